"""What Sphinx cannot know of the book: parts, thumbnails, names, the players' data.

docs/conf.py uses this. ``make site`` builds the site.

python tools/website.py REPOSITORY SITE    for the branch that hosted notebooks open:
lets all notebooks install the book, and their links and the README's lead to the site
"""

import base64
import json
import posixpath
import re
import sys
from contextlib import suppress
from pathlib import Path

import nbformat

import d2lpar
from d2lpar import pipeline_schedules, plot, schedules
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


def chapters() -> dict[str, dict[str, str]]:
    """Return each chapter's number, title, question and time, by its name."""
    found = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text = nbformat.read(path, as_version=4).cells[0].source
        pattern = r"# (?P<number>\d+)\. (?P<title>.+)\n\n\*(?P<question>.+)\*\n\n"
        pattern += r"(?:.*\n)*?- \*\*It takes\*\* about (?P<time>\d+ min)"
        found[path.stem] = re.match(pattern, text).groupdict()
    return found


def parts() -> list[tuple[str, str, dict[str, list[str]]]]:
    """Return the parts of the README's table: title, promise, each chapter's files."""
    part = r"^\| \*\*\d\. (.+)\*\* \| \| \*(.+)\* \|$"
    row = r"^\| \[\d\d .+\]\(notebooks/(\w+)\.ipynb\) \| (.*?) ?\| .+ \|$"
    text = (ROOT / "README.md").read_text("utf-8")
    _, *pieces = re.split(part, text, flags=re.M)
    found = []
    for title, promise, rows in zip(pieces[::3], pieces[1::3], pieces[2::3]):
        files = dict(re.findall(row, rows, flags=re.M))
        files = {name: re.findall(r"`([\w.]+)`", said) for name, said in files.items()}
        found.append((title, promise, files))
    return found


def first_figure(name: str, folder: Path) -> str:
    """Return where a chapter's first figure is; one of a cell is written to folder."""
    for cell in nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells:
        drawing = re.search(r"\]\((img/.+?)\)", cell.source)
        if cell.cell_type == "markdown" and drawing:
            return f"/notebooks/{drawing[1]}"
        for output in cell.get("outputs", ()):
            if figure := output.get("data", {}).get("image/png"):
                path = folder / f"{name}.png"
                path.write_bytes(base64.b64decode(figure))
                return f"/{path.relative_to(ROOT)}"
    raise ValueError(f"{name} has no figure")


def cards(folder: Path) -> str:
    """Return the front page's list: for each part, a card per chapter."""
    lines, known = [], chapters()
    for title, promise, files in parts():
        lines += [f"### {title}", "", promise, "", "::::{container} chapters"]
        for name in files:
            said, page = known[name], f"../notebooks/{name}.ipynb"
            alt = f"The first figure of chapter {said['number']}"
            lines += [":::{container} entry", f"![{alt}]({first_figure(name, folder)})"]
            lines += [""]
            lines += [f"{said['number']}\\. [{said['title']}]({page})", ""]
            lines += [f"{said['question']} *{said['time']}*", ":::"]
        lines += ["::::", ""]
    return "\n".join(lines)


def contents() -> str:
    """Return the sidebar's lists of chapters, by part."""
    lines = []
    for title, _, files in parts():
        lines += ["```{toctree}", ":hidden:", f":caption: {title}", ""]
        lines += [*(f"/notebooks/{name}" for name in files), "```", ""]
    return "\n".join(lines)


def public(module: str) -> list[str]:
    """Return what a file offers in d2lpar or d2lpar.ranks; of plot, all."""
    package = d2lpar.ranks if module.startswith("ranks.") else d2lpar
    things = vars(plot if module == "plot" else package).items()
    source = f"d2lpar.{module}"
    ours = [name for name, v in things if getattr(v, "__module__", None) == source]
    return [name for name in ours if name[0] != "_"]


def documented(module: str) -> list[str]:
    """Return the reference's lines for a file."""
    names = ", ".join(public(module))
    options = f".. automodule:: d2lpar.{module}\n   :members: {names}"
    return [f"### d2lpar.{module}", "", "```{eval-rst}", options, "```", ""]


def reference() -> str:
    """Return the reference: by chapter, the public names of the files it writes."""
    lines, known, shown = [], chapters(), []
    for name, modules in [pair for *_, files in parts() for pair in files.items()]:
        if modules:
            title = f"Chapter {known[name]['number']}: {known[name]['title']}"
            lines += [f"## [{title}](../notebooks/{name}.ipynb)", ""]
            lines += [line for module in modules for line in documented(module)]
            shown += modules
    lines += ["## The workshop", "", "What all chapters use.", ""]
    package = ROOT / "d2lpar"
    for path in sorted(package.rglob("[a-z]*.py")):
        module = ".".join(path.relative_to(package).with_suffix("").parts)
        if module not in shown and public(module):
            lines += documented(module)
    return "\n".join(lines)


def absolute_links(text: str, folder: str, repository: str, site: str) -> str:
    """Lead the relative links of a text in ``folder`` to the site or the repository."""
    raw = repository.replace("//github.com", "//raw.githubusercontent.com")

    def absolute(link):
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        if path.endswith((".svg", ".png")):
            return f"]({raw}/hosted/{path})"
        page, suffix = posixpath.splitext(path)
        if suffix in (".md", ".ipynb") and "/" in path:  # it has no page for the others
            return f"]({site}/{page}.html)"
        return f"]({repository}/tree/hosted/{path})"

    return re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", absolute, text)


def hosted(nb, folder: str, repository: str, site: str) -> None:
    """Let a notebook of ``folder`` install the book; lead its links to the site."""
    lines = f"!git clone -q --depth 1 {repository} d2lpar-book\n"
    lines += "%cd -q d2lpar-book/notebooks\n%pip install -q .."
    nb.cells.insert(1, nbformat.v4.new_code_cell(lines, id="hosted"))
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = absolute_links(cell.source, folder, repository, site)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    text = absolute_links(readme.read_text("utf-8"), "", *sys.argv[1:])
    readme.write_text(text.replace("ADDRESS-OF-THIS-REPOSITORY", sys.argv[1]), "utf-8")
    for path in (ROOT / "notebooks").rglob("*.ipynb"):
        nb = nbformat.read(path, as_version=4)
        hosted(nb, path.parent.relative_to(ROOT).as_posix(), *sys.argv[1:])
        nbformat.write(nb, path)
