"""GradScaler: scales and weights as torch's, whatever overflows; and a divided sum."""

import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from d2lpar import DistributedDataParallel
from d2lpar.mixed_precision import GradScaler, predivide
from d2lpar.ranks.launch import launch

INF, NAN = float("inf"), float("nan")
TORCHS = torch.amp.GradScaler


def weight(value=1.0, dtype=torch.float32):
    return nn.Parameter(torch.tensor([value], dtype=dtype))


def backward(scaler, param, gradient):
    """Give the parameter the scaled gradient of ``gradient * param``."""
    scaler.scale((param * gradient).sum()).backward()


def train(scaler, gradients, second=False):
    """Return each step's scale and weights; a gradient of None counts as fine."""
    params = [weight(), weight(2.0)][: 1 + second]
    optimizers = [torch.optim.SGD([param], 0.1, momentum=0.9) for param in params]
    history = []
    for i, gradient in enumerate(gradients):
        for j, (param, optimizer) in enumerate(zip(params, optimizers, strict=True)):
            optimizer.zero_grad()
            backward(scaler, param, gradient if j == 0 or i % 2 else 0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        history.append([scaler.get_scale(), *[param.item() for param in params]])
    return history


@given(
    st.lists(
        st.sampled_from([0.3, -1e-3, INF, -INF, NAN, 3e38]), min_size=1, max_size=40
    ),
    st.integers(1, 5),
    st.sampled_from([1.3, 2.0, 10.0]),
    st.sampled_from([0.3, 0.5, 0.9]),
    st.sampled_from([1.0, 65536.0, 1e38]),
    st.booleans(),
)
def test_scales_and_weights_are_torchs(
    gradients, interval, growth, backoff, first, second
):
    options = {"init_scale": first, "growth_factor": growth, "backoff_factor": backoff}
    options["growth_interval"] = interval
    ours = GradScaler(**options)
    theirs = TORCHS("cpu", **options)
    expected = train(theirs, gradients, second)
    low = [i for i, row in enumerate(expected) if row[0] < 2.0**-24]
    if low:  # ours says what is wrong, torch's goes on
        with pytest.raises(FloatingPointError):
            train(ours, gradients, second)
        ours = GradScaler(**options)
        gradients, expected = gradients[: low[0]], expected[: low[0]]
    assert train(ours, gradients, second) == expected


@pytest.mark.parametrize("scaler", [GradScaler, TORCHS])
def test_state_goes_on(scaler):
    options = {"init_scale": 8.0, "growth_interval": 3}
    gradients = [1.0, 1.0, INF, 1.0, 1.0, 1.0, 1.0]
    whole = [row[0] for row in train(GradScaler(**options), gradients)]
    first = scaler("cpu", **options)  # a state of torch's scaler is taken too
    train(first, gradients[:5])
    second = GradScaler()
    second.load_state_dict(first.state_dict())
    assert [row[0] for row in train(second, gradients[5:])] == whole[5:]
    theirs = TORCHS("cpu")
    theirs.load_state_dict(second.state_dict())
    assert theirs.state_dict() == second.state_dict()


def test_a_skipped_step_leaves_the_weights_and_returns_none():
    """An infinity in any of several gradients is enough."""
    scaler, params = GradScaler(init_scale=2.0), [weight(), weight()]
    optimizer = torch.optim.SGD(params, 1.0)
    optimizer.step = lambda: "stepped"
    for gradients, expected in (
        ((INF, 1), None),
        ((1, INF), None),
        ((1, 1), "stepped"),
    ):
        optimizer.zero_grad()
        for param, gradient in zip(params, gradients, strict=True):
            backward(scaler, param, gradient)
        assert scaler.step(optimizer) == expected
        scaler.update()


def test_a_static_scale_stays_and_skips():
    scaler = GradScaler(
        init_scale=128.0, growth_factor=1.0, backoff_factor=1.0, growth_interval=1
    )
    first, second, third = train(scaler, [1.0, INF, 1.0])
    assert first == second and first[0] == third[0] == 128 and first[1] != third[1]


def test_disabled_it_does_nothing():
    scaler = GradScaler(enabled=False)
    assert scaler.get_scale() == 1 and not scaler.is_enabled()
    assert train(scaler, [1.0])[0][1] == pytest.approx(0.9)
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})


def test_update_takes_a_new_scale_and_several_losses_are_scaled_alike():
    scaler = GradScaler()
    for value in (32.0, torch.tensor(64.0)):
        scaler.update(value)
        assert scaler.get_scale() == float(value)
    assert scaler.scale([torch.ones(()), (torch.ones(1),)]) == [64, (64,)]


