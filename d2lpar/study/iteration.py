"""One iteration of DataParallel, of its balanced form and of DDP: what moves, and what is kept.

``trace`` runs an iteration and reads the steps from the ledger; ``memory`` measures or counts what
each device holds. Notebook 04 shows both.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

from ..data_parallel.ddp import DistributedDataParallel
from ..data_parallel.loss import DataParallelCriterion
from ..data_parallel.replicas import DataParallel, DataParallelModel, replicate
from ..data_parallel.scattering import gather, position, scatter, tensors_of
from ..devices import check_devices, count_bytes, move, num_bytes
from ..ranks.launcher import launch
from .memory import peak_memory, saved_memory


class Step(NamedTuple):
    """One step of an iteration: what is sent on which link, or which devices compute."""

    name: str
    bytes: dict[tuple, int]  # (source, destination) -> bytes
    busy: tuple[int, ...] = ()  # positions


# Of each form the steps, in order: kinds of messages of the ledger, or who computes.
STEPS = MappingProxyType(
    {
        "DataParallel": {
            "scatter the batch": ("inputs", "targets"),
            "replicate the module": ("parameters", "buffers"),
            "forward": "all",
            "gather the outputs": ("outputs",),
            "loss": "first",
            "scatter the gradients": ("gradient of outputs",),
            "backward": "all",
            "add up the gradients": ("gradient of parameters", "gradient of buffers"),
        },
        "balanced": {
            "scatter the batch": ("inputs", "targets"),
            "replicate the module": ("parameters", "buffers"),
            "forward": "all",
            "loss": "all",
            "add up the losses": ("losses",),
            "scatter the gradients": ("gradient of losses",),
            "backward": "all",
            "add up the gradients": ("gradient of parameters", "gradient of buffers"),
        },
        "DDP": {
            "forward": "all",
            "loss": "all",
            "backward": "all",
            "allreduce the gradients": ("",),  # messages between ranks have no name of their own
        },
    }
)


def trace(
    form: str,
    module: nn.Module,
    criterion: nn.Module,
    X: torch.Tensor,
    y: torch.Tensor,
    devices: Sequence[torch.device],
) -> list[Step]:
    """Run a forward and a backward pass of ``form``, and return its steps with what they sent.

    ``module`` is left as it is. The batch starts where ``X`` and ``y`` are. DDP runs in one process
    a device, on the CPU (the bytes are the same on GPUs), each with its part of the batch from the
    start; buffers, which it sends from the second iteration on, are not in its trace.

    Args:
        form: "DataParallel", "balanced" or "DDP".
        module: with all parameters and buffers on ``devices[0]``.
        criterion: called with (output, target); one of torch's, for the balanced form.
        X: the inputs, with at least one row a device.
        y: their targets.
        devices: one a replica.
    """
    _check(form, X, devices)
    module, criterion = deepcopy(module), deepcopy(criterion)
    X, y, devices = X.detach(), y.detach(), check_devices(devices)
    if form == "DDP":
        kinds = _run_ranks(module, criterion, X, y, len(devices))
    else:
        with count_bytes() as ledger:
            loss_of(form, module, criterion, devices)(X, y).backward()
        kinds = ledger.kinds
    steps = []
    for name, what in STEPS[form].items():
        if isinstance(what, tuple):
            steps.append(Step(name, sum((kinds.pop(kind, Counter()) for kind in what), Counter())))
        else:
            steps.append(Step(name, {}, tuple(range(len(devices) if what == "all" else 1))))
    assert not kinds, f"messages that belong to no step: {kinds}"
    return steps


def loss_of(
    form: str, module: nn.Module, criterion: nn.Module, devices: list[torch.device]
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the function (X, y) -> loss of a form that runs in one process."""
    if form == "DataParallel":
        model = DataParallel(module, devices)
        src = partial(position, devices=devices)
        return lambda X, y: criterion(model(X), move(y, devices[0], src(y.device), 0, "targets"))
    model = DataParallelModel(module, devices)
    parallel_criterion = DataParallelCriterion(criterion, devices)
    return lambda X, y: parallel_criterion(model(X), y)


def _run_ranks(module, criterion, X, y, k: int) -> dict[str, Counter]:
    module, criterion = module.cpu(), criterion.cpu()
    shards = scatter((X.cpu(), y.cpu()), ["cpu"] * k)
    return {"": sum(launch(_run_rank, k, module, criterion, shards), Counter())}


