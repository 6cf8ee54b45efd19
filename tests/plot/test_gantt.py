"""A pipeline over time: bars where the times are, and the same in words."""

import re
import xml.etree.ElementTree as ET

import pytest
import text_layout

from d2lpar import gpipe, one_f_one_b, plot, sequential
from d2lpar.pipeline.schedules import Span, bubble, live_counts, predict
from d2lpar.plot import drawing

SVG = "{http://www.w3.org/2000/svg}"
SCHEDULES = [sequential, gpipe, one_f_one_b]
FORWARD, BACKWARD = drawing.PALETTE[:2]


def texts(picture):
    return ["".join(t.itertext()) for t in ET.fromstring(picture.svg).iter(SVG + "text")]


def bars(picture):
    """(x, y, width, colour, tooltip) of every action, panel by panel."""
    found = []
    for rect in ET.fromstring(picture.svg).iter(SVG + "rect"):
        if (tooltip := rect.find(SVG + "title")) is not None:
            x, y, width = (float(rect.get(name)) for name in ("x", "y", "width"))
            found.append((x, y, width, rect.get("fill"), tooltip.text))
    return found


def ticks(picture):
    """{what it says: x} of the numbers below a single panel."""
    found = ET.fromstring(picture.svg).iter(SVG + "text")
    middle = [t for t in found if t.get("text-anchor") == "middle" and t.get("fill") is None]
    return {t.text: float(t.get("x")) for t in middle}


def strips(picture):
    """For each stage the points (x, y) of the outline of what it keeps."""
    found = ET.fromstring(picture.svg).iter(SVG + "path")
    paths = [path.get("d") for path in found if path.get("fill") == "#999999"]
    outlines = []
    for path in paths:
        start, *steps = re.findall(r"[MHV][^MHVz]*", path)
        x, y = map(float, start[1:].split())
        points = [(x, y)]
        for move in steps:
            x, y = (float(move[1:]), y) if move[0] == "H" else (x, float(move[1:]))
            points.append((x, y))
        outlines.append(points)
    return outlines


def in_order(spans):
    return sorted(spans, key=lambda span: (span.stage, span.start))


def shifted(spans, by):
    return [span._replace(start=span.start + by, end=span.end + by) for span in spans]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("p, m", [(1, 1), (2, 5), (4, 8)])
def test_there_is_a_bar_for_each_action_where_its_time_is(schedule, p, m):
    spans = predict(schedule(p, m))
    picture = plot.pipeline(spans)
    axis = ticks(picture)
    last = max(axis, key=float)
    pixels = (axis[last] - axis["0"]) / float(last)  # in a unit of time, as the axis says
    drawn = bars(picture)
    assert len(drawn) == len(spans) == 2 * p * m
    rows = {}
    for (x, y, width, colour, tooltip), span in zip(drawn, in_order(spans), strict=True):
        assert x == pytest.approx(axis["0"] + span.start * pixels, abs=0.1)
        assert width == pytest.approx((span.end - span.start) * pixels, abs=0.1)
        assert colour == {"forward": FORWARD, "backward": BACKWARD}[span.kind]
        assert tooltip.startswith(f"{span.kind} of micro-batch {span.microbatch}: {span.start:g} ")
        rows.setdefault((span.stage, span.kind), set()).add(y)
    assert all(len(heights) == 1 for heights in rows.values())
    assert list(rows.values()) == sorted(rows.values(), key=min)  # from stage 0 down
    assert len(set.union(*rows.values())) == 2 * p  # backward is lower than forward
    assert max(x + width for x, _, width, *_ in drawn) < drawing.WIDTH - 60


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_words_tell_stages_idle_time_and_what_is_kept(schedule):
    spans = predict(schedule(4, 8))
    peaks = [max(counts) for counts in live_counts(in_order(spans)).values()]
    picture = plot.pipeline(spans, title="Four stages")
    idle = {sequential: "75", gpipe: "27", one_f_one_b: "27"}[schedule]
    assert f"{100 * bubble(spans):.0f}" == idle
    end = max(span.end for span in spans)
    assert picture.alt == (
        f"Four stages. 4 stages, {end:g}, {idle} % idle; they keep the activations of up to "
        f"{', '.join(map(str, peaks))} micro-batches."
    )
    words = texts(picture)
    assert "Four stages" in words and f"{end:g}, {idle} % idle" in words
    assert [f"stage {s}" for s in range(4)] == [w for w in words if w.startswith("stage ")]
    assert [f"keeps {n}" for n in peaks] == [w for w in words if w.startswith("keeps ")]
    assert words[1:5] == ["forward", "backward", "idle", "micro-batches whose activations are kept"]
    assert plot.pipeline(spans).alt.startswith("A pipeline over time. 4 stages")


