"""Lanes in shared memory: any length, any number, no circle of waiting, and nothing left behind."""

import contextlib
import errno
import multiprocessing
import os
import stat
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from d2lpar import ranks
from d2lpar.collectives.schedules import Move, direct, recursive_doubling, ring, star
from d2lpar.ranks.lanes import CHANNELS, LANE_BYTES, SHORT_BYTES, SLOTS, Lanes, SharedMemory
from d2lpar.ranks.launcher import RankError, launch
from d2lpar.ranks.transport import Messages, PeerError, Receive, Send, take

add = torch.Tensor.add_


def transport_of(group=None):
    ranks.barrier(group)  # now it has one
    return ranks.member_of(group, None)[0].transport


@pytest.fixture(autouse=True)
def files(monkeypatch):
    """The files of lanes that the test has made: none is left, whatever happens in it."""
    create, made = SharedMemory.create, []

    def noted(*args):
        memory = create(*args)
        if memory:
            made.append(memory.path)
        return memory

    monkeypatch.setattr(SharedMemory, "create", noted)
    yield made
    assert not [path for path in made if os.path.exists(path)]


def test_the_default_group_has_lanes():
    def check(rank, k):
        transport = transport_of()
        return isinstance(transport, Lanes), transport.member, transport.ranks, transport.others

    assert launch(check, 3) == [
        (True, r, (0, 1, 2), [i for i in range(3) if i != r]) for r in range(3)
    ]


@pytest.mark.parametrize("k", [2, 4])
def test_messages_of_any_length(k):
    def check(rank, k):
        transport = transport_of()
        complaints = []
        for dtype in (torch.bool, torch.complex64):
            full = transport.piece_bytes // dtype.itemsize
            for numel in (0, 63, full, full + 1, 3 * full + 3):
                for into in (take, add):
                    message = (torch.arange(numel) * (rank + 3) % 100).to(dtype)
                    before = message.clone()
                    part = torch.ones(numel, dtype=dtype)
                    after, ahead = (rank + 1) % k, (rank - 1) % k
                    transport.exchange([Send(after, message)], [Receive(ahead, part, into)], 30)
                    want = (torch.arange(numel) * (ahead + 3) % 100).to(dtype)
                    want = want + torch.ones(numel, dtype=dtype) if into is add else want
                    if not torch.equal(part, want) or not torch.equal(message, before):
                        complaints.append((dtype, numel, into is add))
        return complaints

    assert launch(check, k) == [[]] * k


def test_a_sender_far_ahead_blocks_and_goes_on():
    def check(rank, k):
        transport = transport_of()
        count = 50
        if rank == 0:
            begin = time.monotonic()
            for i in range(SLOTS):
                transport.exchange([Send(1, torch.full((3,), float(i)))], [], 30)
            free = time.monotonic() - begin
            for i in range(SLOTS, count):
                transport.exchange([Send(1, torch.full((3,), float(i)))], [], 30)
            return free, time.monotonic() - begin
        time.sleep(2)
        parts = [torch.zeros(3) for _ in range(count)]
        for part in parts:
            transport.exchange([], [Receive(0, part, take)], 30)
        return [part.tolist() for part in parts]

    (free, all_of_them), received = launch(check, 2)
    assert free < 1.5 < all_of_them
    assert received == [[float(i)] * 3 for i in range(50)]


def test_partners_swap_what_they_hold():
    def check(rank, k):
        transport = transport_of()
        numel = 3 * transport.piece_bytes // 4 + 5
        complaints = []
        for into, factor in ((take, 2 - rank), (add, 3)):
            tensor = torch.arange(float(numel)) * (rank + 1)
            transport.exchange([Send(1 - rank, tensor)], [Receive(1 - rank, tensor, into)], 30)
            if not torch.equal(tensor, torch.arange(float(numel)) * factor):
                complaints.append(into is add)
        return complaints

    assert launch(check, 2) == [[], []]


@pytest.mark.parametrize("count", [SLOTS, SLOTS + 1])
def test_several_messages_of_a_pair_in_one_step(count):
    def check(rank, k, count):
        transport = transport_of()
        sizes = [3, transport.piece_bytes, 1][:count]  # in floats
        parts = [torch.zeros(n) for n in sizes]
        sends = [Send(1 - rank, torch.full((n,), 10.0 * rank + i)) for i, n in enumerate(sizes)]
        receives = [Receive(1 - rank, part, take) for part in parts]
        try:
            transport.exchange(sends, receives, 0.4)
        except PeerError as error:
            return str(error)
        return [part.unique().tolist() for part in parts]

    want = [[[10.0 * (1 - rank) + i] for i in range(count)] for rank in range(2)]
    assert launch(check, 2, count) == want


