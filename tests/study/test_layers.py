"""What chapter 18 cuts: together, the ranks' parts are the network of one."""

import pytest
import torch
from helpers import close, in_ranks, randn
from torch.nn import functional as F

from d2lpar import init_params, lenet
from d2lpar.study.layers import TensorParallelLeNet, cut_lenet


@pytest.mark.parametrize("k", [2])
@in_ranks()
def test_a_lenet_has_the_gradients_of_one_process(rank, k):
    params = [p.double() for p in init_params(0.1, torch.Generator().manual_seed(9))]
    whole = [param.clone().requires_grad_() for param in params]
    ours, X, y = TensorParallelLeNet(params), randn(8, 1, 28, 28), torch.arange(8)
    for logits in (ours(X), lenet(X, whole)):
        F.cross_entropy(logits, y).backward()
    close([p.grad for p in ours.params], cut_lenet([p.grad for p in whole]))
