"""Opt levels: their casts, master weights, and what a checkpoint resumes."""

import copy
from collections import OrderedDict, namedtuple

import pytest
import torch
from helpers import everyones, on_ranks, randn
from torch import nn
from torch.nn import functional as F

from d2lpar import DataParallel, DistributedDataParallel
from d2lpar.mixed_precision import GradScaler, MasterWeights, autocast, initialize
from d2lpar.mixed_precision.opt_levels import LEVELS

LOW = torch.float16


class Net(nn.Module):
    """Convolution, BatchNorm and two linear layers that share their weight."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.seen = []

    def forward(self, X):
        h = self.norm(self.conv(X)).relu()
        self.seen.append((X.dtype, h.dtype))
        return {"logits": self.second(self.first(h.mean(1).flatten(1)).relu())}


def made(level, lr=0.1, **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    return initialize(model, optimizer, level, **options)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(8, 1, 4, 4, generator=generator)
    return X, torch.randint(16, (8,), generator=generator)


def train(model, optimizer, scaler, steps, first=0):
    for i in range(first, first + steps):
        X, y = batch(i)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(X)["logits"], y)).backward()
        scaler.step(optimizer)
        scaler.update()


def dtypes(model, norm):
    """Those of BatchNorm's parameters and buffers, or those of the others."""
    state = [*model.named_parameters(), *model.named_buffers()]
    return {
        x.dtype
        for name, x in state
        if x.is_floating_point() and name.startswith("norm") == norm
    }


FULL = torch.float32
EXPECTED = {  # BatchNorm's dtype, the others', input's, after BatchNorm, masters, scale
    "O0": (FULL, FULL, FULL, FULL, False, 1.0),
    "O1": (FULL, FULL, FULL, LOW, False, 2.0**16),
    "O2": (FULL, LOW, LOW, LOW, True, 2.0**16),
    "O3": (LOW, LOW, LOW, LOW, False, 1.0),
}


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_casts_what_apexs_did(level):
    model, optimizer, scaler = made(level)
    output = model(batch()[0])["logits"]
    norm, rest, given, inside, masters, scale = EXPECTED[level]
    assert dtypes(model, norm=True) == {norm} and dtypes(model, norm=False) == {rest}
    assert model.seen == [(given, inside)] and output.dtype == FULL
    assert isinstance(optimizer, MasterWeights) == masters
    assert scaler.get_scale() == scale and scaler.is_enabled() == (scale > 1)
    (group,) = optimizer.param_groups
    assert {p.dtype for p in group["params"]} == ({LOW} if level == "O3" else {FULL})
    assert all(p.requires_grad for p in group["params"])


def test_loss_scale_and_keep_batchnorm_fp32_may_be_chosen():
    scaler = made("O2", loss_scale=128.0)[2]
    assert (scaler.get_scale(), scaler.growth_factor, scaler.backoff_factor) == (
        128,
        1,
        1,
    )
    assert not made("O1", loss_scale=1)[2].is_enabled()
    assert made("O0", loss_scale="dynamic")[2].get_scale() == 2**16
    assert not made("O1", dtype=torch.bfloat16)[2].is_enabled()
    assert made("O1", dtype=torch.bfloat16, loss_scale="dynamic")[2].is_enabled()
    for level, keep, expected in (("O2", False, LOW), ("O3", True, FULL)):
        model, _, _ = made(level, keep_batchnorm_fp32=keep)
        assert dtypes(model, norm=True) == {expected}
        model(batch()[0])


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_moves_every_weight_in_every_level(level):
    model, optimizer, scaler = made(level)
    before = {name: param.clone() for name, param in model.named_parameters()}
    scaler.update(2.0) if scaler.is_enabled() else None
    train(model, optimizer, scaler, 2)
    assert model.first.weight is model.second.weight  # tied weights stay tied
    assert (
        sum(len(group["params"]) for group in optimizer.param_groups)
        == len(before)
        == 7
    )
    for name, param in model.named_parameters():
        # the norm removes it
        assert name == "conv.bias" or not torch.equal(before[name], param)
        assert before[name].dtype == param.dtype


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_copies_cast_with_their_own_weights(level):
    model, _, _ = made(level)
    X, twin = batch()[0], copy.deepcopy(model).eval()
    model.eval()
    whole = model(X)["logits"]
    with torch.no_grad():
        model.second.bias += 1
    assert torch.equal(twin(X)["logits"], whole)


# Master weights


def low(value=1.0, dtype=LOW):
    return nn.Parameter(torch.full((1,), value, dtype=dtype))


