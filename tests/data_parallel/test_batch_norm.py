"""SyncBatchNorm: k ranks compute what one device computes from all their rows."""

from itertools import accumulate, pairwise

import pytest
import torch
import torch.distributed as dist
from helpers import clones, close, distance, grads, on_ranks
from torch import nn

from d2lpar import DistributedDataParallel, SyncBatchNorm, ranks

OPTIONS = [
    {},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": 0.3, "eps": 1e-2},
]


def rows_of(n, seed=0):
    """Channels with means 0, 2, 100 and deviations 1, 5, 0.1; and what comes back for the output.

    The last shows a variance that is computed as a difference of two large numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    X, grad = torch.randn(2, n, 3, 4, 5, generator=generator, dtype=torch.float64)
    scale, shift = torch.tensor([1, 5, 0.1]), torch.tensor([0, 2, 100.0])
    return X * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1), grad


def make(kind, dtype=torch.float64, **options):
    layer = kind(3, **options).to(dtype)
    if layer.weight is not None:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([0.5, 2.0, -1.0]))
            layer.bias.copy_(torch.tensor([1.0, 0.0, 3.0]))
    return layer


def runs(layer, counts, own=slice(None), change=lambda X: X):
    """After three batches: the last output and its gradient, [of parameters], [statistics]."""
    for seed in range(3):
        X, grad = (change(tensor[own]) for tensor in rows_of(sum(counts), seed))
        layer.zero_grad()
        y = layer(X.requires_grad_())
        y.backward(grad)
    return y.detach(), X.grad, grads(layer), clones(layer.buffers())


def compare(rank, k, counts, options, change=lambda X: X, dtype=torch.float64):
    """Ours on this rank's rows, and torch's BatchNorm on all rows, of which it takes the same."""
    begin, end = list(pairwise([0, *accumulate(counts)]))[rank]
    ours = runs(make(SyncBatchNorm, dtype, **options), counts, slice(begin, end), change)
    for grad in ours[2]:
        ranks.allreduce(grad)
    y, X_grad, *others = runs(make(nn.BatchNorm2d, **options), counts)
    return ours, (y[begin:end], X_grad[begin:end], *others)


def as_on_one_device(rank, k):
    def channels_last(X):
        return X.contiguous(memory_format=torch.channels_last)

    for counts in ((6, 3, 0, 1), (3, 3, 3, 3)):
        for options in OPTIONS:
            torch.testing.assert_close(*compare(rank, k, counts, options), rtol=1e-9, atol=1e-9)
    found = compare(rank, k, (3, 3, 3, 3), {}, channels_last)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def keeps_the_digits_of_a_large_mean(rank, k):
    """By the mean of squares minus the square of the mean, float32 would be 0.18 off."""
    ours, theirs = compare(rank, k, (6, 3, 2, 1), {}, torch.Tensor.float, torch.float32)
    assert distance(ours[:1], theirs[:1]) < 1e-3
    assert distance(ours[1:2], theirs[1:2]) < 1e-2  # the gradients, times 1 / 0.1


def control_each_alone_is_another_network(rank, k):
    X, _ = rows_of(12)
    own = slice(3 * rank, 3 * rank + 3)
    assert distance([make(nn.BatchNorm2d)(X[own])], [make(nn.BatchNorm2d)(X)[own]]) > 0.1


def in_ddp(rank, k):
    """Uneven rows: the loss is weighted, and the gradients are those of one device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()).double()
    X, counts = rows_of(9)[0], (4, 2, 2, 1)
    model(X).pow(3).mean().backward()
    whole, own = clones(grads(model)), X.split(counts)[rank]
    model.zero_grad()
    wrapped = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(model))
    (wrapped(own).pow(3).mean() * len(own) * k / len(X)).backward()
    close(grads(model), whole, rtol=1e-8, atol=1e-9)


