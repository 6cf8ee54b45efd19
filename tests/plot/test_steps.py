"""Drawn schedules, iterations and data-parallel training show what happens, and in which order."""

import re

import pytest
import text_layout
from text_layout import elements, texts

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
from d2lpar.plot.picture import GREY, PALETTE
from d2lpar.plot.steps import _Panel
from d2lpar.study.iteration import Step

SCHEDULES = [star, ring, tree, direct, halving_doubling, recursive_doubling]


def count(picture, **attributes):
    """Sub-paths among the paths with these attributes."""
    return sum(path.get("d").count("M") for path in elements(picture, "path", **attributes))


def arrows(picture):
    """(solid, dashed): the curves of all arrows."""
    curves = {True: 0, False: 0}
    for path in elements(picture, "path"):
        curves[path.get("stroke-dasharray") is None] += path.get("d").count("Q")
    return curves[True], curves[False]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_is_drawn_with_an_arrow_a_move_and_a_frame_a_sum(schedule):
    for k in range(2, 9):
        picture = plot.schedule(schedule, k)
        moves = [move for step in schedule(k) for move in step]
        added = sum(move.reduce for move in moves)
        assert arrows(picture) == (added, len(moves) - added)
        states = holdings(schedule(k), k)
        cells = [held for state in states for device in state for held in device]
        assert count(picture, fill=GREY) == len(cells)
        for i in range(k):
            rows = count(picture, stroke=PALETTE[i], stroke_width=f"{36 // k}")
            assert rows == sum(i in contributors for contributors in cells)
        whole = sum(held == tuple(range(k)) for held in cells)
        assert count(picture, fill="none", stroke_width="1.75") == whole
        titles = [text for text in texts(picture) if text.startswith("step ")]
        assert titles == [f"step {i + 1}" for i in range(len(schedule(k)))]
        assert list(text_layout.complaints(picture.svg)) == [], k


@pytest.mark.parametrize("k", range(2, 9))
def test_devices_and_what_they_hold_do_not_overlap(k):
    for n in (1, k):
        panel = _Panel(k, n, 190)
        w, h = panel.cell * n, panel.row * k
        boxes = [(x, y, x + w, y + h) for x, y in panel.corners]
        boxes += [(p.real - 10, p.imag - 10, p.real + 10, p.imag + 10) for p in panel.discs]
        for i, a in enumerate(boxes):
            assert abs(a[0]) < panel.width / 2 and abs(a[2]) < panel.width / 2
            for b in boxes[:i]:
                assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_chunks_are_labelled_on_the_way():
    words = texts(plot.schedule(halving_doubling, 4))
    # step 1 swaps halves: two of each; step 4 hands them back
    assert words.count("0-1") == words.count("2-3") == 4
    folded = texts(plot.schedule(halving_doubling, 3))
    assert folded.count("all") == 2  # the third device's whole tensor, there and back


def test_the_alternative_text_of_a_schedule_tells_its_steps():
    alt = plot.schedule(ring, 3).alt
    assert alt.startswith(
        "ring(3): 3 devices, 4 steps, the tensor in 3 chunks. Step 1: 0 to 1: chunk 2, 1 to 2: "
        "chunk 0, 2 to 0: chunk 1, added; 0 of 9 sums are whole. Step 2: 0 to 1: chunk 1, 1 to 2: "
        "chunk 2, 2 to 0: chunk 0, added; 3 of 9 sums are whole. Step 3:"
    )
    assert alt.endswith("copied; 9 of 9 sums are whole.")
    assert "56 messages, added; 8 of 64" in plot.schedule(direct, 8).alt
    assert "Step 1: 1 to 0: all, 2 to 0: all, added; 1 of 3" in plot.schedule(star, 3).alt


def test_a_broken_ring_can_be_seen_and_a_broadcast_is_drawn_too():
    broken = plot.schedule(lambda k: ring(k)[:-1], 4, title="broken")
    assert "16 of 16 sums" not in broken.alt and "12 of 16 sums" in broken.alt
    assert count(plot.schedule(ring, 4), stroke_width="1.75") > count(broken, stroke_width="1.75")
    assert arrows(plot.schedule(tree_broadcast, 5)) == (0, 4)


# Iterations and data-parallel training: straight arrows between boxes


