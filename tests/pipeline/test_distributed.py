"""A pipeline between ranks: together they train the model that one process would train."""

import inspect
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT, SOON, attempt, both_ways, close, grads, loss_and_grads, mlp, randn, take
from torch import nn

from d2lpar import (
    DistributedPipeline,
    Pipeline,
    count_bytes,
    cut,
    gpipe,
    one_f_one_b,
    ranks,
    sequential,
)
from d2lpar.pipeline.schedules import Action, own_actions
from d2lpar.ranks.launcher import RankError, launch
from d2lpar.ranks.point_to_point import HEADER

SCHEDULES = (sequential, gpipe, one_f_one_b)
MSE = nn.MSELoss()
WIDTHS = 6, 8, 7, 9, 5
HEAD = 3 * HEADER.size  # of three messages


def batch(rows=7, seed=0):
    return randn(rows, 6, seed=seed), randn(rows, 5, seed=10 + seed)


X, Y = batch()


def given(X, y, rank, k):
    """What a rank needs of a batch."""
    return X if rank == 0 else None, y if rank == k - 1 else None


def build(rank, k, m=3, schedule=one_f_one_b, **options):
    """A rank's part of the model that all tests use."""
    return DistributedPipeline(cut(mlp(*WIDTHS), k)[rank], MSE, m, schedule, **options)


def from_all(results):
    """The loss of the last rank, and the gradients of all stages."""
    return results[-1][0], [tensor for result in results for tensor in result[1]]


def whole(rows=7):
    return loss_and_grads(mlp(*WIDTHS), MSE, *batch(rows))


# What the ranks train is what one process would train.


def frozen():
    model = mlp(*WIDTHS)
    model[:3].requires_grad_(False)
    return [model[:3], model[3:5], model[5:]]


def tokens():
    torch.manual_seed(0)
    layers = nn.Embedding(11, 6), nn.Flatten(), nn.Linear(18, 7), nn.Tanh(), nn.Linear(7, 5)
    return cut(nn.Sequential(*layers).double(), 3)


class NeedsRows(nn.Module):
    def forward(self, X):
        assert len(X), "it was called without rows"
        return X


def needs_rows():
    return [stage.append(NeedsRows()) for stage in cut(mlp(*WIDTHS), 3)]


def dropping():
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 5)
    stages = cut(nn.Sequential(*layers).double(), 3)
    torch.manual_seed(5)
    return stages


X_TOKENS, IGNORED = torch.arange(24).reshape(8, 3) % 11, torch.tensor([0, 2, 4, 1, 1, 1, 3, 1])
WEIGHTED = nn.CrossEntropyLoss(weight=randn(5).abs(), ignore_index=1)
ALL = {(0, 1), (1, 0), (1, 2), (2, 1)}
CASES = [  # stages, criterion, batches, micro-batches, options, links that are used
    (lambda: cut(mlp(*WIDTHS), 3), MSE, [batch(7), batch(9, 1), batch(4, 2)], 4, {}, ALL),
    (frozen, MSE, [batch()], 3, {}, ALL - {(1, 0)}),
    (tokens, WEIGHTED, [(X_TOKENS, IGNORED)], 3, {}, ALL),
    (needs_rows, MSE, [batch(3), batch(7), batch(1)], 5, {}, ALL),
    (dropping, MSE, [batch()], 2, {"recompute": True}, ALL),
]


@both_ways
def test_ranks_train_what_one_process_trains(way):
    def train(rank, k):
        take(way)
        found = []
        for make, criterion, batches, m, options, _ in CASES:
            for schedule in SCHEDULES:
                stage = make()[rank]
                pipeline = DistributedPipeline(stage, criterion, m, schedule, **options)
                with count_bytes() as ledger:  # and gradients are added to those already there
                    losses = [pipeline.forward_backward(*given(*b, rank, k)) for b in batches]
                buffers = list(stage.buffers())
                found.append((losses, grads(stage), set(ledger.bytes), pipeline.peak_live, buffers))
        return found

    everyones = zip(*launch(train, 3, timeout=LIMIT), strict=True)
    for make, criterion, batches, m, _, links in CASES:
        for schedule in SCHEDULES:
            results, stages = next(everyones), make()
            pipeline = Pipeline(stages, ["cpu"] * 3, criterion, m, schedule)
            losses = [pipeline.forward_backward(*b) for b in batches]
            close(from_all(results), (losses, grads(pipeline)))
            close([b for result in results for b in result[4]], list(pipeline.stages.buffers()))
            assert [result[3] for result in results] == pipeline.peak_live
            assert set().union(*(result[2] for result in results)) == links
            assert all(result[0] == [None] * len(batches) for result in results[:-1])


