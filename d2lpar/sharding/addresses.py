"""What autograd keeps for backward: of a parameter, only where it lies in its unit.

When backward asks for it, the unit is gathered again. Notebook 11 builds this file.
"""

import torch
from torch.autograd.graph import saved_tensors_hooks


class Addresses(saved_tensors_hooks):
    """Keeps for backward, instead of a parameter, where it lies in its unit."""

    def __init__(self, unit):
        super().__init__(self.pack, self.unpack)
        self.unit = unit

    def pack(self, tensor: torch.Tensor):
        """Return a parameter's address; anything else is left to the hooks around."""
        if is_view(tensor, self.unit.whole):
            return tensor.size(), tensor.stride(), tensor.storage_offset()
        self.__exit__()
        try:
            with torch.enable_grad():
                return _Kept.apply(self.unit.traffic.token, tensor.detach())
        finally:
            self.__enter__()

    def unpack(self, kept) -> torch.Tensor:
        """Return what was kept; for a parameter, gather the unit."""
        if not isinstance(kept, tuple):
            return kept.grad_fn.saved_tensors[0]
        self.unit.gather()
        return self.unit.whole.as_strided(*kept)


class _Kept(torch.autograd.Function):
    """A node that keeps a tensor as other hooks want: a checkpoint's keep nothing."""

    @staticmethod
    def forward(ctx, token, tensor):
        ctx.save_for_backward(tensor)
        return token.clone()

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError


def is_view(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    """Tell whether a tensor shows numbers of ``whole``, as they are."""
    if tensor.layout is not torch.strided or tensor.dtype != whole.dtype:
        return False
    address, own = (x.untyped_storage().data_ptr() for x in (tensor, whole))
    return address == own and not tensor.is_neg()
