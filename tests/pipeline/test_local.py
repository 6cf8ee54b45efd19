"""A pipeline in one process: whatever its schedule, it trains the model that was cut."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from d2lpar import Pipeline, SplitModel, count_bytes, cut, gpipe, one_f_one_b, sequential
from d2lpar.pipeline.schedules import Action, live_counts, own_actions
from d2lpar.study.memory import peak_memory

SCHEDULES = (sequential, gpipe, one_f_one_b)
CPU = torch.device("cpu")
W = torch.tensor([0.5, 2.0, 0.25, 1.0, 3.0], dtype=torch.float64)

each = pytest.mark.parametrize("schedule", SCHEDULES)
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


@pytest.fixture(autouse=True)
def one_thread():
    """What is computed here is so small that a second thread only makes it wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(n, seed=3):
    return torch.randint(5, (n,), generator=torch.Generator().manual_seed(seed))


def mlp():
    """Seven layers, 6 inputs and 5 outputs; what goes on between them has a width of its own."""
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.ReLU(inplace=True), nn.Linear(7, 9)
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(9, 5)).double()


def norms():
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 5)
    return nn.Sequential(*layers).double()


def pair(build=mlp):
    model = build()
    return model, deepcopy(model)


def pipe(model, p, m, schedule=one_f_one_b, criterion=None, **kwargs):
    return Pipeline(cut(model, p), ["cpu"] * p, criterion or nn.MSELoss(), m, schedule, **kwargs)


def grads(module):
    return [param.grad for param in module.parameters()]


def grads_of(model, criterion, X, y):
    """The whole model's loss and gradients."""
    model.zero_grad()
    loss = criterion(model(X), y)
    loss.backward()
    return loss.detach(), grads(model)


def accumulated(model, criterion, X, y, m, weights=None):
    """One micro-batch after the other; each counts by its rows, or by ``weights``."""
    model.zero_grad()
    parts = list(zip(X.tensor_split(m), y.tensor_split(m), strict=True))
    for i, (X_part, y_part) in enumerate(parts):
        weight = weights[i] if weights else len(y_part) / len(y)
        (criterion(model(X_part), y_part) * weight).backward()
    return grads(model)


# The definition: what the pipeline trains is what the model would be.


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 7),
    st.integers(1, 6),
    st.integers(0, 9),
    st.booleans(),
)
def test_several_steps_train_the_same_model(schedule, p, m, more, recompute):
    whole, model = pair()
    pipeline = pipe(model, p, m, schedule, recompute=recompute)
    ours, theirs = (torch.optim.SGD(net.parameters(), 0.1, 0.9) for net in (model, whole))
    for step in range(3):
        rows = 1 + (more + step) % 10  # at times fewer than micro-batches
        X, y = randn(rows, 6, seed=step), randn(rows, 5, seed=10 + step)
        loss = pipeline.forward_backward(X, y)
        close(loss, grads_of(whole, nn.MSELoss(), X, y)[0])
        assert not loss.requires_grad
        close(grads(model), grads(whole))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    close(list(model.parameters()), list(whole.parameters()))


def test_the_mean_of_means_would_be_another_gradient():
    X, y = randn(7, 6), randn(7, 5, seed=1)
    model = mlp()
    _, right = grads_of(model, nn.MSELoss(), X, y)
    right = [grad.clone() for grad in right]
    naive = accumulated(model, nn.MSELoss(), X, y, 3, weights=[1 / 3] * 3)
    assert max((a - b).abs().max() for a, b in zip(naive, right, strict=True)) > 1e-3


def test_micro_batches_differ_by_at_most_one_row_and_the_last_are_shorter():
    rows = []

    def criterion(output, target):
        rows.append(len(output))
        return F.mse_loss(output, target)

    pipe(mlp(), 2, 4, criterion=criterion, count=len).forward_backward(randn(10, 6), randn(10, 5))
    assert rows == [3, 3, 2, 2]


def all_ignored_in_one_part():
    y = labels(8)
    y[3:6] = 1  # the second of three micro-batches
    return y