@pytest.mark.parametrize(("k", "way"), [(1, "lanes"), (4, "messages")])
def test_other_numbers_of_ranks_train_and_evaluate(k, way):
    def train(rank, k):
        take(way)
        pipeline = build(rank, k, 4)
        X, y = batch(9)
        before = pipeline(X if rank == 0 else None)
        loss = pipeline.forward_backward(*given(X, y, rank, k))
        few = pipeline(X[:2].requires_grad_() if rank == 0 else None)  # fewer than micro-batches
        return loss, grads(pipeline), before, few

    results = launch(train, k, timeout=LIMIT)
    X, _ = batch(9)
    close(from_all(results), whole(9))
    *others, (_, _, before, few) = results
    assert all(result[2:] == (None, None) for result in others)
    close((before, few), (mlp(*WIDTHS)(X).detach(), mlp(*WIDTHS)(X[:2]).detach()))
    assert not before.requires_grad and not few.requires_grad


def test_a_group_of_some_ranks_has_stages_of_its_own_and_looks_at_nothing_else():
    def train(rank, k):
        group = dist.new_group([1, 2])
        if rank == 0:
            return attempt(build, 0, 2, group=group)
        X, y = batch()
        X, y = (X, y[:1]) if rank == 1 else (X[:2].requires_grad_(), y)  # the others' are wrong
        pipeline = build(rank - 1, 2, group=group)
        with count_bytes() as ledger:
            loss = pipeline.forward_backward(X, y)
        return loss, grads(pipeline), set(ledger.bytes)

    (kind, words, *_), *results = launch(train, 3, timeout=LIMIT)
    assert kind == "ValueError" and "no member" in words
    assert [links for *_, links in results] == [{(1, 2)}, {(2, 1)}]
    close(from_all(results), whole())


# What is sent, when, and what is kept.


@both_ways
def test_messages_larger_than_slots_do_not_deadlock(way):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, X):
            return X * self.weight

    def train(rank, k):
        take(way)
        pipeline = DistributedPipeline(Scale(), MSE, 6, gpipe, timeout=LIMIT / 2)
        X = torch.full((6, 786_432), 2.0)  # 3 MB a row
        loss = pipeline.forward_backward(*given(X, X / 2, rank, k))
        return loss, pipeline.stage.weight.grad.item()

    results = launch(train, 3, timeout=LIMIT)
    assert [grad for _, grad in results] == pytest.approx([4] * 3)
    assert results[-1][0] == 1


@both_ways
def test_bytes_are_counted_spans_written_down_and_threads_end(way):
    def train(rank, k):
        take(way)
        found, before = [], threading.active_count()
        for schedule in SCHEDULES:
            pipeline = build(rank, k, 3, schedule)
            pipeline.forward_backward(*given(*batch(), rank, k))
            assert pipeline.timeline is None
            pipeline.timeline = []
            with count_bytes() as ledger:
                pipeline.forward_backward(*given(*batch(), rank, k))
            found.append((dict(ledger.bytes), dict(ledger.messages), pipeline.timeline))
        during = threading.active_count()
        del pipeline
        end = time.monotonic() + SOON
        while threading.active_count() > before and time.monotonic() < end:
            time.sleep(0.01)
        return found, during > before == threading.active_count()

    sends = {0: {(0, 1): HEAD + 7 * 7 * 8}, 1: {(1, 0): HEAD + 7 * 7 * 8}}
    for rank, (results, ended) in enumerate(launch(train, 2, timeout=LIMIT)):
        assert ended
        for schedule, (bytes_sent, messages, spans) in zip(SCHEDULES, results, strict=True):
            assert bytes_sent == sends[rank]
            assert messages == dict.fromkeys(sends[rank], 6)  # a header, and the tensor
            assert [span[:3] for span in spans] == own_actions(schedule(2, 3), rank)
            times = [time for span in spans for time in span[3:]]
            assert times == sorted(times) and times[-1] > times[0]


# What is refused: the group is usable then.


def another_gpipe(p, m):
    return sequential(p, m)


another_gpipe.__name__ = "gpipe"


def crossed(p, m):
    order = [Action(0, i, "forward") for i in (0, 1)]
    order += [Action(1, i, "forward") for i in (1, 0)]
    order += [Action(s, i, "backward") for s in (1, 0) for i in (0, 1)]
    return [[action] for action in order]


