"""How a message travels between ranks: here by torch.distributed's send and receive.

A schedule says *what* moves, a transport *how*; NCCL uses the same word. A transport does two
things for a rank: ``exchange`` makes all the moves of one step, and ``tell`` gives every other rank
a short note and returns theirs. ``Messages`` works in every process group, on any number of
machines; ``lanes`` has another one, for ranks that share a memory. Notebook 05 measures both.
"""

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ..devices import record_message

# Over messages a chunk travels in pieces, and one is reduced while others come. Pieces of 512 kB
# were as good between two ranks of one machine, and 6 % slower between four.
PIECE_BYTES = 2**21
ALIGNMENT = 64  # bytes: a message may begin at any multiple of it, whatever its dtype
BOTH = ("send", "receive")  # directions of a collective
NUM_TAGS = 3
DATA, NOTES, END = range(NUM_TAGS)  # tags: what is sent under one is never received under another

take = torch.Tensor.copy_  # what a receiver does with a message that it does not reduce


class PeerError(RuntimeError):
    """A rank did not do its part in time, gave up or is gone. ``ranks`` are those that it names."""

    def __init__(self, message: str, ranks: Sequence[int] = ()):
        super().__init__(message)
        self.ranks = tuple(ranks)


class BusyError(RuntimeError):
    """Two threads of a rank called one group at the same time. It is of no more use."""


class Send(NamedTuple):
    """``message``, a contiguous tensor, goes to member ``dst``."""

    dst: int
    message: torch.Tensor


class Receive(NamedTuple):
    """What comes from member ``src`` goes ``into(part, message)``: ``take``, or a reducer."""

    src: int
    part: torch.Tensor
    into: Callable


class Transport:
    """What all transports share: who the members are, and what ends the use of a group.

    Members of a group are numbered from 0; ``ranks[member]`` is a member's rank in the world, by
    which errors name it. A collective is a ``call`` that agrees first and then makes its moves.
    What it tells and exchanges it does inside a ``guard``: where that fails, nobody knows which
    messages are still under way. ``broken`` then holds what happened, and every later call says so.
    """

    device = torch.device("cpu")  # where notes must lie

    def __init__(self, member: int, ranks: Sequence[int]):
        self.member, self.ranks = member, tuple(ranks)
        self.others = [i for i in range(len(ranks)) if i != member]
        self.broken = ""
        self.under_way: dict[str, _Call] = {}  # direction -> call
        self.refusal = ""  # what a thread was told that called while another one's was under way

    def home(self, tensor: torch.Tensor) -> torch.device:
        """Return where a message of the elements of ``tensor`` must lie."""
        return self.device

    def call(self, words: str, *directions: str) -> "_Call":
        """Make one call (``with``), described by ``words``, while no other thread makes one.

        Two at once would take each other's messages. To let the second one wait would not help: on
        another rank it may be the first. So the second one is refused, and the first one fails too,
        as it may have met a rank's second. A thread may send while another one receives:
        ``directions`` are then one of "send" and "receive", else both.

        Raises:
            BusyError: naming both threads and what they call.
        """
        return _Call(self, words, directions or BOTH)

    def guard(self) -> "_Guard":
        """Do (``with``) what others rely on: after an error in it this rank gives the group up."""
        return _Guard(self)

    def check_use(self) -> None:
        """Raise PeerError if this rank has given the group up."""
        if self.broken:
            raise PeerError(f"the group is of no more use since an earlier call: {self.broken}")

    def look(self) -> None:
        """Raise PeerError where it can be seen that another rank has given up."""

    def give_up(self, error: BaseException) -> None:
        """Refuse all later calls, and let the others know: they would wait for what never comes."""
        if not self.broken:
            self.broken = f"{type(error).__name__}: {error}"
            self._announce(error)

    def tell(self, note: bytes, timeout: float, ahead: Sequence[Send] | None = None) -> list[bytes]:
        """Give ``note`` to all other members; return everyone's, in order: all of one length.

        Nobody returns before all have called, so this is a barrier too. ``ahead`` is what this rank
        sends in the exchange that comes next, an empty list if it only receives: a transport may
        take some of it along. None: no exchange comes next.

        Raises:
            PeerError: naming all who did not call within ``timeout`` seconds, or are gone.
        """
        return self._tell(note, time.monotonic() + timeout, ahead)

    def exchange(self, sends: list[Send], receives: list[Receive], timeout: float) -> None:
        """Make the moves of one step; return when the parts are written and the messages sent.

        Where a message lies that is sent in the same step, nothing may be received but another one
        of the same length from the same member, to be reduced: an exchange of the two.

        Raises:
            PeerError: naming the rank that did not do its part within ``timeout`` seconds.
        """
        for dst, message in sends:
            record_message(message, self.ranks[self.member], self.ranks[dst])
        self._exchange(sends, receives, time.monotonic() + timeout)


