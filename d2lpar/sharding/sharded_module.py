"""ZeRO-2 and 3: modules of whose parameters each rank keeps a part.

This file is the entry; ``units`` has the algorithm. Notebook 11 uses it. Source:
``torch.distributed.fsdp.fully_shard``, of which it has the names.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import ranks
from ..data_parallel import DataParallel
from ..ddp import DistributedDataParallel, share
from ..guards import checked
from ..ranks.transport import check_group
from .shards import Moved, Shard, is_dense
from .units import Policy, Unit

NOT_SHARDED = (
    nn.ModuleList,
    nn.ModuleDict,
    nn.DataParallel,
    nn.parallel.DistributedDataParallel,
)
NOT_SHARDED += DataParallel, DistributedDataParallel


def check_fully_shard(
    module,
    mesh,
    reshard_after_forward,
    shard_placement_fn,
    mp_policy,
    offload_policy,
    ignored_params,
    group,
    **_,
) -> None:
    """Refuse what is no module, and what only torch's supports."""
    check_group(group)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module has to be one nn.Module, not a {type(module).__name__}"
        )
    if isinstance(module, FSDPModule):
        raise ValueError(f"this {type(module).__name__} has been sharded already")
    if isinstance(module, NOT_SHARDED):
        raise ValueError(
            f"a {type(module).__name__} cannot be sharded: shard the modules in it, or"
            " around it"
        )
    if not isinstance(ignored_params, (Collection, type(None))):
        raise TypeError(
            "ignored_params has to be a set of parameters, not"
            f" {type(ignored_params).__name__}"
        )
    if not isinstance(reshard_after_forward, (bool, type(None))):
        raise NotImplementedError(
            f"reshard_after_forward={reshard_after_forward!r}: only True and False are"
            " supported"
        )
    if shard_placement_fn is not None or hasattr(offload_policy, "pin_memory"):
        raise NotImplementedError(
            "shard_placement_fn and CPUOffloadPolicy are not supported here: use "
            "torch.distributed.fsdp.fully_shard for them"
        )
    if mp_policy is not None and not all(
        hasattr(mp_policy, name) for name in Policy._fields
    ):
        raise TypeError(
            "mp_policy has to be torch's MixedPrecisionPolicy, with param_dtype=…, not"
            f" {mp_policy}"
        )
    if mesh is not None and (group is not None or mesh.ndim > 2):
        raise ValueError("pass a group, or a mesh: (shards) or (replicas, shards)")
    check_parameters(module, set(ignored_params or ()))


