"""Timelines and pipelines over time: bars where the times are, and the same in words."""

import re

import pytest
import text_layout
from text_layout import SVG, elements, texts

from d2lpar import gpipe, one_f_one_b, plot, sequential
from d2lpar.pipeline.schedules import Span, live_counts, predict
from d2lpar.plot.picture import DARK_GREY, PALETTE, WIDTH

SCHEDULES = [sequential, gpipe, one_f_one_b]
STEP = [
    ("rank 0: compute", "forward", 10.0, 10.004),
    ("rank 0: compute", "backward", 10.004, 10.010),
    ("rank 0: send", "bucket 0", 10.006, 10.0075),
    ("rank 1: compute", "forward", 10.001, 10.009),
    ("rank 1: send", "bucket 0", 10.009, 10.009),
]


def bars(picture):
    """(x, y, width, colour, tooltip) of every bar."""
    found = []
    for rect in elements(picture, "rect"):
        if (tooltip := rect.find(SVG + "title")) is not None:
            x, y, width = (float(rect.get(name)) for name in ("x", "y", "width"))
            found.append((x, y, width, rect.get("fill"), tooltip.text))
    return found


def ticks(picture):
    """{the number below a single panel: x}."""
    found = {}
    for text in elements(picture, "text", text_anchor="middle"):
        if (
            number := re.fullmatch(r"([-\d.e+]+)( ms)?", text.text)
            if not text.get("fill")
            else None
        ):
            found[float(number[1])] = float(text.get("x"))
    return found


def on_axis(picture):
    """How to read an x on the axis: a function."""
    axis = ticks(picture)
    last = max(axis)
    return lambda x: (x - axis[0]) * last / (axis[last] - axis[0])


def places(picture, word):
    return [
        (float(t.get("x")), float(t.get("y"))) for t in elements(picture, "text") if t.text == word
    ]


def near(*values):
    return pytest.approx(list(values), abs=0.02)


def test_bars_of_a_timeline_stand_where_their_times_are_a_lane_a_row_and_a_kind_a_colour():
    picture = plot.timeline(STEP, title="One step")
    time, drawn = on_axis(picture), bars(picture)
    assert [time(x) for x, *_ in drawn] == near(0, 4, 6, 1, 9)
    assert [time(x + width) for x, _, width, *_ in drawn[:4]] == near(4, 10, 7.5, 9)
    assert drawn[4][2] == 2  # a span without length can be seen
    assert max(x + width for x, _, width, *_ in drawn) < WIDTH
    rows = [places(picture, lane)[0][1] for lane in dict.fromkeys(lane for lane, *_ in STEP)]
    assert rows == sorted(set(rows)) and len(rows) == 4
    assert [y + 10 + 4 for _, y, *_ in drawn] == [rows[i] for i in (0, 0, 1, 2, 3)]
    compute, send = PALETTE[:2]
    assert [colour for *_, colour, _ in drawn] == [compute, compute, send, compute, send]
    assert drawn[2][-1] == "bucket 0: 6 ms to 7.5 ms"
    assert picture.alt == (
        "Timeline of 10 ms: One step. Lanes: 4. Spans: 5. "
        "rank 0: compute has 2 from 0 ms to 10 ms; rank 0: send has 1 from 6 ms to 7.5 ms; "
        "rank 1: compute has 1 from 1 ms to 9 ms; rank 1: send has 1 from 9 ms to 9 ms."
    )
    assert plot.timeline(STEP).alt.startswith("Timeline of 10 ms. Lanes")


def test_lanes_come_in_the_order_of_their_first_spans_and_many_or_long_ones_fit():
    spans = [("b", "x", 5, 6), ("a", "y", 0, 1), ("b", "z", 0, 2)]
    assert [t for t in texts(plot.timeline(spans)) if "ms" not in t] == list("bxzay")
    many = plot.timeline([(f"rank {i}", "x", i, i + 1) for i in range(40)])
    rows = [y for _, y, *_ in bars(many)]
    assert rows == sorted(set(rows)) and bars(many)[8][3] == PALETTE[0]  # round again
    long = plot.timeline([("x" * 120, "b", 0, 1)])
    [(x, _, width, *_)] = bars(long)
    assert x > 120 * 6 and width > 300
    for picture in (many, long):
        assert list(text_layout.complaints(picture.svg)) == []


