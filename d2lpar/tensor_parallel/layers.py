"""Layers cut in parts: every rank has some columns, or some rows, of a weight.

Forward ``copy_to_group`` does what ``reduce_from_group`` does backward, and the other
way round: they are f and g of Shoeybi et al., "Megatron-LM" (2019). Notebook 14 builds
this file.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from .. import ranks
from ..guards import checked
from ..ranks._old import Group
from ..ranks.transport import check_group


def copy_to_group(X: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return ``X``, equal on all ranks; its gradients of all ranks are added up."""
    return _CopyToGroup.apply(X, group)


def reduce_from_group(X: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return the sum of all ranks' ``X``; each gets the gradient of the sum."""
    return _ReduceFromGroup.apply(X, group)


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, group):
        ctx.group = group
        return X.view_as(X)

    @staticmethod
    def backward(ctx, grad):
        return _summed(grad, ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, group):
        return _summed(X, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _summed(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    ranks.allreduce(tensor, group=group)
    return tensor


def place_in(group: Group) -> tuple[int, int]:
    """Return the size of a group and this rank's place in it."""
    check_group(group)
    return dist.get_world_size(group), dist.get_rank(group)


def check_part(tensor, dim, group) -> None:
    """Refuse a part for a rank outside the group, and more ranks than parts."""
    k, _ = place_in(group)
    if tensor.shape[dim] < k:
        raise ValueError(
            f"{tensor.shape[dim]} columns, rows or channels are too few for {k} ranks"
        )


@checked(check_part)
def own_part(tensor: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """Return a copy of this rank's part of ``tensor``, cut along ``dim``."""
    k, me = place_in(group)
    return tensor.detach().tensor_split(k, dim)[me].clone()


class ColumnParallelLinear(nn.Module):
    """The rank's columns of ``nn.Linear``: from all inputs to some outputs.

    ``weight`` (own outputs, in_features) and ``bias`` (own outputs) are cut from those
    that ``nn.Linear`` draws: with the same seed on all ranks the parts make the layer
    of one process. Takes (…, in_features), equal on all ranks; returns (…, own
    outputs).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: Group = None,
    ):
        super().__init__()
        whole = nn.Linear(in_features, out_features, bias)
        self.group = group
        self.weight = nn.Parameter(own_part(whole.weight, 0, group))
        self.bias = nn.Parameter(own_part(whole.bias, 0, group)) if bias else None

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns of the output."""
        return F.linear(copy_to_group(X, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """The rank's own rows of ``nn.Linear``: from some of the inputs to all outputs.

    ``weight`` (out_features, own inputs) is cut as in ``ColumnParallelLinear``;
    ``bias`` (out_features) is the first rank's, and is added once, to the sum. Takes
    (…, own inputs), as ``ColumnParallelLinear`` returns them; returns (…,
    out_features), equal on all ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: Group = None,
    ):
        super().__init__()
        whole = nn.Linear(in_features, out_features, bias)
        self.group = group
        self.weight = nn.Parameter(own_part(whole.weight, 1, group))
        self.bias = whole.bias
        if bias:
            first = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
            ranks.broadcast(self.bias.detach(), first, group)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Return the output, equal on all ranks."""
        output = reduce_from_group(F.linear(X, self.weight), self.group)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class TensorParallelMLP(nn.Module):
    """Two linear layers and a GELU, cut so that one allreduce is needed each way.

    Takes and returns (…, num_features), equal on all ranks.
    """

    def __init__(self, num_features: int, num_hidden: int, group: Group = None):
        super().__init__()
        self.columns = ColumnParallelLinear(num_features, num_hidden, group=group)
        self.rows = RowParallelLinear(num_hidden, num_features, group=group)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Return the output, equal on all ranks."""
        return self.rows(F.gelu(self.columns(X)))


class TensorParallelLeNet(nn.Module):
    """LeNet, each rank with some of the channels of every layer; at most 20 ranks.

    Two allreduces forward, and one backward, or two if the images require gradients.
    ``params`` are the whole network's, equal on all ranks.
    """

    def __init__(self, params: list[torch.Tensor], group: Group = None):
        super().__init__()
        self.group = group
        self.params = nn.ParameterList(cut_lenet(params, group))

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Return the logits (n, 10) of images ``X`` of shape (n, 1, 28, 28)."""
        W1, b1, W2, b2, W3, b3, W4, b4 = self.params
        X = copy_to_group(X[:, :, :-2, :-2], self.group)  # cropped as in lenet
        h1 = F.avg_pool2d(F.conv2d(X, W1, b1).relu_(), 2)  # (n, own channels, 12, 12)
        h2 = reduce_from_group(F.conv2d(h1, W2), self.group)  # (n, 50, 8, 8)
        h2 = F.avg_pool2d((h2 + b2[:, None, None]).relu_(), 2)  # (n, 50, 4, 4)
        h2 = copy_to_group(h2.flatten(1), self.group)
        h3 = torch.addmm(b3, h2, W3).relu_()  # (n, own columns)
        return reduce_from_group(h3 @ W4, self.group) + b4  # (n, 10)


def cut_lenet(params: list[torch.Tensor], group: Group = None) -> list[torch.Tensor]:
    """Return this rank's part of LeNet's parameters; b2 and b4 are whole."""
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    own = partial(own_part, group=group)
    fast = partial(torch.Tensor.to, memory_format=torch.channels_last)
    return [
        *(fast(own(W1, 0)), own(b1, 0)),  # (own channels, 1, 3, 3)
        *(fast(own(W2, 1)), b2.detach().clone()),  # (50, own channels, 5, 5)
        *(own(W3, 1), own(b3, 0)),  # (800, own columns)
        *(own(W4, 0), b4.detach().clone()),  # (own rows, 10)
    ]
