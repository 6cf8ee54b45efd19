"""How much memory tensors take: at the peak of a computation, and saved for backward."""

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode  # "Extending PyTorch" documents it

from ..data_parallel.scattering import tensors_of
from ..devices import as_device, num_bytes


def peak_memory(function: Callable[[], Any], device: torch.device) -> int:
    """Call ``function`` and return by how many bytes the tensors on ``device`` grew at most.

    On a GPU its allocator reports this. On a CPU it is counted: the storage of every tensor that an
    operation of this thread returns, or of its backward pass, until it is freed. What operations
    use inside, and other threads, are not seen.
    """
    device = as_device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _LiveTensors(device) as tensors:
        function()
    return tensors.peak


class _LiveTensors(TorchDispatchMode):
    """Count the bytes of storages that operations make while the mode is on."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device, self.live, self.peak = device, 0, 0
        self._known: dict[int, weakref.finalize] = {}  # by storage, also of those not counted

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Count the storages that an operation makes."""
        for tensor in tensors_of([args, kwargs or {}]):
            self._note(tensor, made_here=False)
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_of([result]):
            self._note(tensor, made_here=True)
        return result

    def _note(self, tensor: torch.Tensor, made_here: bool) -> None:
        if tensor.layout != torch.strided or tensor.device != self.device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            nbytes = storage.nbytes() if made_here else 0
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            self._known[key] = weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        del self._known[key]
        self.live -= nbytes

    def __exit__(self, *error):
        """Stop counting, also of what is freed later."""
        for finalizer in list(self._known.values()):
            finalizer.detach()
        return super().__exit__(*error)


def saved_memory(function: Callable, without: Iterable[torch.Tensor] = ()) -> tuple[Any, int]:
    """Call ``function``; return its result, and the bytes that autograd saved for backward.

    A storage is counted once, and not at all if it is that of ``without`` or of the result.
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
    """Return what is the same for all views of a tensor, and the bytes of the whole storage."""
    if tensor.layout != torch.strided:
        return tensor, num_bytes(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
