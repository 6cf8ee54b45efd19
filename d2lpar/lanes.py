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
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import permutations, zip_longest

import torch

from .transport import ALIGNMENT, PeerError, Receive, Send, Transport, name_ranks, pieces_of

CHANNELS = 4  # process groups of a rank that can have lanes, in all; further ones send messages
SLOTS = 2  # of a lane: one is filled while the other is emptied
SLOT_BYTES = 2**20  # at most
MIN_SLOT_BYTES = 2**12  # with smaller ones, which more than 32 ranks would have, nothing is won
LANE_BYTES = 32 * 2**20  # all lanes together: a container's /dev/shm may have no more than 64 MB
SPINS = 100  # times that a rank looks again before it sleeps
LOOK = 0.05  # seconds after which a sleeping rank looks whether its time is up


class _Lane:
    """A member's end of the lane to or from a peer: what it waits for, and what it then announces.

    A sender waits for free slots and announces full ones, a receiver the other way round.
    """

    def __init__(self, rank: int, slots: list[int], waits_for, announces):
        self.rank = rank  # of the peer
        self.slots = slots  # offsets in the memory
        self.acquire, self.release = waits_for.acquire, announces.release
        self.turn = 0  # messages so far


class Lanes(Transport):
    """A member's ends of the lanes to and from all others."""

    def __init__(self, member: int, ranks: Sequence[int], memory: "SharedMemory", channel: int):
        super().__init__(member, ranks)
        self.outgoing, self.incoming = {}, {}  # the lanes to and from each other member
        for i in self.others:
            there, back = (ranks[member], ranks[i]), (ranks[i], ranks[member])
            free, full = memory.semaphores[(channel, *there)]
            self.outgoing[i] = _Lane(ranks[i], memory.slots(channel, *there), free, full)
            free, full = memory.semaphores[(channel, *back)]
            self.incoming[i] = _Lane(ranks[i], memory.slots(channel, *back), full, free)
        self.waits_for = memory.waits_for(channel)  # by rank; 0: for nobody; else rank + 1
        self.bytes, self.slot_bytes = memory.bytes, memory.slot_bytes
        self.tensor = torch.frombuffer(memory.bytes, dtype=torch.uint8)
        self.view = lru_cache(maxsize=256)(self._view)

    def _tell(self, note: bytes, deadline: float) -> list[bytes]:
        notes, missing = [note] * len(self.ranks), set()
        for lane in self.outgoing.values():
            try:
                offset = self._begin(lane, deadline)
            except PeerError:  # who else?
                missing.add(lane.rank)
                continue
            self.bytes[offset : offset + len(note)] = note
            lane.release()
        for i, lane in self.incoming.items():
            try:
                offset = self._begin(lane, deadline)
            except PeerError:
                missing.add(lane.rank)
                continue
            notes[i] = bytes(self.bytes[offset : offset + len(note)])
            lane.release()
        if missing:
            raise PeerError(f"{name_ranks(sorted(missing))} did not call in time", sorted(missing))
        return notes

    def _exchange(self, sends: list[Send], receives: list[Receive], deadline: float) -> None:
        # Everyone sends a piece to each before it receives one from each, so that nobody waits for
        # a slot in a circle; and one piece is reduced while the next is on its way.
        sending = self._rounds(self.outgoing, sends)
        receiving = self._rounds(self.incoming, receives)
        for leaving, arriving in zip_longest(sending, receiving, fillvalue=()):
            for lane, piece in leaving:
                slot = self._begin(lane, deadline)
                self.view(slot, piece.numel(), piece.dtype).copy_(piece)
                lane.release()
            for lane, piece, into in arriving:
                slot = self._begin(lane, deadline)
                into(piece, self.view(slot, piece.numel(), piece.dtype))
                lane.release()

    def _rounds(self, lanes: dict[int, _Lane], moves: list) -> list[list[tuple]]:
        """Cut all messages into pieces that fit into a slot: a round has one for each lane.

        Where two members have several messages for each other in a step, what is reduced into one
        place may so come in another order than in the list. No schedule here has such steps.
        """
        rounds, turns = [], dict.fromkeys(lanes, 0)
        for peer, message, *into in moves:
            for piece in pieces_of(message, self.slot_bytes):
                if turns[peer] == len(rounds):
                    rounds.append([])
                rounds[turns[peer]].append((lanes[peer], piece, *into))
                turns[peer] += 1
        return rounds

    def _view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.tensor[offset : offset + numel * dtype.itemsize].view(dtype)

    def _begin(self, lane: _Lane, deadline: float) -> int:
        """Wait for the lane's next slot, free for its sender or full for its receiver."""
        if not lane.acquire(False):
            self._sleep(lane, deadline)
        slot = lane.slots[lane.turn % SLOTS]
        lane.turn += 1
        return slot

    def _sleep(self, lane: _Lane, deadline: float) -> None:
        for _ in range(SPINS):
            os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
            if lane.acquire(False):
                return
        me = self.ranks[self.member]
        self.waits_for[me] = lane.rank + 1
        while not lane.acquire(True, LOOK):
            self.waits_for[me] = lane.rank + 1  # another thread may have written meanwhile
            if time.monotonic() > deadline:
                raise self._missing(lane.rank)  # and the table goes on to say for whom
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
        """Make file and semaphores; None where they are of no use, or there is no room.

        They are of no use to a single rank, and to very many.

        ``context`` is multiprocessing's, whose processes the ranks will be.
        """
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        if world_size == 1 or shutil.disk_usage(folder).free < 2 * LANE_BYTES:
            return None  # a rank that fills a file system in memory would die of SIGBUS
        memory = cls(os.path.join(folder, f"d2lpar-{uuid.uuid4().hex}"), world_size, {})
        if memory.slot_bytes < MIN_SLOT_BYTES:
            return None
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