def backward_can_be_differentiated(rank, k):
    """A gradient penalty: backward through backward."""

    def penalty(layer, X):
        X.requires_grad_()
        (grad,) = torch.autograd.grad(layer(X).pow(3).sum(), X, create_graph=True)
        grad.pow(2).sum().backward()
        return X.grad

    X, own = rows_of(8)[0], slice(2 * rank, 2 * rank + 2)
    ours = penalty(SyncBatchNorm(3, affine=False).double(), X[own].clone())
    theirs = penalty(nn.BatchNorm2d(3, affine=False).double(), X)
    torch.testing.assert_close(ours, theirs[own], rtol=1e-6, atol=1e-6 * theirs.abs().max().item())


def nothing_is_sent_in_evaluation(rank, k):
    if rank == 0:
        X, _ = rows_of(4)
        assert torch.equal(make(SyncBatchNorm).eval()(X), make(nn.BatchNorm2d).eval()(X))


def sixteen_bits(rank, k):
    X = rows_of(4)[0].bfloat16()
    layer = SyncBatchNorm(3)
    y, exact = layer(X), nn.BatchNorm2d(3).double()(X.double())
    assert (y.dtype, layer.running_mean.dtype) == (torch.bfloat16, torch.float32)
    assert distance([y], [exact]) < 2e-2  # half a step between bfloat16 numbers from 4 to 8


def bad_inputs(rank, k):
    for X, words in [
        (torch.ones(int(rank == 0), 2), "more than one value per channel"),
        (torch.ones(3), r"shape \(3,\), and SyncBatchNorm takes \(n, 2, \.\.\.\)"),
        (torch.ones(4, 5), r"shape \(4, 5\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            SyncBatchNorm(2)(X)


def only_ranks_of_the_group_count(rank, k):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    X = torch.tensor([[0.0], [1], [1], [2]], requires_grad=True)
    nn.BatchNorm1d(1)(X).pow(3).sum().backward()
    layer = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(1, momentum=1.0), pairs[rank // 2])
    own = torch.tensor([[float(rank)], [rank + 1.0]], requires_grad=True)
    layer(own).pow(3).sum().backward()
    assert layer.running_mean.item() == [1, 1, 3, 3][rank]
    begin = 2 * (rank % 2)
    torch.testing.assert_close(own.grad, X.grad[begin : begin + 2], rtol=0, atol=1e-4)


test_on_four_ranks = on_ranks(
    4,
    [
        as_on_one_device,
        keeps_the_digits_of_a_large_mean,
        control_each_alone_is_another_network,
        in_ddp,
        backward_can_be_differentiated,
        nothing_is_sent_in_evaluation,
        sixteen_bits,
        bad_inputs,
        only_ranks_of_the_group_count,
    ],
)


def test_without_a_process_group_it_is_batchnorm():
    X, _ = rows_of(6)
    assert torch.equal(make(SyncBatchNorm)(X), make(nn.BatchNorm2d)(X))


def test_conversion_takes_everything_over():
    norm = nn.BatchNorm2d(2, momentum=None)
    other = nn.BatchNorm1d(2, eps=0.5, affine=False, track_running_stats=False).eval()
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(norm, other, norm))
    params, buffers = list(model.parameters()), list(model.buffers())
    assert SyncBatchNorm.convert_sync_batchnorm(model) is model
    first, second, third = model[1]
    assert first is third and isinstance(first, SyncBatchNorm)
    assert (first.momentum, first.affine, first.training) == (None, True, True)
    assert (second.eps, second.affine, second.weight, second.training) == (0.5, False, None, False)
    assert [id(p) for p in model.parameters()] == [id(p) for p in params]
    assert [id(b) for b in model.buffers()] == [id(b) for b in buffers]
    for alone in (nn.BatchNorm1d(3, dtype=torch.float64), nn.SyncBatchNorm(3)):
        assert type(SyncBatchNorm.convert_sync_batchnorm(alone)) is SyncBatchNorm
    assert SyncBatchNorm(3, bias=False).bias is None
