"""Site and JupyterLab as readers see them, in the system's Chromium: make browser-test.

They ask nothing of other machines, and fail in no script.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import nbformat
import psutil
import pytest
import website
from exercises import masters, role, solution

from d2lpar import bubble, clock, schedules
from d2lpar.pipeline_schedules import kept, play, spell

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[1]
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
NAMES += ["/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"]
FLAGS = ["--no-sandbox", "--disable-background-networking", "--no-first-run"]
OUTSIDE = re.compile(r"^(?!file:|data:|blob:|(http|ws)://127\.0\.0\.1:)")
GROUPS = "docs/*", "notebooks/0*", "notebooks/1*", "notebooks/exercises/*"
REPOSITORY = "https://github.com/someone/d2lpar"


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        pytest.skip("needs Chromium")
    with api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=found, args=FLAGS)


@pytest.fixture
def page(browser):
    context, wrong = browser.new_context(reduced_motion="reduce"), []
    context.set_default_timeout(60_000)
    context.route(OUTSIDE, lambda r: (wrong.append(r.request.url), r.abort()))
    opened = context.new_page()
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    yield opened
    context.close()
    assert wrong == []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    words = f"-m sphinx -qW -c docs -d {folder}/doctrees . {folder}/site"
    env = os.environ | {"D2LPAR_REPOSITORY": REPOSITORY}
    subprocess.run([sys.executable, *words.split()], cwd=ROOT, env=env, check=True)
    return folder / "site"


def visit(page, site, name, size=DESK):
    page.set_viewport_size(size)
    path, *state = str(name).split("#")
    page.goto("#".join([(site / path).as_uri(), *state]))


@pytest.mark.parametrize("group", GROUPS)
def test_no_page_has_a_serious_fault_or_is_wider_than_its_window(page, site, group):
    from axe_playwright_python.sync_playwright import Axe

    faults, axe = [], Axe()
    for path in sorted(site.glob(f"{group}.html")):
        for size, scheme in ((DESK, "light"), (DESK, "dark"), (PHONE, "light")):
            page.emulate_media(color_scheme=scheme)
            visit(page, site, path, size)
            found = axe.run(page, options={"resultTypes": ["violations"]}).response
            for fault in found["violations"]:
                if fault["impact"] in ("serious", "critical"):
                    faults.append(f"{path.name}, {size}, {scheme}: {fault}")
            if page.evaluate("document.documentElement.scrollWidth") > size["width"]:
                faults.append(f"{path.name}: wider than {size}")
        for image in page.locator(".bd-article img").all():
            alt = image.get_attribute("alt") or ""
            if len(alt) < 20 or alt.endswith((".svg", ".png")):
                faults.append(f"{path.name}: a figure's alternative text is {alt!r}")
    assert faults == []


def test_readers_find_their_way(page, site):
    visit(page, site, "index.html")
    page.get_by_role("link", name="Read chapter 1").click()
    page.locator("a.right-next").click()
    assert page.locator(".bd-article h1").inner_text().startswith("2. Data-parallel")
    visit(page, site, "notebooks/03_allreduce.html")
    links = page.locator(".article-header-buttons a").all()
    addresses = " ".join(link.get_attribute("href") for link in links)
    for name in ("github.com", "colab.research.google.com/github"):
        path = "someone/d2lpar/blob/main/notebooks/03_allreduce.ipynb"
        assert f"{name}/{path}" in addresses
    page.get_by_role("link", name="plays the schedules").click()
    page.get_by_role("heading", name="Schedule player").wait_for()
    page.locator(".bd-article").get_by_role("link", name="puzzle").click()
    page.get_by_role("heading", name="Allreduce puzzle").wait_for()


def rows(page, part):
    """The cells of a player's table, as text."""
    lines = page.locator(f"[data-part={part}] tbody tr").all()
    return [line.locator("th, td").all_inner_texts() for line in lines]


def texts(page, part):
    return page.locator(f"[data-part={part}]").all_inner_texts()


def with_unit(value, unit, prefixes):
    """A number as the page writes it: 1.33 MB."""
    factor, prefix = next((each for each in prefixes if value >= each[0]), (1, ""))
    return f"{float(f'{value / factor:.3g}'):g} {prefix}{unit}"


