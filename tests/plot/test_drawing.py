import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import text_layout

from d2lpar import plot
from d2lpar.collectives.schedules import (
    direct,
    halving_doubling,
    holdings,
    recursive_doubling,
    ring,
    star,
    tree,
    tree_broadcast,
)
from d2lpar.plot import drawing

SCHEDULES = [star, ring, tree, direct, halving_doubling, recursive_doubling]
SVG = "{http://www.w3.org/2000/svg}"


def texts(picture):
    return [element.text for element in ET.fromstring(picture.svg).iter(SVG + "text")]


def count(picture, **attributes):
    """Sub-paths among the paths with these attributes."""
    paths = [
        path.get("d")
        for path in ET.fromstring(picture.svg).iter(SVG + "path")
        if all(path.get(name.replace("_", "-")) == value for name, value in attributes.items())
    ]
    return sum(d.count("M") for d in paths)


def arrows(picture):
    """(solid, dashed): the curves of all arrows."""
    solid = dashed = 0
    for path in ET.fromstring(picture.svg).iter(SVG + "path"):
        if path.get("stroke-dasharray"):
            dashed += path.get("d").count("Q")
        else:
            solid += path.get("d").count("Q")
    return solid, dashed


@pytest.mark.parametrize("k", range(2, 9))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_is_drawn_with_an_arrow_a_move_and_a_frame_a_sum(schedule, k):
    picture = plot.schedule(schedule, k)
    moves = [move for step in schedule(k) for move in step]
    assert arrows(picture) == (
        sum(move.reduce for move in moves),
        sum(not move.reduce for move in moves),
    )
    states = holdings(schedule(k), k)
    cells = [held for state in states for device in state for held in device]
    assert count(picture, fill=drawing.GREY) == len(cells)
    for i in range(k):
        held = sum(i in contributors for contributors in cells)
        assert count(picture, stroke=drawing.PALETTE[i]) == held
    assert count(picture, fill="none", stroke_width="1.75") == sum(
        held == tuple(range(k)) for held in cells
    )
    titles = [text for text in texts(picture) if text.startswith("step ")]
    assert titles == [f"step {i + 1}" for i in range(len(schedule(k)))]


@pytest.mark.parametrize("k", range(2, 9))
def test_devices_and_what_they_hold_do_not_overlap(k):
    for n in (1, k):
        panel = drawing._Panel(k, n, 190)
        w, h = panel.cell * n, panel.row * k
        boxes = [(x, y, x + w, y + h) for x, y in panel.corners]
        boxes += [(p.real - 10, p.imag - 10, p.real + 10, p.imag + 10) for p in panel.discs]
        for i, a in enumerate(boxes):
            assert abs(a[0]) < panel.width / 2 and abs(a[2]) < panel.width / 2
            for b in boxes[:i]:
                assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_chunks_are_labelled_on_the_way():
    words = texts(plot.schedule(halving_doubling, 4))
    # step 1 swaps halves: two of each; step 4 hands them back; every label also has its halo
    assert words.count("0-1") == words.count("2-3") == 8
    folded = texts(plot.schedule(halving_doubling, 3))
    assert folded.count("all") == 4  # the third device's whole tensor, there and back


def test_the_alternative_text_of_a_schedule_tells_its_steps():
    alt = plot.schedule(ring, 3).alt
    assert alt.startswith("ring(3): 3 devices, 4 steps, the tensor in 3 chunks.")
    assert (
        "Step 1: 0 to 1: chunk 2, 1 to 2: chunk 0, 2 to 0: chunk 1, added; 0 of 9 sums are whole."
        in alt
    )
    assert (
        "Step 2: 0 to 1: chunk 1, 1 to 2: chunk 2, 2 to 0: chunk 0, added; 3 of 9 sums are whole."
        in alt
    )
    assert alt.endswith("copied; 9 of 9 sums are whole.")
    assert "56 messages, added; 8 of 64" in plot.schedule(direct, 8).alt


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_words_and_chunks_of_a_schedule_have_room(schedule):
    for k in range(2, 9):
        assert list(text_layout.complaints(plot.schedule(schedule, k).svg)) == [], k


