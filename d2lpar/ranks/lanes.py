"""Lanes in shared memory: how messages travel between the ranks of one ``launch``.

A lane is a one-way path from one rank to another: two slots of a memory that both have
mapped, and two counting semaphores, of the free slots and of the full ones. It is the
bounded buffer of Dijkstra, "Cooperating sequential processes" (1965). A message is
copied once into a slot and read from there. No system call is needed unless a rank has
to sleep. A note takes a short message that follows it along in its slot. Notebook 04
measures lanes against gloo.
"""

import mmap
import os
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import permutations, zip_longest

import torch

from .transport import PeerError, Receive, Send, Sends, Transport, name_ranks, pieces_of

# process groups of a rank that can have lanes, in all; further ones send messages
CHANNELS = 4
SLOTS = 2  # of a lane: one is filled while the other is emptied
SLOT_BYTES = 2**20  # at most
ALIGNMENT = 64  # bytes: a message may begin at any multiple of it, whatever its dtype
# of a slot, for a note that takes a message along, and for a byte that says so
NOTE_BYTES = 64
SHORT_BYTES = 2**17  # of such a message, at most: longer ones gain nothing
# with smaller ones, which more than 28 ranks would have, nothing is won
MIN_SLOT_BYTES = 2**12
# all lanes together: two launches of 16 ranks fit into a container's 64 MB
LANE_BYTES = 24 * 2**20
TABLE_ROWS = 3
SPINS = 100  # times that a rank looks again before it sleeps
LOOK = 0.05  # seconds after which a sleeping rank looks whether its time is up
let_others_run = getattr(os, "sched_yield", partial(time.sleep, 0))


class _Lane:
    """A member's end of the lane to or from a peer: a sender waits for free slots."""

    def __init__(self, rank: int, slots: list[int], waits_for, announces):
        self.rank = rank  # of the peer
        self.slots = slots  # offsets in the memory
        self.acquire, self.release = waits_for.acquire, announces.release
        self.turn = 0  # messages so far
        self.ahead = False  # the first of what is sent next has gone along with a note
        # a receiver's: where a message lies that came along with a note, or 0
        self.held = 0

    def next_slot(self) -> int:
        """Return the offset of the slot that was waited for."""
        slot = self.slots[self.turn % SLOTS]
        self.turn += 1
        return slot