ONE = nn.Linear(1, 1)
NEEDS_X, NEEDS_Y = "the first rank needs the inputs X", "the last rank needs the targets y"
REFUSED = [
    ((ONE, nn.functional.mse_loss, 2), "ValueError", "pass count"),
    ((ONE, MSE, 2, lambda p, m: gpipe(p, m)[1:]), "ValueError", "tick 0"),
    ((ONE, MSE, 2, crossed), "ValueError", "stages 0 and 1 go forward with micro-batches in two"),
    (([ONE, ONE], MSE, 2), "TypeError", "one module, such as cut(model, num_stages)[rank]"),
]


BATCHES = [  # each is refused on both ranks, which so stay at the same call; what they are told
    ((None, None), NEEDS_X, NEEDS_Y),
    ((X[:0], Y[:0]), "a batch of shape [0, 6] has no rows", "a batch of shape [0, 5] has no rows"),
    ((X.clone().requires_grad_(), None), "X requires gradients", NEEDS_Y),
]


def test_pipelines_and_batches_that_are_refused():
    def refuse(rank, k):
        made = [attempt(DistributedPipeline, *arguments)[:2] for arguments, *_ in REFUSED]
        pipeline = build(rank, k)
        calls = [attempt(pipeline.forward_backward, *given(*b, rank, k))[:2] for b, *_ in BATCHES]
        calls.append(attempt(pipeline if rank == 0 else pipeline.forward_backward)[:2])
        return made, calls, pipeline.forward_backward(*given(X, Y, rank, k))

    results = launch(refuse, 2, timeout=LIMIT)
    close(results[-1][2], whole()[0])
    for rank, (made, calls, _) in enumerate(results):
        expected = [case[1:] for case in REFUSED]
        expected += [("ValueError", case[1 + rank]) for case in [*BATCHES, ((), NEEDS_X, NEEDS_Y)]]
        for (kind, text), (error, words) in zip(made + calls, expected, strict=True):
            assert kind == error and words in text


def test_ranks_that_disagree_are_told_so_on_all():
    def disagree(rank, k):
        outcomes = [
            attempt(build, rank, k, 3, gpipe if rank else sequential),
            attempt(build, rank, k, 4 if rank == 1 else 3),
            attempt(build, rank, k, 3, another_gpipe if rank == 2 else gpipe),
        ]
        return outcomes, build(rank, k).forward_backward(*given(*batch(), rank, k))

    *_, (_, loss) = results = launch(disagree, 3, timeout=LIMIT)
    close(loss, whole()[0])
    for (schedules, numbers, names), _ in results:
        for kind, text, _, seconds in (schedules, numbers, names):
            assert kind == "MismatchError" and seconds < SOON, text
        assert "sequential" in schedules[1] and "gpipe" in schedules[1]
        assert "4 micro-batches" in numbers[1] and "3 micro-batches" in numbers[1]


# What goes wrong: the group is of no more use then.


def test_targets_of_another_batch_are_an_error_on_the_last_rank():
    def train(rank, k):
        X, y = batch(9)[0], batch(7)[1]
        return attempt(build(rank, k, timeout=0.5).forward_backward, *given(X, y, rank, k))

    first, last = launch(train, 2, timeout=LIMIT)
    assert last[0] == "ValueError" and "micro-batch 1 has 3 rows of outputs, but 2" in last[1]
    assert first[0] == "PeerError" and first[2] == (1,) and first[3] < 0.5 + SOON


class Fails(nn.Module):
    """Raises an error in the third call."""

    calls = 0

    def forward(self, X):
        self.calls += 1
        if self.calls == 3:
            raise ArithmeticError("here")
        return X


def test_a_stage_that_fails_ends_all_ranks_with_its_error():
    def train(rank, k):
        pipeline = build(rank, k, 4, gpipe)
        if rank == 2:
            pipeline.stage.append(Fails())
        pipeline.forward_backward(*given(*batch(), rank, k))

    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 2: ArithmeticError: here") as error:
        launch(train, 3, timeout=LIMIT)
    assert "the pipeline's forward of micro-batch 2 on stage 2." in str(error.value)
    assert time.monotonic() - begin < LIMIT / 3


