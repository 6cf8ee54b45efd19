"""How long it takes to start ranks that are ready to talk, the first time and again."""

import time

import torch
import torch.distributed as dist
from timing import quartiles

from d2lpar import launch
from d2lpar.devices import hardware


def reduce_once(rank, world_size):
    dist.all_reduce(torch.ones(1))


def seconds_of_a_launch(world_size):
    begin = time.perf_counter()
    launch(reduce_once, world_size)
    return time.perf_counter() - begin


def main():
    print(f"\nlaunch, with a process group and one all_reduce in it\n{hardware()}")
    print(f"first call, 2 ranks: {seconds_of_a_launch(2):.2f} s")
    for world_size, goal in ((2, "  goal <= 0.2 s"), (4, ""), (8, "")):
        low, middle, high = quartiles([seconds_of_a_launch(world_size) for _ in range(20)])
        print(f"again, {world_size} ranks: {middle:.3f} s ({low:.3f} to {high:.3f}){goal}")


if __name__ == "__main__":
    main()
