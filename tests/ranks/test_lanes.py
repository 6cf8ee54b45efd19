"""Lanes in shared memory: any length, any number, no circle of waiting, and nothing left behind."""

import contextlib
import errno
import multiprocessing
import os
import stat
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT

from d2lpar import ranks
from d2lpar.collectives.schedules import direct, recursive_doubling, ring, star
from d2lpar.ranks.lanes import CHANNELS, LANE_BYTES, SHORT_BYTES, SLOTS, Lanes, SharedMemory
from d2lpar.ranks.launcher import RankError, launch
from d2lpar.ranks.transport import Messages, Receive, Send, take

add = torch.Tensor.add_
SPAWN = multiprocessing.get_context("spawn")


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


def test_a_sender_far_ahead_blocks_and_goes_on():
    def check(rank, k):
        transport = transport_of()
        if rank == 0:
            begin, times = time.monotonic(), []
            for i in range(50):
                transport.exchange([Send(1, torch.full((3,), float(i)))], [], 30)
                times.append(time.monotonic() - begin)
            return times[SLOTS - 1], times[-1]
        time.sleep(2)
        parts = [torch.zeros(3) for _ in range(50)]
        for part in parts:
            transport.exchange([], [Receive(0, part, take)], 30)
        return [part.tolist() for part in parts]

    (free, all_of_them), received = launch(check, 2, timeout=LIMIT)
    assert free < 1.5 < all_of_them
    assert received == [[float(i)] * 3 for i in range(50)]


@pytest.mark.parametrize("k", [2, 3])
def test_a_note_takes_a_short_message_along(k):
    def check(rank, k):
        transport = transport_of()
        full, short = transport.piece_bytes // 4, SHORT_BYTES // 4
        after, before = (rank + 1) % k, (rank - 1) % k
        complaints = []
        steps = [[0], [5], [short], [short + 1], [full + 1], [0, 3], [2, full, 0, 4], [full, 1]]
        for sizes in steps:
            parts = [torch.zeros(n) for n in sizes]
            sends = [Send(after, torch.arange(float(n)) + rank) for n in sizes]
            turns = transport.outgoing[after].turn, transport.incoming[before].turn
            transport.tell(b"note", 30, ahead=sends)
            transport.exchange(sends, [Receive(before, part, add) for part in parts], 30)
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

    assert launch(check, k, timeout=LIMIT) == [([], [SLOTS] * 2 * (k - 1))] * k


@pytest.mark.parametrize("schedule", [star, direct, ring, recursive_doubling])
def test_a_difference_leaves_tensors_and_lanes_as_they_were(schedule):
    def check(rank, k):
        transport = transport_of()
        tensor = torch.full((4,), float(rank))
        with contextlib.suppress(ranks.MismatchError):
            ranks.allreduce(tensor, schedule, label="odd" if rank == 1 else "even")
        kept = tensor.tolist()
        ranks.allreduce(tensor, schedule, check=False)
        return kept, tensor.tolist(), free_slots(transport)

    for rank, result in enumerate(launch(check, 4, timeout=LIMIT)):
        assert result == ([float(rank)] * 4, [6.0] * 4, [SLOTS] * 6)


# Channels.


def test_groups_of_some_ranks_find_a_channel_that_all_have_free():
    def run(rank, k):
        members = [(0, 1), (2, 3), (1, 2), (0, 1, 2), (0, 3), (1, 2, 3), (0, 1, 2, 3)]
        groups = {m: dist.new_group(m) for m in members}
        mine = {m: group for m, group in groups.items() if rank in m}
        kinds = {m: type(transport_of(group)) for m, group in mine.items()}
        for group in mine.values():
            order = dist.get_process_group_ranks(group)
            ranks.broadcast(torch.ones(2), order[0], group, check=False)
            tensor = torch.tensor([float(rank)])
            ranks.allreduce(tensor, group=group)
            assert tensor.item() == sum(order)
        return kinds

    results = launch(run, 4, timeout=LIMIT)
    for kinds in results:
        for other in results:
            assert all(other[m] is kinds[m] for m in kinds.keys() & other.keys())
    assert results[0][0, 1] is results[2][2, 3] is results[1][1, 2] is Lanes
    assert Messages in results[1].values()  # rank 1 is in five groups, and has three channels


# The memory.


@pytest.mark.parametrize("k", [2, 3, 4, 8, 16])
def test_slots_are_apart_and_small_in_all(k):
    memory = SharedMemory("nowhere", k, {})
    lanes = [(c, i, j) for c in range(CHANNELS) for i in range(k) for j in range(k) if i != j]
    begins = sorted(offset for lane in lanes for offset in memory.slots(*lane))
    assert all(b - a == memory.slot_bytes for a, b in pairwise(begins))  # and no gaps
    assert begins[0] == 0 and memory.table == len(begins) * memory.slot_bytes <= LANE_BYTES
    assert memory.slot_bytes % 64 == 0
    semaphores = 2 * CHANNELS * k * (k - 1)  # a page each: two launches fit into a container
    assert k > 8 or 2 * (memory.nbytes + 4096 * semaphores) < 60e6


@pytest.mark.parametrize("k", [1, 40])
def test_one_rank_and_very_many_have_no_memory(k, files):
    assert SharedMemory.create(k, SPAWN) is None and files == []


def test_without_room_the_ranks_send_messages(monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    assert SharedMemory.create(2, SimpleNamespace(Semaphore=full)) is None
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    assert SharedMemory.create(2, SPAWN) is None

    def check(rank, k):
        tensor = torch.arange(300_000.0) * (rank + 1)
        ranks.allreduce(tensor)
        return type(transport_of()), torch.equal(tensor, torch.arange(300_000.0) * 6)

    assert launch(check, 3, timeout=LIMIT) == [(Messages, True)] * 3


@pytest.mark.parametrize("has_fallocate", [True, False])
def test_the_memory_is_reserved_and_nobody_else_may_read_it(has_fallocate, monkeypatch):
    if not has_fallocate:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    before = os.umask(0)
    try:
        memory = SharedMemory.create(3, SPAWN)
        status = os.stat(memory.path)
    finally:
        os.umask(before)
    memory.remove()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == memory.nbytes <= 512 * status.st_blocks


@pytest.mark.parametrize("end", ["result", "death", "late"])
def test_no_file_is_left_however_it_ends(end, files):
    def check(rank, k):
        path = ranks.member_of(None, None)[0].memory.path
        ranks.barrier()
        if rank == 1 and end == "death":
            os._exit(3)
        if rank == 1 and end == "late":
            time.sleep(20)
        ranks.barrier()
        return path, os.path.exists(path)  # its name is gone

    with contextlib.nullcontext() if end == "result" else pytest.raises(RankError):
        found = launch(check, 2, timeout=2.0 if end == "late" else LIMIT)
        assert found == [(files[0], False)] * 2
    assert len(files) == 1 and not os.path.exists(files[0])
    assert not os.access("/dev/shm", os.W_OK) or os.path.dirname(files[0]) == "/dev/shm"
