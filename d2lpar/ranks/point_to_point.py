"""A tensor from rank to rank, with a header that says what it is.

Only the sender knows the shape, so a header of a fixed size goes first. Notebook 13
uses this file.
"""

import struct
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from ..collectives.lists import check_tensor
from ..devices import as_device
from ..guards import checked
from .members import Group, member_of
from .transport import MismatchError, Receive, Send, Transport, take

MAX_DIMS = 8
MARK = b"d2lpar  "  # of a header
# mark, label, dtype, wants gradient, dims, shape
HEADER = struct.Struct(f"<8s32s16sqq{MAX_DIMS}q")


def check_send(tensor: torch.Tensor, label: str, **_) -> None:
    """Refuse what a header cannot describe, before anything is sent."""
    check_tensor(tensor, "the tensor")
    if tensor.dim() > MAX_DIMS or len(label.encode()) > 32:
        room = f"a header has room for {MAX_DIMS} dimensions and a label of 32 bytes"
        raise ValueError(f"cannot send shape {list(tensor.shape)} as {label!r}: {room}")


@checked(check_send)
def send(
    tensor: torch.Tensor,
    dst: int,
    label: str = "",
    group: Group = None,
    timeout: float | None = None,
    wants_gradient: bool = False,
) -> None:
    """Send ``tensor`` to rank ``dst``; return when it may be written to again.

    That may be before ``dst`` has received it, or only then: two ranks that first send
    to each other, and then receive, may wait for each other. Let one of them send in a
    thread.

    ``tensor`` is detached, and has up to 8 dimensions. ``dst`` is a rank of the world.
    ``label`` says what it is, in up to 32 bytes; the receiver must expect the same.
    There, the tensor will require a gradient if this rank ``wants_gradient``.

    PeerError: ``dst`` did not receive it in time, or is gone. BusyError: another thread
    of this rank is sending in the same group.
    """
    member, timeout = member_of(group, timeout)
    transport = member.transport
    to = _member_number(transport, dst, "dst")
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = [*tensor.shape] + [0] * (MAX_DIMS - tensor.dim())
    header = HEADER.pack(
        MARK, label.encode(), dtype.encode(), wants_gradient, tensor.dim(), *shape
    )
    with transport.call(f"send of {label!r} to rank {dst}", "send"):
        for message in (
            torch.frombuffer(bytearray(header), dtype=torch.uint8),
            tensor.detach(),
        ):
            flat = message.resolve_conj().resolve_neg().contiguous().view(-1)
            transport.exchange([Send(to, flat.to(transport.device))], [], timeout)


def receive(
    src: int,
    label: str = "",
    device: torch.device | str = "cpu",
    group: Group = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Return what rank ``src`` sends next, as a new tensor on ``device``.

    Raises:
        PeerError: nothing came within ``timeout`` seconds, or ``src`` is gone.
        MismatchError: what comes has another label; or was not sent by ``send``,
            nobody knows what comes next, and the group can no longer be used.
        BusyError: another thread of this rank is receiving in the same group.
    """
    device = as_device(device)
    member, timeout = member_of(group, timeout)
    transport = member.transport
    origin = _member_number(transport, src, "src")
    with transport.call(f"receive of {label!r} from rank {src}", "receive"):
        header = torch.empty(HEADER.size, dtype=torch.uint8, device=transport.device)
        transport.exchange([], [Receive(origin, header, take)], timeout)
        mark, text, kind, wants_gradient, dims, *sizes = HEADER.unpack(
            bytes(header.tolist())
        )
        if mark != MARK:
            error = MismatchError(
                f"{label!r} was expected, but rank {src} makes another call"
            )
            transport.give_up(error)  # nobody knows what comes next
            raise error
        dtype, shape = getattr(torch, kind.rstrip(b"\0").decode()), sizes[:dims]
        flat = torch.empty(shape, dtype=dtype, device=transport.device).view(-1)
        transport.exchange([], [Receive(origin, flat, take)], timeout)
    found = text.rstrip(b"\0").decode(errors="replace")
    if found != label:
        raise MismatchError(
            f"rank {src} has sent {found!r}, but {label!r} was expected"
        )
    return flat.reshape(shape).to(device).requires_grad_(bool(wants_gradient))


def _member_number(transport: Transport, rank: int, name: str) -> int:
    others = {transport.world_ranks[i]: i for i in transport.others}
    if rank not in others:
        raise ValueError(
            f"{name} is {rank!r}, but the other ranks of the group are {[*others]}"
        )
    return others[rank]


class Sender:
    """A daemon thread that makes calls one by one, beside backward.

    A process that ends does not wait for it, as it would for a
    ``ThreadPoolExecutor(1)``: a rank that has failed would stay until its last message
    is taken.
    """

    def __init__(self):
        self._calls = SimpleQueue()
        Thread(
            target=_make, args=(self._calls,), name="communication", daemon=True
        ).start()

    def submit(self, function: Callable, *args: Any) -> Future:
        """Put a call at the end of the queue; return the future of its result."""
        future = Future()
        self._calls.put((future, function, args))
        return future

    def stop(self) -> None:
        """Let the thread end after the calls that are in the queue."""
        self._calls.put(None)


def _make(calls: SimpleQueue) -> None:
    while call := calls.get():
        future, function, args = call
        # False: it was cancelled while it waited
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
        # or what they hold would live until the next call
        del (call, future, function, args)
