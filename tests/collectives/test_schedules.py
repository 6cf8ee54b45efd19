"""Schedules: what each sends, what everyone ends with, and which ones are refused."""

from collections import Counter
from math import ceil, log2

import pytest
import torch

from d2lpar import allreduce, plot
from d2lpar.collectives import cost
from d2lpar.collectives.lists import run_schedule
from d2lpar.collectives.schedules import (
    Move,
    check_steps,
    chunks_of,
    direct,
    exchanges,
    halving_doubling,
    holdings,
    num_chunks,
    recursive_doubling,
    ring,
    star,
    tree,
    tree_broadcast,
    verify_allreduce,
)

SCHEDULES = (star, ring, tree, direct, halving_doubling, recursive_doubling)
KS = range(2, 18)
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def swap(chunk, a=0, b=1):
    return [Move(a, b, chunk, True), Move(b, a, chunk, True)]


@each_schedule
def test_everyone_ends_with_every_contribution_exactly_once(schedule):
    for k in (1, *KS):
        verify_allreduce(schedule, k)
        assert all(schedule(k))  # no step is empty
    assert schedule(1) == []


def chunks_moved(steps, k):
    """Chunks sent and received by each participant, the whole tensor counting as all of them."""
    total, sent, received = num_chunks(steps), Counter(), Counter()
    for m in (m for step in steps for m in step):
        sent[m.src] += len(chunks_of(m, total))
        received[m.dst] += len(chunks_of(m, total))
    return [sent[r] for r in range(k)], [received[r] for r in range(k)]


@pytest.mark.parametrize("k", KS)
def test_how_much_everyone_sends_and_receives(k):
    share = [2 * (k - 1)] * k  # of k chunks
    hub = [k - 1] + [1] * (k - 1)
    powers = [halving_doubling] if log2(k).is_integer() else []
    for schedule, steps, moved in [
        (star, 2, hub),
        (direct, 2, share),
        (ring, 2 * (k - 1), share),
        *((schedule, 2 * log2(k), share) for schedule in powers),
    ]:
        assert len(schedule(k)) == steps
        assert chunks_moved(schedule(k), k) == (moved, moved)
    assert len(halving_doubling(k)) == 2 * (int(log2(k)) + (not powers))


@pytest.mark.parametrize("k", KS)
def test_the_ring_sends_one_chunk_to_the_next_and_is_halfway_a_reduce_scatter(k):
    for step in ring(k):
        assert sorted((m.src, m.dst) for m in step) == [(r, (r + 1) % k) for r in range(k)]
        assert sorted(m.chunk for m in step) == list(range(k))
    for r, held in enumerate(holdings(ring(k), k)[k - 1]):
        assert [c for c in range(k) if held[c] == tuple(range(k))] == [r]


@pytest.mark.parametrize("k", KS)
def test_the_tree_takes_two_rounds_a_level(k):
    steps = tree(k)
    assert len(steps) == 2 * ceil(log2(k))
    for step in steps:  # nobody is in two messages at once
        assert max(Counter(r for m in step for r in (m.src, m.dst)).values()) == 1
    assert sum(map(len, steps)) == 2 * (k - 1)


@pytest.mark.parametrize("k", KS)
def test_recursive_doubling_exchanges_whole_tensors_in_the_fewest_steps(k):
    steps, p = recursive_doubling(k), 2 ** int(log2(k))
    doubling = steps if k == p else steps[1:-1]
    assert len(doubling) == log2(p) and len(steps) == log2(p) + 2 * (k > p)
    assert num_chunks(steps) == 1
    for step in doubling:
        assert exchanges(step) == set(step) and len(step) == p


@pytest.mark.parametrize("k", range(1, 10))
def test_a_broadcast_brings_the_sources_contribution_to_all(k):
    for src in range(k):
        steps = tree_broadcast(k, src)
        assert len(steps) == ceil(log2(k))
        assert all(held == [(src,)] for held in holdings(steps, k)[-1])


# Who holds what


def test_holdings_of_the_ring_step_by_step():
    states = holdings(ring(3), 3)
    assert states[0] == [[(r,)] * 3 for r in range(3)]
    assert states[1] == [[(0,), (0, 2), (0,)], [(1,), (1,), (0, 1)], [(1, 2), (2,), (2,)]]
    assert states[4] == [[(0, 1, 2)] * 3] * 3


def test_holdings_reads_what_was_there_before_the_step():
    assert holdings([swap(None)], 2)[1] == [[(0, 1)], [(0, 1)]]
    again = [[Move(0, 1, None, True)], [Move(0, 1, None, True)]]
    assert holdings(again, 2)[-1] == [[(0,)], [(0, 0, 1)]]  # added twice


