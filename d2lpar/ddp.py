"""DistributedDataParallel: a replica on each rank, and gradients averaged in backward.

The naive version sends after backward, the other's ``Reducer`` during it. Notebook 07
builds this file. Sources: Li et al. (see ``buckets``), and
``torch.nn.parallel.DistributedDataParallel``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import ranks
from ..data_parallel import scatter
from ..guards import checked
from ..ranks.transport import check_group
from .ddp_arguments import check_arguments, gpu_numbers
from .reducer import Reducer
from .state_sharing import share_state, share_tensors
from .uneven import PRESENT, TRAINS, Join, naming_join, num_rows


class NaiveDistributedDataParallel(nn.Module):
    """A replica on one rank; call ``average_gradients`` after each backward pass."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module, self.group = module, group
        share_state(module, group)

    def forward(self, *args, **kwargs):
        """Call the module."""
        return self.module(*args, **kwargs)

    def average_gradients(self) -> None:
        """Average each gradient over the ranks, in place; a missing one counts as 0."""
        for param in self.module.parameters():
            if param.requires_grad:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                ranks.allreduce(param.grad, op="mean", group=self.group)


class DistributedDataParallel(nn.Module):
    """A module's replica on one rank; ``backward`` averages gradients over ranks.

    It takes what ``torch.nn.parallel.DistributedDataParallel`` takes, and means the
    same by it. Parameters may be frozen, tied, unused, and used by some ranks only; one
    that no rank has used keeps a ``.grad`` of None. A copy (``copy.deepcopy``, pickle,
    ``torch.save``) is its own wrapper, without a communication hook; it needs
    ``process_group`` to be all ranks.

    Not as in torch: every backward pass through an output averages, not only the first
    one after a forward pass. With ``use_reentrant=True`` a layer may be checkpointed
    once in a pass. Hooks on gradients must be registered before, since a gradient may
    be sent as soon as it is there. The first three objects get lanes, further ones send
    messages. ``output_device``, ``dim``, ``find_unused_parameters``, ``static_graph``,
    ``check_reduction`` and ``batched_grad_copy`` make no difference. Arguments that are
    not named here are refused. ``weight`` is ours, and so is ``timeline``: set this
    attribute to a list to get (bucket, begin, end) in seconds per message.

    Args:
        device_ids: None, or a list of the one GPU on which the module is; inputs are
            moved to it.
        broadcast_buffers: unless False, buffers become rank 0's, now and before each
            forward pass that follows one with gradients; for these,
            ``forward_sync_buffers`` takes its place.
        init_sync: whether to check that the ranks' modules are alike, and copy rank
            0's state.
        bucket_cap_mb: the size of a bucket in MiB, None: 25; a larger parameter has
            its own.
        gradient_as_bucket_view: saves a copy: gradients are views, which the next
            pass overwrites.
        weight: "equal": the mean over ranks, as in torch. "rows": each rank counts by
            its rows (dimension 0 of forward's first tensor): the mean over a rank's
            rows becomes the mean over all rows. The rows of several forward passes add
            up, until one backward pass ends.
    """

    @checked(check_arguments)
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params=None,
        param_to_hook_all_reduce=None,
        mixed_precision=None,
        device_mesh=None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list=None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        weight: str = "equal",
    ):
        super().__init__()
        self.module, self.dim, self.static_graph = module, dim, static_graph
        self.device_ids, self.output_device = gpu_numbers(device_ids, output_device)
        self.process_group = process_group or dist.group.WORLD
        self.bucket_cap_mb = 25 if bucket_cap_mb is None else bucket_cap_mb
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.broadcast_buffers = broadcast_buffers is not False
        self._by_rows = weight == "rows"
        if init_sync:
            buffers = self.broadcast_buffers or forward_sync_buffers is not None
            share_state(self.module, self.process_group, buffers)
            if (
                len(
                    set(
                        ranks.all_gather(
                            torch.tensor([self._by_rows]), self.process_group
                        ).tolist()
                    )
                )
                > 1
            ):
                raise ValueError(f"weight is {weight!r} on this rank, but not on all")
        if forward_sync_buffers is not None:
            self.broadcast_buffers = forward_sync_buffers
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._attach()

    def _attach(self) -> None:
        named = list(self.module.named_parameters())
        self._frozen = [
            (name, param) for name, param in named if not param.requires_grad
        ]
        self._join: Join | None = None
        self.timeline: list | None = None
        params = [param for _, param in named if param.requires_grad]
        how = self.bucket_cap_mb, self._by_rows, self.gradient_as_bucket_view
        self.reducer = Reducer(params, self.process_group, *how)

    def forward(self, *args, **kwargs):
        """Call the module; before that, ranks share their buffers where torch's do."""
        averages = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self._join:
            self._join.roll_call(TRAINS if averages else PRESENT)
        if self.will_sync_module_buffers():
            self._share_buffers()
        if torch.is_grad_enabled():
            for name, param in self._frozen:
                if param.requires_grad:
                    raise ValueError(
                        f"{name} was unfrozen after wrapping: wrap the module again"
                    )
            self.reducer.timeline = self.timeline
            self.reducer.begin(self._weight_of(args, kwargs))
        if self.device_ids:
            [(args, kwargs)] = scatter(
                (args, kwargs), [torch.device("cuda", self.device_ids[0])]
            )
        output = self.module(*args, **kwargs)
        if averages:
            self.reducer.expect(tensors_in(output))
        self.require_forward_param_sync = averages
        return output

    def _weight_of(self, args: tuple, kwargs: dict) -> float:
        """Return what this rank's gradients count: the result is the sum over ranks."""
        if self._by_rows:
            return num_rows(args, kwargs)
        return self._join.weight if self._join else 1 / self.process_group.size()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let each rank add up gradients alone, for the forward passes made inside."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: Callable) -> None:
        """Let ``hook(state, bucket)`` reduce each bucket, and return a future.

        The tensor of this ``torch.futures.Future`` replaces ``bucket.buffer()``, which
        is not yet divided by the number of ranks. Backward waits for each future no
        longer than the group's time limit.
        """
        if not callable(hook):
            raise TypeError(f"hook must be a function, not {hook!r}")
        if self.reducer.comm_hook:
            raise RuntimeError("register_comm_hook can be called only once")
        if self._by_rows:
            raise ValueError(
                'weight="rows" divides by all rows: it cannot be left to a hook'
            )
        self.reducer.comm_hook = partial(hook, state)

    def will_sync_module_buffers(self) -> bool:
        """Say whether the next forward pass begins with rank 0's buffers for all."""
        wanted = self.require_forward_param_sync and self.broadcast_buffers
        return wanted and any(True for _ in self.module.buffers())

    def _share_buffers(self) -> None:
        source = (
            self._join.source
            if self._join
            else dist.get_global_rank(self.process_group, 0)
        )
        with naming_join():
            # by autograd, as in torch
            unseen = [buffer.data for buffer in self.module.buffers()]
            share_tensors(unseen, source, self.process_group)

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Let ranks have different numbers of batches, for the loop that is inside.

        A rank that has left the loop sends zeros until all have. Then all take the
        parameters of one of the last, and its buffers if they are broadcast. Gradients
        are divided by the number of all ranks or, unless
        ``divide_by_initial_world_size``, of those that still have batches; with
        ``weight="rows"`` by the rows. With ``throw_on_early_termination``, all raise a
        RuntimeError once one has left. A forward pass with gradients must have its
        backward pass.
        """
        if not enable:
            yield
            return
        self._join = Join(
            self, divide_by_initial_world_size, throw_on_early_termination
        )
        try:
            yield
            self._join.keep_up()
        finally:
            self._join = None

    def __getstate__(self) -> dict:
        check_group(None)
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "this one is not of all ranks: copy .module, and wrap the copy"
            )
        ours = ("process_group", "reducer")
        return {name: value for name, value in vars(self).items() if name not in ours}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        check_group(None)
        self.process_group = dist.group.WORLD
        self._attach()


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Return an output's tensors, also in nested tuples, lists, dicts, dataclasses."""
    if is_dataclass(output):
        output = [getattr(output, field.name) for field in fields(output)]
    elif isinstance(output, dict):
        output = output.values()
    elif not isinstance(output, (list, tuple)):
        return [output] if isinstance(output, torch.Tensor) else []
    return [tensor for part in output for tensor in tensors_in(part)]
