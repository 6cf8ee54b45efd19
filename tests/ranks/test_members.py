"""What is kept for a group goes when the group goes, and a line is apart from the group's calls."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT, SOON, attempt, take

from d2lpar import ranks
from d2lpar.ranks import members
from d2lpar.ranks.lanes import CHANNELS, Lanes
from d2lpar.ranks.launcher import RankError, launch
from d2lpar.ranks.members import destroy, group_like, line_of
from d2lpar.ranks.transport import Messages


def channel_of(group):
    """The channel of a group's lanes; None where it sends messages."""
    ranks.barrier(group)  # now it is known
    return getattr(ranks.member_of(group, None)[0].transport, "channel", None)


def test_destroyed_group_is_not_kept():
    def use(rank, world_size):
        alive = []
        for way in ("lanes", "messages"):
            group = dist.new_group()
            ranks.barrier(group)
            take(way, group)
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
            found.append(channel_of(group))
            dist.destroy_process_group(group)
            del group
            ranks.barrier()
        return None not in found and all(sums)

    assert launch(use, 2, timeout=LIMIT) == [True, True]


@pytest.mark.parametrize("left", ["a message", "a note", "doubt"])
def test_channel_in_which_something_may_be_left_is_not_used_again(left):
    def use(rank, world_size):
        group = dist.new_group()
        channel = channel_of(group)
        if rank == 0 and left == "a message":  # nobody takes it, and unchecked nobody misses it
            ranks.broadcast(torch.ones(3), 0, group, check=False)
        elif rank == 0 and left == "a note":
            assert attempt(ranks.barrier, group, timeout=0.3)[0] == "PeerError"
        elif rank == 0:  # it has waited in vain, and knows not what for
            late = attempt(ranks.broadcast, torch.ones(1), 1, group, check=False, timeout=0.3)
            assert late[0] == "PeerError"
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        others = [dist.new_group() for _ in range(CHANNELS)]
        found = [channel_of(other) for other in others]
        return channel is not None and channel not in found, found.count(None)

    assert launch(use, 2, timeout=LIMIT) == [(True, 2)] * 2


def test_lines_have_an_order_of_their_own_and_give_their_channels_back():
    def check(rank, world_size):
        kinds = []
        for _ in range(2 * CHANNELS):
            line = line_of(None)
            ranks.barrier(line)
            kinds.append(type(line.transport))
            del line
        assert set(kinds) == {Lanes}
        lines = [line_of(None) for _ in range(CHANNELS)]
        for line in lines:
            ranks.barrier(line)
        assert [type(line.transport) for line in lines] == [Lanes] * (CHANNELS - 1) + [Messages]
        del line, lines
        for way in ("lanes", "messages"):
            take(way)
            places = [line_of(None), line_of(None), None]
            sums = [torch.full((5,), 10.0**i + rank) for i in range(3)]
            with ThreadPoolExecutor(3) as executor:  # on rank 1 they begin the other way round
                order = [0, 1, 2] if rank == 0 else [2, 1, 0]
                calls = [executor.submit(ranks.allreduce, sums[i], group=places[i]) for i in order]
                for call in calls:
                    call.result()
            assert [t.tolist() for t in sums] == [[2 * 10.0**i + 1] * 5 for i in range(3)]
            kind = Lanes if way == "lanes" else Messages
            assert {type(place.transport) for place in places[:2]} == {kind}
        ranks.use_messages()  # told again: lines go on to have numbers of their own
        assert line_of(None).transport.line == places[1].transport.line + 1

    launch(check, 2, timeout=LIMIT)


def test_group_whose_connections_a_failed_line_has_closed_says_so():
    def use(rank, world_size):
        ranks.use_messages()
        line = line_of(None)
        try:
            with line.transport.call("a test"):
                raise ArithmeticError("on this line")
        except ArithmeticError:
            ranks.barrier()

    with pytest.raises(RankError, match="ArithmeticError: on this line"):
        launch(use, 2, timeout=LIMIT)


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
        group, find, found, searches = dist.new_group(), members._find_lanes, [], []

        def slow(*args):
            searches.append(args)
            time.sleep(0.3)
            return find(*args)

        members._find_lanes = slow
        calls = [lambda: found.append(members.member_of(group, 30)[0].transport)] * 2
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(searches), found[0] is found[1], type(found[0])

    assert launch(check, 2, timeout=LIMIT) == [(1, True, Lanes)] * 2


def test_the_timeout_is_that_of_the_call_also_of_the_first_one_or_of_the_messages():
    def check(rank, k):
        group = dist.new_group()
        ranks.use_messages(timeout=0.3)
        if rank == 1:
            return None
        alone = dist.new_group([0])
        outcomes = [attempt(ranks.barrier, group, timeout=0.3), attempt(ranks.barrier)]
        return outcomes, ranks.member_of(alone, None)[1]

    outcomes, of_a_new_group = launch(check, 2, timeout=LIMIT)[0]
    assert of_a_new_group == 0.3
    for kind, _, named, seconds in outcomes:
        assert (kind, named) == ("PeerError", (1,)) and seconds < SOON
