"""Allreduce between processes, over lanes and over gloo, against torch's.

Every call is timed on every rank, from a common barrier to the moment when the slowest
rank is done. First, in one process, the ring against the naive form.
"""

from functools import partial
from statistics import median

import torch
from timing import (
    AGAIN,
    geometric_mean,
    print_goal,
    print_machine,
    print_ratios,
    ratio,
    time_in_turn,
)

from d2lpar import launch, naive_allreduce, planning, ring_allreduce, schedules
from d2lpar.ranks.collectives import choose

SIZES = [10**3 * 4**i for i in range(8)] + [64 * 10**6]  # 1 kB to 64 MB
NAMES = ["star", "ring", "tree", "direct", "halving_doubling", "recursive_doubling"]
TORCHS = "dist.all_reduce"
CHECKED = "dist.all_reduce, DETAIL"  # torch's own check
# (contender, base): goals for the geometric mean over sizes, and for the worst one
GOALS = {
    (AGAIN, TORCHS): (None, None),
    ("lanes", TORCHS): (0.25, 0.6),
    ("messages", TORCHS): (1.1, None),
    ("messages", CHECKED): (1.1, None),
}
CHOICE = 1.3  # times as long as the fastest schedule may take what ``choose`` takes


def measure(rank: int, world_size: int) -> tuple[dict, dict]:
    """Return seconds by size and contender, and by size, transport and schedule."""
    import torch.distributed as dist

    from d2lpar import ranks

    lanes, messages = dist.new_group(), dist.new_group()
    ranks.use_messages(messages)
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # the groups that are made now check
    checked = dist.new_group()
    dist.set_debug_level(dist.DebugLevel.OFF)
    results, by_schedule = {}, {}
    for nbytes in SIZES:
        tensor = torch.zeros(nbytes // 4)
        ours = partial(ranks.allreduce, tensor)
        contenders = {
            TORCHS: partial(dist.all_reduce, tensor),
            AGAIN: partial(dist.all_reduce, tensor),
            CHECKED: partial(dist.all_reduce, tensor, group=checked),
            "lanes": partial(ours, group=lanes),
            "messages": partial(ours, group=messages),
        }
        rounds = 60 if nbytes < 10**6 else 20 if nbytes < 2 * 10**7 else 8
        results[nbytes] = planning.time_in_turn(contenders, rounds)
        for way, group in (("lanes", lanes), ("messages", messages)):
            calls = {
                name: partial(ours, getattr(schedules, name), group=group)
                for name in NAMES
            }
            by_schedule[way, nbytes] = planning.time_in_turn(calls, rounds)
    return results, by_schedule


def print_results(world_size: int, results: dict) -> None:
    """Print the ratios of each size, and the goals for all sizes."""
    again = 1.0, 1.0
    for nbytes, seconds in results.items():
        print_ratios(f"{world_size} ranks, {nbytes} bytes", seconds, TORCHS, {})
    for (name, base), (goal, worst_goal) in GOALS.items():
        ratios = [ratio(s[name], s[base])[1] for s in results.values()]
        mean, worst = geometric_mean(ratios), max(ratios)
        again = (mean, worst) if name == AGAIN else again
        what = f"{name} : {base}, {world_size} ranks"
        if goal:
            print_goal(f"{what}, mean of {len(ratios)} sizes", mean, goal, again[0])
        if worst_goal:
            print_goal(f"{what}, worst size", worst, worst_goal, again[1])


def print_choice(world_size: int, by_schedule: dict) -> None:
    """Print the fastest schedule of each size, and what ``choose`` loses against it."""
    lost = {}
    for (way, nbytes), seconds in by_schedule.items():
        medians = {name: median(s) for name, s in seconds.items()}
        best, taken = min(medians, key=medians.get), choose(nbytes, world_size).__name__
        loss = medians[taken] / medians[best]
        lost[way] = max(lost.get(way, 0), loss)
        print(f"{way}, {nbytes}: fastest {best}; choose takes {taken}, {loss:.2f}")
    for way, loss in lost.items():
        what = f"choose : the fastest schedule, {way}, {world_size} ranks, worst size"
        print_goal(what, loss, CHOICE)


def main():
    print_machine()
    forms = {"naive": naive_allreduce, AGAIN: naive_allreduce, "ring": ring_allreduce}
    # Each has its own tensors: else it would find them in the caches.
    contenders = {
        name: partial(form, [torch.rand(8_000_000) for _ in range(4)])
        for name, form in forms.items()
    }
    title = "Allreduce of 4 tensors of 32 MB in one process"
    print_ratios(title, time_in_turn(contenders, 40), "naive", {"ring": 1.3})
    for k in (2, 4):
        results, by_schedule = launch(measure, k, timeout=500)[0]
        print_results(k, results)
        print_choice(k, by_schedule)


if __name__ == "__main__":
    main()