CROSS_ENTROPY = {
    "plain": ({}, labels(8)),
    "class weights": ({"weight": W}, labels(8)),
    "some ignored": ({"ignore_index": 2, "weight": W}, labels(8)),
    "all ignored in one part": ({"ignore_index": 1, "weight": W}, all_ignored_in_one_part()),
    "sum": ({"reduction": "sum", "weight": W}, labels(8)),
    "sum, some ignored": ({"reduction": "sum", "ignore_index": 2}, labels(8)),
    "smooth": ({"label_smoothing": 0.1, "weight": W}, labels(8)),
    "smooth, all ignored in one part": (
        {"label_smoothing": 0.1, "ignore_index": 1},
        all_ignored_in_one_part(),
    ),
    "probabilities": ({}, randn(8, 5, seed=4).softmax(1)),
}


@each
@pytest.mark.parametrize("name", CROSS_ENTROPY)
def test_cross_entropy_is_that_of_the_whole_batch(name, schedule):
    options, y = CROSS_ENTROPY[name]
    criterion = nn.CrossEntropyLoss(**options)
    whole, model = pair()
    X = randn(8, 6)
    loss = pipe(model, 2, 3, schedule, criterion).forward_backward(X, y)
    expected, expected_grads = grads_of(whole, criterion, X, y)
    close(loss, expected)
    close(grads(model), expected_grads)
    if options.get("reduction") != "sum" and y.dim() == 1 and options:
        by_rows = accumulated(whole, nn.CrossEntropyLoss(**options), X, y, 3)
        assert any(not torch.allclose(a, b) for a, b in zip(by_rows, grads(model), strict=True)), (
            "weighted by rows it would be the same: nothing was tested"
        )


@pytest.mark.parametrize("criterion", [nn.MSELoss(reduction="sum"), nn.L1Loss(), nn.HuberLoss()])
def test_other_criteria(criterion):
    whole, model = pair()
    X, y = randn(7, 6), randn(7, 5, seed=1)
    loss = pipe(model, 3, 3, criterion=criterion).forward_backward(X, y)
    expected, expected_grads = grads_of(whole, criterion, X, y)
    close(loss, expected)
    close(grads(model), expected_grads)


def test_a_criterion_of_ones_own_with_its_count():
    def criterion(output, target):
        mask = target[:, :1] > 0
        return ((output - target).square() * mask).sum() / mask.sum()

    whole, model = pair()
    X, y = randn(9, 6), randn(9, 5, seed=1)
    pipeline = pipe(model, 2, 2, criterion=criterion, count=lambda y: (y[:, 0] > 0).sum())
    loss = pipeline.forward_backward(X, y)
    expected, expected_grads = grads_of(whole, criterion, X, y)
    close(loss, expected)
    close(grads(model), expected_grads)


@each
def test_gradients_are_added_to_those_already_there(schedule):
    whole, model = pair()
    pipeline = pipe(model, 2, 3, schedule)
    for seed in range(2):
        X, y = randn(7, 6, seed=seed), randn(7, 5, seed=5)
        pipeline.forward_backward(X, y)
        nn.functional.mse_loss(whole(X), y).backward()
    close(grads(model), grads(whole))


@each
@pytest.mark.parametrize("recompute", [False, True])
def test_batch_norm_sees_a_micro_batch_at_a_time(schedule, recompute):
    whole, model = pair(norms)
    X, y = randn(9, 6), randn(9, 5, seed=1)
    pipe(model, 3, 2, schedule, recompute=recompute).forward_backward(X, y)
    at_once = grads_of(deepcopy(whole), nn.MSELoss(), X, y)[1]
    close(grads(model), accumulated(whole, nn.MSELoss(), X, y, 2))
    close(list(model.buffers()), list(whole.buffers()))
    assert model[1].num_batches_tracked == 2
    assert max((a - b).abs().max() for a, b in zip(at_once, grads(whole), strict=True)) > 1e-3


@each
def test_recomputing_drops_the_same_activations(schedule):
    def train(recompute):
        model = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Linear(20, 20), nn.Dropout(0.5))
        pipeline = pipe(model.double(), 2, 3, schedule, recompute=recompute)
        torch.manual_seed(1)
        return pipeline.forward_backward(randn(7, 6), randn(7, 20)), grads(model)

    states = [torch.manual_seed(0) and train(recompute) for recompute in (False, True)]
    close(states[0], states[1])


