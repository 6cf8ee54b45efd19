"""The site as a reader sees it: desk and phone, day and night, without a network."""

import os
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import website
from run_notebooks import ROOT

from d2lpar import collectives, pipeline
from d2lpar.collectives.cost import walk

pytestmark = pytest.mark.browser
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The site, built without a repository."""
    return build(tmp_path_factory.mktemp("site"), repository="")


def build(folder, repository):
    pages, site = folder / "pages", folder / "site"
    before = os.environ.pop("D2LPAR_REPOSITORY", None)
    try:
        os.environ["D2LPAR_REPOSITORY"] = repository
        website.assemble(pages)
        assert website.build(pages, site) == 0
    finally:
        os.environ.pop("D2LPAR_REPOSITORY")
        if before is not None:
            os.environ["D2LPAR_REPOSITORY"] = before
    return site


def visit(page, site, name, size=DESK, **media):
    page.set_viewport_size(size)
    page.emulate_media(**media)
    page.goto((site / name).as_uri())


# Every page


GROUPS = "*", "docs/*", "module/*", "notebooks/0*", "notebooks/1*"
GROUPS += "notebooks/exercises/0*", "notebooks/exercises/[1im]*"


def pages_of(site, group):
    return {path.relative_to(site) for path in site.glob(f"{group}.html")}


def test_no_page_is_left_out(site):
    shown = {path.relative_to(site) for path in site.rglob("*.html")}
    named = set.union(*(pages_of(site, group) for group in GROUPS))
    assert (
        named == {name for name in shown if name.parts[0] != "_static"}
        and len(named) > 45
    )


@pytest.mark.parametrize("group", GROUPS)
def test_no_page_has_a_serious_fault_or_is_wider_than_its_window(page, site, group):
    from axe_playwright_python.sync_playwright import Axe

    faults, axe = [], Axe()
    for name in sorted(pages_of(site, group)):
        for size in (DESK, PHONE):
            visit(page, site, name, size)
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                page.wait_for_function(
                    f"document.documentElement.dataset.theme === '{scheme}'"
                )
                where = f"{name}, {size['width']} px, {scheme}"
                found = axe.run(page, options={"resultTypes": ["violations"]}).response
                for fault in found["violations"]:
                    if fault["impact"] in ("serious", "critical"):
                        targets = [node["target"] for node in fault["nodes"]][:3]
                        faults.append(f"{where}: {fault['help']}: {targets}")
                width = page.evaluate("document.documentElement.scrollWidth")
                if width > size["width"]:
                    faults.append(f"{where}: {width} px wide")
    assert faults == []


def test_every_figure_says_in_words_what_it_shows(page, site):
    figures = 0
    for path in sorted(site.glob("notebooks/*.html")):
        visit(page, site, path.relative_to(site))
        images = page.locator(".bd-article img")
        for image in images.all():
            alt = image.get_attribute("alt") or ""
            assert len(alt) > 20 and not alt.endswith((".svg", ".png")), (
                path.name,
                alt,
            )
            assert (
                image.evaluate("image => image.decode().then(() => image.naturalWidth)")
                > 0
            )
        figures += images.count()
    assert figures > 40


def test_readers_find_their_way(page, site):
    visit(page, site, "index.html")
    chapters = len(list((ROOT / "notebooks").glob("*.ipynb")))
    assert page.locator(".chapters li").count() == chapters
    page.get_by_role("link", name="Read chapter 1").click()
    assert page.locator(".bd-article h1").inner_text().startswith("1. Three ways")
    page.locator("a.right-next").click()
    assert page.locator(".bd-article h1").inner_text().startswith("2. Data-parallel")
    page.locator("a.left-prev").click()
    assert page.locator(".bd-article h1").inner_text().startswith("1. Three ways")
    page.get_by_role("button", name="Download this page").click()
    link = page.locator("a.btn-download-source-button")
    assert link.is_visible()
    source = (site / "notebooks" / link.get_attribute("href")).resolve()
    assert (
        source.read_bytes() == (ROOT / "notebooks" / "01_three_ways.ipynb").read_bytes()
    )
    visit(page, site, "module/collectives.html")
    assert page.locator("dt.sig", has_text="halving_doubling").count() == 1


def test_dark_mode_can_be_chosen_and_stays(page, site):
    visit(page, site, "index.html", color_scheme="light")
    page.get_by_role("button", name="Color mode").click()
    page.get_by_role("button", name="Dark", exact=True).click()
    theme = "document.documentElement.dataset.theme"
    assert page.evaluate(theme) == "dark"
    page.goto((site / "docs" / "students.html").as_uri())
    assert page.evaluate(theme) == "dark"


def test_search_finds_the_bubble(page, site):
    serve = partial(SimpleHTTPRequestHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            page.goto(f"http://127.0.0.1:{server.server_port}/search.html?q=bubble")
            page.get_by_text(re.compile(r"found \d+ pages?")).wait_for()
            found = " ".join(page.locator("ul.search li").all_inner_texts())
        finally:
            server.shutdown()
    assert "Pipeline schedules" in found and "Pipeline player" in found
    assert "idle" in found  # the words around it


@pytest.mark.parametrize("repository", ["", "https://github.com/someone/d2lpar"])
def test_buttons_lead_to_the_repository_where_there_is_one(
    page, site, tmp_path, repository
):
    site = build(tmp_path, repository) if repository else site
    addresses = {}
    for name in (
        "notebooks/03_allreduce.html",
        "docs/students.html",
        "module/ranks.html",
    ):
        visit(page, site, name)
        links = page.locator(".article-header-buttons a").all()
        addresses[name] = {link.get_attribute("href") for link in links}
    notebook = addresses["notebooks/03_allreduce.html"]
    outside = {
        link for link in set.union(*addresses.values()) if link.startswith("http")
    }
    if not repository:
        assert outside == set()
        return
    path = "notebooks/03_allreduce.ipynb"
    colab = f"https://colab.research.google.com/github/someone/d2lpar/blob/main/{path}"
    assert colab in notebook and f"{repository}/blob/main/{path}?plain=1" in notebook
    assert any(
        link.startswith("https://mybinder.org/v2/gh/someone/d2lpar/main")
        for link in notebook
    )
    assert (
        f"{repository}/blob/main/docs/students.md?plain=1"
        in addresses["docs/students.html"]
    )
    for link in outside:  # no button leads to what the repository does not have
        if place := re.search(r"/blob/main/([^?]+)", link):
            assert (ROOT / place[1]).exists(), link


# The players


def select(page, name):
    return page.get_by_role("combobox", name=name)


def rows(page, part):
    """The cells of a player's table, as text."""
    lines = page.locator(f"[data-part={part}] tbody tr").all()
    return [line.locator("th, td").all_inner_texts() for line in lines]