def test_a_broken_ring_can_be_seen():
    broken = plot.schedule(lambda k: ring(k)[:-1], 4, title="broken")
    assert "16 of 16 sums" not in broken.alt and "12 of 16 sums" in broken.alt
    assert (
        count(plot.schedule(ring, 4), stroke_width="1.75") > count(broken, stroke_width="1.75") + 4
    )


def test_a_broadcast_is_drawn_too():
    assert arrows(plot.schedule(tree_broadcast, 5)) == (0, 4)


@pytest.mark.parametrize("k", [0, 1, 9, 64])
def test_a_k_that_does_not_fit_is_an_error(k):
    with pytest.raises(ValueError, match=f"k = {k}, but only 2 to 8"):
        plot.schedule(ring, k)


def test_the_picture_of_the_readme_is_what_the_code_draws():
    path = Path(__file__).parents[2] / "docs" / "ring.svg"
    drawn = plot.schedule(ring, 4, title="Ring allreduce on 4 devices")
    assert path.read_text(encoding="utf-8") == drawn.svg, "save the picture anew"


# Timelines

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
    for rect in ET.fromstring(picture.svg).iter(SVG + "rect"):
        if rect.get("width") != "100%":
            x, y, width = (float(rect.get(name)) for name in ("x", "y", "width"))
            found.append((x, y, width, rect.get("fill"), rect.find(SVG + "title").text))
    return found


def places(picture, word):
    """(x, y) of every text that reads ``word``."""
    found = ET.fromstring(picture.svg).iter(SVG + "text")
    return [(float(t.get("x")), float(t.get("y"))) for t in found if t.text == word]


def test_bars_stand_where_their_times_are():
    picture = plot.timeline(STEP)
    [(zero, _)], [(ten, _)] = places(picture, "0 ms"), places(picture, "10 ms")
    pixels = (ten - zero) / 10  # in a ms, as the axis says
    drawn = bars(picture)
    assert len(drawn) == len(STEP)
    for (x, _, width, *_), (_, _, start, end) in zip(drawn, STEP, strict=True):
        assert x == pytest.approx(zero + 1000 * (start - 10) * pixels, abs=0.1)
        assert width == pytest.approx(max(2, 1000 * (end - start) * pixels), abs=0.1)
    assert max(x + width for x, _, width, _, _ in drawn) < drawing.WIDTH


def test_a_lane_is_a_row_and_a_kind_of_lane_is_a_colour():
    picture = plot.timeline(STEP)
    rows = {lane: places(picture, lane) for lane, *_ in STEP}
    heights = [y for [(_, y)] in rows.values()]
    assert heights == sorted(heights) and len(set(heights)) == 4
    drawn = bars(picture)
    assert [y + 10 + 4 for _, y, *_ in drawn] == [heights[i] for i in (0, 0, 1, 2, 3)]
    compute, send = drawing.PALETTE[:2]
    assert [colour for *_, colour, _ in drawn] == [compute, compute, send, compute, send]


def test_lanes_come_in_the_order_of_their_first_spans():
    spans = [("b", "x", 5, 6), ("a", "y", 0, 1), ("b", "z", 0, 2)]
    assert [t for t in texts(plot.timeline(spans)) if "ms" not in t] == list("bxzay")


def test_a_label_stands_in_its_bar_or_only_in_the_tooltip():
    picture = plot.timeline(STEP)
    words = texts(picture)
    assert words.count("forward") == 2 and words.count("backward") == 1
    assert words.count("bucket 0") == 1  # the other one takes no time
    (x, y, width, *_) = bars(picture)[1]
    assert places(picture, "backward") == [(pytest.approx(x + width / 2, abs=0.1), y + 14)]
    assert [tooltip for *_, tooltip in bars(picture)] == [
        "forward: 0 ms to 4 ms",
        "backward: 4 ms to 10 ms",
        "bucket 0: 6 ms to 7.5 ms",
        "forward: 1 ms to 9 ms",
        "bucket 0: 9 ms to 9 ms",
    ]


