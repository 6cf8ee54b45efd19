"""What Sphinx cannot know of the book: the front page's list, and the players' data.

docs/conf.py uses this. ``make site`` builds the site.
"""

import json
import re
from pathlib import Path

import nbformat

from d2lpar import pipeline_schedules, schedules

ROOT = Path(__file__).resolve().parents[1]
NAMES = ["star", "ring", "tree", "direct", "halving_doubling", "recursive_doubling"]
SCHEDULES = {name: getattr(schedules, name) for name in NAMES}
NAMES = ["sequential", "gpipe", "one_f_one_b"]
PIPELINES = {name: getattr(pipeline_schedules, name) for name in NAMES}


def exported_schedule(steps: list) -> dict:
    """Return a schedule as JSON can hold it.

    ``chunks`` says into how many the tensor is cut. A step of ``steps`` is a list of
    moves, and a move is [src, dst, first chunk, end of the chunks, reduce].
    """
    n = schedules.num_chunks(steps)
    moves = [[(move, schedules.chunks_of(move, n)) for move in step] for step in steps]
    return {
        "chunks": n,
        "steps": [
            [[m.src, m.dst, c.start, c.stop, int(m.reduce)] for m, c in step]
            for step in moves
        ],
    }


def exported_pipeline(orders: list) -> list[list[int]]:
    """Return each stage's passes: of micro-batch i, i + 1 is forward, -(i + 1) back."""
    sign = {"forward": 1, "backward": -1}
    return [[sign[a.kind] * (a.microbatch + 1) for a in own] for own in orders]


def write_players(folder: Path) -> None:
    """Write the data that the players show: up to 8 devices, 6 stages, 12 batches."""
    sizes = [(p, m) for p in range(2, 7) for m in range(1, 13)]
    data = {
        "schedules": {
            name: {k: exported_schedule(schedule(k)) for k in range(2, 9)}
            for name, schedule in SCHEDULES.items()
        },
        "pipelines": {
            name: {f"{p},{m}": exported_pipeline(order(p, m)) for p, m in sizes}
            for name, order in PIPELINES.items()
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in data.items():
        text = json.dumps(content, separators=(",", ":"))
        script = f'<script type="application/json" id="{name}">{text}</script>\n'
        (folder / f"{name}.html").write_text(script, encoding="utf-8")


def chapters() -> list[dict[str, str]]:
    """Return each chapter's name, title, question, time, and what it builds."""
    found = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text = nbformat.read(path, as_version=4).cells[0].source
        pattern = r"# \d+\. (?P<title>.+)\n\n\*(?P<question>.+)\*\n\n(.*\n)"
        pattern += r"- \*\*You will have built\*\* (?P<built>.+)\n"
        pattern += r"- \*\*It takes\*\* about (?P<time>\d+ min)"
        found.append({"name": path.stem} | re.match(pattern, text).groupdict())
    return found


def chapter_list() -> str:
    """Return the front page's list: each chapter's question and what it builds."""
    lines = [
        f"{int(c['name'][:2])}. **[{c['title']}](../notebooks/{c['name']}.ipynb)**"
        f" {c['time']}\n\n    {c['question']}\n\n"
        f"    *You will have built* {c['built']}\n"
        for c in chapters()
    ]
    return "\n".join(lines)
