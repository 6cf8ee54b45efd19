import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from d2lpar.ranks.sender import Sender


def test_calls_are_made_in_order_in_one_other_thread():
    sender, made = Sender(), []

    def call(i):
        made.append((i, threading.current_thread()))
        return 10 * i

    futures = [sender.submit(call, i) for i in range(50)]
    assert [future.result(timeout=5) for future in futures] == [10 * i for i in range(50)]
    assert [i for i, _ in made] == list(range(50))
    assert {thread for _, thread in made} != {threading.current_thread()}
    assert len({thread for _, thread in made}) == 1
    sender.stop()


def test_an_error_is_the_future_s_and_the_next_call_is_made():
    sender = Sender()
    failed, after = sender.submit(int, "x"), sender.submit(int, "7")
    with pytest.raises(ValueError, match="'x'"):
        failed.result(timeout=5)
    assert after.result(timeout=5) == 7
    sender.stop()


def test_cancelled_call_is_left_out_and_the_next_one_is_made():
    sender, go = Sender(), threading.Event()
    first = sender.submit(go.wait, 5)
    cancelled, after = sender.submit(int, "6"), sender.submit(int, "7")
    assert cancelled.cancel()
    go.set()
    assert (first.result(timeout=5), after.result(timeout=5)) == (True, 7)
    sender.stop()


def test_stopped_thread_ends_after_what_is_in_the_queue():
    sender = Sender()
    thread = sender.submit(threading.current_thread).result(timeout=5)
    last = sender.submit(int, "7")
    sender.stop()
    thread.join(timeout=5)
    assert last.result(timeout=0) == 7 and not thread.is_alive()


def test_waiting_thread_holds_nothing():
    class Thing:
        def __call__(self):
            return threading.current_thread()

    sender, thing = Sender(), Thing()
    sender.submit(thing).result(timeout=5)
    gone = weakref.ref(thing)
    del thing
    limit = time.monotonic() + 5  # for the thread to come back to its queue
    while gone() and time.monotonic() < limit:
        gc.collect()
    assert gone() is None
    sender.stop()


def test_process_ends_although_a_call_does_not():
    script = "from time import sleep; from d2lpar.ranks import Sender; Sender().submit(sleep, 60)"
    done = subprocess.run([sys.executable, "-c", script], timeout=40, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
