"""What gradients and buffers a rank has, whatever its model and its batches."""

import copy
import inspect
import io
from functools import partial, reduce

import pytest
import torch
import torch.distributed as dist
from helpers import (
    MEAN,
    attempt,
    clones,
    close,
    everyones,
    gradient,
    grads,
    linear,
    mlp,
    on_ranks,
    randn,
    rows,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from d2lpar import DistributedDataParallel, NaiveDistributedDataParallel, ranks

TORCHS = nn.parallel.DistributedDataParallel
TINY = 1e-4  # MiB: 104 bytes, so that nearly every parameter has a bucket of its own
WAYS = {
    "one bucket": {"bucket_cap_mb": 25},
    "many buckets": {"bucket_cap_mb": TINY},
    "views": {"gradient_as_bucket_view": True},
}


def conv():
    torch.manual_seed(3)
    layers = (
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, 2),
    )
    return nn.Sequential(*layers).double()


def images(rank, step):
    return randn(5, 1, 6, 6, seed=10 * step + rank)


def backward(output):
    output.square().mean().backward()


@torch.no_grad()
def update(module, lr=0.1):
    for param in module.parameters():
        if param.grad is not None:
            param -= lr * param.grad


def state(module):
    return clones(module.state_dict().values())


# What is odd about a model


class Branches(nn.Module):
    """Branch a on rank 0, else b; c nowhere, d in step 1; one frozen, two tied."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        layers = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(5))
        self.a, self.b, self.c, self.d, self.frozen = layers
        self.frozen.requires_grad_(False)
        self.tied, self.tied_too = (
            nn.Linear(3, 3, False, dtype=torch.float64) for _ in range(2)
        )
        self.tied_too.weight = self.tied.weight

    def forward(self, X, rank, step):
        X = self.tied_too(self.tied(self.frozen(X)).tanh())
        X = self.a(X) if rank == 0 else self.b(X)
        return self.d(X) if step == 1 else X


class Mixed(nn.Module):
    """Parameters of several dtypes, sizes and strides."""

    def __init__(self, *dtypes):
        super().__init__()
        self.vectors = nn.ParameterList(torch.ones(5).to(dtype) for dtype in dtypes)
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.conv = nn.Parameter(
            torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last)
        )

    def forward(self, rank):
        factors = [
            randn(p.numel(), seed=rank).view_as(p).to(p.dtype)
            for p in self.parameters()
        ]
        pairs = zip(self.parameters(), factors, strict=True)
        return sum((param * factor).sum().abs() for param, factor in pairs)


# Scenarios: wrap is torch's class or ours; what is returned has to be the same.


def trains(wrap, rank, k, set_to_none=None):
    """Four steps, of which gradients are set to None, set to 0, or added up."""
    return trace_of(
        wrap(conv()), [[images(rank, step)] for step in range(4)], set_to_none
    )


def trains_in_part(wrap, rank, k, set_to_none):
    model = wrap(Branches(), find_unused_parameters=True)
    inputs = [(randn(4, 3, seed=10 * step + rank), rank, step) for step in range(4)]
    return trace_of(model, inputs, set_to_none)


def trace_of(model, batches, set_to_none):
    trace = []
    for args in batches:
        for param in model.parameters() if set_to_none is not None else ():
            param.grad = (
                None if set_to_none or param.grad is None else param.grad.zero_()
            )
        backward(model(*args))
        trace += clones(grads(model))
        update(model)
    return trace, state(model)


def mixes_dtypes(wrap, rank, k):
    module = Mixed(torch.float64, torch.float32, torch.complex64)
    model = wrap(module)
    for _ in range(2):
        module.zero_grad()
        model(rank).backward()
    return clones(grads(module)), [list(grad.stride()) for grad in grads(module)]


def checkpoints(wrap, rank, k):
    """Backward passes inside the backward pass."""
    module = mlp(3, 3, 3, 3)
    first, *others = module
    again = partial(checkpoint, use_reentrant=True)
    module.forward = lambda X: reduce(
        lambda X, layer: again(layer, X), others, first(X)
    )
    model = wrap(module)
    for step in range(2):
        model.zero_grad()
        backward(model(randn(2, 3, seed=10 * step + rank)))
    return clones(grads(model))


def sets_flags(wrap, rank, k):
    """no_sync, also inside itself and where the flag is False; and no sync by hand."""
    module = mlp(6, 5, 1)
    model, trace = wrap(module), []

    def step(i):
        backward(model(randn(4, 6, seed=10 * i + rank)))
        trace.append(clones(grads(module)))

    with model.no_sync():
        step(0)
        with model.no_sync():
            step(1)
        step(2)
    step(3)
    assert len({str(everyones(part)) for part in trace}) == 4
    model.require_backward_grad_sync = False
    with model.no_sync():
        step(4)
    step(5)
    trace.append(model.require_backward_grad_sync)
    model.require_backward_grad_sync = True
    step(6)
    module.zero_grad()
    with model.no_sync():
        output = model(randn(4, 6, seed=rank))
    backward(output)  # of a forward pass that was made inside
    return trace, clones(grads(module))


def shares_buffers(wrap, rank, k, **options):
    """Where all take rank 0's: every rank spoils its buffers before each forward."""
    module, trace = conv(), []

    def spoil():
        for buffer in module.buffers():
            buffer.add_(rank)

    def step(times, calls_backward=True):
        for _ in range(times):
            spoil()
            output = model(images(rank, 0))
            if calls_backward and output.requires_grad:
                backward(output)
            trace.extend(clones(module.buffers()))

    spoil()
    model = wrap(module, **options)
    trace += clones(module.buffers())
    step(1)
    for mode in (True, False):
        model.train(mode)
        with torch.no_grad():
            step(2)
    with model.no_sync():
        step(2)
    step(2, calls_backward=False)
    return trace


