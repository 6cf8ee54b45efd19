"""Pipelines of two ranks against the plain split of the same network, in the same run.

The plain split is a schedule with a single micro-batch: while one rank works, the other
waits. With m micro-batches a pipeline of p ranks can be m·p/(m + p - 1) times as fast.
A core stands for a device here, so every rank computes with one thread; one contender
of the plain split has two, and thereby both cores of a machine that has two.
"""

from functools import partial
from statistics import median

from timing import print_goal, print_machine, ratio

from d2lpar import launch
from d2lpar.planning import time_in_turn

WIDTH, LAYERS, ROWS = 512, 8, 512  # ROWS of a micro-batch
GOAL = 1.5


def measure(rank: int, world_size: int, m: int, rounds: int) -> dict:
    """Return for each contender the seconds of each round, the slowest rank's."""
    import torch
    from torch import nn

    from d2lpar import DistributedPipeline, cut, pipeline_schedules

    torch.manual_seed(0)
    pairs = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    X, sums = torch.randn(ROWS * m, WIDTH), nn.MSELoss(reduction="sum")
    contenders = {
        "plain split": ("gpipe", 1),
        "plain split again": ("gpipe", 1),
        "plain split, 2 threads per rank": ("gpipe", 1),
        "micro-batches, one at a time": ("sequential", m),
        "GPipe": ("gpipe", m),
        "1F1B": ("one_f_one_b", m),
        "interleaved": ("interleaved", m),
        "ZB-H1": ("zero_bubble", m),
        "ZB-V": ("zero_bubble_v", m),
    }
    pipelines = {}
    for name, (schedule, parts) in contenders.items():
        schedule = getattr(pipeline_schedules, schedule)
        num_stages = len(pipeline_schedules.placement(schedule(world_size, parts)))
        arguments = cut(pairs, num_stages), sums, parts, schedule, torch.numel
        pipelines[name] = DistributedPipeline(*arguments)

    def step(name):
        torch.set_num_threads(2 if "2 threads" in name else 1)
        pipelines[name].forward_backward(X, X)
        pipelines[name].stages.zero_grad()

    return time_in_turn({name: partial(step, name) for name in pipelines}, rounds)


def main():
    print_machine()
    print(f"{LAYERS} linear layers {WIDTH} wide, micro-batches of {ROWS} rows, 2 ranks")
    print("with 1 thread each where nothing else is said")
    for m in (4, 8, 16):
        seconds = launch(measure, 2, m, 15, timeout=400)[0]
        print(f"\n{m} micro-batches; at best {2 * m / (m + 1):.2f} times as fast")
        base = seconds["plain split"]
        gains = {name: ratio(base, times) for name, times in seconds.items()}
        for name, (low, middle, high) in gains.items():
            print(
                f"{name:32} {1e3 * median(seconds[name]):7.1f} ms  {middle:5.2f} times"
                f" as fast  {low:.2f} to {high:.2f}"
            )
        if m == 8:
            for name in ("GPipe", "1F1B"):
                what = f"{name} as fast as the plain split, 2 ranks, {m} micro-batches"
                again = gains["plain split again"][1]
                print_goal(what, gains[name], GOAL, again, at_least=True)


if __name__ == "__main__":
    main()
