"""Replicas that begin alike: the ranks compare their modules, and all take one rank's state.

Notebook 05 builds this file. Source: ``torch.nn.parallel.DistributedDataParallel``, which compares
shapes, and broadcasts parameters and buffers.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from .. import ranks
from ..ranks.collectives import is_expanded

MESSAGE_BYTES = 250 * 2**20  # as in torch: where a message has several tensors, it has no more


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
    share_tensors([tensor for _, tensor in state], members[0], group)


def _kind(tensor: torch.Tensor) -> str:
    frozen = " (frozen)" * (isinstance(tensor, nn.Parameter) and not tensor.requires_grad)
    strides = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{strides}{frozen}"


@torch.no_grad()
def share_tensors(
    tensors: Iterable[torch.Tensor], src: int, group: dist.ProcessGroup | None = None
) -> None:
    """Copy those of rank ``src`` into everyone's: tensors of one dtype and device travel together.

    As after any change in place, backward through an earlier graph that has saved one of them
    raises an error; where the tensor is passed as ``.data``, it does not.
    """
    for same in _messages(tensors):
        if len(same) == 1:
            ranks.broadcast(same[0], src, group)
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        ranks.broadcast(flat, src, group)
        parts = flat.split([tensor.numel() for tensor in same])
        for tensor, part in zip(same, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _messages(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    begun = {}  # (dtype, device): the tensors of a message that has room, and their bytes
    for tensor in tensors:
        if tensor.layout is not torch.strided or is_expanded(tensor):
            yield [tensor]  # to be refused
            continue
        kind = tensor.dtype, tensor.device
        same, nbytes = begun.pop(kind, ([], 0))
        if same and nbytes + tensor.nbytes > MESSAGE_BYTES:
            yield same
            same, nbytes = [], 0
        same.append(tensor)
        begun[kind] = same, nbytes + tensor.nbytes
    yield from (same for same, _ in begun.values())
