"""What the benchmarks share: time contenders in turn, and print medians with their spread."""

import random
import time
from collections.abc import Callable
from itertools import cycle
from statistics import median

import torch

from d2lpar.devices import hardware


def time_in_turn(
    contenders: dict[str, Callable[[], object]], rounds: int = 30, warm_up: int = 5
) -> dict[str, list[float]]:
    """Call each contender once a round, in turn, and return its seconds in each round.

    In another order each time, so that a disturbance of the machine hits all of them alike.
    """
    seconds = {name: [] for name in contenders}
    for i in range(warm_up + rounds):
        turns = list(contenders.items())
        random.shuffle(turns)  # else one might always profit from what another leaves in the caches
        for name, contender in turns:
            begin = time.perf_counter()
            contender()
            for device in range(torch.cuda.device_count()):
                torch.cuda.synchronize(device)
            if i >= warm_up:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def print_ratios(title: str, seconds: dict[str, list[float]], base: str, goals: dict) -> None:
    """Print a table: median and quartiles in ms, and the median of each round's ratio to ``base``.

    ``goals`` has, for some names, the largest ratio that is asked for.
    """
    print(f"\n{title}\n{hardware()}, {len(seconds[base])} rounds")
    width = max(map(len, seconds))
    print(f"{'':{width}}  {'median':>9}  {'quartiles':>17}  {'ratio':>6}  {'quartiles':>11}  goal")
    for name, times in seconds.items():
        low, middle, high = quartiles([1e3 * t for t in times])
        ratio = quartiles([a / b for a, b in zip(times, seconds[base], strict=True)])
        goal = f"<= {goals[name]}" if name in goals else ""
        print(
            f"{name:{width}}  {middle:6.2f} ms  {low:6.2f} to {high:6.2f} ms"
            f"  {ratio[1]:6.3f}  {ratio[0]:.2f} to {ratio[2]:.2f}  {goal}"
        )


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], median(ordered), ordered[-1 - len(ordered) // 4]


def copy_bandwidth(nbytes: int, count: int = 12, rounds: int = 40) -> float:
    """Return the bytes a second that are read and written when tensors of ``nbytes`` are copied.

    ``count`` tensors take turns, so that no cache holds what is copied.
    """
    tensors = cycle([torch.ones(nbytes // 4) for _ in range(count)])
    seconds = time_in_turn({"copy": lambda: next(tensors).copy_(next(tensors))}, rounds)
    return 2 * nbytes / median(seconds["copy"])


def matmul_peak(n: int = 2048, rounds: int = 10) -> float:
    """Return the floating-point operations a second of a float32 product of n x n matrices."""
    a = torch.rand(n, n)
    out = torch.empty_like(a)
    seconds = time_in_turn({"matmul": lambda: torch.mm(a, a, out=out)}, rounds, warm_up=2)
    return 2 * n**3 / median(seconds["matmul"])
