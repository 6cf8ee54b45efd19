"""What tests of several rooms share. It travels to ranks by value, as the tests do."""

import time
from functools import cache, partial, wraps
from inspect import Signature, signature
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from d2lpar import ranks, schedules
from d2lpar.ranks.launch import launch

SCHEDULES = [schedules.star, schedules.ring, schedules.tree, schedules.direct]
SCHEDULES += [schedules.halving_doubling, schedules.recursive_doubling]
LIMIT = 60  # seconds for a launch that takes less than one
MEAN = 1.5
SOON = 8.0  # seconds for a call that takes milliseconds on a machine that is not busy
# What torchrun sets for rank 3: the second one on the second of two machines
TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

both_ways = pytest.mark.parametrize("way", ["lanes", "messages"])
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)  # of float64


def take(way, group=None):
    """Let a group of ranks send over lanes, which it has by itself, or by messages."""
    if way == "messages":
        ranks.use_messages(group)


def attempt(call, *args, **kwargs):
    """An error's type, text, peers and seconds; "ok" and the result without one."""
    begin = time.monotonic()
    try:
        result = call(*args, **kwargs)
    except Exception as error:
        seconds = time.monotonic() - begin
        return type(error).__name__, str(error), getattr(error, "peers", ()), seconds
    return "ok", result, (), time.monotonic() - begin


def randn(*shape, seed=0, dtype=torch.float64):
    """The same random numbers everywhere."""
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype
    )


def mlp(*widths, seed=0, dtype=torch.float64):
    """Linear layers with tanh between them, of the same weights everywhere."""
    torch.manual_seed(seed)
    layers = [nn.Linear(a, b, dtype=dtype) for a, b in pairwise(widths)]
    return nn.Sequential(
        *[part for layer in layers for part in (layer, nn.Tanh())][:-1]
    )


def grads(module):
    """The gradients of a module's parameters, in order."""
    return [param.grad for param in module.parameters()]


def distance(ours, theirs):
    """The largest difference between two lists of tensors."""
    pairs = zip(ours, theirs, strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


def loss_and_grads(model, criterion, X, y):
    """The loss of a model on one device, and its gradients, added to those there."""
    loss = criterion(model(X), y)
    loss.backward()
    return loss.detach(), grads(model)


def everyones(value, group=None):
    """All ranks' values, by torch's own collective: ours is what is tested."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def clones(tensors):
    """Copies of tensors, of which some may be None."""
    return [None if tensor is None else tensor.detach().clone() for tensor in tensors]


def grid(num_rows, num_columns):
    """Return the groups of this rank's row, of neighbours, and of its column."""
    places = torch.arange(num_rows * num_columns).view(num_rows, num_columns)
    row, _ = dist.new_subgroups_by_enumeration(places.tolist())
    column, _ = dist.new_subgroups_by_enumeration(places.T.tolist())
    return row, column


def groups_of(rank):
    """All four ranks, two of them, and this one alone."""
    yield None
    for parts in ([[0, 3], [1, 2]], [[0], [1], [2], [3]]):
        yield dist.new_subgroups_by_enumeration(parts)[0]


def attempts(rank, world_size, checks):
    """For ``launch``: call each ``check(rank, world_size)`` in turn in these ranks."""
    return {
        name: attempt(check, rank, world_size)[:2] for name, check in checks.items()
    }


def linear():
    """The smallest model: gradient rank + 1 on ``rows(rank)``, ``MEAN`` over two."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def rows(rank):
    """A batch for ``linear``."""
    return torch.full((1, 1), rank + 1.0)


def gradient(module):
    """The gradient of a module's first parameter, which is one number."""
    return next(module.parameters()).grad.item()


WIDTHS = 6, 8, 7, 9, 5  # of the model that the pipelines' tests cut


def batch(rows=7, seed=0):
    """Inputs and targets for ``mlp(*WIDTHS)``."""
    return randn(rows, 6, seed=seed), randn(rows, 5, seed=10 + seed)


def frozen():
    """``mlp(*WIDTHS)``, to whose first layers no gradient is sent."""
    model = mlp(*WIDTHS)
    model[:3].requires_grad_(False)
    return model


def of_tokens():
    """A model of three whole numbers, 0 to 10."""
    torch.manual_seed(0)
    layers = (
        nn.Embedding(11, 6),
        nn.Flatten(),
        nn.Linear(18, 7),
        nn.Tanh(),
        nn.Linear(7, 5),
    )
    return nn.Sequential(*layers).double()


def breaks(layer):
    """Let backward break off behind a layer, by a ZeroDivisionError."""
    return layer.register_forward_hook(
        lambda module, inputs, output: (
            output.register_hook(lambda grad: 1 / 0),
            output,
        )[1]
    )


def on_ranks(world_size, checks):
    """A test for each check(rank, world_size) of a list or dict; all in one launch."""
    by_name = (
        checks
        if isinstance(checks, dict)
        else {check.__name__: check for check in checks}
    )
    found = cache(lambda: launch(attempts, world_size, by_name, timeout=LIMIT))

    @pytest.mark.parametrize("name", by_name)
    def test(name):
        outcomes = [of_rank[name] for of_rank in found()]
        assert outcomes == [("ok", None)] * world_size, outcomes

    return test


def in_ranks(world_size=None):
    """Make a test of a function of (rank, k), ...: k ranks run it and assert in there.

    Without a number, k is a parameter of the test.
    """

    def decorate(function):
        parameters = [*signature(function).parameters.values()][
            1 if world_size is None else 2 :
        ]

        @wraps(function)
        def test(**fixtures):
            k = world_size or fixtures.pop("k")
            launch(function, k, *fixtures.values(), timeout=LIMIT)

        test.__signature__ = Signature(parameters)
        return test

    return decorate
