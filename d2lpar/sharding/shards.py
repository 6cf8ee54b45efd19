"""A shard: the part of a parameter that one rank keeps. Notebook 11 uses this file."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn

from .. import ranks


class Shard(nn.Parameter):
    """A flat part of a parameter that lies on the ranks of ``group`` in order.

    ``whole`` is a tensor without elements (on "meta") that has the parameter's shape
    and strides. ``sizes`` says how many elements each member of the group has; some may
    have none.
    """

    whole: torch.Tensor
    sizes: Sequence[int]
    group: dist.ProcessGroup

    @property
    def span(self) -> slice:
        """Where this rank's part lies in the ``line`` of the parameter."""
        ends, me = list(accumulate(self.sizes)), dist.get_rank(self.group)
        return slice(ends[me] - self.sizes[me], ends[me])


class Moved(nn.Parameter):
    """What a parameter becomes once its elements are in shards: of no use to anyone."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(
            "this parameter was divided among the ranks by fully_shard: make the"
            " optimiser afterwards, from module.parameters(), and shard tied parameters"
            " in one unit"
        )


def make_shard(
    data: torch.Tensor,
    param: torch.Tensor,
    sizes: Sequence[int],
    group: dist.ProcessGroup,
) -> Shard:
    """Return the shard of ``param`` with elements ``data``, whose memory it shares."""
    shard = Shard(data, param.requires_grad)
    shard.whole = torch.empty_like(param, device="meta", requires_grad=False)
    shard.sizes, shard.group = sizes, group
    return shard


def line(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return the elements in the memory order of ``like`` (None: of ``tensor``).

    It is a view wherever ``tensor`` has the strides of ``like``.
    """
    if like is not None and tensor.stride() != like.stride():
        tensor = torch.empty_strided(
            like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor.detach())
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether elements lie side by side in memory, in any order of dimensions."""
    return (
        tensor.layout is torch.strided
        and torch.empty_like(tensor).stride() == tensor.stride()
    )


def collect(part: torch.Tensor, shard: Shard, dst: int) -> torch.Tensor | None:
    """Return on rank ``dst``'s CPU all that lies as ``shard`` does; None elsewhere.

    ``part`` is the shard itself, or its optimiser's state for it. Called by all ranks
    of the group.
    """
    me = dist.get_rank()
    if me != dst:
        if part.numel():
            ranks.send(part.detach(), dst, shard.group)
        return None
    parts = [
        (part.detach().cpu() if rank == me else ranks.receive(rank, shard.group))
        for rank, size in zip(
            dist.get_process_group_ranks(shard.group), shard.sizes, strict=True
        )
        if size
    ]
    flat = torch.cat(parts) if parts else part.detach().cpu()
    return flat.as_strided(shard.whole.shape, shard.whole.stride())
