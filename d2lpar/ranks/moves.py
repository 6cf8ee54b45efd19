"""A member's own moves of a schedule, and what they move: between ranks each makes only its own.

Notebook 05 uses this file.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from ..collectives.lists import part_of, reducer
from ..collectives.schedules import check_steps, num_chunks, steps_of
from .transport import Receive, Send, Transport, take


class Step(NamedTuple):
    """A member's own moves of one step: (destination, chunk), (source, chunk, into)."""

    sends: list[tuple]
    receives: list[tuple]


class Part(NamedTuple):
    """A member's part in a collective: its moves, and what they move."""

    steps: list[Step]
    flat: torch.Tensor  # the elements, as they are sent
    bounds: Sequence[int]  # chunk c is bounds[c] to bounds[c + 1]

    def sends(self, step: Step) -> list[Send]:
        """Return the messages that leave in a step."""
        return [Send(dst, part_of(self.flat, chunk, self.bounds)) for dst, chunk in step.sends]

    def receives(self, step: Step) -> list[Receive]:
        """Return the messages that come in a step."""
        return [
            Receive(src, part_of(self.flat, chunk, self.bounds), into)
            for src, chunk, into in step.receives
        ]


@lru_cache(maxsize=1024)
def own_moves(schedule, k: int, member: int, op: str, *args) -> tuple[list[Step], int]:
    """Return the moves of one member, step by step, and into how many chunks the tensor is cut."""
    steps = steps_of(schedule, k, *args)
    check_steps(steps, k)
    own = []
    for step in steps:
        sends = [(m.dst, m.chunk) for m in step if m.src == member]
        receives = [
            (m.src, m.chunk, reducer(op, m.src < member) if m.reduce else take)
            for m in step
            if m.dst == member
        ]
        own.append(Step(sends, receives))
    return own, num_chunks(steps)


@lru_cache(maxsize=1024)
def even_bounds(numel: int, n: int) -> list[int]:
    """Return where ``tensor_split`` cuts ``numel`` elements into ``n``: the first are larger."""
    each, larger = divmod(numel, n)
    return [i * each + min(i, larger) for i in range(n + 1)]


def make_moves(part: Part, transport: Transport, timeout: float) -> None:
    """Make all the moves of a member."""
    for step in part.steps:
        transport.exchange(part.sends(step), part.receives(step), timeout)
