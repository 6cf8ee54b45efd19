"""LeNet by hand is torch's; on one device or many, the step is that of autograd.

In float64, unless it is said: kernels round differently, and nothing hangs on one.
"""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from helpers import distance
from torch import nn
from torch.nn import functional as F

import d2lpar
from d2lpar import get_params, init_params, lenet, loss, train, train_batch, training
from d2lpar.data import Minibatches
from d2lpar.training import naive_allreduce

CPU, LR = torch.device("cpu"), 1.0


def batch(rows, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(rows, 1, 28, 28, generator=generator, dtype=dtype)
    return X, torch.randint(10, (rows,), generator=generator)


def replicas(k, dtype=torch.float64):
    params = [p.to(dtype) for p in init_params(0.1, torch.Generator().manual_seed(1))]
    devices, _ = d2lpar.choose_devices(k)
    return [get_params(params, device) for device in devices], devices


def same(params, others):
    pairs = zip(params, others, strict=True)
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


def test_parameters_have_the_scale_and_the_channels_last():
    params = init_params(0.5)
    for W, bias in zip(params[::2], params[1::2], strict=True):
        assert abs(W.std() - 0.5) < 0.05 and abs(W.mean()) < 0.1 and not bias.any()
    assert [params[i].stride()[1] for i in (0, 2)] == [1, 1]


def as_torch_has_it(tensor):
    """A linear layer's weight is (out, in) in torch, and (in, out) in the book."""
    return tensor.T if tensor.dim() == 2 else tensor


@pytest.mark.parametrize("rows", [7, 0])
def test_lenet_and_its_gradients_equal_those_of_torch_nn(rows):
    params = [p.double().requires_grad_() for p in init_params(0.1)]
    X, y = batch(rows)
    net = nn.Sequential(
        *(nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)),
    ).double()
    values = map(as_torch_has_it, params)
    net.load_state_dict(dict(zip(net.state_dict(), values, strict=True)))
    torch.testing.assert_close(lenet(X, params), net(X))
    loss(lenet(X, params), y).sum().backward()
    F.cross_entropy(net(X), y, reduction="sum").backward()
    for mine, other in zip(params, net.parameters(), strict=True):
        torch.testing.assert_close(as_torch_has_it(mine.grad), other.grad)
    assert loss(lenet(X, params), y).shape == (rows,)


def test_get_params_gives_independent_copies_that_record_gradients():
    params = init_params()
    before = [p.clone() for p in params]
    copies = [get_params(params, CPU) for _ in range(2)]
    with torch.no_grad():
        for p in copies[0]:
            p.add_(1)
    assert all(p.requires_grad and p.is_leaf for copy in copies for p in copy)
    assert same(params, before) and same(copies[1], before)
    assert [p.stride() for p in copies[0]] == [p.stride() for p in params]


def test_shards_differ_by_at_most_a_row_and_lose_none():
    for rows, k in [(0, 2), (1, 3), (2, 8), (7, 1), (7, 3), (256, 8)]:
        X, y = batch(rows)
        X_shards, y_shards = d2lpar.split_batch(X, y, [CPU] * k)
        sizes = [len(shard) for shard in X_shards]
        assert sizes == [len(shard) for shard in y_shards] and len(sizes) == k
        assert max(sizes) - min(sizes) <= 1
        assert same([torch.cat(X_shards), torch.cat(y_shards)], [X, y])
    with d2lpar.count_bytes() as ledger:
        d2lpar.split_batch(*batch(6, torch.float32), [CPU] * 2)
    assert ledger.bytes == {("host", i): 3 * (28 * 28 * 4 + 8) for i in range(2)}


