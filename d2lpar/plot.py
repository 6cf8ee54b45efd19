"""Pictures: a schedule step by step, bytes per link, curves, bars, images, and the live board.

Every function returns a ``Picture``: SVG with an alternative text, which a notebook shows as a
cell's last expression and ``save`` writes to a file. The same call gives the same bytes. Colour
is never the only sign: places, markers, dashes and labels say the same. Charts are matplotlib's;
a schedule is written as SVG directly: thousands of marks that must sit to the pixel.

Only notebooks import this file. Notebook 03 draws its schedules with it.
"""

import base64
import cmath
import io
import math
import re
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import matplotlib.style
import torch
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, LogLocator, MaxNLocator, NullLocator
from PIL import Image

from .schedules import Move, num_chunks

WIDTH = 760  # pixels: about the width of text in a notebook and in a README
# Of Okabe and Ito's colours and of Tol's, those that stand out from white (contrast of 3 and more).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#332288", "#117733", "#6699CC", "#882255")
INK, GREY = "#222222", "#E4E4E4"
MARKERS = "os^Dv*PX"
DASHES = ("-", "--", "-.", ":", (0, (8, 2)), (0, (1, 1)), (0, (6, 1, 1, 1, 1, 1)), (0, (3, 3)))
FONTS = "Arial, Helvetica, 'DejaVu Sans', sans-serif"
STYLE = {
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, and is wider than the FONTS
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GREY,
    "legend.frameon": False,
    "legend.handlelength": 3.5,  # long enough to tell the dashes apart
    "figure.constrained_layout.h_pad": 0.12,  # inches
    "figure.constrained_layout.w_pad": 0.12,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "d2lpar",  # the same ids every time
}
KEY = """\
Beside a device: what it holds.
Column: a chunk.
Row: from which device.
Frame: the whole sum.
Number: the chunk that came.
Solid arrow: is added.
Dashed arrow: is copied.
Thicker arrow: more bytes.""".splitlines()
_styled = matplotlib.style.context(["default", STYLE])


@dataclass(frozen=True, repr=False)
class Picture:
    """An SVG and what it says in words: a notebook shows the one, a terminal prints the other."""

    svg: str
    alt: str

    def save(self, path: str | Path) -> None:
        """Write the SVG to ``path``."""
        Path(path).write_text(self.svg, encoding="utf-8")

    def __repr__(self) -> str:
        return self.alt

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"image/svg+xml": self.svg, "text/plain": self.alt}


def _picture(body: str, width: float, height: float, alt: str) -> Picture:
    """An SVG around ``body``, on a white ground: on a dark page the text would be lost."""
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'role="img" aria-label={quoteattr(alt)} viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" style="max-width:100%;height:auto" fill="{INK}" '
        f'font-family="{FONTS}" font-size="12" stroke-linejoin="round"><title>{escape(alt)}</title>'
        f'<rect width="100%" height="100%" rx="8" fill="#FFF"/>{body}</svg>\n'
    )
    return Picture(svg, alt)


