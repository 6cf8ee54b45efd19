"""A loss over a large vocabulary, a chunk of positions at a time: never all logits.

Notebook 06 uses this file. Sources: ``MultiGPULossCompute`` of A. Rush's "The Annotated
Transformer" (2018), and torch's ``linear_cross_entropy``.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ..devices import check_devices, to_device
from ..guards import checked
from .loss import Count, copies_for, find_count, put_together, shares
from .replicas import own_modes, widened
from .scattering import scatter


def check_positions(hidden: torch.Tensor, target: torch.Tensor, **_) -> None:
    """Raise ValueError unless there is a target for each position."""
    if not hidden.dim() or target.shape[: hidden.dim() - 1] != hidden.shape[:-1]:
        raise ValueError(
            f"hidden has shape {list(hidden.shape)}, and target {list(target.shape)};"
            " they should be [..., d] and [...], or [..., classes], with the same"
            " positions"
        )


class ChunkedLoss(nn.Module):
    """``criterion(generator(hidden), target)`` in chunks: never all logits at once.

    The devices share the positions, and take ``chunk_size`` at a time through
    ``generator``, which is on ``devices[0]`` and maps (n, d) to (n, classes), and
    ``criterion``. A chunk's gradients are computed in forward, and its logits
    forgotten; ``backward`` only scales the gradients: hooks and functions in the
    generator see them unscaled. For ``count`` see ``DataParallelCriterion``.

    With ``recompute``, ``backward`` computes the logits again, with the same random
    numbers. That takes longer, but a loss that waits for its backward holds no
    gradients, and it has second derivatives. It is always done in float16, whose
    gradients a ``GradScaler`` scales first, for ``reduction="none"``, and where the
    loss depends on more than ``hidden`` and parameters.
    """

    def __init__(
        self,
        generator: nn.Module,
        criterion: Callable,
        devices: Sequence[torch.device],
        chunk_size: int,
        count: Count | None = None,
        *,
        recompute: bool = False,
    ):
        super().__init__()
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be positive, not {chunk_size}")
        find_count(criterion, count)
        self.generator, self.criterion, self.count = generator, criterion, count
        self.devices, self.chunk_size = check_devices(devices), chunk_size
        self.recompute = recompute

    @checked(check_positions)
    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss; ``hidden`` is (…, d), ``target`` (…) or (…, classes)."""
        places = hidden.shape[:-1]
        hidden = hidden.reshape(-1, hidden.shape[-1])
        target = target.reshape(-1, *target.shape[len(places) :])
        devices = self.devices[: max(1, len(hidden))]
        criterion, own = self.deal(hidden, target, devices)
        twice = self.recompute or getattr(criterion, "reduction", None) == "none"
        compute = compute_twice if twice else compute_in_forward
        generators, criteria = (
            copies_for(devices, m) for m in (self.generator, criterion)
        )
        losses = [
            to_device(compute(generators[i], criteria[i], own[i]), devices[0], i, 0)
            for i in range(len(devices))
            if own[i]
        ]
        loss = put_together(criterion, losses, [1.0] * len(losses))
        return loss.reshape(places + loss.shape[1:]) if loss.dim() else loss

    def deal(self, hidden, target, devices):
        """Return what to call on a chunk, and each device's chunks and weights."""
        chunks = [
            (i, *chunk)
            for i, shard in enumerate(scatter((hidden, target), devices))
            for chunk in zip(
                *[part.split(self.chunk_size) for part in shard], strict=True
            )
        ]
        criterion, weights = shares(
            self.criterion, self.count, [chunk[2:] for chunk in chunks]
        )
        own = [[] for _ in devices]
        for n, weight in weights.items():
            i, *chunk = chunks[n]
            own[i].append((weight, *chunk))
        return criterion, own


Chunks = list[tuple[float, torch.Tensor, torch.Tensor]]  # (weight, hidden, target)