def wraps_twice(wrap, rank, k):
    """Only passes of the wrapper average, not of the module or of another wrapper."""
    module = mlp(3, 1)
    first, second = wrap(module), wrap(module)
    trace = []
    for call in (first, module, second, module, first, second):
        module.zero_grad()
        backward(call(randn(2, 3, seed=rank)))
        trace += clones(grads(module))
    return trace


SCENARIOS = {
    "gradients set to None": partial(trains, set_to_none=True),
    "gradients set to 0": partial(trains, set_to_none=False),
    "gradients added up": trains,
    "unused, frozen, tied, late": partial(trains_in_part, set_to_none=True),
    "unused, gradients set to 0": partial(trains_in_part, set_to_none=False),
    "dtypes, sizes, strides": mixes_dtypes,
    "reentrant checkpoints": checkpoints,
    "no_sync": sets_flags,
    "buffers": shares_buffers,
    "two wrappers": wraps_twice,
} | {  # torch 2.11 lacks the second
    f"{name}=False": partial(shares_buffers, **{name: False})
    for name in ("broadcast_buffers", "forward_sync_buffers", "init_sync")
    if name in inspect.signature(TORCHS).parameters
}


def leaves_what_torchs_leaves(scenario, rank, k):
    theirs = scenario(TORCHS, rank, k)
    for way, options in WAYS.items():
        ours = scenario(partial(DistributedDataParallel, **options), rank, k)
        torch.testing.assert_close(
            ours, theirs, msg=lambda words, way=way: f"{way}: {words}"
        )


test_what_is_left_is_torchs = on_ranks(
    3,
    {
        name: partial(leaves_what_torchs_leaves, scenario)
        for name, scenario in SCENARIOS.items()
    },
)


# The definition.


def trains_on_shards(rank, k):
    for kind in (NaiveDistributedDataParallel, DistributedDataParallel, None):
        module, whole = mlp(6, 5, 4, 1, seed=100 + rank), mlp(6, 5, 4, 1, seed=100)
        if kind is None:
            module.load_state_dict(whole.state_dict())
        model = kind(module) if kind else module
        for step in range(5):
            X, own = randn(4 * k, 6, seed=step), slice(4 * rank, 4 * rank + 4)
            for each in (module, whole):
                each.zero_grad()
            backward(model(X[own]))
            if kind is NaiveDistributedDataParallel:
                model.average_gradients()
            backward(whole(X))
            update(module), update(whole)
        first, *others = everyones(state(module))
        agrees = attempt(close, first, state(whole))[0]
        same = all(
            torch.equal(a, b)
            for other in others
            for a, b in zip(first, other, strict=True)
        )
        assert (agrees, same) == (("ok", True) if kind else ("AssertionError", False))


test_training_on_shards_is_training_on_the_whole_batch = on_ranks(3, [trains_on_shards])


