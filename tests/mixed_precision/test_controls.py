"""Controls: what 16 bits lose without a scale, and without masters."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from d2lpar import (
    autocast,
    get_params,
    init_params,
    initialize,
    lenet,
    load_data_fashion_mnist,
)
from d2lpar.training import loss


@pytest.fixture(scope="module")
def batches():
    return list(load_data_fashion_mnist(256, device="cpu")[0])


def large_gradients(batch, region, scale=1.0):
    """Of LeNet's two large weights, in one backward pass."""
    X, y = batch
    params = get_params(init_params(generator=torch.Generator().manual_seed(0)), "cpu")
    with region:
        value = loss(lenet(X, params), y).mean()
    (scale * value).backward()
    return [params[i].grad for i in (2, 4)]


def test_float16_loses_gradients_unless_the_loss_is_scaled(batches):
    exact = large_gradients(batches[0], autocast(enabled=False))

    def lost(dtype, scale):
        found = large_gradients(batches[0], autocast("cpu", dtype, emulate=True), scale)
        return sum(
            ((e != 0) & (f == 0)).sum() for e, f in zip(exact, found, strict=True)
        )

    assert lost(torch.float16, 1.0) > 10_000
    assert lost(torch.float16, 2.0**16) < 1_000
    assert lost(torch.bfloat16, 1.0) < 1_000


def last_loss(batches, level, dtype):
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, scaler = initialize(
        model, optimizer, level, dtype=dtype, emulate=True
    )
    losses = []
    for X, y in batches:
        X, y = X[:64], y[:64]
        optimizer.zero_grad()
        value = F.cross_entropy(model(X), y)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(value.item())
    return sum(losses[-20:]) / 20


def test_bfloat16_needs_master_weights(batches):
    full = last_loss(batches, "O0", torch.bfloat16)
    for level, dtype in (
        ("O1", torch.bfloat16),
        ("O2", torch.bfloat16),
        ("O2", torch.float16),
    ):
        assert abs(last_loss(batches, level, dtype) - full) < 0.05
    assert last_loss(batches, "O3", torch.bfloat16) > full + 0.1
