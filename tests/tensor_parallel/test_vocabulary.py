"""The cross-entropy of logits cut by class: torch's, without gathering them."""

import math

import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT, attempt
from torch import nn
from torch.nn import functional as F

from d2lpar import ColumnParallelLinear, count_bytes, launch, vocab_parallel_cross_entropy

CLASSES = 10  # uneven parts for 3 and 4 ranks
TARGET = torch.arange(12) % CLASSES  # each class: also the first and the last of every rank
IGNORED = torch.where(TARGET % 3 == 0, -100, TARGET)


def logits_of(shape=(12, CLASSES), dtype=torch.float32):
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(8))).to(dtype)


def own(tensor, group=None):
    return tensor.tensor_split(dist.get_world_size(group), -1)[dist.get_rank(group)]


def ours(logits, target, group=None, **kwargs):
    """The loss and the gradient of this rank's logits; the losses of rows are weighted."""
    mine = own(logits, group).clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, target, logits.shape[-1], group, **kwargs)
    (loss * torch.arange(1.0, 1 + loss.numel()).view(loss.shape)).sum().backward()
    assert torch.equal(mine.detach().nan_to_num(), own(logits, group).nan_to_num())  # intact
    return loss.detach(), mine.grad


def torchs(logits, target, group=None, **kwargs):
    """The same, by torch, from all logits."""
    whole = logits.clone().requires_grad_()
    loss = F.cross_entropy(whole.movedim(-1, min(1, target.dim())), target, **kwargs)
    (loss * torch.arange(1.0, 1 + loss.numel()).view(loss.shape)).sum().backward()
    return loss.detach(), own(whole.grad, group)


def assert_torchs(*case, tolerance=1e-5, **kwargs):
    tolerances = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(ours(*case, **kwargs), torchs(*case, **kwargs), **tolerances)


def huge():
    logits = logits_of()
    logits[0, 0] = logits[1, 9] = logits[2, 4] = 1e4
    logits[3, 3] = logits[4, 0] = -1e4
    logits[5, :5], logits[6, 5:] = 1e4, -1e4
    return logits


def masked():
    """Classes may be masked with minus infinity, also all of a rank."""
    logits = logits_of()
    logits[TARGET != 5, 5] = -math.inf  # the first class of rank 1 of 2
    logits[TARGET < 5, 5:] = -math.inf
    return logits


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_losses_and_gradients_are_torchs(k):
    def run(rank, world_size):
        for reduction in ("mean", "sum", "none"):
            for logits, target, ignore_index in [
                (logits_of(), TARGET, -100),
                (logits_of(), IGNORED, -100),
                (logits_of(), TARGET, 4),
                (logits_of(), IGNORED.clamp(min=-1), -1),
                (logits_of(), torch.full((12,), -100), -100),
                (logits_of((3, 4, CLASSES)), TARGET.view(3, 4), -100),
                (logits_of((CLASSES,)), torch.tensor(7), -100),
                (logits_of((0, CLASSES)), TARGET[:0], -100),
                (logits_of((12, k)), TARGET % k, -100),  # a class a rank
            ]:
                kwargs = {"reduction": reduction, "ignore_index": ignore_index}
                assert_torchs(logits, target, **kwargs)
                assert_torchs(logits.double(), target, **kwargs, tolerance=1e-13)
        for logits in (huge(), 1e30 * huge(), masked()):
            assert_torchs(logits, TARGET, reduction="none")

    launch(run, k, timeout=LIMIT)


def test_bfloat16_and_ignored_rows_without_exponentials():
    def run(rank, world_size):
        logits = logits_of(dtype=torch.bfloat16)
        loss, grad = ours(logits, TARGET)
        wide_loss, wide_grad = torchs(logits.float(), TARGET)
        torch.testing.assert_close(loss, wide_loss)  # it is computed in float32
        assert grad.dtype == torch.bfloat16
        assert (grad - wide_grad).abs().max() < 2**-8 / 12  # half a digit of 1/12
        logits, target = logits_of(), torch.where(TARGET < 2, -100, TARGET)
        logits[0], logits[1, 7] = -math.inf, math.nan  # which are ignored
        for reduction in ("mean", "sum", "none"):
            wanted = F.cross_entropy(logits, target, reduction=reduction)
            assert wanted.isfinite().all()
            torch.testing.assert_close(ours(logits, target, reduction=reduction)[0], wanted)

    launch(run, 2, timeout=LIMIT)


