"""Schedules: what each sends, what everyone ends with, and which ones are refused."""

from math import ceil, log2

import pytest
import torch
from helpers import SCHEDULES

from d2lpar import allreduce, plot
from d2lpar.collectives.cost import walk
from d2lpar.collectives.schedules import (
    Move,
    check_steps,
    exchanges,
    holdings,
    num_chunks,
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


@pytest.mark.parametrize("k", range(2, 18))
def test_how_many_steps_there_are(k):
    log = int(log2(k))
    beyond = 2 * (2**log < k)  # steps for those beyond a power of two
    expected = [2, 2 * (k - 1), 2 * ceil(log2(k)), 2, 2 * log + beyond, log + beyond]
    assert [len(schedule(k)) for schedule in SCHEDULES] == expected
    exchanged = [step for step in recursive_doubling(k) if exchanges(step) == set(step)]
    assert len(exchanged) == log and num_chunks(exchanged) == 1  # of whole tensors


def test_a_broadcast_brings_the_sources_contribution_to_all():
    for k, src in [(n, src) for n in range(1, 10) for src in range(n)]:
        steps = tree_broadcast(k, src)
        assert len(steps) == ceil(log2(k))
        assert all(held == [(src,)] for held in holdings(steps, k)[-1])


# Who holds what


def swap(chunk, a=0, b=1):
    return [Move(a, b, chunk, True), Move(b, a, chunk, True)]


def test_holdings_reads_what_was_there_before_the_step():
    states = holdings(ring(3), 3)
    assert states[0] == [[(r,)] * 3 for r in range(3)]
    assert states[1] == [
        [(0,), (0, 2), (0,)],
        [(1,), (1,), (0, 1)],
        [(1, 2), (2,), (2,)],
    ]
    assert states[4] == [[(0, 1, 2)] * 3] * 3
    assert holdings([swap(None)], 2)[1] == [[(0, 1)], [(0, 1)]]
    # added twice
    assert holdings([[Move(0, 1, None, True)]] * 2, 2)[-1] == [[(0,)], [(0, 0, 1)]]


WRONG = {  # what others have published, or written on the first try
    "without the last step": lambda k: ring(k)[:-1],
    "adds one contribution twice": lambda k: [star(k)[0] + star(k)[0][:1], star(k)[1]],
    "forgets one": lambda k: [
        [m for m in step if k - 1 not in m[:2]] for step in star(k)
    ],
    "adds instead": lambda k: [
        [m._replace(reduce=True) for m in step] for step in ring(k)
    ],
    "takes instead": lambda k: [
        [m._replace(reduce=False) for m in step] for step in ring(k)
    ],
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_schedule_is_refused_with_what_it_leaves(wrong):
    with pytest.raises(ValueError, match=r"participant \d ends with .* in chunk \d"):
        verify_allreduce(wrong, 4)


# Steps that cannot be

NOT_BETWEEN = r"Move\(src=.* does not send a chunk between two of 3 participants"
NO_CHUNK = r"Move\(src=.* names no chunk"
TAKEN = r"in step 2 participant 2 takes chunk [01] while another"
OVERWRITTEN = r"in step 2 participant \d sends chunk [01] while it is overwritten"


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ([Move(0, 3, 0, True)], NOT_BETWEEN),
        ([Move(-1, 0, 0, True)], NOT_BETWEEN),
        ([Move(1, 1, 0, True)], NOT_BETWEEN),
        ([Move(0, 1, -1, True)], NO_CHUNK),
        ([Move(0, 1, range(-1, 1), True)], NO_CHUNK),
        ([Move(0, 1, range(0, 4, 2), True)], NO_CHUNK),
        ([Move(0, 1, range(2, 2), True)], NO_CHUNK),
        (
            [Move(0, 2, None, False), Move(1, 2, None, False), Move(0, 1, 1, True)],
            TAKEN,
        ),
        ([Move(0, 2, None, True), Move(1, 2, None, False)], TAKEN),
        ([Move(0, 2, range(2), False), Move(1, 2, 1, True)], TAKEN),
        ([Move(0, 1, None, False), Move(1, 0, None, False)], OVERWRITTEN),  # to swap
        ([Move(0, 1, None, True), Move(1, 0, None, False)], OVERWRITTEN),
        # a ring at once
        ([Move(0, 1, None, True), Move(1, 2, None, True)], OVERWRITTEN),
        # not the same chunk
        ([Move(0, 1, 0, True), Move(1, 0, None, True)], OVERWRITTEN),
        ([*swap(None), Move(2, 0, None, True)], OVERWRITTEN),
        ([*swap(None), Move(0, 2, None, True)], OVERWRITTEN),
        ([*swap(0), Move(2, 0, range(2), True)], OVERWRITTEN),
        ([*swap(None), *swap(None, 0, 2), *swap(None, 1, 2)], OVERWRITTEN),
    ],
)
def test_moves_that_cannot_be_are_refused_by_all_and_named(step, words):
    def schedule(k):
        return [[Move(0, 1, None, True)], step]

    data = [torch.ones(4) for _ in range(3)]
    for use in (
        lambda: verify_allreduce(schedule, 3),
        lambda: holdings(schedule(3), 3),
        lambda: walk(schedule, 3, 40),
        lambda: plot.schedule(schedule, 3),
        lambda: allreduce(data, schedule),
    ):
        with pytest.raises(ValueError, match=words):
            use()
    assert all(tensor.tolist() == [1] * 4 for tensor in data)


def test_several_may_be_added_and_two_may_exchange_beside_others():
    check_steps([[Move(0, 2, None, True), Move(1, 2, None, True)]], 3)
    aside = [Move(0, 2, 2, True), Move(1, 2, 3, False)]
    assert exchanges(swap(range(2)) + aside) == set(swap(range(2)))
    check_steps([swap(range(2)) + aside], 4)


def test_a_schedule_may_yield_its_steps_and_moves_and_may_change():
    steps = ring(3)

    def lazy(k):
        yield from (iter(step) for step in steps)

    data = [torch.arange(6.0) + r for r in range(3)]
    allreduce(data, lazy)
    verify_allreduce(lazy, 3)
    assert walk(lazy, 3, 24) == walk(ring, 3, 24)
    assert plot.schedule(lazy, 3, "ring").alt == plot.schedule(ring, 3, "ring").alt
    steps = [[Move(1, 0, None, False)]]  # now it is another one
    data[0].zero_()
    allreduce(data, lazy)
    assert all(tensor.tolist() == [3.0 * i + 3 for i in range(6)] for tensor in data)
