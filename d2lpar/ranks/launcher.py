"""Ranks in a cell: run a function as k real processes that can send each other messages.

``torchrun`` starts a script k times; ``launch`` starts a *function* k times, wherever it was
written: in a cell, in a script with or without a main guard, on standard input. The function
travels by value (cloudpickle), so the caller's main module is never run again. The ranks are forked
from a server that has imported torch already (``forkserver``), so they start in a tenth of a
second; forks of the caller would hang once it has run an OpenMP-sized operation. Where there is no
fork server, ranks are spawned.

The ranks meet in a file, which opens no port, and gloo listens on the loopback interface alone.
What runs inside a rank is in ``worker``. Notebook 03 uses this file. Source: Python's
``multiprocessing``.
"""

import contextlib
import errno
import inspect
import linecache
import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.util import get_temp_dir
from typing import Any

import cloudpickle

from .lanes import SharedMemory
from .worker import Failure, Job, be_rank, kill_group, pickled

GRACE = 0.1  # seconds for which others may report too, once one rank has failed
ANSWER = 1.0  # seconds in which a rank must say where it stands, once the time is up
NAME = "d2lpar rank"  # of a rank's process, with its number

_starting = threading.Lock()  # two threads may launch, but not hide the main module at once


class RankError(RuntimeError):
    """A rank raised an exception, died, or did not finish in time.

    ``rank`` is the first that failed, before those that only missed another; ``errors`` has for
    each that failed its traceback, and for each that did not finish the place where it stood.
    """

    def __init__(self, message: str, rank: int | None = None, errors: dict | None = None):
        super().__init__(message)
        self.rank, self.errors = rank, errors or {}


def launch(
    fn: Callable, world_size: int, *args: Any, timeout: float = 120.0, threads: int = 1
) -> list:
    """Call ``fn(rank, world_size, *args)`` in ``world_size`` processes; return a list of results.

    In every rank the default process group is ready (gloo, this machine only), RANK, WORLD_SIZE and
    LOCAL_RANK are set as torchrun sets them, and the environment, the working directory and
    ``sys.path`` are the caller's. The random generators of torch and Python are seeded with the
    rank. A rank works on copies: what it changes in its arguments or in global variables stays
    there, only the result comes back. A rank may start processes, such as a DataLoader's workers.
    Once all ranks have returned, they and these are killed: close your files.

    What a rank prints, the caller prints, in whole lines that begin with ``[rank 0]``. What C code
    writes, or a process that a rank has started, goes to the terminal as it is.

    Args:
        fn: the function, also a closure, a lambda or one defined in a cell.
        world_size: the number of ranks.
        *args: what the function is given after rank and world_size.
        timeout: seconds that the ranks may take once they are started.
        threads: the number of threads of torch's operations in each rank.

    Raises:
        RankError: a rank raised an exception, died, or did not finish in time; all are ended.
        ValueError: a number is out of range.
        TypeError: fn cannot be called, or fn or an argument cannot be pickled.
        RuntimeError: called from a rank, or the ranks cannot be started; the message says why.
    """
    _check(fn, world_size, timeout, threads)
    call = pickled([fn, *args], lambda: _culprit(fn, args))
    own = get_temp_dir() if multiprocessing.parent_process() is None else None  # or inherited
    context, ranks = _context(), []
    files = [os.path.join(get_temp_dir(), f"store-{uuid.uuid4().hex}")]
    try:
        with _deferred_interrupt():
            if memory := SharedMemory.create(world_size, context):
                files.append(memory.path)
        job = Job(call, _sources_of_cells(), dict(os.environ), files, own, timeout, threads)
        with _named_causes():
            _start(ranks, world_size, job, memory, context)
        with _last_resort(ranks, timeout + 3 * ANSWER):
            return _gather(ranks, timeout)
    finally:
        with _deferred_interrupt():
            _end(ranks)
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file)


