"""A stage: two passes apart that are autograd's."""

from functools import partial

import pytest
import torch
from torch import nn

from d2lpar.pipeline.stages import Stage
from d2lpar.study.memory import saved_memory

close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
both = pytest.mark.parametrize("recompute", [False, True])


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf(*shape, seed=0):
    return randn(*shape, seed=seed).requires_grad_()


def grads(module):
    return [param.grad for param in module.parameters()]


def state(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def seeded(build):
    torch.manual_seed(0)
    return build().double()


def train(build, recompute, parts=3):
    """Two micro-batches under way at a time: the stage, and the gradients of its inputs."""
    module = seeded(build)
    stage, given = Stage(module, recompute), []
    inputs = [leaf(4, 6, seed=i) for i in range(parts)]
    outputs = [stage.forward(0, inputs[0])]
    for i in range(parts):
        if i + 1 < parts:
            outputs.append(stage.forward(i + 1, inputs[i + 1]))
        given.append(stage.backward(i, randn(*outputs[i].shape, seed=9 + i)))
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


def instance_norm():
    layers = nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Tanh()
    return nn.Sequential(nn.Linear(6, 6), *layers)


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
    "build", [dropout, norm, norm_in_evaluation, norm_without_statistics, instance_norm]
)
def test_recomputing_changes_neither_gradients_nor_running_statistics(build):
    plain, outputs, given = train(build, recompute=False)
    again, same_outputs, same_given = train(build, recompute=True)
    close(same_outputs, outputs)
    close(same_given, given)
    close(grads(again), grads(plain))
    close(state(again), state(plain))
    if build is norm:
        assert again[1].num_batches_tracked == 3 and again[1].running_mean.abs().max() > 0
    if build is dropout:
        assert (outputs[0] == 0).any(), "nothing was dropped: nothing was tested"


def test_recomputing_leaves_the_norm_tracking_and_the_random_numbers_alone():
    after = []
    for recompute in (False, True):
        module, *_ = train(lambda: nn.Sequential(dropout(), nn.BatchNorm1d(8)), recompute)
        assert module[1].track_running_stats
        after.append(torch.get_rng_state())
    assert torch.equal(*after)


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
def test_a_stage_returns_one_tensor(recompute):
    class Pair(nn.Module):
        def forward(self, X):
            return X, X

    with pytest.raises(TypeError, match="a stage must return one tensor, not a tuple"):
        Stage(Pair(), recompute).forward(0, leaf(2, 2))


@both
def test_a_frozen_first_stage_wants_no_gradient_and_sends_none_back(recompute):
    stage = Stage(seeded(lambda: nn.Linear(6, 3)).requires_grad_(False), recompute)
    output = stage.forward(0, randn(4, 6))
    assert not output.requires_grad
    assert stage.backward(0) is None
    assert stage.forward(1, leaf(4, 6)).requires_grad
    close(stage.backward(1, torch.ones(4, 3).double()), stage.module.weight.sum(0).expand(4, 6))
    assert grads(stage.module) == [None, None]


@both
def test_a_stage_that_learns_sends_no_gradient_to_an_input_that_wants_none(recompute):
    stage = Stage(seeded(lambda: nn.Embedding(5, 3)), recompute)
    output = stage.forward(0, torch.tensor([[1, 4]]))
    assert output.requires_grad
    assert stage.backward(0, torch.ones_like(output)) is None
    assert stage.module.weight.grad.sum(1).tolist() == [0, 3, 0, 0, 3]


def test_gradients_are_recorded_where_they_are_switched_off():
    stage = Stage(nn.Linear(6, 3))
    with torch.no_grad():
        output = stage.forward(0, torch.ones(2, 6))
        stage.backward(0, torch.ones_like(output))
    assert stage.module.bias.grad.tolist() == [2, 2, 2]


def test_what_is_live_and_how_much_was_at_most():
    stage = Stage(nn.Linear(6, 3))
    assert stage.peak == 0
    for i in range(3):
        stage.forward(i, torch.ones(2, 6))
    stage.backward(1, torch.ones(2, 3))
    stage.backward(0, torch.ones(2, 3))
    assert list(stage.live) == [2] and stage.peak == 3
    stage.forward(7, torch.ones(2, 6))
    assert list(stage.live) == [2, 7] and stage.peak == 3


class Counting(nn.Module):
    """Multiplies by the number of the call, which it keeps in a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("calls", torch.tensor(0.0))

    def forward(self, X):
        self.calls = self.calls + 1
        return (X * self.weight * self.calls).tanh()


def test_recomputing_works_on_the_buffers_of_its_own_forward_pass():
    results = []
    for recompute in (False, True):
        module = Counting()
        stage, X = Stage(module, recompute), torch.ones(2, requires_grad=True)
        for i in range(3):
            stage.forward(i, X)
        for i in range(3):
            stage.backward(i, torch.ones(2))
        results.append((module.weight.grad, X.grad, module.calls))
    close(results[1], results[0])
    assert results[0][2] == 3
