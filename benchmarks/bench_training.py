"""One training step, ours against the book's, and the price of more virtual devices.

The book's way: weights with the channels first, an allreduce that adds everything on
the first device, one call of it and one update for each parameter. It runs twice, so
that the spread that it has against itself stands beside the ratio.
"""

import time
from functools import partial
from statistics import quantiles

import torch
from timing import (
    AGAIN,
    matmul_peak,
    print_goal,
    print_machine,
    print_ratios,
    time_in_turn,
)
from torch.nn import functional as F

from d2lpar import get_params, init_params, load_data_fashion_mnist, train_batch
from d2lpar.training import loss

BATCH_SIZE = 256
# Multiply-adds of the layers for the 26 x 26 pixels that count; forward and twice
# backward.
FLOP = (
    3 * 2 * (20 * 9 * 24**2 + 50 * 20 * 25 * 8**2 + 800 * 128 + 128 * 10) * BATCH_SIZE
)


def books_lenet(X, params):
    h1 = F.avg_pool2d(F.relu(F.conv2d(X, params[0], params[1])), (2, 2), (2, 2))
    h2 = F.avg_pool2d(F.relu(F.conv2d(h1, params[2], params[3])), (2, 2), (2, 2))
    h3 = F.relu(torch.mm(h2.reshape(h2.shape[0], -1), params[4]) + params[5])
    return torch.mm(h3, params[6]) + params[7]


def books_allreduce(data):
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i][:] = data[0].to(data[i].device)


def books_train_batch(X, y, device_params, devices, lr):
    X_shards, y_shards = (
        X.split(len(X) // len(devices)),
        y.split(len(y) // len(devices)),
    )
    losses = [
        loss(books_lenet(X_shard, params), y_shard).sum()
        for X_shard, y_shard, params in zip(
            X_shards, y_shards, device_params, strict=True
        )
    ]
    for shard_loss in losses:
        shard_loss.backward()
    with torch.no_grad():
        for i in range(len(device_params[0])):
            books_allreduce([params[i].grad for params in device_params])
        for params in device_params:
            for param in params:
                param -= lr * param.grad / len(X)
                param.grad.zero_()


def replicas(k, contiguous=False):
    params = init_params(generator=torch.Generator().manual_seed(0))
    if contiguous:
        params = [p.clone(memory_format=torch.contiguous_format) for p in params]
    devices = [torch.device("cpu")] * k
    return [get_params(params, device) for device in devices], devices


def main():
    print_machine()
    torch.manual_seed(0)
    train_iter, _ = load_data_fashion_mnist(BATCH_SIZE, device="cpu")
    X, y = next(iter(train_iter))

    def book():
        return partial(books_train_batch, X, y, *replicas(1, contiguous=True), 0.2)

    def ours(k):
        return partial(train_batch, X, y, *replicas(k), 0.2)

    contenders = {"the book's way": book(), AGAIN: book(), "ours": ours(1)}
    seconds = time_in_turn(contenders, rounds=40)
    title = f"One step at batch size {BATCH_SIZE} on one device"
    print_ratios(title, seconds, "the book's way", {"ours": 0.62})
    floor = FLOP / matmul_peak()
    print(
        f"matrix-multiply peak {matmul_peak() / 1e9:.0f} GFLOP/s: at best"
        f" {1e3 * floor:.1f} ms"
    )

    contenders = {f"k = {k}": ours(k) for k in (1, 2, 4, 8)} | {AGAIN: ours(1)}
    seconds = time_in_turn(contenders, rounds=40)
    title = "The same step on k virtual devices that share the processor"
    print_ratios(title, seconds, "k = 1", {"k = 4": 1.2, "k = 8": 1.45})

    device_params, devices = replicas(1)
    begin = time.perf_counter()
    for X, y in train_iter:
        train_batch(X, y, device_params, devices, 0.2)
    epoch = time.perf_counter() - begin
    iterations = time_in_turn(
        {"iterate": lambda: [None for _ in train_iter]}, rounds=5, warm_up=1
    )
    share = tuple(quantiles([100 * s / epoch for s in iterations["iterate"]], n=4))
    print(f"\nAn epoch takes {epoch:.1f} s")
    print_goal("iterating over all minibatches, % of an epoch", share, 2)


if __name__ == "__main__":
    main()
