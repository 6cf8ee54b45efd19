"""A test that hangs fails alone: the next one runs, and nothing it started stays."""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]

TOYS = """
import subprocess, sys, time
import pytest
from d2lpar import launch

SLEEP = "import time; time.sleep(600)"

def test_that_hangs_with_processes():
    subprocess.Popen([sys.executable, "-c", SLEEP])
    # and one of its own
    subprocess.run(["sh", "-c", f"{sys.executable} -c '{SLEEP}'; true"])

def test_that_takes_all_exceptions():
    while True:
        try:
            time.sleep(600)
        except Exception:
            pass

def test_whose_ranks_hang():
    launch(lambda rank, k: time.sleep(600), 2, timeout=1000)

def test_that_hangs_again_as_it_ends():
    try:
        time.sleep(600)
    finally:
        time.sleep(600)

@pytest.fixture
def stuck():
    yield
    time.sleep(600)

def test_with_a_stuck_fixture(stuck):
    pass

def test_after_them():
    pass
"""


def marked(mark):
    """The processes that were started with this in their environment, and still run."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TOYS") == mark:
                yield process


def test_tests_that_hang_fail_alone_and_their_processes_end(tmp_path):
    (tmp_path / "test_toys.py").write_text(TOYS)
    (tmp_path / "conftest.py").write_text("import time_limit\ntime_limit.AGAIN = 1\n")
    options = (
        "-p",
        "time_limit",
        "-p",
        "no:cacheprovider",
        "--rootdir=.",
        "-v",
        "--hang-limit=1.5",
    )
    path, mark = os.pathsep.join([str(ROOT / "tools"), str(ROOT)]), uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_toys.py"],
        env={**os.environ, "PYTHONPATH": path, "TOYS": mark},
        **{"cwd": tmp_path, "capture_output": True, "text": True},
    )
    lines = [line.split() for line in done.stdout.splitlines() if line.endswith("%]")]
    outcomes = [outcome for _, outcome, *_ in lines]  # the stuck fixture's test has two
    assert outcomes == ["FAILED"] * 4 + ["PASSED", "ERROR", "PASSED"], done.stdout
    assert "TestHangsError: it is not done after 1.5 s (--hang-limit)" in done.stdout
    assert "TestHangsError: its teardown is not done after 1.5 s" in done.stdout
    deadline = time.monotonic() + 60  # the fork server ends a moment after pytest
    while left := list(marked(mark)):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
