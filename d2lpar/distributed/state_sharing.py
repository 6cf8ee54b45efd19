"""Replicas that begin alike: ranks compare modules, and all take one rank's state.

Notebook 07 builds this file. Source: ``torch.nn.parallel.DistributedDataParallel``.
"""

from collections.abc import Iterable
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn

from .. import ranks
from .buckets import deal

# as in torch: where a message has several tensors, it has no more
MESSAGE_BYTES = 250 * 2**20


def share_state(
    module: nn.Module, group: dist.ProcessGroup | None = None, buffers: bool = True
) -> None:
    """Check that all ranks have the same module, and copy rank 0's state in place.

    Rank 0 is the first of ``group``. All raise a ValueError that names the first
    difference.
    """
    share_named(
        [*module.named_parameters(), *(module.named_buffers() if buffers else ())],
        group,
    )


def share_named(
    state: list[tuple[str, torch.Tensor]], group: dist.ProcessGroup | None = None
) -> None:
    """Do the same for a list of names and tensors."""
    mine = "\n".join(f"{name}, {_describe(tensor)}" for name, tensor in state)
    text = torch.frombuffer(bytearray(mine.encode() + b"\0"), dtype=torch.uint8)
    texts = bytes(ranks.all_gather(text, group).tolist()).decode().split("\0")[:-1]
    first, *others = dist.get_process_group_ranks(group or dist.group.WORLD)
    for rank, other in zip(others, texts[1:], strict=True):
        pairs = zip_longest(
            texts[0].split("\n"), other.split("\n"), fillvalue="nothing more"
        )
        for i, (a, b) in enumerate(pairs):
            if a != b:
                raise ValueError(
                    f"the ranks have different modules: number {i} of the parameters"
                    f" and buffers is {a} on rank {first}, but {b} on rank {rank}"
                )
    share_tensors([tensor for _, tensor in state], first, group)


def _describe(tensor: torch.Tensor) -> str:
    """Name what all ranks must have alike: dtype, shape, strides, if it is frozen."""
    words = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if not tensor.is_contiguous():
        words += f" with strides {list(tensor.stride())}"
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        words += " (frozen)"
    return words


@torch.no_grad()
def share_tensors(
    tensors: Iterable[torch.Tensor], src: int, group: dist.ProcessGroup | None = None
) -> None:
    """Copy those of rank ``src`` into everyone's in place, many in one message."""
    for together in deal(tensors, MESSAGE_BYTES):
        flats = [tensor.reshape(-1) for tensor in together]
        flat = torch.cat(flats) if len(flats) > 1 else flats[0]  # which may be large
        ranks.broadcast(flat, src, group)
        parts = flat.split([tensor.numel() for tensor in together])
        for tensor, part in zip(together, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
