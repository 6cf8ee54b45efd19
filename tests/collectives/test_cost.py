"""The cost of a schedule: the clock's, the formula's, and the bytes that travel."""

from itertools import pairwise

import pytest
import torch
from helpers import SCHEDULES

from d2lpar import allreduce, count_bytes
from d2lpar.collectives.cost import closed_form, walk
from d2lpar.collectives.schedules import recursive_doubling, ring, star

CLOSED = [schedule for schedule in SCHEDULES if schedule is not recursive_doubling]


@pytest.mark.parametrize("schedule", CLOSED)
def test_the_closed_form_equals_the_walk(schedule):
    for k in (*range(1, 18), 31, 32, 48, 63, 64):
        for nbytes, itemsize in ((0, 4), (44, 4), (1000, 2), (10_007, 1)):
            walked, formula = (
                vars(cost(schedule, k, nbytes, 3e-6, 7e-9, itemsize))
                for cost in (walk, closed_form)
            )
            assert walked.pop("seconds") == pytest.approx(
                formula.pop("seconds"), rel=1e-9, abs=0
            )
            assert walked == formula


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bytes_are_those_that_travel_when_the_schedule_runs(schedule):
    for k in (1, 2, 3, 4, 5, 8):
        for numel in (0, 1, 3, 64, 101):
            with count_bytes() as ledger:
                allreduce([torch.full((numel,), float(r)) for r in range(k)], schedule)
            predicted = walk(schedule, k, 4 * numel)
            assert predicted.sent == tuple(ledger.sent(r) for r in range(k))
            assert predicted.received == tuple(ledger.received(r) for r in range(k))
            assert predicted.busiest_link == max(ledger.bytes.values(), default=0)


def test_a_step_takes_as_long_as_its_busiest_participant():
    # 5 seconds for a whole tensor, 2 for a quarter; the star's hub has a queue, both
    # ways
    seconds = [
        walk(schedule, 4, 4000, alpha=1.0, beta=0.001).seconds for schedule in SCHEDULES
    ]
    assert seconds == pytest.approx(
        [2 * 3 * 5, 6 * 2, 4 * 5, 2 * 3 * 2, 2 * (3 + 2), 2 * 5]
    )


def test_ring_bytes_hardly_grow_with_k_and_star_bytes_do():
    n = 4 * 2**20
    big = {schedule: closed_form(schedule, 100_000, n) for schedule in CLOSED}
    assert all(sum(cost.sent) == sum(cost.received) for cost in big.values())
    assert big[ring].busiest_link <= 2 * n and big[star].sent[0] == 99_999 * n
    times = [closed_form(ring, 2**i, n, 0, 1e-9).seconds for i in range(1, 10)]
    assert all(a < b < 2 * n * 1e-9 for a, b in pairwise(times))


@pytest.mark.parametrize("function", [walk, closed_form])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"k": 0}, "k and itemsize must be positive, not 0 and 4"),
        ({"itemsize": 0}, "not 4 and 0"),
        ({"nbytes": -4}, "not be negative: -4"),
        ({"alpha": -1}, "negative: 40, -1"),
        ({"beta": float("nan")}, "negative: 40, 1e-05, nan"),
        ({"nbytes": 42}, "42 bytes are no whole number of elements of 4 bytes"),
    ],
)
def test_wrong_numbers_are_named(function, wrong, words):
    with pytest.raises(ValueError, match=words):
        function(**({"schedule": ring, "k": 4, "nbytes": 40} | wrong))


def test_a_schedule_without_a_formula_is_named():
    with pytest.raises(
        ValueError, match=r"no closed form for .*recursive_doubling: use walk"
    ):
        closed_form(recursive_doubling, 3, 40)
