"""ZeRO-1: an optimiser of which each rank keeps the state of a part of every parameter.

Notebook 11 builds this file. Sources: Rajbhandari et al., "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models" (SC 2020),
``torch.distributed.optim.ZeroRedundancyOptimizer``.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from .. import ranks
from ..guards import checked
from ..ranks.transport import check_group
from ..schedules import even_bounds
from .full_state import full_state_dict, load_full_state_dict
from .shards import Shard, is_dense, line, make_shard


def check_optimizer(optimizer_class, process_group, overlap_with_ddp, **_) -> None:
    """Refuse what is no class of optimisers, and what only torch's has."""
    check_group(process_group)
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)
    ):
        raise TypeError(
            "optimizer_class has to be a class such as torch.optim.Adam, not"
            f" {optimizer_class!r}"
        )
    if overlap_with_ddp:
        raise NotImplementedError(
            "overlap_with_ddp is not supported here: leave it out"
        )


def check_gradients(self) -> None:
    """Refuse sparse gradients, and a state that lies otherwise than its parameter."""
    for param, shard in self.shards.items():
        if param.grad is not None and param.grad.is_sparse:
            raise ValueError(
                "sparse gradients cannot be divided: use Embedding(sparse=False)"
            )
        if param.stride() != shard.whole.stride() and self.optim.state.get(shard):
            raise RuntimeError(
                f"a parameter of shape {list(param.shape)} lies in memory otherwise"
                " than its state: choose the memory_format before the first step"
            )


class ShardedOptimizer(Optimizer):
    """Updates this rank's part of every parameter, then gathers all parts (ZeRO-1).

    It takes what ``ZeroRedundancyOptimizer`` takes, which deals out whole parameters
    instead. The optimiser within has to treat each element alone, as SGD, Adam and
    AdamW do, and LARS, Adafactor or Muon do not. ``parameters_as_bucket_view`` makes no
    difference: parts are views anyway.

    With ``averages``, which is ours, the optimiser also averages the gradients: use it
    without DistributedDataParallel. A rank then gets only its part of the mean, and
    ``step`` sets the parameters' gradients to None. A parameter that some ranks have
    not used counts as zero there. To clip, and to scale a loss, use d2lpar's
    ``clip_grad_norm_`` and ``GradScaler(group=…)``.
    """

    @checked(check_optimizer)
    def __init__(
        self,
        params: Iterable,
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        averages: bool = False,
        **defaults: Any,
    ):
        self.process_group, self.averages = process_group or dist.group.WORLD, averages
        self.shards: dict[torch.Tensor, Shard] = {}  # by parameter
        self.optim: Optimizer | None = None  # of the shards
        self._make = partial(optimizer_class, **defaults)
        # by parameter: its gradient
        self._scattered: dict[torch.Tensor, torch.Tensor] = {}
        self._full: dict = {}  # what consolidate_state_dict has gathered
        super().__init__(params, defaults)
        self.defaults, self.state = self.optim.defaults, self.optim.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, of each of which this rank updates a part."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            own = {
                **group,
                "params": [self._shard_of(param) for param in group["params"]],
            }
            if self.optim is None:
                self.optim = self._make([own])
            else:
                self.optim.add_param_group(own)
        except Exception:
            self.param_groups.pop()
            for param in group["params"]:
                self.shards.pop(param, None)
            raise
        # the defaults of its class
        _copy_settings(self.optim.param_groups[-1:], [group])

    def _shard_of(self, param: torch.Tensor) -> Shard:
        if not is_dense(param):
            raise ValueError(
                f"a parameter of shape {list(param.shape)} has strides"
                f" {list(param.stride())}: it has to lie in memory without gaps, so"
                " make it from a .clone()"
            )
        bounds = even_bounds(param.numel(), self.process_group.size())
        sizes = [end - begin for begin, end in pairwise(bounds)]
        me = self.process_group.rank()
        own = line(param)[bounds[me] : bounds[me + 1]]
        self.shards[param] = make_shard(own, param, sizes, self.process_group)
        return self.shards[param]

    @checked(check_gradients)
    @torch.no_grad()
    def scatter_gradients(self) -> None:
        """Give each shard its part of the gradient; ``step`` does it for new ones.

        To clip by the norm of the mean, call it once before ``step``, and then
        ``clip_grad_norm_(optimizer.shards.values(), …)``.
        """
        used = [param.grad is not None for param in self.shards]
        if self.averages:
            somewhere = torch.tensor(used)
            ranks.allreduce(somewhere, op="max", group=self.process_group)
            used = somewhere.tolist()
            if not any(used):  # it has been done, which took the gradients
                return
            if any(shard.grad is not None for shard in self.shards.values()):
                raise RuntimeError(
                    "gradients that were scattered wait for the step: call step, or"
                    " zero_grad of this optimiser (the model's does not reach them),"
                    " before the next backward"
                )
        for (param, shard), is_used in zip(self.shards.items(), used, strict=True):
            if shard.untyped_storage().data_ptr() != param.untyped_storage().data_ptr():
                self._follow(param, shard)
            if not is_used:
                shard.grad = None
            elif self.averages:
                shard.grad = self._mean_of(param)
            elif param.grad is not self._scattered.get(param):
                self._scattered[param] = param.grad
                shard.grad = line(param.grad, like=param)[shard.span]

    def _mean_of(self, param: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the mean gradient, and free the gradient."""
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        own = ranks.reduce_scatter(line(grad, like=param), "mean", self.process_group)
        param.grad = None
        return own.clone()  # the view would keep the memory of the whole gradient

    def _follow(self, param: torch.Tensor, shard: Shard) -> None:
        """Take the shard from where the parameter is: ``.to()`` may have moved it."""
        shard.whole = torch.empty_like(param, device="meta", requires_grad=False)
        shard.data = line(param)[shard.span]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's parts, gather all, and return what ``closure`` does."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.scatter_gradients()
        # those of a scheduler
        _copy_settings(self.param_groups, self.optim.param_groups)
        self.optim.step(**kwargs)
        _copy_settings(self.optim.param_groups, self.param_groups)
        for param, shard in self.shards.items():
            if shard.grad is not None:
                line(param).copy_(ranks.all_gather(shard, self.process_group))
                shard.grad = None
        self._scattered.clear()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters and of their parts."""
        super().zero_grad(set_to_none)
        for shard in self.shards.values():
            shard.grad = None
        self._scattered.clear()

    def full_state_dict(self, dst: int | None = None) -> dict[str, Any]:
        """Return on rank ``dst`` the state of an unsharded optimiser, elsewhere {}."""
        _copy_settings(self.param_groups, self.optim.param_groups)
        return full_state_dict(self.optim, dst)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state on rank ``to``, for ``state_dict`` there, as in torch."""
        self._full = self.full_state_dict(to)

    def state_dict(self) -> dict[str, Any]:
        """Return what ``consolidate_state_dict`` has gathered on this rank."""
        if not self._full:
            raise RuntimeError(
                "this rank has only a part of the state: call"
                " consolidate_state_dict(to) on all ranks, then state_dict on rank `to`"
            )
        return self._full

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take our part of a full state of any number of ranks: all call this."""
        load_full_state_dict(self.optim, state_dict)
        self.state = self.optim.state
        _copy_settings(self.optim.param_groups, self.param_groups)


def _copy_settings(groups: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Give each of the other groups all that a group has, but for the parameters."""
    for group, other in zip(groups, others, strict=True):
        other.update({name: value for name, value in group.items() if name != "params"})
