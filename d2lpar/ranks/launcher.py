"""Ranks in a cell: run a function as k real processes that send each other messages.

``torchrun`` starts a script k times; ``launch`` starts a *function* k times, wherever
it was written: in a cell, in a script, on standard input. It travels by value
(cloudpickle), so the caller's main module is not run again. The ranks are forked in a
tenth of a second from a server that has imported torch (``forkserver``). Forks of the
caller would hang once it has used OpenMP.

The ranks meet in a file, which opens no port, and gloo listens on the loopback
interface alone. What runs inside a rank is in ``worker``. Notebook 04 uses this file.
Source: ``multiprocessing``.
"""

import contextlib
import inspect
import linecache
import multiprocessing
import operator
import os
import pickle
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.util import get_temp_dir
from types import ModuleType
from typing import Any

import cloudpickle

from .lanes import SharedMemory
from .worker import Failure, Job, be_rank, kill_group

GRACE = 0.1  # seconds for which others may report too, once one rank has failed
ANSWER = 1.0  # seconds in which a rank must say where it stands, once the time is up

# two threads may launch, but not change the environment at once
_starting = threading.Lock()


class RankError(RuntimeError):
    """A rank raised an exception, died, or did not finish in time.

    ``rank`` is the first that failed, before those that only missed another; ``errors``
    has the traceback of each that failed, and the place of each that did not finish.
    """

    def __init__(
        self, message: str, rank: int | None = None, errors: dict | None = None
    ):
        super().__init__(message)
        self.rank, self.errors = rank, errors or {}


def launch(
    fn: Callable, world_size: int, *args: Any, timeout: float = 120.0, threads: int = 1
) -> list:
    """Call ``fn(rank, world_size, *args)`` in so many processes; list their results.

    In every rank the default process group is ready (gloo, this machine only), RANK,
    WORLD_SIZE and LOCAL_RANK are set as torchrun sets them, and the environment, the
    working directory and ``sys.path`` are the caller's. The random generators of torch
    and Python are seeded with the rank. A rank works on copies: only its result comes
    back. It may start processes, such as a DataLoader's workers. Once all ranks have
    returned, they and these are killed: close your files.

    What a rank prints, the caller prints, in whole lines that begin with ``[rank 0]``;
    what C code or a rank's own processes print goes to the terminal as it is. ``fn``
    may also be a closure, a lambda or defined in a cell. The ranks may take ``timeout``
    seconds once they are started; torch's operations have ``threads`` threads in each.

    Raises:
        RankError: a rank raised an exception, died, or did not finish in time; all
            are ended.
        TypeError: fn or an argument cannot be pickled.
        RuntimeError: called from a rank, or the ranks cannot be started.
    """
    _check(fn, world_size, timeout)
    try:
        call = cloudpickle.dumps((fn, args))
    except Exception as error:
        problem = f"{_culprit(fn, args)} cannot be sent to another process: {error}"
        raise TypeError(problem) from None
    context = multiprocessing.get_context("forkserver")
    # torch.optim imports torch._dynamo when it is first used: seconds, in every rank
    context.set_forkserver_preload(
        ["torch", "torch.distributed", "torch._dynamo", Job.__module__]
    )
    store = os.path.join(get_temp_dir(), f"store-{uuid.uuid4().hex}")
    processes, memory = [], None
    # A rank that stops in the middle of a message would block the one that reads it
    # forever
    last_resort = threading.Timer(timeout + 3 * ANSWER, _kill, [processes])
    last_resort.daemon = True
    try:
        with _starting, _deferred_interrupt():
            memory = SharedMemory.create(world_size, context)
            environment = dict(os.environ)
            job = Job(
                call, _sources_of_cells(), environment, store, memory, timeout, threads
            )
            _start(processes, world_size, job, context)
            last_resort.start()
        return _gather(processes, timeout)
    finally:
        last_resort.cancel()
        with _deferred_interrupt():
            _end(processes)
            if memory:
                memory.remove()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(store)


def _check(fn: Callable, world_size: int, timeout: float) -> None:
    if not callable(fn):
        raise TypeError(
            f"launch needs a function, got {fn!r}; write launch(f, 2), not launch(f())"
        )
    if operator.index(world_size) < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not 0 < timeout <= 1e6:
        raise ValueError(
            f"timeout must be more than 0 and at most 1e6 seconds, got {timeout}"
        )
    if multiprocessing.parent_process():
        raise RuntimeError(
            "launch was called from a rank or a worker, which cannot start ranks"
        )


def _culprit(fn: Callable, args: tuple) -> str:
    """Name what in a call cannot be pickled: "RLock object" alone helps no student."""
    suspects = {
        f"argument {i} ({type(value).__name__})": value for i, value in enumerate(args)
    }
    if inspect.isfunction(fn):
        used = inspect.getclosurevars(fn)
        for name, value in {**used.globals, **used.nonlocals}.items():
            suspects[f"{name!r} ({type(value).__name__}), which the function uses,"] = (
                value
            )
    for name, value in suspects.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return name
    return f"the function {fn!r}"


