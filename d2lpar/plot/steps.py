"""Who sends what to whom, drawn step by step: in a schedule, an iteration, data-parallel training.

They are written as SVG directly, not with matplotlib: they are up to thousands of marks that must
sit to the pixel. A point is a complex number, with y downwards.
"""

import cmath
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from ..collectives.schedules import Move, chunks_of, holdings, num_chunks, steps_of
from .picture import (
    BOLD,
    CENTRED,
    GREY,
    HALO,
    INK,
    PALETTE,
    WIDTH,
    Picture,
    colour_of,
    heading,
    quantity,
    text,
    text_width,
)

KEY = """\
Grid: what a device holds.
Column: a chunk.
Row: from which device.
Frame: the whole sum.
Number: chunk received.
Solid arrow: is added.
Dashed arrow: is copied.
Thicker arrow: more bytes.""".splitlines()
DISC = 10  # the radius of a device, in pixels


def schedule(function: Callable[[int], list[list[Move]]], k: int, title: str = "") -> Picture:
    """Draw every step of ``function(k)``: who sends which chunk to whom, and what is held then.

    Beside each device stands what it holds: a column for each chunk, in it a row for each device
    whose contribution it contains. Raises ValueError unless 2 <= k <= 8.
    """
    if not 2 <= k <= 8:
        raise ValueError(f"k = {k}, but only 2 to 8 devices fit into the picture")
    name = getattr(function, "__name__", "schedule")
    title = title or f"{name}({k})"
    steps = steps_of(function, k)
    states, n = holdings(steps, k), num_chunks(steps)
    count = len(steps) + 2  # panels: the start, the steps, the key
    columns = (3 if count == 6 else 4) if k < 6 else (2 if count == 4 else 3)
    panel = _Panel(k, n, WIDTH / columns)
    panels = [panel.draw("start", [], None, states[0])]
    alt = f"{title}: {k} devices, {len(steps)} steps, the tensor in {n} chunk{'s' * (n > 1)}."
    for i, step in enumerate(steps, 1):
        panels.append(panel.draw(f"step {i}", step, states[i - 1], states[i]))
        whole = sum(held == tuple(range(k)) for device in states[i] for held in device)
        alt += f" Step {i}: {_in_words(step)}; {whole} of {k * n} sums are whole."
    key = [text(complex(16, 36 + 19 * i), line) for i, line in enumerate(KEY)]
    panels.append(text(16 + 10j, "how to read it", BOLD) + "".join(key))
    colour = colour_of(name, colour_of(title, None))
    body = heading(title, columns * panel.width, colour)
    for i, drawn in enumerate(panels):
        x, y = i % columns * panel.width, 50 + i // columns * panel.height
        body += f'<g transform="translate({x:g} {y:g})">{drawn}</g>'
    height = 50 + math.ceil(count / columns) * panel.height
    return Picture.around(body, columns * panel.width, height, alt)


def _in_words(step: list[Move]) -> str:
    verbs = " and ".join(sorted({"added" if move.reduce else "copied" for move in step}))
    if len(step) > 8:
        return f"{len(step)} messages, {verbs}"
    prefix = "chunk " * (step[0].chunk is not None)
    moves = ", ".join(f"{move.src} to {move.dst}: {prefix}{_name(move)}" for move in step)
    return f"{moves}, {verbs}"


