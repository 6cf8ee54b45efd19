"""Workshop. Devices, real or virtual, and a ledger of what is sent between them.

A list of devices may name the same device several times. Each *position* in the list is
then a virtual device: it has its own tensors, in a memory that all of them share. What
goes from one position to another goes through ``to_device``, so that a ``Ledger``
counts it on a laptop as well as on eight GPUs.
"""

import platform
import re
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch


def try_gpu(i: int = 0) -> torch.device:
    """Return GPU number ``i`` if there is one, else the CPU."""
    there = 0 <= i < torch.cuda.device_count()
    return torch.device("cuda", i) if there else torch.device("cpu")


def try_all_gpus() -> list[torch.device]:
    """Return every GPU, or a list with the CPU alone where there is none."""
    return [try_gpu(i) for i in range(max(1, torch.cuda.device_count()))]


def choose_devices(k: int) -> tuple[list[torch.device], str]:
    """Return ``k`` devices, and words that say which: GPUs, else virtual devices."""
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"the number of devices must be a positive int, not {k!r}")
    real = try_all_gpus()
    devices = [real[i % len(real)] for i in range(k)]
    names = ", ".join(map(str, real[:k]))
    return devices, names if k <= len(real) else f"{k} virtual devices on {names}"


def as_device(device: torch.device | str | int) -> torch.device:
    """Return ``device`` as tensors name theirs, such as cuda:0; an int is a GPU."""
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:  # which of them hangs on the build
        gpus = torch.cuda.device_count() or "none"
        problem = f"there is no device {device!r}: GPUs that torch sees here: {gpus}"
        raise ValueError(f'{problem}. Use "cpu", as often as you like') from error


def check_devices(devices) -> list[torch.device]:
    """Return ``devices`` as tensors name theirs; raise for a missing device."""
    if isinstance(devices, str | int | torch.device):
        raise TypeError(f"devices must be a list of devices, not {devices!r}")
    if not devices:
        raise ValueError("devices is empty: there must be at least one")
    return [as_device(device) for device in devices]


def hardware() -> str:
    """Name the machine's processors, to stand beside a timing."""
    n, cpuinfo = torch.get_num_threads(), Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    names = re.findall(r"model name\s*: (.*)", text) + [platform.processor()]
    cores = f"{n} thread{'s' * (n > 1)} of {names[0] or platform.machine()}"
    gpus = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    parts = [f"{count} x {name}" for name, count in Counter(gpus).items()]
    return ", ".join([*parts, cores, f"torch {torch.__version__}"])


class Ledger:
    """What was sent: ``bytes`` and ``messages`` per (source, destination) position."""

    current = None  # the one that is open: all threads write into it

    def __init__(self):
        self.bytes, self.messages = Counter(), Counter()
        self._lock = threading.Lock()

    def record(self, src, dst, nbytes: int) -> None:
        """Count a message of ``nbytes`` bytes from position ``src`` to ``dst``."""
        with self._lock:
            self.bytes[src, dst] += nbytes
            self.messages[src, dst] += 1

    def sent(self, position) -> int:
        """Return the bytes that left ``position``."""
        return sum(n for (src, _), n in self.bytes.items() if src == position)


@contextmanager
def count_bytes():
    """Count the bytes that move between positions in the ``with`` block."""
    outer, Ledger.current = Ledger.current, Ledger()
    try:
        yield Ledger.current
    finally:
        Ledger.current = outer


def record_message(tensor: torch.Tensor, src, dst) -> None:
    """Write into the open ledger, if any, that a tensor goes from src to dst."""
    if Ledger.current is not None and src != dst:
        Ledger.current.record(src, dst, tensor.nbytes)


def to_device(tensor: torch.Tensor, device: torch.device, src, dst) -> torch.Tensor:
    """Return ``tensor`` on ``device``, sent from position ``src`` to ``dst``.

    Positions are ints, or "host" for the place where a batch comes from. Do not write
    to the result: where both positions share one memory, it is the tensor itself or a
    view of it. The ledger counts the message, and the gradient that goes back.
    """
    record_message(tensor, src, dst)
    there = tensor.to(device)
    goes_back = there.requires_grad and src != dst
    return _WayBack.apply(there, src, dst) if goes_back and Ledger.current else there


class _WayBack(torch.autograd.Function):
    """The tensor itself; when its gradient comes back, the ledger counts it."""

    @staticmethod
    def forward(ctx, tensor, src, dst):
        ctx.src, ctx.dst = src, dst
        return tensor.detach()

    @staticmethod
    def backward(ctx, grad):
        record_message(grad, ctx.dst, ctx.src)
        return grad, None, None
