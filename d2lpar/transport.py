"""How a message travels between ranks: here by torch.distributed's send and receive.

A schedule says *what* moves, a transport *how*; NCCL uses the same word. A transport does two
things for a rank: ``exchange`` makes all the moves of one step, and ``tell`` gives every other rank
a short note and returns theirs. ``Messages`` works in every process group, on any number of
machines; ``lanes`` has another one, for ranks that share a memory. Notebook 05 measures both.
"""

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist

from .devices import record_message

PIECE_BYTES = 2**21  # over messages a chunk travels in pieces, and one is reduced as others come
ALIGNMENT = 64  # bytes: a message may begin at any multiple of it, whatever its dtype

take = torch.Tensor.copy_  # what a receiver does with a message that it does not reduce


class PeerError(RuntimeError):
    """A rank did not do its part in time, or is gone. ``ranks`` are those that were missing."""

    def __init__(self, message: str, ranks: Sequence[int] = ()):
        super().__init__(message)
        self.ranks = tuple(ranks)


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
    """What both transports share: who the members are, and how long a wait may last.

    Members of a group are numbered from 0; ``ranks[member]`` is a member's rank in the world, by
    which errors name it. After a failed wait nobody knows which messages are still under way, so
    ``broken`` then holds what happened, and every later call says so.
    """

    device = torch.device("cpu")  # where messages must lie

    def __init__(self, member: int, ranks: Sequence[int]):
        self.member, self.ranks = member, tuple(ranks)
        self.others = [i for i in range(len(ranks)) if i != member]
        self.broken = ""

    def tell(self, note: bytes, timeout: float) -> list[bytes]:
        """Give ``note`` to all other members; return everyone's, in order: all of one length.

        Nobody returns before all have called, so this is a barrier too.

        Raises:
            PeerError: naming all who did not call within ``timeout`` seconds, or are gone.
        """
        return self._guarded(self._tell, note, time.monotonic() + timeout)

    def exchange(self, sends: list[Send], receives: list[Receive], timeout: float) -> None:
        """Make the moves of one step; return when the parts are written and the messages sent.

        Where a message lies that is sent in the same step, nothing may be received but another one
        of the same length from the same member, to be reduced: an exchange of the two.

        Raises:
            PeerError: naming the rank that did not do its part within ``timeout`` seconds.
        """
        for dst, message in sends:
            record_message(message, self.ranks[self.member], self.ranks[dst])
        self._guarded(self._exchange, sends, receives, time.monotonic() + timeout)

    def _guarded(self, action: Callable, *args):
        """Do ``action``, unless an earlier one has failed; remember when this one does."""
        if self.broken:
            raise PeerError(f"the group is of no more use since an earlier call: {self.broken}")
        try:
            return action(*args)
        except BaseException as error:
            self.broken = f"{type(error).__name__}: {error}"
            raise


class Messages(Transport):
    """torch.distributed's point-to-point messages, in any process group.

    With gloo messages lie in the CPU's memory, and each one is started and waited for alone, so
    that a failure names its rank. With NCCL they lie on the GPU, and an exchange is one group
    (``batch_isend_irecv``). That part has not been run: it takes several GPUs.
    """

    def __init__(self, group: dist.ProcessGroup, line: int = 0):
        super().__init__(dist.get_rank(group), dist.get_process_group_ranks(group))
        self._group = weakref.ref(group)  # what is kept for a group must not keep it
        self.line = line  # the tag: messages of different lines do not meet
        if dist.get_backend(group) == dist.Backend.NCCL:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.staging = torch.empty(0, dtype=torch.uint8, device=self.device)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, which someone else must keep."""
        return self._group()

    def _tell(self, note: bytes, deadline: float) -> list[bytes]:
        mine = torch.frombuffer(bytearray(note), dtype=torch.uint8).to(self.device)
        theirs = mine.repeat(len(self.ranks), 1)
        operations = [self._operation(dist.isend, mine, i) for i in self.others]
        operations += [self._operation(dist.irecv, theirs[i], i) for i in self.others]
        self._wait(self._post(operations), deadline)
        return [row.numpy().tobytes() for row in theirs.cpu()]

    def _exchange(self, sends: list[Send], receives: list[Receive], deadline: float) -> None:
        # In pieces, so that one can be reduced while the next is on its way.
        outgoing = [
            self._operation(dist.isend, piece, dst)
            for dst, message in sends
            for piece in pieces_of(message, PIECE_BYTES)
        ]
        arrivals = [
            (self._operation(dist.irecv, piece, src), place, into)
            for (src, part, into), landing in zip(receives, self._landings(receives), strict=True)
            for piece, place in zip(
                pieces_of(landing, PIECE_BYTES), pieces_of(part, PIECE_BYTES), strict=True
            )
        ]
        works = self._post(outgoing + [operation for operation, *_ in arrivals])
        sent, received = works[: len(outgoing)], works[len(outgoing) :]
        if self.device.type == "cuda":  # one piece of work for all
            self._wait(works, deadline)
            sent, received = [], [None] * len(arrivals)
        leaving = defaultdict(list)  # what has to be sent from a place before it may be written
        for operation, work in zip(outgoing, sent, strict=False):  # none over NCCL
            leaving[operation.tensor.data_ptr()].append(work)
        for work, (operation, place, into) in zip(received, arrivals, strict=True):
            if work:
                self._wait([work], deadline)
            if into is not take:
                self._wait(leaving.pop(place.data_ptr(), []), deadline)
                into(place, operation.tensor)
        self._wait(list(chain(*leaving.values())), deadline)

    def _landings(self, receives: list[Receive]) -> list[torch.Tensor]:
        """Return where each message arrives: in its place, or beside it if it is to be reduced.

        The memory beside is kept: new pages would cost as much as the reduction.
        """
        reduced = [part for _, part, into in receives if into is not take]
        nbytes = sum(_aligned(part.nbytes) for part in reduced)
        if nbytes > self.staging.nbytes:
            self.staging = self.staging.new_empty(nbytes)
        landings, offset = [], 0
        for _, part, into in receives:
            if into is take:
                landings.append(part)
            else:
                landings.append(self.staging[offset : offset + part.nbytes].view(part.dtype))
                offset += _aligned(part.nbytes)
        return landings

    def _operation(self, kind: Callable, tensor: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self.ranks[peer], self.group, self.line)

    def _post(self, operations: list[dist.P2POp]) -> list[tuple[list[int], dist.Work]]:
        """Start all; return what is under way, each with the ranks that it is about."""
        if not operations:
            return []
        if self.device.type == "cuda":
            peers = [operation.peer for operation in operations]
            return [(peers, work) for work in dist.batch_isend_irecv(operations)]
        works = []
        for kind, tensor, peer in [(o.op, o.tensor, o.peer) for o in operations]:
            try:
                works.append(([peer], kind(tensor, peer, self.group, self.line)))
            except RuntimeError as error:
                raise _gone([peer], error) from None
        return works

    def _wait(self, works: list[tuple[list[int], dist.Work]], deadline: float) -> None:
        """Wait for all ``works``; then name every rank of which one has failed."""
        missing, reason = [], None
        for peers, work in works:
            left = min(max(deadline - time.monotonic(), 0.01), 1e6)  # a timedelta must end
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                missing += peers
                reason = reason or error
        if missing:
            raise _gone(missing, reason)


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
    return PeerError(f"{name_ranks(names)} did not answer in time, or is gone: {line}", names)


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
