"""All methods of the book, one network, one batch: what each sends, holds and takes.

What is counted comes first, since it is the same on every machine. Then the times, of
all methods in turn; then sharded training against torch's, for a network with more
parameters; then eight GPUs, predicted from one and beside what NVIDIA has published.
"""

from functools import partial
from statistics import median

from timing import AGAIN, print_machine, print_ratios

from d2lpar import launch
from d2lpar.study import methods

ROWS, STEPS, RANKS = 256, 10, 2
CONTROLS = {("one device", "again"): "one device", ("each rank", "alone"): methods.EACH}
REAL = "one device", "DDP"  # timed in the 16 bits of the CPU, too


def variants() -> dict:
    """Return, by (method, bits), the region in which it computes."""
    import torch

    from d2lpar import autocast

    emulated = autocast("cpu", torch.bfloat16, emulate=True)
    regions = {"float32": None, "16 bits": emulated}
    return {
        (name, bits): region
        for name in methods.METHODS
        for bits, region in regions.items()
    }


def compare(rank: int, world_size: int) -> tuple:
    """Return this rank's counts and losses, and the seconds of each round."""
    import torch

    from d2lpar import autocast, load_data_fashion_mnist

    X, y = next(iter(load_data_fashion_mnist(ROWS, device="cpu")[0]))
    counts, losses, steps = {}, {}, {}
    for (name, bits), region in variants().items():
        real = None if bits == "float32" else autocast("cpu", torch.bfloat16)
        counts[name, bits] = methods.count_step(name, X, y, real)
        losses[name, bits] = methods.loss_after(STEPS, name, X, y, region)
        steps[name, bits] = _step(name, X, y, region)
    for name in REAL:
        steps[name, "16 bits of the CPU"] = _step(
            name, X, y, autocast("cpu", torch.bfloat16)
        )
    for key, name in CONTROLS.items():
        steps[key] = _step(name, X, y, None)
    return counts, losses, methods.time_in_turn(steps)


def _step(name, X, y, region):
    method = methods.make(name, X, y, region)
    return method.step if method else None


WIDTH, LAYERS = 1024, 4
ZERO = "torch's DDP", "ZeRO-1", "torch's ZeRO-1", "ZeRO-3"
FSDP = "torch's fully_shard", "ZeRO-3", "ZeRO-3, prefetch"


def shard_in_turn(rank: int, world_size: int, names: tuple) -> dict[str, list[float]]:
    """Return each round's seconds, for ways to keep a part of the state or more.

    Only three models have lanes: so DDP, ours, ZeRO-3 and one more of ours.
    """
    import torch
    from torch import nn
    from torch.distributed import fsdp
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from d2lpar import DistributedDataParallel, ShardedOptimizer, fully_shard

    def step_of(wrap=None, shard=None, optimizer=torch.optim.Adam):
        torch.manual_seed(0)
        layers = [
            part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())
        ]
        model = nn.Sequential(*layers)
        for part in (*layers[::2], model) if shard else ():
            shard(part, reshard_after_forward=True)
        net, trained = (
            wrap(model) if wrap else model,
            optimizer(model.parameters(), lr=1e-3),
        )

        def step():
            trained.zero_grad()
            net(X).square().mean().backward()
            trained.step()

        return step

    X, adam = torch.randn(ROWS, WIDTH), torch.optim.Adam
    ddp, torchs_ddp = DistributedDataParallel, nn.parallel.DistributedDataParallel
    zero1 = partial(ShardedOptimizer, optimizer_class=adam, averages=True)
    torchs_zero1 = partial(ZeroRedundancyOptimizer, optimizer_class=adam)
    steps = {
        "DDP": partial(step_of, ddp),
        AGAIN: partial(step_of, ddp),
        "torch's DDP": partial(step_of, torchs_ddp),
        "ZeRO-1": partial(step_of, optimizer=zero1),
        "torch's ZeRO-1": partial(step_of, torchs_ddp, optimizer=torchs_zero1),
        "ZeRO-3": partial(step_of, shard=fully_shard),
        "ZeRO-3, prefetch": partial(step_of, shard=partial(fully_shard, prefetch=True)),
        "torch's fully_shard": partial(step_of, shard=fsdp.fully_shard),
    }
    return methods.time_in_turn(
        {name: steps[name]() for name in names}, rounds=30, warm_up=5
    )


def main():
    print_machine()
    results = launch(compare, RANKS, timeout=3600)
    counts, losses, seconds = zip(*results, strict=True)
    print(
        f"LeNet, {ROWS} images, {RANKS} ranks or devices. Per step, of the busiest;"
        " '-': not seen"
    )
    print(
        f"{'':28}{'sent, kB':>10}{'messages':>10}{'held, kB':>10}"
        f"{'peak, kB':>10}{'loss':>9}"
    )
    for key in counts[0]:
        columns = zip(*[count[key] for count in counts if count[key]], strict=True)
        own = [loss[key] for loss in losses if loss[key] is not None]
        print(f"{_name(key):28}{_row(columns)}{sum(own) / len(own):9.4f}")
    print(f"('loss': in step {STEPS}, 16 bits emulated)\n\n1 thread per rank")
    table = methods.ratios(seconds[0], ("one device", "float32"))
    print(methods.unrest(*[table[key] for key in CONTROLS]) or "The machine is quiet.")
    print(f"{'':28}{'median':>11}  times as fast as one device (quartiles)")
    for key, (low, middle, high) in table.items():
        milliseconds = 1e3 * median(seconds[0][key])
        print(
            f"{_name(key):28}{milliseconds:8.1f} ms  {middle:5.2f} ({low:.2f} to"
            f" {high:.2f})"
        )
    title = f"{LAYERS} layers {WIDTH} wide, {ROWS} rows per rank, Adam, {RANKS} ranks"
    seconds = launch(shard_in_turn, RANKS, ("DDP", *ZERO, AGAIN), timeout=3600)[0]
    print_ratios(title, seconds, "DDP", {"ZeRO-1": 1.1, "ZeRO-3": 1.35})
    seconds = launch(shard_in_turn, RANKS, ("DDP", *FSDP), timeout=3600)[0]
    print_ratios(title, seconds, "torch's fully_shard", {"ZeRO-3": 1.0})
    print(
        "\nResNet-50 on eight GPUs, images per second: predicted from one, and"
        " published (NVIDIA)"
    )
    print(f"{'':28}{'DDP':>8} {'one bucket':>10} {'DataParallel':>12} {'published':>9}")
    for name, row in methods.PUBLISHED.items():
        ddp, bucket, parallel = (
            methods.predict_images(row.one_gpu, row.link, method=method)
            for method in ("DDP", "DDP, one bucket", "DataParallel")
        )
        off = 100 * (ddp / row.eight_gpus - 1)
        predicted = f"{ddp:8.0f} {bucket:10.0f} {parallel:12.0f}"
        print(f"{name:28}{predicted} {row.eight_gpus:9}  DDP {off:+.0f} %")
    print(
        "Assumed: links of 130 and 250 GB/s each way, 256 images per GPU, 10 µs per"
        " message."
    )


def _name(key: tuple[str, str]) -> str:
    return ", ".join(key)


def _row(columns) -> str:
    """Return sent, messages, held and peak, of the rank that has most of each."""
    sent, messages, held, peak = (
        None if None in column else max(column) for column in columns
    )
    cells = [
        _kilobytes(sent),
        "-" if messages is None else messages,
        *map(_kilobytes, (held, peak)),
    ]
    return "".join(f"{cell:>10}" for cell in cells)


def _kilobytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e3:,.0f}"


if __name__ == "__main__":
    main()
