"""Messages over torch.distributed: in order, as they were when they were sent, and loud if late."""

import _thread
import contextlib
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT, attempt

from d2lpar.ranks.launcher import launch
from d2lpar.ranks.transport import (
    END,
    NOTES,
    PIECE_BYTES,
    BusyError,
    Messages,
    PeerError,
    Receive,
    Send,
    Transport,
    pieces_of,
    take,
)

add = torch.Tensor.add_
SIZES = (0, 1, 7, PIECE_BYTES // 4, PIECE_BYTES // 4 + 1, 3 * PIECE_BYTES // 4 + 5)  # of floats


@pytest.mark.parametrize("numel", [0, 1, 4096, 5000])
def test_pieces_are_views_that_fit(numel):
    for dtype in (torch.uint8, torch.complex128):
        tensor = torch.arange(numel).to(dtype)
        pieces = pieces_of(tensor, 4096)
        assert all(0 < piece.nbytes <= 4096 for piece in pieces)
        assert torch.equal(torch.cat([tensor[:0], *pieces]), tensor)
        storages = {piece.untyped_storage().data_ptr() for piece in pieces}
        assert storages <= {tensor.untyped_storage().data_ptr()}


def test_tell_returns_all_notes_in_order_and_is_a_barrier():
    def check(rank, k):
        transport = Messages(dist.new_group())
        notes = [transport.tell(b"%d %d" % (rank, i), 30) for i in range(20)]
        time.sleep(0.2 * (rank == 1))
        before = time.monotonic()
        transport.tell(b"x" * 1000, 30)
        return notes, before, time.monotonic()

    results = launch(check, 4, timeout=LIMIT)
    for notes, _, after in results:
        assert notes == [[b"%d %d" % (r, i) for r in range(4)] for i in range(20)]
        assert after >= max(before for _, before, _ in results)


def test_messages_of_a_pair_arrive_in_order_and_partners_exchange_what_they_hold():
    def check(rank, k):
        group = dist.new_group([2, 1])
        if rank == 0:
            return []
        transport = Messages(group)
        assert transport.ranks[transport.member] == rank  # members are no ranks
        peer, complaints = 1 - transport.member, []
        for into in (take, add):
            parts = [torch.ones(n) for n in SIZES]
            sends = [Send(peer, torch.arange(n) + 100.0 * rank + i) for i, n in enumerate(SIZES)]
            transport.exchange(sends, [Receive(peer, part, into) for part in parts], 30)
            for i, (part, n) in enumerate(zip(parts, SIZES, strict=True)):
                want = torch.arange(n) + 100.0 * (3 - rank) + i + (into is add)
                if not torch.equal(part, want):
                    complaints.append(f"{into}, {n} elements: {part}, not {want}")
        transport.exchange([], [], 30)
        for numel in SIZES:
            tensor = torch.arange(float(numel)) * rank
            for i in range(5):  # each rank is sometimes behind
                time.sleep(0.01 * (i % 2 == rank % 2))
                transport.exchange([Send(peer, tensor)], [Receive(peer, tensor, add)], 30)
            if not torch.equal(tensor, torch.arange(float(numel)) * 3 * 2**4):
                complaints.append(f"exchange of {numel} elements")
        return complaints

    assert launch(check, 3, timeout=LIMIT) == [[]] * 3


def test_several_sources_are_reduced_in_the_order_of_the_receives():
    def check(rank, k):
        transport = Messages(dist.group.WORLD)
        part = torch.full((3,), 1e8)
        if rank:  # the order matters: 1e8 + 1 is 1e8
            time.sleep(0.1 * (rank == 1))
            transport.exchange([Send(0, torch.tensor([1.0, -1e8, 5.0]) * rank)], [], 30)
            return None
        transport.exchange([], [Receive(src, part, add) for src in (1, 2, 3)], 30)
        return part.tolist()

    want = torch.full((3,), 1e8)
    for src in (1, 2, 3):
        want += torch.tensor([1.0, -1e8, 5.0]) * src
    assert launch(check, 4, timeout=LIMIT)[0] == want.tolist()


# What fails.


def called(transport, function, *args):
    with transport.call("a test"):
        return function(*args)


@pytest.mark.parametrize("what", ["tell", "receive", "send"])
def test_a_failed_call_marks_the_transport_as_broken(what):
    def check(rank, k):
        transport = Messages(dist.group.WORLD)
        if rank == 1:
            return None
        large = torch.ones(8 * PIECE_BYTES)
        arguments = {
            "tell": (transport.tell, b"hello", 0.3),
            "receive": (transport.exchange, [], [Receive(1, torch.ones(3), take)], 0.3),
            "send": (transport.exchange, [Send(1, large)], [], 0.3),
        }[what]
        return [attempt(called, transport, *arguments) for _ in range(2)], transport.broken

    (first, later), broken = launch(check, 2, timeout=LIMIT)[0]
    assert first[0] == "PeerError" and first[2] == (1,) and "rank 1" in first[1]
    assert broken == f"PeerError: {first[1]}"
    assert later[0] == "PeerError" and first[1] in later[1]
    assert "of no more use since an earlier call" in later[1]


def test_what_is_wrong_with_arguments_does_not_end_the_use_of_a_group():
    transport = Transport(0, [0])
    for error in (ValueError, TypeError):
        with pytest.raises(error), transport.call("a test"):
            raise error
    assert not transport.broken


def test_a_note_is_not_taken_for_data():
    def check(rank, k):
        transport, part = Messages(dist.group.WORLD), torch.zeros(8)
        if rank == 0:  # its call has failed here, and it goes on with the next one
            return attempt(transport.tell, b"note" * 8, 1.0)[0]
        return attempt(transport.exchange, [], [Receive(0, part, take)], 0.5)[0], part.sum().item()

    assert launch(check, 2, timeout=LIMIT) == ["PeerError", ("PeerError", 0.0)]


def test_a_rank_that_gives_up_is_named_at_once():
    def check(rank, k):
        transport = Messages(group := dist.new_group())
        transport.tell(b"all are there", 30)
        if rank == 1:
            with contextlib.suppress(MemoryError), transport.call("a test"):
                raise MemoryError("no room")
            return transport.broken, group.size()
        return attempt(transport.tell, b"next", LIMIT)[:3]

    first, gone, last = launch(check, 3, timeout=LIMIT / 2)
    assert gone == ("MemoryError: no room", 3)
    for kind, text, named in (first, last):
        assert (kind, named) == ("PeerError", (1,))
        assert "rank 1 did not answer in time, is gone or gave up, or waits itself" in text


def test_a_connection_that_breaks_while_a_note_is_being_sent_is_noticed_at_once():
    def check(rank, k):
        group = dist.new_group()
        transport = Messages(group)
        transport.tell(b"all are there", 30)
        note = bytes(2**26)
        if rank == 0:
            wait = transport._wait
            transport._wait = lambda *args: (dist.send(torch.empty(1), 1), wait(*args))
            return attempt(transport.tell, note, 8)
        landing = torch.empty(len(note), dtype=torch.uint8)
        dist.recv(torch.empty(1), 0)  # rank 0 waits now
        dist.irecv(landing, 0, group, NOTES)  # and its note sets out
        with contextlib.suppress(RuntimeError):  # a wait in vain closes the connection
            dist.irecv(torch.empty(1), 0, group, END).wait(timedelta(milliseconds=1))

    kind, text, named, _ = launch(check, 2, timeout=LIMIT)[0]
    assert (kind, named) == ("PeerError", (1,))
    assert "Timed out" not in text


# One call at a time.


class Occupied:
    """A transport on which a thread called first has a call under way, until it may ``leave``."""

    def __init__(self, *directions):
        self.transport, self.outcome = Transport(0, [0, 1]), "ok"
        self.transport._announce = lambda error: setattr(self, "announced", error)
        self.is_in, self.may_leave = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.stay, args=directions, name="first")
        self.thread.start()
        assert self.is_in.wait(30)

    def stay(self, *directions):
        try:
            with self.transport.call("allreduce of A", *directions):
                self.is_in.set()
                assert self.may_leave.wait(30)
        except BusyError as error:
            self.outcome = str(error)

    def leave(self):
        self.may_leave.set()
        self.thread.join(30)
        return self.outcome