def test_a_label_stands_in_its_bar_or_only_in_the_tooltip():
    picture = plot.timeline(STEP)
    words = texts(picture)
    assert words.count("forward") == 2 and words.count("bucket 0") == 1  # the other takes no time
    (x, y, width, *_) = bars(picture)[1]
    assert places(picture, "backward") == [(pytest.approx(x + width / 2, abs=0.1), y + 14)]
    pipe = plot.pipeline([Span(0, 0, "forward", 0, 0.001), Span(0, 0, "backward", 50, 100)])
    assert [t.text for t in elements(pipe, "text", fill="#FFF")] == ["0"]


@pytest.mark.parametrize("total", [m * 10.0**e for e in range(-7, 4) for m in (1, 1.3, 2, 4, 9.9)])
def test_the_axis_has_a_few_round_ticks(total):
    found = list(ticks(plot.timeline([("a", "b", 3.0, 3.0 + total)])))
    assert 4 <= len(found) <= 8 and found[0] == 0
    step = found[1]
    assert found == [pytest.approx(i * step) for i in range(len(found))]
    assert f"{step:e}"[:8] in ("1.000000", "2.000000", "5.000000")
    assert 1000 * total - step < found[-1] <= 1000 * total * (1 + 1e-6)


@pytest.mark.parametrize("total", [1e-6, 0.0123, 1.5])
def test_words_and_numbers_of_a_timeline_have_room(total):
    lanes = [f"rank {i}: {'communicate and wait ' * i}" for i in range(3)]
    spans = [(f"{w} MWM", 0.1 * i, 0.1 * i + 0.03 * w) for i in range(9) for w in range(1, 4)]
    drawn = [(lane, words, total * a, total * b) for lane in lanes for words, a, b in spans]
    assert list(text_layout.complaints(plot.timeline(drawn[::3], title="MWM").svg)) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("p, m", [(1, 1), (4, 8)])
def test_a_pipeline_has_a_bar_for_each_action_where_its_time_is(schedule, p, m):
    spans = sorted(predict(schedule(p, m)), key=lambda span: (span.stage, span.start))
    picture = plot.pipeline(spans, title="All stages")
    time, drawn = on_axis(picture), bars(picture)
    assert len(drawn) == len(spans) == 2 * p * m
    rows = {}
    for (x, y, width, colour, tooltip), span in zip(drawn, spans, strict=True):
        assert [time(x), time(x + width)] == near(span.start, span.end)
        assert colour == PALETTE[span.kind == "backward"]
        assert tooltip.startswith(f"{span.kind} of micro-batch {span.microbatch}: {span.start:g} ")
        rows.setdefault((span.stage, span.kind), set()).add(y)
    assert list(rows.values()) == sorted(rows.values(), key=min)  # from stage 0 down
    assert len(set.union(*rows.values())) == 2 * p == len(rows)  # backward is lower than forward
    peaks = [str(max(counts)) for counts in live_counts(spans).values()]
    words, end = texts(picture), max(span.end for span in spans)
    idle = {sequential: 75, gpipe: 27, one_f_one_b: 27}[schedule] * (p > 1)
    assert f"{end:g}, {idle} % idle" in words
    assert [f"stage {stage}" for stage in range(p)] == [w for w in words if w.startswith("stage ")]
    assert [f"keeps {n}" for n in peaks] == [word for word in words if word.startswith("keeps ")]
    assert picture.alt == (
        f"All stages. {p} stages, {end:g}, {idle} % idle; they keep the activations of up to "
        f"{', '.join(peaks)} micro-batches."
    )


