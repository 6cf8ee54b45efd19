"""DataParallel against the plain module, threads against a loop, and the chunked loss.

On a CPU the devices are virtual and share the cores: what is measured is the price of
splitting and copying, not a speed-up. On two GPUs or more torch's own DataParallel runs
beside ours.
"""

import os
import subprocess
import sys
from functools import partial

import torch
from timing import AGAIN, print_machine, print_ratios, time_in_turn
from torch import nn
from torch.nn import functional as F

from d2lpar import (
    ChunkedLoss,
    DataParallel,
    choose_devices,
    parallel_apply,
    replicate,
    scatter,
)
from d2lpar.models import lenet_layers
from d2lpar.study.memory import peak_memory

GOALS = {1: 1.05, 2: 1.15, 4: 1.15}  # of LeNet's step, to that of the plain module
POSITIONS, WIDTH, CLASSES = 2048, 64, 8000  # of the chunked loss: the logits take 66 MB
CHUNKS_GOAL = 0.7  # of 8 chunks, to the time that the loss takes when it is not chunked


def networks() -> dict:
    """Return, by name, (a network, a batch, how many rounds)."""

    def stack(width, depth):
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

    return {
        "LeNet, 256 rows": (lenet_layers(), torch.randn(256, 1, 28, 28), 60),
        "60 small layers, 256 rows": (stack(64, 60), torch.randn(256, 64), 60),
        "4 layers 1024 wide, 512 rows": (stack(1024, 4), torch.randn(512, 1024), 20),
    }


def step(model: nn.Module, X: torch.Tensor) -> None:
    model.zero_grad()
    model(X).square().mean().backward()


def measure_step(name: str, module: nn.Module, X: torch.Tensor, rounds: int) -> None:
    contenders = {"plain": partial(step, module, X), AGAIN: partial(step, module, X)}
    for k in GOALS:
        devices, _ = choose_devices(k)
        contenders[f"k = {k}"] = partial(step, DataParallel(module, devices), X)
        if len(set(devices)) == k > 1:
            contenders[f"torch's, k = {k}"] = partial(
                step, nn.DataParallel(module, devices), X
            )
    goals = (
        {f"k = {k}": goal for k, goal in GOALS.items()}
        if name.startswith("LeNet")
        else {}
    )
    seconds = time_in_turn(contenders, rounds)
    print_ratios(f"Forward and backward: {name}", seconds, "plain", goals)


def measure_threads(name: str, module: nn.Module, X: torch.Tensor, rounds: int) -> None:
    contenders = {}
    for k in (2, 4):
        devices, _ = choose_devices(k)
        replicas, shards = replicate(module, devices), scatter((X,), devices)
        calls = list(zip(replicas, shards, strict=True))
        contenders[f"loop, k = {k}"] = lambda calls=calls: [
            call(*shard) for call, shard in calls
        ]
        contenders[f"threads, k = {k}"] = partial(parallel_apply, replicas, shards)
    seconds = time_in_turn(contenders, rounds)
    for k in (2, 4):
        pair = {way: seconds[way] for way in (f"loop, k = {k}", f"threads, k = {k}")}
        print_ratios(
            f"parallel_apply, forward alone: {name}", pair, f"loop, k = {k}", {}
        )


def measure_chunks() -> None:
    kept = "kept" if "MALLOC_TRIM_THRESHOLD_" in os.environ else "given back"
    devices, _ = choose_devices(1)
    generator = nn.Linear(WIDTH, CLASSES).to(devices[0])
    hidden = torch.randn(POSITIONS, WIDTH, device=devices[0], requires_grad=True)
    target = torch.randint(CLASSES, (POSITIONS,), device=devices[0])
    criterion = nn.CrossEntropyLoss()

    def run(loss):
        generator.zero_grad()
        loss(hidden, target).backward()

    ways = {"not chunked": lambda hidden, target: criterion(generator(hidden), target)}
    ways[AGAIN] = ways["not chunked"]
    for chunks in (2, 4, 8, 16):
        size = POSITIONS // chunks
        ways[f"{chunks} chunks"] = ChunkedLoss(generator, criterion, devices, size)
        ways[f"{chunks} chunks, computed twice"] = ChunkedLoss(
            generator, criterion, devices, size, recompute=True
        )
    if hasattr(nn, "LinearCrossEntropyOptions"):
        options = nn.LinearCrossEntropyOptions(
            batch_chunk_size=POSITIONS // 8, chunking_method=None
        )
        ways["torch's, 8 chunks"] = lambda hidden, target: F.linear_cross_entropy(
            hidden,
            generator.weight,
            target,
            linear_bias=generator.bias,
            options=options,
        )
    peaks = {
        name: peak_memory(partial(run, way), devices[0]) for name, way in ways.items()
    }
    contenders = {name: partial(run, way) for name, way in ways.items()}
    seconds = time_in_turn(contenders, 10, 2)
    title = f"Loss of {POSITIONS} positions, {CLASSES} classes, memory {kept}"
    goals = {"8 chunks": CHUNKS_GOAL} if kept == "given back" else {}
    print_ratios(title, seconds, "not chunked", goals)
    # torch's is one operation, into which the count cannot look
    if devices[0].type == "cpu":
        peaks.pop("torch's, 8 chunks", None)
    for name, peak in peaks.items():
        print(
            f"{name:26} peak {peak / 1e6:6.1f} MB, {peaks['not chunked'] / peak:5.2f}"
            " times less"
        )


def main() -> None:
    """Measure all, then the chunks again as in a process that make has not started."""
    print_machine()
    if sys.argv[1:] == ["chunks"]:
        measure_chunks()
        return
    for name, (module, X, rounds) in networks().items():
        [device], _ = choose_devices(1)
        module, X = module.to(device), X.to(device)
        measure_step(name, module, X, rounds)
        measure_threads(name, module, X, rounds)
    measure_chunks()
    without = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MALLOC_")
    }
    subprocess.run([sys.executable, __file__, "chunks"], env=without, check=True)


if __name__ == "__main__":
    main()
