"""Replicas that begin alike: the ranks compare their modules, and all take one rank's state.

Notebook 05 builds this file. Source: ``torch.nn.parallel.DistributedDataParallel``, which compares
shapes, and broadcasts parameters and buffers.
"""

import torch
import torch.distributed as dist
from torch import nn

from . import ranks


def share_state(
    module: nn.Module, group: dist.ProcessGroup | None = None, buffers: bool = True
) -> None:
    """Check that all ranks have the same module, and copy rank 0's state into it in place.

    The state is all parameters and, if ``buffers``, all buffers. Rank 0 is the first one of
    ``group``.

    Raises:
        ValueError: on every rank, naming the first parameter or buffer that differs.
    """
    state = [*module.named_parameters(), *(module.named_buffers() if buffers else ())]
    mine = "".join(f"\n{name}, {_kind(tensor)}" for name, tensor in state)
    text = torch.frombuffer(bytearray(mine.encode() + b"\0"), dtype=torch.uint8)
    texts = bytes(ranks.all_gather(text, group).tolist()).decode().split("\0")[:-1]
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    first = texts[0].split("\n")
    for rank, other in zip(members, texts, strict=True):
        if other != texts[0]:
            lines = zip(
                [*first, "nothing more"], [*other.split("\n"), "nothing more"], strict=False
            )
            i, a, b = next((i, a, b) for i, (a, b) in enumerate(lines) if a != b)
            raise ValueError(
                f"the ranks have different modules: number {i} of the parameters and buffers is "
                f"{a} on rank {members[0]}, but {b} on rank {rank}"
            )
    for _, tensor in state:
        ranks.broadcast(tensor.detach(), members[0], group)


def _kind(tensor: torch.Tensor) -> str:
    frozen = " (frozen)" * (isinstance(tensor, nn.Parameter) and not tensor.requires_grad)
    strides = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{strides}{frozen}"


@torch.no_grad()
def share_buffers(module: nn.Module, src: int, group: dist.ProcessGroup | None = None) -> None:
    """Copy the buffers of rank ``src`` into everyone's, in one message for each dtype and device.

    A graph that has saved a buffer, of a forward pass before, does not see that it changes.
    """
    buffers = [buffer.data for buffer in module.buffers()]  # detach would let autograd see it
    for kind in dict.fromkeys((buffer.dtype, buffer.device) for buffer in buffers):
        same = [buffer for buffer in buffers if (buffer.dtype, buffer.device) == kind]
        flat = torch.cat([buffer.reshape(-1) for buffer in same])
        ranks.broadcast(flat, src, group)
        parts = flat.split([buffer.numel() for buffer in same])
        for buffer, part in zip(same, parts, strict=True):
            buffer.copy_(part.view_as(buffer))
