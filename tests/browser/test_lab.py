"""JupyterLab as a reader uses it: figures, Run All, an interrupt, an exercise."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import nbformat
import psutil
import pytest
from exercises import MASTERS, role, solution
from run_notebooks import METADATA, ROOT, read

pytestmark = pytest.mark.browser
LIMIT = 600  # seconds for a chapter
TALL = {"width": 1280, "height": 4000}  # JupyterLab draws only the cells in view


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address and folder of a JupyterLab over a fresh, untrusted copy."""
    folder = tmp_path_factory.mktemp("lab")
    for name in ("notebooks", "tools", "data"):
        shutil.copytree(ROOT / name, folder / name)
    subprocess.run(
        [sys.executable, folder / "tools" / "work_copies.py"], check=True, timeout=100
    )
    home = folder / "home"
    places = {name: str(home) for name in ("HOME", "IPYTHONDIR", "JUPYTER_DATA_DIR")}
    places |= {"JUPYTER_CONFIG_DIR": str(home), "JUPYTER_RUNTIME_DIR": str(home)}
    home.mkdir()
    # As `make lab` starts it, but on a free port that no token protects.
    options = [
        "--no-browser",
        "--port=0",
        "--ServerApp.token=",
        "--ServerApp.password=",
    ]
    options += ["--allow-root", f"--LabApp.app_settings_dir={folder / 'tools' / 'lab'}"]
    options += [
        "--LabApp.news_url=None",
        (
            "--LabApp.check_for_updates_class="
            "jupyterlab.handlers.announcements.NeverCheckForUpdate"
        ),
    ]
    with open(folder / "log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            cwd=folder,
            env=os.environ | places,
            stdout=log,
            stderr=log,
        )
    try:
        yield address(server, home, folder), folder
    finally:
        started = psutil.Process(server.pid).children(recursive=True)
        for _ in range(2):  # the second answers "yes" to the question of the first
            server.send_signal(signal.SIGINT)
        # Those that clean up after a kernel end by themselves.
        _, left = psutil.wait_procs([psutil.Process(server.pid), *started], timeout=30)
        for process in left:
            process.kill()
        server.wait(30)


def address(server, home, folder):
    for _ in range(120):
        for info in home.glob("jpserver-*.json"):
            try:
                url = json.loads(info.read_text())["url"].replace(
                    "localhost", "127.0.0.1"
                )
                urllib.request.urlopen(f"{url}api/status", timeout=5)
            except (OSError, ValueError):
                continue
            return url
        assert server.poll() is None, (folder / "log").read_text()
        time.sleep(0.5)
    raise AssertionError((folder / "log").read_text())


def open_notebook(page, url, path):
    """Open a notebook in a workspace of its own."""
    page.set_viewport_size(TALL)
    workspace = path.replace("/", "-").replace(".", "-")
    page.goto(f"{url}lab/workspaces/{workspace}/tree/{path}")
    page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=120_000)
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for(
        timeout=120_000
    )


def choose(page, menu, item):
    page.get_by_role("menuitem", name=menu, exact=True).click()
    # its name may hold a shortcut
    page.locator(".lm-Menu-item", has_text=item).first.click()


def start(page):
    """Click Run All Cells, again if JupyterLab was not ready, until a cell begins."""
    begun = page.locator(".jp-InputPrompt", has_text=re.compile(r"\[[\d*]+\]"))
    for _ in range(5):
        choose(page, "Run", "Run All Cells")
        page.wait_for_timeout(3000)
        if begun.count():
            return
    raise AssertionError("Run All Cells does nothing")


def run_all(page, folder, path):
    """Run all cells, save, and return the notebook as it is then on disk."""
    before = read(folder / path)
    last = [
        cell.id for cell in before.cells if cell.cell_type == "code" and cell.source
    ][-1]
    start(page)
    idle = page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]")
    begin = time.monotonic()
    while True:
        assert time.monotonic() - begin < LIMIT, f"{path} is still running"
        page.wait_for_timeout(1000)
        if idle.count():
            page.keyboard.press("Control+s")
            page.wait_for_timeout(1000)
            now = nbformat.read(folder / path, as_version=4)
            done = {cell.id: cell.get("execution_count") for cell in now.cells}
            failed = [
                out
                for cell in now.cells
                for out in cell.get("outputs", [])
                if out.output_type == "error"
            ]
            if done[last] or failed:
                return now, failed


