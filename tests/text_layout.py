"""Where the text of a picture stands, in the metrics of DejaVu Sans, the widest of its fonts."""

import functools
import itertools
import re
import xml.etree.ElementTree as ET

import matplotlib
import numpy as np
from PIL import ImageFont

SVG = "{http://www.w3.org/2000/svg}"
parsed = functools.lru_cache(maxsize=4)(ET.fromstring)


def texts(picture):
    """All that a picture says in its drawing, in order."""
    return ["".join(t.itertext()) for t in parsed(picture.svg).iter(SVG + "text")]


def elements(picture, tag, **attributes):
    """Its elements of this tag that have these attributes (stroke_width for stroke-width)."""
    wanted = {name.replace("_", "-"): value for name, value in attributes.items()}
    return [
        one for one in parsed(picture.svg).iter(SVG + tag) if wanted.items() <= one.attrib.items()
    ]


@functools.cache
def font(bold):
    name = f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans{'-Bold' * bold}.ttf"
    return ImageFont.truetype(name, 1000)


def boxes(element, tag, matrix=None, style=None):
    """Yield (words, left, top, right, bottom) in pixels of every text, or every rect with a x."""
    style = (style or {}) | element.attrib | _declarations(element.get("style", ""))
    matrix = (np.eye(3) if matrix is None else matrix) @ _matrix(element.get("transform", ""))
    if element.tag == SVG + tag and element.get("x"):
        words, *corners = _text(element, style) if tag == "text" else _rect(element)
        points = np.array([matrix @ [*corner, 1] for corner in corners])[:, :2]
        yield words, *points.min(0), *points.max(0)
    if element.tag != SVG + "defs":
        for child in element:
            yield from boxes(child, tag, matrix, style)


def _declarations(css):
    pairs = (declaration.partition(":") for declaration in css.split(";"))
    found = {name.strip(): value.strip() for name, _, value in pairs if value}
    if "font" in found:  # matplotlib's shorthand: [bold] 13px 'DejaVu Sans', …
        size = re.search(r"([\d.]+)px", found["font"])[1]
        found |= {"font-size": size, "font-weight": found["font"].split()[0]}
    return found


def _matrix(transform):
    whole = np.eye(3)
    for kind, numbers in re.findall(r"(\w+)\(([^)]*)\)", transform):
        v = [float(number) for number in re.findall(r"[-+.\de]+", numbers)]
        part = np.eye(3)
        if kind == "translate":
            part[:2, 2] = (v + [0])[:2]
        elif kind == "scale":
            part[0, 0], part[1, 1] = v[0], v[-1]
        else:
            assert kind == "rotate", transform
            turn, centre = np.radians(v[0]), np.array((v + [0, 0])[1:3])
            part[:2, :2] = [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
            part[:2, 2] = centre - part[:2, :2] @ centre
        whole = whole @ part
    return whole


def _rect(element):
    x, y, width, height = (float(element.get(name)) for name in ("x", "y", "width", "height"))
    return "", *itertools.product((x, x + width), (y, y + height))


def _text(element, style):
    size = float(style["font-size"].removesuffix("px"))
    words, width = "", 0.0
    for part, weight in _runs(element, style.get("font-weight")):
        words += part
        width += font(weight == "bold").getlength(part) * size / 1000
    x, y = float(element.get("x")), float(element.get("y"))
    x -= {"start": 0, "middle": width / 2, "end": width}[style.get("text-anchor", "start")]
    return words, *itertools.product((x, x + width), (y - 0.73 * size, y + 0.2 * size))


def _runs(element, weight):
    yield element.text or "", weight
    for child in element:
        yield child.text or "", child.get("font-weight", weight)
        yield child.tail or "", weight


def complaints(svg, margin=4):
    """Yield every text that overlaps another, leaves its frame, or comes close to the edge."""
    root = ET.fromstring(svg)
    if not root.get("font-family", "").startswith("'DejaVu Sans', Verdana"):  # nearly as wide
        yield f"its text is not in DejaVu Sans, but in {root.get('font-family')}"
    _, _, width, height = map(float, root.get("viewBox").split())
    texts = sorted(set(boxes(root, "text")))  # a halo stands where its text does
    for words, left, top, right, bottom in texts:
        if left < margin or right > width - margin or top < 0 or bottom > height:
            yield f"{words!r} leaves the picture: {left:.0f} to {right:.0f} of {width:g} pixels"
        x, y = (left + right) / 2, (top + bottom) / 2
        for _, *rect in boxes(root, "rect"):
            inside = rect[0] < x < rect[2] and rect[1] < y < rect[3]
            if inside and not rect[0] < left < right < rect[2]:
                yield f"{words!r} fills its frame: {right - left:.0f} of {rect[2] - rect[0]:.0f}"
    for a, b in itertools.combinations(texts, 2):
        if a[1] < b[3] and b[1] < a[3] and a[2] < b[4] and b[2] < a[4]:
            yield f"{a[0]!r} and {b[0]!r} overlap"
