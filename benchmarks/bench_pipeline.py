"""A pipeline of two ranks against the plain split of the same model, in the same run.

The plain split is the schedule ``sequential`` with a single micro-batch: while one rank
works, the other waits. With m micro-batches a pipeline of p stages can be m·p/(m + p -
1) times as fast. A core stands for a device here, so every rank computes with one
thread; one contender of the plain split has two, and thereby both cores of a machine
that has two.
"""

from functools import partial
from statistics import median

from timing import print_goal, print_machine, ratio

from d2lpar import launch
from d2lpar.study.methods import time_in_turn

WIDTH, LAYERS, ROWS = 512, 8, 256  # ROWS of a micro-batch
GOAL = 1.5


def measure(rank: int, world_size: int, num_microbatches: int, rounds: int) -> dict:
    """Return for each contender the seconds of each round, the slowest rank's."""
    import torch
    from torch import nn

    import d2lpar
    from d2lpar import gpipe, one_f_one_b, sequential

    torch.manual_seed(0)
    layers = [
        layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())
    ]
    stage = d2lpar.cut(nn.Sequential(*layers), world_size)[rank]
    X = torch.randn(ROWS * num_microbatches, WIDTH)
    schedules = {
        "plain split": (sequential, 1),
        "plain split again": (sequential, 1),
        "plain split, 2 threads per rank": (sequential, 1),
        "micro-batches, sequential": (sequential, num_microbatches),
        "GPipe": (gpipe, num_microbatches),
        "1F1B": (one_f_one_b, num_microbatches),
        "1F1B, recomputing": (one_f_one_b, num_microbatches),
    }
    pipelines = {
        name: d2lpar.DistributedPipeline(
            stage, nn.MSELoss(), m, schedule, recompute="recomputing" in name
        )
        for name, (schedule, m) in schedules.items()
    }

    def step(name):
        torch.set_num_threads(2 if "2 threads" in name else 1)
        pipelines[name].forward_backward(X, X)
        stage.zero_grad()

    return time_in_turn({name: partial(step, name) for name in pipelines}, rounds)


def main():
    print_machine()
    print(
        f"{LAYERS} linear layers {WIDTH} wide, micro-batches of {ROWS} rows, 2 ranks,",
        end="",
    )
    print(" 1 thread per rank where nothing else is said")
    for m in (4, 8, 16):
        seconds = launch(measure, 2, m, 15, timeout=400)[0]
        print(f"\n{m} micro-batches; at best {2 * m / (m + 1):.2f} times as fast")
        base = seconds["plain split"]
        gains = {name: ratio(base, times) for name, times in seconds.items()}
        for name, (low, middle, high) in gains.items():
            print(
                f"{name:30} {1e3 * median(seconds[name]):7.1f} ms  {middle:5.2f} times"
                f" as fast  {low:.2f} to {high:.2f}"
            )
        if m == 8:
            for name in ("GPipe", "1F1B"):
                what = f"{name} as fast as the plain split, 2 ranks, {m} micro-batches"
                print_goal(
                    what,
                    gains[name],
                    GOAL,
                    gains["plain split again"][1],
                    at_least=True,
                )


if __name__ == "__main__":
    main()
