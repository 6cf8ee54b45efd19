"""A schedule step by step, a timeline, and the ``Picture`` that every drawing returns.

A picture is SVG with an alternative text, which a notebook shows as a cell's last expression and
``save`` writes to a file. The same call gives the same bytes. Both drawings are written as SVG
directly: they are up to thousands of marks that must sit to the pixel. Colour is never the only
sign: places, dashes and labels say the same. Only ``plot``, ``figures`` and ``gantt`` import it.
"""

import base64
import cmath
import functools
import io
import math
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import matplotlib
import resvg_py
from PIL import Image, ImageFont

from ..collectives.schedules import Move, chunks_of, holdings, num_chunks, steps_of

WIDTH = 760  # pixels: about the width of text in a notebook and in a README
# Of Okabe and Ito's colours and of Tol's, those that stand out from white (contrast of 3 and more).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#332288", "#117733", "#6699CC", "#882255")
INK, GREY = "#222222", "#E4E4E4"
# Widths are those of DejaVu Sans, which matplotlib brings; Verdana's are nearly the same.
FONTS = "'DejaVu Sans', Verdana, Arial, sans-serif"
KEY = """\
Grid: what a device holds.
Column: a chunk.
Row: from which device.
Frame: the whole sum.
Number: chunk received.
Solid arrow: is added.
Dashed arrow: is copied.
Thicker arrow: more bytes.""".splitlines()


@dataclass(frozen=True, repr=False)
class Picture:
    """An SVG and what it says in words: a notebook shows the one, a terminal prints the other.

    What matplotlib drew is also kept as its ``figure``, to restyle
    (``picture.figure.axes[0].set_title("Mine", loc="left")``), to save in other formats
    (``picture.figure.savefig("x.pdf")``), and to show as the last expression of a cell, after
    ``%matplotlib inline``.
    """

    svg: str
    alt: str
    figure: Any = field(default=None, compare=False)

    def save(self, path: str | Path) -> None:
        """Write the SVG to ``path``."""
        Path(path).write_text(self.svg, encoding="utf-8")

    def png(self) -> bytes:
        """Render the picture as a PNG of twice the size with 64 colours, in about 0.1 to 1 s.

        No font of the machine is used: with the same packages the bytes are the same everywhere.
        """
        fonts = [_font_file(bold) for bold in (False, True)]
        rendered = resvg_py.svg_to_bytes(
            self.svg, zoom=2, background="#FFF", skip_system_fonts=True, font_files=fonts
        )
        image = Image.open(io.BytesIO(rendered)).convert("RGB")
        written = io.BytesIO()
        image.quantize(64, Image.Quantize.MEDIANCUT).save(written, "PNG", optimize=True)
        return written.getvalue()

    def __repr__(self) -> str:
        return self.alt

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Collection[str] | None = None
    ) -> tuple[dict[str, str], dict[str, dict]]:
        """Return SVG, PNG and text: JupyterLab shows no SVG in a notebook that is not trusted."""
        data, metadata = {"image/svg+xml": self.svg, "text/plain": self.alt}, {}
        if "image/png" not in (exclude or ()):
            png = self.png()
            data["image/png"] = base64.b64encode(png).decode()
            width = Image.open(io.BytesIO(png)).width // 2
            metadata["image/png"] = {"alt": self.alt, "width": width}
        return data, metadata


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


def picture(body: str, width: float, height: float, alt: str, figure: Any = None) -> Picture:
    """An SVG around ``body``, on a white ground: on a dark page the text would be lost."""
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'role="img" aria-label={quoteattr(alt)} viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" style="max-width:100%;height:auto" fill="{INK}" '
        f'font-family="{FONTS}" font-size="12" stroke-linejoin="round"><title>{escape(alt)}</title>'
        f'<rect width="100%" height="100%" rx="8" fill="#FFF"/>{body}</svg>\n'
    )
    return Picture(svg, alt, figure)


