"""What carries messages: groups, places for lanes, threads, and ranks that fail."""

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import SOON, attempt, both_ways, in_ranks, take

from d2lpar import RankError, count_bytes, launch, ranks, ring, star


@in_ranks(4)
def test_groups_of_some_ranks_have_lanes_while_there_are_places(rank, k):
    members_of = [(1, 3), (0, 2), (3, 2, 1), (0, 1), (1, 2), (0, 1, 3)]
    groups, kinds = [(m, dist.new_group(m)) for m in members_of * 2], set()
    for members, group in groups:  # {1, 3} and {0, 2} at the same time
        if rank not in members:
            assert attempt(ranks.barrier, group)[0] == "ValueError"
            continue
        kinds.add(type(ranks.group_of(group).transport).__name__)
        order = dist.get_process_group_ranks(group)
        me, data = order.index(rank), [torch.arange(14.0) * 10**r for r in order]
        mine = data[me].clone()
        with count_bytes() as ledger:
            ranks.allreduce(mine, ring, group=group)
        assert torch.equal(mine, sum(data))
        assert set(ledger.bytes) == {(rank, order[(me + 1) % len(order)])}
        mine = data[me].clone()
        ranks.broadcast(mine, order[-1], group)
        assert torch.equal(mine, data[-1])
        outside = next(r for r in range(k) if r not in members)
        for call in (ranks.broadcast, ranks.send):
            kind, text, *_ = attempt(call, data[me], outside, group)
            assert kind == "ValueError" and str(outside) in text
        odd = rank == max(members)
        kind, text, *_ = attempt(ranks.allreduce, torch.ones(3 + odd), group=group)
        assert kind == "MismatchError" and all(f"rank {r}" in text for r in members)
    assert rank != 1 or kinds == {"Lanes", "Messages"}  # it is in ten


@in_ranks(2)
def test_the_first_call_in_a_group_keeps_its_time_limit(rank, k):
    group = dist.new_group()
    if rank == 0:
        kind, *_, seconds = attempt(ranks.barrier, group, timeout=0.3)
        assert kind == "PeerError" and seconds < SOON


@in_ranks(2)
def test_a_chunk_that_is_exchanged_is_sent_before_it_is_written(rank, k):
    ranks.use_messages()
    group, tensor = ranks.group_of(), torch.full((1000,), rank + 1.0)
    if rank == 0:
        group.exchange([(1, tensor)], [(1, tensor, "sum")], group.deadline(None))
        assert tensor.unique().tolist() == [3]
    else:
        tag, theirs = group.messages.tag, torch.empty(1000)
        dist.send(tensor, 0, tag=tag)  # it has come when ours is taken
        time.sleep(0.2)
        dist.recv(theirs, 0, tag=tag)
        assert theirs.unique().tolist() == [1]


# A rank does not do its part.


