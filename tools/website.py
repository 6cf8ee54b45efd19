"""What Sphinx cannot know of the book: the front page's list, and the players' data.

docs/conf.py uses this. ``make site`` builds the site.
"""

import json
import re
from contextlib import suppress
from pathlib import Path

import nbformat

from d2lpar import pipeline_schedules, schedules
from d2lpar.pipeline_schedules import is_split, kept, play

ROOT = Path(__file__).resolve().parents[1]
NAMES = ["star", "ring", "tree", "direct", "halving_doubling", "recursive_doubling"]
SCHEDULES = {name: getattr(schedules, name) for name in NAMES}
ORDERS = ["sequential", "gpipe", "one_f_one_b", "interleaved", "zero_bubble"]
ORDERS += ["zero_bubble_v"]
PIPELINES = {name: getattr(pipeline_schedules, name) for name in ORDERS}

# The puzzles' levels: a schedule that meets the target, its size, and for an allreduce
# the rules. "neighbours": each sends to the next one only; "single": in a step each
# sends one message and takes one. The pages have the names, and say what to do.
ALLREDUCE_LEVELS = [
    ("star", 2, ""),
    ("star", 4, ""),
    ("ring", 3, "neighbours single"),
    ("ring", 4, "neighbours single"),
    ("tree", 4, "single"),
    ("halving_doubling", 4, "single"),
]
PIPELINE_LEVELS = [
    ("gpipe", 2, 2),
    ("gpipe", 3, 4),
    ("one_f_one_b", 3, 4),
    ("interleaved", 2, 4),
    ("zero_bubble", 3, 4),
    ("zero_bubble_v", 2, 4),
]


def exported_schedule(steps: list) -> dict:
    """Return a schedule as JSON can hold it.

    ``chunks`` says into how many the tensor is cut. A step of ``steps`` is a list of
    moves, in which chunks ``first`` to ``end`` - 1 travel.
    """
    n = schedules.num_chunks(steps)
    moves = [[(move, schedules.chunks_of(move, n)) for move in step] for step in steps]
    names = ["src", "dst", "first", "end", "reduce"]
    plain = [
        [dict(zip(names, (m.src, m.dst, c.start, c.stop, m.reduce))) for m, c in step]
        for step in moves
    ]
    return {"chunks": n, "steps": plain}


def exported_pipeline(orders: list) -> list[dict]:
    """Return each rank's word and stages: what ``spell`` makes its actions from."""
    ranks = []
    for order in orders:
        stages = sorted({action.stage for action in order})
        letters = [action.kind[0].upper() for action in order]
        word = [
            letter if action.stage == stages[0] else letter.lower()
            for letter, action in zip(letters, order)
        ]
        ranks.append({"stages": stages, "word": "".join(word)})
    return ranks


def allreduce_levels() -> list[dict]:
    """Return the allreduce puzzle's levels; the schedule itself sets the target."""
    levels = []
    for name, k, rules in ALLREDUCE_LEVELS:
        steps = SCHEDULES[name](k)
        n = schedules.num_chunks(steps)
        c = schedules.cost(SCHEDULES[name], k, 4 * n)
        target = {"steps": len(steps), "messages": sum(map(len, steps))}
        target["busiest"] = max(c.sent(r) for r in range(k)) // 4
        level = {"k": k, "chunks": n, "target": target}
        levels.append(level | dict.fromkeys(rules.split(), True))
    return levels


def pipeline_levels() -> list[dict]:
    """Return the pipeline puzzle's levels; the schedule itself sets the target."""
    levels = []
    for name, p, m in PIPELINE_LEVELS:
        orders = PIPELINES[name](p, m)
        stages = [rank["stages"] for rank in exported_pipeline(orders)]
        letters = "FBW" if is_split(orders) else "FB"
        letters += letters.lower() * (len(stages[0]) == 2)
        keeps = [max(kept(order)) for order in orders]
        target = {"ticks": len(play(orders)), "keeps": keeps}
        level = {"m": m, "stages": stages, "letters": letters, "target": target}
        levels.append(level)
    return levels


def possible(schedule, sizes) -> dict:
    """Return a pipeline schedule for all sizes that it can be made for."""
    found = {}
    for p, m in sizes:
        with suppress(ValueError):  # interleaved takes rounds of p micro-batches
            found[f"{p},{m}"] = exported_pipeline(schedule(p, m))
    return found


def write_players(folder: Path) -> None:
    """Write the pages' data, for up to 8 devices, 6 ranks and 12 micro-batches."""
    sizes = [(p, m) for p in range(2, 7) for m in range(1, 13)]
    data = {
        "schedules": {
            name: {k: exported_schedule(schedule(k)) for k in range(2, 9)}
            for name, schedule in SCHEDULES.items()
        },
        "pipelines": {
            name: possible(schedule, sizes) for name, schedule in PIPELINES.items()
        },
        "allreduce-levels": allreduce_levels(),
        "pipeline-levels": pipeline_levels(),
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
