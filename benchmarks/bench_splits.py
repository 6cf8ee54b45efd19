"""What ``splits`` predicts for two ranks on this machine, beside what is measured.

Every split trains the same network on the same batch, with one thread per rank. A
speed-up is against one process of the same run, which trains the whole network.
"""

from statistics import median

from timing import print_machine, quartiles

from d2lpar import launch
from d2lpar.study.methods import time_in_turn

ROUNDS, MICROBATCHES = 20, 8


def networks() -> dict:
    """Return, by name, makers of the layers and their tensor split, and one batch."""
    import torch
    from torch import nn

    from d2lpar import init_params
    from d2lpar.models import Copy, Sum, lenet_layers
    from d2lpar.tensor_parallel.layers import TensorParallelLeNet, TensorParallelMLP

    def mlp():
        return nn.Sequential(
            Copy(), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512), Sum()
        )

    return {
        "LeNet, 256 rows": (
            lenet_layers,
            lambda: TensorParallelLeNet(init_params()),
            torch.rand(256, 1, 28, 28),
        ),
        "four MLPs 512 wide, 512 rows": (
            lambda: nn.Sequential(*[mlp() for _ in range(4)]),
            lambda: nn.Sequential(*[TensorParallelMLP(512, 2048) for _ in range(4)]),
            torch.rand(512, 512),
        ),
    }


def step_of(split: str, name: str):
    """Return this rank's module, and the function that computes a step's gradients."""
    import torch.distributed as dist
    from torch import nn

    import d2lpar
    from d2lpar.study.splits import profile

    make, make_tensor_split, X = networks()[name]
    k, rank = dist.get_world_size(), dist.get_rank()
    if split == "pipeline":
        flops = [sum(layer.flops) for layer in profile(make(), X[:2])]
        stage = d2lpar.cut(make(), k, flops)[rank]
        pipeline = d2lpar.DistributedPipeline(stage, nn.MSELoss(), MICROBATCHES)
        y = X.new_zeros(len(X), 10 if X.dim() == 4 else 512)
        return stage, lambda: pipeline.forward_backward(X, y)
    model = make_tensor_split() if split == "tensor" else make()
    if split == "data":
        model, X = d2lpar.DistributedDataParallel(model), X.tensor_split(k)[rank]
    return model, lambda: model(X).square().mean().backward()


def measure(rank: int, world_size: int, split: str, name: str) -> list[float]:
    """Return the seconds of each round, the slowest rank's."""
    module, gradients = step_of(split, name)

    def step():
        gradients()
        module.zero_grad()

    return time_in_turn({split: step}, ROUNDS)[split]


def machine():
    """Measure a core's speed and the messages between two ranks."""
    from d2lpar.study.splits import Machine

    alpha, long = (launch(allreduce_seconds, 2, numel)[0] for numel in (1, 2**20))
    return Machine("loopback", launch(core_flops, 1)[0], alpha, (long - alpha) / 2**22)


def allreduce_seconds(rank: int, world_size: int, numel: int) -> float:
    import time

    import torch

    from d2lpar import ranks

    tensor, seconds = torch.zeros(numel), []
    for _ in range(100):
        begin = time.perf_counter()
        ranks.allreduce(tensor)  # one message each way, at the same time
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[50]


def core_flops(rank: int, world_size: int) -> float:
    from timing import matmul_peak

    return matmul_peak(1024)


def main():
    from d2lpar.study.splits import SPLITS, cost_of, profile

    here = machine()
    print_machine()
    print(
        f"a core {here.flops / 1e9:.0f} GFLOP/s, a message {1e6 * here.alpha:.0f} µs"
        f" and then {1 / here.beta / 1e9:.1f} GB/s"
    )
    for name, (make, _, X) in networks().items():
        layers = profile(make(), X[:2])
        costs = {s: cost_of(s, layers, len(X), 2, here, MICROBATCHES) for s in SPLITS}
        print(f"\n{name}, two ranks")
        one = None
        for split, cost in costs.items():
            k = cost.num_devices
            seconds = launch(measure, k, split, name)[0]
            one = one or median(seconds)
            low, middle, high = quartiles([one / t for t in seconds])
            predicted = costs["one device"].seconds / cost.seconds
            print(
                f"{split:12} {1e3 * median(seconds):7.1f} ms (predicted"
                f" {1e3 * cost.seconds:5.1f}), {middle:5.2f} times as fast ({low:.2f}"
                f" to {high:.2f}; predicted {predicted:.2f})"
            )


if __name__ == "__main__":
    main()
