"""Devices: GPUs where there are enough, else virtual ones; and a ledger.

A *position* is a place in a list of devices. The list may name one device several
times: every position is then a virtual device, with its own tensors in a memory that
all of them share. What travels between positions goes through ``to_device``, so that a
``Ledger`` can count it on a laptop as well as on eight GPUs. Notebook 02 uses this
file.
"""

import platform
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path

import torch


def try_gpu(i: int = 0) -> torch.device:
    """Return GPU number ``i`` if there is one, else the CPU."""
    return (
        torch.device("cuda", i)
        if 0 <= i < torch.cuda.device_count()
        else torch.device("cpu")
    )


def try_all_gpus() -> list[torch.device]:
    """Return every GPU, or a list with the CPU alone where there is none."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [
        try_gpu()
    ]


def choose_devices(k: int) -> tuple[list[torch.device], str]:
    """Return ``k`` devices, real or virtual, and words that say which.

    Virtual devices take turns on what there is: 4 devices on 2 GPUs are two per GPU.
    """
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"the number of devices must be a positive int, not {k!r}")
    real = try_all_gpus()
    devices = [real[i % len(real)] for i in range(k)]
    return devices, describe(devices)


def as_device(device: torch.device | str | int) -> torch.device:
    """Return ``device`` as tensors name theirs, such as cuda:0; an int is a GPU."""
    try:
        return torch.empty(0, device=device).device
    except torch.OutOfMemoryError:  # it is there, and full
        raise
    # which of them depends on how torch was built
    except (AssertionError, RuntimeError) as error:
        gpus = f"GPUs 0 to {n - 1}" if (n := torch.cuda.device_count()) else "no GPU"
        problem = f"there is no device {device!r}: torch sees {gpus} here"
        raise ValueError(
            f'{problem}. Use "cpu", which a list may name several times'
        ) from error


def check_devices(devices: Sequence[torch.device]) -> list[torch.device]:
    """Return ``devices`` as tensors name theirs; raise for a missing device."""
    if isinstance(devices, (str, torch.device)):
        raise TypeError(f"devices must be a list of devices, not {devices!r}")
    if not devices:
        raise ValueError("devices is empty: there must be at least one")
    return [as_device(device) for device in devices]


def describe(devices: Sequence[torch.device]) -> str:
    """Say in a few words what ``devices`` are, e.g. ``4 virtual devices on cpu``."""
    distinct = list(dict.fromkeys(map(str, devices)))
    if len(distinct) == len(devices):
        return ", ".join(distinct)
    return f"{len(devices)} virtual devices on {', '.join(distinct)}"


def hardware() -> str:
    """Name the machine's processors, to stand beside a timing."""
    n = torch.get_num_threads()
    cores = f"{n} thread{'s' * (n > 1)} of {_processor()}"
    names = Counter(
        torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
    )
    gpus = [f"{count} x {name}" for name, count in names.items()]
    return ", ".join([*gpus, cores, f"torch {torch.__version__}"])


def _processor() -> str:
    with suppress(OSError, subprocess.CalledProcessError):
        # where platform.processor() says no more than "arm"
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.check_output(command, text=True).strip()
        if found := re.search(
            r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()
        ):
            return found[1]
    return platform.processor() or platform.machine()


class Ledger:
    """What was sent: ``bytes`` and ``messages`` per (source, destination) position."""

    def __init__(self):
        self.bytes: Counter = Counter()
        self.messages: Counter = Counter()
        # one thread per device may write at the same time
        self._lock = threading.Lock()

    def record(self, src, dst, nbytes: int) -> None:
        """Count a message of ``nbytes`` bytes from position ``src`` to ``dst``."""
        with self._lock:
            self.bytes[src, dst] += nbytes
            self.messages[src, dst] += 1

    def sent(self, position) -> int:
        """Return the bytes that left ``position``."""
        return sum(n for (src, _), n in self.bytes.items() if src == position)

    def received(self, position) -> int:
        """Return the bytes that arrived at ``position``."""
        return sum(n for (_, dst), n in self.bytes.items() if dst == position)


_ledger: ContextVar[Ledger | None] = ContextVar("ledger", default=None)


@contextmanager
def count_bytes() -> Iterator[Ledger]:
    """Count, inside the ``with`` block, every byte that moves between positions."""
    ledger = Ledger()
    token = _ledger.set(ledger)
    try:
        yield ledger
    finally:
        _ledger.reset(token)


def to_device(tensor: torch.Tensor, device: torch.device, src, dst) -> torch.Tensor:
    """Return ``tensor`` on ``device``, sent from position ``src`` to ``dst``.

    Positions are ints, or "host" for the place where a batch comes from. Do not write
    to the result: where both positions share one memory, it is the tensor itself or a
    view of it. The ledger counts the message, and the gradient that a backward pass
    sends back to ``src``.
    """
    record_message(tensor, src, dst)
    there = tensor.to(device)
    ledger = _ledger.get()
    if (
        ledger is not None
        and src != dst
        and there.requires_grad
        and torch.is_grad_enabled()
    ):
        there = _WayBack.apply(there, partial(ledger.record, dst, src))
    return there


class _WayBack(torch.autograd.Function):
    """The tensor itself; when its gradient comes back, its bytes are recorded."""

    @staticmethod
    def forward(ctx, tensor, record):
        ctx.record = record
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx, grad):
        if grad is not None:
            ctx.record(nbytes=num_bytes(grad))
        return grad, None


def record_message(tensor: torch.Tensor, src, dst) -> None:
    """Write into the ledger, if any, that ``tensor`` goes from ``src`` to ``dst``."""
    ledger = _ledger.get()
    if ledger is not None and src != dst:
        ledger.record(src, dst, num_bytes(tensor))


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a message with ``tensor``; a sparse one has indices."""
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return num_bytes(tensor.indices()) + num_bytes(tensor.values())
    return tensor.numel() * tensor.element_size()
