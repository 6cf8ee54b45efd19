"""The number lines show what torch says of its types."""

import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import text_layout
import torch

from d2lpar import plot
from d2lpar.plot.drawing import PALETTE
from d2lpar.plot.number_formats import number_lines

SVG = "{http://www.w3.org/2000/svg}"


def paths(colour):
    return [
        path.get("d")
        for path in ET.fromstring(number_lines().svg).iter(SVG + "path")
        if path.get("stroke") == colour
    ]


def extent(path):
    left, right = re.match(r"M([\d.]+) \d+H([\d.]+)", path).groups()
    return float(left), float(right)


def test_ranges_are_in_proportion_and_marks_are_the_numbers():
    scale = (extent(paths(PALETTE[0])[1])[1] - extent(paths(PALETTE[0])[0])[0]) / (38.53 + 44.85)
    for kind, colour in zip((torch.float32, torch.bfloat16, torch.float16), PALETTE, strict=False):
        subnormal, normal, density = paths(colour)
        info = torch.finfo(kind)
        least = torch.tensor(info.tiny * info.eps, dtype=kind)
        assert least > 0 and least / 2 == 0  # the smallest there is
        powers = [math.log10(value) for value in (least.item(), info.tiny, info.max)]
        expected = [scale * (b - a) for a, b in pairwise(powers)]
        found = [right - left for left, right in map(extent, (subnormal, normal))]
        assert all(abs(a - b) < 0.2 for a, b in zip(found, expected, strict=True))
        if kind != torch.float32:
            between = torch.linspace(1, 1 + 1 / 32, 4097).to(kind).unique()
            assert density.count("v16") == len(between)


def test_it_is_legible_and_says_the_same_in_words():
    picture = plot.number_lines()
    assert list(text_layout.complaints(picture.svg)) == []
    assert "float16 from 6.0e-08 to 6.6e+04, 9.8e-04 apart at 1" in picture.alt
