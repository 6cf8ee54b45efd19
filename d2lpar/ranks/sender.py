"""Workshop. A thread that makes a rank's calls, while the main thread computes."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import torch

from ..memory import watched


class Sender:
    """A daemon thread that makes calls one by one, for as long as this object lives.

    A process that ends does not wait for it, as it would for a ThreadPoolExecutor: a
    rank that has failed would stay until its last message is taken.
    """

    def __init__(self):
        self.calls = SimpleQueue()
        work = threading.Thread(target=make_calls, args=(self.calls,), daemon=True)
        work.name = "communication"
        work.start()

    def submit(self, function: Callable, *args: Any) -> Future:
        """Put a call at the end of the queue; return the future of its result.

        On a GPU it follows in the stream that is current here.
        """
        future, on_stream = Future(), nullcontext()
        if torch.cuda.is_initialized():  # else stream(None) would do that, too
            on_stream = torch.cuda.stream(torch.cuda.current_stream())
        self.calls.put((future, on_stream, function, args))
        return future

    def stop(self) -> None:
        """Let the thread end after the calls that are in the queue."""
        self.calls.put(None)

    __del__ = stop


def make_calls(calls: SimpleQueue) -> None:
    """Make the calls that are put into the queue, until None."""
    while call := calls.get():
        future, on_stream, function, args = call
        if future.set_running_or_notify_cancel():  # False: it was cancelled
            try:
                with watched(), on_stream:  # what it makes counts, too
                    future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
        # or what they hold would live until the next call
        del (call, future, on_stream, function, args)
