"""Chapter 02. LeNet from raw tensors, trained with a replica and a shard per device.

Names and network are those of Dive into Deep Learning, section "Training on Multiple
GPUs"; LeNet is from LeCun et al., "Gradient-based learning applied to document
recognition" (1998).
"""

import time
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from .data import load_data_fashion_mnist
from .devices import choose_devices, to_device


def init_params(scale=0.01, generator=None):
    """Return ``[W1, b1, …, W4, b4]``: weights N(0, scale²), biases zero."""
    shapes = (20, 1, 3, 3), (50, 20, 5, 5), (800, 128), (128, 10)
    weights = [torch.randn(shape, generator=generator) * scale for shape in shapes]
    W1, W2, W3, W4 = weights
    W1, W2 = (W.to(memory_format=torch.channels_last) for W in (W1, W2))  # faster
    b1, b2, b3, b4 = torch.zeros(20), torch.zeros(50), torch.zeros(128), torch.zeros(10)
    return [W1, b1, W2, b2, W3, b3, W4, b4]


def lenet(X, params):
    """Return the logits, of shape (n, 10), of images ``X`` of shape (n, 1, 28, 28)."""
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    X = X[..., :26, :26]  # the second pooling drops what the other pixels give
    h1 = F.avg_pool2d(F.conv2d(X, W1, b1).relu(), 2)  # (n, 20, 12, 12)
    h2 = F.avg_pool2d(F.conv2d(h1, W2, b2).relu(), 2)  # (n, 50, 4, 4)
    h3 = torch.addmm(b3, h2.flatten(1), W3).relu()  # h2 @ W3 + b3, (n, 128)
    return torch.addmm(b4, h3, W4)  # (n, 10)


def loss(y_hat, y):
    """Return the cross-entropy of each example, (n,): neither summed nor averaged."""
    return F.cross_entropy(y_hat, y, reduction="none")


@torch.no_grad()
def sgd(params, lr, batch_size):
    """Subtract lr / batch_size times the summed gradient in place, then clear it."""
    for param in params:
        param.sub_(param.grad, alpha=lr / batch_size)
        param.grad = None


def get_params(params, device):
    """Return a copy of ``params`` on ``device``, sharing nothing, with gradients on."""
    return [param.detach().to(device, copy=True).requires_grad_() for param in params]


def naive_allreduce(data):
    """Sum in place: add all to ``data[0]``, then copy the sum to all others."""
    for i in range(1, len(data)):
        data[0].add_(to_device(data[i], data[0].device, i, 0))
    for i in range(1, len(data)):
        data[i].copy_(to_device(data[0], data[i].device, 0, i))


def split_batch(X, y, devices):
    """Split ``X`` and ``y`` into one shard per device: ``(X_shards, y_shards)``.

    The shards keep the order and differ in size by at most one row.
    """
    if len(X) != len(y):
        raise ValueError(f"X has {len(X)} rows, but y has {len(y)}")
    return shard_rows(X, devices), shard_rows(y, devices)


def shard_rows(rows, devices):
    """Split ``rows`` along dimension 0, and send each part to its device."""
    shards = rows.tensor_split(len(devices))
    return [to_device(shard, devices[i], "host", i) for i, shard in enumerate(shards)]


def train_batch(X, y, device_params, devices, lr, allreduce=naive_allreduce):
    """Take the same SGD step in place on every replica; return the summed loss."""
    if len(device_params) != len(devices):
        raise ValueError(f"{len(device_params)} replicas for {len(devices)} devices")
    X_shards, y_shards = split_batch(X, y, devices)
    losses = [
        loss(lenet(X_shard, params), y_shard).sum()
        for X_shard, y_shard, params in zip(X_shards, y_shards, device_params)
    ]
    for shard_loss in losses:  # on GPUs, each call returns before it has computed
        shard_loss.backward()
    for i in range(len(device_params[0])):
        allreduce([params[i].grad for params in device_params])
    for params in device_params:
        sgd(params, lr, len(X))
    # the losses go last: who waits for their sum has waited for every device
    parts = [
        to_device(part.detach(), devices[0], i, 0) for i, part in enumerate(losses)
    ]
    return sum(parts)


@torch.no_grad()
def accuracy(device_params, devices, test_iter):
    """Return the fraction of the examples that the network gets right."""
    correct, total = [0] * len(devices), 0
    for X, y in test_iter:
        X_shards, y_shards = split_batch(X, y, devices)
        for i in range(len(devices)):
            hits = lenet(X_shards[i], device_params[i]).argmax(dim=1) == y_shards[i]
            correct[i] += hits.sum()
        total += len(y)
    return sum(count.item() for count in correct) / total


@dataclass
class History:
    """What ``train`` measured in each epoch, and the replicas that it trained."""

    device_params: list = field(repr=False)
    loss: list = field(default_factory=list)  # mean over the training examples
    accuracy: list = field(default_factory=list)  # on the test examples
    seconds: list = field(default_factory=list)  # of training, without the test


def train(
    num_devices, batch_size, lr, num_epochs=10, allreduce=naive_allreduce, seed=0
):
    """Train LeNet on Fashion-MNIST on ``num_devices`` devices; return its history.

    ``batch_size`` counts the rows of all devices together. The parameters at the start
    and the order of the examples follow from ``seed``, whatever the number of devices.
    """
    devices, description = choose_devices(num_devices)
    train_iter, test_iter = load_data_fashion_mnist(
        batch_size, seed=seed, device=devices[0]
    )
    params = init_params(generator=torch.Generator().manual_seed(seed))
    run = History([get_params(params, device) for device in devices])
    print(description)
    for epoch in range(1, num_epochs + 1):
        begin, total = time.perf_counter(), 0
        for X, y in train_iter:
            total += train_batch(X, y, run.device_params, devices, lr, allreduce)
        # .item() waits for all that is still queued on the devices
        run.loss.append(total.item() / len(train_iter.images))
        run.seconds.append(time.perf_counter() - begin)
        run.accuracy.append(accuracy(run.device_params, devices, test_iter))
        print(f"epoch {epoch}: loss {run.loss[-1]:.3f}, ", end="")
        print(f"test accuracy {run.accuracy[-1]:.3f}, {run.seconds[-1]:.1f} s")
    return run
