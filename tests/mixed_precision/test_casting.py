"""Autocast: equal to torch.autocast to the bit, by function and by network."""

import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from d2lpar.mixed_precision import autocast, casting
from d2lpar.models import lenet_layers, resnet, transformer

each_dtype = pytest.mark.parametrize(
    "dtype", casting.LOW_DTYPES, ids=["float16", "bfloat16"]
)


def ones(*shape):
    return torch.ones(shape, dtype=torch.long)


# Functions, and their arguments: a tuple is the shape of random numbers between 0 and
# 1.
LOW = [
    ([partial(torch.conv2d, padding="same"), F.conv2d], (2, 3, 8, 8), (4, 3, 3, 3)),
    ([torch.conv_tbc], (10, 7, 3), (5, 3, 5), (5,), 0),
    ([torch.conv_transpose2d], (2, 3, 8, 8), (3, 4, 3, 3)),
    ([torch.bmm, partial(torch.einsum, "bij,bjk->bik")], (2, 3, 4), (2, 4, 5)),
    (
        [torch.mm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__],
        (4, 4),
        (4, 4),
    ),
    ([torch.Tensor.__rmatmul__, partial(torch.tensordot, dims=1)], (4, 4), (4, 4)),
    ([torch.linalg.vecdot], (3, 4), (3, 4)),
    ([torch.addmm, torch.Tensor.addmm], (5,), (3, 4), (4, 5)),
    ([torch.baddbmm, torch.addbmm], (3, 5), (2, 3, 4), (2, 4, 5)),
    ([torch.prelu], (3, 4), (1,)),
    ([F.linear], (3, 4), (5, 4), (5,)),
    ([F.scaled_dot_product_attention], *[(2, 4, 6, 8)] * 3),
    ([torch.linalg.multi_dot], [(3, 4), (4, 5), (5, 6)]),
]
OF_PAIRS = [
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.poisson_nll_loss,
    torch.cdist,
]
OF_PAIRS += [F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div]
OF_CLASSES = [
    partial(F.cross_entropy, label_smoothing=0.1),
    F.nll_loss,
    F.multi_margin_loss,
]
OF_MATRICES = [
    torch.prod,
    torch.Tensor.prod,
    torch.trace,
    torch.inverse,
    torch.linalg.inv,
]
OF_MATRICES += [torch.linalg.svdvals, torch.fft.rfft, partial(torch.quantile, q=0.3)]
POOLS = [F.avg_pool3d, F.adaptive_avg_pool3d, F.adaptive_max_pool3d, F.max_pool3d]
FULL = [
    (OF_PAIRS, (4, 5), (4, 5)),
    (OF_CLASSES, (4, 5), ones(4)),
    ([F.cross_entropy, torch._C._nn.nll_loss2d], (2, 5, 3, 3), ones(2, 3, 3)),
    (
        [F.multilabel_margin_loss, F.soft_margin_loss, F.hinge_embedding_loss],
        (4, 5),
        ones(4, 5),
    ),
    ([F.cosine_embedding_loss], (4, 5), (4, 5), ones(4)),
    ([F.triplet_margin_loss], (4, 5), (4, 5), (4, 5)),
    ([F.ctc_loss], (6, 1, 4), ones(1, 2), torch.tensor([6]), torch.tensor([2])),
    (POOLS, (1, 2, 4, 4, 4), 2),
    ([partial(torch._C._nn.reflection_pad1d, padding=(2, 2))], (2, 5)),
    ([partial(F.grid_sample, align_corners=False)], (1, 2, 4, 4), (1, 3, 3, 2)),
    (OF_MATRICES, (4, 4)),
    ([torch.polar], (3,), (3,)),
]
REST = [  # what computes in the type of its arguments, or widens them itself
    ([partial(torch.softmax, dim=1), torch.exp, torch.sum, F.relu], (3, 4)),
    ([partial(F.layer_norm, normalized_shape=(4,))], (3, 4)),
    ([torch.add, torch.div, torch.eq, torch.lt], (3, 4), torch.ones(3, 4)),
    ([torch.mul], torch.ones(3, 4), (3, 4)),
    ([F.avg_pool2d], (1, 2, 4, 4), 2),
]
WIDEST = [
    ([torch.cat, torch.stack], [(3,), torch.ones(3)]),
    ([torch.cat], [(3,), (3,)]),
    ([torch.index_copy], torch.ones(3), 0, ones(1), (1,)),
]


def calls(table):
    """A test's cases: a function and its arguments."""
    of_all = [(function, args) for functions, *args in table for function in functions]
    names = [getattr(function, "func", function).__name__ for function, _ in of_all]
    return [
        pytest.param(*case, id=name) for case, name in zip(of_all, names, strict=True)
    ]