class _Guard:
    """See ``Transport.guard``."""

    def __init__(self, transport: Transport):
        self.transport = transport

    def __enter__(self) -> None:
        self.transport.check_use()

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        if error is not None:
            self.transport.give_up(error)


class _Call:
    """See ``Transport.call``."""

    def __init__(self, transport: Transport, words: str, directions: Sequence[str]):
        self.transport, self.words, self.directions = transport, words, directions
        self.thread = threading.get_ident()

    def __enter__(self) -> None:
        self.transport.check_use()
        under_way = self.transport.under_way
        for n, direction in enumerate(self.directions):
            first = under_way.setdefault(direction, self)  # looks and enters in one
            if first is not self:
                for entered in self.directions[:n]:
                    del under_way[entered]
                self._refuse(first)

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        transport = self.transport
        for direction in self.directions:
            del transport.under_way[direction]
        if transport.refusal:
            raise BusyError(transport.refusal)
        if error is None and self.directions is BOTH:
            transport.look()

    def _refuse(self, first: "_Call") -> NoReturn:
        names = {thread.ident: repr(thread.name) for thread in threading.enumerate()}
        self.transport.refusal = (
            f"thread {names.get(self.thread)} called {self.words} while {first.words} of thread "
            f"{names.get(first.thread)} was under way: give each thread a group of its own"
        )
        error = BusyError(self.transport.refusal)
        self.transport.give_up(error)
        raise error


Work = tuple[list[int], dist.Work]  # what is under way, and the ranks that it is about


