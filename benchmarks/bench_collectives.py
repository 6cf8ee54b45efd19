"""The overhead of a schedule in one process: ring against naive, naive against copy."""

from functools import partial

import torch
from timing import (
    AGAIN,
    copy_bandwidth,
    print_goal,
    print_machine,
    print_ratios,
    quartiles,
    time_in_turn,
)

from d2lpar import naive_allreduce, ring_allreduce

K, NBYTES = 4, 32_000_000


def main():
    print_machine()
    # Each has its own tensors: on shared ones, each would find in the caches what the
    # one before has left there.
    contenders = {
        name: partial(function, [torch.rand(NBYTES // 4) for _ in range(K)])
        for name, function in (
            ("naive_allreduce", naive_allreduce),
            (AGAIN, naive_allreduce),
            ("ring_allreduce", ring_allreduce),
        )
    }
    seconds = time_in_turn(contenders, rounds=40)
    title = f"Allreduce of {K} tensors of {NBYTES // 10**6} MB in one process"
    print_ratios(title, seconds, "naive_allreduce", {"ring_allreduce": 1.3})

    # an addition reads two and writes one, a copy one and one
    moved = (K - 1) * NBYTES * (3 + 2)
    bandwidth = copy_bandwidth(NBYTES)
    ratios = quartiles([t * bandwidth / moved for t in seconds["naive_allreduce"]])
    print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s, read and written", end="")
    print(f"; naive_allreduce moves {moved / 1e6:.0f} MB")
    print_goal("naive_allreduce : a copy of as many bytes", ratios, 1.3)


if __name__ == "__main__":
    main()
