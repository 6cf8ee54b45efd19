"""DataParallel: one process, a thread per device, a module copied for every batch.

``DataParallelModel`` scatters the batch, replicates the module and calls the replicas
in threads; ``DataParallel`` also gathers the outputs. Notebook 05 builds this file.
Sources: ``torch.nn.parallel.DataParallel``, which needs GPUs; without a gather, H.
Zhang's PyTorch-Encoding.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from ..devices import check_devices, to_device
from ..guards import checked
from .scattering import gather, num_rows, parts_of, rebuild, scatter, tensors_of


def check_replicate(module: nn.Module, devices: Sequence[torch.device]) -> None:
    """Raise unless ``module`` can be copied, and is on ``devices[0]``."""
    device = check_devices(devices)[0]
    for name, part in module.named_modules():
        if "_orig_mod" in part._modules or part._compiled_call_impl:
            raise TypeError(
                f"{name or 'the module'} is compiled: only the original can be copied"
            )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device}: move the module to {device} first"
            )


@checked(check_replicate)
def replicate(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """Return a copy of ``module`` per device; gradients of all flow to ``module``.

    A replica has its own copies of parameters and buffers, also in lists and dicts of
    them and of submodules, and shares everything else with the module. Tied parameters
    stay tied. Replica 0 works on the module's own buffers, so that running statistics
    go on. What a replica sets on itself in ``forward`` is lost. Gradients are added up
    on ``devices[0]``, where the module is, 16-bit ones as float32, in device order:
    equal ones have the same sum to the last bit.
    """
    devices = check_devices(devices)
    params, buffers = list(module.parameters()), list(module.buffers())
    state, replicas = params + buffers, []
    copies = _Broadcast.apply(devices, *state)
    for i in range(len(devices)):
        replaced = state if i else params  # replica 0 works on the module's own buffers
        twins = dict(zip(map(id, replaced), copies[i * len(state) :], strict=False))
        replicas.append(_replica(module, twins, own_buffers=i > 0))
    return replicas


class _Broadcast(torch.autograd.Function):
    """Copies of tensors for every position; gradients are added up on position 0."""

    @staticmethod
    def forward(ctx, devices, *tensors):
        """Return the copies for position 0, which share memory, then for 1, …."""
        ctx.device, ctx.num_tensors, ctx.context = (
            devices[0],
            len(tensors),
            copy_context(),
        )
        # a replica that does not use a copy sends nothing back
        ctx.set_materialize_grads(False)
        copies = [tensor.detach() for tensor in tensors]
        for i, device in enumerate(devices[1:], 1):
            for tensor in tensors:
                there = to_device(tensor, device, 0, i)
                copies.append(there.clone() if there is tensor else there)
        wanted = [tensor.requires_grad for tensor in tensors] * len(devices)
        ctx.mark_non_differentiable(
            *[c for c, w in zip(copies, wanted, strict=True) if not w]
        )
        return tuple(copies)

    @staticmethod
    def backward(ctx, *grads):
        """Add up the gradients of each tensor's copies, from position 0 on."""
        n = ctx.num_tensors
        run = ctx.context.copy().run  # a context is entered by one thread at a time
        return None, *[run(_add_up, grads[j::n], ctx.device) for j in range(n)]