def straight(picture):
    """[(x and y of the tail, x and y of the neck, thickness)] of the straight arrows."""
    found = []
    for path in elements(picture, "path", stroke="#222222"):
        if ends := re.fullmatch(r"M(\S+) (\S+)L(\S+) (\S+)", path.get("d")):
            found.append((*map(float, ends.groups()), float(path.get("stroke-width"))))
    return found


STEPS = [
    Step("scatter <X & y>", {("host", 0): 400, ("host", 1): 1500}),
    Step("forward", {}, (0, 1)),
    Step("gather", {(1, 0): 2_000_000}),
    Step("loss", {}, (0,)),
    Step("nothing is sent", {}),
]


def test_an_iteration_has_an_arrow_for_each_link_and_a_block_for_each_that_computes():
    picture = plot.iteration({"A & B": STEPS})
    words = texts(picture)
    steps = ["scatter <X & y>", "forward", "gather", "loss", "nothing is sent"]
    numbered = [f"{n}. {step}" for n, step in enumerate(steps, 1)]
    assert [word for word in words if ". " in word] == numbered
    assert {"A & B", "host", "0", "1", "1.9 kB", "2 MB"} <= set(words)
    assert picture.alt == (
        "The steps of an iteration. A & B: 1. scatter <X & y>, 1.9 kB; 2. forward; 3. gather, "
        "2 MB; 4. loss; 5. nothing is sent."
    )
    named = {text.text: round(float(text.get("x"))) for text in elements(picture, "text")}
    host, zero, one = named["host"], named["0"], named["1"]
    assert host < zero < one
    drawn = straight(picture)
    assert all(y == end for _, y, _, end, _ in drawn)
    ways = [(round(x), "right" if x < end else "left") for x, _, end, _, _ in drawn]
    assert ways == [(host, "right"), (host, "right"), (one, "left")]
    assert 1 <= drawn[0][-1] < drawn[1][-1] < drawn[2][-1]  # thicker for more bytes
    blocks = [float(r.get("x")) + float(r.get("width")) / 2 for r in elements(picture, "rect")[1:]]
    assert list(map(round, blocks)) == [zero, one, zero]


def test_iterations_stand_side_by_side_and_have_room_for_their_words():
    link = {(0, 1): 399_999_999, (1, 0): 1, (3, 2): 1}
    steps = [Step(name, link, (0, 3)) for name in ("allreduce the gradients", "loss", "x" * 20)]
    pictures = [plot.iteration(dict.fromkeys("ABC"[:n], steps)) for n in (1, 2, 3)]
    for picture in pictures:
        assert list(text_layout.complaints(picture.svg)) == []
    assert len({picture.svg.partition("viewBox=")[2][:8] for picture in pictures}) == 1
    assert [word for word in texts(pictures[2]) if word in "ABC"] == ["A", "B", "C"]
    assert "A: 1. allreduce" in pictures[2].alt and "C: 1. allreduce" in pictures[2].alt
    assert "1. send." in plot.iteration({"A": [Step("send", {(0, 1): 0})]}).alt
    assert plot.iteration({"A": [Step("forward", {}, (0,))]}).alt.endswith("A: 1. forward.")


@pytest.mark.parametrize("k", range(1, 5))
def test_data_parallel_shows_every_device_and_what_is_sent(k):
    picture = plot.data_parallel(k)
    words = texts(picture)
    for i in range(k):
        assert f"device {i}" in words and f"of shard {i}" in words
    assert words.count("same step") == k and words.count("sum") == 1
    thick = [arrow[-1] for arrow in straight(picture)]
    assert thick.count(3) == 3 * k  # a shard, a gradient and the sum, for each device
    assert thick.count(1) == k
    assert f"{k} devices" in picture.alt and "allreduce" in picture.alt


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot.schedule(ring, 1), "k = 1, but only 2 to 8"),
        (lambda: plot.schedule(ring, 9), "k = 9, but only 2 to 8"),
        (lambda: plot.data_parallel(0), "k = 0, but only 1 to 4"),
        (lambda: plot.data_parallel(5), "k = 5, but only 1 to 4"),
        (lambda: plot.iteration({}), "0 forms, but only 1 to 3"),
        (lambda: plot.iteration(dict.fromkeys("abcd", STEPS)), "4 forms, but only 1 to 3"),
    ],
)
def test_what_does_not_fit_is_an_error_with_the_numbers(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
