"""A pipeline over time, drawn: what each stage does when, and what it keeps meanwhile.

Written as SVG, like ``drawing``; notebooks show it through ``plot``.
"""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from ..pipeline.schedules import Span, bubble, live_counts
from .drawing import (
    GREY,
    PALETTE,
    WIDTH,
    Picture,
    heading,
    picture,
    round_numbers,
    text,
    text_width,
)

LEFT, RIGHT = 72, 84  # pixels for the stages' names, and for how many micro-batches are kept
LANE, STRIP = 38, 20  # pixels of a stage: its actions, and below them what it keeps
COLOURS = PALETTE[:2]  # of forward and backward
KEY = (
    (COLOURS[0], "forward"),
    (COLOURS[1], "backward"),
    (GREY, "idle"),
    ("#999999", "micro-batches whose activations are kept"),
)


def pipeline(
    spans: Mapping[str, Sequence[Span]] | Sequence[Span], title: str = "", unit: str | None = None
) -> Picture:
    """Draw when each stage works on which micro-batch, and how many it keeps: a Gantt chart.

    Args:
        spans: what ``predict`` returns or ``timeline`` was given; or, to compare several on one
            scale of time, {name: spans}.
        title: of the picture.
        unit: "seconds" for times in ms; None where times are numbers of something else.

    Raises:
        ValueError: there is nothing to draw, or ``unit`` is another one.
    """
    panels = dict(spans) if isinstance(spans, Mapping) else {"": spans}
    if not panels or not all(panels.values()):
        raise ValueError("no spans to draw: pass what predict returns, or a timeline")
    if unit not in (None, "seconds"):
        raise ValueError(f'unit is {unit!r}, but should be None or "seconds"')
    longest = max(map(_duration, panels.values()))
    scale = (WIDTH - LEFT - RIGHT) / (longest or 1)  # pixels in a unit of time
    ticks = round_numbers(longest or 1)  # as far apart in a short run as in the longest
    y, words = 50.0 if title else 22.0, []
    body = heading(title, WIDTH) + _key(y)
    y += 26
    for name, own in panels.items():
        drawn, height, said = _panel(name, own, scale, ticks, unit)
        body += f'<g transform="translate(0 {y:g})">{drawn}</g>'
        y += height
        words.append(said)
    return picture(body, WIDTH, y, f"{title or 'A pipeline over time'}. {' '.join(words)}")


def _panel(
    name: str, spans: Sequence[Span], scale: float, ticks: Sequence[float], unit: str | None
) -> tuple[str, float, str]:
    """Return the drawing of one run, its height, and what it says in words."""
    zero, duration = min(span.start for span in spans), _duration(spans)
    num_stages = 1 + max(span.stage for span in spans)
    head = f"{_time(duration, unit)}, {100 * bubble(spans):.0f} % idle"
    body = text(16 + 10j, f"<tspan font-weight='bold'>{escape(name)}</tspan>{name and ': '}{head}")
    top, bottom = 24, 24 + num_stages * (LANE + STRIP)
    for tick in (tick for tick in ticks if tick <= duration * (1 + 1e-6)):
        x = LEFT + tick * scale
        body += f'<path d="M{x:.5g} {top}V{bottom}" stroke="{GREY}"/>'
        body += text(complex(x, bottom + 12), _time(tick, unit), 'text-anchor="middle"')
    peaks = []
    for stage in range(num_stages):
        own = sorted((span for span in spans if span.stage == stage), key=lambda span: span.start)
        own = [span._replace(start=span.start - zero, end=span.end - zero) for span in own]
        y = top + stage * (LANE + STRIP)
        body += text(complex(LEFT - 10, y + LANE / 2), f"stage {stage}", 'text-anchor="end"')
        body += (
            f'<rect x="{LEFT}" y="{y + 4}" width="{duration * scale:.5g}" height="{LANE - 8}" '
            f'fill="{GREY}"/>'
        )
        body += "".join(_bar(span, y, scale, unit) for span in own)
        counts = live_counts(own).get(stage, [])
        peaks.append(max(counts, default=0))
        body += _strip(own, counts, y + LANE, scale)
        place = complex(LEFT + duration * scale + 8, y + LANE + STRIP / 2 - 6)
        body += text(place, f"keeps {peaks[-1]}")
    said = f"{name and name + ': '}{num_stages} stages, {head}; "
    said += f"they keep the activations of up to {', '.join(map(str, peaks))} micro-batches."
    return body, bottom + 34, said


def _bar(span: Span, y: float, scale: float, unit: str | None) -> str:
    """One action: forward a little higher than backward, with its micro-batch's number."""
    backward = span.kind == "backward"
    x, width = LEFT + span.start * scale, max(1.5, (span.end - span.start) * scale)
    y += 4 + 6 * backward
    when = f"{_time(span.start, unit)} to {_time(span.end, unit)}"
    bar = (
        f'<rect x="{x:.5g}" y="{y:g}" width="{width:.5g}" height="{LANE - 14}" '
        f'fill="{COLOURS[backward]}" stroke="#FFF" stroke-width="0.8">'
        f"<title>{span.kind} of micro-batch {span.microbatch}: {when}</title></rect>"
    )
    digits = len(str(span.microbatch))
    if width < 1 + 5 * digits:
        return bar
    size = 11 if width >= 5 + 7 * digits else 8
    style = f'fill="#FFF" font-size="{size}" font-weight="bold" text-anchor="middle"'
    return bar + text(complex(x + width / 2, y + (LANE - 14) / 2), span.microbatch, style)


def _strip(spans: Sequence[Span], counts: Sequence[int], y: float, scale: float) -> str:
    """Steps as high as the number of micro-batches kept: up at a forward's start, else down."""
    height, path = (STRIP - 8) / max([4, *counts]), f"M{LEFT} {y + STRIP - 8}"
    for span, count in zip(spans, counts, strict=True):
        time = span.start if span.kind == "forward" else span.end
        path += f"H{LEFT + time * scale:.5g}V{y + STRIP - 8 - count * height:.5g}"
    return f'<path d="{path}z" fill="#999999"/>'


def _key(y: float) -> str:
    body, x = "", 16.0
    for colour, words in KEY:
        body += f'<rect x="{x:.4g}" y="{y - 7}" width="14" height="14" fill="{colour}"/>'
        body += text(complex(x + 20, y), words)
        x += 44 + text_width(words)
    return body


def _duration(spans: Sequence[Span]) -> float:
    return max(span.end for span in spans) - min(span.start for span in spans)


def _time(value: float, unit: str | None) -> str:
    value = float(f"{1000 * value if unit else value:.3g}")
    return f"{value:g}{' ms' if unit else ''}"
