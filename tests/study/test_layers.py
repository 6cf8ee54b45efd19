"""What chapters 17 and 18 cut: together, the ranks' parts are the network of one."""

import pytest
import torch
from helpers import close, in_ranks, randn
from torch import nn
from torch.nn import functional as F

from d2lpar import init_params, lenet
from d2lpar.models import Copy, Sum
from d2lpar.study.layers import (
    TensorParallelLeNet,
    TensorParallelMLP,
    cut_lenet,
    transformer,
)


@pytest.mark.parametrize("k", [2])
@in_ranks()
def test_a_lenet_and_an_mlp_have_the_gradients_of_one_process(rank, k):
    params = [p.double() for p in init_params(0.1, torch.Generator().manual_seed(9))]
    whole = [param.clone().requires_grad_() for param in params]
    ours, X, y = TensorParallelLeNet(params), randn(8, 1, 28, 28), torch.arange(8)
    for logits in (ours(X), lenet(X, whole)):
        F.cross_entropy(logits, y).backward()
    close([p.grad for p in ours.params], cut_lenet([p.grad for p in whole]))
    torch.manual_seed(2)
    mlp = TensorParallelMLP(6, 8).double()
    torch.manual_seed(2)
    parts = nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)
    X = randn(5, 6)
    close(mlp(X), nn.Sequential(*parts).double()(X))


def test_a_transformer_has_a_mark_where_each_cut_would_be():
    marks = [type(m) for m in transformer(9, 8, 2, 2, 4).modules()]
    assert [m for m in marks if m in (Copy, Sum)] == [Copy, Sum] * 4 + [Copy]
