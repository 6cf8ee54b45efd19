"""Hold the notebooks' cells that show module code equal to the module.

    python tools/saved_cells.py         rewrites the cells that differ, and names them

A cell whose first line is ``#@save d2lpar.<room>.<file>``, or ``#@save d2lpar.<file>``,
holds one or more functions or classes of that file, as they stand there, with
docstrings cut to their first line and without their ``@checked`` lines. The module is
the authority. To show a function in a new cell, write the first line and ``def
its_name(): ...``, and run the command. It also formats the notebooks: ruff by itself
would respell the mark.

A long class is shown in pieces: ``class Name(Name):`` with stubs of some methods goes
on with the class of an earlier cell. Its first piece is ``class Name:``, which has the
attributes and those of the methods that the cell names, or ``class Name(file.Name):``,
which inherits from the module's class the methods that the chapter does not show.
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
LINE_LENGTH = 88


def expected(
    source: str, package: Path, in_pieces: set[str] = frozenset()
) -> str | None:
    """Return what a code cell should hold, or None where it shows no module code.

    ``in_pieces`` are the classes that the notebook shows in pieces. Raises ValueError
    for a cell that names something the module lacks, or that cannot be kept.
    """
    first_line = source.partition("\n")[0].strip()
    if not re.match(r"#\s?@save", first_line):
        if re.search(r"^#\s?@save", source, flags=re.M):
            raise ValueError("'#@save' has to be the cell's first line")
        return None
    mark = MARK.fullmatch(first_line)
    if not mark:
        raise ValueError(
            f"{first_line!r} should read '#@save d2lpar.<file>', or <room>.<file>"
        )
    place = f"{mark.group(1).replace('.', '/')}.py"
    if not (package / place).exists():
        raise ValueError(f"{first_line!r} names d2lpar/{place}, which does not exist")
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(
            f"{first_line!r}: the cell's line {error.lineno} is no Python"
        ) from None
    for node in statements:
        if not isinstance(node, NAMED):
            raise ValueError(
                f"{first_line!r}: line {node.lineno} of the cell is neither a function"
                " nor a class"
            )
    if not statements:
        raise ValueError(f"{first_line!r}: the cell names no function or class")
    shown = [definition(package, place, node, in_pieces) for node in statements]
    return first_line + "\n" + "\n\n\n".join(shown)


def definition(package: Path, place: str, stub: ast.stmt, in_pieces: set[str]) -> str:
    """Return the source of what a cell's ``stub`` names, docstrings cut."""
    text = (package / place).read_text(encoding="utf-8")
    lines = text.splitlines()
    top = [
        n for n in ast.parse(text).body if isinstance(n, NAMED) and n.name == stub.name
    ]
    if not top:
        raise ValueError(f"d2lpar/{place} has no function or class {stub.name}")
    node = top[-1]
    first = min([node.lineno] + [d.lineno for d in node.decorator_list])
    kept = {i: lines[i - 1] for i in range(first, node.end_lineno + 1)}
    if own_base(stub) or node.name in in_pieces:
        leave_piece(kept, node, stub, place)
    for guard in _guards(node):
        drop(kept, guard.lineno, guard.end_lineno)
    for text in _long_docstrings(node):
        if text.lineno in kept:
            drop(kept, text.lineno, text.end_lineno)
            kept[text.lineno] = _cut(lines[text.lineno - 1], place)
    return "\n".join(kept[i] for i in sorted(kept))


def drop(kept: dict[int, str], first: int, last: int) -> None:
    """Remove the lines from ``first`` to ``last``, inclusive."""
    for line in range(first, last + 1):
        kept.pop(line, None)


def own_base(node: ast.stmt) -> str | None:
    """Return the base of ``class Name(Name)`` or ``class Name(file.Name)``."""
    bases = [ast.unparse(base) for base in getattr(node, "bases", [])]
    return next((base for base in bases if base.rpartition(".")[2] == node.name), None)


