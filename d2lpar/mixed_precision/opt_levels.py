"""Four levels of mixed precision, as NVIDIA's apex named them: O0, O1, O2 and O3.

A level is a row of a table: which casts there are, what stays in float32, how the loss is scaled.
O1 is what became ``torch.autocast``. O2 keeps the parameters in 16 bits and trains a float32 copy
of them, the master weights: 16 bits are too few to add a small step to a large weight. Notebook 08
uses this file. Source: apex.amp, which NVIDIA deleted in May 2025; Micikevicius et al., "Mixed
Precision Training" (ICLR 2018).
"""

import math
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ..data_parallel.ddp import DistributedDataParallel
from ..data_parallel.replicas import DataParallel, DataParallelModel
from ..data_parallel.scattering import tensors_of
from ..guards import checked
from .casting import LOW_DTYPES, autocast, map_tensors
from .grad_scaler import GradScaler


class Level(NamedTuple):
    """The properties of an opt level, as apex names them; None: does not apply."""

    cast_model_type: torch.dtype | None  # of parameters and buffers
    patch_torch_functions: bool  # autocast in forward
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None  # float32 copies, which the optimiser trains
    loss_scale: float | str


WRAPPERS = (
    DataParallel,
    DataParallelModel,
    DistributedDataParallel,
    nn.DataParallel,
    nn.parallel.DistributedDataParallel,
)
LEVELS = {
    "O0": Level(torch.float32, False, None, False, 1.0),
    "O1": Level(None, True, None, None, "dynamic"),
    "O2": Level(torch.float16, False, True, True, "dynamic"),
    "O3": Level(torch.float16, False, False, False, 1.0),
}


def check_initialize(
    model,
    optimizer,
    opt_level="O1",
    loss_scale=None,
    keep_batchnorm_fp32=None,
    *,
    dtype=torch.float16,
    emulate=False,
):
    """Refuse what no level is, and a model or an optimiser for which it is too late."""
    if opt_level not in LEVELS:
        raise ValueError(f"opt_level has to be one of {', '.join(LEVELS)}, not {opt_level!r}")
    if dtype not in LOW_DTYPES:
        raise ValueError(f"dtype has to be torch.float16 or torch.bfloat16, not {dtype}")
    if keep_batchnorm_fp32 not in (None, True, False):
        raise ValueError(f"keep_batchnorm_fp32 has to be a bool, not {keep_batchnorm_fp32!r}")
    if keep_batchnorm_fp32 is not None and opt_level in ("O0", "O1"):
        raise ValueError(f"keep_batchnorm_fp32 is for O2 and O3: {opt_level} casts no parameter")
    is_number = isinstance(loss_scale, (int, float)) and 0 < loss_scale < math.inf
    if loss_scale not in (None, "dynamic") and not is_number:
        raise ValueError(f"loss_scale has to be 'dynamic' or positive, not {loss_scale!r}")
    if opt_level == "O3" and loss_scale not in (None, 1):
        raise ValueError(
            f"loss_scale {loss_scale} in O3: its 16-bit gradients would be rounded to zero "
            "again when they are unscaled. O2 unscales in float32."
        )
    if isinstance(model, WRAPPERS):
        raise TypeError(
            f"the model is a {type(model).__name__}: initialize model.module, then wrap it"
        )
    if "forward" in vars(model):
        raise ValueError("the model's forward was replaced already, perhaps by initialize")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer has to be one of torch.optim's, not {type(optimizer).__name__}")
    if opt_level == "O3" and optimizer.state:
        raise RuntimeError("the optimiser has state of float32 parameters, which O3 casts")
    for name, param in model.named_parameters():
        if param.dtype != torch.float32:
            raise TypeError(f"{name} is {param.dtype}: initialize casts a float32 model itself")


@checked(check_initialize)
def initialize(
    model: nn.Module,
    optimizer: Optimizer,
    opt_level: str = "O1",
    loss_scale: float | str | None = None,
    keep_batchnorm_fp32: bool | None = None,
    *,
    dtype: torch.dtype = torch.float16,
    emulate: bool = False,
) -> tuple[nn.Module, Optimizer, GradScaler]:
    """Return the model, an optimiser and a GradScaler, made ready for an opt level.

    The model is changed in place; wrap it in DistributedDataParallel afterwards. Its outputs are
    float32, in any structure of tuples, lists and dicts. In O2 the optimiser returned is a
    ``MasterWeights`` around yours: use that one, and clip the gradients of what its
    ``param_groups`` hold, after ``scaler.unscale_``. Then train as with ``torch.amp``:
    ``scaler.scale(loss)``, ``scaler.step(optimizer)``, ``scaler.update()``. A static scale also
    skips steps that overflow, and a dynamic one has no ceiling; apex did not, and stopped at 2^24.
    Replicas of ``torch.nn.DataParallel`` on several GPUs would call the original's forward: use
    this module's.

    Args:
        model: with float32 parameters.
        optimizer: of the model's parameters.
        opt_level: "O0", "O1", "O2" or "O3".
        loss_scale: "dynamic" or a number, which is kept; 1 scales nothing and skips no step. None:
            as the level has it, and 1 for bfloat16, whose range is float32's.
        keep_batchnorm_fp32: for O2 and O3: whether BatchNorm keeps float32 parameters and buffers.
            None: as the level has it.
        dtype: torch.float16 or torch.bfloat16.
        emulate: compute products as ``autocast`` does with ``emulate``.

    Raises:
        ValueError: an argument is none of these; or in O3 a loss is to be scaled, whose float16
            gradients unscaling would round to zero again.
        TypeError: the model is wrapped for several devices already, its parameters are not
            float32, or ``optimizer`` is none.
        RuntimeError: in O3, the optimiser has made a step.
    """
    level = LEVELS[opt_level]
    casts_model = level.cast_model_type in LOW_DTYPES
    if casts_model:
        keep = keep_batchnorm_fp32
        cast_model(model, dtype, level.keep_batchnorm_fp32 if keep is None else keep)
    if level.master_weights:
        optimizer = MasterWeights(optimizer)
    if level.patch_torch_functions or casts_model:
        region = {"dtype": dtype, "enabled": emulate or not casts_model, "emulate": emulate}
        model._casting = casts_model, region
        model.forward = MethodType(_cast_forward, model)  # bound: our replicas get their own
    if loss_scale is None:
        loss_scale = 1.0 if dtype == torch.bfloat16 else level.loss_scale
    if loss_scale == "dynamic":
        return model, optimizer, GradScaler()
    static = {"init_scale": loss_scale, "growth_factor": 1.0, "backoff_factor": 1.0}
    return model, optimizer, GradScaler(**static, enabled=loss_scale != 1)


