"""A loss in parts, on devices or in chunks, is the whole's, with its gradients."""

from functools import partial
from itertools import product

import pytest
import torch
from helpers import mlp, randn
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from d2lpar import ChunkedLoss, DataParallelCriterion, DataParallelModel, count_bytes
from d2lpar.data_parallel.loss import PER_CLASS, PER_ELEMENT

CPU = torch.device("cpu")
W = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12, equal_nan=True)


def labels(*shape, ignored=()):
    """Classes 0 to 4; rows of those that are ignored."""
    target = torch.randint(5, shape, generator=torch.Generator().manual_seed(3))
    for row in ignored:
        target[row % shape[0]] = -100
    return target


def cases(n):
    """{class of torch.nn and more: (its arguments, output, target or targets)}."""
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
        "CrossEntropyLoss of probabilities, smooth": (smooth | weight, x, soft),
        "CrossEntropyLoss, smooth": (smooth | index | {"weight": W + 1}, x, target),
        "CrossEntropyLoss, smooth, without weight": (
            smooth | {"weight": W * torch.tensor([0.0, 1, 1, 1, 1])},
            x,
            torch.arange(n)
            .sub(min(n, 5) - 2)
            .clamp(0, 4),  # class 0 counts nothing, but adds
        ),
        "CrossEntropyLoss, smooth, all ignored": (
            smooth,
            x,
            labels(n, ignored=range(n)),
        ),
        "CrossEntropyLoss of bytes": (weight, x, target.byte()),
    }
    for name in ("CrossEntropyLoss", "NLLLoss"):
        found |= {
            name: ({}, x, target),
            f"{name}, both": (index | weight, x, target),
            f"{name}, last shards ignored": ({}, x, labels(n, ignored=(-1, -2, -3))),
            f"{name}, all ignored": (weight, x, labels(n, ignored=range(n))),
        }
    return found


def case(name, n, reduction="mean"):
    options, output, targets = cases(n)[name]
    criterion = getattr(nn, name.partition(" ")[0].strip(","))(
        reduction=reduction, **options
    )
    return criterion, output, targets if type(targets) is list else [targets]


def split(output, k, dim=0):
    return output.tensor_split(min(k, output.shape[dim]), dim)


def grad_of(loss, *tensors):
    """The gradients of a weighted sum of the losses, or of one loss times a factor."""
    torch.manual_seed(5)
    return torch.autograd.grad((loss * torch.rand_like(loss)).sum(), tensors)


def require_same(criterion, output, targets, k, count=None, dim=0):
    output = output.requires_grad_()
    expected = criterion(output, *targets)
    loss = DataParallelCriterion(criterion, [CPU] * k, count, dim)(
        split(output, k, dim), *targets
    )
    tensors = [
        output,
        *(criterion.parameters() if isinstance(criterion, nn.Module) else ()),
    ]
    close(loss, expected)
    close(grad_of(loss, *tensors), grad_of(expected, *tensors))


def require_same_in_chunks(criterion, hidden, target, k, size):
    torch.manual_seed(0)
    generator = nn.Linear(hidden.shape[-1], 5).double()
    tensors = [hidden.requires_grad_(), *generator.parameters()]
    places = hidden.shape[:-1]
    expected = criterion(
        generator(hidden).reshape(-1, 5),
        target.reshape(-1, *target.shape[len(places) :]),
    )
    expected = (
        expected.reshape(places + expected.shape[1:]) if expected.dim() else expected
    )
    expected_grads = grad_of(expected, *tensors)
    for recompute in (False, True):
        in_chunks = ChunkedLoss(
            generator, criterion, [CPU] * k, size, recompute=recompute
        )
        loss = in_chunks(hidden, target)
        close(loss, expected)
        close(grad_of(loss, *tensors), expected_grads)


# Against the criterion alone.


def test_every_class_that_is_known_is_tested():
    assert {kind.__name__ for kind in PER_ELEMENT + PER_CLASS} <= set(cases(1))


# what torch says of KLDivLoss
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", cases(1))
def test_parts_give_the_loss_and_the_gradients_of_the_whole(name):
    reductions = ("mean", "sum", "none", *["batchmean"] * (name == "KLDivLoss"))
    for (k, rows), reduction in product([(1, 3), (3, 7), (8, 3)], reductions):
        criterion, output, targets = case(name, rows, reduction)
        require_same(criterion, output, targets, k)
    assert criterion.reduction == reductions[-1]  # it is left as it was


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in cases(1)
        if name.startswith(("Cross", "NLL")) and "pix" not in name
    ],
)
def test_chunks_give_the_loss_and_the_gradients_of_the_whole(name):
    sizes = [(1, 4, 13), (2, 100, 13), (3, 3, 13), (8, 1, 2)]
    for (k, size, rows), reduction in product(sizes, ("mean", "sum", "none")):
        criterion, _, [target] = case(name, rows, reduction)
        require_same_in_chunks(criterion, randn(rows, 4), target, k, size)


@pytest.mark.parametrize("places", [(), (0,), (3, 0), (2, 3, 2)], ids=str)
def test_positions_may_have_any_shape(places):
    numbers = randn(*places, 5, seed=2)
    for (k, size), reduction in product([(1, 4), (3, 1)], ("mean", "sum", "none")):
        for kind, target in (
            (nn.CrossEntropyLoss, labels(*places)),
            (nn.CrossEntropyLoss, numbers.softmax(-1)),
            (nn.MSELoss, numbers),
        ):
            criterion = kind(reduction=reduction)
            require_same_in_chunks(criterion, randn(*places, 4), target, k, size)


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 2**20), st.integers(1, 20))
def test_whatever_is_ignored(k, rows, ignored, size):
    target = labels(rows, ignored=[row for row in range(rows) if ignored >> row & 1])
    require_same(nn.CrossEntropyLoss(W + 1), randn(rows, 5), [target], k)
    require_same_in_chunks(nn.CrossEntropyLoss(W + 1), randn(rows, 4), target, k, size)


