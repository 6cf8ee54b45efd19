"""A loss in parts is the loss of the whole: its value, and every gradient, for any number of parts.

Compared in float64 with the criterion alone; and what the wrong way to average would give.
"""

import re
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from d2lpar import ChunkedLoss, DataParallelCriterion, DataParallelModel, count_bytes
from d2lpar.data_parallel.loss import PER_CLASS, PER_ELEMENT

CPU = torch.device("cpu")
KS = [1, 2, 3, 4, 8]
W = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(*shape, ignored=(), index=-100):
    """Classes 0 to 4; rows of those that are ignored."""
    target = torch.randint(5, shape, generator=torch.Generator().manual_seed(3))
    for row in ignored:
        target[row % shape[0]] = index
    return target


close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12, equal_nan=True)


def cases(n):
    """{class of torch.nn and more: (its arguments, output, target or list of targets)}."""
    x, y, pixels = randn(n, 5), randn(n, 5, seed=1), randn(n, 5, 4)
    soft, positive, target = y.softmax(1), y.exp(), labels(n)
    index, weight, smooth = {"ignore_index": 1}, {"weight": W}, {"label_smoothing": 0.1}
    found = {
        "L1Loss": ({}, x, y),
        "MSELoss": ({}, x[:, 0], y[:, 0]),
        "SmoothL1Loss": ({}, x, y),
        "HuberLoss": ({}, pixels, pixels.flip(2)),
        "BCELoss": (weight, x.sigmoid(), soft),
        "BCEWithLogitsLoss": ({"pos_weight": W} | weight, x, soft),
        "SoftMarginLoss": ({}, x, y.sign()),
        "HingeEmbeddingLoss": ({}, x, y.sign()),
        "KLDivLoss": ({}, x.log_softmax(1), soft),
        "PoissonNLLLoss": ({}, x, positive),
        "GaussianNLLLoss": ({}, x, [y, positive]),
        "MultiMarginLoss": (weight, x, target),
        "MultiLabelMarginLoss": ({}, x, torch.tensor([[1, 3, -1, 0, 0]]).repeat(n, 1)),
        "MultiLabelSoftMarginLoss": (weight, x, (y > 0).double()),
        "CrossEntropyLoss of pixels": (index | weight, pixels, labels(n, 4)),
        "CrossEntropyLoss of probabilities": ({}, x, soft),
        "CrossEntropyLoss of probabilities, smooth": (smooth | weight, x, soft),
        "CrossEntropyLoss, smooth": (smooth | index | {"weight": W + 1}, x, target),
        "CrossEntropyLoss, smooth, without weight": (
            smooth | {"weight": W * torch.tensor([0.0, 1, 1, 1, 1])},
            x,
            torch.arange(n).sub(min(n, 5) - 2).clamp(0, 4),  # class 0 counts nothing, but adds
        ),
        "CrossEntropyLoss of bytes": (weight, x, target.byte()),
    }
    for name in ("CrossEntropyLoss", "NLLLoss"):
        found |= {
            name: ({}, x, target),
            f"{name}, weights": (weight, x, target),
            f"{name}, one ignored": (index, x, target),
            f"{name}, both": (index | weight, x, target),
            f"{name}, first shards ignored": (weight, x, labels(n, ignored=(0, 1, 2))),
            f"{name}, last shards ignored": ({}, x, labels(n, ignored=(-1, -2, -3))),
            f"{name}, all but one ignored": ({}, x, labels(n, ignored=range(n - 1))),
            f"{name}, all ignored": (weight, x, labels(n, ignored=range(n))),
        }
    return found


def case(name, n, reduction="mean"):
    options, output, targets = cases(n)[name]
    criterion = getattr(nn, re.match(r"\w+", name)[0])(reduction=reduction, **options)
    return criterion, output, targets if type(targets) is list else [targets]


def split(output, k, dim=0):
    return output.tensor_split(min(k, output.shape[dim]), dim)


def grad_of(loss, *tensors):
    """The gradients, for a loss that is not reduced of a sum that has every row count anew."""
    torch.manual_seed(5)
    return torch.autograd.grad((loss * torch.rand_like(loss)).sum(), tensors)


def require_same(criterion, output, targets, k, count=None, dim=0, alone=None):
    output = output.requires_grad_()
    expected = (alone or criterion)(output, *targets)
    loss = DataParallelCriterion(criterion, [CPU] * k, count, dim)(split(output, k, dim), *targets)
    close(loss, expected)
    close(grad_of(loss, output), grad_of(expected, output))


def mean_of_means(criterion, output, targets, k):
    parts = zip(split(output, k), *[split(target, k) for target in targets], strict=True)
    return torch.stack([criterion(*part) for part in parts]).mean()


