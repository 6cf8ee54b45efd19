"""The methods of this book side by side: one network, one batch, and a step of each method.

What is exact is counted: bytes and messages sent, memory held and at the peak, the loss after ten
steps. Times are taken of all methods in turn, in another order in each round, within one launch: a
disturbance of the machine then hits all alike, and the ratio within a round means something.
Notebook 09 uses this file.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from . import ranks
from .cost import closed_form
from .data_parallel import DataParallel
from .ddp import DistributedDataParallel
from .devices import count_bytes
from .distributed_pipeline import DistributedPipeline
from .memory import peak_memory
from .mixed_precision import autocast
from .models import lenet_layers
from .network import channels_last
from .partition import cut
from .schedules import ring
from .splits import profile
from .tensor_parallel import TensorParallelLeNet

METHODS = (
    "one device",
    "DataParallel",
    "DDP",
    "DDP, one bucket",  # apex's delay_allreduce
    "torch's DDP",
    "pipeline",
    "tensor split",
)
ALONE = "one device", "DataParallel"  # in one process: rank 0 works, the others wait
MICROBATCHES = 4
CAP_MB = 0.1  # of a bucket: LeNet has half a megabyte


class Method(NamedTuple):
    """A method on one rank, ready to train."""

    step: Callable[[], torch.Tensor | None]  # one training step; its loss, where this rank has it
    optimizer: torch.optim.Optimizer


class Counts(NamedTuple):
    """What one step of a method takes on a rank."""

    sent: int | None  # bytes, by the busiest device of this rank; None: not by way of our ledger
    messages: int | None  # likewise
    held: int  # bytes of parameters, and of the optimiser's state
    peak: int | None  # bytes more than that, in the midst of a step; None: in threads, not seen


def make(name: str, X: torch.Tensor, y: torch.Tensor, region: autocast | None = None) -> Method:
    """Return a method for LeNet, with the same weights every time, as this rank of all takes part.

    Args:
        name: one of ``METHODS``.
        X: images (n, 1, 28, 28) of the whole batch, equal on all ranks.
        y: their classes (n,).
        region: in which forward passes compute; None: float32.
    """
    torch.manual_seed(0)
    layers, rank, k = lenet_layers(), dist.get_rank(), dist.get_world_size()
    for param in layers.parameters():
        if param.dim() == 4:  # as the tensor split has them: else it would be the faster network
            param.data = channels_last(param.data)
    region = region or autocast(enabled=False)
    if name == "pipeline":
        flops = [sum(layer.flops) for layer in profile(layers, X[:2])]
        stage = cut(layers, k, flops)[rank]
        stage.forward = region(stage.forward)
        pipeline = DistributedPipeline(stage, _loss, MICROBATCHES, count=len)
        optimizer = _optimizer(stage)
        return Method(_stepping(optimizer, partial(pipeline.forward_backward, X, y)), optimizer)
    model = _wrap(name, layers, k)
    if "DDP" in name:
        X, y = X.tensor_split(k)[rank], y.tensor_split(k)[rank]

    def forward_backward() -> torch.Tensor:
        with region.copy():
            value = _loss(model(X), y)
        value.backward()
        return value.detach()

    optimizer = _optimizer(model)
    return Method(_stepping(optimizer, forward_backward), optimizer)


def _wrap(name: str, layers: nn.Sequential, k: int) -> nn.Module:
    if name == "tensor split":  # takes linear weights as (inputs, outputs)
        return TensorParallelLeNet([p.T if p.dim() == 2 else p for p in layers.parameters()])
    wraps = {
        "one device": lambda layers: layers,
        "DataParallel": partial(DataParallel, device_ids=["cpu"] * k),
        "DDP": partial(DistributedDataParallel, bucket_cap_mb=CAP_MB),
        "DDP, one bucket": partial(DistributedDataParallel, bucket_cap_mb=1e6),
        "torch's DDP": partial(nn.parallel.DistributedDataParallel, bucket_cap_mb=CAP_MB),
    }
    return wraps[name](layers)


def _loss(y_hat: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y_hat.float(), y)


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def _stepping(optimizer: torch.optim.Optimizer, forward_backward: Callable) -> Callable:
    def step() -> torch.Tensor | None:
        optimizer.zero_grad()
        value = forward_backward()
        optimizer.step()
        return value

    return step


def takes_part(name: str) -> bool:
    """Return whether this rank has something to do in a method."""
    return name not in ALONE or dist.get_rank() == 0


def count_step(
    name: str, X: torch.Tensor, y: torch.Tensor, region: autocast | None = None
) -> Counts | None:
    """Return what the second step of a method takes on this rank; None if it takes no part."""
    if not takes_part(name):
        return None
    method = make(name, X, y, region)
    method.step()  # the optimiser makes its state
    with count_bytes() as ledger:
        peak = peak_memory(method.step, "cpu")
    sent, messages = _busiest(ledger.bytes), _busiest(ledger.messages)
    if name == "torch's DDP":
        sent = messages = None
    params = [param for group in method.optimizer.param_groups for param in group["params"]]
    states = [x for state in method.optimizer.state.values() for x in state.values()]
    held = sum(x.nbytes for x in params + states if isinstance(x, torch.Tensor))
    return Counts(sent, messages, held, None if name == "DataParallel" else peak)


def _busiest(sent: Counter) -> int:
    """Return the most that one position has sent, of bytes or messages by (source, destination)."""
    total = Counter()
    for (src, _), n in sent.items():
        total[src] += n * (src != "host")
    return max(total.values(), default=0)


def loss_after(
    steps: int, name: str, X: torch.Tensor, y: torch.Tensor, region: autocast | None = None
) -> float | None:
    """Return the loss in the last of several steps; None if this rank does not have it."""
    if not takes_part(name):
        return None
    method = make(name, X, y, region)
    value = [method.step() for _ in range(steps)][-1]
    return None if value is None else value.item()


def time_in_turn(
    steps: dict[str, Callable | None], rounds: int = 15, warm_up: int = 2, seed: int = 0
) -> dict[str, list[float]]:
    """Return each method's seconds in each round, all ranks together, from barrier to barrier.

    Called on all ranks, with the same names and the same seed of the order. None: this rank has no
    part in a method.
    """
    order, seconds = random.Random(seed), {name: [] for name in steps}
    for i in range(warm_up + rounds):
        for name in order.sample(list(steps), len(steps)):
            ranks.barrier()
            begin = time.perf_counter()
            (steps[name] or nullcontext)()
            ranks.barrier()
            if i >= warm_up:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def ratios(seconds: dict[str, Sequence[float]], base: str) -> dict[str, tuple[float, ...]]:
    """Return quartile, median, quartile of how many times as fast as ``base``, round by round."""
    table = {}
    for name, own in seconds.items():
        fast = sorted(b / s for b, s in zip(seconds[base], own, strict=True))
        table[name] = fast[len(fast) // 4], median(fast), fast[-1 - len(fast) // 4]
    return table


def unrest(quartiles: tuple[float, float, float]) -> str:
    """Return a warning if a method varies by more than a fifth against itself, else ""."""
    low, _, high = quartiles
    if low >= 0.8 and high <= 1.25:
        return ""
    return (
        "The machine is busy: one method against itself is, in the middle half of the rounds, "
        f"{low:.2f} to {high:.2f} times as fast. Distrust the times."
    )


# Eight GPUs, predicted


class Published(NamedTuple):
    """What NVIDIA has measured with ResNet-50, in images a second, and a link that we assume."""

    one_gpu: float
    eight_gpus: float
    link: float  # bytes a second, each way: assumed


# DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md, container 21.03
# (March 2021): https://github.com/NVIDIA/DeepLearningExamples
PUBLISHED = MappingProxyType(
    {
        "DGX-1, V100, float32": Published(367, 2855, 130e9),
        "DGX-1, V100, mixed": Published(1200, 8322, 130e9),
        "DGX A100, TF32": Published(938, 7248, 250e9),
        "DGX A100, mixed": Published(2470, 16621, 250e9),
    }
)
RESNET50_BYTES = 25_557_032 * 4  # of its gradients, in float32


def predict_images(one_gpu: float, link: float, k: int = 8, rows: int = 256) -> float:
    """Return the images a second of DDP on ``k`` GPUs, from those of one.

    Backward takes two thirds of a step, and gradients travel in a ring while it runs. Latency
    (10 µs), ``rows`` per GPU and ``link`` (bytes a second) are assumptions.
    """
    step = rows / one_gpu
    travel = closed_form(ring, k, RESNET50_BYTES, alpha=1e-5, beta=1 / link).seconds
    return k * rows / (step / 3 + max(2 * step / 3, travel))
