"""A stage: two separate passes, the recomputed forward pass, and its input."""

from functools import partial

import pytest
import torch
from helpers import close, grads, randn
from torch import nn

from d2lpar.memory import saved_memory
from d2lpar.pipeline.stages import Stage


def leaf(*shape, seed=0):
    return randn(*shape, seed=seed).requires_grad_()


def train(module, recompute):
    """Of three micro-batches, two under way at once: outputs and input gradients."""
    stage, given = Stage(module, recompute), []
    inputs = [leaf(4, 6, seed=i) for i in range(3)]
    outputs = [stage.forward(0, inputs[0])]
    for i in range(3):
        if i < 2:
            outputs.append(stage.forward(i + 1, inputs[i + 1]))
        given.append(stage.backward(i, randn(*outputs[i].shape, seed=9 + i)))
    assert list(stage.live) == [] and stage.peak == 2
    return outputs, given


def dropout():
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))


def norm():
    return nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh()
    )


class Counting(nn.Module):
    """Multiplies by the number of the call, which it keeps in a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("calls", torch.tensor(0.0))

    def forward(self, X):
        self.calls = self.calls + 1
        return (X * self.weight * self.calls).tanh()


@pytest.mark.parametrize("build", [dropout, norm, Counting])
def test_recomputing_changes_neither_gradients_nor_running_statistics(build):
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        module = build().double()
        outputs, given = train(module, recompute)
        buffers = dict(module.named_buffers())
        results.append((outputs, given, grads(module), buffers, torch.get_rng_state()))
    close(*results)
    if build is norm:
        assert (
            module[1].num_batches_tracked == 3
            and module[1].running_mean.abs().max() > 0
        )
    if build is dropout:
        assert (outputs[0] == 0).any(), "nothing was dropped: nothing was tested"
    if build is Counting:
        assert module.calls == 3


def test_recomputing_keeps_the_input_alone_and_goes_forward_twice():
    for recompute in (False, True):
        module, calls = norm().double(), []
        module.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        stage, X = Stage(module, recompute), leaf(4, 6)
        kept = [X, *module.parameters()]
        output, saved = saved_memory(partial(stage.forward, 0, X), without=kept)
        assert (saved == 0) == recompute
        stage.backward(0, torch.ones_like(output))
        assert len(calls) == 1 + recompute


@pytest.mark.parametrize("recompute", [False, True])
def test_a_first_layer_that_works_in_place_leaves_its_input_alone(recompute):
    layers = nn.Sequential(nn.ReLU(inplace=True)), nn.Linear(6, 3, dtype=torch.float64)
    for X in (leaf(4, 6), randn(4, 6)):
        stage = Stage(nn.Sequential(*layers), recompute)
        output = stage.forward(0, X)
        grad = stage.backward(0, torch.ones_like(output))
        assert torch.equal(X.detach(), randn(4, 6))
        close(output.detach(), layers[1](randn(4, 6).relu()).detach())
        if X.requires_grad:
            close(grad, layers[1].weight.sum(0) * (X > 0))


def test_gradients_are_recorded_where_they_are_switched_off():
    stage = Stage(nn.Linear(6, 3))
    with torch.no_grad():
        output = stage.forward(0, torch.ones(2, 6))
        stage.backward(0, torch.ones_like(output))
    assert stage.module.bias.grad.tolist() == [2, 2, 2]
