"""How much memory tensors take: at the peak of a computation, and for the sake of backward.

On a GPU torch's allocator keeps count. On a CPU nothing does, so ``peak_memory`` looks at every
operation and counts what it returns. Notebook 04 uses this file.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode  # "Extending PyTorch" documents it

from .devices import num_bytes
from .scattering import tensors_of


def peak_memory(function: Callable[[], Any], device: torch.device) -> int:
    """Call ``function`` and return by how many bytes the tensors on ``device`` grew at most.

    On a GPU this is what its allocator reports. On a CPU it is counted: the storage of every tensor
    that an operation of this thread, or of its backward pass, returns, until it is freed; what an
    operation uses inside is not seen.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _LiveTensors() as tensors:
        function()
    return tensors.peak


class _LiveTensors(TorchDispatchMode):
    """Count the bytes of storages that operations make while the mode is on."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()  # storages that were there before, or are counted

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Do the operation, then count the storages that are new."""
        for tensor in tensors_of([args, kwargs or {}]):
            self._note(tensor, new=False)
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_of([result]):
            self._note(tensor, new=True)
        return result

    def _note(self, tensor: torch.Tensor, new: bool) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            nbytes = storage.nbytes() * new
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, storage._cdata, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


def saved_memory(
    function: Callable[[], Any], without: Iterable[torch.Tensor] = ()
) -> tuple[Any, int]:
    """Call ``function``; return its result, and the bytes that autograd saved for backward.

    A storage is counted once, and not at all if it is that of a tensor in ``without`` or of the
    result: what is kept anyway.
    """
    saved = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
        else:
            saved[tensor] = num_bytes(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    for tensor in [*without, *tensors_of(result)]:
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    return result, sum(saved.values())
