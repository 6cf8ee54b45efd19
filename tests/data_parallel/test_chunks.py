"""Gradients that a chunked loss computes in forward are those that backward would compute.

That all criteria and sizes are right in both forms: test_parallel_loss.
"""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from d2lpar import ChunkedLoss, autocast

CPU = torch.device("cpu")
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
both = pytest.mark.parametrize("recompute", [False, True])


def problem(rows=7, classes=5, dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(rows, 4, dtype=dtype).requires_grad_()
    return nn.Linear(4, classes).to(dtype), hidden, torch.randint(classes, (rows,))


def gradients(loss, tensors):
    return torch.autograd.grad(loss, tensors, allow_unused=True)


class Counted(nn.Linear):
    calls = 0

    def forward(self, hidden):
        self.calls += 1
        return super().forward(hidden)


@pytest.mark.parametrize(("recompute", "calls"), [(False, 4), (True, 8)])
def test_logits_are_computed_once_or_twice(recompute, calls):
    generator, (_, hidden, target) = Counted(4, 5).double(), problem()
    ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU], 2, recompute=recompute)(
        hidden, target
    ).backward()
    assert generator.calls == calls


@both
def test_a_later_factor_reaches_all_gradients(recompute):
    generator, hidden, target = problem()
    tensors = [hidden, *generator.parameters()]
    in_chunks = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU] * 2, 2, recompute=recompute)
    expected = gradients(-3 * F.cross_entropy(generator(hidden), target), tensors)
    close(gradients(-3 * in_chunks(hidden, target), tensors), expected)


@both
@pytest.mark.parametrize("kept", ["hidden", "weight", "nothing"])
def test_what_is_frozen_gets_no_gradient(kept, recompute):
    generator, hidden, target = problem()
    expected = gradients(
        F.cross_entropy(generator(hidden), target), [hidden, *generator.parameters()]
    )
    hidden = hidden.detach().requires_grad_(kept == "hidden")
    generator.bias.requires_grad_(False)
    generator.weight.requires_grad_(kept == "weight")
    loss = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU], 3, recompute=recompute)
    value = loss(hidden, target)
    assert value.requires_grad == (kept != "nothing")
    if kept != "nothing":
        value.backward()
    found = {"hidden": hidden.grad, "weight": generator.weight.grad}
    assert generator.bias.grad is None
    for name, wanted in zip(found, expected, strict=False):
        if name == kept:
            close(found[name], wanted)
        else:
            assert found[name] is None


@both
def test_without_gradients_there_is_only_a_value(recompute):
    generator, hidden, target = problem()
    loss = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU] * 2, 2, recompute=recompute)
    with torch.no_grad():
        value = loss(hidden, target)
    assert not value.requires_grad
    close(value, F.cross_entropy(generator(hidden), target).detach())
    with torch.inference_mode():
        close(loss(hidden, target).item(), value.item())


class Choosy(nn.Module):
    """Uses one weight for a chunk that begins with a positive number, else another one."""

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(4, 5)]).double()

    def forward(self, hidden):
        return self.ways[int(hidden[0, 0] > 0)](hidden)


@both
@pytest.mark.parametrize("k", [1, 2])
def test_a_parameter_may_be_used_by_some_chunks_or_by_none(k, recompute):
    _, hidden, target = problem(8)
    generator, criterion = Choosy(), nn.CrossEntropyLoss(reduction="sum")
    tensors = [hidden, *generator.parameters()]
    chunks = zip(hidden.split(1), target.split(1), strict=True)
    expected = gradients(sum(criterion(generator(h), t) for h, t in chunks), tensors)
    loss = ChunkedLoss(generator, criterion, [CPU] * k, 1, recompute=recompute)(hidden, target)
    found = gradients(loss, tensors)
    assert expected[1] is not None and expected[3] is not None and expected[5] is None
    for a, b in zip(found, expected, strict=True):
        if b is not None:
            close(a, b)
        elif k == 1:  # a copy on another device has a gradient of zero
            assert a is None


