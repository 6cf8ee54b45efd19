"""Workshop. How messages travel, by torch.distributed or in shared memory.

A schedule says *what* moves, a transport *how*; NCCL uses the same word. A transport
has one method, ``exchange``, which makes the moves of one step. ``Messages`` works
between any machines, ``Lanes`` between the ranks of one ``launch``.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count, product
from types import SimpleNamespace
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from ..collectives import write
from ..devices import record_message
from .lanes import Lanes, Memory

NOTE_BYTES = 256  # of a note, always: so its receiver knows the length


class PeerError(RuntimeError):
    """A rank was late or is gone; ``peers`` are those that the error names."""

    def __init__(self, message: str, peers: tuple[int, ...] = ()):
        super().__init__(message)
        self.peers = peers


class MismatchError(RuntimeError):
    """The ranks were about to do different things; ``plan`` is another one's."""

    def __init__(self, message: str, plan: str = ""):
        super().__init__(message)
        self.plan = plan


class BusyError(RuntimeError):
    """A call began while one of another thread was under way in the same group."""


class Messages:
    """torch.distributed's messages between the ranks of a process group.

    With the backend "cpu:gloo,cuda:nccl" tensors stay on the GPU, and notes go over
    gloo. We have run that with one GPU only: it follows torch's documentation.
    """

    def __init__(self, process_group: dist.ProcessGroup, number: int):
        self.process_group = ref(process_group)  # or it would never be freed
        self.ranks = dist.get_process_group_ranks(process_group)
        self.tag = 1 + number  # 0 is that of the caller's own dist.send
        backends = dist.get_backend_config(process_group)
        if "cpu:" not in backends:
            way_out = 'make it with the backend "cpu:gloo,cuda:nccl"'
            raise ValueError(f"the group is {backends}, without the CPU: {way_out}")
        self.has_nccl = "nccl" in backends

    def exchange(self, sends: list, receives: list, deadline: float) -> dict[int, str]:
        """Make a step's moves: sends (member, tensor), receives (member, part, op).

        Return the ranks that were late, and why.
        """
        late, arriving = {}, []
        for src, part, op in receives:
            if part.numel():
                landing = part if op is None else torch.empty_like(part)
                arriving.append((src, landing, part, op))
        # Receives first: when a connection breaks, gloo does not wake a sender.
        moves = [(dist.irecv, landing, src) for src, landing, *_ in arriving]
        moves += [(dist.isend, m, dst) for dst, m in sends if m.numel()]
        works = self.begin(moves, late)
        if late:
            return late
        for (_, _, peer), work in zip(moves, works):
            left = max(deadline - time.monotonic(), 0.01)
            if not late or left == 0.01:  # once one is gone, nobody waits for others
                with self.noting(late, peer):
                    work.wait(timedelta(seconds=left))
        for _, landing, part, op in arriving if not late else ():
            if op is not None:
                write(part, landing, op)
        return late

    def begin(self, moves: list, late: dict) -> list[dist.Work]:
        """Begin to send (``dist.isend``) or to receive each tensor, in order."""
        group, works = self.process_group(), []
        if moves and moves[0][1].is_cuda:  # NCCL needs the messages of a step together
            batch = [dist.P2POp(kind, t, self.ranks[i], group) for kind, t, i in moves]
            works = dist.batch_isend_irecv(batch)  # perhaps one work for all
            return works * (len(moves) // len(works))
        for kind, tensor, peer in moves:
            with self.noting(late, peer):
                works.append(kind(tensor, self.ranks[peer], group, self.tag))
        return works

    @contextmanager
    def noting(self, late: dict, peer: int) -> Iterator[None]:
        """Note in ``late`` that a member does not come, and why."""
        try:
            yield
        except RuntimeError as error:
            late[self.ranks[peer]] = str(error).splitlines()[0]


class Group:
    """Ranks that make their calls in one order: who they are, and what carries it all.

    Members are numbered from 0: ``ranks[i]`` is the rank of member i in the world.
    """

    place = None  # of its lanes, if it has some

    def __init__(self, process_group: dist.ProcessGroup, number: int = 0):
        self.messages = self.transport = Messages(process_group, number)
        self.ranks, self.me = self.messages.ranks, dist.get_rank(process_group)
        self.size = len(self.ranks)
        self.others = [i for i in range(self.size) if i != self.me]
        self.calls, self.context = 0, ""  # what plans say besides
        self.broken = ""  # why it can no longer be used
        self.numbers = count(1)  # of the groups that own_group makes of it
        ways = product(("send", "receive"), self.others)
        self.under_way = {way: threading.Lock() for way in ways}
        self.mine = [bytearray(NOTE_BYTES) for _ in self.ranks]  # notes to each member
        self.theirs = [bytearray(NOTE_BYTES) for _ in self.ranks]
        self.sent = [torch.frombuffer(note, dtype=torch.uint8) for note in self.mine]
        self.taken = [torch.frombuffer(note, dtype=torch.uint8) for note in self.theirs]

    def take_lanes(self, deadline: float) -> None:
        """Use lanes in a place that is free on all ranks, if there is any."""
        if here.memory is None or self.size == 1:
            return
        free = here.memory.free
        mine = {free.pop() for _ in range(len(free))}  # away from other threads
        notes = dict.fromkeys(self.others, " ".join(map(str, mine)))
        theirs = self.tell(notes, self.others, deadline).values()
        common = mine.intersection(*[map(int, note.split()) for note in theirs])
        if common:
            mine.remove(min(common))
            self.place = min(common)
            self.transport = Lanes(here.memory, self.place, self.ranks, self.me)
        free.update(mine)

    def __del__(self):
        if self.place is not None and not self.broken:  # its lanes are empty
            here.memory.free.add(self.place)

    @contextmanager
    def saying(self, context: str) -> Iterator[None]:
        """Add ``context`` to the plans of calls that are made inside."""
        self.context = context
        try:
            yield
        finally:
            self.context = ""

    @contextmanager
    def alone(self, name: str, *ways: str | tuple[str, int]) -> Iterator[None]:
        """Keep other threads of this rank out: they would take each other's messages.

        A way is "send" or "receive", to or from all members, or ("send", i) for one:
        other threads may meanwhile go other ways.
        """
        under_way = self.under_way.items()
        locks = [lock for way, lock in under_way if way in ways or way[0] in ways]
        taken = [lock for lock in locks if lock.acquire(blocking=False)]
        try:
            if len(taken) < len(locks) and not self.broken:  # else carry refuses
                raise BusyError(
                    f"{name} was called while a call of another thread was under way:"
                    " give each thread its own group, by ranks.own_group()"
                )
            yield
        finally:
            for lock in taken:
                lock.release()

    def deadline(self, timeout: float | None) -> float:
        """Return until when a call may take that begins now."""
        seconds = here.timeout if timeout is None else timeout
        if not seconds > 0:
            raise ValueError(f"timeout must be a number of seconds, not {timeout!r}")
        return time.monotonic() + min(seconds, 1e6)

    def member(self, rank: int) -> int:
        """Return the number that another rank of the world has in this group."""
        others = [self.ranks[i] for i in self.others]
        if rank not in others:
            raise ValueError(f"rank {rank!r} is none of the group's others, {others}")
        return self.ranks.index(rank)

    def tell(self, notes: dict[int, str], senders: list[int], deadline: float) -> dict:
        """Give ``notes[i]`` to member i; return the notes of the senders."""
        for i, note in notes.items():
            self.mine[i][:] = note.encode()[:NOTE_BYTES].ljust(NOTE_BYTES)
        sends = [(i, self.sent[i]) for i in notes]
        receives = [(i, self.taken[i], None) for i in senders]
        self.carry(sends, receives, deadline, "did not call in time, or ended")
        return {i: self.theirs[i].decode(errors="replace").rstrip() for i in senders}

    def exchange(self, sends: list, receives: list, deadline: float) -> None:
        """Make a step's moves: sends (member, tensor), receives (member, part, op)."""
        for dst, message in sends:
            record_message(message, self.ranks[self.me], self.ranks[dst])
        what = "did not take part in time, ended, or waited for another"
        self.carry(sends, receives, deadline, what)

    def carry(self, sends: list, receives: list, deadline: float, what: str) -> None:
        """Let the transport make moves; after an error nobody knows what is sent."""
        if self.broken:
            raise PeerError(f"the group can no longer be used since: {self.broken}")
        try:
            if late := self.transport.exchange(sends, receives, deadline):
                names = sorted(late)
                who = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, names))}"
                raise PeerError(f"{who} {what} ({late[names[0]]})", tuple(names))
        except BaseException as error:
            self.broken = self.broken or f"{type(error).__name__}: {error}"
            raise