def _run_rank(rank: int, world_size: int, module, criterion, shards) -> Counter:
    X, y = shards[rank]
    model = DistributedDataParallel(module)
    with count_bytes() as ledger:
        criterion(model(X), y).backward()
    return ledger.bytes


class Memory(NamedTuple):
    """What each device holds, in bytes by kind, and how that was found out."""

    devices: list[dict[str, int]]
    method: str


def memory(
    form: str,
    module: nn.Module,
    criterion: nn.Module,
    X: torch.Tensor,
    y: torch.Tensor,
    devices: Sequence[torch.device],
) -> Memory:
    """Return what an iteration of ``form`` holds on each device; the arguments are ``trace``'s.

    On GPUs, one a position, it is the peak that the allocator of each reports. On virtual devices
    it is counted for each position: parameters with buffers; gradients, of parameters and of
    outputs; outputs; and activations, which is what else autograd saves for the backward pass. That
    is an upper bound, since not all of it is there at the same time.
    """
    _check(form, X, devices)
    module, devices, X = deepcopy(module), check_devices(devices), X.detach()
    if all(device.type == "cuda" for device in devices) and len(set(devices)) == len(devices):
        return Memory(_measure(form, module, criterion, X, y, devices), "peak of the allocator")
    return Memory(_count(form, module, criterion, X, y, devices), "counted")


def _measure(form, module, criterion, X, y, devices) -> list[dict[str, int]]:
    if form == "DDP":  # each rank for itself: the others are not seen
        parts = [
            ([device], *part)
            for device, part in zip(devices, scatter((X, y), devices), strict=True)
        ]
    else:
        parts = [(devices, X, y)] * len(devices)

    def run(devices, X, y):
        own = [deepcopy(part).to(devices[0]) for part in (module, criterion)]
        loss_of("balanced" if form == "DDP" else form, *own, devices)(X, y).backward()

    peaks = []
    for device, part in zip(devices, parts, strict=True):
        run(*part)  # what a library allocates once, and keeps, is there from now on
        peaks.append({"in all": peak_memory(partial(run, *part), device)})
    return peaks


def _count(form, module, criterion, X, y, devices) -> list[dict[str, int]]:
    parameters = _bytes_of([*module.parameters(), *module.buffers()])
    gradients = _bytes_of([param for param in module.parameters() if param.requires_grad])
    replicas, shards = replicate(module, devices), scatter((X, y), devices)
    held, outputs = [], []
    for replica, (X_shard, y_shard) in zip(replicas, shards, strict=True):
        X_shard = X_shard.clone()  # not a view of the whole batch
        state = [*replica.parameters(), *replica.buffers()]
        output, saved = saved_memory(partial(replica, X_shard), state)
        outputs.append(output)
        held.append({"parameters": parameters, "gradients": gradients + _bytes_of(output)})
        held[-1] |= {"outputs": _bytes_of(output), "activations": saved}
        if form != "DataParallel":
            held[-1]["activations"] += _saved_by_loss(criterion, output, y_shard)
    if form == "DataParallel":
        whole = gather(outputs, devices[0])
        held[0]["activations"] += _saved_by_loss(criterion, whole, y)
        if len(devices) > 1:  # what is joined is there twice; of its gradient, parts are views
            held[0]["outputs"] += _bytes_of(whole)
            held[0]["gradients"] += _bytes_of(whole) - _bytes_of(outputs[0])
    if form != "DDP" and len(devices) > 1:
        held[0]["gradients"] += gradients  # the sum, beside those of replica 0
    return held


def _saved_by_loss(criterion, output, y) -> int:
    y = y.to(output.device)
    return saved_memory(partial(criterion, output, y), [output, y, *criterion.buffers()])[1]


def _bytes_of(tree) -> int:
    return sum(map(num_bytes, tensors_of(tree)))


def _check(form: str, X: torch.Tensor, devices: Sequence[torch.device]) -> None:
    if form not in STEPS:
        raise ValueError(f"form is {form!r}, which is none of {', '.join(STEPS)}")
    if len(X) < len(devices):
        raise ValueError(f"{len(X)} rows are too few for {len(devices)} devices")
