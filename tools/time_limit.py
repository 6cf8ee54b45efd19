"""A pytest plugin: a test that hangs fails, its processes end, and the next runs.

The limit is for hangs, not for slowness: far above what any test takes on a busy
machine. What a signal cannot interrupt, a call of C code that never returns, is left to
pytest's own faulthandler_timeout, which ends the whole run.
"""

import contextlib
import os
import signal

import psutil
import pytest

AGAIN = 30  # seconds until a test is told again: it took the error, or hangs as it ends


class TestHangsError(BaseException):
    """A test is over the limit. No Exception, so that no test takes it for one."""


def pytest_addoption(parser):
    """Add the option ``--hang-limit``."""
    words = (
        "seconds after which a test hangs (default: 300; 0, for a debugger: no limit)"
    )
    parser.addoption(
        "--hang-limit", type=float, default=300, metavar="SECONDS", help=words
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """Limit what comes before a test."""
    return (yield from _limited(item, "its setup"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Limit a test."""
    return (yield from _limited(item, "it"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """Limit what comes after a test."""
    return (yield from _limited(item, "its teardown"))


def _limited(item, what):
    limit, started = item.config.getoption("--hang-limit"), []

    def stop(number, frame):
        # Those whose parent ends before them could not be found any more later.
        started.extend(psutil.Process().children(recursive=True))
        raise TestHangsError(f"{what} is not done after {limit:g} s (--hang-limit)")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit, AGAIN)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                if not _is_shared(process):
                    process.kill()


def _is_shared(process):
    """Whether all tests share it: multiprocessing's fork server or resource tracker."""
    names = "multiprocessing.forkserver", "multiprocessing.resource_tracker"
    line = " ".join(process.cmdline())
    return process.ppid() == os.getpid() and any(
        f"from {name}" in line for name in names
    )
