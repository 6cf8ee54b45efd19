"""Make the exercises that students fill in from masters with solutions.

    python tools/exercises.py                 rewrite notebooks/exercises/
    python tools/exercises.py --check         name what differs from the masters
    python tools/exercises.py --course DIR    write a folder for nbgrader

The masters, tests/exercises/*.ipynb, are marked as nbgrader wants it: a region between
the lines ``### BEGIN SOLUTION`` and ``### END SOLUTION`` becomes one line that raises,
and the lines between ``### BEGIN HIDDEN TESTS`` and ``### END HIDDEN TESTS`` are left
out. None of this needs nbgrader. The texts of the exercises are those of the chapters:
a master's are rewritten, too.
"""

import argparse
import copy
import re
import shutil
import sys
import textwrap
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from run_notebooks import METADATA, ROOT, read
from saved_cells import formatted

from d2lpar.study.checks import STUB

MASTERS = ROOT / "tests" / "exercises"
CHAPTERS = ROOT / "notebooks"
STUDENTS = CHAPTERS / "exercises"
TEXT_STUB = "YOUR ANSWER HERE"
REGION = r"^([ \t]*)### BEGIN {0}$\n(.*?)^[ \t]*### END {0}$\n?"
SOLUTION = re.compile(REGION.format("SOLUTION"), flags=re.M | re.S)
HIDDEN = re.compile(REGION.format("HIDDEN TESTS"), flags=re.M | re.S)

# What a course needs to know. The stubs must be ours, so that both ways give the same
# notebook.
CONFIG = rf'''"""The settings of a course with the exercises of d2lpar."""

c = get_config()
c.CourseDirectory.course_id = "d2lpar"
c.ClearSolutions.code_stub = {{"python": {STUB!r}}}
c.ClearSolutions.text_stub = {TEXT_STUB!r}
# nbgrader zip_collect: files named such as ada_03_allreduce.ipynb
named = r".*?(?P<student_id>[^/]+?)_(?P<file_id>\d\d_\w+|museum)"
c.FileNameCollectorPlugin.named_regexp = named
c.ExecutePreprocessor.timeout = 120  # seconds per cell: twice what a launch may take
c.ExecutePreprocessor.extra_arguments = ["--Application.log_level=ERROR"]
'''


def role(cell: NotebookNode) -> str:
    """Return what a master's cell is: text, setup, solution, check or manual."""
    marks = cell.metadata.get("nbgrader", {})
    names = {(True, False): "solution", (False, True): "check", (True, True): "manual"}
    kind = names.get((marks.get("solution", False), marks.get("grade", False)))
    return kind or ("setup" if cell.cell_type == "code" else "text")


def solution(source: str) -> str:
    """Return the solution in a cell, without the marks."""
    return SOLUTION.sub(r"\2", source)


def unsolved(source: str, stub: str = STUB) -> str:
    """Return a cell as students get it."""
    return SOLUTION.sub(rf"\1{stub}\n", HIDDEN.sub("", source)).rstrip("\n")


def student(master: NotebookNode) -> NotebookNode:
    """Return the notebook that students get."""
    nb = copy.deepcopy(master)
    nb.metadata = copy.deepcopy(METADATA)
    for cell in nb.cells:
        cell.source = unsolved(
            cell.source, STUB if cell.cell_type == "code" else TEXT_STUB
        )
        if cell.cell_type == "code":
            cell.update(outputs=[], execution_count=None)
        if cell.metadata.get("nbgrader", {}).get("locked"):
            cell.metadata.update(editable=False, deletable=False)
    return nb


def chapter_texts(name: str) -> dict[str, str]:
    """Return a chapter's exercises by heading, and what stands before them.

    The museum belongs to no chapter, and has none.
    """
    chapter = CHAPTERS / f"{name}.ipynb"
    if not chapter.exists():
        return {}
    section = read(chapter).cells[-1].source.partition("## Exercises\n")[2]
    preface, *items = re.split(r"^\d+\. ", section, flags=re.M)
    preface = re.sub(r"^.*\[With checks\].*$", "", preface, flags=re.M).strip()
    items = [textwrap.dedent("   " + item).strip() for item in items]
    return {"": preface} | {f"## Exercise {i}": item for i, item in enumerate(items, 1)}


def completed(master: NotebookNode, name: str) -> NotebookNode:
    """Return a master with the chapter's texts, and such tags that "run all" runs all.

    Without the tag, JupyterLab stops at the first exercise that is not solved.
    """
    nb, texts = copy.deepcopy(master), chapter_texts(name)
    for cell in nb.cells:
        heading = cell.source.partition("\n")[0]
        if cell.id == "preface":
            cell.source = texts[""]
        elif role(cell) == "text" and heading in texts:
            cell.source = f"{heading}\n\n{texts[heading]}"
        elif role(cell) in ("solution", "check"):
            cell.metadata.tags = ["raises-exception"]
    return nb


def expected() -> dict[Path, str]:
    """Return the text of each master and of what is made from it, formatted."""
    texts = {}
    for path in sorted(MASTERS.glob("*.ipynb")):
        master = completed(read(path), path.stem)
        for target, nb in ((path, master), (STUDENTS / path.name, student(master))):
            texts[target] = formatted(nbformat.writes(nb) + "\n")
    return texts


def differences() -> list[Path]:
    """Return the files that are missing, stale, not formatted, or left over."""
    texts = expected()
    left_over = set(STUDENTS.glob("*.ipynb")) - set(texts)
    stale = [
        p for p, text in texts.items() if not p.exists() or p.read_text("utf-8") != text
    ]
    return sorted([*left_over, *stale])


def write() -> None:
    """Make ``differences`` empty, and name the files that change."""
    texts = expected()
    if not texts:
        sys.exit(
            f"There are no masters in {MASTERS}: students' notebooks are made from"
            " them."
        )
    for path in differences():
        if path in texts:
            path.parent.mkdir(exist_ok=True)
            path.write_text(texts[path], encoding="utf-8")
        else:
            path.unlink()
        print(f"{path.relative_to(ROOT)}: {'written' if path in texts else 'removed'}")


def make_course(folder: Path) -> None:
    """Write a course for nbgrader; never over a source that is already there."""
    for path in sorted(MASTERS.glob("*.ipynb")):
        target = folder / "source" / path.stem / path.name
        if target.exists():
            print(f"{target}: there already, and left as it is")
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    config = folder / "nbgrader_config.py"
    if not config.exists():
        config.write_text(CONFIG, encoding="utf-8")
    print(
        f"A course with {len(list(folder.glob('source/*/*.ipynb')))} assignments:"
        f" {folder}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing, name what differs"
    )
    parser.add_argument(
        "--course", type=Path, metavar="DIR", help="write a course for nbgrader"
    )
    options = parser.parse_args(arguments)
    if options.course:
        make_course(options.course)
    elif options.check:
        for path in (stale := differences()):
            print(
                f"{path.relative_to(ROOT)} is not what the masters give: make exercises"
            )
        return int(bool(stale))
    else:
        write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
