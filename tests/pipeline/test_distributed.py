"""A pipeline between ranks: together they train the model that one process would train."""

import inspect
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
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
ROWS = (7, 4, 9)  # of the batches of three steps
SOON = 8.0  # seconds, for what takes milliseconds on a machine that is not busy
LIMIT = 30

both = pytest.mark.parametrize("way", ["lanes", "messages"])
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def go(way):
    if way == "messages":
        ranks.use_messages()


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp(seed=0):
    """Seven layers, 6 inputs and 5 outputs; what goes on between them has a width of its own."""
    torch.manual_seed(seed)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.ReLU(inplace=True), nn.Linear(7, 9)
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(9, 5)).double()


def norms(seed=0):
    torch.manual_seed(seed)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 5)
    return nn.Sequential(*layers).double()


def batch(rows=7, seed=0):
    return randn(rows, 6, seed=seed), randn(rows, 5, seed=10 + seed)


def given(X, y, rank, k):
    """What a rank needs of a batch."""
    return X if rank == 0 else None, y if rank == k - 1 else None


def grads(module):
    return [param.grad for param in module.parameters()]


def params(module):
    return [param.detach() for param in module.parameters()]


def attempt(call, *args, **kwargs):
    """What an error is, says and names, and how long it took; "ok" and the result without one."""
    begin = time.monotonic()
    try:
        result = call(*args, **kwargs)
    except Exception as error:
        seconds = time.monotonic() - begin
        return type(error).__name__, str(error), getattr(error, "ranks", ()), seconds
    return "ok", result, (), time.monotonic() - begin


def momentum(module):
    return torch.optim.SGD(module.parameters(), 0.1, 0.9)


def train_whole(model, criterion=None):
    losses, optimizer = [], momentum(model)
    for step, rows in enumerate(ROWS):
        X, y = batch(rows, step)
        loss = (criterion or nn.MSELoss())(model(X), y)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, params(model)


