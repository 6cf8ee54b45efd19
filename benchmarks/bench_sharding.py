"""A step of sharded training, against DDP and against torch's own, with Adam."""

from functools import partial

from timing import AGAIN, print_machine, print_ratios

from d2lpar import launch
from d2lpar.planning import time_in_turn

ROWS, WIDTH, LAYERS, RANKS = 256, 1024, 4, 2
# Only three of ours have lanes at once, and torch's are compared with one of them.
AGAINST_DDP = "DDP", AGAIN, "torch's DDP", "ZeRO-1", "torch's ZeRO-1", "ZeRO-3"
AGAINST_TORCHS = "torch's fully_shard", "torch's again", "ZeRO-3"


def measure(rank: int, world_size: int, names: tuple) -> dict[str, list[float]]:
    """Return each round's seconds of the ways to keep a part of the state, or more."""
    import torch
    from torch import nn
    from torch.distributed import fsdp, init_device_mesh
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from d2lpar import DistributedDataParallel, ShardedOptimizer, fully_shard

    X, adam = torch.randn(ROWS, WIDTH), torch.optim.Adam

    def step_of(wrap=None, shard=None, optimizer=adam):
        torch.manual_seed(0)
        pairs = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
        model = nn.Sequential(*[layer for pair in pairs for layer in pair])
        for part in (*model[::2], model) if shard else ():
            shard(part, reshard_after_forward=True)
        net = wrap(model) if wrap else model
        trained = optimizer(model.parameters(), lr=1e-3)

        def step():
            trained.zero_grad()
            net(X).square().mean().backward()
            trained.step()

        return step

    ddp, torchs_ddp = DistributedDataParallel, nn.parallel.DistributedDataParallel
    zero1 = partial(ShardedOptimizer, optimizer_class=adam)
    mesh = init_device_mesh("cpu", (world_size,))
    torchs_fsdp = partial(fsdp.fully_shard, mesh=mesh)
    torchs_zero1 = partial(ZeroRedundancyOptimizer, optimizer_class=adam)
    steps = {
        "DDP": partial(step_of, ddp),
        AGAIN: partial(step_of, ddp),
        "torch's DDP": partial(step_of, torchs_ddp),
        "ZeRO-1": partial(step_of, optimizer=zero1),
        "torch's ZeRO-1": partial(step_of, torchs_ddp, optimizer=torchs_zero1),
        "ZeRO-3": partial(step_of, shard=fully_shard),
        "torch's fully_shard": partial(step_of, shard=torchs_fsdp),
        "torch's again": partial(step_of, shard=torchs_fsdp),
    }
    return time_in_turn({name: steps[name]() for name in names}, 30)


def main():
    print_machine()
    title = f"{LAYERS} layers {WIDTH} wide, {ROWS} rows per rank, Adam, {RANKS} ranks"
    seconds = launch(measure, RANKS, AGAINST_DDP, timeout=600)[0]
    print_ratios(title, seconds, "DDP", {"ZeRO-1": 1.1, "ZeRO-3": 1.35})
    seconds = launch(measure, RANKS, AGAINST_TORCHS, timeout=600)[0]
    seconds[AGAIN] = seconds.pop("torch's again")
    print_ratios(title, seconds, "torch's fully_shard", {"ZeRO-3": 0.8})


if __name__ == "__main__":
    main()