def schedule(schedule: Callable[[int], list[list[Move]]], k: int, title: str = "") -> Picture:
    """Draw every step of ``schedule(k)``: who sends which chunk to whom, and what is held after it.

    Beside each device stands what it holds: a column for each chunk, in it a row for each device
    whose contribution it contains. Raises ValueError unless 2 <= k <= 8.
    """
    if not 2 <= k <= 8:
        raise ValueError(f"k = {k}, but only 2 to 8 devices fit into the picture")
    title = title or f"{getattr(schedule, '__name__', 'schedule')}({k})"
    steps = steps_of(schedule, k)
    states = holdings(steps, k)
    count = len(steps) + 2  # panels: the start, the steps, the key
    columns = (3 if count == 6 else 4) if k < 6 else (2 if count == 4 else 3)
    panel = _Panel(k, num_chunks(steps), WIDTH / columns)
    panels = [panel.draw("start", [], None, states[0])]
    chunks = f"{panel.n} chunk{'s' * (panel.n > 1)}"
    alt = [f"{title}: {k} devices, {len(steps)} steps, the tensor in {chunks}."]
    for i, step in enumerate(steps):
        panels.append(panel.draw(f"step {i + 1}", step, states[i], states[i + 1]))
        whole = sum(held == panel.all for device in states[i + 1] for held in device)
        alt.append(f"Step {i + 1}: {_in_words(step)}; {whole} of {k * panel.n} sums are whole.")
    key = [f'<text x="16" y="{40 + 19 * i}">{line}</text>' for i, line in enumerate(KEY)]
    panels.append('<text x="16" y="14" font-weight="bold">how to read it</text>' + "".join(key))
    body = heading(title, columns * panel.width)
    for i, drawn in enumerate(panels):
        x, y = i % columns * panel.width, 50 + i // columns * panel.height
        body += f'<g transform="translate({x:g} {y:g})">{drawn}</g>'
    height = 50 + math.ceil(count / columns) * panel.height
    return picture(body, columns * panel.width, height, " ".join(alt))


def _in_words(step: list[Move]) -> str:
    verbs = " and ".join(sorted({"added" if m.reduce else "copied" for m in step}))
    what = ["all" if m.chunk is None else f"chunk {_name(m)}" for m in step]
    moves = ", ".join(f"{m.src} to {m.dst}: {w}" for m, w in zip(step, what, strict=True))
    return f"{moves if len(step) <= 8 else f'{len(step)} messages'}, {verbs}"


def _name(move: Move) -> str:
    chunks = chunks_of(move, 1)
    one = str(chunks[0]) if len(chunks) == 1 else f"{chunks[0]}-{chunks[-1]}"
    return "all" if move.chunk is None else one


