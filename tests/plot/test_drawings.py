"""Schedules show who sends what; bars stand where their times are."""

import re

import pytest
from helpers import SCHEDULES
from text_layout import SVG, complaints, elements, texts

from d2lpar import gpipe, one_f_one_b, plot, sequential
from d2lpar.collectives import direct, halving_doubling, holdings, ring, star, tree_broadcast
from d2lpar.pipeline.schedules import Span, live_counts, predict
from d2lpar.plot.drawings import _Panel
from d2lpar.plot.picture import DARK_GREY, GREY, PALETTE, WIDTH


def legible(*pictures):
    return not [words for picture in pictures for words in complaints(picture.svg)]


def count(picture, **attributes):
    """Sub-paths among the paths with these attributes."""
    return sum(path.get("d").count("M") for path in elements(picture, "path", **attributes))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_is_drawn_with_an_arrow_a_move_and_a_frame_a_sum(schedule):
    for k in (2, 3, 4, 5, 8):
        picture = plot.schedule(schedule, k)
        moves = [move for step in schedule(k) for move in step]
        added = sum(move.reduce for move in moves)
        frames = count(picture, fill="none", stroke_width="1.75")
        dashed = count(picture, fill="none", stroke_dasharray="4 3")
        assert count(picture, fill="none") - frames - dashed == added == len(moves) - dashed
        cells = [c for state in holdings(schedule(k), k) for device in state for c in device]
        assert count(picture, fill=GREY) == len(cells)
        for i in range(k):
            rows = count(picture, stroke=PALETTE[i], stroke_width=f"{36 // k}")
            assert rows == sum(i in contributors for contributors in cells)
        assert frames == sum(held == tuple(range(k)) for held in cells)
        titles = [text for text in texts(picture) if text.startswith("step ")]
        assert titles == [f"step {i + 1}" for i in range(len(schedule(k)))]
        assert legible(picture), k


def test_devices_and_what_they_hold_do_not_overlap():
    for k, cut in [(k, cut) for k in range(2, 9) for cut in (False, True)]:
        panel = _Panel(k, k if cut else 1, 190)
        w, h = panel.cell * panel.n, panel.row * k
        boxes = [(x, y, x + w, y + h) for x, y in panel.corners]
        boxes += [(p.real - 10, p.imag - 10, p.real + 10, p.imag + 10) for p in panel.discs]
        for i, a in enumerate(boxes):
            assert abs(a[0]) < panel.width / 2 and abs(a[2]) < panel.width / 2
            for b in boxes[:i]:
                assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_the_alternative_text_of_a_schedule_tells_its_steps():
    alt = plot.schedule(ring, 3).alt
    assert alt.startswith(
        "ring(3): 3 participants, 4 steps, the tensor in 3 chunks. Step 1: 0 to 1: chunk 2, "
        "1 to 2: chunk 0, 2 to 0: chunk 1, added; 0 of 9 sums are whole. Step 2:"
    )
    assert alt.endswith("copied; 9 of 9 sums are whole.")
    assert "56 messages, added; 8 of 64" in plot.schedule(direct, 8).alt
    assert "Step 1: 1 to 0: all, 2 to 0: all, added; 1 of 3" in plot.schedule(star, 3).alt
    assert "0 to 2: chunk 2-3" in plot.schedule(halving_doubling, 4).alt
    broken = plot.schedule(lambda k: ring(k)[:-1], 4, title="broken").alt
    assert "16 of 16 sums" not in broken and "12 of 16 sums" in broken
    assert "0 to 4: all, copied" in plot.schedule(tree_broadcast, 5).alt  # this is no allreduce


# Timelines and pipelines

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
    words = [t for t in elements(picture, "text", text_anchor="middle") if not t.get("fill")]
    return {float(t.text.removesuffix(" ms")): float(t.get("x")) for t in words}