@each
@pytest.mark.parametrize("recompute", [False, True])
def test_a_frozen_first_stage(schedule, recompute):
    whole, model = pair()
    for layers in (model, whole):
        layers[:3].requires_grad_(False)
    X, y = randn(7, 6), randn(7, 5, seed=1)
    stages = model[:3], model[3:5], model[5:]
    pipeline = Pipeline(stages, ["cpu"] * 3, nn.MSELoss(), 3, schedule, recompute)
    with count_bytes() as ledger:
        loss = pipeline.forward_backward(X, y)
    expected, expected_grads = grads_of(whole, nn.MSELoss(), X, y)
    close(loss, expected)
    close(grads(model), expected_grads)
    assert set(ledger.bytes) == {(0, 1), (1, 2), (2, 1)}
    assert model[0].weight.grad is None


@each
def test_tokens_go_into_the_first_stage(schedule):
    def build():
        layers = nn.Embedding(11, 6), nn.Flatten(), nn.Linear(18, 7), nn.Tanh(), nn.Linear(7, 5)
        return nn.Sequential(*layers).double()

    whole, model = pair(build)
    X = torch.arange(21).reshape(7, 3) % 11
    pipe(model, 3, 3, schedule, nn.CrossEntropyLoss()).forward_backward(X, labels(7))
    close(grads(model), grads_of(whole, nn.CrossEntropyLoss(), X, labels(7))[1])


@pytest.mark.parametrize("recompute", [False, True])
def test_the_batch_is_not_written_to(recompute):
    whole, model = pair(lambda: nn.Sequential(nn.ReLU(inplace=True), *mlp()))
    X, y = randn(7, 6), randn(7, 5, seed=1)
    pipe(model, 8, 3, recompute=recompute).forward_backward(X, y)
    assert torch.equal(X, randn(7, 6)) and torch.equal(y, randn(7, 5, seed=1))
    close(grads(model), grads_of(whole, nn.MSELoss(), X, y)[1])


# What is sent, when, and what is kept.


@each
def test_every_link_carries_each_micro_batch_once_each_way(schedule):
    pipeline = pipe(mlp(), 7, 3, schedule)
    with count_bytes() as ledger:
        pipeline.forward_backward(randn(7, 6), randn(7, 5))
    widths = [8, 8, 7, 7, 9, 9]
    there = {(s, s + 1): 7 * width * 8 for s, width in enumerate(widths)}
    back = {(s + 1, s): nbytes for (s, _), nbytes in there.items()}
    assert ledger.bytes == there | back
    assert ledger.messages == dict.fromkeys(there | back, 3)


def test_stages_inputs_and_results_are_where_the_devices_say():
    stages = [nn.Linear(6, 8).requires_grad_(False), nn.Linear(8, 7), nn.Linear(7, 5)]
    pipeline = Pipeline(stages, ["cpu", "meta", "meta"], nn.CrossEntropyLoss(), 2)
    assert [stage.weight.device.type for stage in pipeline.stages] == ["cpu", "meta", "meta"]
    assert pipeline.forward_backward(torch.ones(5, 6), labels(5)).device.type == "meta"
    assert stages[1].weight.grad.device.type == "meta"
    elsewhere = Pipeline(stages[1:], ["meta", "meta"], nn.MSELoss(), 2)
    with count_bytes() as ledger:
        elsewhere.forward_backward(torch.ones(5, 8), torch.ones(5, 5))
    assert ledger.bytes["host", 0] == 5 * 8 * 4
    assert ledger.messages["host", 0] == 2
    assert elsewhere(torch.ones(5, 8)).device.type == "meta"


@pytest.mark.gpu
@each
def test_stages_on_gpu_and_cpu_in_turn(schedule):
    whole, model = pair()
    X, y = randn(7, 6), randn(7, 5, seed=1)
    stages = cut(model, 3)
    pipeline = Pipeline(stages, ["cuda", "cpu", "cuda"], nn.MSELoss(), 3, schedule)
    loss = pipeline.forward_backward(X, y)
    expected, expected_grads = grads_of(whole, nn.MSELoss(), X, y)
    close(loss.cpu(), expected)
    close([grad.cpu() for grad in grads(model)], expected_grads)
    places = [next(stage.parameters()).device.type for stage in stages]
    assert places == ["cuda", "cpu", "cuda"]


@each
def test_the_timeline_has_a_span_for_each_action(schedule):
    pipeline = pipe(mlp(), 3, 4, schedule)
    assert pipeline.timeline is None
    pipeline.forward_backward(randn(7, 6), randn(7, 5))
    assert pipeline.timeline is None
    pipeline.timeline = []
    pipeline.forward_backward(randn(7, 6), randn(7, 5))
    expected = [action for tick in schedule(3, 4) for action in tick]
    assert [span[:3] for span in pipeline.timeline] == expected
    times = [time for span in pipeline.timeline for time in span[3:]]
    assert times == sorted(times) and times[-1] > times[0]


