"""A loss over a large vocabulary, a chunk of positions at a time: all logits never exist at once.

The gradients of a chunk are computed as soon as its loss is there, and its logits are then
forgotten. Notebook 04 uses this file. Sources: ``MultiGPULossCompute`` of A. Rush's "The Annotated
Transformer" (2018), which does so too, and torch's ``linear_cross_entropy``.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ..collectives.lists import is_low_precision
from ..devices import check_devices
from .loss import Count, find_count, put_together, replicas, shares
from .replicas import own_modes
from .scattering import scatter


class ChunkedLoss(nn.Module):
    """``criterion(generator(hidden), target)`` in chunks, so that the full logits never exist.

    The positions are dealt out to the devices, and on each of them go through the generator and the
    criterion ``chunk_size`` at a time. A chunk's gradients are computed at once, and its logits are
    forgotten; ``backward`` only scales the gradients. Hooks and functions inside the generator
    therefore see gradients of the loss itself, whatever it is multiplied by afterwards.

    With ``recompute``, ``backward`` computes the logits of a chunk a second time, with the same
    random numbers, and then its gradients. That takes longer, but a loss that waits for its
    backward holds no gradients, and there are second derivatives. It is also done where gradients
    cannot wait or cannot be had at once: in float16, whose gradients a ``GradScaler`` scales first;
    for ``reduction="none"``; where parameters have hooks; and where the criterion takes something
    from a graph outside, such as a target that requires gradients.

    Args:
        generator: maps hidden states (n, d) to logits (n, classes), each position by itself.
        criterion: called with (logits, target), both with a row for each position.
        devices: where the chunks are computed; the generator is on ``devices[0]``.
        chunk_size: positions whose logits exist at the same time on one device.
        count: see ``DataParallelCriterion``.
        recompute: whether to compute the gradients in ``backward``, and all logits twice.

    Raises:
        ValueError: see ``DataParallelCriterion``; ``chunk_size`` is not a positive int; from a
            call, ``hidden`` and ``target`` differ in positions.
        RuntimeError: from ``backward``, where a second derivative needs ``recompute=True``.
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
        if not isinstance(chunk_size, int) or chunk_size < 1:
            raise ValueError(f"chunk_size must be a positive int, not {chunk_size!r}")
        self.generator, self.criterion, self.count = generator, criterion, count
        self.devices, self.chunk_size = check_devices(devices), chunk_size
        self.recompute = recompute
        find_count(criterion, count)

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss; ``hidden`` is (…, d), ``target`` (…), or with classes (…, classes)."""
        places = hidden.shape[:-1]
        if not hidden.dim() or target.shape[: len(places)] != places:
            raise ValueError(
                f"hidden has shape {list(hidden.shape)}, and target {list(target.shape)}; they "
                "should be [..., d] and [...], or [..., classes], with the same positions"
            )
        hidden = hidden.reshape(-1, hidden.shape[-1])  # (positions, d)
        target = target.reshape(-1, *target.shape[len(places) :])
        devices = self.devices[: max(1, len(hidden))]
        shards = scatter(hidden, devices)
        chunks = self._chunks(shards, scatter(target, devices))
        criterion, weights = shares(self.criterion, self.count, [(c.target,) for c in chunks])
        both = replicas(self.generator, devices), replicas(criterion, devices)
        calls = list(zip(*both, strict=True))
        try:
            if self.recompute or getattr(criterion, "reduction", None) == "none":
                raise _MustWait
            loss = self._compute_at_once(calls, shards, chunks, weights)
        except _MustWait:
            loss = self._compute_twice(calls, chunks, weights)
        return loss.reshape(places + loss.shape[1:]) if loss.dim() else loss

    def _compute_at_once(self, calls, shards, chunks, weights) -> torch.Tensor:
        begin = _next_number()
        sums = [
            _Sums(*call, shard, self.chunk_size, begin)
            for call, shard in zip(calls, shards, strict=True)
        ]
        for i in _in_turns(chunks, weights):
            sums[chunks[i].position].add(chunks[i], weights[i])
        losses = {i: part.loss() for i, part in enumerate(sums) if part.dtype}  # of what counts
        once, positions = dict.fromkeys(losses, 1.0), {i: i for i in losses}
        loss = put_together(self.criterion, losses, once, positions, self.devices[0])
        return loss.to(sums[min(losses)].dtype)

    def _compute_twice(self, calls, chunks, weights) -> torch.Tensor:
        wide = [(_with_wide_sums(generator), criterion) for generator, criterion in calls]
        losses = {}
        for i in _in_turns(chunks, weights):
            call = partial(_loss_of_chunk, *wide[chunks[i].position], own_modes())
            losses[i] = checkpoint(call, chunks[i].hidden, chunks[i].target, use_reentrant=False)
        positions = {i: chunks[i].position for i in weights}
        return put_together(self.criterion, losses, weights, positions, self.devices[0])

    def _chunks(self, hidden: list[torch.Tensor], target: list[torch.Tensor]) -> list["Chunk"]:
        return [
            Chunk(number, position, *parts)
            for position, shard in enumerate(zip(hidden, target, strict=True))
            for number, parts in enumerate(
                zip(*[part.split(self.chunk_size) for part in shard], strict=True)
            )
        ]


class _MustWait(Exception):
    """The gradients of a chunk cannot be computed before those of the whole loss are known."""


class Chunk(NamedTuple):
    """Some of the positions of a batch, on the device that works on them."""

    number: int  # among those of its device
    position: int  # of the device
    hidden: torch.Tensor  # (n, d)
    target: torch.Tensor  # (n,) or (n, classes)


def _in_turns(chunks: list[Chunk], weights: dict[int, float]) -> list[int]:
    """Return the chunks that count, in an order in which all devices take turns."""
    return sorted(weights, key=lambda i: chunks[i].number)


class _Sums:
    """What the chunks of one device add up to: their loss, and the gradients of it."""

    def __init__(self, generator, criterion, hidden: torch.Tensor, chunk_size: int, begin: int):
        self.generator, self.criterion = generator, criterion
        self.begin = begin  # nodes with smaller numbers are of a graph outside
        parts = [part for part in (generator, criterion) if isinstance(part, nn.Module)]
        params = [param for part in parts for param in part.parameters() if param.grad_fn]
        # Where the graph of a chunk ends, beside leaves: at the parameters of replicas.
        self.ends = {(param.grad_fn, param.output_nr): param for param in params}
        self.total, self.dtype = 0, None
        self.grads = {}  # of each tensor that the loss depends on
        if hidden.requires_grad:
            self.grads[hidden] = torch.zeros_like(hidden)
            self.grads_of_chunks = self.grads[hidden].split(chunk_size)

    def add(self, chunk: Chunk, weight: float) -> None:
        """Compute the loss and the gradients of one more chunk, and forget all else."""
        hidden = chunk.hidden.detach().requires_grad_(chunk.hidden.requires_grad)
        with saved_tensors_hooks(_as_it_is, _as_it_is):  # not those of a checkpoint around us
            loss = self.criterion(self.generator(hidden), chunk.target)
        if loss.dim():
            raise ValueError(f"the loss of a chunk has shape {list(loss.shape)}, and is no number")
        self.total, self.dtype = self.total + _widened(loss.detach()) * weight, loss.dtype
        if not loss.requires_grad:
            return
        tensors = self._dependencies(loss)
        with torch.autocast(loss.device.type, enabled=False):  # as in backward
            weights = torch.full_like(loss, weight)
            grads = torch.autograd.grad(loss, tensors, weights, allow_unused=True)
        for tensor, grad in zip(tensors, grads, strict=True):
            if grad is None:
                continue
            if tensor is hidden:
                self.grads_of_chunks[chunk.number].copy_(grad)
            elif tensor in self.grads:
                self.grads[tensor].add_(grad)
            else:
                self.grads[tensor] = _widened(grad).clone()  # it may be another tensor's, too

    def _dependencies(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors at which the graph of a chunk ends, or raise _MustWait."""
        nodes, found = [loss.grad_fn], {}
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            in_float16 = any(meta.dtype == torch.float16 for meta in node._input_metadata)
            if in_float16 or node._sequence_nr() < self.begin:  # both private
                raise _MustWait
            for edge in node.next_functions:
                following = edge[0]
                if edge in self.ends:
                    found[edge] = self.ends[edge]
                elif following is None or following in seen:
                    continue
                elif following.name() == "torch::autograd::AccumulateGrad":
                    found[edge] = following.variable
                else:
                    seen.add(following)
                    nodes.append(following)
        tensors = list(found.values())
        for tensor in tensors:
            if tensor._backward_hooks or tensor.dtype == torch.float16:  # hooks: called twice
                raise _MustWait
        return tensors

    def loss(self) -> torch.Tensor:
        """Return the weighted sum of the losses, which knows its gradients."""
        return _Known.apply(self.total, list(self.grads.values()), *self.grads)


