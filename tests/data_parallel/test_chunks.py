"""A chunked loss's gradients, made in forward, are backward's; more in test_loss."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from d2lpar import ChunkedLoss, autocast, count_bytes
from d2lpar.study.memory import peak_memory

CPU = torch.device("cpu")
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
both = pytest.mark.parametrize("recompute", [False, True])


def problem(rows=7, classes=5, dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(rows, 4, dtype=dtype).requires_grad_()
    return nn.Linear(4, classes).to(dtype), hidden, torch.randint(classes, (rows,))


def gradients(loss, tensors):
    return torch.autograd.grad(loss, tensors, allow_unused=True)


def chunked(generator, size=2, k=1, criterion=None, count=None, recompute=False):
    criterion = criterion or nn.CrossEntropyLoss()
    return ChunkedLoss(
        generator, criterion, [CPU] * k, size, count, recompute=recompute
    )


# What it costs.


class Counted(nn.Linear):
    calls = 0

    def forward(self, hidden):
        self.calls += 1
        return super().forward(hidden)


@pytest.mark.parametrize(("recompute", "calls"), [(False, 4), (True, 8)])
def test_logits_are_computed_once_or_twice_and_once_more_in_a_checkpoint(
    recompute, calls
):
    generator, (_, hidden, target) = Counted(4, 5).double(), problem()
    tensors = [hidden, *generator.parameters()]
    expected = gradients(F.cross_entropy(generator(hidden.tanh()), target), tensors)
    loss, generator.calls = chunked(generator, recompute=recompute), 0
    loss(hidden, target).backward()
    assert generator.calls == calls
    value = checkpoint(
        lambda hidden: loss(hidden.tanh(), target), hidden, use_reentrant=False
    )
    close(gradients(value, tensors), expected)
    assert generator.calls <= 2 * calls + 4


@both
def test_the_peak_falls_with_the_size_of_the_chunks(recompute):
    generator, hidden, target = problem(1024, 500, torch.float32)

    def peak(size):
        loss = chunked(generator, size, recompute=recompute)
        return peak_memory(lambda: loss(hidden, target).backward(), CPU)

    assert peak(128) < peak(1024) / 5


def test_no_chunk_keeps_the_gradients_of_the_one_before():
    generator, hidden, target = problem(8, 5000, torch.float32)
    loss = chunked(generator, size=1)
    peak = peak_memory(lambda: loss(hidden, target).backward(), CPU)
    # sums, and one's
    assert peak < 2.5 * sum(param.nbytes for param in generator.parameters())


@both
def test_the_ledger_counts_what_chunks_need(recompute):
    generator, hidden, target = problem(5)
    with count_bytes() as ledger:
        chunked(generator, k=2, recompute=recompute)(hidden, target).backward()
    # two of the five positions
    hidden, targets, parameters, loss = 2 * 4 * 8, 2 * 8, 25 * 8, 8
    assert ledger.bytes == {
        (0, 1): hidden + targets + parameters + loss,  # of the loss it is the gradient
        (1, 0): loss + hidden + parameters,
    }


# What the gradients are.


@both
@pytest.mark.parametrize("kept", ["hidden", "weight", "nothing"])
def test_what_is_frozen_gets_no_gradient(kept, recompute):
    generator, hidden, target = problem()
    tensors = {"hidden": hidden, "weight": generator.weight, "bias": generator.bias}
    whole = F.cross_entropy(generator(hidden), target)
    expected = [
        gradients(whole, t)[0] if name == kept else None for name, t in tensors.items()
    ]
    for name, tensor in tensors.items():
        tensor.requires_grad_(name == kept)
    generator.unused = nn.Parameter(torch.ones(1))
    value = chunked(generator, 3, recompute=recompute)(hidden, target)
    close(value, whole.detach().requires_grad_(kept != "nothing"))
    if value.requires_grad:
        value.backward()
    for tensor, grad in zip(
        [*tensors.values(), generator.unused], [*expected, None], strict=True
    ):
        assert tensor.grad is grad is None or torch.allclose(
            tensor.grad, grad, rtol=1e-12
        )
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            value = chunked(generator, k=2, recompute=recompute)(
                hidden.requires_grad_(), target
            )
        assert not value.requires_grad


class Odd(nn.Module):
    """Two of its parameters share one gradient, and two layers share one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.inner, self.outer = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.outer.weight = self.inner.weight

    def forward(self, hidden):
        return self.outer(self.inner(hidden)) * (self.a + self.b).sum()


