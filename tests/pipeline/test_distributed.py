"""A pipeline between ranks: together they train the model that one process would."""

import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import (
    LIMIT,
    PIPELINES,
    SOON,
    WIDTHS,
    NeedsRows,
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
    randn,
    take,
)
from torch import nn

from d2lpar import DistributedPipeline, Pipeline, count_bytes, cut, ranks
from d2lpar.pipeline.schedules import (
    Action,
    gpipe,
    one_f_one_b,
    own_actions,
    sequential,
)
from d2lpar.ranks.launch import launch

MSE = nn.MSELoss()


X, Y = batch()


def given(X, y, rank, k):
    """What a rank needs of a batch."""
    return X if rank == 0 else None, y if rank == k - 1 else None


def build(rank, k, m=3, schedule=one_f_one_b, **options):
    """A rank's part of the model that most tests use."""
    return DistributedPipeline(cut(mlp(*WIDTHS), k)[rank], MSE, m, schedule, **options)


def assert_trains(pipeline, rank, k, rows=7):
    """One step, as one process makes it with the whole model."""
    loss = pipeline.forward_backward(*given(*batch(rows), rank, k))
    model = mlp(*WIDTHS)
    expected, _ = loss_and_grads(model, MSE, *batch(rows))
    close(grads(pipeline.stage), grads(cut(model, k)[rank]))
    assert rank == k - 1 or loss is None
    if rank == k - 1:
        close(loss, expected)


# What the ranks train is what one process would train.


def needs_rows():
    return [stage.append(NeedsRows()) for stage in cut(mlp(*WIDTHS), 3)]


def dropping():
    torch.manual_seed(0)
    norm = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh()
    stages = cut(nn.Sequential(*norm, nn.Dropout(0.5), nn.Linear(8, 5)).double(), 3)
    torch.manual_seed(5)
    return stages


X_TOKENS, IGNORED = (
    torch.arange(24).reshape(8, 3) % 11,
    torch.tensor([0, 2, 4, 1, 1, 1, 3, 1]),
)
WEIGHTED = nn.CrossEntropyLoss(weight=randn(5).abs(), ignore_index=1)
ALL = {(0, 1), (1, 0), (1, 2), (2, 1)}
CASES = [  # stages, criterion, batches, micro-batches, options, links that are used
    (
        lambda: cut(mlp(*WIDTHS), 3),
        MSE,
        [batch(7), batch(9, 1), batch(4, 2)],
        4,
        {},
        ALL,
    ),
    (lambda: cut(frozen(), 3), MSE, [batch()], 3, {}, ALL - {(1, 0)}),
    (lambda: cut(of_tokens(), 3), WEIGHTED, [(X_TOKENS, IGNORED)], 3, {}, ALL),
    (needs_rows, MSE, [batch(3), batch(7), batch(1)], 5, {}, ALL),
    (dropping, MSE, [batch()], 2, {"recompute": True}, ALL),
]


@both_ways
def test_ranks_train_what_one_process_trains(way):
    def train(rank, k):
        take(way)
        for make, criterion, batches, m, options, links in CASES:
            for schedule in PIPELINES:
                stage = make()[rank]
                ours = DistributedPipeline(stage, criterion, m, schedule, **options)
                # and gradients are added to those already there
                with count_bytes() as ledger:
                    losses = [
                        ours.forward_backward(*given(*b, rank, k)) for b in batches
                    ]
                whole = Pipeline(make(), ["cpu"] * k, criterion, m, schedule)
                expected = [whole.forward_backward(*b) for b in batches]
                close(grads(stage), grads(whole.stages[rank]))
                close(list(stage.buffers()), list(whole.stages[rank].buffers()))
                assert ours.peak_live == whole.peak_live[rank]
                assert set(ledger.bytes) == {link for link in links if link[0] == rank}
                assert rank == k - 1 or losses == [None] * len(batches)
                if rank == k - 1:
                    close(losses, expected)

    launch(train, 3, timeout=LIMIT)


@pytest.mark.parametrize(("k", "way"), [(1, "lanes"), (4, "messages")])
def test_other_numbers_of_ranks_train_and_evaluate(k, way):
    def train(rank, k):
        take(way)
        pipeline = build(rank, k, 4)
        assert_trains(pipeline, rank, k, 9)
        # fewer rows than micro-batches
        for X in batch(9)[0], batch(2)[0].requires_grad_():
            output = pipeline(X if rank == 0 else None)
            assert rank == k - 1 or output is None
            if rank == k - 1:
                close(output, mlp(*WIDTHS)(X).detach())
                assert not output.requires_grad

    launch(train, k, timeout=LIMIT)


# What is sent, when, and what is kept.


