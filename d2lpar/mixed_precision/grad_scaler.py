"""A loss that is scaled, so that small gradients are not rounded to zero.

float16 has nothing below 6e-8, and many gradients are smaller. ``predivide`` keeps a
sum over many ranks within the range of float16. Notebook 10 uses this file. Sources:
Micikevicius et al., "Mixed Precision Training" (ICLR 2018), ``torch.amp.GradScaler``
and NVIDIA's apex.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from .. import ranks
from ..guards import checked

SMALLEST_SCALE = 2.0**-24  # of what fits into float16, nothing overflows at this scale
_SETTINGS = "growth_factor", "backoff_factor", "growth_interval"


def check_grad_scaler(
    device, init_scale, growth_factor, backoff_factor, growth_interval, **_
) -> None:
    """Refuse a scale that is not positive, and factors that turn it the wrong way."""
    if not isinstance(device, str):
        raise TypeError(f'device has to be such as "cpu", not {device!r}')
    if not (0 < init_scale < math.inf and growth_interval > 0):
        raise ValueError(f"must be positive: {init_scale=}, {growth_interval=}")
    if not (growth_factor >= 1 >= backoff_factor > 0):
        raise ValueError(
            f"must be at least 1: {growth_factor=}; positive and at most 1:"
            f" {backoff_factor=}"
        )


def check_unscale(self, optimizer) -> None:
    """Refuse to divide by the scale twice."""
    if optimizer in self._found:
        raise RuntimeError("unscale_ or step was called already since update")


def check_gradients(self, grads) -> None:
    """Refuse gradients that are missing, or that float16 would round to zero again."""
    if any(grad.dtype == torch.float16 for grad in grads):
        raise ValueError(
            "gradients are float16, and would be rounded to zero again: give the"
            " optimiser float32 parameters (autocast keeps them), or float32 masters"
            " (MasterWeights)"
        )
    if not grads and self.group is None:
        raise RuntimeError(
            "no parameter of this optimiser has a gradient: call backward first, and"
            " pass the optimiser that initialize returned"
        )


def check_step(self, optimizer, args, kwargs) -> None:
    """Refuse a closure, and a second step."""
    if self._enabled and (args or "closure" in kwargs):
        raise RuntimeError("step takes no closure: its gradients would stay scaled")
    if optimizer in self._stepped:
        raise RuntimeError("step was called already since update")


def check_update(self, new_scale) -> None:
    """Refuse an update without a step before it, and a scale that is not positive."""
    if self._enabled and new_scale is None and not self._found:
        raise RuntimeError(
            "update comes after step: no optimiser was unscaled since the last"
        )
    if self._enabled and new_scale is not None and not 0 < float(new_scale) < math.inf:
        raise ValueError(f"new_scale has to be positive, not {float(new_scale)}")


class GradScaler:
    """Scales losses, unscales gradients, as ``torch.amp.GradScaler`` does.

    One step is ``scaler.scale(loss).backward()``, ``scaler.step(optimizer)``,
    ``scaler.update()``. A step is skipped where a gradient is infinite or NaN. After
    ``growth_interval`` steps in a row that are not, the scale grows; after one that is,
    it backs off. With ``growth_factor`` and ``backoff_factor`` 1 the scale is static.
    The ranks of ``group`` agree on whether a step is skipped: they must where they hold
    parts of one model. Without a group this process decides alone, as is right after an
    average of gradients. ``device`` is not needed.
    """

    @checked(check_grad_scaler)
    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
    ):
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.group = growth_interval, group
        self._enabled = enabled
        self._scale = torch.tensor(float(init_scale))  # a float32, as torch's
        self._good_steps = 0  # in a row
        # since the last update: was there an infinity
        self._found: dict[Optimizer, bool] = {}
        self._stepped: set[Optimizer] = set()

    def is_enabled(self) -> bool:
        """Return whether anything is scaled."""
        return self._enabled

    def get_scale(self) -> float:
        """Return the scale; 1 where nothing is scaled."""
        return self._scale.item() if self._enabled else 1.0

    def scale(self, outputs: Any) -> Any:
        """Return the loss times the scale; each one likewise in a tuple or list."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            return outputs * self._scale.to(outputs.device)
        if not isinstance(outputs, (tuple, list)):
            raise TypeError(
                f"scale takes a loss, or several, and not {type(outputs).__name__}"
            )
        return type(outputs)(map(self.scale, outputs))

    @checked(check_unscale)
    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimiser's parameters by the scale, in place.

        ``step`` does it where it has not been done. Call it before what reads
        gradients, such as ``clip_grad_norm_``, and then read those of the parameters in
        ``optimizer.param_groups``: of a ``MasterWeights`` they are float32 copies.
        """
        # of 16-bit parameters, to float32 masters
        if hasattr(optimizer, "take_gradients"):
            optimizer.take_gradients()
        if not self._enabled:
            return
        params = (
            param for group in optimizer.param_groups for param in group["params"]
        )
        found = self._divide([param.grad for param in params if param.grad is not None])
        if self.group is not None:
            ranks.allreduce(found, op="max", group=self.group)
        self._found[optimizer] = bool(found)

    @checked(check_gradients)
    def _divide(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """Divide gradients by the scale; return 1 for any infinite or NaN, else 0."""
        inverse, found = self._scale.double().reciprocal().float(), torch.zeros(())
        for grad in grads:
            values = grad._values() if grad.is_sparse else grad
            values.mul_(inverse.to(values.device))
            found = found.to(values.device).maximum((~values.isfinite().all()).float())
        return found.cpu()

    @checked(check_step)
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Return what ``optimizer.step`` does; None if a gradient is not finite."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if optimizer not in self._found:
            self.unscale_(optimizer)
        result = None if self._found[optimizer] else optimizer.step(**kwargs)
        self._stepped.add(optimizer)
        return result

    @checked(check_update)
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Choose the next scale, or take ``new_scale``, after all optimisers' steps.

        Raises FloatingPointError, which torch's does not, when the scale has fallen
        below 2^-24.
        """
        if not self._enabled:
            return
        skipped = any(self._found.values())
        if new_scale is not None:
            self._scale = torch.tensor(float(new_scale))
        elif skipped:
            self._scale, self._good_steps = self._times(self.backoff_factor), 0
        else:
            self._good_steps += 1
            if self._good_steps == self.growth_interval:
                self._scale, self._good_steps = self._times(self.growth_factor), 0
        self._found, self._stepped = {}, set()
        if skipped and self._scale < SMALLEST_SCALE:
            raise FloatingPointError(
                f"the scale has fallen to {self._scale.item():.3g}, and gradients are"
                " still not finite: this is NaN, not overflow of a gradient, or the"
                " loss is infinite itself. Look for it with"
                " torch.autograd.detect_anomaly"
            )

    def _times(self, factor: float) -> torch.Tensor:
        scale = (self._scale.double() * factor).float()
        return scale if scale.isfinite() else self._scale

    def state_dict(self) -> dict[str, Any]:
        """Return scale, settings and the count of good steps; {} where disabled."""
        if not self._enabled:
            return {}
        settings = {name: getattr(self, name) for name in _SETTINGS}
        return {
            "scale": self.get_scale(),
            **settings,
            "_growth_tracker": self._good_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a ``state_dict``, ours or torch's; RuntimeError if empty."""
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError(
                "the state is empty: it was saved by a scaler that was disabled"
            )
        self._scale = torch.tensor(float(state_dict["scale"]))
        self._good_steps = state_dict["_growth_tracker"]
        for name in _SETTINGS:
            setattr(self, name, state_dict[name])


def check_predivide(factor) -> None:
    """Refuse a factor that is not positive."""
    if not 0 < factor < math.inf:
        raise ValueError(f"factor has to be positive, not {factor}")


@checked(check_predivide)
def predivide(factor: float) -> Callable[..., torch.futures.Future[torch.Tensor]]:
    """Return a communication hook that divides by ``factor`` before the sum.

    It is for ``model.register_comm_hook(process_group, predivide(factor))`` of torch's
    class or ours, and does what apex's ``gradient_predivide_factor`` does. The sum is
    divided by k / factor, for k ranks. torch's DistributedDataParallel adds in float16,
    of which the largest is 65,504: 64 gradients of 2,000 add up to more, and if each is
    divided by 64 first, small ones are rounded to zero. A factor of √k does half of
    either. Our own buckets widen 16 bits and need none of this.
    """

    def hook(process_group: dist.ProcessGroup | None, bucket: dist.GradBucket):
        k = dist.get_world_size(process_group)
        work = dist.all_reduce(
            bucket.buffer().div_(factor), group=process_group, async_op=True
        )
        return work.get_future().then(lambda future: future.value()[0].div_(k / factor))

    return hook
