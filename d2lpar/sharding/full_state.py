"""The whole state of a sharded model or optimiser, to load on any number of ranks.

Notebook 11 uses this file. Source: ``torch.distributed.checkpoint.state_dict``,
full_state_dict.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..guards import checked
from .shards import Shard, collect, line

# in the state that torch's keep for a parameter
NUMBERS = "step", "eta", "mu", "mu_product"


def check_source(source, dst) -> None:
    """Refuse what has no shards of one group."""
    groups = {shard.group for shard in _params_of(source) if isinstance(shard, Shard)}
    if len(groups) != 1:
        raise ValueError(
            f"{type(source).__name__} has parameters of {len(groups)} groups of shards:"
            " one is needed, as of a module after fully_shard (and reshard), or of its"
            " optimiser"
        )
    members = dist.get_process_group_ranks(groups.pop())
    if dst is not None and dst not in members:
        raise ValueError(f"dst is {dst!r}, but the shards are on the ranks {members}")


@checked(check_source)
def full_state_dict(
    source: nn.Module | Optimizer, dst: int | None = None
) -> dict[str, Any]:
    """Return, on rank ``dst``, the ``state_dict`` as it is without shards.

    Elsewhere it is {}. Called by all ranks; None is the first rank of each group of
    shards. One tensor after the other travels to ``dst``, and ends on its CPU, so no
    rank ever has more than one whole tensor on its device.
    """
    shards = _params_of(source)
    group = next(shard.group for shard in shards if isinstance(shard, Shard))
    dst = dist.get_process_group_ranks(group)[0] if dst is None else dst
    collected = {}  # by part: two names may have one tensor

    def whole(part: Any, shard: torch.Tensor) -> Any:
        if not _lies_as(part, shard):
            return (
                part.detach().cpu().clone() if isinstance(part, torch.Tensor) else part
            )
        if id(part) not in collected:
            collected[id(part)] = (
                part,
                collect(part, shard, dst),
            )
        return collected[id(part)][1]

    state = _map_state(source, whole)
    return state if dist.get_rank() == dst else {}


def check_target(target, **_) -> None:
    """Refuse a module that has whole parameters now, since what they get is lost."""
    for name, part in target.named_modules() if isinstance(target, nn.Module) else ():
        unit = vars(part).get("_unit")
        if unit and unit.placed is not unit.shards:
            raise RuntimeError(
                f"the unit {name or 'root'} has whole parameters, which are only a"
                " copy, since unshard: call reshard first"
            )


@checked(check_target)
def load_full_state_dict(target: nn.Module | Optimizer, state: dict[str, Any]) -> None:
    """Load a full ``state``, which all ranks must have: each rank takes its part.

    ValueError: a tensor has another shape than the parameter. Otherwise the errors are
    torch's.
    """
    if isinstance(target, nn.Module):
        own = target.state_dict(keep_vars=True)
        parts = {
            name: _part_of(value, own.get(name), name) for name, value in state.items()
        }
        target.load_state_dict(parts)
        return
    shards, parts = _params_of(target), {}
    for i, values in state["state"].items():
        if i < len(shards):
            parts[i] = {
                name: (
                    value
                    if _is_number(name, value, shards[i])
                    else _part_of(value, shards[i], f"{name} of parameter {i}")
                )
                for name, value in values.items()
            }
    target.load_state_dict({**state, "state": parts})


def _params_of(source: nn.Module | Optimizer) -> list[torch.Tensor]:
    if isinstance(source, nn.Module):
        return list(source.parameters())
    return [param for group in source.param_groups for param in group["params"]]


def _map_state(source: nn.Module | Optimizer, function: Callable) -> dict[str, Any]:
    """Return the ``state_dict``, with ``function`` of each value and its parameter."""
    if isinstance(source, nn.Module):
        state = source.state_dict(keep_vars=True)
        return {name: function(value, value) for name, value in state.items()}
    shards, state = _params_of(source), source.state_dict()
    values = {
        i: {
            name: function(value, shards[i])
            for name, value in state["state"][i].items()
        }
        for i in sorted(state["state"])  # in one order on all ranks
    }
    return {**state, "state": values}


def _lies_as(part: Any, shard: Any) -> bool:
    return (
        isinstance(shard, Shard)
        and isinstance(part, torch.Tensor)
        and part.shape == shard.shape
    )


def _is_number(name: str, value: Any, shard: Any) -> bool:
    """Tell whether it belongs to the whole parameter, such as the number of steps."""
    has_one = isinstance(shard, Shard) and shard.whole.dim() == 0
    return (
        name in NUMBERS
        if has_one
        else isinstance(value, torch.Tensor) and value.dim() == 0
    )


def _part_of(value: Any, shard: Any, name: str) -> Any:
    """Return this rank's part of a whole tensor; anything else as it is."""
    if not isinstance(shard, Shard) or not isinstance(value, torch.Tensor):
        return value
    if value.shape != shard.whole.shape:
        raise ValueError(
            f"{name} has shape {list(value.shape)}, but the parameter"
            f" {list(shard.whole.shape)}"
        )
    return line(value, like=shard.whole)[shard.span]
