"""Workshop. Ranks in a cell, k real processes that run one function.

``torchrun`` starts a script k times; ``launch`` starts a *function* k times. It travels
by value (cloudpickle): the caller's main module is not run again. Ranks are forked in a
tenth of a second from a server that has imported torch. Forks of the caller would hang
once it has used OpenMP. What runs beside the caller is in ``worker``.
"""

import copyreg
import importlib
import io
import linecache
import marshal
import multiprocessing
import operator
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle
import torch

from .worker import Failure, Job, serve

START = 300.0  # seconds in which the server must have imported torch
PACKAGE = Path(__file__).parents[1] / "__init__.py"
GRACE = 0.1  # seconds for which others may report too, once one rank has failed
DRAIN = 1.0  # seconds in which what ranks have sent is read, once their parent is gone

# The server has the caller's d2lpar, whatever else has this name, and Python's random,
# not one in the working directory (-P). The first optimizer would import torch._dynamo,
# in every rank, for seconds; this makes a folder for its cache, if it is told of none.
PROGRAM = f"""
import importlib.util, os, sys, tempfile
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.gettempdir()
import torch._dynamo
spec = importlib.util.spec_from_file_location("d2lpar", {str(PACKAGE)!r})
sys.modules["d2lpar"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["d2lpar"])
from {serve.__module__} import serve
serve()
"""

# torch.ops is a module with a class of its own, which is not pickled as a module is
copyreg.pickle(type(torch.ops), lambda ops: (importlib.import_module, (ops.__name__,)))

_asking = threading.Lock()  # of two threads that launch, one starts the server


