"""DistributedDataParallel: ours, over lanes or messages, against torch's over gloo.

A step; overlap, over a link that is slowed on purpose; and ``join``, with ranks of
which each has two more batches than the one before.
"""

from functools import partial

from timing import AGAIN, print_machine, print_ratios, ratio

from d2lpar import launch
from d2lpar.study.methods import time_in_turn

GOALS = {"25 million parameters": 0.9, "60 small layers": 1.0, "LeNet": 1.08}
JOIN_GOALS = {"lanes": 1.1, "messages": 1.3}
LINK = 1e9  # bytes per second of the link that is slowed on purpose


def networks() -> dict:
    """Return, by name, (a function that makes the network, one batch)."""
    import torch
    from torch import nn

    from d2lpar.models import lenet_layers

    def stack(width, depth):
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

    return {
        "25 million parameters": (partial(stack, 2500, 4), torch.randn(64, 2500)),
        "60 small layers": (partial(stack, 64, 60), torch.randn(64, 64)),
        "LeNet": (lenet_layers, torch.randn(128, 1, 28, 28)),
    }


def measure(rank: int, world_size: int, name: str, rounds: int) -> dict:
    """Return the seconds of each round, the slowest rank's, of torch's and of ours."""
    import time
    from concurrent.futures import ThreadPoolExecutor

    import torch
    from torch.nn.parallel import DistributedDataParallel

    import d2lpar

    make, X = networks()[name]

    def over_slow_link(link, bucket):
        future = torch.futures.Future()

        def send():
            time.sleep(bucket.buffer().nbytes / LINK)
            d2lpar.ranks.allreduce(bucket.buffer(), op="mean")
            future.set_result(bucket.buffer())

        link.submit(send)
        return future

    slow = d2lpar.DistributedDataParallel(make())
    slow.register_comm_hook(ThreadPoolExecutor(1), over_slow_link)
    # one, full at the end
    slow_naive = d2lpar.DistributedDataParallel(make(), bucket_cap_mb=1e6)
    slow_naive.register_comm_hook(ThreadPoolExecutor(1), over_slow_link)
    models = {
        "torch": DistributedDataParallel(make()),
        AGAIN: DistributedDataParallel(make()),
        "ours": d2lpar.DistributedDataParallel(make()),
        "slow link, one bucket": slow_naive,
        "slow link, overlapped": slow,
    }
    optimizers = {
        n: torch.optim.SGD(m.parameters(), lr=1e-4) for n, m in models.items()
    }

    def step(contender):
        optimizers[contender].zero_grad()
        models[contender](X).square().mean().backward()
        optimizers[contender].step()

    return time_in_turn({name: partial(step, name) for name in models}, rounds)


def measure_join(rank: int, world_size: int, way: str, rounds: int) -> dict:
    """Return the slowest rank's seconds per round: a loop in join, and leaving it."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import d2lpar

    make, X = networks()["60 small layers"]
    group = dist.new_group()
    if way == "messages":
        d2lpar.ranks.use_messages(group)
    models = {
        "torch": DistributedDataParallel(make()),
        AGAIN: DistributedDataParallel(make()),
        "ours": d2lpar.DistributedDataParallel(make(), process_group=group),
    }

    def loop(model):
        with model.join():
            for _ in range(4 + 2 * rank):
                model(X).square().mean().backward()

    return time_in_turn(
        {name: partial(loop, model) for name, model in models.items()}, rounds
    )


def main():
    print_machine()
    for k in (2, 4):
        for name, goal in GOALS.items():
            seconds = launch(
                measure, k, name, 15 if name.startswith("25") else 60, timeout=400
            )[0]
            print_ratios(f"A step, {name}, {k} ranks", seconds, "torch", {"ours": goal})
            gain = ratio(
                seconds["slow link, overlapped"], seconds["slow link, one bucket"]
            )
            print(
                f"overlapped : one bucket = {gain[1]:.2f} ({gain[0]:.2f} to"
                f" {gain[2]:.2f})"
            )
        for way, goal in JOIN_GOALS.items():
            seconds = launch(measure_join, k, way, 20, timeout=400)[0]
            title = f"A loop in join over {way}, 60 small layers, {k} ranks"
            print_ratios(title, seconds, "torch", {"ours": goal})


if __name__ == "__main__":
    main()
