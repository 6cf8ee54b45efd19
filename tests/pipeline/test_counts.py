"""The shares of parts are those by which one device's mean weighs them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from d2lpar.pipeline.counts import PER_ELEMENT, find_count, shares


@pytest.mark.parametrize("criterion", [nn.MSELoss(), nn.CrossEntropyLoss()])
def test_weighted_means_are_the_mean(criterion):
    torch.manual_seed(0)
    outputs, y = torch.randn(7, 5).double(), torch.tensor([0, 1, -100, -100, 4, 2, 3])
    y = torch.randn(7, 5).double() if type(criterion) in PER_ELEMENT else y
    parts = list(zip(outputs.tensor_split(4), y.tensor_split(4), strict=True))
    part, weights = shares(criterion, None, [(target,) for _, target in parts])
    total = sum(weight * part(*parts[i]) for i, weight in weights.items())
    torch.testing.assert_close(total, criterion(outputs, y))
    # the two that are ignored are a part of their own
    assert len(weights) == (4 if type(criterion) in PER_ELEMENT else 3)


def test_without_count_an_unknown_mean_is_refused():
    assert find_count(nn.MSELoss(reduction="sum")) is None
    with pytest.raises(ValueError, match="mse_loss divides its mean by: pass count"):
        find_count(F.mse_loss)