@pytest.mark.parametrize(("trains", "way"), [(True, "lanes"), (True, "messages"), (False, "lanes")])
def test_ranks_learn_at_once_of_a_stage_that_fails(trains, way):
    def run(rank, k):
        take(way)
        pipeline = build(rank, k, 4, gpipe)
        if rank == 1:
            pipeline.stage.append(Fails())
        X, y = batch()
        try:
            pipeline.forward_backward(*given(X, y, rank, k)) if trains else pipeline(X)
        except ArithmeticError as error:
            return error.__notes__
        except ranks.PeerError as error:
            return str(error)

    first, notes, last = launch(run, 3, timeout=LIMIT)
    assert "forward of micro-batch 2 on stage 1" in notes[0]
    for text in (first, last) if trains else (last,):  # the first one may evaluate, and be done
        assert "rank 1" in text and "Timed out" not in text and "do its part in time" not in text


@pytest.mark.parametrize(
    ("missed", "way"),
    [("construction", "lanes"), ("training", "messages"), ("evaluation", "lanes")],
)
def test_a_rank_that_does_not_come_is_named_in_time(missed, way):
    def train(rank, k):
        take(way)
        if missed == "construction":
            return attempt(build, rank, k, timeout=0.5) if rank != 1 else None
        pipeline = build(rank, k, timeout=0.5)
        if rank == 1:
            return None
        if missed == "evaluation":
            return attempt(pipeline, batch()[0])
        return attempt(pipeline.forward_backward, *given(*batch(), rank, k))

    first, _, last = launch(train, 3, timeout=LIMIT)
    for kind, text, named, seconds in (first, last):
        assert kind == "PeerError" and named == (1,) and "rank 1" in text
        assert 0.4 < seconds < 0.5 + SOON


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("skips", ["'forward 0 of batch 1', but 'forward 0 of batch 2' was expected"]),
        ("evaluates", ["'forward 0 of evaluation 1'", "'forward 0 of batch 1'"]),
        ("something else", ["rank 0 makes another call"]),
    ],
)
def test_a_rank_at_another_call_is_found_out(does, words):
    def differ(rank, k):
        pipeline, (X, y) = build(rank, k, timeout=2), batch()
        if rank == 0 and does == "evaluates":
            return attempt(pipeline, X), None
        if rank == 0 and does == "something else":
            return attempt(partial(ranks.barrier, timeout=2)), None
        if rank == 1 and does == "skips":
            attempt(pipeline.forward_backward, None, y[:0])  # refused: one batch ahead from now on
        return attempt(pipeline.forward_backward, X, y), attempt(pipeline, X)

    _, ((kind, text, *_), again) = launch(differ, 2, timeout=LIMIT)
    assert kind == "MismatchError" and all(part in text for part in words)
    assert again[0] == "PeerError" and "of no more use since an earlier call" in again[1]


def test_what_cannot_be_sent_is_refused_where_it_was_made():
    def refuse(rank, k):
        deep = nn.Sequential(nn.Linear(6, 6).double(), nn.Unflatten(1, (1,) * 8 + (6,)))
        stage = deep if rank == 0 else nn.Flatten()
        pipeline = DistributedPipeline(stage, MSE, 1, timeout=3)
        return attempt(pipeline.forward_backward, *given(*batch(), rank, k))

    (kind, text, _, seconds), _ = launch(refuse, 2, timeout=LIMIT)
    assert kind == "ValueError" and "room for 8 dimensions" in text and seconds < 2


def test_gradients_are_those_of_torchs_own_pipeline():
    def compare(rank, k):
        from torch.distributed import pipelining

        found, pairs = [], {"ScheduleGPipe": gpipe, "Schedule1F1B": one_f_one_b}
        if torch.__version__.startswith("2.6."):
            del pairs["Schedule1F1B"]  # it hangs over gloo
        for name, schedule in pairs.items():
            stage, (X, y) = cut(mlp(*WIDTHS), k)[rank], batch(12)
            pipeline = build(rank, k, 4, schedule)
            pipeline.forward_backward(X, y)
            theirs = pipelining.PipelineStage(stage, rank, k, torch.device("cpu"))
            torchs = getattr(pipelining, name)
            arguments = [] if rank else [X]
            torchs(theirs, 4, loss_fn=MSE).step(*arguments, target=y if rank else None, losses=[])
            divides = "scale_grads" in inspect.signature(torchs).parameters
            found.append((grads(pipeline), [g / (1 if divides else 4) for g in grads(stage)]))
        return found

    for results in launch(compare, 2, timeout=LIMIT):
        for ours, theirs in results:
            close(ours, theirs)
            assert all(grad.any() for grad in theirs)