@both_ways
def test_messages_larger_than_slots_do_not_deadlock(way):
    def train(rank, k):
        take(way)
        stage = nn.Conv1d(1, 1, 1, bias=False)
        nn.init.ones_(stage.weight)
        pipeline = DistributedPipeline(stage, MSE, 6, gpipe, timeout=LIMIT / 2)
        X = torch.full((6, 1, 786_432), 2.0)  # 3 MB per row
        loss = pipeline.forward_backward(*given(X, X / 2, rank, k))
        # a sum of millions
        assert stage.weight.grad.item() == pytest.approx(4, rel=1e-2)
        assert rank < k - 1 or loss == pytest.approx(1)

    launch(train, 3, timeout=LIMIT)


@both_ways
def test_bytes_are_counted_spans_written_down_and_threads_end(way):
    def train(rank, k):
        take(way)
        before, link = threading.active_count(), (rank, 1 - rank)
        for schedule in PIPELINES:
            pipeline = build(rank, k, 3, schedule)
            pipeline.forward_backward(*given(*batch(), rank, k))
            assert pipeline.timeline is None
            pipeline.timeline = []
            with count_bytes() as ledger:
                pipeline.forward_backward(*given(*batch(), rank, k))
            assert ledger.bytes == {link: 7 * 7 * 8}
            assert ledger.messages == {link: 3}  # of each micro-batch
            spans = pipeline.timeline
            assert [span[:3] for span in spans] == own_actions(schedule(2, 3), rank)
            times = [time for span in spans for time in span[3:]]
            assert times == sorted(times) and times[-1] > times[0]
        assert threading.active_count() > before
        del pipeline
        end = time.monotonic() + SOON
        while threading.active_count() > before and time.monotonic() < end:
            time.sleep(0.01)
        assert threading.active_count() == before

    launch(train, 2, timeout=LIMIT)


# What is refused: the group is usable then.


def a_group_of_some_ranks_has_its_own_stages_and_looks_at_nothing_else(rank, k):
    group = dist.new_group([1, 2])
    if rank == 0:
        kind, words, *_ = attempt(build, 0, 2, group=group)
        assert kind == "ValueError" and "no member" in words
        return
    pipeline = build(rank - 1, 2, group=group)
    # the others' are wrong
    X, y = (batch()[0], Y[:1]) if rank == 1 else (X_TOKENS[:2], Y)
    with count_bytes() as ledger:
        pipeline.forward_backward(X, y)
    assert set(ledger.bytes) == {(rank, 3 - rank)}
    pipeline.stage.zero_grad()
    assert_trains(pipeline, rank - 1, 2)


def another_gpipe(p, m):
    return sequential(p, m)


another_gpipe.__name__ = "gpipe"


def ranks_that_disagree_are_told_so_on_all(rank, k):
    for m, schedule, words in [
        (3, gpipe if rank else sequential, ("sequential", "gpipe")),
        (4 if rank == 1 else 3, gpipe, ("4 micro-batches", "3 micro-batches")),
        (3, another_gpipe if rank == 2 else gpipe, ("gpipe",)),
        (
            3,
            (lambda p, m: gpipe(p, m)[1:]) if rank == 1 else gpipe,
            ("tick 0: ", "gpipe"),
        ),
    ]:
        kind, text, _, seconds = attempt(build, rank, k, m, schedule)
        assert kind == "MismatchError" and seconds < SOON, text
        assert all(word in text for word in words), text
    assert_trains(build(rank, k), rank, k)


test_three_ranks = on_ranks(
    3,
    [
        a_group_of_some_ranks_has_its_own_stages_and_looks_at_nothing_else,
        ranks_that_disagree_are_told_so_on_all,
    ],
)


def crossed(p, m):
    order = [Action(0, i, "forward") for i in (0, 1)]
    order += [Action(1, i, "forward") for i in (1, 0)]
    order += [Action(s, i, "backward") for s in (1, 0) for i in (0, 1)]
    return [[action] for action in order]


ONE = nn.Linear(1, 1)
REFUSED = [
    ((ONE, nn.functional.mse_loss, 2), "ValueError", "pass count"),
    ((ONE, MSE, 2, lambda p, m: gpipe(p, m)[1:]), "ValueError", "tick 0"),
    (
        (ONE, MSE, 2, crossed),
        "ValueError",
        "stages 0 and 1 process micro-batches forward in different orders",
    ),
    (
        ([ONE, ONE], MSE, 2),
        "TypeError",
        "one module, such as cut(model, num_stages)[rank]",
    ),
]
NEEDS_X, NEEDS_Y = (
    "the first rank needs the inputs X",
    "the last rank needs the targets y",
)
# each is refused on both ranks, which so stay at the same call; what they are told
BATCHES = [
    ((None, None), NEEDS_X, NEEDS_Y),
    (
        (X[:0], Y[:0]),
        "a batch of shape [0, 6] has no rows",
        "a batch of shape [0, 5] has no rows",
    ),
    ((X.clone().requires_grad_(), None), "X requires gradients", NEEDS_Y),
]