# How it is used


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
        torch.testing.assert_close([grad, layer.weight.grad], [X.grad, weight_grad])
        return loss.item()

    assert len(set(launch(run, 3, timeout=LIMIT))) == 1  # to the last bit


def test_a_group_smaller_than_the_world_has_rows_and_classes_of_its_own():
    def run(rank, world_size):
        group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1]])
        rows = 12 - 5 * (rank % 2)
        assert_torchs(logits_of()[:rows], TARGET[:rows], group)
        if rank != 1:
            return None
        outside = dist.GroupMember.NON_GROUP_MEMBER
        return attempt(vocab_parallel_cross_entropy, torch.ones(1, 2), TARGET[:1], 2, outside)[:2]

    kind, words = launch(run, 3, timeout=LIMIT)[1]
    assert kind == "ValueError" and "no member of the group" in words


def test_backward_may_run_twice_and_has_no_gradient_itself():
    def run(rank, world_size):
        mine = own(logits_of()).clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(mine, TARGET, CLASSES)
        pair = [torch.autograd.grad(loss, mine, retain_graph=True)[0] for _ in range(2)]
        assert torch.equal(*pair)
        with pytest.raises(NotImplementedError, match="own gradient"):
            torch.autograd.grad(loss, mine, create_graph=True)

    launch(run, 2, timeout=LIMIT)


# What it sends


def test_three_numbers_a_row_are_sent_whatever_the_number_of_classes():
    def run(rank, world_size):
        for num_classes in (CLASSES, 1000):
            mine = own(logits_of((5, num_classes))).clone().requires_grad_()
            with count_bytes() as forward:
                loss = vocab_parallel_cross_entropy(mine, TARGET[:5], num_classes)
            with count_bytes() as backward:
                loss.backward()
            assert forward.bytes == {(rank, 1 - rank): 5 * 3 * 4} and backward.bytes == {}
            assert forward.messages == {(rank, 1 - rank): 2}

    launch(run, 2, timeout=LIMIT)


# What does not fit


def test_what_does_not_fit_is_an_error():
    def run(rank, world_size):
        right, own = torch.zeros(4, 4 - rank), 4 - rank  # of 7 classes
        whose = f"this rank has the classes {('0 to 3', '4 to 6')[rank]} of 7"
        average = 'reduction is \'average\', which is none of "mean", "sum", "none"'

        def said(logits, target, num_classes=7, **kwargs):
            call = vocab_parallel_cross_entropy
            return attempt(call, logits, torch.tensor(target), num_classes, **kwargs)[:2]

        assert said(right, [0, 6, -100, 3])[0] == "ok"
        for answer, words in [
            (said(right, [0] * 3), f"shape [4, {own}], but [3, {own}] is right: {whose}"),
            (said(torch.zeros(4, 7), [0] * 4), f"shape [4, 7], but [4, {own}] is right: {whose}"),
            (said(right[None], [0] * 4), f"shape [1, 4, {own}], but [4, {own}] is right: {whose}"),
            (said(right[:, :1], [0] * 4, 1), "1 classes are too few for 2 ranks"),
            (said(right, [0, 6, -1, 3]), "target -1 is none of the 7 classes"),
            (said(right, [0, 7, 2, 3]), "target 7 is none of the 7 classes"),
            (said(right, [0, -100, 2, 3], ignore_index=2), "target -100 is none of the 7 classes"),
            (said(right, [0, 1, 2, 3], reduction="average"), average),
        ]:
            assert answer[0] == "ValueError" and answer[1].endswith(words), answer

    launch(run, 2, timeout=LIMIT)
