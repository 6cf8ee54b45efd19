"""Curves, bars, stacks and bytes per link, drawn with matplotlib."""

import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

from .picture import (
    DARK_GREY,
    FONTS,
    GREY,
    INK,
    PALETTE,
    WIDTH,
    Picture,
    colour_of,
    colours_of,
    quantity,
    wrapped,
)

MARKERS = "os^Dv*PX"
HATCHES = ("", "///", "xx", "\\\\\\", "||", "--", "++", "x")  # dots take 60 kB
DASHES = ("-", "--", "-.", ":", (0, (8, 2)), (0, (1, 1)), (0, (6, 1, 1, 1, 1, 1)), (0, (3, 3)))
STYLE = {
    "font.sans-serif": ["DejaVu Sans"],  # the first of the FONTS, and comes with matplotlib
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
styled = matplotlib.style.context(["default", STYLE])


def chart(figure: Figure, alt: str) -> Picture:
    """Return what matplotlib drew, without what would leak into the page."""
    figure.patch.set_visible(False)
    for axes in figure.axes:  # the name of a processor may be long
        room = 480 / len(figure.axes)
        axes.set_title(wrapped(axes.get_title("left"), room, 13, bold=True))
        axes.set_xlabel(wrapped(axes.get_xlabel(), room))
    FigureCanvasSVG(figure).print_svg(written := io.StringIO(), metadata={"Date": None})
    body = re.search(r"<svg[^>]*>(.*)</svg>", written.getvalue(), re.DOTALL)[1]
    leaks = r'<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->|(?<=<g) id="[^"]*"'
    body = re.sub(leaks, "", body, flags=re.DOTALL)
    body = re.sub(r"'DejaVu Sans'(, sans-serif)?", FONTS, body)
    figure.patch.set_visible(True)  # for those who save the figure
    size = figure.get_size_inches() * 72
    return Picture.around(re.sub(r"\s*\n\s*", "\n", body), *size, alt, figure)


def new_figure(height: float, layout: str = "constrained") -> Figure:
    """Return an empty figure as wide as all pictures."""
    return Figure(figsize=(WIDTH / 72, height / 72), layout=layout)


@styled
def bars(values: Mapping, x_label: str = "", unit: str | None = None, title: str = "") -> Picture:
    """Draw a bar for each name: a number, or (median, low, high) to show its spread.

    ``unit`` may be "bytes" or "seconds": 1.5 MB, 20 ms.
    """
    figure = new_figure(75 + 26 * len(values))
    axes = figure.subplots()
    words = _draw_bars(axes, values, unit, [colour_of(str(name)) for name in values])
    axes.set(xlabel=x_label, title=title)
    return chart(figure, f"Bars: {title or x_label}. {words}.")


@styled
def stacks(values: Mapping, x_label: str = "", unit: str | None = None, title: str = "") -> Picture:
    """Draw a bar for each name, of up to 8 kinds of parts: {name: {part: number}}."""
    kinds = list(dict.fromkeys(kind for parts in values.values() for kind in parts))
    if not 1 <= len(kinds) <= 8:
        raise ValueError(f"{len(kinds)} kinds of parts, but 1 to 8 can be told apart")
    figure = new_figure(100 + 26 * len(values))
    axes, begins, words = figure.subplots(), dict.fromkeys(values, 0.0), []
    for kind, colour, hatch in zip(kinds, PALETTE, HATCHES, strict=False):
        lengths = [parts.get(kind, 0) for parts in values.values()]
        style = {"facecolor": colour, "hatch": hatch, "edgecolor": "#FFF", "linewidth": 0.6}
        axes.barh(range(len(values)), lengths, left=list(begins.values()), label=kind, **style)
        begins = {n: begins[n] + parts.get(kind, 0) for n, parts in values.items()}
    for y, (name, parts) in enumerate(values.items()):
        total = quantity(begins[name], unit)
        axes.annotate(total, (begins[name], y), (6, 0), textcoords="offset points", va="center")
        each = ", ".join(f"{kind} {quantity(part, unit)}" for kind, part in parts.items())
        words.append(f"{name} {total} ({each})")
    _finish_bars(axes, values, unit)
    axes.set(xlabel=x_label, title=title)
    figure.legend(loc="outside lower left", ncols=4)
    return chart(figure, f"Bars: {title or x_label}. {'; '.join(words)}.")


@styled
def links(bytes_by_link: Mapping, title: str = "") -> Picture:
    """Draw the bytes of every link: {(src, dst): bytes}, or {name: {(src, dst): bytes}} to compare.

    More than 16 links are added up to what each participant sends and receives.
    """
    compared = any(isinstance(value, Mapping) for value in bytes_by_link.values())
    panels = bytes_by_link if compared else {title: bytes_by_link}
    most = Counter()  # bytes, in the panel where the link carries most
    for counts in panels.values():
        most |= Counter(counts)
    every = sorted({link for counts in panels.values() for link in counts}, key=str)
    if len(every) <= 16:
        order = sorted(every, key=lambda link: -most[link])
        rows = {f"{src} → {dst}": [(src, dst)] for src, dst in order}
    else:
        rows = {}
        for d in sorted({device for link in every for device in link}, key=str):
            rows[f"{d} sends"] = [link for link in every if link[0] == d]
            rows[f"{d} receives"] = [link for link in every if link[1] == d]
    figure = new_figure(75 + 24 * len(rows))
    columns = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    words = []
    for axes, (name, counts) in zip(columns, panels.items(), strict=True):
        values = {row: sum(counts.get(link, 0) for link in own) for row, own in rows.items()}
        colours = [colour_of(name), DARK_GREY] if len(every) > 16 else [colour_of(name)]
        words.append(f"{name}: {_draw_bars(axes, values, 'bytes', colours)}")
        axes.set_title(name)
    return chart(figure, f"Bytes per link. {'. '.join(words)}.")


def _draw_bars(axes: Axes, values: Mapping, unit: str | None, colours: Sequence[str]) -> str:
    """Draw bars from the top down, each with its value in words; return them all in words."""
    if not values:
        raise ValueError("0 bars to draw: pass at least one value")
    words = {}
    for y, (name, value) in enumerate(values.items()):
        middle, low, high = value if isinstance(value, Sequence) else (value, value, value)
        axes.barh(y, middle, height=0.7, color=colours[y % len(colours)])
        words[name] = quantity(middle, unit)
        if low < high:
            axes.plot([low, high], [y, y], color=INK, marker="|", markersize=9)
            words[name] += f" ({quantity(low, unit)} to {quantity(high, unit)})"
        axes.annotate(words[name], (high, y), (6, 0), textcoords="offset points", va="center")
    _finish_bars(axes, values, unit)
    return ", ".join(f"{name} {word}" for name, word in words.items())


def _finish_bars(axes: Axes, names: Mapping, unit: str | None) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.3)  # room for the words
    axes.xaxis.set_major_locator(MaxNLocator(4 if len(axes.figure.axes) < 3 else 2))
    axes.xaxis.set_major_formatter(lambda value, _: quantity(value, unit))


