"""Workshop. What runs beside the caller: a server, parents, and ranks.

The *server* imports torch once, and forks a *parent* for each launch. The parent forks
the *ranks*, tells how one died, and in the end kills them, with what they have started.
A *rank* calls the function, reports what became of it, and stays.
"""

import io
import linecache
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist

from .lanes import Memory
from .transport import PeerError, prepare

LATE = 2.0  # seconds after the time limit in which a rank may say where it stands


class Job(NamedTuple):
    """What the caller hands to the parent of its ranks."""

    call: bytes  # the function and its arguments, pickled
    surroundings: tuple  # of the caller: the arguments of _take_over
    world_size: int
    timeout: float
    threads: int


class Failure(NamedTuple):
    """What is told of a rank that failed."""

    order: float  # 0 for a death, else when; inf if it only says that another failed
    what: str  # in one line
    details: str = ""  # the traceback


def serve() -> None:
    """Be the server: fork a parent for each request, until the caller is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is meant for the caller
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a parent
    requests = Connection(0)
    with suppress(EOFError):
        while True:
            with Connection(recv_handle(requests)) as caller:
                _fork(be_parent, caller)


def _fork(role: Callable, *args: Any) -> int:
    """Return the number of a new process, which only calls ``role(*args)``."""
    if (pid := os.fork()) == 0:
        try:
            role(*args)
        finally:
            os._exit(1)
    return pid


def be_parent(caller: Connection) -> None:
    """Have ranks, each with its own line to the caller, and end with them."""
    os.setpgrp()  # a group with all that the ranks start
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # requests are the server's
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        job, ranks = caller.recv(), {}
        _take_over(*job.surroundings)
        with tempfile.TemporaryDirectory(prefix="d2lpar-") as folder:
            common = job, os.path.join(folder, "store"), Memory.create(job.world_size)
            for rank in range(job.world_size):
                with Connection(recv_handle(caller)) as line:
                    ranks[_fork(be_rank, rank, line, caller, *common)] = rank
            threading.Thread(target=_kill, args=(ranks, caller, job.timeout)).start()
            with suppress(ChildProcessError):  # all are dead
                while True:
                    pid, status = os.wait()
                    if pid in ranks:
                        caller.send((ranks.pop(pid), "outcome", _death(status)))
    except OSError as error:
        caller.send((None, "refused", str(error)))
    finally:
        caller.close()  # the caller need not wait for this process to be taken apart
        os.killpg(0, signal.SIGKILL)


def _take_over(environment, folder, path, argv, sources, dtype) -> None:
    """Give this process, a fork of the server, what surrounds the caller now."""
    os.environ.clear()
    os.environ.update(environment)
    # left alone, gloo may choose an outward interface
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    os.chdir(folder)
    sys.path[:], sys.argv[:] = path, argv
    tempfile.tempdir = None
    linecache.cache.update(sources)  # of cells
    torch.set_default_dtype(dtype)


def _kill(ranks: dict, caller: Connection, timeout: float) -> None:
    """Kill the ranks once the caller is gone, or silent for as long as it said."""
    with suppress(EOFError, OSError):
        seconds = timeout + LATE
        while caller.poll(seconds):
            seconds = caller.recv()
        where = "no answer: it is stopped, or in C code that does not return"
        for rank in ranks.values():
            caller.send((rank, "outcome", where))
    while ranks:
        with suppress(KeyError, ProcessLookupError):  # it has just ended
            pid, _ = ranks.popitem()
            os.kill(pid, signal.SIGKILL)


def _death(status: int) -> Failure:
    code = os.waitstatus_to_exitcode(status)
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Failure(0, f"died before it had finished ({how})")


def be_rank(rank: int, line, caller, job: Job, store: str, memory) -> None:
    """Be a rank: call the function, report, and stay until killed."""
    caller.close()  # that is the parent's connection
    report = _talk(rank, line)
    watch = job.timeout, line, report
    threading.Thread(target=_watch, args=watch, daemon=True).start()
    try:
        _join(rank, job, store, memory)
        fn, args = pickle.loads(job.call)
        outcome = _pickled(fn(rank, job.world_size, *args))
    except BaseException as error:
        outcome = _failure(error)
    # as at the end of any process: it takes the names of locks away
    util._run_finalizers(0)
    report(outcome)
    threading.Event().wait()  # if it left now, those that still talk to it would fail


def _watch(timeout: float, line: Connection, report: Callable) -> None:
    """Say where the main thread stands if the time is up; end if the caller is gone."""
    if not line.poll(timeout):
        frame = sys._current_frames()[threading.main_thread().ident]
        report(_readable(traceback.format_stack(frame)[1:]))  # not the server's program
        line.poll(None)
    os._exit(1)


def _talk(rank: int, line: Connection) -> Callable:
    """Send the caller what this process prints; return what sends it an outcome."""
    lock = threading.RLock()  # a finalizer that prints may run inside send

    def send(kind: str, content: Any) -> None:
        line.send((rank, kind, content))

    def report(outcome: Any) -> None:
        with lock:
            for output in outputs:
                if output.begun:
                    output.write("\n")
            send("outcome", outcome)

    def leave() -> None:  # what a rank forks prints for itself
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        line.close()

    outputs = [_Output(kind, send, lock) for kind in ("stdout", "stderr")]
    sys.stdout, sys.stderr = outputs
    os.register_at_fork(after_in_child=leave)
    return report


class _Output(io.TextIOBase):
    """A rank's stdout or stderr: it sends whole lines."""

    encoding = "utf-8"

    def __init__(self, kind: str, send: Callable, lock):
        self.kind, self.send, self.lock = kind, send, lock
        self.begun = ""  # a line without its end

    def write(self, text: str) -> int:
        with self.lock:
            *lines, self.begun = (self.begun + text).split("\n")
            if lines:
                self.send(self.kind, lines)
        return len(text)


def _join(rank: int, job: Job, store: str, memory: Memory | None) -> None:
    """Do what torchrun does, seed what draws numbers, and join the default group."""
    k = job.world_size
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": k, "LOCAL_WORLD_SIZE": k}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    torch.set_num_threads(job.threads)
    torch.manual_seed(rank)  # or all would draw what their server would
    random.seed(rank)
    file = dist.FileStore(store, k)  # opens no port
    limit = timedelta(seconds=job.timeout + 10)  # beyond the caller's, which tells more
    dist.init_process_group("gloo", None, limit, k, rank, file)
    prepare(memory, 0.9 * job.timeout)  # before the caller's, which tells less


def _pickled(result: Any) -> bytes:
    try:
        return cloudpickle.dumps(result)
    except Exception as error:
        kind = type(result).__name__
        raise TypeError(f"cannot return a {kind} to the caller: {error}") from None


def _failure(error: BaseException) -> Failure:
    order = float("inf") if isinstance(error, PeerError) else time.monotonic()
    what = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
    return Failure(order, what, _readable(traceback.format_exception(error)))


def _readable(entries: list[str]) -> str:
    """Join a traceback's entries, without our own and the paths of cells."""
    text = "".join(entry for entry in entries if f'"{__file__}"' not in entry)
    return re.sub(r'"[^"\n]*ipykernel_\d+[\\/]\d+\.py"', '"<cell>"', text).rstrip()
