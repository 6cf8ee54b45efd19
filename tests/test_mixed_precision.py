"""Mixed precision: torch's bits, the steps of its scaler, and apex's levels."""

import math
from functools import partial

import pytest
import torch
from helpers import attempt, clones, grads, in_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from d2lpar import (
    DistributedDataParallel,
    GradScaler,
    MasterWeights,
    autocast,
    initialize,
    ranks,
)
from d2lpar.mixed_precision import (
    FULL,
    LEVELS,
    LOW,
    LOW_DTYPES,
    cast_floats,
    round_to_fp8,
)
from d2lpar.models import gpt, lenet_layers, resnet

each_dtype = pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)
IMAGES, TOKENS = torch.rand(4, 1, 28, 28), torch.arange(24).reshape(2, 12)
NETWORKS = {
    "LeNet": (lenet_layers, IMAGES),
    "ResNet": (partial(resnet, (8, 16)), IMAGES),
    "transformer": (partial(gpt, 32, 16, 2, 2, 12), TOKENS),
}


@each_device
@each_dtype
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_torchs_to_the_bit(name, dtype, device):
    make, X = NETWORKS[name]
    found = []
    for region in autocast(device, dtype), torch.autocast(device, dtype):
        torch.manual_seed(0)
        model = make().to(device)
        y = torch.arange(X.numel() if X is TOKENS else 4, device=device) % 10
        with region:
            logits = model(X.to(device)).flatten(0, -2)
            # on GPUs torch's rounds the logarithms of probabilities to 16 bits
            loss = F.cross_entropy(logits if device == "cpu" else logits.float(), y)
        loss.backward()
        found.append([logits.detach(), loss.detach(), *grads(model)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def of_shapes(*shapes):
    return [torch.rand(shape, requires_grad=True) for shape in shapes]


M, T = torch.Tensor, (2, 3, 4)
KL_DIV = partial(F.kl_div, reduction="sum")
CALLS = [  # every name of the CPU's lists, in all its spellings, and what is in none
    ([F.linear], of_shapes((3, 4), (5, 4), (5,))),
    ([torch.matmul, torch.mm, M.matmul, M.__matmul__], of_shapes((3, 4), (4, 5))),
    ([M.__rmatmul__, torch.linalg.matmul], of_shapes((4, 4), (4, 4))),
    ([torch.bmm, partial(torch.einsum, "bij,bjk->bik")], of_shapes(T, (2, 4, 5))),
    ([torch.addmm, M.addmm], of_shapes((5,), (3, 4), (4, 5))),
    ([torch.baddbmm, torch.addbmm], of_shapes((3, 5), T, (2, 4, 5))),
    ([F.conv1d], of_shapes((2, 3, 8), (4, 3, 3), (4,))),
    ([F.conv2d, torch.conv2d], of_shapes((2, 3, 8, 8), (4, 3, 3, 3), (4,))),
    ([F.conv3d], of_shapes((1, 3, 4, 4, 4), (2, 3, 2, 2, 2))),
    ([F.conv_transpose1d], of_shapes((2, 3, 8), (3, 4, 3))),
    ([F.conv_transpose2d], of_shapes((2, 3, 8, 8), (3, 4, 3, 3))),
    ([F.conv_transpose3d], of_shapes((1, 3, 4, 4, 4), (3, 2, 2, 2, 2))),
    ([F.prelu, torch.prelu], of_shapes((3, 4), (1,))),
    ([F.scaled_dot_product_attention], of_shapes(*[(2, 4, 6, 8)] * 3)),
    ([F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss], of_shapes(T, T)),
    ([F.poisson_nll_loss, F.binary_cross_entropy, KL_DIV], of_shapes(T, T)),
    ([F.binary_cross_entropy_with_logits, torch.cdist], of_shapes(T, T)),
    ([F.cross_entropy, F.nll_loss], [*of_shapes((4, 5)), torch.arange(4)]),
    ([F.multi_margin_loss], [*of_shapes((4, 5)), torch.arange(4)]),
    ([F.cosine_embedding_loss], [*of_shapes((4, 5), (4, 5)), torch.ones(4)]),
    ([F.margin_ranking_loss], [*of_shapes(T, T), torch.ones(T)]),
    ([F.hinge_embedding_loss, F.soft_margin_loss], [*of_shapes(T), torch.ones(T)]),
    ([F.triplet_margin_loss], of_shapes(T, T, T)),
    ([torch.prod, M.prod, torch.exp, F.gelu, M.square], of_shapes((3, 4))),
]
EACH_CALL = [(function, args) for functions, args in CALLS for function in functions]


@each_dtype
@pytest.mark.parametrize("half", [False, True], ids=["of float32", "of 16 bits"])
def test_functions_are_torchs_to_the_bit(dtype, half):
    for function, args in EACH_CALL:
        found = []
        for region in autocast("cpu", dtype), torch.autocast("cpu", dtype):
            args = [x.detach().requires_grad_(x.requires_grad) for x in args]
            with region:
                y = function(*(cast_floats(args, dtype) if half else args))
            y.sum().backward()
            found.append([y.detach(), *[x.grad for x in args if x.grad is not None]])
        for ours, theirs in zip(*found, strict=True):
            assert ours.dtype == theirs.dtype, function
            assert torch.equal(ours.nan_to_num(), theirs.nan_to_num()), function


def test_every_name_is_tried():
    tried = {getattr(function, "func", function).__name__ for function, _ in EACH_CALL}
    assert set((LOW + FULL).split()) <= tried


X, W = torch.rand(3, 3), torch.rand(3, 3)


def test_the_innermost_region_decides_until_it_ends():
    outer, inner = autocast(dtype=torch.float16), autocast(enabled=False)
    with outer:
        with inner, pytest.raises(RuntimeError):
            assert (X @ W).dtype == torch.float32
            torch.ones(2) @ torch.ones(3)
        with autocast(), outer:
            assert (X @ W).dtype == torch.float16
        with autocast():
            assert (X @ W).dtype == torch.bfloat16
        assert (X @ W).dtype == torch.float16
    assert (X @ W).dtype == torch.float32


def test_only_floats_of_the_regions_device_are_cast():
    elsewhere = torch.ones(3, 3, device="meta")
    with autocast("cpu:0"):
        assert (X @ W).dtype == torch.bfloat16
        assert (elsewhere @ elsewhere).dtype == torch.float32
        assert (X.double() @ W.double()).dtype == torch.float64
        out = torch.mm(X, W, out=torch.empty(3, 3))
    assert torch.equal(out, X @ W)


def test_a_weight_is_cast_once_and_forgotten_with_the_region():
    found = []
    for make in autocast, torch.autocast:
        weight, outer = W.clone().requires_grad_(), make("cpu")
        for _ in range(2):
            with outer:
                torch.inference_mode()(torch.matmul)(X, weight)
                torch.no_grad()(torch.matmul)(X, weight)
                y = X @ weight
                with make("cpu"):
                    y = y @ weight  # their gradients add up in 16 bits
            y.sum().backward()
            weight.data -= weight.grad
        found.append(weight.detach())
        assert not getattr(outer, "casts", ())  # they would take memory
    assert torch.equal(*found)


def test_emulation_rounds_arguments_and_result():
    for dtype in LOW_DTYPES:
        with autocast("cpu", dtype, emulate=True):
            y = X @ W
        exact = X.to(dtype).double() @ W.to(dtype).double()
        assert y.dtype == dtype
        assert (y - exact).abs().max() <= 0.51 * torch.finfo(dtype).eps * exact.max()


VALUES = [1.0, -2.0, 1e-6, math.inf, -math.inf, math.nan]


@given(
    st.lists(st.tuples(*[st.sampled_from(VALUES)] * 2, st.booleans()), max_size=25),
    st.integers(1, 4),
)
def test_scales_and_weights_are_torchs(steps, interval):
    found = []
    for make in partial(torch.amp.GradScaler, "cpu"), GradScaler:
        scaler, scales = make(growth_interval=interval), []
        params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizers = [torch.optim.SGD([w], 0.01, momentum=0.9) for w in params]
        for *gradients, clips in steps:
            for w, gradient, optimizer in zip(
                params, gradients, optimizers, strict=True
            ):
                optimizer.zero_grad()
                scaler.scale((gradient * w).sum()).backward()
                if clips:
                    scaler.unscale_(optimizer)
                    norm = nn.utils.clip_grad_norm_(w, 0.5)
                if not clips or norm.isfinite():  # else the step is left out
                    scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        found.append((scales, clones(params)))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


def trained(gradient, dtype=torch.float32):
    w = nn.Parameter(torch.ones(3, dtype=dtype))
    w.grad = torch.full_like(w, gradient)
    return w, torch.optim.SGD([w], lr=1.0)


def test_a_disabled_scaler_scales_and_skips_nothing():
    scaler, (w, optimizer) = GradScaler(enabled=False), trained(math.inf, torch.float16)
    assert scaler.scale(3.0) == 3.0
    scaler.step(optimizer)
    scaler.update()
    assert w.isinf().all() and scaler.get_scale() == 1


def test_errors_name_what_is_wrong():
    scaler, (_, low) = GradScaler(init_scale=2.0**-23), trained(1.0, torch.float16)
    assert "use MasterWeights" in attempt(scaler.unscale_, low)[1]
    MasterWeights(low)
    assert "already" in attempt(MasterWeights, low)[1]
    w, optimizer = trained(math.nan)
    scaler.unscale_(optimizer)
    assert "called already" in attempt(scaler.unscale_, optimizer)[1]
    scaler.update()
    scaler.step(optimizer)
    assert "no scale is small enough" in attempt(scaler.update)[1]
    optimizer.state[w]["step"] = 1
    assert "has made steps" in attempt(MasterWeights, optimizer)[1]


@in_ranks(2)
def test_ranks_of_the_group_skip_together(rank, k):
    for group, skips in ((ranks.group_of(None), True), (None, rank == 1)):
        scaler, gradient = GradScaler(group=group), math.inf if rank else 1.0
        w, optimizer = trained(gradient)
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale() == 2.0**15) == w.eq(1).all() == skips


# MasterWeights and the levels


@each_dtype
def test_masters_make_the_steps_of_float32_weights(dtype):
    low = nn.Linear(4, 3).to(dtype)
    full = nn.Linear(4, 3)
    full.load_state_dict(low.state_dict())
    make = partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1)
    optimizers = make(low.parameters()), make(full.parameters())
    MasterWeights(optimizers[0])
    for i in range(20):
        if i % 2:  # a batch is left out; else gradients add up over two steps
            low(torch.ones(2, 4, dtype=dtype)).sum().backward()
            for optimizer in optimizers:
                optimizer.zero_grad()
        for a, b in zip(low.parameters(), full.parameters(), strict=True):
            assert a.grad is None
            a.grad = torch.randn_like(a)
            b.grad = a.grad.float() + (0 if b.grad is None else b.grad)
        for optimizer in optimizers:
            optimizer.step()
    masters = optimizers[0].param_groups[0]["params"]
    assert all(map(torch.equal, masters, full.parameters()))
    low.weight.data.fill_(3)  # a checkpoint is loaded
    optimizers[0].step()
    assert low.weight.eq(3).all()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layers = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))

    def forward(self, tokens, *, shift):
        y = self.layers(self.embedding(tokens) + shift)
        self.seen = y.dtype, shift.dtype
        return {"y": y, "tokens": tokens}


