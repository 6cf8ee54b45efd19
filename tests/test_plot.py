"""What is drawn is what the data say: bars, spans, arrows, chunks."""

import base64
import io

import numpy as np
import pytest
import torch
from helpers import SCHEDULES
from matplotlib.colors import to_hex
from PIL import Image

from d2lpar import bubble, gpipe, halving_doubling, one_f_one_b, plot
from d2lpar.pipeline_schedules import Span, clock, interleaved, kept, zero_bubble
from d2lpar.schedules import holdings


def arrows(ax):
    """Of each arrow, whether it is dashed, and how thick it is."""
    drawn = [text.arrow_patch for text in ax.texts if hasattr(text, "arrow_patch")]
    return [(isinstance(a.get_linestyle(), tuple), a.get_linewidth()) for a in drawn]


def words(ax):
    return [text.get_text().strip() for text in ax.texts if text.get_text()]


def blocks(ax):
    """Where each block of a drawing over time starts and ends."""
    paths = [p.vertices[:, 0] for c in ax.collections for p in c.get_paths()]
    return [(xs.min(), xs.max()) for xs in paths]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("k", [2, 3, 4, 8])
def test_a_schedule_has_an_arrow_a_move_and_a_box_a_contribution(schedule, k):
    figure, steps = plot.schedule(schedule, k), [[], *schedule(k)]
    titles = [ax.get_title("left") for ax in figure.axes]
    assert titles == ["start", *(f"step {i}" for i in range(1, len(steps)))]
    for ax, step, state in zip(figure.axes, steps, holdings(steps[1:], k), strict=True):
        copied = [not move.reduce for move in step]
        assert [dashed for dashed, _ in arrows(ax)] == copied
        held = [own for device in state for own in device]
        assert len(ax.patches) == sum(own == tuple(range(k)) for own in held)  # frames
        colours = [to_hex(c) for grid in ax.collections for c in grid.get_facecolor()]
        for i in range(k):
            boxes = colours.count(plot.PALETTE[i].lower()) - 1  # and the disc
            assert boxes == sum(i in own for own in held)
        assert len(colours) == k + k * len(held)
    assert f"{len(steps) - 1} steps" in figure.alt


def test_a_larger_message_has_a_thicker_arrow_and_what_came_is_numbered():
    halves, quarters = plot.schedule(halving_doubling, 4).axes[1:3]
    assert arrows(halves)[0][1] > arrows(quarters)[0][1]
    assert words(quarters).count("0") == 2  # a disc, and a chunk that came to device 0


def test_bars_are_as_long_as_their_values_and_show_their_spread():
    values = {"ring": (2.0, 1.0, 4.0), "one device": 3.0}
    [ax] = plot.bars(values, "time of a step", "seconds", "Two ways").axes
    assert [bar.get_width() for bar in ax.patches] == [2, 3]
    assert [list(line.get_xdata()) for line in ax.lines] == [[1, 4], []]
    assert words(ax) == ["2 s", "3 s"] and ax.texts[0].get_position() == (4, 0)
    assert to_hex(ax.patches[0].get_facecolor()) == plot.SCHEDULES["ring"].lower()
    assert [label.get_text() for label in ax.get_yticklabels()] == list(values)


def test_stacked_parts_lie_end_to_end():
    values = {"a": {"weights": 3, "gradients": 2}, "b": {"gradients": 4}}
    figure = plot.bars(values, "memory", "bytes")
    bars = [(bar.get_x(), bar.get_width()) for bar in figure.axes[0].patches]
    assert bars == [(0, 3), (0, 0), (3, 2), (0, 4)]  # weights, then gradients
    assert figure.alt == "Bars: memory. a 5 B; b 4 B."


