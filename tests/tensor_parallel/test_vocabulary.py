"""The cross-entropy of logits cut by class: torch's, without gathering them."""

import math

import pytest
import torch
import torch.distributed as dist
from helpers import attempt, on_ranks, randn
from torch import nn
from torch.nn import functional as F

from d2lpar import ColumnParallelLinear, count_bytes, vocab_parallel_cross_entropy

CLASSES = 10  # uneven parts for 3 ranks
# each class: also the first and the last of every rank
TARGET = torch.arange(12) % CLASSES
IGNORED = torch.where(TARGET % 3 == 0, -100, TARGET)
REDUCTIONS = "mean", "sum", "none"


def logits_of(*shape, dtype=torch.float32):
    return (3 * randn(*(shape or (12, CLASSES)), seed=8)).to(dtype)


def own(tensor, group=None):
    return tensor.tensor_split(dist.get_world_size(group), -1)[dist.get_rank(group)]


def ours(logits, target, group=None, **kwargs):
    """The loss and the gradient of this rank's logits; rows have weights."""
    mine = own(logits, group).clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, target, logits.shape[-1], group, **kwargs)
    (loss * torch.arange(1.0, 1 + loss.numel()).view(loss.shape)).sum().backward()
    # intact
    assert torch.equal(mine.detach().nan_to_num(), own(logits, group).nan_to_num())
    return loss.detach(), mine.grad


def torchs(logits, target, group=None, **kwargs):
    """The same, by torch, from all logits."""
    whole = logits.clone().requires_grad_()
    loss = F.cross_entropy(whole.movedim(-1, min(1, target.dim())), target, **kwargs)
    (loss * torch.arange(1.0, 1 + loss.numel()).view(loss.shape)).sum().backward()
    return loss.detach(), own(whole.grad, group)


def assert_torchs(*case, tolerance=1e-5, **kwargs):
    tolerances = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(
        ours(*case, **kwargs), torchs(*case, **kwargs), **tolerances
    )


def losses_and_gradients_are_torchs(rank, k):
    huge, masked = logits_of(), logits_of()
    huge[0, 0] = huge[1, 9] = huge[2, 4] = 1e4
    huge[3, 3] = huge[4, 0] = -1e4
    huge[5, :5], huge[6, 5:] = 1e4, -1e4
    # masked classes: all of the last rank, and others
    masked[TARGET < 5, 4:] = -math.inf
    masked[4, 4] = 0
    alone, _ = dist.new_subgroups(1)
    pair, _ = dist.new_subgroups_by_enumeration([[0, 2], [1]])
    for group, size in ((None, k), (pair, dist.get_world_size(pair)), (alone, 1)):
        for logits, target, ignore_index in [
            (logits_of(), TARGET, -100),
            (logits_of(), IGNORED, -100),
            (logits_of(), TARGET, 4),
            (logits_of(), IGNORED.clamp(min=-1), -1),
            (logits_of(), torch.full((12,), -100), -100),
            (logits_of(3, 4, CLASSES), TARGET.view(3, 4), -100),
            (logits_of(CLASSES), torch.tensor(7), -100),
            (logits_of(0, CLASSES), TARGET[:0], -100),
            (logits_of(12, size), TARGET % size, -100),  # one class per rank
        ]:
            for reduction in REDUCTIONS:
                kwargs = {"reduction": reduction, "ignore_index": ignore_index}
                assert_torchs(logits, target, group, **kwargs)
                assert_torchs(logits.double(), target, group, **kwargs, tolerance=1e-13)
        for logits in (huge, 1e30 * huge, masked):
            assert_torchs(logits, TARGET, group, reduction="none")


def bfloat16_and_ignored_rows_without_exponentials(rank, world_size):
    logits = logits_of(dtype=torch.bfloat16)
    loss, grad = ours(logits, TARGET)
    wide_loss, wide_grad = torchs(logits.float(), TARGET)
    torch.testing.assert_close(loss, wide_loss)  # it is computed in float32
    assert grad.dtype == torch.bfloat16
    assert (grad - wide_grad).abs().max() < 2**-8 / 12  # half a digit of 1/12
    logits, target = logits_of(), torch.where(TARGET < 2, -100, TARGET)
    logits[0], logits[1, 7] = -math.inf, math.nan  # which are ignored
    for reduction in REDUCTIONS:
        wanted = F.cross_entropy(logits, target, reduction=reduction)
        assert wanted.isfinite().all()
        torch.testing.assert_close(ours(logits, target, reduction=reduction)[0], wanted)


