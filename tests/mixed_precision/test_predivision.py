"""Division before and after a sum in float16."""

import pytest
import torch
from torch import nn

from d2lpar import DistributedDataParallel
from d2lpar.mixed_precision import predivide
from d2lpar.ranks.launcher import launch

TORCHS = nn.parallel.DistributedDataParallel


class Gradient(nn.Module):
    """Its float16 parameter's gradients are what it is called with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))

    def forward(self, X):
        return (self.weight * X).sum()


def averages(rank, world_size):
    """[large, small] with each factor, by torch's wrapper and by ours."""
    small = 3 * 2.0**-24  # three times the smallest float16
    X, found = torch.tensor([40_000, small], dtype=torch.float16), {}
    for name, wrap in (("torch's", TORCHS), ("ours", DistributedDataParallel)):
        for factor in (None, 1.0, 2.0, 2**0.5):
            model = wrap(Gradient())
            if factor:
                model.register_comm_hook(None, predivide(factor))
            model(X).backward()
            large, little = model.module.weight.grad.tolist()
            found[name, factor] = large, little / small
    return found


def test_half_before_and_half_after_keeps_large_and_small():
    found = launch(averages, 2, timeout=60)
    assert found[0] == found[1]
    found = found[0]
    assert found["torch's", 1.0] == (float("inf"), 1)  # 40,000 + 40,000
    assert found["torch's", 2.0] == (40_000, pytest.approx(4 / 3))  # 1.5 is rounded to 2
    assert found["torch's", 2**0.5] == (pytest.approx(40_000, rel=2e-3), 1)
    for factor in (None, 1.0, 2.0):  # our buckets of 16 bits are float32
        assert found["ours", factor] == (40_000, 1)


@pytest.mark.parametrize("factor", [0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_is_not_positive_is_refused(factor):
    with pytest.raises(ValueError, match="factor has to be positive"):
        predivide(factor)
