"""Collectives between processes: ours over lanes and over gloo, against torch's.

Every call is timed on every rank, from a common barrier to the moment when the slowest
rank is done. The bus bandwidth is that of nccl-tests: 2(k - 1)/k of the tensor's bytes
per second. From the last table the threshold of ``ranks.choose`` was read. Arguments:
numbers of ranks, else 2 and 4.
"""

import sys
from statistics import median

from timing import (
    copy_bandwidth,
    geometric_mean,
    print_goal,
    print_machine,
    ratio,
)

from d2lpar import launch
from d2lpar.collectives.schedules import (
    direct,
    halving_doubling,
    recursive_doubling,
    ring,
    star,
    tree,
)
from d2lpar.ranks.collectives import choose
from d2lpar.study.methods import time_in_turn

SIZES = [10**3 * 4**i for i in range(8)] + [64 * 10**6]  # 1 kB to 64 MB
SCHEDULES = (star, ring, tree, direct, halving_doubling, recursive_doubling)
TORCHS, AGAIN = "dist.all_reduce", "dist.all_reduce again"
CHECKED = "dist.all_reduce, DETAIL"  # torch's own check
# (contender, base): goals for the geometric mean of the ratios over sizes, and for the
# worst one
GOALS = {
    (AGAIN, TORCHS): (None, None),
    ("lanes", TORCHS): (0.2, 0.5),
    ("messages", TORCHS): (1.0, 1.4),
    ("messages, checked", CHECKED): (1.0, None),
}
CHOICE = 1.3  # times as long as the fastest schedule may take what ``choose`` takes


def measure(rank: int, world_size: int, sizes: list[int]) -> tuple[dict, dict]:
    """Return the seconds of each contender by size, of schedules by transport too."""
    import torch
    import torch.distributed as dist

    from d2lpar import ranks

    lanes, messages = dist.new_group(), dist.new_group()
    ranks.use_messages(messages)
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # the groups that are made now check
    checked = dist.new_group()
    dist.set_debug_level(dist.DebugLevel.OFF)
    groups = {"lanes": lanes, "messages": messages}
    results, by_schedule = {}, {}
    for nbytes in sizes:
        tensor = torch.zeros(nbytes // 4)
        contenders = {
            TORCHS: lambda t=tensor: dist.all_reduce(t),
            AGAIN: lambda t=tensor: dist.all_reduce(t),
            CHECKED: lambda t=tensor: dist.all_reduce(t, group=checked),
            "lanes": lambda t=tensor: ranks.allreduce(t, group=lanes),
            "messages": lambda t=tensor: ranks.allreduce(
                t, group=messages, check=False
            ),
            "messages, checked": lambda t=tensor: ranks.allreduce(t, group=messages),
        }
        rounds = 60 if nbytes < 10**6 else 20 if nbytes < 2 * 10**7 else 8
        results[nbytes] = time_in_turn(contenders, rounds)
        for way, group in groups.items():
            calls = {
                s.__name__: lambda t=tensor, s=s, g=group: ranks.allreduce(
                    t, s, "sum", g, False
                )
                for s in SCHEDULES
            }
            by_schedule[way, nbytes] = time_in_turn(calls, rounds)
    return results, by_schedule


def print_table(world_size: int, results: dict) -> None:
    """Print medians with the bus bandwidth, and ratios as ``GOALS`` wants them."""
    for nbytes, seconds in results.items():
        bus = 2 * (world_size - 1) / world_size * nbytes / 1e9
        cells = [
            f"{name} {1e6 * median(times):.0f} us ({bus / median(times):.2f} GB/s)"
            for name, times in seconds.items()
        ]
        print(f"{nbytes:9}  " + "; ".join(cells))
    for (name, base), (goal, worst_goal) in GOALS.items():
        print(f"{name} : {base}")
        ratios = {nbytes: ratio(s[name], s[base]) for nbytes, s in results.items()}
        for nbytes, (low, middle, high) in ratios.items():
            print(f"  {nbytes:9}  {middle:.2f}  ({low:.2f} to {high:.2f})")
        middles = [middle for _, middle, _ in ratios.values()]
        mean, worst = geometric_mean(middles), max(middles)
        if name == AGAIN:
            again = mean, worst
            print(f"  geometric mean {mean:.2f}, worst {worst:.2f}")
        what = f"{name} : {base}, {world_size} ranks"
        if goal:
            print_goal(f"{what}, mean of {len(middles)} sizes", mean, goal, again[0])
        if worst_goal:
            print_goal(f"{what}, worst size", worst, worst_goal, again[1])


def print_crossovers(world_size: int, by_schedule: dict) -> None:
    """Print each schedule's median, the fastest, and what ``choose`` loses."""
    lost = {}
    print("schedules, us: " + ", ".join(s.__name__ for s in SCHEDULES))
    for (way, nbytes), seconds in by_schedule.items():
        medians = {name: 1e6 * median(times) for name, times in seconds.items()}
        best, taken = min(medians, key=medians.get), choose(nbytes, world_size).__name__
        row = "".join(f"{us:8.0f}" for us in medians.values())
        loss = medians[taken] / medians[best]
        lost[way] = max(lost.get(way, 0), loss)
        print(
            f"  {way:8}  {nbytes:9}  {row}  fastest {best}; choose takes {taken}:"
            f" {loss:.2f}"
        )
    for way, loss in lost.items():
        what = (
            f"what choose takes : the fastest schedule, {way}, {world_size} ranks,"
            " worst size"
        )
        print_goal(what, loss, CHOICE)


def main():
    print_machine()
    print(
        f"copy bandwidth {copy_bandwidth(64 * 10**6) / 1e9:.1f} GB/s, read and written"
    )
    for k in map(int, sys.argv[1:] or (2, 4)):
        results, by_schedule = launch(measure, k, SIZES, timeout=500)[0]
        print(f"\n{k} ranks, medians and bus bandwidths")
        print_table(k, results)
        print_crossovers(k, by_schedule)


if __name__ == "__main__":
    main()