def test_a_schedule_that_sends_chunks_one_by_one():
    def check(rank, k):
        def piecemeal(k):
            theirs = {0: (3, 4, 5), 1: (0, 1, 2)}
            collect = [Move(r, 1 - r, c, True) for r in range(2) for c in theirs[r]]
            hand_out = [Move(r, 1 - r, c, False) for r in range(2) for c in theirs[1 - r]]
            return [collect, hand_out]

        tensor = torch.arange(6.0)
        try:
            ranks.allreduce(tensor, piecemeal, timeout=5)
        except PeerError as error:
            return str(error)
        return tensor.tolist()

    assert launch(check, 2) == [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]] * 2


def test_tell_returns_all_notes_in_order_and_is_a_barrier():
    def check(rank, k):
        transport = transport_of()
        notes = [transport.tell(b"%d %2d" % (rank, i), 30) for i in range(50)]
        time.sleep(0.2 * (rank == 2))
        before = time.monotonic()
        transport.tell(b"", 30)
        return notes, before, time.monotonic()

    results = launch(check, 4)
    for notes, _, after in results:
        assert notes == [[b"%d %2d" % (r, i) for r in range(4)] for i in range(50)]
        assert after >= max(before for _, before, _ in results)


def free_slots(transport):
    """Return how many slots of each lane, out and in, are free when no rank is in a call."""
    found = []
    for member in range(len(transport.ranks)):  # one after the other: counting takes what it counts
        dist.barrier()
        if member == transport.member:
            outgoing = [lane.acquire.__self__ for lane in transport.outgoing.values()]
            incoming = [lane.release.__self__ for lane in transport.incoming.values()]
            for free in outgoing + incoming:
                found.append(sum(free.acquire(False) for _ in range(SLOTS + 1)))
                for _ in range(found[-1]):
                    free.release()
    dist.barrier()
    return found


