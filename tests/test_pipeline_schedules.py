"""Pipeline schedules as data: complete, possible, and as good as their names."""

from itertools import chain, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2lpar.pipeline.schedules import (
    Action,
    Span,
    bubble,
    check_pipeline,
    gpipe,
    live_counts,
    one_f_one_b,
    own_actions,
    predict,
    sequential,
    source,
    target,
)

SIZES = list(product(range(1, 6), (1, 2, 5, 8)))  # stages, micro-batches
# schedule: (ticks, micro-batches of which stage s keeps activations at most)
PROMISES = {
    sequential: (lambda p, m: 2 * m * p, lambda p, m, s: 1),
    gpipe: (lambda p, m: 2 * (m + p - 1), lambda p, m, s: m),
    one_f_one_b: (lambda p, m: 2 * (m + p - 1), lambda p, m, s: min(m, p - s)),
}
seconds = st.floats(0.125, 8)


def F(stage, microbatch):
    return Action(stage, microbatch, "forward")


def B(stage, microbatch):
    return Action(stage, microbatch, "backward")


def in_short(actions):
    return " ".join(f"{kind[0].upper()}{i}" for _, i, kind in actions)


@pytest.mark.parametrize("schedule", PROMISES)
def test_every_microbatch_passes_every_stage_forward_and_backward_in_a_possible_order(
    schedule,
):
    num_ticks, keeps = PROMISES[schedule]
    for p, m in SIZES:
        ticks = schedule(p, m)
        check_pipeline(ticks, p, m)
        at = {action: t for t, tick in enumerate(ticks) for action in tick}
        assert len(ticks) == num_ticks(p, m) and all(ticks)
        assert sum(map(len, ticks)) == len(at) == 2 * p * m
        assert set(at) == set(product(range(p), range(m), ("forward", "backward")))
        # one action at a time
        assert len({(s, t) for (s, _, _), t in at.items()}) == len(at)
        for (s, i, kind), t in at.items():
            if kind == "forward":
                assert s == 0 or at[s - 1, i, "forward"] < t
            else:
                assert at[s, i, "forward"] < t
                assert s == p - 1 or at[s + 1, i, "backward"] < t
        counts = live_counts(chain(*ticks))
        assert [max(counts[s]) for s in range(p)] == [keeps(p, m, s) for s in range(p)]
        assert all(of_stage[-1] == 0 for of_stage in counts.values())


def test_1f1b_tick_by_tick():
    ticks = one_f_one_b(3, 4)
    lines = [
        [in_short(a for a in tick if a.stage == s).rjust(2, ".") for tick in ticks]
        for s in range(3)
    ]
    assert [" ".join(line) for line in lines] == [
        "F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3",
        ".. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..",
        ".. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..",
    ]
    assert in_short(own_actions(ticks, 1)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert in_short(own_actions(gpipe(2, 3), 1)) == "F0 F1 F2 B2 B1 B0"
    assert in_short(own_actions(sequential(2, 2), 0)) == "F0 B0 F1 B1"


def test_source_and_target_are_the_neighbours_that_an_action_has():
    assert source(F(0, 4), 3) is None and source(F(2, 4), 3) == F(1, 4)
    assert source(B(2, 4), 3) is None and source(B(0, 4), 3) == B(1, 4)
    assert target(F(2, 4), 3) is None and target(F(0, 4), 3) == F(1, 4)
    assert target(B(0, 4), 3) is None and target(B(2, 4), 3) == B(1, 4)


F10 = "forward of micro-batch 0 on stage 1"
REFUSED = [
    ([], "forward of micro-batch 0 on stage 0 is missing"),
    (gpipe(2, 2)[:-1], "backward of micro-batch 0 on stage 0 is missing"),
    (gpipe(2, 2) + [[F(1, 0)]], f"tick 6: {F10} was done in tick 1"),
    ([[F(0, 0)], [F(1, 0), F(0, 1), B(1, 0)]], "tick 1: stage 1 has two actions"),
    ([[F(0, 0), F(0, 0)]], "tick 0: stage 0 has two actions"),
    ([[F(1, 0)]], f"tick 0: {F10} comes before forward of micro-batch 0 on stage 0"),
    (
        [[F(0, 0), F(1, 0)]],
        f"tick 0: {F10} comes before forward of micro-batch 0 on stage 0",
    ),
    (
        [[F(0, 0)], [F(0, 1)], [B(1, 0)]],
        f"backward of micro-batch 0 on stage 1 comes before {F10}",
    ),
    (
        [[F(0, 0)], [F(1, 0)], [B(0, 0)]],
        (
            "backward of micro-batch 0 on stage 0 comes before backward of micro-batch"
            " 0 on stage 1"
        ),
    ),
    ([[F(2, 0)]], "stage=2, .* is no action of 2 stages and 2 micro-batches"),
    ([[F(0, -1)]], "microbatch=-1, .* is no action"),
    ([[Action(0, 0, "sideways")]], "kind='sideways'.* is no action"),
]


def test_what_is_no_training_step_is_refused_with_what_is_wrong():
    for ticks, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            check_pipeline(ticks, 2, 2)


# The clock


@given(
    st.sampled_from(list(PROMISES)),
    st.integers(1, 8),
    st.integers(1, 12),
    seconds,
    seconds,
)
def test_bubble_of_equal_stages_hangs_on_their_number_alone(
    schedule, p, m, forward, backward
):
    idle = bubble(predict(schedule(p, m), forward, backward))
    assert idle == pytest.approx(
        (p - 1) / p if schedule is sequential else (p - 1) / (m + p - 1)
    )


def test_bubble_is_measured_from_the_first_start():
    spans = [Span(*F(0, 0), 5, 6), Span(*F(1, 0), 6, 7), Span(*B(1, 0), 7, 9)]
    assert bubble(iter(spans)) == 1 - 4 / (2 * 4)


def test_uneven_stages_and_transfers_by_hand():
    assert predict(gpipe(2, 2), [1, 2], (2, 4), transfer=0.5) == [
        Span(*F(0, 0), 0, 1),
        Span(*F(0, 1), 1, 2),
        Span(*F(1, 0), 1.5, 3.5),
        Span(*F(1, 1), 3.5, 5.5),
        Span(*B(1, 1), 5.5, 9.5),
        Span(*B(0, 1), 10, 12),
        Span(*B(1, 0), 9.5, 13.5),
        Span(*B(0, 0), 14, 16),
    ]
    assert predict(gpipe(1, 1)) == [Span(*F(0, 0), 0, 1), Span(*B(0, 0), 1, 3)]
    with pytest.raises(ValueError, match="backward has 3 times for 2 stages"):
        predict(gpipe(2, 2), backward=[1, 2, 3])


def test_live_counts_after_each_action_of_ticks_or_of_spans():
    expected = {0: [1, 2, 1, 2, 1, 0], 1: [1, 0, 1, 0, 1, 0]}
    ticks = one_f_one_b(2, 3)
    assert live_counts(chain(*ticks)) == live_counts(predict(ticks)) == expected
    assert list(live_counts([F(1, 0), F(0, 0)])) == [0, 1]
