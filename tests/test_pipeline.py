"""A pipeline in one process: any schedule trains the model that was cut."""

from copy import deepcopy
from itertools import product

import pytest
import torch
from helpers import (
    PIPELINES,
    WIDTHS,
    NeedsRows,
    batch,
    close,
    distance,
    frozen,
    grads,
    loss_and_grads,
    mlp,
    of_tokens,
    randn,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from d2lpar import (
    Pipeline,
    SplitModel,
    count_bytes,
    cut,
    gpipe,
    one_f_one_b,
    sequential,
)
from d2lpar.memory import peak_memory
from d2lpar.pipeline.schedules import Action

W = torch.tensor([0.5, 2.0, 0.25, 1.0, 3.0], dtype=torch.float64)


def labels(n):
    return torch.randint(5, (n,), generator=torch.Generator().manual_seed(3))


X, Y = batch()


def pipe(model, p, m, schedule=one_f_one_b, criterion=None, **kwargs):
    return Pipeline(
        cut(model, p), ["cpu"] * p, criterion or nn.MSELoss(), m, schedule, **kwargs
    )


def check(model, p, m, X, y, schedule=one_f_one_b, criterion=None, **kwargs):
    """Loss and gradients are those of the whole model."""
    whole, criterion = deepcopy(model), criterion or nn.MSELoss()
    pipeline = pipe(model, p, m, schedule, criterion, **kwargs)
    loss = pipeline.forward_backward(X, y)
    close((loss, grads(model)), loss_and_grads(whole, criterion, X.clone(), y))
    assert not loss.requires_grad


def accumulated(model, criterion, X, y, m):
    """Gradients of one micro-batch after the other, each weighted by its rows."""
    for X_part, y_part in zip(X.tensor_split(m), y.tensor_split(m), strict=True):
        (criterion(model(X_part), y_part) * len(y_part) / len(y)).backward()
    return grads(model)


# The definition: what the pipeline trains is what the model would be.


@given(
    st.sampled_from(PIPELINES), st.integers(1, 7), st.integers(1, 6), st.integers(0, 9)
)
def test_several_steps_train_the_same_model(schedule, p, m, more):
    whole, model = mlp(*WIDTHS), mlp(*WIDTHS)
    pipeline = pipe(model, p, m, schedule, recompute=more % 2 == 1)
    ours, theirs = (
        torch.optim.SGD(net.parameters(), 0.1, 0.9) for net in (model, whole)
    )
    for step in range(4):
        # at times fewer rows than micro-batches
        X, y = batch(1 + (more + step) % 10, step)
        loss = pipeline.forward_backward(X, y)
        close((loss, grads(model)), loss_and_grads(whole, nn.MSELoss(), X, y))
        # the first gradients are added to
        for optimizer in (ours, theirs) if step else ():
            optimizer.step()
            optimizer.zero_grad()
    close(list(model.parameters()), list(whole.parameters()))


def test_micro_batches_differ_by_at_most_one_row_and_the_last_are_shorter():
    rows = []

    def criterion(output, target):
        rows.append(len(output))
        return F.mse_loss(output, target)

    pipe(mlp(*WIDTHS), 2, 4, criterion=criterion, count=len).forward_backward(
        *batch(10)
    )
    assert rows == [3, 3, 2, 2]


def masked(output, target):
    mask = target[:, :1] > 0
    return ((output - target).square() * mask).sum() / mask.sum()


IGNORED = labels(8)
IGNORED[3:6] = 1  # the second of three micro-batches
CE = nn.CrossEntropyLoss
# (criterion, targets, count, whether a weight by rows would be right, too)
CRITERIA = {
    "mean": (nn.MSELoss(), randn(7, 5), None, True),
    "sum": (nn.MSELoss(reduction="sum"), randn(7, 5), None, None),
    "masked": (masked, randn(9, 5, seed=1), lambda y: (y[:, 0] > 0).sum(), False),
    "some ignored": (CE(W, ignore_index=2), labels(8), None, False),
    "all ignored in one part": (CE(W, ignore_index=1), IGNORED, None, False),
    "smooth, all ignored": (
        CE(ignore_index=1, label_smoothing=0.1),
        IGNORED,
        None,
        False,
    ),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_other_criteria(name):
    criterion, y, count, by_rows = CRITERIA[name]
    X = randn(len(y), 6, seed=5)
    for schedule in PIPELINES:
        model = mlp(*WIDTHS)
        check(model, 2, 3, X, y, schedule, criterion, count=count)
        few = nn.Sequential(*mlp(*WIDTHS), NeedsRows())  # fewer rows than micro-batches
        check(few, 3, 5, X[-3:], y[-3:], schedule, criterion, count=count)
    if by_rows is not None:
        naive = accumulated(mlp(*WIDTHS), criterion, X, y, 3)
        close_enough = all(map(torch.allclose, naive, grads(model)))
        assert close_enough == by_rows, "weighted by rows it would be the same"


@pytest.mark.parametrize("recompute", [False, True])
def test_batch_norm_sees_a_micro_batch_at_a_time(recompute):
    layers = (
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.BatchNorm1d(8),
        nn.Linear(8, 5),
    )
    model = nn.Sequential(*layers).double()
    whole, at_once, (X, y) = deepcopy(model), deepcopy(model), batch(9)
    pipeline = pipe(model, 3, 2, recompute=recompute)
    pipeline.forward_backward(X, y)
    close(grads(model), accumulated(whole, nn.MSELoss(), X, y, 2))
    close(list(model.buffers()), list(whole.buffers()))
    assert distance(loss_and_grads(at_once, nn.MSELoss(), X, y)[1], grads(whole)) > 1e-3
    # of fewer rows than parts
    assert torch.equal(pipeline.eval()(X[:1]), whole.eval()(X[:1]))


THERE, BACK = {(0, 1), (1, 2)}, {(1, 0), (2, 1)}
MODELS = [  # inputs, links that are used
    (lambda: nn.Sequential(nn.ReLU(inplace=True), *mlp(*WIDTHS)), X, THERE | BACK),
    (
        lambda: nn.Sequential(mlp(6, 5), nn.Flatten(), nn.ReLU(inplace=True)),
        X,
        THERE | BACK,
    ),
    (frozen, X, THERE | {(2, 1)}),
    (of_tokens, labels(21).reshape(7, 3), THERE | BACK),
]


@pytest.mark.parametrize(("build", "X", "links"), MODELS)
def test_other_models(build, X, links):
    before = X.clone()
    for schedule, recompute in product(PIPELINES, (False, True)):
        with count_bytes() as ledger:
            check(build(), 3, 3, X, Y, schedule, recompute=recompute)
        assert set(ledger.bytes) == links and torch.equal(X, before)


def test_ignored_targets_leave_infinite_logits_out():
    logits = torch.tensor([[1.0, -torch.inf, 2.0, 0.0, 0.0]], dtype=torch.float64)
    adds = nn.Module()
    adds.forward = lambda X: X + logits
    model = nn.Sequential(nn.Linear(6, 5).double(), adds)
    check(model, 2, 2, randn(2, 6), torch.tensor([2, -100]), criterion=CE())
    assert model[0].weight.grad.isfinite().all()


def test_a_stage_without_a_way_back_ends_it_there():
    detached = nn.Linear(4, 4)
    detached.register_forward_pre_hook(lambda module, args: args[0].detach())
    stages = [nn.Linear(4, 4), detached, nn.Linear(4, 2)]
    pipeline = Pipeline(stages, ["cpu"] * 3, nn.MSELoss(), 2)
    pipeline.forward_backward(torch.randn(5, 4), torch.randn(5, 2))
    assert not stages[0].weight.grad.any()
    assert stages[1].weight.grad.any() and stages[2].weight.grad.any()


def test_losses_of_16_bits_are_added_up_wide():
    model = nn.Linear(4, 4).bfloat16()
    X, y = torch.randn(64, 4).bfloat16(), torch.randn(64, 4).bfloat16()
    pipeline = Pipeline([model], ["cpu"], nn.MSELoss(), 64)
    losses = [
        nn.MSELoss()(model(row), target) for row, target in zip(X, y, strict=True)
    ]
    close(
        pipeline.forward_backward(X, y),
        sum(loss.float() for loss in losses) / 64,
        rtol=1e-3,
    )


# What is sent, when, and what is kept.


def test_stages_inputs_criterion_and_results_are_where_the_devices_say():
    stages = [nn.Linear(6, 8).requires_grad_(False), nn.Linear(8, 7), nn.Linear(7, 5)]
    criterion = CE(weight=torch.ones(5))
    pipeline = Pipeline(stages, ["cpu", "meta", "meta"], criterion, 2)
    assert [stage.weight.device.type for stage in pipeline.stages] == [
        "cpu",
        "meta",
        "meta",
    ]
    assert criterion.weight.device.type == "meta"
    elsewhere = Pipeline(stages[1:], ["meta", "meta"], nn.MSELoss(), 2)
    with count_bytes() as ledger:
        loss = elsewhere.forward_backward(torch.ones(5, 8), torch.ones(5, 5))
    assert loss.device.type == stages[1].weight.grad.device.type == "meta"
    assert ledger.bytes["host", 0] == 5 * 8 * 4 and ledger.messages["host", 0] == 2
    assert elsewhere(torch.ones(5, 8)).device.type == "meta"


@pytest.mark.gpu
def test_stages_on_gpu_and_cpu_in_turn():
    for schedule in PIPELINES:
        whole, model, devices = mlp(*WIDTHS), mlp(*WIDTHS), ["cuda", "cpu", "cuda"]
        pipeline = Pipeline(cut(model, 3), devices, nn.MSELoss(), 3, schedule)
        loss = pipeline.forward_backward(X, Y)
        ours = loss.cpu(), [grad.cpu() for grad in grads(model)]
        close(ours, loss_and_grads(whole, nn.MSELoss(), X, Y))
        places = [next(stage.parameters()).device.type for stage in pipeline.stages]
        assert places == devices


@pytest.mark.parametrize(
    ("schedule", "peak"),
    [(sequential, [1, 1, 1]), (gpipe, [5, 5, 5]), (one_f_one_b, [3, 2, 1])],
)
def test_each_link_carries_a_micro_batch_once_and_each_action_has_a_span(
    schedule, peak
):
    pipeline = pipe(mlp(*WIDTHS), 3, 5, schedule)
    with count_bytes() as ledger:
        pipeline.forward_backward(X, Y)
    links = {(0, 1): 7, (1, 0): 7, (1, 2): 9, (2, 1): 9}  # how many numbers per row
    assert ledger.bytes == {link: 7 * width * 8 for link, width in links.items()}
    assert ledger.messages == dict.fromkeys(links, 5)
    assert pipeline.timeline is None and pipeline.peak_live == peak
    pipeline.timeline = []
    pipeline.forward_backward(X, Y)
    assert pipeline.peak_live == peak
    expected = [action for tick in schedule(3, 5) for action in tick]
    assert [span[:3] for span in pipeline.timeline] == expected
    times = [time for span in pipeline.timeline for time in span[3:]]
    assert times == sorted(times) and times[-1] > times[0]


def test_recomputing_and_1f1b_lower_the_peak_of_memory():
    def peak(schedule, recompute):
        layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())]
        pipeline = pipe(nn.Sequential(*layers), 3, 8, schedule, recompute=recompute)
        X, y = torch.ones(8 * 50, 8), torch.ones(8 * 50, 8)
        pipeline.forward_backward(X, y)  # the gradients' own memory
        return peak_memory(lambda: pipeline.forward_backward(X, y), "cpu")

    peaks = {case: peak(*case) for case in product(PIPELINES, (False, True))}
    for recompute in (False, True):
        assert peaks[one_f_one_b, recompute] < 0.6 * peaks[gpipe, recompute]
        assert peaks[sequential, recompute] < peaks[one_f_one_b, recompute]
    for schedule in (gpipe, one_f_one_b):
        assert peaks[schedule, True] < 0.7 * peaks[schedule, False]


