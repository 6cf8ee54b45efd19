"""What a stage of a pipeline does with a micro-batch. Notebook 13 builds this file."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint


class Stage:
    """What one stage does with micro-batches, forward and backward apart.

    ``live`` stores what backward needs of each micro-batch: the stage's input, and its
    output with autograd's graph. On the last stage, ``finish(i, output)`` returns the
    loss of micro-batch i.
    """

    def __init__(
        self, module: nn.Module, recompute: bool = False, finish: Callable | None = None
    ):
        self.module, self.recompute, self.finish = module, recompute, finish
        self.live: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.peak = 0

    def forward(self, i: int, X: torch.Tensor) -> torch.Tensor:
        """Return the output for micro-batch ``i``, detached.

        ``X`` is a leaf. Without rows it is passed on as it is.
        """
        with torch.inference_mode(False), torch.enable_grad():
            # no row was left
            output = call(self.module, X, self.recompute) if len(X) else X
            if self.finish:
                output = self.finish(i, output)
        self.live[i] = X, output
        self.peak = max(self.peak, len(self.live))
        return output.detach().requires_grad_(output.requires_grad)

    def backward(self, i: int, grad: torch.Tensor | None = None) -> torch.Tensor | None:
        """Run backward on micro-batch ``i``; return its input's gradient, if any."""
        X, output = self.live.pop(i)
        if output.requires_grad:
            output.backward(grad)
        return torch.zeros_like(X) if X.requires_grad and X.grad is None else X.grad


def call(module: nn.Module, X: torch.Tensor, recompute: bool = False) -> torch.Tensor:
    """Call a stage's layers.

    With ``recompute`` autograd keeps only ``X``, and the backward pass begins with a
    second forward pass, with the same random numbers and buffers: Chen et al.,
    "Training Deep Nets with Sublinear Memory Cost" (2016). BatchNorm's running
    statistics are updated once. A layer that writes to its input must not come first,
    unless its ``inplace`` says so: then it gets a copy.
    """
    passes = [module]
    if recompute:  # the second pass works on copies of the buffers, as they are now
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        passes.append(partial(functional_call, module, buffers))

    def forward(X: torch.Tensor) -> torch.Tensor:
        return passes.pop(0)(X.clone() if works_in_place(module) else X)

    return one_tensor(
        checkpoint(forward, X, use_reentrant=False) if recompute else forward(X)
    )


def works_in_place(module: nn.Module) -> bool:
    """Tell whether a layer works in place: its input is then copied."""
    return any(getattr(part, "inplace", False) for part in module.modules())


def one_tensor(output) -> torch.Tensor:
    """Return what a stage has made; raise TypeError unless it is a tensor."""
    if not isinstance(output, torch.Tensor):
        raise TypeError(
            f"a stage must return one tensor, not a {type(output).__name__}: join what"
            " it makes in one, or cut the model where one tensor goes from layer to"
            " layer"
        )
    return output


def modules_of(
    parts: nn.Sequential | Sequence[nn.Module], name: str
) -> list[nn.Module]:
    """Return the parts of a model as a list; refuse a model that is none."""
    if isinstance(parts, nn.Module) and not isinstance(
        parts, (nn.Sequential, nn.ModuleList)
    ):
        raise TypeError(
            f"{name} must be an nn.Sequential or a list of modules, not a"
            f" {type(parts).__name__}: only its forward knows which layer is called"
            " after which"
        )
    return list(nn.ModuleList(parts))  # which refuses what is no module
