"""How a message travels between ranks: here by torch.distributed's send and receive.

A schedule says *what* moves, a transport *how*; NCCL uses the same word. ``exchange``
makes all moves of one step, and ``tell`` gives every other rank a short note and
returns theirs. ``Messages`` works in every process group. ``lanes`` is for ranks that
share memory. Notebook 04 measures both.
"""

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..devices import record_message

BOTH = ("send", "receive")  # directions of a collective
# tags: what is sent under one is never received under another
DATA, NOTES, END = range(3)
NUM_TAGS = 3

take = torch.Tensor.copy_  # what a receiver does with a message that it does not reduce


class PeerError(RuntimeError):
    """A rank was late, gave up or is gone; ``peers`` are those that the error names."""

    def __init__(self, message: str, peers: Sequence[int] = ()):
        super().__init__(message)
        self.peers = tuple(peers)


class MismatchError(RuntimeError):
    """The ranks meant to do different things; nobody has begun. But see ``receive``."""


class BusyError(RuntimeError):
    """Two threads of a rank called one group at once. It can no longer be used."""


class Send(NamedTuple):
    """``message``, a contiguous tensor, goes to member ``dst``."""

    dst: int
    message: torch.Tensor


class Receive(NamedTuple):
    """What member ``src`` sent goes ``into(part, message)``: ``take``, or a reducer."""

    src: int
    part: torch.Tensor
    into: Callable


Sends = Sequence[Send]


class Transport:
    """What all transports share: the members, and what ends the use of a group.

    Members of a group are numbered from 0. Errors name them by their ranks in the
    world, ``world_ranks[member]``. ``broken`` says why this rank has given the group
    up.
    """

    device = torch.device("cpu")  # where notes must lie

    def __init__(self, member: int, world_ranks: Sequence[int]):
        self.member, self.world_ranks = member, tuple(world_ranks)
        self.others = [i for i in range(len(world_ranks)) if i != member]
        self.broken = ""
        self.under_way: dict[str, tuple] = {}  # direction: (call, thread)
        self.refusal = ""  # what a second thread was told that called at the same time

    def home(self, tensor: torch.Tensor) -> torch.device:
        """Return where a message of the elements of ``tensor`` must lie."""
        return self.device

    @contextmanager
    def call(self, words: str, *directions: str) -> Iterator[None]:
        """Make the call that ``words`` describe, alone among this rank's threads.

        Two calls at once would take each other's messages, and on another rank the
        second may be the first: so both fail (BusyError). But one thread may send while
        another one receives: ``directions`` is then "send" or "receive". An error ends
        the use of the group, unless it is about arguments or plans: nobody would know
        which messages are under way.
        """
        if self.broken:
            raise PeerError(
                f"the group can no longer be used since an earlier call: {self.broken}"
            )
        this, entered = (words, threading.current_thread().name), []
        try:
            for direction in directions or BOTH:
                # looks and enters in one
                first = self.under_way.setdefault(direction, this)
                if first is not this:
                    self.refusal = (
                        f"thread {this[1]!r} called {words} while {first[0]} of thread "
                        f"{first[1]!r} was under way: give each thread its own group"
                    )
                    raise BusyError(self.refusal)
                entered.append(direction)
            yield
        except (ValueError, TypeError, MismatchError):
            raise
        except BaseException as error:
            self.give_up(error)
            raise
        finally:
            for direction in entered:
                del self.under_way[direction]
            if self.refusal:
                raise BusyError(self.refusal) from None
        if not directions:
            self.look()

    def look(self) -> None:
        """Raise PeerError where it can be seen that another rank has given up."""

    def give_up(self, error: BaseException) -> None:
        """Refuse all later calls, and tell the others, lest they wait in vain."""
        if not self.broken:
            self.broken = f"{type(error).__name__}: {error}"
            self._announce(error)

    def tell(self, note: bytes, timeout: float, ahead: Sends = ()) -> list[bytes]:
        """Give all others ``note``; return everyone's in order: all of one length.

        Nobody returns before all have called. ``ahead`` is what this rank sends in the
        exchange that comes next: some of it may go along.
        """
        return self._tell(note, time.monotonic() + timeout, ahead)

    def exchange(
        self, sends: list[Send], receives: list[Receive], timeout: float
    ) -> None:
        """Make one step's moves; return when parts are written and messages sent.

        Nothing may be received where a message lies that is sent in the same step,
        unless two members send each other parts of one length, and both reduce.
        """
        for dst, message in sends:
            record_message(
                message, self.world_ranks[self.member], self.world_ranks[dst]
            )
        self._exchange(sends, receives, time.monotonic() + timeout)


Work = tuple[list[int], dist.Work]  # what is under way, and the ranks that it is about