@pytest.mark.parametrize("p", [1, 2])
def test_the_plain_split_is_the_model(p):
    whole, model = mlp(*WIDTHS), mlp(*WIDTHS)
    split, (X, y) = SplitModel(cut(model, p), ["cpu"] * p), batch()
    with count_bytes() as ledger:
        ours = loss_and_grads(split, nn.MSELoss(), X, y)
    close(ours, loss_and_grads(whole, nn.MSELoss(), X, y))
    assert ledger.bytes == ({(0, 1): 7 * 7 * 8, (1, 0): 7 * 7 * 8} if p == 2 else {})


# What fails, and what is refused.


@pytest.mark.parametrize(("kind", "i"), [("forward", 3), ("backward", 4)])
def test_a_stage_that_fails_says_where_and_leaves_nothing_over(kind, i):
    calls, model = [], mlp(*WIDTHS)
    pipeline = pipe(model, 2, 5, gpipe)

    def fail(module, args, output):
        calls.append(1)
        if kind == "backward":
            output.register_hook(lambda grad: 1 / 0)
        elif len(calls) == i + 1:
            1 / 0  # noqa: B018

    hook = model[-1].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError) as caught:
        pipeline.forward_backward(*batch(9, 8))
    note = f"This was the pipeline's {kind} of micro-batch {i} on stage 1."
    assert caught.value.__notes__ == [note]
    hook.remove()
    model.zero_grad()
    ours = pipeline.forward_backward(X, Y), grads(model)
    close(ours, loss_and_grads(mlp(*WIDTHS), nn.MSELoss(), X, Y))
    assert pipeline.peak_live == [5, 5]