def test_every_class_that_is_known_is_tested():
    assert {kind.__name__ for kind in PER_ELEMENT + PER_CLASS} <= set(cases(1))


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")  # what torch says of KLDivLoss
@pytest.mark.parametrize(
    ("name", "reduction"), [*product(cases(1), ("mean", "sum", "none")), ("KLDivLoss", "batchmean")]
)
def test_parts_give_the_loss_and_the_gradients_of_the_whole(name, reduction):
    for k, rows in product(KS, (3, 7, 8)):  # fewer than devices, uneven, even
        criterion, output, targets = case(name, rows, reduction)
        require_same(criterion, output, targets, k)


def test_the_mean_over_nothing_is_what_the_criterion_says():
    loss = DataParallelCriterion(nn.CrossEntropyLoss(), [CPU] * 2)
    assert loss(split(randn(4, 5), 2), torch.full((4,), -100)).isnan()


@pytest.mark.parametrize(
    ("name", "rows", "right"),
    [
        ("MSELoss", 8, True),
        ("MSELoss", 7, False),
        ("CrossEntropyLoss", 8, True),
        ("CrossEntropyLoss", 7, False),
        ("CrossEntropyLoss, one ignored", 8, False),
        ("CrossEntropyLoss, weights", 8, False),
        ("CrossEntropyLoss of pixels", 8, False),
    ],
)
def test_the_mean_of_means_is_right_only_where_all_parts_count_the_same(name, rows, right):
    criterion, output, targets = case(name, rows)
    gap = mean_of_means(criterion, output, targets, 2) - criterion(output, *targets)
    assert gap.abs() < 1e-12 if right else gap.abs() > 1e-3


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 2**20), st.integers(0, 1000))
def test_whatever_is_ignored(k, rows, ignored, seed):
    target = labels(rows, ignored=[row for row in range(rows) if ignored >> row & 1])
    require_same(nn.CrossEntropyLoss(W + 1), randn(rows, 5, seed=seed), [target], k)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_rows_may_lie_in_another_dimension(reduction):
    output, target = randn(2, 5, 7), labels(2, 7)
    require_same(nn.CrossEntropyLoss(reduction=reduction), output, [target], 3, dim=-1)


class Relative(nn.Module):
    """A loss of one's own: the mean over targets that are not 0, times a learnable scale."""

    def __init__(self, reduction=None):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        if reduction:
            self.reduction = reduction

    def forward(self, output, target):
        each = self.scale * (output - target) ** 2 * (target != 0)
        kind = getattr(self, "reduction", "mean")
        return {"mean": each.sum() / (target != 0).sum(), "sum": each.sum(), "none": each}[kind]


class Own(nn.CrossEntropyLoss):
    def forward(self, output, target):
        return super().forward(output, target) ** 2


def nonzero(target):
    return (target != 0).sum()


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("reduction", [None, "sum", "none"])
def test_a_criterion_of_ones_own_and_its_parameters(k, reduction):
    criterion, output = Relative(reduction), randn(7)
    target = randn(7, seed=1).clamp(min=0)
    parallel = DataParallelCriterion(criterion, [CPU] * k, None if reduction else nonzero)
    loss, expected = parallel(split(output, k), target), criterion(output, target)
    close(loss, expected)
    close(grad_of(loss, criterion.scale), grad_of(expected, criterion.scale))
    assert list(parallel.parameters()) == [criterion.scale]


@pytest.mark.parametrize(
    ("criterion", "name"),
    [
        (Relative(), "Relative"),
        (Own(), "Own"),
        (F.mse_loss, "mse_loss"),
        (nn.CosineEmbeddingLoss(), "CosineEmbeddingLoss"),
        (nn.TripletMarginLoss(), "TripletMarginLoss"),
        (partial(F.mse_loss), "partial"),
    ],
)
def test_without_count_an_unknown_mean_is_refused(criterion, name):
    for make in (
        partial(DataParallelCriterion, criterion, [CPU]),
        partial(ChunkedLoss, nn.Linear(2, 2), criterion, [CPU], 1),
    ):
        with pytest.raises(ValueError, match=f"{name} is not a loss of torch.nn .* pass count"):
            make()


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_where_there_is_no_mean_count_is_of_no_matter(reduction):
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    target = labels(6, ignored=(4, 5))
    require_same(criterion, randn(6, 5), [target], 3, count=lambda target: (target >= 0).sum())


def test_a_function_with_count_serves_all_devices():
    require_same(F.mse_loss, randn(7, 2), [randn(7, 2, seed=1)], 3, torch.numel)