@both
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.05)]
)
def test_parameters_may_be_tied_and_may_share_a_gradient(dtype, tolerance, recompute):
    _, hidden, target = problem()
    generator, hidden, target = Odd().to(dtype), hidden.detach().to(dtype), target % 4
    params = list(generator.parameters())
    expected = gradients(F.cross_entropy(generator(hidden), target), params)
    for k in (1, 3):
        loss = chunked(generator, 2, k, recompute=recompute)
        found = gradients(loss(hidden, target), params)
        close(found, expected, rtol=tolerance, atol=tolerance)


@both
def test_losses_of_16_bits_are_added_as_float32(recompute):
    torch.manual_seed(0)
    generator, target = nn.Linear(16, 50).bfloat16(), torch.randint(50, (1024,))
    hidden, whole = torch.randn(1024, 16).bfloat16(), nn.Linear(16, 50)
    whole.load_state_dict(generator.state_dict())
    for reduction in ("mean", "sum"):
        criterion = nn.CrossEntropyLoss(reduction=reduction)
        expected = criterion(whole(hidden.float()), target)
        loss = chunked(generator, 2, 2, criterion, recompute=recompute)(hidden, target)
        close(loss, expected.bfloat16(), rtol=0.01, atol=0)
        [exact], [found] = (
            gradients(expected, [whole.weight]),
            gradients(loss, [generator.weight]),
        )
        assert found.dtype == torch.bfloat16
        assert (found.float() - exact).norm() / exact.norm() < 0.01


@both
@pytest.mark.parametrize("size", [2, 7])
def test_the_loss_may_depend_on_what_is_outside_and_on_its_target(size, recompute):
    generator, hidden, _ = problem()
    logarithm = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    teacher = torch.rand(7, 5, dtype=torch.float64, requires_grad=True)
    found = []
    for in_chunks in (True, False):
        temperature = logarithm.exp()
        temperature.register_hook(lambda grad: 3 * grad)  # called once

        def criterion(logits, target, temperature=temperature):
            return F.cross_entropy(logits * temperature + logarithm * logits**2, target)

        in_parts, soft = (
            chunked(generator, size, 1, criterion, len, recompute),
            teacher.softmax(-1),
        )
        loss = (
            in_parts(hidden, soft) if in_chunks else criterion(generator(hidden), soft)
        )
        loss = loss + temperature.square()  # the graph is used again
        found.append(gradients(loss, [hidden, logarithm, generator.weight, teacher]))
    close(*found)