def test_schedules_keep_what_they_are_known_to_keep():
    kept = {
        s: re.findall(r"up to (.*) micro", plot.pipeline(predict(s(3, 6))).alt) for s in SCHEDULES
    }
    assert kept == {sequential: ["1, 1, 1"], gpipe: ["6, 6, 6"], one_f_one_b: ["3, 2, 1"]}


def test_what_is_kept_rises_as_a_forward_starts_and_falls_as_a_backward_ends():
    spans = [
        Span(0, 0, "forward", 0, 1),
        Span(0, 1, "forward", 2, 3),
        Span(0, 1, "backward", 4, 6),
        Span(0, 0, "backward", 8, 10),
    ]
    picture = plot.pipeline(spans)
    axis = ticks(picture)
    pixels = (axis["10"] - axis["0"]) / 10
    [[base, *points]] = strips(picture)
    times = [(x - axis["0"]) / pixels for x, _ in points]
    assert times == [pytest.approx(t, abs=0.01) for t in (0, 0, 2, 2, 6, 6, 10, 10)]
    step = base[1] - points[1][1]
    heights = [(base[1] - y) / step for _, y in points]
    assert step > 1 and heights == [pytest.approx(n, abs=0.01) for n in (0, 1, 1, 2, 2, 1, 1, 0)]


def test_several_panels_share_one_scale():
    panels = {"short": predict(gpipe(2, 2)), "long": predict(gpipe(2, 8))}
    picture = plot.pipeline(panels, title="Both")
    drawn = bars(picture)
    assert len(drawn) == sum(map(len, panels.values()))
    assert drawing.WIDTH - 100 < max(x + width for x, _, width, *_ in drawn) < drawing.WIDTH - 60
    widths = [width for _, _, width, colour, _ in drawn if colour == FORWARD]
    assert min(widths) == pytest.approx(max(widths), abs=0.01)
    assert picture.alt == (
        "Both. short: 2 stages, 9, 33 % idle; they keep the activations of up to 2, 2 "
        "micro-batches. long: 2 stages, 27, 11 % idle; they keep the activations of up to 8, 8 "
        "micro-batches."
    )
    heads = [word for word in texts(picture) if word.endswith("idle") and len(word) > 4]
    assert heads == ["short: 9, 33 % idle", "long: 27, 11 % idle"]
    alone = [bars(plot.pipeline(spans))[0][2] for spans in panels.values()]
    assert alone[0] > 2 * alone[1]  # each with a scale of its own


def test_numbers_of_a_short_run_beside_a_long_one_have_room():
    runs = {str(m): predict(gpipe(4, m), 0.0021, 0.0042) for m in (1, 8, 30)}
    picture = plot.pipeline(runs, title="Short, longer, long", unit="seconds")
    assert list(text_layout.complaints(picture.svg)) == []
    assert texts(picture).count("0 ms") == 3


