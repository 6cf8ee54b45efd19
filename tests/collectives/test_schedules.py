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
    direct,
    exchanges,
    halving_doubling,
    holdings,
    num_chunks,
    recursive_doubling,
    ring,
    sent_and_written,
    star,
    tree,
    tree_broadcast,
    verify_allreduce,
)

SCHEDULES = (star, ring, tree, direct, halving_doubling, recursive_doubling)


def chunks_moved(steps, k):
    """Chunks sent and received by each participant, the whole tensor counting as all of them."""
    total, sent, received = num_chunks(steps), Counter(), Counter()
    for step in steps:
        for src, dst, chunk, _ in step:
            size = total if chunk is None else len(chunk) if isinstance(chunk, range) else 1
            sent[src] += size
            received[dst] += size
    return [sent[r] for r in range(k)], [received[r] for r in range(k)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("k", range(1, 18))
def test_everyone_ends_with_every_contribution_exactly_once(schedule, k):
    verify_allreduce(schedule, k)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_participant_has_nothing_to_do(schedule):
    assert schedule(1) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_step_is_empty(schedule):
    assert all(step for k in range(2, 18) for step in schedule(k))


@pytest.mark.parametrize("k", range(2, 18))
def test_the_star_has_two_steps_and_a_hub(k):
    steps = star(k)
    assert len(steps) == 2
    assert chunks_moved(steps, k) == ([k - 1] + [1] * (k - 1), [k - 1] + [1] * (k - 1))


@pytest.mark.parametrize("k", range(2, 18))
def test_the_ring_sends_one_chunk_to_the_next_in_each_of_its_steps(k):
    steps = ring(k)
    assert len(steps) == 2 * (k - 1)
    assert num_chunks(steps) == k
    for step in steps:
        assert sorted((m.src, m.dst) for m in step) == [(r, (r + 1) % k) for r in range(k)]
        assert sorted(m.chunk for m in step) == list(range(k))
    assert chunks_moved(steps, k) == ([2 * (k - 1)] * k, [2 * (k - 1)] * k)


@pytest.mark.parametrize("k", range(2, 18))
def test_halfway_round_the_ring_participant_r_holds_the_sum_of_chunk_r(k):
    halfway = holdings(ring(k), k)[k - 1]
    for r in range(k):
        whole = [c for c in range(k) if halfway[r][c] == tuple(range(k))]
        assert whole == [r]


@pytest.mark.parametrize("k", range(2, 18))
def test_the_tree_takes_two_rounds_a_level(k):
    steps = tree(k)
    assert len(steps) == 2 * ceil(log2(k))
    for step in steps:  # nobody is in two messages at once
        assert max(Counter(r for m in step for r in (m.src, m.dst)).values()) == 1
    assert sum(map(len, steps)) == 2 * (k - 1)


@pytest.mark.parametrize("k", range(2, 18))
def test_direct_takes_two_rounds_of_k_minus_1_chunks(k):
    steps = direct(k)
    assert len(steps) == 2
    assert num_chunks(steps) == k
    for step in steps:
        assert Counter(m.src for m in step) == Counter(dict.fromkeys(range(k), k - 1))
    assert chunks_moved(steps, k) == ([2 * (k - 1)] * k, [2 * (k - 1)] * k)


@pytest.mark.parametrize("k", [2, 4, 8, 16])
def test_halving_doubling_takes_few_steps_and_the_rings_bytes(k):
    steps = halving_doubling(k)
    assert len(steps) == 2 * log2(k)
    assert num_chunks(steps) == k
    for step in steps:  # one message each
        assert Counter(m.src for m in step) == Counter(range(k))
    assert chunks_moved(steps, k) == chunks_moved(ring(k), k)


@pytest.mark.parametrize("k", [3, 5, 6, 7, 9, 15])
def test_halving_doubling_adds_two_steps_where_k_is_no_power_of_two(k):
    assert len(halving_doubling(k)) == 2 * (int(log2(k)) + 1)


@pytest.mark.parametrize("k", range(2, 18))
def test_recursive_doubling_exchanges_whole_tensors_in_the_fewest_steps(k):
    steps, p = recursive_doubling(k), 2 ** int(log2(k))
    doubling = steps if k == p else steps[1:-1]
    assert len(doubling) == log2(p) and len(steps) == log2(p) + 2 * (k > p)
    assert num_chunks(steps) == 1
    for step in doubling:
        assert exchanges(step) == set(step) and len(step) == p
    check_steps(steps, k)


@pytest.mark.parametrize("k", range(1, 10))
def test_a_broadcast_brings_the_sources_contribution_to_all(k):
    for src in range(k):
        steps = tree_broadcast(k, src)
        assert len(steps) == (ceil(log2(k)) if k > 1 else 0)
        assert all(held == [(src,)] for held in holdings(steps, k)[-1])


# What others have published, or written on the first try: each must be caught.


def without_the_last_step(k):
    return ring(k)[:-1]


def adds_one_contribution_twice(k):
    return [star(k)[0] + star(k)[0][:1], star(k)[1]]


def forgets_a_participant(k):
    return [[m for m in step if k - 1 not in m[:2]] for step in star(k)]


def adds_instead_of_taking(k):
    return [[m._replace(reduce=True) for m in step] for step in ring(k)]


def takes_instead_of_adding(k):
    return [[m._replace(reduce=False) for m in step] for step in ring(k)]


@pytest.mark.parametrize(
    "wrong",
    [
        without_the_last_step,
        adds_one_contribution_twice,
        forgets_a_participant,
        adds_instead_of_taking,
        takes_instead_of_adding,
    ],
)
def test_a_wrong_schedule_is_refused_with_what_it_leaves(wrong):
    with pytest.raises(
        ValueError, match=r"participant \d ends with the contributions .* in chunk \d"
    ):
        verify_allreduce(wrong, 4)


def test_holdings_of_the_ring_step_by_step():
    states = holdings(ring(3), 3)
    assert states[0] == [[(r,)] * 3 for r in range(3)]
    assert states[1] == [[(0,), (0, 2), (0,)], [(1,), (1,), (0, 1)], [(1, 2), (2,), (2,)]]
    assert states[2] == [
        [(0, 1, 2), (0, 2), (0,)],
        [(1,), (0, 1, 2), (0, 1)],
        [(1, 2), (2,), (0, 1, 2)],
    ]
    assert states[4] == [[(0, 1, 2)] * 3] * 3


def test_holdings_reads_what_was_there_before_the_step():
    swap = [[Move(0, 1, None, True), Move(1, 0, None, True)]]
    assert holdings(swap, 2)[1] == [[(0, 1)], [(0, 1)]]


def test_holdings_shows_a_contribution_that_is_added_twice():
    again = [[Move(0, 1, None, True)], [Move(0, 1, None, True)]]
    assert holdings(again, 2)[-1] == [[(0,)], [(0, 0, 1)]]


@pytest.mark.parametrize(
    "move",
    [
        Move(0, 3, 0, True),
        Move(-1, 0, 0, True),
        Move(1, 1, 0, True),
        Move(0, 1, -1, True),
        Move(0, 1, range(-1, 1), True),
        Move(0, 1, range(0, 4, 2), True),
        Move(0, 1, range(2, 2), True),
    ],
)
def test_a_move_that_cannot_be_is_an_error_that_names_it(move):
    def wrong(k):
        return [[move, Move(0, 1, 1, True)]]

    words = r"Move\(src=.* two of 3 participants|Move\(src=.* names no chunk"
    with pytest.raises(ValueError, match=words):
        holdings(wrong(3), 3)
    with pytest.raises(ValueError, match=words):
        cost.walk(wrong, 3, 40)
    data = [torch.ones(4) for _ in range(3)]
    with pytest.raises(ValueError, match=words):
        allreduce(data, wrong)
    assert all(tensor.tolist() == [1] * 4 for tensor in data)


@pytest.mark.parametrize(
    "step",
    [
        [Move(0, 1, None, False), Move(1, 0, None, False)],  # to swap is no exchange
        [Move(0, 1, None, True), Move(1, 0, None, False)],
        [Move(0, 1, None, True), Move(1, 2, None, True)],
        [Move(0, 1, 0, True), Move(1, 0, None, True)],  # not the same chunk
        [Move(0, 1, None, True), Move(1, 0, None, True), Move(2, 0, None, True)],
        [Move(0, 1, None, True), Move(1, 0, None, True), Move(0, 2, None, True)],
        [Move(0, 1, 0, True), Move(1, 0, 0, True), Move(0, 1, 1, True)],
        [Move(0, 1, 0, True), Move(1, 0, 0, True), Move(2, 0, range(2), True)],
        [Move(a, b, None, True) for a in range(3) for b in range(3) if a != b],
    ],
)
def test_a_chunk_must_not_be_sent_and_overwritten_in_one_step_but_by_an_exchange(step):
    def wrong(k):
        return [[Move(0, 1, None, True)], step]

    data = [torch.ones(4) for _ in range(3)]
    for use in (
        lambda: verify_allreduce(wrong, 3),
        lambda: holdings(wrong(3), 3),
        lambda: cost.walk(wrong, 3, 40),
        lambda: plot.schedule(wrong, 3),
        lambda: allreduce(data, wrong),
    ):
        with pytest.raises(
            ValueError, match=r"in step 2 participant \d sends chunk [01] while it is overwritten"
        ):
            use()
    assert all(tensor.tolist() == [1] * 4 for tensor in data)


@pytest.mark.parametrize(
    "step",
    [
        [Move(0, 2, None, False), Move(1, 2, None, False)],
        [Move(0, 2, None, True), Move(1, 2, None, False)],
        [Move(0, 2, range(2), False), Move(1, 2, 1, True)],
    ],
)
def test_what_is_taken_must_not_be_written_by_another_message(step):
    with pytest.raises(ValueError, match=r"in step 1 participant 2 takes chunk [01] while another"):
        verify_allreduce(lambda k: [step], 3)
    check_steps([[m._replace(reduce=True) for m in step]], 3)  # several may be added


def test_a_schedule_that_has_changed_is_taken_as_it_is_now():
    steps = star(2)
    data = [torch.ones(2), torch.ones(2)]
    allreduce(data, lambda k: steps)

    def changing(k):
        return steps

    allreduce(data, changing)
    steps = [[Move(1, 0, None, False)]]  # now it is another one
    data[0].zero_()
    allreduce(data, changing)
    assert data[0].tolist() == data[1].tolist() == [4, 4]


def test_a_schedule_may_yield_its_steps_and_moves():
    def lazy(k):
        yield from (iter(step) for step in ring(k))

    data = [torch.arange(6.0) + r for r in range(3)]
    allreduce(data, lazy)
    assert all(tensor.tolist() == [3.0 * i + 3 for i in range(6)] for tensor in data)
    verify_allreduce(lazy, 3)
    assert holdings(lazy(3), 3) == holdings(ring(3), 3)
    assert cost.walk(lazy, 3, 24) == cost.walk(ring, 3, 24)
    assert cost.link_bytes(lazy, 3, 24) == cost.link_bytes(ring, 3, 24)
    assert plot.schedule(lazy, 3, "ring").svg == plot.schedule(ring, 3, "ring").svg


@pytest.mark.parametrize("k", (2, 3, 4, 6))
def test_the_ring_in_two_steps_is_refused_by_all(k):
    """All r to r + 1 at once, then copies: made one by one, its moves would give right sums."""

    def impossible(k):
        around = [Move(r, r + 1, None, True) for r in range(k - 1)]
        return [around, [Move(k - 1, r, None, False) for r in range(k - 1)]]

    data = [torch.ones(4) for _ in range(k)]
    if k > 2:
        for use in (
            lambda: allreduce(data, impossible),
            lambda: cost.walk(impossible, k, 16),
            lambda: cost.link_bytes(impossible, k, 16),
            lambda: holdings(impossible(k), k),
        ):
            with pytest.raises(ValueError, match="in step 1 participant 1 sends chunk 0"):
                use()
    run_schedule(impossible(k), data)  # unchecked, it gives what its moves say: r holds r - 1 and r
    assert [tensor[0].item() for tensor in data] == [2.0] * k


def test_an_exchange_is_two_moves_of_one_chunk_that_both_reduce():
    swap = [Move(0, 1, range(2), True), Move(1, 0, range(2), True)]
    aside = [Move(0, 2, 2, True), Move(1, 2, 3, False)]
    assert exchanges(swap + aside) == set(swap)
    assert exchanges(aside) == exchanges([]) == set()
    check_steps([swap + aside], 4)


def test_what_is_sent_and_written_in_one_step():
    step = [Move(0, 1, range(2), True), Move(1, 2, 1, True), Move(2, 3, 0, True)]
    assert sent_and_written(step, 2) == {(1, 1)}
    assert sent_and_written([*step, Move(3, 2, None, False)], 2) == {(1, 1), (2, 0), (3, 0)}
    assert sent_and_written(ring(4)[0], 4) == set()


def test_the_number_of_chunks_is_one_more_than_the_largest_named():
    assert num_chunks([]) == num_chunks(star(3)) == 1
    assert num_chunks([[Move(0, 1, 4, True), Move(0, 1, range(2, 7), True)]]) == 7
