"""The cost of a schedule: the clock's, the formula's, and the bytes that in fact travel."""

from itertools import pairwise

import pytest
import torch

from d2lpar import allreduce, count_bytes
from d2lpar.collectives import cost
from d2lpar.collectives.schedules import (
    direct,
    halving_doubling,
    recursive_doubling,
    ring,
    star,
    tree,
)

CLOSED = (star, ring, tree, direct, halving_doubling)
SCHEDULES = (*CLOSED, recursive_doubling)


@pytest.mark.parametrize("schedule", CLOSED)
def test_the_closed_form_equals_the_walk(schedule):
    for k in (*range(1, 34), 48, 63, 64):
        for nbytes, itemsize in ((0, 4), (44, 4), (1000, 2), (10_007, 1)):
            walked = cost.walk(schedule, k, nbytes, 3e-6, 7e-9, itemsize)
            formula = cost.closed_form(schedule, k, nbytes, 3e-6, 7e-9, itemsize)
            assert walked.seconds == pytest.approx(formula.seconds, rel=1e-9, abs=0)
            assert vars(walked) | {"seconds": 0} == vars(formula) | {"seconds": 0}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bytes_are_those_that_travel_when_the_schedule_runs(schedule):
    for k in (1, 2, 3, 4, 5, 8):
        for numel in (0, 1, 3, 64, 101):
            with count_bytes() as ledger:
                allreduce([torch.full((numel,), float(r)) for r in range(k)], schedule)
            predicted = cost.walk(schedule, k, 4 * numel)
            assert predicted.sent == tuple(ledger.sent(r) for r in range(k))
            assert predicted.received == tuple(ledger.received(r) for r in range(k))
            assert predicted.busiest_link == max(ledger.bytes.values(), default=0)


def test_a_step_takes_as_long_as_its_busiest_participant():
    alpha, beta, n = 1.0, 0.001, 4000  # 5 seconds for a whole tensor, 2 for a quarter
    seconds = {s: cost.walk(s, 4, n, alpha, beta).seconds for s in SCHEDULES}
    assert seconds[star] == pytest.approx(2 * 3 * 5)  # the hub's queue, once in and once out
    assert seconds[ring] == pytest.approx(6 * 2)
    assert seconds[tree] == pytest.approx(4 * 5)
    assert seconds[direct] == pytest.approx(2 * 3 * 2)
    assert seconds[halving_doubling] == pytest.approx(2 * (3 + 2))
    assert seconds[recursive_doubling] == pytest.approx(2 * 5)


def test_ring_bytes_hardly_grow_with_k_and_star_bytes_do():
    n = 4 * 2**20
    for schedule in CLOSED:  # also of so many
        big = cost.closed_form(schedule, 100_000, n)
        assert len(big.sent) == 100_000 and sum(big.sent) == sum(big.received)
    assert cost.closed_form(ring, 100_000, n, 0, 1).busiest_link < 2 * n + 1
    assert cost.closed_form(star, 100_000, n, 0, 1).sent[0] == 99_999 * n
    times = [cost.closed_form(ring, 2**i, n, 0, 1e-9).seconds for i in range(1, 10)]
    assert all(a < b < 2 * n * 1e-9 for a, b in pairwise(times))


def test_the_walk_takes_any_schedule_and_the_closed_form_says_that_it_does_not():
    def backwards(k):
        return [[m._replace(src=k - 1 - m.src, dst=k - 1 - m.dst) for m in s] for s in star(k)]

    assert cost.walk(backwards, 3, 40).sent == (40, 40, 80)
    with pytest.raises(ValueError, match=r"no closed form for .*backwards, .*: use walk"):
        cost.closed_form(backwards, 3, 40)


@pytest.mark.parametrize("function", [cost.walk, cost.closed_form])
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