@pytest.mark.parametrize(
    ("first", "second"),
    [((), ()), (("send",), ()), ((), ("receive",)), (("send",), ("send",))],
    ids=str,
)
def test_a_second_thread_is_refused_and_the_first_one_learns_of_it(first, second):
    there = Occupied(*first)
    words = (
        "'MainThread' called allreduce of B while allreduce of A of thread 'first' was under way"
    )
    with pytest.raises(BusyError, match=words), there.transport.call("allreduce of B", *second):
        pytest.fail("it was let in")
    assert isinstance(there.announced, BusyError)  # the other ranks learn of it, too
    assert words in there.leave()
    again = f"of no more use since an earlier call: BusyError: thread {words}"
    with pytest.raises(PeerError, match=again), there.transport.call("allreduce of C"):
        pytest.fail("it was let in")


def test_one_thread_may_send_while_another_one_receives_and_call_after_it():
    there = Occupied("send")
    with there.transport.call("receive", "receive"):
        pass
    assert there.leave() == "ok"
    for _ in range(2):
        with there.transport.call("allreduce of B"):
            pass


def test_a_thread_that_python_does_not_know_is_refused_too():
    transport, told, done = Transport(0, [0]), [], threading.Event()
    transport._announce = lambda error: None

    def second():
        told.append(attempt(called, transport, list)[0])
        done.set()

    with pytest.raises(BusyError), transport.call("first"):
        _thread.start_new_thread(second, ())
        assert done.wait(30)
    assert told == ["BusyError"]
