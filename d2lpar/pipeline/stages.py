"""What a stage of a pipeline does with a micro-batch.

It makes the forward and the backward pass of its layers, apart from each other and from those of
the other stages, as the executors of a pipeline ask for it. Notebook 06 builds this file.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


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

        ``X`` is a leaf. Without rows it is passed on as it is, and no gradient comes back.
        """
        with torch.inference_mode(False), torch.enable_grad():
            output = call(self.module, X, self.recompute) if len(X) else X  # no row was left
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
    function = (lambda X: module(X.clone())) if writes_to_its_input(module) else module
    if recompute:
        contexts = partial(_contexts, module)
        output = checkpoint(function, X, use_reentrant=False, context_fn=contexts)
    else:
        output = function(X)
    return one_tensor(output)


def one_tensor(output) -> torch.Tensor:
    """Return what a stage has made if it is a tensor; raise TypeError for anything else."""
    if not isinstance(output, torch.Tensor):
        raise TypeError(
            f"a stage must return one tensor, not a {type(output).__name__}: join what it makes in "
            "one, or cut the model where one tensor goes from layer to layer"
        )
    return output


def modules_of(parts: nn.Sequential | Sequence[nn.Module], name: str) -> list[nn.Module]:
    """Return the parts of a model as a list; raise TypeError for what is no list of modules."""
    if isinstance(parts, nn.Module) and not isinstance(parts, (nn.Sequential, nn.ModuleList)):
        raise TypeError(
            f"{name} must be an nn.Sequential or a list of modules, not a {type(parts).__name__}: "
            "only its forward knows which layer is called after which"
        )
    parts = list(parts)
    for i, part in enumerate(parts):
        if not isinstance(part, nn.Module):
            raise TypeError(f"{name}[{i}] is not a module: {part!r}")
    return parts


def writes_to_its_input(module: nn.Module) -> bool:
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
