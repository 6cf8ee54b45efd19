"""The cross-entropy of logits cut by class: torch's, without gathering them."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from d2lpar import ColumnParallelLinear, count_bytes, launch, ranks, vocab_parallel_cross_entropy

LIMIT = 60  # seconds, for what takes less than one
CLASSES = 10  # uneven parts for 3 and 4 ranks
TARGET = torch.arange(12) % CLASSES  # each class: also the first and the last of every rank


def logits_of(shape=(12, CLASSES), dtype=torch.float32):
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(8))).to(dtype)


def own(tensor, group=None):
    return tensor.tensor_split(dist.get_world_size(group), -1)[dist.get_rank(group)]


def ours(logits, target, weights=1.0, group=None, **kwargs):
    """The loss and the gradient of this rank's logits."""
    mine = own(logits, group).clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, target, logits.shape[-1], group, **kwargs)
    (weights * loss).sum().backward()
    return loss.detach(), mine.grad


def torchs(logits, target, weights=1.0, group=None, **kwargs):
    """The same, by torch, from all logits."""
    whole = logits.clone().requires_grad_()
    loss = F.cross_entropy(whole.movedim(-1, min(1, target.dim())), target, **kwargs)
    (weights * loss).sum().backward()
    return loss.detach(), own(whole.grad, group)


def distance(ours, theirs):
    """The largest difference, relative above 1; infinite where a shape or a dtype is another."""
    largest = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        gap = (a.double() - b.double()).abs() / b.abs().clamp(min=1)
        gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, gap)
        largest = max(largest, float(gap.nan_to_num(1e9).max())) if gap.numel() else largest
    return largest


def assert_torchs(k, cases, tolerance=1e-5):
    """``cases`` is {name: (logits, target, keywords)}."""

    def run(rank, world_size):
        return {
            name: distance(ours(logits, target, **kwargs), torchs(logits, target, **kwargs))
            for name, (logits, target, kwargs) in cases.items()
        }

    for differ in launch(run, k, timeout=LIMIT):
        for name, difference in differ.items():
            assert difference <= tolerance, name


# It is torch's.


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_losses_and_gradients_are_torchs(k):
    cases = {}
    ignored = torch.where(TARGET % 3 == 0, -100, TARGET)
    for reduction in ("mean", "sum", "none"):
        cases |= {
            (reduction, "plain"): (logits_of(), TARGET, {}),
            (reduction, "some ignored"): (logits_of(), ignored, {}),
            (reduction, "a class ignored"): (logits_of(), TARGET, {"ignore_index": 4}),
            (reduction, "-1 ignored"): (logits_of(), ignored.clamp(min=-1), {"ignore_index": -1}),
            (reduction, "3 dimensions"): (logits_of((3, 4, CLASSES)), TARGET.view(3, 4), {}),
            (reduction, "1 dimension"): (logits_of((CLASSES,)), torch.tensor(7), {}),
            (reduction, "no rows"): (logits_of((0, CLASSES)), TARGET[:0], {}),
            (reduction, "a class a rank"): (logits_of((12, k)), TARGET % k, {}),
        }
    for (reduction, _), (_, _, kwargs) in cases.items():
        kwargs["reduction"] = reduction
    weights = torch.arange(12.0) - 5
    cases["weighted"] = logits_of(), ignored, {"reduction": "none", "weights": weights}
    assert_torchs(k, cases)


def test_float64_has_all_its_digits():
    logits = logits_of(dtype=torch.float64)
    assert_torchs(3, {"mean": (logits, TARGET, {}), "sum": (logits, TARGET, {})}, 1e-14)


def test_bfloat16_is_computed_in_float32_and_its_gradient_is_bfloat16():
    def run(rank, world_size):
        logits = logits_of(dtype=torch.bfloat16)
        loss, grad = ours(logits, TARGET)
        wide_loss, wide_grad = torchs(logits.float(), TARGET)
        return distance([loss], [wide_loss]), grad.dtype, distance([grad.float()], [wide_grad])

    for loss_gap, dtype, grad_gap in launch(run, 2, timeout=LIMIT):
        assert loss_gap < 1e-6
        assert dtype == torch.bfloat16 and grad_gap < 2**-8 / 12  # half a digit of 1/12