class Scaled(nn.Module):
    """A criterion with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, logits, target):
        return F.cross_entropy(logits * self.scale, target)


@both
@pytest.mark.parametrize("k", [1, 2])
def test_hooks_of_parameters_are_called_as_often_as_in_backward(k, recompute):
    (generator, hidden, target), criterion = problem(), Scaled()
    tensors = [generator.weight, criterion.scale]
    expected = gradients(criterion(generator(hidden), target), tensors)
    for tensor in tensors:
        tensor.register_hook(lambda grad: 3 * grad)
    loss = chunked(generator, 2, k, criterion, len, recompute)(hidden, target)
    loss.backward(retain_graph=True)
    loss.backward()
    close([tensor.grad for tensor in tensors], [2 * 3 * grad for grad in expected])


def test_second_derivatives_need_recomputation():
    generator, hidden, target = problem()
    whole = F.cross_entropy(generator(hidden), target)
    with pytest.raises(
        RuntimeError, match="second derivatives only with recompute=True"
    ):
        torch.autograd.grad(
            chunked(generator)(hidden, target), hidden, create_graph=True
        )
    loss = chunked(generator, recompute=True)(hidden, target)
    pair = [
        torch.autograd.grad(end, hidden, create_graph=True)[0] for end in (loss, whole)
    ]
    close(*[gradients(grad.square().sum(), [generator.weight]) for grad in pair])


# Under autocast, a scaler and dropout.


class Inside(nn.Linear):
    def forward(self, hidden):
        with torch.autocast("cpu", torch.float16):
            return super().forward(hidden).float()


@pytest.mark.parametrize("where", ["weights", "torch.autocast", "autocast", "inside"])
def test_a_scale_reaches_float16_before_its_gradients_are_rounded(where):
    torch.manual_seed(0)
    generator = (Inside if where == "inside" else nn.Linear)(4, 20_000)
    hidden, target = torch.randn(1024, 4), torch.zeros(1024, dtype=torch.long)
    regions = {"torch.autocast": torch.autocast, "autocast": autocast}
    region = (
        regions[where]("cpu", torch.float16)
        if where in regions
        else torch.enable_grad()
    )
    if where == "weights":
        generator, hidden = generator.half(), hidden.half()
    hidden.requires_grad_()

    def criterion(logits, target):
        return F.cross_entropy(logits, target) / 20

    with region:
        value = chunked(generator, 256, 1, criterion, len)(hidden, target)
    for grad in gradients(value.float() * 2.0**12, [hidden, generator.weight]):
        # nearly all, where the scale comes too late
        assert (grad == 0).float().mean() < 0.05


@both
@pytest.mark.parametrize("region", [torch.autocast, autocast])
def test_chunks_in_bfloat16_agree_with_the_whole_and_backward_is_outside(
    region, recompute
):
    torch.manual_seed(0)
    generator, hidden, seen = nn.Linear(16, 50), torch.randn(64, 16), []
    target, weight = torch.randint(50, (64,)), [generator.weight, generator.bias]
    exact = gradients(F.cross_entropy(generator(hidden), target), weight)

    def watch(module, args, logits):
        logits.register_hook(lambda grad: seen.append(torch.is_autocast_enabled("cpu")))

    generator.register_forward_hook(watch)
    with warnings.catch_warnings(), region("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        value = chunked(generator, 8, 1, recompute=recompute)(hidden, target)
    for a, b in zip(gradients(value, weight), exact, strict=True):
        assert a.dtype == torch.float32 and (a - b).norm() / b.norm() < 0.02
    assert seen == [False] * 8


@both
def test_random_numbers_differ_between_chunks_and_agree_with_the_gradients(recompute):
    def criterion(logits, target):
        return logits.sum()

    criterion.reduction = "sum"
    hidden = torch.ones(64, 5, dtype=torch.float64, requires_grad=True)
    value = chunked(nn.Dropout(0.5), 8, 1, criterion, recompute=recompute)(
        hidden, torch.zeros(64)
    )
    value.backward()
    close(hidden.grad.sum(), value.detach())  # kept ones have 2 in both
    assert len({tuple(rows.flatten().tolist()) for rows in hidden.grad.split(8)}) > 1


@pytest.mark.parametrize(
    ("size", "hidden", "target", "words"),
    [
        (0, (7, 4), (7,), "chunk_size must be positive, not 0"),
        (2, (7, 4), (6,), r"hidden has shape \[7, 4\], and target \[6\]"),
        (2, (2, 3, 4), (6,), "with the same positions"),
        (2, (), (), r"hidden has shape \[\]"),
    ],
)
def test_what_does_not_fit_is_named(size, hidden, target, words):
    with pytest.raises(ValueError, match=words):
        chunked(nn.Linear(4, 5), size)(
            torch.zeros(hidden), torch.zeros(target, dtype=torch.long)
        )
