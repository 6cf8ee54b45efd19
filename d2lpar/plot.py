"""Workshop. The book's figures: curves, bars, schedules, timelines, pipelines.

Each is a ``Picture``: a matplotlib figure that also says in words what it shows.
"""

import base64
import io
from collections import defaultdict
from itertools import cycle, pairwise

import matplotlib.style
import numpy as np
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Patch, Rectangle
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from .pipeline_schedules import Span, bubble, kept
from .schedules import chunks_of, holdings, num_chunks

# Of Okabe and Ito's colours and of Tol's, those that stand out from white.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#332288", "#6699CC", "#117733"]
PALETTE += ["#882255", "#000000"]
NAMES = ["star", "ring", "tree", "direct", "halving_doubling", "dist.all_reduce"]
SCHEDULES = dict(zip(NAMES, PALETTE, strict=False)) | {"recursive_doubling": PALETTE[7]}
COLOURS = dict(zip(["forward", "backward", "weight"], PALETTE, strict=False))
INK, GREY, DARK_GREY = "#222222", "#E4E4E4", "#767676"
CENTRED = {"ha": "center", "va": "center_baseline", "size": 9}
WIDTH = 6.4  # inches, shown as 640 pixels
STYLE = {"font.size": 11, "axes.titlesize": 11, "axes.titlelocation": "left"}
STYLE |= {"axes.grid": True, "grid.color": GREY, "axes.axisbelow": True}
STYLE |= {f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")}
STYLE |= {"xtick.major.size": 0, "ytick.major.size": 0, "legend.frameon": False}
styled = matplotlib.style.context(["default", STYLE])


class Picture(Figure):
    """A figure with ``alt``, what it shows in words; its PNG carries them as well."""

    alt = ""

    def __init__(self, height: float, title: str = "", note: str = ""):
        super().__init__(figsize=(WIDTH, height), layout="constrained")
        self.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
        self.supxlabel(note, x=0.01, ha="left", size=9, color=DARK_GREY)

    def _repr_mimebundle_(self, include=None, exclude=None):
        self.savefig(drawn := io.BytesIO(), dpi=200)
        image = Image.open(drawn).convert("RGB").quantize(64)  # a third of the bytes
        about = PngInfo()
        about.add_itxt("Description", self.alt)
        image.save(png := io.BytesIO(), "PNG", optimize=True, pnginfo=about)
        data = {"image/png": base64.b64encode(png.getvalue()).decode()}
        data["text/plain"] = self.alt
        return data, {"image/png": {"alt": self.alt, "width": image.width // 2}}


def quantity(value: float, unit: str | None = None) -> str:
    """Write three digits and a unit ("bytes", "seconds" or another): 1.05 MB, 20 ms."""
    if unit is None and float(value).is_integer():
        return f"{value:,.0f}"
    value = float(f"{value:.3g}")
    if unit in ("bytes", "seconds"):
        return EngFormatter({"bytes": "B", "seconds": "s"}[unit])(value)
    return f"{value:g} {unit or ''}".strip()


def _scale(axis, unit: str | None, values=(0.5,), log: bool = False) -> None:
    """Set ticks at round numbers; whole ``values`` on a log axis at powers of two."""
    whole = unit is None and all(float(value).is_integer() for value in values)
    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=whole))
    if log:
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        subs = [1] if whole or max(values) > 100 * min(values) else [1, 2, 5]
        axis.set_major_locator(LogLocator(2 if whole else 10, subs, numticks=8))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: quantity(value, unit))


