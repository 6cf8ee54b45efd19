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
from statistics import median, quantiles

import psutil  # jupyter brings it
import torch

from d2lpar.devices import hardware

AGAIN = "the same again"  # the reference, a second time


def print_machine() -> None:
    """Print what this runs on and how busy it is: the figures are worth no more."""
    busy, (load, *_) = psutil.cpu_percent(interval=1.0), os.getloadavg()
    print(f"{hardware()}; {busy:.0f} % busy before we begin (load {load:.1f})")
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        print("The memory of large tensors is given back when they are freed.")


def time_in_turn(
    contenders: dict[str, Callable[[], object]], rounds: int = 30, warm_up: int = 5
) -> dict[str, list[float]]:
    """Call each contender once a round, and return its seconds in each round.

    In another order each time, so that a disturbance of the machine hits all of them
    alike, and none always profits from what another leaves in the caches.
    """
    seconds = {name: [] for name in contenders}
    for i in range(warm_up + rounds):
        turns = list(contenders.items())
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
    print(f"\n{title}, {len(seconds[base])} rounds")
    width = max(map(len, seconds))
    ratios = {name: ratio(times, seconds[base]) for name, times in seconds.items()}
    for name, times in seconds.items():
        low, middle, high = quantiles([1e3 * t for t in times], n=4)
        of_base = "{1:6.3f} ({0:.2f} to {2:.2f})".format(*ratios[name])
        spread = f"{middle:8.2f} ms ({low:.2f} to {high:.2f})"
        print(f"{name:{width}} {spread:30} times {base}: {of_base}")
    again = ratios.get(AGAIN, (1, 1, 1))[1]
    for name, goal in goals.items():
        print_goal(f"{title}: {name} : {base}", ratios[name], goal, again)


def print_goal(
    what: str,
    value: float | tuple[float, float, float],
    goal: float,
    again: float = 1.0,
    at_least: bool = False,
) -> None:
    """Print whether a ratio, or the median of (low, middle, high), reaches its goal.

    ``again`` is what the reference measures against itself: by so much the ratio may
    miss the goal and it is still not known whether it does. These lines are collected.
    """
    low, middle, high = value if isinstance(value, tuple) else (value,) * 3
    beyond = goal / middle if at_least else middle / goal
    verdict = "met within noise" if beyond <= max(again, 1 / again) else "MISSED"
    verdict = "met" if beyond <= 1 else verdict
    spread = f" ({low:.2f} to {high:.2f})" if low < high else ""
    bound = f"{'>=' if at_least else '<='} {goal:.2f}"
    measured = f"{middle:5.2f}{spread:15} {bound}"
    print(f"goal {verdict:16} {measured}  itself {again:.2f}  {what}")


def ratio(times: list[float], base: list[float]) -> tuple[float, float, float]:
    """Return the quartiles of the ratios of two contenders' seconds, round by round."""
    return tuple(quantiles([a / b for a, b in zip(times, base, strict=True)], n=4))


def geometric_mean(values: list[float]) -> float:
    """Return the mean of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


def matmul_peak(n: int = 2048, rounds: int = 10) -> float:
    """Return the float32 operations per second of a product of n x n matrices."""
    a = torch.rand(n, n)
    out = torch.empty_like(a)
    seconds = time_in_turn({"matmul": lambda: torch.mm(a, a, out=out)}, rounds, 2)
    return 2 * n**3 / median(seconds["matmul"])