class _Pickler(cloudpickle.Pickler):
    """Keep the names of cells and files, for tracebacks: cloudpickle 3.1.3 does not."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(
        {CodeType: lambda code: (marshal.loads, (marshal.dumps(code),))}
    )


class RankError(RuntimeError):
    """A rank raised an exception, died, or did not finish in time.

    ``rank`` is the first that failed, before those that only missed another; ``errors``
    has the traceback of each that failed, and the place of each that did not finish.
    """

    def __init__(self, message: str, rank: int = 0, errors: dict | None = None):
        super().__init__(message)
        self.rank, self.errors = rank, errors


def launch(
    fn: Callable, world_size: int, *args: Any, timeout: float = 120.0, threads: int = 1
) -> list:
    """Call ``fn(rank, world_size, *args)`` in so many processes; list their results.

    In a rank the default process group is ready (gloo, on this machine only), and RANK,
    LOCAL_RANK and WORLD_SIZE are set as by torchrun. The environment, the working
    directory, ``sys.path`` and torch's default dtype are the caller's; modules are
    imported anew, and torch and Python draw numbers seeded with the rank. A rank
    works on copies, and has no keyboard. It may start processes. Once all ranks have
    returned, they and these are killed, but for those in sessions of their own: close
    your files.

    What a rank prints, the caller prints, in whole lines that begin with ``[rank 0]``;
    what C code or a rank's own processes print goes straight to the terminal. The ranks
    may take ``timeout`` seconds once started; torch has ``threads`` threads in each.

    Raises RankError if a rank raises, dies or is late, TypeError if fn or an argument
    cannot be pickled, RuntimeError if no rank can be started.
    """
    _check(fn, world_size, timeout)
    call = io.BytesIO()
    try:
        _Pickler(call).dump((fn, args))
    except Exception as error:
        what = f"{fn!r}, what it uses, or an argument"
        raise TypeError(f"{what} cannot be sent to a rank: {error}") from None
    known = linecache.cache.copy().items()  # cells too, whose sources have no time
    sources = {name: entry for name, entry in known if len(entry) == 4 and not entry[1]}
    dtype, place = torch.get_default_dtype(), os.getcwd()
    surroundings = dict(os.environ), place, sys.path, sys.argv, sources, dtype
    job = Job(call.getvalue(), surroundings, world_size, timeout, threads)
    with ExitStack() as stack:
        try:
            parent, *ranks = _start(job, stack)
        except OSError as error:
            raise RuntimeError(f"the ranks cannot be started: {error}") from error
        outcomes = _gather(parent, ranks, timeout)
    results = [outcomes.get(rank) for rank in range(world_size)]
    if not all(isinstance(result, bytes) for result in results):
        raise _error(outcomes, timeout)
    return [pickle.loads(result) for result in results]


def _check(fn: Callable, world_size: int, timeout: float) -> None:
    if not callable(fn):
        hint = "write launch(f, 2), not launch(f())"
        raise TypeError(f"launch needs a function, got {fn!r}; {hint}")
    if operator.index(world_size) < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not 0 < timeout <= 1e6:
        raise ValueError(f"timeout must be above 0, at most 1e6 seconds, got {timeout}")


def _start(job: Job, stack: ExitStack) -> list[Connection]:
    """Start ranks; return connections to their parent and to each.

    Closing ``stack`` ends them, as the end of this process would.
    """
    parent, theirs = multiprocessing.Pipe()
    ours = [stack.enter_context(parent)]
    with theirs, _asking:
        try:
            send_handle(_server(os.getpid()), theirs.fileno(), None)
        except ConnectionError:  # somebody has killed it
            _server.cache_clear()
            send_handle(_server(os.getpid()), theirs.fileno(), None)
    with suppress(ConnectionError):  # it has died, and said why
        parent.send(job)
        for _ in range(job.world_size):
            rank, theirs = multiprocessing.Pipe()
            ours.append(stack.enter_context(rank))
            with theirs:
                send_handle(parent, theirs.fileno(), None)
    return ours


@lru_cache(maxsize=1)
def _server(caller: int) -> Connection:
    """Start the server of this process, or of a fork of it; return its connection."""
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        command = [sys.executable, "-P", "-c", PROGRAM]
        stdin = (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)
        # a session of its own, so that Control-C is only for the caller
        options = {"file_actions": [stdin], "setsid": True}
        os.posix_spawn(sys.executable, command, os.environ, **options)
    return ours


def _gather(parent: Connection, ranks: list[Connection], timeout: float) -> dict:
    """Print what the ranks print until all are gone; return how each has ended.

    A result is bytes; a Failure is one; a str is the place of a rank that was late.
    """
    talking, outcomes = [*ranks, parent], {}
    end = time.monotonic() + START + timeout  # the parent ends earlier, if it can
    while talking and (left := end - time.monotonic()) > 0:
        for connection in wait(talking, left):
            try:
                rank, kind, content = connection.recv()
            except (EOFError, OSError):  # OSError: in the middle of a message
                talking.remove(connection)
                if connection is parent:
                    end = time.monotonic() + DRAIN
                continue
            if kind == "refused":
                raise RuntimeError(f"the ranks cannot be started: {content}")
            if kind != "outcome":
                text = "".join(f"[rank {rank}] {line}\n" for line in content)
                getattr(sys, kind).write(text)  # at once: no other line comes between
                getattr(sys, kind).flush()
                continue
            outcomes.setdefault(rank, content)
            is_last = len(outcomes) == len(ranks)
            if is_last or isinstance(content, Failure):
                with suppress(OSError):  # it has ended
                    parent.send(0 if is_last else GRACE)
    return outcomes


def _error(outcomes: dict, timeout: float) -> RuntimeError:
    """Say which rank failed first, or else where those stand that are late."""
    failed = {r: o for r, o in sorted(outcomes.items()) if isinstance(o, Failure)}
    late = {r: o for r, o in sorted(outcomes.items()) if isinstance(o, str)}
    if failed:
        first = min(failed, key=lambda rank: failed[rank].order)
        errors = {r: f"{f.what}\n\n{f.details}".rstrip() for r, f in failed.items()}
        return RankError(f"rank {first}: {errors[first]}", first, errors)
    if late:
        names = ", ".join(f"rank {r}" for r in late)
        finished = ", ".join(str(r) for r in sorted(outcomes) if r not in late)
        what = f"did not finish within {timeout:g} s (finished: {finished or 'none'})"
        parts = [f"{names} {what}"]
        for r in late:
            parts.append(f"where rank {r} stands (most recent call last):\n{late[r]}")
        return RankError("\n\n".join(parts), min(late), late)
    return RuntimeError("the ranks are gone: what had started them was killed")
