"""One iteration of DataParallel, its balanced form and DDP: what moves, what is kept.

Notebook 05 uses this file.
"""

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn

from ..data_parallel.ddp import DistributedDataParallel
from ..data_parallel.loss import DataParallelCriterion, put_together, shares
from ..data_parallel.replicas import (
    DataParallel,
    DataParallelModel,
    parallel_apply,
    replicate,
)
from ..data_parallel.scattering import gather, position, scatter, tensors_of
from ..devices import check_devices, count_bytes, num_bytes, to_device
from ..guards import checked
from ..ranks.launch import launch
from .memory import peak_memory, saved_memory

FORMS = "DataParallel", "balanced", "DDP"


class Step(NamedTuple):
    """One step of an iteration: what is sent on which link, or what devices compute."""

    name: str
    bytes: dict[tuple, int]  # (source, destination) -> bytes
    busy: tuple[int, ...] = ()  # positions


def _check_form(form, X, devices, **_) -> None:
    if form not in FORMS:
        raise ValueError(f"form is {form!r}, which is none of {', '.join(FORMS)}")
    if len(X) < len(devices):
        raise ValueError(f"{len(X)} rows are too few for {len(devices)} devices")


@checked(_check_form)
def trace(
    form: str, module: nn.Module, criterion: nn.Module, X, y, devices
) -> list[Step]:
    """Run ``form`` forward and backward; return its steps with what they sent.

    ``form`` is "DataParallel", "balanced" or "DDP", ``devices`` has one device per
    replica. The ``module``, which is left as it is, is on the first of them. The
    balanced form takes a criterion of torch's. DDP runs in one process per device, on
    the CPU, each with its part of the batch from the start; buffers, which it sends
    from the second iteration on, are not in its trace.
    """
    devices, everyone = check_devices(devices), tuple(range(len(devices)))
    module, criterion, X, y = (
        deepcopy(module),
        deepcopy(criterion),
        X.detach(),
        y.detach(),
    )
    if form == "DDP":
        shards = scatter((X.cpu(), y.cpu()), ["cpu"] * len(devices))
        sent = launch(_run_rank, len(devices), module.cpu(), criterion.cpu(), shards)
        computing = [
            Step(name, {}, everyone) for name in ("forward", "loss", "backward")
        ]
        return [*computing, Step("allreduce the gradients", sum(sent, Counter()))]
    steps, before = [], Counter()
    with count_bytes() as ledger:
        for name, busy in _steps(form, module, criterion, X, y, devices):
            steps.append(Step(name, ledger.bytes - before, everyone[:busy]))
            before = ledger.bytes.copy()
    return steps


def _steps(form, module, criterion, X, y, devices) -> Iterator[tuple[str, int]]:
    """Make the eight steps; yield after each its name and how many compute.

    In the balanced form the loss has parts: outputs stay where they are, only losses
    are sent.
    """
    k, shards = len(devices), scatter((X,), devices)
    if form == "balanced":
        targets = scatter((y,), devices)
    else:
        target = to_device(y, devices[0], position(y.device, devices), 0)
    yield "scatter the batch", 0
    replicas = replicate(module, devices)
    yield "replicate the module", 0
    outputs = parallel_apply(replicas, shards)
    yield "forward", k
    if form == "balanced":
        part, weights = shares(criterion, None, targets)
        ends = [part(outputs[i], *targets[i]) for i in weights]
        yield "loss", k
        losses = [
            to_device(loss, devices[0], i, 0)
            for i, loss in zip(weights, ends, strict=True)
        ]
        loss = put_together(criterion, losses, list(weights.values()))
        yield "add up the losses", 0
    else:
        ends = outputs
        output = gather(outputs, devices[0])
        yield "gather the outputs", 0
        loss = criterion(output, target)
        yield "loss", 1
    gradients = torch.autograd.grad(loss, ends)
    yield "scatter the gradients", 0
    state = chain(
        *[(*replica.parameters(), *replica.buffers()) for replica in replicas]
    )
    copies = [copy for copy in state if copy.requires_grad]
    found = torch.autograd.grad(ends, copies, gradients, allow_unused=True)
    yield "backward", k
    used = [
        (copy, grad)
        for copy, grad in zip(copies, found, strict=True)
        if grad is not None
    ]
    torch.autograd.backward(*zip(*used, strict=True))  # where the copies came from
    yield "add up the gradients", 0


