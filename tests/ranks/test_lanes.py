"""Lanes: a message waits for its place, in any number of pieces; or there are none."""

import torch
from helpers import in_ranks

from d2lpar import ranks
from d2lpar.ranks import lanes
from d2lpar.ranks.lanes import SLOT_BYTES, SLOTS, Memory


@in_ranks(2)
def test_a_sender_far_ahead_waits_and_goes_on(rank, k):
    for n in (3, SLOT_BYTES // 4 * (SLOTS + 3) + 1):  # numbers; in several pieces
        for i in range(2 * SLOTS + 1):
            if rank == 0:
                ranks.send(torch.full((n,), float(i)), 1)
            else:
                assert ranks.receive(0).unique().tolist() == [i]


def test_one_rank_very_many_or_a_system_that_refuses_have_no_lanes(monkeypatch):
    assert Memory.create(1) is None and Memory.create(lanes.MAX_RANKS + 1) is None
    memory = Memory.create(3)
    assert len(memory.bytes) == len(memory.semaphores) * SLOTS * SLOT_BYTES

    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lanes.multiprocessing, "get_context", refuse)
    assert Memory.create(3) is None