def leave_piece(
    kept: dict[int, str], node: ast.ClassDef, stub: ast.ClassDef, place: str
) -> None:
    """Leave of a class what ``stub`` has, and in its first piece the attributes."""
    base = own_base(stub)
    methods = {n.name: n for n in node.body if isinstance(n, NAMED)}
    named = {n.name for n in stub.body if isinstance(n, NAMED)}
    if unknown := sorted(named - set(methods)):
        raise ValueError(
            f"d2lpar/{place}: {node.name} has no method {', '.join(unknown)}"
        )
    for name in named if base and "." in base else ():
        if "super()" in ast.unparse(methods[name]):
            raise ValueError(
                f"d2lpar/{place}: super() in {node.name}.{name} would be the module's"
            )
    end = node.body[0].lineno - 1  # the last line before the statement at hand
    for member in node.body:
        if member.name not in named if isinstance(member, NAMED) else base:
            drop(kept, end + 1, member.end_lineno)
        end = member.end_lineno
    if base:
        first = min(kept)
        drop(kept, first, node.body[0].lineno - 1)
        kept[first] = f"class {node.name}({base}):"
        while kept and not kept[(blank := sorted(kept)[1])].strip():
            del kept[blank]


def check(nb: NotebookNode, package: Path) -> list[str]:
    """Return one complaint for each cell that differs from the module."""
    return [complaint for _, _, complaint in _differences(nb, package)]


def rewrite(nb: NotebookNode, package: Path) -> list[str]:
    """Rewrite in place the cells that differ; return a line about each."""
    report = []
    for cell, text, complaint in _differences(nb, package):
        if text is None:
            raise ValueError(complaint)
        cell.source = text
        report.append(complaint)
    return report


def _differences(nb: NotebookNode, package: Path):
    """Yield (cell, what it should hold or None, complaint) for each difference."""
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    in_pieces = set(
        re.findall(
            r"^class (\w+)\(\1\):", "\n".join(c.source for c in code), flags=re.M
        )
    )
    for number, cell in enumerate(code, 1):
        try:
            text = expected(cell.source, package, in_pieces)
        except ValueError as error:
            yield cell, None, f"code cell {number}: {error}"
            continue
        if text is not None and text != cell.source.rstrip("\n"):
            mark = cell.source.partition("\n")[0]
            yield cell, text, f"code cell {number} ({mark}) differs from the module"


def _long_docstrings(node: ast.AST) -> list[ast.Expr]:
    named = [
        n
        for n in ast.walk(node)
        if isinstance(n, NAMED) and ast.get_docstring(n) is not None
    ]
    return [n.body[0] for n in named if n.body[0].end_lineno > n.body[0].lineno]


def _guards(node: ast.AST) -> list[ast.expr]:
    """Return the ``@checked(...)`` decorators of a definition, and inside it."""
    decorators = [d for n in ast.walk(node) for d in getattr(n, "decorator_list", [])]
    return [d for d in decorators if ast.unparse(d).startswith("checked(")]


def _cut(line: str, place: str) -> str:
    quotes = re.search(r"\"\"\"|'''", line).group()
    # or the text's quote joins ours
    space = " " if line.rstrip().endswith(quotes[0]) else ""
    cut = line.rstrip() + space + quotes
    if len(cut) > LINE_LENGTH or cut.strip() == 2 * quotes:
        raise ValueError(
            f"d2lpar/{place}: a docstring's first line has to say it in 1 to"
            f" {LINE_LENGTH - len(quotes)} columns, since a cell shows it alone:"
            f" {line.strip()}"
        )
    return cut


def formatted(text: str) -> str:
    """Return a notebook's JSON, formatted by ruff, with the marks of saved cells."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "--stdin-filename",
        "notebook.ipynb",
        "-",
    ]
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
            text = (
                path.read_text(encoding="utf-8")
                if not report
                else nbformat.writes(nb) + "\n"
            )
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
    print(
        "Run what has changed: make refresh"
        if changed
        else "No cell has been rewritten."
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