class Lanes(Transport):
    """A member's ends of the lanes to and from all others, in one memory channel."""

    def __init__(
        self,
        member: int,
        world_ranks: Sequence[int],
        memory: "SharedMemory",
        channel: int,
    ):
        super().__init__(member, world_ranks)
        self.memory, self.channel = memory, channel
        memory.used[channel] = True
        self.outgoing, self.incoming = {}, {}  # the lanes to and from each other member
        for i in self.others:
            me, peer = world_ranks[member], world_ranks[i]
            there, back = (channel, me, peer), (channel, peer, me)
            (free, full), (empty, filled) = (
                memory.semaphores[there],
                memory.semaphores[back],
            )
            self.outgoing[i] = _Lane(peer, memory.slots(*there), free, full)
            self.incoming[i] = _Lane(peer, memory.slots(*back), filled, empty)
        # Of every rank, for the others to read: for whom it waits (1 + rank, or 0 for
        # nobody), when it last looked around while it did (ns), and, once it has given
        # up, whose part it missed (bit r for rank r). The semaphores order what is in
        # the slots, on every processor, but not this: a rank may see an old entry,
        # which at worst names another one that is missing, too.
        self.waits_for, self.looked, self.missed = memory.table_of(channel)
        self.bytes, self.piece_bytes = memory.bytes, memory.slot_bytes - NOTE_BYTES
        self.short_bytes = min(SHORT_BYTES, self.piece_bytes)
        tensor = torch.frombuffer(memory.bytes, dtype=torch.uint8)
        self.view = lru_cache(maxsize=256)(partial(_view, tensor))

    def __del__(self):
        if not self.broken:  # else messages may still be under way
            self.memory.used[self.channel] = False

    def _tell(self, note: bytes, deadline: float, ahead: Sends) -> list[bytes]:
        for lane in self.incoming.values():
            if lane.held:  # nobody has taken it: plans differed
                lane.held = 0
                lane.release()
        notes, missing = [note] * len(self.world_ranks), []
        first = {dst: message for dst, message in reversed(ahead) if message.numel()}
        for i, lane in self.outgoing.items():
            if not self._wait(lane, deadline):
                missing.append(lane.rank)  # who else?
                continue
            slot = lane.next_slot()
            lane.ahead = i in first and first[i].nbytes <= self.short_bytes
            self.bytes[slot : slot + len(note) + 1] = note + bytes([lane.ahead])
            if lane.ahead:
                self.view(slot + NOTE_BYTES, first[i].numel(), first[i].dtype).copy_(
                    first[i]
                )
            lane.release()
        for i, lane in self.incoming.items():
            if not self._wait(lane, deadline):
                missing.append(lane.rank)
                continue
            slot = lane.next_slot()
            end = slot + len(note)
            notes[i] = bytes(self.bytes[slot:end])
            if self.bytes[end]:
                lane.held = slot + NOTE_BYTES
            else:
                lane.release()
        if missing:
            missing = sorted(set(missing))
            raise PeerError(f"{name_ranks(missing)} did not call in time", missing)
        return notes

    def _exchange(
        self, sends: list[Send], receives: list[Receive], deadline: float
    ) -> None:
        # Everyone sends a piece to each before it receives one from each, so that
        # nobody waits for a slot in a circle; and one piece is reduced while the next
        # is on its way.
        sending = self._rounds(self.outgoing, sends)
        receiving = self._rounds(self.incoming, receives)
        for leaving, arriving in zip_longest(sending, receiving, fillvalue=()):
            for lane, piece in leaving:
                if lane.ahead:
                    lane.ahead = False
                    continue
                slot = self._slot(lane, deadline)
                self.view(slot, piece.numel(), piece.dtype).copy_(piece)
                lane.release()
            for lane, piece, into in arriving:
                slot, lane.held = lane.held or self._slot(lane, deadline), 0
                into(piece, self.view(slot, piece.numel(), piece.dtype))
                lane.release()

    def _rounds(self, lanes: dict[int, _Lane], moves: list) -> list[list[tuple]]:
        """Cut messages into pieces that fit into a slot: a round has one per lane."""
        rounds, turns = [], dict.fromkeys(lanes, 0)
        for peer, message, *into in moves:
            for piece in pieces_of(message, self.piece_bytes):
                if turns[peer] == len(rounds):
                    rounds.append([])
                rounds[turns[peer]].append((lanes[peer], piece, *into))
                turns[peer] += 1
        return rounds

    def _slot(self, lane: _Lane, deadline: float) -> int:
        """Wait for the lane's next slot: free for a sender, or full for a receiver."""
        if self._wait(lane, deadline):
            return lane.next_slot()
        line = self._line(lane.rank)
        stuck = line[-1]
        # a circle: the one that has not looked around for longest
        if self.waits_for[stuck]:
            stuck = min(line, key=self.looked.__getitem__)
        raise PeerError(f"rank {stuck} did not do its part in time", [stuck])

    def _wait(self, lane: _Lane, deadline: float) -> bool:
        """Wait until there is a slot, or until the time is up: then it is False."""
        if lane.acquire(False):
            return True
        for _ in range(SPINS):
            let_others_run()
            if lane.acquire(False):
                return True
        me = self.world_ranks[self.member]
        while time.monotonic() < deadline:
            # another thread may have written meanwhile
            self.waits_for[me] = lane.rank + 1
            self.looked[me] = time.monotonic_ns()
            if lane.acquire(True, LOOK):
                self.waits_for[me] = 0
                return True
            if self.refusal:  # another thread of this rank has given up
                raise PeerError(self.refusal)
            self._check(self._line(lane.rank)[-1])
        return False  # and the table goes on to say for whom

    def _line(self, rank: int) -> list[int]:
        """Return ``rank``, the one that it waits for, and so on, but not this rank."""
        line = [self.world_ranks[self.member]]
        while rank not in line:
            line.append(rank)
            if self.waits_for[rank] and not self.missed[rank]:
                rank = self.waits_for[rank] - 1
        return line[1:]

    def look(self) -> None:
        """Raise PeerError where another rank has given up."""
        for i in self.others:
            self._check(self.world_ranks[i])

    def _check(self, rank: int) -> None:
        """Raise PeerError if ``rank`` has given up, and name whom it missed."""
        if not self.missed[rank]:
            return
        others = [self.world_ranks[i] for i in self.others]
        missed = [other for other in others if self.missed[rank] >> other & 1]
        if missed in ([], [rank]):
            raise PeerError(f"rank {rank} gave up: its own error says why", [rank])
        raise PeerError(
            f"{name_ranks(missed)} did not do its part, says rank {rank}", missed
        )

    def _announce(self, error: BaseException) -> None:
        me = self.world_ranks[self.member]
        self.missed[me] = sum(
            1 << rank for rank in getattr(error, "peers", ()) or (me,)
        )


