"""Schedules, timelines and pipelines, written as SVG: their marks must sit to the pixel.

Where a point is one number, it is complex, with y downwards.
"""

import cmath
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from ..collectives.schedules import Move, chunks_of, holdings, num_chunks, steps_of
from ..pipeline.schedules import Span, bubble, live_counts
from .picture import (
    BOLD,
    CENTRED,
    DARK_GREY,
    GREY,
    INK,
    PALETTE,
    WIDTH,
    Axis,
    Picture,
    arrow,
    at,
    colour_of,
    drawn,
    heading,
    text,
    text_width,
)

KEY = "Grid: what each holds/Column: a chunk/Row: whose contribution/Frame: the whole sum"
KEY += "/Number: chunk received/Solid arrow: is added/Dashed arrow: is copied/Thicker: more bytes"
DISC, STAGE = 10, 58  # the radius of a device and the height of a stage, in pixels


def schedule(function: Callable[[int], list[list[Move]]], k: int, title: str = "") -> Picture:
    """Draw every step of ``function(k)``: who sends which chunk to whom, and what is held then.

    Beside each device stands what it holds: a column for each chunk, in it a row for each device
    whose contribution it contains. There is room for 2 to 8 devices.
    """
    if not 2 <= k <= 8:
        raise ValueError(f"k = {k}, but only 2 to 8 devices fit into the picture")
    name = getattr(function, "__name__", "schedule")
    title, steps = title or f"{name}({k})", steps_of(function, k)
    states, n = holdings(steps, k), num_chunks(steps)
    columns = 4 if k < 6 else 3
    panel = _Panel(k, n, WIDTH / columns)
    panels = [panel.draw("start", [], None, states[0])]
    alt = f"{title}: {k} participants, {len(steps)} steps, the tensor in {n} chunk{'s' * (n > 1)}."
    for i, step in enumerate(steps, 1):
        panels.append(panel.draw(f"step {i}", step, states[i - 1], states[i]))
        whole = sum(held == tuple(range(k)) for device in states[i] for held in device)
        alt += f" Step {i}: {_in_words(step)}; {whole} of {k * n} sums are whole."
    key = "".join(text(complex(16, 36 + 19 * i), line) for i, line in enumerate(KEY.split("/")))
    panels.append(text(16 + 10j, "how to read it", BOLD) + key)
    body = heading(title, columns * panel.width, colour_of(name, colour_of(title, None)))
    for i, marks in enumerate(panels):
        x, y = i % columns * panel.width, 50 + i // columns * panel.height
        body += f'<g transform="translate({x:g} {y:g})">{marks}</g>'
    height = 50 + math.ceil(len(panels) / columns) * panel.height
    return Picture.around(body, columns * panel.width, height, alt)


def _in_words(step: list[Move]) -> str:
    verbs = " and ".join(sorted({"added" if move.reduce else "copied" for move in step}))
    if len(step) > 8:
        return f"{len(step)} messages, {verbs}"
    words = []
    for move in step:
        first, *_, last = [*chunks_of(move, 1)] * 2
        chunk = f"chunk {first}" if first == last else f"chunk {first}-{last}"
        words.append(f"{move.src} to {move.dst}: {'all' if move.chunk is None else chunk}")
    return f"{', '.join(words)}, {verbs}"


