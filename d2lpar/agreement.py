"""Agreement: before anything is sent, all ranks compare what they are about to do.

A rank's *plan* is a line of text; a digest of it, with the number of the call, is what travels.
Notebook 05 uses this file. Source: torch's ProcessGroupWrapper, which does the same under
TORCH_DISTRIBUTED_DEBUG=DETAIL.
"""

import struct
from functools import lru_cache
from hashlib import blake2b

import torch

from .checks import is_folded
from .schedules import Schedule
from .transport import Transport

NOTE = struct.Struct("<qq16s")  # number of the call, rows, digest of the plan
TEXT_BYTES = 256  # of the plan itself, which is sent only when plans differ


class MismatchError(RuntimeError):
    """The ranks were about to do different things. Nothing was sent, and the group is usable."""


def agree(transport: Transport, call: int, plan: str, rows: int, timeout: float) -> list[int]:
    """Return everyone's rows; raise MismatchError on all ranks unless all have the same plan."""
    notes = transport.tell(NOTE.pack(call, rows, _digest(plan)), timeout)
    if notes.count(notes[0]) == len(notes):  # as a rule, and quickly seen
        return [rows] * len(notes)
    calls, rows, digests = zip(*map(NOTE.unpack, notes), strict=True)
    if len(set(calls)) > 1 or len(set(digests)) > 1:
        text = plan.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        plans = [t.rstrip(b"\0").decode(errors="replace") for t in transport.tell(text, timeout)]
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
    return kind + " expanded" if is_expanded(tensor) else kind


@lru_cache(maxsize=1024)
def _kind(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def describe_schedule(schedule, k: int) -> str:
    """Name a schedule, with a digest of its moves: two functions may have the same name."""
    if not callable(schedule):
        return f"schedule {schedule!r}"
    name = getattr(schedule, "__qualname__", type(schedule).__qualname__)
    return f"schedule {name} ({_digest_of_moves(schedule, k)})"


@lru_cache(maxsize=1024)
def _digest_of_moves(schedule: Schedule, k: int) -> str:
    return blake2b(repr(schedule(k)).encode(), digest_size=4).hexdigest()


def is_expanded(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has one place of memory for several elements."""
    return not tensor.is_contiguous() and is_folded(tensor)
