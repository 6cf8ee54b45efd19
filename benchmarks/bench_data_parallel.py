"""DataParallel against the plain module, its threads against a loop, and the chunked loss.

On a CPU the devices are virtual and share the cores: what is measured is the price of splitting and
copying, not a speed-up. On two GPUs or more torch's own DataParallel runs beside ours.
"""

from functools import partial

import torch
from timing import print_ratios, time_in_turn
from torch import nn
from torch.nn import functional as F

from d2lpar import ChunkedLoss, DataParallel, choose_devices, parallel_apply, replicate, scatter
from d2lpar.memory import peak_memory
from d2lpar.network import LeNet

GOALS = {1: 1.05, 2: 1.15, 4: 1.15}  # of LeNet's step, to that of the plain module
POSITIONS, WIDTH, CLASSES = 2048, 64, 8000  # of the chunked loss: the logits take 66 MB


def networks() -> dict:
    """Return, by name, (a network, a batch, how many rounds)."""

    def stack(width, depth):
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

    return {
        "LeNet, 256 rows": (LeNet(), torch.randn(256, 1, 28, 28), 60),
        "60 small layers, 256 rows": (stack(64, 60), torch.randn(256, 64), 60),
        "4 layers 1024 wide, 512 rows": (stack(1024, 4), torch.randn(512, 1024), 20),
    }


def step(model: nn.Module, X: torch.Tensor) -> None:
    model.zero_grad()
    model(X).square().mean().backward()


def measure_step(name: str, module: nn.Module, X: torch.Tensor, rounds: int) -> None:
    contenders = {"plain": partial(step, module, X), "plain again": partial(step, module, X)}
    for k in GOALS:
        devices, _ = choose_devices(k)
        contenders[f"k = {k}"] = partial(step, DataParallel(module, devices), X)
        if len(set(devices)) == k > 1:
            contenders[f"torch's, k = {k}"] = partial(step, nn.DataParallel(module, devices), X)
    goals = {f"k = {k}": goal for k, goal in GOALS.items()} if name.startswith("LeNet") else {}
    seconds = time_in_turn(contenders, rounds)
    print_ratios(f"Forward and backward: {name}", seconds, "plain", goals)


def measure_threads(name: str, module: nn.Module, X: torch.Tensor, rounds: int) -> None:
    contenders = {}
    for k in (2, 4):
        devices, _ = choose_devices(k)
        replicas, shards = replicate(module, devices), scatter((X,), devices)
        calls = list(zip(replicas, shards, strict=True))
        contenders[f"loop, k = {k}"] = lambda calls=calls: [call(*shard) for call, shard in calls]
        contenders[f"threads, k = {k}"] = partial(parallel_apply, replicas, shards)
    seconds = time_in_turn(contenders, rounds)
    for k in (2, 4):
        pair = {way: seconds[way] for way in (f"loop, k = {k}", f"threads, k = {k}")}
        print_ratios(f"parallel_apply, forward alone: {name}", pair, f"loop, k = {k}", {})


def measure_chunks() -> None:
    devices, _ = choose_devices(1)
    generator = nn.Linear(WIDTH, CLASSES).to(devices[0])
    hidden = torch.randn(POSITIONS, WIDTH, device=devices[0], requires_grad=True)
    target = torch.randint(CLASSES, (POSITIONS,), device=devices[0])
    criterion = nn.CrossEntropyLoss()

    def run(loss):
        generator.zero_grad()
        loss(hidden, target).backward()

    ways = {"not chunked": lambda hidden, target: criterion(generator(hidden), target)}
    for chunks in (2, 4, 8, 16):
        ways[f"{chunks} chunks"] = ChunkedLoss(generator, criterion, devices, POSITIONS // chunks)
    if hasattr(nn, "LinearCrossEntropyOptions"):
        options = nn.LinearCrossEntropyOptions(
            batch_chunk_size=POSITIONS // 8, chunking_method=None
        )
        ways["torch's, 8 chunks"] = lambda hidden, target: F.linear_cross_entropy(
            hidden, generator.weight, target, linear_bias=generator.bias, options=options
        )
    peaks = {name: peak_memory(partial(run, way), devices[0]) for name, way in ways.items()}
    contenders = {name: partial(run, way) for name, way in ways.items()}
    seconds = time_in_turn(contenders, 10, 2)
    print_ratios(f"Loss of {POSITIONS} positions, {CLASSES} classes", seconds, "not chunked", {})
    if devices[0].type == "cpu":  # torch's is one operation, into which the count cannot look
        peaks.pop("torch's, 8 chunks", None)
    for name, peak in peaks.items():
        print(f"{name:18} peak {peak / 1e6:6.1f} MB, {peaks['not chunked'] / peak:5.2f} times less")


def main() -> None:
    for name, (module, X, rounds) in networks().items():
        [device], _ = choose_devices(1)
        module, X = module.to(device), X.to(device)
        measure_step(name, module, X, rounds)
        measure_threads(name, module, X, rounds)
    measure_chunks()


if __name__ == "__main__":
    main()