# Ours alone, and what is refused.


def sixteen_bits(rank, k):
    """They travel as float32, and are rounded once."""
    for cap in (25, TINY):
        module = Mixed(torch.float16, torch.bfloat16)
        module(rank).backward()
        alone = zip(*everyones(clones(grads(module))), strict=True)
        module.zero_grad()
        DistributedDataParallel(module, bucket_cap_mb=cap)(rank).backward()
        for param, everyone in zip(module.parameters(), alone, strict=True):
            mean = sum(grad.float() / k for grad in everyone).to(param.dtype)
            assert torch.equal(param.grad, mean), param.dtype


def every_pass_averages(rank, k):
    module = linear()
    loss = DistributedDataParallel(module)(rows(rank)).sum()
    loss.backward(retain_graph=True)
    assert gradient(module) == MEAN
    loss.backward()
    assert gradient(module) == 2 * MEAN


def views_are_written_over(rank, k):
    for as_view, expected in ((False, MEAN), (True, 10 * MEAN)):
        module = linear()
        model = DistributedDataParallel(module, gradient_as_bucket_view=as_view)
        model(rows(rank)).sum().backward()
        kept = module.weight.grad
        module.zero_grad()
        model(10 * rows(rank)).sum().backward()
        assert kept.item() == expected and gradient(module) == 10 * MEAN


def group_of_some_ranks(rank, k):
    """It has a source of its own, and ranks may be in different numbers of groups."""
    group = dist.new_group([1])
    if rank == 1:
        model = DistributedDataParallel(linear(), process_group=group)
        with model.join():
            model(rows(rank)).sum().backward()
        assert gradient(model) == rank + 1
    model = DistributedDataParallel(linear())
    model(rows(rank)).sum().backward()
    assert gradient(model) == MEAN


def copies(rank, k):
    def saved(model):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    for twin in (copy.deepcopy, saved):
        model = DistributedDataParallel(nn.BatchNorm1d(1), gradient_as_bucket_view=True)
        model(torch.randn(3, 1)).sum().backward()
        if rank == 0:
            twin(model)  # as for a moving average on one rank: no other need take part
        other = twin(model)
        model.zero_grad(), other.zero_grad()
        (other(torch.tensor([[1.0], [2.0]])) * (rank + 1)).sum().backward()
        assert (
            other.module.bias.grad.item() == 2 * MEAN and model.module.bias.grad is None
        )
        assert other.gradient_as_bucket_view
        assert list(other.state_dict()) == [
            f"module.{name}" for name in model.module.state_dict()
        ]
    with pytest.raises(RuntimeError, match=r"copy \.module, and wrap the copy"):
        copy.deepcopy(DistributedDataParallel(linear(), process_group=dist.new_group()))


def gradients_of_gradients(rank, k):
    model = DistributedDataParallel(linear())
    output = model(rows(rank)).square().sum()
    with (
        pytest.raises(RuntimeError, match="without create_graph"),
        pytest.warns(UserWarning),
    ):
        output.backward(create_graph=True)
    model.zero_grad()
    ranks.barrier()
    model(rows(rank)).sum().backward()  # and afterwards all is well
    assert gradient(model) == MEAN


def gradient_that_comes_twice(rank, k):
    module = linear()
    model, X = DistributedDataParallel(module), rows(rank).requires_grad_()
    inner = checkpoint(module, X, use_reentrant=True)  # a backward pass of its own
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        (inner + model(X)).sum().backward()
    module.zero_grad()
    (checkpoint(module, X, use_reentrant=False) + model(X)).sum().backward()
    assert gradient(module) == 2 * MEAN


def unfrozen_parameter(rank, k):
    module = nn.Sequential(linear(), linear().requires_grad_(False))
    model = DistributedDataParallel(module)
    module[1].requires_grad_(True)
    with pytest.raises(ValueError, match=r"1\.weight was unfrozen after wrapping"):
        model(rows(rank))
    DistributedDataParallel(module)(rows(rank)).sum().backward()
    assert [p.grad.item() for p in module.parameters()] == [MEAN, MEAN]


test_ours_alone = on_ranks(
    2,
    [
        sixteen_bits,
        every_pass_averages,
        views_are_written_over,
        group_of_some_ranks,
        copies,
        gradients_of_gradients,
        gradient_that_comes_twice,
        unfrozen_parameter,
    ],
)
