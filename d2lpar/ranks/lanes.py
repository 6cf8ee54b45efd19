"""Workshop. Lanes in shared memory, between the ranks of one ``launch``.

A lane is a one-way path from one rank to another: two slots of a memory that both have,
and two counting semaphores, of the free slots and of the full ones. It is the bounded
buffer of Dijkstra, "Cooperating sequential processes" (1965). A message is copied once
into a slot and read from there; the system is needed only where a rank has to sleep.
"""

import mmap
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import torch

from ..collectives import write

GROUPS = 8  # of a rank that can have lanes; further ones send messages
MAX_RANKS = 16  # of a launch with lanes: each pair of ranks costs semaphores
SLOTS = 2  # of a lane: one is filled while the other is emptied
SLOT_BYTES = 2**18
LOOKS = 100  # that a rank takes before it sleeps
let_others_run = getattr(os, "sched_yield", lambda: time.sleep(0))


class Memory:
    """The slots and semaphores of all lanes of a launch, made before it forks ranks.

    They have no names, so nothing can be left behind. Only slots in use take room.
    """

    def __init__(self, world_size: int):
        self.world_size, self.free = world_size, set(range(GROUPS))
        lanes = GROUPS * world_size**2
        memory = mmap.mmap(-1, lanes * SLOTS * SLOT_BYTES)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        semaphore = multiprocessing.get_context("fork").Semaphore
        self.semaphores = [(semaphore(SLOTS), semaphore(0)) for _ in range(lanes)]

    @classmethod
    def create(cls, world_size: int) -> "Memory | None":
        """Return a memory; None for one rank, for many, or if the system refuses."""
        try:
            return cls(world_size) if 1 < world_size <= MAX_RANKS else None
        except OSError:
            return None


class Lane:
    """One rank's end of a lane: its slots in turn, what it awaits and announces."""

    def __init__(self, memory: Memory, place: int, src: int, dst: int, sends: bool):
        number = (place * memory.world_size + src) * memory.world_size + dst
        self.slots = [(number * SLOTS + i) * SLOT_BYTES for i in range(SLOTS)]
        free, full = memory.semaphores[number]
        self.peer, self.sends = dst if sends else src, sends
        self.acquire = free.acquire if sends else full.acquire
        self.release = full.release if sends else free.release
        self.turn = 0

    def slot(self, deadline: float) -> int | None:
        """Wait for the next slot, and return where it begins; None if time is up."""
        if not self.acquire(False):
            for _ in range(LOOKS):
                let_others_run()
                if self.acquire(False):
                    break
            else:
                if not self.acquire(True, max(deadline - time.monotonic(), 0)):
                    return None
        self.turn += 1
        return self.slots[self.turn % SLOTS]


class Lanes:
    """A rank's ends of the lanes to and from the other ranks of a group."""

    has_nccl = False  # tensors must lie on the CPU

    def __init__(self, memory: Memory, place: int, ranks: Sequence[int], me: int):
        others = {i: rank for i, rank in enumerate(ranks) if i != me}
        self.outgoing, self.incoming = {}, {}
        for i, rank in others.items():
            self.outgoing[i] = Lane(memory, place, ranks[me], rank, sends=True)
            self.incoming[i] = Lane(memory, place, rank, ranks[me], sends=False)

        @lru_cache(maxsize=256)  # the same places come again and again
        def view(begin: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
            return memory.bytes[begin : begin + numel * dtype.itemsize].view(dtype)

        self.view = view

    def exchange(self, sends: list, receives: list, deadline: float) -> dict[int, str]:
        """Make a step's moves: sends (member, tensor), receives (member, part, op).

        Return the ranks that were late, and why. In each round everyone puts a piece
        into its lanes before it takes one from them, so that no circle of ranks waits.
        """
        late, pieces = {}, defaultdict(list)
        for dst, message in sends:
            for piece in pieces_of(message, SLOT_BYTES):
                pieces[self.outgoing[dst]].append((piece, None))
        for src, part, op in receives:
            for piece in pieces_of(part, SLOT_BYTES):
                pieces[self.incoming[src]].append((piece, op))
        for i in range(max(map(len, pieces.values()), default=0)):
            for lane in [lane for lane, own in pieces.items() if i < len(own)]:
                begin, (piece, op) = lane.slot(deadline), pieces[lane][i]
                if begin is None:
                    late[lane.peer] = "time is up"
                    continue
                slot = self.view(begin, piece.numel(), piece.dtype)
                if lane.sends:
                    slot.copy_(piece)
                else:
                    write(piece, slot, op)
                lane.release()
            if late:
                break
        return late


def pieces_of(tensor: torch.Tensor, nbytes: int) -> Sequence[torch.Tensor]:
    """Cut a flat tensor into pieces of at most ``nbytes``; an empty one gives none."""
    if tensor.nbytes <= nbytes:
        return (tensor,) if tensor.numel() else ()
    return tensor.split(nbytes // tensor.itemsize)
