"""What a training step costs in each split of a network: bytes, messages, memory, time.

``profile`` runs a network once and notes what every layer computes, holds and returns. From that
``cost_of`` computes a step on ``num_devices`` devices, split by data, by layers (a pipeline) or
inside layers. Notebook 07 compares them.

The model is simple. A layer's backward pass takes twice the time of its forward pass, which is its
floating-point operations through the device's speed. Messages cost what ``cost`` says, and all sums
are rings. Gradients travel while backward runs, and activations in a pipeline while stages work;
the sums inside layers are waited for.
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ..collectives.cost import closed_form
from ..collectives.schedules import ring
from ..devices import num_bytes
from ..models import Copy, Sum
from ..pipeline.partition import balance
from ..pipeline.schedules import bubble, live_counts, one_f_one_b, predict

SPLITS = ("one device", "data", "pipeline", "tensor")
ATTENTION = MappingProxyType(  # the CPU's kernel, which torch's counter does not know
    {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
            lambda q, k, v, *args, **kwargs: sdpa_flop_count(q, k, v)
        )
    }
)


class Layer(NamedTuple):
    """What a layer needs: bytes of float32, and of what depends on the batch, per example.

    Numbers are pairs: of what a split inside layers leaves whole on each device, and of what it
    divides.
    """

    flops: tuple[float, float]  # of the forward pass
    parameters: tuple[int, int]
    saved: tuple[float, float]  # for the backward pass
    output: float
    forward_sums: tuple[float, ...]  # sizes of what a split inside layers adds up
    backward_sums: tuple[float, ...]


class Machine(NamedTuple):
    """Devices and the links between them."""

    name: str
    flops: float  # a second and device
    alpha: float  # seconds a message
    beta: float  # seconds a byte


class SplitCost(NamedTuple):
    """A training step, of the busiest device."""

    split: str
    num_devices: int
    bytes: int  # sent
    messages: int  # sent
    memory: int  # bytes of parameters, gradients and activations
    idle: float  # part of the time in which it does not compute
    seconds: float


def profile(model: nn.Sequential, X: torch.Tensor) -> list[Layer]:
    """Run ``model`` on a small batch ``X``, and return what each of its layers needs.

    It is a forward pass in the mode that the model is in: BatchNorm's statistics may change.
    """
    watch, layers = _Watch(model), []
    try:
        for layer in model:
            output = watch.run(layer, X)
            layers.append(watch.result(X, output))
            X = output.detach().requires_grad_(output.is_floating_point())
    finally:
        watch.stop()
    return layers


class _Watch:
    """Hooks that note what happens between ``Copy`` and ``Sum``, and what outside of them."""

    def __init__(self, model: nn.Module):
        self.inside = False
        self.addresses = {param.data_ptr() for param in model.parameters()}
        self.hooks = []
        for part in model.modules():
            if isinstance(part, (Copy, Sum)):
                self.hooks.append(part.register_forward_hook(self._mark))
            elif any(True for _ in part.parameters(recurse=False)):
                self.hooks.append(part.register_forward_pre_hook(self._use))

    def run(self, layer: nn.Module, X: torch.Tensor) -> torch.Tensor:
        """Call a layer, and note."""
        self.flops, self.params, self.saved = [0, 0], [0, 0], {}
        self.sums, self.whole, self.counted = ([], []), {X.data_ptr()}, 0
        with (
            torch.enable_grad(),
            FlopCounterMode(display=False, custom_mapping=ATTENTION) as self.counter,
            saved_tensors_hooks(self._save, lambda tensor: tensor),
        ):
            output = layer(X)
            self._count()
        return output

    def result(self, X: torch.Tensor, output: torch.Tensor) -> Layer:
        """Return what the last call has needed."""
        n, saved = len(X), [0, 0]
        for address, (nbytes, inside) in self.saved.items():
            if address != output.data_ptr():  # that is the next layer's
                saved[inside and address not in self.whole] += nbytes
        return Layer(
            tuple(flops / n for flops in self.flops),
            tuple(self.params),
            tuple(nbytes / n for nbytes in saved),
            num_bytes(output) / n,
            *(tuple(nbytes / n for nbytes in sums) for sums in self.sums),
        )

    def stop(self) -> None:
        """Remove all hooks."""
        for hook in self.hooks:
            hook.remove()

    def _mark(self, marker: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        self._count()
        self.inside = isinstance(marker, Copy)
        if self.inside:
            self.whole.add(output.data_ptr())
        if not self.inside or output.requires_grad:
            self.sums[self.inside].append(num_bytes(output))

    def _count(self) -> None:
        total = self.counter.get_total_flops()
        self.flops[self.inside] += total - self.counted
        self.counted = total

    def _use(self, part: nn.Module, inputs: tuple) -> None:
        self.params[self.inside] += sum(map(num_bytes, part.parameters(recurse=False)))

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.addresses:
            self.saved[storage.data_ptr()] = storage.nbytes(), self.inside
        return tensor


def cost_of(
    split: str,
    layers: Sequence[Layer],
    batch_size: int,
    num_devices: int,
    machine: Machine,
    num_microbatches: int = 8,
) -> SplitCost:
    """Return what a step costs on the busiest device.

    Args:
        split: "one device", "data", "pipeline" or "tensor".
        layers: see ``profile``.
        batch_size: rows of the whole batch.
        num_devices: how many share the work.
        machine: the devices, and the links between them.
        num_microbatches: of the pipeline, which follows ``one_f_one_b``.

    Raises:
        ValueError: ``split`` is unknown, or there are fewer layers than stages.
    """
    functions = {"one device": _one, "data": _data, "pipeline": _pipeline, "tensor": _tensor}
    if split not in functions:
        raise ValueError(f"split is {split!r}, which is none of {', '.join(functions)}")
    if split == "pipeline":
        return _pipeline(layers, batch_size, num_devices, machine, num_microbatches)
    return functions[split](layers, batch_size, num_devices, machine)


def _one(layers, n, k, machine) -> SplitCost:
    seconds = 3 * n * _total(layers, "flops") / machine.flops
    memory = 2 * _total(layers, "parameters") + n * _total(layers, "saved")
    return SplitCost("one device", 1, 0, 0, round(memory), 0.0, seconds)


def _data(layers, n, k, machine) -> SplitCost:
    parameters = _total(layers, "parameters")
    rows = -(-n // k)  # of the largest shard
    forward = rows * _total(layers, "flops") / machine.flops
    busy = 3 * forward
    sent = closed_form(ring, k, parameters, machine.alpha, machine.beta)
    seconds = forward + max(2 * forward, sent.seconds)  # gradients travel during backward
    memory = 2 * parameters + rows * _total(layers, "saved")
    return SplitCost(
        "data", k, max(sent.sent), sent.steps, round(memory), 1 - busy / seconds, seconds
    )


def _pipeline(layers, n, k, machine, m) -> SplitCost:
    rows, begin, stages = n / m, 0, []
    for size in balance([sum(layer.flops) for layer in layers], k):
        stages.append(layers[begin : begin + size])
        begin += size
    forward = [rows * _total(stage, "flops") / machine.flops for stage in stages]
    cuts = [stage[-1].output for stage in stages[:-1]]  # bytes an example
    transfer = max((machine.alpha + rows * cut * machine.beta for cut in cuts), default=0.0)
    spans = predict(one_f_one_b(k, m), forward, [2 * seconds for seconds in forward], transfer)
    kept = live_counts(spans)
    memory = [
        2 * _total(stage, "parameters") + max(kept[s]) * rows * _total(stage, "saved")
        for s, stage in enumerate(stages)
    ]
    sent = [n * (left + right) for left, right in zip([0, *cuts], [*cuts, 0], strict=True)]
    messages = m * min(2, k - 1)  # a stage in the middle sends activations on, and gradients back
    seconds = max(span.end for span in spans)
    return SplitCost(
        "pipeline", k, round(max(sent)), messages, round(max(memory)), bubble(spans), seconds
    )


def _tensor(layers, n, k, machine) -> SplitCost:
    def share(name: str) -> float:
        """What is left whole, and a part of what is divided."""
        return _total(layers, name, 0) + _total(layers, name, 1) / k

    sums = [size for layer in layers for size in layer.forward_sums + layer.backward_sums]
    sent = [
        closed_form(ring, k, 4 * round(n * size / 4), machine.alpha, machine.beta) for size in sums
    ]
    busy = 3 * n * share("flops") / machine.flops
    seconds = busy + sum(cost.seconds for cost in sent)
    memory = 2 * share("parameters") + n * share("saved")
    num_bytes_sent = sum(max(cost.sent) for cost in sent)
    messages = sum(cost.steps for cost in sent)
    return SplitCost(
        "tensor", k, num_bytes_sent, messages, round(memory), 1 - busy / seconds, seconds
    )


def _total(layers: Sequence[Layer], name: str, part: int | None = None) -> float:
    """Add up a number of all layers: what is left whole (0), what is divided (1), or both."""
    pairs = [getattr(layer, name) for layer in layers]
    return sum(sum(pair) if part is None else pair[part] for pair in pairs)
