"""SyncBatchNorm: k ranks compute what one device computes from all their rows."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from d2lpar import DistributedDataParallel, SyncBatchNorm, ranks
from d2lpar.ranks.launcher import launch

CHANNELS = 3


def rows_of(n, dtype=torch.float64, seed=0):
    """Channels with means 0, 2, 100 and deviations 1, 5, 0.1; and what comes back for the output.

    The last shows a variance that is computed as a difference of two large numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, CHANNELS, 4, 5, generator=generator, dtype=torch.float64)
    scale, shift = torch.tensor([1, 5, 0.1]), torch.tensor([0, 2, 100.0])
    X = X * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)
    grad = torch.randn(X.shape, generator=generator, dtype=torch.float64)
    return X.to(dtype), grad.to(dtype)


def state_of(layer):
    names = ("running_mean", "running_var", "num_batches_tracked")
    return [getattr(layer, name) for name in names if getattr(layer, name) is not None]


def make(cls, options, dtype=torch.float64):
    layer = cls(CHANNELS, **options).to(dtype)
    if layer.weight is not None:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([0.5, 2.0, -1.0]))
            layer.bias.copy_(torch.tensor([1.0, 0.0, 3.0]))
    return layer


def run(layer, batches):
    """The last output, its gradients, and the running statistics, after several batches."""
    for X, grad in batches:
        X = X.clone().requires_grad_()
        layer.zero_grad()
        y = layer(X)
        y.backward(grad)
    params = [] if layer.weight is None else [layer.weight.grad, layer.bias.grad]
    return y.detach(), X.grad, params, state_of(layer)


def in_rank(rank, world_size, counts, options, dtype, memory_format=None):
    batches = []
    for seed in range(3):
        X, grad = (t.split(counts)[rank] for t in rows_of(sum(counts), dtype, seed))
        if memory_format:
            X = X.contiguous(memory_format=memory_format)
        batches.append((X, grad))
    y, X_grad, params, state = run(make(SyncBatchNorm, options, dtype), batches)
    for grad in params:
        ranks.allreduce(grad)
    return y, X_grad, params, state


def largest_differences(counts, options, dtype=torch.float64, **more):
    results = launch(in_rank, len(counts), counts, options, dtype, timeout=60, **more)
    batches = [rows_of(sum(counts), torch.float64, seed) for seed in range(3)]
    whole = run(make(nn.BatchNorm2d, options), batches)
    joined = [torch.cat([r[i] for r in results]) for i in range(2)]
    differences = [
        (ours - theirs).abs().max().item() for ours, theirs in zip(joined, whole, strict=False)
    ]
    for _, _, params, state in results:
        pairs = zip(params + state, whole[2] + whole[3], strict=True)
        differences += [(ours - theirs).abs().max().item() for ours, theirs in pairs]
    return differences