def train_stage(rank, k, model, m, schedule):
    stage = cut(model, k)[rank]
    pipeline = DistributedPipeline(stage, nn.MSELoss(), m, schedule, timeout=LIMIT)
    losses, optimizer = [], momentum(stage)
    for step, rows in enumerate(ROWS):
        losses.append(pipeline.forward_backward(*given(*batch(rows, step), rank, k)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, params(stage), pipeline.peak_live


def from_all(results):
    """The losses of the last rank, and the parameters or gradients of all stages."""
    return results[-1][0], [tensor for result in results for tensor in result[1]]


def grads_of(model, criterion, X, y):
    loss = criterion(model(X), y)
    loss.backward()
    return loss.detach(), grads(model)


# The definition: what the ranks train is what one process would train.


@both
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_several_steps_train_the_same_model(k, way):
    cases = [(schedule, m) for schedule in SCHEDULES for m in (1, 4)]

    def train(rank, k):
        go(way)
        return [train_stage(rank, k, mlp(), m, schedule) for schedule, m in cases]

    everyones = launch(train, k, timeout=LIMIT)
    whole = train_whole(mlp())
    for (schedule, m), *results in zip(cases, *everyones, strict=True):
        close(from_all(results), whole)
        for losses, *_ in results[:-1]:
            assert losses == [None] * len(ROWS)
        model = mlp()
        one_process = Pipeline(cut(model, k), ["cpu"] * k, nn.MSELoss(), m, schedule)
        X, y = batch(ROWS[0])
        close(results[-1][0][0], one_process.forward_backward(X, y))
        assert [peak for *_, peak in results] == one_process.peak_live


def test_gradients_are_added_to_those_already_there():
    def train(rank, k):
        stage = cut(mlp(), k)[rank]
        pipeline = DistributedPipeline(stage, nn.MSELoss(), 3)
        for seed in range(2):
            loss = pipeline.forward_backward(*given(*batch(7, seed), rank, k))
        return loss, grads(stage)

    model = mlp()
    for seed in range(2):
        loss, expected = grads_of(model, nn.MSELoss(), *batch(7, seed))
    close(from_all(launch(train, 2, timeout=LIMIT)), (loss, expected))


def test_what_a_rank_does_not_need_is_not_looked_at():
    def train(rank, k):
        X, y = batch()
        X, y = (X, y[:1]) if rank == 0 else (X[:2].requires_grad_(), y)
        pipeline = DistributedPipeline(cut(mlp(), k)[rank], nn.MSELoss(), 3, timeout=LIMIT)
        return pipeline.forward_backward(X, y), grads(pipeline)

    close(from_all(launch(train, 2, timeout=LIMIT)), grads_of(mlp(), nn.MSELoss(), *batch()))


@both
def test_a_frozen_first_stage_is_sent_no_gradient(way):
    def train(rank, k):
        go(way)
        found = []
        for schedule in SCHEDULES:
            model = mlp()
            model[:3].requires_grad_(False)
            stage = [model[:3], model[3:5], model[5:]][rank]
            pipeline = DistributedPipeline(stage, nn.MSELoss(), 3, schedule, timeout=LIMIT)
            with count_bytes() as ledger:
                loss = pipeline.forward_backward(*given(*batch(), rank, k))
            found.append((loss, grads(stage), set(ledger.bytes)))
        return found

    model = mlp()
    model[:3].requires_grad_(False)
    whole = grads_of(model, nn.MSELoss(), *batch())
    for results in zip(*launch(train, 3, timeout=LIMIT), strict=True):
        close(from_all(results), whole)
        assert [links for *_, links in results] == [{(0, 1)}, {(1, 2)}, {(2, 1)}]


def test_tokens_and_class_weights_with_micro_batches_whose_targets_are_ignored():
    def build():
        torch.manual_seed(0)
        layers = nn.Embedding(11, 6), nn.Flatten(), nn.Linear(18, 7), nn.Tanh(), nn.Linear(7, 5)
        return nn.Sequential(*layers).double()

    criterion = nn.CrossEntropyLoss(weight=randn(5).abs(), ignore_index=1)
    X, y = torch.arange(24).reshape(8, 3) % 11, torch.tensor([0, 2, 4, 1, 1, 1, 3, 1])

    def train(rank, k):
        stage = cut(build(), k)[rank]
        pipeline = DistributedPipeline(stage, criterion, 3, timeout=LIMIT)
        return pipeline.forward_backward(*given(X, y, rank, k)), grads(stage)

    close(from_all(launch(train, 2, timeout=LIMIT)), grads_of(build(), criterion, X, y))


def test_recomputing_is_what_one_process_does():
    def train(rank, k):
        stage = cut(norms(), k)[rank]
        pipeline = DistributedPipeline(stage, nn.MSELoss(), 2, recompute=True, timeout=LIMIT)
        calls = []
        stage.register_forward_pre_hook(lambda *_: calls.append(1))
        torch.manual_seed(5)
        loss = pipeline.forward_backward(*given(*batch(), rank, k))
        return loss, grads(stage), list(stage.buffers()), len(calls)

    model = norms()
    pipeline = Pipeline(cut(model, 2), ["cpu"] * 2, nn.MSELoss(), 2)
    torch.manual_seed(5)
    loss, results = pipeline.forward_backward(*batch()), launch(train, 2, timeout=LIMIT)
    close(from_all(results), (loss, grads(model)))
    close([buffer for result in results for buffer in result[2]], list(model.buffers()))
    assert [calls for *_, calls in results] == [4, 4]


@both
def test_evaluation_returns_the_whole_models_output_on_the_last_rank(way):
    def evaluate(rank, k):
        go(way)
        stage = cut(mlp(), k)[rank]
        pipeline = DistributedPipeline(stage, nn.MSELoss(), 4, timeout=LIMIT)
        X, y = batch(9)
        outputs = [pipeline(X if rank == 0 else None)]
        loss = pipeline.forward_backward(*given(X, y, rank, k))
        outputs.append(pipeline(X if rank == 0 else None))
        return loss, grads(stage), outputs

    model = mlp()
    X, y = batch(9)
    whole = grads_of(model, nn.MSELoss(), X, y)
    for k in (1, 3):
        results = launch(evaluate, k, timeout=LIMIT)
        close(from_all(results), whole)
        *others, (_, _, outputs) = results
        assert all(output == [None, None] for *_, output in others)
        for output in outputs:
            close(output, model(X).detach())
            assert not output.requires_grad


def test_a_group_of_some_ranks_has_stages_of_its_own():
    def train(rank, k):
        group = dist.new_group([1, 2])
        if rank == 0:
            return None
        stage = cut(mlp(), 2)[rank - 1]
        pipeline = DistributedPipeline(stage, nn.MSELoss(), 3, group=group, timeout=LIMIT)
        with count_bytes() as ledger:
            loss = pipeline.forward_backward(*given(*batch(), rank - 1, 2))
        return loss, grads(stage), set(ledger.bytes)

    nobody, *results = launch(train, 3, timeout=LIMIT)
    assert nobody is None and [links for *_, links in results] == [{(1, 2)}, {(2, 1)}]
    close(from_all(results), grads_of(mlp(), nn.MSELoss(), *batch()))


# What is sent, when, and what is kept.


@both
def test_messages_larger_than_slots_do_not_deadlock(way):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, X):
            return X * self.weight

    def train(rank, k):
        go(way)
        found = []
        for schedule in SCHEDULES:
            pipeline = DistributedPipeline(Scale(), nn.MSELoss(), 6, schedule, timeout=10)
            X = torch.full((6, 786_432), 2.0)  # 3 MB a row
            loss = pipeline.forward_backward(*given(X, X / 2, rank, k))
            found.append((loss, pipeline.stage.weight.grad.item()))
        return found

    for rank, results in enumerate(launch(train, 3, timeout=LIMIT)):
        for loss, grad in results:
            assert grad == pytest.approx(4)
            assert loss is None if rank < 2 else loss == 1


@both
def test_activations_and_gradients_are_counted_and_spans_written_down(way):
    def train(rank, k):
        go(way)
        found = []
        for schedule in SCHEDULES:
            model = mlp()
            stage = [model[:2], model[2:4], model[4:]][rank]
            pipeline = DistributedPipeline(stage, nn.MSELoss(), 3, schedule, timeout=LIMIT)
            pipeline.forward_backward(*given(*batch(), rank, k))
            assert pipeline.timeline is None
            pipeline.timeline = []
            with count_bytes() as ledger:
                pipeline.forward_backward(*given(*batch(), rank, k))
            found.append((dict(ledger.bytes), dict(ledger.messages), pipeline.timeline))
        return found

    def sent(width):
        return 3 * HEADER.size + 7 * width * 8

    expected = [{(0, 1): sent(8)}, {(1, 2): sent(7), (1, 0): sent(8)}, {(2, 1): sent(7)}]
    for rank, results in enumerate(launch(train, 3, timeout=LIMIT)):
        for schedule, (bytes_sent, messages, spans) in zip(SCHEDULES, results, strict=True):
            assert bytes_sent == expected[rank]
            assert messages == dict.fromkeys(expected[rank], 6)  # a header, and the tensor
            assert [span[:3] for span in spans] == own_actions(schedule(3, 3), rank)
            times = [time for span in spans for time in span[3:]]
            assert times == sorted(times) and times[-1] > times[0]


def test_threads_end_with_their_pipeline():
    def train(rank, k):
        before = threading.active_count()
        pipeline = DistributedPipeline(cut(mlp(), k)[rank], nn.MSELoss(), 3)
        pipeline.forward_backward(*given(*batch(), rank, k))
        during = threading.active_count()
        del pipeline
        end = time.monotonic() + SOON
        while threading.active_count() > before and time.monotonic() < end:
            time.sleep(0.01)
        return during - before, threading.active_count() - before

    assert all(during > 0 and after == 0 for during, after in launch(train, 2, timeout=LIMIT))


# What is refused, and what goes wrong.


def test_ranks_that_disagree_are_told_so_on_all():
    def another_gpipe(p, m):
        return sequential(p, m)

    another_gpipe.__name__ = "gpipe"

    def disagree(rank, k):
        build = partial(DistributedPipeline, cut(mlp(), k)[rank], nn.MSELoss())
        outcomes = [
            attempt(build, 3, gpipe if rank else sequential),
            attempt(build, 4 if rank == 1 else 3),
            attempt(build, 3, another_gpipe if rank == 2 else gpipe),
        ]
        pipeline = build(3)  # the group is usable
        return outcomes, pipeline.forward_backward(*given(*batch(), rank, k))

    *_, (_, loss) = results = launch(disagree, 3, timeout=LIMIT)
    close(loss, grads_of(mlp(), nn.MSELoss(), *batch())[0])
    for (schedules, numbers, names), _ in results:
        for kind, text, _, seconds in (schedules, numbers, names):
            assert kind == "MismatchError" and seconds < SOON, text
        assert "sequential" in schedules[1] and "gpipe" in schedules[1]
        assert "4 micro-batches" in numbers[1] and "3 micro-batches" in numbers[1]


def test_what_a_rank_needs_and_is_not_given():
    def refuse(rank, k):
        pipeline = DistributedPipeline(cut(mlp(), k)[rank], nn.MSELoss(), 3, timeout=LIMIT)
        X, y = batch()
        outcomes = [
            attempt(pipeline.forward_backward, *given(X, y, 1 - rank, k)),
            attempt(pipeline.forward_backward, *given(X[:0], y[:0], rank, k)),
        ]
        if rank == 0:
            outcomes.append(attempt(pipeline.forward_backward, X.clone().requires_grad_()))
            outcomes.append(attempt(pipeline))
        else:  # so that the ranks stay at the same call
            outcomes += [attempt(pipeline.forward_backward) for _ in range(2)]
        return outcomes, pipeline.forward_backward(*given(X, y, rank, k))

    (first, _), (last, loss) = launch(refuse, 2, timeout=LIMIT)
    close(loss, grads_of(mlp(), nn.MSELoss(), *batch())[0])
    assert {kind for kind, *_ in first + last} == {"ValueError"}
    for (_, text, *_), words in zip(
        first + last,
        [
            "the first rank needs the inputs X",
            "a batch of shape [0, 6] has no rows",
            "X requires gradients",
            "the first rank needs the inputs X",
            "the last rank needs the targets y",
            "a batch of shape [0, 5] has no rows",
            *["the last rank needs the targets y"] * 2,
        ],
        strict=True,
    ):
        assert words in text


def test_pipelines_that_are_refused():
    def build(rank, k):
        stage = nn.Linear(1, 1)
        return [
            attempt(DistributedPipeline, stage, nn.MSELoss(reduction="none"), 2),
            attempt(DistributedPipeline, stage, nn.functional.mse_loss, 2),
            attempt(DistributedPipeline, stage, nn.MSELoss(), 0),
            attempt(DistributedPipeline, stage, nn.MSELoss(), 2, lambda p, m: gpipe(p, m)[1:]),
            attempt(DistributedPipeline, stage, nn.MSELoss(), 2, "gpipe"),
            attempt(DistributedPipeline, [stage, stage], nn.MSELoss(), 2),
        ]

    for none, function, zero, wrong, text, stages in launch(build, 2, timeout=LIMIT):
        assert none[0] == "ValueError" and 'reduction "none"' in none[1]
        assert function[0] == "ValueError" and "pass count" in function[1]
        assert zero[0] == "ValueError" and "not 0" in zero[1]
        assert wrong[0] == "ValueError" and "tick 0" in wrong[1]
        assert text[0] == "TypeError" and "such as gpipe" in text[1]
        assert stages[0] == "TypeError" and "not a list: such as cut(model, num" in stages[1]


def test_targets_of_another_batch_are_an_error_on_the_last_rank():
    def train(rank, k):
        pipeline = DistributedPipeline(cut(mlp(), k)[rank], nn.MSELoss(), 3, timeout=0.5)
        (X, _), (_, y) = batch(9), batch(7)
        return attempt(pipeline.forward_backward, *given(X, y, rank, k))

    first, last = launch(train, 2, timeout=LIMIT)
    assert last[0] == "ValueError" and "micro-batch 1 has 3 rows of outputs, but 2" in last[1]
    assert first[0] == "PeerError" and first[2] == (1,) and first[3] < 0.5 + SOON


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_stage_that_fails_ends_all_ranks_with_its_error(culprit):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, X):
            self.calls += 1
            if self.calls == 3:
                raise ArithmeticError("in micro-batch 2")
            return X

    def train(rank, k):
        stage = cut(mlp(), k)[rank]
        if rank == culprit:
            stage.append(Fails())
        pipeline = DistributedPipeline(stage, nn.MSELoss(), 4, gpipe)
        pipeline.forward_backward(*given(*batch(), rank, k))

    begin = time.monotonic()
    with pytest.raises(RankError, match=f"rank {culprit}: ArithmeticError: in micro-batch 2") as e:
        launch(train, 3, timeout=LIMIT)
    assert f"the pipeline's forward of micro-batch 2 on stage {culprit}." in str(e.value)
    assert e.value.rank == culprit
    assert time.monotonic() - begin < LIMIT / 3


