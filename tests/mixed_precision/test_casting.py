"""Autocast: equal to torch.autocast to the bit, function by function and network by network."""

import gc
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from d2lpar import DataParallel, init_params, lenet
from d2lpar.mixed_precision import autocast, casting
from d2lpar.models import lenet_layers, resnet, transformer

each_dtype = pytest.mark.parametrize("dtype", casting.LOW_DTYPES, ids=["float16", "bfloat16"])


def randn(*shape):
    return torch.randn(shape, requires_grad=True)


def ones(*shape, dtype=torch.long):
    return torch.ones(shape, dtype=dtype)


# (function, its arguments, its options): torch's own lists for CPUs, and others that they cover.
LOW = [
    (torch.conv1d, lambda: (randn(2, 3, 8), randn(4, 3, 3), randn(4)), {}),
    (torch.conv2d, lambda: (randn(2, 3, 8, 8), randn(4, 3, 3, 3)), {"padding": "same"}),
    (F.conv2d, lambda: (randn(2, 3, 8, 8), randn(4, 3, 3, 3), randn(4)), {"stride": 2}),
    (torch.conv3d, lambda: (randn(1, 2, 4, 4, 4), randn(3, 2, 2, 2, 2)), {}),
    (torch.conv_tbc, lambda: (randn(10, 7, 3), randn(5, 3, 5), randn(5), 0), {}),
    (torch.conv_transpose1d, lambda: (randn(2, 3, 8), randn(3, 4, 3)), {}),
    (torch.conv_transpose2d, lambda: (randn(2, 3, 8, 8), randn(3, 4, 3, 3)), {}),
    (torch.conv_transpose3d, lambda: (randn(1, 2, 4, 4, 4), randn(2, 3, 2, 2, 2)), {}),
    (torch.bmm, lambda: (randn(2, 3, 4), randn(2, 4, 5)), {}),
    (torch.mm, lambda: (randn(3, 4), randn(4, 5)), {}),
    (torch.matmul, lambda: (randn(2, 3, 4), randn(4)), {}),
    (torch.Tensor.matmul, lambda: (randn(3, 4), randn(4, 5)), {}),
    (torch.Tensor.__matmul__, lambda: (randn(3, 4), randn(4, 5)), {}),
    (torch.Tensor.__rmatmul__, lambda: (randn(4, 5), randn(3, 4)), {}),
    (torch.baddbmm, lambda: (randn(2, 3, 5), randn(2, 3, 4), randn(2, 4, 5)), {}),
    (torch.addmm, lambda: (randn(5), randn(3, 4), randn(4, 5)), {}),
    (torch.Tensor.addmm, lambda: (randn(5), randn(3, 4), randn(4, 5)), {}),
    (torch.addbmm, lambda: (randn(3, 5), randn(2, 3, 4), randn(2, 4, 5)), {}),
    (torch.prelu, lambda: (randn(3, 4), randn(1)), {}),
    (F.linear, lambda: (randn(3, 4), randn(5, 4), randn(5)), {}),
    (F.scaled_dot_product_attention, lambda: [randn(2, 4, 6, 8) for _ in "qkv"], {}),
    (torch.linalg.vecdot, lambda: (randn(3, 4), randn(3, 4)), {}),
    (torch.einsum, lambda: ("bij,bjk->bik", randn(2, 3, 4), randn(2, 4, 5)), {}),
    (torch.tensordot, lambda: (randn(3, 4), randn(4, 5)), {"dims": 1}),
    (torch.linalg.multi_dot, lambda: ([randn(3, 4), randn(4, 5), randn(5, 6)],), {}),
]
WITHOUT_GRADIENT = [
    (torch._addmm_activation, lambda: (randn(5), randn(3, 4), randn(4, 5)), {"use_gelu": True}),
    (
        torch._native_multi_head_attention,
        lambda: (
            *[randn(8, 8, 8) for _ in "qkv"],
            *(8, 4, randn(24, 8), randn(24), randn(8, 8), randn(8)),
        ),
        {},
    ),
]


def low(*shape, positive=False):
    """16-bit leaves; the dtype is set by ``in_16_bits`` while a test runs."""
    return torch.rand(shape) if positive else torch.randn(shape)