def _cast_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of the module's class in a region; return its outputs in float32."""
    casts_inputs, region = self._casting
    if casts_inputs:
        args, kwargs = _cast((args, kwargs), region["dtype"])
    tensors = [*tensors_of((args, kwargs)), *self.parameters()]
    device = tensors[0].device.type if tensors else "cpu"  # the model may have moved
    with autocast(device, **region):
        outputs = type(self).forward(self, *args, **kwargs)
    return _cast(outputs, torch.float32)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """Cast tensors of 16 and 32 bits, in any structure of tuples, lists and dicts."""
    floats = torch.float32, *LOW_DTYPES
    return map_tensors(lambda t: t.to(dtype) if t.dtype in floats else t, x)


def cast_model(model: nn.Module, dtype: torch.dtype, keep_batchnorm_fp32: bool = True) -> None:
    """Cast parameters and buffers to 16 bits, in place; BatchNorm's may stay float32.

    Every parameter stays the same object, so tied weights stay tied and an optimiser has them.
    """
    for part in model.modules():
        if keep_batchnorm_fp32 and isinstance(part, _BatchNorm):
            continue
        for param in part.parameters(recurse=False):
            param.data = param.data.to(dtype)
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)


class MasterWeights(Optimizer):
    """An optimiser of float32 copies of 16-bit parameters, into which they are rounded back.

    ``step`` takes the parameters' gradients to the copies, in float32, steps there, and rounds the
    copies into the parameters. A step that is too small for 16 bits is not lost: it adds up in the
    copies, which ``param_groups`` holds: learning-rate schedulers work, and ``clip_grad_norm_`` on
    what it holds does, after ``scaler.unscale_``. A parameter that was written since the last step
    (a loaded state, another rank's weights) is taken over before the next.

    Args:
        optimizer: of parameters of which some have 16 bits; it trains the copies from now on.
    """

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer
        self.masters: dict[torch.Tensor, nn.Parameter] = {}  # by 16-bit parameter
        self._has_gradients = False  # taken from the parameters since the last step
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its 16-bit parameters get masters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["params"] = [self._master_of(param) for param in group["params"]]

    def _master_of(self, param: torch.Tensor) -> torch.Tensor:
        if param.dtype not in LOW_DTYPES:
            return param
        master = nn.Parameter(param.detach().float(), param.requires_grad)
        if param in self.optimizer.state:
            self.optimizer.state[master] = _cast(self.optimizer.state.pop(param), torch.float32)
        self.masters[param] = master
        return master

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Give the masters the parameters' gradients, in float32; else ``step`` does it."""
        for param, master in self.masters.items():
            if not torch.equal(param, master.to(param.dtype)):  # written since the last step
                master.copy_(param)
            master.grad = None if param.grad is None else param.grad.float()
        self._has_gradients = True

    @torch.no_grad()
    def step(self, closure: None = None) -> Any:
        """Step on the masters, and round them into the parameters; takes no closure."""
        if closure is not None:
            raise TypeError("step takes no closure: the masters would not get its gradients")
        if not self._has_gradients:
            self.take_gradients()
        result = self.optimizer.step()
        for param, master in self.masters.items():
            param.copy_(master)
            master.grad = None  # between steps there are 16 bytes per parameter with Adam, not 20
        self._has_gradients = False
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of parameters and masters."""
        super().zero_grad(set_to_none)
        for param in self.masters:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()
        self._has_gradients = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimiser within, and the masters, in order."""
        masters = [master.detach() for master in self.masters.values()]
        return {**self.optimizer.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a ``state_dict``; the parameters become the masters, rounded.

        Raises ValueError where the state has other masters: of another number, or other shapes.
        """
        saved = state_dict.get("masters", [])
        ours, theirs = [[tuple(m.shape) for m in ms] for ms in (self.masters.values(), saved)]
        if ours != theirs:
            raise ValueError(f"the state has masters of shapes {theirs}, the optimiser {ours}")
        self.optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != "masters"})
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        for (param, master), value in zip(self.masters.items(), saved, strict=True):
            master.copy_(value)
            param.copy_(master)