def _check(fn: Callable, world_size: int, timeout: float, threads: int) -> None:
    if not callable(fn):
        raise TypeError(f"launch needs a function, got {fn!r}; write launch(f, 2), not launch(f())")
    for name, number in {"world_size": world_size, "threads": threads}.items():
        if type(number) is not int or number < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {number!r}")
    if not isinstance(timeout, int | float) or not 0 < timeout <= 1e6:
        raise ValueError(f"timeout must be more than 0 and at most 1e6 seconds, got {timeout!r}")
    here = multiprocessing.current_process()
    if here.daemon or here.name.startswith(NAME):  # a daemon: the worker of a pool, for instance
        where = f"launch was called from a rank or a worker ({here.name})"
        raise RuntimeError(f"{where}, which cannot have ranks of its own")
    try:
        os.getcwd()
    except FileNotFoundError:
        problem = "the working directory, which would be that of the ranks, has been deleted"
        raise RuntimeError(f"{problem}: change to another one (os.chdir)") from None


def _culprit(fn: Callable, args: tuple) -> str:
    """Name what in a call cannot be pickled: "RLock object" alone does not help a student."""
    suspects = {f"argument {i} ({type(a).__name__})": a for i, a in enumerate(args)}
    with contextlib.suppress(TypeError, ValueError):  # not a Python function; a name not yet bound
        used = inspect.getclosurevars(fn)
        for name, value in {**used.globals, **used.nonlocals}.items():
            suspects[f"{name!r} ({type(value).__name__}), which the function uses,"] = value
    for name, value in suspects.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return name
    return f"the function {getattr(fn, '__name__', fn)!r}"


def _sources_of_cells() -> dict:
    """The source of code that is in no file, so that a rank's traceback can show its lines."""
    return {
        name: (entry[0], None, *entry[2:])  # no modification time: never compared with a file
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(name)
    }


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Hide where the main module comes from: multiprocessing would run it again in each child."""
    main = vars(sys.modules["__main__"])
    saved = {name: main.pop(name) for name in ("__file__", "__spec__") if name in main}
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(saved)


@contextlib.contextmanager
def _tidy_server() -> Iterator[None]:
    """Keep a fork server that starts now from importing what lies in the current directory.

    Torch's compiler, which it imports, makes folders: let them be in one that is removed.
    """
    own = get_temp_dir()
    ours = {"PYTHONSAFEPATH": "1", "TORCHINDUCTOR_CACHE_DIR": own, "TMPDIR": own}
    before = {name: os.environ[name] for name in ours if name in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Let SIGINT wait: it would leave a rank half started, or kill a fork server in its imports."""
    came = []
    if in_main_thread := threading.current_thread() is threading.main_thread():
        handler = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    if posix := hasattr(signal, "pthread_sigmask"):
        resource_tracker.ensure_running()  # first, since it unblocks SIGINT when it starts
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # children inherit it
    try:
        yield
    finally:
        if posix:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def _named_causes() -> Iterator[None]:
    """Say what the operating system lacks that ranks need, and what to do."""
    try:
        yield
    except (OSError, EOFError) as error:
        problem, remedy = str(error), "fix this and call launch again"
        if "AF_UNIX path too long" in problem:
            folder = f"the folder for temporary files, {get_temp_dir()}, has too long a name for"
            problem = f"{folder} a socket in it"
            remedy = "start Python with TMPDIR set to a folder with a shorter one, such as /tmp"
        elif isinstance(error, ConnectionRefusedError | EOFError):
            problem, remedy = "the server that forks them has just ended", "call launch again"
        elif error.errno == errno.EMFILE:
            problem = "this process may not open as many files as so many ranks need"
            remedy = "launch fewer, or raise the limit (ulimit -n)"
        raise RuntimeError(f"the ranks cannot be started: {problem}; {remedy}") from error


def _context() -> multiprocessing.context.BaseContext:
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        # torch.optim imports torch._dynamo when it is first used: seconds, in every rank
        names = ["torch", "torch.distributed", "torch._dynamo", be_rank.__module__]
        context.set_forkserver_preload(names)
    return context


def _start(ranks: list, world_size: int, job: Job, memory: SharedMemory | None, context) -> None:
    """Fill the list of (process, connection), each before it is started: what is in it is ended."""
    with _starting, _deferred_interrupt(), _hidden_main(), _tidy_server():
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            call = (rank, world_size, theirs, job, memory and memory.part_of(rank))
            name = f"{NAME} {rank}"
            process = context.Process(target=be_rank, args=call, name=name, daemon=True)
            ranks.append((process, ours))
            with theirs:  # closed here, so that the connection ends when the rank does
                process.start()


