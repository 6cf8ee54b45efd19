"""Build the book as a site in build/site; no notebook is run.

    python tools/website.py
    D2LPAR_REPOSITORY=https://github.com/NAME/d2lpar python tools/website.py

The second form adds buttons that open a notebook on Binder or Colab, or its source;
D2LPAR_BRANCH names another branch than main. build/pages holds what Sphinx reads: the
pages of docs/, the notebooks, a page per room of the module, and the schedules for the
players.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

from d2lpar import collectives, pipeline

ROOT = Path(__file__).resolve().parents[1]
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
PACKAGE = ROOT / "d2lpar"
GROUND = ["devices", "data", "network", "models", "checkpoint"]
ROOF = ["training", "train_ddp", "plot"]
ROOMS = ["collectives", "ranks", "data_parallel", "mixed_precision", "sharding"]
ROOMS += ["pipeline", "tensor_parallel", "study"]
SCHEDULES = {
    schedule.__name__: schedule
    for schedule in (
        collectives.star,
        collectives.ring,
        collectives.tree,
        collectives.direct,
        collectives.halving_doubling,
        collectives.recursive_doubling,
    )
}
PIPELINES = {
    f.__name__: f for f in (pipeline.sequential, pipeline.gpipe, pipeline.one_f_one_b)
}
MOST_DEVICES, MOST_STAGES, MOST_MICROBATCHES = 8, 6, 12


# What the players show


def exported_schedules() -> dict:
    """Return each schedule for 2 to 8 devices, as lists that JSON can hold.

    ``[name][k]`` has ``chunks``, into how many the tensor is cut, and ``steps``. A step
    is a list of moves, and a move is [src, dst, first chunk, end of the chunks,
    reduce].
    """
    exported = {}
    for name, schedule in SCHEDULES.items():
        exported[name] = {}
        for k in range(2, MOST_DEVICES + 1):
            steps = schedule(k)
            n = collectives.num_chunks(steps)
            moves = [[_as_list(move, n) for move in step] for step in steps]
            exported[name][k] = {"chunks": n, "steps": moves}
    return exported


def _as_list(move: collectives.Move, n: int) -> list[int]:
    chunks = collectives.schedules.chunks_of(move, n)
    return [move.src, move.dst, chunks.start, chunks.stop, int(move.reduce)]


def exported_pipelines() -> dict:
    """Return each pipeline's order, for 2 to 6 stages, 1 to 12 micro-batches.

    ``[name]["p,m"][stage]`` lists a stage's passes in order: i + 1 is the forward pass
    of micro-batch i, and -(i + 1) its backward pass.
    """
    exported = {}
    for name, schedule in PIPELINES.items():
        exported[name] = {}
        for p in range(2, MOST_STAGES + 1):
            for m in range(1, MOST_MICROBATCHES + 1):
                ticks = schedule(p, m)
                stages = [pipeline.schedules.own_actions(ticks, s) for s in range(p)]
                sign = {"forward": 1, "backward": -1}
                orders = [
                    [sign[a.kind] * (a.microbatch + 1) for a in own] for own in stages
                ]
                exported[name][f"{p},{m}"] = orders
    return exported


# Pages that are made from what there is


def reading_order(room: Path) -> list[str]:
    """Return the files of a room in the order in which its docstring names them."""
    text = ast.get_docstring(
        ast.parse((room / "__init__.py").read_text(encoding="utf-8"))
    )
    named = re.findall(r"``(\w+)``", text)
    return [name for name in dict.fromkeys(named) if (room / f"{name}.py").is_file()]


def exported_names(room: Path) -> dict[str, list[str]]:
    """Return the names that a room hands out, by the file that they come from."""
    top = ast.parse((room / "__init__.py").read_text(encoding="utf-8")).body
    lines = [node for node in top if isinstance(node, ast.ImportFrom)]
    return {node.module: [alias.name for alias in node.names] for node in lines}


def module_page(title: str, module: str, files: list[str], names: dict | None) -> str:
    """Return a page of the reference: the room, and then file by file.

    ``names`` has the documented names of each file; None: all that are public.
    """
    page = [title, "=" * len(title), ""]
    if module != "d2lpar":
        page += [f".. automodule:: {module}", "   :no-members:", ""]
    for file in files:
        shown = "" if names is None else " " + ", ".join(names.get(file, []))
        page += [file, "-" * len(file), "", f".. automodule:: {module}.{file}"]
        page += [
            (
                f"   :members:{shown}"
                if shown.strip() or names is None
                else "   :no-members:"
            ),
            "",
        ]
    return "\n".join(page)


def write_module_pages(folder: Path) -> None:
    """Write a page per room, and one each for the ground and the roof."""
    folder.mkdir(parents=True)
    rooms = [PACKAGE / name for name in ROOMS]
    pages = {"ground": module_page("Ground floor", "d2lpar", GROUND, None)}
    for room in rooms:
        module, files = f"d2lpar.{room.name}", reading_order(room)
        pages[room.name] = module_page(room.name, module, files, exported_names(room))
    pages["roof"] = module_page("Roof", "d2lpar", ROOF, None)
    for name, page in pages.items():
        (folder / f"{name}.rst").write_text(page, encoding="utf-8")


def chapters(folder: Path) -> list[dict[str, str]]:
    """Return each chapter's name, title, question, and what it builds."""
    found = []
    for path in sorted(folder.glob("*.ipynb")):
        text = nbformat.read(path, as_version=4).cells[0].source
        chapter = {"name": path.stem, "number": path.stem[:2]}
        chapter["title"] = re.search(r"^# \d+\. (.+)$", text, flags=re.M)[1]
        chapter["question"] = re.search(r"^\*(.+)\*$", text, flags=re.M)[1]
        chapter["built"] = re.search(
            r"^- \*\*You will have built\*\* (.+)$", text, flags=re.M
        )[1]
        chapter["time"] = re.search(
            r"^- \*\*It takes\*\* about (\d+ min)", text, flags=re.M
        )[1]
        found.append(chapter)
    return found


