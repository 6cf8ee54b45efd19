"""Print how large the module is, room by room, and how much of it the chapters show.

    python tools/size.py

A line of code is one that is neither blank, nor only a comment, nor part of a docstring
or of an import. A name is public when it is defined at the top of a file and does not
begin with ``_``. What chapters show are the lines of code in their "@save" cells.
"""

import ast
import re
import sys
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from run_notebooks import ROOT, read
from saved_cells import MARK, NAMED, own_base

PACKAGE = ROOT / "d2lpar"
HEAD = "room", "files", "lines", "code", "docstring", "public", "shown"
ALGORITHMS = "collectives", "data_parallel", "mixed_precision", "sharding", "pipeline"
ALGORITHMS += ("tensor_parallel",)
DOCUMENTED = (ast.Module, *NAMED)


class Size(NamedTuple):
    """Files, lines, lines of code and of docstrings, names, lines shown."""

    files: int
    lines: int
    code: int
    docstring: int
    public: int
    shown: int

    def __add__(self, other: "Size") -> "Size":
        return Size(*map(sum, zip(self, other, strict=True)))


def span(node: ast.AST) -> set[int]:
    """Return the numbers of a node's lines, decorators included."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return set(range(first, node.end_lineno + 1))


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines of code in ``text``."""
    nodes = list(ast.walk(ast.parse(text)))
    bodies = [
        n.body[0] for n in nodes if isinstance(n, DOCUMENTED) and ast.get_docstring(n)
    ]
    left_out = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    code = {
        i for i, line in enumerate(text.splitlines(), 1) if re.match(r"\s*[^\s#]", line)
    }
    return code.difference(*map(span, bodies + left_out))


def size_of(path: Path, shown: int = 0) -> Size:
    """Count one file, of which chapters show ``shown`` lines of code."""
    text = path.read_text("utf-8")
    nodes = list(ast.walk(tree := ast.parse(text)))
    bodies = [
        n.body[0] for n in nodes if isinstance(n, DOCUMENTED) and ast.get_docstring(n)
    ]
    tops = [node for node in tree.body if isinstance(node, NAMED)]
    return Size(
        files=1,
        lines=len(text.splitlines()),
        code=len(code_lines(text)),
        docstring=len(set().union(*map(span, bodies))),
        public=sum(not node.name.startswith("_") for node in tops),
        shown=shown,
    )


def shown_lines() -> dict[str, int]:
    """Return how many lines of code chapters show: {"ranks/moves.py": 60, …}.

    What two chapters show counts once.
    """
    found = {}  # by file, then by name
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in read(path).cells:
            if mark := MARK.match(cell.source):
                names = found.setdefault(f"{mark.group(1).replace('.', '/')}.py", {})
                lines = code_lines(cell.source)
                for node in ast.parse(cell.source).body:
                    methods = [
                        n for n in getattr(node, "body", ()) if isinstance(n, NAMED)
                    ]
                    parts = methods if isinstance(node, ast.ClassDef) else [node]
                    for part in parts:
                        names[node.name, part.name] = len(span(part) & lines)
                    if not own_base(node):  # a class's header and attributes
                        rest = (span(node) & lines).difference(*map(span, parts))
                        names[node.name, ""] = len(rest)
    return {place: sum(names.values()) for place, names in found.items()}


def functions(path: Path) -> list[tuple[int, str]]:
    """Return the functions of a file with their lines of code."""
    lines, found = path.read_text("utf-8").splitlines(), []
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef):
            own = span(node) - (
                span(node.body[0]) if ast.get_docstring(node) else set()
            )
            code = [i for i in own if re.match(r"\s*[^\s#]", lines[i - 1])]
            found.append((len(code), f"{path.relative_to(PACKAGE)}: {node.name}"))
    return found


def main() -> int:
    """Print the table, and the largest file and function."""
    paths, shown, rooms = sorted(PACKAGE.rglob("*.py")), shown_lines(), {}
    for path in paths:
        place = path.relative_to(PACKAGE).as_posix()
        room = place.partition("/")[0] if "/" in place else "(outside)"
        size = size_of(path, shown.get(place, 0))
        rooms[room] = rooms[room] + size if room in rooms else size
    total = Size(*map(sum, zip(*rooms.values(), strict=True)))
    row = "{:16}" + "{:>10}" * (len(HEAD) - 1)
    print(row.format(*HEAD))
    for room, size in [*rooms.items(), ("in all", total)]:
        print(row.format(room, *size))
    algorithms = Size(
        *map(sum, zip(*(rooms[room] for room in ALGORITHMS), strict=True))
    )
    print(f"shown: {total.shown / total.code:.0%} of all lines of code, and ", end="")
    print(
        f"{algorithms.shown / algorithms.code:.0%} of those of {', '.join(ALGORITHMS)}"
    )
    print(f"docstrings: {total.docstring / total.lines:.0%} of all lines")
    largest = max(paths, key=lambda path: size_of(path).lines)
    print(
        f"largest file: {largest.relative_to(PACKAGE)}, {size_of(largest).lines} lines"
    )
    for number, name in sorted(
        chain.from_iterable(map(functions, paths)), reverse=True
    )[:3]:
        print(f"largest functions: {name}, {number} lines of code")
    tests = [
        len(path.read_text("utf-8").splitlines())
        for path in (ROOT / "tests").rglob("*.py")
    ]
    print(f"tests: {sum(tests)} lines in {len(tests)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