def test_huge_logits_do_not_overflow():
    huge = logits_of()
    huge[0, 0] = huge[1, 9] = huge[2, 4] = 1e4
    huge[3, 3] = huge[4, 0] = -1e4
    huge[5, :5], huge[6, 5:] = 1e4, -1e4
    huge[7] += 1e4
    huge[8] -= 1e4
    cases = {"float32": (huge, TARGET, {"reduction": "none"})}
    cases["far"] = huge * 1e30, TARGET, {"reduction": "none"}
    assert_torchs(3, cases)
    losses = F.cross_entropy(huge, TARGET, reduction="none")
    assert losses.isfinite().all() and losses.max() > 9e3


def test_classes_may_be_masked_with_minus_infinity():
    masked = logits_of()
    masked[TARGET != 5, 5] = -math.inf  # the first class of rank 1
    masked[TARGET < 5, 5:] = -math.inf  # all classes of a rank
    assert_torchs(2, {"none": (masked, TARGET, {"reduction": "none"})})


def test_the_loss_of_ignored_rows_alone_is_torchs():
    ignored = torch.full((12,), -100)

    def run(rank, world_size):
        return {r: ours(logits_of(), ignored, reduction=r) for r in ("mean", "sum", "none")}

    for results in launch(run, 2, timeout=LIMIT):
        assert results["mean"][0].isnan()
        assert results["sum"][0] == 0 and torch.equal(results["none"][0], torch.zeros(12))
        assert not results["sum"][1].any() and not results["none"][1].any()


def test_an_ignored_row_has_no_loss_even_where_its_logits_have_no_exponentials():
    logits = logits_of()
    logits[0], logits[1, 7] = -math.inf, math.nan
    target = torch.where(TARGET < 2, -100, TARGET)

    def run(rank, world_size):
        return [ours(logits, target, reduction=r)[0] for r in ("mean", "sum", "none")]

    wanted = [F.cross_entropy(logits, target, reduction=r) for r in ("mean", "sum", "none")]
    assert wanted[1].isfinite()
    for losses in launch(run, 2, timeout=LIMIT):
        assert distance(losses, wanted) < 1e-6


def test_ignored_rows_alone_have_no_gradient():
    assert_torchs(2, {"mean": (logits_of(), torch.full((12,), -100), {})})


# How it is used.


def test_after_a_column_parallel_layer_it_trains_as_one_process():
    def run(rank, world_size):
        torch.manual_seed(3)
        layer = ColumnParallelLinear(6, CLASSES)
        torch.manual_seed(3)
        whole = nn.Linear(6, CLASSES)
        X = torch.randn(12, 6, generator=torch.Generator().manual_seed(4)).requires_grad_()
        loss = vocab_parallel_cross_entropy(layer(X), TARGET, CLASSES)
        loss.backward()
        grad, X.grad = X.grad, None
        F.cross_entropy(whole(X), TARGET).backward()
        weight_grad = whole.weight.grad.tensor_split(world_size)[rank]
        return loss.item(), distance([grad, layer.weight.grad], [X.grad, weight_grad])

    results = launch(run, 3, timeout=LIMIT)
    assert len({loss for loss, _ in results}) == 1  # to the last bit
    assert max(difference for _, difference in results) < 1e-6