def test_the_schedule_player_shows_what_python_counts_and_obeys_the_keyboard(
    page, site
):
    visit(page, site, "docs/schedules.html", reduced_motion="reduce")
    schedule, k = select(page, "Schedule"), select(page, "Devices")
    for name, size in (("ring", 5), ("halving_doubling", 6), ("tree", 8)):
        schedule.select_option(name)
        k.select_option(str(size))
        steps = website.SCHEDULES[name](size)
        states = collectives.holdings(steps, size)
        n = collectives.num_chunks(steps)
        page.get_by_role("button", name="Step").focus()
        for i in range(len(steps) + 1):
            assert (
                page.locator("[data-part=count]").inner_text()
                == f"{i} of {len(steps)} steps done"
            )
            whole = [sum(len(c) == size for c in held) for held in states[i]]
            assert [row[1] for row in rows(page, "sent")] == [
                f"{w} of {n}" for w in whole
            ]
            drawn = sum(len(c) for held in states[i] for c in held)
            squares = page.locator("[data-part=drawing] rect[fill]").count()
            assert (squares, page.locator("rect.whole").count()) == (drawn, sum(whole))
            assert page.locator(".arrows .head").count() == (
                len(steps[i]) if i < len(steps) else 0
            )
            page.keyboard.press("Enter")
    page.get_by_role("slider", name="Steps done").focus()
    page.keyboard.press("Home")
    assert page.locator("[data-part=count]").inner_text().startswith("0 of")
    page.keyboard.press("ArrowRight")
    assert page.locator("[data-part=words]").inner_text().startswith("Step 2: ")
    select(page, "Tensor").select_option("400000000")
    table = {row[0]: row[1:] for row in rows(page, "table")}
    cost = walk(collectives.star, 8, 400_000_000)
    assert table["star"] == [
        str(cost.steps),
        f"{max(cost.sent) / 1e9:.3g} GB",
        f"{cost.seconds * 1e3:.3g} ms",
    ]
    assert [name for name, row in table.items() if "fastest" in row[-1]] == [
        "halving and doubling"
    ]


def test_messages_travel_unless_motion_is_not_wanted(page, site):
    count = page.locator("[data-part=count]")
    visit(page, site, "index.html", reduced_motion="no-preference")
    assert page.get_by_role("button", name="Pause").is_visible()
    page.wait_for_function(
        "document.querySelector('[data-part=count]').textContent[0] > 1"
    )
    page.get_by_role("button", name="Pause").press("Space")
    stands = count.inner_text()
    page.wait_for_timeout(2500)
    assert count.inner_text() == stands
    visit(page, site, "index.html", reduced_motion="reduce")
    page.wait_for_timeout(2500)
    assert count.inner_text() == "0 of 8 steps done"
    assert page.get_by_role("button", name="Play").is_visible()


def test_the_pipeline_player_shows_what_python_predicts(page, site):
    visit(page, site, "docs/pipelines.html")
    select(page, "Stages").select_option("3")
    slider = page.get_by_role("slider", name="Micro-batches")
    slider.focus()
    page.keyboard.press("Home")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    select(page, "A backward pass takes").select_option("3")
    select(page, "Schedule").select_option("one_f_one_b")
    expected = []
    for name, schedule in website.PIPELINES.items():
        ticks = schedule(3, 5)
        spans = pipeline.predict(ticks, 1, 3)
        live = pipeline.live_counts(action for tick in ticks for action in tick)
        most = ", ".join(str(max(counts)) for counts in live.values())
        share = f"{100 * pipeline.bubble(spans):.1f} %"
        title = {
            "sequential": "one after the other",
            "gpipe": "GPipe",
            "one_f_one_b": "1F1B",
        }[name]
        expected.append([title, f"{spans[-1].end:g}", share, most])
    assert rows(page, "table") == expected
    assert (
        page.locator("rect.forward").count()
        == page.locator("rect.backward").count()
        == 15
    )
    page.get_by_role("slider", name="Time").focus()
    page.keyboard.press("Home")
    assert [row[1] for row in rows(page, "state")] == ["not started"] * 3
    page.get_by_role("button", name="Step").press("Enter")  # the first pass has ended
    assert rows(page, "state") == [
        ["0", "forward 0", "1", "3"],
        ["1", "idle", "0", "2"],
        ["2", "idle", "0", "1"],
    ]
    page.get_by_role("button", name="Back").press("Enter")
    assert page.locator("[data-part=count]").inner_text() == "time 0 of 28"