@pytest.mark.parametrize(
    "schedule, peak", [(sequential, [1, 1, 1]), (gpipe, [5, 5, 5]), (one_f_one_b, [3, 2, 1])]
)
def test_stages_keep_as_many_micro_batches_as_scheduled(schedule, peak):
    pipeline = pipe(mlp(), 3, 5, schedule)
    for _ in range(2):
        pipeline.forward_backward(randn(7, 6), randn(7, 5))
        assert pipeline.peak_live == peak
    ticks = schedule(3, 5)
    assert [max(live_counts(own_actions(ticks, s))[s]) for s in range(3)] == peak


def test_recomputing_and_1f1b_lower_the_peak_of_memory():
    def peak(schedule, recompute):
        layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())]
        pipeline = pipe(nn.Sequential(*layers), 3, 8, schedule, recompute=recompute)
        X, y = torch.ones(8 * 50, 8), torch.ones(8 * 50, 8)
        pipeline.forward_backward(X, y)  # the gradients' own memory
        return peak_memory(lambda: pipeline.forward_backward(X, y), CPU)

    peaks = {(s, r): peak(s, r) for s in SCHEDULES for r in (False, True)}
    for recompute in (False, True):
        assert peaks[one_f_one_b, recompute] < 0.6 * peaks[gpipe, recompute]
        assert peaks[sequential, recompute] < peaks[one_f_one_b, recompute]
    for schedule in (gpipe, one_f_one_b):
        assert peaks[schedule, True] < 0.7 * peaks[schedule, False]


def test_a_stage_that_fails_leaves_nothing_over():
    fails = [4]

    class Fails(nn.Module):
        def forward(self, X):
            fails[0] -= 1
            if fails[0] == 0:
                raise ArithmeticError("of this stage")
            return X

    whole, model = pair(lambda: nn.Sequential(*mlp(), Fails()))
    pipeline = pipe(model, 2, 5, gpipe)
    X, y = randn(7, 6), randn(7, 5, seed=1)
    with pytest.raises(ArithmeticError, match="of this stage") as caught:
        pipeline.forward_backward(randn(9, 6, seed=8), randn(9, 5))
    note = "This was the pipeline's forward of micro-batch 3 on stage 1."
    assert caught.value.__notes__ == [note]
    model.zero_grad()
    loss = pipeline.forward_backward(X, y)
    expected, expected_grads = grads_of(whole, nn.MSELoss(), X, y)
    close(loss, expected)
    close(grads(model), expected_grads)
    assert pipeline.peak_live == [5, 5]


# The plain split.


@pytest.mark.parametrize("p", [1, 2, 3, 7])
def test_the_plain_split_is_the_model(p):
    whole, model = pair()
    split = SplitModel(cut(model, p), ["cpu"] * p)
    X, y = randn(7, 6), randn(7, 5, seed=1)
    with count_bytes() as ledger:
        output = split(X)
        nn.functional.mse_loss(output, y).backward()
    close(output, whole(X))
    close(grads(model), grads_of(whole, nn.MSELoss(), X, y)[1])
    links = [(s, s + 1) for s in range(p - 1)]
    assert set(ledger.bytes) == {*links, *((b, a) for a, b in links)}
    if p == 2:
        assert ledger.bytes == {(0, 1): 7 * 7 * 8, (1, 0): 7 * 7 * 8}


def test_a_pipeline_that_is_called_evaluates_the_model():
    whole, model = pair(norms)
    pipeline = pipe(model, 3, 2)
    pipeline.forward_backward(randn(8, 6), randn(8, 5))
    whole.load_state_dict(model.state_dict())
    pipeline.eval()
    whole.eval()
    X = randn(1, 6, seed=7)  # fewer rows than micro-batches
    assert torch.equal(pipeline(X), whole(X))


class NeedsRows(nn.Module):
    def forward(self, X):
        assert len(X), "it was called without rows"
        return X