def test_a_caller_in_inference_mode_is_told():
    pipeline = pipe(mlp(*WIDTHS), 2, 2)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"[Ii]nference"):
        pipeline.forward_backward(X + 0, Y)


def one_more(p, m):
    return [*gpipe(p, m), [Action(p, 0, "forward")]]


def per_row(output, target):
    return (output - target).square().mean(1)


PAIR = nn.Module()
PAIR.forward = lambda X: (X, X)
LINEAR, MSE = nn.Linear(6, 5, dtype=torch.float64), nn.MSELoss()
ONE, TWO = ([LINEAR], ["cpu"], MSE, 2), [LINEAR, LINEAR]
REFUSED = [  # a pipeline, a batch
    ((TWO, ["cpu"], MSE, 2), (X, Y), ValueError, "2 stages for 1 devices"),
    ((TWO, [], MSE, 2), (X, Y), ValueError, "devices is empty"),
    ((nn.ModuleDict(), ["cpu"], MSE, 2), (X, Y), TypeError, "list .* not a ModuleDict"),
    (
        ([LINEAR, torch.relu], ["cpu"] * 2, MSE, 2),
        (X, Y),
        TypeError,
        "relu is not a Module",
    ),
    (
        ([LINEAR], ["cpu"], F.mse_loss, 2),
        (X, Y),
        ValueError,
        "what mse_loss divides .* pass count",
    ),
    (
        ([LINEAR], ["cpu"], MSE, 0),
        (X, Y),
        ValueError,
        "1 stages and 0 micro-batches: need one",
    ),
    (
        ([LINEAR], ["cpu"], nn.MSELoss(reduction="none"), 2),
        (),
        ValueError,
        '"none" returns no',
    ),
    ((*ONE, lambda p, m: gpipe(p, m)[::-1]), (X, Y), ValueError, "comes before"),
    ((*ONE, one_more), (X, Y), ValueError, "is no action"),
    (
        ([LINEAR], ["cpu"], per_row, 2, gpipe, False, len),
        (X, Y),
        ValueError,
        r"shape \[4\], and no",
    ),
    (
        ([LINEAR, nn.Flatten(0)], ["cpu"] * 2, MSE, 2),
        (X, Y),
        ValueError,
        "20 rows of outputs, but 4",
    ),
    (
        ([LINEAR, PAIR], ["cpu"] * 2, MSE, 2),
        (X, Y),
        TypeError,
        "not a tuple: join what it",
    ),
    (ONE, (X[:0], Y[:0]), ValueError, r"a batch of shape \[0, 6\] has no rows to cut"),
    (ONE, (X, Y[:6]), ValueError, r"X has shape \[7, 6\], but y has shape \[6, 5\]"),
    (ONE, (X[0, 0], Y[0, 0]), ValueError, r"a batch of shape \[\] has no rows"),
    (ONE, (X.clone().requires_grad_(), Y), ValueError, "X requires gradients"),
]


def test_pipelines_and_batches_that_are_refused():
    for arguments, data, error, words in REFUSED:
        with pytest.raises(error, match=words):
            Pipeline(*arguments).forward_backward(*data)
    assert LINEAR.weight.grad is None
