"""Draw the README's picture, docs/ring.svg: a ring allreduce that moves.

    python tools/ring_picture.py

It is drawn from the schedule itself. Where motion is not wanted, or a viewer has none,
the picture stands still in the middle of the fifth step.
"""

from pathlib import Path

from d2lpar.collectives import holdings, ring
from d2lpar.plot import PALETTE

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "ring.svg"
K, STEPS = 4, ring(4)
# seconds: a message on its way, a step, and the whole sum shown
TRAVEL, STEP, END = 1.0, 1.5, 3.5
TOTAL = STEP * len(STEPS) + END
STILL = 4  # the step that is shown where nothing moves
WIDTH, HEIGHT, CELL = 760, 290, 13
# of the devices: a ring, clockwise
PLACES = [(270, 80), (490, 80), (490, 210), (270, 210)]
CORNERS = [
    (x + (-38 - K * CELL if x < WIDTH / 2 else 38), y - K * CELL / 2) for x, y in PLACES
]
ALT = (
    "A ring allreduce that moves: four devices each send one chunk to the next in every"
    " step. After three steps each has one whole sum, after six steps all have all."
)
STYLE = f"""
text {{ font: 14px 'DejaVu Sans', Verdana, Arial, sans-serif; \
text-anchor: middle; fill: #222 }}
.name {{ fill: #FFF }}
.name, .title {{ font-weight: bold }}
.state, .mail {{ opacity: 0 }}
.still {{ opacity: 1 }}
@media (prefers-reduced-motion: no-preference) {{
  .state, .mail {{ animation: {TOTAL}s linear infinite; opacity: 0 }}
  .state {{ animation-name: show }}
  .last {{ animation-name: end }}
  .mail {{ animation-name: go }}
}}
@keyframes show {{ 0%, {100 * STEP / TOTAL:.3f}% {{ opacity: 1 }}
  {100 * STEP / TOTAL + 0.001:.3f}%, 100% {{ opacity: 0 }} }}
@keyframes end {{ 0%, {100 * END / TOTAL:.3f}% {{ opacity: 1 }}
  {100 * END / TOTAL + 0.001:.3f}%, 100% {{ opacity: 0 }} }}
@keyframes go {{ 0%, {100 * (STEP - TRAVEL) / TOTAL:.3f}% {{ \
opacity: 1; transform: none }}
  {100 * STEP / TOTAL:.3f}% {{ opacity: 1; transform: var(--way) }}
  {100 * STEP / TOTAL + 0.001:.3f}%, 100% {{ opacity: 0; transform: var(--way) }} }}
"""


def state(held: list, number: int) -> str:
    """Draw what all devices hold after so many steps, and say what happens next."""
    marks = dict.fromkeys(("#E4E4E4", *PALETTE[:K]), "")
    frames = ""
    for (x, y), chunks in zip(CORNERS, held, strict=True):
        for c, contributions in enumerate(chunks):
            left = x + c * CELL
            marks["#E4E4E4"] += f"M{left} {y}h{CELL - 2}v{K * CELL}h{2 - CELL}z"
            for who in contributions:
                marks[PALETTE[who]] += (
                    f"M{left} {y + who * CELL}h{CELL - 2}v{CELL - 1}h{2 - CELL}z"
                )
            if len(contributions) == K:
                frames += f"M{left - 1} {y - 1}h{CELL}v{K * CELL + 1}h{-CELL}z"
    words = "All devices hold the whole sum."
    if number < len(STEPS):
        verb = "adds" if STEPS[number][0].reduce else "copies"
        words = (
            f"Step {number + 1} of {len(STEPS)}: each sends one chunk to the next,"
            f" which {verb} it."
        )
    paths = "".join(
        f'<path fill="{colour}" d="{d}"/>' for colour, d in marks.items() if d
    )
    frame = (
        f'<path fill="none" stroke="#222" stroke-width="2" d="{frames}"/>'
        if frames
        else ""
    )
    classes = "state" + " last" * (number == len(STEPS)) + " still" * (number == STILL)
    delay = f"animation-delay:{number * STEP - TOTAL:g}s"
    text = f'<text x="{WIDTH / 2:g}" y="272">{words}</text>'
    return f'<g class="{classes}" style="{delay}">{paths}{frame}{text}</g>'


def message(number: int, move) -> str:
    """Draw a message of a step, on its way."""
    (x, y), (to_x, to_y) = PLACES[move.src], PLACES[move.dst]
    toward = [(b > a) - (b < a) for a, b in ((x, to_x), (y, to_y))]
    start = x + 32 * toward[0], y + 32 * toward[1]
    way = [b - a - 64 * t for a, b, t in ((x, to_x, toward[0]), (y, to_y, toward[1]))]
    still = " still" * (number == STILL)
    style = (
        f"animation-delay:{number * STEP - TOTAL:g}s;"
        f"--way:translate({way[0]}px,{way[1]}px)"
    )
    dashes = "" if move.reduce else ' stroke-dasharray="4 3"'
    return (
        f'<g class="mail{still}" style="{style}"><g transform="translate({start[0]}'
        f' {start[1]})"><rect x="-11" y="-11" width="22" height="22" rx="5" fill="#FFF"'
        f' stroke="#222"{dashes}/><text y="5">{move.chunk}</text></g></g>'
    )


def picture() -> str:
    """Return the picture as SVG."""
    states = holdings(STEPS, K)
    line = "M" + "L".join(f"{x} {y}" for x, y in PLACES) + "z"
    body = f'<path d="{line}" fill="none" stroke="#BBB" stroke-width="2"/>'
    body += "".join(state(held, number) for number, held in enumerate(states))
    body += "".join(message(i, move) for i, step in enumerate(STEPS) for move in step)
    for r, (x, y) in enumerate(PLACES):
        body += f'<circle cx="{x}" cy="{y}" r="18" fill="{PALETTE[r]}"/>'
        body += f'<text class="name" x="{x}" y="{y + 5}">{r}</text>'
    title = (
        f'<text class="title" x="{WIDTH / 2:g}" y="30">Four devices add up their'
        " gradients</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{ALT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
        f"<title>{ALT}</title><style>{STYLE}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#FFF"/>{title}{body}</svg>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
