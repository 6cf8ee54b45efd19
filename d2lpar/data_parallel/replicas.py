"""DataParallel: one process, a thread for each device, a module copied again for every batch.

Four functions do the work: ``scatter`` the batch, ``replicate`` the module, ``parallel_apply`` the
replicas to the shards, ``gather`` the outputs. ``DataParallelModel`` is the first three of them in
a row, ``DataParallel`` all four. Backward undoes them in turn: gradients of the outputs are
scattered, those of the parameters are added up on the first device. Notebook 04 builds this file.
Source: ``torch.nn.parallel.DataParallel`` and its parts, which need GPUs; the form without a gather
is that of H. Zhang's PyTorch-Encoding.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from ..collectives.lists import is_low_precision
from ..devices import check_devices, to_device
from .scattering import (
    chosen_devices,
    gather,
    gather_with,
    num_rows,
    parts_of,
    position,
    rebuild,
    renamed,
    scatter,
    tensors_of,
)


def replicate(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """Return a copy of ``module`` for each device; gradients of all copies flow to ``module``.

    A replica has its own copies of parameters and buffers, and shares everything else with the
    module. Replica 0 is where the module is: it works on the module's own buffers, so that running
    statistics go on. Tied parameters stay tied, and lists and dicts of them and of submodules hold
    the replica's (unless they are as long as data). What a replica sets on itself in ``forward``
    goes with it, and a hook that was made with the module in it sees the module, not the replica.

    The gradients are added up on ``devices[0]`` in the order of the devices, so that equal ones
    always have the same sum, to the last bit; 16-bit ones are added as float32 and rounded once.

    Raises:
        ValueError: there is no device; a parameter or buffer is not on ``devices[0]``, or is lazy
            and has no shape yet.
        TypeError: ``module`` is no module, or a compiled or scripted one.
    """
    devices = check_devices(devices)
    state = _check_state(module, devices[0])
    copies = _Broadcast.apply(devices, *state)
    replicas = []
    for i in range(len(devices)):
        twins = dict(zip(map(id, state), copies[i * len(state) :], strict=False))
        if i == 0:
            twins |= {id(buffer): buffer for buffer in module.buffers()}
        replicas.append(_replica(module, twins, own_buffers=i == 0))
    return replicas


def _check_state(module: nn.Module, device: torch.device) -> list[torch.Tensor]:
    """Return the parameters and buffers, each once."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not a {type(module).__name__}")
    for name, part in module.named_modules():
        compiled = "_orig_mod" in part._modules or vars(part).get("_compiled_call_impl")
        if compiled or isinstance(part, torch.jit.ScriptModule):
            raise TypeError(f"{name or 'the module'} is compiled: only the original can be copied")
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in named:
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ValueError(f"{name} has no shape yet: call the module on a batch first")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}: move the module to {device} first")
    return list(dict.fromkeys(tensor for _, tensor in named))


MODULES_OWN = frozenset(vars(nn.Module()))  # what every module has, such as hooks
LONG = 1000  # items: a longer list or dict is data, in which it would take long to find nothing


class _Broadcast(torch.autograd.Function):
    """Copies of tensors for every position; their gradients are added up on position 0."""

    @staticmethod
    def forward(ctx, devices, *tensors):
        """Return the copies for position 0, which share the tensors' memory, then for 1, …."""
        ctx.device, ctx.num_tensors, ctx.context = devices[0], len(tensors), copy_context()
        ctx.set_materialize_grads(False)
        copies = [tensor.detach() for tensor in tensors]
        for i, device in enumerate(devices[1:], 1):
            for tensor in tensors:
                there = to_device(tensor, device, 0, i)
                copies.append(there.clone() if there is tensor else there)
        wanted = [tensor.requires_grad for tensor in tensors] * len(devices)
        ctx.mark_non_differentiable(*[c for c, w in zip(copies, wanted, strict=True) if not w])
        return tuple(copies)

    @staticmethod
    def backward(ctx, *grads):
        """Add up the gradients of each tensor's copies, from position 0 on."""
        n = ctx.num_tensors
        run = ctx.context.copy().run  # a context is entered by one thread at a time
        sums = [run(_add_up, grads[j::n], ctx.device) for j in range(n)]
        return None, *sums