@both
@pytest.mark.parametrize("trains", [True, False])
def test_ranks_learn_at_once_of_a_stage_that_fails(trains, way):
    class Fails(nn.Module):
        def forward(self, X):
            raise ArithmeticError("here")

    def run(rank, k):
        go(way)
        stage = nn.Sequential(Fails()) if rank == 1 else cut(mlp(), k)[rank]
        pipeline = DistributedPipeline(stage, nn.MSELoss(), 4, timeout=LIMIT / 2)
        X, y = batch()
        try:
            pipeline.forward_backward(*given(X, y, rank, k)) if trains else pipeline(X)
        except ArithmeticError as error:
            return error.__notes__
        except ranks.PeerError as error:
            return str(error)

    first, notes, last = launch(run, 3, timeout=LIMIT)
    assert "forward of micro-batch 0 on stage 1" in notes[0]
    for text in (first, last) if trains else (last,):  # the first one may evaluate, and be done
        assert "rank 1" in text and "Timed out" not in text and "do its part in time" not in text


@both
@pytest.mark.parametrize("missed", ["from the start", "in training", "in evaluation"])
def test_a_rank_that_does_not_come_is_named_in_time(missed, way):
    def train(rank, k):
        go(way)
        build = partial(DistributedPipeline, cut(mlp(), k)[rank], nn.MSELoss(), 3, timeout=0.5)
        if missed == "from the start":
            return attempt(build) if rank != 1 else None
        pipeline = build()
        if rank == 1:
            return None
        if missed == "in evaluation":
            return attempt(pipeline, batch()[0])
        return attempt(pipeline.forward_backward, *given(*batch(), rank, k))

    first, _, last = launch(train, 3, timeout=LIMIT)
    for kind, text, named, seconds in (first, last):
        assert kind == "PeerError" and named == (1,) and "rank 1" in text
        assert 0.4 < seconds < 0.5 + SOON


