"""What all tests share.

GPU tests are skipped without a GPU, random tests are repeatable, and functions of a
file of tests travel to ranks by value.
"""

import contextlib
import os

import cloudpickle
import helpers
import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings

# No deadline per example: on a shared machine one of them is always slow. A whole test
# has one: timeout, in pyproject.toml.
settings.register_profile(
    "d2lpar",
    deadline=None,
    max_examples=50,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(  # make everywhere's; it prints how to repeat an example
    "random", settings.get_profile("d2lpar"), derandomize=False, print_blob=True
)
settings.load_profile("d2lpar")

# make test's two processes share the cores: more threads would wait for each other.
if "OMP_NUM_THREADS" not in os.environ:  # make everywhere tries other numbers
    torch.set_num_threads(1)


def pytest_addoption(parser):
    words = "try all wrong answers to exercises, not only the first of each"
    parser.addoption("--all-answers", action="store_true", help=words)


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers in every run of a test."""
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """End what a test that failed, or took too long, has left running."""
    report = yield
    if report.failed and not item.get_closest_marker("browser"):  # all share Chromium
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "serve()" not in " ".join(process.cmdline()):  # all use it
                    process.kill()
    return report


def pytest_collection_modifyitems(items):
    for module in {helpers, *(item.module for item in items)}:
        # ranks cannot import a file of tests
        cloudpickle.register_pickle_by_value(module)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
