"""Where the elements of a shard lie in its parameter."""

import pytest
import torch
import torch.distributed as dist
from helpers import on_ranks
from hypothesis import given
from hypothesis import strategies as st

from d2lpar.sharding.shards import collect, is_dense, line, make_shard

WEIGHT = torch.arange(24.0).view(2, 3, 2, 2)


@pytest.mark.parametrize(
    "tensor",
    [
        WEIGHT,
        WEIGHT.to(memory_format=torch.channels_last),
        WEIGHT.permute(3, 1, 0, 2),
        torch.tensor(5.0),
    ],
    ids=["contiguous", "channels_last", "transposed", "number"],
)
def test_a_line_is_a_view_in_the_order_of_memory(tensor):
    assert is_dense(tensor)
    flat = line(tensor)
    assert flat.data_ptr() == tensor.data_ptr() and flat.shape == (tensor.numel(),)
    assert torch.equal(flat.as_strided(tensor.shape, tensor.stride()), tensor)
    other = tensor.contiguous() * 2
    assert torch.equal(line(other, like=tensor), 2 * flat)


@given(st.permutations(range(3)), st.lists(st.integers(1, 4), min_size=3, max_size=3))
def test_any_order_of_dimensions_has_a_line(order, shape):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape).permute(order)
    other = tensor.contiguous()
    assert is_dense(tensor)
    assert torch.equal(line(tensor).as_strided(tensor.shape, tensor.stride()), tensor)
    assert torch.equal(line(other, like=tensor), line(tensor))


def test_gaps_and_overlaps_are_seen():
    base = torch.zeros(4, 6)
    for tensor in (
        base[:, ::2],
        base[:2, :3],
        torch.zeros(1).expand(3),
        base.to_sparse(),
    ):
        assert not is_dense(tensor)


def shards_are_parts_of_the_line_and_make_the_whole_again(rank, k):
    weight = torch.nn.Parameter(WEIGHT.to(memory_format=torch.channels_last))
    sizes = [5, 0, 19]
    begin = sum(sizes[:rank])
    shard = make_shard(
        line(weight)[begin : begin + sizes[rank]], weight, sizes, dist.group.WORLD
    )
    assert shard.span == slice(begin, begin + sizes[rank])
    assert shard.requires_grad and shard.whole.stride() == weight.stride()
    for dst in range(k):
        whole = collect(shard, shard, dst)
        assert (whole is None) == (rank != dst)
        assert rank != dst or (
            torch.equal(whole, weight) and whole.stride() == weight.stride()
        )


def nothing_is_made_of_nothing(rank, k):
    empty = torch.nn.Parameter(torch.empty(0, 3))
    shard = make_shard(line(empty), empty, [0] * k, dist.group.WORLD)
    whole = collect(shard, shard, 0)
    assert rank or whole.shape == (0, 3)


test_on_three = on_ranks(
    3,
    [shards_are_parts_of_the_line_and_make_the_whole_again, nothing_is_made_of_nothing],
)