def pipelines_and_batches_are_refused(rank, k):
    for arguments, *expected in REFUSED:
        kind, text, *_ = attempt(DistributedPipeline, *arguments)
        assert kind == expected[0] and expected[1] in text
    pipeline = build(rank, k)
    for b, *words in BATCHES:
        kind, text, *_ = attempt(pipeline.forward_backward, *given(*b, rank, k))
        assert kind == "ValueError" and words[rank] in text
    kind, text, *_ = attempt(pipeline if rank == 0 else pipeline.forward_backward)
    assert kind == "ValueError" and (NEEDS_X, NEEDS_Y)[rank] in text
    assert_trains(pipeline, rank, k)


def gradients_are_those_of_torchs_own_pipeline(rank, k):
    from torch.distributed import pipelining

    pairs = {"ScheduleGPipe": gpipe, "Schedule1F1B": one_f_one_b}
    for name, schedule in pairs.items():
        stage, (X, y) = cut(mlp(*WIDTHS), k)[rank], batch(12)
        pipeline = build(rank, k, 4, schedule)
        pipeline.forward_backward(X, y)
        theirs = pipelining.PipelineStage(stage, rank, k, torch.device("cpu"))
        torchs = getattr(pipelining, name)
        arguments = [] if rank else [X]
        torchs(theirs, 4, loss_fn=MSE).step(
            *arguments, target=y if rank else None, losses=[]
        )
        close(grads(pipeline), grads(stage))
        assert all(grad.any() for grad in grads(stage))


test_two_ranks = on_ranks(
    2, [pipelines_and_batches_are_refused, gradients_are_those_of_torchs_own_pipeline]
)


# What goes wrong: the group can no longer be used then.


class Fails(nn.Module):
    """Raises an error in the third call."""

    calls = 0

    def forward(self, X):
        self.calls += 1
        if self.calls == 3:
            raise ArithmeticError("here")
        return X


@pytest.mark.parametrize(
    ("trains", "way"), [(True, "lanes"), (True, "messages"), (False, "lanes")]
)
def test_ranks_learn_of_a_stage_that_fails(trains, way):
    def run(rank, k):
        take(way)
        pipeline = build(rank, k, 4, gpipe, timeout=2)
        if rank == 1:
            pipeline.stage.append(Fails())
        try:
            pipeline.forward_backward(*given(X, Y, rank, k)) if trains else pipeline(X)
        except ArithmeticError as error:
            return error.__notes__[0]
        except ranks.PeerError as error:
            return str(error)

    first, note, last = launch(run, 3, timeout=LIMIT)
    assert "forward of micro-batch 2 on stage 1" in note
    # the first one may evaluate, and be done
    for text in (first, last) if trains else (last,):
        assert "rank 1" in text


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
            return attempt(pipeline, X)
        return attempt(pipeline.forward_backward, *given(X, Y, rank, k))

    first, _, last = launch(train, 3, timeout=LIMIT)
    for kind, text, named, seconds in (first, last):
        assert kind == "PeerError" and named == (1,) and "rank 1" in text
        assert 0.4 < seconds < 0.5 + SOON


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("skips", ["'forward 0 of batch 1', but 'forward 0 of batch 2' was expected"]),
        ("evaluates", ["'forward 0 of evaluation 1'", "'forward 0 of batch 1'"]),
        ("something else", ["was expected, but rank 0 says", "barrier"]),
    ],
)
def test_a_rank_at_another_call_is_found_out(does, words):
    def differ(rank, k):
        pipeline = build(rank, k, timeout=2)
        if rank == 0 and does == "evaluates":
            return attempt(pipeline, X), None
        if rank == 0 and does == "something else":
            return attempt(partial(ranks.barrier, timeout=2)), None
        if rank == 1 and does == "skips":
            # refused: one batch ahead from now on
            attempt(pipeline.forward_backward, None, Y[:0])
        return attempt(pipeline.forward_backward, X, Y), attempt(pipeline, X)

    _, ((kind, text, *_), again) = launch(differ, 2, timeout=LIMIT)
    assert kind == "MismatchError" and all(part in text for part in words)
    assert again[0] == "PeerError" and "can no longer be used since" in again[1]


def test_targets_of_another_batch_are_an_error_on_the_last_rank():
    def train(rank, k):
        X, y = batch(9)[0], batch(7)[1]
        return attempt(
            build(rank, k, timeout=0.5).forward_backward, *given(X, y, rank, k)
        )

    first, last = launch(train, 2, timeout=LIMIT)
    assert (
        last[0] == "ValueError"
        and "micro-batch 1 has 3 rows of outputs, but 2" in last[1]
    )
    assert first[0] == "PeerError" and first[2] == (1,) and first[3] < 0.5 + SOON
