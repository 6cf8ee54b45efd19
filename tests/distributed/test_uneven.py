"""Ranks with fewer batches (join), or with fewer rows in them (weight="rows")."""

from functools import partial

import pytest
import torch
from helpers import (
    attempt,
    breaks,
    clones,
    close,
    everyones,
    grads,
    mlp,
    on_ranks,
    randn,
)
from torch import nn

from d2lpar import DistributedDataParallel

TORCHS = nn.parallel.DistributedDataParallel
ROWS = partial(DistributedDataParallel, weight="rows")


def norm():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()


def update(module):
    with torch.no_grad():
        for param in module.parameters():
            param -= 0.1 * param.grad


def step(model, rank, i):
    X = randn(5, 3, seed=10 * i + rank)
    model.zero_grad()
    model(X).square().mul(torch.arange(5.0)[:, None]).mean().backward()
    update(model)


def joins(wrap, rank, k, counts, broadcast_buffers=True, **options):
    """A loop of ``counts[rank]`` batches; what all then have, and after plain steps."""
    model = wrap(norm(), broadcast_buffers=broadcast_buffers)
    with model.join(**options):
        for i in range(counts[rank]):
            step(model, rank, i)
    trace = clones(model.state_dict().values())
    for i in range(2):
        step(model, rank, 10 + i)
    return trace, clones(grads(model))


def joins_again(wrap, rank, k):
    model = wrap(norm())
    for count in (1 + rank, 2 * (rank > 0), 2):
        with model.join():
            for i in range(count):
                step(model, rank, i)
    return clones(model.state_dict().values())


def throws(wrap, rank, k):
    model, steps = wrap(nn.Linear(3, 2).double()), 0
    with pytest.raises(RuntimeError), model.join(throw_on_early_termination=True):
        for i in range(2 + rank):
            step(model, rank, i)
            steps += 1
    return steps


def does_nothing(wrap, rank, k):
    model = wrap(norm())
    with model.join(enable=False):
        step(model, rank, 0)
    return clones(grads(model))


SCENARIOS = {
    "the last has most": partial(joins, counts=(2, 3, 4)),
    "the first has most": partial(joins, counts=(4, 3, 2)),
    "one has none": partial(joins, counts=(2, 0, 2)),
    "divided by those that are left": partial(
        joins, counts=(2, 3, 4), divide_by_initial_world_size=False
    ),
    "buffers of one's own": partial(joins, counts=(1, 2, 3), broadcast_buffers=False),
    "again": joins_again,
    "an error for all": throws,
    "not enabled": does_nothing,
}


def leaves_what_torchs_leaves(scenario, rank, k):
    close(*(scenario(kind, rank, k) for kind in (DistributedDataParallel, TORCHS)))


test_join_is_torchs = on_ranks(
    3,
    {
        name: partial(leaves_what_torchs_leaves, scenario)
        for name, scenario in SCENARIOS.items()
    },
)


def passes_without_gradients(rank, k):
    """Torch's class waits forever in this loop."""
    model = DistributedDataParallel(norm())
    with model.join():
        for i in range(1 + rank):
            with torch.no_grad():
                model(randn(5, 3, seed=rank))
            step(model, rank, i)
    first, *others = everyones(
        [tensor.tolist() for tensor in model.state_dict().values()]
    )
    assert all(first == other for other in others) and first[-1] == 2 * k


def drops_a_gradient(rank, k):
    """A parameter used only by a rank that has left keeps no gradient on the others."""
    model = DistributedDataParallel(nn.ModuleList(nn.Linear(3, 1) for _ in range(2)))
    model.module.forward = lambda X: model.module[rank > 0](X)
    with model.join():
        for _ in range(1 + 2 * rank):
            model.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
    assert [layer.weight.grad is None for layer in model.module] == [rank > 0, False]


def mean(output):
    return output.square().mean()


def has_gradients_of(model, whole):
    close(grads(model), grads(whole))


