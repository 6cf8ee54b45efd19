from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from d2lpar import (
    all_gather,
    allreduce,
    broadcast,
    count_bytes,
    launch,
    naive_allreduce,
    reduce_scatter,
    ring_allreduce,
)
from d2lpar.collectives.lists import OPS, run_schedule
from d2lpar.collectives.schedules import (
    Move,
    direct,
    halving_doubling,
    recursive_doubling,
    ring,
    star,
    tree,
)

SCHEDULES = (star, ring, tree, direct, halving_doubling, recursive_doubling)
KS = (1, 2, 3, 4, 8)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def make(k, shape, dtype=torch.float32, device="cpu"):
    """Values that name their position and index, small enough to be exact in every dtype."""
    numel = torch.Size(shape).numel()
    values = torch.arange(numel).remainder(5).reshape(shape)
    return [(values + r % 3).to(dtype).to(device) for r in range(k)]


def reference(data, op="sum"):
    """The reduction by one call of torch, in float64 where that is wider."""
    dtype = data[0].dtype
    wide = torch.stack([t.to(torch.float64) if dtype.is_floating_point else t for t in data])
    result = {
        "sum": partial(torch.sum, dtype=wide.dtype),
        "mean": torch.mean,
        "max": torch.amax,
        "min": torch.amin,
        "product": partial(torch.prod, dtype=wide.dtype),
    }[op](wide, dim=0)
    return result.to(dtype)


def assert_allreduces(function, data, op="sum"):
    expected = reference(data, op)
    tensors = list(data)
    function(data)
    assert all(now is then for now, then in zip(data, tensors, strict=True)), "a slot was rebound"
    for tensor in data:
        assert torch.equal(tensor, expected), (tensor, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=str)
@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_allreduce_equals_torch_on_every_dtype_and_size(schedule, k, dtype, device):
    for shape in ((), (0,), (1,), (k - 1,), (k,), (7,), (3, 5), (4, 0, 2), (64,)):
        assert_allreduces(partial(allreduce, schedule=schedule), make(k, shape, dtype, device))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_allreduce_equals_torch_for_every_op(schedule, k, op):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        data = [torch.randperm(11).sub(5).to(dtype) for _ in range(k)]
        assert_allreduces(partial(allreduce, schedule=schedule, op=op), data, op)
    if op != "mean":
        data = [torch.randperm(11).sub(5) for _ in range(k)]
        assert_allreduces(partial(allreduce, schedule=schedule, op=op), data, op)


def test_bool_is_reduced_as_logic():
    data = [torch.tensor([False, False, True]), torch.tensor([False, True, True])]
    either, both = [t.clone() for t in data], [t.clone() for t in data]
    allreduce(either, op="max")
    allreduce(both, op="min")
    assert either[0].tolist() == [False, True, True] == either[1].tolist()
    assert both[0].tolist() == [False, False, True] == both[1].tolist()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("k", (2, 3, 5, 8))
def test_every_device_gets_the_same_bits_in_every_run(schedule, k):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        start = [torch.randn(101).to(dtype) for _ in range(k)]
        runs = [[t.clone() for t in start] for _ in range(2)]
        for data in runs:
            allreduce(data, schedule, "mean")
        assert all(torch.equal(t, runs[0][0]) for data in runs for t in data)


@pytest.mark.parametrize("k", (2, 3, 4, 7))
def test_the_executor_takes_all_messages_of_a_step_before_it_writes(k):
    data = [torch.full((5,), 10.0**r) for r in range(k)]
    run_schedule(recursive_doubling(k), data)
    assert [tensor.tolist() for tensor in data] == [[sum(10.0**r for r in range(k))] * 5] * k
    swap = [torch.tensor([r]) for r in range(2)]
    run_schedule([[Move(0, 1, None, False), Move(1, 0, None, False)]], swap)
    assert [tensor.item() for tensor in swap] == [1, 0]


def test_an_exchange_gives_both_the_same_zero():
    for op in ("max", "min"):
        for zeros in ((0.0, -0.0), (-0.0, 0.0)):
            data = [torch.full((64,), zero) for zero in zeros]
            allreduce(data, recursive_doubling, op)
            assert torch.equal(data[0].signbit(), data[1].signbit())


@pytest.mark.parametrize("schedule", SCHEDULES)
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", [naive_allreduce, ring_allreduce])
def test_layouts_that_are_not_contiguous(function, device):
    base = torch.arange(4 * 6 * 5.0, device=device).reshape(4, 6, 5)
    assert_allreduces(function, [base[r].clone().T for r in range(4)])
    assert_allreduces(function, [base[r].clone()[::2, 1::3] for r in range(4)])
    columns = base.reshape(-1, 3).clone()
    assert_allreduces(function, list(columns.unbind(1)))  # interleaved in one memory
    images = [
        torch.rand(2, 3, 4, 5, device=device).mul(9).round().to(memory_format=torch.channels_last)
        for _ in range(3)
    ]
    assert_allreduces(function, images)
    a, b, c = make(3, (3, 4))
    mixed = [a, b.T.contiguous().T, c.repeat_interleave(2, 1)[:, ::2]]
    assert_allreduces(function, mixed)