@styled
def curves(
    series: Mapping, x_label, y_label, title="", log_x=False, log_y=False, x_unit=None, y_unit=None
) -> Picture:
    """Draw up to 8 curves: {name: (xs, ys)}. A unit may be "bytes" or "seconds"."""
    if not 1 <= len(series) <= 8:
        raise ValueError(f"{len(series)} series, but 1 to 8 can be told apart")
    figure = new_figure(330)
    axes = figure.subplots()
    lines, words, colours = [], [], colours_of(list(map(str, series)))
    for i, (name, (xs, ys)) in enumerate(series.items()):
        if len(xs) != len(ys) or len(xs) == 0:
            raise ValueError(f"{name!r} has {len(xs)} x values and {len(ys)} y values")
        style = {"color": colours[i], "marker": MARKERS[i], "linestyle": DASHES[i]}
        lines += axes.plot(xs, ys, label=name, markevery=max(1, len(xs) // 12), **style)
        ends = [f"{quantity(ys[j], y_unit)} at {quantity(xs[j], x_unit)}" for j in (0, -1)]
        words.append(f"{name}: from {' to '.join(ends)}")
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    axes.grid()
    _scale(axes.xaxis, [x for xs, _ in series.values() for x in xs], log_x, x_unit)
    _scale(axes.yaxis, [y for _, ys in series.values() for y in ys], log_y, y_unit)
    if len(series) > 1:  # beside the curves, in the order in which they end
        lines.sort(key=lambda line: -line.get_ydata()[-1])
        figure.legend(handles=lines, loc="outside right upper")
    return chart(figure, f"Curves: {title or y_label} over {x_label}. {'; '.join(words)}.")


def _scale(axis: Axis, values: list[float], log: bool, unit: str | None) -> None:
    """Ticks that can be read: powers of ten with units, whole numbers for whole numbers."""
    whole = all(float(value).is_integer() for value in values)
    if log:
        if min(values) <= 0:
            raise ValueError(f"a logarithmic axis cannot show {min(values)}")
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        few = (1.0,) if max(values) > 100 * min(values) else (1.0, 2.0, 5.0)
        marks = sorted(set(values)) if whole and unit is None else []  # k: 2, 4, 8
        apart = 0 < len(marks) <= 8 and all(b > 1.3 * a for a, b in pairwise(marks))
        axis.set_major_locator(FixedLocator(marks) if apart else LogLocator(subs=few))
        axis.set_minor_locator(NullLocator())
    elif whole and unit is None:
        axis.set_major_locator(MaxNLocator(integer=True))
    axis.set_major_formatter(lambda value, _: quantity(value, unit))
