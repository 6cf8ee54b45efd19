"""Hold the cells that begin with "#@save ddp" to d2lpar/ddp.py, word for word.

python tools/saved_cells.py    rewrites the cells that differ, and formats notebooks

A new cell needs only the mark and ``def its_name(): ...``. Tools such as nbdev go the
other way: here the module is the authority.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]


def chapter_of(module: str) -> int:
    """Return which chapter writes a file, or 0 for the workshop: its first line says.

    The workshop is what all chapters use; of it they show what they explain.
    """
    said = re.match(r'"""Chapter (\d+)\. ', module)
    return int(said[1]) if said else 0


def definitions(text: str) -> dict[str, str]:
    """Return by name what stands at the top of a file, with the comment above it."""
    lines, found, end = text.splitlines(), {}, 0
    for node in ast.parse(text).body:
        first = min(n.lineno for n in (node, *getattr(node, "decorator_list", ())))
        above = "\n".join(lines[end : first - 1]).rpartition("\n\n")[2]
        source = "\n".join([above, *lines[first - 1 : node.end_lineno]]).strip("\n")
        end = node.end_lineno
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.Expr):
            name = getattr(node, "name", ast.unparse(node).partition(" = ")[0])
            found[name] = source
    return found


def mend(notebooks: list, package: Path = ROOT / "d2lpar") -> Iterator[str]:
    """Yield a complaint for each saved cell that differs, and set it right in place.

    Every definition of a chapter's file stands in one cell of this chapter.
    """
    paths = {path.relative_to(package): path for path in package.rglob("*.py")}
    texts = {
        ".".join(name.with_suffix("").parts): path.read_text("utf-8")
        for name, path in paths.items()
    }
    chapters = {file: chapter_of(text) for file, text in texts.items()}
    shown = {
        f"{name} of {file}": 0
        for file, text in texts.items()
        if chapters[file]
        for name in definitions(text)
    }
    for nb in notebooks:
        chapter = int(re.match(r"# (\d+)\. ", nb.cells[0].source)[1])
        for cell in nb.cells:
            mark = re.match(r"#@save ([\w.]+)\n", cell.source)
            if not mark:
                continue
            file = mark[1]
            if chapters[file] not in (0, chapter):
                yield f"{file} is chapter {chapters[file]}'s, and not {chapter}'s"
            there, names = definitions(texts[file]), definitions(cell.source)
            if unknown := ", ".join(names.keys() - there.keys()):
                yield f"{file} has no {unknown}"
                continue
            source = mark[0] + "\n\n\n".join(there[name] for name in names)
            if cell.source != source:
                yield f"{', '.join(names)}: not word for word that of {file}"
                cell.source = source
            for name in names:
                shown[f"{name} of {file}"] = shown.get(f"{name} of {file}", 0) + 1
    for name, count in shown.items():
        if count != 1:
            yield f"{name} stands in {count} cells, and not in one"


def formatted(text: str) -> str:
    """Return a notebook's JSON, formatted by ruff, which would respell the marks."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename=x.ipynb", "-"]
    ran = subprocess.check_output(command, input=text, cwd=ROOT, text=True)
    return ran.replace('"# @save ', '"#@save ')


if __name__ == "__main__":
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    notebooks = [nbformat.read(path, as_version=4) for path in paths]
    print(*mend(notebooks), sep="\n")
    for path, nb in zip(paths, notebooks, strict=True):
        text = formatted(nbformat.writes(nb) + "\n")
        if text != path.read_text("utf-8"):
            path.write_text(text, "utf-8")
            print(f"{path.name}: written. To run it: make refresh ONLY={path.name[:2]}")
    sys.exit(any(mend(notebooks)))  # what is left is to be mended by hand
