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
    """Channels with means 0, 2, 100, deviations 1, 5, 0.1; and the output's gradient.

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


def runs(layer, counts, own=slice(None), dtype=torch.float64):
    """After three batches: output, input's gradient, [of parameters], [statistics]."""
    for seed in range(3):
        X, grad = (tensor[own].to(dtype) for tensor in rows_of(sum(counts), seed))
        layer.zero_grad()
        y = layer(X.requires_grad_())
        y.backward(grad)
    return y.detach(), X.grad, grads(layer), clones(layer.buffers())


def compare(rank, counts, options, dtype=torch.float64):
    """Ours on this rank's rows; and the same rows of torch's BatchNorm on all rows."""
    begin, end = list(pairwise([0, *accumulate(counts)]))[rank]
    ours = runs(make(SyncBatchNorm, dtype, **options), counts, slice(begin, end), dtype)
    for grad in ours[2]:
        ranks.allreduce(grad)
    y, X_grad, *others = runs(make(nn.BatchNorm2d, **options), counts)
    return ours, (y[begin:end], X_grad[begin:end], *others)


def as_on_one_device(rank, k):
    for options in OPTIONS:
        found = compare(rank, (6, 3, 0, 1), options)
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def keeps_the_digits_of_a_large_mean(rank, k):
    """By the mean of squares minus the mean's square, float32 would be 0.18 off."""
    ours, theirs = compare(rank, (6, 3, 2, 1), {}, torch.float32)
    assert distance(ours[:1], theirs[:1]) < 1e-3
    assert distance(ours[1:2], theirs[1:2]) < 1e-2  # the gradients, times 1 / 0.1


def control_each_alone_is_another_network(rank, k):
    X, _ = rows_of(12)
    own = slice(3 * rank, 3 * rank + 3)
    assert (
        distance([make(nn.BatchNorm2d)(X[own])], [make(nn.BatchNorm2d)(X)[own]]) > 0.1
    )


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


def a_gradient_penalty_and_evaluation(rank, k):

    def penalty(layer, X):
        X.requires_grad_()
        (grad,) = torch.autograd.grad(layer(X).pow(3).sum(), X, create_graph=True)
        grad.pow(2).sum().backward()
        return X.grad

    if rank == 0:  # in evaluation nothing is sent
        X, _ = rows_of(4)
        assert torch.equal(
            make(SyncBatchNorm).eval()(X), make(nn.BatchNorm2d).eval()(X)
        )
    X, own = rows_of(8)[0], slice(2 * rank, 2 * rank + 2)
    ours = penalty(SyncBatchNorm(3, affine=False).double(), X[own].clone())
    theirs = penalty(nn.BatchNorm2d(3, affine=False).double(), X)
    torch.testing.assert_close(
        ours, theirs[own], rtol=1e-6, atol=1e-6 * theirs.abs().max().item()
    )


def sixteen_bits(rank, k):
    X = rows_of(4)[0].bfloat16()
    layer = SyncBatchNorm(3)
    y, exact = layer(X), nn.BatchNorm2d(3).double()(X.double())
    assert (y.dtype, layer.running_mean.dtype) == (torch.bfloat16, torch.float32)
    # half a step between bfloat16 numbers from 4 to 8
    assert distance([y], [exact]) < 2e-2


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
    layer = SyncBatchNorm.convert_sync_batchnorm(
        nn.BatchNorm1d(1, momentum=1.0), pairs[rank // 2]
    )
    layer(torch.tensor([[float(rank)], [rank + 1.0]])).pow(3).sum().backward()
    assert layer.running_mean.item() == [1, 1, 3, 3][rank]
    mine = layer.weight.grad.clone()
    ranks.allreduce(mine, group=pairs[rank // 2])
    theirs = nn.BatchNorm1d(1)
    theirs(torch.tensor([[0.0], [1], [1], [2]])).pow(3).sum().backward()
    torch.testing.assert_close(mine, theirs.weight.grad)


test_on_four_ranks = on_ranks(
    4,
    [
        as_on_one_device,
        keeps_the_digits_of_a_large_mean,
        control_each_alone_is_another_network,
        in_ddp,
        a_gradient_penalty_and_evaluation,
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
    tensors = list(map(id, [*model.parameters(), *model.buffers()]))
    attributes = [vars(layer) | {"process_group": None} for layer in model[1]]
    assert SyncBatchNorm.convert_sync_batchnorm(model) is model
    assert {type(layer) for layer in model[1]} == {SyncBatchNorm} and model[1][
        0
    ] is norm
    assert [vars(layer) for layer in model[1]] == attributes
    assert list(map(id, [*model.parameters(), *model.buffers()])) == tensors
    for alone in (nn.BatchNorm1d(3, dtype=torch.float64), nn.SyncBatchNorm(3)):
        assert type(SyncBatchNorm.convert_sync_batchnorm(alone)) is SyncBatchNorm
    assert SyncBatchNorm(3, bias=False).bias is None