OPTIONS = [
    {},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": 0.3, "eps": 1e-2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("counts", [(12,), (6, 6), (9, 3), (3, 3, 3, 3), (1, 7, 0, 4)], ids=str)
def test_as_on_one_device(counts, options):
    assert max(largest_differences(counts, options)) < 1e-9


def test_in_float32_the_channel_with_a_large_mean_keeps_its_digits():
    """By the mean of squares minus the square of the mean it would be 0.18 off."""
    differences = largest_differences((9, 3), {}, torch.float32)
    assert differences[0] < 1e-3
    assert differences[1] < 1e-2  # the gradients, times 1 / 0.1


def test_strides_do_not_matter():
    counts, options = (4, 4), {}
    result = launch(in_rank, 2, counts, options, torch.float64, torch.channels_last, timeout=60)
    plain = launch(in_rank, 2, counts, options, torch.float64, timeout=60)
    for ours, theirs in zip(result, plain, strict=True):
        assert torch.allclose(ours[0], theirs[0], rtol=0, atol=1e-12)


def each_alone(rank, world_size, counts):
    X, grad = (t.split(counts)[rank] for t in rows_of(sum(counts)))
    return run(make(nn.BatchNorm2d, {}), [(X, grad)])[0]


def test_control_a_batchnorm_on_each_rank_is_another_network():
    whole = run(make(nn.BatchNorm2d, {}), [rows_of(12)])[0]
    alone = torch.cat(launch(each_alone, 2, (6, 6), timeout=60))
    assert (alone - whole).abs().max() > 0.1


def in_ddp(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(CHANNELS, 4, 3), nn.BatchNorm2d(4), nn.Flatten()).double()
    X, _ = rows_of(8)
    whole = gradients(model, X)
    sync = SyncBatchNorm.convert_sync_batchnorm(model)
    wrapped = DistributedDataParallel(sync)
    ours = gradients(wrapped, X[4 * rank : 4 * rank + 4])
    return max((a - b).abs().max().item() for a, b in zip(ours, whole, strict=True))


def gradients(model, X):
    model.zero_grad()
    model(X).pow(3).mean().backward()
    return [param.grad.clone() for param in model.parameters()]


def test_inside_ddp_gradients_are_those_of_one_device():
    assert max(launch(in_ddp, 2, timeout=60)) < 1e-9


def weighted(rank, world_size):
    """Uneven rows: the loss is weighted, and the gradients are those of one device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    X, counts = torch.randn(12, 3, dtype=torch.float64), (9, 3)
    model(X).pow(2).mean().backward()
    whole = [param.grad.clone() for param in model.parameters()]
    sync = SyncBatchNorm.convert_sync_batchnorm(model)
    wrapped, own = DistributedDataParallel(sync), X.split(counts)[rank]
    wrapped.zero_grad()
    (wrapped(own).pow(2).mean() * len(own) * world_size / len(X)).backward()
    off = max(
        (p.grad - g).abs().max().item() for p, g in zip(sync.parameters(), whole, strict=True)
    )
    try:
        DistributedDataParallel(sync, weight="rows")
    except ValueError as error:
        return off, str(error)


def test_with_uneven_rows_the_loss_is_weighted_and_weight_rows_is_refused():
    for off, error in launch(weighted, 2, timeout=60):
        assert off < 1e-9
        assert "weight each rank's loss by rows * k / all rows" in error


def penalty(rank, world_size):
    """A gradient penalty: backward through backward."""
    X = rows_of(6)[0].split(3)[rank].clone().requires_grad_()
    y = SyncBatchNorm(CHANNELS, affine=False).double()(X)
    (grad,) = torch.autograd.grad(y.pow(3).sum(), X, create_graph=True)
    grad.pow(2).sum().backward()
    return X.grad


def test_backward_can_be_differentiated():
    X = rows_of(6)[0].requires_grad_()
    y = nn.BatchNorm2d(CHANNELS, affine=False).double()(X)
    (grad,) = torch.autograd.grad(y.pow(3).sum(), X, create_graph=True)
    grad.pow(2).sum().backward()
    joined = torch.cat(launch(penalty, 2, timeout=60))
    assert torch.allclose(joined, X.grad, rtol=1e-6, atol=1e-6 * X.grad.abs().max().item())


def evaluate_alone(rank, world_size):
    X, _ = rows_of(4)
    layer = SyncBatchNorm(CHANNELS).double().eval()
    return layer(X).sum().item() if rank == 0 else None


def test_in_evaluation_nothing_is_sent():
    assert launch(evaluate_alone, 2, timeout=20)[0] is not None


def of_16_bits(rank, world_size):
    X, _ = rows_of(4, torch.bfloat16)
    layer = SyncBatchNorm(CHANNELS)
    y = layer(X)
    exact = nn.BatchNorm2d(CHANNELS).double()(X.double())
    return y.dtype, layer.running_mean.dtype, (y.double() - exact).abs().max().item()


def test_16_bits_are_normalised_in_float32():
    dtype, statistics, off = launch(of_16_bits, 2, timeout=60)[0]
    assert (dtype, statistics) == (torch.bfloat16, torch.float32)
    assert off < 2e-2  # half a step between bfloat16 numbers from 4 to 8


def one_value(rank, world_size):
    errors = []
    for X in (torch.ones(1 - rank, 2), torch.ones(0, 2), torch.ones(3), torch.ones(4, 5)):
        try:
            SyncBatchNorm(2)(X)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_bad_inputs_are_refused_on_all_ranks():
    for errors in launch(one_value, 2, timeout=60):
        assert "more than one value per channel" in errors[0]
        assert errors[1] == errors[0]
        assert "shape (3,), and SyncBatchNorm takes (n, 2, ...)" in errors[2]
        assert "shape (4, 5)" in errors[3]


def groups(rank, world_size):
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    layer = SyncBatchNorm(1, momentum=1.0, process_group=pair)
    X = torch.tensor([[float(rank)], [rank + 1.0]], requires_grad=True)
    layer(X).pow(3).sum().backward()
    own = X.grad.flatten()
    model = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(1), pair)
    return layer.running_mean.item(), own, model.process_group is pair


def test_only_the_ranks_of_the_group_count():
    results = launch(groups, 4, timeout=60)
    assert [mean for mean, _, _ in results] == [1, 1, 3, 3]
    X = torch.tensor([[0.0], [1], [1], [2]], requires_grad=True)
    nn.BatchNorm1d(1)(X).pow(3).sum().backward()
    for pair in (results[:2], results[2:]):
        joined = torch.cat([own for _, own, _ in pair])
        assert torch.allclose(joined, X.grad.flatten(), atol=1e-4)
    assert all(kept for _, _, kept in results)


def test_without_a_process_group_and_in_evaluation_it_is_batchnorm():
    X, _ = rows_of(6, torch.float32)
    ours, torchs = make(SyncBatchNorm, {}, torch.float32), make(nn.BatchNorm2d, {}, torch.float32)
    assert torch.equal(ours(X), torchs(X))
    assert torch.equal(ours.eval()(X), torchs.eval()(X))


def test_conversion_takes_everything_over():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.BatchNorm2d(2, momentum=None)))
    model[1].append(nn.BatchNorm1d(2, eps=0.5, affine=False, track_running_stats=False).eval())
    model[1].append(model[1][0])  # the same layer again
    before = model[1][0]
    params = list(model.parameters())
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    first, second, third = model[1]
    assert first is third
    assert (second.eps, second.track_running_stats) == (0.5, False)
    assert first.num_batches_tracked is before.num_batches_tracked
    assert isinstance(first, SyncBatchNorm)
    assert (first.momentum, first.training, second.training) == (None, True, False)
    assert first.running_var is before.running_var
    assert (second.weight, second.affine, first.affine) == (None, False, True)
    assert [id(p) for p in model.parameters()] == [id(p) for p in params]
    alone = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3, dtype=torch.float64))
    assert isinstance(alone, SyncBatchNorm)
    assert alone.running_mean.dtype == torch.float64
    theirs = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3))
    assert type(SyncBatchNorm.convert_sync_batchnorm(theirs)) is SyncBatchNorm
    assert SyncBatchNorm(3, bias=False).bias is None
