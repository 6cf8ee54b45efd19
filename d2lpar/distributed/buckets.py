"""Buckets: gradients side by side in one flat tensor, since every message has a price.

Notebook 07 shows how parameters are dealt out. Source: Li et al., "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training" (VLDB 2020), section 3.2.
"""

from collections.abc import Iterable

import torch
from torch import nn


class Bucket:
    """Gradients side by side in one flat tensor, which travels as one message.

    Gradients of 16 bits lie in it as float32, and are rounded once, when they come out.
    After them the last bucket has the *manifest*: how many ranks have used each
    parameter of all buckets, then the sum of all ranks' weights. Communication hooks
    find the methods of torch's ``GradBucket``.
    """

    def __init__(self, number: int, params: list[nn.Parameter], manifest_size: int = 0):
        self.number, self.params = number, params
        self.ready: set[int] = set()  # which gradients backward has made
        self.sizes = [param.numel() for param in params]
        n, dtype = sum(self.sizes), wide(params[0].dtype)
        self.flat = torch.zeros(n + manifest_size, dtype=dtype, device=params[0].device)
        self.values, self.manifest = self.flat.split([n, manifest_size])
        self.views = self._views_of(self.values)
        self._buffer = self.values  # or what a hook has put in its place

    @property
    def is_full(self) -> bool:
        """Whether backward has made all gradients."""
        return len(self.ready) == len(self.params)

    @torch.no_grad()
    def fill(self, weight: float) -> None:
        """Put every gradient, times ``weight``, into its place; a missing one is 0."""
        self._buffer = self.values
        for param, view in zip(self.params, self.views, strict=True):
            grad = param.grad
            if grad is None or weight == 0:  # the mean over no rows is not a number
                view.zero_()
            elif grad.dtype == view.dtype:
                # in place where the gradient is this view
                torch.mul(grad, weight, out=view)
            else:
                view.copy_(grad).mul_(weight)

    def hand_out(self, i: int, as_view: bool) -> None:
        """Set the i-th gradient to a view of the bucket, or to its own tensor."""
        param, view = self.params[i], self.views[i]
        if as_view and view.dtype == param.dtype:
            param.grad = view
        elif param.grad is None:  # unused on this rank
            param.grad = view.to(param.dtype, copy=True)
        else:
            param.grad.copy_(view)

    def buffer(self) -> torch.Tensor:
        """Return all gradients as one flat tensor."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Let a hook that this one calls see another buffer, of any dtype."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return a view of the buffer for each parameter, with its shape."""
        return self._views_of(self._buffer)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, in the order of their gradients."""
        return self.params

    def index(self) -> int:
        """Return the number of this bucket, in the order in which they are sent."""
        return self.number

    def is_last(self) -> bool:
        """Whether no bucket follows in this pass."""
        return len(self.manifest) > 0

    def _views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = zip(flat.split(self.sizes), self.params, strict=True)
        # empty_like keeps the strides of a channels_last weight
        return [
            part.as_strided(p.shape, torch.empty_like(p).stride()) for part, p in parts
        ]


def make_buckets(params: list[nn.Parameter], bucket_cap_mb: float) -> list[Bucket]:
    """Deal ``params`` out to buckets, the last first: backward begins there."""
    dealt = deal(reversed(params), bucket_cap_mb * 2**20)
    manifest_sizes = [0] * (len(dealt) - 1) + [len(params) + 1]
    return [Bucket(i, dealt[i], size) for i, size in enumerate(manifest_sizes)]


def deal(tensors: Iterable[torch.Tensor], max_bytes: float) -> list[list[torch.Tensor]]:
    """Group tensors into messages of at most ``max_bytes``, in order."""
    # begun: (dtype, device) -> (the group that is being filled, its bytes)
    full, begun = [], {}
    for tensor in tensors:
        kind = wide(tensor.dtype), tensor.device
        group, nbytes = begun.pop(kind, ([], 0))
        size = tensor.numel() * kind[0].itemsize
        if group and nbytes + size > max_bytes:
            full.append(group)
            group, nbytes = [], 0
        begun[kind] = [*group, tensor], nbytes + size
    return full + [group for group, _ in begun.values()]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of ``dtype`` travel."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