def masters_of(*params, lr=0.5, **options):
    return MasterWeights(torch.optim.SGD(params, lr, **options))


def test_masters_are_a_float32_run_of_rounded_weights():
    """O2 by hand: float32 SGD, gradients taken at the rounded weights."""
    param = nn.Parameter(randn(50).to(LOW))
    by_hand, optimizer = param.detach().float(), masters_of(param, lr=1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        (param.float() ** 3).sum().backward()
        by_hand -= 1e-3 * (3 * by_hand.to(LOW).float() ** 2).to(LOW).float()
        optimizer.step()
    (master,) = optimizer.param_groups[0]["params"]
    assert torch.allclose(master, by_hand, rtol=0, atol=1e-7)
    assert torch.equal(param, master.to(LOW))


@pytest.mark.parametrize(
    ("wrap", "end"), [(MasterWeights, 0), (lambda optimizer: optimizer, 1)]
)
def test_small_steps_add_up_in_masters_only(wrap, end):
    param = low(dtype=torch.bfloat16)
    optimizer = wrap(torch.optim.SGD([param], 1e-3))
    for _ in range(1000):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert param.item() == pytest.approx(end, abs=1e-3)


def test_groups_and_schedulers_work_and_parameters_of_32_bits_are_their_own_masters():
    first, second = low(), nn.Parameter(torch.ones(1))
    optimizer = masters_of(first)
    optimizer.add_param_group({"params": [second], "lr": 0.25})
    assert optimizer.param_groups[1]["params"][0] is second
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for param in (first, second):
        param.grad = torch.ones_like(param)
    optimizer.step()
    scheduler.step()
    optimizer.step()
    assert (first.item(), second.item()) == (0.25, 0.625)
    optimizer.zero_grad()
    assert first.grad is second.grad is None


@pytest.mark.parametrize("set_to_none", [True, False, None])
def test_gradients_that_come_after_those_taken_are_taken_too(set_to_none):
    """As after a skipped step; None: without zero_grad."""
    param = low()
    optimizer = masters_of(param)
    param.grad = torch.full_like(param, float("inf"))
    optimizer.take_gradients()
    if set_to_none is None:
        param.grad = None
    else:
        optimizer.zero_grad(set_to_none)
        (master,) = optimizer.param_groups[0]["params"]
        assert all(not p.grad for p in (param, master))
    param.backward()
    optimizer.step()
    assert param.item() == 0.5
    for _ in range(2):  # and those that are added
        param.backward()
        optimizer.take_gradients()
    param.backward()
    optimizer.step()
    assert param.item() == -1.5


@pytest.mark.parametrize("enabled", [True, False])
def test_taken_gradients_may_be_clipped(enabled):
    param = low()
    optimizer, scaler = (
        masters_of(param, lr=1.0),
        GradScaler(init_scale=2.0**10, enabled=enabled),
    )
    scaler.scale(3 * param).backward()
    scaler.unscale_(optimizer)
    (master,) = optimizer.param_groups[0]["params"]
    assert nn.utils.clip_grad_norm_([master], 0.25) == 3
    scaler.step(optimizer)
    assert param.item() == 0.75


def ranks_that_begin_apart_train_one_network(rank, world_size):
    """What is written into the parameters is taken over into the masters."""
    torch.manual_seed(rank)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, scaler = initialize(model, optimizer, "O2", emulate=True)
    wrapped = DistributedDataParallel(model)
    X = torch.randn(2, 4)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(wrapped(X).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    first, second = everyones([param.tolist() for param in model.parameters()])
    assert first == second


test_ranks = on_ranks(2, [ranks_that_begin_apart_train_one_network])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
def test_state_from_before_belongs_to_the_masters(kind):
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [kind([param], 0.5) for param in params]
    for i in range(2):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = torch.ones_like(param)
            optimizer.step()
        if i == 0:
            params[0].grad, params[0].data = None, params[0].data.half()
            optimizers[0] = MasterWeights(optimizers[0])
    assert abs(params[0].item() - params[1].item()) < 1e-3


def test_a_loaded_state_reaches_parameters_groups_and_schedulers():
    param = low()
    optimizer = masters_of(param, momentum=0.9)
    state = copy.deepcopy(optimizer.state_dict())
    state["masters"] = [torch.full((1,), 2.0)]
    state["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(state)
    assert param.item() == 2
    optimizer.param_groups[0]["lr"] *= 2
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert param.item() == 1.5


def test_inputs_by_name_and_any_structure_are_cast():
    Point = namedtuple("Point", "x n")

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("count", torch.tensor(3))

        def forward(self, a, b=None):
            kinds = a.x.dtype, a.n.dtype, b["b"].dtype, self.count.dtype
            return OrderedDict(point=Point(self.layer(a.x), a.n), kinds=kinds)

    model = Takes()
    initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O2")
    output = model(
        Point(torch.ones(1, 2), torch.ones(1, dtype=torch.long)), b={"b": torch.ones(1)}
    )
    assert output["kinds"] == (LOW, torch.long, LOW, torch.long)
    assert isinstance(output, OrderedDict)
    assert output["point"].x.dtype == torch.float32


def test_o2_casts_parameters_and_not_functions_unless_it_emulates():
    class Loss(nn.Linear):
        def forward(self, X):
            kinds.append(F.mse_loss(super().forward(X), X).dtype)
            return X

    kinds, model = [], Loss(2, 2)
    for emulate in (False, True):
        twin = copy.deepcopy(model)
        initialize(twin, torch.optim.SGD(twin.parameters()), "O2", emulate=emulate)
        twin(torch.ones(1, 2))
    assert kinds == [LOW, torch.float32]  # the emulating region has autocast's lists
    X = torch.rand(9, 9)
    layer = nn.Linear(9, 9)
    with autocast("cpu", LOW, emulate=True):
        expected = layer(X).float()
    initialize(layer, torch.optim.SGD(layer.parameters()), "O1", emulate=True)
    assert torch.equal(layer(X), expected)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_checkpoint_resumes_bit_equal(level, tmp_path):
    """Scaler and masters too: the scale grows after three steps."""
    whole = made(level, lr=1e-3)
    whole[2].growth_interval = 3
    train(*whole, 2)
    torch.save([part.state_dict() for part in whole], tmp_path / "a.pt")
    train(*whole, 4, first=2)
    resumed = made(level, lr=1.0)
    for part, state in zip(resumed, torch.load(tmp_path / "a.pt"), strict=True):
        part.load_state_dict(state)
    train(*resumed, 4, first=2)
    assert resumed[2].state_dict() == whole[2].state_dict()
    assert resumed[2].get_scale() == 2.0**18
    for ours, theirs in [
        (resumed[0].parameters(), whole[0].parameters()),
        (resumed[1].param_groups[0]["params"], whole[1].param_groups[0]["params"]),
    ]:
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_what_is_refused_before_anything_changes():
    model, wrapped = nn.Linear(2, 2), DataParallel(nn.Linear(2, 2), ["cpu", "cpu"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    again = initialize(nn.Linear(2, 2), optimizer, "O1")[0]
    for options, error, words in [
        ({"opt_level": "O4"}, ValueError, "one of O0, O1, O2, O3, not 'O4'"),
        (
            {"dtype": torch.float64},
            ValueError,
            "float16 or torch.bfloat16, not torch.float64",
        ),
        (
            {"keep_batchnorm_fp32": True},
            ValueError,
            "keep_batchnorm_fp32 is for O2 and O3",
        ),
        (
            {"opt_level": "O2", "keep_batchnorm_fp32": "False"},
            ValueError,
            "a bool, not 'False'",
        ),
        ({"loss_scale": "static"}, ValueError, "'dynamic' or positive, not 'static'"),
        ({"loss_scale": float("inf")}, ValueError, "'dynamic' or positive, not inf"),
        ({"opt_level": "O3", "loss_scale": 128.0}, ValueError, "rounded to zero again"),
        (
            {"opt_level": "O3"},
            RuntimeError,
            "state of float32 parameters, which O3 casts",
        ),
        ({"model": wrapped}, TypeError, r"initialize model\.module"),
        ({"optimizer": None}, TypeError, r"torch\.optim's, not NoneType"),
        ({"model": again}, ValueError, "forward was replaced already"),
        ({"model": nn.Linear(2, 2).half()}, TypeError, r"weight is torch\.float16"),
    ]:
        with pytest.raises(error, match=words):
            initialize(**{"model": model, "optimizer": optimizer} | options)
    assert model.weight.dtype == torch.float32 and "forward" not in vars(model)


def test_masters_take_no_closure_and_no_state_of_others():
    optimizer = masters_of(low())
    with pytest.raises(TypeError, match="no closure"):
        optimizer.step(lambda: None)
    with pytest.raises(
        ValueError, match=r"shapes \[\(3,\)\], the optimiser \[\(1,\)\]"
    ):
        optimizer.load_state_dict(
            {**optimizer.state_dict(), "masters": [torch.ones(3)]}
        )