def loss_of(form: str, module, criterion, X, y, devices) -> torch.Tensor:
    """Return the loss of a form that runs in one process."""
    if form == "DataParallel":
        return criterion(DataParallel(module, devices)(X), y.to(devices[0]))
    return DataParallelCriterion(criterion, devices)(
        DataParallelModel(module, devices)(X), y
    )


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


@checked(_check_form)
def memory_of(
    form: str, module: nn.Module, criterion: nn.Module, X, y, devices
) -> Memory:
    """Return what an iteration of ``form`` holds per device.

    On GPUs it is the peak that the allocator of each reports. On virtual devices it is
    counted: parameters with buffers; gradients, of parameters and of outputs; outputs;
    and activations: what else autograd saves. Not counted are the gradients inside the
    module and the criterion, which live for a moment of backward.
    """
    module, devices, X = deepcopy(module), check_devices(devices), X.detach()
    if all(device.type == "cuda" for device in devices) and len(set(devices)) == len(
        devices
    ):
        return Memory(
            _measure(form, module, criterion, X, y, devices), "peak of the allocator"
        )
    return Memory(_count(form, module, criterion, X, y, devices), "counted")


def _measure(form, module, criterion, X, y, devices) -> list[dict[str, int]]:
    def run(X, y, devices):
        own = (deepcopy(part).to(devices[0]) for part in (module, criterion))
        loss_of(form, *own, X, y, devices).backward()

    peaks, parts = [], [(X, y, devices)] * len(devices)
    if form == "DDP":  # each rank for itself: the others are not seen
        shards = scatter((X, y), devices)
        parts = [
            (*shard, [device]) for shard, device in zip(shards, devices, strict=True)
        ]
    for part, device in zip(parts, devices, strict=True):
        run(*part)  # what a library allocates once, and keeps, is there from now on
        peaks.append({"in all": peak_memory(partial(run, *part), device)})
    return peaks


def _count(form, module, criterion, X, y, devices) -> list[dict[str, int]]:
    state = [*module.parameters(), *module.buffers()]
    gradients = _bytes_of(
        [param for param in module.parameters() if param.requires_grad]
    )
    outputs, held = [], []
    shards = scatter((X, y), devices)
    for replica, (X_shard, y_shard) in zip(
        replicate(module, devices), shards, strict=True
    ):
        # a copy: not a view of the whole batch
        forward = partial(replica, X_shard.clone())
        output, saved = saved_memory(
            forward, [*replica.parameters(), *replica.buffers()]
        )
        if form != "DataParallel":
            saved += _saved_by_loss(criterion, output, y_shard)
        n = _bytes_of(output)
        own = {"gradients": gradients + n, "outputs": n, "activations": saved}
        held.append({"parameters": _bytes_of(state), **own})
        outputs.append(output)
    if form == "DataParallel":
        whole = gather(outputs, devices[0])
        held[0]["activations"] += _saved_by_loss(criterion, whole, y)
        # what is joined is there twice; of its gradient, parts are views
        if len(devices) > 1:
            held[0]["outputs"] += _bytes_of(whole)
            held[0]["gradients"] += _bytes_of(whole) - _bytes_of(outputs[0])
    if form != "DDP" and len(devices) > 1:
        held[0]["gradients"] += gradients  # the sum, beside those of replica 0
    return held


def _saved_by_loss(criterion, output, y) -> int:
    y = y.to(output.device)
    return saved_memory(
        partial(criterion, output, y), [output, y, *criterion.buffers()]
    )[1]


def _bytes_of(tree) -> int:
    return sum(map(num_bytes, tensors_of(tree)))