@pytest.mark.parametrize("k", [2, 3])
def test_a_note_takes_a_short_message_along(k):
    def check(rank, k):
        transport = transport_of()
        full = transport.piece_bytes // 4
        after, before = (rank + 1) % k, (rank - 1) % k
        complaints = []
        short = SHORT_BYTES // 4
        for sizes in (
            [0],
            [5],
            [short],
            [short + 1],
            [full + 1],
            [0, 3],
            [2, full, 0, 4],
            [full, 1],
        ):
            messages = [torch.arange(float(n)) + rank for n in sizes]
            parts = [torch.zeros(n) for n in sizes]
            sends = [Send(after, message) for message in messages]
            receives = [Receive(before, part, add) for part in parts]
            turns = transport.outgoing[after].turn, transport.incoming[before].turn
            transport.tell(b"note", 30, ahead=sends)
            transport.exchange(sends, receives, 30)
            wanted = [torch.arange(float(n)) + before for n in sizes]
            if not all(map(torch.equal, parts, wanted)):
                complaints.append((sizes, "wrong"))
            first = next(filter(None, sizes), 0)
            along = 0 < first <= short  # then the note needs no slot of its own
            slots = sum(-(-n // full) for n in sizes) + (not along)
            used = transport.outgoing[after].turn, transport.incoming[before].turn
            if [b - a for a, b in zip(turns, used, strict=True)] != [slots, slots]:
                complaints.append((sizes, turns, used))
        return complaints, free_slots(transport)

    assert launch(check, k) == [([], [SLOTS] * 2 * (k - 1))] * k


def test_what_went_ahead_is_dropped_where_nobody_wants_it():
    def check(rank, k):
        transport = transport_of()
        message, part = torch.full((4,), 10.0 + rank), torch.zeros(4)
        transport.tell(b"note", 30, ahead=[Send(1 - rank, message)])  # plans differ, say
        transport.tell(b"the whole plan", 30)
        transport.exchange([Send(1 - rank, -message)], [Receive(1 - rank, part, take)], 30)
        transport.tell(b"note", 30, ahead=[Send(0, message)] if rank else [])  # one way only
        if rank == 0:
            transport.exchange([], [Receive(1, part, add)], 30)
        else:
            transport.exchange([Send(0, message)], [], 30)
        return part.tolist(), free_slots(transport)

    free = [SLOTS] * 2
    assert launch(check, 2) == [([0.0] * 4, free), ([-10.0] * 4, free)]


def test_what_lies_in_a_slot_is_not_taken_for_what_did_not_come_along():
    def check(rank, k):
        transport = transport_of()
        part, sends = torch.zeros(4), [Send(1 - rank, torch.full((4,), 7.0))]
        for _ in range(SLOTS):
            transport.exchange(sends, [Receive(1 - rank, part, take)], 30)
        transport.tell(b"note", 30, ahead=sends if rank else None)
        assert free_slots(transport) == [SLOTS] * 2  # rank 0 has not kept what it cannot want
        part.zero_()
        if rank:
            try:
                transport.exchange(sends, [Receive(0, part, take)], 0.3)
            except PeerError as error:
                return str(error), part.tolist()

    assert launch(check, 2)[1] == ("rank 0 did not do its part in time", [0.0] * 4)


@pytest.mark.parametrize("schedule", [star, direct, ring, recursive_doubling])
def test_a_difference_leaves_tensors_and_lanes_as_they_were(schedule):
    def check(rank, k, schedule):
        transport = transport_of()
        tensor = torch.full((4,), float(rank))
        with contextlib.suppress(ranks.MismatchError):
            ranks.allreduce(tensor, schedule, label="odd" if rank == 1 else "even")
        kept = tensor.tolist()
        ranks.allreduce(tensor, schedule, check=False)
        return kept, tensor.tolist(), free_slots(transport)

    for rank, result in enumerate(launch(check, 4, schedule)):
        assert result == ([float(rank)] * 4, [6.0] * 4, [SLOTS] * 6)


def test_a_failed_call_marks_the_transport_as_broken():
    def check(rank, k):
        transport = transport_of()
        if rank == 1:
            return None
        said = []
        for _ in range(2):
            try:
                with transport.guard():
                    transport.exchange([], [Receive(1, torch.ones(2), take)], 0.2)
            except PeerError as error:
                said.append((str(error), error.ranks))
        return said

    first, again = launch(check, 2)[0]
    assert first == ("rank 1 did not do its part in time", (1,))
    assert "of no more use since an earlier call: PeerError: rank 1 did not" in again[0]


@pytest.mark.parametrize("times", [(0.5, 30, 30), (30, 30, 0.5)], ids=["first", "last"])
def test_all_give_up_as_soon_as_one_has_and_name_whom_it_missed(times):
    def check(rank, k):
        transport = transport_of()
        if rank == 3:
            time.sleep(1)  # whose own part is missed, and who then waits for one that has given up
        source, part = (rank - 1) % k, torch.zeros(1)
        try:
            with transport.guard():
                transport.exchange([], [Receive(source, part, take)], [*times, 30][rank])
        except PeerError as error:
            return str(error), error.ranks

    *waiting, late = launch(check, 4, timeout=20)
    assert waiting.pop(times.index(0.5)) == ("rank 3 did not do its part in time", (3,))
    for text, named in waiting:
        assert named == (3,) and "rank 3 did not do its part, says rank " in text
    assert late == ("rank 2 gave up: its own error says why", (2,))


# Channels.


def test_the_first_groups_have_lanes_and_the_others_messages():
    def check(rank, k):
        groups = [dist.group.WORLD] + [dist.new_group() for _ in range(CHANNELS + 1)]
        kinds, sums = [], []
        for group in groups:
            kinds.append(type(transport_of(group)))
        for i, group in enumerate(groups):  # what one group does is nothing to the others
            ranks.broadcast(torch.ones(2), 0, group, check=False)
            tensor = torch.arange(5.0) * (rank + 1) + i
            ranks.allreduce(tensor, ring, group=group)
            sums.append(tensor.tolist())
        return kinds, sums

    for kinds, sums in launch(check, 3):
        assert kinds == [Lanes] * CHANNELS + [Messages] * 2
        assert sums == [(torch.arange(5.0) * 6 + 3 * i).tolist() for i in range(CHANNELS + 2)]


def test_groups_of_some_ranks_find_a_channel_that_all_have_free():
    def check(rank, k):
        members = [(0, 1), (2, 3), (1, 2), (0, 1, 2), (0, 3), (1, 2, 3), (0, 1, 2, 3)]
        groups = [(m, dist.new_group(m)) for m in members]
        kinds, complaints = {}, []
        for m, group in groups:
            if rank in m:
                kinds[m] = type(transport_of(group)).__name__
        for m, group in groups:
            if rank in m:
                tensor = torch.tensor([float(rank)])
                ranks.allreduce(tensor, group=group)
                if tensor.item() != sum(m):
                    complaints.append((m, tensor))
        return kinds, complaints

    results = launch(check, 4)
    assert [complaints for _, complaints in results] == [[]] * 4
    for kinds, _ in results:
        for other, _ in results:
            assert all(other[m] == kinds[m] for m in kinds.keys() & other.keys())
    assert results[0][0][(0, 1)] == results[2][0][(2, 3)] == results[1][0][(1, 2)] == "Lanes"
    assert "Messages" in results[1][0].values()  # rank 1 is in five groups, and has three channels


# The memory.


@pytest.mark.parametrize("k", [2, 3, 4, 8, 16])
def test_slots_are_apart_and_small_in_all(k):
    memory = SharedMemory("nowhere", k, {})
    spans = [
        (offset, offset + memory.slot_bytes)
        for channel in range(CHANNELS)
        for src in range(k)
        for dst in range(k)
        for offset in memory.slots(channel, src, dst)
        if src != dst
    ]
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert spans[-1][1] == memory.table == len(spans) * memory.slot_bytes  # and no gaps
    assert memory.slot_bytes % 64 == 0 and len(spans) * memory.slot_bytes <= LANE_BYTES


def test_very_many_ranks_send_messages(files):
    context = multiprocessing.get_context("spawn")
    assert SharedMemory.create(40, context) is None
    assert files == []


def test_one_rank_needs_no_memory():
    assert SharedMemory.create(1, multiprocessing.get_context("spawn")) is None
    assert launch(lambda rank, k: ranks.barrier(), 1) == [None]


def test_without_room_the_ranks_send_messages(monkeypatch):
    def full(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    assert SharedMemory.create(2, multiprocessing.get_context("spawn")) is None

    def check(rank, k):
        tensor = torch.arange(300_000.0) * (rank + 1)
        ranks.allreduce(tensor)
        return type(transport_of()), torch.equal(tensor, torch.arange(300_000.0) * 6)

    assert launch(check, 3) == [(Messages, True)] * 3


@pytest.mark.parametrize("has_fallocate", [True, False])
def test_the_memory_is_reserved_and_nobody_else_may_read_it(has_fallocate, monkeypatch):
    if not has_fallocate:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    before = os.umask(0)
    try:
        memory = SharedMemory.create(3, multiprocessing.get_context("spawn"))
        status = os.stat(memory.path)
    finally:
        os.umask(before)
    memory.remove()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == memory.nbytes <= 512 * status.st_blocks


@pytest.mark.parametrize("k", [2, 3, 4, 8])
def test_two_launches_fit_into_a_container(k):
    semaphores = 2 * CHANNELS * k * (k - 1)  # a page each
    assert 2 * (SharedMemory("nowhere", k, {}).nbytes + 4096 * semaphores) < 60e6


def test_without_room_for_a_semaphore_the_ranks_send_messages(monkeypatch):
    class Full:
        def Semaphore(self, value):
            raise OSError(28, "No space left on device")

    assert SharedMemory.create(2, Full()) is None


@pytest.mark.parametrize("end", ["result", "error", "death", "late", "peer"])
def test_no_file_is_left_however_it_ends(end, files):
    def check(rank, k, end):
        ranks.barrier()
        if rank == 1:
            if end == "error":
                raise ValueError("no")
            if end == "death":
                os._exit(3)
            if end in ("late", "peer"):
                time.sleep(20)
        ranks.allreduce(torch.ones(3), timeout=0.2 if end == "peer" else 60)

    with contextlib.nullcontext() if end == "result" else pytest.raises(RankError) as raised:
        launch(check, 2, end, timeout=1.0)
    if end in ("late", "peer"):
        expected = "PeerError" if end == "peer" else "did not finish within|PeerError"
        assert raised.match(expected)
    assert len(files) == 1 and not os.path.exists(files[0])


def test_all_ranks_have_one_file_in_memory_whose_name_is_gone(files):
    def check(rank, k):
        memory = ranks.member_of(None, None)[0].memory
        return memory.path, os.path.exists(memory.path), memory.bytes.nbytes

    found = launch(check, 2)
    assert [path for path, *_ in found] == files * 2
    size = SharedMemory("nowhere", 2, {}).nbytes
    assert [found[1:] for found in found] == [(False, size)] * 2
    if os.access("/dev/shm", os.W_OK):
        assert os.path.dirname(files[0]) == "/dev/shm"
