"""Where a model is cut: so that the largest stage is as small as possible."""

import time
from itertools import combinations, pairwise

import pytest
import torch
from helpers import grads
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from d2lpar import cut
from d2lpar.pipeline.partition import balance, layer_seconds


class Slow(nn.Module):
    """The identity, which takes 30 ms forward or backward."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, X):
        X = X.clone()
        if self.kind == "forward":
            time.sleep(0.03)
        elif X.requires_grad:
            X.register_hook(lambda grad: time.sleep(0.03))
        return X


def sizes(stages):
    return [len(stage) for stage in stages]


@given(st.lists(st.integers(0, 9) | st.floats(0, 9), min_size=1, max_size=8), st.data())
def test_the_largest_part_is_as_small_as_can_be(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    found = balance(costs, parts)
    assert len(found) == parts and sum(found) == len(costs) and min(found) >= 1

    def largest(ends):
        return max(sum(costs[a:b]) for a, b in pairwise([0, *ends, len(costs)]))

    best = min(largest(ends) for ends in combinations(range(1, len(costs)), parts - 1))
    assert largest([sum(found[: n + 1]) for n in range(parts - 1)]) == pytest.approx(
        best
    )


@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_the_stages_have_the_models_own_layers_in_order(num_stages):
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    for whole in (model, list(model), nn.ModuleList(model)):
        stages = cut(whole, num_stages)
        assert all(type(stage) is nn.Sequential for stage in stages)
        assert [id(layer) for stage in stages for layer in stage] == list(
            map(id, model)
        )


def test_cut_by_count_by_bytes_of_parameters_and_by_a_list():
    layers = [nn.Linear(9, 9, dtype=torch.float32) for _ in range(4)]
    layers += [nn.Linear(9, 9, dtype=torch.float64) for _ in range(2)]
    for by, expected in [
        ("count", [3, 3]),
        ("parameters", [4, 2]),
        ([5, 1, 1, 1, 1, 1], [1, 5]),
        ((1, 0, 0, 0, 0.5, 5), [5, 1]),
    ]:
        assert sizes(cut(layers, 2, by)) == expected


@pytest.mark.parametrize("slow", [Slow("forward"), Slow("backward")])
def test_cut_by_time_forward_and_backward_wherever_gradients_are_switched_off(slow):
    layers = [nn.Linear(3, 3), slow, nn.Linear(3, 3), nn.Tanh(), nn.Tanh(), nn.Tanh()]
    with torch.no_grad():
        seconds = layer_seconds(layers, torch.randn(2, 3), rounds=3)
    assert len(seconds) == 6 and max(seconds) == seconds[1] >= 0.03
    layers = [nn.Linear(3, 3), nn.Tanh(), slow, slow]
    assert sizes(cut(layers, 2, "time", torch.randn(2, 3))) == [3, 1]
    embedding = [nn.Embedding(5, 3), nn.Linear(3, 2)]
    assert len(layer_seconds(embedding, torch.tensor([[1, 4]]), rounds=1)) == 2


def test_measuring_leaves_gradients_buffers_random_numbers_and_inputs_as_they_are():
    layers = (
        nn.Linear(6, 6),
        nn.BatchNorm1d(6),
        nn.Dropout(0.5),
        nn.Linear(6, 2, bias=False),
    )
    model, X = nn.Sequential(nn.ReLU(inplace=True), *layers), torch.randn(4, 6)
    model[1].weight.grad = torch.full((6, 6), 3.0)
    model[4].requires_grad_(False)
    before = [
        tensor.clone()
        for tensor in (X, torch.get_rng_state(), *model.state_dict().values())
    ]
    assert min(layer_seconds(model, X, rounds=2)) > 0
    after = [X, torch.get_rng_state(), *model.state_dict().values()]
    assert all(map(torch.equal, before, after)) and not X.requires_grad
    weight, *others = grads(model)
    assert torch.equal(weight, torch.full((6, 6), 3.0)) and others == [None] * 4


FIRST, LAST = nn.Linear(2, 2), nn.Linear(2, 2)
LAST.bias = FIRST.bias
LAYERS = [FIRST, nn.Tanh(), LAST]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((LAYERS, 4), ValueError, "3 layers cannot be cut into 4 stages"),
        ((LAYERS, 0), ValueError, "3 layers cannot be cut into 0 stages"),
        ((LAYERS, 2, [1, 2]), ValueError, "2 costs for 3 layers"),
        ((LAYERS, 2, "bytes"), ValueError, "by is 'bytes', which is none of"),
        ((LAYERS, 2, "time"), ValueError, "pass a micro-batch X"),
        (
            (nn.ModuleDict(), 2),
            TypeError,
            "must be an nn.Sequential .* not a ModuleDict: only its",
        ),
        (([nn.Linear(2, 2), torch.relu], 2), TypeError, "relu is not a Module"),
        (
            (LAYERS, 3),
            ValueError,
            r"stages 0 and 2 share a parameter \(0.bias of stage 2\)",
        ),
    ],
)
def test_a_cut_that_cannot_be_is_an_error_that_says_why(arguments, error, words):
    with pytest.raises(error, match=words):
        cut(*arguments)


def test_layers_of_one_stage_may_share_a_parameter():
    assert sizes(cut([nn.Tanh(), FIRST, LAST], 2, [9, 1, 1])) == [1, 2]