def mean_over_all_rows(rank, k):
    X, (begin, end) = randn(6, 6), [(0, 5), (5, 6), (6, 6)][rank]
    whole = mlp(6, 5, 1)
    mean(whole(X)).backward()
    for cap in (25, 1e-4):
        model, equal = (
            ROWS(mlp(6, 5, 1), bucket_cap_mb=cap),
            DistributedDataParallel(mlp(6, 5, 1)),
        )
        for _ in range(2):  # the rows of the first step are not counted in the second
            model.zero_grad()
            mean(model(X[begin:end])).backward()
        has_gradients_of(model, whole)
        mean(equal(X[begin:end])).backward()
        assert attempt(has_gradients_of, equal, whole)[0] == "AssertionError"


def rows_of_two_passes(rank, k):
    """They add up: by no_sync, and by one backward pass for both."""
    X, sizes, whole = randn(3, 6), (2, 1, 1), mlp(6, 5, 1)
    total = sum(2 * n + 1 for n in sizes)
    for n in sizes:
        (
            (mean(whole(X[:n])) + mean(whole(X[: n + 1]))) * (2 * n + 1) / total
        ).backward()
    first, second = X[: sizes[rank]], X[: sizes[rank] + 1]
    model = ROWS(mlp(6, 5, 1))
    with model.no_sync():
        mean(model(first)).backward()
    mean(model(second)).backward()
    has_gradients_of(model, whole)
    model.zero_grad()
    (mean(model(first)) + mean(model(second))).backward()
    has_gradients_of(model, whole)


def two_backward_passes_also_after_one_that_broke(rank, k):
    model, whole, X = ROWS(mlp(6, 5, 1)), mlp(6, 5, 1), randn(6, 6)
    broken = breaks(model.module[1])
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1 + 9 * rank, 6, dtype=X.dtype)).sum().backward()
    broken.remove()
    model.zero_grad()
    output = model(X.split([1, 2, 3])[rank])
    output.mean().backward(retain_graph=True)
    mean(output).backward()
    (whole(X).mean() + mean(whole(X))).backward()
    has_gradients_of(model, whole)


def rows_in_join(rank, k):
    X, model, whole = (
        randn(3, 3, 4, 6),
        ROWS(mlp(6, 5, 1), bucket_cap_mb=1e-4),
        mlp(6, 5, 1),
    )
    with model.join():
        for i in range(rank + 1):
            model.zero_grad()
            mean(model(X[i, rank, : 2 + rank])).backward()
            update(model)
    for i in range(3):
        whole.zero_grad()
        mean(whole(torch.cat([X[i, r, : 2 + r] for r in range(i, 3)]))).backward()
        update(whole)
    close(list(model.parameters()), list(whole.parameters()))
    weights = everyones([param.tolist() for param in model.parameters()])
    assert weights[0] == weights[1] == weights[2]


def complex_parameters(rank, k):
    module = nn.Module()
    module.a, module.b = (
        nn.Parameter(torch.ones(2, dtype=t)) for t in (torch.cfloat, torch.float)
    )
    module.forward = lambda X: sum(
        (param * X).abs().sum() for param in module.parameters()
    )
    ROWS(module)(torch.full((1, 2), 1.0 + rank)).backward()
    assert [grad.tolist() for grad in grads(module)] == [[2, 2]] * 2


def refuses_what_cannot_be_weighted(rank, k):
    with pytest.raises(ValueError, match="tensor with rows"):
        ROWS(nn.Linear(2, 2))(3)
    mine = ("equal", "rows")[rank == 1]
    with pytest.raises(
        ValueError, match=f"weight is '{mine}' on this rank, but not on all"
    ):
        DistributedDataParallel(nn.Linear(2, 2), weight=mine)


test_rows = on_ranks(
    3,
    [
        passes_without_gradients,
        drops_a_gradient,
        mean_over_all_rows,
        rows_of_two_passes,
        two_backward_passes_also_after_one_that_broke,
        rows_in_join,
        complex_parameters,
        refuses_what_cannot_be_weighted,
    ],
)