FULL = [
    (F.cross_entropy, lambda: (low(4, 5), ones(4)), {"label_smoothing": 0.1}),
    (F.cross_entropy, lambda: (low(4, 5), ones(4)), {"reduction": "none"}),
    (F.nll_loss, lambda: (low(4, 5), ones(4)), {}),
    (F.nll_loss, lambda: (low(2, 5, 3, 3), ones(2, 3, 3)), {}),
    (torch._C._nn.nll_loss2d, lambda: (low(2, 5, 3, 3), ones(2, 3, 3)), {}),
    (F.mse_loss, lambda: (low(4, 5), low(4, 5)), {}),
    (F.l1_loss, lambda: (low(4, 5), low(4, 5)), {}),
    (F.smooth_l1_loss, lambda: (low(4, 5), low(4, 5)), {}),
    (F.huber_loss, lambda: (low(4, 5), low(4, 5)), {}),
    (F.kl_div, lambda: (low(4, 5), low(4, 5, positive=True)), {"reduction": "sum"}),
    (F.binary_cross_entropy, lambda: [low(4, 5, positive=True) for _ in "xy"], {}),
    (F.binary_cross_entropy_with_logits, lambda: (low(4, 5), low(4, 5, positive=True)), {}),
    (F.multilabel_margin_loss, lambda: (low(4, 5), ones(4, 5)), {}),
    (F.soft_margin_loss, lambda: (low(4, 5), ones(4, 5)), {}),
    (F.multi_margin_loss, lambda: (low(4, 5), ones(4)), {}),
    (F.poisson_nll_loss, lambda: (low(4, 5), low(4, 5)), {}),
    (F.cosine_embedding_loss, lambda: (low(4, 5), low(4, 5), ones(4)), {}),
    (F.hinge_embedding_loss, lambda: (low(4, 5), ones(4, 5)), {}),
    (F.margin_ranking_loss, lambda: (low(4), low(4), ones(4)), {}),
    (F.triplet_margin_loss, lambda: [low(4, 5) for _ in "abc"], {}),
    (F.ctc_loss, lambda: (low(6, 1, 4), ones(1, 2), torch.tensor([6]), torch.tensor([2])), {}),
    (F.avg_pool3d, lambda: (low(1, 2, 4, 4, 4), 2), {}),
    (F.adaptive_avg_pool3d, lambda: (low(1, 2, 4, 4, 4), 2), {}),
    (F.adaptive_max_pool3d, lambda: (low(1, 2, 4, 4, 4), 2), {}),
    (F.max_pool3d, lambda: (low(1, 2, 4, 4, 4), 2), {}),
    (torch._C._nn.reflection_pad1d, lambda: (low(2, 5), (2, 2)), {}),
    (F.grid_sample, lambda: (low(1, 2, 4, 4), low(1, 3, 3, 2)), {"align_corners": False}),
    (torch.cdist, lambda: (low(3, 4), low(5, 4)), {}),
    (torch.prod, lambda: (low(3, 4),), {"dim": 1}),
    (torch.trace, lambda: (low(4, 4),), {}),
    (torch.quantile, lambda: (low(9), 0.3), {}),
    (torch.Tensor.prod, lambda: (low(3, 4),), {}),
    (torch.fft.rfft, lambda: (low(8),), {}),
    (torch.linalg.inv, lambda: (low(3, 3),), {}),
    (torch.linalg.svdvals, lambda: (low(3, 3),), {}),
    (torch.inverse, lambda: (low(3, 3),), {}),
    (torch.polar, lambda: (low(3), low(3)), {}),
]
REST = [  # what computes in the type of its arguments, or widens them itself
    (torch.softmax, lambda: (low(3, 4), 1), {}),
    (F.layer_norm, lambda: (low(3, 4), (4,)), {}),
    (torch.exp, lambda: (low(3, 4),), {}),
    (torch.sum, lambda: (low(3, 4),), {}),
    (torch.add, lambda: (low(3, 4), torch.ones(3, 4)), {}),
    (torch.mul, lambda: (torch.ones(3, 4), low(3, 4)), {}),
    (torch.div, lambda: (low(3, 4), torch.ones(3, 4)), {}),
    *[
        (function, lambda: (low(3, 4), torch.ones(3, 4)), {})
        for function in (torch.eq, torch.ge, torch.gt, torch.le, torch.lt, torch.ne)
    ],
    (F.relu, lambda: (low(3, 4),), {}),
    (F.avg_pool2d, lambda: (low(1, 2, 4, 4), 2), {}),
]
WIDEST = [
    (torch.cat, lambda: ([low(3), torch.ones(3)],), {}),
    (torch.stack, lambda: ([torch.ones(3), low(3)],), {}),
    (torch.cat, lambda: ([low(3), low(3)],), {}),
    (torch.index_copy, lambda: (torch.ones(3), 0, ones(1), low(1)), {}),
]


