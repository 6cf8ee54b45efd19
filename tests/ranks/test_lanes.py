"""Lanes in shared memory: any length and number, no circle, nothing left."""

import errno
import multiprocessing
import os
import stat
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from helpers import LIMIT, in_ranks, transport_of

from d2lpar.ranks.lanes import (
    CHANNELS,
    LANE_BYTES,
    SHORT_BYTES,
    SLOTS,
    Lanes,
    SharedMemory,
)
from d2lpar.ranks.launcher import launch
from d2lpar.ranks.transport import Messages, Receive, Send, take

SPAWN = multiprocessing.get_context("spawn")


@in_ranks(2)
def test_a_sender_far_ahead_blocks_and_goes_on(rank, k):
    transport = transport_of()
    if rank == 0:
        begin, times = time.monotonic(), []
        for i in range(50):
            transport.exchange([Send(1, torch.full((3,), float(i)))], [], 30)
            times.append(time.monotonic() - begin)
        assert times[SLOTS - 1] < 1.5 < times[-1]
        return
    time.sleep(2)
    parts = torch.zeros(50, 3)
    for part in parts:
        transport.exchange([], [Receive(0, part, take)], 30)
    assert parts.tolist() == [[float(i)] * 3 for i in range(50)]


@pytest.mark.parametrize("k", [2, 3])
@in_ranks()
def test_a_note_takes_a_short_message_along(rank, k):
    transport = transport_of()
    full, short = transport.piece_bytes // 4, SHORT_BYTES // 4
    after, before = (rank + 1) % k, (rank - 1) % k
    steps = [
        [0],
        [5],
        [short],
        [short + 1],
        [full + 1],
        [0, 3],
        [2, full, 0, 4],
        [full, 1],
    ]
    for sizes in steps:
        parts = [torch.ones(n) for n in sizes]
        sends = [Send(after, torch.arange(float(n)) + rank) for n in sizes]
        turns = transport.outgoing[after].turn, transport.incoming[before].turn
        transport.tell(b"note", 30, ahead=sends)
        receives = [Receive(before, part, torch.Tensor.add_) for part in parts]
        transport.exchange(sends, receives, 30)
        wanted = [torch.arange(float(n)) + before + 1 for n in sizes]
        assert all(map(torch.equal, parts, wanted)), sizes
        # then the note needs no own slot
        along = 0 < next(filter(None, sizes), 0) <= short
        slots = sum(-(-n // full) for n in sizes) + (not along)
        used = transport.outgoing[after].turn, transport.incoming[before].turn
        assert used == (turns[0] + slots, turns[1] + slots), sizes


# The memory.


@pytest.mark.parametrize("k", [2, 8, 16])
def test_slots_are_apart_and_small_in_all(k):
    memory = SharedMemory("nowhere", k, {})
    lanes = [
        (c, i, j) for c in range(CHANNELS) for i in range(k) for j in range(k) if i != j
    ]
    begins = sorted(offset for lane in lanes for offset in memory.slots(*lane))
    assert all(b - a == memory.slot_bytes for a, b in pairwise(begins))  # and no gaps
    assert (
        begins[0] == 0 and memory.table == len(begins) * memory.slot_bytes <= LANE_BYTES
    )
    assert memory.slot_bytes % 64 == 0
    # a page each: two launches fit into a container
    semaphores = 2 * CHANNELS * k * (k - 1)
    assert k > 8 or 2 * (memory.nbytes + 4096 * semaphores) < 60e6


@pytest.mark.parametrize("k", [1, 40])
def test_one_rank_and_very_many_have_no_memory(k):
    assert SharedMemory.create(k, SPAWN) is None


def test_without_room_the_ranks_send_messages(monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    assert SharedMemory.create(2, SimpleNamespace(Semaphore=full)) is None
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    assert SharedMemory.create(2, SPAWN) is None
    assert (
        launch(lambda rank, k: type(transport_of()), 2, timeout=LIMIT) == [Messages] * 2
    )


@pytest.mark.parametrize("on_linux", [True, False])
def test_the_memory_is_reserved_nobody_else_may_read_it_and_it_is_not_left(
    on_linux, monkeypatch
):
    access = os.access
    # where there is no /dev/shm, and no room can be reserved in a file
    if not on_linux:
        monkeypatch.setattr(
            os, "access", lambda path, *how: "shm" not in path and access(path, *how)
        )
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
    assert access("/dev/shm", os.W_OK) * on_linux == memory.path.startswith("/dev/shm/")

    def check(rank, k):
        lanes = transport_of()
        return type(lanes), os.path.exists(lanes.memory.path)  # its name is gone

    assert launch(check, 2, timeout=LIMIT) == [(Lanes, False)] * 2
