"""Lanes in shared memory: how messages travel between the ranks of one ``launch``.

A lane is a one-way path from one rank to another: two slots of a memory that both have mapped, and
two counting semaphores that say how many slots are free and how many are full. It is the bounded
buffer of Dijkstra, "Cooperating sequential processes" (1965). A message is copied once into a slot
and read from there; no system call copies it, and none is made as long as nobody has to sleep.
Notebook 05 measures it against gloo.
"""

import mmap
import os
import shutil
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import permutations

import torch

from .transport import ALIGNMENT, PeerError, Receive, Send, Transport, name_ranks, pieces_of

CHANNELS = 4  # process groups of a rank that can have lanes; further ones send messages
SLOTS = 2  # of a lane: one is filled while the other is emptied
SLOT_BYTES = 2**20  # at most
LANE_BYTES = 32 * 2**20  # all lanes together: a container's /dev/shm may have no more than 64 MB
SPINS = 100  # times that a rank looks again before it sleeps
LOOK = 0.05  # seconds after which a sleeping rank looks whether its time is up


class Lanes(Transport):
    """A member's ends of the lanes to and from all others.

    ``semaphores[src, dst]`` is the pair (free, full) of a lane; ``slots[src, dst]`` are the offsets
    of its slots.
    """

    def __init__(self, member: int, ranks: Sequence[int], memory: "SharedMemory", channel: int):
        super().__init__(member, ranks)
        self.slots, self.semaphores = {}, {}
        for i in self.others:
            for src, dst in ((member, i), (i, member)):
                lane = ranks[src], ranks[dst]
                self.slots[src, dst] = memory.slots(channel, *lane)
                self.semaphores[src, dst] = memory.semaphores[(channel, *lane)]
        self.waits_for = memory.waits_for(channel)  # by rank; 0: for nobody; else rank + 1
        self.bytes, self.slot_bytes = memory.bytes, memory.slot_bytes
        self.tensor = torch.frombuffer(memory.bytes, dtype=torch.uint8)
        self.turns = dict.fromkeys(self.slots, 0)  # messages so far, of each lane
        self.view = lru_cache(maxsize=256)(self._view)

    def _tell(self, note: bytes, deadline: float) -> list[bytes]:
        notes, missing = [note] * len(self.ranks), set()
        for i in self.others:
            try:
                offset = self._begin(self.member, i, deadline)
            except PeerError:  # who else?
                missing.add(self.ranks[i])
                continue
            self.bytes[offset : offset + len(note)] = note
            self.semaphores[self.member, i][1].release()
        for i in self.others:
            try:
                offset = self._begin(i, self.member, deadline)
            except PeerError:
                missing.add(self.ranks[i])
                continue
            notes[i] = bytes(self.bytes[offset : offset + len(note)])
            self.semaphores[i, self.member][0].release()
        if missing:
            raise PeerError(f"{name_ranks(sorted(missing))} did not call in time", sorted(missing))
        return notes

    def _exchange(self, sends: list[Send], receives: list[Receive], deadline: float) -> None:
        # Everyone sends a piece to each before it receives one from each, so that nobody waits for
        # a slot in a circle; and one piece is reduced while the next is on its way.
        outgoing, incoming = defaultdict(list), defaultdict(list)
        for dst, message in sends:
            outgoing[dst] += pieces_of(message, self.slot_bytes)
        for src, part, into in receives:
            incoming[src] += [(piece, into) for piece in pieces_of(part, self.slot_bytes)]
        for i in range(max(map(len, [*outgoing.values(), *incoming.values()]), default=0)):
            for dst, pieces in outgoing.items():
                if i < len(pieces):
                    offset = self._begin(self.member, dst, deadline)
                    self.view(offset, pieces[i].numel(), pieces[i].dtype).copy_(pieces[i])
                    self.semaphores[self.member, dst][1].release()
            for src, pieces in incoming.items():
                if i < len(pieces):
                    piece, into = pieces[i]
                    offset = self._begin(src, self.member, deadline)
                    into(piece, self.view(offset, piece.numel(), piece.dtype))
                    self.semaphores[src, self.member][0].release()

    def _view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.tensor[offset : offset + numel * dtype.itemsize].view(dtype)

    def _begin(self, src: int, dst: int, deadline: float) -> int:
        """Wait for the lane's next slot, free for its sender or full for its receiver."""
        lane = src, dst
        semaphore = self.semaphores[lane][dst == self.member]
        if not semaphore.acquire(False):
            self._sleep(semaphore, dst if src == self.member else src, deadline)
        turn = self.turns[lane]
        self.turns[lane] = turn + 1
        return self.slots[lane][turn % SLOTS]

    def _sleep(self, semaphore, peer: int, deadline: float) -> None:
        for _ in range(SPINS):
            os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
            if semaphore.acquire(False):
                return
        me = self.ranks[self.member]
        self.waits_for[me] = self.ranks[peer] + 1
        while not semaphore.acquire(True, LOOK):
            if time.monotonic() > deadline:
                raise self._missing(self.ranks[peer])  # and the table goes on to say for whom
        self.waits_for[me] = 0

    def _missing(self, rank: int) -> PeerError:
        """Name the one that is waited for, or whom that one waits for in its turn, and so on."""
        chain = [self.ranks[self.member]]
        while rank not in chain and self.waits_for[rank]:
            chain.append(rank)
            rank = self.waits_for[rank] - 1
        return PeerError(f"rank {rank} did not do its part in time", [rank])


