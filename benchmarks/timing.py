"""What benchmarks share: time contenders in turn, print medians, spread and goals.

A goal is a bound for a ratio. A machine that others use, too, does not measure a ratio
exactly: so each table has its reference twice, and the ratio of the two stands beside
the goal.
"""

import math
import os
import random
import time
from collections.abc import Callable
from itertools import cycle
from statistics import median

import psutil  # jupyter brings it
import torch

from d2lpar.devices import hardware
from d2lpar.study.methods import quartiles

AGAIN = "the same again"  # the reference, a second time


def print_machine() -> None:
    """Print what this runs on and how busy it is: the figures are worth no more."""
    busy, (load, *_) = psutil.cpu_percent(interval=1.0), os.getloadavg()
    kept = (
        "kept"
        if "MALLOC_TRIM_THRESHOLD_" in os.environ
        else "given back (make bench keeps it)"
    )
    print(f"{hardware()}; {busy:.0f} % busy before we begin (load {load:.1f})")
    print(f"On Linux, the memory of large tensors that are freed is {kept}.")


def time_in_turn(
    contenders: dict[str, Callable[[], object]], rounds: int = 30, warm_up: int = 5
) -> dict[str, list[float]]:
    """Call each contender once a round, in turn, and return its seconds in each round.

    In another order each time, so that a disturbance of the machine hits all of them
    alike.
    """
    seconds = {name: [] for name in contenders}
    for i in range(warm_up + rounds):
        turns = list(contenders.items())
        # else one might always profit from what another leaves in the caches
        random.shuffle(turns)
        for name, contender in turns:
            begin = time.perf_counter()
            contender()
            for device in range(torch.cuda.device_count()):
                torch.cuda.synchronize(device)
            if i >= warm_up:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def print_ratios(
    title: str, seconds: dict[str, list[float]], base: str, goals: dict
) -> None:
    """Print medians and quartiles in ms, and the median of the ratios to ``base``.

    A ratio is one of the same round. ``goals`` has, for some names, the largest ratio
    that is asked for.
    """
    print(f"\n{title}\n{len(seconds[base])} rounds")
    width = max(map(len, seconds))
    print(
        f"{'':{width}}  {'median':>9}  {'quartiles':>17}  {'ratio':>6} "
        f" {'quartiles':>11}"
    )
    ratios = {name: ratio(times, seconds[base]) for name, times in seconds.items()}
    for name, times in seconds.items():
        low, middle, high = quartiles([1e3 * t for t in times])
        print(
            f"{name:{width}}  {middle:6.2f} ms  {low:6.2f} to {high:6.2f} ms"
            f"  {ratios[name][1]:6.3f}  {ratios[name][0]:.2f} to {ratios[name][2]:.2f}"
        )
    for name, goal in goals.items():
        print_goal(
            f"{title}: {name} : {base}",
            ratios[name],
            goal,
            ratios.get(AGAIN, (1, 1, 1))[1],
        )


def print_goal(
    what: str,
    value: float | tuple[float, float, float],
    goal: float,
    again: float = 1.0,
    at_least: bool = False,
) -> None:
    """Print whether a ratio, or the median of (low, middle, high), reaches its goal.

    ``again`` is what the reference measures against itself: by so much the ratio may
    miss the goal and it is still not known whether it does. ``tools/bench.py`` collects
    these lines.
    """
    low, middle, high = value if isinstance(value, tuple) else (value,) * 3
    noise = max(again, 1 / again)
    beyond = goal / middle if at_least else middle / goal
    verdict = (
        "met" if beyond <= 1 else "met within noise" if beyond <= noise else "MISSED"
    )
    spread = f" ({low:.2f} to {high:.2f})" if low < high else ""
    bound = f"{'>=' if at_least else '<='} {goal:.2f}"
    print(
        f"goal {verdict:16} {middle:5.2f}{spread:15} {bound}  itself {again:.2f} "
        f" {what}"
    )


def ratio(times: list[float], base: list[float]) -> tuple[float, float, float]:
    """Return the quartiles of the ratios of two contenders' seconds, round by round."""
    return quartiles([a / b for a, b in zip(times, base, strict=True)])


def geometric_mean(values: list[float]) -> float:
    """Return the mean of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


def copy_bandwidth(nbytes: int, count: int = 12, rounds: int = 40) -> float:
    """Return the bytes read and written per second when tensors are copied.

    ``count`` tensors of ``nbytes`` take turns, so that no cache holds what is copied.
    """
    tensors = cycle([torch.ones(nbytes // 4) for _ in range(count)])
    seconds = time_in_turn({"copy": lambda: next(tensors).copy_(next(tensors))}, rounds)
    return 2 * nbytes / median(seconds["copy"])


def matmul_peak(n: int = 2048, rounds: int = 10) -> float:
    """Return the float32 operations per second of a product of n x n matrices."""
    a = torch.rand(n, n)
    out = torch.empty_like(a)
    seconds = time_in_turn(
        {"matmul": lambda: torch.mm(a, a, out=out)}, rounds, warm_up=2
    )
    return 2 * n**3 / median(seconds["matmul"])