def test_the_alternative_text_of_a_timeline_tells_its_lanes():
    assert plot.timeline(STEP, title="One step").alt == (
        "Timeline of 10 ms: One step. Lanes: 4. Spans: 5. "
        "rank 0: compute has 2 from 0 ms to 10 ms; rank 0: send has 1 from 6 ms to 7.5 ms; "
        "rank 1: compute has 1 from 1 ms to 9 ms; rank 1: send has 1 from 9 ms to 9 ms."
    )
    assert "One step" in texts(plot.timeline(STEP, title="One step"))
    assert plot.timeline(STEP).alt.startswith("Timeline of 10 ms. Lanes")


@pytest.mark.parametrize("total", [m * 10.0**e for e in range(-7, 4) for m in (1, 1.3, 2, 4, 9.9)])
def test_the_axis_has_a_few_round_ticks(total):
    picture = plot.timeline([("a", "b", 3.0, 3.0 + total)])
    ticks = [float(text[:-3]) for text in texts(picture) if text.endswith(" ms")]
    assert 4 <= len(ticks) <= 8 and ticks[0] == 0
    step = ticks[1]
    assert ticks == [pytest.approx(i * step) for i in range(len(ticks))]
    assert f"{step:e}"[:8] in ("1.000000", "2.000000", "5.000000")
    assert 1000 * total - step < ticks[-1] <= 1000 * total * (1 + 1e-6)


def test_a_span_without_length_can_be_seen_and_many_lanes_fit():
    assert [width for _, _, width, *_ in bars(plot.timeline([("a", "b", 1, 1)]))] == [2]
    many = [(f"rank {i}", "x", i, i + 1) for i in range(40)]
    picture = plot.timeline(many)
    height = float(ET.fromstring(picture.svg).get("height"))
    rows = [y for _, y, *_ in bars(picture)]
    assert rows == sorted(set(rows)) and rows[-1] + 20 < height
    assert bars(picture)[8][3] == bars(picture)[0][3] == drawing.PALETTE[0]  # round again


def test_a_long_name_of_a_lane_leaves_room_for_bars():
    picture = plot.timeline([("x" * 120, "b", 0, 1)])
    [(x, _, width, *_)] = bars(picture)
    assert x > 120 * 6 and width > 300
    assert x + width < float(ET.fromstring(picture.svg).get("width"))


@pytest.mark.parametrize("total", [1e-6, 0.0123, 1.5])
def test_words_and_numbers_of_a_timeline_have_room(total):
    lanes = [f"rank {i}: {'communicate and wait ' * i}" for i in range(3)]
    spans = [(f"{w} MWM", 0.1 * i, 0.1 * i + 0.03 * w) for i in range(9) for w in range(1, 4)]
    drawn = [(lane, words, total * a, total * b) for lane in lanes for words, a, b in spans]
    assert list(text_layout.complaints(plot.timeline(drawn[::3], title="MWM").svg)) == []


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([], "0 spans to draw"),
        ([("a", "b", 0, 1), ("c", "d", 2, 1)], "'d' of 'c' cannot last from 2 s to 1 s"),
        ([("a", "b", float("nan"), 1)], "'b' of 'a' cannot last from nan s to 1 s"),
        ([("a", "b", 0, float("inf"))], "'b' of 'a' cannot last from 0 s to inf s"),
        ([("a", "b", -float("inf"), 0)], "'b' of 'a' cannot last from -inf s to 0 s"),
    ],
)
def test_a_timeline_that_cannot_be_drawn_is_an_error(spans, message):
    with pytest.raises(ValueError, match=message):
        plot.timeline(spans)
