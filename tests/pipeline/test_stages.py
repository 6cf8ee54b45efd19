"""A stage: two passes apart that are autograd's."""

from functools import partial

import pytest
import torch
from helpers import close, grads, randn
from torch import nn

from d2lpar.pipeline.stages import Stage
from d2lpar.study.memory import saved_memory

both = pytest.mark.parametrize("recompute", [False, True])


def leaf(*shape, seed=0):
    return randn(*shape, seed=seed).requires_grad_()


def seeded(build):
    torch.manual_seed(0)
    return build().double()


def train(build, recompute, parts=3):
    """Two micro-batches under way at a time; the module, outputs and gradients of inputs."""
    module = seeded(build)
    stage, given = Stage(module, recompute), []
    inputs = [leaf(4, 6, seed=i) for i in range(parts)]
    outputs = [stage.forward(0, inputs[0])]
    for i in range(parts):
        if i + 1 < parts:
            outputs.append(stage.forward(i + 1, inputs[i + 1]))
        given.append(stage.backward(i, randn(*outputs[i].shape, seed=9 + i)))
    assert list(stage.live) == [] and stage.peak == 2
    return module, outputs, given


def dropout():
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))


def norm():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh())


def norm_in_evaluation():
    module = norm()
    module[1].running_mean.fill_(2)
    return module.eval()


def norm_without_statistics():
    layers = nn.Linear(6, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Tanh()
    return nn.Sequential(*layers)


class Counting(nn.Module):
    """Multiplies by the number of the call, which it keeps in a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("calls", torch.tensor(0.0))

    def forward(self, X):
        self.calls = self.calls + 1
        return (X * self.weight * self.calls).tanh()


@both
def test_forward_and_backward_apart_are_autograds(recompute):
    build = partial(nn.Sequential, nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    module, outputs, given = train(build, recompute)
    ours = [grad.clone() for grad in grads(module)]
    module.zero_grad()
    for i, (output, grad) in enumerate(zip(outputs, given, strict=True)):
        X = leaf(4, 6, seed=i)
        expected = module(X)
        expected.backward(randn(*expected.shape, seed=9 + i))
        close(output.detach(), expected.detach())
        close(grad, X.grad)
        assert output.is_leaf and output.requires_grad
    close(ours, grads(module))


@pytest.mark.parametrize(
    "build", [dropout, norm, norm_in_evaluation, norm_without_statistics, Counting]
)
def test_recomputing_changes_neither_gradients_nor_running_statistics(build):
    results = []
    for recompute in (False, True):
        module, outputs, given = train(build, recompute)
        buffers = dict(module.named_buffers())
        results.append((outputs, given, grads(module), buffers, torch.get_rng_state()))
    close(*results)
    if build is norm:
        assert module[1].num_batches_tracked == 3 and module[1].running_mean.abs().max() > 0
    if build is dropout:
        assert (outputs[0] == 0).any(), "nothing was dropped: nothing was tested"
    if build is Counting:
        assert module.calls == 3


def test_recomputing_keeps_the_input_alone_and_goes_forward_twice():
    for recompute in (False, True):
        module, calls = seeded(norm_without_statistics), []
        module.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        stage, X = Stage(module, recompute), leaf(4, 6)
        kept = [X, *module.parameters()]
        output, saved = saved_memory(partial(stage.forward, 0, X), without=kept)
        assert (saved == 0) == recompute
        stage.backward(0, torch.ones_like(output))
        assert len(calls) == 1 + recompute


@both
def test_the_last_stage_finishes_with_the_loss(recompute):
    module, X = seeded(lambda: nn.Linear(6, 3)), leaf(4, 6)
    stage = Stage(module, recompute, finish=lambda i, output: i * output.square().sum())
    loss = stage.forward(5, X)
    grad = stage.backward(5)
    expected = 5 * module(X).square().sum()
    close(loss.detach(), expected.detach())
    close(grad, torch.autograd.grad(expected, X)[0])


@both
@pytest.mark.parametrize("nested", [False, True])
def test_a_first_layer_that_works_in_place_leaves_its_input_alone(recompute, nested):
    def build():
        relu = nn.ReLU(inplace=True)
        return nn.Sequential(nn.Sequential(relu) if nested else relu, nn.Linear(6, 3))

    for X in (leaf(4, 6), randn(4, 6)):
        module = seeded(build)
        stage = Stage(module, recompute)
        output = stage.forward(0, X)
        grad = stage.backward(0, torch.ones_like(output))
        assert torch.equal(X.detach(), randn(4, 6))
        close(output.detach(), module[1](randn(4, 6).relu()).detach())
        close(module[1].weight.grad, randn(4, 6).relu().sum(0).expand(3, 6))
        if X.requires_grad:
            close(grad, module[1].weight.sum(0) * (X > 0))


@both
def test_what_wants_no_gradient_is_sent_none_back(recompute):
    frozen = Stage(seeded(lambda: nn.Linear(6, 3)).requires_grad_(False), recompute)
    assert not frozen.forward(0, randn(4, 6)).requires_grad
    assert frozen.backward(0) is None
    assert frozen.forward(1, leaf(4, 6)).requires_grad
    close(frozen.backward(1, torch.ones(4, 3).double()), frozen.module.weight.sum(0).expand(4, 6))
    assert grads(frozen.module) == [None, None]
    learns = Stage(seeded(lambda: nn.Embedding(5, 3)), recompute)
    output = learns.forward(0, torch.tensor([[1, 4]]))
    assert output.requires_grad
    assert learns.backward(0, torch.ones_like(output)) is None
    assert learns.module.weight.grad.sum(1).tolist() == [0, 3, 0, 0, 3]


@both
def test_a_stage_returns_one_tensor(recompute):
    module = nn.Module()
    module.forward = lambda X: (X, X)
    with pytest.raises(TypeError, match="a stage must return one tensor, not a tuple"):
        Stage(module, recompute).forward(0, leaf(2, 2))


def test_gradients_are_recorded_where_they_are_switched_off():
    stage = Stage(nn.Linear(6, 3))
    with torch.no_grad():
        output = stage.forward(0, torch.ones(2, 6))
        stage.backward(0, torch.ones_like(output))
    assert stage.module.bias.grad.tolist() == [2, 2, 2]