def test_a_single_device_may_have_a_single_row_without_a_dimension():
    output, target = randn(5), torch.tensor(2)
    loss = DataParallelCriterion(nn.CrossEntropyLoss(), [CPU])([output], target)
    close(loss, F.cross_entropy(output, target))


def test_a_criterion_is_left_as_it_was():
    criterion, target = nn.CrossEntropyLoss(W, label_smoothing=0.1), torch.tensor([0, 0, 1, 2])
    for _ in range(2):
        require_same(criterion, randn(4, 5), [target], 2)
    assert criterion.reduction == "mean"


def test_a_criterion_is_replicated():
    criterion = nn.CrossEntropyLoss(W)
    with count_bytes() as ledger:
        DataParallelCriterion(criterion, [CPU] * 3)(split(randn(6, 5), 3), labels(6))
    targets = 2 * 8
    assert {ledger.bytes[0, i] for i in (1, 2)} == {W.nbytes + targets}


@pytest.mark.parametrize("recompute", [False, True])
def test_the_ledger_counts_what_chunks_need(recompute):
    generator, hidden = nn.Linear(4, 5).double(), randn(5, 4).requires_grad_()
    with count_bytes() as ledger:
        loss = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU] * 2, 2, recompute=recompute)
        loss(hidden, labels(5)).backward()
    hidden, targets, parameters, loss = 2 * 4 * 8, 2 * 8, 25 * 8, 8  # two of the five positions
    assert ledger.bytes == {
        (0, 1): hidden + targets + parameters + loss,  # of the loss it is the gradient
        (1, 0): loss + hidden + parameters,
    }


@pytest.mark.parametrize("recompute", [False, True])
def test_losses_of_16_bits_are_added_as_float32(recompute):
    torch.manual_seed(0)
    generator, target = nn.Linear(16, 50).bfloat16(), torch.randint(50, (2048,))
    hidden, whole, exact = torch.randn(2048, 16).bfloat16(), nn.Linear(16, 50), {}
    whole.load_state_dict(generator.state_dict())
    for reduction in ("mean", "sum"):
        criterion = nn.CrossEntropyLoss(reduction=reduction)
        expected = criterion(whole(hidden.float()), target)
        in_chunks = ChunkedLoss(generator, criterion, [CPU] * 2, 2, recompute=recompute)
        loss = in_chunks(hidden, target)
        assert loss.dtype == torch.bfloat16
        close(loss.float(), expected, rtol=0.01)
        for model, end in ((whole, expected), (generator, loss)):
            [exact[model]] = torch.autograd.grad(end, [model.weight])
        error = (exact[generator].float() - exact[whole]).norm() / exact[whole].norm()
        assert exact[generator].dtype == torch.bfloat16 and error < 0.01


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("devices", [1, 3])
def test_a_generator_may_have_tied_weights_of_16_bits(devices, recompute):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
            self.outer.weight = self.inner.weight

        def forward(self, hidden):
            return self.outer(self.inner(hidden))

    torch.manual_seed(0)
    generator, hidden, target = Tied().bfloat16(), randn(6, 4).bfloat16(), labels(6) % 4
    criterion = nn.CrossEntropyLoss()
    in_chunks = ChunkedLoss(generator, criterion, [CPU] * devices, 2, recompute=recompute)
    loss = in_chunks(hidden, target)
    gradients = torch.autograd.grad(loss, list(generator.parameters()))
    expected = torch.autograd.grad(
        criterion(generator(hidden), target), list(generator.parameters())
    )
    close(gradients, expected, rtol=0.03, atol=0.003)


def test_an_output_may_be_of_any_structure():
    def criterion(output, target):
        return F.mse_loss(output["mean"], target) + output["more"][0].abs().mean()

    output, target = randn(7).requires_grad_(), randn(7, seed=1)
    parts = [{"mean": part, "more": (part * 2, "words")} for part in split(output, 3)]
    loss = DataParallelCriterion(criterion, [CPU] * 3, count=len)(parts, target)
    close(loss, F.mse_loss(output, target) + 2 * output.abs().mean())


def test_an_error_says_on_which_device_it_was():
    def criterion(output, target):
        if target[0] == 2:
            raise KeyError("two")
        return (output - target).mean()

    parallel = DataParallelCriterion(criterion, [CPU] * 3, count=len)
    with pytest.raises(KeyError) as error:
        parallel(split(randn(3), 3), torch.arange(3))
    assert "device 2 (cpu)" in "".join(error.value.__notes__)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (randn(4, 5), "no list of outputs for 2 devices"),
        ([], "0 outputs for 2 devices"),
        ([randn(1, 5)] * 3, "3 outputs for 2 devices"),
        ([randn(3, 5), randn(1, 5)], "an output has 3 rows, but its part of the targets 2"),
    ],
)
def test_outputs_that_do_not_fit_are_named(outputs, words):
    with pytest.raises(ValueError, match=words):
        DataParallelCriterion(nn.CrossEntropyLoss(), [CPU] * 2)(outputs, labels(4))


