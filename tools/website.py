"""What Sphinx cannot know of the book: the front page's list, and the players' data.

docs/conf.py uses this. ``make site`` builds the site.
"""

import json
import re
from pathlib import Path

import nbformat

from d2lpar import pipeline_schedules, schedules
from d2lpar.pipeline_schedules import is_split, kept, play

ROOT = Path(__file__).resolve().parents[1]
NAMES = ["star", "ring", "tree", "direct", "halving_doubling", "recursive_doubling"]
SCHEDULES = {name: getattr(schedules, name) for name in NAMES}
NAMES = ["sequential", "gpipe", "one_f_one_b", "interleaved", "zero_bubble"]
NAMES += ["zero_bubble_v"]
PIPELINES = {name: getattr(pipeline_schedules, name) for name in NAMES}

# The puzzles' levels: a name, a schedule that meets the target, its size, what to do.
# "neighbours": each sends to the next one only; "single": one message in and one out.
ALLREDUCE_LEVELS = [
    (
        "A first sum",
        "star",
        2,
        "",
        """Each of two devices holds a number, and needs the
sum of both. Let device 1 send its own to device 0, which adds it. Run the step. Then
let device 0 send the sum back: device 1 replaces its number with it.""",
    ),
    (
        "Star",
        "star",
        4,
        "",
        """Four devices, and the same idea: all send to one, which
adds them up and sends the sum to all. A step may have many moves.""",
    ),
    (
        "Ring of three",
        "ring",
        3,
        "neighbours single",
        """Each tensor is cut into three
chunks, the columns. Each device sends to its neighbour only, and one chunk in a step is
enough. First let the sums travel round and grow, then let complete sums travel on.""",
    ),
    (
        "Ring of four",
        "ring",
        4,
        "neighbours single",
        """The same with four devices and
four chunks. Copy your list when it is done: exercise 3 of chapter 3 trains with it.""",
    ),
    (
        "Tree",
        "tree",
        4,
        "single",
        """Whole tensors again, but now each device sends one
message in a step, and takes one. Pairs add up first, then pairs of pairs.""",
    ),
    (
        "Halving and doubling",
        "halving_doubling",
        4,
        "single",
        """Partners swap halves,
then quarters, and back again. Press two chunks that stand side by side, and both, with
what is between them, travel as one message.""",
    ),
]
PIPELINE_LEVELS = [
    (
        "A first pipeline",
        "gpipe",
        2,
        2,
        """Two ranks hold a half of the network each, and
two micro-batches, 0 and 1, go through it. Press F0 of rank 0: its forward pass. Its
result goes to rank 1. A backward pass comes from the last rank.""",
    ),
    (
        "GPipe",
        "gpipe",
        3,
        4,
        """Three ranks, four micro-batches: all forward, then all
backward. The dark strip below a rank shows how many micro-batches it keeps.""",
    ),
    (
        "1F1B",
        "one_f_one_b",
        3,
        4,
        """The same number of ticks, and less memory: run a
backward pass as soon as you can. Copy your list when it is done: exercise 2 of chapter
12 runs it on three processes.""",
    ),
    (
        "Interleaved",
        "interleaved",
        2,
        4,
        """Each rank has two short stages, the second
one in small letters: micro-batches go round the ranks twice. Forward passes go in
rounds of two micro-batches, first on one stage, then on the other.""",
    ),
    (
        "Zero bubble",
        "zero_bubble",
        3,
        4,
        """A backward pass is cut in two: B, for which
the rank before it waits, and W, the gradient of the weights, for which nobody waits.
Fill the gaps with W.""",
    ),
    (
        "V",
        "zero_bubble_v",
        2,
        4,
        """Micro-batches go down the ranks, and up again: rank 0
has the first stage and the last one. The target is that of ZB-V.""",
    ),
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
    for title, name, k, rules, text in ALLREDUCE_LEVELS:
        steps = SCHEDULES[name](k)
        c = schedules.cost(SCHEDULES[name], k, 4 * schedules.num_chunks(steps))
        target = {"steps": len(steps), "messages": sum(map(len, steps))}
        target["busiest"] = max(c.sent(r) for r in range(k)) // 4
        level = {"name": title, "k": k, "chunks": schedules.num_chunks(steps)}
        level |= {"text": " ".join(text.split()), "target": target}
        levels.append(level | dict.fromkeys(rules.split(), True))
    return levels


def pipeline_levels() -> list[dict]:
    """Return the pipeline puzzle's levels; the schedule itself sets the target."""
    levels = []
    for title, name, p, m, text in PIPELINE_LEVELS:
        orders = PIPELINES[name](p, m)
        stages = [rank["stages"] for rank in exported_pipeline(orders)]
        letters = "FBW" if is_split(orders) else "FB"
        target = {"ticks": len(play(orders))}
        target["keeps"] = [max(kept(order)) for order in orders]
        level = {"name": title, "m": m, "stages": stages, "target": target}
        level |= {"letters": letters + letters.lower() * (len(stages[0]) == 2)}
        levels.append(level | {"text": " ".join(text.split())})
    return levels


def possible(schedule, sizes) -> dict:
    """Return a pipeline schedule for all sizes that it can be made for."""
    found = {}
    for p, m in sizes:
        if m % p == 0 or schedule is not pipeline_schedules.interleaved:
            found[f"{p},{m}"] = exported_pipeline(schedule(p, m))
    return found


def write_players(folder: Path) -> None:
    """Write the data that the pages show: up to 8 devices, 6 ranks, 12 batches."""
    sizes = [(p, m) for p in range(2, 7) for m in range(1, 13)]
    data = {
        "schedules": {
            name: {k: exported_schedule(schedule(k)) for k in range(2, 9)}
            for name, schedule in SCHEDULES.items()
        },
        "pipelines": {
            name: possible(order, sizes) for name, order in PIPELINES.items()
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