def test_measured_is_solid_predicted_dashed_and_a_schedule_has_one_colour():
    xs, ys = [1, 10, 100], [0.3, 0.2, 0.1]
    lines = {"other": (xs, ys), "ring": (xs, ys), "ring, predicted": (xs[:2], ys[:2])}
    [ax] = plot.curves(lines, "bytes", "time", "A race", log="x").axes
    other, ring, predicted = ax.lines
    assert [list(line.get_ydata()) for line in (ring, predicted)] == [ys, ys[:2]]
    assert (ring.get_linestyle(), predicted.get_linestyle()) == ("-", "--")
    assert ring.get_color() == predicted.get_color() == plot.SCHEDULES["ring"]
    assert other.get_color() != ring.get_color()
    assert (ax.get_xscale(), ax.get_yscale(), ax.get_ylim()[0]) == ("log", "linear", 0)
    panels = {"PCIe": lines, "NVLink": {"ring": (xs, ys)}}
    above, below = plot.curves(panels, "bytes", "time").axes
    assert [ax.get_title("left") for ax in (above, below)] == list(panels)
    assert above.get_ylim() == below.get_ylim() and words(below) == ["ring"]
    assert words(above) == list(lines)  # at places that differ
    assert len({round(text.get_position()[1], 2) for text in above.texts}) == 3
    lines.pop("other")
    [ring] = plot.curves({"ring": lines}, "bytes", "time").axes
    assert words(ring) == ["ring", "predicted"]  # its title says whose


def test_a_timeline_has_each_span_at_its_time_and_none_too_thin_to_be_seen():
    spans = [("a: send", "W", 1.0, 1.5), ("b: send", "b", 1.5, 2.0)]
    [ax] = plot.timeline([*spans, ("a: x", "", 1.0, 1.0)], "A step").axes
    *seen, (start, end) = blocks(ax)
    assert seen == [(0, 0.5), (0.5, 1)] and start == 0 < end < 0.01
    assert words(ax) == ["W", "b"]
    a, b, x = [to_hex(c.get_facecolor()[0]) for c in ax.collections]
    assert a == b != x  # a and b are of one kind


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b, interleaved, zero_bubble])
def test_a_pipeline_has_a_block_an_action_and_says_what_it_keeps(schedule):
    orders = schedule(3, 6)
    spans, v = clock(orders), 1 + (schedule is interleaved)
    late = [[Span(a, start + 5, end + 5) for a, start, end in own] for own in spans]
    first, second = plot.pipeline({"one": late, "two": spans}).axes
    every = [span for own in spans for span in own]
    assert {span[1:] for span in every} <= set(blocks(first))
    numbers = [word for word in words(first) if word.isdigit()]
    assert sorted(numbers) == sorted(str(span.action.microbatch) for span in every)
    keeps = [word for word in words(first) if word.startswith("keeps")]
    assert keeps == [f"keeps {max(kept(order)) / v:g}" for order in orders]
    end, idle = max(span.end for span in every), 100 * bubble(spans)
    assert first.get_title("left") == f"one: {end:g} units, {idle:.0f} % idle"
    assert blocks(first) == blocks(second) and second.get_xlabel() == "time in units"
    kinds = {span.action.kind: v for span in every}  # a colour each, paler per stage
    colours = {to_hex(c.get_facecolor()[0]) for c in first.collections}
    assert len(colours) == len(kinds) * v + 2  # idle, and what is kept


def test_images_are_shown_as_they_are():
    X = torch.rand(3, 1, 4, 5)
    axes = plot.images(X, ["a", "b", "c"], columns=2).axes
    assert [ax.get_title() for ax in axes] == ["a", "b", "c"]
    assert np.array_equal([ax.images[0].get_array() for ax in axes], X[:, 0])


def test_a_notebook_gets_a_png_with_the_words_and_a_reader_can_save_it(tmp_path):
    figure = plot.bars({"a": 1.0}, title="Costs")
    data, shown = figure._repr_mimebundle_()
    image = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
    assert data["text/plain"] == figure.alt == "Bars: Costs. a 1."
    assert image.info["Description"] == shown["image/png"]["alt"] == figure.alt
    assert image.width == 1280 == 2 * shown["image/png"]["width"]
    figure.savefig(tmp_path / "mine.pdf")
    assert (tmp_path / "mine.pdf").stat().st_size > 1000


def test_quantities_have_three_digits_and_a_unit():
    assert [plot.quantity(x, "seconds") for x in (0, 0.0204)] == ["0 s", "20.4 ms"]
    assert plot.quantity(1_048_576, "bytes") == "1.05 MB"
    assert (plot.quantity(2048), plot.quantity(3, "ticks")) == ("2,048", "3 ticks")
