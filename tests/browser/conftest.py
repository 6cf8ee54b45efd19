"""A real browser, Chromium by Playwright; `make browser-test` installs all it needs."""

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
# Nothing but what the tests ask for: a browser calls its makers as soon as it starts.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
]
FLAGS += ["--disable-component-update", "--no-first-run"]
OUTSIDE = re.compile(r"^(?!file:|data:|blob:|(http|ws)://127\.0\.0\.1:)")


def executable() -> str | None:
    """Return the system's Chromium; D2LPAR_BROWSER names another."""
    found = [
        os.environ.get("D2LPAR_BROWSER"),
        *map(shutil.which, NAMES),
        shutil.which(MAC),
    ]
    return next(filter(None, found), None)


def missing() -> str:
    """Say what the tests of a browser lack, or nothing."""
    if not all(
        find_spec(name) for name in ("playwright", "axe_playwright_python", "sphinx")
    ):
        return "needs Playwright, axe and Sphinx: make browser-test installs them"
    return (
        ""
        if executable()
        else "needs Chromium: install it, or name it in D2LPAR_BROWSER"
    )


def pytest_collection_modifyitems(items):
    """Skip what stands in this folder, with a word, where something is missing."""
    if reason := missing():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def browser():
    """Chromium, for all tests."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable(), args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def page(browser):
    """A page of its own, which must not ask other machines nor fail in a script."""
    context, asked, errors = browser.new_context(), [], []

    def refuse(route):
        asked.append(route.request.url)
        route.abort()

    context.route(OUTSIDE, refuse)
    context.set_default_timeout(60_000)
    opened = context.new_page()
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    context.close()
    assert (asked, errors) == ([], [])
