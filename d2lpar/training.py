"""Data-parallel training: a replica and a batch shard for each device, one allreduce.

``get_params``, ``split_batch``, ``train_batch`` and ``train`` are those of Dive into
Deep Learning, section "Training on Multiple GPUs". Notebook 02 builds this file.
"""

import time
from dataclasses import dataclass, field

import torch

from .collectives import ring_allreduce
from .data import load_data_fashion_mnist
from .devices import as_device, check_devices, choose_devices, hardware, to_device
from .guards import checked
from .network import init_params, lenet, loss, sgd


def check_get_params(device, **_) -> None:
    """Raise ValueError for a device that is not there."""
    as_device(device)


@checked(check_get_params)
def get_params(params, device):
    """Return a copy of ``params`` on ``device``, sharing nothing, with gradients on."""
    return [param.detach().to(device, copy=True).requires_grad_() for param in params]


def check_split(X, y, devices) -> None:
    """Raise ValueError for a missing device, or if ``X`` and ``y`` differ in rows."""
    check_devices(devices)
    if X.shape[:1] != y.shape[:1]:
        raise ValueError(
            f"X has shape {tuple(X.shape)}, but y has shape {tuple(y.shape)}"
        )


@checked(check_split)
def split_batch(X, y, devices):
    """Split ``X`` and ``y`` into one shard per device: ``(X_shards, y_shards)``.

    The shards differ by at most one row and keep the order; with fewer rows than
    devices the last ones are empty.
    """
    return shard_rows(X, devices), shard_rows(y, devices)


def shard_rows(rows, devices):
    """Split ``rows`` along dimension 0 and bring each part to its device."""
    shards = rows.tensor_split(len(devices))
    return [to_device(shard, devices[i], "host", i) for i, shard in enumerate(shards)]


def check_batch(X, device_params, devices, **_) -> None:
    """Raise ValueError for an empty batch, or unless each device has one replica."""
    if len(X) == 0:
        raise ValueError("the batch is empty: its mean gradient is not defined")
    if len(device_params) != len(devices):
        raise ValueError(
            f"there are {len(device_params)} replicas for {len(devices)} devices"
        )


@checked(check_batch)
def train_batch(X, y, device_params, devices, lr, allreduce=ring_allreduce):
    """Take an SGD step in place on all replicas; return the summed loss.

    Each device sums the gradient over its shard, the allreduce sums over devices, and
    every replica divides by the number of rows of the whole batch. So the step is the
    same with one device or many, with even shards or uneven ones.
    """
    for params in device_params:
        for param in params:
            param.grad = None  # as optimizer.zero_grad() does
    shards = zip(*split_batch(X, y, devices), device_params, strict=True)
    losses = [
        loss(lenet(X_shard, params), y_shard).sum()
        for X_shard, y_shard, params in shards
    ]
    # on GPUs these calls return at once, so the devices work in parallel
    for shard_loss in losses:
        shard_loss.backward()
    for i in range(len(device_params[0])):
        allreduce([params[i].grad for params in device_params])
    for params in device_params:
        sgd(params, lr, len(X))
    return sum(
        to_device(part.detach(), devices[0], i, 0) for i, part in enumerate(losses)
    )


def train_epoch(train_iter, device_params, devices, lr, allreduce=ring_allreduce):
    """Train on every batch of ``train_iter``; return the mean loss of its examples."""
    total, rows = torch.zeros((), dtype=torch.float64, device=devices[0]), 0
    for X, y in train_iter:
        total += train_batch(X, y, device_params, devices, lr, allreduce)
        rows += len(X)
    # .item() also waits for all that is still queued on the devices
    return total.item() / rows


@torch.no_grad()
def accuracy(device_params, devices, test_iter):
    """Return the fraction of the test examples that the network gets right.

    Every device works on a shard of each batch: exercise 4 of the book's section.
    """
    correct, total = [0] * len(devices), 0
    for X, y in test_iter:
        shards = zip(*split_batch(X, y, devices), device_params, strict=True)
        for i, (X_shard, y_shard, params) in enumerate(shards):
            correct[i] += (lenet(X_shard, params).argmax(dim=1) == y_shard).sum()
        total += len(y)
    return sum(int(count) for count in correct) / total


@dataclass
class History:
    """What a training run measured: the lists have one entry per finished epoch."""

    num_epochs: int
    devices: str  # what the devices are
    hardware: str  # what they run on
    # one replica per device
    device_params: list[list[torch.Tensor]] = field(repr=False)
    # mean over the examples of the epoch
    loss: list[float] = field(default_factory=list)
    # on the test set, after the epoch
    accuracy: list[float] = field(default_factory=list)
    # of the epoch's training, testing aside
    seconds: list[float] = field(default_factory=list)


def print_progress(history: History) -> None:
    """Print a line about the epoch just ended: what ``train`` does by default."""
    epoch = len(history.loss)
    if epoch == 1:
        print(f"{history.devices} ({history.hardware})")
    print(
        f"epoch {epoch:2}/{history.num_epochs}: loss {history.loss[-1]:.3f}, "
        f"test accuracy {history.accuracy[-1]:.3f}, {history.seconds[-1]:.1f} s",
        flush=True,
    )


def check_train(lr, num_epochs, **_) -> None:
    """Raise ValueError for a number not positive, unless a part of ``train`` will."""
    if not lr > 0:
        raise ValueError(f"lr must be positive, not {lr!r}")
    if num_epochs < 1:
        raise ValueError(f"num_epochs must be positive, not {num_epochs!r}")


@checked(check_train)
def train(
    num_devices,
    batch_size,
    lr,
    num_epochs=10,
    *,
    allreduce=ring_allreduce,
    seed=0,
    on_progress=print_progress,
):
    """Train LeNet on Fashion-MNIST, data-parallel on ``num_devices`` devices.

    ``batch_size`` counts the rows on all devices together, and ``lr`` is for the
    gradient averaged over the batch. ``allreduce`` sums a list of gradients, one per
    device, in place. Parameters and order of the examples follow from ``seed``,
    whatever the number of devices. ``on_progress`` is called with the history so far
    after every epoch.
    """
    devices, description = choose_devices(num_devices)
    train_iter, test_iter = load_data_fashion_mnist(
        batch_size, seed=seed, device=devices[0]
    )
    params = init_params(generator=torch.Generator().manual_seed(seed))
    device_params = [get_params(params, device) for device in devices]
    history = History(num_epochs, description, hardware(), device_params)
    for _ in range(num_epochs):
        start = time.perf_counter()
        history.loss.append(
            train_epoch(train_iter, device_params, devices, lr, allreduce)
        )
        history.seconds.append(time.perf_counter() - start)
        history.accuracy.append(accuracy(device_params, devices, test_iter))
        on_progress(history)
    return history
