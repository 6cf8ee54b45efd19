"""How long it takes to start ranks that are ready to talk, the first time and again."""

import time

import torch
import torch.distributed as dist
from timing import print_goal, print_machine, quartiles

from d2lpar import launch


def reduce_once(rank, world_size):
    dist.all_reduce(torch.ones(1))


def seconds_of_a_launch(world_size):
    begin = time.perf_counter()
    launch(reduce_once, world_size)
    return time.perf_counter() - begin


def main():
    print_machine()
    print("launch, with a process group and one all_reduce in it")
    print(f"first call, 2 ranks: {seconds_of_a_launch(2):.2f} s")
    for world_size in (2, 4, 8):
        seconds = quartiles([seconds_of_a_launch(world_size) for _ in range(20)])
        print(
            f"again, {world_size} ranks: {seconds[1]:.3f} s ({seconds[0]:.3f} to"
            f" {seconds[2]:.3f})"
        )
        if world_size == 2:
            print_goal("a launch of 2 ranks, seconds", seconds, 0.2)


if __name__ == "__main__":
    main()
