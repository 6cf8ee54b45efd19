"""A pipeline trains what the whole network would, on devices and between ranks."""

import threading
from copy import deepcopy
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from helpers import (
    LIMIT,
    SOON,
    WIDTHS,
    attempt,
    batch,
    both_ways,
    close,
    frozen,
    grads,
    loss_and_grads,
    mlp,
    of_tokens,
    on_ranks,
    take,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from d2lpar import DistributedPipeline, Pipeline, count_bytes, cut, launch, ranks
from d2lpar.pipeline import Stage, balance
from d2lpar.pipeline_schedules import (
    gpipe,
    interleaved,
    one_f_one_b,
    placement,
    sequential,
    spell,
    zero_bubble,
    zero_bubble_v,
)

SCHEDULES = sequential, gpipe, one_f_one_b, interleaved, zero_bubble, zero_bubble_v
MSE = nn.MSELoss(reduction="sum")
X, Y = batch(11)


# Where a network is cut


@given(st.lists(st.integers(0, 9) | st.floats(0, 9), min_size=1, max_size=8), st.data())
def test_the_largest_part_is_as_small_as_can_be(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    found = balance(costs, parts)
    assert len(found) == parts and sum(found) == len(costs) and min(found) >= 1

    def largest(ends):
        return max(sum(costs[a:b]) for a, b in pairwise([0, *ends, len(costs)]))

    places = combinations(range(1, len(costs)), parts - 1)
    ends = [sum(found[: n + 1]) for n in range(parts - 1)]
    assert largest(ends) == pytest.approx(min(map(largest, places)))


def test_stages_have_the_networks_own_layers_whatever_holds_the_costs():
    model, costs = mlp(*WIDTHS), [9, 1, 1, 1, 1, 1, 1]
    for layers in (model, list(model), nn.ModuleList(model)):
        for own in (costs, tuple(costs), np.array(costs), torch.tensor(costs)):
            first, second = cut(layers, 2, own)
            assert [*first, *second] == [*model] and len(first) == 1
    assert [len(stage) for stage in cut(model, 3)] == [3, 3, 1]


def test_a_cut_that_cannot_be_is_refused():
    for arguments, words in [
        ([4], "2 layers cannot be cut into 4 stages"),
        ([0], "2 layers cannot be cut into 0 stages"),
        ([2, [1]], "there are 1 costs for 2 layers"),
    ]:
        with pytest.raises(ValueError, match=words):
            cut([nn.Tanh(), nn.Tanh()], *arguments)


# Backward passes in two halves


class Odd(nn.Module):
    """Uses a weight, and functions of it, several times; changes an output in place."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, X):
        X = self.layer(self.layer(self.norm(X)).relu_())
        W, b = self.layer.weight, self.layer.bias.tanh()
        X = F.linear(F.linear(X, W.tanh(), b), W, b) + F.linear(X[0], bias=b, weight=W)
        Y = checkpoint(self.layer, X, use_reentrant=False)
        return Y * F.linear(X, b)[..., None]


def partly_frozen():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5, bias=False))
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    return model


def complex_layers():
    layers = [nn.Linear(n, 5, dtype=torch.complex128) for n in (6, 5)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("build", [partly_frozen, complex_layers, Odd])
@pytest.mark.parametrize("wanted", [True, False])  # whether the input's gradient is
def test_two_halves_of_a_backward_pass_make_the_whole(build, wanted):
    torch.manual_seed(0)
    whole = build()
    whole = whole if build is complex_layers else whole.double()
    halves = deepcopy(whole)
    first, second = Stage(whole), Stage(halves, split=True)
    for i in range(2):  # both are under way at once
        X = torch.randn(2, 3, 6, dtype=next(whole.parameters()).dtype)
        for stage in (first, second):
            stage.forward(i, X.clone().requires_grad_(wanted))
    for i in (1, 0):
        grad = torch.randn_like(first.live[i][1])
        close(second.backward(i, grad), first.backward(i, grad))
    assert any(second.later.values()), "nothing was left for later"
    for i in (0, 1):
        second.weight(i, None)
    close(grads(halves), grads(whole))
    assert second.live == second.later == {}


# On devices and between ranks: what is trained is what one device would train


def convolutions():
    torch.manual_seed(0)
    layers = nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.GELU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(16, 7), nn.Tanh(), nn.Linear(7, 5)).double()


def tokens():
    return nn.Sequential(nn.Identity(), *of_tokens())  # six layers, for six stages


def counted(y):
    return (y != 1).sum()


TOKENS = torch.arange(33).reshape(11, 3) % 11
IGNORED = nn.CrossEntropyLoss(ignore_index=1, reduction="sum")
CASES = {  # network, inputs, targets, criterion, count
    "mlp": (lambda: mlp(*WIDTHS, 5, 5), X, Y, MSE, torch.numel),
    "sum": (convolutions, X, Y, MSE, None),
    "frozen": (frozen, X, Y, MSE, torch.numel),
    "tokens": (tokens, TOKENS, TOKENS[:, 0] % 5, IGNORED, counted),
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
def test_devices_train_what_one_device_trains(case):
    build, X, y, criterion, count = CASES[case]
    for schedule in SCHEDULES:
        num_stages, before = len(placement(schedule(2, 4))), X.clone()
        loss, right = one_device(case, num_stages)
        stages = cut(build(), num_stages)
        pipeline = Pipeline(stages, ["cpu"] * 2, criterion, 4, schedule, count)
        found = [pipeline.forward_backward(X, y) for _ in range(2)]
        close([found, list(map(grads, stages))], [[loss, loss], right])
        assert torch.equal(X, before) and not found[0].requires_grad


@both_ways
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_ranks_train_what_one_device_trains(p, way):
    def train(rank, p):
        for schedule in SCHEDULES:
            num_stages = len(placement(schedule(p, 2 * p)))
            for case in CASES if p < 4 else ["mlp"]:
                build, X, y, criterion, count = CASES[case]
                loss, right = one_device(case, num_stages)
                stages = cut(build(), num_stages)
                run = DistributedPipeline(stages, criterion, 2 * p, schedule, count)
                take(way, run.group)
                found = [run.forward_backward(X, y) for _ in range(2)]
                for s in map(int, run.stages):
                    close(grads(stages[s]), right[s])
                is_last = str(num_stages - 1) in run.stages
                assert is_last or found == [None, None]
                close(found, [loss if is_last else None] * 2)

    launch(train, p, timeout=LIMIT)


TORCHS = {
    "ScheduleGPipe": gpipe,
    "Schedule1F1B": one_f_one_b,
    "ScheduleInterleaved1F1B": interleaved,
    "ScheduleInterleavedZeroBubble": zero_bubble,
    "ScheduleZBVZeroBubble": zero_bubble_v,
}


def gradients_are_torchs(rank, p):
    from torch.distributed.pipelining import PipelineStage, schedules

    X, y = batch(12)
    for name, schedule in TORCHS.items():
        n, kind = len(placement(schedule(p, 4))), getattr(schedules, name)
        ours, theirs = cut(mlp(*WIDTHS), n), cut(mlp(*WIDTHS), n)
        run = DistributedPipeline(ours, MSE, 4, schedule, torch.numel)
        run.forward_backward(X, y)
        cpu = torch.device("cpu")
        own = [int(s) for s in run.stages]
        parts = [PipelineStage(theirs[s], s, n, cpu) for s in own]
        several = issubclass(kind, schedules.PipelineScheduleMulti)
        torchs = kind(parts if several else parts[0], 4, loss_fn=nn.MSELoss())
        target = {"target": y, "losses": []} if n - 1 in own else {}
        torchs.step(*[X] * (0 in own), **target)
        for s in own:
            close(grads(ours[s]), grads(theirs[s]))


# What is sent, when, and where it lies


def runs_ahead(p, m):
    """Rank 0 sends rank 1 what it takes late, and then rank 2 what that waits for."""
    words = ["Ff" + "FbBf" * (m - 1) + "bB", *["FfbB" * m] * (p - 1)]
    return [spell(word, r, p + r) for r, word in enumerate(words)]


@both_ways
@pytest.mark.parametrize("schedule", [*SCHEDULES, runs_ahead])
def test_large_messages_do_not_deadlock(schedule, way):
    def train(rank, p):
        stages = [nn.Conv1d(1, 1, 1, bias=False) for _ in placement(schedule(p, 6))]
        for stage in stages:
            nn.init.ones_(stage.weight)
        run = DistributedPipeline(stages, MSE, 6, schedule, torch.numel)
        take(way, run.group)
        X = torch.full((6, 1, 400_000), 2.0)  # 1.6 MB per row: lanes hold 0.5
        run.forward_backward(X, X / 2)
        for stage in run.stages.values():  # a sum of millions
            assert stage.weight.grad.item() == pytest.approx(4, rel=1e-2)

    launch(train, 3, timeout=LIMIT)


def all_end(threads):
    for thread in threads:
        thread.join(SOON)
        assert not thread.is_alive()


def bytes_are_counted_and_threads_end(rank, p):
    before = threading.enumerate()
    run = DistributedPipeline(cut(mlp(*WIDTHS), p), MSE, 3)
    with count_bytes() as ledger:
        run.forward_backward(X, Y)
    assert ledger.bytes == {(rank, 1 - rank): 11 * 7 * 8}
    assert ledger.messages == {(rank, 1 - rank): 3}  # one of each micro-batch
    all_end(set(threading.enumerate()) - set(before))


def test_devices_get_their_stages_and_messages():
    stages, inputs = [nn.Linear(6, 8), nn.Linear(8, 5)], []
    criterion = nn.CrossEntropyLoss(torch.ones(5), reduction="sum")
    pipeline = Pipeline(stages, ["cpu", "meta"], criterion, 2)
    assert [stage.weight.device.type for stage in stages] == ["cpu", "meta"]
    assert criterion.weight.device.type == "meta"
    pipeline = Pipeline([nn.Linear(6, 5)], ["meta"], criterion, 1)
    pipeline.stages[0].register_forward_pre_hook(lambda _, args: inputs.extend(args))
    pipeline.forward_backward(X.float(), Y)
    assert [tensor.device.type for tensor in inputs] == ["meta"]
    pipeline = Pipeline(cut(mlp(*WIDTHS), 2), ["cpu"] * 2, MSE, 3)
    with count_bytes() as ledger:
        pipeline.forward_backward(X, Y)
    assert ledger.bytes == dict.fromkeys([(0, 1), (1, 0)], 11 * 7 * 8)


@pytest.mark.gpu
def test_stages_on_gpu_and_cpu_in_turn():
    for schedule in (one_f_one_b, zero_bubble):
        stages, devices = cut(mlp(*WIDTHS), 3), ["cuda", "cpu", "cuda"]
        pipeline = Pipeline(stages, devices, MSE, 3, schedule, torch.numel)
        loss = pipeline.forward_backward(X, Y)
        found = [grad.cpu() for stage in stages for grad in grads(stage)]
        whole = loss_and_grads(mlp(*WIDTHS), nn.MSELoss(), X, Y)
        close((loss.cpu(), found), whole)


# What is refused: nothing was sent, and all goes on


TIED = [nn.Linear(6, 6), nn.Linear(6, 6)]
TIED[1].bias = TIED[0].bias
FITS = "ranks, micro-batches and stages, not for"
REFUSED = [  # what is changed in a pipeline and its batch, and what is said
    ({"criterion": nn.MSELoss()}, 'reduction="mean", and must have "sum"'),
    ({"stages": cut(mlp(*WIDTHS), 3)}, rf"\(2, 3, 2\) {FITS} \(2, 3, 3\)"),
    ({"schedule": lambda p, m: gpipe(p, 2)}, rf"\(2, 2, 2\) {FITS}"),
    ({"schedule": lambda p, m: gpipe(3, m)}, rf"\(3, 3, 3\) {FITS}"),
    ({"schedule": lambda p, m: [gpipe(p, m)[0][1:]] * p}, "occurs 0 times"),
    ({"stages": TIED}, "two stages share a parameter: put layers that do in one"),
    ({"m": 12}, "X has 11 rows and y has 11: .* the same number, at least 12"),
    ({"y": Y[:10]}, "X has 11 rows and y has 10: both need the same"),
]


def step(rank_form, stages=None, criterion=MSE, m=3, schedule=one_f_one_b, X=X, y=Y):
    """One step of a pipeline of two stages, of which arguments may be wrong."""
    stages = cut(mlp(*WIDTHS), 2) if stages is None else stages
    devices = [] if rank_form else [["cpu"] * 2]
    form = DistributedPipeline if rank_form else Pipeline
    return form(stages, *devices, criterion, m, schedule).forward_backward(X, y)


def what_is_wrong_everywhere_is_refused(rank, p):
    for changes, words in REFUSED:
        for rank_form in (False, True):
            with pytest.raises(ValueError, match=words):
                step(rank_form, **changes)


def what_differs_is_told_to_all_and_loses_nothing(rank, p):
    for changes, words in [
        ({"m": 3 + rank}, "pipeline, m = "),
        ({"schedule": gpipe if rank else one_f_one_b}, "pipeline, m = "),
        ({"stages": cut(mlp(*WIDTHS), 2 + rank)}, "(2, 3, 2)"),
        ({"stages": cut(mlp(*WIDTHS), 2, [1 + 9 * rank] + [1] * 6)}, "[4, 4] p"),
        ({"criterion": MSE if rank else nn.MSELoss()}, "must have"),
    ]:
        kind, text, *_, seconds = attempt(step, True, **changes)
        assert kind == "MismatchError" and words in text and seconds < SOON, text
    run = DistributedPipeline(cut(mlp(*WIDTHS), 2), MSE, 3, count=torch.numel)
    for y, wanted in [(Y[: 11 - rank], "MismatchError"), (Y, "ok")]:
        kind, text, *_ = attempt(run.forward_backward, X, y)
        assert kind == wanted and ("ValueError: X has 11" in str(text)) == (y is not Y)
    _, right = loss_and_grads(mlp(*WIDTHS), nn.MSELoss(), X, Y)
    close(grads(run.stages), right[:4] if rank == 0 else right[4:])


class Sparse(nn.Module):
    """Its output cannot be sent, as the thread finds that should send it."""

    def forward(self, X):
        return X.to_sparse()


def what_cannot_be_sent_is_told_to_all(rank, p):
    kind, text, _, seconds = attempt(step, True, [Sparse(), mlp(6, 5)])
    assert kind == "PeerError" and seconds < SOON
    assert "rank 0 failed." in text and "sparse" in text


test_two_ranks = on_ranks(
    2,
    [
        gradients_are_torchs,
        bytes_are_counted_and_threads_end,
        what_is_wrong_everywhere_is_refused,
        what_differs_is_told_to_all_and_loses_nothing,
        what_cannot_be_sent_is_told_to_all,
    ],
)


# What fails: all are told, and the pipeline can no longer be used


@both_ways
@pytest.mark.parametrize("kind", ["forward", "backward", "weight"])
def test_a_stage_that_fails_is_named_on_all_ranks(kind, way):
    def fails(*_):
        raise ArithmeticError("here")

    def train(rank, p):
        run = DistributedPipeline(cut(mlp(*WIDTHS), 3), MSE, 4, zero_bubble)
        take(way, run.group)
        original = getattr(Stage, kind)

        def sometimes(stage, i, arrived):
            return original(stage, i, arrived) if rank != 1 or i != 2 else fails()

        setattr(Stage, kind, sometimes)
        first = attempt(run.forward_backward, X, Y)
        setattr(Stage, kind, original)
        all_end([t for t in threading.enumerate() if t.name == "communication"])
        ranks.barrier()  # the group of all goes on
        return first, attempt(run.forward_backward, X, Y)

    named = f"rank 1 failed.\nThis was the {kind} pass of micro-batch 2 on stage 1."
    for rank, (first, again) in enumerate(launch(train, 3, timeout=LIMIT)):
        (error, text, _, seconds), (later, why, *_) = first, again
        assert seconds < SOON and later == "PeerError" and named in why
        assert error == ("ArithmeticError" if rank == 1 else "PeerError")
        assert rank == 1 or f"{named}\nArithmeticError('here')" in text


def test_a_rank_that_does_not_come_is_named_in_time():
    def train(rank, p):
        ranks.transport.here.timeout = 0.5
        run = DistributedPipeline(cut(mlp(*WIDTHS), 3), MSE, 3)
        if rank != 1:
            return attempt(run.forward_backward, X, Y)

    first, _, last = launch(train, 3, timeout=LIMIT)
    for kind, text, named, seconds in (first, last):
        assert kind == "PeerError" and named == (1,) and "rank 1" in text
        assert 0.4 < seconds < 0.5 + SOON


def test_on_devices_a_stage_that_fails_says_which_it_was():
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        step(False, [mlp(6, 5), mlp(6, 5)])
    [note] = caught.value.__notes__
    assert note == "This was the forward pass of micro-batch 0 on stage 1."
