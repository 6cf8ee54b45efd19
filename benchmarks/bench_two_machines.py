"""Allreduce between two machines: what the cost model predicts, and what is measured.

The machines are namespaces of Linux with a virtual cable between them
(tools/two_machines.py), on which ``tc`` limits the bytes per second and, where the
kernel has netem, delays each packet. Ranks of one machine share its cable. So the
model's participants are the machines, and only messages that cross count. Its alpha is
measured: an allreduce of one number has one crossing. Its beta is that of the cable,
with the headers of the packets. Without a limit on the cable, nothing is predicted.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median

from timing import geometric_mean, print_goal, print_machine

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
import two_machines as tm

from d2lpar.collectives.cost import step_seconds
from d2lpar.collectives.schedules import (
    direct,
    halving_doubling,
    recursive_doubling,
    ring,
    star,
    tree,
)

SCHEDULES = (star, ring, tree, direct, halving_doubling, recursive_doubling)
CABLES = {  # bytes a second; tc's words for rate and delay; whether a goal is stated
    "as fast as it can": (None, (), False),
    "1 Gbit/s": (1.25e8, ("1gbit",), False),  # here two cores are the limit, too
    "100 Mbit/s": (1.25e7, ("100mbit",), True),
    "100 Mbit/s, 5 ms": (1.25e7, ("100mbit", "5ms"), True),
}
SIZES = [8, 10**4, 10**5, 10**6]
LONG = 10**6  # bytes from which a goal is stated: alpha counts for little
HEADERS = 1514 / 1448  # Ethernet, IP and TCP, for each packet's data
GOAL = 1.25  # times as long as predicted a long tensor may take
LIMIT = 300  # seconds


def measure() -> None:
    """In a rank: print as JSON the slowest rank's seconds per call in each round."""
    import torch
    import torch.distributed as dist

    from d2lpar import ranks
    from d2lpar.study.methods import time_in_turn

    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
    results = {}
    for nbytes in SIZES:
        tensor = torch.zeros(nbytes // 4)
        calls = {
            s.__name__: lambda t=tensor, s=s: ranks.allreduce(t, s, check=False)
            for s in SCHEDULES
        }
        results[nbytes] = time_in_turn(calls, rounds=10)
    if dist.get_rank() == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


def run(each: int, limits: tuple) -> dict[int, dict[str, float]]:
    """Return the median of each schedule by size, with ``each`` ranks a machine."""
    with tm.two_machines() as machines:
        if limits:
            for machine in machines:
                machine.slow_down(*limits)
        words = sys.executable, __file__, "rank"
        ranks = tm.start_ranks(
            machines, each, *words, stdout=subprocess.PIPE, text=True
        )
        said = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
    return {
        int(nbytes): {name: median(times) for name, times in seconds.items()}
        for nbytes, seconds in json.loads(said[0]).items()
    }


def predict(each: int, nbytes: int, alpha: float, beta: float) -> Iterator[float]:
    """Yield each schedule's predicted time: the sum of its steps across the cable."""
    for schedule in SCHEDULES:
        steps = tm.crossings(schedule, each, nbytes)
        yield sum(step_seconds(messages, alpha, beta) for messages in steps)


def report(title: str, each: int, results: dict) -> None:
    """Print milliseconds by size and schedule, and their ratio to the prediction."""
    print(f"\n{title}, {each} ranks a machine: ms (times the prediction)")
    print(f"{'bytes':>9}" + "".join(f"{s.__name__:>20}" for s in SCHEDULES))
    (rate, _, has_goal), ratios = CABLES[title], []
    alpha = results[SIZES[0]]["recursive_doubling"]
    for nbytes, seconds in results.items():
        cells = [f"{1e3 * t:.2f}" for t in seconds.values()]
        if rate:
            predicted = predict(each, nbytes, alpha, HEADERS / rate)
            times = [t / p for t, p in zip(seconds.values(), predicted, strict=True)]
            cells = [
                f"{cell} ({time:.2f})" for cell, time in zip(cells, times, strict=True)
            ]
            ratios += times if nbytes >= LONG else []
        print(f"{nbytes:9}" + "".join(f"{cell:>20}" for cell in cells))
    if has_goal:
        what = f"measured : predicted, {LONG} bytes, {title}, {each} ranks a machine"
        print_goal(
            f"{what}, mean of {len(ratios)} schedules", geometric_mean(ratios), GOAL
        )


def main() -> None:
    """Measure over each cable, with one and two ranks a machine."""
    if sys.argv[1:] == ["rank"]:
        measure()
        return
    print_machine()
    if why_not := tm.missing():
        print(f"Skipped: {why_not}")
        return
    for title, (_, limits, _) in CABLES.items():
        for each in (1, 2):
            try:
                report(title, each, run(each, limits))
            except OSError as error:
                print(f"\n{title}: skipped: {error}")
                break


if __name__ == "__main__":
    main()
