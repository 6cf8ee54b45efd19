"""Hold the cells that begin with "#@save ddp" to d2lpar/ddp.py, word for word.

python tools/saved_cells.py    rewrites the cells that differ, and formats notebooks

A new cell needs only the mark and ``def its_name(): ...``. Tools such as nbdev go the
other way: here the module is the authority.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
# Of these, chapters show what they explain; of all others every definition.
WORKSHOP = "checkpoint train_ddp devices data models launch worker transport lanes"


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
    """Yield a complaint for each saved cell that differs, and set it right in place."""
    shown = {}
    for cell in [cell for nb in notebooks for cell in nb.cells]:
        mark = re.match(r"#@save ([\w.]+)\n", cell.source)
        if not mark:
            continue
        file = mark[1]
        module = package / f"{file.replace('.', '/')}.py"
        there, names = definitions(module.read_text("utf-8")), definitions(cell.source)
        if unknown := ", ".join(names.keys() - there.keys()):
            yield f"{file} has no {unknown}"
            continue
        source = mark[0] + "\n\n\n".join(there[name] for name in names)
        if cell.source != source:
            yield f"{', '.join(names)}: not word for word that of {file}"
            cell.source = source
        all_names = () if file.split(".")[-1] in WORKSHOP.split() else there
        shown.setdefault(file, Counter(dict.fromkeys(all_names, 0))).update(list(names))
    for file, counts in shown.items():
        for name in (name for name, count in counts.items() if count != 1):
            yield f"{name} of {file} stands in {counts[name]} cells, and not in one"


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
