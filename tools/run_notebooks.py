"""Execute the book's notebooks with nbconvert, one by one, each in a fresh kernel.

    python tools/run_notebooks.py                 all of them, to build/notebooks
    python tools/run_notebooks.py 02 03           those whose names begin so
    python tools/run_notebooks.py --refresh       and write outputs back to notebooks/

The first cell that fails ends the run: it is printed with its traceback, and the exit
status is 1.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import nbformat
import psutil
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbconvert import HTMLExporter
from nbconvert.preprocessors import ExecutePreprocessor
from nbformat import NotebookNode
from traitlets import default

ROOT = Path(__file__).resolve().parents[1]

# All that a committed notebook says of its kernel: versions and local names would
# differ from machine to machine.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}


class OwnKernel(AsyncKernelManager):
    """Start the very Python that runs this file, whatever kernels are registered."""

    @default("kernel_spec_manager")
    def _only_the_native_kernel(self):
        return KernelSpecManager(kernel_dirs=[], ensure_native_kernel=True)


class NotebookError(Exception):
    """A cell failed. The message says which, with its source and its traceback."""


def read(path: Path) -> NotebookNode:
    """Read a notebook, and give an id that will stay to each cell that has none."""
    # nbformat would give random ids, which would change with every refresh.
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["nbformat_minor"] = max(raw["nbformat_minor"], 5)
    for number, cell in enumerate(raw["cells"]):
        cell.setdefault(
            "id", hashlib.sha256(f"{number} {cell['source']}".encode()).hexdigest()[:8]
        )
    return nbformat.reads(json.dumps(raw), as_version=4)


def execute(
    nb: NotebookNode, folder: Path, idle_limit: float, notebook_limit: float
) -> None:
    """Execute the notebook in place, in ``folder``.

    The limits are in seconds. Raises NotebookError.
    """
    started = []  # the indices of the cells that have begun
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.update(outputs=[], execution_count=None)
    client = ExecutePreprocessor(
        kernel_name="python3",
        kernel_manager_class=OwnKernel,
        # or ipykernel warns about TCP
        extra_arguments=["--Application.log_level=ERROR"],
        timeout=None,  # a cell may take long on a busy machine: see end_what_hangs
        startup_timeout=notebook_limit,
        # with all that it started: ranks that hang must not stay
        shutdown_kernel="immediate",
        record_timing=False,
        coalesce_streams=True,
        on_cell_start=lambda cell, cell_index: started.append(cell_index),
    )
    try:
        with end_what_hangs(idle_limit, notebook_limit) as reasons:
            client.preprocess(nb, {"metadata": {"path": str(folder)}})
    except CellExecutionError:
        cell = nb.cells[started[-1]]
        error = next(out for out in cell.outputs if out.output_type == "error")
        raise NotebookError(
            _describe(nb, started[-1], "\n".join(error.traceback))
        ) from None
    except DeadKernelError:
        died = (
            "The kernel died: killed for want of memory, or crashed in compiled code."
        )
        reason = reasons[0] if reasons else died
        raise NotebookError(_describe(nb, started[-1], reason)) from None


@contextmanager
def end_what_hangs(idle_limit: float, notebook_limit: float):
    """End processes started inside when they hang; yield a list for the reasons.

    On a busy machine a cell may take any time, and is not stopped for it. Processes
    that have used less than a hundredth of a core during ``idle_limit`` seconds wait
    for something that does not come. Those that compute forever meet
    ``notebook_limit``. A process whose parent has ended is not seen.
    """
    begin, reasons, over = time.monotonic(), [], threading.Event()
    # when progress was last seen, and the CPU seconds used by then
    then, before = begin, 0.0
    others = set(psutil.Process().children(recursive=True))

    def started() -> set[psutil.Process]:
        return set(psutil.Process().children(recursive=True)) - others

    def watch() -> None:
        nonlocal then, before
        while not over.wait(idle_limit / 20):
            now, used = time.monotonic(), _cpu_seconds(started())
            if abs(used - before) > 0.01 * idle_limit:  # it falls when a process ends
                then, before = now, used
            elif now - then > idle_limit:
                reasons.append(
                    f"Nothing was computed for {idle_limit:.0f} s (--idle-limit)."
                )
            if now - begin > notebook_limit:
                limit = f"{notebook_limit:.0f} s (--notebook-limit)"
                reasons.append(f"The notebook has used up its {limit}.")
            if reasons:
                for process in started():
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield reasons
    finally:
        over.set()
        watcher.join()


def _cpu_seconds(processes: set[psutil.Process]) -> float:
    used = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            used += sum(process.cpu_times()[:2])  # user and system
    return used


def normalise(nb: NotebookNode) -> NotebookNode:
    """Remove in place what varies between runs without meaning; return the notebook."""
    nb.metadata = nbformat.from_dict(METADATA)
    for cell in nb.cells:
        cell.metadata.pop("execution", None)
    return nb


def to_html(nb: NotebookNode, path: Path) -> str:
    """Return the notebook as one standalone page, whose links lead to other pages."""
    resources = {"metadata": {"name": path.stem, "path": str(path.parent)}}
    exporter = HTMLExporter(
        template_file=str(ROOT / "tools" / "page.html.j2"), embed_images=True
    )
    # It warns of missing alternative texts, which page.html.j2 adds.
    exporter.log.setLevel("ERROR")
    page, _ = exporter.from_notebook_node(nb, resources)
    return re.sub(r'href="([\w-]+)\.ipynb', r'href="\1.html', page)


def _describe(nb: NotebookNode, index: int, reason: str) -> str:
    number = sum(cell.cell_type == "code" for cell in nb.cells[: index + 1])
    source = "\n".join("    " + line for line in nb.cells[index].source.splitlines())
    return f"In cell [{number}]:\n\n{source}\n\n{reason}"


def run(
    path: Path, build: Path, refresh: bool, idle_limit: float, notebook_limit: float
) -> None:
    """Execute a notebook and write the results; ``build`` also gets a failed one."""
    nb = read(path)
    target = build / path.name
    page = target.with_suffix(".html")
    for old in (target, page):
        old.unlink(missing_ok=True)
    try:
        execute(nb, path.parent, idle_limit, notebook_limit)
    finally:
        nbformat.write(normalise(nb), target)
    page.write_text(to_html(nb, path), encoding="utf-8")
    if refresh:
        nbformat.write(nb, path)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", help="first letters of the notebooks; default: all"
    )
    parser.add_argument(
        "--refresh", action="store_true", help="write outputs back to notebooks/"
    )
    parser.add_argument("--idle-limit", type=float, default=300, metavar="SECONDS")
    parser.add_argument("--notebook-limit", type=float, default=3600, metavar="SECONDS")
    parser.add_argument("--folder", type=Path, default=ROOT / "notebooks")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "notebooks")
    args = parser.parse_args(arguments)

    paths = sorted(args.folder.glob("*.ipynb"))
    chosen = [
        p for p in paths if not args.names or p.name.startswith(tuple(args.names))
    ]
    if not chosen:
        print(
            f"No such notebook. There are: {', '.join(p.name for p in paths) or 'none'}"
        )
        return 1
    args.build.mkdir(parents=True, exist_ok=True)
    for name in ("img", "exercises"):  # to which the notebooks link
        if (args.folder / name).is_dir():
            shutil.copytree(args.folder / name, args.build / name, dirs_exist_ok=True)

    # Neither the reader's IPython profile nor a debugger's warning belongs into the
    # results. A kernel is killed: what it leaves in its folder for temporary files goes
    # with ours.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        os.environ.update(
            IPYTHONDIR=own, TMPDIR=own, PYDEVD_DISABLE_FILE_VALIDATION="1"
        )
        return run_all(chosen, args)


def run_all(paths: list[Path], args: argparse.Namespace) -> int:
    """Execute the notebooks one by one, a line each; return the exit status."""
    width = max(len(path.name) for path in paths)
    begin = time.monotonic()
    for path in paths:
        print(f"{path.name:<{width}} ... ", end="", flush=True)
        start = time.monotonic()
        try:
            run(path, args.build, args.refresh, args.idle_limit, args.notebook_limit)
        except NotebookError as error:
            print(
                f"failed after {time.monotonic() - start:.1f} s\n\n{_plain(str(error))}"
            )
            print(f"\nThe notebook up to there: {_shown(args.build / path.name)}")
            return 1
        print(f"{time.monotonic() - start:6.1f} s", flush=True)
    count = f"{len(paths)} notebook" + "s" * (len(paths) > 1)
    where = _shown(args.folder if args.refresh else args.build)
    print(f"{count} in {time.monotonic() - begin:.1f} s, now in {where}")
    return 0


def _plain(text: str) -> str:
    """Take the colours out, unless a terminal is there to show them."""
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return text if coloured else re.sub(r"\x1b\[[0-9;]*m", "", text)


def _shown(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted")
        sys.exit(130)