def test_a_rank_that_skips_a_batch_is_found_out():
    def skip(rank, k):
        pipeline = DistributedPipeline(cut(mlp(), k)[rank], nn.MSELoss(), 3, timeout=LIMIT)
        X, y = batch()
        if rank == 1:
            attempt(pipeline.forward_backward, None, y[:0])  # refused: one batch behind from now on
        first = attempt(pipeline.forward_backward, *given(X, y, rank, k)) if rank == 0 else None
        second = attempt(pipeline.forward_backward, *given(X, y, rank, k)) if rank == 1 else None
        return first or second

    with pytest.raises(RankError, match=r"MismatchError.*'forward 0 of batch 1'"):

        def run(rank, k):
            kind, text, *_ = skip(rank, k)
            if rank == 1:
                raise RuntimeError(f"{kind}: {text}")
            time.sleep(LIMIT)

        launch(run, 2, timeout=LIMIT)


def test_a_rank_that_evaluates_while_another_trains_is_found_out():
    def differ(rank, k):
        pipeline = DistributedPipeline(cut(mlp(), k)[rank], nn.MSELoss(), 3, timeout=2)
        X, y = batch()
        outcome = attempt(pipeline, X) if rank == 0 else attempt(pipeline.forward_backward, X, y)
        again = attempt(pipeline, X) if rank == 1 else None
        return outcome, again

    _, ((kind, text, *_), again) = launch(differ, 2, timeout=LIMIT)
    assert kind == "MismatchError"
    assert "'forward 0 of evaluation 1'" in text and "'forward 0 of batch 1'" in text
    assert again[0] == "PeerError" and "of no more use since an earlier call" in again[1]


