"""Pipeline schedules: possible, as good as their formulas, and torch's own lists."""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from helpers import LIMIT
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from d2lpar import launch
from d2lpar import pipeline_schedules as ps
from d2lpar.pipeline_schedules import Action, Span, bubble, clock, play, spell

# schedule: how many stages' activations rank r of p keeps at most
KEEPS = {
    ps.sequential: lambda p, m, r: 1,
    ps.gpipe: lambda p, m, r: m,
    ps.one_f_one_b: lambda p, m, r: min(m, p - r),
    ps.interleaved: lambda p, m, r: min(2 * m, 3 * p - 2 * r - 1),
    ps.zero_bubble: lambda p, m, r: min(m, p),
    ps.zero_bubble_v: lambda p, m, r: min(2 * m, 2 * p, m + r + 1),
}
F, B = [partial(Action, kind=kind) for kind in ("forward", "backward")]
seconds = st.floats(0.125, 8)


def sizes(schedule):
    """Ranks and micro-batches that a schedule can be made for."""
    step = (lambda p: p) if schedule is ps.interleaved else (lambda p: 1)
    return [(p, m) for p in range(1, 6) for m in range(step(p), 13, step(p))]


def duration(spans):
    return max(own[-1].end for own in spans)


@pytest.mark.parametrize("schedule", KEEPS)
def test_every_pass_happens_once_after_those_that_it_needs(schedule):
    for p, m in sizes(schedule):
        orders = schedule(p, m)
        v = 2 if schedule in (ps.interleaved, ps.zero_bubble_v) else 1
        kinds = {"forward", "backward"} | {a.kind for a in orders[0]}
        at = {action: t for t, tick in enumerate(play(orders)) for action in tick}
        assert set(at) == set(product(range(v * p), range(m), kinds))
        assert sum(map(len, orders)) == len(at) and len(orders) == p
        for (s, i, kind), t in at.items():
            if kind == "forward":
                assert s == 0 or at[s - 1, i, "forward"] < t
            elif kind == "backward":
                assert at[s, i, "forward"] < t
                assert s == v * p - 1 or at[s + 1, i, "backward"] < t
            else:
                assert at[s, i, "backward"] < t
        place = ps.placement(orders)
        for rank, order in enumerate(orders):
            assert {place[action.stage] for action in order} == {rank}
            times = [at[action] for action in order]
            assert times == sorted(set(times))  # one at a time, in its order
            assert max(ps.kept(order)) == KEEPS[schedule](p, m, rank)
            assert ps.kept(order)[-1] == 0


def torchs_list(rank, p, name, place, m):
    """For ``launch``: what torch lists for a rank, such as ["0F0", "0F1", …]."""
    from torch.distributed.pipelining import PipelineStage, schedules

    own, cpu = [s for s in place if place[s] == rank], torch.device("cpu")
    stages = [PipelineStage(nn.Linear(2, 2), s, len(place), cpu) for s in own]
    order = getattr(schedules, name)(stages, m, nn.MSELoss()).pipeline_order[rank]
    words = [str(action) for action in order if action is not None]
    return [word for word in words if "REDUCE" not in word]


@pytest.mark.parametrize(
    ("name", "orders", "m"),
    [
        ("ScheduleInterleaved1F1B", ps.interleaved(3, 6), 6),
        ("ScheduleInterleaved1F1B", ps.interleaved(3, 9, v=3), 9),
        ("ScheduleInterleavedZeroBubble", ps.zero_bubble(3, 6), 6),
        ("ScheduleZBVZeroBubble", ps.zero_bubble_v(3, 7), 7),
        ("ScheduleZBVZeroBubble", ps.zero_bubble_v(3, 3), 3),  # fewer than 2p - 1
    ],
)
def test_lists_are_torchs(name, orders, m):
    split = any(action.kind == "weight" for action in orders[0])
    letters = {"forward": "F", "backward": "I" if split else "B", "weight": "W"}
    ours = [[f"{s}{letters[kind]}{i}" for s, i, kind in order] for order in orders]
    place = ps.placement(orders)
    assert launch(torchs_list, 3, name, place, m, timeout=LIMIT) == ours