def computed(region, function, args, dtype):
    """Call in a region: all results, and the gradients of the random arguments."""
    leaves = []

    def make(x):
        if isinstance(x, list):
            return [make(each) for each in x]
        if not isinstance(x, tuple):
            return x
        leaves.append(torch.rand(x).to(dtype).requires_grad_())
        return leaves[-1]

    torch.manual_seed(0)
    made = make(args)
    with region:
        results = function(*made)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    if any(result.requires_grad for result in results):
        sum(result.abs().float().sum() for result in results).backward()
    return [*results, *[leaf.grad for leaf in leaves if leaf.grad is not None]]


def assert_same_bits(ours, theirs):
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x.detach().nan_to_num(), y.detach().nan_to_num())


@each_dtype
@pytest.mark.parametrize(("function", "args"), calls(LOW))
def test_products_are_torchs_to_the_bit(function, args, dtype):
    ours = computed(autocast("cpu", dtype), function, args, torch.float32)
    assert ours[0].dtype == dtype
    assert_same_bits(
        ours, computed(torch.autocast("cpu", dtype), function, args, torch.float32)
    )


@pytest.mark.filterwarnings("ignore")  # soft_margin_loss on integers
@each_dtype
@pytest.mark.parametrize(("function", "args"), calls(FULL + REST + WIDEST))
def test_of_16_bit_arguments_all_others_are_torchs_to_the_bit(function, args, dtype):
    ours = computed(autocast("cpu", dtype), function, args, dtype)
    if any(function in functions for functions, *_ in FULL):
        assert ours[0].dtype in (torch.float32, torch.complex64)
    assert_same_bits(
        ours, computed(torch.autocast("cpu", dtype), function, args, dtype)
    )


# Of these names Python calls another: the function that a module or a user calls is in
# the lists.
ELSEWHERE = {
    "cpu": {"_convolution", "mkldnn_rnn_layer", "_grid_sampler_2d_cpu_fallback"},
    "cuda": {"_cudnn_rnn"},
}


@pytest.mark.parametrize("device_type", casting.LISTS)
def test_the_lists_have_what_torch_registers(device_type):
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[device_type]
    # private, and complete
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    names = {name.removeprefix("aten::").partition(".")[0] for name in registered}
    lists = casting.LISTS[device_type]
    assert names - set().union(*lists) <= ELSEWHERE[device_type]
    assert not (
        lists.low & lists.full or lists.low & lists.widest or lists.full & lists.widest
    )


RANGE = [
    torch.exp,
    torch.sum,
    torch.norm,
    torch.linalg.norm,
    lambda x: F.layer_norm(x, (4,)),
]
RANGE += [lambda x: x.softmax(0), lambda x: x**2, lambda x: 2**x, lambda x: 1 / x]


def test_what_has_a_large_range_or_is_mixed_is_float32_on_gpus_only(monkeypatch):
    low, full = torch.randn(4).bfloat16(), torch.randn(4)
    with autocast("cpu"):
        assert {function(low).dtype for function in RANGE} == {torch.bfloat16}
    monkeypatch.setattr(casting, "LISTS", {"cpu": casting.LISTS["cuda"]})
    with autocast("cpu"):
        assert {function(low).dtype for function in RANGE} == {torch.float32}
        assert torch.dot(low, full).dtype == torch.float32  # refused without a cast
        assert torch.dot(low, low).dtype == torch.bfloat16


# Networks


def step(model, X, region):
    """The loss of one forward pass in a region, and all gradients after it."""
    model.zero_grad()
    with region:
        y_hat = model(X)
        y = torch.arange(y_hat[..., 0].numel(), device=X.device) % 10
        value = F.cross_entropy(y_hat.flatten(0, -2), y)
    value.backward()
    return [value.detach(), *[param.grad for param in model.parameters()]]


NETWORKS = {
    "lenet": lambda: (lenet_layers(), torch.randn(8, 1, 28, 28)),
    "resnet": lambda: (resnet((8, 16)), torch.randn(4, 1, 16, 16)),
    "transformer": lambda: (transformer(50, 32, 4, 2, 8), torch.randint(50, (3, 8))),
}


