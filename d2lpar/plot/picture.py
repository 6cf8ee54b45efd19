"""The picture that everything here returns, its colours, and marks to draw by hand.

The same call gives the same bytes. Colour is never the only sign: places, dashes and labels say the
same.
"""

import base64
import functools
import io
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape, quoteattr

import matplotlib
import resvg_py
from matplotlib.ticker import EngFormatter, MaxNLocator
from PIL import Image, ImageFont

WIDTH = 760  # pixels: about the width of text in a notebook and in a README
# Of Okabe and Ito's colours and of Tol's, those that stand out from white (contrast of 3 and more).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#332288", "#117733", "#6699CC", "#882255")
INK, GREY, DARK_GREY = "#222222", "#E4E4E4", "#767676"
SCHEDULES = {
    "star": PALETTE[0],
    "ring": PALETTE[1],
    "tree": PALETTE[2],
    "direct": PALETTE[3],
    "halving_doubling": PALETTE[4],
    "recursive_doubling": PALETTE[7],
    "all_reduce": PALETTE[6],  # torch's, which chooses one by itself
}
# Widths are those of DejaVu Sans, which matplotlib brings; Verdana's are nearly the same.
FONTS = "'DejaVu Sans', Verdana, Arial, sans-serif"
BOLD, CENTRED = 'font-weight="bold"', 'text-anchor="middle"'
HALO = 'paint-order="stroke" stroke="#FFF" stroke-width="4"'  # around text that crosses a line


@dataclass(frozen=True, repr=False)
class Picture:
    """An SVG and what it says in words: a notebook shows the one, a terminal prints the other.

    What matplotlib drew is also kept as its ``figure``, to restyle, to save in other formats
    (``picture.figure.savefig("x.pdf")``), and to show in a cell, after ``%matplotlib inline``.
    """

    svg: str
    alt: str
    figure: Any = field(default=None, compare=False)

    @classmethod
    def around(cls, body: str, width: float, height: float, alt: str, figure: Any = None):
        """Put SVG elements on a white ground: on a dark page their text would be lost."""
        svg = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'role="img" aria-label={quoteattr(alt)} viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" style="max-width:100%;height:auto" '
            f'fill="{INK}" font-family="{FONTS}" font-size="12" stroke-linejoin="round">'
            f"<title>{escape(alt)}</title>"
            f'<rect width="100%" height="100%" rx="8" fill="#FFF"/>{body}</svg>\n'
        )
        return cls(svg, alt, figure)

    def save(self, path: str | Path) -> None:
        """Write the SVG to ``path``."""
        Path(path).write_text(self.svg, encoding="utf-8")

    def png(self) -> bytes:
        """Render the picture as a PNG of twice the size with 64 colours, in about 0.1 to 1 s."""
        # without the fonts of this machine: the bytes are the same everywhere
        fonts = {"skip_system_fonts": True, "font_files": [_font_file(b) for b in (False, True)]}
        rendered = resvg_py.svg_to_bytes(self.svg, zoom=2, background="#FFF", **fonts)
        image = Image.open(io.BytesIO(rendered)).convert("RGB")
        written = io.BytesIO()
        image.quantize(64, Image.Quantize.MEDIANCUT).save(written, "PNG", optimize=True)
        return written.getvalue()

    def __repr__(self) -> str:
        return self.alt

    def _repr_mimebundle_(self, include=None, exclude: Collection[str] | None = None) -> tuple:
        """Return SVG, PNG and text: JupyterLab shows no SVG in a notebook that is not trusted."""
        data, metadata = {"image/svg+xml": self.svg, "text/plain": self.alt}, {}
        if "image/png" not in (exclude or ()):
            png = self.png()
            data["image/png"] = base64.b64encode(png).decode()
            width = Image.open(io.BytesIO(png)).width // 2
            metadata["image/png"] = {"alt": self.alt, "width": width}
        return data, metadata


def colour_of(name: str, default: str | None = PALETTE[0]) -> str | None:
    """Return a schedule's colour: of "ring", and of "dist.all_reduce" and "ring, over gloo" too."""
    return SCHEDULES.get(name.removeprefix("dist.").partition(",")[0], default)


def colours_of(names: Sequence[str]) -> list[str]:
    """Return a colour for each of up to 8 names; others than schedules take what those leave."""
    own = [colour_of(name, None) for name in names]
    left = (colour for colour in PALETTE if colour not in own)
    return [colour or next(left) for colour in own]


def quantity(value: float, unit: str | None) -> str:
    """Write three digits and a unit ("bytes", "seconds" or None): 1.05 MB, 20 ms, 1200 s."""
    value = float(f"{value:.3g}")
    if not unit or (unit == "seconds" and value >= 1000):
        return f"{value:g}{' s' if unit else ''}"
    return EngFormatter({"bytes": "B", "seconds": "s"}[unit])(value)


