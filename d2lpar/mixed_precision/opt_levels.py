"""Four levels of mixed precision, as NVIDIA's apex named them: O0, O1, O2 and O3.

O1 became ``torch.autocast``. O2 trains a float32 copy of 16-bit parameters, the master
weights: 16 bits are too few to add a small step to a large weight. Notebook 10 uses
this file. Source: NVIDIA's apex.amp, deleted in May 2025; Micikevicius et al., "Mixed
Precision Training" (ICLR 2018).
"""

import math
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ..data_parallel import DataParallel
from ..ddp import DistributedDataParallel
from ..guards import checked
from ..losses import DataParallelModel
from .casting import LOW_DTYPES, autocast, map_tensors, tensors_of
from .grad_scaler import GradScaler


class Level(NamedTuple):
    """The properties of an opt level, as apex names them; None: does not apply."""

    cast_model_type: torch.dtype | None  # of parameters and buffers
    patch_torch_functions: bool  # autocast in forward
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None  # float32 copies, which the optimiser trains
    loss_scale: float | str


WRAPPERS = DataParallel, DataParallelModel, DistributedDataParallel
WRAPPERS += nn.DataParallel, nn.parallel.DistributedDataParallel
LEVELS = {
    "O0": Level(torch.float32, False, None, False, 1.0),
    "O1": Level(None, True, None, None, "dynamic"),
    "O2": Level(torch.float16, False, True, True, "dynamic"),
    "O3": Level(torch.float16, False, False, False, 1.0),
}


def check_initialize(
    model, optimizer, opt_level, loss_scale, keep_batchnorm_fp32, dtype, **_
) -> None:
    """Refuse what no level has, and a model or optimiser that comes too late."""
    if opt_level not in LEVELS:
        raise ValueError(
            f"opt_level has to be one of {', '.join(LEVELS)}, not {opt_level!r}"
        )
    if dtype not in LOW_DTYPES:
        raise ValueError(
            f"dtype has to be torch.float16 or torch.bfloat16, not {dtype}"
        )
    if keep_batchnorm_fp32 not in (None, True, False):
        raise ValueError(
            f"keep_batchnorm_fp32 has to be a bool, not {keep_batchnorm_fp32!r}"
        )
    if keep_batchnorm_fp32 is not None and opt_level in ("O0", "O1"):
        raise ValueError(
            f"keep_batchnorm_fp32 is for O2 and O3: {opt_level} casts no parameter"
        )
    is_number = isinstance(loss_scale, (int, float)) and 0 < loss_scale < math.inf
    if loss_scale not in (None, "dynamic") and not is_number:
        raise ValueError(
            f"loss_scale has to be 'dynamic' or positive, not {loss_scale!r}"
        )
    if opt_level == "O3" and loss_scale not in (None, 1):
        raise ValueError(
            f"loss_scale {loss_scale} in O3: unscaled, its 16-bit gradients would be"
            " rounded to zero again. O2 unscales in float32."
        )
    if isinstance(model, WRAPPERS):
        kind = type(model).__name__
        raise TypeError(f"the model is a {kind}: initialize model.module, then wrap it")
    if "forward" in vars(model):
        raise ValueError(
            "the model's forward was replaced already, perhaps by initialize"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer has to be one of torch.optim's, not {type(optimizer).__name__}"
        )
    if opt_level == "O3" and optimizer.state:
        raise RuntimeError(
            "the optimiser has state of float32 parameters, which O3 casts"
        )
    for name, param in model.named_parameters():
        if param.dtype != torch.float32:
            raise TypeError(
                f"{name} is {param.dtype}: initialize casts a float32 model itself"
            )


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

    The float32 model is changed in place; wrap it in DistributedDataParallel afterwards
    (replicas of DataParallel would call the original's forward). Its outputs are
    float32, in any structure of tuples, lists and dicts. In O2 the optimiser returned
    is a ``MasterWeights`` around yours. What is None is as the level has it.
    ``loss_scale`` may be "dynamic" or a number, which is kept; 1, which bfloat16 has by
    itself, scales nothing and skips no step. Unlike in apex, any other number also
    skips steps that overflow, and "dynamic" may grow beyond 2^24.
    ``keep_batchnorm_fp32`` is for O2 and O3, ``emulate`` that of ``autocast``.
    """
    level = LEVELS[opt_level]
    casts_model = level.cast_model_type in LOW_DTYPES
    if casts_model:
        keep = keep_batchnorm_fp32
        cast_model(model, dtype, level.keep_batchnorm_fp32 if keep is None else keep)
    if level.master_weights:
        optimizer = MasterWeights(optimizer)
    if level.patch_torch_functions or casts_model:
        region = {
            "dtype": dtype,
            "enabled": emulate or not casts_model,
            "emulate": emulate,
        }
        model._casting = casts_model, region
        # bound: our replicas get their own
        model.forward = MethodType(_cast_forward, model)
    return model, optimizer, make_scaler(level, dtype, loss_scale)


def make_scaler(
    level: Level, dtype: torch.dtype, loss_scale: float | str | None
) -> GradScaler:
    """Return a scaler whose scale is "dynamic" or a fixed number; 1 scales nothing."""
    if loss_scale is None:
        loss_scale = 1.0 if dtype == torch.bfloat16 else level.loss_scale
    if loss_scale == "dynamic":
        return GradScaler()
    static = {"init_scale": loss_scale, "growth_factor": 1.0, "backoff_factor": 1.0}
    return GradScaler(**static, enabled=loss_scale != 1)


def _cast_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the class's forward in a region; return its outputs in float32."""
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


def cast_model(
    model: nn.Module, dtype: torch.dtype, keep_batchnorm_fp32: bool = True
) -> None:
    """Cast parameters in place, and buffers; BatchNorm's may stay float32."""
    for part in model.modules():
        if keep_batchnorm_fp32 and isinstance(part, _BatchNorm):
            continue
        for param in part.parameters(recurse=False):
            param.data = param.data.to(dtype)
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)


