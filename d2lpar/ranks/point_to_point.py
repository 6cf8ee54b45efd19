"""A tensor from one rank to another, with a header that says what it is.

A collective knows on every rank what is sent; what a pipeline sends on has a shape that only the
sender knows. So a header goes first, of a fixed size: label, dtype, shape, and whether a gradient
is wanted back. Notebook 06 uses this file.
"""

import struct

import torch
import torch.distributed as dist

from ..collectives.lists import check_tensor
from ..devices import as_device
from .agreement import MismatchError
from .collectives import member_of
from .transport import Receive, Send, take

MAX_DIMS = 8
MARK = b"d2lpar  "  # of a header
HEADER = struct.Struct(f"<8s32sqqq{MAX_DIMS}q")  # mark, label, dtype, wants gradient, dims, shape
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)


def send(
    tensor: torch.Tensor,
    dst: int,
    label: str = "",
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
    wants_gradient: bool = False,
) -> None:
    """Send ``tensor`` to rank ``dst``; return when it may be written to again.

    That may be before ``dst`` has received it, or only then: two ranks that first send to each
    other, and then receive, may wait for each other. Let one of them send in a thread.

    Args:
        tensor: of up to 8 dimensions, detached.
        dst: a rank of the world, and of ``group``.
        label: what it is, up to 32 bytes; the receiver must expect the same.
        group: a process group; None: all ranks.
        timeout: seconds to wait for ``dst``; None: the group's.
        wants_gradient: what the receiver's tensor ``requires_grad``.

    Raises:
        PeerError: ``dst`` did not receive it in time, or is gone.
        BusyError: another thread of this rank is about to send in the same group.
        ValueError: ``dst`` is no other rank of the group, or the tensor cannot be described.
    """
    check_sendable(tensor, label)
    member, timeout = member_of(group, timeout)
    transport = member.transport
    to, text = _peer(transport, dst, "dst"), label.encode()
    shape = [*tensor.shape] + [0] * (MAX_DIMS - tensor.dim())
    fields = DTYPES.index(tensor.dtype), wants_gradient, tensor.dim(), *shape
    header = HEADER.pack(MARK, text, *fields)
    with transport.call(f"send of {label!r} to rank {dst}", "send"), transport.guard():
        for message in (torch.frombuffer(bytearray(header), dtype=torch.uint8), tensor.detach()):
            flat = message.resolve_conj().resolve_neg().contiguous().view(-1)
            transport.exchange([Send(to, flat.to(transport.device))], [], timeout)


def check_sendable(tensor: torch.Tensor, label: str) -> None:
    """Refuse what ``send`` refuses, before anything is sent."""
    check_tensor(tensor, "the tensor")
    if tensor.dim() > MAX_DIMS or tensor.dtype not in DTYPES or len(label.encode()) > 32:
        raise ValueError(
            f"cannot send {tensor.dtype} of shape {list(tensor.shape)} as {label!r}: a header has "
            f"room for {MAX_DIMS} dimensions, torch's usual dtypes and a label of 32 bytes"
        )


def receive(
    src: int,
    label: str = "",
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Return what rank ``src`` sends next, as a new tensor on ``device``; it must have ``label``.

    Raises:
        PeerError: nothing came within ``timeout`` seconds, or ``src`` is gone.
        MismatchError: what comes has another label, and is lost; or it was not sent by ``send``,
            nobody knows what comes next, and the group is of no more use.
        BusyError: another thread of this rank is about to receive in the same group.
        ValueError: ``src`` is no other rank of the group, or there is no such device.
    """
    device = as_device(device)
    member, timeout = member_of(group, timeout)
    transport = member.transport
    origin = _peer(transport, src, "src")
    with transport.call(f"receive of {label!r} from rank {src}", "receive"), transport.guard():
        header = torch.empty(HEADER.size, dtype=torch.uint8, device=transport.device)
        transport.exchange([], [Receive(origin, header, take)], timeout)
        mark, text, dtype, wants_gradient, dims, *shape = HEADER.unpack(bytes(header.tolist()))
        if mark != MARK:
            raise MismatchError(f"{label!r} was expected, but rank {src} makes another call")
        flat = torch.empty(shape[:dims], dtype=DTYPES[dtype], device=transport.device).view(-1)
        transport.exchange([], [Receive(origin, flat, take)], timeout)
    found = text.rstrip(b"\0").decode(errors="replace")
    if found != label:
        raise MismatchError(f"rank {src} has sent {found!r}, but {label!r} was expected")
    return flat.reshape(shape[:dims]).to(device).requires_grad_(bool(wants_gradient))


def _peer(transport, rank: int, name: str) -> int:
    if rank not in transport.ranks or transport.ranks.index(rank) == transport.member:
        others = [r for r in transport.ranks if r != transport.ranks[transport.member]]
        raise ValueError(f"{name} is {rank!r}, but the other ranks of the group are {others}")
    return transport.ranks.index(rank)
