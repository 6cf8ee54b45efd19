"""Batch normalisation over the rows of all ranks.

Ordinary BatchNorm sees one rank's rows. ``SyncBatchNorm`` takes the mean and variance
of all rows, by two sums: the mean of squares minus the squared mean needs one, but
loses digits where the mean is large. Notebook 09 builds this file. Source:
``torch.nn.SyncBatchNorm``, which needs GPUs.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .. import ranks
from .buckets import wide


class _SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' tensors; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone()
        ranks.allreduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return _SumOverRanks.apply(grad, ctx.group), None


class SyncBatchNorm(_BatchNorm):
    """BatchNorm with the mean and variance over the rows of all ranks.

    Ranks may differ in rows. In evaluation, on one rank, and without a process group it
    is ``nn.BatchNorm``. In training all ranks must call it equally often: where one has
    fewer batches, give ``join`` its ``throw_on_early_termination``. Where ranks differ
    in rows, weight each rank's loss by rows · k / all rows. Gradients contain other
    ranks' losses, so ``weight="rows"`` is refused.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ):
        options = {"device": device, "dtype": dtype}
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, **options
        )
        self.process_group = process_group
        if not bias:
            self.bias = None

    def _check_input_dim(self, X: torch.Tensor) -> None:
        if X.dim() < 2 or X.shape[1] != self.num_features:
            shape, wanted = tuple(X.shape), f"(n, {self.num_features}, ...)"
            raise ValueError(f"X has shape {shape}, and SyncBatchNorm takes {wanted}")

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Normalise each channel, and update the running statistics."""
        self._check_input_dim(X)
        group = self.process_group
        if (
            not self.training
            or not dist.is_initialized()
            or dist.get_world_size(group) == 1
        ):
            return super().forward(X)
        # channels last: they line up with mean and var
        x = X.to(wide(X.dtype)).movedim(1, -1)
        dims = tuple(range(x.dim() - 1))
        # values per channel on this rank
        rows = x.new_tensor([x.numel() / x.shape[-1]])
        total = _SumOverRanks.apply(torch.cat([x.sum(dims), rows]), group)
        mean, count = total[:-1] / total[-1], total[-1].detach()
        centred = x - mean
        var = _SumOverRanks.apply(centred.square().sum(dims), group) / count
        self._update(mean.detach(), var.detach(), count)
        scale = (var + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        y = centred * scale
        if self.bias is not None:
            y = y + self.bias
        return y.movedim(-1, 1).to(X.dtype)

    def _update(
        self, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor
    ) -> None:
        """Let the running statistics follow; their variance is the unbiased one."""
        if count < 2:
            raise ValueError(
                "SyncBatchNorm needs more than one value per channel in training"
            )
        if self.track_running_stats:
            self.num_batches_tracked += 1
            momentum = self.momentum
            if momentum is None:  # the mean over all batches
                momentum = 1 / self.num_batches_tracked.item()
            self.running_mean.lerp_(mean.to(self.running_mean), momentum)
            self.running_var.lerp_(
                (var * count / (count - 1)).to(self.running_var), momentum
            )

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: dist.ProcessGroup | None = None
    ) -> nn.Module:
        """Make each BatchNorm in ``module`` a SyncBatchNorm of the same tensors."""
        for layer in module.modules():
            if isinstance(layer, _BatchNorm):
                layer.__class__, layer.process_group = cls, process_group
        return module