@each_dtype
@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("name", LEVELS)
def test_a_level_casts_what_apexs_did(name, emulate, dtype):
    full, model = torch.float32, Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    region, scaler = initialize(model, optimizer, name, dtype=dtype, emulate=emulate)
    with region:
        out = model(torch.arange(5), shift=torch.ones(4))
        loss = out["y"].square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    weights = dtype if name in ("O2", "O3") else full
    norms = dtype if name == "O3" else full
    assert {p.dtype for p in model.layers[1].parameters()} == {weights}
    found = {x.dtype for x in model.layers[0].state_dict().values()}
    assert found == {norms, torch.int64}
    assert model.seen == (full if name == "O0" else dtype, weights)
    assert (out["y"].dtype, out["tokens"].dtype) == (full, torch.int64) or name == "O1"
    trains = optimizer.param_groups[0]["params"]
    assert trains[1] is model.layers[0].weight
    assert {p.dtype for p in trains} == {full if name == "O2" else norms}
    rounded = [p.to(w.dtype) for p, w in zip(trains, model.parameters(), strict=True)]
    assert all(map(torch.equal, rounded, model.parameters()))
    assert scaler.enabled == (name in ("O1", "O2") and dtype == torch.float16)


@in_ranks(2)
def test_o2_on_two_ranks_trains_as_float32_on_one_device(rank, k):
    found, X = [], torch.eye(4, 3)
    for level, rows in ("O0", X), ("O2", X[rank::k]):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        region, scaler = initialize(model, optimizer, level)
        net = DistributedDataParallel(model) if level == "O2" else model
        for _ in range(3):
            optimizer.zero_grad()
            with region:
                loss = net(rows).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(optimizer.param_groups[0]["params"])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_keeps_the_largest_and_rounds_by_half_a_gap(dtype):
    x = torch.randn(64, 32) * torch.logspace(-20, 20, 64)[:, None]
    y = round_to_fp8(x, dtype, dim=1)
    rows = x.abs().amax(1, keepdim=True)
    torch.testing.assert_close(y.abs().amax(1, keepdim=True), rows)
    normal = x.abs() > rows / 400
    error = ((y - x) / x).abs()[normal].max()
    assert 0.4 < error / torch.finfo(dtype).eps <= 0.501
    assert (round_to_fp8(x, dtype)[0] == 0).all()  # one scale for all of them
    assert not round_to_fp8(torch.zeros(3).half(), dtype).any()