def _view(
    memory: torch.Tensor, offset: int, numel: int, dtype: torch.dtype
) -> torch.Tensor:
    return memory[offset : offset + numel * dtype.itemsize].view(dtype)


class SharedMemory:
    """All ranks' lanes of one ``launch``: a file that all map, and the semaphores."""

    def __init__(self, path: str, world_size: int, semaphores: dict):
        self.path, self.world_size, self.semaphores = path, world_size, semaphores
        slots = CHANNELS * world_size * (world_size - 1) * SLOTS
        self.slot_bytes = min(SLOT_BYTES, LANE_BYTES // slots // ALIGNMENT * ALIGNMENT)
        self.table = slots * self.slot_bytes  # where it begins
        self.nbytes = self.table + 8 * CHANNELS * TABLE_ROWS * world_size
        self.used = [False] * CHANNELS  # by this rank

    @classmethod
    def create(cls, world_size: int, context) -> "SharedMemory | None":
        """Make file and semaphores; None for one rank, very many, or without room."""
        if world_size == 1:
            return None
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        memory = cls(os.path.join(folder, f"d2lpar-{uuid.uuid4().hex}"), world_size, {})
        if memory.slot_bytes < MIN_SLOT_BYTES:
            return None
        try:
            for channel in range(CHANNELS):
                for lane in permutations(range(world_size), 2):
                    pair = context.Semaphore(SLOTS), context.Semaphore(0)
                    memory.semaphores[(channel, *lane)] = pair
            with open(memory.path, "xb", opener=partial(os.open, mode=0o600)) as file:
                # Now: a rank that later wrote where no memory is left would die
                # (SIGBUS).
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, memory.nbytes)
                else:
                    file.write(bytes(memory.nbytes))
        except OSError:  # no room: semaphores take some in the same folder
            memory.remove()
            return None
        return memory

    def part_of(self, rank: int) -> "SharedMemory":
        """Return what a rank is handed: the same, with its own lanes' semaphores."""
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

    def is_free(self, channel: int, me: int, others: Sequence[int]) -> bool:
        """Say whether this rank does not use a channel, and all it sent was taken."""
        if self.used[channel]:
            return False
        for rank in others:
            empty, _ = self.semaphores[channel, me, rank]
            held = sum(empty.acquire(False) for _ in range(SLOTS))
            for _ in range(held):
                empty.release()
            if held < SLOTS:
                return False
        return True

    def slots(self, channel: int, src: int, dst: int) -> list[int]:
        """Return the offsets of the slots of the lane from ``src`` to ``dst``."""
        peers = self.world_size - 1  # no rank has a lane to itself
        lane = (channel * self.world_size + src) * peers + dst - (dst > src)
        return [(lane * SLOTS + i) * self.slot_bytes for i in range(SLOTS)]

    def table_of(self, channel: int) -> list[memoryview]:
        """Return the rows of the table: a number of each rank in each."""
        size = 8 * self.world_size
        begin = self.table + channel * TABLE_ROWS * size
        return [
            self.bytes[begin + i * size :][:size].cast("q") for i in range(TABLE_ROWS)
        ]