def name_of(call):
    return call[0].__name__


def computed(region, call, to=None):
    """Call in a region: all results, and the gradients of all floating-point arguments."""
    function, arguments, options = call
    torch.manual_seed(0)
    flat, structure = torch.utils._pytree.tree_flatten(arguments())
    leaves = []
    for i, x in enumerate(flat):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            was_low = to is not None and not bool((x == 1).all())  # ones stay float32
            flat[i] = x.detach().to(to if was_low else x.dtype).requires_grad_()
            leaves.append(flat[i])
    with region:
        results = function(*torch.utils._pytree.tree_unflatten(flat, structure), **options)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    for result in results:
        if result.requires_grad:
            torch.view_as_real(result).sum().backward() if result.is_complex() else (
                result.float().sum().backward(retain_graph=True)
            )
    return [*results, *[leaf.grad for leaf in leaves if leaf.grad is not None]]


def assert_same_bits(ours, theirs):
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x.detach().nan_to_num(), y.detach().nan_to_num())


@each_dtype
@pytest.mark.parametrize("call", LOW + WITHOUT_GRADIENT, ids=name_of)
def test_products_are_torchs_to_the_bit(call, dtype):
    with torch.set_grad_enabled(call in LOW):
        ours = computed(autocast("cpu", dtype), call)
        assert ours[0].dtype == dtype
        assert_same_bits(ours, computed(torch.autocast("cpu", dtype), call))


@each_dtype
@pytest.mark.parametrize("call", FULL + REST + WIDEST, ids=name_of)
def test_of_16_bit_arguments_all_others_are_torchs_to_the_bit(call, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # soft_margin_loss on integers
        ours = computed(autocast("cpu", dtype), call, to=dtype)
        theirs = computed(torch.autocast("cpu", dtype), call, to=dtype)
    if call in FULL:
        assert ours[0].dtype in (torch.float32, torch.complex64)
    assert_same_bits(ours, theirs)


# Of these names Python calls another: the function that a module or a user calls is in the lists.
ELSEWHERE = {
    "cpu": {"_convolution", "mkldnn_rnn_layer", "_grid_sampler_2d_cpu_fallback"},
    "cuda": {"_cudnn_rnn"},
}


@pytest.mark.parametrize("device_type", casting.LISTS)
def test_the_lists_have_what_torch_registers(device_type):
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[device_type]
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)  # private, and complete
    names = {name.removeprefix("aten::").partition(".")[0] for name in registered}
    lists = casting.LISTS[device_type]
    assert names - set().union(*lists) <= ELSEWHERE[device_type]
    assert not (lists.low & lists.full or lists.low & lists.widest or lists.full & lists.widest)


def on_cpu(monkeypatch, device_type):
    """Use another device's lists for the tensors of this CPU."""
    monkeypatch.setattr(casting, "LISTS", {"cpu": casting.LISTS[device_type]})


RANGE = [torch.exp, torch.sum, torch.norm, torch.linalg.norm, lambda x: F.layer_norm(x, (4,))]
RANGE += [lambda x: x.softmax(0), lambda x: x**2, lambda x: 2**x, lambda x: 1 / x]