def chapter_list(found: list[dict[str, str]]) -> str:
    """Return the front page's list: each chapter's question and what it builds."""
    entries = []
    for chapter in found:
        link = f"[{chapter['title']}](notebooks/{chapter['name']}.ipynb)"
        entries.append(
            f"{int(chapter['number'])}. **{link}** {chapter['time']}\n\n   "
            f" {chapter['question']}\n\n    *You will have built* {chapter['built']}\n"
        )
    return "\n".join(entries)


PLAYERS = {
    "03_allreduce": (
        "[Step through the schedules](../docs/schedules.md) of this chapter: the page "
        "plays them, and needs no installation."
    ),
    "12_pipeline_schedules": (
        "[Watch the schedules](../docs/pipelines.md) of this chapter at work: "
        "the page plays them, and needs no installation."
    ),
}


def add_player(path: Path, sentence: str) -> None:
    """Let a chapter of the site lead to the page that plays what it builds."""
    nb = nbformat.read(path, as_version=4)
    nb.cells[0].source += f"\n\n{sentence}"
    nbformat.write(nb, path)


def fold_setup(path: Path) -> None:
    """Fold away an exercise notebook's first code cell."""
    nb = nbformat.read(path, as_version=4)
    setup = next(cell for cell in nb.cells if cell.cell_type == "code")
    setup.metadata.tags = [*setup.metadata.get("tags", []), "hide-input"]
    nbformat.write(nb, path)


EXERCISES = """\
# Exercises

A notebook for each chapter, and [a museum of bugs](museum.ipynb). To solve them you
need the book on your own machine: [how to begin](../../docs/students.md).

```{toctree}
:glob:
:titlesonly:

[0-9]*
museum
```
"""


def assemble(pages: Path = PAGES) -> None:
    """Write all that Sphinx reads into a folder."""
    shutil.rmtree(pages, ignore_errors=True)
    ignored = shutil.ignore_patterns(
        ".ipynb_checkpoints", "*.py", "__pycache__", "_static"
    )
    shutil.copytree(ROOT / "docs", pages / "docs", ignore=ignored)
    shutil.copytree(ROOT / "notebooks", pages / "notebooks", ignore=ignored)
    (pages / "notebooks" / "exercises" / "index.md").write_text(
        EXERCISES, encoding="utf-8"
    )
    for name, sentence in PLAYERS.items():
        add_player(pages / "notebooks" / f"{name}.ipynb", sentence)
    for path in (pages / "notebooks" / "exercises").glob("*.ipynb"):
        fold_setup(path)
    write_module_pages(pages / "module")
    for name, data in (
        ("schedules", exported_schedules()),
        ("pipelines", exported_pipelines()),
    ):
        text = json.dumps(data, separators=(",", ":"))
        script = f'<script type="application/json" id="{name}">{text}</script>\n'
        (pages / "docs" / f"{name}.data.html").write_text(script, encoding="utf-8")
    front = (pages / "docs" / "index.md").read_text(encoding="utf-8")
    front = front.replace("](../", "](").replace(
        "CHAPTERS", chapter_list(chapters(ROOT / "notebooks"))
    )
    (pages / "index.md").write_text(front, encoding="utf-8")
    (pages / "docs" / "index.md").unlink()
    # links that lead out of the site, or to a folder
    for page in (pages / "docs").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        text = text.replace("](../README.md)", "](students.md)")
        text = text.replace(
            "](../notebooks/exercises)", "](../notebooks/exercises/index.md)"
        )
        page.write_text(text, encoding="utf-8")


def build(pages: Path = PAGES, site: Path = SITE) -> int:
    """Let Sphinx make a site; return its exit status. A warning is an error."""
    shutil.rmtree(site, ignore_errors=True)
    sphinx = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    folders = [
        "-c",
        str(ROOT / "docs"),
        "-d",
        str(pages.parent / "doctrees"),
        str(pages),
    ]
    return subprocess.run([*sphinx, *folders, str(site)]).returncode


def main() -> int:
    """Assemble and build; return the exit status."""
    assemble()
    status = build()
    if status == 0:
        size = sum(path.stat().st_size for path in SITE.rglob("*") if path.is_file())
        print(
            f"The site is in build/site ({size / 1e6:.0f} MB): open"
            " build/site/index.html"
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
