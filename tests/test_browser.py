"""Site and JupyterLab as readers see them, in the system's Chromium: make browser-test.

They ask nothing of other machines, and fail in no script.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
import website
from exercises import masters, role, solution

from d2lpar import collectives, pipeline

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[1]
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
NAMES += ["/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"]
FLAGS = ["--no-sandbox", "--disable-background-networking", "--no-first-run"]
OUTSIDE = re.compile(r"^(?!file:|data:|blob:|(http|ws)://127\.0\.0\.1:)")
GROUPS = "docs/*", "notebooks/0*", "notebooks/1*", "notebooks/exercises/*"


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        pytest.skip("needs Chromium")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def page(browser):
    context, wrong = browser.new_context(), []
    context.set_default_timeout(60_000)
    context.route(OUTSIDE, lambda r: (wrong.append(r.request.url), r.abort()))
    opened = context.new_page()
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    yield opened
    context.close()
    assert wrong == []


def build(folder, repository=""):
    words = f"-m sphinx -qW -c docs -d {folder}/doctrees . {folder}/site"
    env = os.environ | {"D2LPAR_REPOSITORY": repository}
    subprocess.run([sys.executable, *words.split()], cwd=ROOT, env=env, check=True)
    return folder / "site"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return build(tmp_path_factory.mktemp("site"))


def visit(page, site, name, size=DESK):
    page.set_viewport_size(size)
    page.goto((site / name).as_uri())


# The site


@pytest.mark.parametrize("group", GROUPS)
def test_no_page_has_a_serious_fault_or_is_wider_than_its_window(page, site, group):
    from axe_playwright_python.sync_playwright import Axe

    faults, axe = [], Axe()
    for path in sorted(site.glob(f"{group}.html")):
        for size in (DESK, PHONE):
            visit(page, site, path, size)
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                theme = "document.documentElement.dataset.theme"
                page.wait_for_function(f"{theme} === '{scheme}'")
                where = f"{path.name}, {size['width']} px, {scheme}"
                found = axe.run(page, options={"resultTypes": ["violations"]}).response
                for fault in found["violations"]:
                    if fault["impact"] in ("serious", "critical"):
                        targets = [node["target"] for node in fault["nodes"]][:3]
                        faults.append(f"{where}: {fault['help']}: {targets}")
                if (
                    page.evaluate("document.documentElement.scrollWidth")
                    > size["width"]
                ):
                    faults.append(f"{where}: wider than its window")
        for image in page.locator(".bd-article img").all():
            alt = image.get_attribute("alt") or ""
            if len(alt) < 20 or alt.endswith((".svg", ".png")):
                faults.append(f"{path.name}: a figure's alternative text is {alt!r}")
    assert faults == []


def test_readers_find_their_way(page, site, tmp_path):
    visit(page, site, "index.html")
    page.get_by_role("link", name="Read chapter 1").click()
    page.locator("a.right-next").click()
    assert page.locator(".bd-article h1").inner_text().startswith("2. Data-parallel")
    assert page.locator(".article-header-buttons a[href^=http]").count() == 0
    repository = "https://github.com/someone/d2lpar"
    visit(page, build(tmp_path, repository), "notebooks/03_allreduce.html")
    links = page.locator(".article-header-buttons a").all()
    addresses = " ".join(link.get_attribute("href") for link in links)
    name = "notebooks/03_allreduce.ipynb"
    assert f"{repository}/blob/main/{name}" in addresses
    assert (
        f"colab.research.google.com/github/someone/d2lpar/blob/main/{name}" in addresses
    )
    page.get_by_role("link", name="Play with the schedules").click()
    page.get_by_role("heading", name="Schedule player").wait_for()


def rows(page, part):
    """The cells of a player's table, as text."""
    lines = page.locator(f"[data-part={part}] tbody tr").all()
    return [line.locator("th, td").all_inner_texts() for line in lines]


def test_the_schedule_player_shows_what_python_counts_and_obeys_the_keyboard(
    page, site
):
    page.emulate_media(reduced_motion="reduce")
    visit(page, site, "docs/schedules.html")
    for name, size in (("ring", 5), ("halving_doubling", 6), ("tree", 8)):
        page.get_by_role("combobox", name="Schedule").select_option(name)
        page.get_by_role("combobox", name="Devices").select_option(str(size))
        steps = website.SCHEDULES[name](size)
        n = collectives.num_chunks(steps)
        page.get_by_role("button", name="Step").focus()
        for i, held in enumerate(collectives.holdings(steps, size)):
            count = page.locator("[data-part=count]").inner_text()
            assert count == f"{i} of {len(steps)} steps done"
            whole = [sum(len(c) == size for c in chunks) for chunks in held]
            assert [row[1] for row in rows(page, "sent")] == [
                f"{w} of {n}" for w in whole
            ]
            moves = len(steps[i]) if i < len(steps) else 0
            assert page.locator(".arrows .head").count() == moves
            page.keyboard.press("Enter")