def on_axis(picture):
    """How to read an x on the axis: a function."""
    axis = ticks(picture)
    last = max(axis)
    return lambda x: (x - axis[0]) * last / (axis[last] - axis[0])


def near(*values):
    return pytest.approx(list(values), abs=0.02)


def test_bars_of_a_timeline_stand_where_their_times_are_a_lane_a_row_and_a_kind_a_colour():
    picture = plot.timeline(STEP, title="One step")
    time, drawn = on_axis(picture), bars(picture)
    assert [time(x) for x, *_ in drawn] == near(0, 4, 6, 1, 9)
    assert [time(x + width) for x, _, width, *_ in drawn[:4]] == near(4, 10, 7.5, 9)
    assert drawn[4][2] == 2  # a span without length can be seen
    rows = {text.text: float(text.get("y")) for text in elements(picture, "text")}
    assert [y + 10 + 4 for _, y, *_ in drawn] == [rows[lane] for lane, *_ in STEP]
    assert len({y for _, y, *_ in drawn}) == 4
    compute, send = PALETTE[:2]
    assert [colour for *_, colour, _ in drawn] == [compute, compute, send, compute, send]
    assert drawn[2][-1] == "bucket 0: 6 ms to 7.5 ms"
    assert texts(picture).count("bucket 0") == 1  # of the other there is only the tooltip
    assert picture.alt == (
        "Timeline of 10 ms: One step. Lanes: 4. Spans: 5. "
        "rank 0: compute has 2 from 0 ms to 10 ms; rank 0: send has 1 from 6 ms to 7.5 ms; "
        "rank 1: compute has 1 from 1 ms to 9 ms; rank 1: send has 1 from 9 ms to 9 ms."
    )


def test_many_lanes_and_long_names_have_room_for_their_words_and_numbers():
    many = plot.timeline([(f"rank {i}", "x", i, i + 1) for i in range(40)])
    assert bars(many)[8][3] == PALETTE[0]  # round again
    long = plot.timeline([("x" * 120, "b", 0, 1)])
    [(x, _, width, *_)] = bars(long)
    assert x > 120 * 6 and width > 300
    spans = [(f"{w} MWM", 0.1 * i, 0.1 * i + 0.03 * w) for i in range(9) for w in range(1, 4)]
    full = plot.timeline([(f"rank {i % 3}: {'wait ' * i}", *span) for i, span in enumerate(spans)])
    assert legible(many, long, full)
    for total in (1e-7, 0.013, 2.0, 9900.0):
        found = list(ticks(plot.timeline([("a", "b", 3.0, 3.0 + total)])))
        assert 4 <= len(found) <= 8 and found[0] == 0
        assert found[-1] <= 1000 * total * (1 + 1e-6) < found[-1] + found[1]


@pytest.mark.parametrize("schedule, idle", [(sequential, 75), (gpipe, 27), (one_f_one_b, 27)])
def test_a_pipeline_has_a_bar_for_each_action_where_its_time_is(schedule, idle):
    spans = sorted(predict(schedule(4, 8)), key=lambda span: (span.stage, span.start))
    picture = plot.pipeline(spans, title="All stages")
    time, drawn, rows = on_axis(picture), bars(picture), {}
    for (x, y, width, colour, tooltip), span in zip(drawn, spans, strict=True):
        assert [time(x), time(x + width)] == near(span.start, span.end)
        assert colour == PALETTE[span.kind == "backward"]
        assert tooltip.startswith(f"{span.kind} of micro-batch {span.microbatch}: {span.start:g} ")
        rows.setdefault((span.stage, span.kind), set()).add(y)
    assert list(rows.values()) == sorted(rows.values(), key=min)  # from stage 0 down
    assert len(set.union(*rows.values())) == 8 == len(rows)  # backward is lower than forward
    peaks = [str(max(counts)) for counts in live_counts(spans).values()]
    end = max(span.end for span in spans)
    assert f"{end:g}, {idle} % idle" in texts(picture)
    assert [f"keeps {n}" for n in peaks] == [t for t in texts(picture) if t.startswith("keeps ")]
    assert picture.alt == (
        f"All stages. 4 stages, {end:g}, {idle} % idle; they keep the activations of up to "
        f"{', '.join(peaks)} micro-batches."
    )
    later = [span._replace(start=span.start + 1024, end=span.end + 1024) for span in spans]
    assert plot.pipeline(later[::-1], title="All stages").svg == picture.svg


