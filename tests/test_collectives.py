"""Collectives on lists, against torch: every schedule, dtype, operation and layout."""

from functools import partial

import pytest
import torch
from helpers import SCHEDULES

from d2lpar import (
    all_gather,
    allreduce,
    broadcast,
    count_bytes,
    naive_allreduce,
    reduce_scatter,
    ring,
    ring_allreduce,
)
from d2lpar.collectives import OPS

KS = (1, 2, 3, 4, 8)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
on_each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def make(k, shape, dtype=torch.float32, device="cpu"):
    """Values that name position and index, small enough to be exact in every dtype."""
    values = torch.arange(torch.Size(shape).numel()).remainder(5).reshape(shape)
    return [(values + r % 3).to(dtype).to(device) for r in range(k)]


def reference(data, op="sum"):
    """The reduction by one call of torch, in float64 where that is wider."""
    functions = {"sum": torch.sum, "mean": torch.mean}
    functions |= {"max": torch.amax, "min": torch.amin}
    whole = torch.stack(data)
    wide = whole.double() if whole.is_floating_point() else whole
    return functions[op](wide, dim=0).to(whole.dtype)


def assert_allreduces(function, data, op="sum"):
    expected, tensors = reference(data, op), list(data)
    function(data)
    assert all(now is then for now, then in zip(data, tensors)), "a slot was rebound"
    rtol = 1e-6 if op == "mean" and data[0].is_cuda else 0  # a GPU multiplies by 1 / k
    for tensor in data:
        torch.testing.assert_close(tensor, expected, rtol=rtol, atol=0)


@on_each_device
@pytest.mark.parametrize("dtype", (*INTEGERS, *FLOATS, torch.complex64), ids=str)
@each_schedule
def test_allreduce_equals_torch_on_every_dtype_op_and_size(schedule, dtype, device):
    for k in KS:
        for shape in ((), (0,), (1,), (k - 1,), (k,), (3, 5), (4, 0, 2), (64,)):
            data = make(k, shape, dtype, device)
            assert_allreduces(partial(allreduce, schedule=schedule), data)
        for op in OPS if dtype in FLOATS else ("max", "min") * (not dtype.is_complex):
            data = [torch.randint(-2, 3, (11,)).to(dtype).to(device) for _ in range(k)]
            assert_allreduces(partial(allreduce, schedule=schedule, op=op), data, op)


@each_schedule
def test_every_device_gets_the_same_bits_in_every_run(schedule):
    for k in (2, 3, 5, 8):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            start = [torch.randn(101).to(dtype) for _ in range(k)]
            runs = [[t.clone() for t in start] for _ in range(2)]
            for data in runs:
                allreduce(data, schedule, "mean")
            assert all(torch.equal(t, runs[0][0]) for data in runs for t in data)


@each_schedule
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_low_precision_is_rounded_once_and_travels_as_float32(schedule, dtype):
    k, n = 64, 128
    data = [torch.rand(n).to(dtype) for _ in range(k)]
    exact = torch.stack(data).double().sum(dim=0)
    hop_by_hop = sum(data[1:], start=data[0])
    spacing = torch.finfo(dtype).eps * exact
    assert ((hop_by_hop.double() - exact).abs() > spacing).any()  # what we must not do
    with count_bytes() as ledger:
        allreduce(data, schedule)
    assert ((data[0].double() - exact).abs() <= 0.51 * spacing).all()
    assert data[0].dtype == dtype
    if schedule is ring:
        assert ledger.sent(0) == 2 * (k - 1) * n // k * 4


@on_each_device
@pytest.mark.parametrize("function", [naive_allreduce, ring_allreduce])
def test_layouts_that_are_not_contiguous(function, device):
    matrix = torch.arange(40.0, device=device).reshape(10, 4)
    assert_allreduces(function, list(matrix.unbind(1)))  # they lie between each other
    a, b, c = make(3, (2, 3, 4, 5), device=device)
    assert_allreduces(function, [a, b.contiguous(memory_format=torch.channels_last), c])
    data = [torch.ones(3, requires_grad=True) for _ in range(2)]
    with torch.no_grad():
        function(data)
    assert data[0].tolist() == [2, 2, 2] and data[0].requires_grad


