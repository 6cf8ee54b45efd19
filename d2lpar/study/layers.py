"""LeNet and an MLP that are cut over ranks, until chapters 17 and 18 take the GPT."""

import torch
from torch import nn
from torch.nn import functional as F

from .. import ranks
from ..models import Block, Head, gpt
from ..models import Copy as CopyMark
from ..models import Sum as SumMark
from ..tensor_parallel import (
    ColumnParallelLinear,
    Copy,
    RowParallelLinear,
    Sum,
    own_part,
)


class TensorParallelMLP(nn.Sequential):
    """Two linear layers and a GELU, with one allreduce each way."""

    def __init__(self, num_features, num_hidden, group=None):
        columns = ColumnParallelLinear(nn.Linear(num_features, num_hidden), group)
        rows = RowParallelLinear(nn.Linear(num_hidden, num_features), group)
        super().__init__(columns, nn.GELU(), rows)


class TensorParallelLeNet(nn.Module):
    """LeNet, each rank with some channels of each layer of a whole, ``params``."""

    def __init__(self, params, group=None):
        super().__init__()
        self.group = ranks.group_of(group)
        self.params = nn.ParameterList(cut_lenet(params, group))

    def forward(self, X):
        """Return the logits (n, 10) of images ``X`` of shape (n, 1, 28, 28)."""
        W1, b1, W2, b2, W3, b3, W4, b4 = self.params
        X = Copy.apply(X[:, :, :-2, :-2], self.group)  # cropped as in lenet
        h1 = F.avg_pool2d(F.conv2d(X, W1, b1).relu_(), 2)  # (n, own channels, 12, 12)
        h2 = Sum.apply(F.conv2d(h1, W2), self.group)  # (n, 50, 8, 8)
        h2 = F.avg_pool2d((h2 + b2[:, None, None]).relu_(), 2)  # (n, 50, 4, 4)
        h2 = Copy.apply(h2.flatten(1), self.group)
        h3 = torch.addmm(b3, h2, W3).relu_()  # (n, own columns)
        return Sum.apply(h3 @ W4, self.group) + b4  # (n, 10)


def cut_lenet(params, group=None):
    """Return this rank's part of LeNet's parameters; b2 and b4 are whole."""
    group, dims = ranks.group_of(group), (0, 0, 1, None, 1, 0, 0, None)
    own = [
        (p if dim is None else own_part(p, dim, group)).detach().clone()
        for p, dim in zip(params, dims, strict=True)
    ]
    for i in (0, 2):
        own[i] = own[i].to(memory_format=torch.channels_last)
    return own


def transformer(
    vocab_size=8192, width=256, num_heads=4, num_blocks=8, length=128
) -> nn.Sequential:
    """Return a GPT with ``Copy`` and ``Sum`` of ``models`` where a cut would be."""
    model = gpt(vocab_size, width, num_heads, num_blocks, length)
    for part in model:
        if isinstance(part, Block):
            part.attention = nn.Sequential(CopyMark(), part.attention, SumMark())
            part.mlp = nn.Sequential(CopyMark(), part.mlp, SumMark())
        elif isinstance(part, Head):
            part.logits = nn.Sequential(CopyMark(), part.logits)
    return model