class _Panel:
    """One step: ``k`` devices on a circle, and outside of it what each holds of ``n`` chunks."""

    def __init__(self, k: int, n: int, width: float):
        self.k, self.n = k, n
        self.cell, self.row = min(36, max(8, 60 // n)), 36 // k  # the size of one contribution
        w, h = self.cell * n, self.row * k
        radius = max(44, 27 / math.sin(math.pi / k))  # 54 pixels, or more, between neighbours
        flat = 0.5 / k if k % 4 == 0 else 0  # then two devices share the top
        self.discs = [cmath.rect(radius, math.tau * (i / k - 0.25 - flat)) for i in range(k)]
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
        """Draw the arrows of ``step``, what is held after it, and the numbers of what came."""
        paths, texts = defaultdict(str), ""
        for move in step:
            self.arrow(paths, move)
        height, width = self.row * self.k, self.cell - 1
        for device, p in enumerate(self.discs):
            disc = f'stroke="{PALETTE[device]}" stroke-width="{2 * DISC}" stroke-linecap="round"'
            paths[disc] += f"M{at(p)}h0"
            texts += text(p, device, 'fill="#FFF"')
            x, y = self.corners[device]
            for c, held in enumerate(after[device]):
                if self.n > 1 and (before is None or before[device][c] != held):
                    beyond = y - 8 if p.imag < 0 else y + height + 7
                    texts += text(complex(x + self.cell / 2, beyond), c, 'font-size="10"')
                paths[f'fill="{GREY}"'] += f"M{x} {y}h{width}v{height}h-{width}z"
                for i in set(held):
                    row = f'stroke="{PALETTE[i]}" stroke-width="{self.row}"'
                    paths[row] += f"M{x} {y + (i + 0.5) * self.row:g}h{width}"
                if held == tuple(range(self.k)):  # from each exactly once
                    frame = f"M{x - 0.5} {y}h{self.cell}v{height}h-{self.cell}z"
                    paths[f'fill="none" stroke="{INK}" stroke-width="1.75"'] += frame
                x += self.cell
        place = f'transform="translate({self.width / 2:g} {self.middle:.4g})"'
        marks = f"<g {CENTRED} {BOLD} {place}>{drawn(paths)}{texts}</g>"
        return text(16 + 10j, title, BOLD) + marks

    def arrow(self, paths: dict[str, str], move: Move) -> None:
        """Draw a curve as thick as the message is long."""
        start, end = self.discs[move.src], self.discs[move.dst]
        middle, straight = (start + end) / 2, abs(end - start)
        if straight > 1.05 * abs(self.discs[1] - self.discs[0]):  # no neighbours
            middle *= 0.75  # away from the discs between them
        # bent to the left, so that an exchange is two curves, and cut at the edges of the discs
        bend = middle - 1j * (end - start) * min(0.2, 16 / straight)
        cut = (DISC + 1.5) / abs(bend - start)
        start, end = start + cut * (bend - start), end + cut * (bend - end)
        thick = 1.2 + 2.4 * len(chunks_of(move, self.n)) / self.n
        arrow(paths, start, bend, end, thick, dashed=not move.reduce)


def timeline(spans: Sequence[tuple[str, str, float, float]], title: str = "") -> Picture:
    """Draw each ``(lane, label, start, end)``, in seconds, as a bar over time: a Gantt chart.

    Lanes stand in the order of their first spans, and the earliest start is 0 ms. Lanes of one
    kind share a colour: "rank 0: send" and "rank 1: send" are of the kind "send". A label that its
    bar cannot hold is shown while the mouse is on the bar.
    """
    if not spans:
        raise ValueError("0 spans to draw: pass at least one (lane, label, start, end)")
    lanes, zero = defaultdict(list), min(start for _, _, start, _ in spans)
    for lane, label, start, end in spans:
        if not -math.inf < start <= end < math.inf:  # nor may they be NaN
            raise ValueError(f"{label!r} of {lane!r} cannot last from {start} s to {end} s")
        lanes[lane].append((start - zero, end - zero, label))
    total = max(end for *_, end in spans) - zero
    kinds = list(dict.fromkeys(lane.rpartition(": ")[2] for lane in lanes))
    left, top = 26 + max(map(text_width, lanes)), 46 if title else 16  # room for names and title
    width, bottom = max(WIDTH, left + 400), top + 26 * len(lanes)
    axis = Axis(left, (width - left - 40) / (total or 1), "seconds")
    body, words = heading(title, width) + axis.draw(total, total, top, bottom), []
    for i, (lane, own) in enumerate(lanes.items()):
        y, kind = top + 26 * i + 3, kinds.index(lane.rpartition(": ")[2])
        body += text(complex(left - 10, y + 10), lane, 'text-anchor="end"')
        for start, end, label in own:
            body += axis.bar(start, end, y, 20, PALETTE[kind % len(PALETTE)], label, label)
        extent = axis.words(min(own)[0], max(end for _, end, _ in own))
        words.append(f"{lane} has {len(own)} from {extent}")
    alt = f"Timeline of {axis.time(total)}{title and ': '}{title}. Lanes: {len(lanes)}. "
    alt += f"Spans: {len(spans)}. {'; '.join(words)}."
    return Picture.around(body, width, bottom + 34, alt)


def pipeline(
    spans: Mapping[str, Sequence[Span]] | Sequence[Span], title: str = "", unit: str | None = None
) -> Picture:
    """Draw when each stage works on which micro-batch, and how many it keeps: a Gantt chart.

    ``spans`` is what ``predict`` returns or a pipeline's ``timeline`` was given. To compare several
    on one scale of time, pass {name: spans}. ``unit`` is "seconds", or None for other times.
    """
    panels = spans if isinstance(spans, Mapping) else {"": spans}
    if not panels or not all(panels.values()):
        raise ValueError("no spans to draw: pass what predict returns, or a timeline")
    if unit not in (None, "seconds"):
        raise ValueError(f'unit is {unit!r}, but should be None or "seconds"')
    longest = max(map(_duration, panels.values()))
    axis = Axis(72, (WIDTH - 156) / (longest or 1), unit)  # between names and numbers
    x, y, alt, body = 16.0, 50.0 if title else 22.0, title or "A pipeline over time", ""
    key = {"forward": PALETTE[0], "backward": PALETTE[1], "idle": GREY}
    for words, colour in {**key, "micro-batches whose activations are kept": DARK_GREY}.items():
        body += f'<rect x="{x:.4g}" y="{y - 7}" width="14" height="14" fill="{colour}"/>'
        body += text(complex(x + 20, y), words)
        x += 44 + text_width(words)
    alt += "."
    for name, own in panels.items():
        num_stages, duration = 1 + max(span.stage for span in own), _duration(own)
        head = f"{axis.time(duration)}, {100 * bubble(own):.0f} % idle"
        name, y, peaks = f"{name}{name and ': '}", y + 50, []
        body += text(complex(16, y - 14), name, BOLD)
        body += text(complex(18 + text_width(name, bold=True), y - 14), head)
        body += axis.draw(longest, duration, y, y + num_stages * STAGE)
        for stage in range(num_stages):
            marks, peak = _stage(stage, own, y, axis)
            body += marks
            peaks.append(str(peak))
            y += STAGE
        alt += f" {name}{num_stages} stages, {head}; they keep the activations of up to "
        alt += f"{', '.join(peaks)} micro-batches."
        y += 30
    return Picture.around(heading(title, WIDTH) + body, WIDTH, y + 4, alt)


def _stage(stage: int, spans: Sequence[Span], y: float, axis: Axis) -> tuple[str, int]:
    """Draw what one stage does and, below, keeps; return that and the most that it keeps."""
    zero, length = min(span.start for span in spans), _duration(spans) * axis.scale
    own = sorted((span for span in spans if span.stage == stage), key=lambda span: span.start)
    counts = live_counts(own).get(stage, [])
    peak, ground = max(counts, default=0), y + STAGE - 8
    body = text(complex(axis.left - 10, y + 19), f"stage {stage}", 'text-anchor="end"')
    body += f'<rect x="{axis.left}" y="{y + 4}" width="{length:.5g}" height="30" fill="{GREY}"/>'
    strip = f"M{axis.left} {ground}"
    for span, count in zip(own, counts, strict=True):
        backward, start, stop = span.kind == "backward", span.start - zero, span.end - zero
        words = f"{span.kind} of micro-batch {span.microbatch}"
        args = y + 4 + 6 * backward, 24, PALETTE[backward], span.microbatch, words
        body += axis.bar(start, stop, *args)
        # it is kept from a forward's start to a backward's end
        x = axis.left + (stop if backward else start) * axis.scale
        strip += f"H{x:.5g}V{ground - count * 12 / max(4, peak):.5g}"
    body += f'<path d="{strip}z" fill="{DARK_GREY}"/>'
    return body + text(complex(axis.left + length + 8, y + 42), f"keeps {peak}"), peak


def _duration(spans: Sequence[Span]) -> float:
    return max(span.end for span in spans) - min(span.start for span in spans)
