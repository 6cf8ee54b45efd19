"""How much memory tensors take: at a computation's peak, and saved for backward."""

import weakref
from collections.abc import Callable, Hashable, Iterable
from threading import RLock
from typing import Any
from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks

# "Extending PyTorch" documents it
from torch.utils._python_dispatch import TorchDispatchMode

from ..data_parallel.scattering import tensors_of
from ..devices import as_device, num_bytes
from ..ranks import Sender


def peak_memory(function: Callable[[], Any], device: torch.device) -> int:
    """Call ``function``; return by how many bytes ``device``'s tensors grew.

    On a GPU its allocator reports this. On a CPU it is counted: the storage of every
    tensor that an operation of this thread returns, of its backward pass, or of a
    communication thread (``Sender``), until it is freed. What operations use inside,
    and other threads, are not seen.
    """
    device = as_device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    live, submit = _Live(device), Sender.submit

    def watched(function: Callable, *args: Any) -> Any:
        with _Watch(live):
            return function(*args)

    with (
        _Watch(live),
        mock.patch.object(
            Sender, "submit", lambda sender, *call: submit(sender, watched, *call)
        ),
    ):
        try:
            function()
        finally:
            live.forget_all()
    return live.peak


class _Live:
    """The storages on a device that are alive, and their bytes."""

    def __init__(self, device: torch.device):
        self.device, self.nbytes, self.peak = device, 0, 0
        # by storage, also of those not counted
        self._known: dict[int, weakref.finalize] = {}
        self._lock = RLock()  # a storage may be freed while another one is noted

    def note(self, tensor: torch.Tensor, made_here: bool) -> None:
        """Count a tensor's storage, if it was not seen before and was made here."""
        if tensor.layout != torch.strided or tensor.device != self.device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if key not in self._known:
                nbytes = storage.nbytes() if made_here else 0
                self.nbytes += nbytes
                self.peak = max(self.peak, self.nbytes)
                self._known[key] = weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        with self._lock:
            del self._known[key]
            self.nbytes -= nbytes

    def forget_all(self) -> None:
        """Stop counting, also of what is freed later."""
        for finalizer in list(self._known.values()):
            finalizer.detach()


class _Watch(TorchDispatchMode):
    """Note the tensors that operations of one thread are given and return."""

    def __init__(self, live: _Live):
        super().__init__()
        self.live = live

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Count the storages that an operation makes."""
        for tensor in tensors_of([args, kwargs or {}]):
            self.live.note(tensor, made_here=False)
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_of([result]):
            self.live.note(tensor, made_here=True)
        return result


def saved_memory(
    function: Callable, without: Iterable[torch.Tensor] = ()
) -> tuple[Any, int]:
    """Call ``function``; return its result, and the bytes saved for backward.

    A storage is counted once, and not at all if it is that of ``without`` or of the
    result.
    """
    saved = {}  # the memory of a tensor -> bytes

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        place, nbytes = _memory_of(tensor)
        saved[place] = nbytes
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    for tensor in [*without, *tensors_of(result)]:
        saved.pop(_memory_of(tensor)[0], None)
    return result, sum(saved.values())


def _memory_of(tensor: torch.Tensor) -> tuple[Hashable, int]:
    """Return what all views of a tensor share, and the bytes of the whole storage."""
    if tensor.layout != torch.strided:
        return tensor, num_bytes(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