@each
@pytest.mark.parametrize(
    "criterion, count",
    [
        (nn.CrossEntropyLoss(W, label_smoothing=0.1), None),
        (nn.CrossEntropyLoss(reduction="sum"), None),
        (nn.CrossEntropyLoss(W, ignore_index=2), None),
        (nn.CrossEntropyLoss(), lambda y: len(y) * int(y.max() >= 0)),  # max needs rows, too
    ],
)
def test_a_batch_with_fewer_rows_than_micro_batches_makes_fewer(criterion, count, schedule):
    whole, model = pair(lambda: nn.Sequential(*mlp(), NeedsRows()))
    pipeline = pipe(model, 3, 5, schedule, criterion, count=count)
    X, y = randn(3, 6), labels(3)
    expected, expected_grads = grads_of(whole, criterion, X, y)
    close(pipeline.forward_backward(X, y), expected)
    close(grads(model), expected_grads)


# What is refused.


def test_batches_that_are_refused():
    pipeline = pipe(mlp(), 2, 3)
    X, y = randn(7, 6), randn(7, 5)
    for arguments, words in [
        ((X[:0], y[:0]), r"a batch of shape \[0, 6\] has no rows to cut"),
        ((X, y[:6]), r"X has shape \[7, 6\], but y has shape \[6, 5\]"),
        ((X, y[0, 0]), r"X has shape \[7, 6\], but y has shape \[\]"),
        ((X[0, 0], y[0, 0]), r"a batch of shape \[\] has no rows"),
        ((X.clone().requires_grad_(), y), "X requires gradients"),
    ]:
        with pytest.raises(ValueError, match=words):
            pipeline.forward_backward(*arguments)
    assert grads(pipeline) == [None] * 8
    pipeline.forward_backward(X[:3], y[:3])


def test_stages_must_keep_the_rows():
    model = nn.Sequential(nn.Linear(6, 5), nn.Flatten(0))
    with pytest.raises(ValueError, match="micro-batch 0 has 10 rows of outputs, but 2 targets"):
        pipe(model.double(), 2, 2).forward_backward(randn(4, 6), randn(4, 5))


def test_a_stage_must_return_one_tensor():
    class Pair(nn.Module):
        def forward(self, X):
            return X, X

    pipeline = pipe(nn.Sequential(mlp(), Pair()), 2, 2)
    with pytest.raises(TypeError, match="not a tuple: join what it makes in one, or cut") as caught:
        pipeline.forward_backward(randn(4, 6), randn(4, 5))
    assert "of micro-batch 0 on stage 1" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="not a tuple: join"):
        pipeline(randn(4, 6))


def test_a_way_back_that_fails_says_where():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, X):
            return X.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("on the way back")

    class Layer(nn.Module):
        def forward(self, X):
            return Fails.apply(X)

    model = nn.Sequential(*mlp(), Layer())
    with pytest.raises(ArithmeticError, match="on the way back") as caught:
        pipe(model, 3, 2).forward_backward(randn(4, 6), randn(4, 5))
    assert caught.value.__notes__ == [
        "This was the pipeline's backward of micro-batch 0 on stage 2."
    ]


def test_a_model_is_not_taken_for_its_stages():
    model = nn.ModuleDict({"layer": nn.Linear(6, 5)})
    with pytest.raises(TypeError, match=r"stages must be an nn.Sequential or a list .* not a Modu"):
        Pipeline(model, ["cpu"], nn.MSELoss(), 2)
    with pytest.raises(TypeError, match=r"stages\[1\] is not a module: <built-in"):
        SplitModel([nn.Linear(6, 5), torch.relu], ["cpu"] * 2)


def backward_first(p, m):
    return gpipe(p, m)[::-1]


def half(p, m):
    return gpipe(p, m)[: m + p - 1]


def for_one_more(p, m):
    return [*gpipe(p, m), [Action(p, 0, "forward")]]