def test_neighbouring_elements_are_left_alone():
    wide = torch.zeros(2, 10)
    allreduce([row[2:5].fill_(1) for row in wide])
    assert wide.tolist() == [[0, 0, 2, 2, 2, 0, 0, 0, 0, 0]] * 2


@st.composite
def strided_lists(draw):
    """k views of one random shape, each with strides, offset and order of dimensions of its own."""
    k = draw(st.integers(1, 6))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    data = []
    for r in range(k):
        order = draw(st.permutations(range(len(shape))))
        steps = [draw(st.integers(1, 3)) for _ in shape]
        offset = draw(st.integers(0, 2))
        storage = torch.zeros([shape[d] * steps[d] + offset for d in order], dtype=torch.int64)
        view = storage[tuple(slice(offset, None, steps[d]) for d in order)]
        view = view.permute([order.index(d) for d in range(len(shape))])
        view = view[tuple(slice(0, n) for n in shape)]
        data.append(view.copy_(make(k, shape, torch.int64)[r]))
    return data


@given(strided_lists(), st.sampled_from(SCHEDULES), st.sampled_from(["sum", "max", "product"]))
def test_any_shape_strides_and_k(data, schedule, op):
    assert_allreduces(partial(allreduce, schedule=schedule, op=op), data, op)


