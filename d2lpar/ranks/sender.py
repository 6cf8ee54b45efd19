"""A thread that makes calls one after the other: so that sending goes on beside backward.

``concurrent.futures.ThreadPoolExecutor(1)`` does the same, but a process that ends waits for its
threads: a rank that has failed would stay until its last message is taken, and be missed by nobody.
Notebook 05 shows the idea with an executor.
"""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any


class Sender:
    """A daemon thread with a queue of calls."""

    def __init__(self):
        self._calls = SimpleQueue()
        Thread(target=_make, args=(self._calls,), name="communication", daemon=True).start()

    def submit(self, function: Callable, *args: Any) -> Future:
        """Put a call at the end of the queue; return the future of its result."""
        future = Future()
        self._calls.put((future, function, args))
        return future

    def stop(self) -> None:
        """Let the thread end after the calls that are in the queue."""
        self._calls.put(None)


def _make(calls: SimpleQueue) -> None:
    while call := calls.get():
        future, function, args = call
        if future.set_running_or_notify_cancel():  # False: it was cancelled while it waited
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
        del call, future, function, args  # or what they hold would live until the next call
