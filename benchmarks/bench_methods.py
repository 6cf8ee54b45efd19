"""All methods of the book for one network and one batch: what each sends, holds, and takes.

What is counted comes first, since it is the same on every machine. Then the times, of all methods
in turn; then eight GPUs, predicted from one and beside what NVIDIA has published.
"""

from timing import quartiles

from d2lpar import launch, methods
from d2lpar.devices import hardware

ROWS, STEPS, RANKS = 256, 10, 2
AGAIN = "one device", "again"


def variants() -> dict:
    """Return, by (method, bits), the region in which it computes."""
    import torch

    from d2lpar import autocast

    emulated = autocast("cpu", torch.bfloat16, emulate=True)
    regions = {"float32": None, "16 bits": emulated}
    return {(name, bits): region for name in methods.METHODS for bits, region in regions.items()}


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
    steps[AGAIN] = _step(AGAIN[0], X, y, None)
    steps["one device", "16 bits of the CPU"] = _step(
        "one device", X, y, autocast("cpu", torch.bfloat16)
    )
    return counts, losses, methods.time_in_turn(steps)


def _step(name, X, y, region):
    return methods.make(name, X, y, region).step if methods.takes_part(name) else None


def main():
    results = launch(compare, RANKS, timeout=3600)
    counts, losses, seconds = zip(*results, strict=True)
    print(
        f"LeNet, {ROWS} images, {RANKS} ranks or devices. Per step, of the busiest; '-': not seen"
    )
    print(f"{'':28}{'sent, kB':>10}{'messages':>10}{'held, kB':>10}{'peak, kB':>10}{'loss':>9}")
    for key in counts[0]:
        columns = zip(*[count[key] for count in counts if count[key]], strict=True)
        own = [loss[key] for loss in losses if loss[key] is not None]
        print(f"{_name(key):28}{_row(columns)}{sum(own) / len(own):9.4f}")
    print(f"('loss': in step {STEPS}, 16 bits emulated)\n\n{hardware()}, 1 thread per rank")
    table = methods.ratios(seconds[0], ("one device", "float32"))
    print(methods.unrest(table[AGAIN]) or "The machine is quiet.")
    print(f"{'':28}{'median':>11}  times as fast as one device (quartiles)")
    for key, (low, middle, high) in table.items():
        median = 1e3 * quartiles(seconds[0][key])[1]
        print(f"{_name(key):28}{median:8.1f} ms  {middle:5.2f} ({low:.2f} to {high:.2f})")
    print(
        "\nResNet-50 on eight GPUs, images per second: predicted from one, and published (NVIDIA)"
    )
    for name, row in methods.PUBLISHED.items():
        predicted = methods.predict_images(row.one_gpu, row.link)
        off = 100 * (predicted / row.eight_gpus - 1)
        print(f"{name:28}{predicted:8.0f} {row.eight_gpus:8.0f}  {off:+.0f} %")


def _name(key: tuple[str, str]) -> str:
    return ", ".join(key)


def _row(columns) -> str:
    """Return sent, messages, held and peak, of the rank that has most of each."""
    sent, messages, held, peak = (None if None in column else max(column) for column in columns)
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
