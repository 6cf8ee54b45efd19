"""What is kept for a group goes with it; a line is apart from the group's calls."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT, SOON, attempt, in_ranks, take, transport_of

from d2lpar import ranks
from d2lpar.ranks import members
from d2lpar.ranks.lanes import CHANNELS, Lanes
from d2lpar.ranks.launcher import RankError, launch
from d2lpar.ranks.members import destroy, group_like, line_of
from d2lpar.ranks.transport import Messages


def channel_of(group):
    """The channel of a group's lanes; None where it sends messages."""
    return getattr(transport_of(group), "channel", None)


@in_ranks(2)
def test_destroyed_group_is_not_kept_and_its_channel_is_used_again(rank, k):
    for i in range(3 * CHANNELS):
        group = dist.new_group()
        assert channel_of(group) is not None
        for _ in range(i % 3):  # so that the lanes stop at different slots
            ranks.barrier(group)
        tensor = torch.full((100_000,), float(rank + i))
        ranks.allreduce(tensor, group=group)
        assert tensor.unique().tolist() == [2.0 * i + 1]
        if i % 2:
            take("messages", group)
            ranks.barrier(group)
        gone = weakref.ref(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert gone() is None
        ranks.barrier()


@in_ranks(2)
def test_channel_in_which_something_may_be_left_is_not_used_again(rank, k):
    late = partial(attempt, timeout=0.3)
    for left in (
        lambda group: (
            rank == 0 and ranks.broadcast(torch.ones(3), 0, group, check=False)
        ),
        lambda group: rank == 0 and late(ranks.barrier, group),  # a note
        # It has waited in vain, and knows not what for
        lambda group: (
            rank == 0 and late(ranks.broadcast, torch.ones(1), 1, group, check=False)
        ),
    ):
        group = dist.new_group()
        assert channel_of(group) is not None
        assert (left(group) or [None])[0] in (None, "PeerError")
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
    assert CHANNELS == 4 and channel_of(dist.new_group()) is None


@in_ranks(2)
def test_lines_and_groups_have_an_order_of_their_own_and_lines_give_their_channels_back(
    rank, k
):
    def add_up(i, place):
        for _ in range(20):
            tensor = torch.full((5,), 10.0**i + rank)
            ranks.allreduce(tensor, group=place)
            assert tensor.tolist() == [2 * 10.0**i + 1] * 5

    for _ in range(2 * CHANNELS):
        line = line_of(None)
        ranks.barrier(line)
        assert type(line.transport) is Lanes
        del line
    lines = [line_of(None) for _ in range(CHANNELS)]
    for line in lines:
        ranks.barrier(line)
    assert [type(line.transport) for line in lines] == [Lanes] * (CHANNELS - 1) + [
        Messages
    ]
    del line, lines
    for way, kind in (("lanes", Lanes), ("messages", Messages)):
        take(way)
        group = dist.new_group()
        take(way, group)
        places = [line_of(None), line_of(None), None, group]
        # on rank 1 they begin the other way round
        with ThreadPoolExecutor(4) as executor:
            order = (0, 1, 2, 3) if rank == 0 else (3, 2, 1, 0)
            calls = [executor.submit(add_up, i, places[i]) for i in order]
            [call.result() for call in calls]
        assert {type(place.transport) for place in places[:2]} == {kind}
    ranks.use_messages()  # told again: lines go on to have numbers of their own
    assert line_of(None).transport.line == places[1].transport.line + 1


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


@in_ranks(3)
def test_groups_of_our_own_are_destroyed_where_that_is_safe(rank, k):
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    group = group_like(None)
    destroy(group)
    assert len(groups) == before
    pair = dist.new_group([0, 1])
    if rank < 2:
        first = group_like(pair)
        destroy(first)  # its name would be given to the next one
        assert first.group_name != group_like(pair).group_name
    dist.destroy_process_group()
    destroy(group)  # says nothing


@in_ranks(2)
def test_two_threads_that_begin_a_group_have_one_transport(rank, k):
    group, find, searches = dist.new_group(), members._find_lanes, []

    def slow(*args):
        searches.append(args)
        time.sleep(0.3)
        return find(*args)

    members._find_lanes = slow
    both = threading.Barrier(2)
    with ThreadPoolExecutor(2) as executor:
        calls = [
            lambda: (both.wait(), members.member_of(group, 30)[0].transport)[1]
        ] * 2
        first, second = executor.map(lambda call: call(), calls)
    assert len(searches) == 1 and first is second and type(first) is Lanes


@in_ranks(2)
def test_the_timeout_is_that_of_the_call_also_of_the_first_one_or_of_the_messages(
    rank, k
):
    group = dist.new_group()
    ranks.use_messages(timeout=0.3)
    if rank == 1:
        return
    assert ranks.member_of(dist.new_group([0]), None)[1] == 0.3
    for kind, _, named, seconds in (
        attempt(ranks.barrier, group, timeout=0.3),
        attempt(ranks.barrier),
    ):
        assert (kind, named) == ("PeerError", (1,)) and seconds < SOON