def test_what_is_kept_rises_as_a_forward_starts_and_falls_as_a_backward_ends():
    actions = [("forward", 0, 0, 1), ("forward", 1, 2, 3), ("backward", 1, 4, 6)]
    actions.append(("backward", 0, 8, 10))
    picture = plot.pipeline([Span(0, m, kind, a, b) for kind, m, a, b in actions])
    [strip] = elements(picture, "path", fill=DARK_GREY)
    ground = float(re.match(r"M\S+ ([\d.]+)", strip.get("d"))[1])
    steps = [tuple(map(float, s)) for s in re.findall(r"H([\d.]+)V([\d.]+)", strip.get("d"))]
    time, unit = on_axis(picture), ground - steps[0][1]
    assert [time(x) for x, _ in steps] == near(0, 2, 6, 10)
    assert unit > 1 and [(ground - y) / unit for _, y in steps] == near(1, 2, 1, 0)


def test_several_panels_share_one_scale():
    panels = {"short": predict(gpipe(2, 2)), "long": predict(gpipe(2, 8))}
    picture = plot.pipeline(panels, title="Both")
    drawn = bars(picture)
    assert WIDTH - 100 < max(x + width for x, _, width, *_ in drawn) < WIDTH - 60
    widths = [width for _, _, width, colour, _ in drawn if colour == PALETTE[0]]
    assert len(widths) == 2 * (2 + 8) and min(widths) == pytest.approx(max(widths), abs=0.01)
    assert picture.alt == (
        "Both. short: 2 stages, 9, 33 % idle; they keep the activations of up to 2, 2 "
        "micro-batches. long: 2 stages, 27, 11 % idle; they keep the activations of up to 8, 8 "
        "micro-batches."
    )
    alone = [bars(plot.pipeline(spans))[0][2] for spans in panels.values()]
    assert alone[0] > 2 * alone[1]  # each with a scale of its own


def test_panels_and_their_numbers_have_room():
    runs = {str(m): predict(gpipe(p, m), 0.0021, 0.0042) for p, m in ((3, 1), (1, 8), (4, 30))}
    picture = plot.pipeline(runs, title="Short, longer, long", unit="seconds")
    assert list(text_layout.complaints(picture.svg)) == []
    assert texts(picture).count("0 ms") == 3
    tops = [y for _, y, *_ in bars(picture)]
    assert tops[:2] + tops[6:8] + tops[22:24] == sorted(tops[:2] + tops[6:8] + tops[22:24])


def test_times_in_seconds_are_told_in_ms():
    spans = predict(gpipe(2, 3), 0.001, 0.002)
    picture = plot.pipeline(spans, unit="seconds")
    assert "12 ms, 25 % idle" in texts(picture) and "2 stages, 12 ms, 25 % idle" in picture.alt
    assert "12 ms" in texts(picture) and 12 in ticks(picture)
    assert bars(picture)[0][4] == "forward of micro-batch 0: 0 ms to 1 ms"
    assert "0.012, 25 % idle" in texts(plot.pipeline(spans))


def test_the_first_start_is_zero_and_the_order_of_the_spans_does_not_matter():
    spans = predict(one_f_one_b(3, 4))
    later = [span._replace(start=span.start + 1024, end=span.end + 1024) for span in spans]
    assert plot.pipeline(later[::-1]).svg == plot.pipeline(spans).svg
    own = [span for span in predict(gpipe(2, 3)) if span.stage == 1]  # one rank's
    assert "keep the activations of up to 0, 3 micro-batches" in plot.pipeline(own).alt
    assert len(bars(plot.pipeline(predict(gpipe(2, 3), 0, 0)))) == 12  # without length


@pytest.mark.parametrize(
    ("draw", "spans", "message"),
    [
        (plot.timeline, [], "0 spans to draw"),
        (plot.timeline, [("c", "d", 2, 1)], "'d' of 'c' cannot last from 2 s to 1 s"),
        (plot.timeline, [("a", "b", float("nan"), 1)], "'b' of 'a' cannot last from nan s to 1 s"),
        (plot.timeline, [("a", "b", 0, float("inf"))], "'b' of 'a' cannot last from 0 s to inf s"),
        (plot.pipeline, [], "no spans to draw"),
        (plot.pipeline, {}, "no spans to draw"),
        (plot.pipeline, {"a": [], "b": predict(gpipe(1, 1))}, "no spans to draw"),
        (lambda s: plot.pipeline(s, unit="ms"), predict(gpipe(1, 1)), "unit is 'ms'"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(draw, spans, message):
    with pytest.raises(ValueError, match=message):
        draw(spans)