def test_what_has_a_large_range_or_is_mixed_is_float32_on_gpus_only(monkeypatch):
    low, full = torch.randn(4).bfloat16(), torch.randn(4)
    with autocast("cpu"):
        assert {function(low).dtype for function in RANGE} == {torch.bfloat16}
    on_cpu(monkeypatch, "cuda")
    with autocast("cpu"):
        assert {function(low).dtype for function in RANGE} == {torch.float32}
        assert torch.dot(low, full).dtype == torch.float32  # refused without a cast
        assert torch.dot(low, low).dtype == torch.bfloat16


@pytest.mark.gpu
@each_dtype
def test_networks_on_a_gpu_are_torchs_to_the_bit(dtype):
    for model, X in [(lenet_layers(), torch.randn(8, 1, 28, 28)), tokens_and_transformer()]:
        model, X = model.cuda(), X.cuda()
        ours = step(model, X, autocast("cuda", dtype))
        assert_same_bits(ours, step(model, X, torch.autocast("cuda", dtype)))


# Networks


def tokens_and_transformer():
    return transformer(50, 32, 4, 2, 8), torch.randint(50, (3, 8))


class RawLeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.params = nn.ParameterList(init_params(0.1))

    def forward(self, X):
        return lenet(X, self.params)


def step(model, X, region):
    """The loss of one forward pass in a region, and all gradients after it."""
    model.zero_grad()
    with region:
        y_hat = model(X)
        value = F.cross_entropy(y_hat.flatten(0, -2), torch.arange(y_hat[..., 0].numel()) % 10)
    value.backward()
    return [value.detach(), *[param.grad for param in model.parameters()]]


@each_dtype
@pytest.mark.parametrize(
    "make",
    [
        lambda: (lenet_layers(), torch.randn(8, 1, 28, 28)),
        lambda: (resnet((8, 16)), torch.randn(4, 1, 16, 16)),
        tokens_and_transformer,
        lambda: (RawLeNet(), torch.randn(8, 1, 28, 28)),
    ],
    ids=["lenet", "resnet", "transformer", "raw tensors"],
)
def test_networks_are_torchs_to_the_bit(make, dtype):
    torch.manual_seed(0)
    model, X = make()
    ours = step(model, X, autocast("cpu", dtype))
    assert_same_bits(ours, step(model, X, torch.autocast("cpu", dtype)))
    plain = step(model, X, autocast("cpu", dtype, enabled=False))
    assert not all(torch.equal(x, y) for x, y in zip(ours, plain, strict=True))


# Regions


def dtype_of_product():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize("region", [autocast, torch.autocast])
def test_regions_nest_and_end(region):
    found = []
    with region("cpu"):
        found.append(dtype_of_product())
        with region("cpu", enabled=False):
            found.append(dtype_of_product())
            with region("cpu", torch.float16):
                found.append(dtype_of_product())
            found.append(dtype_of_product())
        found.append(dtype_of_product())
        with pytest.raises(ZeroDivisionError), region("cpu", torch.float16):
            1 / 0  # noqa: B018
        found.append(dtype_of_product())
        with region("cuda", enabled=False):  # of another device: leaves the one around it alone
            found.append(dtype_of_product())
    found.append(dtype_of_product())
    low, full = torch.bfloat16, torch.float32
    assert found == [low, full, torch.float16, full, low, low, low, full]


def test_without_a_dtype_a_region_takes_that_of_the_one_around_or_the_usual_one():
    assert autocast().dtype == torch.bfloat16 == torch.get_autocast_dtype("cpu")
    assert autocast("cuda").dtype == torch.float16 == torch.get_autocast_dtype("cuda")
    for region in (autocast, torch.autocast):
        with region("cpu", torch.float16):
            with region("cpu"):
                assert dtype_of_product() == torch.float16
            with region("cpu", enabled=False), region("cpu"):
                assert dtype_of_product() == torch.float16


def test_a_region_is_entered_again_inside_itself():
    region = autocast("cpu")
    with region:
        with region:
            assert dtype_of_product() == torch.bfloat16
        assert dtype_of_product() == torch.bfloat16
    assert dtype_of_product() == torch.float32


def test_as_a_decorator_also_of_a_function_that_calls_itself():
    @autocast("cpu", dtype=torch.float16)
    def product(depth):
        """Its name and docstring stay."""
        return [dtype_of_product()] + (product(depth - 1) if depth else [])

    assert product(2) == [torch.float16] * 3
    assert (product.__name__, product.__doc__) == ("product", "Its name and docstring stay.")
    assert dtype_of_product() == torch.float32