def _add_up(grads: Sequence[torch.Tensor | None], device: torch.device):
    """Add up the gradients, one a position, on ``device``; None where no position has one."""
    total = None
    for i, grad in enumerate(grads):
        if grad is not None:
            dtype = grad.dtype
            grad = to_device(grad, device, i, 0)
            grad = grad.float() if is_low_precision(dtype) else grad
            total = grad if total is None else total + grad
    return total if total is None else total.to(dtype)


def _replica(module: nn.Module, twins: dict[int, Any], own_buffers: bool) -> nn.Module:
    """Return a shallow copy of ``module`` and its submodules, with the twin of every tensor."""
    parts = list(module.modules())
    twins |= {id(part): object.__new__(part.__class__) for part in parts}
    for part in parts:
        replica = vars(twins[id(part)])
        for name, value in vars(part).items():
            replica[name] = value if name in MODULES_OWN else _twin(value, twins)
        for name in ("_parameters", "_buffers", "_modules"):
            replica[name] = {key: _twin(value, twins) for key, value in replica[name].items()}
        if own_buffers:
            replica["_buffers"] = part._buffers  # even one that forward replaces goes on
    return twins[id(module)]


def _twin(value: Any, twins: dict[int, Any]) -> Any:
    """Return the replica's own of a tensor, a module, a list or dict; else ``value`` itself."""
    if id(value) in twins:
        return twins[id(value)]
    if isinstance(value, (list, tuple, dict)) and len(value) < LONG:
        parts = parts_of(value)
        twin_parts = [_twin(part, twins) for part in parts]
        changed = any(twin is not part for twin, part in zip(twin_parts, parts, strict=True))
        return rebuild(value, twin_parts) if changed else value
    if isinstance(value, MethodType) and id(value.__self__) in twins:
        return MethodType(value.__func__, twins[id(value.__self__)])
    return value


def parallel_apply(
    modules: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[dict] | None = None
) -> list[Any]:
    """Call each module with its inputs, in a thread of its own; return the outputs in order.

    The caller's own thread takes the first. ``inputs[i]`` is the tuple or list of the arguments of
    ``modules[i]``, or its only argument. Every thread has the caller's grad mode, inference mode,
    autocast (torch's or ours) and ledger; other settings that torch keeps for each thread, such as
    hooks on saved tensors, hold for the first module only. On a CPU all draw random numbers from
    one generator, in no certain order.

    Raises:
        ValueError: there are not as many inputs, or kwargs, as modules.
        Exception: what the first module raised of those that failed, when all have ended; a note
            says where.
    """
    kwargs = [{}] * len(modules) if kwargs is None else kwargs
    if not len(modules) == len(inputs) == len(kwargs):
        raise ValueError(
            f"there are {len(modules)} modules, {len(inputs)} inputs and {len(kwargs)} kwargs"
        )
    calls, contexts = [], [copy_context() for _ in modules]
    for i, (module, args, options) in enumerate(zip(modules, inputs, kwargs, strict=True)):
        args = args if isinstance(args, (list, tuple)) else (args,)
        device = _device_of(module, args, options)
        where = f"device {i} ({device})"
        calls.append(partial(_call, where, _modes(device), module, args, options))
    if len(calls) < 2:
        return [call() for call in calls]
    with ThreadPoolExecutor(len(calls) - 1) as pool:
        others = pool.map(lambda context, call: context.run(call), contexts[1:], calls[1:])
        first = calls[0]()
    return [first, *others]


def _call(where: str, modes: list, module: Callable, args: Sequence[Any], kwargs: dict) -> Any:
    """Call ``module`` under ``modes``; an exception is given a note that says where it was."""
    try:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            return module(*args, **kwargs)
    except Exception as error:
        error.add_note(f"This was the replica on {where}.")
        raise


