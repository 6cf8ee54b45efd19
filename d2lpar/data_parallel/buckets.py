"""Buckets: gradients side by side in one flat tensor, so that many travel as one message.

A message has a cost of its own, however short it is; sixty small ones cost more than one that holds
the sixty gradients. Notebook 05 builds this file. Source: Li et al., "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training" (VLDB 2020), section 3.2.
"""

import torch
from torch import nn

WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class Bucket:
    """Gradients side by side in one flat tensor, which travels as one message.

    Those of 16 bits lie in it as float32, and are rounded once, when they come out again. The last
    bucket has room for the *manifest* behind them: for each parameter of all buckets, how many
    ranks have used it; and the rows of all ranks.

    ``buffer``, ``set_buffer``, ``gradients``, ``parameters``, ``index`` and ``is_last`` are those
    of torch's ``GradBucket``, for communication hooks.
    """

    def __init__(
        self,
        number: int,
        params: list[nn.Parameter],
        dtype: torch.dtype,
        device: torch.device,
        extra: int = 0,
    ):
        self.number, self.params, self.dtype, self.device = number, params, dtype, device
        self.ready: set[int] = set()  # which gradients backward has made
        self.sizes = [param.numel() for param in params]
        self.flat = torch.zeros(sum(self.sizes) + extra, dtype=dtype, device=device)
        self.values, self.manifest = self.flat.split([sum(self.sizes), extra])
        self.views = self._views_of(self.values)
        self._buffer = self.values  # or what a hook has put in its place

    @property
    def is_full(self) -> bool:
        """Whether backward has made all gradients."""
        return len(self.ready) == len(self.params)

    @torch.no_grad()
    def fill(self, weight: float) -> None:
        """Put every gradient, times ``weight``, into its place: one copy; a missing one is zero."""
        self._buffer = self.values
        for param, view in zip(self.params, self.views, strict=True):
            grad = param.grad
            if grad is None or weight == 0:  # the mean over no rows is not a number
                view.zero_()
            elif grad.is_sparse:
                raise ValueError("sparse gradients cannot be averaged: use Embedding(sparse=False)")
            elif grad.dtype == view.dtype:
                torch.mul(grad, weight, out=view)  # in place where the gradient is this view
            else:
                view.copy_(grad).mul_(weight)

    def hand_out(self, i: int, as_view: bool) -> None:
        """Let the i-th parameter have its gradient: a view of the bucket, or a tensor of its own.

        It is a view only where the dtypes agree.
        """
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
        parts = flat.split(self.sizes)
        return [_like(part, param) for part, param in zip(parts, self.params, strict=True)]


def _like(flat: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a view of ``flat`` with the shape and, where it is dense, the strides of ``param``."""
    dense = torch.empty_like(param)  # keeps the strides of a channels_last weight
    return flat.as_strided(param.shape, dense.stride())


def make_buckets(params: list[nn.Parameter], bucket_cap_mb: float) -> list[Bucket]:
    """Deal ``params``, at least one, out to buckets, the last first: backward begins with it."""
    full = []  # (parameters, dtype, device) of each bucket
    begun = {}  # (dtype, device): (parameters, bytes) of the one that is being filled
    for param in reversed(params):
        kind = (param.dtype if param.dtype in WIDE else torch.float32, param.device)
        members, nbytes = begun.pop(kind, ([], 0))
        size = param.numel() * kind[0].itemsize
        if members and nbytes + size > bucket_cap_mb * 2**20:
            full.append((members, *kind))
            members, nbytes = [], 0
        begun[kind] = (members + [param], nbytes + size)
    full += [(members, *kind) for kind, (members, _) in begun.items()]
    extras = [0] * (len(full) - 1) + [len(params) + 1]  # room for the manifest
    return [Bucket(i, *parts, extras[i]) for i, parts in enumerate(full)]