def test_only_float32_and_16_bits_of_the_regions_device_are_cast():
    double, whole = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.long)
    with autocast("cpu"):
        assert (double @ double).dtype == torch.float64
        assert (whole @ whole).dtype == torch.long
        assert (torch.ones(2, 2).half() @ torch.ones(2, 2)).dtype == torch.bfloat16
    with autocast("cuda"):
        assert dtype_of_product() == torch.float32


def test_in_place_and_out_cast_nothing():
    out = torch.empty(2, 2)
    with autocast("cpu"):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=out)
        assert torch.ones(2, 2).addmm_(out, out).dtype == torch.float32
    assert out.tolist() == [[2, 2], [2, 2]]


def casts_of(weight, *outputs):
    """The nodes, in the graphs of outputs, that cast the weight."""
    found, nodes = set(), [out.grad_fn for out in outputs]
    while nodes:
        node = nodes.pop()
        below = [n for n, _ in node.next_functions if n]
        if any(getattr(n, "variable", None) is weight for n in below):
            found.add(node)
        nodes += below
    return found


def test_a_weight_is_cast_once_and_its_gradients_add_up_in_16_bits_as_torchs_do():
    def gradient(region, weight):
        weight.grad = None
        with region:
            out = sum(F.linear(torch.full((1, 4), 1.0 + i), weight) for i in range(5))
        out.sum().backward()
        return weight.grad.clone()

    torch.manual_seed(0)
    weight = torch.randn(3, 4, requires_grad=True)
    kept, again = [
        [gradient(kind("cpu", cache_enabled=cache), weight) for kind in (autocast, torch.autocast)]
        for cache in (True, False)
    ]
    assert torch.equal(*kept)
    assert torch.equal(*again)
    for cache, casts in ((None, 1), (False, 2)):
        with autocast("cpu", cache_enabled=cache):
            outputs = [F.linear(torch.ones(1, 4), weight) for _ in range(2)]
        assert len(casts_of(weight, *outputs)) == casts


def test_regions_that_nest_share_their_casts():
    weight, X = torch.ones(3, 4, requires_grad=True), torch.ones(1, 4)
    with autocast("cpu"):
        outer = F.linear(X, weight)
        with autocast("cpu"):
            inner = F.linear(X, weight)
        with autocast("cpu", torch.float16):
            assert F.linear(X, weight).dtype == torch.float16
        with autocast("cpu", cache_enabled=False):
            fresh = F.linear(X, weight)
    assert casts_of(weight, outer) == casts_of(weight, inner) != casts_of(weight, fresh)


def test_only_weights_are_kept():
    X, grown = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True) * 1
    with autocast("cpu"):
        torch.mm(X, grown)
        X.add_(1)
        with torch.no_grad():
            grown.add_(1)
        assert torch.mm(X, grown).tolist() == [[8, 8], [8, 8]]


def test_a_changed_weight_is_seen_in_the_next_region():
    weight, X, region = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1), autocast("cpu")
    for expected in (1.0, 2.0, 3.0):
        with region:
            assert F.linear(X, weight).item() == expected
        with torch.no_grad():
            weight += 1


def test_a_weight_that_takes_the_place_of_another_is_not_mistaken_for_it():
    with autocast("cpu"):
        for value in range(1, 50):  # the id of one that is gone is used again
            weight = torch.full((1, 1), float(value), requires_grad=True)
            assert F.linear(torch.ones(1, 1), weight).item() == value


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_inside_keeps_the_way_to_the_weight(mode):
    weight = torch.ones(1, 1, requires_grad=True)
    with autocast("cpu"):
        with mode():
            F.linear(torch.ones(1, 1), weight)
        F.linear(torch.full((1, 1), 3.0), weight).backward()
    assert weight.grad.item() == 3


