"""The README shows the module's ring in motion, and one moment of it standing still."""

import re
import xml.etree.ElementTree as ET

import ring_picture

from d2lpar.collectives import ring

SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_is_what_the_code_draws():
    drawn = ring_picture.picture()
    assert ring_picture.PICTURE.read_text("utf-8") == drawn, (
        "python tools/ring_picture.py"
    )


def test_every_message_of_the_ring_travels_in_its_step():
    root = ET.fromstring(ring_picture.picture())
    groups = root.findall(f"{SVG}g")
    states = [group for group in groups if "state" in group.get("class")]
    mail = [group for group in groups if "mail" in group.get("class")]
    begin = [float(re.search(r"delay:(-[\d.]+)s", g.get("style"))[1]) for g in states]
    assert begin == sorted(begin) and len(states) == len(ring(4)) + 1
    for number, step in enumerate(ring(4)):
        shown = [
            g for g in mail if f"animation-delay:{begin[number]:g}s" in g.get("style")
        ]
        assert [g.find(f".//{SVG}text").text for g in shown] == [
            str(m.chunk) for m in step
        ]
        assert all(
            (g.find(f".//{SVG}rect").get("stroke-dasharray") is None) == step[0].reduce
            for g in shown
        )
        for group, move in zip(shown, step, strict=True):
            way = re.search(
                r"translate\((-?\d+)px,(-?\d+)px\)", group.get("style")
            ).groups()
            at = re.search(
                r"translate\((-?\d+) (-?\d+)\)", group[0].get("transform")
            ).groups()
            arrives = [int(a) + int(w) for a, w in zip(at, way, strict=True)]
            near = [
                abs(a - b)
                for a, b in zip(arrives, ring_picture.PLACES[move.dst], strict=True)
            ]
            assert sorted(near) == [0, 32]  # beside the device that it is for
    squares = [
        len(re.findall("M", path.get("d"))) for path in states[-1].findall(f"{SVG}path")
    ]
    # the ground, four contributions and the frames, in 16 chunks
    assert squares == [16] * 6
    still = [group.get("class") for group in groups if "still" in group.get("class")]
    assert still == ["state still"] + ["mail still"] * 4
