"""Gradients and buffers on each rank: torch's, whatever the model and the batches."""

import copy
import gc
import os
import threading
import time
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import (
    LIMIT,
    MEAN,
    attempt,
    both_ways,
    breaks,
    clones,
    close,
    everyones,
    gradient,
    grads,
    grid,
    linear,
    mlp,
    on_ranks,
    randn,
    rows,
    take,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from d2lpar import (
    ColumnParallelLinear,
    DistributedDataParallel,
    NaiveDistributedDataParallel,
    RowParallelLinear,
    SyncBatchNorm,
    count_bytes,
    ddp,
    launch,
    ranks,
)
from d2lpar.ddp import fill_buckets
from d2lpar.ranks.lanes import Lanes

TORCHS = nn.parallel.DistributedDataParallel
GRAPH_WARNS = pytest.warns(UserWarning, match="create_graph")
TINY = 1e-6  # MiB: 1 byte, so that each parameter has a bucket of its own


def backward(output):
    output.square().mean().backward()


def update(module):
    torch.optim.SGD(module.parameters(), lr=0.1).step()


def state(module):
    return clones(module.state_dict().values())


# Buckets


def deal(params, cap):
    """Return the buckets of ``fill_buckets``, by places in the list."""
    place = {id(param): i for i, param in enumerate(params)}
    return [[place[id(p)] for p in bucket] for bucket in fill_buckets(params, cap)]


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(1, 60))
def test_buckets_are_those_of_torch(sizes, cap):
    unit = 2**17  # bytes: an eighth of 1 MiB, at which the first bucket is full
    params = [torch.empty(size * unit // 4, device="meta") for size in sizes]
    caps = [min(2**20, cap * unit), cap * unit]
    expected, _ = dist._compute_bucket_assignment_by_size(params, caps)
    assert deal(params, cap * unit) == expected


def test_a_bucket_has_one_dtype():
    params = [torch.zeros(1, dtype=dtype) for dtype in (torch.half, torch.float)]
    params = [params[0], params[0].clone(), params[1], params[0].clone()]
    assert deal(params, 100) == [[0, 1], [2], [3]]


# Scenarios: wrap is torch's class or ours, and what is returned has to be the same.


class Branches(nn.Module):
    """Branch a on rank 0, else b; c nowhere, d in step 1; one frozen, two tied."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(3, 3, dtype=torch.float64) for _ in range(7)]
        self.a, self.b, self.c, self.d, self.frozen, self.tied, self.tied_too = layers
        self.frozen.requires_grad_(False)
        self.tied_too.weight = self.tied.weight

    def forward(self, X, rank, step):
        X = self.tied_too(self.tied(self.frozen(X)).tanh())
        X = self.a(X) if rank == 0 else self.b(X)
        return {"y": [self.d(X) if step == 1 else X], "nothing": None}


class Images(nn.Module):
    """A convolution in channels_last, buffers, and parameters of two dtypes."""

    def __init__(self):
        super().__init__()
        conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.images = nn.Sequential(conv, nn.BatchNorm2d(3), nn.ReLU()).double()
        self.images[1].running_mean.normal_()
        self.linear = nn.Linear(48, 2)

    def forward(self, X):
        return self.linear(self.images(X).flatten(1).float())


def images(rank, step=0):
    return randn(5, 2, 6, 6, seed=10 * step + rank)


def trains_in_part(wrap, rank, k):
    model, trace = wrap(Branches(), find_unused_parameters=True), []
    for step in range(5):
        model.zero_grad()
        X = randn(4, 3, seed=10 * step + rank)
        backward(model(X, rank, step=step)["y"][0])
        trace += clones(grads(model))
        update(model)
    return trace, state(model)


def trains(wrap, rank, k, **options):
    """Five steps, of which gradients add up; the last without training mode."""
    model, trace = wrap(Images(), **options), []
    for step in range(5):
        model.train(step < 4)
        backward(model(images(rank, step)))
        trace += clones(grads(model))
        update(model)
    return trace, state(model)


def accumulates(wrap, rank, k):
    """no_sync, also inside itself, with an error, and where the flag is False."""
    model, trace = wrap(mlp(6, 5, 1, seed=rank)), []

    def step(i):
        backward(model(randn(4, 6, seed=10 * i + rank)))
        trace.extend(clones(grads(model)))

    with model.no_sync():
        step(0)
        with pytest.raises(KeyError), model.no_sync():
            step(1)
            raise KeyError
        step(2)
    assert len({str(own) for own in everyones(trace)}) == k  # each rank alone
    step(3)
    model.require_backward_grad_sync = False
    with model.no_sync():
        step(4)
    step(5)
    model.require_backward_grad_sync = True
    step(6)
    with model.no_sync():
        output = model(randn(4, 6, seed=rank))
    backward(output)  # of a forward pass that was made inside
    trace += clones(grads(model))
    output = model(randn(4, 6, seed=rank))
    with model.no_sync():
        backward(output + model(randn(4, 6, seed=rank + 9)))  # the first one averages
    return trace, clones(grads(model))


def shares_buffers(wrap, rank, k, **options):
    """Where all take rank 0's: each rank spoils its buffers before each forward."""
    model, trace = wrap(Images(), **options), []
    modes = "train", "train", "no_grad", "no_grad", "no_sync", "no_sync", "train"
    for mode in modes:
        trace += clones(model.buffers())
        for buffer in model.buffers():
            buffer.add_(rank)
        grad = torch.set_grad_enabled(mode != "no_grad")
        with model.no_sync() if mode == "no_sync" else grad:
            output = model(images(rank))
            if output.requires_grad:
                backward(output)
    return trace


def calls_twice(wrap, rank, k):
    """Two forward passes, with buffers, before a backward pass."""
    model = wrap(Images())
    (model(images(rank)) + model(images(rank, 1))).sum().backward()
    return clones(grads(model))


def checkpoints(wrap, rank, k, around):
    again = partial(checkpoint, use_reentrant=False)
    module = mlp(3, 3, 3)
    if not around:
        module = nn.Sequential(module[0], module[1:])
        module[1].forward = partial(again, module[1].forward)
    model = wrap(module)
    call = partial(again, model) if around else model
    for step in range(2):
        backward(call(randn(2, 3, seed=10 * step + rank)))
    return clones(grads(model))


SCENARIOS = {
    "unused, frozen, tied": trains_in_part,
    "convolution, two dtypes": trains,
    "no_sync": accumulates,
    "buffers": shares_buffers,
    "broadcast_buffers=False": partial(shares_buffers, broadcast_buffers=False),
    "two forward passes": calls_twice,
    "checkpoint inside": partial(checkpoints, around=False),
    "checkpoint around": partial(checkpoints, around=True),
}


def leaves_what_torchs_leaves(scenario, rank, k):
    found = []
    for wrap in (
        TORCHS,
        DistributedDataParallel,
        partial(DistributedDataParallel, bucket_cap_mb=TINY),
    ):
        torch.manual_seed(rank)  # each rank begins with a network of its own
        found.append(scenario(wrap, rank, k))
    exactly = {"check_stride": True} | ({"rtol": 0, "atol": 0} if k == 2 else {})
    for ours in found[1:]:
        torch.testing.assert_close(ours, found[0], **exactly)


CHECKS = {n: partial(leaves_what_torchs_leaves, s) for n, s in SCENARIOS.items()}
test_two_ranks_leave_torchs_bits = on_ranks(2, CHECKS)
test_three_ranks_leave_what_torchs_leaves = on_ranks(3, CHECKS)


def on_a_gpu(scenario, wrap, rank, k):
    """One GPU may serve all ranks; inputs move to it; the stream is always behind."""
    index = rank % torch.cuda.device_count()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # or cuBLAS refuses
    torch.use_deterministic_algorithms(True)

    def wrap_there(module, **options):
        module.register_forward_pre_hook(lambda *_: torch.cuda._sleep(10**7))
        return wrap(module.to(index), [index], **options)

    with torch.cuda.stream(torch.cuda.Stream(index)):
        return scenario(wrap_there, rank, k)


GPU_CHECKS = {
    name: partial(leaves_what_torchs_leaves, partial(on_a_gpu, scenario))
    for name, scenario in SCENARIOS.items()
    if scenario is not calls_twice  # torch 2.11's fails there: pytorch/pytorch#175024
}
test_two_ranks_on_gpus_leave_torchs_bits = pytest.mark.gpu(on_ranks(2, GPU_CHECKS))


# The definition: k ranks are one device with all rows


def trains_on_shards(rank, k):
    for kind in (NaiveDistributedDataParallel, DistributedDataParallel, None):
        module, whole = mlp(6, 5, 1, seed=rank), mlp(6, 5, 1)
        model = kind(module) if kind else module
        for step in range(5):
            X, own = randn(4 * k, 6, seed=step), slice(4 * rank, 4 * rank + 4)
            module.zero_grad(), whole.zero_grad()
            backward(model(X[own]))
            if kind is NaiveDistributedDataParallel:
                model.average_gradients()
            backward(whole(X))
            update(module), update(whole)
        same = len({str([p.tolist() for p in own]) for own in everyones(state(module))})
        agrees = attempt(close, state(module), state(whole))[0] == "ok"
        assert (same, agrees) == ((1, True) if kind else (k, False))


def layers_that_send(columns, rank, k):
    """A layer that is cut among a row of ranks, and SyncBatchNorm over a column."""
    row, column = grid(k // columns, columns)
    me, share = dist.get_rank(row), dist.get_rank(column)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), *mlp(8, 12, 3)).double()
    cut = (
        ColumnParallelLinear(nn.Linear(8, 12), row),
        RowParallelLinear(nn.Linear(12, 3), row),
    )
    own = nn.Sequential(*copy.deepcopy(whole[:2]), cut[0], nn.Tanh(), cut[1]).double()
    own = SyncBatchNorm.convert_sync_batchnorm(own, column)

    def parts():  # of the whole, as this rank has them
        for name, tensor in whole.state_dict().items():
            dim = {"2.weight": 0, "2.bias": 0, "4.weight": 1}.get(name)
            yield tensor if dim is None else tensor.tensor_split(columns, dim)[me]

    own.load_state_dict(dict(zip(own.state_dict(), parts(), strict=True)))
    model = DistributedDataParallel(own, process_group=column, bucket_cap_mb=TINY)
    for step in range(3):
        X = randn(24, 6, seed=step)
        own.zero_grad(), whole.zero_grad()
        backward(model(X.tensor_split(k // columns)[share]))
        backward(whole(X))
        update(own), update(whole)
    close(state(own), clones(parts()))


def inside(*numbers):
    return {f"{n} columns": partial(layers_that_send, n) for n in numbers}


test_three_ranks_train_as_one = on_ranks(3, [trains_on_shards])
test_two_ranks_with_layers_that_send = on_ranks(2, inside(1, 2))
test_four_ranks_with_layers_that_send = on_ranks(4, inside(1, 2, 4))


# What is sent, and when


def sends_each_gradient_once(rank, k):
    module = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10))
    nbytes, sent = sum(param.nbytes for param in module.parameters()), []
    for cap, buckets in ({}, 1), ({"bucket_cap_mb": TINY}, 4):
        model = DistributedDataParallel(module, **cap)
        with count_bytes() as ledger:
            with model.no_sync():
                backward(model(torch.ones(2, 100)))
            assert ledger.sent(rank) == 0
            backward(model(torch.ones(2, 100)))
        assert len(model.reducer.buckets) == buckets
        assert ledger.sent(rank) == nbytes + 4 * 4  # and a number for each parameter
        sent.append(ledger.messages.total())
    assert sent == [1, 4]
    for width, buckets in (1500, 2), (2600, 3):  # layers of 9 MB, and of 27
        three = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
        assert len(DistributedDataParallel(three).reducer.buckets) == buckets


def sends_in_order_while_backward_runs(rank, k):
    """Even if buckets are complete in another order on each rank."""
    module, order = nn.ModuleList(nn.Linear(3, 3) for _ in range(4)), [3, 1, 0, 2]

    def forward(X):
        for i in order if rank else [0, 1, 2, 3]:
            X = module[i](X).tanh()
        return X

    def noting(flat, group):
        assert rank or at_the_end.wait(LIMIT / 2), "backward waits for what is sent"
        log.append(flat.numel())
        return average(flat, group)

    module.forward = forward
    model, log, average = DistributedDataParallel(module, bucket_cap_mb=TINY), [], None
    average, ddp.average = ddp.average, noting
    # on rank 0, layer 0 comes last; it lets the other buckets leave, and waits for them
    at_the_end = threading.Event()
    module[0].weight.register_hook(lambda grad: at_the_end.set())
    module[0].weight.register_hook(lambda grad: wait_for(log, 6 * (rank == 0)))
    backward(model(randn(2, 3, dtype=torch.float32)))
    ddp.average = average
    assert log == [p.numel() + 1 for p in module.parameters()][::-1]


def wait_for(log, number):
    """Hold up backward until so many messages have been sent."""
    limit = time.monotonic() + LIMIT / 2
    while len(log) < number:
        assert time.monotonic() < limit, "not all is sent before backward ends"
        time.sleep(0.001)


def each_backward_averages(rank, k):
    """Two through one output, and one inside of another, with the same parameter."""
    model, X = DistributedDataParallel(linear()), rows(rank).requires_grad_()
    for _ in range(rank):  # which do not count
        with model.no_sync():
            model(X)
    loss = model(X).sum()
    loss.backward(retain_graph=True)
    assert gradient(model) == MEAN
    with torch.no_grad():
        model(X)
    loss.backward()
    assert gradient(model) == 2 * MEAN
    for first, second in (True, False), (False, True):
        model.zero_grad()
        y = [
            checkpoint(model.module, X, use_reentrant=True) if again else model(X)
            for again in (first, second)
        ]
        sum(y).sum().backward()
        assert gradient(model) == 2 * MEAN


def a_part_of_the_ranks(rank, k):
    group = dist.new_group([1])
    for kind in (DistributedDataParallel, NaiveDistributedDataParallel):
        if rank == 1:
            model = kind(linear(), process_group=group)
            model(input=rows(rank)).sum().backward()
            if kind is NaiveDistributedDataParallel:
                model.average_gradients()
            assert gradient(model) == rank + 1


# What goes wrong


def error_in_backward(rank, k):
    """After one that all ranks have, training goes on, also through the same output."""
    module = nn.Sequential(linear(), linear())
    model = DistributedDataParallel(module, bucket_cap_mb=TINY)
    handle = breaks(module[0])
    loss = model(rows(rank)).sum()
    handle.remove()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        module.zero_grad()
    model(rows(rank)).sum().backward()
    assert [grad.item() for grad in grads(module)] == [MEAN, MEAN]


def gradient_with_a_graph(rank, k):
    model = DistributedDataParallel(linear())
    loss = model(rows(rank)).square().sum()
    with pytest.raises(RuntimeError, match="has a graph"), GRAPH_WARNS:
        loss.backward(create_graph=True)
    model.zero_grad()
    model(rows(rank)).sum().backward()  # training goes on
    assert gradient(model) == MEAN


def module_that_was_changed(rank, k):
    module = nn.Sequential(linear(), linear().requires_grad_(False))
    for change in (
        lambda: module[1].requires_grad_(True),
        lambda: module.append(linear()),
        lambda: module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True),
    ):
        model = DistributedDataParallel(module)
        module[0].requires_grad_(False)  # this is all right
        model(rows(rank))
        module[0].requires_grad_(True)
        change()
        with pytest.raises(ValueError, match="change the module before wrapping"):
            model(rows(rank))


def arguments(rank, k):
    with pytest.raises(ValueError, match=r"\[0\].* on {'cpu'}: leave device_ids out"):
        DistributedDataParallel(linear().requires_grad_(False), device_ids=[0])
    with pytest.raises(TypeError, match="gradient_as_bucket_view"):
        DistributedDataParallel(linear(), gradient_as_bucket_view=True)
    with pytest.raises(ranks.MismatchError, match=r"float32 \[3, 2\]\n"):
        DistributedDataParallel(nn.Linear(2 + rank, 3))
    with pytest.raises(ranks.MismatchError, match="2 parameters to train"):
        DistributedDataParallel(nn.Linear(2, 3, bias=rank == 0))


test_two_ranks = on_ranks(
    2,
    [
        sends_each_gradient_once,
        sends_in_order_while_backward_runs,
        each_backward_averages,
        a_part_of_the_ranks,
        error_in_backward,
        gradient_with_a_graph,
        module_that_was_changed,
        arguments,
    ],
)


# What spoils the group: each is an error on every rank that waits


def fails_alone(model, rank):
    """Rank 1 breaks off its backward pass, and goes on."""
    if rank == 1:
        loss = model(rows(rank)).sum()
        loss.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    model(rows(rank)).sum().backward()


def fails_late(model, rank):
    """Rank 1 breaks off after all is sent, and takes no step."""
    X = rows(rank).requires_grad_() * 1
    if rank == 1:
        X.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(X).sum().backward()
    else:
        model(X).sum().backward()
    model(rows(rank)).sum().backward()


def uses_no_parameter(model, rank):
    """Rank 1's output comes from its input alone, in the first step."""
    for step in range(2):
        y = model(rows(rank)) if (rank, step) != (1, 0) else rows(1).requires_grad_()
        y.sum().backward()


@pytest.mark.parametrize(
    ("case", "errors", "words"),
    [
        (fails_alone, ["MismatchError"] * 2, "2 forward and 0 backward"),
        (fails_late, ["MismatchError"] * 2, "2 forward and 1 backward"),
        (uses_no_parameter, ["PeerError", "ok"], "rank 1 did not call in time"),
    ],
)
def test_nothing_hangs_or_is_mixed_up(case, errors, words):
    def check(rank, world_size):
        model = DistributedDataParallel(linear())
        ranks.transport.here.timeout = 1.0
        kind, text, *_ = attempt(case, model, rank)
        time.sleep(1.5 * (kind == "ok"))
        return kind, text

    found = launch(check, 2, timeout=20)
    assert [kind for kind, _ in found] == errors and words in found[0][1], found


# What is left


@both_ways
def test_nothing_is_left_of_a_wrapper(way):
    def left(module):
        gc.collect()
        hooks = [
            param._post_accumulate_grad_hooks or () for param in module.parameters()
        ]
        files = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ()
        return sum(map(len, hooks)), threading.active_count(), len(files)

    def wrap(rank, world_size):
        take(way)
        module, reducers, kinds = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), [], set()
        before = left(module)
        for i in range(12):  # more than there are lanes
            model = DistributedDataParallel(module)
            for _ in range(2):
                backward(model(torch.randn(4, 3)))
            kinds.add(type(model.reducer.group.transport))
            reducers.append(weakref.ref(model.reducer))
            if i == 11:
                model.reducer.num_forwards += rank  # the next pass is another's
                output = model(torch.randn(4, 3))
                assert attempt(backward, output)[0] == "MismatchError"
                ref = weakref.ref(output)
                del output
                assert ref() is None  # nobody keeps the error, and with it the graph
            del model
            gc.collect()
            ranks.barrier()
        limit = time.monotonic() + LIMIT / 2
        while (after := left(module)) != before and time.monotonic() < limit:
            time.sleep(0.01)  # a thread ends on its own
        assert after == before and before[0] == 0
        assert not any(ref() for ref in reducers)
        assert kinds == {Lanes} if way == "lanes" else Lanes not in kinds

    launch(wrap, 2, timeout=LIMIT)
