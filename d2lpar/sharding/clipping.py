"""The norm of gradients that lie in shards. Notebook 11 uses this file."""

from collections.abc import Iterable
from functools import reduce

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .. import ranks
from .shards import Shard


def check_clip(parameters, norm_type) -> None:
    """Refuse a norm that cannot be taken in parts, and shards of several groups."""
    if not norm_type > 0:
        raise ValueError(f"norm_type has to be positive, not {norm_type!r}")
    if len({param.group for param in parameters if isinstance(param, Shard)}) > 1:
        raise ValueError(
            "the shards are of several groups: clip those of each group alone"
        )


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place to a norm of ``max_norm``; return the old one.

    It is ``torch.nn.utils.clip_grad_norm_``, but the norm is that of whole parameters,
    of which each rank has a shard: called by all ranks of their group. What is no shard
    counts once: its gradient has to be the same on all ranks.
    """
    parameters = (
        [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    )
    norm_type = float(norm_type)
    check_clip(parameters, norm_type)
    shards = [param for param in parameters if isinstance(param, Shard)]
    rest = [param for param in parameters if not isinstance(param, Shard)]
    norms = [
        _norm_of(params, norm_type, foreach) for params in (shards, rest) if params
    ]
    if shards:
        everyones = ranks.all_gather(norms[0].view(1), shards[0].group)
        norms[0] = torch.linalg.vector_norm(everyones, norm_type)
    norm = get_total_norm(norms, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {norm}, so it cannot"
            " clip them; leave out error_if_nonfinite to scale them all the same"
        )
    clip_grads_with_norm_(parameters, max_norm, norm, foreach)
    return norm


def _norm_of(
    params: list[torch.Tensor], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    """Return the norm of the gradients here: of one type on all ranks, even of none."""
    grads = [
        param.grad for param in params if param.grad is not None and param.grad.numel()
    ]
    norm = get_total_norm(grads, norm_type, foreach=foreach)
    return norm.to(
        params[0].device, reduce(torch.promote_types, [param.dtype for param in params])
    )
