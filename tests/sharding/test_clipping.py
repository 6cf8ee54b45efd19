"""The norm of all gradients, of which each rank has a part."""

import math

import pytest
import torch
import torch.distributed as dist
from helpers import attempt, close, in_ranks, mlp, on_ranks, randn
from torch import nn

from d2lpar import fully_shard
from d2lpar.sharding import Shard, clip_grad_norm_

ROWS = 6


def models(rank, k, ignored=False):
    """A model on one device and a sharded one, with the same gradients."""
    alone, model = mlp(5, 7, 1), mlp(5, 7, 1)
    kept = {model[0].weight} if ignored else set()
    for part in (model[0], model):
        fully_shard(part, ignored_params=kept)
    X = randn(ROWS, 5)
    alone(X).square().mean().backward()
    model(X).square().mean().backward()
    return alone, model


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("ignored", [False, True])
@in_ranks()
def test_gradients_are_clipped_by_the_norm_of_all(rank, k, ignored):
    for norm_type in (2.0, 1, 3.5, math.inf, "inf"):
        for part in (0.5, 2.0):
            alone, model = models(rank, k, ignored)
            norm = torch.nn.utils.clip_grad_norm_(
                alone.parameters(), math.inf, norm_type
            )
            alone, _ = models(rank, k)
            torch.nn.utils.clip_grad_norm_(alone.parameters(), part * norm, norm_type)
            found = clip_grad_norm_(model.parameters(), part * norm, norm_type)
            close(found, norm)
            for own, whole in zip(model.parameters(), alone.parameters(), strict=True):
                cut = own.span if isinstance(own, Shard) else slice(None)
                close(own.grad.reshape(-1), whole.grad.reshape(-1)[cut])


def ranks_alone_would_clip_otherwise(rank, k):
    _, model = models(rank, k)
    own = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    whole = clip_grad_norm_(list(model.parameters()), 1e9)
    assert own < 0.99 * whole


def one_tensor_none_and_gradients_that_are_missing(rank, k):
    _, model = models(rank, k)
    first = next(model.parameters())
    alone = models(rank, k)[0][0].weight.grad
    close(clip_grad_norm_(first, 1e9), alone.norm())
    model.zero_grad()
    assert clip_grad_norm_(model.parameters(), 1.0).item() == 0
    assert clip_grad_norm_([], 1.0).item() == 0


def a_rank_with_empty_shards_takes_part(rank, k):
    for dtype in (torch.float64, torch.bfloat16):
        model = fully_shard(nn.Linear(1, 1, bias=False).to(dtype))
        model(torch.full((1, 1), 3, dtype=dtype)).sum().backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        assert (norm.item(), norm.dtype) == (3.0, dtype)


def what_is_not_finite_is_told_on_all_ranks(rank, k):
    _, model = models(rank, k)
    if rank == 0:
        next(model.parameters()).grad[0] = torch.nan
    kind, text, *_ = attempt(
        clip_grad_norm_, model.parameters(), 1.0, error_if_nonfinite=True
    )
    assert kind == "RuntimeError" and "nan" in text
    assert clip_grad_norm_(model.parameters(), 1.0).isnan()


def what_cannot_be_meant_is_refused(rank, k):
    pair = [
        fully_shard(nn.Linear(2, 2), group=dist.new_group([0, 1])) for _ in range(2)
    ]
    both = [param for module in pair for param in module.parameters()]
    for expected, args in (
        ("ValueError the shards are of several groups", (both, 1.0)),
        ("ValueError norm_type has to be positive, not 0", ([], 1.0, 0)),
    ):
        kind, text, *_ = attempt(clip_grad_norm_, *args)
        assert f"{kind} {text}".startswith(expected), (kind, text)


test_on_two = on_ranks(
    2,
    [
        ranks_alone_would_clip_otherwise,
        one_tensor_none_and_gradients_that_are_missing,
        a_rank_with_empty_shards_takes_part,
        what_is_not_finite_is_told_on_all_ranks,
        what_cannot_be_meant_is_refused,
    ],
)
