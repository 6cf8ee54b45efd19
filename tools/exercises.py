"""Make the exercises that students fill in from masters with solutions.

python tools/exercises.py                 rewrites notebooks/exercises/
python tools/exercises.py --course DIR    writes a folder for nbgrader

The masters, tests/exercises/*.ipynb, are marked as nbgrader wants it. Their texts are
those of the chapters, and are rewritten, too. By hand, so that students and CI need no
nbgrader.
"""

import copy
import re
import shutil
import sys
import textwrap
from functools import cache
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell
from saved_cells import ROOT, formatted

from d2lpar.checks import STUB

MASTERS = ROOT / "tests" / "exercises"
CHAPTERS = ROOT / "notebooks"
STUDENTS = CHAPTERS / "exercises"
TEXT_STUB = "YOUR ANSWER HERE"
REGION = r"^([ \t]*)### BEGIN {0}$\n(.*?)^[ \t]*### END {0}$\n?"
SOLUTION = re.compile(REGION.format("SOLUTION"), flags=re.M | re.S)
HIDDEN = re.compile(REGION.format("HIDDEN TESTS"), flags=re.M | re.S)
# The settings of a course. The stubs must be ours, so that both ways hand out the same.
CONFIG = rf'''"""The settings of a course with the exercises of d2lpar."""

import re

from nbgrader import preprocessors

HIDDEN = re.compile({HIDDEN.pattern!r}, flags=re.M | re.S)


class PutBack(preprocessors.OverwriteCells):
    """Put the hidden tests back; warn only of a check that a student has changed.

    nbgrader's own warns of each check that has hidden tests, changed or not.
    """

    def preprocess_cell(self, cell, resources, index):
        book = self.gradebook.find_notebook(self.notebook_id, self.assignment_id)
        sources = {{source.name: source.source or "" for source in book.source_cells}}
        source = sources.get(cell.metadata.get("nbgrader", {{}}).get("grade_id"), "")
        if cell.source.split() == HIDDEN.sub("", source).split():
            cell.source = source
        return super().preprocess_cell(cell, resources, index)


c = get_config()
c.Autograde.sanitize_preprocessors = [
    preprocessors.ClearOutput,
    preprocessors.DeduplicateIds,
    preprocessors.OverwriteKernelspec,
    PutBack,
    preprocessors.CheckCellMetadata,
]
c.CourseDirectory.course_id = "d2lpar"
c.ClearSolutions.code_stub = {{"python": {STUB!r}}}
c.ClearSolutions.text_stub = {TEXT_STUB!r}
# nbgrader zip_collect: files named such as ada_03_allreduce.ipynb
named = r".*?(?P<student_id>[^/]+?)_(?P<file_id>\d\d_\w+|museum)"
c.FileNameCollectorPlugin.named_regexp = named
c.ExecutePreprocessor.timeout = 120  # seconds per cell: twice what a launch may take
c.ExecutePreprocessor.extra_arguments = ["--Application.log_level=ERROR"]
'''


@cache
def masters() -> dict[str, NotebookNode]:
    """Return all masters by name."""
    paths = sorted(MASTERS.glob("*.ipynb"))
    return {path.stem: nbformat.read(path, as_version=4) for path in paths}


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
    for cell in nb.cells:
        stub = STUB if cell.cell_type == "code" else TEXT_STUB
        cell.source = unsolved(cell.source, stub)
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
    last = nbformat.read(chapter, as_version=4).cells[-1].source
    preface, *items = re.split(
        r"^\d+\. ", last.partition("## Exercises\n")[2], flags=re.M
    )
    preface = re.sub(r"^.*\[With checks\].*$", "", preface, flags=re.M).strip()
    items = [textwrap.dedent("   " + item).strip() for item in items]
    items = [item.replace("](../", "](../../") for item in items]  # a folder deeper
    return {"": preface} | {f"## Exercise {i}": item for i, item in enumerate(items, 1)}


def completed(master: NotebookNode, name: str) -> NotebookNode:
    """Return a master with the chapter's texts and the tags of its cells.

    Setup and checks are folded, in JupyterLab and on the site. Without their tag,
    JupyterLab would stop at the first exercise that is not solved.
    """
    nb, texts = copy.deepcopy(master), chapter_texts(name)
    nb.cells = [cell for cell in nb.cells if cell.id != "preface"]
    if preface := texts.get(""):
        nb.cells.insert(2, new_markdown_cell(preface, id="preface"))
    for cell in nb.cells:
        heading = cell.source.partition("\n")[0]
        if role(cell) == "text" and heading in texts:
            cell.source = f"{heading}\n\n{texts[heading]}"
        elif role(cell) == "solution":
            cell.metadata.tags = ["raises-exception"]
        elif role(cell) in ("setup", "check"):
            cell.metadata.jupyter = {"source_hidden": True}
            check = ["raises-exception"] if role(cell) == "check" else []
            cell.metadata.tags = ["hide-input", *check]
    return nb


def expected() -> dict[Path, str]:
    """Return the text of each master and of what is made from it, formatted."""
    texts = {}
    for name, master in masters().items():
        nb = completed(master, name)
        for target, made in ((MASTERS, nb), (STUDENTS, student(nb))):
            texts[target / f"{name}.ipynb"] = formatted(nbformat.writes(made) + "\n")
    return texts


def make_course(folder: Path) -> None:
    """Write a course for nbgrader; never over a source that is already there."""
    for path in sorted(MASTERS.glob("*.ipynb")):
        target = folder / "source" / path.stem / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            print(f"{target}: there already, and left as it is")
        else:
            shutil.copyfile(path, target)
    if not (config := folder / "nbgrader_config.py").exists():
        config.write_text(CONFIG, encoding="utf-8")
    count = len(list(folder.glob("source/*/*.ipynb")))
    print(f"A course with {count} assignments: {folder}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--course"]:
        make_course(Path(sys.argv[2]))
        sys.exit()
    for path, text in expected().items():
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: written")