def _modes(device: torch.device) -> list:
    """Return what makes another thread do as the caller's does: torch keeps all this a thread."""
    modes = [torch.inference_mode()] if torch.is_inference_mode_enabled() else []
    modes.append(torch.set_grad_enabled(torch.is_grad_enabled()))
    for kind in sorted({"cpu", device.type}):
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            modes.append(torch.autocast(kind))  # with the dtype that is set now
    modes += [mode.for_thread() for mode in own_modes()]
    if device.type == "cuda":
        modes += [
            torch.cuda.device(device),
            torch.cuda.stream(torch.cuda.current_stream(device)),
        ]
    return modes


def own_modes() -> list:
    """Return the modes of ours that are on, such as ``autocast``: torch does not carry them on."""
    return [mode for mode in _get_current_function_mode_stack() if hasattr(mode, "for_thread")]


def _device_of(module: Callable, *args: Any) -> torch.device:
    """Return where a call works: where its tensors are, or else its parameters and buffers."""
    tensors = tensors_of(args)
    if not tensors and isinstance(module, nn.Module):
        tensors = [*module.parameters(), *module.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


class DataParallelModel(nn.Module):
    """A module on several devices, whose outputs stay where they were computed.

    Called with a batch, it returns a list of outputs, one for each device that had rows: what
    ``DataParallelCriterion`` takes. Gradients flow to ``module``, which is on the first device.
    What mixes the rows of a batch, such as BatchNorm in training, sees those of its device only.

    Args:
        module: whose parameters and buffers are on ``device_ids[0]``; to a single device it is
            moved.
        device_ids: where the replicas go: devices, their names, or numbers of GPUs. One that is
            named several times has several, so that ``["cpu"] * 3`` are three virtual devices.
            None: all GPUs. Without any GPU, None and numbers mean what they mean in torch: the
            module itself is called, with the whole batch.
        dim: the dimension of the rows, of inputs and outputs.
        devices: the first edition's name of ``device_ids``.

    Attributes:
        devices: the devices; an empty list where the module itself is called.
        device_ids: the same, a GPU as its number, as in torch.

    Raises:
        ValueError: there is no device; from a call, what ``scatter`` and ``replicate`` raise.
    """

    def __init__(
        self, module: nn.Module, device_ids: Sequence | None = None, dim: int = 0, *, devices=None
    ):
        super().__init__()
        self.module, self.dim = module, dim
        self.devices, self.device_ids = chosen_devices(device_ids, devices)
        if len(self.devices) == 1:
            module.to(self.devices[0])

    def forward(self, *args, **kwargs) -> list[Any]:
        """Return the outputs of all devices; one that gets no row has none."""
        if not self.devices:
            return [self.module(*args, **kwargs)]
        alone = len(self.devices) == 1  # then nothing is split, nor is anything copied
        devices = self.devices[: 1 if alone else num_rows((args, kwargs), self.dim) or 1]
        shards = scatter((args, kwargs), devices, self.dim)
        modules = [self.module] if alone else replicate(self.module, devices)
        return parallel_apply(modules, *zip(*shards, strict=True))


class DataParallel(DataParallelModel):
    """A module on several devices, to be used like the module, as torch's ``nn.DataParallel``.

    The outputs are joined on ``output_device``, by default the first device. An output without
    dimensions, such as a loss, becomes a vector with a number for each device, whose mean is the
    wrong one where the shards differ in rows; with a single device it is left as it is.

    Args:
        module, device_ids, dim, devices: see ``DataParallelModel``.
        output_device: where the outputs go.

    Raises:
        ValueError, TypeError: see ``DataParallelModel`` and ``gather``.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        *,
        devices: Sequence[torch.device] | None = None,
    ):
        super().__init__(module, renamed(device_ids, devices), dim)
        if self.devices:
            there = self.devices[0] if output_device is None else output_device
            [self._there] = check_devices([there])
            self.output_device = self._there.index if self._there.type == "cuda" else self._there

    def forward(self, *args, **kwargs) -> Any:
        """Return the module's output for the whole batch."""
        outputs = super().forward(*args, **kwargs)
        if not self.devices or self.devices == [self._there]:
            return outputs[0]
        if len(self.devices) == 1:
            dst = position(self._there, self.devices)
            return gather_with(outputs, lambda out: to_device(out, self._there, 0, dst))
        return gather(outputs, self._there, self.dim)
