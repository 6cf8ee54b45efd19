"""The book's figures: curves, bars, schedules, timelines and pipelines, by matplotlib.

Each function returns a ``Picture``: a matplotlib figure, to restyle and to save, that
also says in words what it shows. A schedule has one colour in all of them.
"""

import base64
import io
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import matplotlib.style
import numpy as np
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Patch, Rectangle
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from .collectives.schedules import chunks_of, holdings, num_chunks, steps_of
from .pipeline.schedules import bubble, live_counts

# Of Okabe and Ito's colours and of Tol's, those that stand out from white.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#332288", "#6699CC", "#117733"]
PALETTE += ["#882255"]
NAMES = ["star", "ring", "tree", "direct", "halving_doubling", "dist.all_reduce"]
NAMES += ["recursive_doubling"]
SCHEDULES = dict(zip(NAMES, PALETTE, strict=False))
INK, GREY, DARK_GREY = "#222222", "#E4E4E4", "#767676"
MARKERS, DASHES = "os^Dv*PX", ["--", ":", "-."]
HATCHES = ["", "///", "xx", "\\\\\\", "||", "--", "++", ".."]
CENTRED = {"ha": "center", "va": "center_baseline", "size": 9}
WIDTH = 6.4  # inches, shown as 640 pixels
STYLE = {"font.size": 11, "axes.titlesize": 11, "axes.titlelocation": "left"}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "grid.color": GREY}
STYLE |= {"axes.axisbelow": True, "legend.frameon": False, "hatch.linewidth": 0.6}
STYLE |= {"lines.markersize": 5, "text.parse_math": False}
styled = matplotlib.style.context(["default", STYLE])