def test_a_group_smaller_than_the_world_has_rows_and_classes_of_its_own():
    def run(rank, world_size):
        group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1]])
        rows = 12 - 5 * (rank % 2)
        case = logits_of()[:rows], TARGET[:rows], 1.0, group
        return distance(ours(*case), torchs(*case))

    assert max(launch(run, 3, timeout=LIMIT)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_neither_logits_nor_what_backward_needs_is_written_to(dtype):
    def run(rank, world_size):
        mine = own(logits_of(dtype=dtype)).clone().requires_grad_()
        losses = vocab_parallel_cross_entropy(mine, TARGET, CLASSES, reduction="none")
        grad = torch.ones_like(losses)
        grads = []
        for _ in range(2):
            losses.backward(grad, retain_graph=True)
            grads.append(mine.grad)
            mine.grad = None
        intact = torch.equal(mine, own(logits_of(dtype=dtype))) and bool((grad == 1).all())
        return intact, torch.equal(*grads)

    assert launch(run, 2, timeout=LIMIT) == [(True, True)] * 2


# What it sends.


@pytest.mark.parametrize("k", [1, 2, 3])
def test_three_numbers_a_row_are_sent_whatever_the_number_of_classes(k):
    def run(rank, world_size):
        sent = {}
        for num_classes in (CLASSES, 1000):
            mine = logits_of((5, num_classes))
            mine = own(mine).clone().requires_grad_()
            with count_bytes() as forward:
                loss = vocab_parallel_cross_entropy(mine, TARGET[:5], num_classes)
            with count_bytes() as backward:
                loss.backward()
            sent[num_classes] = forward.bytes, forward.messages, backward.bytes
        with count_bytes() as wanted:
            ranks.allreduce(torch.zeros(5))
            ranks.allreduce(torch.zeros(10))
        return sent, (wanted.bytes, wanted.messages, {})

    for rank, (sent, wanted) in enumerate(launch(run, k, timeout=LIMIT)):
        assert sent == {CLASSES: wanted, 1000: wanted}
        if k == 2:
            assert wanted[:2] == ({(rank, 1 - rank): 5 * 3 * 4}, {(rank, 1 - rank): 2})


# What does not fit.


def test_what_does_not_fit_is_an_error():
    def complaint(logits, target, *args, **kwargs):
        try:
            vocab_parallel_cross_entropy(logits, target, *args, **kwargs)
        except ValueError as error:
            return str(error)

    def run(rank, world_size):
        right = torch.zeros(4, 4 - rank)  # of 7 classes

        def with_target(*classes, **kwargs):
            return complaint(right, torch.tensor(classes), 7, **kwargs)

        return {
            "right": with_target(0, 6, -100, 3),
            "rows": complaint(right, TARGET[:3], 7),
            "classes": complaint(torch.zeros(4, 7), TARGET[:4], 7),
            "dimensions": complaint(right[None], TARGET[:4], 7),
            "few": complaint(right[:, :1], TARGET[:4], 1),
            "negative": with_target(0, 6, -1, 3),
            "too large": with_target(0, 7, 2, 3),
            "no more ignored": with_target(0, -100, 2, 3, ignore_index=2),
            "reduction": with_target(0, 1, 2, 3, reduction="average"),
        }

    for rank, said in enumerate(launch(run, 2, timeout=LIMIT)):
        own, classes = 4 - rank, ("0 to 3", "4 to 6")[rank]
        whose = f"this rank has the classes {classes} of 7"
        assert said == {
            "right": None,
            "rows": f"logits have shape [4, {own}], but [3, {own}] is right: {whose}",
            "classes": f"logits have shape [4, 7], but [4, {own}] is right: {whose}",
            "dimensions": f"logits have shape [1, 4, {own}], but [4, {own}] is right: {whose}",
            "few": "1 classes are too few for 2 ranks",
            "negative": "target -1 is none of the 7 classes",
            "too large": "target 7 is none of the 7 classes",
            "no more ignored": "target -100 is none of the 7 classes",
            "reduction": ('reduction is \'average\', which is none of "mean", "sum", "none"'),
        }


def test_a_gradient_of_the_gradient_is_refused():
    def twice(rank, k):
        logits = torch.randn(3, 4, requires_grad=True)
        loss = vocab_parallel_cross_entropy(logits, torch.tensor([0, 1, 7]), 4 * k)
        with pytest.raises(NotImplementedError, match="own gradient"):
            torch.autograd.grad(loss, logits, create_graph=True)

    launch(twice, 2, timeout=LIMIT)


def test_a_rank_outside_of_the_group_is_told_so():
    def outside(rank, k):
        group = dist.new_group([0])
        if rank == 1:
            with pytest.raises(ValueError, match="no member of the group"):
                vocab_parallel_cross_entropy(torch.ones(1, 2), torch.tensor([0]), 2, group)
            with pytest.raises(ValueError, match="no member of the group"):
                ColumnParallelLinear(2, 2, group=group)

    launch(outside, 2, timeout=LIMIT)
