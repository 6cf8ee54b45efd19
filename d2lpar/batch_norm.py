"""Chapter 09. Batch normalisation over the rows of all ranks.

The mean and the variance take two sums over the ranks. One would be enough for the mean
of squares minus the squared mean, which loses its digits where the mean is large.
Source: ``torch.nn.SyncBatchNorm``, which needs GPUs.
"""

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm  # private: the base of them all

from . import ranks
from .losses import wide


class SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' tensors; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x, group):
        """Return the sum; ``x`` stays as it is."""
        ctx.group, total = group, x.clone()
        ranks.allreduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        """Add up what all ranks' uses contribute, by a sum that has a gradient, too."""
        return SumOverRanks.apply(grad, ctx.group), None


def follow(layer, mean, var, count):
    """Let the running statistics follow; their variance is divided by count - 1."""
    layer.num_batches_tracked += 1
    share, unbiased = layer.momentum, var * count / (count - 1)
    if share is None:  # the mean over all batches
        share = 1 / layer.num_batches_tracked.item()
    layer.running_mean.lerp_(mean.to(layer.running_mean), share)
    layer.running_var.lerp_(unbiased.to(layer.running_var), share)


class SyncBatchNorm(_BatchNorm):
    """BatchNorm with the mean and the variance over the rows of all ranks.

    Its arguments are those of ``nn.BatchNorm2d``. ``X`` has the shape (n, num_features,
    …), and n may differ between ranks. In training all ranks call it equally often. In
    evaluation, and on one rank, it is ``nn.BatchNorm``.
    """

    def __init__(self, *args, process_group=None, **options):
        super().__init__(*args, **options)
        self.process_group = process_group

    def forward(self, X):
        """Normalise each channel; in training, update the running statistics."""
        self._check_input_dim(X)
        group = self.process_group
        k = dist.get_world_size(group) if dist.is_initialized() else 1
        if k == 1 or not self.training:
            return super().forward(X)
        x = X.to(wide(X.dtype)).movedim(1, -1)  # channels last, beside mean and var
        dims = tuple(range(x.dim() - 1))
        rows = x.new_tensor([x.shape[:-1].numel()])  # of this rank
        total = SumOverRanks.apply(torch.cat([x.sum(dims), rows]), group)
        mean, count = total[:-1] / total[-1], total[-1].detach()
        if count < 2:
            raise ValueError("one value per channel has no variance: pass more rows")
        centred = x - mean
        var = SumOverRanks.apply(centred.square().sum(dims), group) / count
        if self.track_running_stats:
            follow(self, mean.detach(), var.detach(), count)
        y = centred * (var + self.eps).rsqrt()
        if self.weight is not None:
            y = y * self.weight
        if self.bias is not None:
            y = y + self.bias
        return y.movedim(-1, 1).to(X.dtype)

    def _check_input_dim(self, X):
        """Refuse what has no channels, or another number: torch calls this, too."""
        if X.dim() < 2 or X.shape[1] != self.num_features:
            raise ValueError(f"X is {list(X.shape)}, not (n, {self.num_features}, …)")

    @classmethod
    def convert_sync_batchnorm(cls, module, process_group=None):
        """Make each BatchNorm in ``module`` a SyncBatchNorm with the same tensors."""
        for layer in module.modules():
            if isinstance(layer, _BatchNorm):
                layer.__class__, layer.process_group = cls, process_group
        return module
