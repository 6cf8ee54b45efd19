"""Iterations show who computes and who sends what to whom."""

import re

import pytest
from text_layout import complaints, elements, texts

from d2lpar import plot
from d2lpar.plot.picture import INK
from d2lpar.study.iteration import Step

STEPS = [
    Step("scatter <X & y>", {("host", 0): 400, ("host", 1): 1500}),
    Step("forward", {}, (0, 1)),
    Step("gather", {(1, 0): 2_000_000}),
    Step("nothing is sent", {("host", 0): 0}),
]


def test_an_iteration_has_an_arrow_for_each_link_and_a_block_for_each_that_computes():
    picture = plot.iteration({"A & B": STEPS})
    assert {"A & B", "host", "0", "1", "1.9 kB", "2 MB", "2. forward"} <= set(texts(picture))
    assert picture.alt == (
        "The steps of an iteration. A & B: 1. scatter <X & y>, 1.9 kB; 2. forward; "
        "3. gather, 2 MB; 4. nothing is sent."
    )
    place = {text.text: float(text.get("x")) for text in elements(picture, "text")}
    assert place["host"] < place["0"] < place["1"]
    found = []
    for path in elements(picture, "path", fill="none", stroke=INK):
        for tail, y, neck, end in re.findall(r"M(\S+) (\S+)Q\S+ \S+ (\S+) ([^M ]+)", path.get("d")):
            assert y == end
            side = "right" if float(tail) < float(neck) else "left"
            found.append((float(path.get("stroke-width")), float(tail), side))
    thick, tails, ways = zip(*sorted(found), strict=True)  # thicker for more bytes
    assert len(set(thick)) >= 2 and ways == ("right", "right", "right", "left")
    assert tails[:-1] == pytest.approx([place["host"]] * 3, abs=0.5)
    assert tails[-1] == pytest.approx(place["1"], abs=0.5)
    blocks = elements(picture, "path", stroke_width="16")
    middles = [float(path.get("d")[1:].split()[0]) + 8 for path in blocks]
    assert middles == pytest.approx([place["0"], place["1"]], abs=0.5)


def test_up_to_three_iterations_stand_side_by_side_and_have_room_for_their_words():
    link = {(0, 1): 399_999_999, (1, 0): 1, (3, 2): 1}
    steps = [Step(name, link, (0, 3)) for name in ("allreduce the gradients", "loss", "x" * 20)]
    for forms in ("A", "AB", "ABC"):
        picture = plot.iteration(dict.fromkeys(forms, steps))
        assert not list(complaints(picture.svg)) and 'viewBox="0 0 760' in picture.svg
        assert [word for word in texts(picture) if word in "ABC"] == list(forms)
        assert all(f"{form}: 1. allreduce" in picture.alt for form in forms)
    for forms in ("", "ABCD"):
        with pytest.raises(ValueError, match=f"{len(forms)} forms, but only 1 to 3"):
            plot.iteration(dict.fromkeys(forms, steps))
