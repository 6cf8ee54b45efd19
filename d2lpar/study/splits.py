"""What a training step costs in each split of a network: bytes, messages, memory, time.

The model is simple. A layer's forward pass takes its floating-point operations divided
by the device's speed, and its backward pass twice as long. Messages cost what ``cost``
says, and all sums are rings. Gradients travel while backward runs, and activations in a
pipeline while stages work; the sums inside layers are waited for. Notebook 17 uses this
file.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ..models import Copy, Sum
from ..pipeline import cut
from ..pipeline_schedules import bubble, clock, kept, one_f_one_b
from ..schedules import Cost, cost, ring

SPLITS = ("one device", "data", "pipeline", "tensor")
# torch does not count it
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION = {FLASH: lambda q, k, v, *args, **kwargs: sdpa_flop_count(q, k, v)}


class Layer(NamedTuple):
    """What a layer needs: bytes of float32, and what each example adds.

    Pairs are (what a split inside layers leaves whole on each device, what it divides).
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
    flops: float  # per second and device
    alpha: float  # seconds per message
    beta: float  # seconds per byte


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
    """Run ``model`` on a small batch ``X``; return what each layer needs.

    It is a forward pass in the mode that the model is in: BatchNorm's statistics may
    change.
    """
    watch, layers = _Watch(model), []
    with ExitStack() as hooks:
        for part in model.modules():
            hooks.enter_context(part.register_forward_pre_hook(watch.enter))
        for layer in model:
            needs, output = watch.run(layer, X)
            layers.append(needs)
            X = output.detach().requires_grad_(output.is_floating_point())
    return layers


@dataclass
class _Tally:
    """What has been counted, inside or outside: operations, and bytes."""

    flops: int = 0
    parameters: int = 0
    saved: int = 0


