"""Agreement: before anything is sent, all ranks compare what they are about to do.

A rank's *plan* is a line of text; a digest of it, with the number of the call, is what travels.
Notebook 05 uses this file. Source: torch's ProcessGroupWrapper, which does the same under
TORCH_DISTRIBUTED_DEBUG=DETAIL.
"""

import struct
from collections.abc import Hashable, Sequence
from functools import lru_cache
from hashlib import blake2b

import torch

from ..collectives.lists import is_expanded
from ..collectives.schedules import Schedule, steps_of
from .transport import PeerError, Send, Transport, name_ranks

MARK = b"d2\xff\x7f"  # of a note; as a float32 it is NaN, so that hardly any data look like it
NOTE = struct.Struct("<4sIq16s")  # mark, number of the call, rows, digest of the plan
TEXT_BYTES = 256  # of the plan itself, which is sent only when plans differ


class MismatchError(RuntimeError):
    """The ranks were about to do different things.

    If that was a collective, nobody has read a message, and the group is usable; for what
    ``receive`` finds, see there.
    """


def agree(
    transport: Transport,
    call: int,
    plan: str,
    rows: int,
    timeout: float,
    ahead: Sequence[Send] | None = None,
) -> list[int]:
    """Return everyone's rows; raise MismatchError on all ranks unless all have the same plan.

    What went ``ahead`` with the notes (see ``Transport.tell``) is then dropped by all, unread.
    Raises PeerError too: see ``Transport.tell``, and where a rank sends something else than a note.
    """
    with transport.guard():
        notes = transport.tell(NOTE.pack(MARK, call % 2**32, rows, _digest(plan)), timeout, ahead)
    if notes.count(notes[0]) == len(notes):  # as a rule, and quickly seen
        return [rows] * len(notes)
    marks, calls, rows, digests = zip(*map(NOTE.unpack, notes), strict=True)
    if strangers := [r for r, mark in zip(transport.ranks, marks, strict=True) if mark != MARK]:
        with transport.guard():
            what = "did not compare plans: is what was called there unchecked, or a send?"
            raise PeerError(f"{name_ranks(strangers)} {what} This rank's call: {plan}", strangers)
    if len(set(calls)) > 1 or len(set(digests)) > 1:
        text = plan.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        with transport.guard():
            texts = transport.tell(text, timeout)
        plans = [text.rstrip(b"\0").decode(errors="replace") for text in texts]
        who = [
            f"rank {r}, call {n}: {p}"
            for r, n, p in zip(transport.ranks, calls, plans, strict=True)
        ]
        raise MismatchError("the ranks are about to do different things\n" + "\n".join(who))
    return list(rows)


@lru_cache(maxsize=1024)
def _digest(plan: str) -> bytes:
    return blake2b(plan.encode(), digest_size=16).digest()


def describe_tensor(tensor, first: int = 0) -> str:
    """Say dtype and shape, without an error for what is no tensor: that comes after the check."""
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    kind = _kind(tensor.dtype, tensor.shape[first:])
    if tensor.requires_grad and torch.is_grad_enabled():
        kind += " that requires gradients"
    if tensor.is_meta:
        return kind + " on meta"
    if tensor.layout is not torch.strided:
        return f"{kind} with layout {tensor.layout}"
    return kind + " expanded" if is_expanded(tensor) else kind


@lru_cache(maxsize=1024)
def _kind(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def describe_schedule(schedule, k: int) -> str:
    """Name a schedule, with a digest of its moves: two functions may have the same name."""
    if not callable(schedule):
        return f"schedule {schedule!r}"
    if not isinstance(schedule, Hashable):
        kind = type(schedule).__name__
        raise TypeError(f"{kind}, a schedule, is not hashable: make it @dataclass(frozen=True)")
    name = getattr(schedule, "__qualname__", type(schedule).__qualname__)
    return f"schedule {name} ({_digest_of_moves(schedule, k)})"


@lru_cache(maxsize=1024)
def _digest_of_moves(schedule: Schedule, k: int) -> str:
    return blake2b(repr(steps_of(schedule, k)).encode(), digest_size=4).hexdigest()