def test_panels_do_not_overlap():
    picture = plot.pipeline({str(p): predict(gpipe(p, 2)) for p in (3, 1, 2)})
    root = ET.fromstring(picture.svg)
    tops, bottoms = [], []
    for group in root.iter(SVG + "g"):
        top = float(re.search(r"translate\(0 (.*)\)", group.get("transform"))[1])
        ends = [float(r.get("y")) + float(r.get("height")) for r in group.iter(SVG + "rect")]
        ends += [float(t.get("y")) for t in group.iter(SVG + "text")]
        tops.append(top)
        bottoms.append(top + max(ends))
    assert len(tops) == 3
    assert all(low < top for low, top in zip(bottoms, tops[1:], strict=False))
    assert bottoms[-1] < float(root.get("height"))


def test_times_in_seconds_are_told_in_ms():
    spans = predict(gpipe(2, 3), 0.001, 0.002)
    picture = plot.pipeline(spans, unit="seconds")
    assert "12 ms, 25 % idle" in texts(picture) and "2 stages, 12 ms, 25 % idle" in picture.alt
    assert "0 ms" in ticks(picture) and "12 ms" in ticks(picture)
    assert bars(picture)[0][4] == "forward of micro-batch 0: 0 ms to 1 ms"
    assert "0.012, 25 % idle" in texts(plot.pipeline(spans))


def test_the_first_start_is_zero():
    spans = predict(one_f_one_b(3, 4))
    later = shifted(spans, 1024)
    assert plot.pipeline(later).svg == plot.pipeline(spans).svg
    assert plot.pipeline({"later": later, "now": spans}).svg == (
        plot.pipeline({"later": spans, "now": later}).svg
    )


def test_the_order_of_the_spans_does_not_matter_and_the_same_call_gives_the_same_bytes():
    spans = predict(one_f_one_b(3, 4))
    picture = plot.pipeline(spans, title="Again")
    assert plot.pipeline(spans, title="Again") == picture
    assert plot.pipeline(spans[::-1], title="Again") == picture


def test_a_label_stands_in_its_bar_or_only_in_the_tooltip():
    spans = [Span(0, 0, "forward", 0, 0.001), Span(0, 0, "backward", 50, 100)]
    picture = plot.pipeline(spans)
    (_, _, narrow, *_), (x, _, width, *_) = bars(picture)
    assert 1 <= narrow < 3  # still to be seen
    white = [t for t in ET.fromstring(picture.svg).iter(SVG + "text") if t.get("fill") == "#FFF"]
    assert [(t.text, float(t.get("x"))) for t in white] == [
        ("0", pytest.approx(x + width / 2, abs=1))
    ]


def test_titles_and_names_are_escaped():
    words = """a < b & "c" > 'd'"""
    picture = plot.pipeline({words: predict(gpipe(2, 2))}, title=words)
    assert words in texts(picture) and f"{words}: 9, 33 % idle" in texts(picture)
    root = ET.fromstring(picture.svg)
    assert root.get("aria-label") == root.find(SVG + "title").text == picture.alt
    assert picture.alt.startswith(f"{words}. {words}: 2 stages")


@pytest.mark.parametrize("spans", [[], {}, {"a": []}, {"a": predict(gpipe(1, 1)), "b": []}])
def test_no_spans_are_an_error(spans):
    with pytest.raises(ValueError, match="no spans to draw"):
        plot.pipeline(spans)


@pytest.mark.parametrize("unit", ["ms", "", "bytes"])
def test_an_unknown_unit_is_an_error(unit):
    with pytest.raises(ValueError, match=f"unit is '{unit}'"):
        plot.pipeline(predict(gpipe(1, 1)), unit=unit)


def test_the_timeline_of_one_rank_alone_can_be_drawn():
    spans = [span for span in predict(gpipe(2, 3)) if span.stage == 1]
    assert "keep the activations of up to 0, 3 micro-batches" in plot.pipeline(spans).alt


def test_spans_without_length_can_be_drawn():
    assert len(bars(plot.pipeline(predict(gpipe(2, 3), 0, 0)))) == 12
