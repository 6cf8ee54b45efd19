"""Ranks that torchrun starts: which one this is, how they meet, and how they end.

``launcher`` starts ranks itself. Here torchrun has started them, on any number of
machines, and starts them again when one fails. A process that nobody has started so is
the only rank.
"""

import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from .members import use_messages
from .transport import name_ranks

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
        use_messages(timeout=timeout)
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
            raise TimeoutError(
                f"{name_ranks(missing)} did not come within {timeout:g} s"
            )
        time.sleep(0.01)
    return dist.PrefixStore(word, store)


def _end_with(torchrun: int) -> None:
    """End this process when its parent is gone: killed, torchrun leaves it running."""
    while os.getppid() == torchrun:
        time.sleep(LOOK)
    print("torchrun is gone, so this rank ends", file=sys.stderr, flush=True)
    os._exit(1)
