"""Schedules: what everyone ends with, which ones are refused, and what they cost."""

from functools import partial
from itertools import pairwise
from math import ceil, log2

import pytest
import torch
from helpers import SCHEDULES

from d2lpar import allreduce, cost, count_bytes, plot, two_level
from d2lpar.schedules import (
    Move,
    check_steps,
    even_bounds,
    holdings,
    recursive_doubling,
    ring,
    star,
    tree_broadcast,
    verify_allreduce,
)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_everyone_ends_with_every_contribution_exactly_once(schedule):
    assert schedule(1) == []
    for k in range(1, 18):
        verify_allreduce(schedule, k)
        assert all(schedule(k))  # no step is empty


def test_how_many_steps_there_are():
    for k in range(2, 18):
        log, fold = int(log2(k)), 2 * (2 ** int(log2(k)) < k)
        expected = [2, 2 * (k - 1), 2 * ceil(log2(k)), 2, 2 * log + fold, log + fold]
        assert [len(schedule(k)) for schedule in SCHEDULES] == expected


def test_a_broadcast_brings_the_sources_contribution_to_all():
    for k, src in [(n, src) for n in range(1, 10) for src in range(n)]:
        steps = tree_broadcast(k, src)
        assert len(steps) == ceil(log2(k))
        assert all(held == [(src,)] for held in holdings(steps, k)[-1])


def test_two_levels_are_right_and_only_likes_cross_between_nodes():
    for nodes, size in [(1, 4), (4, 1), (2, 4), (3, 2)]:
        schedule, k = partial(two_level, size=size), nodes * size
        verify_allreduce(schedule, k)
        c = cost(schedule, k, 4 * k)  # a float per chunk
        assert c.steps == 2 * (size - 1) + 2 * (nodes - 1)
        between = {
            link: n for link, n in c.bytes.items() if link[0] // size != link[1] // size
        }
        assert all(src % size == dst % size for src, dst in between)
        assert set(between.values()) <= {4 * 2 * (nodes - 1)}
    with pytest.raises(ValueError, match="6 participants do not make whole nodes of 4"):
        two_level(6)


# Who holds what


def swap(chunk):
    return [Move(0, 1, chunk, True), Move(1, 0, chunk, True)]


def test_holdings_reads_what_was_there_before_the_step():
    states = holdings(ring(3), 3)
    assert states[0] == [[(r,)] * 3 for r in range(3)]
    first = [[(0,), (0, 2), (0,)], [(1,), (1,), (0, 1)], [(1, 2), (2,), (2,)]]
    assert states[1] == first and states[4] == [[(0, 1, 2)] * 3] * 3
    assert holdings([swap(None)], 2)[1] == [[(0, 1)], [(0, 1)]]
    twice = [[Move(0, 1, None, True)]] * 2
    assert holdings(twice, 2)[-1] == [[(0,)], [(0, 0, 1)]]


def changed(schedule, **values):
    return lambda k: [[m._replace(**values) for m in step] for step in schedule(k)]


WRONG = {
    "without the last step": lambda k: ring(k)[:-1],
    "adds one contribution twice": lambda k: [star(k)[0] + star(k)[0][:1], star(k)[1]],
    "adds instead": changed(ring, reduce=True),
    "takes instead": changed(ring, reduce=False),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_schedule_is_refused_with_what_it_leaves(wrong):
    with pytest.raises(ValueError, match=r"participant \d ends with .* in chunk \d"):
        verify_allreduce(wrong, 4)


NOT_BETWEEN, NO_CHUNK = r"Move\(.* is not between two of 3", r"Move\(.* names no chunk"
TORN = r"in step 2 chunk [01] of participant \d is sent, and the same step changes it"
TWICE = r"in step 2 chunk [01] of participant 2 arrives more than once, and is not"
REFUSED = [
    ([Move(0, 3, 0, True)], NOT_BETWEEN),
    ([Move(1, 1, 0, True)], NOT_BETWEEN),
    ([Move(0, 1, range(-1, 1), True)], NO_CHUNK),
    ([Move(0, 1, range(0, 4, 2), True)], NO_CHUNK),
    ([Move(0, 1, range(2, 2), True)], NO_CHUNK),
    ([Move(0, 2, None, True), Move(1, 2, None, False)], TWICE),
    ([Move(0, 2, range(2), False), Move(1, 2, 1, True)], TWICE),
    ([Move(0, 1, None, True), Move(1, 0, None, False)], TORN),
    ([Move(0, 1, None, True), Move(1, 2, None, True)], TORN),  # a ring at once
    ([Move(0, 1, 0, True), Move(1, 0, None, True)], TORN),  # not the same chunk
    ([*swap(None), Move(0, 2, None, True)], TORN),
    ([*swap(0), *swap(1)], TORN),  # between ranks one would be written too early
]


@pytest.mark.parametrize(("step", "words"), REFUSED)
def test_moves_that_cannot_be_are_refused_by_all_and_named(step, words):
    def schedule(k):
        return [[Move(0, 1, None, True)], step]

    data = [torch.ones(4) for _ in range(3)]
    for use in (
        lambda: verify_allreduce(schedule, 3),
        lambda: cost(schedule, 3, 40),
        lambda: plot.schedule(schedule, 3),
        lambda: allreduce(data, schedule),
    ):
        with pytest.raises(ValueError, match=words):
            use()
    assert all(tensor.tolist() == [1] * 4 for tensor in data)


def test_several_may_be_added_and_two_may_exchange_beside_others():
    check_steps([[Move(0, 2, None, True), Move(1, 2, None, True)]], 3)
    check_steps([swap(range(2)) + [Move(0, 2, 2, True), Move(1, 2, 3, False)]], 4)


@pytest.mark.parametrize("numel, n", [(0, 3), (2, 3), (7, 3), (12, 4), (5, 1)])
def test_bounds_are_where_tensor_split_cuts(numel, n):
    sizes = [len(part) for part in torch.empty(numel).tensor_split(n)]
    bounds = even_bounds(numel, n)
    assert [b - a for a, b in pairwise(bounds)] == sizes


# What it costs


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bytes_are_those_that_travel_when_the_schedule_runs(schedule):
    for k in (1, 2, 3, 4, 5, 8):
        for numel in (0, 1, 3, 64, 101):
            with count_bytes() as ledger:
                allreduce([torch.full((numel,), float(r)) for r in range(k)], schedule)
            c = cost(schedule, k, 4 * numel)
            assert c.bytes == ledger.bytes
            assert [c.sent(r) for r in range(k)] == [ledger.sent(r) for r in range(k)]


def test_a_step_takes_as_long_as_its_busiest_participant():
    # 5 seconds for a whole tensor, 2 for a quarter; the star's hub has a queue
    seconds = [cost(s, 4, 4000, lambda *_: (1, 0.001)).seconds for s in SCHEDULES]
    expected = [2 * 3 * 5, 6 * 2, 4 * 5, 2 * 3 * 2, 2 * (3 + 2), 2 * 5]
    assert seconds == pytest.approx(expected)


def test_each_link_may_have_its_own_cost():
    def link(src, dst):
        return (1, 0) if src // 2 == dst // 2 else (100, 0)

    # 0 and 1 exchange, then 0 and 2, and 1 and 3, over slow links
    assert cost(recursive_doubling, 4, 40, link).seconds == 101
