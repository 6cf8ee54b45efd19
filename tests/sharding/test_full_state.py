"""The whole state of what is sharded: saved once, and loaded on any number of ranks."""

from functools import partial

import pytest
import torch
from helpers import LIMIT, attempt, close, everyones, mlp, on_ranks, randn
from torch import nn

from d2lpar import ShardedOptimizer, count_bytes, fully_shard
from d2lpar.memory import peak_memory
from d2lpar.ranks import launch
from d2lpar.sharding import FSDPModule, full_state_dict, load_full_state_dict

ADAM = partial(torch.optim.Adam, lr=0.01, amsgrad=True)
ROWS = 12


class Model(nn.Module):
    """A channels_last weight, buffers, one weight named twice, one frozen, a number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3).eval()
        self.first, self.second = (
            nn.Linear(12, 12, bias=False),
            nn.Linear(12, 12, bias=False),
        )
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(12, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, X):
        X = self.norm(self.conv(X)).flatten(1).tanh() * self.scale
        return self.frozen(self.second(self.first(X).tanh()))


def shards(model):
    for part in (model.conv, model.norm, model.frozen):
        fully_shard(part)
    return fully_shard(model)


def make(way):
    """The model and the optimiser, in one of the ways to shard."""
    model = Model()
    if way == "units":
        shards(model)
        return model, ADAM(model.parameters())
    if way == "optimizer":
        return model, ShardedOptimizer(
            model.parameters(), ADAM.func, averages=True, **ADAM.keywords
        )
    return model, ADAM(model.parameters())


def train(model, optimizer, steps, rank=0, k=1):
    for step in steps:
        optimizer.zero_grad()
        X = randn(ROWS, 2, 4, 4, seed=step).tensor_split(k)[rank]
        model(X).square().mean().backward()
        optimizer.step()


def full_states(model, optimizer):
    if isinstance(model, FSDPModule):
        return full_state_dict(model), full_state_dict(optimizer)
    if isinstance(optimizer, ShardedOptimizer):
        return model.state_dict(), optimizer.full_state_dict()
    return model.state_dict(), optimizer.state_dict()


def run(rank, k, way, steps, states=None):
    model, optimizer = make(way)
    if states:
        load(model, optimizer, *states)
    train(model, optimizer, steps, rank, k)
    return full_states(model, optimizer)


def load(model, optimizer, model_state, optimizer_state):
    if isinstance(model, FSDPModule):
        load_full_state_dict(model, model_state)
        load_full_state_dict(optimizer, optimizer_state)
    else:
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)


def check_same(found, expected, exact=False):
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, dict):
            assert set(ours) == set(theirs)
            check_same([ours[name] for name in theirs], theirs.values(), exact)
        elif isinstance(theirs, torch.Tensor):
            assert ours.shape == theirs.shape and ours.stride() == theirs.stride()
            assert ours.dtype == theirs.dtype and type(ours) is torch.Tensor
            assert (
                torch.equal(ours, theirs)
                if exact
                else close(ours, theirs.detach()) is None
            )
        elif isinstance(theirs, list) and theirs and isinstance(theirs[0], dict):
            check_same(ours, theirs, exact)
        else:
            assert ours == theirs


@pytest.mark.parametrize("way", ["units", "optimizer"])
def test_the_full_state_is_that_of_one_device(way):
    expected = run(0, 1, "alone", range(3))
    for k in (1, 2, 3):
        first, *others = launch(run, k, way, range(3), timeout=LIMIT)
        check_same(first, expected)
        assert all(other[1] == {} for other in others)


@pytest.mark.parametrize("way", ["units", "optimizer"])
def test_another_number_of_ranks_goes_on_from_the_same_bits(way):
    states = launch(run, 2, way, range(3), timeout=LIMIT)[0]
    for k in (1, 3, 4):
        check_same(
            launch(run, k, way, [], states, timeout=LIMIT)[0], states, exact=True
        )
    straight = launch(run, 2, way, range(5), timeout=LIMIT)[0]
    again = launch(run, 2, way, range(3, 5), states, timeout=LIMIT)[0]
    check_same(again, straight, exact=True)
    for k in (3, 1):
        check_same(launch(run, k, way, range(3, 5), states, timeout=LIMIT)[0], straight)
    # and one without shards
    check_same(run(0, 1, "alone", range(3, 5), states), straight)


def torchs_calls_do_the_same(rank, k):
    model, optimizer = make("optimizer")
    train(model, optimizer, range(2), rank, k)
    kind, text, *_ = attempt(optimizer.state_dict)
    assert kind == "RuntimeError" and "consolidate_state_dict" in text
    optimizer.consolidate_state_dict(to=1)
    assert attempt(optimizer.state_dict)[0] == ("ok" if rank == 1 else "RuntimeError")
    expected = make("alone")
    train(*expected, range(2))
    if rank == 1:
        check_same([optimizer.state_dict()], [expected[1].state_dict()])


def it_is_gathered_piece_by_piece(rank, k):
    """Each rank sends its part once; none has two whole tensors beside the result."""
    torch.manual_seed(0)
    model = mlp(64, 64, 64, 64, 64, dtype=torch.float32)
    for i in (0, 2, 4, 6):
        fully_shard(model[i])
    fully_shard(model)
    n = sum(param.numel() for param in model.parameters())
    with count_bytes() as ledger:
        state = full_state_dict(model)
    assert rank == 0 or ledger.sent(rank) == 4 * n
    peak = peak_memory(lambda: full_state_dict(model), "cpu")
    one = 4 * 64 * 64
    assert peak < (
        sum(x.nbytes for x in state.values()) + 2 * one if rank == 0 else one
    )


def shards_of_two_groups_and_none_are_refused(rank, k):
    model = shards(Model())
    cases = (
        ("ValueError Sequential has parameters of 0 groups", mlp(3, 3), None),
        (
            "ValueError Adam has parameters of 0 groups",
            ADAM(mlp(3, 3).parameters()),
            None,
        ),
        ("ValueError dst is 7, but the shards are on the ranks [0, 1]", model, 7),
    )
    for expected, source, dst in cases:
        kind, text, *_ = attempt(full_state_dict, source, dst)
        assert f"{kind} {text}".startswith(expected), (kind, text)


def a_state_that_does_not_fit_is_refused(rank, k):
    model = shards(Model())
    right = Model().state_dict()
    wrong = (
        (
            "ValueError conv.weight has shape [2, 2], but the parameter [3, 2, 3, 3]",
            "conv.weight",
        ),
        ("RuntimeError Error(s) in loading", None),
    )
    before = everyones([param.detach().clone() for param in model.parameters()])
    for expected, name in wrong:
        state = (
            {**right, name: torch.zeros(2, 2)}
            if name
            else {"conv.weight": right["conv.weight"]}
        )
        kind, text, *_ = attempt(load_full_state_dict, model, state)
        assert f"{kind} {text}".startswith(expected), (kind, text)
    after = everyones([param.detach() for param in model.parameters()])
    assert all(
        torch.equal(a, b)
        for old, new in zip(before, after, strict=True)
        for a, b in zip(old[2:], new[2:], strict=True)
    )
    model.conv.unshard()
    kind, text, *_ = attempt(load_full_state_dict, model, right)
    assert kind == "RuntimeError" and text.startswith(
        "the unit conv has whole parameters"
    )
    model.conv.reshard()
    load_full_state_dict(model, right)
    check_same([full_state_dict(model)], [right if rank == 0 else {}])


class Counts(torch.optim.SGD):
    """An optimiser with a number of its own per parameter, which no name gives away."""

    def step(self):
        for param in self.param_groups[0]["params"]:
            self.state[param]["decay"] = (
                self.state[param].get("decay", torch.tensor(1.0)) / 2
            )
        super().step()


def numbers_of_a_parameter_stay_whole(rank, k):
    model = shards(Model())
    del model.scale  # of a parameter that is a number itself, nothing tells them apart
    optimizer, other = (Counts(model.parameters(), lr=0.1) for _ in "ab")
    optimizer.step()
    state = everyones([full_state_dict(optimizer)])[0][0]
    load_full_state_dict(other, state)
    other.step()
    assert {values["decay"].item() for values in other.state.values()} == {0.25}


test_on_two = on_ranks(
    2,
    [
        torchs_calls_do_the_same,
        it_is_gathered_piece_by_piece,
        shards_of_two_groups_and_none_are_refused,
        a_state_that_does_not_fit_is_refused,
        numbers_of_a_parameter_stay_whole,
    ],
)
