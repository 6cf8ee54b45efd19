import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from d2lpar import drawing, plot
from d2lpar.schedules import direct, halving_doubling, holdings, ring, star, tree, tree_broadcast

SCHEDULES = [star, ring, tree, direct, halving_doubling]
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
    path = Path(__file__).parents[1] / "docs" / "ring.svg"
    drawn = plot.schedule(ring, 4, title="Ring allreduce on 4 devices")
    assert path.read_text(encoding="utf-8") == drawn.svg, "save the picture anew"
