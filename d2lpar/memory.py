"""Workshop. How much memory tensors take, at the peak and saved for backward."""

from contextlib import nullcontext
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import saved_tensors_hooks

# Private names: "Extending PyTorch" explains the first, torch's own FSDP has the second
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .devices import as_device


def peak_memory(function, device: torch.device | str) -> int:
    """Call ``function``; return by how many bytes ``device``'s tensors grew.

    On a GPU its allocator reports this. On a CPU it counts the storage of each tensor
    that an operation of this thread, or of a ``watched`` one, returns.
    """
    device = as_device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    outer, watch = _Watch.current, _Watch(device)
    _Watch.current = watch
    try:
        with watch:
            function()
    finally:
        _Watch.current = outer
    return watch.peak


def watched():
    """Return a context in which ``peak_memory``, while it runs, sees this thread."""
    return _Watch.current or nullcontext()


class _Watch(TorchDispatchMode):
    """Note the storages that operations are given and return, while they are alive."""

    current = None

    def __init__(self, device: torch.device):
        super().__init__()
        self.device, self.peak, self.lock = device, 0, Lock()
        self.nbytes = WeakKeyDictionary()  # of storages; 0 of those that were there

    def note(self, tree, made_here: bool) -> None:
        """Count the storages of a tree of tensors that were not seen before."""
        with self.lock:
            for tensor in tree_leaves(tree):
                if isinstance(tensor, torch.Tensor) and tensor.device == self.device:
                    storage = tensor.untyped_storage()
                    self.nbytes.setdefault(storage, storage.nbytes() * made_here)
            self.peak = max(self.peak, sum(self.nbytes.values()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Do what is asked, and note the tensors."""
        self.note((args, kwargs), made_here=False)
        result = function(*args, **(kwargs or {}))
        self.note(result, made_here=True)
        return result


def saved_memory(function, without=()) -> tuple:
    """Call ``function``; return its result, and the bytes it saved for backward.

    Not counted are the storages of the result and of ``without``.
    """
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # the tensor itself would keep its graph alive

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    for tensor in tree_leaves((list(without), result)):
        if isinstance(tensor, torch.Tensor):
            saved.pop(tensor.untyped_storage().data_ptr(), None)
    return result, sum(saved.values())
