"""LeNet, cut over ranks, until chapter 18 takes the GPT."""

import torch
from torch import nn
from torch.nn import functional as F

from .. import ranks
from ..tensor_parallel import Copy, Sum, own_part


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
