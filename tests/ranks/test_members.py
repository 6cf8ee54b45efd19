"""What is kept for a group goes when the group goes, and a line is apart from the group's calls."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from d2lpar import ranks
from d2lpar.ranks import members
from d2lpar.ranks.lanes import CHANNELS, Lanes
from d2lpar.ranks.launcher import RankError, launch
from d2lpar.ranks.members import destroy, line_of
from d2lpar.ranks.transport import Messages, group_like

LIMIT = 60  # seconds, for what takes less than one


def has_lanes(group):
    return isinstance(ranks.member_of(group, None)[0].transport, Lanes)


def test_destroyed_group_is_not_kept():
    def use(rank, world_size):
        alive = []
        for way in (ranks.barrier, ranks.use_messages):
            group = dist.new_group()
            way(group)
            ranks.barrier(group)
            alive.append(weakref.ref(group))
            dist.destroy_process_group(group)
            del group
        gc.collect()
        return [group() is None for group in alive]

    assert launch(use, 2, timeout=LIMIT) == [[True, True]] * 2


def test_channel_of_a_group_that_is_gone_is_used_again():
    def use(rank, world_size):
        found, sums = [], []
        for i in range(3 * CHANNELS):
            group = dist.new_group()
            for _ in range(i % 3):  # so that the lanes stop at different slots
                ranks.barrier(group)
            tensor = torch.full((100_000,), float(rank + i))
            ranks.allreduce(tensor, group=group)
            sums.append(tensor.unique().tolist() == [2.0 * i + 1])
            found.append(has_lanes(group))
            dist.destroy_process_group(group)
            del group
            ranks.barrier()
        return found, sums

    for found, sums in launch(use, 2, timeout=LIMIT):
        assert all(found) and all(sums)


def test_channel_in_which_a_message_was_left_is_not_used_again():
    def use(rank, world_size):
        group = dist.new_group()
        ranks.barrier(group)
        if rank == 0:  # nobody takes it, and without a check nobody misses it
            ranks.broadcast(torch.ones(3), src=0, group=group, check=False)
        channel = ranks.member_of(group, None)[0].channel
        dist.destroy_process_group(group)
        del group
        gc.collect()
        ranks.barrier()
        found = []
        groups = [dist.new_group() for _ in range(CHANNELS)]
        for group in groups:
            ranks.barrier(group)
            member = ranks.member_of(group, None)[0]
            found.append(member.channel if has_lanes(group) else None)
        return channel in found, found.count(None)

    assert launch(use, 2, timeout=LIMIT) == [(False, 2)] * 2


def test_channel_of_a_broken_group_is_not_used_again():
    def use(rank, world_size):
        group = dist.new_group()
        ranks.barrier(group)
        channel = ranks.member_of(group, None)[0].channel
        if rank == 0:
            with pytest.raises(ranks.PeerError):
                ranks.barrier(group, timeout=0.1)
        ranks.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        other = dist.new_group()
        ranks.barrier(other)
        return ranks.member_of(other, None)[0].channel != channel

    assert launch(use, 2, timeout=LIMIT) == [True] * 2


@pytest.mark.parametrize("way", ["lanes", "messages"])
def test_line_has_an_order_of_its_own(way):
    def check(rank, world_size):
        if way == "messages":
            ranks.use_messages()
        places = [line_of(None), line_of(None), None]
        sums = [torch.full((5,), 10.0**i + rank) for i in range(3)]
        with ThreadPoolExecutor(3) as executor:  # on rank 1 they begin the other way round
            order = [0, 1, 2] if rank == 0 else [2, 1, 0]
            calls = [executor.submit(ranks.allreduce, sums[i], group=places[i]) for i in order]
            for call in calls:
                call.result()
        kind = {type(place.transport) for place in places[:2]}
        return [tensor.tolist() for tensor in sums], kind

    expected = [[2 * 10.0**i + 1] * 5 for i in range(3)]
    kind = {Lanes} if way == "lanes" else {Messages}
    assert launch(check, 2, timeout=LIMIT) == [(expected, kind)] * 2


def test_line_gives_its_channel_back():
    def use(rank, world_size):
        kinds = []
        for _ in range(2 * CHANNELS):
            line = line_of(None)
            ranks.barrier(line)
            kinds.append(type(line.transport))
            del line
        return set(kinds)

    assert launch(use, 3, timeout=LIMIT) == [{Lanes}] * 3


def test_lines_beyond_the_channels_send_messages():
    def use(rank, world_size):
        lines = [line_of(None) for _ in range(CHANNELS + 1)]
        sums = []
        for i, line in enumerate(lines):
            tensor = torch.tensor([i + rank])
            ranks.allreduce(tensor, group=line)
            sums.append(tensor.item())
        return sums, sum(isinstance(line.transport, Lanes) for line in lines)

    assert launch(use, 2, timeout=LIMIT) == [([1, 3, 5, 7, 9], CHANNELS - 1)] * 2


def test_line_keeps_its_number_when_the_group_is_told_again_to_send_messages():
    def use(rank, world_size):
        ranks.use_messages()
        first = line_of(None)
        ranks.use_messages()
        return first.transport.line, line_of(None).transport.line

    assert launch(use, 2, timeout=LIMIT) == [(1, 2)] * 2


def test_group_whose_connections_a_failed_line_has_closed_says_so():
    def use(rank, world_size):
        ranks.use_messages()
        line = line_of(None)
        try:
            with line.transport.guard():
                raise ArithmeticError("on this line")
        except ArithmeticError:
            ranks.barrier()

    with pytest.raises(RankError, match="ArithmeticError: on this line"):
        launch(use, 2, timeout=LIMIT)


def test_line_is_not_begun_while_another_call_is_under_way():
    def use(rank, world_size):
        transport = ranks.member_of(None, None)[0].transport
        with pytest.raises(ranks.BusyError), transport.call("held"):
            line_of(None, timeout=5)
        return transport.refusal

    for refusal in launch(use, 2, timeout=LIMIT):
        assert "called find a channel while held" in refusal


def test_groups_of_our_own_are_destroyed_where_that_is_safe():
    def use(rank, world_size):
        def groups():
            return len(dist.distributed_c10d._world.pg_map)

        before = groups()
        group = group_like(None)
        destroy(group)
        some = groups() - before
        pair = dist.new_group([0, 1])
        if rank < 2:
            first = group_like(pair)
            destroy(first)  # its name would be given to the next one
            second = group_like(pair)
            assert first.group_name != second.group_name
        dist.destroy_process_group()
        destroy(group)  # says nothing
        return some

    assert launch(use, 3, timeout=LIMIT) == [0] * 3


def test_two_threads_that_begin_a_group_have_one_transport():
    def check(rank, k):
        group, find, found, searches = dist.new_group(), members._with_lanes, [], []

        def slow(*args):
            searches.append(args)
            time.sleep(0.3)
            return find(*args)

        members._with_lanes = slow
        calls = [lambda: found.append(members.member_of(group, 30)[0].transport)] * 2
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(searches), found[0] is found[1], type(found[0]).__name__

    assert launch(check, 2) == [(1, True, "Lanes")] * 2