class _Known(torch.autograd.Function):
    """A loss whose gradients are known: backward only multiplies them."""

    @staticmethod
    def forward(ctx, loss, grads, *tensors):
        ctx.save_for_backward(*grads)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return loss.clone()

    @staticmethod
    def backward(ctx, grad_of_loss):
        if torch.is_grad_enabled():
            raise RuntimeError("ChunkedLoss has second derivatives only with recompute=True")
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, *[(grad * grad_of_loss).to(dtype) for grad, dtype in pairs]


def _next_number() -> int:
    """Return the number that autograd gives to the next node of a graph: they rise."""
    probe = torch.ones((), requires_grad=True).clone()
    return probe.grad_fn._sequence_nr() if probe.grad_fn else 0  # private; no graph, no number


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if is_low_precision(tensor.dtype) else tensor


def _loss_of_chunk(generator, criterion, modes: list, hidden: torch.Tensor, target: torch.Tensor):
    with ExitStack() as stack:
        for mode in modes:  # which are no longer on when the chunk is computed again
            stack.enter_context(mode.for_thread())
        return criterion(generator(hidden), target)


def _with_wide_sums(generator: nn.Module) -> Callable:
    """Return the generator, called so that gradients of 16-bit weights add up as float32.

    Autograd adds up a tensor's gradients in the tensor's dtype, and would round after every chunk.
    """
    narrow = {n: p for n, p in generator.named_parameters() if is_low_precision(p.dtype)}
    if not narrow:
        return generator
    wide = {name: param.float() for name, param in narrow.items()}
    return lambda hidden: functional_call(
        generator, {name: wide[name].to(narrow[name].dtype) for name in narrow}, hidden
    )