@pytest.mark.parametrize("op", OPS)
def test_reduce_scatter_leaves_shard_r_on_device_r_in_place(op):
    for k in KS:
        rows = make(k, (3, 10), torch.bfloat16 if op == "mean" else torch.float64)
        data = [tensor.t() for tensor in rows]
        expected = reference(data, op).tensor_split(k)
        shards = reduce_scatter(data, op)
        for r in range(k):
            assert torch.equal(shards[r], expected[r])
            assert torch.equal(data[r].tensor_split(k)[r], expected[r])


@pytest.mark.parametrize("k", KS)
def test_all_gather_joins_shards_of_any_length(k):
    for dtype in INTEGERS + FLOATS:
        wholes = make(k, (2, 3), dtype)
        shards = [whole[:, : r % 3].t() for r, whole in enumerate(wholes)]
        gathered = all_gather(shards)
        assert len(gathered) == k
        gathered[0].fill_(1)  # not the others, nor the shards
        assert all(torch.equal(whole, torch.cat(shards)) for whole in gathered[1:])


@pytest.mark.parametrize("k", KS)
def test_broadcast_copies_the_source(k):
    for src in range(k):
        data = [tensor.t() for tensor in make(k, (3, 4), torch.bfloat16)]
        source = data[src].clone()
        broadcast(data, src)
        assert all(torch.equal(tensor, source) for tensor in data)


# Bytes


@pytest.mark.parametrize("k", (2, 3, 8))
def test_the_ring_sends_less_than_two_tensors_and_each_half_of_it_half_of_that(k):
    chunk = 7 * 4  # bytes
    with count_bytes() as both:
        ring_allreduce(make(k, (7 * k,)))
    assert both.bytes == {(r, (r + 1) % k): 2 * (k - 1) * chunk for r in range(k)}
    assert set(both.messages.values()) == {2 * (k - 1)}
    with count_bytes() as first:
        shards = reduce_scatter(make(k, (7 * k,)))
    with count_bytes() as second:
        all_gather(shards)
    assert first.sent(0) == second.sent(0) == (k - 1) * chunk


# What is refused

ONES, LEAF = torch.ones(3), torch.ones(3, requires_grad=True)
TWO = [ONES, ONES.clone()]
ALIKE = ring_allreduce, reduce_scatter, broadcast
ALL = (*ALIKE, all_gather)
REFUSED = [
    (ALL, torch.ones(2, 3), TypeError, "a list with a tensor per device, not tensor"),
    (ALL, [ONES, 1.0], TypeError, r"data\[1\] is a float, not a tensor"),
    (ALL, [ONES, ONES.double()], ValueError, r"float32 .*, but data\[1\] is float64"),
    (ALL, [ONES, LEAF], ValueError, r"data\[1\] requires gradients, .*no_grad"),
    (ALIKE, [*TWO, torch.ones(4)], ValueError, r"\[3\], but .*\[2\] is float32 \[4\]"),
    (ALIKE, [*TWO, ONES], ValueError, r"data\[0\] and data\[2\] share memory"),
    ([partial(allreduce, op="avg")], TWO, ValueError, "'avg', .* none of sum, mean"),
    ([partial(allreduce, op="mean")], [ONES.int()], ValueError, "mean of int32 .*sum"),
    ([partial(allreduce, op="min")], [ONES * 1j], ValueError, "have no order, so no m"),
    ([partial(broadcast, src=2)], TWO, ValueError, "src is 2, but the .* are 0 to 1"),
    ([all_gather], [ONES, torch.ones(2, 3)], ValueError, r"\[0\], but .* \[0, 3\]"),
]


@pytest.mark.parametrize(("functions", "data", "error", "words"), REFUSED)
def test_what_cannot_be_reduced_is_refused(functions, data, error, words):
    for function in functions:
        with pytest.raises(error, match=words):
            function(data)
