"""A model cut into stages, and what a stage does with a micro-batch.

``cut`` divides a list of layers so that the largest stage is as small as can be. A ``Stage`` makes
the forward and the backward pass of its layers, apart from each other and from the other stages',
as the executors of a pipeline ask for it. Notebook 06 builds this file.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import accumulate
from statistics import median
from time import perf_counter

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .devices import num_bytes


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
    """
    layers = list(model)
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
    output = layer(entry.clone() if _writes_to_its_input(layer) else entry)
    if output.requires_grad:
        output.backward(torch.ones_like(output))
    wait()
    return perf_counter() - begin, output.detach()


class Stage:
    """What one stage does with the micro-batches of a batch, forward and backward apart.

    ``live`` holds, for each micro-batch between the two, what the backward pass needs: the stage's
    input, and its output with autograd's graph behind it. ``peak`` is how many it held at most.

    Args:
        module: the layers.
        recompute: see ``call``.
        finish: what the last stage does with a micro-batch's number and output: the loss.
    """

    def __init__(self, module: nn.Module, recompute: bool = False, finish: Callable | None = None):
        self.module, self.recompute, self.finish = module, recompute, finish
        self.live: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.peak = 0

    def forward(self, i: int, X: torch.Tensor) -> torch.Tensor:
        """Return the output for micro-batch ``i``, detached, but marked if it wants a gradient.

        ``X`` is a leaf.
        """
        with torch.inference_mode(False), torch.enable_grad():
            output = call(self.module, X, self.recompute)
            if self.finish:
                output = self.finish(i, output)
        self.live[i] = X, output
        self.peak = max(self.peak, len(self.live))
        return output.detach().requires_grad_(output.requires_grad)

    def backward(self, i: int, grad: torch.Tensor | None = None) -> torch.Tensor | None:
        """Go backward with micro-batch ``i``; return the gradient of its input, if it wants one.

        ``grad`` is the gradient of the output; a loss has none. The gradients of the parameters are
        added to, and the micro-batch is forgotten.
        """
        X, output = self.live.pop(i)
        if output.requires_grad:
            output.backward(grad)
        return torch.zeros_like(X) if X.requires_grad and X.grad is None else X.grad


def call(module: nn.Module, X: torch.Tensor, recompute: bool = False) -> torch.Tensor:
    """Call a stage's layers.

    With ``recompute`` autograd keeps only ``X``, and the backward pass begins with the forward pass
    once more, with the same random numbers and buffers: Chen et al., "Training Deep Nets with
    Sublinear Memory Cost" (2016). BatchNorm's running statistics are updated once.

    Where a layer works in place (its ``inplace`` is True), the first one gets a copy of ``X``. One
    that writes to its input without saying so must not come first.

    Raises:
        TypeError: the layers return anything but one tensor.
    """
    function = (lambda X: module(X.clone())) if _writes_to_its_input(module) else module
    if recompute:
        contexts = partial(_contexts, module)
        output = checkpoint(function, X, use_reentrant=False, context_fn=contexts)
    else:
        output = function(X)
    if not isinstance(output, torch.Tensor):
        raise TypeError(f"a stage must return one tensor, not a {type(output).__name__}")
    return output


def _writes_to_its_input(module: nn.Module) -> bool:
    """Tell whether a layer works in place, as ReLU(inplace=True) does: perhaps the first one.

    It must not write to what another stage has sent: that one's backward pass may need it.
    """
    return any(getattr(part, "inplace", False) for part in module.modules())


def _contexts(module: nn.Module) -> tuple:
    """Return what surrounds the two forward passes; called before the first."""
    copies = [
        (part, name, buffer.clone())
        for part in module.modules()
        for name, buffer in part.named_buffers("", False)
    ]
    return nullcontext(), _with_buffers(copies)


@contextmanager
def _with_buffers(copies: list[tuple]) -> Iterator[None]:
    """Let a module work on copies of its buffers, such as BatchNorm's statistics."""
    own = [(part, name, getattr(part, name)) for part, name, _ in copies]
    for part, name, buffer in copies:
        setattr(part, name, buffer)
    try:
        yield
    finally:
        for part, name, buffer in own:
            setattr(part, name, buffer)