@pytest.mark.parametrize(
    ("name", "rows", "right"),
    [
        ("MSELoss", 8, True),
        ("MSELoss", 7, False),
        ("CrossEntropyLoss", 8, True),
        ("CrossEntropyLoss, both", 8, False),
    ],
)
def test_the_mean_of_means_is_right_only_where_all_parts_count_the_same(
    name, rows, right
):
    criterion, output, [target] = case(name, rows)
    parts = zip(split(output, 2), split(target, 2), strict=True)
    gap = torch.stack([criterion(*part) for part in parts]).mean() - criterion(
        output, target
    )
    assert gap.abs() < 1e-12 if right else gap.abs() > 1e-3


def test_the_balanced_form_is_one_device():
    model, X, y = mlp(3, 6, 5), randn(7, 3), labels(7, ignored=[0])
    criterion, three = nn.CrossEntropyLoss(W + 1), [CPU] * 3
    balanced = DataParallelCriterion(criterion, three)(
        DataParallelModel(model, three)(X), y
    )
    whole, params = criterion(model(X), y), list(model.parameters())
    close(grad_of(balanced, *params), grad_of(whole, *params))


# Other criteria, outputs and devices.


class Relative(nn.Module):
    """A loss of one's own: the mean over nonzero targets, times a learnable scale."""

    def __init__(self, reduction=None):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        if reduction:
            self.reduction = reduction

    def forward(self, output, target):
        each = self.scale * (output - target) ** 2 * (target != 0)
        kind = getattr(self, "reduction", "mean")
        return {
            "mean": each.sum() / (target != 0).sum(),
            "sum": each.sum(),
            "none": each,
        }[kind]


def test_other_criteria_dimensions_counts_and_structures():
    positive, targets = randn(7, seed=1).clamp(min=0), [labels(6, ignored=(4, 5))]
    for k in (1, 3, 8):
        require_same(
            Relative(), randn(7), [positive], k, lambda target: (target != 0).sum()
        )
        for reduction in ("sum", "none"):
            require_same(Relative(reduction), randn(7), [positive], k)
    for reduction in ("mean", "sum", "none"):
        criterion = nn.CrossEntropyLoss(reduction=reduction)
        require_same(criterion, randn(2, 5, 7), [labels(2, 7)], 3, dim=-1)
    require_same(
        nn.CrossEntropyLoss(reduction="sum"), randn(6, 5), targets, 3, count=len
    )  # unused
    require_same(F.mse_loss, randn(7, 2), [randn(7, 2, seed=1)], 3, torch.numel)

    def criterion(output, target):
        return F.mse_loss(output["mean"], target) + output["more"][0].abs().mean()

    output, target = randn(7), randn(7, seed=1)
    parts = [{"mean": part, "more": (part * 2, "words")} for part in split(output, 3)]
    loss = DataParallelCriterion(criterion, [CPU] * 3, count=len)(parts, target)
    close(loss, F.mse_loss(output, target) + 2 * output.abs().mean())


def test_a_model_without_devices_and_its_loss_take_the_whole_batch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    model = DataParallelModel(nn.Linear(3, 5).double())
    criterion, X, target = nn.CrossEntropyLoss(weight=W), randn(6, 3), labels(6)
    loss = DataParallelCriterion(criterion, model.devices)
    assert torch.equal(loss(model(X), target), criterion(model.module(X), target))
    with pytest.raises(ValueError, match="for 1 device, not 2 outputs"):
        loss(split(randn(6, 5), 2), target)


def test_a_criterion_is_replicated_and_its_error_says_where():
    with count_bytes() as ledger:
        DataParallelCriterion(nn.CrossEntropyLoss(W), [CPU] * 3)(
            split(randn(6, 5), 3), labels(6)
        )
    assert {ledger.bytes[0, i] for i in (1, 2)} == {W.nbytes + 2 * 8}  # and two targets

    def criterion(output, target):
        return 1 / int(target[0] != 2) * (output - target).mean()

    with pytest.raises(ZeroDivisionError) as error:
        DataParallelCriterion(criterion, [CPU] * 3, len)(
            split(randn(3), 3), torch.arange(3)
        )
    assert "device 2 (cpu)" in "".join(error.value.__notes__)


class Own(nn.CrossEntropyLoss):
    pass


@pytest.mark.parametrize("criterion", [F.mse_loss, Own(), nn.CosineEmbeddingLoss()])
def test_without_count_an_unknown_mean_is_refused(criterion):
    name = getattr(criterion, "__name__", type(criterion).__name__)
    for make in (
        partial(DataParallelCriterion, criterion, [CPU]),
        partial(ChunkedLoss, nn.Linear(2, 2), criterion, [CPU], 1),
    ):
        with pytest.raises(
            ValueError, match=f"known what {name} divides its mean by: pass count"
        ):
            make()


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (randn(4, 5), "for 2 devices, not a tensor"),
        ([], "for 2 devices, not 0 outputs"),
        ([randn(1, 5)] * 3, "for 2 devices, not 3 outputs"),
        (
            [randn(3, 5), randn(1, 5)],
            "output 0 has 3 rows, but its part of the targets 2",
        ),
        ([randn(2, 5)] * 2, r"the loss of a part has shape \[5\]"),
    ],
)
def test_outputs_that_do_not_fit_are_named(outputs, words):
    with pytest.raises(ValueError, match=words):
        loss = DataParallelCriterion(
            lambda output, y: (output - y).sum(0), [CPU] * 2, len
        )
        loss(outputs, randn(4, 5))