class _Panel:
    """One step in pixels: the devices on a circle, and outside of it what each of them holds.

    A point is a complex number. Marks of one style go into one SVG path: ``paths`` maps the path's
    attributes to its data.
    """

    def __init__(self, k: int, n: int, width: float):
        self.k, self.n, self.all = k, n, tuple(range(k))
        self.cell, self.row = min(36, max(8, 60 // n)), 36 // k  # the size of one contribution
        w, h = self.cell * n, self.row * k
        radius = max(44, 27 / math.sin(math.pi / k))  # room for an arrow between neighbours
        top = -0.25 - (0.5 / k if k % 4 == 0 else 0)  # in turns; the top is flat for 4 and 8
        self.discs = [cmath.rect(radius, math.tau * (top + i / k)) for i in range(k)]
        self.corners = []  # top left of what a device holds, moved outwards till it clears the disc
        for p in self.discs:
            out = min((w / 2 + 14) / max(abs(p.real), 0.01), (h / 2 + 14) / max(abs(p.imag), 0.01))
            corner = p * (1 + out) - complex(w, h) / 2
            self.corners.append((round(corner.real), round(corner.imag)))
        xs, ys = zip(*self.corners, strict=True)
        self.width = max(width, 2 * (max(xs) + w) + 26)
        self.height = max(210, max(ys) + h - min(ys) + 74)
        self.middle = self.height / 2 + 4 - (min(ys) + max(ys) + h) / 2

    def draw(self, title: str, step: list[Move], before: list | None, after: list) -> str:
        """The arrows of ``step``, what is held after it, and the number of each chunk that came."""
        paths, halos, texts, taken = {}, [], [], []
        for move in step:
            places = self.arrow(paths, move)
            if self.n > 1 and len(step) <= 2 * self.k:  # more labels would hide the arrows
                width = text_width(_name(move), bold=True)
                free = (p for p in places if not any(_near(p, q, width + 1, 12) for q in taken))
                place = next(free, places[0])
                taken.append(place)
                halos.append(text(place, _name(move), 'stroke="#FFF" stroke-width="4"'))
                texts.append(text(place, _name(move)))
        for device, p in enumerate(self.discs):
            colour, (x, y) = PALETTE[device], self.corners[device]
            texts.append(f'<circle cx="{p.real:.4g}" cy="{p.imag:.4g}" r="10" fill="{colour}"/>')
            texts.append(text(p, device, 'fill="#FFF"'))
            for c, held in enumerate(after[device]):
                self.column(paths, x + c * self.cell, y, held)
                if self.n > 1 and (before is None or before[device][c] != held):
                    beyond = y - 8 if p.imag < 0 else y + self.row * self.k + 7
                    place = complex(x + (c + 0.5) * self.cell, beyond)
                    texts.append(text(place, c, 'font-size="10"'))
        drawn = "".join(f'<path {style} d="{data}"/>' for style, data in paths.items())
        return (
            f'<text x="16" y="14" font-weight="bold">{title}</text><g text-anchor="middle" '
            f'font-weight="bold" transform="translate({self.width / 2:g} {self.middle:.4g})">'
            f"{drawn}{''.join(halos + texts)}</g>"
        )

    def column(self, paths: dict[str, str], x: int, y: int, held: tuple[int, ...]) -> None:
        """A chunk: a row for each contributor; a frame if each is there exactly once."""
        height, width = self.row * self.k, self.cell - 1
        _add(paths, f'fill="{GREY}"', f"M{x} {y}h{width}v{height}h-{width}z")
        for i in sorted(set(held)):
            style = f'stroke="{PALETTE[i]}" stroke-width="{self.row}"'
            _add(paths, style, f"M{x} {y + (i + 0.5) * self.row:g}h{width}")
        if held == self.all:
            frame = f"M{x - 0.5} {y}h{self.cell}v{height}h-{self.cell}z"
            _add(paths, f'fill="none" stroke="{INK}" stroke-width="1.75"', frame)

    def arrow(self, paths: dict[str, str], move: Move) -> list[complex]:
        """A curve as thick as the message is long; returns places for its label, the best first."""
        start, end = self.discs[move.src], self.discs[move.dst]
        middle, straight, radius = (start + end) / 2, abs(end - start), abs(start)
        t = 0.43  # where the label stands, between 0 and 1
        if straight > 1.05 * abs(self.discs[1] - self.discs[0]):  # no neighbours
            middle *= 0.75  # away from the discs between them
            t = 0.25 if straight > 1.7 * radius else 0.5  # away from where many cross
        # bent to the left, so that an exchange is two curves, and cut at the edges of the discs
        control = middle - 1j * (end - start) * min(0.2, 16 / straight)
        cut = 11.5 / abs(control - start)
        start, end = start + cut * (control - start), end + cut * (control - end)
        thick = 1.2 + 2.4 * len(chunks_of(move, self.n)) / self.n
        back = (control - end) / abs(control - end) * (5 + thick)  # from the tip to the neck
        dashes = "" if move.reduce else ' stroke-dasharray="4 3"'
        shaft = f"M{_at(start)}Q{_at(control)} {_at(end + back)}"
        _add(paths, f'fill="none" stroke="{INK}" stroke-width="{thick:.2g}"{dashes}', shaft)
        head = f"M{_at(end)}L{_at(end + back * (1 + 0.5j))} {_at(end + back * (1 - 0.5j))}z"
        _add(paths, f'fill="{INK if move.reduce else "#FFF"}" stroke="{INK}"', head)
        along = [t, *(t + sign * 0.04 * i for i in range(1, 10) for sign in (-1, 1))]
        curve = [(1 - t) ** 2 * start + 2 * t * (1 - t) * control + t**2 * end for t in along]
        width = 11 + text_width(_name(move), bold=True) / 2
        return [p for p in curve if not any(_near(p, q, width, 16) for q in self.discs)] or curve


def _near(p: complex, q: complex, width: float, height: float) -> bool:
    return abs(p.real - q.real) < width and abs(p.imag - q.imag) < height


def _add(paths: dict[str, str], style: str, data: str) -> None:
    paths[style] = paths.get(style, "") + data


def _at(point: complex) -> str:
    return f"{point.real:.4g} {point.imag:.4g}"


def timeline(spans: Sequence[tuple[str, str, float, float]], title: str = "") -> Picture:
    """Draw each ``(lane, label, start, end)``, in seconds, as a bar over time: a Gantt chart.

    A lane is a row; rows come in the order of their first spans, and the earliest start is 0 ms.
    Lanes of one kind share a colour: "rank 0: send" and "rank 1: send" are of the kind "send". A
    label that its bar cannot hold is shown while the mouse is on the bar. Raises ValueError for no
    spans, and for a span that ends before it starts.
    """
    if not spans:
        raise ValueError("0 spans to draw: pass at least one (lane, label, start, end)")
    zero = min(start for _, _, start, _ in spans)
    lanes = {}  # each with its own (label, start, end)
    for lane, label, start, end in spans:
        if not -math.inf < start <= end < math.inf:  # nor may they be NaN
            raise ValueError(f"{label!r} of {lane!r} cannot last from {start} s to {end} s")
        lanes.setdefault(lane, []).append((label, start - zero, end - zero))
    total = max(end for *_, end in spans) - zero
    kinds = list(dict.fromkeys(map(_kind, lanes)))
    left, top = 26 + max(map(text_width, lanes)), 46 if title else 16  # room for names and title
    width, bottom = max(WIDTH, left + 400), top + 26 * len(lanes)
    scale = (width - left - 40) / (total or 1)  # pixels in a second
    body = heading(title, width)
    for tick in round_numbers(total or 1):
        x = left + tick * scale
        body += f'<path d="M{x:.5g} {top}V{bottom + 4}" stroke="{GREY}"/>'
        body += text(complex(x, bottom + 16), _ms(tick), 'text-anchor="middle"')
    words = []
    for i, (lane, own) in enumerate(lanes.items()):
        y, colour = top + 26 * i + 13, PALETTE[kinds.index(_kind(lane)) % len(PALETTE)]
        body += text(complex(left - 10, y), escape(lane), 'text-anchor="end"')
        for label, start, end in own:
            x, length = left + start * scale, (end - start) * scale
            body += _bar(x, y, length, colour, label, f"{_ms(start)} to {_ms(end)}")
        first, last = min(start for _, start, _ in own), max(end for *_, end in own)
        words.append(f"{lane} has {len(own)} from {_ms(first)} to {_ms(last)}")
    alt = f"Timeline of {_ms(total)}{title and ': '}{title}. Lanes: {len(lanes)}. "
    alt += f"Spans: {len(spans)}. {'; '.join(words)}."
    return picture(body, width, bottom + 34, alt)


def _bar(x: float, y: float, length: float, colour: str, label: str, when: str) -> str:
    """A bar from ``x`` on, never too thin to be seen, with its label if that fits."""
    length = max(2, length)
    bar = (
        f'<rect x="{x:.5g}" y="{y - 10:g}" width="{length:.5g}" height="20" fill="{colour}" '
        f'stroke="#FFF" stroke-width="0.6"><title>{escape(label)}: {when}</title></rect>'
    )
    if length < 10 + text_width(label, size=11, bold=True):
        return bar
    style = 'fill="#FFF" font-size="11" font-weight="bold" text-anchor="middle"'
    return bar + text(complex(x + length / 2, y), escape(label), style)


def _kind(lane: str) -> str:
    return lane.rpartition(": ")[2]


def round_numbers(total: float) -> list[float]:
    """4 to 8 round numbers from 0 to ``total``."""
    power = 10.0 ** math.floor(math.log10(total))
    step = max(m * power for m in (0.2, 0.5, 1, 2) if 3 * m * power <= total)
    return [i * step for i in range(int(total / step + 1e-6) + 1)]


def _ms(seconds: float) -> str:
    return f"{float(f'{1000 * seconds:.3g}'):g} ms"


def text(point: complex, words: object, more: str = "") -> str:
    """SVG for words whose middle is at ``point``, a complex number; ``more`` is attributes."""
    return f'<text x="{point.real:.4g}" y="{point.imag + 4:.4g}" {more}>{words}</text>'


def heading(title: str, width: float) -> str:
    """SVG for the title of a picture, made smaller where that is needed; nothing for no title."""
    size = min(17, 17 * (width - 32) / (text_width(title, 17, bold=True) or 1))
    style = f'font-size="{size:.3g}" font-weight="bold"'
    return text(16 + 22j, escape(title), style) if title else ""
