"""A loss in parts, on devices or in chunks, is the whole's, with its gradients."""

from functools import partial

import pytest
import torch
from helpers import mlp, randn
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import d2lpar
from d2lpar import ChunkedLoss, DataParallelCriterion, DataParallelModel

CPU = torch.device("cpu")
W = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12, equal_nan=True)
in_sum = partial(nn.CrossEntropyLoss, reduction="sum")


def labels(*shape, ignored=()):
    """Classes 0 to 4; -100 in the rows that are ignored."""
    target = torch.randint(5, shape, generator=torch.Generator().manual_seed(3))
    for row in ignored:
        target[row % shape[0]] = -100
    return target


def counted(target):
    return (target != -100).sum()


def both(loss, whole, tensors):
    """A loss and the whole one, and the gradients of both times 3, computed twice."""
    for value in (loss, whole):
        torch.autograd.grad(value, tensors, retain_graph=True)
    grads = [torch.autograd.grad(3 * value, tensors) for value in (loss, whole)]
    return (loss, *grads[0]), (whole, *grads[1])


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 2**20))
def test_whatever_is_ignored_parts_are_the_loss_of_one_device(k, rows, ignored):
    y = labels(rows, ignored=[row for row in range(rows) if ignored >> row & 1])
    model, X = mlp(3, 5), randn(rows, 3)
    outputs = DataParallelModel(model, [CPU] * k)(X)
    assert len(outputs) == len(y.chunk(k))
    loss = DataParallelCriterion(in_sum(), [CPU] * k, counted)(outputs, y)
    whole = nn.CrossEntropyLoss()(model(X), y)
    close(*both(loss, whole, list(model.parameters())))


def test_class_weights_sums_other_criteria_and_dimensions():
    outputs, y = randn(7, 5).requires_grad_(), labels(7)
    parts, three = list(outputs.chunk(3)), [CPU] * 3
    loss = DataParallelCriterion(in_sum(W), three, lambda y: W[y].sum())(parts, y)
    close(*both(loss, nn.CrossEntropyLoss(W)(outputs, y), [outputs]))
    loss = DataParallelCriterion(in_sum(W), three)(parts, y)
    close(*both(loss, in_sum(W)(outputs, y), [outputs]))
    parts, y = DataParallelModel(nn.Identity(), three, dim=1)(outputs), randn(7, 5)
    loss = DataParallelCriterion(nn.MSELoss(reduction="sum"), three, torch.numel, 1)
    close(*both(loss(parts, y), F.mse_loss(outputs, y), [outputs]))


@given(st.integers(1, 20), st.integers(1, 21), st.integers(0, 2**20))
def test_chunks_are_the_loss_of_the_whole(rows, size, ignored):
    y = labels(rows, ignored=[row for row in range(rows) if ignored >> row & 1])
    assume(counted(y))
    generator, hidden = mlp(4, 5), randn(rows, 4).requires_grad_()
    places = hidden.reshape(1, rows, 1, 4), y.reshape(1, rows, 1)
    loss = ChunkedLoss(generator, in_sum(), size, counted)(*places)
    whole = nn.CrossEntropyLoss()(generator(hidden), y)
    close(*both(loss, whole, [hidden, *generator.parameters()]))


class Scaled(nn.Module):
    """A criterion with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, outputs, y):
        return F.cross_entropy(outputs * self.scale, y, reduction="sum")


def test_on_devices_with_chunks_it_is_still_the_loss_of_one_device():
    encoder, generator, criterion = mlp(3, 4), mlp(4, 5), Scaled()
    X, y, three = randn(7, 3), labels(7, ignored=[0, 6]), [CPU] * 3
    chunked = ChunkedLoss(generator, criterion, chunk_size=2)
    outputs = DataParallelModel(encoder, three)(X)
    with d2lpar.count_bytes() as ledger:
        loss = DataParallelCriterion(chunked, three, counted)(outputs, y)
    # a parameter travels once per device, with three targets and one; a loss comes back
    assert ledger.bytes == {(0, 1): 232, (0, 2): 216, (1, 0): 8, (2, 0): 8}
    whole = criterion(generator(encoder(X)), y) / counted(y)
    params = [param for part in (encoder, chunked) for param in part.parameters()]
    close(*both(loss, whole, params))


def test_what_is_frozen_gets_no_gradient_and_without_gradients_none_is_computed():
    generator, hidden, y, calls = mlp(4, 5), randn(7, 4), labels(7), []
    weight, bias = generator[0].weight, generator[0].bias.requires_grad_(False)
    expected, loss = in_sum()(generator(hidden), y), ChunkedLoss(generator, in_sum(), 2)
    loss(hidden, y).backward()
    close([weight.grad], list(torch.autograd.grad(expected, weight)))
    assert bias.grad is None
    generator.register_forward_hook(lambda *args: calls.append(args[2].requires_grad))
    with torch.no_grad():
        close(loss(hidden, y), expected.detach())
    assert calls == [False] * 4
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss(hidden, y), weight, create_graph=True)


def test_losses_and_gradients_of_16_bits_are_added_as_float32():
    torch.manual_seed(0)
    generator, y = nn.Linear(16, 50).bfloat16(), torch.randint(50, (1024,))
    hidden, whole = torch.randn(1024, 16).bfloat16(), nn.Linear(16, 50)
    whole.load_state_dict(generator.state_dict())
    expected = in_sum()(whole(hidden.float()), y)
    [exact] = torch.autograd.grad(expected, [whole.weight])
    loss = ChunkedLoss(generator, in_sum(), 2)(hidden, y)
    assert abs(loss / expected - 1) < 2e-3
    [found] = torch.autograd.grad(loss, [generator.weight])
    assert found.dtype == torch.bfloat16
    assert (found.float() - exact).norm() / exact.norm() < 0.01


def test_the_peak_is_that_of_a_chunk_and_no_chunk_keeps_its_graph():
    generator, hidden = nn.Linear(4, 500), torch.randn(1024, 4, requires_grad=True)
    y, loss = torch.randint(500, (1024,)), ChunkedLoss(generator, in_sum(), 128)
    peak = d2lpar.peak_memory(lambda: loss(hidden, y).backward(), CPU)
    whole = d2lpar.peak_memory(lambda: in_sum()(generator(hidden), y).backward(), CPU)
    logits, grads = 4 * 500 * 128, hidden.nbytes + 5 * 500 * 4
    assert peak < 3 * logits + grads + 5_000 < whole / 5
    assert d2lpar.saved_memory(lambda: loss(hidden, y))[1] == grads


def test_errors_name_what_does_not_fit():
    mean, linear, part = nn.CrossEntropyLoss(), nn.Linear(4, 5), randn(4, 5)
    on_two = DataParallelCriterion(in_sum(), [CPU] * 2)
    chunked = ChunkedLoss(linear, in_sum(), 2)
    divided = ChunkedLoss(linear, in_sum(), 2, counted)
    for call, words in (
        (lambda: DataParallelCriterion(mean, [CPU]), 'reduction="mean", and must have'),
        (lambda: ChunkedLoss(linear, nn.Sequential(mean), 2), "the mean, pass count"),
        (lambda: ChunkedLoss(linear, F.cross_entropy, 2), "be an nn.Module, not <func"),
        (lambda: DataParallelCriterion(divided, [CPU]), "ChunkedLoss has a count of"),
        (lambda: on_two(part, labels(4)), "outputs is a Tensor: pass the list that"),
        (lambda: on_two([part] * 3, labels(12)), "shorter"),
        (lambda: chunked(torch.zeros(7, 4), labels(6)), r"\[7, 4\], but target \[6\]"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            call()