def check_parameters(module: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Refuse parameters that cannot lie in one line, or in another unit."""
    names = {part: name for name, part in module.named_modules()}
    kinds = {}  # dtype and device: the first name
    for part, key in _places(module, ignored):
        param, name = part._parameters[key], f"{names[part]}.{key}".strip(".")
        if isinstance(param, (Moved, Shard)):
            raise ValueError(
                f"{name} belongs to another unit, which was sharded before: shard only"
                " the module that contains all that use it"
            )
        if (
            isinstance(param, nn.UninitializedParameter)
            or param.is_meta
            or not is_dense(param)
        ):
            raise ValueError(
                f"{name} has no memory yet, or lies in it with gaps: initialise it"
            )
        if not param.is_floating_point():
            raise ValueError(
                f"{name} is {param.dtype}, not floating-point: put it into"
                " ignored_params"
            )
        kinds.setdefault((param.dtype, param.device), name)
    if len(kinds) > 1:
        found = ", ".join(
            f"{name} {dtype} on {device}" for (dtype, device), name in kinds.items()
        )
        raise ValueError(f"the parameters of one unit must be of one kind, not {found}")


@checked(check_fully_shard)
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn=None,
    mp_policy=None,
    offload_policy=None,
    ignored_params: set[nn.Parameter] | None = None,
    group: dist.ProcessGroup | None = None,
    prefetch: bool = False,
) -> nn.Module:
    """Leave each rank a shard of the parameters, in place; return the module.

    The parameters of one call are a *unit*. Call it on parts first, such as each layer,
    then on the whole, which takes what is left; make the optimiser afterwards. All
    ranks begin with the parameters and buffers of the first one.
    ``module.parameters()`` then has objects of ``Shard``, flat and some of them empty;
    while a unit computes, its modules have whole parameters. Gradients are the mean
    over ranks, in float32 where the shards are of 16 bits.

    The optimiser has to treat each element alone, as SGD, Adam and AdamW do, and LARS,
    Adafactor or Muon do not: it sees flat parts. To clip, and to scale a loss, use
    d2lpar's ``clip_grad_norm_`` and ``GradScaler(group=…)``: torch's see this rank's
    shards alone.

    Not as in torch: tied parameters have to be in one unit; under ``torch.autocast``
    weights would be kept in 16 bits, which is refused; float16 and bfloat16 are always
    added as float32; ``mp_policy`` looks for tensors in tuples, lists and dicts alone;
    after ``torch.autograd.grad`` units stay whole until a backward pass that reaches
    them. In backward, modules have shards, and hooks see those; what is checkpointed
    has to be a module, not a method that reads a parameter of its own module. A list of
    modules, ``unshard(async_op)``, ``register_fsdp_forward_method`` and the other
    ``set_…`` methods are not there.

    Args:
        module: one that computes, such as a layer, a block or the model.
        mesh: of one dimension, the shards; or of two: replicas, then shards.
        reshard_after_forward: whether to free parameters between forward and backward
            (ZeRO-3), or keep them (False: ZeRO-2). None: free all but those of the
            outermost unit.
        shard_placement_fn: not supported, and refused.
        mp_policy: torch's ``MixedPrecisionPolicy``, or one with its attributes.
        offload_policy: only torch's OffloadPolicy, which does nothing.
        ignored_params: these stay whole, and their gradients are not averaged.
        group: ours; the ranks among which to divide, instead of a mesh. None: all.
        prefetch: ours; whether to gather the next unit, and reduce the one before,
            while one computes. It takes the memory of one unit more, and pays where
            messages wait for a link, not where the ranks fill all cores. That of the
            outermost unit counts.
    """
    places, parts = _places(module, set(ignored_params or ())), _own_parts(module)
    groups = _groups_of(mesh, group)
    _begin_alike(places, parts, groups)
    policy = mp_policy or Policy()
    unit = Unit(module, places, groups, reshard_after_forward, policy, prefetch)
    unit.watch(parts if places else [module])
    module._unit = unit
    module.__class__ = type(
        f"FSDP{type(module).__name__}", (FSDPModule, type(module)), {}
    )
    return module


def _groups_of(mesh, group) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Return the group of the shards, and that of the replicas, if there are some."""
    if mesh is None:
        return group or dist.group.WORLD, None
    return mesh.get_group(mesh.ndim - 1), mesh.get_group(0) if mesh.ndim == 2 else None


def _begin_alike(places, parts: list[nn.Module], groups: tuple) -> None:
    """Give all ranks the parameters and buffers of the first."""
    named = [(name, part._parameters[name]) for part, name in places]
    named += [item for part in parts for item in part.named_buffers(recurse=False)]
    # along the replicas, then among the shards
    for group in filter(None, reversed(groups)):
        share([tensor for _, tensor in named], ranks.group_of(group))


class FSDPModule:
    """What a module can do after ``fully_shard``."""

    _unit: Unit

    def _units(self, recurse: bool = True) -> list[Unit]:
        parts = self.modules() if recurse else [self]
        return [part._unit for part in parts if isinstance(part, FSDPModule)]

    def unshard(self) -> None:
        """Make this unit's parameters whole, until ``reshard`` or a forward pass."""
        self._unit.join_traffic()
        self._unit.swap_in()

    def reshard(self) -> None:
        """Free this unit's parameters but for the shards."""
        self._unit.swap_out()
        self._unit.free()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Say whether gradients are averaged, or added up on each rank alone."""
        for unit in self._units(recurse):
            unit.syncs = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let each rank add up gradients alone in backward passes made inside."""
        before = [(unit, unit.syncs) for unit in self._units()]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, syncs in before:
                unit.syncs = syncs

    @property
    def timeline(self) -> list | None:
        """A list set here gets (name, unit, begin, end) per message, in seconds."""
        return self._unit.timeline

    @timeline.setter
    def timeline(self, value: list | None) -> None:
        self._unit.timeline = value

    def __deepcopy__(self, memo):
        raise TypeError(
            "a sharded module cannot be copied: load its full state into another one"
        )


def _own_parts(module: nn.Module) -> list[nn.Module]:
    """Return the module and those in it, without the ones that were sharded before."""
    parts = [module]
    for child in module.children():
        if not isinstance(child, FSDPModule):
            parts += _own_parts(child)
    return list(dict.fromkeys(parts))


def _places(
    module: nn.Module, ignored: set[nn.Parameter]
) -> list[tuple[nn.Module, str]]:
    """Return where the parameters of a new unit are: module and name."""
    return [
        (part, name)
        for part in _own_parts(module)
        for name, param in part._parameters.items()
        if param is not None and param not in ignored
    ]
