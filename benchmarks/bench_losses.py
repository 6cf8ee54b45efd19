"""DataParallel against the plain module, and the loss in chunks: seconds and peaks.

On a CPU the devices are virtual and share the cores: what is measured is the price of
splitting and copying, not a speed-up.
"""

import os
import subprocess
import sys
from functools import partial

import torch
from timing import AGAIN, print_machine, print_ratios, time_in_turn
from torch import nn

from d2lpar import ChunkedLoss, DataParallel, choose_devices
from d2lpar.memory import peak_memory
from d2lpar.models import lenet_layers

GOALS = {"k = 1": 1.05}  # to the plain module's step; more devices share the cores
POSITIONS, WIDTH, CLASSES = 2048, 64, 8000  # of the chunked loss: the logits take 66 MB
CHUNKS_GOAL = 0.75  # of 8 chunks, to the time of the loss in one piece


def measure_data_parallel() -> None:
    """Time LeNet's forward and backward, plain and on k devices."""
    [device], _ = choose_devices(1)
    module, X = lenet_layers().to(device), torch.randn(256, 1, 28, 28, device=device)

    def step(model):
        model.zero_grad()
        model(X).square().mean().backward()

    contenders = {"plain": partial(step, module), AGAIN: partial(step, module)}
    for k in (1, 2, 4):
        devices, _ = choose_devices(k)
        contenders[f"k = {k}"] = partial(step, DataParallel(module, devices))
    seconds = time_in_turn(contenders, 60)
    print_ratios("DataParallel, LeNet, 256 rows", seconds, "plain", GOALS)


def measure_chunks() -> None:
    """Time the loss of many classes, whole and in chunks, and count its peaks."""
    kept = "MALLOC_TRIM_THRESHOLD_" in os.environ
    devices, _ = choose_devices(1)
    generator = nn.Linear(WIDTH, CLASSES).to(devices[0])
    hidden = torch.randn(POSITIONS, WIDTH, device=devices[0], requires_grad=True)
    target = torch.randint(CLASSES, (POSITIONS,), device=devices[0])
    criterion = nn.CrossEntropyLoss(reduction="sum")

    def run(loss):
        generator.zero_grad()
        loss(hidden, target).backward()

    def whole(hidden, target):
        return criterion(generator(hidden), target)

    ways = {"not chunked": whole, AGAIN: whole}
    for n in (2, 8, 32):
        ways[f"{n} chunks"] = ChunkedLoss(generator, criterion, POSITIONS // n)
    contenders = {name: partial(run, way) for name, way in ways.items()}
    for name, contender in contenders.items():
        print(f"{name}: peak {peak_memory(contender, devices[0]) / 1e6:.1f} MB")
    title = f"Loss of {POSITIONS} positions, {CLASSES} classes, memory "
    title += "kept" if kept else "given back"
    goals = {} if kept else {"8 chunks": CHUNKS_GOAL}
    print_ratios(title, time_in_turn(contenders, 10, 2), "not chunked", goals)


def main() -> None:
    """Measure all, then the chunks again as in a process that make has not started."""
    if sys.argv[1:] == ["chunks"]:
        measure_chunks()
        return
    print_machine()
    measure_data_parallel()
    measure_chunks()
    plain = {n: v for n, v in os.environ.items() if not n.startswith("MALLOC_")}
    subprocess.run([sys.executable, __file__, "chunks"], env=plain, check=True)


if __name__ == "__main__":
    main()
