"""Autocast: in a region, each of torch's functions chooses its own precision.

Products of matrices are computed in 16 bits, where processors are fast; losses, and
what has a large range, in float32. The lists are torch's own. Notebook 10 uses this
file. Sources: Micikevicius et al., "Mixed Precision Training" (ICLR 2018), and
``torch.autocast``.
"""

import functools
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ..guards import checked

LOW_DTYPES = torch.float16, torch.bfloat16


class Lists(NamedTuple):
    """Names of functions, by their precision; others keep that of their arguments."""

    low: frozenset[str]  # the region's 16 bits
    full: frozenset[str]  # float32
    widest: frozenset[str]  # the widest type among the arguments


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PRODUCTS = _names("""
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    _convolution linear prelu scaled_dot_product_attention matmul __matmul__ __rmatmul__
    mm bmm addmm addbmm baddbmm linalg_vecdot chain_matmul linalg_multi_dot einsum
""")
_LOSSES = _names("""
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss
    cross_entropy cross_entropy_loss hinge_embedding_loss huber_loss kl_div l1_loss
    margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss
    nll_loss2d nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss
    triplet_margin_loss
""")
# On CPUs what only lacked 16-bit kernels is in float32: Fourier transforms, linear
# algebra, pools.
_CPU = Lists(
    low=_PRODUCTS | _names("tensordot _addmm_activation _native_multi_head_attention"),
    full=_LOSSES
    | _names("""
        _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d
        adaptive_max_pool3d_with_indices avg_pool3d cdist cholesky cholesky_inverse
        cholesky_solve ctc_loss det fake_quantize_per_tensor_affine fft_fft fft_fft2
        fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2
        fft_irfftn fft_rfft fft_rfft2 fft_rfftn fractional_max_pool2d
        fractional_max_pool2d_with_indices fractional_max_pool3d
        fractional_max_pool3d_with_indices geqrf grid_sample grid_sampler
        grid_sampler_2d grid_sampler_3d inverse linalg_cholesky linalg_cholesky_ex
        linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
        linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq
        linalg_matrix_rank linalg_qr linalg_solve linalg_svd linalg_svdvals
        linalg_tensorinv linalg_tensorsolve lu lu_solve max_pool3d max_unpool1d
        max_unpool2d max_unpool3d multilabel_margin_loss_forward nanquantile orgqr ormqr
        pinverse polar prod qr quantile reflection_pad1d reflection_pad2d
        replication_pad1d replication_pad2d replication_pad3d stft svd trace
        triangular_solve view_as_complex
    """),
    widest=_names("cat concat concatenate stack hstack vstack index_copy"),
)
# On GPUs it is what has a large range, or adds up many numbers.
_GPU = Lists(
    low=_PRODUCTS
    | _names("""
        addmv addr mv convolution cudnn_convolution cudnn_convolution_transpose
        lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell
        _thnn_fused_gru_cell _scaled_dot_product_flash_attention
    """),
    full=_LOSSES
    | _names("""
        __rdiv__ __rtruediv__ arccos arcsin gumbel_softmax local_response_norm lp_pool1d
        multilabel_soft_margin_loss normalize pairwise_distance softmin special_erfinv
        special_expm1 special_log1p special_log_softmax special_logsumexp
        special_softmax square sum_to_size trapezoid trapz
        triplet_margin_with_distance_loss
        acos asin cosh erfinv exp expm1 log log10 log1p log2 logsumexp pow __pow__
        __rpow__ reciprocal rsqrt sinh softplus tan cosine_similarity cumprod cumsum
        prod sum softmax log_softmax layer_norm native_layer_norm group_norm rms_norm
        norm frobenius_norm nuclear_norm linalg_norm linalg_vector_norm
        linalg_matrix_norm renorm cdist dist pdist interpolate upsample_nearest1d
        upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
        upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_bilinear2d_aa
        _upsample_bicubic2d_aa
    """),
    widest=_names("""
        addcdiv addcmul atan2 bilinear cat concat concatenate stack hstack vstack cross
        dot vdot grid_sample grid_sampler index_put scatter_add tensordot
    """),
)
LISTS = {"cpu": _CPU, "cuda": _GPU}
# Made of functions in the lists, which they call where a function mode does not see it.
UNSEEN = _names("""
    affine_grid bilinear corrcoef cov inner linalg_matrix_power linalg_pinv
    linear_cross_entropy local_response_norm lp_pool3d matrix_power
    multi_head_attention_forward
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
""")

# By device type: the innermost region that this thread is in, and the casts of weights
# it keeps.
_REGIONS: ContextVar[dict[str, tuple["autocast", dict | None]]] = ContextVar("regions")


