"""A model cut into stages: lists of layers, divided so that the largest is as small as can be.

What a layer costs is its number, its parameters or its measured time. Notebook 06 builds this file.
Source: Huang et al., GPipe (2019), which balances the computation of the stages.
"""

from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from statistics import median
from time import perf_counter

import torch
from torch import nn

from ..devices import num_bytes
from .stages import modules_of, writes_to_its_input


def cut(
    model: nn.Sequential | Sequence[nn.Module],
    num_stages: int,
    by: str | Sequence[float] = "count",
    X: torch.Tensor | None = None,
) -> list[nn.Sequential]:
    """Cut a model into stages of consecutive layers, the largest as small as possible.

    The stages hold the model's own layers, not copies.

    Args:
        model: an ``nn.Sequential`` or a list of modules, each called with what the last returned.
        num_stages: how many; every stage gets at least one layer.
        by: what is to be balanced: the "count" of layers, their "parameters" (bytes), the "time" of
            their forward and backward pass, measured with ``X``, or a list of a cost for each.
        X: a micro-batch, for "time".

    Raises:
        ValueError: there are fewer layers than stages, a cost is negative, ``by`` is unknown,
            "time" has no ``X``, or a parameter is in two stages.
        TypeError: ``model`` is a module of another kind, or holds what is no module.
    """
    layers = modules_of(model, "the model")
    costs = _costs(layers, by, X)
    stages, begin = [], 0
    for size in balance(costs, num_stages):
        stages.append(nn.Sequential(*layers[begin : begin + size]))
        begin += size
    owners = {}
    for s, stage in enumerate(stages):
        for name, param in stage.named_parameters():
            if owners.setdefault(param, s) != s:
                raise ValueError(
                    f"stages {owners[param]} and {s} share a parameter ({name} of stage {s}): "
                    "layers that do must be in one stage"
                )
    return stages


def balance(costs: Sequence[float], num_parts: int) -> list[int]:
    """Divide a list into consecutive parts, so that the largest sum of a part is smallest.

    Returns how many elements each part has, at least 1. Raises ValueError for fewer elements than
    parts and for costs that are negative.
    """
    if type(num_parts) is not int or num_parts < 1:
        raise ValueError(f"the number of stages must be a positive int, not {num_parts!r}")
    if len(costs) < num_parts:
        raise ValueError(f"{len(costs)} layers cannot be cut into {num_parts} stages")
    if not all(cost >= 0 for cost in costs):
        raise ValueError(f"costs must not be negative: {list(costs)}")
    ends = [0, *accumulate(costs)]

    @cache
    def divide(n: int, parts: int) -> tuple[float, tuple[int, ...]]:
        """Return (largest sum, sizes) of the first ``n`` elements, divided into ``parts``."""
        if parts == 1:
            return ends[n], (n,)
        ways = [(divide(j, parts - 1), j) for j in range(n - 1, parts - 2, -1)]
        (largest, sizes), j = min(ways, key=lambda way: max(way[0][0], ends[n] - ends[way[1]]))
        return max(largest, ends[n] - ends[j]), (*sizes, n - j)

    return list(divide(len(costs), num_parts)[1])


def _costs(layers: list[nn.Module], by: str | Sequence[float], X) -> Sequence[float]:
    if by == "count":
        return [1] * len(layers)
    if by == "parameters":
        return [sum(map(num_bytes, layer.parameters())) for layer in layers]
    if by == "time":
        if X is None:
            raise ValueError('to cut by "time", pass a micro-batch X')
        return layer_seconds(layers, X)
    if isinstance(by, str):
        raise ValueError(f'by is {by!r}, which is none of "count", "parameters", "time"')
    if len(by) != len(layers):
        raise ValueError(f"there are {len(by)} costs for {len(layers)} layers")
    return by


def layer_seconds(layers: Sequence[nn.Module], X: torch.Tensor, rounds: int = 10) -> list[float]:
    """Measure the forward and backward pass of each layer: the median of ``rounds``, in seconds.

    Leaves gradients, buffers and random numbers as they are. ``X`` is the first layer's input.
    """
    seconds, wants_gradient = [], False  # the first layer's input needs none
    for layer in layers:
        state = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        grads = [param.grad for param in layer.parameters()]
        times = []
        try:
            with torch.enable_grad(), torch.random.fork_rng([X.device] if X.is_cuda else []):
                for _ in range(2 + rounds):  # the first ones warm up
                    time, output = _time_layer(layer, X, wants_gradient)
                    times.append(time)
        finally:
            for name, buffer in layer.named_buffers():
                buffer.copy_(state[name])
            for param, grad in zip(layer.parameters(), grads, strict=True):
                param.grad = grad
        seconds.append(median(times[2:]))
        X, wants_gradient = output, output.is_floating_point()
    return seconds


def _time_layer(
    layer: nn.Module, X: torch.Tensor, wants_gradient: bool
) -> tuple[float, torch.Tensor]:
    """Return the seconds of one forward and backward pass, and the output."""
    for param in layer.parameters():
        param.grad = None
    wait = partial(torch.cuda.synchronize, X.device) if X.is_cuda else int
    entry = X.detach().clone().requires_grad_(wants_gradient)
    wait()
    begin = perf_counter()
    output = layer(entry.clone() if writes_to_its_input(layer) else entry)
    if output.requires_grad:
        output.backward(torch.ones_like(output))
    wait()
    return perf_counter() - begin, output.detach()
