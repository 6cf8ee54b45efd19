"""Hold the notebooks' cells that show module code equal to the module.

    python tools/saved_cells.py         rewrites the cells that differ, and names them

A cell whose first line is ``#@save d2lpar.<room>.<file>``, or ``#@save d2lpar.<file>``, holds one
or more whole functions or classes of that file, as they stand there, with docstrings cut to their
first line and without their ``@checked`` lines. The module is the authority. To show a function in
a new cell, write the first line and ``def its_name(): ...``, and run the command. It also formats
the notebooks: ruff by itself would respell the mark.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from run_notebooks import ROOT, read

MARK = re.compile(r"#@save d2lpar\.((?:\w+\.)?\w+)")
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LINE_LENGTH = 100


def expected(source: str, package: Path) -> str | None:
    """Return what a code cell should hold, or None where it shows no module code.

    Raises ValueError for a cell that names something the module lacks, or that cannot be kept.
    """
    first_line = source.partition("\n")[0].strip()
    if not re.match(r"#\s?@save", first_line):
        if re.search(r"^#\s?@save", source, flags=re.M):
            raise ValueError("'#@save' has to be the cell's first line")
        return None
    mark = MARK.fullmatch(first_line)
    if not mark:
        raise ValueError(f"{first_line!r} should read '#@save d2lpar.<file>', or <room>.<file>")
    place = f"{mark.group(1).replace('.', '/')}.py"
    if not (package / place).exists():
        raise ValueError(f"{first_line!r} names d2lpar/{place}, which does not exist")
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(f"{first_line!r}: the cell's line {error.lineno} is no Python") from None
    for node in statements:
        if not isinstance(node, NAMED):
            raise ValueError(
                f"{first_line!r}: line {node.lineno} of the cell is neither a function nor a class"
            )
    if not statements:
        raise ValueError(f"{first_line!r}: the cell names no function or class")
    shown = [definition(package, place, node.name) for node in statements]
    return first_line + "\n" + "\n\n\n".join(shown)


def definition(package: Path, place: str, name: str) -> str:
    """Return a top-level function's or class's source, docstrings cut, guards gone."""
    text = (package / place).read_text(encoding="utf-8")
    lines = text.splitlines()
    top = [n for n in ast.parse(text).body if isinstance(n, NAMED) and n.name == name]
    if not top:
        raise ValueError(f"d2lpar/{place} has no function or class {name}")
    node = top[-1]
    first = min([node.lineno] + [d.lineno for d in node.decorator_list])
    last = node.end_lineno
    edits = [(d, [_cut(lines[d.lineno - 1], place)]) for d in _long_docstrings(node)]
    edits += [(guard, []) for guard in _guards(node)]
    for old, new in sorted(edits, key=lambda edit: -edit[0].lineno):  # from below
        lines[old.lineno - 1 : old.end_lineno] = new
        last -= old.end_lineno - old.lineno + 1 - len(new)
    return "\n".join(lines[first - 1 : last])


def check(nb: NotebookNode, package: Path) -> list[str]:
    """Return one complaint for each cell of the notebook that differs from the module."""
    return [complaint for _, _, complaint in _differences(nb, package)]


def rewrite(nb: NotebookNode, package: Path) -> list[str]:
    """Rewrite in place the cells that differ; return a line about each. Outputs stay."""
    report = []
    for cell, text, complaint in _differences(nb, package):
        if text is None:
            raise ValueError(complaint)
        cell.source = text
        report.append(complaint)
    return report


def _differences(nb: NotebookNode, package: Path):
    """Yield (cell, what it should hold or None, complaint) for every cell that differs."""
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, 1):
        try:
            text = expected(cell.source, package)
        except ValueError as error:
            yield cell, None, f"code cell {number}: {error}"
            continue
        if text is not None and text != cell.source.rstrip("\n"):
            mark = cell.source.partition("\n")[0]
            yield cell, text, f"code cell {number} ({mark}) differs from the module"


def _long_docstrings(node: ast.AST) -> list[ast.Expr]:
    named = [n for n in ast.walk(node) if isinstance(n, NAMED) and ast.get_docstring(n) is not None]
    return [n.body[0] for n in named if n.body[0].end_lineno > n.body[0].lineno]


def _guards(node: ast.AST) -> list[ast.expr]:
    """Return the ``@checked(...)`` decorators of a definition and of those inside it."""
    decorators = [d for n in ast.walk(node) for d in getattr(n, "decorator_list", [])]
    return [d for d in decorators if ast.unparse(d).startswith("checked(")]


def _cut(line: str, place: str) -> str:
    quotes = re.search(r"\"\"\"|'''", line).group()
    space = " " if line.rstrip().endswith(quotes[0]) else ""  # or the text's quote joins ours
    cut = line.rstrip() + space + quotes
    if len(cut) > LINE_LENGTH or cut.strip() == 2 * quotes:
        raise ValueError(
            f"d2lpar/{place}: a docstring's first line has to say it in 1 to"
            f" {LINE_LENGTH - len(quotes)} columns, since a cell shows it alone: {line.strip()}"
        )
    return cut


def formatted(text: str) -> str:
    """Return a notebook's JSON with its code formatted by ruff, the marks of saved cells kept."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "notebook.ipynb", "-"]
    ran = subprocess.run(
        command, input=text, capture_output=True, text=True, encoding="utf-8", cwd=ROOT
    )
    if ran.returncode:
        raise ValueError(ran.stderr.strip())
    return ran.stdout.replace('"# @save ', '"#@save ')


def main() -> int:
    """Rewrite and format every notebook that differs, and return the exit status."""
    status, changed = 0, False
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        nb = read(path)
        try:
            report = rewrite(nb, ROOT / "d2lpar")
            text = path.read_text(encoding="utf-8") if not report else nbformat.writes(nb) + "\n"
            neat = formatted(text)
        except ValueError as error:
            print(f"{path.name}, {error}")
            status = 1
            continue
        for line in report:
            print(f"{path.name}, {line}: rewritten")
        if neat != text:
            print(f"{path.name}: formatted")
        if report or neat != text:
            path.write_text(neat, encoding="utf-8")
        changed = changed or bool(report)
    print("Run what has changed: make refresh" if changed else "No cell has been rewritten.")
    return status


if __name__ == "__main__":
    sys.exit(main())