class Messages(Transport):
    """torch.distributed's point-to-point messages in CPU memory, usually over gloo.

    Each one is waited for alone, so that a failure names its rank.
    """

    # A chunk travels in pieces, so that one is reduced while others come. Pieces of 512
    # kB were as good between two ranks of one machine, and 6 % slower between four.
    piece_bytes = 2**21

    def __init__(
        self, group: dist.ProcessGroup, line: int = 0, own: Transport | None = None
    ):
        super().__init__(dist.get_rank(group), dist.get_process_group_ranks(group))
        self._group = weakref.ref(group)  # what is kept for a group must not keep it
        # the number of a line, and the group's own transport
        self.line, self.own = line, own
        # memory for what is to be reduced
        self.landings: dict[tuple, torch.Tensor] = {}

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, which someone else must keep."""
        return self._group()

    def _tell(self, note: bytes, deadline: float, ahead: Sends) -> list[bytes]:
        mine = torch.frombuffer(bytearray(note), dtype=torch.uint8).to(self.device)
        theirs = mine.repeat(len(self.world_ranks), 1)
        moves = [(dist.isend, mine, i) for i in self.others]
        moves += [(dist.irecv, theirs[i], i) for i in self.others]
        works = self._post(moves, NOTES)
        # Receives first: when a connection breaks, gloo does not wake a sender
        self._wait(works[::-1], deadline)
        return [row.numpy().tobytes() for row in theirs.cpu()]

    def _exchange(
        self, sends: list[Send], receives: list[Receive], deadline: float
    ) -> None:
        cut = partial(pieces_of, nbytes=self.piece_bytes)
        leaving = [
            (dist.isend, piece, dst) for dst, message in sends for piece in cut(message)
        ]
        arriving, uses = [], []  # what is received, and what becomes of it
        for i, (src, part, into) in enumerate(receives):
            landing = part if into is take else self._beside(i, part)
            arriving += [(dist.irecv, piece, src) for piece in cut(landing)]
            uses += [(place, into) for place in cut(part)]
        # Receives first: gloo asks for each message, and behind our data the question
        # would wait. On a slow link, two that exchange tensors would then send one
        # after the other.
        works = self._post(arriving + leaving)
        received, sent = works[: len(arriving)], works[len(arriving) :]
        sending = defaultdict(list)  # the address of a piece: its works
        for (_, piece, _), work in zip(leaving, sent, strict=True):
            sending[piece.data_ptr()].append(work)
        for (_, piece, _), (place, into), work in zip(
            arriving, uses, received, strict=True
        ):
            self._wait([work], deadline)
            if into is not take:
                # sent before it changes
                self._wait(sending.pop(place.data_ptr(), []), deadline)
                into(place, piece)
        self._wait(list(chain(*sending.values())), deadline)

    def _beside(self, i: int, part: torch.Tensor) -> torch.Tensor:
        """Return where a step's i-th message, to be reduced into ``part``, lands."""
        # It is kept: new pages would cost as much as the reduction
        memory = self.landings.get((i, part.device))
        if memory is None or memory.nbytes < part.nbytes:
            memory = torch.empty(part.nbytes, dtype=torch.uint8, device=part.device)
            self.landings[i, part.device] = memory
        return memory[: part.nbytes].view(part.dtype)

    def _post(
        self, moves: list[tuple[Callable, torch.Tensor, int]], tag: int = DATA
    ) -> list[Work]:
        """Start to send (``dist.isend``) or receive each tensor, in order."""
        tag += NUM_TAGS * self.line
        works = []
        for kind, tensor, peer in moves:
            try:
                works.append(
                    (
                        [self.world_ranks[peer]],
                        kind(tensor, self.world_ranks[peer], self.group, tag),
                    )
                )
            except RuntimeError as error:
                raise _gone([self.world_ranks[peer]], error) from None
        return works

    def _wait(self, works: list[Work], deadline: float) -> None:
        """Wait for ``works``. Name the first rank that is gone, or all late ones."""
        missing, reason = [], None
        for peers, work in works:
            # a timedelta must end
            left = min(max(deadline - time.monotonic(), 0.01), 1e6)
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
        """Close all connections, as gloo does once it has waited in vain for one."""
        for i in self.others:
            with suppress(RuntimeError):  # it is closed already, or not gloo's
                self._wait(
                    self._post([(dist.irecv, torch.empty(1), i)], END), deadline=0
                )
        if isinstance(self.own, Messages):
            self.own.broken = self.own.broken or self.broken


def _gone(peers: list[int], reason: Exception) -> PeerError:
    names, line = sorted(set(peers)), str(reason).splitlines()[0]
    what = "did not answer in time, gave up, ended, or waited for another rank"
    return PeerError(f"{name_ranks(names)} {what}: {line}", names)


def name_ranks(numbers: Sequence[int]) -> str:
    """Say ``rank 3`` or ``ranks 1, 3``."""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def pieces_of(tensor: torch.Tensor, nbytes: int) -> Sequence[torch.Tensor]:
    """Cut a flat tensor into pieces of at most ``nbytes``; an empty one gives none."""
    if tensor.nbytes <= nbytes:
        return (tensor,) if tensor.numel() else ()
    return tensor.split(nbytes // tensor.element_size())