def test_a_rank_that_does_something_else_is_found_out():
    def differ(rank, k):
        if rank == 1:
            pipeline = DistributedPipeline(nn.Linear(2, 2), nn.MSELoss(), 1)
            return attempt(pipeline.forward_backward, None, torch.ones(2, 2))
        DistributedPipeline(nn.Linear(2, 2), nn.MSELoss(), 1)
        return attempt(partial(ranks.barrier, timeout=2))

    _, (kind, text, *_) = launch(differ, 2, timeout=LIMIT)
    assert kind == "MismatchError" and "rank 0 makes another call" in text


def test_what_cannot_be_sent_is_refused_where_it_was_made():
    def refuse(rank, k):
        deep = nn.Sequential(nn.Linear(6, 6).double(), nn.Unflatten(1, (1,) * 8 + (6,)))
        stage = deep if rank == 0 else nn.Flatten()
        pipeline = DistributedPipeline(stage, nn.MSELoss(), 1, timeout=3)
        return attempt(pipeline.forward_backward, *given(*batch(), rank, k))

    (kind, text, _, seconds), _ = launch(refuse, 2, timeout=LIMIT)
    assert kind == "ValueError" and "room for 8 dimensions" in text and seconds < 2


class NeedsRows(nn.Module):
    def forward(self, X):
        assert len(X), "it was called without rows"
        return X


