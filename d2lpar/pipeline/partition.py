"""A model cut into stages: lists of layers, the largest as small as possible.

Notebook 13 uses this file. Source: Huang et al., GPipe (2019), which balances
computation.
"""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from itertools import accumulate
from statistics import median
from time import perf_counter

import torch
from torch import nn

from ..guards import checked
from .stages import call, modules_of


def _check_cut(model, num_stages, by, X) -> None:
    num_layers = len(modules_of(model, "the model"))
    if isinstance(by, str):
        if by not in ("count", "parameters", "time"):
            raise ValueError(
                f'by is {by!r}, which is none of "count", "parameters", "time"'
            )
        if by == "time" and X is None:
            raise ValueError('to cut by "time", pass a micro-batch X')
    elif len(by) != num_layers:
        raise ValueError(f"there are {len(by)} costs for {num_layers} layers")


@checked(_check_cut)
def cut(
    model: nn.Sequential | Sequence[nn.Module],
    num_stages: int,
    by: str | Sequence[float] = "count",
    X: torch.Tensor | None = None,
) -> list[nn.Sequential]:
    """Cut a model into stages of adjacent layers, the largest one minimal.

    The stages hold the model's own layers, not copies. A parameter must not be in two
    stages. ``by`` is what is balanced: the "count" of layers, their "parameters"
    (bytes), the "time" of their forward and backward pass, measured with a micro-batch
    ``X``, or a list of their costs.
    """
    layers, costs = modules_of(model, "the model"), by
    if by == "count":
        costs = [1] * len(layers)
    elif by == "parameters":
        costs = [sum(param.nbytes for param in layer.parameters()) for layer in layers]
    elif by == "time":
        costs = layer_seconds(layers, X)
    stages, begin = [], 0
    for size in balance(costs, num_stages):
        stages.append(nn.Sequential(*layers[begin : begin + size]))
        begin += size
    check_owners(stages)
    return stages


def check_owners(stages: list[nn.Sequential]) -> None:
    """Raise ValueError if a parameter is in two stages."""
    owners = {}
    for s, stage in enumerate(stages):
        for name, param in stage.named_parameters():
            if owners.setdefault(param, s) != s:
                shared = (
                    f"stages {owners[param]} and {s} share a parameter ({name} of stage"
                    f" {s})"
                )
                raise ValueError(f"{shared}: layers that do must be in one stage")


def _check_balance(costs, num_parts) -> None:
    if not 1 <= num_parts <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {num_parts} stages")


@checked(_check_balance)
def balance(costs: Sequence[float], num_parts: int) -> list[int]:
    """Return sizes of consecutive parts whose largest sum is as small as possible."""
    ends = [0, *accumulate(costs)]

    @cache
    def divide(n: int, parts: int) -> tuple[float, list[int]]:
        """Return (largest sum, sizes) of the first ``n`` elements in ``parts``."""
        if parts == 1:
            return ends[n], [n]
        ways = []
        for j in range(n - 1, parts - 2, -1):  # where the last part begins
            largest, sizes = divide(j, parts - 1)
            ways.append((max(largest, ends[n] - ends[j]), [*sizes, n - j]))
        return min(ways, key=lambda way: way[0])

    return divide(len(costs), num_parts)[1]


def layer_seconds(
    layers: Sequence[nn.Module], X: torch.Tensor, rounds: int = 10
) -> list[float]:
    """Measure each layer's forward and backward pass: median seconds of ``rounds``.

    Leaves gradients, buffers and random numbers as they are. ``X`` is the first layer's
    input.
    """
    seconds, X = [], X.detach()  # no gradient is needed for the first layer's input
    with torch.enable_grad(), torch.random.fork_rng([X.device] if X.is_cuda else []):
        for layer in map(deepcopy, layers):
            times = []
            for _ in range(2 + rounds):  # the first ones warm up
                layer.zero_grad()
                own = X.detach().clone().requires_grad_(X.requires_grad)
                begin = _time_when_done(X.device)
                output = call(layer, own)
                if output.requires_grad:
                    output.backward(torch.ones_like(output))
                times.append(_time_when_done(X.device) - begin)
            seconds.append(median(times[2:]))
            X = output.detach().requires_grad_(output.is_floating_point())
    return seconds


def _time_when_done(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()
