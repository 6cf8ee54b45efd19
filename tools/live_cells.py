"""Hold the notebooks' "@save" cells to being alive: what they show has to be what runs.

    python tools/live_cells.py [03 07]    runs chapters, names what was never entered

Without a run, ``dead`` follows the names: from each one that a saved cell defines there
has to be a way to a statement that runs, and no import may put the module's own in its
place. The command also sees what is reached but not entered, such as a method that
nothing calls. It has each saved function and method note its name in a file when it is
entered, in whatever process that happens.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import nbformat
import run_notebooks
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from saved_cells import NAMED

BUILD = run_notebooks.ROOT / "build" / "live"
RECORDER = """
def _entered(name, path={path!r}, seen=set()):
    if name not in seen:
        seen.add(name)
        with open(path, "a") as record:
            record.write(name + "\\n")
"""


def statements(nb: NotebookNode) -> Iterator[tuple[bool, ast.stmt]]:
    """Yield (whether its cell is saved, statement) for each at the top of a cell."""
    for cell in nb.cells:
        if cell.cell_type == "code" and not cell.source.startswith("%%"):
            lines = cell.source.splitlines()
            lines = ["pass" if line.startswith(("%", "!")) else line for line in lines]
            for statement in ast.parse("\n".join(lines)).body:
                yield cell.source.startswith("#@save"), statement


def loaded(node: ast.AST) -> set[str]:
    """Return the names that a piece of code reads."""
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    return {n.id for n in names if isinstance(n.ctx, ast.Load)}


def dead(nb: NotebookNode) -> Iterator[str]:
    """Complain of each name of a saved cell that nothing runs, or that is imported."""
    saved, imported, uses, waiting = [], set(), defaultdict(set), set()
    for is_saved, node in statements(nb):
        if isinstance(node, NAMED):
            uses[node.name] |= loaded(node)
            saved += [node.name] * (is_saved and node.name not in saved)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {alias.asname or alias.name for alias in node.names}
        else:
            waiting |= loaded(node)
    reached = set()
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting |= uses[name] - reached
    for name in saved:
        if name in imported:
            yield f"{name} is shown, and also imported"
        if name not in reached:
            yield f"{name} is shown, and no cell that runs something leads to it"


def functions(cell: NotebookNode) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield (dotted name, definition) of a saved cell's functions and methods."""
    for node in ast.parse(cell.source).body if cell.source.startswith("#@save") else ():
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." * isinstance(node, ast.ClassDef)
        for member in members:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + member.name, member


def recording(nb: NotebookNode, record: Path) -> list[str]:
    """Let saved functions note in ``record`` that they are entered; name them all."""
    names = []
    for cell in nb.cells:
        if cell.cell_type != "code":
            continue
        lines = cell.source.splitlines()
        for name, node in reversed(list(functions(cell))):
            names.append(name)
            body = (
                node.body[1:]
                if ast.get_docstring(node) and node.body[1:]
                else node.body
            )
            first = min(
                [
                    body[0].lineno,
                    *(d.lineno for d in getattr(body[0], "decorator_list", [])),
                ]
            )
            lines.insert(first - 1, f"{' ' * body[0].col_offset}_entered({name!r})")
        cell.source = "\n".join(lines)
    nb.cells.insert(0, new_code_cell(RECORDER.format(path=str(record))))
    return sorted(set(names))


def main(chosen: list[str]) -> int:
    """Run the chapters that are chosen, or all, and return the exit status."""
    BUILD.mkdir(parents=True, exist_ok=True)
    for old in BUILD.glob("*.*"):
        old.unlink()
    shown = {}
    for path in sorted((run_notebooks.ROOT / "notebooks").glob("*.ipynb")):
        nb = run_notebooks.read(path)
        shown[path.stem] = recording(nb, BUILD / f"{path.stem}.entered")
        nbformat.write(nb, BUILD / path.name)
    arguments = [f"--folder={BUILD}", f"--build={BUILD / 'run'}", *chosen]
    if status := run_notebooks.main(arguments):
        return status
    for chapter, names in shown.items():
        record = BUILD / f"{chapter}.entered"
        entered = record.read_text().split() if record.exists() else []
        missing = [name for name in names if name not in entered]
        if names and (chapter.startswith(tuple(chosen)) or not chosen):
            print(
                f"{chapter}: {len(names) - len(missing)} of {len(names)} were entered",
                *missing,
            )
            status = status or bool(missing)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