class Aliased(nn.Module):
    """Its parameters have one gradient, and that is an expanded number."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(5).double()), nn.Parameter(torch.ones(5).double())

    def forward(self, hidden):
        return (self.a + self.b).sum() * hidden


@both
@pytest.mark.parametrize("k", [1, 2])
def test_parameters_may_share_a_gradient(k, recompute):
    generator, hidden = Aliased(), torch.rand(7, 4, dtype=torch.float64)
    target = torch.zeros(7, dtype=torch.long)
    params = [generator.a, generator.b]
    expected = gradients(F.cross_entropy(generator(hidden), target), params)
    loss = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU] * k, 2, recompute=recompute)
    close(gradients(loss(hidden, target), params), expected)


@both
def test_what_the_criterion_holds_gets_its_gradient(recompute):
    generator, hidden, target = problem()
    temperature = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def criterion(logits, target):
        return F.cross_entropy(logits * temperature.exp(), target)

    tensors = [hidden, temperature, *generator.parameters()]
    loss = ChunkedLoss(generator, criterion, [CPU], 2, count=len, recompute=recompute)
    expected = gradients(criterion(generator(hidden), target), tensors)
    close(gradients(loss(hidden, target), tensors), expected)


@both
@pytest.mark.parametrize("size", [2, 7])
def test_the_criterion_may_take_something_from_a_graph_outside(size, recompute):
    generator, hidden, target = problem()
    logarithm = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def gradient(in_chunks):
        temperature = logarithm.exp()

        def criterion(logits, target):
            return F.cross_entropy(logits * temperature, target)

        def in_one(hidden, target):
            return criterion(generator(hidden), target)

        chunked = ChunkedLoss(generator, criterion, [CPU], size, count=len, recompute=recompute)
        loss = (chunked if in_chunks else in_one)(hidden, target)
        return gradients(loss + temperature.square(), [logarithm])  # the graph is used again

    close(gradient(True), gradient(False))


class Held(torch.autograd.Function):
    """Calls what it keeps as autograd calls a leaf, and has no gradient for its second input."""

    @staticmethod
    def forward(ctx, X, unused):
        ctx.variable = unused
        return X * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3, None


@both
def test_a_function_in_the_generator_may_keep_anything_and_leave_out_gradients(recompute):
    linear, hidden, target = problem()

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.unused = linear, nn.Parameter(torch.ones(3))

        def forward(self, hidden):
            return self.linear(Held.apply(hidden, self.unused))

    generator = Generator()
    tensors = [hidden, *linear.parameters()]
    expected = gradients(F.cross_entropy(generator(hidden), target), tensors)
    loss = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU], 3, recompute=recompute)
    value = loss(hidden, target)
    close(gradients(value, tensors), expected)
    loss(hidden, target).backward()
    assert generator.unused.grad is None


@both
def test_a_hook_on_what_a_criterion_holds_is_called_once(recompute):
    generator, hidden, target = problem()
    scale = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)

    def criterion(logits, target):
        return F.cross_entropy(logits * scale, target)

    [expected] = gradients(criterion(generator(hidden), target), [scale])
    scale.register_hook(lambda grad: 3 * grad)
    ChunkedLoss(generator, criterion, [CPU], 3, count=len, recompute=recompute)(
        hidden, target
    ).backward()
    close(scale.grad, 3 * expected)


@pytest.mark.parametrize(("recompute", "calls"), [(False, 2 * 8), (True, 3 * 8)])
def test_inside_a_checkpoint_the_work_grows_with_the_chunks_only(recompute, calls):
    generator, (_, hidden, target) = Counted(4, 5).double(), problem(8)
    loss = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU], 1, recompute=recompute)
    checkpoint(loss, hidden, target, use_reentrant=False).backward()
    assert generator.calls <= calls


@both
def test_an_error_of_the_generator_stays_as_it_is(recompute):
    _, hidden, target = problem()
    loss = ChunkedLoss(
        nn.Linear(3, 5).double(), nn.CrossEntropyLoss(), [CPU], 2, recompute=recompute
    )
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        loss(hidden, target)


def test_second_derivatives_need_recomputation():
    generator, hidden, target = problem()
    [expected] = torch.autograd.grad(
        F.cross_entropy(generator(hidden), target), hidden, create_graph=True
    )
    loss = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU], 2)(hidden, target)
    with pytest.raises(RuntimeError, match="second derivatives only with recompute=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    loss = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU], 2, recompute=True)(hidden, target)
    [found] = torch.autograd.grad(loss, hidden, create_graph=True)
    weight = [generator.weight]
    close(gradients(found.square().sum(), weight), gradients(expected.square().sum(), weight))


@both
def test_backward_may_be_repeated_only_where_torch_allows_it(recompute):
    generator, hidden, target = problem()
    loss = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU], 2, recompute=recompute)
    value = loss(hidden, target)
    value.backward(retain_graph=True)
    once = generator.weight.grad.clone()
    value.backward(retain_graph=True)
    close(generator.weight.grad, 2 * once)
    value.backward()
    close(generator.weight.grad, 3 * once)
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


@both
def test_hooks_of_parameters_are_called_as_often_as_in_backward(recompute):
    generator, hidden, target = problem()
    weight = [generator.weight]
    [expected] = gradients(F.cross_entropy(generator(hidden), target), weight)
    generator.weight.register_hook(lambda grad: 3 * grad)
    loss = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU], 2, recompute=recompute)
    loss(hidden, target).backward()
    close(generator.weight.grad, 3 * expected)


@both
def test_a_target_may_require_gradients(recompute):
    generator, hidden, _ = problem()
    teacher = torch.rand(7, 5, dtype=torch.float64, requires_grad=True)
    tensors = [teacher, hidden, generator.weight]
    expected = gradients(F.cross_entropy(generator(hidden), teacher.softmax(-1)), tensors)
    loss = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU] * 2, 2, recompute=recompute)
    close(gradients(loss(hidden, teacher.softmax(-1)), tensors), expected)


class Cast(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden.to(self.weight.dtype))


class Inside(Cast):
    def forward(self, hidden):
        with torch.autocast("cpu", torch.float16):
            return super().forward(hidden).float()


@pytest.mark.parametrize("where", ["weights", "hidden", "torch.autocast", "autocast", "inside"])
def test_a_scale_reaches_float16_before_its_gradients_are_rounded(where):
    torch.manual_seed(0)
    generator, hidden = Cast(4, 20_000), torch.randn(1024, 4)
    target, region = torch.zeros(1024, dtype=torch.long), torch.enable_grad()
    if where == "inside":
        generator = Inside(4, 20_000)
    elif where == "weights":
        generator.half()
    elif where == "hidden":
        with torch.no_grad():
            generator.weight *= 1e-4
        hidden = hidden.half()
    else:
        region = {"torch.autocast": torch.autocast, "autocast": autocast}[where](
            "cpu", torch.float16
        )
    hidden.requires_grad_()

    def criterion(logits, target):
        return F.cross_entropy(logits, target) / 20

    with region:
        value = ChunkedLoss(generator, criterion, [CPU], 256, count=len)(hidden, target)
    grads = gradients(value.float() * 2.0**12, [hidden, generator.weight])
    zeros = [(grad == 0).float().mean() for grad in grads]
    assert max(zeros) < 0.05  # nearly all, where the scale comes too late


@both
@pytest.mark.parametrize("region", [torch.autocast, autocast])
def test_chunks_in_bfloat16_agree_with_the_whole(region, recompute):
    torch.manual_seed(0)
    generator, hidden = nn.Linear(16, 50), torch.randn(64, 16)
    target, weight = torch.randint(50, (64,)), [generator.weight, generator.bias]
    exact = gradients(F.cross_entropy(generator(hidden), target), weight)
    loss = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU] * 2, 8, recompute=recompute)
    with warnings.catch_warnings(), region("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        value = loss(hidden, target)
    for a, b in zip(gradients(value, weight), exact, strict=True):
        assert a.dtype == torch.float32 and (a - b).norm() / b.norm() < 0.02


@both
def test_the_loss_may_be_in_a_layer_that_is_checkpointed(recompute):
    generator, hidden, target = problem()
    tensors = [hidden, *generator.parameters()]
    loss = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU] * 2, 2, recompute=recompute)
    expected = gradients(F.cross_entropy(generator(hidden.tanh()), target), tensors)
    value = checkpoint(lambda hidden: loss(hidden.tanh(), target), hidden, use_reentrant=False)
    close(gradients(value, tensors), expected)


@both
def test_random_numbers_differ_between_chunks_and_agree_with_the_gradients(recompute):
    class Dropped(nn.Module):
        def forward(self, hidden):
            return F.dropout(hidden, 0.5)

    hidden = torch.ones(64, 5, dtype=torch.float64, requires_grad=True)

    def criterion(logits, target):
        return logits.sum()

    criterion.reduction = "sum"
    loss = ChunkedLoss(Dropped(), criterion, [CPU], 8, recompute=recompute)
    value = loss(hidden, torch.zeros(64))
    value.backward()
    close(hidden.grad.sum(), value.detach())  # kept ones have 2 in both
    assert len({tuple(rows.flatten().tolist()) for rows in hidden.grad.split(8)}) > 1


def test_gradients_are_computed_outside_autocast_as_in_backward():
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, X):
            return X.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch.is_autocast_enabled("cpu"))
            return grad

    generator, hidden, target = problem(dtype=torch.float32)
    watched = nn.Sequential(generator)
    watched.register_forward_hook(lambda module, args, logits: Watch.apply(logits))
    with torch.autocast("cpu", torch.bfloat16):
        ChunkedLoss(watched, nn.CrossEntropyLoss(), [CPU], 4)(hidden, target)
    assert seen == [False, False]