FAULTS = {  # what is said, and what rank 1 does, after all have agreed
    "ZeroDivisionError": lambda: 1 / 0,
    "PeerError": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


@both_ways
@pytest.mark.parametrize("schedule", [star, ring])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_does_not_do_its_part_is_named(fault, schedule, way, monkeypatch):
    launcher = sys.modules["d2lpar.ranks.launch"]  # the name is also the function's
    monkeypatch.setattr(launcher, "GRACE", 3)  # let others speak

    def check(rank, k):
        take(way)
        group = ranks.group_of()
        if rank == 1:
            group.exchange = lambda *_: FAULTS[fault]()
        try:
            ranks.allreduce(torch.ones(8), schedule, timeout=2)
        except ranks.PeerError as error:
            assert error.peers and rank not in error.peers
            if rank == (0 if schedule is star else 2):  # which waits for rank 1 itself
                assert 1 in error.peers
            raise

    with pytest.raises(RankError) as caught:
        launch(check, 3, timeout=6)
    assert fault in str(caught.value).splitlines()[0]
    texts = "".join(map(str, caught.value.errors.values()))
    assert "AssertionError" not in texts and "rank 1 did not take part" in texts


@both_ways
@in_ranks(2)
def test_who_sends_or_takes_nothing_is_named_in_time(rank, k, way):
    take(way)
    if rank == 0:
        for function in (
            partial(ranks.receive, 1),
            partial(ranks.send, torch.ones(5_000_000), 1, own := ranks.own_group()),
        ):
            kind, _, named, seconds = attempt(function, timeout=0.3)
            assert (kind, named) == ("PeerError", (1,)) and seconds < SOON
            assert "can no longer be used since" in attempt(function)[1]
        del own
    else:
        ranks.own_group()


# Threads.


def wait_for_a_send(group):
    """Wait until a thread sends to rank 1, perhaps in the group's first call."""
    known = ranks.transport.here.groups
    while group not in known or not known[group].under_way["send", 1].locked():
        time.sleep(0.001)


@both_ways
@in_ranks(2)
def test_a_call_beside_that_of_another_thread_is_refused(rank, k, way):
    take(way)
    for group in (dist.group.WORLD, dist.new_group()):  # in which it is the first call
        if rank == 0:
            with ThreadPoolExecutor(1) as executor:
                first = executor.submit(ranks.allreduce, torch.ones(3), group=group)
                wait_for_a_send(group)
                kind, text, *_ = attempt(ranks.barrier, group)
                assert kind == "BusyError" and "barrier was called while" in text
                assert "ranks.own_group()" in text
                dist.send(torch.empty(1), 1)
                first.result()
        else:
            dist.recv(torch.empty(1), 0)
            ranks.allreduce(torch.ones(3), group=group)
        ranks.barrier(group)  # the group goes on


@in_ranks(2)
def test_a_broken_group_says_so_while_a_thread_still_sends(rank, k):
    group = ranks.own_group()
    group.broken = "it is broken"
    with group.alone("send", ("send", 1 - rank)):
        kind, text, *_ = attempt(ranks.barrier, group)
    assert kind == "PeerError" and "used since: it is broken" in text


@in_ranks(4)
def test_two_groups_that_need_new_ones_of_torch_do_not_wait_for_each_other(rank, k):
    group = ranks.group_of(dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0])
    group.messages.has_nccl = True  # such a group does
    for i in range(4):  # one of the two is late
        time.sleep(0.1 * (rank // 2 == i % 2))
        own, total = ranks.own_group(group), torch.tensor([1.0 + rank])
        ranks.allreduce(total, group=own)
        assert own.ranks == group.ranks and total.item() == (3 if rank < 2 else 7)


@both_ways
@in_ranks(2)
def test_threads_with_groups_of_their_own_have_an_order_of_their_own(rank, k, way):
    take(way)
    groups = [ranks.own_group() for _ in range(9)]  # more than there are places

    def add_up(i):
        for _ in range(20):
            tensor = torch.full((5,), 100.0 * i + rank)
            ranks.allreduce(tensor, group=groups[i])
            assert tensor.tolist() == [200.0 * i + 1] * 5

    with ThreadPoolExecutor(9) as executor:  # on rank 1 they begin the other way round
        list(executor.map(add_up, range(9) if rank == 0 else reversed(range(9))))


@both_ways
@in_ranks(3)
def test_a_thread_that_waits_to_send_holds_up_no_other_message(rank, k, way):
    take(way)
    large = torch.arange(2.0**20)  # more than lanes hold
    if rank == 0:
        with ThreadPoolExecutor(1) as executor:
            first = executor.submit(ranks.send, large, 1)
            wait_for_a_send(dist.group.WORLD)
            ranks.send(large, 2)
            assert ranks.receive(2).item() == 7
            first.result()
    elif rank == 1:
        assert ranks.receive(2).item() == 7  # which has come after these messages
        assert torch.equal(ranks.receive(0), large)
    else:
        assert torch.equal(ranks.receive(0), large)
        ranks.send(torch.tensor(7.0), 0)
        ranks.send(torch.tensor(7.0), 1)