@given(strided_lists())
def test_scatter_and_gather_make_an_allreduce(data):
    expected = reference(data)
    shards = reduce_scatter(data)
    assert [s.shape for s in shards] == [
        s.shape for s in torch.atleast_1d(expected).tensor_split(len(data))
    ]
    for whole in all_gather(shards):
        assert torch.equal(whole, torch.atleast_1d(expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("k", KS)
def test_reduce_scatter_leaves_shard_r_on_device_r_in_place(k, op, device):
    data = make(k, (10, 3), torch.bfloat16 if op == "mean" else torch.float64, device)
    expected = reference(data, op).tensor_split(k)
    shards = reduce_scatter(data, op)
    for r in range(k):
        assert torch.equal(shards[r], expected[r])
        assert torch.equal(data[r].tensor_split(k)[r], expected[r])


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=str)
def test_all_gather_joins_shards_of_any_length(k, dtype):
    shards = [torch.full((r % 3, 2), r, dtype=dtype) for r in range(k)]
    gathered = all_gather(shards)
    assert len(gathered) == k
    for whole in gathered:
        assert torch.equal(whole, torch.cat(shards))
    gathered[0].fill_(1)
    assert all(torch.equal(whole, torch.cat(shards)) for whole in gathered[1:])
    assert all_gather([torch.tensor(float(r)) for r in range(k)])[0].tolist() == list(range(k))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", KS)
def test_broadcast_copies_the_bits_of_the_source(k, device):
    for src in range(k):
        data = make(k, (3, 4), torch.bfloat16, device)
        data[src][0, 0] = float("nan")
        source = data[src].clone()
        broadcast(data, src)
        for tensor in data:
            assert torch.equal(tensor.view(torch.int16), source.view(torch.int16))


def assert_is_a_ring_by_its_bytes(schedule, k):
    with count_bytes() as ledger:
        allreduce(make(k, (7 * k,)), schedule)
    chunk = 7 * 4  # bytes
    assert ledger.bytes == {(r, (r + 1) % k): 2 * (k - 1) * chunk for r in range(k)}
    assert set(ledger.messages.values()) == {2 * (k - 1)}


@pytest.mark.parametrize("k", range(2, 9))
def test_the_ring_sends_less_than_two_tensors_from_any_position(k):
    assert_is_a_ring_by_its_bytes(ring, k)


@pytest.mark.parametrize("k", range(2, 9))
def test_reduce_scatter_and_all_gather_send_half_each(k):
    data = make(k, (7 * k,))
    with count_bytes() as ledger:
        shards = reduce_scatter(data)
    assert ledger.sent(0) == (k - 1) * 7 * 4
    with count_bytes() as ledger:
        all_gather(shards)
    assert ledger.sent(0) == (k - 1) * 7 * 4


# Against torch's own collectives, between real processes.

GLOO_DTYPES = (*INTEGERS, *FLOATS, torch.complex128)
GLOO_SHAPES = ((), (0,), (1,), (3,), (7, 3), (64,))
# In older versions of torch gloo has no AVG: the mean is its sum, divided.
GLOO_OPS = {"sum": "SUM", "mean": "SUM", "max": "MAX", "min": "MIN", "product": "PRODUCT"}


def gloo_cases(k):
    for shape in GLOO_SHAPES:
        for dtype in GLOO_DTYPES:
            for op in GLOO_OPS:
                ordered = not dtype.is_complex or op in ("sum", "mean")
                if ordered and not (op == "mean" and dtype in INTEGERS):
                    yield op, make(k, shape, dtype)


@pytest.mark.parametrize("k", KS)
def test_allreduce_equals_gloos_on_every_schedule_dtype_op_and_size(k):
    def reduce_with_gloo(rank, world_size, cases):
        results = []
        for op, data in cases:
            dist.all_reduce(data[rank], getattr(dist.ReduceOp, GLOO_OPS[op]))
            results.append(data[rank] / world_size if op == "mean" else data[rank])
        return results

    by_rank = launch(reduce_with_gloo, k, list(gloo_cases(k)))
    for schedule in SCHEDULES:
        for i, (op, data) in enumerate(gloo_cases(k)):
            allreduce(data, schedule, op)
            for rank in range(k):
                torch.testing.assert_close(data[rank], by_rank[rank][i], rtol=1e-6, atol=0)


@pytest.mark.parametrize("k", KS)
def test_the_other_collectives_equal_gloos(k):
    def with_gloo(rank, world_size, data, src):
        own = data[rank]
        shard = torch.empty_like(own[: len(own) // world_size])
        dist.reduce_scatter_tensor(shard, own.clone())
        gathered = torch.empty(world_size * len(own), *own.shape[1:], dtype=own.dtype)
        dist.all_gather_into_tensor(gathered, own)
        dist.broadcast(own, src)
        return shard, gathered, own

    for dtype in (torch.float32, torch.int64):
        data = make(k, (4 * k, 3), dtype)
        theirs = launch(with_gloo, k, data, k - 1)
        shards = reduce_scatter([tensor.clone() for tensor in data])
        gathered = all_gather(data)
        broadcast(data, src=k - 1)
        for ours, by_gloo in zip(zip(shards, gathered, data, strict=True), theirs, strict=True):
            for mine, other in zip(ours, by_gloo, strict=True):
                assert torch.equal(mine, other)


# Mutants that others have published: the assertions above must catch each of them.


def drops_the_remainder(data):
    size = data[0].numel() // len(data) * len(data)
    allreduce([tensor.view(-1)[:size] for tensor in data])


def adds_into_a_new_tensor(data):
    data[:] = [sum(data)] * len(data)


def reads_what_was_just_overwritten(data):
    for r in range(len(data)):
        data[r].copy_(sum(data))


def keeps_only_the_first_up_to_date(data):
    for tensor in data[1:]:
        data[0].add_(tensor)


@pytest.mark.parametrize(
    "mutant",
    [
        drops_the_remainder,
        adds_into_a_new_tensor,
        reads_what_was_just_overwritten,
        keeps_only_the_first_up_to_date,
    ],
)
def test_a_wrong_allreduce_is_caught(mutant):
    with pytest.raises(AssertionError):
        assert_allreduces(mutant, make(3, (7,)))


@pytest.mark.parametrize("k", [3, 4, 8])
def test_a_ring_of_whole_tensors_is_right_but_for_its_bytes(k):
    def whole_tensor_ring(k):
        around = [Move(r, (r + 1) % k, None, True) for r in range(k - 1)]
        back = [Move(r % k, (r + 1) % k, None, False) for r in range(k - 1, 2 * k - 2)]
        return [[move] for move in around + back]

    assert len(whole_tensor_ring(k)) == len(ring(k))
    assert_allreduces(partial(allreduce, schedule=whole_tensor_ring), make(k, (7 * k,)))
    with pytest.raises(AssertionError):
        assert_is_a_ring_by_its_bytes(whole_tensor_ring, k)


# Operations, sources and schedules that are refused.


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_the_mean_of_integers_is_refused(dtype):
    for function in (allreduce, reduce_scatter):
        with pytest.raises(ValueError, match=f"the mean of {dtype} is no {dtype}"):
            function(make(2, (3,), dtype), op="mean")


def test_an_unknown_op_source_or_schedule_is_named():
    with pytest.raises(ValueError, match="'avg', which is none of sum, mean, max, min, product"):
        allreduce(make(2, (3,)), op="avg")
    with pytest.raises(ValueError, match="complex numbers have no order"):
        allreduce(make(2, (3,), torch.complex64), op="max")
    with pytest.raises(TypeError, match="must be a function such as ring, not list"):
        allreduce(make(2, (3,)), ring(2))
    for src in (-1, 2, 0.0):
        with pytest.raises(ValueError, match=f"src is {src}, but the positions are 0 to 1"):
            broadcast(make(2, (3,)), src)