@styled
def curves(
    series, x_label, y_label, title="", note="", log="", sharey=True, **units
) -> Picture:
    """Draw {name: (xs, ys)}, or one below the other {panel: {name: (xs, ys)}}.

    ``log`` may be "x", "y" or "xy"; ``x_unit`` and ``y_unit`` are as for ``quantity``.
    "ring, predicted" is dashed and has the colour of "ring". Panels have the same y,
    unless ``sharey`` is False.
    """
    nested = isinstance(next(iter(series.values())), dict)
    panels, words = series if nested else {"": series}, []
    lines = [line for panel in panels.values() for line in panel.items()]
    subjects = dict.fromkeys(name.partition(",")[0] for name, _ in lines)
    left = cycle(c for c in PALETTE if c not in map(SCHEDULES.get, subjects))
    colours = {name: SCHEDULES.get(name) or next(left) for name in subjects}
    figure = Picture(0.9 + 2.2 * len(panels), title, note)
    grid = figure.subplots(len(panels), sharex=True, sharey=sharey, squeeze=False)
    axes = grid[:, 0]
    for ax, (panel, own) in zip(axes, panels.items(), strict=True):
        dash = {subject: cycle(["--", ":", "-."]) for subject in subjects}
        for name, (xs, ys) in own.items():
            subject, comma, _ = name.partition(",")
            style = {"color": colours[subject], "markevery": 1 + len(xs) // 17}
            style["label"] = label = name.removeprefix(f"{panel}, ")
            ax.plot(xs, ys, next(dash[subject]) if comma else "o-", **style)
            ends = [quantity(ys[i], units.get("y_unit")) for i in (0, -1)]
            words.append(f"{panel}: {label} from {' to '.join(ends)}".strip(": "))
        ax.set(title=panel, ylabel=y_label)
    for ax, own in zip(axes, panels.values(), strict=True):
        for i, x in enumerate("xy"):
            drawn = lines if sharey else own.items()
            values = np.concatenate([line[i] for _, line in drawn])
            _scale(getattr(ax, f"{x}axis"), units.get(f"{x}_unit"), values, x in log)
    ax.set(xlabel=x_label, ylim=(None if "y" in log else 0, None))
    for ax in axes:
        _name_lines(ax)
    figure.alt = f"Curves: {title or y_label} over {x_label}. {', '.join(words)}."
    return figure


def _name_lines(ax) -> None:
    """Write each line's name at its right end, apart from the others."""
    place = ax.transData + ax.transAxes.inverted()
    ends = {line: place.transform(line.get_xydata()[-1])[1] for line in ax.lines}
    order = sorted(ends, key=ends.get)
    for low, high in list(pairwise(order)) * 50:
        push = max(0, 0.09 - (ends[high] - ends[low])) / 2
        ends[low], ends[high] = ends[low] - push, ends[high] + push
    for line, y in ends.items():
        style = {"color": line.get_color(), "va": "center", "transform": ax.transAxes}
        ax.text(1.02, y, line.get_label(), **style)


@styled
def bars(values: dict, x_label="", unit=None, title="", note="") -> Picture:
    """Draw a bar for each name: a number, (median, low, high), or {part: number}."""
    nested = isinstance(next(iter(values.values())), dict)
    parts = values if nested else {n: {"": np.ravel(v)[0]} for n, v in values.items()}
    kinds = dict.fromkeys(kind for own in parts.values() for kind in own)
    figure, lefts = Picture(0.8 + 0.3 * (len(values) + nested), title, note), 0
    ax = figure.subplots()
    for kind, colour in zip(kinds, cycle(PALETTE), strict=False):
        lengths = np.array([own.get(kind, 0) for own in parts.values()])
        colours = colour if kind else [SCHEDULES.get(name, colour) for name in values]
        ax.barh(range(len(values)), lengths, 0.7, lefts, label=kind, color=colours)
        lefts = lefts + lengths
    totals = {name: quantity(x, unit) for name, x in zip(values, lefts, strict=True)}
    for y, (name, total) in enumerate(totals.items()):
        ends = [] if nested else np.ravel(values[name])[1:]
        ax.plot(ends, [y] * len(ends), color=INK, marker="|", markersize=8)
        ax.text(max(lefts[y], *ends, 0), y, f"  {total}", va="center")
    ax.set(yticks=range(len(values)), yticklabels=values, xlabel=x_label)
    ax.set(xlim=(0, 1.15 * ax.dataLim.x1), ylim=(len(values) - 0.4, -0.6))
    _scale(ax.xaxis, unit)
    ax.yaxis.grid(False)
    if nested:
        figure.legend(loc="outside lower left", ncols=4)
    words = "; ".join(f"{name} {total}" for name, total in totals.items())
    figure.alt = f"Bars: {title or x_label}. {words}."
    return figure


@styled
def images(X, titles: list[str] | tuple = (), columns: int = 8) -> Picture:
    """Draw images (N, 1, height, width) or (N, height, width), 0 white to 1 black."""
    rows = -(-len(X) // columns)
    figure = Picture(rows * (WIDTH / columns + 0.25))
    for i, image in enumerate(X.detach().cpu().float().numpy()):
        ax = figure.add_subplot(rows, columns, i + 1)
        ax.imshow(image.reshape(X.shape[-2:]), cmap="gray_r", vmin=0, vmax=1)
        ax.set_title(titles[i] if titles else "", loc="center", size=9)
        ax.axis("off")
    figure.alt = f"{len(X)} images{': ' if titles else ''}{', '.join(titles)}."
    return figure


@styled
def schedule(function, k: int, title: str = "") -> Picture:
    """Draw every step of ``function(k)``: who sends what, and who then holds what.

    Beside each device, a column is a chunk that it holds, a row in it a contribution.
    """
    steps, note = function(k), "solid: adds; dashed: replaces; framed: complete sum; "
    note += "numbers: chunks just received"
    columns = 3 if k > 5 or len(steps) == 4 else 4
    states, n, far = holdings(steps, k), num_chunks(steps), 2 if k == 4 else 2.3
    angles = np.pi / 2 - 2 * np.pi * (np.arange(k) - 0.5) / k
    places = np.stack([np.cos(angles), np.sin(angles)], axis=1).round(6)
    rows, title = -(-len(states) // columns), title or f"{function.__name__}({k})"
    figure = Picture(rows * WIDTH / columns + 0.5, title, note)
    figure.get_layout_engine().set(w_pad=0, h_pad=0.02, wspace=0, hspace=0.02)
    figure.alt = f"{title}: {k} participants, {len(steps)} steps, {n} chunks."
    for number, (step, state) in enumerate(zip([[], *steps], states, strict=True)):
        ax = figure.add_subplot(rows, columns, number + 1, aspect="equal")
        ax.set_title(f"step {number}" if number else "start", y=0.95)
        ax.set(xlim=(-far, far), ylim=(-far, far), xticks=[], yticks=[])
        before = states[number - 1]  # for the start, the end: all chunks are new
        for device, place in enumerate(places):
            _draw_device(ax, device, place, state[device], before[device], k)
        for move in step:
            thick = 0.9 + len(chunks_of(move, n)) / n
            _arrow(ax, places[move.src], places[move.dst], thick, not move.reduce)
        sent = ", ".join(f"{move.src} to {move.dst}" for move in step)
        figure.alt += f" Step {number}: {sent}." * bool(step)
    return figure


def _draw_device(ax, device: int, place, held: list, before: list, k: int) -> None:
    """Draw a disc, and outside of it the grid of what the device holds."""
    size = np.array([min(1, 0.4 * len(held)), 0.62])
    out = 1 + min((size / 2 + 0.26) / np.maximum(np.abs(place), 0.01))
    (left, low), (w, h) = out * place - size / 2, size / [len(held), k]
    boxes, colours = [Circle(place, 0.21)], [PALETTE[device]]
    for chunk, own in enumerate(held):
        x = left + chunk * w
        for row in range(k):  # the first on top
            boxes.append(Rectangle((x, low + (k - 1 - row) * h), 0.95 * w, 0.95 * h))
            colours.append(PALETTE[row] if row in own else GREY)
        if own == tuple(range(k)):
            ax.add_patch(Rectangle((x, low), w, size[1], fill=False, ec=INK, zorder=3))
        if own != before[chunk] and len(held) > 1:
            y, va = (low + size[1], "bottom") if place[1] >= 0 else (low - 0.06, "top")
            ax.text(x + w / 2, y, chunk, ha="center", va=va, size=9)
    ax.add_collection(PatchCollection(boxes, facecolor=colours))
    ax.text(*place, device, color="white", weight="bold", **CENTRED)


def _arrow(ax, start, end, thick: float, dashed=False, bend=-0.2) -> None:
    style = {"arrowstyle": "-|>", "connectionstyle": f"arc3,rad={bend}", "ec": INK}
    style |= {"shrinkA": 7, "shrinkB": 7, "lw": thick, "mutation_scale": 10}
    style |= {"fc": "white", "ls": (0, (3, 2))} if dashed else {"fc": INK}
    ax.annotate("", end, start, arrowprops=style)


def _blocks(ax, y, height, spans, total: float, colour, ink: str = "white") -> None:
    """Draw blocks (start, end, label), all visible, with the labels that fit."""
    pairs = [(start, max(end - start, 0.006 * total)) for start, end, _ in spans]
    style = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.6}
    ax.broken_barh(pairs, (y - height / 2, height), **style)
    for (start, length), (*_, label) in zip(pairs, spans, strict=True):
        if len(str(label)) < 62 * length / total:  # characters that fit
            ax.text(start + length / 2, y, label, color=ink, **CENTRED)


def _time_axis(ax, lanes: list[str], total: float, unit: str) -> None:
    """Name the lanes, and let the axis below count ``unit``."""
    name, unit = ("time", unit) if unit == "seconds" else (f"time in {unit}", None)
    ax.set(xlabel=name, xlim=(0, total), ylim=(len(lanes) - 0.5, -0.5))
    ax.set_yticks(range(len(lanes)), lanes)
    _scale(ax.xaxis, unit)


@styled
def timeline(spans: list[tuple], title: str = "", note: str = "") -> Picture:
    """Draw bars (lane, label, start, end), in seconds; "a: x" is coloured as "b: x"."""
    zero = min(start for _, _, start, _ in spans)
    total = max(end for *_, end in spans) - zero
    lanes = list(dict.fromkeys(lane for lane, *_ in spans))
    kinds = list(dict.fromkeys(lane.split(": ")[-1] for lane in lanes))
    figure = Picture(0.9 + 0.3 * len(lanes), title, note)
    ax = figure.subplots()
    for y, lane in enumerate(lanes):
        own = [(s - zero, e - zero, text) for name, text, s, e in spans if name == lane]
        _blocks(ax, y, 0.8, own, total, PALETTE[kinds.index(lane.split(": ")[-1])])
    _time_axis(ax, lanes, total, "seconds")
    figure.alt = f"{title}, for {quantity(total, 'seconds')}: {', '.join(lanes)}."
    return figure


@styled
def pipeline(spans, title: str = "", unit: str = "units", note: str = "") -> Picture:
    """Draw which micro-batch each rank works on: lists of Spans, or {name: lists}.

    Further stages of a rank are paler. ``keeps`` counts micro-batches of a whole rank.
    """
    panels, kinds = dict(spans) if isinstance(spans, dict) else {"": spans}, {}
    for name, ranks in panels.items():
        zero = min(own[0].start for own in ranks)
        panels[name] = [[Span(a, b - zero, e - zero) for a, b, e in r] for r in ranks]
    ends = {name: max(own[-1].end for own in ranks) for name, ranks in panels.items()}
    num_ranks, total = max(map(len, panels.values())), 1.12 * max(ends.values())
    figure = Picture(0.6 + (0.42 * num_ranks + 0.5) * len(panels), title, note)
    axes = figure.subplots(len(panels), sharex=True, sharey=True, squeeze=False)[:, 0]
    for ax, (name, ranks) in zip(axes, panels.items(), strict=True):
        head = f"{quantity(ends[name], unit)}, {100 * bubble(ranks):.0f} % idle"
        ax.set_title(f"{name}: {head}" if name else head)
        for rank, own in enumerate(ranks):
            kinds |= {span.action.kind: COLOURS[span.action.kind] for span in own}
            _draw_rank(ax, rank, own, ends[name], total)
        _time_axis(ax, [f"rank {r}" for r in range(num_ranks)], total, unit)
        ax.label_outer()
    if len(panels) > 1 or len(kinds) > 2:
        kinds |= {"idle": GREY, "kept": DARK_GREY}
        key = [Patch(color=colour, label=label) for label, colour in kinds.items()]
        figure.legend(handles=key, loc="outside lower left", ncols=5)
    words = "; ".join(ax.get_title("left") for ax in axes)
    figure.alt = f"{title or 'A pipeline over time'}. {words}."
    return figure


def _draw_rank(ax, rank: int, own, end: float, total: float) -> None:
    """Draw what a rank does and, below, how many micro-batches it keeps."""
    ax.broken_barh([(0, end)], (rank - 0.4, 0.56), facecolor=GREY)
    blocks = defaultdict(list)
    for (stage, i, kind), *times in own:
        blocks[kind, stage].append((*times, i))
    stages = sorted({stage for _, stage in blocks})
    for (kind, stage), those in blocks.items():
        y, pale = rank - 0.17 + 0.1 * (kind != "forward"), 0.55 * (stage != stages[0])
        colour = [c + pale * (1 - c) for c in to_rgb(COLOURS[kind])]
        _blocks(ax, y, 0.46, those, total, colour, INK if pale else "white")
    # It is kept from the start of its forward to the end of its last pass.
    counts = [n / len(stages) for n in kept([span.action for span in own])]
    times, floor = [s[1 + (s.action.kind != "forward")] for s in own], rank + 0.42
    heights = [floor - 0.2 * count / max(4, *counts) for count in counts]
    ax.fill_between(times, floor, heights, step="post", color=DARK_GREY, linewidth=0.8)
    ax.text(end, rank + 0.3, f" keeps {max(counts):g}", size=9, va="center")