class Picture(Figure):
    """A figure with ``alt``, what it shows in words; its PNG carries them as well."""

    alt = ""

    def __init__(self, height: float, title: str = "", note: str = ""):
        super().__init__(figsize=(WIDTH, height), layout="constrained")
        if title:
            self.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
        if note:  # such as the machine; small, below
            self.supxlabel(note, x=0.01, ha="left", size=9, color=DARK_GREY)

    def __repr__(self):
        return self.alt

    def _repr_mimebundle_(self, include=None, exclude=None):
        self.savefig(drawn := io.BytesIO(), dpi=200)
        image = Image.open(drawn).convert("RGB").quantize(64)  # a third of the bytes
        about = PngInfo()
        about.add_itxt("Description", self.alt)
        image.save(png := io.BytesIO(), "PNG", optimize=True, pnginfo=about)
        data = {"image/png": base64.b64encode(png.getvalue()).decode()}
        shown = {"image/png": {"alt": self.alt, "width": image.width // 2}}
        return data | {"text/plain": self.alt}, shown


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each name; what follows a comma does not change it."""
    subjects = {name: str(name).partition(",")[0] for name in names}
    chosen = {subject: SCHEDULES.get(subject) for subject in subjects.values()}
    left = (colour for colour in PALETTE * 2 if colour not in chosen.values())
    chosen = {subject: colour or next(left) for subject, colour in chosen.items()}
    return {name: chosen[subject] for name, subject in subjects.items()}


def quantity(value: float, unit: str | None = None) -> str:
    """Write three digits and a unit ("bytes", "seconds" or another): 1.05 MB, 20 ms."""
    if unit is None and float(value).is_integer():
        return f"{value:,.0f}"
    value = float(f"{value:.3g}")
    if unit in ("bytes", "seconds"):
        return EngFormatter({"bytes": "B", "seconds": "s"}[unit])(value)
    return f"{value:g} {unit or ''}".strip()


def _scale(axis, values: Sequence[float], unit: str | None, log: bool = False) -> None:
    """Set ticks at round numbers; whole ones on a log axis at powers of two."""
    whole = unit is None and all(float(value).is_integer() for value in values)
    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=whole))
    if log:
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        subs = [1] if whole or max(values) > 100 * min(values) else [1, 2, 5]
        most = 10 // len(axis.axes.figure.axes)
        axis.set_major_locator(LogLocator(2 if whole else 10, subs, numticks=most))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: quantity(value, unit))


@styled
def curves(series, x_label, y_label, title="", note="", log="", **units) -> Picture:
    """Draw {name: (xs, ys)}, or side by side {panel: {name: (xs, ys)}}.

    ``log`` may be "x", "y" or "xy"; ``x_unit`` and ``y_unit`` are as for ``quantity``.
    What follows a comma in a name, as in "ring, predicted", makes a dashed line.
    """
    nested = isinstance(next(iter(series.values())), Mapping)
    panels, words = series if nested else {"": series}, []
    lines = [line for panel in panels.values() for line in panel.items()]
    colours = colours_of(dict(lines))
    figure = Picture(3.5 + 0.2 * len(colours) / 2, title, note * (len(colours) == 1))
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for ax, (panel, own) in zip(axes, panels.items(), strict=True):
        for i, (name, colour) in enumerate(colours.items()):
            xs, ys = own.get(name, ([], []))
            style = {"marker": MARKERS[i % 8], "markevery": 1 + len(xs) // 13}
            if "," in name:
                alike = [other for other in colours if colours[other] == colour]
                style = {"linestyle": DASHES[alike.index(name) - 1]}
            ax.plot(xs, ys, label=name, color=colour, **style)
            if len(ys):
                ends = [quantity(ys[j], units.get("y_unit")) for j in (0, -1)]
                words.append(f"{name} from {' to '.join(ends)}")
        ax.set(title=panel, xlabel=x_label)
        ax.grid()
    for i, x in enumerate("xy"):
        values = np.concatenate([line[i] for _, line in lines])
        _scale(getattr(ax, f"{x}axis"), values, units.get(f"{x}_unit"), x in log)
    axes[0].set(ylabel=y_label, ylim=(None if "y" in log else 0, None))
    if len(colours) > 1:
        columns = 3 if max(map(len, colours)) < 20 else 2
        style = {"title": note, "title_fontsize": 9, "alignment": "left"}
        handles, names = ax.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower left", ncols=columns, **style)
    figure.alt = f"Curves: {title or y_label} over {x_label}. {', '.join(words)}."
    return figure


@styled
def bars(values: Mapping, x_label="", unit=None, title="", note="") -> Picture:
    """Draw a bar for each name: a number, (median, low, high), or {part: number}."""
    nested = isinstance(next(iter(values.values())), Mapping)
    parts = values if nested else {n: {"": np.ravel(v)[0]} for n, v in values.items()}
    kinds = dict.fromkeys(kind for own in parts.values() for kind in own)
    figure, lefts = Picture(0.8 + 0.3 * (len(values) + nested), title, note), 0
    ax = figure.subplots()
    for kind, colour, hatch in zip(kinds, PALETTE, HATCHES, strict=False):
        lengths = np.array([own.get(kind, 0) for own in parts.values()])
        colours = colour if kind else [SCHEDULES.get(name, colour) for name in values]
        style = {"color": colours, "hatch": hatch, "edgecolor": "white"}
        ax.barh(range(len(values)), lengths, 0.7, lefts, label=kind, **style)
        lefts = lefts + lengths
    totals = {name: quantity(x, unit) for name, x in zip(values, lefts, strict=True)}
    for y, (name, total) in enumerate(totals.items()):
        ends = [] if nested else np.ravel(values[name])[1:]
        ax.plot(ends, [y] * len(ends), color=INK, marker="|", markersize=8)
        ax.text(max(lefts[y], *ends, 0), y, f"  {total}", va="center")
    ax.set(yticks=range(len(values)), yticklabels=values, xlabel=x_label)
    ax.set(xlim=(0, 1.15 * ax.dataLim.x1), ylim=(len(values) - 0.4, -0.6))
    _scale(ax.xaxis, [0.5], unit)
    if nested:
        figure.legend(loc="outside lower left", ncols=4)
    words = "; ".join(f"{name} {total}" for name, total in totals.items())
    figure.alt = f"Bars: {title or x_label}. {words}."
    return figure


@styled
def images(X, titles: Sequence[str] = (), columns: int = 8) -> Picture:
    """Draw images (N, 1, height, width) or (N, height, width), 0 white to 1 black."""
    rows = math.ceil(len(X) / columns)
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

    Beside each device, a column is a chunk that it holds, a row in it a contribution, a
    frame the whole sum, a number a chunk that has just come. What is copied is dashed.
    """
    steps, columns = steps_of(function, k), 4 if k < 6 else 3
    states, n = holdings(steps, k), num_chunks(steps)
    turn, size = (0.5, 2.0) if k == 4 else (0.5 * (k == 8), 2.35)
    angles = [math.pi / 2 - 2 * math.pi * (i - turn) / k for i in range(k)]
    places = [(math.cos(angle), math.sin(angle)) for angle in angles]
    rows, title = math.ceil(len(states) / columns), title or f"{function.__name__}({k})"
    figure = Picture(rows * WIDTH / columns + 0.3, title)
    figure.get_layout_engine().set(w_pad=0, h_pad=0.02, wspace=0, hspace=0.02)
    before = [[()] * n] * k
    for number, (step, state) in enumerate(zip([[], *steps], states, strict=True)):
        ax = figure.add_subplot(rows, columns, number + 1, aspect="equal")
        ax.set(xlim=(-size, size), ylim=(-size, size))
        ax.set_title(f"step {number}" if number else "start", y=0.95)
        ax.axis("off")
        for device, place in enumerate(places):
            _draw_device(ax, device, place, state[device], before[device], k)
        for move in step:
            thick = 0.9 + len(chunks_of(move, n)) / n
            _arrow(ax, places[move.src], places[move.dst], thick, not move.reduce)
        before = state
    figure.alt = f"{title}: {k} participants, {len(steps)} steps, {n} chunks."
    for number, step in enumerate(steps, 1):
        sent = ", ".join(f"{move.src} to {move.dst}" for move in step)
        figure.alt += f" Step {number}: {sent}."
    return figure


def _draw_device(ax, device: int, place, held: list, before: list, k: int) -> None:
    """Draw a disc, and outside of it the grid of what the device holds."""
    place, size = np.array(place), np.array([min(1, 0.4 * len(held)), 0.62])
    out = 1 + min((size / 2 + 0.26) / np.maximum(np.abs(place), 0.01))
    (left, low), (w, h) = out * place - size / 2, size / [len(held), k]
    boxes, colours = [Circle(place, 0.21)], [PALETTE[device]]
    for chunk, own in enumerate(held):
        x = left + chunk * w
        for row in range(k):
            corner = x, low + (k - 1 - row) * h
            boxes.append(Rectangle(corner, 0.95 * w, 0.95 * h))
            colours.append(PALETTE[row] if row in own else GREY)
        if own == tuple(range(k)):
            frame = {"fill": False, "edgecolor": INK, "linewidth": 1.2, "zorder": 3}
            ax.add_patch(Rectangle((x, low), w, size[1], **frame))
        if own != before[chunk] and len(held) > 1:
            y = low + (size[1] + 0.16 if place[1] > 0 else -0.17)
            ax.text(x + w / 2, y, chunk, **CENTRED)
    ax.add_collection(PatchCollection(boxes, facecolor=colours))
    ax.text(*place, device, color="white", weight="bold", **CENTRED)


def _arrow(ax, start, end, thick: float, dashed=False, bend=-0.2) -> None:
    style = {"arrowstyle": "-|>", "connectionstyle": f"arc3,rad={bend}", "shrinkA": 7}
    style |= {"shrinkB": 7, "linewidth": thick, "mutation_scale": 10, "edgecolor": INK}
    style |= {"linestyle": (0, (3, 2)) if dashed else "-"}
    style |= {"facecolor": "white" if dashed else INK}
    ax.annotate("", end, start, arrowprops=style)


def _blocks(ax, y: float, height: float, spans, total: float, colour: str) -> None:
    """Draw blocks (start, end, label), all visible, with the labels that fit."""
    least = 0.004 * total
    pairs = [(start, max(end - start, least)) for start, end, _ in spans]
    edges = [0.6 if length > 2 * least else 0 for _, length in pairs]
    style = {"facecolor": colour, "edgecolor": "white", "linewidth": edges}
    ax.broken_barh(pairs, (y - height / 2, height), **style)
    for (start, length), (*_, label) in zip(pairs, spans, strict=True):
        if len(str(label)) < 62 * length / total:  # characters that fit
            ax.text(start + length / 2, y, label, color="white", **CENTRED)


def _time_axis(ax, lanes: Sequence[str], total: float, unit: str) -> None:
    """Name the lanes, and let the axis below count ``unit``."""
    name, unit = ("time", unit) if unit == "seconds" else (f"time in {unit}", None)
    ax.set(xlabel=name, xlim=(0, total), yticks=range(len(lanes)), yticklabels=lanes)
    _scale(ax.xaxis, [0.5], unit)
    ax.grid(axis="x")
    ax.invert_yaxis()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


@styled
def timeline(spans: Sequence[tuple], title: str = "", note: str = "") -> Picture:
    """Draw each ``(lane, label, start, end)``, in seconds, as a bar: a Gantt chart."""
    lanes, zero = defaultdict(list), min(start for _, _, start, _ in spans)
    for lane, label, start, end in spans:
        lanes[lane].append((start - zero, end - zero, label))
    total = max(end for *_, end in spans) - zero
    # Lanes of one kind share a colour: "rank 0: send" and "rank 1: send".
    kinds = list(dict.fromkeys(lane.split(": ")[-1] for lane in lanes))
    figure = Picture(0.9 + 0.3 * len(lanes), title, note)
    ax = figure.subplots()
    for y, (lane, own) in enumerate(lanes.items()):
        _blocks(ax, y, 0.8, own, total, PALETTE[kinds.index(lane.split(": ")[-1])])
    _time_axis(ax, list(lanes), total, "seconds")
    figure.alt = f"{title}, for {quantity(total, 'seconds')}: {', '.join(lanes)}."
    return figure


@styled
def pipeline(spans, title: str = "", unit: str = "ticks", note: str = "") -> Picture:
    """Draw when each stage works on which micro-batch, for one or {name: spans}."""
    panels = spans if isinstance(spans, Mapping) else {"": spans}
    panels = {name: _from_zero(own) for name, own in panels.items()}
    longest = max(span.end for own in panels.values() for span in own)
    sizes = [1 + max(span.stage for span in own) for own in panels.values()]
    figure = Picture(0.9 + 0.42 * sum(sizes) + 0.45 * len(panels), title, note)
    ratios = {"height_ratios": [size + 0.3 for size in sizes], "squeeze": False}
    axes, words = figure.subplots(len(panels), sharex=True, **ratios)[:, 0], []
    for ax, (name, own), size in zip(axes, panels.items(), sizes, strict=True):
        end = max(span.end for span in own)
        head = f"{quantity(end, unit)}, {100 * bubble(own):.0f} % idle"
        words.append(f"{name}: {head}" if name else head)
        ax.set_title(words[-1])
        for stage in range(size):
            _draw_stage(ax, stage, own, end, 1.12 * longest)
        _time_axis(ax, [f"stage {i}" for i in range(size)], 1.12 * longest, unit)
        ax.label_outer()
    colours = dict(zip(("forward", "backward"), PALETTE, strict=False))
    colours |= {"idle": GREY, "micro-batches kept": DARK_GREY}
    key = [Patch(color=colour, label=label) for label, colour in colours.items()]
    figure.legend(handles=key, loc="outside lower left", ncols=4)
    figure.alt = f"{title or 'A pipeline over time'}. {'; '.join(words)}."
    return figure


def _from_zero(spans: Sequence) -> list:
    zero = min(span.start for span in spans)
    return [s._replace(start=s.start - zero, end=s.end - zero) for s in spans]


def _draw_stage(ax, stage: int, spans, end: float, total: float) -> None:
    """Draw what a stage does and, below, how many micro-batches it keeps."""
    own = sorted((s for s in spans if s.stage == stage), key=lambda span: span.start)
    counts, floor = live_counts(own)[stage], stage + 0.42
    ax.broken_barh([(0, end)], (stage - 0.4, 0.56), facecolor=GREY)
    for i, kind in enumerate(("forward", "backward")):
        blocks = [(s.start, s.end, s.microbatch) for s in own if s.kind == kind]
        _blocks(ax, stage - 0.17 + 0.1 * i, 0.46, blocks, total, PALETTE[i])
    # It is kept from the start of its forward to the end of its backward pass.
    times = [s.end if s.kind == "backward" else s.start for s in own]
    heights = [floor - 0.2 * count / max(4, *counts) for count in counts]
    ax.fill_between(times, floor, heights, step="post", color=DARK_GREY, linewidth=0.8)
    ax.text(end, stage + 0.3, f" keeps {max(counts)}", size=9, va="center")


@styled
def iteration(traces: Mapping[str, Sequence]) -> Picture:
    """Draw the steps of an iteration for each form: {name: steps}.

    Downwards in time: blocks on devices that are busy, and an arrow for each link.
    """
    steps = [step for form in traces.values() for step in form]
    most = max(n for step in steps for n in (1, *step.bytes.values()))
    devices = sorted({d for step in steps for d in (*step.busy, *sum(step.bytes, ()))})
    figure, words, rows = Picture(4.5), [], 0
    axes = figure.subplots(1, len(traces), sharex=True, sharey=True, squeeze=False)[0]
    for ax, (form, steps) in zip(axes, traces.items(), strict=True):
        y = 0
        for number, step in enumerate(steps, 1):
            sent = quantity(sum(step.bytes.values()), "bytes")
            name = f"{number}. {step.name}" + f", {sent}" * bool(step.bytes)
            words.append(f"{form} {name}")
            ax.text(-0.5, y + 0.6, name, va="center", size=10)
            bottom = y + 1.5 + 0.9 * bool(step.busy) + 0.5 * len(step.bytes)
            ax.vlines(devices, y + 1.2, bottom - 0.1, GREY, zorder=0)
            ax.broken_barh([(d - 0.2, 0.4) for d in step.busy], (y + 1.3, 0.8))
            for i, ((src, dst), nbytes) in enumerate(sorted(step.bytes.items())):
                at = y + 1.5 + 0.5 * i
                _arrow(ax, (src, at), (dst, at), 0.8 + 2 * nbytes / most, bend=0)
            y = bottom
        rows = max(rows, y)
        ax.set(title=form, xticks=devices, xlabel="device", yticks=[])
        ax.set(xlim=(-0.6, max(devices) + 0.6), ylim=(rows, 0))
        ax.spines[:].set_visible(False)
    figure.set_figheight(0.8 + 0.16 * rows)
    figure.alt = f"The steps of an iteration. {'; '.join(words)}."
    return figure
