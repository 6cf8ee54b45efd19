"""What only the rooms of later chapters still need; their issues empty this file.

Ranks that torchrun starts: which one this is, how they meet, and how they end. Ranks in
rows and columns. A thread that makes calls, and labelled messages for a pipeline.
"""

import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..collectives import check_tensor, kind_of
from ..memory import watched
from .collectives import sendable
from .transport import MismatchError, group_of, prepare

Group = dist.ProcessGroup | None  # None: all ranks

NUMBERS = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
VARIABLES = *NUMBERS, "MASTER_ADDR", "MASTER_PORT"  # what torchrun sets
LOOK = 0.2  # seconds after which a rank looks whether torchrun is still there
# seconds at most to reach torchrun's store, which is there before the ranks are
STORE = 30.0


class Place(NamedTuple):
    """Which rank a process is, of how many, in all and on its machine."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


def is_alone(environment: Mapping[str, str]) -> bool:
    """Return whether none of torchrun's variables is set: this is the only rank."""
    return not any(environment.get(name) for name in VARIABLES)


def place(environment: Mapping[str, str]) -> Place:
    """Return the place that torchrun's variables give this process.

    ValueError names the variables if some are not set, or contradict each other.
    """
    if is_alone(environment):
        return Place(0, 0, 1, 1)
    if missing := [name for name in VARIABLES if not environment.get(name)]:
        raise ValueError(f"not set: {', '.join(missing)}; torchrun sets all of them")
    here = Place(*(int(environment[name]) for name in NUMBERS))
    rank, local_rank, size, local_size = here
    if not (0 <= local_rank <= rank < size and local_rank < local_size <= size):
        given = ", ".join(f"{name}={environment[name]}" for name in NUMBERS)
        raise ValueError(
            f"these contradict each other: {given}; torchrun sets all of them"
        )
    return here


@contextmanager
def process_group(backend: str, timeout: float) -> Iterator[None]:
    """Have the default group in the block; ranks wait ``timeout`` s for others."""
    limit = timedelta(seconds=timeout)
    if is_alone(os.environ):
        store, rank, world_size = dist.HashStore(), 0, 1
        # No port beyond this machine: gloo listens even where there is nobody to talk
        # to.
        os.environ.setdefault(
            "GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo"
        )
    else:
        if dist.is_torchelastic_launched():
            threading.Thread(
                target=_end_with, args=(os.getppid(),), daemon=True
            ).start()
        is_there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        soon = min(limit, timedelta(seconds=STORE))
        store, rank, world_size = next(
            rendezvous("env://", timeout=soon if is_there else limit)
        )
        store.set_timeout(limit)
        store = meet(store, rank, world_size, timeout)
    dist.init_process_group(backend, None, limit, world_size, rank, store)
    try:
        prepare(None, timeout)
        yield
    finally:
        dist.destroy_process_group()


def meet(store: dist.Store, rank: int, world_size: int, timeout: float) -> dist.Store:
    """Return a part of the store that no earlier attempt has used, named by rank 0.

    torchrun's store outlives a restart, with the addresses of the processes that are
    gone, and the torchruns of several machines do not count the same restarts. So each
    rank asks with a new word, which no earlier rank 0 can have answered.
    """
    word = uuid.uuid4().hex
    if rank > 0:
        store.set(f"question of rank {rank}", word)
        store.add(f"rank {rank} has asked", 1)
        name = store.get(f"answer of rank 0 to {word}").decode()
        store.add(f"rank {rank} is in {name}", 1)
        return dist.PrefixStore(name, store)
    deadline, missing = time.monotonic() + timeout, list(range(1, world_size))
    while missing:
        for other in missing:
            # adding 0 looks without waiting
            if store.add(f"rank {other} has asked", 0):
                question = store.get(f"question of rank {other}").decode()
                store.set(f"answer of rank 0 to {question}", word)
        missing = [
            other for other in missing if not store.add(f"rank {other} is in {word}", 0)
        ]
        if missing and time.monotonic() > deadline:
            who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            raise TimeoutError(f"{who} did not come within {timeout:g} s")
        time.sleep(0.01)
    return dist.PrefixStore(word, store)


def _end_with(torchrun: int) -> None:
    """End this process when its parent is gone: killed, torchrun leaves it running."""
    while os.getppid() == torchrun:
        time.sleep(LOOK)
    print("torchrun is gone, so this rank ends", file=sys.stderr, flush=True)
    os._exit(1)


def make_grid(
    num_rows: int, num_columns: int
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the process groups of this rank's row and column: called by all ranks.

    Rank r is in row r // num_columns: the ranks of a row are neighbours, usually on one
    machine.
    """
    world_size = dist.get_world_size()
    if num_rows < 1 or num_rows * num_columns != world_size:
        raise ValueError(
            f"{world_size} ranks do not make {num_rows} rows of {num_columns} columns"
        )
    places = torch.arange(world_size).view(num_rows, num_columns)
    row, _ = dist.new_subgroups_by_enumeration(places.tolist())
    column, _ = dist.new_subgroups_by_enumeration(places.T.tolist())
    return row, column


class Sender:
    """A daemon thread that makes calls one by one, beside backward.

    A process that ends does not wait for it, as it would for a
    ``ThreadPoolExecutor(1)``: a rank that has failed would stay until its last message
    is taken.
    """

    def __init__(self):
        self._calls = SimpleQueue()
        Thread(
            target=_make, args=(self._calls,), name="communication", daemon=True
        ).start()

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
        # False: it was cancelled while it waited
        if future.set_running_or_notify_cancel():
            try:
                with watched():  # what it makes counts, too
                    future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
        # or what they hold would live until the next call
        del (call, future, function, args)


def send_labelled(
    tensor: torch.Tensor,
    dst: int,
    label: str,
    group=None,
    timeout: float | None = None,
    wants_gradient: bool = False,
) -> None:
    """Send a tensor with a label, which the receiver must expect."""
    group = group_of(group)
    check_tensor(tensor, "the tensor")
    member, deadline = group.member(dst), group.deadline(timeout)
    flat = sendable(tensor, group).cpu()
    with group.alone(f"send of {label!r} to rank {dst}", "send"):
        note = f"0 send {kind_of(tensor)} {wants_gradient:d} {label}"
        group.tell({member: note}, [], deadline)
        group.exchange([(member, flat)], [], deadline)


def receive_labelled(
    src: int, label: str, device, group=None, timeout: float | None = None
) -> torch.Tensor:
    """Return on ``device`` what comes next; MismatchError if its label is another."""
    group = group_of(group)
    member, deadline = group.member(src), group.deadline(timeout)
    with group.alone(f"receive of {label!r} from rank {src}", "receive"):
        _, plan = group.tell({}, [member], deadline)[member].split(" ", 1)
        if not plan.startswith("send "):
            group.broken = f"{label!r} was expected, but rank {src} says: {plan}"
            raise MismatchError(group.broken)
        kind, _, rest = plan.removeprefix("send ").partition("]")
        dtype, _, shape = kind.partition(" ")
        wants_gradient, found = rest.split(maxsplit=1)
        tensor = torch.empty(json.loads(shape + "]"), dtype=getattr(torch, dtype))
        group.exchange([], [(member, tensor.view(-1), None)], deadline)
    if found != label:
        raise MismatchError(
            f"rank {src} has sent {found!r}, but {label!r} was expected"
        )
    return tensor.to(device).requires_grad_(wants_gradient == "1")