class _Watch:
    """Notes what happens between ``Copy`` and ``Sum`` (inside), and outside of them."""

    def __init__(self, model: nn.Module):
        self.inside = False
        self.parameters = {param.data_ptr() for param in model.parameters()}

    def run(self, layer: nn.Module, X: torch.Tensor) -> tuple[Layer, torch.Tensor]:
        """Call a layer; return what it needs, and its output."""
        self.tallies = {False: _Tally(), True: _Tally()}  # outside and inside
        self.forward_sums, self.backward_sums = [], []  # bytes
        self.saved, self.counted = {}, 0
        # inside, each has a part of X
        self.whole = set() if self.inside else {X.data_ptr()}
        with (
            torch.enable_grad(),
            FlopCounterMode(display=False, custom_mapping=ATTENTION) as self.counter,
            saved_tensors_hooks(self._save, lambda tensor: tensor),
        ):
            output = layer(X)
            self._count_flops()
        for address, (nbytes, inside) in self.saved.items():
            if address != output.data_ptr():  # that is the next layer's
                self.tallies[inside and address not in self.whole].saved += nbytes
        outside, inside = self.tallies.values()
        layer = Layer(
            flops=(outside.flops / len(X), inside.flops / len(X)),
            parameters=(outside.parameters, inside.parameters),
            saved=(outside.saved / len(X), inside.saved / len(X)),
            output=output.nbytes / len(X),
            forward_sums=tuple(size / len(X) for size in self.forward_sums),
            backward_sums=tuple(size / len(X) for size in self.backward_sums),
        )
        return layer, output

    def enter(self, part: nn.Module, inputs: tuple) -> None:
        """Note that a part of the model is called."""
        if isinstance(part, (Copy, Sum)):
            self._count_flops()
            self.inside = isinstance(part, Copy)
            if not self.inside:
                self.forward_sums.append(inputs[0].nbytes)
            elif inputs[0].requires_grad:
                self.backward_sums.append(inputs[0].nbytes)
            if self.inside:
                self.whole.add(inputs[0].data_ptr())
        self.tallies[self.inside].parameters += sum(
            param.nbytes for param in part.parameters(recurse=False)
        )

    def _count_flops(self) -> None:
        total = self.counter.get_total_flops()
        self.tallies[self.inside].flops += total - self.counted
        self.counted = total

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.parameters:
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
    """Return what a step costs on the busiest device, from ``profile``'s layers.

    ``split`` is one of ``SPLITS``, ``batch_size`` the rows of the whole batch. The
    pipeline follows ``one_f_one_b``.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, which is none of {', '.join(SPLITS)}")
    if split == "pipeline":
        costs = _pipeline(layers, batch_size, num_devices, machine, num_microbatches)
    elif split == "tensor":
        costs = _tensor(layers, batch_size, num_devices, machine)
    else:
        num_devices = 1 if split == "one device" else num_devices
        costs = _data(layers, batch_size, num_devices, machine)
    return SplitCost(split, num_devices, *costs)


def _data(layers, n, k, machine) -> tuple:
    flops, parameters, saved = _add_up(layers)
    rows = -(-n // k)  # of the largest shard
    forward = rows * flops / machine.flops
    sent = cost(ring, k, round(parameters), lambda *_: (machine.alpha, machine.beta))
    backward = max(2 * forward, sent.seconds)  # gradients travel during backward
    seconds, waits = forward + backward, backward - 2 * forward
    memory = round(2 * parameters + rows * saved)
    return _busiest(sent, k), sent.steps, memory, waits / seconds, seconds


def _pipeline(layers, n, k, machine, m) -> tuple:
    rows, begin, stages = n / m, 0, []
    costs = [sum(layer.flops) for layer in layers]
    for part in cut([nn.Identity()] * len(layers), k, costs):
        stages.append(layers[begin : begin + len(part)])
        begin += len(part)
    flops, parameters, saved = zip(*map(_add_up, stages), strict=True)
    forward = [rows * number / machine.flops for number in flops]
    cuts = [stage[-1].output for stage in stages[:-1]]  # bytes per example
    transfer = max(
        (machine.alpha + rows * cut * machine.beta for cut in cuts), default=0.0
    )
    orders = one_f_one_b(k, m)
    # a backward pass takes twice as long: once for the input, once for the weights
    spans = clock(orders, forward, forward, forward, transfer)
    keeps = [max(kept(order)) for order in orders]
    memory = max(2 * parameters[s] + keeps[s] * rows * saved[s] for s in range(k))
    sent = max(n * (left + right) for left, right in pairwise([0, *cuts, 0]))
    # a stage in the middle sends activations on, and gradients back
    messages = m * min(2, k - 1)
    return (
        round(sent),
        messages,
        round(memory),
        bubble(spans),
        max(own[-1].end for own in spans),
    )


def _tensor(layers, n, k, machine) -> tuple:
    flops, parameters, saved = _add_up(layers, k)
    sizes = [
        size for layer in layers for size in layer.forward_sums + layer.backward_sums
    ]
    nbytes = [4 * round(n * size / 4) for size in sizes]
    link = machine.alpha, machine.beta
    sums = [cost(ring, k, size, lambda *_: link) for size in nbytes]
    waits = sum(one.seconds for one in sums)
    seconds = 3 * n * flops / machine.flops + waits
    memory = round(2 * parameters + n * saved)
    sent, messages = (
        sum(_busiest(one, k) for one in sums),
        sum(one.steps for one in sums),
    )
    return sent, messages, memory, waits / seconds, seconds


def _busiest(one: Cost, k: int) -> int:
    return max(one.sent(r) for r in range(k))


def _add_up(layers: Sequence[Layer], k: int = 1) -> list[float]:
    """Return flops, bytes of parameters and bytes saved, of one of ``k`` devices."""
    columns = zip(
        *[(layer.flops, layer.parameters, layer.saved) for layer in layers], strict=True
    )
    return [sum(whole + divided / k for whole, divided in column) for column in columns]
