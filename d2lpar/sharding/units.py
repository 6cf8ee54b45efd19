"""A unit: parameters of a module that are gathered before use, and freed after it.

Notebook 11 builds this file. Sources: Zhao et al., "PyTorch FSDP" (VLDB 2023), and
``torch.distributed.fsdp.fully_shard``.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map

from .. import ranks
from ..losses import wide
from ..schedules import even_bounds
from .addresses import Addresses
from .shards import Moved, Shard, line, make_shard
from .traffic import BACKWARD, Traffic


class Policy(NamedTuple):
    """What is cast to which type, named as in torch's ``MixedPrecisionPolicy``.

    Parameters are gathered as ``param_dtype``, inputs cast to it, and outputs to
    ``output_dtype``. Gradients are added up in 32 bits at least, whatever
    ``reduce_dtype`` says.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


class Unit:
    """The parameters of a module, without inner units': whole while used.

    They lie in one line, one after the other, which is cut into even parts: this rank's
    shards are what its part has of each parameter. The unit opens with the forward pass
    of its module or, when a checkpoint computes a part of the module again, of that
    part.
    """

    def __init__(
        self,
        module: nn.Module,
        places: list[tuple[nn.Module, str]],
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup | None],
        reshards: bool | None,
        policy: Policy,
        prefetches: bool,
    ):
        self.module, self.places, self.groups = module, places, groups
        self.reshards, self.policy, self.prefetches = reshards, policy, prefetches
        self.syncs = True  # whether gradients are averaged
        self.traffic: Traffic | None = None
        # of the root: (what, unit, begin, end) in seconds
        self.timeline: list | None = None
        params = [part._parameters[name] for part, name in places]
        # tied: one number
        numbers = {param: i for i, param in enumerate(dict.fromkeys(params))}
        self.numbers = [numbers[param] for param in params]  # by place
        self.shards = self._cut(list(numbers))
        self.opener: nn.Module | None = None  # the module that is being called
        self.whole: torch.Tensor | None = None  # all parameters in one line
        self.versions: list[int] = []  # of the shards that it was made from
        self.coming: Future | None = None  # of a whole one that was asked for ahead
        self.awaits_gradients = False
        self.unsynced: list[torch.Tensor | None] = []  # gradients of this rank alone
        self.swap_out()

    def _cut(self, params: list[nn.Parameter]) -> list[Shard]:
        """Return this rank's shard of each parameter, of which nothing else is left."""
        group = self.groups[0]
        ends = (
            torch.tensor([0, *(param.numel() for param in params)]).cumsum(0).tolist()
        )
        self.spans = list(pairwise(ends))  # of the parameters, in the line
        bounds, me, shards = even_bounds(ends[-1], group.size()), group.rank(), []
        for param, (begin, end) in zip(params, self.spans, strict=True):
            cuts = [min(max(bound, begin), end) - begin for bound in bounds]
            sizes = [b - a for a, b in pairwise(cuts)]
            own = line(param)[cuts[me] : cuts[me + 1]].clone()
            shards.append(make_shard(own, param, sizes, group))
            param.data = param.new_empty(0)
            param.__class__ = Moved
        return shards

    # Open and closed

    def watch(self, parts: list[nn.Module]) -> None:
        """Open when one of these modules is called, close when it returns or fails."""
        for part in parts:
            part.register_forward_pre_hook(self.open, prepend=True, with_kwargs=True)
            part.register_forward_hook(self.close, always_call=True)

    def open(
        self, opener: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """Make the parameters whole, and give them to the modules."""
        if self.opener is not None:
            return None
        is_own = opener is self.module
        if is_own or not self.traffic:
            self.join_traffic()
        if is_own:
            self._check_autocast()
        self._check_places()
        self.opener, self.context = opener, ExitStack()
        if self.shards:
            self.gather()
            self._place(_Gathered.apply(self, self.traffic.token))
            self.awaits_gradients = any(shard.requires_grad for shard in self.shards)
        if is_own and self.resharding and self.shards:
            self.context.enter_context(Addresses(self))
        if is_own and self.policy.cast_forward_inputs:
            return _cast((args, kwargs), self.policy.param_dtype)
        return None

    def close(self, opener: nn.Module, args: tuple, output):
        """Give the shards back to the modules: after a forward pass."""
        if self.opener is not opener:
            return None
        self.opener = None
        self.context.close()
        self.swap_out()
        if self.traffic.state != BACKWARD and (
            self.resharding or not torch.is_grad_enabled()
        ):
            self.free()
        if opener is self.module and self.traffic.root is self:
            self.traffic.expect_backward(tensors_in(output))
        if opener is self.module:
            return _cast(output, self.policy.output_dtype)
        return None

    def _check_autocast(self) -> None:
        for shard in self.shards[: self.resharding]:
            kind, dtype = shard.device.type, self.compute_dtype
            if (
                torch.is_autocast_enabled(kind)
                and torch.get_autocast_dtype(kind) != dtype
            ):
                raise ValueError(
                    "under torch.autocast, backward would keep"
                    f" {torch.get_autocast_dtype(kind)} copies of these {dtype}"
                    " parameters: use mp_policy, or reshard_after_forward=False, which"
                    " keeps parameters anyway"
                )

    def _check_places(self) -> None:
        for (part, name), i in zip(self.places, self.numbers, strict=True):
            if part._parameters.get(name) is not self.placed[i]:
                raise RuntimeError(
                    f"the parameter {name} of a {type(part).__name__} was replaced"
                    " after fully_shard, by functional_call or by setting it: write"
                    " into its shard"
                )

    @property
    def resharding(self) -> bool:
        """Whether to free parameters between forward and backward."""
        return self.traffic.root is not self if self.reshards is None else self.reshards

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type in which parameters are gathered."""
        return self.policy.param_dtype or self.shards[0].dtype

    def join_traffic(self) -> None:
        """Send with all units of the model; the first one called is its root."""
        if self.traffic is None:
            Traffic(self)  # which all units in the module join
        if self.traffic.root is self:
            self.traffic.begin()

    def _place(self, tensors: Sequence[torch.Tensor]) -> None:
        self.placed = tensors
        for (part, name), i in zip(self.places, self.numbers, strict=True):
            part._parameters[name] = tensors[i]
            if name in (names := vars(part).get("_flat_weights_names", [])):
                # of an LSTM: a list of them
                part._flat_weights[names.index(name)] = tensors[i]

    def swap_out(self) -> None:
        """Give the shards to the modules, as their parameters."""
        self._place(self.shards)

    def swap_in(self) -> None:
        """Give whole parameters to the modules, without a way back for gradients."""
        if self.shards:
            self.gather()
            self._place(self.views(self.whole))

    # Whole and freed

    def gather(self) -> None:
        """Make the parameters whole, unless they are and no shard has changed."""
        if self.versions != [shard._version for shard in self.shards]:
            self.whole = self.coming = None
        if self.whole is None:
            self.whole = self.traffic.gather(self)

    def all_gather(self, group) -> torch.Tensor:
        """Return all parameters in one line: what the communication thread does."""
        own = torch.cat([shard.to(self.compute_dtype) for shard in self.shards])
        return ranks.all_gather(own, group)

    def free(self) -> None:
        """Forget all but the shards, unless the parameters are being used."""
        if self.opener is None:
            self.whole = None

    def free_unless_awaited(self) -> None:
        """Free a unit that is frozen, or whose gradients have come."""
        if not self.awaits_gradients:
            self.free()

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters, as views of the line in which they lie."""
        wholes = zip(self.shards, self.spans, strict=True)
        return [
            flat.as_strided(s.whole.shape, s.whole.stride(), begin)
            for s, (begin, _) in wholes
        ]

    # Gradients

    def reduce(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        """Average gradients and keep the own part; or keep them for later."""
        self.free()
        self.awaits_gradients = False
        self.traffic.finish()  # so that only one unit's gradients wait to be sent
        if self.unsynced:
            pairs = zip(grads, self.unsynced, strict=True)
            grads = [b if a is None else a if b is None else b + a for a, b in pairs]
        dtype = wide(self.policy.reduce_dtype or self.shards[0].dtype)
        if not self.syncs:
            self.unsynced = [grad if grad is None else grad.to(dtype) for grad in grads]
            return
        flat = self.shards[0].new_zeros(
            self.spans[-1][-1], dtype=dtype, requires_grad=False
        )
        for view, grad in zip(self.views(flat), grads, strict=True):
            if grad is not None:
                view.copy_(grad)
        self.unsynced = []
        self.traffic.reduce(self, flat, [grad is not None for grad in grads])

    def reduce_scatter(
        self, flat: torch.Tensor, used: list[bool], traffic: Traffic
    ) -> torch.Tensor:
        """Return this rank's part of the mean: what the communication thread does."""
        own = ranks.reduce_scatter(flat, "mean", traffic.shards)
        own = own.clone()  # the view would keep the memory of all
        if traffic.replicas:
            ranks.allreduce(own, op="mean", group=traffic.replicas)
        return own

    def add_gradients(self, own: torch.Tensor, used: list[bool]) -> None:
        """Add each parameter's part of the mean to the gradient of its shard."""
        parts = own.split([shard.numel() for shard in self.shards])
        for shard, part, is_used in zip(self.shards, parts, used, strict=True):
            if is_used:
                part = part.to(shard.dtype)
                shard.grad = part if shard.grad is None else shard.grad.add_(part)
                for hook in (shard._post_accumulate_grad_hooks or {}).values():
                    hook(shard)


class _Gathered(torch.autograd.Function):
    """The parameters of a unit; backward comes once all gradients have come."""

    @staticmethod
    def forward(ctx, unit, token):
        ctx.unit = unit
        ctx.set_materialize_grads(False)  # None for a parameter that was not used
        wholes = unit.views(unit.whole)
        frozen = [
            w for w, s in zip(wholes, unit.shards, strict=True) if not s.requires_grad
        ]
        ctx.mark_non_differentiable(*frozen)
        return tuple(wholes)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        ctx.unit.reduce(grads)
        return None, torch.zeros(())


def _cast(tree, dtype: torch.dtype | None):
    if dtype is None:
        return tree
    return tree_map(
        lambda x: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x,
        tree,
    )


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Return an output's tensors, also in nested tuples, lists, dicts, dataclasses."""
    if is_dataclass(output):
        output = [getattr(output, field.name) for field in fields(output)]
    elif isinstance(output, dict):
        output = output.values()
    elif not isinstance(output, (list, tuple)):
        return [output] if isinstance(output, torch.Tensor) else []
    return [tensor for part in output for tensor in tensors_in(part)]