def after_a_column_parallel_layer_it_trains_as_one_process(rank, world_size):
    torch.manual_seed(3)
    layer = ColumnParallelLinear(6, CLASSES)
    torch.manual_seed(3)
    whole = nn.Linear(6, CLASSES)
    X = randn(12, 6, dtype=torch.float32).requires_grad_()
    loss = vocab_parallel_cross_entropy(layer(X), TARGET, CLASSES)
    loss.backward()
    grad, X.grad = X.grad, None
    F.cross_entropy(whole(X), TARGET).backward()
    weight_grad = whole.weight.grad.tensor_split(world_size)[rank]
    torch.testing.assert_close([grad, layer.weight.grad], [X.grad, weight_grad])
    losses = [None] * world_size
    dist.all_gather_object(losses, loss.item())
    assert len(set(losses)) == 1  # to the last bit


def backward_may_run_twice_and_has_no_gradient_itself(rank, world_size):
    mine = own(logits_of()).clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, TARGET, CLASSES)
    assert torch.equal(
        *[torch.autograd.grad(loss, mine, retain_graph=True)[0] for _ in "ab"]
    )
    with pytest.raises(NotImplementedError, match="own gradient"):
        torch.autograd.grad(loss, mine, create_graph=True)


test_loss = on_ranks(
    3,
    [
        losses_and_gradients_are_torchs,
        bfloat16_and_ignored_rows_without_exponentials,
        after_a_column_parallel_layer_it_trains_as_one_process,
        backward_may_run_twice_and_has_no_gradient_itself,
    ],
)


def three_numbers_per_row_are_sent_whatever_the_number_of_classes(rank, world_size):
    for num_classes in (CLASSES, 1000):
        mine = own(logits_of(5, num_classes)).float().requires_grad_()
        with count_bytes() as forward:
            loss = vocab_parallel_cross_entropy(mine, TARGET[:5], num_classes)
        with count_bytes() as backward:
            loss.backward()
        assert forward.bytes == {(rank, 1 - rank): 5 * 3 * 4} and backward.bytes == {}
        assert forward.messages == {(rank, 1 - rank): 2}


def what_does_not_fit_is_an_error(rank, world_size):
    right, own = torch.zeros(4, 4 - rank), 4 - rank  # of 7 classes
    whose = f"this rank has the classes {('0 to 3', '4 to 6')[rank]} of 7"
    average = 'reduction is \'average\', which is none of "mean", "sum", "none"'
    for logits, target, options, *outcome in [
        (right, [0, 6, -100, 3], {}, "ok", ""),
        (
            right,
            [0] * 3,
            {},
            "ValueError",
            f"shape [4, {own}], but [3, {own}] is right: {whose}",
        ),
        (
            torch.zeros(4, 7),
            [0] * 4,
            {},
            "ValueError",
            f"[4, 7], but [4, {own}] is right: {whose}",
        ),
        (
            right[:, :1],
            [0] * 4,
            {"num_classes": 1},
            "ValueError",
            "1 classes are too few for 2 ranks",
        ),
        (right, [0, 6, -1, 3], {}, "ValueError", "target -1 is none of the 7 classes"),
        (right, [0, 7, 2, 3], {}, "ValueError", "target 7 is none of the 7 classes"),
        (
            right,
            [0, -100, 2, 3],
            {"ignore_index": 2},
            "ValueError",
            "target -100 is none of the 7",
        ),
        (right, [0, 1, 2, 3], {"reduction": "average"}, "ValueError", average),
        (
            right,
            [0] * 4,
            {"group": dist.GroupMember.NON_GROUP_MEMBER},
            "ValueError",
            "no member",
        ),
    ]:
        options = {"num_classes": 7} | options
        call = vocab_parallel_cross_entropy
        kind, words, *_ = attempt(call, logits, torch.tensor(target), **options)
        assert kind == outcome[0] and outcome[1] in str(words), (kind, words)


test_two_ranks = on_ranks(
    2,
    [
        three_numbers_per_row_are_sent_whatever_the_number_of_classes,
        what_does_not_fit_is_an_error,
    ],
)
