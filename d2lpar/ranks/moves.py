"""A schedule as one member sees it: its sends and receives, and a tensor's messages.

Notebook 04 builds a small form of it.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import torch

from ..collectives.lists import part_of, reducer
from ..collectives.schedules import check_steps, num_chunks, steps_of
from .transport import Receive, Send, take


class Moves(NamedTuple):
    """One member's moves of a schedule, step by step: what it sends and receives."""

    name: str  # of the schedule, with a digest of all moves: two may have one name
    num_chunks: int  # into which the tensor is cut
    # [(destination, chunk), …], [(source, chunk, into), …]
    steps: list[tuple[list, list]]


@lru_cache(maxsize=1024)
def own_moves(schedule, k: int, member: int, op: str, *args) -> Moves:
    """Return the moves of one member."""
    steps = steps_of(schedule, k, *args)
    check_steps(steps, k)
    digest = blake2b(repr(steps).encode(), digest_size=4).hexdigest()
    name = getattr(schedule, "__qualname__", type(schedule).__qualname__)
    moves = Moves(f"schedule {name} ({digest})", num_chunks(steps), [])
    for step in steps:
        sends, receives = [], []
        for m in step:
            if m.src == member:
                sends.append((m.dst, m.chunk))
            if m.dst == member:
                into = reducer(op, m.src < member) if m.reduce else take
                receives.append((m.src, m.chunk, into))
        moves.steps.append((sends, receives))
    return moves


def messages_of(
    steps: Sequence[tuple], flat: torch.Tensor, bounds: Sequence[int] = ()
) -> list[tuple[list[Send], list[Receive]]]:
    """Return steps' messages: chunk c of ``flat`` is bounds[c] to bounds[c + 1]."""
    return [
        (
            [Send(dst, part_of(flat, chunk, bounds)) for dst, chunk in sends],
            [
                Receive(src, part_of(flat, chunk, bounds), into)
                for src, chunk, into in receives
            ],
        )
        for sends, receives in steps
    ]


@lru_cache(maxsize=1024)
def even_bounds(numel: int, n: int) -> list[int]:
    """Return where ``tensor_split`` cuts ``numel`` elements in ``n``, larger first."""
    each, larger = divmod(numel, n)
    return [i * each + min(i, larger) for i in range(n + 1)]
