"""Chapter 10. Mixed precision: 16 bits where they are fast, 32 where needed.

``autocast`` lets each function choose. ``GradScaler`` keeps small gradients from
vanishing, ``MasterWeights`` small steps. ``initialize`` combines the three, as NVIDIA's
apex did. Sources: Micikevicius et al., "Mixed Precision Training" (ICLR 2018), "FP8
Formats for Deep Learning" (2022), ``torch.amp``, apex.amp.
"""

from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map  # private

from . import ranks

LOW_DTYPES = torch.float16, torch.bfloat16

LOW = """
    linear matmul __matmul__ __rmatmul__ linalg_matmul mm bmm addmm addbmm baddbmm
    einsum conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    prelu scaled_dot_product_attention
"""
FULL = """
    cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div
    binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss
    cosine_embedding_loss hinge_embedding_loss margin_ranking_loss soft_margin_loss
    multi_margin_loss triplet_margin_loss prod cdist
"""
FULL_ON_GPUS = """
    exp expm1 log log2 log10 log1p pow __pow__ __rpow__ square rsqrt reciprocal
    softplus softmax log_softmax logsumexp sum cumsum cumprod norm linalg_vector_norm
    layer_norm group_norm rms_norm normalize cosine_similarity dist interpolate
"""
innermost = ContextVar("innermost", default=None)  # the region that decides


class autocast(TorchFunctionMode):
    """A region in which each of torch's functions chooses its precision.

    As in ``torch.autocast``, LOW functions compute in ``dtype``, FULL ones in float32,
    others in what they get. End it before the optimiser's step: it keeps casts of
    weights. With ``emulate``, LOW ones compute in float32, from rounded arguments, and
    round. torch's also casts in nn.LSTM, nn.MultiheadAttention, checkpoints; linear
    algebra, FFTs, quantiles, sampling, padding, 3-d pools, CTC, multilabel loss.
    """

    def __init__(self, device_type="cpu", dtype=None, enabled=True, *, emulate=False):
        super().__init__()
        kind = torch.device(device_type).type
        self.device_type, self.enabled, self.emulate = kind, enabled, emulate
        self.dtype = dtype or (torch.bfloat16 if kind == "cpu" else torch.float16)
        full = FULL if kind == "cpu" else FULL + FULL_ON_GPUS
        self.low, self.full, self.tokens = set(LOW.split()), set(full.split()), []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.__name__
        if not self.enabled or innermost.get() is not self or "out" in kwargs:
            return function(*args, **kwargs)
        if name in self.low:
            args, kwargs = tree_map(self.to_low, (args, kwargs))
        if name in self.full or (name in self.low and self.emulate):
            args, kwargs = tree_map(self.to_float32, (args, kwargs))
        result = function(*args, **kwargs)
        return self.to_low(result) if name in self.low and self.emulate else result

    def to_low(self, x):
        """Return a tensor in 16 bits; anything else as it is."""
        if not self.is_castable(x):
            return x
        if not (x.is_leaf and x.requires_grad) or torch.is_inference_mode_enabled():
            return x.to(self.dtype)
        if (x, self.dtype) not in self.casts:  # a weight is cast once
            with torch.enable_grad():  # its next use may need gradients
                self.casts[x, self.dtype] = x.to(self.dtype)
        return self.casts[x, self.dtype]

    def to_float32(self, x):
        """Return a tensor in 32 bits; anything else as it is."""
        return x.float() if self.is_castable(x) else x

    def is_castable(self, x):
        """Tell whether this is a tensor of the region's device, of 16 or 32 bits."""
        is_here = isinstance(x, torch.Tensor) and x.device.type == self.device_type
        return is_here and x.dtype in (torch.float32, *LOW_DTYPES)

    def __enter__(self):
        self.casts = getattr(innermost.get(), "casts", {})  # of the region around
        self.tokens.append(innermost.set(self))
        return super().__enter__()

    def __exit__(self, *error):
        innermost.reset(self.tokens.pop())
        if innermost.get() is None:
            self.casts.clear()  # the optimiser will change the weights
        return super().__exit__(*error)


class GradScaler:
    """Scales a loss so that small gradients do not vanish, and chooses the scale.

    As ``torch.amp.GradScaler``; with ``group``, its ranks skip a step together.
    """

    def __init__(
        self, *, init_scale=2.0**16, growth_interval=2000, enabled=True, group=None
    ):
        self.factor = init_scale if enabled else 1.0
        self.growth_interval, self.good_steps = growth_interval, 0
        self.enabled, self.group = enabled, group
        self.unscaled = {}  # by optimiser, until it steps: was there an overflow?
        self.overflows = []  # the same of the steps since the last update

    def get_scale(self):
        """Return the scale."""
        return self.factor

    def scale(self, loss):
        """Return the loss times the scale."""
        return loss * self.factor

    @torch.no_grad()
    def unscale_(self, optimizer):
        """Divide an optimiser's gradients by the scale, before you clip them."""
        if optimizer in self.unscaled:
            raise RuntimeError("unscale_ was called already since the last step")
        if hasattr(optimizer, "take_gradients"):  # to masters or shards
            optimizer.take_gradients()
        params = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in params if p.grad is not None and p.numel()]  # has rows
        if self.enabled and torch.float16 in {grad.dtype for grad in grads}:
            raise ValueError("float16 gradients vanish unscaled: use MasterWeights")
        for grad in grads:
            grad *= 1 / self.factor
        overflow = (~nn.utils.get_total_norm(grads, torch.inf).isfinite()).float()
        if self.group is not None:
            ranks.allreduce(overflow, op="max", group=self.group)
        self.unscaled[optimizer] = self.enabled and bool(overflow)

    def step(self, optimizer):
        """Let the optimiser step, unless one of its gradients is not finite."""
        if optimizer not in self.unscaled:
            self.unscale_(optimizer)
        self.overflows.append(self.unscaled.pop(optimizer))
        return None if self.overflows[-1] else optimizer.step()

    def update(self):
        """Halve the scale after an overflow, double it after many good steps."""
        overflow = any([*self.overflows, *self.unscaled.values()])
        self.overflows, self.unscaled = [], {}
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.factor /= 2
        elif self.enabled and self.good_steps == self.growth_interval:
            self.factor, self.good_steps = 2 * self.factor, 0
        if self.factor < 2.0**-24:
            raise FloatingPointError("no scale is small enough: is the loss finite?")