def _gather(ranks: list, timeout: float) -> list:
    """Wait for all results, or raise as soon as one rank has failed or the time is up."""
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    outcomes = _listen(waiting, ranks, timeout)
    failures = {r: outcomes[r] for r in sorted(outcomes) if isinstance(outcomes[r], Failure)}
    if failures:
        raise _failed(failures)
    if waiting:
        unfinished = sorted(waiting.values())
        for connection in waiting:
            with contextlib.suppress(OSError):
                connection.send("where are you?")
        raise _timed_out(unfinished, outcomes, timeout, _listen(waiting, ranks, ANSWER))
    return [_unpickle(outcomes[rank], rank) for rank in range(len(ranks))]


def _unpickle(result: bytes, rank: int) -> Any:
    try:
        return cloudpickle.loads(result)
    except Exception as error:
        problem = f"rank {rank}: its result cannot be read back: {type(error).__name__}: {error}"
        raise RankError(problem, rank) from error


@contextlib.contextmanager
def _last_resort(ranks: list, seconds: float) -> Iterator[None]:
    """Kill the ranks after ``seconds``: one that stops in mid-message would block the reader."""
    timer = threading.Timer(seconds, lambda: [process.kill() for process, _ in ranks])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _listen(waiting: dict[Connection, int], ranks: list, seconds: float) -> dict[int, Any]:
    """Print the lines that come, until every waiting rank has sent something else: its outcome.

    Stops earlier when the time is up, and GRACE after a failure.
    """
    outcomes, deadline = {}, time.monotonic() + seconds
    while waiting and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(waiting), left):
            rank = waiting[connection]
            try:
                kind, content = connection.recv()
            except (EOFError, OSError):  # OSError: in the middle of a message
                kind, content = "failure", _death(ranks[rank][0])
            if kind in ("stdout", "stderr"):
                stream = getattr(sys, kind)
                text = "".join(f"[rank {rank}] {line}\n" for line in content)
                encoding = getattr(stream, "encoding", None) or "utf-8"
                stream.write(text.encode(encoding, "backslashreplace").decode(encoding))  # at once
                stream.flush()
                continue
            outcomes[rank] = content
            del waiting[connection]
            if kind == "failure":
                deadline = min(deadline, time.monotonic() + GRACE)
    return outcomes


def _death(process: multiprocessing.Process) -> Failure:
    """A death counts as the first failure: others fail as their connections to the dead break."""
    process.join(ANSWER)
    code = process.exitcode
    how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
    return Failure(False, float("-inf"), f"died before it had finished ({how})", "")


def _failed(failures: dict[int, Failure]) -> RankError:
    first = min(failures, key=lambda rank: failures[rank][:2])
    message = f"rank {first}: {failures[first].what}\n\n{failures[first].details}".rstrip()
    others = [f"rank {r} ({f.what.split(':')[0]})" for r, f in failures.items() if r != first]
    if others:
        message += f"\n\nfailed too: {', '.join(others)}"
    return RankError(message, first, {r: f.details or f.what for r, f in failures.items()})


def _timed_out(unfinished: list, outcomes: dict, timeout: float, answers: dict) -> RankError:
    names = ", ".join(f"rank {rank}" for rank in unfinished)
    finished = ", ".join(str(rank) for rank in sorted(outcomes)) or "none"
    message = f"{names} did not finish within {timeout:g} s (finished: {finished})"
    unknown = "no answer: still starting, just finished, or in C code that does not return"
    errors = {r: answers[r] if isinstance(answers.get(r), str) else unknown for r in unfinished}
    for rank, where in errors.items():
        message += f"\n\nwhere rank {rank} stands (most recent call last):\n{where}".rstrip()
    return RankError(message, unfinished[0], errors)


def _end(ranks: list) -> None:
    """Kill all ranks. They hold nothing worth a polite end: their results and lines are here."""
    for process, _ in ranks:
        if process.pid:
            kill_group(process.pid)  # what a rank has started may outlive it
            process.kill()  # while it starts it is not yet in its group
    for process, connection in ranks:
        if process.pid:
            process.join(5)
        connection.close()  # not before: to a rank it means that the caller is gone