def test_the_pipeline_player_shows_what_python_predicts(page, site):
    visit(page, site, "docs/pipelines.html")
    page.get_by_role("combobox", name="Stages").select_option("3")
    page.get_by_role("slider", name="Micro-batches").focus()
    page.keyboard.press("Home")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.get_by_role("combobox", name="A backward pass takes").select_option("3")
    expected = []
    for order in website.PIPELINES.values():
        ticks = order(3, 5)
        spans = pipeline.predict(ticks, 1, 3)
        live = pipeline.live_counts(action for tick in ticks for action in tick)
        most = ", ".join(str(max(counts)) for counts in live.values())
        share = f"{100 * pipeline.bubble(spans):.1f} %"
        expected.append([f"{spans[-1].end:g}", share, most])
    assert [row[1:] for row in rows(page, "table")] == expected


# JupyterLab, as `make lab` starts it


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address and the folder of a JupyterLab over a fresh copy."""
    folder = tmp_path_factory.mktemp("lab")
    for name in ("notebooks", "tools", "data"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "Makefile", folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"--no-browser --port {port} --ServerApp.token= --ServerApp.password="
    make = ["make", "-o", ".venv/installed", "lab", f"PY={sys.executable}"]
    places = {"JUPYTER_CONFIG_DIR": str(folder), "JUPYTER_DATA_DIR": str(folder)}
    with open(folder / "log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(
            [*make, f"LAB={options}"],
            cwd=folder,
            env=os.environ | places,
            stdout=log,
            stderr=log,
        )
    until(lambda: "is running at" in (folder / "log").read_text())
    yield f"http://127.0.0.1:{port}/lab/tree", folder
    started = psutil.Process(server.pid).children(recursive=True)
    for process in started:
        process.send_signal(signal.SIGTERM)
    for process in psutil.wait_procs(started, timeout=30)[1]:
        process.kill()
    server.wait(30)


def until(condition, wait=time.sleep):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        wait(0.2)


def open_notebook(page, lab, path):
    page.set_viewport_size({"width": 1280, "height": 4000})  # it draws what is in view
    page.goto(f"{lab[0]}/{path}?reset")
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    return page.locator(".jp-Notebook .jp-Cell")


def run_cell(page, cell):
    """Run a cell, and wait for its end; again if JupyterLab was not ready for it."""
    prompt = cell.locator(".jp-InputPrompt")
    before = prompt.inner_text()
    while prompt.inner_text() == before:
        cell.locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        page.wait_for_timeout(3000)
    done = re.compile(r"\[\d+\]")
    until(lambda: done.match(prompt.inner_text()), lambda s: page.wait_for_timeout(200))


def test_a_copy_has_no_outputs_and_an_exercise_is_solved(page, lab):
    path = "work/exercises/03_allreduce.ipynb"
    assert all(
        not cell.get("outputs")
        for file in (lab[1] / "work").glob("*.ipynb")
        for cell in nbformat.read(file, as_version=4).cells
    )
    cells = open_notebook(page, lab, path)
    kinds = [role(c) for c in nbformat.read(lab[1] / path, as_version=4).cells]
    setup, answer = kinds.index("setup"), kinds.index("solution")
    check = cells.nth(answer + 1)
    run_cell(page, cells.nth(setup))
    run_cell(page, check)
    output = check.locator(".jp-OutputArea-output")
    assert output.first.inner_text().startswith("1: name 'two_way_ring' is not defined")
    cells.nth(answer).locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(solution(masters()["03_allreduce"].cells[answer].source))
    run_cell(page, cells.nth(answer))
    run_cell(page, check)
    output.get_by_text("1: done").wait_for()


def test_a_chapter_runs_with_its_figures_and_no_error(page, lab):
    path = "work/01_three_ways.ipynb"
    open_notebook(page, lab, path)
    begun = page.locator(".jp-InputPrompt", has_text=re.compile(r"\[[\d*]+\]"))

    def start():  # again if JupyterLab was not ready
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.locator(".lm-Menu-item", has_text="Run All Cells").first.click()
        page.wait_for_timeout(3000)
        return begun.count()

    def cells():
        page.keyboard.press("Control+s")
        page.wait_for_timeout(1000)
        nb = nbformat.read(lab[1] / path, as_version=4)
        return [cell for cell in nb.cells if cell.cell_type == "code"]

    until(start)
    until(lambda: all(cell.execution_count for cell in cells()))
    outputs = [output for cell in cells() for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    kinds = {output.output_type for output in outputs}
    assert "error" not in kinds and "stderr" not in {o.get("name") for o in outputs}