@pytest.mark.parametrize("reduction", [None, "sum"])
def test_a_part_that_is_no_number_is_refused(reduction):
    def criterion(output, target):
        return (output - target).sum(0)

    criterion.reduction = reduction
    with pytest.raises(ValueError, match=r"the loss of a part has shape \[2\]"):
        DataParallelCriterion(criterion, [CPU] * 2, None if reduction else len)(
            split(randn(4, 2), 2), randn(4, 2)
        )


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("rows", [8, 7, 3])
def test_training_the_balanced_form_is_training_one_device(rows, k):
    def train(loss_of):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5)).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
        for step in range(5):
            X, y = randn(rows, 3, seed=step), labels(rows, ignored=[step])
            optimizer.zero_grad()
            loss_of(model, X, y).backward()
            optimizer.step()
        return torch.cat([param.detach().flatten() for param in model.parameters()])

    criterion, devices = nn.CrossEntropyLoss(W + 1), [CPU] * k
    one = train(lambda model, X, y: criterion(model(X), y))
    many = train(
        lambda model, X, y: DataParallelCriterion(criterion, devices)(
            DataParallelModel(model, devices)(X), y
        )
    )
    wrong = train(lambda model, X, y: mean_of_means(criterion, model(X), [y], k))
    close(many, one)
    assert k == 1 or (wrong - one).abs().nan_to_num(1).max() > 1e-3


# In chunks


def require_same_in_chunks(criterion, hidden, target, k, size):
    torch.manual_seed(0)
    generator = nn.Linear(hidden.shape[-1], 5).double()
    tensors = [hidden.requires_grad_(), *generator.parameters()]
    logits, places = generator(hidden), hidden.shape[:-1]
    expected = criterion(
        logits.reshape(-1, logits.shape[-1]), target.reshape(-1, *target.shape[len(places) :])
    )
    expected = expected.reshape(places + expected.shape[1:]) if expected.dim() else expected
    expected_grads = grad_of(expected, *tensors)
    for recompute in (False, True):
        in_chunks = ChunkedLoss(generator, criterion, [CPU] * k, size, recompute=recompute)
        loss = in_chunks(hidden, target)
        close(loss, expected)
        close(grad_of(loss, *tensors), expected_grads)


CHUNKED = [name for name in cases(1) if re.match("Cross|NLLLoss$|MSE", name)]
CHUNKED.remove("CrossEntropyLoss of pixels")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_give_the_loss_and_the_gradients_of_the_whole(name, reduction):
    for k, size, rows in [(1, 1, 5), (1, 4, 13), (2, 100, 13), (3, 3, 13), (8, 1, 2), (8, 1, 9)]:
        criterion, _, [target] = case(name, rows, reduction)
        target = randn(rows, 5) if name == "MSELoss" else target
        require_same_in_chunks(criterion, randn(rows, 4), target, k, size)


@pytest.mark.parametrize("places", [(), (1,), (0,), (3, 0), (2, 3), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_positions_may_have_any_shape(places, reduction):
    numbers, soft = randn(*places, 5, seed=2), randn(*places, 5, seed=1).softmax(-1)
    for k, size in [(1, 4), (3, 1), (8, 4)]:
        for target in (labels(*places), soft):
            require_same_in_chunks(
                nn.CrossEntropyLoss(reduction=reduction), randn(*places, 4), target, k, size
            )
        criterion = nn.MSELoss(reduction=reduction)
        require_same_in_chunks(criterion, randn(*places, 4), numbers, k, size)


@given(st.integers(1, 9), st.integers(1, 30), st.integers(1, 30), st.integers(0, 2**30))
def test_chunks_of_any_size_whatever_is_ignored(k, size, rows, ignored):
    target = labels(rows, ignored=[row for row in range(rows) if ignored >> row & 1])
    require_same_in_chunks(nn.CrossEntropyLoss(W + 1), randn(rows, 4), target, k, size)


def test_a_model_without_devices_and_its_loss_take_the_whole_batch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    model = DataParallelModel(nn.Linear(3, 5).double())
    criterion, X, target = nn.CrossEntropyLoss(weight=W), randn(6, 3), labels(6)
    loss = DataParallelCriterion(criterion, model.devices)
    assert torch.equal(loss(model(X), target), criterion(model.module(X), target))
    with pytest.raises(ValueError, match="2 outputs for 1 device:"):
        loss(split(randn(6, 5), 2), target)
