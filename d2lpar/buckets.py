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
    """

    def __init__(
        self, params: list[nn.Parameter], dtype: torch.dtype, device: torch.device, extra: int = 0
    ):
        self.params, self.dtype = params, dtype
        self.ready: set[int] = set()  # which gradients backward has made
        sizes = [param.numel() for param in params]
        self.flat = torch.zeros(sum(sizes) + extra, dtype=dtype, device=device)
        *views, self.manifest = self.flat.split([*sizes, extra])
        self.views = [_like(view, param) for view, param in zip(views, params, strict=True)]

    @property
    def is_full(self) -> bool:
        """Whether backward has made all gradients."""
        return len(self.ready) == len(self.params)

    @torch.no_grad()
    def fill(self, weight: float) -> None:
        """Put every gradient, times ``weight``, into its place: one copy; a missing one is zero."""
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

    def empty(self, i: int) -> None:
        """Let the i-th parameter have its gradient from the bucket: a view, where dtypes agree."""
        param, view = self.params[i], self.views[i]
        param.grad = view if view.dtype == param.dtype else view.to(param.dtype)


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
    manifests = [0] * (len(full) - 1) + [len(params) + 1]
    return [Bucket(*parts, extra) for parts, extra in zip(full, manifests, strict=True)]