def test_the_schedule_player_shows_what_python_counts(page, site):
    visit(page, site, "docs/schedules.html")
    sizes = (1e9, "G"), (1e6, "M"), (1e3, "k")
    times = (1, ""), (1e-3, "m"), (1e-6, "µ")
    for name, size in (("ring", 5), ("halving_doubling", 6), ("tree", 8)):
        page.get_by_role("combobox", name="Schedule").select_option(name)
        page.get_by_role("combobox", name="Devices").select_option(str(size))
        page.get_by_role("slider", name="Moment").press("Home")
        steps = website.SCHEDULES[name](size)
        n = schedules.num_chunks(steps)
        page.get_by_role("button", name="Step").focus()
        for i, held in enumerate(schedules.holdings(steps, size)):
            assert f": {i} of {len(steps)} steps done" in texts(page, "caption")[0]
            found = rows(page, "sent")
            sent = schedules.cost(website.SCHEDULES[name], size, 4_000_000).sent
            for r, chunks in enumerate(held):
                whole = sum(own == tuple(range(size)) for own in chunks)
                assert found[r][:2] == [str(r), f"{whole} of {n}"]
                if i == len(steps):
                    assert found[r][2] == with_unit(sent(r), "B", sizes)
            page.keyboard.press("Enter")
        wanted = []
        for each in website.SCHEDULES.values():
            c = schedules.cost(each, size, 4_000_000)
            most = max(map(c.sent, range(size)))
            columns = with_unit(most, "B", sizes), with_unit(c.seconds, "s", times)
            wanted.append([str(c.steps), *columns])
        names = ["star", "ring", "tree", "direct"]
        names += ["halving and doubling", "recursive doubling"]
        wanted = [[name, *row] for name, row in zip(names, wanted, strict=True)]
        assert rows(page, "table") == wanted


def test_time_passes_as_one_presses(page, site):
    def shown(*words):
        until(
            lambda: texts(page, "caption") == list(words),
            lambda: page.wait_for_timeout(20),
        )

    page.emulate_media(reduced_motion="no-preference")
    visit(page, site, "docs/schedules.html#schedule=ring&k=8&moment=2")
    step, play = (page.get_by_role("button", name=n) for n in ("Step", "Play"))
    shown("ring: 2 of 14 steps done")
    for _ in range(6):  # however quick they are
        step.click()
    shown("ring: 8 of 14 steps done")
    page.get_by_role("button", name="Back").click()
    shown("ring: 7 of 14 steps done")
    page.get_by_role("combobox", name="Beside it").select_option("halving_doubling")
    at = schedules.cost(lambda k: schedules.ring(k)[:7], 8, 4_000_000).seconds
    other = [schedules.halving_doubling(8)[:n] for n in range(7)]
    ends = [schedules.cost(lambda k, s=s: s, 8, 4_000_000).seconds for s in other]
    done = sum(end <= at * 1.000001 for end in ends) - 1  # at the same time
    shown("ring: 7 of 14 steps done", f"halving and doubling: {done} of 6 steps done")
    page.get_by_role("combobox", name="Beside it").select_option("")
    shown("ring: 7 of 14 steps done")
    page.get_by_role("combobox", name="Speed").select_option("fast")
    step.click()
    play.click()  # while a step is on its way
    page.get_by_role("button", name="Pause").click()
    play.click()
    shown("ring: 14 of 14 steps done")
    play.click()  # from the start
    shown("ring: 1 of 14 steps done")
    step.click()  # while it plays: one step, and it is still
    shown("ring: 2 of 14 steps done")
    page.wait_for_timeout(1000)
    assert texts(page, "caption") == ["ring: 2 of 14 steps done"]
    address = page.url.replace("k=8", "k=4")
    page.evaluate("address => { location.href = address; }", address)  # pasted
    page.get_by_text("ring: 2 of 6 steps done").wait_for()
    visit(page, site, "docs/index.html")
    shown("ring: 1 of 8 steps done")
    page.get_by_role("button", name="Step").click()
    shown("ring: 2 of 8 steps done")
    page.wait_for_timeout(2000)
    assert texts(page, "caption") == ["ring: 2 of 8 steps done"]
    page.get_by_role("slider", name="Moment").press("End")
    shown("ring: 8 of 8 steps done")


