"""What runs inside a rank: it joins, calls the function, reports, stays until ended.

One connection to the caller carries lines of output, the result or the failure, and the
question where the rank stands. When it ends, the caller is gone, and the rank ends too.
"""

import contextlib
import faulthandler
import io
import itertools
import linecache
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist

from .lanes import SharedMemory
from .members import use_lanes
from .transport import PeerError


class Job(NamedTuple):
    """What a rank is given."""

    call: bytes  # the function and its arguments, pickled
    sources: dict  # linecache's entries of code that is in no file: cells
    environment: dict
    # the file in which the ranks meet, in a temporary folder of the caller's own
    store: str
    memory: SharedMemory | None  # with its own lanes
    timeout: float
    threads: int


class Failure(NamedTuple):
    """What a rank tells of an exception."""

    follows: bool  # from another rank's: it says that one is missing
    when: float  # on the clock that all processes of a machine share
    what: str  # in one line
    details: str  # the traceback


def be_rank(rank: int, world_size: int, connection: Connection, job: Job) -> None:
    """The new process: call the function, report, and stay until ended."""
    # the caller is interrupted, and ends its ranks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)  # a group of processes, which ends as one
    faulthandler.dump_traceback_later(job.timeout + 60, exit=True, file=2)  # see _watch
    # a finalizer that prints may run inside send, in the same thread
    lock = threading.RLock()

    def send(kind: str, content: Any) -> None:
        with lock:
            connection.send((kind, content))

    outputs = sys.stdout, sys.stderr = _Output("stdout", send), _Output("stderr", send)
    _allow_children(connection)
    threading.Thread(
        target=_watch, args=(connection, send, outputs, job), daemon=True
    ).start()
    try:
        _prepare(rank, world_size, job)
        fn, args = pickle.loads(job.call)
        result = fn(rank, world_size, *args)
        outcome = "result", pickled(result, f"the result ({type(result).__name__})")
    except BaseException as error:
        outcome = "failure", _failure(error)
    # as at the end of any process: it takes the names of locks away
    util._run_finalizers(0)
    for output in outputs:
        output.finish()
    send(*outcome)
    threading.Event().wait()  # if it left now, those that still talk to it would fail


def _allow_children(connection: Connection) -> None:
    """Let a rank have processes, such as a DataLoader's; they end with its group."""
    multiprocessing.current_process().daemon = False  # daemons may have none
    # Python's own, not that of the ranks
    multiprocessing.set_start_method(None, force=True)

    def leave() -> None:
        """Let a forked process neither report to the caller nor keep its line open."""
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        connection.close()

    os.register_at_fork(after_in_child=leave)


def kill_group(pid: int) -> None:
    """Kill a rank and all processes that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _prepare(rank: int, world_size: int, job: Job) -> None:
    """Do what multiprocessing does not, beyond directory and path; join the group."""
    os.environ.clear()  # what is here dates from the start of the fork server
    os.environ.update(job.environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    # left alone, gloo may choose an outward interface
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    tempfile.tempdir = None  # the fork server's
    linecache.cache.update(job.sources)
    torch.set_num_threads(job.threads)
    # copies of one server, they would all draw the same numbers
    torch.manual_seed(rank)
    random.seed(rank)
    # beyond the caller's limit, which tells more
    limit = timedelta(seconds=job.timeout + 10)
    store = dist.FileStore(job.store, world_size)
    dist.init_process_group("gloo", None, limit, world_size, rank, store)
    if job.memory:
        job.memory.open()
        # before the caller's limit, which tells less
        use_lanes(job.memory, 0.9 * job.timeout)
    dist.barrier()
    if job.memory:
        # all have mapped it: so nothing is left behind, whoever is killed
        job.memory.remove()


def _failure(error: BaseException) -> Failure:
    """What to tell of an exception: its traceback begins with the user's function."""
    when, trace = time.monotonic(), error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    # of SyntaxError not the first
    what = next(line for line in lines if not line.startswith(" "))
    details = "".join(traceback.format_exception(type(error), error, trace))
    return Failure(
        isinstance(error, PeerError), when, what, _without_paths_of_cells(details)
    )


def _watch(connection: Connection, send: Callable, outputs: tuple, job: Job) -> None:
    """Say where the main thread is if asked; end the rank once the caller is gone."""
    # Unless C code keeps the interpreter's lock forever: faulthandler's clock needs no
    # lock
    try:
        while connection.recv():
            for output in outputs:
                output.finish()
            send("stack", _where())
    # the caller was killed: nobody else is left to clean up
    except (EOFError, OSError):
        if job.memory:
            job.memory.remove()
        shutil.rmtree(os.path.dirname(job.store), ignore_errors=True)
    finally:
        kill_group(os.getpid())
        os._exit(1)


def _where() -> str:
    """The stack of the main thread, from the user's function on."""
    stack = traceback.extract_stack(
        sys._current_frames()[threading.main_thread().ident]
    )
    # multiprocessing's frames
    stack = itertools.dropwhile(lambda f: f.filename != __file__, stack)
    stack = itertools.dropwhile(lambda f: f.filename == __file__, stack)  # and ours
    return _without_paths_of_cells("".join(traceback.format_list(list(stack))))


def _without_paths_of_cells(text: str) -> str:
    return re.sub(r'"[^"\n]*ipykernel_\d+[\\/]\d+\.py"', '"<cell>"', text)


class _Output(io.TextIOBase):
    """A stdout or stderr that sends whole lines to the caller, one line per thread."""

    encoding = "utf-8"

    def __init__(self, kind: str, send: Callable):
        self.kind, self.send = kind, send
        self.begun = {}  # thread -> the line that it has begun

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        thread = threading.get_ident()
        *lines, self.begun[thread] = (self.begun.get(thread, "") + text).split("\n")
        if lines:
            self.send(self.kind, lines)
        return len(text)

    def finish(self) -> None:
        """Send the lines that were begun and not ended."""
        begun, self.begun = self.begun, {}
        if lines := [line for line in begun.values() if line]:
            self.send(self.kind, lines)


def pickled(value: Any, name: str) -> bytes:
    """Return ``value`` as bytes, or raise a TypeError that says what it was."""
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(f"{name} cannot be sent to another process: {error}") from None