def compute_in_forward(
    generator: Callable, criterion: Callable, chunks: Chunks
) -> torch.Tensor:
    """Return the weighted sum of a device's chunk losses, its gradients computed."""
    generator_on_leaves, params = on_leaves(generator)
    criterion_on_leaves, more = on_leaves(criterion)
    total, grads = 0, {}
    for weight, hidden, target in chunks:
        leaf = hidden.detach().requires_grad_(hidden.requires_grad)
        # not those of a checkpoint around us
        with saved_tensors_hooks(lambda X: X, lambda X: X):
            loss = criterion_on_leaves(generator_on_leaves(leaf), target)
        part = put_together(criterion, [widened(loss)], [weight])
        total = total + part.detach()
        if not loss.requires_grad:
            continue
        origins = {leaf: hidden} | params | more
        leaves = [leaf for leaf in origins if leaf.requires_grad]
        if must_wait(loss, leaves):
            return compute_twice(generator, criterion, chunks)
        with torch.autocast(loss.device.type, enabled=False):  # as in backward
            found = torch.autograd.grad(part, leaves, allow_unused=True)
        for leaf, grad in zip(leaves, found, strict=True):
            add_to(grads, origins[leaf], grad)
        found = grad = None  # or they would stay while the next chunk is computed
    return KnownGradients.apply(total.to(loss.dtype), list(grads.values()), *grads)


def on_leaves(module: Callable) -> tuple[Callable, dict[torch.Tensor, torch.Tensor]]:
    """Return ``module`` on leaves, at which backward ends, and {leaf: parameter}."""
    if not isinstance(module, nn.Module):
        return module, {}
    params = dict(module.named_parameters())
    leaves = {
        name: p.detach().requires_grad_(p.requires_grad) for name, p in params.items()
    }
    origins = {leaves[name]: params[name] for name in params}
    return lambda *args: functional_call(module, leaves, args), origins


def add_to(
    sums: dict[torch.Tensor, torch.Tensor], key: torch.Tensor, grad: torch.Tensor | None
) -> None:
    """Add ``grad``, if any, in place to the sum of ``key``; 16 bits as float32."""
    if grad is not None and key in sums:
        sums[key].add_(grad)
    elif grad is not None:
        # it may be the gradient of another tensor, too
        sums[key] = widened(grad).clone()


def must_wait(loss: torch.Tensor, leaves: list[torch.Tensor]) -> bool:
    """Tell whether the graph of ``loss`` uses float16 or has leaves besides these."""
    known, nodes, seen = {id(leaf) for leaf in leaves}, [loss.grad_fn], {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if any(meta.dtype == torch.float16 for meta in node._input_metadata):  # private
            return True
        if (
            node.name() == "torch::autograd::AccumulateGrad"
            and id(node.variable) not in known
        ):
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


class KnownGradients(torch.autograd.Function):
    """A loss whose gradients are known: backward only multiplies them."""

    @staticmethod
    def forward(ctx, loss, grads, *tensors):
        """Return the loss; ``grads`` are its gradients with respect to ``tensors``."""
        ctx.save_for_backward(*grads)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return loss.clone()

    @staticmethod
    def backward(ctx, grad_of_loss):
        """Scale the gradients by that of the loss."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "ChunkedLoss has second derivatives only with recompute=True"
            )
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, *[(grad * grad_of_loss).to(dtype) for grad, dtype in pairs]


def compute_twice(
    generator: Callable, criterion: Callable, chunks: Chunks
) -> torch.Tensor:
    """Return the same from losses whose logits ``backward`` computes again."""
    generator, modes = with_wide_sums(generator), own_modes()

    def loss_of(hidden, target):
        with ExitStack() as stack:
            for mode in modes:  # which are no longer on in backward
                stack.enter_context(mode.for_thread())
            return criterion(generator(hidden), target)

    weights = [weight for weight, *_ in chunks]
    losses = [checkpoint(loss_of, *chunk, use_reentrant=False) for _, *chunk in chunks]
    return put_together(criterion, losses, weights)


def with_wide_sums(generator: nn.Module) -> Callable:
    """Return the generator, with gradients of 16-bit weights added up as float32."""
    # autograd would round their sums at every chunk
    params = dict(generator.named_parameters())
    wide = {name: widened(param) for name, param in params.items()}
    if all(wide[name] is params[name] for name in params):
        return generator
    return lambda hidden: functional_call(
        generator, {name: wide[name].to(params[name].dtype) for name in params}, hidden
    )