class MasterWeights:
    """Lets an optimiser train float32 copies of 16-bit weights, and rounds them back.

    The optimiser's groups hold the copies: clip *their* gradients, after ``unscale_``.
    """

    def __init__(self, optimizer):
        if hasattr(optimizer, "take_gradients"):
            raise ValueError("the optimiser has masters or shards already")
        if optimizer.state:
            raise ValueError("the optimiser has made steps: give it masters before")
        self.master_of = {}
        for group in optimizer.param_groups:
            for i, w in enumerate(group["params"]):
                if w.dtype in LOW_DTYPES:
                    master = nn.Parameter(w.detach().float(), w.requires_grad)
                    self.master_of[w] = group["params"][i] = master
        optimizer.take_gradients = self.take_gradients  # for GradScaler.unscale_
        self.zero_masters, optimizer.zero_grad = optimizer.zero_grad, self.zero_grad
        optimizer.register_step_pre_hook(self.take_gradients)
        optimizer.register_step_post_hook(self.write_weights)

    def zero_grad(self):
        """Forget the gradients of masters and weights."""
        self.zero_masters()
        for w in self.master_of:
            w.grad = None

    @torch.no_grad()
    def take_gradients(self, *_):
        """Move the weights' gradients to their masters: before a step."""
        for w, master in self.master_of.items():
            if not torch.equal(w, master.to(w.dtype)):  # a checkpoint was loaded
                master.copy_(w)
            if w.grad is not None:
                grad, w.grad = w.grad.float(), None
                master.grad = grad if master.grad is None else master.grad + grad

    @torch.no_grad()
    def write_weights(self, *_):
        """Round the masters into the weights: after a step."""
        for w, master in self.master_of.items():
            w.copy_(master)


class Level(NamedTuple):
    """What an opt level of apex stands for."""

    low_weights: bool  # 16-bit weights and buffers
    autocasts: bool
    masters: bool  # float32 copies of the weights; BatchNorm stays float32
    scales_loss: bool


LEVELS = {
    "O0": Level(low_weights=False, autocasts=False, masters=False, scales_loss=False),
    "O1": Level(low_weights=False, autocasts=True, masters=False, scales_loss=True),
    "O2": Level(low_weights=True, autocasts=False, masters=True, scales_loss=True),
    "O3": Level(low_weights=True, autocasts=False, masters=False, scales_loss=False),
}


def initialize(model, optimizer, opt_level, *, dtype=torch.float16, emulate=False):
    """Make a float32 model and its optimiser ready for a level of apex, in place.

    Return a region for the forward pass and the loss, and a scaler.
    """
    level = LEVELS[opt_level]
    if level.low_weights:
        cast_model(model, dtype, keep_batch_norm=level.masters)
    if level.masters:
        MasterWeights(optimizer)
    device = next(model.parameters()).device.type
    enabled = level.autocasts or (level.low_weights and emulate)
    region = autocast(device, dtype, enabled, emulate=emulate)
    return region, GradScaler(enabled=level.scales_loss and dtype == torch.float16)


def cast_model(model, dtype, keep_batch_norm):
    """Cast weights, buffers and what the model will get; it will return float32."""
    for part in model.modules():
        if not (keep_batch_norm and isinstance(part, _BatchNorm)):
            own = *part.parameters(recurse=False), *part.buffers(recurse=False)
            for tensor in own:  # the optimiser has them: they stay the same objects
                tensor.data = cast_floats(tensor.data, dtype)
    model.register_forward_pre_hook(
        lambda _, args, kwargs: cast_floats((args, kwargs), dtype), with_kwargs=True
    )
    model.register_forward_hook(lambda _, args, out: cast_floats(out, torch.float32))


def cast_floats(tree, dtype):
    """Cast the tensors of floats in tuples, lists and dicts."""

    def cast(x):
        is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.to(dtype) if is_float else x

    return tree_map(cast, tree)


def round_to_fp8(x, dtype=torch.float8_e4m3fn, dim=()):
    """Round to the numbers of an 8-bit type, scaled so that the largest just fits.

    All of ``x`` has one scale; with ``dim``, each slice along it has its own.
    """
    largest = x.abs().float().amax(dim, keepdim=True).clamp(min=1e-30)
    scale = torch.finfo(dtype).max / largest
    return ((x * scale).to(dtype).float() / scale).to(x.dtype)