def _sources_of_cells() -> dict:
    """Return the source of code that is in no file, for the tracebacks of ranks."""
    # an entry is (length, time of the file, lines, name)
    entries = linecache.cache.copy().items()
    return {
        name: entry for name, entry in entries if len(entry) == 4 and entry[1] is None
    }


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Let SIGINT wait: it might half-start a rank, or kill an importing fork server."""
    came = []
    if in_main_thread := threading.current_thread() is threading.main_thread():
        handler = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    resource_tracker.ensure_running()  # first, since it unblocks SIGINT when it starts
    # children inherit it
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def _apart_from_the_caller() -> Iterator[None]:
    """Keep new processes from running the main module or a student's random.py.

    Torch's compiler, which the fork server imports, makes folders: let them be in one
    that is removed.
    """
    own = get_temp_dir()
    ours = {"PYTHONSAFEPATH": "1", "TORCHINDUCTOR_CACHE_DIR": own, "TMPDIR": own}
    before = {name: os.environ.get(name) for name in ours}
    main = sys.modules["__main__"]
    os.environ.update(ours)
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def _start(processes: list, world_size: int, job: Job, context) -> None:
    """Start the ranks. Each is in ``processes`` before its start, which may fail."""
    try:
        with _apart_from_the_caller():
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                own = job._replace(memory=job.memory and job.memory.part_of(rank))
                call, name = (rank, world_size, theirs, own), f"d2lpar rank {rank}"
                process = context.Process(
                    target=be_rank, args=call, name=name, daemon=True
                )
                processes.append((process, ours))
                # closed here, so that the connection ends when the rank does
                with theirs:
                    process.start()
    except (OSError, EOFError) as error:
        raise RuntimeError(f"the ranks cannot be started: {error}") from error


def _gather(processes: list, timeout: float) -> list:
    """Wait for all results; raise as soon as one rank has failed or the time is up."""
    waiting = {connection: rank for rank, (_, connection) in enumerate(processes)}
    outcomes = _listen(waiting, processes, timeout)
    failures = {
        r: outcomes[r] for r in sorted(outcomes) if isinstance(outcomes[r], Failure)
    }
    if failures:
        raise _failed(failures)
    if waiting:
        unfinished = sorted(waiting.values())
        for connection in waiting:
            with contextlib.suppress(OSError):
                connection.send("where are you?")
        raise _timed_out(
            unfinished, outcomes, timeout, _listen(waiting, processes, ANSWER)
        )
    return [_read(rank, outcomes[rank]) for rank in range(len(processes))]


def _read(rank: int, result: bytes) -> Any:
    try:
        return pickle.loads(result)
    except Exception as error:
        raise RankError(
            f"rank {rank}: its result cannot be read back: {error!r}", rank
        ) from error


def _listen(
    waiting: dict[Connection, int], processes: list, seconds: float
) -> dict[int, Any]:
    """Print lines until all outcomes are here, time is up, or GRACE after a failure."""
    outcomes, deadline = {}, time.monotonic() + seconds
    while waiting and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(waiting), left):
            rank = waiting[connection]
            try:
                kind, content = connection.recv()
            except (EOFError, OSError):  # OSError: in the middle of a message
                kind, content = "failure", _death(processes[rank][0])
            if kind in ("stdout", "stderr"):
                stream = getattr(sys, kind)
                text = "".join(f"[rank {rank}] {line}\n" for line in content)
                # with escapes for what it cannot write
                code = stream.encoding or "utf-8"
                # at once
                stream.write(text.encode(code, "backslashreplace").decode(code))
                stream.flush()
                continue
            outcomes[rank] = content
            del waiting[connection]
            if kind == "failure":
                deadline = min(deadline, time.monotonic() + GRACE)
    return outcomes


def _death(process: multiprocessing.Process) -> Failure:
    """A death counts as first failure: others fail as connections to the dead break."""
    process.join(ANSWER)
    code = process.exitcode
    how = (
        f"signal {signal.Signals(-code).name}"
        if code and code < 0
        else f"exit code {code}"
    )
    return Failure(False, float("-inf"), f"died before it had finished ({how})", "")


def _failed(failures: dict[int, Failure]) -> RankError:
    first = min(failures, key=lambda rank: failures[rank][:2])
    message = (
        f"rank {first}: {failures[first].what}\n\n{failures[first].details}".rstrip()
    )
    others = [
        f"rank {r} ({f.what.split(':')[0]})" for r, f in failures.items() if r != first
    ]
    if others:
        message += f"\n\nfailed too: {', '.join(others)}"
    return RankError(
        message, first, {r: f.details or f.what for r, f in failures.items()}
    )


def _timed_out(
    unfinished: list, outcomes: dict, timeout: float, answers: dict
) -> RankError:
    names = ", ".join(f"rank {rank}" for rank in unfinished)
    finished = ", ".join(str(rank) for rank in sorted(outcomes)) or "none"
    message = f"{names} did not finish within {timeout:g} s (finished: {finished})"
    unknown = (
        "no answer: still starting, just finished, or in C code that does not return"
    )
    errors = {
        r: answers[r] if isinstance(answers.get(r), str) else unknown
        for r in unfinished
    }
    for rank, where in errors.items():
        message += (
            f"\n\nwhere rank {rank} stands (most recent call last):\n{where}".rstrip()
        )
    return RankError(message, unfinished[0], errors)


def _kill(processes: list) -> None:
    """Kill all ranks: their results and lines are here, so no polite end is needed."""
    for process, _ in processes:
        if process.pid:
            kill_group(process.pid)  # what a rank has started may outlive it
            process.kill()  # while it starts it is not yet in its group


def _end(processes: list) -> None:
    _kill(processes)
    for process, connection in processes:
        if process.pid:
            process.join(5)
        connection.close()  # not before: to a rank it means that the caller is gone
