"""DistributedDataParallel: the time of a step with ours, over lanes, against torch's over gloo."""

from functools import partial
from statistics import median

from timing import quartiles

from d2lpar import launch
from d2lpar.devices import hardware

GOALS = {"25 million parameters": 0.9, "60 small layers": 1.0, "LeNet": 1.08}
LINK = 1e9  # bytes a second of the link that is slowed on purpose


def networks() -> dict:
    """Return, by name, (a function that makes the network, one batch)."""
    import torch
    from torch import nn

    from d2lpar.network import LeNet

    def stack(width, depth):
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

    return {
        "25 million parameters": (partial(stack, 2500, 4), torch.randn(64, 2500)),
        "60 small layers": (partial(stack, 64, 60), torch.randn(64, 64)),
        "LeNet": (LeNet, torch.randn(128, 1, 28, 28)),
    }


def measure(rank: int, world_size: int, name: str, rounds: int) -> dict:
    """Return the seconds of each round, the slowest rank's, of torch's and of ours."""
    import time
    from concurrent.futures import ThreadPoolExecutor

    import torch
    import torch.distributed as dist
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
    slow_naive = d2lpar.DistributedDataParallel(make(), bucket_cap_mb=1e6)  # one, full at the end
    slow_naive.register_comm_hook(ThreadPoolExecutor(1), over_slow_link)
    models = {
        "torch": DistributedDataParallel(make()),
        "ours": d2lpar.DistributedDataParallel(make()),
        "slow link, one bucket": slow_naive,
        "slow link, overlapped": slow,
    }
    seconds = {name: [] for name in models}
    optimizers = {n: torch.optim.SGD(m.parameters(), lr=1e-4) for n, m in models.items()}
    for i in range(rounds + 3):
        for contender, model in models.items():
            dist.barrier()
            d2lpar.ranks.barrier()
            begin = time.perf_counter()
            optimizers[contender].zero_grad()
            model(X).square().mean().backward()
            optimizers[contender].step()
            if i >= 3:
                seconds[contender].append(time.perf_counter() - begin)
    times = torch.tensor([list(seconds.values())], dtype=torch.float64)
    slowest = d2lpar.ranks.all_gather(times).amax(dim=0)
    return dict(zip(seconds, slowest.tolist(), strict=True))


def main():
    print(hardware())
    for k in (2, 4):
        for name, goal in GOALS.items():
            seconds = launch(measure, k, name, 15 if name.startswith("25") else 60, timeout=400)[0]
            print(f"\n{name}, {k} ranks")
            for contender, times in seconds.items():
                print(f"  {contender:22} {1e3 * median(times):8.2f} ms")
            for a, b, words in (
                ("ours", "torch", f"goal <= {goal}"),
                ("slow link, overlapped", "slow link, one bucket", "below 1: overlap gains"),
            ):
                pairs = zip(seconds[a], seconds[b], strict=True)
                low, middle, high = quartiles([x / y for x, y in pairs])
                print(f"  {a} : {b} = {middle:.2f} ({low:.2f} to {high:.2f})  {words}")


if __name__ == "__main__":
    main()