def _name(move: Move) -> str:
    if move.chunk is None:
        return "all"
    first, *_, last = [*chunks_of(move, 1)] * 2
    return f"{first}" if first == last else f"{first}-{last}"


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
        paths = defaultdict(str)  # marks of one style are one path: {its attributes: its data}
        texts, taken = "", []
        for move in step:
            places = self.arrow(paths, move)
            if self.n > 1 and len(step) <= 2 * self.k:  # more labels would hide the arrows
                width = text_width(_name(move), bold=True)
                free = (p for p in places if not any(_near(p, q, width + 1, 12) for q in taken))
                taken.append(next(free, places[0]))
                texts += text(taken[-1], _name(move), HALO)
        for device, p in enumerate(self.discs):
            x, y = self.corners[device]
            disc = (
                f'<circle cx="{p.real:.4g}" cy="{p.imag:.4g}" r="{DISC}" fill="{PALETTE[device]}"/>'
            )
            texts += disc + text(p, device, 'fill="#FFF"')
            for c, held in enumerate(after[device]):
                self.column(paths, x + c * self.cell, y, held)
                if self.n > 1 and (before is None or before[device][c] != held):
                    beyond = y - 8 if p.imag < 0 else y + self.row * self.k + 7
                    texts += text(complex(x + (c + 0.5) * self.cell, beyond), c, 'font-size="10"')
        drawn = "".join(f'<path {style} d="{data}"/>' for style, data in paths.items())
        place = f'transform="translate({self.width / 2:g} {self.middle:.4g})"'
        return f"{text(16 + 10j, title, BOLD)}<g {CENTRED} {BOLD} {place}>{drawn}{texts}</g>"

    def column(self, paths: dict[str, str], x: int, y: int, held: tuple[int, ...]) -> None:
        """Draw a chunk: a row for each contributor; a frame if each is there exactly once."""
        height, width = self.row * self.k, self.cell - 1
        paths[f'fill="{GREY}"'] += f"M{x} {y}h{width}v{height}h-{width}z"
        for i in set(held):
            style = f'stroke="{PALETTE[i]}" stroke-width="{self.row}"'
            paths[style] += f"M{x} {y + (i + 0.5) * self.row:g}h{width}"
        if held == tuple(range(self.k)):
            frame = f"M{x - 0.5} {y}h{self.cell}v{height}h-{self.cell}z"
            paths[f'fill="none" stroke="{INK}" stroke-width="1.75"'] += frame

    def arrow(self, paths: dict[str, str], move: Move) -> list[complex]:
        """Draw a curve as thick as the message is long; return its label's places, best first."""
        start, end = self.discs[move.src], self.discs[move.dst]
        middle, straight = (start + end) / 2, abs(end - start)
        best = 0.43  # where on the curve its label stands, between 0 and 1
        if straight > 1.05 * abs(self.discs[1] - self.discs[0]):  # no neighbours
            middle *= 0.75  # away from the discs between them
            best = 0.25 if straight > 1.7 * abs(start) else 0.5  # away from where many cross
        # bent to the left, so that an exchange is two curves, and cut at the edges of the discs
        control = middle - 1j * (end - start) * min(0.2, 16 / straight)
        cut = (DISC + 1.5) / abs(control - start)
        start, end = start + cut * (control - start), end + cut * (control - end)
        thick = 1.2 + 2.4 * len(chunks_of(move, self.n)) / self.n
        back = (control - end) / abs(control - end) * (5 + thick)  # from the tip to the neck
        dashes = "" if move.reduce else ' stroke-dasharray="4 3"'
        style = f'fill="none" stroke="{INK}" stroke-width="{thick:.2g}"{dashes}'
        paths[style] += f"M{_at(start)}Q{_at(control)} {_at(end + back)}"
        sides = f"{_at(end + back * (1 + 0.5j))} {_at(end + back * (1 - 0.5j))}"
        style = f'fill="{INK if move.reduce else "#FFF"}" stroke="{INK}"'
        paths[style] += f"M{_at(end)}L{sides}z"
        along = [best, *(best + sign * 0.04 * i for i in range(1, 10) for sign in (-1, 1))]
        curve = [(1 - t) ** 2 * start + 2 * t * (1 - t) * control + t**2 * end for t in along]
        width = DISC + 1 + text_width(_name(move), bold=True) / 2
        return [p for p in curve if not any(_near(p, q, width, 16) for q in self.discs)] or curve


def _near(p: complex, q: complex, width: float, height: float) -> bool:
    return abs(p.real - q.real) < width and abs(p.imag - q.imag) < height


def _at(point: complex) -> str:
    return f"{point.real:.4g} {point.imag:.4g}"


def iteration(traces: Mapping[str, Sequence]) -> Picture:
    """Draw the steps of an iteration, downwards, for each form: {name: ``iteration.trace(…)``}.

    A vertical line is a device. A block on it says that it computes; an arrow from one to another
    is what is sent, as thick as it is large. Raises ValueError for no form or more than three.
    """
    if not 1 <= len(traces) <= 3:
        raise ValueError(f"{len(traces)} forms, but only 1 to 3 fit into the picture")
    sizes = [n for steps in traces.values() for step in steps for n in step.bytes.values()]
    width, body, bottom, alt = WIDTH / len(traces), "", 0.0, "The steps of an iteration."
    for i, (form, steps) in enumerate(traces.items()):
        drawn, height, words = _sequence(steps, width, max([1, *sizes]))
        title = text(16 + 20j, form, f'font-size="15" {BOLD}')
        body += f'<g transform="translate({i * width:g} 0)">{title}{drawn}</g>'
        bottom = max(bottom, height)
        alt += f" {form}: {words}."
    return Picture.around(body, WIDTH, bottom, alt)


