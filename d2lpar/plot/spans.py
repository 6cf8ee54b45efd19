"""What happens when, drawn: a timeline, and a pipeline over time.

They are written as SVG directly, like ``steps``.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from ..pipeline.schedules import Span, bubble, live_counts
from .picture import (
    BOLD,
    CENTRED,
    DARK_GREY,
    GREY,
    PALETTE,
    WIDTH,
    Picture,
    heading,
    text,
    text_width,
)

LANE, BAR, STRIP = 38, 24, 20  # heights: of a stage's actions, one of them, and what it keeps


def timeline(spans: Sequence[tuple[str, str, float, float]], title: str = "") -> Picture:
    """Draw each ``(lane, label, start, end)``, in seconds, as a bar over time: a Gantt chart.

    A lane is a row; rows come in the order of their first spans, and the earliest start is 0 ms.
    Lanes of one kind share a colour: "rank 0: send" and "rank 1: send" are of the kind "send". A
    label that its bar cannot hold is shown while the mouse is on the bar. Raises ValueError for no
    spans, and for a span that ends before it starts.
    """
    if not spans:
        raise ValueError("0 spans to draw: pass at least one (lane, label, start, end)")
    lanes = defaultdict(list)  # each with its own (label, start, end)
    zero = min(start for _, _, start, _ in spans)
    for lane, label, start, end in spans:
        if not -math.inf < start <= end < math.inf:  # nor may they be NaN
            raise ValueError(f"{label!r} of {lane!r} cannot last from {start} s to {end} s")
        lanes[lane].append((label, start - zero, end - zero))
    total = max(end for *_, end in spans) - zero
    kinds = list(dict.fromkeys(map(_kind, lanes)))
    left, top = 26 + max(map(text_width, lanes)), 46 if title else 16  # room for names and title
    width, bottom = max(WIDTH, left + 400), top + 26 * len(lanes)
    scale = (width - left - 40) / (total or 1)  # pixels per second
    body = heading(title, width)
    body += _axis(round_numbers(total), left, top, bottom, scale, "seconds")
    words = []
    for i, (lane, own) in enumerate(lanes.items()):
        y, colour = top + 26 * i + 3, PALETTE[kinds.index(_kind(lane)) % len(PALETTE)]
        body += text(complex(left - 10, y + 10), lane, 'text-anchor="end"')
        for label, start, end in own:
            when = f"{label}: {_time(start, 'seconds')} to {_time(end, 'seconds')}"
            body += _bar(left + start * scale, y, (end - start) * scale, 20, colour, label, when)
        first, last = min(start for _, start, _ in own), max(end for *_, end in own)
        extent = f"{_time(first, 'seconds')} to {_time(last, 'seconds')}"
        words.append(f"{lane} has {len(own)} from {extent}")
    alt = f"Timeline of {_time(total, 'seconds')}{title and ': '}{title}. Lanes: {len(lanes)}. "
    alt += f"Spans: {len(spans)}. {'; '.join(words)}."
    return Picture.around(body, width, bottom + 34, alt)


def _kind(lane: str) -> str:
    return lane.rpartition(": ")[2]


def pipeline(
    spans: Mapping[str, Sequence[Span]] | Sequence[Span], title: str = "", unit: str | None = None
) -> Picture:
    """Draw when each stage works on which micro-batch, and how many it keeps: a Gantt chart.

    ``spans`` is what ``predict`` returns or ``timeline`` was given; to compare several on one scale
    of time, {name: spans}. ``unit`` is "seconds", or None where times are numbers of something
    else. Raises ValueError where there is nothing to draw, and for another unit.
    """
    panels = spans if isinstance(spans, Mapping) else {"": spans}
    if not panels or not all(panels.values()):
        raise ValueError("no spans to draw: pass what predict returns, or a timeline")
    if unit not in (None, "seconds"):
        raise ValueError(f'unit is {unit!r}, but should be None or "seconds"')
    longest = max(map(_duration, panels.values()))
    left, right = 72, 84  # room for the names of stages, and for how many micro-batches they keep
    scale = (WIDTH - left - right) / (longest or 1)  # pixels per unit of time
    y, alt = 50.0 if title else 22.0, f"{title or 'A pipeline over time'}."
    body, x = heading(title, WIDTH), 16.0
    key = {"forward": PALETTE[0], "backward": PALETTE[1], "idle": GREY}
    for words, colour in {**key, "micro-batches whose activations are kept": DARK_GREY}.items():
        body += f'<rect x="{x:.4g}" y="{y - 7}" width="14" height="14" fill="{colour}"/>'
        body += text(complex(x + 20, y), words)
        x += 44 + text_width(words)
    y += 36
    for name, own in panels.items():
        duration, name = _duration(own), f"{name}{name and ': '}"
        num_stages = 1 + max(span.stage for span in own)
        head = f"{_time(duration, unit)}, {100 * bubble(own):.0f} % idle"
        body += text(complex(16, y), name, BOLD)
        body += text(complex(16 + text_width(name, bold=True), y), head)
        y, bottom = y + 14, y + 14 + num_stages * (LANE + STRIP)
        ticks = [tick for tick in round_numbers(longest) if tick <= duration * (1 + 1e-6)]
        body += _axis(ticks, left, y, bottom, scale, unit)
        peaks = []
        for stage in range(num_stages):
            drawn, peak = _stage(stage, own, left, y, scale, unit)
            body += drawn
            peaks.append(str(peak))
            y += LANE + STRIP
        alt += f" {name}{num_stages} stages, {head}; they keep the activations of up to "
        alt += f"{', '.join(peaks)} micro-batches."
        y = bottom + 44
    return Picture.around(body, WIDTH, y - 10, alt)


def _stage(stage: int, spans: Sequence[Span], left: float, y: float, scale: float, unit):
    """Draw what one stage does and, below, keeps; return that and the most that it keeps."""
    zero, end = min(span.start for span in spans), _duration(spans)
    own = sorted((span for span in spans if span.stage == stage), key=lambda span: span.start)
    body = text(complex(left - 10, y + LANE / 2), f"stage {stage}", 'text-anchor="end"')
    body += f'<rect x="{left}" y="{y + 4}" width="{end * scale:.5g}" height="30" fill="{GREY}"/>'
    counts = live_counts(own).get(stage, [])
    ground, height = y + LANE + STRIP - 8, (STRIP - 8) / max([4, *counts])
    strip = f"M{left} {ground}"
    for span, count in zip(own, counts, strict=True):
        backward = span.kind == "backward"
        start, stop = span.start - zero, span.end - zero
        when = f"{span.kind} of micro-batch {span.microbatch}: "
        when += f"{_time(start, unit)} to {_time(stop, unit)}"
        place = left + start * scale, y + 4 + 6 * backward, (stop - start) * scale
        body += _bar(*place, BAR, PALETTE[backward], span.microbatch, when)
        # it is kept from a forward's start to a backward's end
        strip += (
            f"H{left + (stop if backward else start) * scale:.5g}V{ground - count * height:.5g}"
        )
    body += f'<path d="{strip}z" fill="{DARK_GREY}"/>'
    peak = max(counts, default=0)
    return body + text(complex(left + end * scale + 8, y + LANE + 4), f"keeps {peak}"), peak


def _duration(spans: Sequence[Span]) -> float:
    return max(span.end for span in spans) - min(span.start for span in spans)


def _bar(x: float, y: float, length: float, height: int, colour: str, label, tooltip: str) -> str:
    """Draw a bar from ``x`` on, never too thin to be seen, with its label if that fits."""
    length, style = max(2, length), f'{CENTRED} {BOLD} fill="#FFF"'
    bar = (
        f'<rect x="{x:.5g}" y="{y:g}" width="{length:.5g}" height="{height}" fill="{colour}" '
        f'stroke="#FFF" stroke-width="0.7"><title>{escape(tooltip)}</title></rect>'
    )
    for size, margin in ((11, 4), (8, 0.5)):
        if text_width(label, size, bold=True) + margin <= length:
            middle = complex(x + length / 2, y + height / 2)
            return bar + text(middle, label, f'{style} font-size="{size}"')
    return bar


def _axis(ticks: Sequence[float], left: float, top: float, bottom: float, scale: float, unit):
    """Draw a line and a number for each tick."""
    body = ""
    for tick in ticks:
        x = left + tick * scale
        body += f'<path d="M{x:.5g} {top}V{bottom + 4}" stroke="{GREY}"/>'
        body += text(complex(x, bottom + 16), _time(tick, unit), CENTRED)
    return body


def round_numbers(total: float) -> list[float]:
    """Return 4 to 8 round numbers from 0 to ``total``."""
    power = 10.0 ** math.floor(math.log10(total or 1))
    step = max(m * power for m in (0.2, 0.5, 1, 2) if 3 * m * power <= (total or 1))
    return [i * step for i in range(int((total or 1) / step + 1e-6) + 1)]


def _time(value: float, unit: str | None) -> str:
    value = float(f"{1000 * value if unit else value:.3g}")
    return f"{value:g}{' ms' if unit else ''}"