def _font_file(bold: bool) -> str:
    return f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans{'-Bold' if bold else ''}.ttf"


@functools.cache
def _font(bold: bool) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(_font_file(bold), 1000, layout_engine=ImageFont.Layout.BASIC)


def text_width(words: object, size: float = 12, bold: bool = False) -> float:
    """Return how many pixels the words take."""
    return _font(bold).getlength(str(words)) * size / 1000


def wrapped(words: str, room: float, size: float = 12, bold: bool = False) -> str:
    """Return the words, cut into lines if they take more than ``room`` pixels."""
    per_line = room / (text_width(words, size, bold) or 1)
    return words if per_line >= 1 else textwrap.fill(words, int(per_line * len(words)))


def text(point: complex, words: object, more: str = "") -> str:
    """Return SVG for words whose middle is at ``point``; ``more`` is attributes."""
    place = f'x="{point.real:.4g}" y="{point.imag + 4:.4g}"'
    return f"<text {place} {more}>{escape(str(words))}</text>"


def heading(title: str, width: float, colour: str | None = None) -> str:
    """Return SVG for a picture's title, as large as fits, underlined in ``colour``."""
    if not title:
        return ""
    size = min(17, 17 * (width - 32) / text_width(title, 17, bold=True))
    line = f'<path d="M16 33H{16 + text_width(title, size, bold=True):.4g}" stroke-width="3" '
    line += f'stroke="{colour}"/>'
    return text(16 + 22j, title, f'font-size="{size:.3g}" {BOLD}') + (line if colour else "")


def at(point: complex) -> str:
    """Return a point as a path has it."""
    return f"{point.real:.4g} {point.imag:.4g}"


def arrow(paths: dict, start: complex, bend: complex, end: complex, thick: float, dashed: bool):
    """Add an arrow to ``paths``: marks of one style are one path, {its attributes: its data}."""
    neck = end + (bend - end) / abs(bend - end) * (5 + thick)
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    style = f'fill="none" stroke="{INK}" stroke-width="{thick:.2g}"{dashes}'
    paths[style] += f"M{at(start)}Q{at(bend)} {at(neck)}"
    side = (neck - end) * 0.5j
    style = f'fill="{"#FFF" if dashed else INK}" stroke="{INK}"'
    paths[style] += f"M{at(end)}L{at(neck + side)} {at(neck - side)}z"


def drawn(paths: dict[str, str]) -> str:
    """Return SVG for {attributes: data}."""
    return "".join(f'<path {style} d="{data}"/>' for style, data in paths.items())


class Axis(NamedTuple):
    """An axis of time: where it begins, and its pixels per unit."""

    left: float
    scale: float
    unit: str | None

    def time(self, value: float) -> str:
        """Return a time with three digits: in ms where the unit is seconds."""
        value = float(f"{1000 * value if self.unit else value:.3g}")
        return f"{value:g}{' ms' if self.unit else ''}"

    def words(self, start: float, end: float) -> str:
        """Return from when to when, in words."""
        return f"{self.time(start)} to {self.time(end)}"

    def draw(self, longest: float, end: float, top: float, bottom: float) -> str:
        """Draw a line and a number for each of the round numbers of ``longest``, up to ``end``."""
        body, ticks = "", MaxNLocator(7, steps=[1, 2, 5, 10]).tick_values(0, longest)
        for tick in ticks[ticks <= end * (1 + 1e-6)]:
            x = self.left + tick * self.scale
            body += f'<path d="M{x:.5g} {top}V{bottom + 4}" stroke="{GREY}"/>'
            body += text(complex(x, bottom + 16), self.time(tick), CENTRED)
        return body

    def bar(self, start, end, y: float, height: int, colour: str, label, words: str) -> str:
        """Draw a bar, never too thin to be seen, with its label if that fits."""
        x, length = self.left + start * self.scale, max(2, (end - start) * self.scale)
        bar = f'<rect x="{x:.5g}" y="{y:g}" width="{length:.5g}" height="{height}" fill="{colour}" '
        bar += 'stroke="#FFF" stroke-width="0.7">'
        bar += f"<title>{escape(words)}: {self.words(start, end)}</title></rect>"
        for size, margin in ((11, 4), (8, 0.5)):
            if text_width(label, size, bold=True) + margin <= length:
                style = f'{CENTRED} {BOLD} fill="#FFF" font-size="{size}"'
                return bar + text(complex(x + length / 2, y + height / 2), label, style)
        return bar