def test_the_pipeline_player_shows_what_python_counts(page, site):
    visit(page, site, "docs/pipelines.html")
    page.get_by_role("combobox", name="Ranks").select_option("3")
    page.get_by_role("slider", name="Micro-batches").fill("6")
    for name, unit in (("the weights", 1.5), ("A message", 0.5)):
        page.get_by_role("slider", name=name).fill(str(unit))
    orders = [schedule(3, 6) for schedule in website.PIPELINES.values()]
    v = [1, 1, 1, 2, 1, 2]
    times = [clock(o, 1 / n, 1 / n, 1.5 / n, 0.5) for o, n in zip(orders, v)]
    wanted = []
    for each, spans, n in zip(orders, times, v):
        end = max(own[-1].end for own in spans)
        most = ", ".join(f"{max(kept(own)) / n:g}" for own in each)
        wanted.append([f"{end:g} units, {100 * bubble(spans):.1f} % idle", most])
    names = [
        "one after the other",
        "GPipe",
        "1F1B",
        "interleaved 1F1B",
        "ZB-H1",
        "ZB-V",
    ]
    wanted = [[name, *row] for name, row in zip(names, wanted, strict=True)]
    assert rows(page, "table") == wanted
    page.get_by_role("combobox", name="Below it").select_option("")
    page.get_by_role("combobox", name="Schedule").select_option("zero_bubble")
    page.get_by_role("slider", name="Moment").press("Home")
    starts = sorted({t for own in times[4] for span in own for t in span[1:]})
    page.get_by_role("button", name="Step").focus()
    for now in starts[:15]:
        found = rows(page, "state")
        for rank, own in enumerate(times[4]):
            does = [s.action for s in own if s.start <= now < s.end]
            words = f"{does[0].kind} {does[0].microbatch}" if does else "idle"
            begun = sum(s.action.kind == "forward" and s.start <= now for s in own)
            over = sum(s.action.kind == "weight" and s.end <= now for s in own)
            assert found[rank][1:3] == [words, str(begun - over)]
        page.keyboard.press("Enter")
    page.get_by_role("slider", name="Micro-batches").fill("5")
    found = {row[0]: row[1] for row in rows(page, "table")}
    assert found["interleaved 1F1B"] == "needs a multiple of 3 micro-batches"


def press(page, label):
    """Press a button of a puzzle with the keyboard."""
    page.get_by_role("button", name=label, exact=True).focus()
    page.keyboard.press("Enter")


def place(page, move):
    press(page, f"chunk {move.chunk} of device {move.src}")
    press(page, f"device {move.dst}")


def test_a_ring_is_placed_with_the_keyboard_and_copied(page, site):
    visit(page, site, "docs/allreduce_puzzle.html", PHONE)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("combobox", name="Level").select_option("4. Ring of four")
    steps = schedules.ring(4)
    wrong = [steps[0][0], steps[0][1]._replace(chunk=steps[0][0].chunk)]
    for move in wrong:  # the second sends what the first changes
        place(page, move)
    with pytest.raises(ValueError) as refused:
        schedules.check_steps([wrong, *steps], 4)
    assert texts(page, "said") == [f"Refused, nothing is placed: {refused.value}."]
    place(page, steps[0][2]._replace(dst=0))
    assert "2 sends to 3 only, its neighbour" in texts(page, "said")[0]
    press(page, "Undo")
    assert texts(page, "python") == ["steps = [\n]\n"]
    for number, step in enumerate(steps, start=1):
        way = "is added" if step[0].reduce else "replaces what is there"
        page.get_by_role("radio", name=way).press("Space")
        for move in step:
            place(page, move)
        press(page, f"Run step {number}")
        if number == 3:
            press(page, "Undo")
            assert texts(page, "said") == ["Step 3 is open again."]
            press(page, "Run step 3")
            assert "4 of 16 sums are whole" in texts(page, "said")[0]
    assert texts(page, "said") == ["Solved. Every device has the whole sum."]
    assert all(row[1] == row[2] for row in rows(page, "targets"))
    press(page, "Copy")
    page.get_by_text("Copied.").wait_for()
    names = {"Move": schedules.Move}
    exec(page.evaluate("navigator.clipboard.readText()"), names)
    assert names["steps"] == steps
    place(page, steps[0][2]._replace(dst=0))
    assert texts(page, "said")[0].startswith("Refused, nothing is placed: ")
    press(page, "Next level")
    level = page.get_by_role("combobox")
    assert level.input_value() == "4"
    page.keyboard.press("ArrowRight")  # from device 0 to its tensor
    page.keyboard.press("Enter")
    assert texts(page, "said")[0].startswith("Device 0 sends the whole tensor.")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert "the whole tensor to device 1" in texts(page, "said")[0]
    page.reload()
    level.select_option("3")  # where it was left
    assert texts(page, "said") == ["Solved. Every device has the whole sum."]
    assert level.locator("option").all_inner_texts()[3] == "4. Ring of four ✓"


