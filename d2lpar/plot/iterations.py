"""The steps of an iteration, drawn by hand like ``drawings``: who computes, who sends to whom."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

from .picture import BOLD, CENTRED, HALO, INK, PALETTE, WIDTH, Picture, arrow, drawn, quantity, text


def iteration(traces: Mapping[str, Sequence]) -> Picture:
    """Draw the steps of an iteration, downwards, for each form: {name: ``iteration.trace(…)``}.

    A vertical line is a device. A block on it says that it computes; an arrow from one to another
    is what is sent, as thick as it is large. There is room for three forms.
    """
    if not 1 <= len(traces) <= 3:
        raise ValueError(f"{len(traces)} forms, but only 1 to 3 fit into the picture")
    most = max(n for steps in traces.values() for step in steps for n in (1, *step.bytes.values()))
    width, body, bottom, alt = WIDTH / len(traces), "", 0.0, "The steps of an iteration."
    for i, (form, steps) in enumerate(traces.items()):
        marks, height, words = _form(steps, width, most)
        title = text(16 + 20j, form, f'font-size="15" {BOLD}')
        body += f'<g transform="translate({i * width:g} 0)">{title}{marks}</g>'
        bottom = max(bottom, height)
        alt += f" {form}: {words}."
    return Picture.around(body, WIDTH, bottom, alt)


def _form(steps: Sequence, width: float, most: int) -> tuple[str, float, str]:
    """Draw the steps of one form; return the drawing, its height and what it says in words."""
    places = {place for step in steps for place in chain(step.busy, *step.bytes)}
    places = sorted(places, key=lambda place: (isinstance(place, int), place))  # "host" first
    columns = {p: 30 + (i + 0.5) * (width - 60) / len(places) for i, p in enumerate(places)}
    y, texts, words, paths = 66.0, "", [], defaultdict(str)
    for n, step in enumerate(steps, 1):
        total = sum(step.bytes.values())
        name, sent = f"{n}. {step.name}", quantity(total, "bytes") if total else ""
        words.append(f"{name}, {sent}" if sent else name)
        texts += text(complex(16, y), name, f"{HALO} {BOLD}")
        if sent:
            texts += text(complex(16, y := y + 18), sent, HALO)
        y += 20
        for place in step.busy:
            block = f'stroke="{PALETTE[place % len(PALETTE)]}" stroke-width="16"'
            paths[block] += f"M{columns[place] - 8:g} {y:g}h16"
        y += 10 * bool(step.busy)
        for (src, dst), nbytes in sorted(step.bytes.items(), key=str):
            start, end = complex(columns[src], y), complex(columns[dst], y)
            arrow(paths, start, (start + end) / 2, end, 1 + 2.5 * nbytes / most, dashed=False)
            y += 9
        y += 16
    lines = ""
    for place, x in columns.items():
        colour = PALETTE[place % len(PALETTE)] if isinstance(place, int) else INK
        lines += f'<path d="M{x:g} 52V{y - 10:g}" stroke="{colour}" stroke-dasharray="2 3"/>'
        lines += text(complex(x, 42), place, f'{CENTRED} {BOLD} fill="{colour}"')
    return lines + texts + drawn(paths), y, "; ".join(words)