@pytest.mark.parametrize(
    "arguments, kwargs, error, words",
    [
        ((["cpu"], nn.MSELoss(), 2), {}, ValueError, "2 stages for 1 devices"),
        ((["cpu"] * 3, nn.MSELoss(), 2), {}, ValueError, "2 stages for 3 devices"),
        (([], nn.MSELoss(), 2), {}, ValueError, "devices is empty"),
        ((["cpu"] * 2, nn.MSELoss(reduction="none"), 2), {}, ValueError, 'reduction "none"'),
        (
            (["cpu"] * 2, nn.MSELoss(reduction="none"), 2),
            {"count": len},
            ValueError,
            'reduction "none"',
        ),
        ((["cpu"] * 2, F.mse_loss, 2), {}, ValueError, "mse_loss is not a loss .* pass count"),
        ((["cpu"] * 2, nn.MSELoss(), 0), {}, ValueError, "micro-batches must .* not 0"),
        ((["cpu"] * 2, nn.MSELoss(), 2.0), {}, ValueError, r"micro-batches must .* not 2\.0"),
        ((["cpu"] * 2, nn.MSELoss(), 2, "gpipe"), {}, TypeError, "such as gpipe, not 'gpipe'"),
        ((["cpu"] * 2, nn.MSELoss(), 2, backward_first), {}, ValueError, "comes before"),
        ((["cpu"] * 2, nn.MSELoss(), 2, half), {}, ValueError, "is missing"),
        ((["cpu"] * 2, nn.MSELoss(), 2, for_one_more), {}, ValueError, "is no action"),
    ],
)
def test_pipelines_that_are_refused(arguments, kwargs, error, words):
    with pytest.raises(error, match=words):
        Pipeline([nn.Linear(6, 6), nn.Linear(6, 5)], *arguments, **kwargs)


def test_a_loss_that_is_no_number_is_refused():
    def per_row(output, target):
        return (output - target).square().mean(1)

    pipeline = pipe(mlp(), 2, 2, criterion=per_row, count=len)
    with pytest.raises(ValueError, match=r"criterion returns shape \[2\]"):
        pipeline.forward_backward(randn(4, 6), randn(4, 5))


class Detached(nn.Module):
    """Learns, but has no way back to its input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, X):
        return self.layer(X.detach())


def test_a_stage_without_a_way_back_ends_it_there():
    stages = [nn.Linear(4, 4), Detached(), nn.Linear(4, 2)]
    pipeline = Pipeline(stages, ["cpu"] * 3, nn.MSELoss(), 2)
    pipeline.forward_backward(torch.randn(5, 4), torch.randn(5, 2))
    assert not stages[0].weight.grad.any()
    assert stages[1].layer.weight.grad.any() and stages[2].weight.grad.any()


def test_ignored_targets_leave_infinite_logits_out():
    logits = torch.tensor([[1.0, -torch.inf, 2.0]])
    stages = [nn.Linear(2, 3), nn.Module()]
    stages[1].forward = lambda X: X + logits
    criterion = nn.CrossEntropyLoss()
    pipeline = Pipeline(stages, ["cpu"] * 2, criterion, 2)
    X, y = torch.randn(2, 2), torch.tensor([2, -100])
    loss = pipeline.forward_backward(X, y)
    close(loss, criterion((stages[0](X) + logits).detach(), y))
    assert stages[0].weight.grad.isfinite().all()


def test_a_caller_in_inference_mode_is_told():
    pipeline = Pipeline(cut(mlp(), 2), ["cpu"] * 2, nn.MSELoss(), 2)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"[Ii]nference"):
        pipeline.forward_backward(torch.randn(4, 6).double(), torch.randn(4, 5).double())


def test_losses_of_16_bits_are_added_up_wide():
    model = nn.Linear(4, 4).bfloat16()
    X, y = torch.randn(64, 4).bfloat16(), torch.randn(64, 4).bfloat16()
    pipeline = Pipeline([model], ["cpu"], nn.MSELoss(), 64)
    losses = [nn.MSELoss()(model(row), target) for row, target in zip(X, y, strict=True)]
    close(pipeline.forward_backward(X, y), sum(loss.float() for loss in losses) / 64, rtol=1e-3)


def test_a_layer_in_place_may_come_behind_a_view():
    build = partial(nn.Sequential, nn.Linear(4, 4), nn.Flatten(), nn.ReLU(inplace=True))
    model = build().double()
    X, y = torch.randn(6, 4).double(), torch.randn(6, 4).double()
    Pipeline([model[:1], model[1:]], ["cpu"] * 2, nn.MSELoss(), 3).forward_backward(X, y)
    expected = torch.autograd.grad(nn.MSELoss()(model(X), y), list(model.parameters()))
    close(grads(model), list(expected))


def test_class_weights_follow_the_last_device():
    criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
    Pipeline([nn.Linear(2, 2), nn.Linear(2, 3)], ["cpu", "meta"], criterion, 2)
    assert criterion.weight.device.type == "meta"