class SharedMemory:
    """The lanes between all ranks of one ``launch``: a file that all map, and the semaphores.

    Behind the slots lies a table in which a rank that sleeps writes for whom it waits.
    """

    def __init__(self, path: str, world_size: int, semaphores: dict):
        self.path, self.world_size, self.semaphores = path, world_size, semaphores
        slots = CHANNELS * world_size * (world_size - 1) * SLOTS
        self.slot_bytes = min(SLOT_BYTES, LANE_BYTES // slots // ALIGNMENT * ALIGNMENT)
        self.table = CHANNELS * world_size**2 * SLOTS * self.slot_bytes  # the diagonal stays empty
        self.used = [True] + [False] * (CHANNELS - 1)  # channel 0 is the default group's

    @classmethod
    def create(cls, world_size: int, context) -> "SharedMemory | None":
        """Make file and semaphores; None where they are of no use (one rank) or there is no room.

        ``context`` is multiprocessing's, whose processes the ranks will be.
        """
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        if world_size == 1 or shutil.disk_usage(folder).free < 2 * LANE_BYTES:
            return None  # a rank that fills a file system in memory would die of SIGBUS
        memory = cls(os.path.join(folder, f"d2lpar-{uuid.uuid4().hex}"), world_size, {})
        try:
            for channel in range(CHANNELS):
                for lane in permutations(range(world_size), 2):
                    pair = context.Semaphore(SLOTS), context.Semaphore(0)
                    memory.semaphores[(channel, *lane)] = pair
            with open(memory.path, "xb") as file:
                file.truncate(memory.table + 8 * CHANNELS * world_size)
        except OSError:  # semaphores take room in the same folder
            memory.remove()
            return None
        return memory

    def part_of(self, rank: int) -> "SharedMemory":
        """Return what is handed to a rank: the same, with the semaphores of its own lanes."""
        own = {lane: pair for lane, pair in self.semaphores.items() if rank in lane[1:]}
        return SharedMemory(self.path, self.world_size, own)

    def open(self) -> None:
        """Map the file: what a rank does, once."""
        with open(self.path, "r+b") as file:
            self.bytes = memoryview(mmap.mmap(file.fileno(), 0))

    def remove(self) -> None:
        """Take the file's name away; the memory is freed once no rank has it mapped."""
        with suppress(OSError):
            os.unlink(self.path)

    def slots(self, channel: int, src: int, dst: int) -> list[int]:
        """Return the offsets of the slots of the lane from ``src`` to ``dst``."""
        lane = (channel * self.world_size + src) * self.world_size + dst
        return [(lane * SLOTS + i) * self.slot_bytes for i in range(SLOTS)]

    def waits_for(self, channel: int) -> memoryview:
        """Return the row of the table: 1 + the rank for which each rank waits, or 0."""
        row = self.table + 8 * self.world_size * channel
        return self.bytes[row : row + 8 * self.world_size].cast("q")
