"""Where a model is cut: so that the largest stage is as small as can be."""

import time
from functools import partial
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from d2lpar import cut
from d2lpar.pipeline.partition import balance, layer_seconds

close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
costs = st.lists(st.integers(0, 9) | st.floats(0, 9), min_size=1, max_size=8)


class Slow(nn.Module):
    """The identity, which takes its time forward or backward."""

    def __init__(self, forward=0.0, backward=0.0):
        super().__init__()
        self.seconds = forward, backward

    def forward(self, X):
        time.sleep(self.seconds[0])
        X = X.clone()
        if X.requires_grad:
            X.register_hook(lambda grad: time.sleep(self.seconds[1]))
        return X


def sizes(stages):
    return [len(stage) for stage in stages]


def grads(module):
    return [param.grad for param in module.parameters()]


def state(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@given(costs, st.data())
def test_the_largest_part_is_as_small_as_can_be(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    found = balance(costs, parts)
    assert len(found) == parts and sum(found) == len(costs) and min(found) >= 1

    def largest(ends):
        return max(sum(costs[a:b]) for a, b in pairwise([0, *ends, len(costs)]))

    best = min(largest(ends) for ends in combinations(range(1, len(costs)), parts - 1))
    assert largest([sum(found[: n + 1]) for n in range(parts - 1)]) == pytest.approx(best)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_the_stages_have_the_models_own_layers_in_order(num_stages):
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    for whole in (model, list(model)):
        stages = cut(whole, num_stages)
        assert all(type(stage) is nn.Sequential for stage in stages)
        assert [id(layer) for stage in stages for layer in stage] == list(map(id, model))
        assert max(sizes(stages)) == -(-5 // num_stages)


def test_cut_by_count_by_bytes_of_parameters_and_by_a_list():
    layers = [nn.Linear(9, 9, dtype=torch.float32) for _ in range(4)]
    layers += [nn.Linear(9, 9, dtype=torch.float64) for _ in range(2)]
    assert sizes(cut(layers, 2)) == sizes(cut(layers, 2, "count")) == [3, 3]
    assert sizes(cut(layers, 2, "parameters")) == [4, 2]
    assert sizes(cut(layers, 2, [5, 1, 1, 1, 1, 1])) == [1, 5]
    assert sizes(cut(layers, 2, (1, 0, 0, 0, 0.5, 5))) == [5, 1]


@pytest.mark.parametrize("slow", [Slow(forward=0.03), Slow(backward=0.03)])
def test_cut_by_time_forward_and_backward(slow):
    layers = [nn.Linear(3, 3), slow, nn.Linear(3, 3), nn.Tanh(), nn.Tanh(), nn.Tanh()]
    seconds = layer_seconds(layers, torch.randn(2, 3), rounds=3)
    assert len(seconds) == 6 and seconds[1] >= 0.03
    assert max(seconds) == seconds[1]
    assert sizes(cut([nn.Tanh(), nn.Tanh(), slow, slow], 2, "time", torch.randn(2, 3))) == [3, 1]


@pytest.mark.parametrize(
    "num_stages, by, words",
    [
        (4, "count", "3 layers cannot be cut into 4 stages"),
        (0, "count", "positive int, not 0"),
        (True, "count", "positive int, not True"),
        (1.5, "count", r"positive int, not 1\.5"),
        (2, [1, -2, 3], r"must not be negative: \[1, -2, 3\]"),
        (2, [1, float("nan"), 3], "must not be negative"),
        (2, [1, 2], "2 costs for 3 layers"),
        (2, "bytes", "by is 'bytes', which is none of"),
        (2, "time", "pass a micro-batch X"),
    ],
)
def test_a_cut_that_cannot_be_is_an_error_that_says_why(num_stages, by, words):
    with pytest.raises(ValueError, match=words):
        cut([nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)], num_stages, by)


def test_a_parameter_must_not_be_in_two_stages():
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    last.bias = first.bias
    with pytest.raises(ValueError, match=r"stages 0 and 2 share a parameter \(0.bias of stage 2\)"):
        cut([first, nn.Tanh(), last], 3)
    assert sizes(cut([nn.Tanh(), first, last], 2, [9, 1, 1])) == [1, 2]


def test_measuring_leaves_gradients_buffers_random_numbers_and_inputs_as_they_are():
    model = nn.Sequential(
        nn.ReLU(inplace=True),
        nn.Linear(6, 6),
        nn.BatchNorm1d(6),
        nn.Dropout(0.5),
        nn.Linear(6, 2, bias=False),
    )
    model[1].weight.grad = torch.full((6, 6), 3.0)
    model[4].requires_grad_(False)
    X = torch.randn(4, 6)
    before, rng, copy = state(model), torch.get_rng_state(), X.clone()
    seconds = layer_seconds(model, X, rounds=2)
    assert len(seconds) == 5 and min(seconds) > 0
    assert torch.equal(torch.get_rng_state(), rng) and torch.equal(X, copy)
    assert not X.requires_grad
    close(state(model), before, rtol=0, atol=0)
    weight, *others = grads(model)
    assert torch.equal(weight, torch.full((6, 6), 3.0)) and others == [None] * 4


def test_measuring_with_tokens():
    assert len(layer_seconds([nn.Embedding(5, 3), nn.Linear(3, 2)], torch.tensor([[1, 4]]))) == 2


def test_measuring_without_gradients_switched_on():
    layers = [nn.Linear(64, 64), nn.Linear(64, 64)]
    calls = []
    layers[0].weight.register_hook(lambda grad: calls.append(1))
    with torch.no_grad():
        layer_seconds(layers, torch.randn(8, 64), rounds=3)
    assert len(calls) == 2 + 3


def test_measuring_gives_gradients_back_after_an_error():
    layer = nn.Linear(3, 3)
    layer.weight.grad = torch.ones(3, 3)
    with pytest.raises(RuntimeError):
        layer_seconds([layer], torch.randn(2, 4))
    assert torch.equal(layer.weight.grad, torch.ones(3, 3))


def test_a_module_whose_layers_are_in_no_known_order_is_refused():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

    with pytest.raises(
        TypeError, match=r"the model must be an nn.Sequential .* not a Net: only its"
    ):
        cut(Net(), 2)
    with pytest.raises(TypeError, match=r"the model\[1\] is not a module: <built-in"):
        cut([nn.Linear(2, 2), torch.relu], 2)
    assert sizes(cut(nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]), 2)) == [1, 1]