WRONG = {  # what others have published, or written on the first try
    "without the last step": lambda k: ring(k)[:-1],
    "adds one contribution twice": lambda k: [star(k)[0] + star(k)[0][:1], star(k)[1]],
    "forgets one": lambda k: [[m for m in step if k - 1 not in m[:2]] for step in star(k)],
    "adds instead": lambda k: [[m._replace(reduce=True) for m in step] for step in ring(k)],
    "takes instead": lambda k: [[m._replace(reduce=False) for m in step] for step in ring(k)],
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_schedule_is_refused_with_what_it_leaves(wrong):
    with pytest.raises(ValueError, match=r"participant \d ends with .* in chunk \d"):
        verify_allreduce(wrong, 4)


# Steps that cannot be


def uses(schedule, k, data):
    """Everything that takes a schedule."""
    yield lambda: verify_allreduce(schedule, k)
    yield lambda: holdings(schedule(k), k)
    yield lambda: cost.walk(schedule, k, 40)
    yield lambda: plot.schedule(schedule, k)
    yield lambda: allreduce(data, schedule)


def assert_refused(step, words):
    data = [torch.ones(4) for _ in range(3)]
    for use in uses(lambda k: [[Move(0, 1, None, True)], step], 3, data):
        with pytest.raises(ValueError, match=words):
            use()
    assert all(tensor.tolist() == [1] * 4 for tensor in data)


NOT_BETWEEN = r"Move\(src=.* does not send a chunk between two of 3 participants"
NO_CHUNK = r"Move\(src=.* names no chunk"
TAKEN = r"in step 2 participant 2 takes chunk [01] while another"


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
        ([Move(0, 2, None, False), Move(1, 2, None, False)], TAKEN),
        ([Move(0, 2, None, True), Move(1, 2, None, False)], TAKEN),
        ([Move(0, 2, range(2), False), Move(1, 2, 1, True)], TAKEN),
    ],
)
def test_a_move_that_cannot_be_is_an_error_that_names_it(step, words):
    assert_refused([*step, Move(0, 1, 1, True)], words)


@pytest.mark.parametrize(
    "step",
    [
        [Move(0, 1, None, False), Move(1, 0, None, False)],  # to swap is no exchange
        [Move(0, 1, None, True), Move(1, 0, None, False)],
        [Move(0, 1, None, True), Move(1, 2, None, True)],
        [Move(0, 1, 0, True), Move(1, 0, None, True)],  # not the same chunk
        [*swap(None), Move(2, 0, None, True)],
        [*swap(None), Move(0, 2, None, True)],
        [*swap(0), Move(2, 0, range(2), True)],
        [*swap(None), *swap(None, 0, 2), *swap(None, 1, 2)],
    ],
)
def test_a_chunk_must_not_be_sent_and_overwritten_in_one_step_but_by_an_exchange(step):
    assert_refused(step, r"in step 2 participant \d sends chunk [01] while it is overwritten")


def test_several_may_be_added_and_two_may_exchange_beside_others():
    check_steps([[Move(0, 2, None, True), Move(1, 2, None, True)]], 3)
    aside = [Move(0, 2, 2, True), Move(1, 2, 3, False)]
    assert exchanges(swap(range(2)) + aside) == set(swap(range(2)))
    check_steps([swap(range(2)) + aside], 4)


@pytest.mark.parametrize("k", (3, 4, 6))
def test_the_ring_in_two_steps_is_refused_by_all(k):
    """All r to r + 1 at once, then copies: made one by one, its moves would give right sums."""

    def impossible(k):
        around = [Move(r, r + 1, None, True) for r in range(k - 1)]
        return [around, [Move(k - 1, r, None, False) for r in range(k - 1)]]

    data = [torch.ones(4) for _ in range(k)]
    for use in uses(impossible, k, data):
        with pytest.raises(ValueError, match=r"in step 1 participant \d sends chunk 0"):
            use()
    run_schedule(impossible(k), data)  # unchecked, it gives what its moves say: r holds r - 1 and r
    assert [tensor[0].item() for tensor in data] == [2.0] * k


def test_a_schedule_may_yield_its_steps_and_moves_and_may_change():
    steps = ring(3)

    def lazy(k):
        yield from (iter(step) for step in steps)

    data = [torch.arange(6.0) + r for r in range(3)]
    allreduce(data, lazy)
    assert all(tensor.tolist() == [3.0 * i + 3 for i in range(6)] for tensor in data)
    verify_allreduce(lazy, 3)
    assert cost.walk(lazy, 3, 24) == cost.walk(ring, 3, 24)
    assert plot.schedule(lazy, 3, "ring").svg == plot.schedule(ring, 3, "ring").svg
    steps = [[Move(1, 0, None, False)]]  # now it is another one
    data[0].zero_()
    allreduce(data, lazy)
    assert all(tensor.tolist() == [3.0 * i + 3 for i in range(6)] for tensor in data)