def _add_up(
    grads: Sequence[torch.Tensor | None], device: torch.device
) -> torch.Tensor | None:
    """Add up each position's gradient on ``device``; None where no position has one."""
    total = None
    for i, grad in enumerate(grads):
        if grad is not None:
            there = widened(to_device(grad, device, i, 0))
            total, dtype = there if total is None else total + there, grad.dtype
    return total if total is None else total.to(dtype)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return 16-bit numbers as float32, so as to round once; others as they are."""
    is_narrow = tensor.is_floating_point() and tensor.itemsize < 4
    return tensor.float() if is_narrow else tensor


def _replica(module: nn.Module, twins: dict[int, Any], own_buffers: bool) -> nn.Module:
    """Return a shallow copy of ``module`` and submodules, with the twins of tensors."""
    parts = list(module.modules())
    twins = twins | {id(part): object.__new__(part.__class__) for part in parts}
    for part in parts:
        replica = vars(twins[id(part)])
        replica.update(
            {name: _twin(value, twins) for name, value in vars(part).items()}
        )
        for name in ["_parameters", "_modules"] + ["_buffers"] * own_buffers:
            replica[name] = dict(replica[name])  # forward may write to it
    return twins[id(module)]


def _twin(value: Any, twins: dict[int, Any]) -> Any:
    """Return the twin of a tensor or module, also in lists and dicts; others as is."""
    if id(value) in twins:
        return twins[id(value)]
    # such as a forward that was replaced, as by initialize
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _twin(value.__self__, twins))
    if not isinstance(value, (list, tuple, dict)):
        return value
    parts = parts_of(value)
    own = [_twin(part, twins) for part in parts]
    return value if all(map(is_, own, parts)) else rebuild(value, own)


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs: Sequence[dict] | None = None,
) -> list[Any]:
    """Call each module with its inputs in its own thread; return all outputs.

    ``inputs[i]`` is the tuple or list of the arguments of ``modules[i]``, or its only
    argument. Every thread has the caller's grad mode, inference mode, autocast and
    ledger; what else torch keeps per thread, such as hooks on saved tensors, holds only
    for the first module, in the caller's own thread. On a CPU all draw from one random
    generator, in no certain order. When modules fail, the first one's error is raised
    after all have ended; a note says where it was.
    """
    kwargs = [{}] * len(modules) if kwargs is None else kwargs
    calls, contexts = [], [copy_context() for _ in modules]
    for i, (module, args, options) in enumerate(
        zip(modules, inputs, kwargs, strict=True)
    ):
        args = args if isinstance(args, (list, tuple)) else (args,)
        device = _device_of(module, args, options)
        where = f"device {i} ({device})"
        calls.append(partial(_call, where, _modes(device), module, args, options))
    # which starts threads only when it needs them
    with ThreadPoolExecutor(len(calls)) as pool:
        others = pool.map(
            lambda context, call: context.run(call), contexts[1:], calls[1:]
        )
        first = calls[0]()
    return [first, *others]


def _call(
    where: str, modes: list, module: Callable, args: Sequence[Any], kwargs: dict
) -> Any:
    """Call ``module`` under ``modes``; note on an error where it was."""
    try:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            return module(*args, **kwargs)
    except Exception as error:
        error.add_note(f"This was the replica on {where}.")
        raise


def _modes(device: torch.device) -> list:
    """Return what makes another thread do as the caller's: torch's per-thread modes."""
    modes = [torch.inference_mode()] if torch.is_inference_mode_enabled() else []
    modes.append(torch.set_grad_enabled(torch.is_grad_enabled()))
    for kind in sorted({"cpu", device.type}):
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            modes.append(torch.autocast(kind))  # with the dtype that is set now
    # of the autocast that chapter 10 builds
    modes += [mode.for_thread() for mode in own_modes()]
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)  # the queue of its operations
        modes += [torch.cuda.device(device), torch.cuda.stream(stream)]
    return modes


def own_modes() -> list:
    """Return our active modes, such as ``autocast``: torch does not pass them on."""
    return [
        mode
        for mode in _get_current_function_mode_stack()
        if hasattr(mode, "for_thread")
    ]


def _device_of(module: Callable, *args: Any) -> torch.device:
    """Return where a call works: where its tensors are, or else the module's."""
    tensors = tensors_of(args)
    if not tensors and isinstance(module, nn.Module):
        tensors = [*module.parameters(), *module.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


class DataParallelModel(nn.Module):
    """A module on several devices, whose outputs stay where they were computed.

    Called with a batch, it returns a list of outputs, one for each device that had
    rows, for ``DataParallelCriterion``. Gradients flow to ``module``, on the first
    device. What mixes rows, such as BatchNorm in training, sees those of its device.
    The rows are dimension ``dim``.

    ``device_ids`` are devices, their names, or numbers of GPUs; None: all GPUs. One
    that is named several times has several replicas: ``["cpu"] * 3`` are three virtual
    devices. Without any GPU, None and numbers mean the same as in torch: the module
    itself is called, with the whole batch. The attribute ``device_ids`` is what torch's
    is; ``devices`` are the devices themselves.
    """

    def __init__(
        self, module: nn.Module, device_ids: Sequence | None = None, dim: int = 0
    ):
        super().__init__()
        self.module, self.dim = module, dim
        self.devices = chosen_devices(device_ids)
        self.device_ids = list(map(_as_torch_names, self.devices))
        if len(self.devices) == 1:
            module.to(self.devices[0])

    def forward(self, *args, **kwargs) -> list[Any]:
        """Return the outputs of all devices; one that gets no row has none."""
        if len(self.devices) == 1:
            [(args, kwargs)] = scatter((args, kwargs), self.devices)
        if len(self.devices) < 2:
            return [self.module(*args, **kwargs)]
        devices = self.devices[: num_rows((args, kwargs), self.dim) or 1]
        shards = scatter((args, kwargs), devices, self.dim)
        return parallel_apply(
            replicate(self.module, devices), *zip(*shards, strict=True)
        )


class DataParallel(DataParallelModel):
    """A module on several devices, used like the module, as ``nn.DataParallel``.

    The outputs are joined on ``output_device``, by default the first device. An output
    without dimensions, such as a loss, becomes a vector with a number for each device;
    its mean is wrong where the shards differ in rows. With one device, or none, the
    output is the module's.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
    ):
        super().__init__(module, device_ids, dim)
        if self.devices:
            there = self.devices[0] if output_device is None else output_device
            [self._there] = check_devices([there])
            self.output_device = _as_torch_names(self._there)

    def forward(self, *args, **kwargs) -> Any:
        """Return the module's output for the whole batch."""
        outputs = super().forward(*args, **kwargs)
        return (
            gather(outputs, self._there, self.dim)
            if len(self.devices) > 1
            else outputs[0]
        )


def chosen_devices(device_ids: Sequence | None) -> list[torch.device]:
    """Return the devices that ``device_ids`` names; none without a GPU to number."""
    gpus = range(torch.cuda.device_count())
    named = gpus if device_ids is None else device_ids
    if not gpus and all(isinstance(device, int) for device in named):
        return []
    return check_devices(named)


def _as_torch_names(device: torch.device) -> int | torch.device:
    """Return a GPU's number; another device, unknown to torch's, as it is."""
    return device.index if device.type == "cuda" else device
