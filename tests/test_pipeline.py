"""A pipeline trains what the whole network would, on devices and between ranks."""

import threading
import time
from copy import deepcopy
from functools import partial
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from helpers import (
    SOON,
    WIDTHS,
    attempt,
    batch,
    both_ways,
    close,
    frozen,
    grads,
    in_ranks,
    linear,
    mlp,
    of_tokens,
    randn,
    take,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from d2lpar import DistributedPipeline, Pipeline, cut, ranks
from d2lpar import pipeline_schedules as ps
from d2lpar.pipeline import Stage

SCHEDULES = ps.sequential, ps.gpipe, ps.one_f_one_b, ps.interleaved
SCHEDULES += ps.zero_bubble, ps.zero_bubble_v
MSE = nn.MSELoss(reduction="sum")
X, Y = batch(11)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
same = partial(close, check_device=False)


# Where a network is cut


@given(st.lists(st.integers(0, 9) | st.floats(0, 9), min_size=1, max_size=8), st.data())
def test_the_largest_part_is_as_small_as_can_be(costs, data):
    num_parts = data.draw(st.integers(1, len(costs)))
    sizes = map(len, cut([nn.Identity() for _ in costs], num_parts, costs))

    def largest(inner):
        return max(sum(costs[a:b]) for a, b in pairwise([0, *inner, len(costs)]))

    ways = list(combinations(range(1, len(costs)), num_parts - 1))
    inner = tuple(np.cumsum(list(sizes))[:-1])
    assert inner in ways and largest(inner) == pytest.approx(min(map(largest, ways)))


def test_what_cannot_be_cut_is_named():
    model = mlp(*WIDTHS)
    with pytest.raises(ValueError, match="7 layers cannot be cut into 8 stages"):
        cut(model, 8)
    with pytest.raises(ValueError, match="there are 1 costs for 7 layers"):
        cut(model, 2, [1])


# Backward passes in two halves


class Odd(nn.Module):
    """Uses a weight, and functions of it, several times; changes an output in place."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.layer = nn.Linear(6, 6)
        self.frozen.weight.requires_grad_(False)

    def forward(self, X):
        X = self.layer(self.frozen(self.layer(self.first(X)).mul_(2)))
        W, b = self.layer.weight, self.layer.bias.tanh()
        X = F.linear(F.linear(X, W.tanh(), b), W, b) + F.linear(X[0], bias=b, weight=W)
        Y = checkpoint(self.layer, X, use_reentrant=False)
        return Y * F.linear(X, b)[..., None]


@pytest.mark.parametrize("wanted", [True, False])  # whether the input's gradient is
def test_two_halves_of_a_backward_pass_make_the_whole(wanted):
    whole, randoms = Odd().double(), partial(randn, 2, 3, 6)
    halves = deepcopy(whole)
    first, second = Stage(whole), Stage(halves, split=True)
    for i in range(2):  # both are under way at once
        for stage in (first, second):
            stage.forward(i, randoms(seed=i).requires_grad_(wanted))
    for i in (1, 0):
        close(second.backward(i, randoms()), first.backward(i, randoms()))
    assert len(second.later[0]) == 4 + wanted  # calls, whose weights wait
    for i in (0, 1):
        second.weight(i, None)
    close(grads(halves), grads(whole))
    assert second.live == second.later == {}


def test_what_the_second_half_would_get_wrong_is_refused():
    layer, X = nn.Linear(6, 6).double(), randn(2, 6).requires_grad_()

    def changes(X):
        Y = layer(X := 2 * X)
        return Y + X.add_(1)

    def asks(i, output):
        return torch.autograd.grad(output.sum(), X, create_graph=True)[0]

    stage = Stage(changes, split=True)
    stage.forward(0, X)
    stage.backward(0, X)
    with pytest.raises(RuntimeError, match="input changed in place: write X = X"):
        stage.weight(0, None)
    with pytest.raises(RuntimeError, match="forward asks for a gradient"):
        Stage(layer, split=True, finish=asks).forward(0, X)


# On devices and between ranks: what is trained is what one device would train


COMPLEX = partial(mlp, *WIDTHS, 5, 5, dtype=torch.complex128)
TOKENS = torch.arange(33).reshape(11, 3) % 11
IGNORED = nn.CrossEntropyLoss(ignore_index=1, reduction="sum")
CASES = {  # network, inputs, targets, criterion, count
    "mlp": (lambda: mlp(*WIDTHS, 5, 5), X, Y, MSE, torch.numel),
    "frozen": (frozen, X, Y, MSE, None),
    "complex": (COMPLEX, torch.fft.fft(X), Y, nn.L1Loss(reduction="sum"), None),
    "tokens": (of_tokens, TOKENS, TOKENS[:, 0] % 5, IGNORED, lambda y: (y != 1).sum()),
}


def one_device(case, num_stages):
    """The loss of one device, and the gradients of two batches by stage."""
    build, X, y, criterion, count = CASES[case]
    model = build()
    for _ in range(2):
        loss = criterion(model(X), y) / (count(y) if count else 1)
        loss.backward()
    return loss.detach(), [grads(stage) for stage in cut(model, num_stages)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_devices_train_what_one_device_trains(case, device):
    build, X, y, criterion, count = CASES[case]
    for schedule in SCHEDULES:
        num_stages, before = len(ps.placement(schedule(2, 4))), X.clone()
        loss, right = one_device(case, num_stages)
        stages = cut(build(), num_stages)
        pipeline = Pipeline(stages, [device, "cpu"], criterion, 4, schedule, count)
        found = [pipeline.forward_backward(X, y) for _ in range(2)]
        same([found, list(map(grads, stages))], [[loss, loss], right])
        assert torch.equal(X, before) and not found[0].requires_grad


def test_losses_in_16_bits_are_added_in_32():
    X = torch.full((2, 1), 200.0).half()
    loss = Pipeline([linear().half()], ["cpu"], MSE, 2).forward_backward(X, 0 * X)
    assert loss.item() == 80_000  # more than the largest of 16 bits


@both_ways
@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@in_ranks()
def test_ranks_train_what_one_device_trains(rank, k, device, way):
    for schedule in SCHEDULES:
        place = list(ps.placement(schedule(k, 2 * k)).values())
        for case in CASES if k < 3 else ["mlp"]:
            build, X, y, criterion, count = CASES[case]
            loss, right = one_device(case, len(place))
            stages = cut(build().to(device), len(place))
            run = DistributedPipeline(stages, criterion, 2 * k, schedule, count)
            take(way, run.group)
            found = [run.forward_backward(X, y) for _ in range(2)]
            own = [of_stage if r == rank else [] for of_stage, r in zip(right, place)]
            same(list(map(grads, run.stages)), own)
            same(found, [loss if rank == place[-1] else None] * 2)


# What is sent, when, and where it lies


def runs_ahead(p, m):
    """Rank 0 sends rank 1 what it takes late, and then rank 2 what that waits for."""
    words = ["Ff" + "FbBf" * (m - 1) + "bB", *["FfbB" * m] * (p - 1)]
    return [ps.spell(word, r, p + r) for r, word in enumerate(words)]


@both_ways
@pytest.mark.parametrize("schedule", [*SCHEDULES, runs_ahead])
@in_ranks(3)
def test_large_messages_do_not_deadlock(rank, p, schedule, way):
    stages = [linear() for _ in ps.placement(schedule(p, 6))]
    run = DistributedPipeline(stages, MSE, 6, schedule, torch.numel)
    take(way, run.group)
    X = torch.full((6, 400_000, 1), 2.0)  # 1.6 MB per row: lanes hold 0.5
    run.forward_backward(X, X / 2)
    for [grad] in filter(None, map(grads, run.stages)):  # a sum of millions
        assert grad.item() == pytest.approx(4, rel=1e-2)


def test_devices_get_their_stages_and_inputs():
    stages = [nn.Linear(6, 8), nn.Linear(8, 5)]
    criterion = nn.CrossEntropyLoss(torch.ones(5), reduction="sum")
    Pipeline(stages, ["cpu", "meta"], criterion, 2)
    parts = [*stages, criterion]
    assert [part.weight.device.type for part in parts] == ["cpu", "meta", "meta"]
    # or torch would say that tensors are on two devices
    Pipeline([nn.Linear(6, 5)], ["meta"], criterion, 1).forward_backward(X.float(), Y)


# What is refused: nothing was sent, and all goes on


def step(form, **changes):
    """One step of a pipeline of two stages, of which some options are others."""
    options = {"stages": cut(mlp(*WIDTHS), 2), "criterion": MSE, "m": 3}
    run = form(**options | {"schedule": ps.gpipe} | changes)
    return run.forward_backward(X, Y)


OTHER = "for 3 ranks, 2 micro-batches and 3 stages, not for 2 ranks, 3 .* and 2 stages"
REFUSED = [
    ({"criterion": nn.MSELoss()}, 'reduction="mean", and must have "sum"'),
    ({"schedule": lambda p, m: ps.gpipe(3, 2)}, OTHER),
    ({"schedule": lambda p, m: [ps.gpipe(p, m)[0][1:]] * p}, "occurs 0 times"),
    ({"stages": [nn.Linear(6, 6)] * 2}, "two stages share a parameter: put layers"),
    ({"m": 12}, "X has 11 rows and y has 11: .* the same number, at least 12"),
]


@in_ranks(2)
def test_what_is_wrong_everywhere_is_refused(rank, p):
    for changes, words in REFUSED:
        for form in (partial(Pipeline, devices=["cpu"] * 2), DistributedPipeline):
            with pytest.raises(ValueError, match=words):
                step(form, **changes)


@in_ranks(2)
def test_what_differs_is_told_to_all_and_loses_nothing(rank, p):
    for changes, words in [
        ({"schedule": SCHEDULES[rank]}, "pipeline, m = "),
        ({"stages": cut(mlp(*WIDTHS), 2, [1 + 9 * rank] + [1] * 6)}, "[4, 4] p"),
        ({"criterion": MSE if rank else nn.MSELoss()}, "must have"),
    ]:
        kind, text, *_, seconds = attempt(step, DistributedPipeline, **changes)
        assert kind == "MismatchError" and words in text and seconds < SOON, text
    run = DistributedPipeline(cut(mlp(*WIDTHS, 5, 5), 2), MSE, 3, count=torch.numel)
    for y, wanted in [(Y[: 11 - rank], "MismatchError"), (Y, "ok"), (Y, "ok")]:
        kind, text, *_ = attempt(run.forward_backward, X, y)
        assert kind == wanted and ("ValueError: X has 11" in str(text)) == (y is not Y)
    close(grads(run.stages), one_device("mlp", 2)[1][rank])


# What fails: all are told, and the pipeline can no longer be used


@both_ways
@pytest.mark.parametrize("kind", ["forward", "backward", "weight"])
@in_ranks(3)
def test_a_stage_that_fails_is_named_on_all_ranks(rank, p, kind, way):
    run = DistributedPipeline(cut(mlp(*WIDTHS), 3), MSE, 4, ps.zero_bubble)
    take(way, run.group)
    run.forward_backward(X, Y)
    original = getattr(Stage, kind)

    def sometimes(stage, i, arrived):
        result = original(stage, i, arrived)
        if (rank, i) != (1, 2):
            return result
        if kind == "forward":
            return result.to_sparse()  # which cannot be sent
        raise RuntimeError("here")

    setattr(Stage, kind, sometimes)
    error, text, _, seconds = attempt(run.forward_backward, X, Y)
    for thread in threading.enumerate():
        if thread.name == "communication":
            thread.join(SOON)
            assert not thread.is_alive()
    ranks.barrier()  # the group of all goes on
    later, why, *_ = attempt(run.forward_backward, X, Y)
    named = f"rank 1 failed.\nThis was the {kind} pass of micro-batch 2 on stage 1."
    assert seconds < SOON and later == "PeerError" and named in why
    assert error == ("RuntimeError" if rank == 1 else "PeerError")
    assert rank == 1 or f"{named}\nRuntimeError(" in text


@both_ways
@in_ranks(3)
def test_a_rank_that_is_late_is_named_in_time(rank, p, way):
    ranks.transport.here.timeout = 0.5
    run = DistributedPipeline(cut(mlp(*WIDTHS), 3), MSE, 3)
    take(way, run.group)
    if rank == 1:
        run.stages[1].register_forward_pre_hook(lambda *_: time.sleep(1))
    kind, text, named, seconds = attempt(run.forward_backward, X, Y)
    assert kind == "PeerError"
    if rank != 1:
        assert named == (1,) and "rank 1" in text and 0.4 < seconds < SOON
