"""Run the notebooks, each in a fresh kernel, and stop at the first cell that fails."""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter

ROOT = Path(__file__).resolve().parents[1]
FOLDER, BUILD = ROOT / "notebooks", ROOT / "build" / "notebooks"
TEMPLATE = str(ROOT / "tools" / "page.html.j2")


def execute(nb: nbformat.NotebookNode, limit: float) -> str:
    """Execute a notebook in place, ``limit`` seconds per cell; return what failed."""
    begun, metadata = [], nb.metadata.copy()
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.update(outputs=[], execution_count=None)
    client = NotebookClient(
        nb,
        kernel_name="python3",
        timeout=limit,
        resources={"metadata": {"path": str(FOLDER)}},
        shutdown_kernel="immediate",  # with all that it has started
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--Application.log_level=ERROR"],  # or it warns about TCP
        on_cell_start=lambda cell, cell_index: begun.append(cell.source),
    )
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        text = f"In this cell:\n\n{begun[-1]}\n\n{getattr(error, 'traceback', error)}"
        return re.sub(r"\x1b\[[0-9;]*m", "", text)  # without colours
    finally:
        nb.metadata = metadata  # and not the versions of this machine
    return ""


def run(path: Path, limit: float, refresh: bool) -> str:
    """Execute a notebook, write it and its page; return what failed."""
    nb, target = nbformat.read(path, as_version=4), BUILD / path.name
    failed = execute(nb, limit)
    nbformat.write(nb, target)
    page, _ = HTMLExporter(template_file=TEMPLATE).from_notebook_node(nb)
    page = re.sub(r'href="([\w-]+)\.ipynb', r'href="\1.html', page)
    target.with_suffix(".html").write_text(page, encoding="utf-8")
    if refresh and not failed:
        nbformat.write(nb, path)
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=[""], help="how they begin: 02 03")
    parser.add_argument("--refresh", action="store_true", help="write outputs back")
    parser.add_argument("--limit", type=float, default=1200, help="seconds per cell")
    args = parser.parse_args(arguments)
    for folder in filter(Path.is_dir, FOLDER.iterdir()):  # pages link to these
        shutil.copytree(folder, BUILD / folder.name, dirs_exist_ok=True)
    paths = [p for p in FOLDER.glob("*.ipynb") if p.name.startswith(tuple(args.names))]
    start = time.monotonic()
    for path in sorted(paths):
        print(f"{path.name:36}", end="", flush=True)
        begin = time.monotonic()
        failed = run(path, args.limit, args.refresh)
        print(f"{time.monotonic() - begin:7.1f} s", flush=True)
        if failed:
            print(f"\n{failed}\n\n{path.name} failed; see build/notebooks")
            return 1
    print(f"{len(paths)} notebooks in {time.monotonic() - start:.1f} s")
    return int(not paths)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        os.environ |= {"IPYTHONDIR": own, "TMPDIR": own}  # gone in the end
        os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # or a debugger warns
        sys.exit(main())
