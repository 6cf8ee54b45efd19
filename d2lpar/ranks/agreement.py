"""Agreement: before they send, all ranks compare what they will do: their *plans*.

Source: torch's ProcessGroupWrapper, which does this under
TORCH_DISTRIBUTED_DEBUG=DETAIL.
"""

import struct
from functools import lru_cache
from hashlib import blake2b

from .transport import MismatchError, PeerError, Sends, Transport, name_ranks

# of a note; as a float32 it is NaN, so that hardly any data look like it
MARK = b"d2\xff\x7f"
NOTE = struct.Struct("<4sIq16s")  # mark, number of the call, number, digest of the plan
TEXT_BYTES = 256  # of the plan itself, which is sent only when plans differ


def agree(
    transport: Transport,
    call: int,
    plan: str,
    number: int,
    timeout: float,
    ahead: Sends = (),
) -> list[int]:
    """Return every member's ``number``; MismatchError on all unless plans are equal.

    What went ``ahead`` is then dropped, unread. A rank that sends no note is a
    PeerError.
    """
    note = NOTE.pack(MARK, call % 2**32, number, _digest(plan))
    notes = transport.tell(note, timeout, ahead)
    if notes.count(note) == len(notes):  # quickly seen
        return [number] * len(notes)
    marks, calls, numbers, digests = zip(*map(NOTE.unpack, notes), strict=True)
    if strangers := [
        r for r, mark in zip(transport.world_ranks, marks, strict=True) if mark != MARK
    ]:
        what = "did not compare plans: is what was called there unchecked, or a send?"
        raise PeerError(
            f"{name_ranks(strangers)} {what} This rank's call: {plan}", strangers
        )
    if len(set(zip(calls, digests, strict=True))) == 1:
        return list(numbers)
    text = plan.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    texts = [
        t.rstrip(b"\0").decode(errors="replace") for t in transport.tell(text, timeout)
    ]
    lines = ["the ranks are about to do different things"]
    for rank, n, theirs in zip(transport.world_ranks, calls, texts, strict=True):
        lines.append(f"rank {rank}, call {n}: {theirs}")
    raise MismatchError("\n".join(lines))


@lru_cache(maxsize=1024)
def _digest(plan: str) -> bytes:
    return blake2b(plan.encode(), digest_size=16).digest()