@each_dtype
@pytest.mark.parametrize(
    "device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_torchs_to_the_bit(name, device_type, dtype):
    model, X = (each.to(device_type) for each in NETWORKS[name]())
    ours = step(model, X, autocast(device_type, dtype))
    assert_same_bits(ours, step(model, X, torch.autocast(device_type, dtype)))
    plain = step(model, X, autocast(device_type, dtype, enabled=False))
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
        with pytest.raises(ZeroDivisionError), region("cpu", torch.float16):
            1 / 0  # noqa: B018
        found.append(dtype_of_product())
        # of another device: leaves the one around it alone
        with region("cuda", enabled=False):
            found.append(dtype_of_product())
        outer = region("cpu", torch.float16)
        with outer, outer:  # again inside itself
            found.append(dtype_of_product())
    found.append(dtype_of_product())
    low, full = torch.bfloat16, torch.float32
    assert found == [low, full, torch.float16, full, low, low, torch.float16, full]


def test_without_a_dtype_a_region_takes_that_of_the_one_around_or_the_usual_one():
    for device_type in ("cpu", "cuda"):
        assert autocast(device_type).dtype == torch.get_autocast_dtype(device_type)
    for region in (autocast, torch.autocast):
        with region("cpu", torch.float16), region("cpu"):
            assert dtype_of_product() == torch.float16
        with region("cpu", torch.float16), region("cpu", enabled=False), region("cpu"):
            assert dtype_of_product() == torch.float16


def test_as_a_decorator_it_keeps_its_settings_also_where_a_function_calls_itself():
    @autocast("cpu", dtype=torch.float16)
    def product(depth):
        """Its name and docstring stay."""
        return [dtype_of_product()] + (product(depth - 1) if depth else [])

    assert product(2) == [torch.float16] * 3
    assert (product.__name__, product.__doc__) == (
        "product",
        "Its name and docstring stay.",
    )
    assert autocast("cpu", enabled=False)(dtype_of_product)() == torch.float32
    region = autocast("cpu", torch.float16, True, False, emulate=True)
    twin = region.for_thread()  # which a decorator enters in each call
    for name in ("device_type", "dtype", "enabled", "cache_enabled", "emulate"):
        assert getattr(twin, name) == getattr(region, name)


def test_only_floats_of_the_regions_device_are_cast_but_not_in_place_or_into_out():
    ones, out = torch.ones(2, 2), torch.empty(2, 2)
    with autocast("cpu"):
        for dtype in (torch.float64, torch.long):
            assert (ones.to(dtype) @ ones.to(dtype)).dtype == dtype
        assert (ones.half() @ ones).dtype == torch.bfloat16
        assert F.linear(input=ones, weight=ones, bias=None).dtype == torch.bfloat16
        torch.mm(ones, ones, out=out)
        assert torch.ones(2, 2).addmm_(out, out).dtype == torch.float32
    with autocast("cuda"):
        assert dtype_of_product() == torch.float32
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


@pytest.mark.parametrize("cache", [True, False])
def test_a_weight_is_cast_once_and_its_gradients_add_up_in_16_bits_as_torchs_do(cache):
    weight, found = torch.randn(3, 4, requires_grad=True), []
    for kind in (autocast, torch.autocast):
        weight.grad = None
        with kind("cpu", cache_enabled=cache):
            outputs = [F.linear(torch.full((1, 4), 1.0 + i), weight) for i in range(5)]
        sum(outputs).sum().backward(retain_graph=True)
        found.append((weight.grad.clone(), len(casts_of(weight, *outputs))))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == (1 if cache else 5)


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


def test_only_weights_are_kept_and_no_longer_than_the_region():
    X, weight = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    grown, region = weight * 1, autocast("cpu")
    with region:
        torch.mm(X, grown)
        X.add_(1)
        with torch.no_grad():
            grown.add_(1)
        assert torch.mm(X, grown).tolist() == [[8, 8], [8, 8]]
    for expected in (4, 8):
        with region:
            assert torch.mm(X, weight)[0, 0] == expected
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
    attention, first, X = (
        nn.MultiheadAttention(8, 2),
        nn.Linear(8, 8),
        torch.randn(3, 2, 8),
    )
    for function, said in [
        (lambda: attention(X, X, X)[0], "multi_head_attention_forward computes"),
        # 16 and 32 bits
        (lambda: attention(first(X), X, X)[0], "multi_head_attention_forward"),
        (lambda: nn.LSTM(8, 8)(X)[0], r"lstm computes in float32: "),
        (lambda: F.local_response_norm(X.bfloat16()[None], 2), "local_response_norm"),
    ]:
        with autocast("cpu"), pytest.warns(UserWarning, match=said):
            assert function().dtype == torch.float32
    with torch.autocast("cpu"):
        assert attention(X, X, X)[0].dtype == torch.bfloat16


def test_a_region_is_of_its_thread():
    kinds = []
    with autocast("cpu", torch.float16):
        thread = threading.Thread(target=lambda: kinds.append(dtype_of_product()))
        thread.start()
        thread.join()
    assert kinds == [torch.float32]


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


def test_a_region_holds_no_weight_after_its_end():
    region, weight = autocast("cpu"), torch.ones(2, 2, requires_grad=True)
    gone = weakref.ref(weight)
    with pytest.raises(ZeroDivisionError), region:
        F.linear(torch.ones(1, 2), weight)
        1 / 0  # noqa: B018
    del weight
    gc.collect()
    assert gone() is None


def test_bad_arguments():
    for error, words, arguments in [
        (ValueError, "'cpu' or 'cuda', not 'tpu'", ["tpu"]),
        (TypeError, r"such as torch\.bfloat16, not 'float16'", ["cpu", "float16"]),
    ]:
        with pytest.raises(error, match=words):
            autocast(*arguments)


@pytest.mark.parametrize("region", [autocast, torch.autocast])
def test_a_type_that_has_not_16_bits_disables_with_a_warning(region):
    with pytest.warns(UserWarning), region("cpu", torch.float64):
        assert dtype_of_product() == torch.float32