def test_sparse_gradients_are_unscaled_in_place():
    embedding = nn.Embedding(4, 2, sparse=True)
    scaler, optimizer = GradScaler(), torch.optim.SGD(embedding.parameters(), 1.0)
    scaler.scale(embedding(torch.tensor([1, 1, 2])).sum()).backward()
    scaler.unscale_(optimizer)
    assert embedding.weight.grad.to_dense().sum(1).tolist() == [0, 4, 2, 0]


def test_a_second_unscale_or_step_and_a_closure_are_refused_until_update():
    scaler, param = GradScaler(init_scale=2.0), weight()
    optimizer = torch.optim.SGD([param], 1.0)
    backward(scaler, param, 3.0)
    for args, options in (((sum,), {}), ((), {"closure": sum})):
        with pytest.raises(RuntimeError, match="step takes no closure"):
            scaler.step(optimizer, *args, **options)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale_ or step was called already"):
        scaler.unscale_(optimizer)
    assert nn.utils.clip_grad_norm_([param], 0.5) == 3  # unscaled once
    scaler.step(optimizer)
    assert param.item() == pytest.approx(0.5)
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(RuntimeError, match="step was called already"):
            call(optimizer)
    scaler.update()
    scaler.unscale_(optimizer)


def test_float16_gradients_are_refused_before_one_is_changed():
    scaler, params = GradScaler(), [weight(), weight(dtype=torch.float16)]
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="gradients are float16"):
        scaler.step(torch.optim.SGD(params, 1.0))
    assert params[0].grad.item() == 1


def test_nan_is_not_overflow():
    scaler = GradScaler(init_scale=1.0)
    with pytest.raises(FloatingPointError, match="this is NaN, not overflow"):
        train(scaler, [NAN] * 30)
    assert scaler.get_scale() == 2.0**-25


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: GradScaler(init_scale=INF), ValueError, "init_scale"),
        (lambda: GradScaler(growth_interval=0), ValueError, "growth_interval"),
        (lambda: GradScaler(growth_factor=0.5), ValueError, "growth_factor"),
        (lambda: GradScaler(backoff_factor=2), ValueError, "backoff_factor"),
        (lambda: GradScaler(128.0), TypeError, 'such as "cpu", not 128'),
        (
            lambda: GradScaler().scale("loss"),
            TypeError,
            "a loss, or several, and not str",
        ),
        (lambda: GradScaler().update(), RuntimeError, "update comes after step"),
        (lambda: GradScaler().update(0), ValueError, "new_scale has to be positive"),
        (lambda: GradScaler().load_state_dict({}), RuntimeError, "the state is empty"),
        (
            lambda: GradScaler().step(torch.optim.SGD([weight()])),
            RuntimeError,
            "call backward",
        ),
        (lambda: predivide(0), ValueError, "factor has to be positive"),
    ],
)
def test_what_cannot_be_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


# Between ranks


def scales_of(rank, world_size, agree):
    """Six steps of a parameter of this rank alone; rank 1 overflows in the fourth."""
    scaler = GradScaler(growth_interval=3, group=dist.group.WORLD if agree else None)
    history = train(
        scaler, [INF if (rank, step) == (1, 3) else 1.0 for step in range(6)]
    )
    return [scale for scale, _ in history], history[-1][1]


def test_ranks_of_a_group_skip_together_and_without_one_part_silently():
    together = launch(scales_of, 2, True, timeout=LIMIT)
    assert together[0] == together[1]
    assert together[0][0][2:4] == [2.0**17, 2.0**16]
    (first, more), (second, less) = launch(scales_of, 2, False, timeout=LIMIT)
    assert first[:3] == second[:3] and first[5] == 4 * second[5]
    assert more < less  # one more step


def averages(rank, world_size):
    """[large, small] with each factor, by torch's wrapper and by ours."""
    small = 3 * 2.0**-24  # three times the smallest float16
    X, found = torch.tensor([40_000, small], dtype=torch.float16), {}
    torchs = nn.parallel.DistributedDataParallel
    for name, wrap in (("torch's", torchs), ("ours", DistributedDataParallel)):
        for factor in (1.0, 2.0, 2**0.5) if wrap is torchs else (None,):
            model = wrap(nn.Linear(2, 1, bias=False, dtype=torch.float16))
            if factor:
                model.register_comm_hook(None, predivide(factor))
            model(X).backward()
            large, little = model.module.weight.grad[0].tolist()
            found[name, factor] = large, little / small
    return found


def test_half_before_and_half_after_keeps_large_and_small():
    found, other = launch(averages, 2, timeout=LIMIT)
    assert found == other
    assert found["torch's", 1.0] == (float("inf"), 1)  # 40,000 + 40,000
    assert found["torch's", 2.0] == (
        40_000,
        pytest.approx(4 / 3),
    )  # 1.5 is rounded to 2
    assert found["torch's", 2**0.5] == (pytest.approx(40_000, rel=2e-3), 1)
    assert found["ours", None] == (40_000, 1)  # our buckets are added up in float32