def _chart(figure: Figure, alt: str) -> Picture:
    """What matplotlib drew, without its metadata and without what would leak into the page."""
    figure.patch.set_visible(False)
    text = io.StringIO()
    FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})  # savefig draws twice
    body = re.search(r"<svg[^>]*>(.*)</svg>", text.getvalue(), re.DOTALL)[1]
    body = re.sub(r"(?s)<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body)
    body = re.sub(r'(?<=<g) id="[^"]*"', "", body)
    body = re.sub(r"'DejaVu Sans'(, sans-serif)?", FONTS, body)
    width, height = figure.get_size_inches() * 72
    return _picture(re.sub(r"\s*\n\s*", "\n", body), width, height, alt)


def _figure(height: float, layout: str = "constrained") -> Figure:
    return Figure(figsize=(WIDTH / 72, height / 72), layout=layout)


def holdings(steps: list[list[Move]], k: int) -> list[list[list[tuple[int, ...]]]]:
    """Whose contributions are in each chunk: ``[step][device][chunk]``, a sorted tuple of devices.

    Entry 0 is the start, entry s what is held after step s. A contribution that was added twice
    stands there twice. Raises ValueError for a move that is not between two of the k devices.
    """
    n = num_chunks(steps)
    states = [[[(device,)] * n for device in range(k)]]
    for step in steps:
        before, after = states[-1], [list(held) for held in states[-1]]
        for m in step:
            chunks = _chunks(m, n)
            if m.src == m.dst or not {m.src, m.dst} <= set(range(k)) or min(chunks) < 0:
                raise ValueError(f"{m} does not send a chunk between two of {k} devices")
            for c in chunks:
                got = before[m.src][c]
                after[m.dst][c] = tuple(sorted(after[m.dst][c] + got)) if m.reduce else got
        states.append(after)
    return states


def _chunks(move: Move, n: int) -> Sequence[int]:
    if move.chunk is None:
        return range(n)
    return move.chunk if isinstance(move.chunk, range) else [move.chunk]


def schedule(schedule: Callable[[int], list[list[Move]]], k: int, title: str = "") -> Picture:
    """Draw every step of ``schedule(k)``: who sends which chunk to whom, and what is held after it.

    Beside each device stands what it holds: a column for each chunk, in it a row for each device
    whose contribution it contains. Raises ValueError unless 2 <= k <= 8.
    """
    if not 2 <= k <= 8:
        raise ValueError(f"k = {k}, but only 2 to 8 devices fit into the picture")
    title = title or f"{getattr(schedule, '__name__', 'schedule')}({k})"
    steps = schedule(k)
    states = holdings(steps, k)
    count = len(steps) + 2  # panels: the start, the steps, the key
    columns = (3 if count == 6 else 4) if k < 6 else (2 if count == 4 else 3)
    panel = _Panel(k, num_chunks(steps), WIDTH / columns)
    panels = [panel.draw("start", [], None, states[0])]
    alt = [f"{title}: {k} devices, {len(steps)} steps, the tensor in {panel.n} chunks."]
    for i, step in enumerate(steps):
        panels.append(panel.draw(f"step {i + 1}", step, states[i], states[i + 1]))
        whole = sum(held == panel.all for device in states[i + 1] for held in device)
        alt.append(f"Step {i + 1}: {_in_words(step)}; {whole} of {k * panel.n} sums are whole.")
    key = [f'<text x="16" y="{40 + 19 * i}">{line}</text>' for i, line in enumerate(KEY)]
    panels.append('<text x="16" y="14" font-weight="bold">how to read it</text>' + "".join(key))
    body = f'<text x="16" y="26" font-size="17" font-weight="bold">{escape(title)}</text>'
    for i, drawn in enumerate(panels):
        x, y = i % columns * panel.width, 50 + i // columns * panel.height
        body += f'<g transform="translate({x:g} {y:g})">{drawn}</g>'
    height = 50 + math.ceil(count / columns) * panel.height
    return _picture(body, columns * panel.width, height, " ".join(alt))


def _in_words(step: list[Move]) -> str:
    verbs = " and ".join(sorted({"added" if m.reduce else "copied" for m in step}))
    moves = ", ".join(f"{m.src} to {m.dst} {_name(m)}" for m in step)
    return f"{moves if len(step) <= 8 else f'{len(step)} messages'}, {verbs}"


def _name(move: Move) -> str:
    chunks = _chunks(move, 1)
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
        paths, halos, texts = {}, [], []
        for move in step:
            place = self.arrow(paths, move)
            if self.n > 1 and len(step) <= 2 * self.k:  # more labels would hide the arrows
                halos.append(_text(place, _name(move), 'stroke="#FFF" stroke-width="4"'))
                texts.append(_text(place, _name(move)))
        for device, p in enumerate(self.discs):
            colour, (x, y) = PALETTE[device], self.corners[device]
            texts.append(f'<circle cx="{p.real:.4g}" cy="{p.imag:.4g}" r="10" fill="{colour}"/>')
            texts.append(_text(p, device, 'fill="#FFF"'))
            for c, held in enumerate(after[device]):
                self.column(paths, x + c * self.cell, y, held)
                if self.n > 1 and (before is None or before[device][c] != held):
                    beyond = y - 8 if p.imag < 0 else y + self.row * self.k + 7
                    place = complex(x + (c + 0.5) * self.cell, beyond)
                    texts.append(_text(place, c, 'font-size="10"'))
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

    def arrow(self, paths: dict[str, str], move: Move) -> complex:
        """A curve as thick as the message is long; returns the place for its label."""
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
        thick = 1.2 + 2.4 * len(_chunks(move, self.n)) / self.n
        back = (control - end) / abs(control - end) * (5 + thick)  # from the tip to the neck
        dashes = "" if move.reduce else ' stroke-dasharray="4 3"'
        shaft = f"M{_at(start)}Q{_at(control)} {_at(end + back)}"
        _add(paths, f'fill="none" stroke="{INK}" stroke-width="{thick:.2g}"{dashes}', shaft)
        head = f"M{_at(end)}L{_at(end + back * (1 + 0.5j))} {_at(end + back * (1 - 0.5j))}z"
        _add(paths, f'fill="{INK if move.reduce else "#FFF"}" stroke="{INK}"', head)
        return (1 - t) ** 2 * start + 2 * t * (1 - t) * control + t**2 * end


def _add(paths: dict[str, str], style: str, data: str) -> None:
    paths[style] = paths.get(style, "") + data


def _at(point: complex) -> str:
    return f"{point.real:.4g} {point.imag:.4g}"


def _text(point: complex, words: object, more: str = "") -> str:
    return f'<text x="{point.real:.4g}" y="{point.imag + 4:.4g}" {more}>{words}</text>'


@_styled
def bars(values: Mapping, x_label: str = "", unit: str | None = None, title: str = "") -> Picture:
    """Draw a bar for each name: a number, or (median, low, high) to show its spread.

    ``unit`` may be "bytes" or "seconds": 1.5 MB, 20 ms. Raises ValueError for no values.
    """
    figure = _figure(75 + 26 * len(values))
    words = _draw_bars(figure.subplots(), values, unit)
    figure.axes[0].set(xlabel=x_label, title=title)
    return _chart(figure, f"Bars: {title or x_label}. {words}.")


@_styled
def links(bytes_by_link: Mapping, title: str = "") -> Picture:
    """Draw the bytes of every link: {(src, dst): bytes}, or {name: {(src, dst): bytes}} to compare.

    More than 16 links are added up to what each participant sends and receives.
    """
    one = not any(isinstance(value, Mapping) for value in bytes_by_link.values())
    panels = {title: bytes_by_link} if one else bytes_by_link
    most = {}  # (src, dst) -> bytes, in the panel where it carries most
    for counts in panels.values():
        most |= {link: max(count, most.get(link, 0)) for link, count in counts.items()}
    devices = sorted({device for link in most for device in link})
    few = len(most) <= 16
    figure = _figure(75 + 24 * (len(most) if few else 2 * len(devices)))
    row = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    words = []
    for axes, (name, counts) in zip(row, panels.items(), strict=False):
        if few:
            order = sorted(most, key=lambda link: (-most[link], link))
            values = {f"{src} → {dst}": counts.get((src, dst), 0) for src, dst in order}
        else:
            values = {}
            for d in devices:
                values[f"{d} sends"] = sum(n for (src, _), n in counts.items() if src == d)
                values[f"{d} receives"] = sum(n for (_, dst), n in counts.items() if dst == d)
        words.append(f"{name}: {_draw_bars(axes, values, 'bytes', 2 - few)}")
        axes.set_title(name)
    return _chart(figure, f"Bytes per link. {'. '.join(words)}.")


def _draw_bars(axes: Axes, values: Mapping, unit: str | None, colours: int = 1) -> str:
    """Bars from the top down, each with its value in words; returns them all in words."""
    if not values:
        raise ValueError("0 bars to draw: pass at least one value")
    words = {}
    for y, (name, value) in enumerate(values.items()):
        middle, low, high = value if isinstance(value, Sequence) else (value, value, value)
        axes.barh(y, middle, height=0.7, color=PALETTE[y % colours])
        words[name] = _quantity(middle, unit)
        if low < high:
            axes.plot([low, high], [y, y], color=INK, marker="|", markersize=9)
            words[name] += f" ({_quantity(low, unit)} to {_quantity(high, unit)})"
        axes.annotate(words[name], (high, y), (6, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(values)), values)
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.margins(x=0.3)  # room for the words
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(lambda value, _: _quantity(value, unit))
    return ", ".join(f"{name} {word}" for name, word in words.items())


def _quantity(value: float, unit: str | None) -> str:
    """Three digits and a unit: 1.05 MB, 20 ms."""
    value = float(f"{value:.3g}")
    return EngFormatter({"bytes": "B", "seconds": "s"}[unit])(value) if unit else f"{value:g}"


@_styled
def curves(
    series: Mapping, x_label, y_label, title="", log_x=False, log_y=False, x_unit=None, y_unit=None
) -> Picture:
    """Draw a curve for each name: {name: (xs, ys)}. A unit may be "bytes" or "seconds".

    Raises ValueError for no series or more than 8, for lengths that differ, and for what a
    logarithmic axis cannot show.
    """
    if not 1 <= len(series) <= 8:
        raise ValueError(f"{len(series)} series, but 1 to 8 can be told apart")
    figure = _figure(330)
    axes = figure.subplots()
    lines, words = [], []
    for i, (name, (xs, ys)) in enumerate(series.items()):
        if len(xs) != len(ys) or len(xs) == 0:
            raise ValueError(f"{name!r} has {len(xs)} x values and {len(ys)} y values")
        style = {"color": PALETTE[i], "marker": MARKERS[i], "linestyle": DASHES[i]}
        lines += axes.plot(xs, ys, label=name, markevery=max(1, len(xs) // 12), **style)
        ends = [f"{_quantity(ys[j], y_unit)} at {_quantity(xs[j], x_unit)}" for j in (0, -1)]
        words.append(f"{name}: from {' to '.join(ends)}")
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    axes.grid()
    _scale(axes.xaxis, [x for xs, _ in series.values() for x in xs], log_x, x_unit)
    _scale(axes.yaxis, [y for _, ys in series.values() for y in ys], log_y, y_unit)
    if len(series) > 1:  # beside the curves, in the order in which they end
        lines.sort(key=lambda line: -line.get_ydata()[-1])
        figure.legend(handles=lines, loc="outside right upper")
    return _chart(figure, f"Curves: {title or y_label} over {x_label}. {'; '.join(words)}.")


def _scale(axis: Axis, values: list[float], log: bool, unit: str | None) -> None:
    """Ticks that can be read: powers of ten with units, whole numbers for whole numbers."""
    whole = all(float(value).is_integer() for value in values)
    if log:
        if min(values) <= 0:
            raise ValueError(f"a logarithmic axis cannot show {min(values)}")
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        few = (1.0,) if max(values) > 100 * min(values) else (1.0, 2.0, 5.0)
        counts = whole and unit is None and len(set(values)) <= 8  # k: 2, 4, 8
        axis.set_major_locator(
            FixedLocator(sorted(set(values))) if counts else LogLocator(subs=few)
        )
        axis.set_minor_locator(NullLocator())
    elif whole and unit is None:
        axis.set_major_locator(MaxNLocator(integer=True))
    axis.set_major_formatter(lambda value, _: _quantity(value, unit))


def images(X: torch.Tensor, titles: Sequence[str] = (), columns: int = 8) -> Picture:
    """Draw images (N, 1, height, width) or (N, height, width), 0 white to 1 black, with titles.

    Raises ValueError for no images, and for titles that are not as many as the images.
    """
    if len(X) == 0 or (titles and len(titles) != len(X)):
        raise ValueError(f"{len(X)} images and {len(titles)} titles")
    pixels = (255 * (1 - X.detach().cpu().float().clamp(0, 1))).byte().numpy()
    cell, line = WIDTH // columns, 20 if titles else 0  # pixels; the title's height
    body = ""
    for i, image in enumerate(pixels):
        x, y = i % columns * cell, i // columns * (cell + line) + line
        png = io.BytesIO()
        Image.fromarray(image.reshape(X.shape[-2:])).save(png, "PNG", optimize=True)
        body += (
            f'<image x="{x + 5}" y="{y + 5}" width="{cell - 10}" height="{cell - 10}" '
            'style="image-rendering:pixelated" xlink:href="data:image/png;base64,'
            f'{base64.b64encode(png.getvalue()).decode()}"/>'
        )
        if titles:
            body += _text(complex(x + cell / 2, y - 5), escape(titles[i]), 'text-anchor="middle"')
    height = math.ceil(len(X) / columns) * (cell + line)
    words = f": {', '.join(titles)}" if titles else ""
    return _picture(body, min(columns, len(X)) * cell, height, f"{len(X)} images{words}.")


class Board:
    """The live board: ``train(…, on_progress=Board())`` draws loss and accuracy after every epoch.

    It updates one display, at most once in ``interval`` seconds, and always for a run's last
    epoch. ``picture`` is what it drew last; outside of a notebook nothing is displayed.
    """

    def __init__(self, title: str = "", interval: float = 0.3):
        self.title, self.interval = title, interval
        self.picture: Picture | None = None
        self._history = self._handle = None
        self._epochs, self._drawn = math.inf, -math.inf

    def __call__(self, history: Any) -> None:
        """Draw ``history``: its loss, accuracy and seconds, each a list with a number per epoch."""
        epochs = len(history.loss)
        new_run = history is not self._history and epochs <= self._epochs
        late = time.monotonic() - self._drawn >= self.interval
        self._history, self._epochs = history, epochs
        if epochs == 0 or not (new_run or late or epochs >= history.num_epochs):
            return
        self.picture = _draw_board(history, self.title)
        if new_run or self._handle is None:
            self._handle = _display(self.picture)
        else:
            self._handle.update(self.picture)
        self._drawn = time.monotonic()


def _display(picture: Picture) -> Any:
    """Show the picture in the running notebook and return its handle; None outside of one."""
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        return None
    return ipython.display.display(picture, display_id=True)


@_styled
def _draw_board(history: Any, title: str) -> Picture:
    figure = _figure(270, layout="none")  # found in no time
    figure.subplots_adjust(0.05, 0.26, 0.98, 0.82 if title else 0.91)
    epochs = range(1, len(history.loss) + 1)
    words = [f"epoch {len(epochs)} of {history.num_epochs}"]
    curves = {"training loss": history.loss, "test accuracy": history.accuracy}
    for i, (axes, (name, values)) in enumerate(
        zip(figure.subplots(1, 2), curves.items(), strict=True)
    ):
        axes.plot(epochs, values, color=PALETTE[i], marker=MARKERS[i], linestyle=DASHES[i])
        axes.set(
            title=f"{name}: {values[-1]:.3f}", xlabel="epoch", xlim=(0.5, history.num_epochs + 0.5)
        )
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.grid()
        axes.set_ylim(0, 1 if i else None)
        words.append(f"{name} {values[-1]:.3f}")
    words.append(f"{_quantity(statistics.median(history.seconds), 'seconds')} per epoch")
    caption = f"{history.devices}; {history.hardware}; {words[-1]}"
    figure.supxlabel("\n".join(textwrap.wrap(caption, 110)), x=0.02, y=0.03, ha="left", fontsize=11)
    figure.suptitle(title, x=0.02, y=0.96, ha="left", fontweight="bold")
    return _chart(figure, f"{title or 'Training'}: {', '.join(words)}; {history.devices}.")