class Messages(Transport):
    """torch.distributed's point-to-point messages, in the CPU's memory: over gloo, as a rule.

    Each one is started and waited for alone, so that a failure names its rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, line: int = 0, groups_own: Transport | None = None
    ):
        super().__init__(dist.get_rank(group), dist.get_process_group_ranks(group))
        self._group = weakref.ref(group)  # what is kept for a group must not keep it
        self.line = line  # messages of different lines do not meet
        self.groups_own = groups_own  # the transport whose connections a further line shares
        self.staging = torch.empty(0, dtype=torch.uint8)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, which someone else must keep."""
        return self._group()

    def _tell(self, note: bytes, deadline: float, ahead: Sequence[Send] | None) -> list[bytes]:
        mine = torch.frombuffer(bytearray(note), dtype=torch.uint8).to(self.device)
        theirs = mine.repeat(len(self.ranks), 1)
        moves = [(dist.isend, mine, i) for i in self.others]
        moves += [(dist.irecv, theirs[i], i) for i in self.others]
        works = self._post(moves, NOTES)
        # Receives first: when a connection breaks, gloo does not wake who is in the midst of a send
        self._wait(works[::-1], deadline)
        return [row.numpy().tobytes() for row in theirs.cpu()]

    def _exchange(self, sends: list[Send], receives: list[Receive], deadline: float) -> None:
        leaving = defaultdict(list)  # by address: a place is sent before it is reduced into
        for dst, message in sends:
            for piece in pieces_of(message, PIECE_BYTES):
                leaving[piece.data_ptr()] += self._post([(dist.isend, piece, dst)])
        arriving = []  # in pieces, so that one is reduced while the next is on its way
        for (src, part, into), landing in zip(receives, self._landings(receives), strict=True):
            places, pieces = pieces_of(part, PIECE_BYTES), pieces_of(landing, PIECE_BYTES)
            for place, piece in zip(places, pieces, strict=True):
                arriving.append((self._post([(dist.irecv, piece, src)]), piece, place, into))
        for works, piece, place, into in arriving:
            self._wait(works, deadline)
            if into is not take:
                self._wait(leaving.pop(place.data_ptr(), []), deadline)
                into(place, piece)
        self._wait(list(chain(*leaving.values())), deadline)

    def _landings(self, receives: list[Receive]) -> list[torch.Tensor]:
        """Return where each message arrives: in its place, or beside it if it is to be reduced.

        The memory beside is kept: new pages would cost as much as the reduction.
        """
        reduced = [part for _, part, into in receives if into is not take]
        nbytes = sum(_aligned(part.nbytes) for part in reduced)
        if reduced and (nbytes > self.staging.nbytes or self.staging.device != reduced[0].device):
            self.staging = torch.empty(nbytes, dtype=torch.uint8, device=reduced[0].device)
        landings, offset = [], 0
        for _, part, into in receives:
            if into is take:
                landings.append(part)
            else:
                landings.append(self.staging[offset : offset + part.nbytes].view(part.dtype))
                offset += _aligned(part.nbytes)
        return landings

    def _post(self, moves: list[tuple[Callable, torch.Tensor, int]], tag: int = DATA) -> list[Work]:
        """Start to send (``dist.isend``) or receive each tensor, to or from a member."""
        tag += NUM_TAGS * self.line
        works = []
        for kind, tensor, peer in moves:
            try:
                works.append(([self.ranks[peer]], kind(tensor, self.ranks[peer], self.group, tag)))
            except RuntimeError as error:
                raise _gone([self.ranks[peer]], error) from None
        return works

    def _wait(self, works: list[Work], deadline: float) -> None:
        """Wait for all ``works``. Name the first rank that is gone, or all that are late."""
        missing, reason = [], None
        for peers, work in works:
            left = min(max(deadline - time.monotonic(), 0.01), 1e6)  # a timedelta must end
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                missing += peers
                reason = reason or error
                if time.monotonic() < deadline:
                    break
        if missing:
            raise _gone(missing, reason)

    def _announce(self, error: BaseException) -> None:
        """Close the connections to all, as gloo does once it has waited in vain for one."""
        for i in self.others:
            with suppress(RuntimeError):  # it is closed already, or not gloo's
                self._wait(self._post([(dist.irecv, torch.empty(1), i)], END), deadline=0)
        if isinstance(self.groups_own, Messages):
            self.groups_own.broken = self.groups_own.broken or self.broken


def group_like(group: dist.ProcessGroup | None, backend: str | None = None) -> dist.ProcessGroup:
    """Return a new process group of the same ranks: its messages have an order of their own.

    Called by all of them. ``backend``: of its messages; None: that of ``group``.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    # Only for the members of a group, torch finds its name by counting the groups of each: with all
    # ranks it need not.
    only_members = len(ranks) < dist.get_world_size()
    backend = backend or dist.get_backend(group)
    return dist.new_group(ranks, backend=backend, use_local_synchronization=only_members)


def _gone(ranks: list[int], reason: Exception) -> PeerError:
    names, line = sorted(set(ranks)), str(reason).splitlines()[0]
    verb = "is" if len(names) == 1 else "are"
    what = f"did not answer in time, {verb} gone or gave up, or waits itself for another rank"
    return PeerError(f"{name_ranks(names)} {what}: {line}", names)


def name_ranks(ranks: Sequence[int]) -> str:
    """Say ``rank 3`` or ``ranks 1, 3``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def pieces_of(tensor: torch.Tensor, nbytes: int) -> Sequence[torch.Tensor]:
    """Cut a flat tensor into pieces of at most ``nbytes``; an empty one gives none."""
    if tensor.nbytes <= nbytes:
        return (tensor,) if tensor.numel() else ()
    return tensor.split(nbytes // tensor.element_size())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