@each_dtype
def test_emulation_rounds_arguments_and_result_and_is_float32_between(dtype):
    torch.manual_seed(0)
    a, b = (torch.randn(40, 40, requires_grad=True) for _ in "ab")
    with autocast("cpu", dtype, emulate=True):
        product = a @ b
    expected = (a.detach().to(dtype).float() @ b.detach().to(dtype).float()).to(dtype)
    assert torch.equal(product, expected)
    upstream = torch.randn(40, 40).to(dtype)
    product.backward(upstream)
    by_hand = (upstream.float() @ b.detach().to(dtype).float().T).to(dtype).float()
    assert torch.equal(a.grad, by_hand)


# What a function mode does not see


def test_what_is_made_of_others_is_named_and_stays_float32():
    attention, first, X = nn.MultiheadAttention(8, 2), nn.Linear(8, 8), torch.randn(3, 2, 8)
    for function, said in [
        (lambda: attention(X, X, X)[0], "multi_head_attention_forward computes"),
        (lambda: attention(first(X), X, X)[0], "multi_head_attention_forward"),  # 16 and 32 bits
        (lambda: nn.LSTM(8, 8)(X)[0], r"lstm computes in float32: "),
        (lambda: F.local_response_norm(X.bfloat16()[None], 2), "local_response_norm"),
    ]:
        with autocast("cpu"), pytest.warns(UserWarning, match=said):
            assert function().dtype == torch.float32
    with torch.autocast("cpu"):
        assert attention(X, X, X)[0].dtype == torch.bfloat16


def test_a_region_is_of_its_thread_and_of_those_of_data_parallel():
    class Kind(nn.Module):
        def forward(self, X):
            kinds.append((X @ X.T).dtype)
            return X

    kinds = []
    model = DataParallel(Kind(), ["cpu", "cpu"])
    with autocast("cpu", torch.float16):
        model(torch.ones(4, 3))
        thread = threading.Thread(target=lambda: kinds.append(dtype_of_product()))
        thread.start()
        thread.join()
    model(torch.ones(4, 3))
    assert kinds == [torch.float16] * 2 + [torch.float32] * 3


def test_recomputation_with_the_region_in_context_fn():
    layer, X = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)

    def gradient(call):
        X.grad = None
        with autocast("cpu"):
            out = call(lambda x: F.relu(layer(x)))
        out.float().sum().backward()
        return X.grad.clone()

    def again(function):
        contexts = (torch.enable_grad(), autocast("cpu"))
        return checkpoint(function, X, use_reentrant=False, context_fn=lambda: contexts)

    assert torch.equal(gradient(lambda function: function(X)), gradient(again))


def test_arguments_by_name_are_cast_too():
    X, W = torch.randn(2, 4), torch.randn(3, 4)
    with autocast("cpu"):
        named = F.linear(input=X, weight=W, bias=None)
        assert torch.equal(named, F.linear(X, W))
        assert named.dtype == torch.bfloat16


def test_a_region_holds_no_weight_after_its_end():
    region, weight = autocast("cpu"), torch.ones(2, 2, requires_grad=True)
    gone = weakref.ref(weight)
    with pytest.raises(ZeroDivisionError), region:
        F.linear(torch.ones(1, 2), weight)
        1 / 0  # noqa: B018
    del weight
    gc.collect()
    assert gone() is None


def test_a_decorator_keeps_every_setting():
    for region in (
        autocast("cpu", enabled=False),
        autocast("cpu", torch.float16, True, False, emulate=True),
    ):
        twin = region.for_thread()  # a decorator enters one for each call
        for name in ("device_type", "dtype", "enabled", "cache_enabled", "emulate"):
            assert getattr(twin, name) == getattr(region, name)
    plain = torch.full((1, 1), 1 + 2**-12)
    assert autocast("cpu", enabled=False)(torch.mm)(plain, plain).dtype == torch.float32


# Bad arguments


def test_a_device_without_lists_is_refused():
    with pytest.raises(ValueError, match="'cpu' or 'cuda', not 'tpu'"):
        autocast("tpu")
    with pytest.raises(TypeError, match=r"such as torch\.bfloat16, not 'float16'"):
        autocast("cpu", "float16")


@pytest.mark.parametrize("region", [autocast, torch.autocast])
def test_a_type_that_has_not_16_bits_disables_with_a_warning(region):
    with pytest.warns(UserWarning), region("cpu", torch.float64):
        assert dtype_of_product() == torch.float32