def test_a_fresh_copy_shows_every_figure_without_trust(page, lab):
    url, folder = lab
    for path in sorted((folder / "notebooks").glob("*.ipynb")):
        nb = read(path)
        figures = [
            out
            for cell in nb.cells
            for out in cell.get("outputs", [])
            if "image/png" in out.get("data", {})
        ]
        page.set_viewport_size(TALL)
        open_notebook(page, url, f"notebooks/{path.name}")
        seen = {}
        # scroll through it: a cell that is not in view is not there
        for _ in range(40):
            for image in page.locator(".jp-OutputArea-output img").all():
                width = image.evaluate(
                    "image => image.decode().then(() => image.naturalWidth)"
                )
                seen[image.get_attribute("src")] = width
            if len(seen) == len(figures):
                break
            page.locator(".jp-WindowedPanel-outer").first.evaluate(
                "panel => panel.scrollBy(0, 2500)"
            )
            page.wait_for_timeout(500)
        assert len(seen) == len(figures), path.name
        assert all(width > 100 for width in seen.values())
        assert (
            page.locator(
                ".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']"
            ).count()
            == 0
        )


@pytest.mark.parametrize("chapter", ["01_three_ways", "03_allreduce", "04_ranks"])
def test_run_all_of_a_chapter_ends_without_an_error(page, lab, chapter):
    url, folder = lab
    path = f"work/{chapter}.ipynb"
    open_notebook(page, url, path)
    nb, failed = run_all(page, folder, path)
    assert failed == []
    code = [cell for cell in nb.cells if cell.cell_type == "code" and cell.source]
    assert all(cell.execution_count for cell in code) and len(code) > 10
    assert (
        page.locator("[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    )


def test_an_interrupted_launch_leaves_no_process(page, lab):
    url, folder = lab
    cell = """
    import os, time
    from pathlib import Path
    from d2lpar import launch

    def wait(rank, world_size, folder):
        Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
        time.sleep(600)

    launch(wait, 3, os.getcwd(), timeout=500)
    """
    source = "\n".join(line[4:] for line in cell.strip("\n").splitlines())
    nb = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source)], metadata=METADATA
    )
    nbformat.write(nb, folder / "interrupt.ipynb")
    open_notebook(page, url, "interrupt.ipynb")
    start(page)
    files = [folder / f"pid-{rank}" for rank in range(3)]
    wait_until(
        page, lambda: all(file.exists() and file.read_text() for file in files), 60
    )
    ranks = [psutil.Process(int(file.read_text())) for file in files]
    assert all(rank.is_running() for rank in ranks)
    choose(page, "Kernel", "Interrupt Kernel")
    page.get_by_text("KeyboardInterrupt").first.wait_for()
    wait_until(page, lambda: not any(rank.is_running() for rank in ranks), 60)
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    kernel = next(
        process
        for process in psutil.process_iter(["cmdline"])
        if "ipykernel_launcher" in " ".join(process.info["cmdline"] or ())
        and process.cwd() == str(folder)
    )
    python = [
        child
        for child in kernel.children(recursive=True)
        if child.pid not in helpers(kernel)
    ]
    assert python == []


def helpers(kernel):
    """The server that forks ranks, and the tracker, serve until the kernel ends."""
    named = ("forkserver", "resource_tracker")
    children = kernel.children(recursive=True)
    return {
        child.pid
        for child in children
        if any(n in " ".join(child.cmdline()) for n in named)
    }


def wait_until(page, condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, page.locator("body").inner_text()
        # and not time.sleep, which would stop the page's requests
        page.wait_for_timeout(200)


def test_the_check_of_an_exercise_says_done_once_it_is_solved(page, lab):
    url, folder = lab
    path = "work/exercises/03_allreduce.ipynb"
    open_notebook(page, url, path)
    master = read(MASTERS / "03_allreduce.ipynb")
    number = next(i for i, cell in enumerate(master.cells) if role(cell) == "solution")
    answer = solution(master.cells[number].source)
    cells = page.locator(".jp-Notebook .jp-Cell")
    kinds = [(cell.cell_type, role(cell)) for cell in read(folder / path).cells]
    setup, unsolved = kinds.index(("code", "setup")), kinds.index(("code", "solution"))
    check = cells.nth(unsolved + 1)
    run_cell(page, cells.nth(setup))
    run_cell(page, check)
    output = check.locator(".jp-OutputArea-output")
    assert output.first.inner_text().startswith("1: name 'two_way_ring' is not defined")
    cells.nth(unsolved).locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(answer)
    run_cell(page, cells.nth(unsolved))
    run_cell(page, check)
    output.get_by_text("1: done").wait_for()


def run_cell(page, cell):
    """Run a cell, and wait for its end; again if JupyterLab was not ready for it."""
    prompt = cell.locator(".jp-InputPrompt")
    before = prompt.inner_text()
    for _ in range(5):
        cell.locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        page.wait_for_timeout(3000)
        if prompt.inner_text() != before:
            break
    wait_until(
        page,
        lambda: re.match(r"\[\d+\]", now := prompt.inner_text()) and now != before,
        60,
    )