# What this process has for all of its groups, and the seconds that a call may take
here = SimpleNamespace(memory=None, timeout=300.0, groups=WeakKeyDictionary())


def prepare(memory: Memory | None, timeout: float) -> None:
    """Let groups have lanes in ``memory``, and calls a time limit: on all ranks."""
    here.memory, here.timeout = memory, timeout
    group_of()


def group_of(
    group: Group | dist.ProcessGroup | None = None, timeout: float | None = None
) -> Group:
    """Return what this rank knows of a group, by default of all ranks.

    The first call in a group must be made by all of its ranks: they look for lanes.
    """
    if isinstance(group, Group):
        return group
    check_group(group)
    process_group = group or dist.group.WORLD
    if process_group not in here.groups:
        group = Group(process_group)
        deadline = group.deadline(timeout)
        with group.alone("the first call", "send", "receive"):
            if here.groups.setdefault(process_group, group) is group:
                group.take_lanes(deadline)
    return here.groups[process_group]


def check_group(group) -> None:
    """Raise ValueError unless there is such a group, and this rank is a member."""
    if not dist.is_initialized():
        raise ValueError(
            "there is no process group: call this inside launch or under torchrun"
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is no member of the group")
    if not isinstance(group, dist.ProcessGroup | None):
        raise TypeError(f"group is {group!r}, and no group as dist.new_group makes it")


def own_group(group: Group | dist.ProcessGroup | None = None) -> Group:
    """Return the same ranks once more, for another thread: on all ranks, in one order.

    Its calls have an order of their own, and lanes or messages of their own. (But over
    gloo, all that the ranks share ends with a call that is late.)
    """
    group = group_of(group)
    process_group = group.messages.process_group()
    if group.messages.has_nccl:  # whose messages have no tags
        process_group = dist.new_group(group.ranks, use_local_synchronization=True)
    own = Group(process_group, next(group.numbers))
    own.numbers = group.numbers
    if group.transport is not group.messages:
        own.take_lanes(own.deadline(None))
    return own


def use_messages(group: Group | dist.ProcessGroup | None = None) -> None:
    """Let a group send messages, not use lanes: on all of its ranks."""
    group = group_of(group)
    group.transport = group.messages
