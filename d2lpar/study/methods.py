"""The methods of this book side by side: one network, one batch, one step of each.

Bytes are counted. Time is taken in turn, in another order in each round, within one
launch: a disturbance of the machine then hits all methods alike. Notebook 18 uses this
file.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ..data_parallel import DataParallel
from ..ddp import DistributedDataParallel
from ..devices import count_bytes
from ..memory import peak_memory
from ..mixed_precision import autocast
from ..models import lenet_layers
from ..pipeline import DistributedPipeline, cut
from ..schedules import cost, ring, star
from ..sharding import ShardedOptimizer, fully_shard
from .layers import TensorParallelLeNet

ALONE = "one device", "DataParallel"  # in one process: rank 0 works, the others wait
DATA = "DDP", "DDP, one bucket", "torch's DDP"  # the second is apex's delay_allreduce
SHARDED = "ZeRO-1", "ZeRO-3"
METHODS = (*ALONE, *DATA, *SHARDED, "pipeline", "tensor split")
# a control: with a free core for every rank as fast as one device
EACH = "each rank alone"
MICROBATCHES = 4
CAP_MB = 0.1  # of a bucket: LeNet has half a megabyte


class Method(NamedTuple):
    """A method on one rank, ready to train."""

    # one training step; its loss, where this rank has it
    step: Callable[[], torch.Tensor | None]
    optimizer: torch.optim.Optimizer


class Counts(NamedTuple):
    """What a method takes on a rank."""

    # bytes per step, by the busiest device; None: our ledger does not see it
    sent: int | None
    # likewise
    messages: int | None
    held: int  # bytes of parameters, and of the optimiser's state
    # bytes of all tensors at most; None: they are made in threads, and not seen
    peak: int | None


def make(
    name: str, X: torch.Tensor, y: torch.Tensor, region: autocast | None = None
) -> Method | None:
    """Return a method for LeNet, its weights always the same; None on an idle rank.

    Called on all ranks of a ``launch``, at most 4 for a pipeline. ``X`` (n, 1, 28, 28)
    and ``y`` (n,) are the whole batch, equal on all ranks; n is a multiple of their
    number, since DDP and the sharded methods take the mean over ranks. Forward passes
    compute in ``region``, or float32.
    """
    rank, k = dist.get_rank(), dist.get_world_size()
    _check(name, X, k)
    if name in ALONE and rank:
        return None
    region = region or autocast(enabled=False)
    layers = lenet_layers(0.05, torch.Generator().manual_seed(0))
    model = _wrap(name, layers, rank, k)
    if name in (*DATA, *SHARDED):
        X, y = X.tensor_split(k)[rank], y.tensor_split(k)[rank]
    if name == "pipeline":
        stages = pipeline_stages(layers, k)
        stages[rank] = _in_region(region, model)
        pipeline = DistributedPipeline(stages, _WideLoss(), MICROBATCHES, count=len)
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    if name == "ZeRO-1":
        sgd = partial(ShardedOptimizer, optimizer_class=sgd.func, **sgd.keywords)
    optimizer = sgd(model.parameters())

    def forward_backward() -> torch.Tensor | None:
        if name == "pipeline":
            return pipeline.forward_backward(X, y)
        with region:
            loss = _loss(model(X), y)
        loss.backward()
        return loss.detach()

    def step() -> torch.Tensor | None:
        optimizer.zero_grad()
        loss = forward_backward()
        optimizer.step()
        return loss

    return Method(step, optimizer)


def _check(name: str, X: torch.Tensor, k: int) -> None:
    if name not in (*METHODS, EACH):
        raise ValueError(f"there is no method {name!r}, but {', '.join(METHODS)}")
    if len(X) % k:
        raise ValueError(f"{len(X)} rows cannot be split evenly over {k} ranks")


def _wrap(name: str, layers: nn.Sequential, rank: int, k: int) -> nn.Module:
    if name == "pipeline":
        return pipeline_stages(layers, k)[rank]
    if name == "tensor split":
        return TensorParallelLeNet(list(layers.parameters()))
    if name == "DataParallel":
        return DataParallel(layers, device_ids=["cpu"] * k)
    if name == "torch's DDP":
        return nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=CAP_MB)
    if name in DATA:
        return DistributedDataParallel(
            layers, bucket_cap_mb=CAP_MB if name == "DDP" else 1e6
        )
    if name == "ZeRO-3":
        for layer in layers:
            if list(layer.parameters()):
                fully_shard(layer)
        return fully_shard(layers)
    return layers


def pipeline_stages(layers, k) -> list[nn.Sequential]:
    """Return k stages with about as many FLOP each."""
    return cut(layers, k, [207_360, 3_200_000, 204_800, 2_560])


def _in_region(region, module):
    forward = module.forward

    def call(*args):
        with region:
            return forward(*args)

    module.forward = call
    return module


def _loss(y_hat: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y_hat.float(), y)


class _WideLoss(nn.CrossEntropyLoss):
    def __init__(self):
        super().__init__(reduction="sum")

    def forward(self, y_hat, y):
        return super().forward(y_hat.float(), y)


def count_step(
    name: str, X: torch.Tensor, y: torch.Tensor, region: autocast | None = None
) -> Counts | None:
    """Return what a method takes on this rank in three steps, or None.

    The first step makes the optimiser's state and the second, with torch's wrapper,
    other buckets: messages are those of the third. The peak is that of all three, and
    of making the method.
    """
    if name in ALONE and dist.get_rank():
        return None

    def train() -> None:
        nonlocal method, ledger
        method = make(name, X, y, region)
        for _ in range(3):
            with count_bytes() as ledger:
                method.step()

    method = ledger = None
    peak = peak_memory(train, "cpu")
    seen = name != "torch's DDP"
    sent, messages = (
        _busiest(n) if seen else None for n in (ledger.bytes, ledger.messages)
    )
    state = [x for values in method.optimizer.state.values() for x in values.values()]
    params = method.optimizer.param_groups[0]["params"]
    params = list(getattr(method.optimizer, "shards", params))  # whole ones, in ZeRO-1
    held = sum(x.nbytes for x in params + state if isinstance(x, torch.Tensor))
    return Counts(sent, messages, held, None if name == "DataParallel" else peak)


def _busiest(sent: Counter) -> int:
    """Return the most sent by one position, of counts by (source, destination)."""
    total = Counter()
    for (src, _), n in sent.items():
        total[src] += n
    return max(total.values(), default=0)


def loss_after(
    steps: int,
    name: str,
    X: torch.Tensor,
    y: torch.Tensor,
    region: autocast | None = None,
) -> float | None:
    """Return the loss of this rank's rows in the last step; None if it has none."""
    method = make(name, X, y, region)
    if not method:
        return None
    value = [method.step() for _ in range(steps)][-1]
    return None if value is None else value.item()


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], median(ordered), ordered[-1 - len(ordered) // 4]


def ratios(
    seconds: dict[str, Sequence[float]], base: str
) -> dict[str, tuple[float, ...]]:
    """Return the three quartiles of the speed against ``base``, round by round."""
    return {
        name: quartiles([b / s for b, s in zip(seconds[base], own, strict=True)])
        for name, own in seconds.items()
    }


def unrest(*quartiles: tuple[float, float, float]) -> str:
    """Return a warning if quartiles of equal work are over a fifth off, else ""."""
    low, high = min(q[0] for q in quartiles), max(q[2] for q in quartiles)
    if low >= 0.8 and high <= 1.25:
        return ""
    reason = (
        "the machine is busy, or its cores share what they need. Distrust the times."
    )
    return f"The same work is {low:.2f} to {high:.2f} times as fast as itself: {reason}"


# Eight GPUs, predicted


class Published(NamedTuple):
    """NVIDIA's ResNet-50 measurements, in images per second, and an assumed link."""

    one_gpu: float
    eight_gpus: float
    link: float  # bytes per second, each way: assumed


# DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md,
# container 21.03 (March 2021; V100s of 16 GB):
# https://github.com/NVIDIA/DeepLearningExamples
PUBLISHED = {
    "DGX-1, V100, float32": Published(367, 2855, 130e9),
    "DGX-1, V100, mixed": Published(1200, 8322, 130e9),
    "DGX A100, TF32": Published(938, 7248, 250e9),
    "DGX A100, mixed": Published(2470, 16621, 250e9),
}
RESNET50_BYTES = 25_557_032 * 4  # of its gradients, in float32


def predict_images(
    one_gpu: float, link: float, *, method: str = "DDP", k: int = 8, rows: int = 256
) -> float:
    """Return the images per second of a method on ``k`` GPUs, from those of one.

    Backward takes two thirds of a step. With "DDP" the gradients travel in a ring while
    it runs, with "DDP, one bucket" afterwards; with "DataParallel" GPU 0 serves one GPU
    after the other. Latency (10 µs), ``rows`` per GPU and ``link`` (bytes per second)
    are assumptions.
    """
    schedules = {"DDP": ring, "DDP, one bucket": ring, "DataParallel": star}
    if method not in schedules:
        raise ValueError(f"method {method!r} is none of {', '.join(schedules)}")
    travel = cost(schedules[method], k, RESNET50_BYTES, lambda *_: (1e-5, 1 / link))
    step = rows / one_gpu
    hidden = 2 / 3 * step if method == "DDP" else 0
    return k * rows / (step - hidden + max(hidden, travel.seconds))
