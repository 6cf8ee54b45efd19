"""The messages of a sharded model, in one order, beside the computing.

A communication thread makes these gathers and reductions one after the other, over its
own line in the group. While a unit computes, the thread gathers the next one: the order
is that of the pass before. Notebook 11 uses this file. Source: Zhao et al., "PyTorch
FSDP" (VLDB 2023), section 3.3.
"""

import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any

import torch

from .. import ranks

FORWARD, BACKWARD = "forward", "backward"


class Traffic:
    """Sends for a model's units: those in the module of ``root``, which joins them.

    ``shards`` is a line in the group over which parameters are divided; ``replicas``,
    where there are some, one in the group of the ranks that have the same part.
    """

    def __init__(self, root):
        self.root = root
        parts = root.module.named_modules()
        named = {
            name: vars(part)["_unit"] for name, part in parts if "_unit" in vars(part)
        }
        for name, unit in named.items():
            if unit.traffic and unit.traffic.root not in named.values():
                raise RuntimeError(
                    f"{name} belongs to another sharded model, which was called before:"
                    " shard a module that contains both models, and call it"
                )
        self.shards, self.replicas = (
            group and ranks.own_group(group) for group in root.groups
        )
        self.units = list(named.values())
        for name, unit in named.items():
            unit.traffic, unit.name = self, name or "root"
        self.state = FORWARD
        self._now: list = []  # units, as they were gathered in this pass
        # and in the pass before
        self._last: dict[str, list] = {FORWARD: [], BACKWARD: []}
        self._reducing: tuple | None = None  # unit, which parameters were used, future
        self._leaf = torch.zeros((), requires_grad=True)
        self._sender = ranks.Sender()
        weakref.finalize(self, self._sender.stop)

    # A forward pass and its backward pass

    def begin(self) -> None:
        """Begin a forward pass of the model."""
        # a hook calls it within a backward pass
        if torch._C._current_graph_task_id() != -1:
            self.finish()
        elif self._reducing:  # an error broke off the last backward pass
            self._reducing[-1].result()
            self._reducing = None
        self._turn_to(FORWARD)
        self._context = copy_context()  # the thread counts bytes where the caller does
        with torch.enable_grad():
            self.token = _Pass.apply(self._leaf, weakref.ref(self.root))

    def expect_backward(self, outputs: list[torch.Tensor]) -> None:
        """Learn from the model's outputs when a backward pass begins."""
        for tensor in outputs:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._enter_backward)

    def _enter_backward(self, *_) -> None:
        if self.state != BACKWARD:  # there may be several outputs
            self._turn_to(BACKWARD)

    def end(self) -> None:
        """End a backward pass: all gradients have come."""
        for unit in self.units:
            # from a pass without synchronisation; unused in this
            if unit.unsynced and unit.syncs:
                unit.reduce([None] * len(unit.shards))
        self.finish()
        self._turn_to(FORWARD)
        for unit in self.units:
            unit.free()

    def _turn_to(self, state: str) -> None:
        if self._now:
            self._last[self.state], self._now = self._now, []
        for unit in self.units:
            unit.coming = None  # it was gathered ahead, and not needed
        self.state = state

    # Messages

    def gather(self, unit) -> torch.Tensor:
        """Return the whole parameters of a unit, and begin to gather the next one."""
        coming, unit.coming = unit.coming or self._start(unit), None
        if self.state == BACKWARD and self._now:
            self._now[-1].free_unless_awaited()
        # else a part is called alone
        if self.state == BACKWARD or self.root.opener is not None:
            self._now.append(unit)
            if self.root.prefetches:
                self._look_ahead(unit)
        return coming.result()

    def _look_ahead(self, unit) -> None:
        """Gather what followed this unit in the last pass, if that was like this."""
        i, last = len(self._now), self._last[self.state]
        if i < len(last) and last[i - 1] is unit and last[i].whole is None:
            last[i].coming = self._start(last[i])

    def _start(self, unit) -> Future:
        unit.versions = [shard._version for shard in unit.shards]
        return self._submit("gather", unit, unit.all_gather, self.shards)

    def reduce(self, unit, flat: torch.Tensor, used: list[bool]) -> None:
        """Begin to reduce a unit's gradients, which lie side by side in ``flat``."""
        future = self._submit("reduce", unit, unit.reduce_scatter, flat, used, self)
        self._reducing = unit, used, future
        if not self.root.prefetches:
            self.finish()

    def finish(self) -> None:
        """Wait for the reduction that is under way, and hand out its result."""
        if self._reducing:
            (unit, used, future), self._reducing = self._reducing, None
            unit.add_gradients(future.result(), used)

    def _submit(self, what: str, unit, function: Callable, *args: Any) -> Future:
        return self._sender.submit(
            self._context.run, self._timed, what, unit.name, function, args
        )

    def _timed(
        self, what: str, name: str, function: Callable, args: tuple
    ) -> torch.Tensor:
        begin = time.perf_counter()
        with torch.no_grad():
            result = function(*args)
        if self.root.timeline is not None:
            self.root.timeline.append((what, name, begin, time.perf_counter()))
        return result


class _Pass(torch.autograd.Function):
    """A token that a forward pass's units take: its backward comes after theirs."""

    @staticmethod
    def forward(ctx, leaf, root):
        ctx.root = root
        return leaf.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.root().traffic.end()  # of which it may have become a part since
        return None, None
