"""Pipeline schedules: possible, as good as their formulas, and torch's own lists."""

from functools import partial
from itertools import chain, product

import numpy as np
import pytest
import torch
from helpers import in_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

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


@pytest.mark.parametrize("schedule", KEEPS)
def test_every_pass_happens_once_after_those_that_it_needs(schedule):
    v = 2 if schedule in (ps.interleaved, ps.zero_bubble_v) else 1
    for p, m in product(range(1, 6), range(1, 13)):
        if schedule is ps.interleaved and m % p:
            continue
        orders = schedule(p, m)
        play(orders)  # each pass once, after those that it needs
        kinds = {"forward", "backward"} | {action.kind for action in orders[0]}
        assert set(chain(*orders)) == set(product(range(v * p), range(m), kinds))
        for rank, order in enumerate(orders):
            assert max(ps.kept(order)) == KEEPS[schedule](p, m, rank)
            assert ps.kept(order)[-1] == 0


@pytest.mark.parametrize(
    ("name", "orders", "m"),
    [
        ("ScheduleInterleaved1F1B", ps.interleaved(3, 9, v=3), 9),
        ("ScheduleInterleavedZeroBubble", ps.zero_bubble(3, 6), 6),
        ("ScheduleZBVZeroBubble", ps.zero_bubble_v(3, 7), 7),
        ("ScheduleZBVZeroBubble", ps.zero_bubble_v(3, 3), 3),  # fewer than 2p - 1
    ],
)
@in_ranks(3)
def test_lists_are_torchs(rank, p, name, orders, m):
    from torch.distributed.pipelining import PipelineStage, schedules

    place, cpu = ps.placement(orders), torch.device("cpu")
    own = [s for s in place if place[s] == rank]
    stages = [PipelineStage(nn.Linear(2, 2), s, len(place), cpu) for s in own]
    order = getattr(schedules, name)(stages, m, nn.MSELoss()).pipeline_order[rank]
    # torch writes I for a backward pass of the input alone
    words = [str(action).replace("I", "B") for action in order if action]
    ours = [f"{s}{kind[0].upper()}{i}" for s, i, kind in orders[rank]]
    assert ours == [word for word in words if "REDUCE" not in word]


@in_ranks(3)
def test_1f1b_runs_in_torchs_order(rank, p):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    module, word, X = nn.Linear(4, 4), [], torch.randn(5, 4)
    module.register_forward_hook(lambda *_: word.append("F"))
    module.register_full_backward_pre_hook(lambda *_: word.append("B"))
    stage = PipelineStage(module, rank, p, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 5, loss_fn=nn.MSELoss())
    schedule.step(*[X] * (rank == 0), target=X if rank == p - 1 else None)
    word = "".join(word[-10:])  # before that it finds out shapes
    assert spell(word, rank) == ps.one_f_one_b(p, 5)[rank]


def test_ticks_and_rounds_by_hand():
    assert [len(tick) for tick in play(ps.one_f_one_b(2, 2))] == [1, 2, 1, 2, 1, 1]
    assert ps.interleaved(4, 8, v=1, ahead=1) == ps.one_f_one_b(4, 8)
    with pytest.raises(ValueError, match="rounds of 4 micro-batches: 6 do not fit"):
        ps.interleaved(4, 6)


F0, B0 = "forward pass of micro-batch 0", "backward pass of micro-batch 0"
REFUSED = [
    ([], "the schedule has no actions"),
    ([spell("FBFB", 0), spell("FB", 1)], "on stage 1 occurs 0 times, not once"),
    ([spell("FB", 0), spell("FB", 2)], f"{F0} on stage 1 occurs 0 times"),
    ([[F(0, 0), F(0, 0), B(0, 0)]], f"{F0} on stage 0 occurs 2 times, not once"),
    ([[*spell("FB", 0), Action(0, 0, "sideways")]], "'sideways'.* is no action"),
    ([[*spell("FB", 0), F(0, -1)]], "microbatch=-1, .* is no action"),
    ([[F(0, 0)], [B(0, 0)]], "stage 0 is on ranks 0 and 1"),
    ([spell("fFbB", 0, 1)], f"tick 0: {F0} on stage 1 waits for {F0} on stage 0"),
    ([spell("FB", 0), spell("BF", 1)], f"tick 1: {B0} on stage 1 waits for {F0} on st"),
    ([spell("FWB", 0)], f"weight pass of micro-batch 0 .* waits for {B0}"),
]


@pytest.mark.parametrize(("orders", "words"), REFUSED)
def test_what_cannot_happen_is_refused_with_what_is_wrong(orders, words):
    for use in (play, clock):
        with pytest.raises(ValueError, match=words):
            use(orders)


# The clock


@given(st.integers(1, 8), st.integers(1, 12), *[st.floats(0.125, 8)] * 3)
def test_idle_times_are_those_of_the_formulas(p, m, f, b, w):
    uneven, equal = (f, b, w), (f, f, f)
    fill = (p - 1) * (f + b + w)
    for schedule, n, costs, idle in [
        (ps.sequential, m, uneven, m * fill),
        (ps.gpipe, m, uneven, fill),
        (ps.one_f_one_b, m, uneven, fill),
        (ps.interleaved, m * p, uneven, fill),
        (ps.zero_bubble, m * p, equal, (p - 1) * f),
        (ps.zero_bubble_v, max(m * p, 2 * p - 1), equal, (p - 1) * f),
    ]:
        orders = schedule(p, n)
        busy = len(ps.placement(orders)) // p * n * sum(costs)
        found = bubble(clock(orders, *costs))
        assert found == pytest.approx(idle / (idle + busy)), schedule


def test_uneven_stages_and_transfers_by_hand():
    spans = clock(ps.gpipe(2, 2), [1, 2], [1, 2], [1, 2], transfer=0.5)
    assert [[(span.start, span.end) for span in own] for own in spans] == [
        [(0, 1), (1, 2), (10, 12), (14, 16)],
        [(1.5, 3.5), (3.5, 5.5), (5.5, 9.5), (9.5, 13.5)],
    ]
    # no message between two stages of a rank
    orders = [[F(0, 0), F(1, 0), B(1, 0), B(0, 0)]]
    assert clock(orders, np.float32(1), np.ones(2), transfer=9)[0][-1].end == 6
    with pytest.raises(ValueError, match="backward has 3 costs for 2 stages"):
        clock(ps.gpipe(2, 2), backward=[1, 2, 3])
    # a bubble counts from the first start on
    spans = [[Span(F(0, 0), 5, 6)], [Span(F(1, 0), 6, 7), Span(B(1, 0), 7, 9)]]
    assert bubble(spans) == 1 - 4 / (2 * 4)