def torchs_order(rank, p, m):
    """For ``launch``: the passes of ``Schedule1F1B``, as hooks see them."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    module, word, X = nn.Linear(4, 4), [], torch.randn(m, 4)
    module.register_forward_hook(lambda *_: word.append("F"))
    module.register_full_backward_pre_hook(lambda *_: word.append("B"))
    stage = PipelineStage(module, rank, p, torch.device("cpu"))
    schedule = Schedule1F1B(stage, m, loss_fn=nn.MSELoss())
    for _ in range(2):  # the first step also finds out shapes
        word.clear()
        schedule.step(*[X] * (rank == 0), target=X if rank == p - 1 else None)
    return spell("".join(word), rank)


def test_1f1b_runs_in_torchs_order():
    assert launch(torchs_order, 3, 5, timeout=LIMIT) == ps.one_f_one_b(3, 5)


def test_words_stand_for_actions():
    assert spell("FFBF", 3) == [F(3, 0), F(3, 1), B(3, 0), F(3, 2)]
    assert spell("Ffbw", 0, 5) == [F(0, 0), F(5, 0), B(5, 0), Action(5, 0, "weight")]
    assert ps.interleaved(4, 8, v=1, ahead=1) == ps.one_f_one_b(4, 8)
    with pytest.raises(ValueError, match="rounds of 4 micro-batches: 6 do not fit"):
        ps.interleaved(4, 6)


F0, B0 = "forward pass of micro-batch 0", "backward pass of micro-batch 0"
REFUSED = [
    ([], "the schedule has no actions"),
    ([spell("FBFB", 0), spell("FB", 1)], "on stage 1 occurs 0 times, not once"),
    ([spell("FB", 0), spell("FB", 2)], f"{F0} on stage 1 occurs 0 times"),
    ([[F(0, 0), F(0, 0), B(0, 0)]], f"{F0} on stage 0 occurs 2 times, not once"),
    ([spell("FBFBW", 0)], "weight pass of micro-batch 1 on stage 0 occurs 0 times"),
    ([[*spell("FB", 0), Action(0, 0, "sideways")]], "'sideways'.* is no action"),
    ([[*spell("FB", 0), F(0, -1)]], "microbatch=-1, .* is no action"),
    ([[F(0, 0)], [B(0, 0)]], "stage 0 is on ranks 0 and 1"),
    ([spell("BF", 0)], f"tick 0: {B0} on stage 0 waits for {F0} on stage 0"),
    ([spell("FB", 0), spell("BF", 1)], f"tick 1: {B0} on stage 1 waits for {F0} on st"),
    ([spell("FWB", 0)], f"weight pass of micro-batch 0 .* waits for {B0}"),
]


@pytest.mark.parametrize(("orders", "words"), REFUSED)
def test_what_cannot_happen_is_refused_with_what_is_wrong(orders, words):
    for use in (play, clock):
        with pytest.raises(ValueError, match=words):
            use(orders)


# The clock


@given(st.integers(1, 8), st.integers(1, 12), seconds, seconds, seconds)
def test_idle_times_are_those_of_the_formulas(p, m, f, b, w):
    whole = f + b + w
    for schedule in (ps.gpipe, ps.one_f_one_b):
        idle = bubble(clock(schedule(p, m), f, b, w))
        assert idle == pytest.approx((p - 1) / (m + p - 1))
    assert bubble(clock(ps.sequential(p, m), f, b, w)) == pytest.approx((p - 1) / p)
    m *= p
    halves = f / 2, b / 2, w / 2
    idle = duration(clock(ps.interleaved(p, m), *halves)) - m * whole
    assert idle == pytest.approx((p - 1) * whole / 2)
    thirds = f / 3, f / 3, f / 3  # equal, as the two others assume
    idle = duration(clock(ps.zero_bubble(p, m), *thirds)) - m * f
    assert idle == pytest.approx((p - 1) * f / 3)
    m = max(m, 2 * p - 1)
    sixths = f / 6, f / 6, f / 6
    idle = duration(clock(ps.zero_bubble_v(p, m), *sixths)) - m * f
    assert idle == pytest.approx((p - 1) * f / 6)


def test_uneven_stages_and_transfers_by_hand():
    assert clock(ps.gpipe(2, 2), [1, 2], [1, 2], [1, 2], transfer=0.5) == [
        [Span(F(0, 0), 0, 1), Span(F(0, 1), 1, 2)]
        + [Span(B(0, 0), 10, 12), Span(B(0, 1), 14, 16)],
        [Span(F(1, 0), 1.5, 3.5), Span(F(1, 1), 3.5, 5.5)]
        + [Span(B(1, 0), 5.5, 9.5), Span(B(1, 1), 9.5, 13.5)],
    ]
    # no message between two stages of a rank
    orders = [[F(0, 0), F(1, 0), B(1, 0), B(0, 0)]]
    assert duration(clock(orders, np.float32(1), np.ones(2), transfer=9)) == 6
    with pytest.raises(ValueError, match="backward has 3 costs for 2 stages"):
        clock(ps.gpipe(2, 2), backward=[1, 2, 3])


def test_the_bubble_counts_from_the_first_start_on():
    spans = [[Span(F(0, 0), 5, 6)], [Span(F(1, 0), 6, 7), Span(B(1, 0), 7, 9)]]
    assert bubble(spans) == 1 - 4 / (2 * 4)