def test_ranges_are_placed_and_a_missed_target_is_named(page, site):
    solved = "Solved. Every device has the whole sum."
    missed = "Every device has the whole sum, but not within the target:"
    for name, level, said in (
        ("halving_doubling", 5, solved),
        ("recursive_doubling", 4, f"{missed} messages (8, not 6)."),
    ):
        page.goto("about:blank")
        visit(page, site, f"docs/allreduce_puzzle.html#level={level}")
        for number, step in enumerate(website.SCHEDULES[name](4), start=1):
            way = "is added" if step[0].reduce else "replaces what is there"
            page.get_by_role("radio", name=way).press("Space")
            for move in step:
                chunks = move.chunk if name == "halving_doubling" else [None]
                for c in dict.fromkeys([chunks[-1], chunks[0]]):
                    what = "the whole tensor" if c is None else f"chunk {c}"
                    press(page, f"{what} of device {move.src}")
                press(page, f"device {move.dst}")
            press(page, f"Run step {number}")
        assert texts(page, "said") == [said]


@pytest.mark.parametrize("number", range(len(website.PIPELINE_LEVELS)))
def test_a_pipeline_is_placed_with_the_keyboard_and_copied(page, site, number):
    name, p, m = website.PIPELINE_LEVELS[number]
    visit(page, site, f"docs/pipeline_puzzle.html#level={number}", PHONE)
    orders = website.PIPELINES[name](p, m)
    press(page, f"backward pass of micro-batch 0 on stage {orders[-1][0].stage}")
    assert texts(page, "said")[0].startswith("Refused: tick 0: ")
    for action in chain(*play(orders)):
        press(page, str(action))
    press(page, "take back the last pass of rank 0")
    assert texts(page, "said") == ["Rank 0: its last pass is taken back."]
    press(page, str(orders[0][-1]))
    if orders[-1][-1].kind == "backward":  # rank 0 needs it
        press(page, f"take back the last pass of rank {p - 1}")
        assert f" waits for {orders[-1][-1]}." in texts(page, "said")[0]
        press(page, "take back the last pass of rank 0")
        press(page, str(orders[0][-1]))
    assert texts(page, "said") == ["Solved. All micro-batches are done."]
    assert all(row[1] == row[2] for row in rows(page, "targets"))
    names = {"spell": spell}
    exec(texts(page, "python")[0], names)
    assert names["orders"] == orders


@pytest.fixture
def lab(tmp_path):
    """The address of a JupyterLab over a fresh copy, as ``make lab`` starts it."""
    for name in ("notebooks", "tools", "data"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "Makefile", tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"--no-browser --port {port} --ServerApp.token= --ServerApp.password="
    make = "make", "-o", ".venv/installed", "lab", f"PY={sys.executable}"
    env = os.environ | {"JUPYTER_CONFIG_DIR": str(tmp_path)}
    with open(tmp_path / "log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(
            [*make, f"LAB={options}"], cwd=tmp_path, env=env, stdout=log, stderr=log
        )
    until(lambda: "is running at" in (tmp_path / "log").read_text())
    yield f"http://127.0.0.1:{port}/lab/tree"
    started = psutil.Process(server.pid).children(recursive=True)
    for process in started:
        process.terminate()
    for process in psutil.wait_procs(started, timeout=30)[1]:
        process.kill()
    server.wait(30)


def until(condition, wait=lambda: time.sleep(0.2)):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        wait()


def run_cell(page, cell):
    """Run a cell, and wait for its end; again if JupyterLab was not ready for it."""
    prompt = cell.locator(".jp-InputPrompt")
    before = prompt.inner_text()

    def has_run():
        text = prompt.inner_text()
        return text != before and re.match(r"\[\d+\]", text)

    def press():
        if prompt.inner_text() != "[*]:":  # which it may have been for a moment
            prompt.click()  # which opens a folded cell
            page.keyboard.press("Shift+Enter")
        page.wait_for_timeout(3000)

    until(has_run, press)


def test_an_exercise_is_solved_in_jupyterlab(page, lab, tmp_path):
    path = "work/exercises/03_allreduce.ipynb"
    page.set_viewport_size({"width": 1280, "height": 4000})  # it draws what is in view
    page.goto(f"{lab}/{path}")
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    cells = page.locator(".jp-Notebook .jp-Cell")
    kinds = [role(c) for c in nbformat.read(tmp_path / path, as_version=4).cells]
    answer = kinds.index("solution")
    check = cells.nth(answer + 1)
    run_cell(page, cells.nth(kinds.index("setup")))
    run_cell(page, check)
    output = check.locator(".jp-OutputArea-output")
    assert output.first.inner_text().startswith("1: name 'two_way_ring' is not defined")
    cells.nth(answer).locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(solution(masters()["03_allreduce"].cells[answer].source))
    run_cell(page, cells.nth(answer))
    run_cell(page, check)
    output.get_by_text("1: done").wait_for()