def map_tensors(function: Callable, x: Any) -> Any:
    """Return ``x`` with ``function`` of each tensor in its tuples, lists and dicts."""
    if isinstance(x, torch.Tensor):
        return function(x)
    if isinstance(x, dict):
        return type(x)((key, map_tensors(function, x[key])) for key in x)
    if isinstance(x, (tuple, list)):
        parts = [map_tensors(function, part) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return x


def tensors_of(x: Any) -> list[torch.Tensor]:
    """List the tensors in tuples, lists and dicts."""
    tensors = []
    map_tensors(tensors.append, x)
    return tensors


def check_autocast(device_type, dtype, enabled, **_) -> None:
    """Refuse what is no device or type; warn where the type is none to cast to."""
    if device_type not in LISTS:
        raise ValueError(f"device_type has to be 'cpu' or 'cuda', not {device_type!r}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype has to be such as torch.bfloat16, not {dtype!r}")
    if enabled and dtype not in (None, *LOW_DTYPES):
        warnings.warn(
            f"autocast casts to torch.float16 or torch.bfloat16, not {dtype}: it is"
            " disabled",
            stacklevel=3,
        )


class autocast(TorchFunctionMode):
    """A region where torch's functions choose a precision, as ``torch.autocast`` is.

    A context manager or a decorator. On a CPU, functions in the lists compute what they
    compute under ``torch.autocast``, to the last bit, gradients included. Only tensors
    of ``device_type`` ("cpu" or "cuda") are cast, and of those neither float64 nor
    integers. A float32 weight (a leaf that requires gradients) is cast once, and its
    cast is forgotten at the end of the outermost region: end it before ``backward``.
    Calls with ``out=`` and in-place functions cast nothing.

    A function mode sees the functions that Python calls, but not what those call
    inside. So ``nn.MultiheadAttention``, the recurrent layers, ``nn.Bilinear`` and
    others compute in float32, with a warning; a scripted or compiled function may not
    be seen at all. ``einsum`` and ``tensordot`` round all their arguments; ``F.pad``
    that reflects or replicates leaves 16 bits on a CPU, where torch widens.
    ``torch.is_autocast_enabled`` says no. Recomputation by ``torch.utils.checkpoint``
    needs ``use_reentrant=False`` and the region in its ``context_fn``.

    ``dtype`` is torch.float16 or torch.bfloat16; None is that of the region around, or
    else bfloat16 on CPUs, float16 on GPUs. Another type disables the region, with a
    warning. With ``enabled=False`` nothing is cast, also within another region.
    ``cache_enabled`` is whether casts of weights are kept; None is as in the region
    around. ``emulate`` computes products in float32, from arguments rounded to 16 bits,
    and rounds the result, as tensor cores do: much faster on a CPU without 16-bit
    arithmetic.
    """

    @checked(check_autocast)
    def __init__(
        self,
        device_type: str = "cpu",
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        emulate: bool = False,
    ):
        super().__init__()
        if dtype is None:
            around, _ = _REGIONS.get({}).get(device_type, (None, None))
            usual = torch.bfloat16 if device_type == "cpu" else torch.float16
            dtype = around.dtype if around else usual
        self.device_type, self.dtype = device_type, dtype
        self.enabled = enabled and dtype in LOW_DTYPES
        self.cache_enabled, self.emulate = cache_enabled, emulate
        self._before = []  # what _REGIONS was, each time this region was entered

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Cast the arguments as the list says that ``function`` is in, then call it."""
        kwargs = kwargs or {}
        innermost, _ = _REGIONS.get({}).get(self.device_type, (None, None))
        if not self.enabled or self is not innermost or kwargs.get("out") is not None:
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name in LISTS[self.device_type].low:
            args, kwargs = map_tensors(self._to_low, [args, kwargs])
            if not self.emulate:
                return function(*args, **kwargs)
            args, kwargs = map_tensors(self._to_float32, [args, kwargs])
            return map_tensors(self._to_low, function(*args, **kwargs))
        if self._widens(name, [args, kwargs]):
            args, kwargs = map_tensors(self._to_float32, [args, kwargs])
        return function(*args, **kwargs)

    def _widens(self, name, inputs):
        """Return whether a function not in the 16-bit list computes in float32."""
        lists = LISTS[self.device_type]
        if name in lists.widest:
            return any(
                self._is_cast(x) and x.dtype == torch.float32
                for x in tensors_of(inputs)
            )
        if name in UNSEEN - lists.full:
            warnings.warn(
                f"{name} computes in float32: what it calls inside is hidden from this"
                " autocast, but not from torch.autocast",
                stacklevel=3,
            )
        return name in lists.full | UNSEEN

    def _to_low(self, x):
        if not self._is_cast(x):
            return x
        _, cache = _REGIONS.get()[self.device_type]
        is_weight = (
            x.is_leaf
            and x.requires_grad
            and x.dtype == torch.float32
            and not x._is_view()
        )
        if cache is None or not is_weight or torch.is_inference_mode_enabled():
            return x.to(self.dtype)
        key = x, self.dtype
        if key not in cache:
            with torch.enable_grad():  # no_grad may end while the cast is still in use
                cache[key] = x.to(self.dtype)
        return cache[key]

    def _to_float32(self, x):
        return x.to(torch.float32) if self._is_cast(x) else x

    def _is_cast(self, x):
        return x.device.type == self.device_type and x.dtype in (
            torch.float32,
            *LOW_DTYPES,
        )

    def __enter__(self):
        regions = _REGIONS.get({})
        _, cache = regions.get(self.device_type, (None, {}))
        if self.cache_enabled is False:
            cache = None
        elif self.cache_enabled and cache is None:
            cache = {}
        self._before.append(regions)
        _REGIONS.set({**regions, self.device_type: (self, cache)})
        return super().__enter__()

    def __exit__(self, *error):
        _REGIONS.set(self._before.pop())
        return super().__exit__(*error)

    def for_thread(self) -> "autocast":
        """Return a region with the same settings, for another thread to enter."""
        return autocast(
            self.device_type,
            self.dtype,
            self.enabled,
            self.cache_enabled,
            emulate=self.emulate,
        )

    def __call__(self, function: Callable) -> Callable:
        """Return ``function`` with its body in such a region."""

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self.for_thread():
                return function(*args, **kwargs)

        return inside