def test_what_is_kept_rises_as_a_forward_starts_and_falls_as_a_backward_ends():
    spans = [Span(0, 0, "forward", 0, 1), Span(0, 1, "forward", 2, 3)]
    spans += [Span(0, 1, "backward", 4, 6), Span(0, 0, "backward", 8, 10)]
    picture = plot.pipeline(spans)
    [strip] = elements(picture, "path", fill=DARK_GREY)
    ground = float(re.match(r"M\S+ ([\d.]+)", strip.get("d"))[1])
    steps = [tuple(map(float, s)) for s in re.findall(r"H([\d.]+)V([\d.]+)", strip.get("d"))]
    time, unit = on_axis(picture), ground - steps[0][1]
    assert [time(x) for x, _ in steps] == near(0, 2, 6, 10)
    assert unit > 1 and [(ground - y) / unit for _, y in steps] == near(1, 2, 1, 0)


def test_several_panels_share_one_scale():
    picture = plot.pipeline({"short": predict(gpipe(2, 2)), "long": predict(gpipe(2, 8))}, "Both")
    drawn = bars(picture)
    assert WIDTH - 100 < max(x + width for x, _, width, *_ in drawn) < WIDTH - 60
    widths = [width for _, _, width, colour, _ in drawn if colour == PALETTE[0]]
    assert len(widths) == 2 * (2 + 8) and min(widths) == pytest.approx(max(widths), abs=0.01)
    assert " short: 2 stages, 9, 33 % idle; they" in picture.alt
    assert " long: 2 stages, 27, 11 % idle; they" in picture.alt
    assert legible(picture) and max(y for _, y, *_ in drawn[:8]) < drawn[8][1]


def test_a_pipeline_in_seconds_tells_ms_and_shows_one_rank_or_no_length_at_all():
    picture = plot.pipeline(predict(gpipe(2, 3), 0.001, 0.002), unit="seconds")
    assert "12 ms, 25 % idle" in texts(picture) and "2 stages, 12 ms, 25 % idle" in picture.alt
    assert 12 in ticks(picture) and legible(picture)
    assert bars(picture)[0][4] == "forward of micro-batch 0: 0 ms to 1 ms"
    own = [span for span in predict(gpipe(2, 3)) if span.stage == 1]
    assert "keep the activations of up to 0, 3 micro-batches" in plot.pipeline(own).alt
    assert len(bars(plot.pipeline(predict(gpipe(2, 3), 0, 0)))) == 12


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plot.schedule(ring, 1), "k = 1, but only 2 to 8"),
        (lambda: plot.schedule(ring, 9), "k = 9, but only 2 to 8"),
        (lambda: plot.timeline([]), "0 spans to draw"),
        (lambda: plot.timeline([("c", "d", 2, 1)]), "'d' of 'c' cannot last from 2 s to 1 s"),
        (lambda: plot.timeline([("a", "b", float("nan"), 1)]), "cannot last from nan s to 1 s"),
        (lambda: plot.timeline([("a", "b", 0, float("inf"))]), "cannot last from 0 s to inf s"),
        (lambda: plot.pipeline({}), "no spans to draw"),
        (lambda: plot.pipeline({"a": [], "b": predict(gpipe(1, 1))}), "no spans to draw"),
        (lambda: plot.pipeline(predict(gpipe(1, 1)), unit="ms"), "unit is 'ms'"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