def _sequence(steps: Sequence, width: float, most: int) -> tuple[str, float, str]:
    """Draw the steps of one form; return the drawing, its height and what it says in words."""
    places = {place for step in steps for place in chain(step.busy, *step.bytes)}
    places = sorted(places, key=lambda place: (isinstance(place, int), place))  # "host" first
    columns = {p: 30 + (i + 0.5) * (width - 60) / len(places) for i, p in enumerate(places)}
    y, body, words = 66.0, "", []
    for n, step in enumerate(steps, 1):
        total = sum(step.bytes.values())
        name, sent = f"{n}. {step.name}", quantity(total, "bytes") if total else ""
        words.append(f"{name}, {sent}" if sent else name)
        body += text(complex(16, y), name, f"{HALO} {BOLD}")
        if text_width(name, bold=True) + text_width(sent) > width - 40:
            y += 18  # below the name: beside it there is no room
        body += text(complex(width - 16, y), sent, f'{HALO} text-anchor="end"')
        y += 20
        for place in step.busy:
            body += _box(complex(columns[place], y), 16, 16, [], PALETTE[place % len(PALETTE)])
        y += 10 * bool(step.busy)
        for (src, dst), nbytes in sorted(step.bytes.items(), key=str):
            start, end = complex(columns[src], y), complex(columns[dst], y)
            body += _arrow(start, end, 1 + 2.5 * nbytes / most)
            y += 9
        y += 16
    lines = ""
    for place, x in columns.items():
        colour = PALETTE[place % len(PALETTE)] if isinstance(place, int) else INK
        lines += f'<path d="M{x:g} 52V{y - 10:g}" stroke="{colour}" stroke-dasharray="2 3"/>'
        lines += text(complex(x, 42), place, f'{CENTRED} {BOLD} fill="{colour}"')
    return lines + body, y, "; ".join(words)


def data_parallel(k: int = 2) -> Picture:
    """Draw one step of data-parallel training on ``k`` devices, from the batch to the update.

    Raises ValueError unless 1 <= k <= 4.
    """
    if not 1 <= k <= 4:
        raise ValueError(f"k = {k}, but only 1 to 4 devices fit into the picture")
    rows = [84 + 84 * i for i in range(k)]
    batch, total = complex(62, sum(rows) / k), complex(526, sum(rows) / k)
    body = _box(batch, 84, 76, ["batch", "X, y"]) + _box(total, 76, 76, ["sum"])
    for i, y in enumerate(rows):
        replica, gradient, update = complex(220, y), complex(378, y), complex(682, y)
        body += _box(replica, 116, 52, [f"device {i}", f"shard {i}, replica {i}"], PALETTE[i])
        body += _box(gradient, 100, 52, ["gradient", f"of shard {i}"], PALETTE[i])
        body += _box(update, 112, 52, ["same step", f"on replica {i}"], PALETTE[i])
        body += _arrow(batch + 42, replica - 58, 3)
        body += _arrow(replica + 58, gradient - 50)
        body += _arrow(gradient + 50, total - 38, 3)
        body += _arrow(total + 38, update - 56, 3)
    columns = {132: "1. split", 299: "2. backward", 526: "3. allreduce", 682: "4. update"}
    for x, words in columns.items():
        body += text(complex(x, 24), words, f"{CENTRED} {BOLD}")
    alt = (
        f"One step on {k} devices. 1: the batch is split into {k} shards, one for each device. "
        "2: each device computes the gradient of its shard with its own replica of the parameters. "
        "3: an allreduce sums the gradients. 4: every device takes the same step on its replica."
    )
    return Picture.around(body, WIDTH, rows[-1] + 44, alt)


def _box(middle: complex, width: float, height: float, lines: list[str], colour: str = INK) -> str:
    """Draw a frame with lines of text, the first one bold; without text it is filled."""
    corner, fill = middle - complex(width, height) / 2, "#FFF" if lines else colour
    drawn = (
        f'<rect x="{corner.real:g}" y="{corner.imag:g}" width="{width:g}" height="{height:g}" '
        f'rx="6" fill="{fill}" stroke="{colour}" stroke-width="2"/>'
    )
    for i, line in enumerate(lines):
        place = middle + 17j * (i - (len(lines) - 1) / 2)
        drawn += text(place, line, CENTRED if i else f"{CENTRED} {BOLD}")
    return drawn


def _arrow(start: complex, end: complex, thick: float = 1) -> str:
    """Draw a straight arrow: thick where something is sent, thin within a device."""
    back = (start - end) / abs(start - end) * (4 + 1.5 * thick)  # from the tip to the neck
    sides = f"{_at(end + back * (1 + 0.6j))} {_at(end + back * (1 - 0.6j))}"
    return (
        f'<path d="M{_at(start)}L{_at(end + back)}" stroke="{INK}" stroke-width="{thick:g}"/>'
        f'<path d="M{_at(end)}L{sides}z" fill="{INK}"/>'
    )