def check_closure(self, closure) -> None:
    """Refuse a closure."""
    if closure is not None:
        raise TypeError(
            "step takes no closure: the masters would not get its gradients"
        )


class MasterWeights(Optimizer):
    """An optimiser of float32 copies, which are rounded back into 16-bit parameters.

    ``param_groups`` holds the copies: clip *their* gradients, after
    ``scaler.unscale_``. A parameter that was written since the last step (a loaded
    state, another rank's weights) is taken over before the next. Parameters of 32 bits
    are their own masters.
    """

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer
        self.masters: dict[torch.Tensor, nn.Parameter] = {}  # by 16-bit parameter
        # which gradients the masters have since the last step
        self._taken: tuple | None = None
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
            self.optimizer.state[master] = _cast(
                self.optimizer.state.pop(param), torch.float32
            )
        self.masters[param] = master
        return master

    def _gradients(self) -> tuple:
        """Return marks that change as the gradients do, and these too: ids are kept."""
        grads = [param.grad for param in self.masters]
        return [(id(grad), getattr(grad, "_version", 0)) for grad in grads], grads

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Give the masters the gradients, in float32; ``step`` does it if needed."""
        for param, master in self.masters.items():
            # written since the last step
            if not torch.equal(param, master.to(param.dtype)):
                master.copy_(param)
            master.grad = None if param.grad is None else param.grad.float()
        self._taken = self._gradients()

    @checked(check_closure)
    @torch.no_grad()
    def step(self, closure: None = None) -> Any:
        """Step on the masters, and round them into the parameters; takes no closure."""
        if not self._taken or self._taken[0] != self._gradients()[0]:
            self.take_gradients()  # not taken yet, or others have come since
        result = self.optimizer.step()
        for param, master in self.masters.items():
            param.copy_(master)
            master.grad = None  # between steps it takes no memory
        self._taken = None
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of parameters and masters."""
        super().zero_grad(set_to_none)
        for param in self.masters:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()
        self._taken = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimiser within, and the masters, in order."""
        masters = [master.detach() for master in self.masters.values()]
        return {**self.optimizer.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a ``state_dict``; the parameters become the masters, rounded."""
        saved = state_dict.get("masters", [])
        ours, theirs = [
            [tuple(m.shape) for m in ms] for ms in (self.masters.values(), saved)
        ]
        if ours != theirs:
            raise ValueError(
                f"the state has masters of shapes {theirs}, the optimiser {ours}"
            )
        self.optimizer.load_state_dict(
            {k: v for k, v in state_dict.items() if k != "masters"}
        )
        self.param_groups, self.state = (
            self.optimizer.param_groups,
            self.optimizer.state,
        )
        for (param, master), value in zip(self.masters.items(), saved, strict=True):
            master.copy_(value)
            param.copy_(master)
