"""SyncBatchNorm: k ranks compute what one device computes from all their rows."""

import pytest
import torch
import torch.distributed as dist
from helpers import attempt, clones, close, distance, grads, in_ranks, on_ranks, randn
from torch import nn

from d2lpar import DistributedDataParallel, SyncBatchNorm, ranks

OPTIONS = [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]
COUNTS = 6, 3, 0, 1  # the ranks' rows, of 10
convert = SyncBatchNorm.convert_sync_batchnorm


def rows_of(n, seed=0):
    """Channels with means 0, 2, 100, deviations 1, 5, 0.1; and weights."""
    X, weights = randn(2, n, 3, 4, 5, seed=seed)
    scale, shift = torch.tensor([[1, 5, 0.1], [0, 2, 100]]).view(2, -1, 1, 1)
    return X * scale + shift, weights


def make(kind, **options):
    layer = kind(3, **options).double()
    if layer.affine:
        layer.weight.data, layer.bias.data = randn(2, 3)
    return layer


def runs(layer, counts=(10,), rank=0):
    """Three batches, with a gradient penalty: the last one's tensors, and the layer's.

    y, its gradient by X, that of the whole by X, [those by parameters], [statistics].
    """
    for seed in range(3):
        X, weights = (tensor.split(counts)[rank] for tensor in rows_of(10, seed))
        layer.zero_grad()
        y = layer(X.requires_grad_())
        (grad,) = torch.autograd.grad(y, X, weights, create_graph=True)
        ((y * weights).sum() + grad.square().sum()).backward()
    return *clones([y, grad, X.grad]), grads(layer), clones(layer.buffers())


def uneven_rows_are_one_device(rank, k):
    for options in [*OPTIONS, {"momentum": 0.3, "eps": 1e-2}]:
        ours = runs(make(SyncBatchNorm, **options), COUNTS, rank)
        for grad in ours[3]:
            ranks.allreduce(grad)
        *theirs, sums, buffers = runs(make(nn.BatchNorm2d, **options))
        theirs = [tensor.split(COUNTS)[rank] for tensor in theirs]
        close(ours, (*theirs, sums, buffers), rtol=1e-9, atol=1e-9)
    alone = runs(make(nn.BatchNorm2d, **options), COUNTS)[:1]  # a control
    assert rank != 0 or distance(alone, theirs[:1]) > 0.1


def the_digits_of_a_large_mean_are_kept(rank, k):
    """By the mean of squares minus the mean's square, float32 would be 0.18 off."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        X, layer = rows_of(10)[0].to(dtype), SyncBatchNorm(3)
        y, exact = layer(X.split(COUNTS)[rank]), nn.BatchNorm2d(3).double()(X.double())
        assert (y.dtype, layer.running_mean.dtype) == (dtype, torch.float32)
        rtol = torch.finfo(dtype).eps
        close(y.double(), exact.split(COUNTS)[rank], rtol=rtol, atol=1e-3)


def only_ranks_of_the_group_count(rank, k):
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    *ours, _, buffers = runs(make(SyncBatchNorm, process_group=group), COUNTS, rank)
    *theirs, _, expected = runs(make(nn.BatchNorm2d), (9, 1), rank // 2)
    theirs = [tensor.split(COUNTS[rank // 2 * 2 :][:2])[rank % 2] for tensor in theirs]
    close((ours, buffers), (theirs, expected), rtol=1e-9, atol=1e-9)


def alone_or_in_evaluation_it_is_batchnorm(rank, k):
    group = [dist.new_group([each]) for each in range(k)][rank]
    layer, theirs = make(SyncBatchNorm, process_group=group), make(nn.BatchNorm2d)
    close(runs(layer), runs(theirs), rtol=0, atol=0)
    layer.process_group = None
    if rank == 0:  # nothing is sent: the others do not take part
        close(runs(layer.eval()), runs(theirs.eval()), rtol=0, atol=0)


def what_does_not_fit_is_an_error(rank, k):
    for X, words in (
        (torch.ones(3), "X is [3], not (n, 2, …)"),
        (torch.ones(4, 5), "X is [4, 5], not (n, 2, …)"),
        (torch.ones(int(rank == 0), 2), "one value per channel has no variance"),
    ):
        kind, text, *_ = attempt(SyncBatchNorm(2), X)
        assert kind == "ValueError" and text.startswith(words), text


CHECKS = [uneven_rows_are_one_device, the_digits_of_a_large_mean_are_kept]
CHECKS += [only_ranks_of_the_group_count, alone_or_in_evaluation_it_is_batchnorm]
CHECKS += [what_does_not_fit_is_an_error]
test_on_four_ranks = on_ranks(4, CHECKS)


@pytest.mark.parametrize(("k", "counts"), [(2, (5, 5)), (4, (4, 2, 3, 1))])
@in_ranks()
def test_in_ddp_ranks_have_the_gradients_of_one_device(rank, k, counts):
    X, found = rows_of(10)[0], []
    for own, share in ((X.split(counts)[rank], counts[rank] * k / 10), (X, 1)):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(24, 2)
        layers[1].bias = None
        model = net = nn.Sequential(*layers).double()
        if own is not X:
            net = DistributedDataParallel(convert(model))
        for _ in range(2):
            (net(own).pow(3).mean() * share).backward()
        found.append((grads(model), [*model.buffers()]))
    close(*found, rtol=1e-8, atol=1e-8)


def test_without_a_process_group_it_is_batchnorm():
    close(runs(make(SyncBatchNorm)), runs(make(nn.BatchNorm2d)), rtol=0, atol=0)


def test_conversion_keeps_tensors_and_attributes():
    norm = nn.BatchNorm2d(2, momentum=None)
    other = nn.BatchNorm1d(2, eps=0.5, affine=False, track_running_stats=False).eval()
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(norm, other, norm))
    tensors = list(map(id, [*model.parameters(), *model.buffers()]))
    attributes = [vars(layer) | {"process_group": "a group"} for layer in model[1]]
    assert convert(model, "a group") is model
    assert [type(layer) for layer in model[1]] == [SyncBatchNorm] * 3
    assert [vars(layer) for layer in model[1]] == attributes
    assert list(map(id, [*model.parameters(), *model.buffers()])) == tensors
    assert type(convert(nn.BatchNorm3d(3))) is SyncBatchNorm