@pytest.mark.parametrize("allreduce", [naive_allreduce, d2lpar.ring_allreduce])
def test_steps_are_those_of_autograd_alone_on_any_number_of_devices(allreduce):
    for k in (1, 2, 3, 8):  # ragged shards, and at times fewer rows than devices
        device_params, devices = replicas(k)
        for seed, rows in enumerate([3, 21]):
            X, y = batch(rows, seed=seed)
            before = get_params(device_params[0], CPU)
            grads = torch.autograd.grad(loss(lenet(X, before), y).mean(), before)
            expected = [p - LR * g for p, g in zip(before, grads, strict=True)]
            assert distance(before, expected) > 1e-3  # the step does something
            with d2lpar.count_bytes() as ledger:
                total = train_batch(X, y, device_params, devices, LR, allreduce)
            for params in device_params:
                assert distance([p.cpu() for p in params], expected) < 1e-12
                assert same(params, device_params[0])
            torch.testing.assert_close(total.cpu(), loss(lenet(X, before), y).sum())
            assert not total.requires_grad
            if allreduce is naive_allreduce:  # gradients, and 8 bytes of loss
                sizes = [(ledger.sent(0), ledger.bytes[i, 0]) for i in range(1, k)]
                n = 129_068 * 8
                assert sizes == [((k - 1) * n, n + 8)] * (k - 1)


def test_accuracy_counts_every_example_once_on_its_own_device():
    device_params, devices = replicas(3, torch.float32)
    images = (batch(101)[0][:, 0] * 255).to(torch.uint8)
    labels = lenet(images.unsqueeze(1) / 255, device_params[0]).argmax(dim=1)
    labels[:30] = (labels[:30] + 1) % 10
    test_iter = Minibatches(images, labels, 20)  # the last has a single row
    assert d2lpar.accuracy(device_params, devices, test_iter) == pytest.approx(71 / 101)
    with torch.no_grad():
        device_params[0][-1][labels[0]] += 1e6  # this one always says the same
    assert 0.1 < d2lpar.accuracy(device_params, devices, test_iter) < 0.65


@pytest.fixture
def tiny_data(monkeypatch):
    """The first 500 training and 256 test images in place of all."""
    sets = zip(training.load_data_fashion_mnist(256, device=CPU), (500, 256))
    tensors = [(whole.images[:n], whole.labels[:n]) for whole, n in sets]

    def load(batch_size, seed, device):
        there = [[tensor.to(device) for tensor in pair] for pair in tensors]
        return [Minibatches(*pair, batch_size, seed) for pair in there]

    monkeypatch.setattr(training, "load_data_fashion_mnist", load)
    # the book's scale of 0.01 would need thousands of steps
    monkeypatch.setattr(training, "init_params", partial(init_params, 0.1))
    return load


def test_training_records_its_history_and_learns(tiny_data, capsys):
    allreduce = Mock(side_effect=naive_allreduce)
    run = train(3, 32, 0.2, num_epochs=6, allreduce=allreduce)
    assert len(run.loss) == len(run.accuracy) == len(run.seconds) == 6
    assert run.loss[0] == pytest.approx(2.303, abs=0.3)  # ln 10: as good as a guess
    assert run.loss[-1] < 1.6 and run.accuracy[-1] > 0.4 and min(run.seconds) > 0
    assert same(*run.device_params[:2]) and allreduce.called
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == d2lpar.choose_devices(3)[1] and len(lines) == 7
    assert lines[6].startswith(f"epoch 6: loss {run.loss[5]:.3f}, test accuracy ")


def test_the_seed_is_that_of_the_parameters_and_of_the_order(tiny_data):
    for k, seed in ((1, 3), (3, 3), (1, 0)):  # the same on any number of devices
        generator = torch.Generator().manual_seed(seed)
        params, total = get_params(init_params(0.1, generator), CPU), 0
        for X, y in tiny_data(250, seed, CPU)[0]:
            total += train_batch(X, y, [params], [CPU], LR)
        run = train(k, 250, LR, num_epochs=1, **({"seed": seed} if seed else {}))
        # in float32, and another order would change them by 0.2, and by 0.04
        assert distance([p.cpu() for p in run.device_params[0]], params) < 0.01
        assert run.loss == [pytest.approx(total.item() / 500, abs=0.001)]


def test_errors_name_what_does_not_fit():
    X, y = batch(6)
    for call, words in (
        (lambda: d2lpar.split_batch(X, y[:5], [CPU] * 2), "X has 6 rows, but y has 5"),
        (lambda: train_batch(X, y, replicas(2)[0], [CPU] * 3, LR), "2 replicas for 3"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
