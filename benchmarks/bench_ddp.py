"""A step of DistributedDataParallel: ours against torch's over gloo, in one run."""

from functools import partial

from timing import AGAIN, print_machine, print_ratios

from d2lpar import launch
from d2lpar.planning import time_in_turn

GOALS = {"25 million parameters": 0.9, "60 small layers": 0.9, "LeNet": 1.05}


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
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import d2lpar

    make, X = networks()[name]
    models = {
        "torch": DistributedDataParallel(make()),
        AGAIN: DistributedDataParallel(make()),
        "ours": d2lpar.DistributedDataParallel(make()),
    }

    def step(model, optimizer):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()

    steps = {
        name: partial(step, model, torch.optim.SGD(model.parameters(), lr=1e-4))
        for name, model in models.items()
    }
    return time_in_turn(steps, rounds)


def main():
    print_machine()
    for k in (2, 4):
        for name, goal in GOALS.items():
            rounds = 15 if name.startswith("25") else 60
            seconds = launch(measure, k, name, rounds, timeout=400)[0]
            print_ratios(f"A step, {name}, {k} ranks", seconds, "torch", {"ours": goal})


if __name__ == "__main__":
    main()