@both
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_batch_with_fewer_rows_than_micro_batches_makes_fewer(schedule, way):
    def train(rank, k):
        go(way)
        stage = cut(mlp(), k)[rank].append(NeedsRows())
        pipeline = DistributedPipeline(stage, nn.MSELoss(), 5, schedule, timeout=LIMIT)
        losses = [
            pipeline.forward_backward(*given(*batch(rows, rows), rank, k)) for rows in (3, 7, 1)
        ]
        return losses, grads(stage)

    losses, ours = from_all(launch(train, 3, timeout=LIMIT))
    model = mlp()
    for loss, rows in zip(losses, (3, 7, 1), strict=True):
        close(loss, grads_of(model, nn.MSELoss(), *batch(rows, rows))[0])  # and adds to gradients
    close(ours, grads(model))


def test_a_last_batch_with_fewer_rows_than_micro_batches_can_be_evaluated():
    def evaluate(rank, k):
        stage = cut(mlp(), k)[rank].append(NeedsRows())
        pipeline = DistributedPipeline(stage, nn.MSELoss(), 4)
        return pipeline(batch()[0][:2].requires_grad_() if rank == 0 else None)

    close(launch(evaluate, 2, timeout=LIMIT)[1], mlp()(batch()[0][:2]))


def test_a_schedule_that_sends_in_another_order_than_it_receives_is_refused():
    def crossed(p, m):
        order = [Action(0, i, "forward") for i in (0, 1)]
        order += [Action(1, i, "forward") for i in (1, 0)]
        order += [Action(s, i, "backward") for s in (1, 0) for i in (0, 1)]
        return [[action] for action in order]

    def refuse(rank, k):
        return attempt(DistributedPipeline, nn.Linear(2, 2), nn.MSELoss(), 2, crossed)

    for kind, text, *_ in launch(refuse, 2, timeout=LIMIT):
        assert kind == "ValueError" and "stage 1 goes forward with micro-batches in another" in text


OLD = torch.__version__.startswith("2.6.")  # its 1F1B hangs over gloo
no_old = pytest.mark.skipif(OLD, reason="torch 2.6 hangs")


@pytest.mark.parametrize("name", ["ScheduleGPipe", pytest.param("Schedule1F1B", marks=no_old)])
def test_gradients_are_those_of_torchs_own_pipeline(name):
    def compare(rank, k):
        from torch.distributed import pipelining

        stages = [cut(mlp(), k)[rank] for _ in range(2)]
        X, y = batch(12)
        schedule = {"ScheduleGPipe": gpipe, "Schedule1F1B": one_f_one_b}[name]
        DistributedPipeline(stages[0], nn.MSELoss(), 4, schedule).forward_backward(X, y)
        theirs = pipelining.PipelineStage(stages[1], rank, k, torch.device("cpu"))
        arguments = (X,) if rank == 0 else ()
        getattr(pipelining, name)(theirs, 4, loss_fn=nn.MSELoss()).step(
            *arguments, target=y if rank == k - 1 else None, losses=[]
        )
        divides = "scale_grads" in inspect.signature(getattr(pipelining, name)).parameters
        return grads(stages[0]), [g / (1 if divides else 4) for g in grads(stages[1])]  # torch 2.6

    for ours, theirs in launch(compare, 2, timeout=LIMIT):
        close(ours, theirs)
        assert all(grad.any() for grad in theirs)
