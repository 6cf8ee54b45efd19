"""GradScaler: the same scales and weights as torch.amp.GradScaler, whatever overflows when."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from d2lpar.mixed_precision import GradScaler
from d2lpar.ranks.launcher import launch

INF, NAN = float("inf"), float("nan")
TORCHS = torch.amp.GradScaler


def weight(value=1.0, dtype=torch.float32):
    return nn.Parameter(torch.tensor([value], dtype=dtype))


def backward(scaler, param, gradient):
    """Give the parameter the scaled gradient of ``gradient * param``."""
    scaler.scale((param * gradient).sum()).backward()


def train(scaler, gradients, second=False):
    """Return each step's scale and weights; a gradient of None counts as one that is fine."""
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


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.3, -1e-3, INF, -INF, NAN, 3e38]), min_size=1, max_size=40),
    st.integers(1, 5),
    st.sampled_from([1.3, 2.0, 10.0]),
    st.sampled_from([0.3, 0.5, 0.9]),
    st.sampled_from([1.0, 65536.0, 1e38]),
    st.booleans(),
)
def test_scales_and_weights_are_torchs(gradients, interval, growth, backoff, first, second):
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


def test_growth_counts_good_steps_in_a_row():
    scaler = GradScaler(init_scale=8.0, growth_interval=2)
    scales = [row[0] for row in train(scaler, [1.0, INF, 1.0, 1.0, INF, 1.0])]
    assert scales == [8, 4, 4, 8, 4, 4]


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


def test_gradients_are_unscaled_once_and_may_be_clipped():
    scaler, param = GradScaler(), weight()
    optimizer = torch.optim.SGD([param], 1.0)
    backward(scaler, param, 3.0)
    assert param.grad.item() == 3 * 2**16
    scaler.unscale_(optimizer)
    assert param.grad.item() == 3
    nn.utils.clip_grad_norm_([param], 0.5)
    scaler.step(optimizer)
    assert param.item() == pytest.approx(0.5)


def test_a_skipped_step_leaves_the_weight_and_returns_none():
    scaler, param = GradScaler(init_scale=2.0), weight()
    optimizer = torch.optim.SGD([param], 1.0)
    optimizer.step = lambda: "stepped"
    for gradient, expected in ((INF, None), (1.0, "stepped")):
        optimizer.zero_grad()
        backward(scaler, param, gradient)
        assert scaler.step(optimizer) == expected
        scaler.update()
    assert param.item() == 1


def test_a_static_scale_stays():
    scaler = GradScaler(init_scale=128.0, growth_factor=1.0, backoff_factor=1.0, growth_interval=1)
    history = train(scaler, [1.0, INF, 1.0])
    assert [scale for scale, _ in history] == [128.0] * 3
    assert history[0][1] == history[1][1] != history[2][1]


@pytest.mark.parametrize("scaler", [GradScaler, TORCHS])
def test_disabled_it_does_nothing(scaler):
    scaler = scaler("cpu", enabled=False)
    assert scaler.get_scale() == 1
    assert not scaler.is_enabled()
    assert train(scaler, [1.0])[0][1] == pytest.approx(0.9)
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})


@pytest.mark.parametrize("scaler", [GradScaler, TORCHS])
def test_update_takes_a_new_scale(scaler):
    scaler = scaler("cpu")
    scaler.scale(torch.ones(()))
    for value in (32.0, torch.tensor(64.0)):
        scaler.update(value)
        assert scaler.get_scale() == float(value)


def test_several_losses_are_scaled_alike():
    scaler = GradScaler(init_scale=4.0)
    assert scaler.scale([torch.ones(()), (torch.ones(1),)]) == [4, (4,)]
    with pytest.raises(TypeError, match="a loss, or several, and not str"):
        scaler.scale("loss")


def test_an_infinity_in_any_of_several_gradients_skips():
    for bad in range(3):
        scaler, params = GradScaler(init_scale=2.0), [weight() for _ in range(3)]
        optimizer = torch.optim.SGD(params, 1.0)
        for i, param in enumerate(params):
            backward(scaler, param, NAN if i == bad else 1.0)
        scaler.step(optimizer)
        assert [param.item() for param in params] == [1, 1, 1]


def test_sparse_gradients_are_unscaled_in_place():
    embedding = nn.Embedding(4, 2, sparse=True)
    scaler, optimizer = GradScaler(), torch.optim.SGD(embedding.parameters(), 1.0)
    scaler.scale(embedding(torch.tensor([1, 1, 2])).sum()).backward()
    scaler.unscale_(optimizer)
    assert embedding.weight.grad.to_dense().sum(1).tolist() == [0, 4, 2, 0]


def test_a_scale_that_would_be_infinite_does_not_grow():
    scaler = GradScaler(init_scale=2.0**127, growth_interval=1)
    theirs = TORCHS("cpu", init_scale=2.0**127, growth_interval=1)
    assert train(scaler, [1e-30] * 3) == train(theirs, [1e-30] * 3)
    assert scaler.get_scale() == 2.0**127


# Errors


def after_backward(dtype=torch.float32):
    scaler, param = GradScaler(init_scale=2.0), weight(dtype=dtype)
    optimizer = torch.optim.SGD([param], 1.0)
    backward(scaler, param, 1.0)
    return scaler, optimizer


def test_unscale_twice_or_after_step_is_refused():
    scaler, optimizer = after_backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale_ or step was called already"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="unscale_ or step was called already"):
        scaler.unscale_(optimizer)
    scaler.update()
    scaler.unscale_(optimizer)


def test_step_twice_or_with_a_closure_is_refused():
    scaler, optimizer = after_backward()
    for arguments in ({"closure": sum}, {}):
        if not arguments:
            scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="closure" if arguments else "step was called"):
            scaler.step(optimizer, **arguments)
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, sum)


def test_update_before_step_is_refused():
    with pytest.raises(RuntimeError, match="update comes after step"):
        GradScaler().update()


def test_float16_gradients_are_refused_before_one_is_changed():
    scaler, first, second = GradScaler(), weight(), weight(dtype=torch.float16)
    optimizer = torch.optim.SGD([first, second], 1.0)
    for param in (first, second):
        param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="gradients are float16"):
        scaler.step(optimizer)
    assert first.grad.item() == 1


def test_no_gradient_at_all_is_an_error():
    with pytest.raises(RuntimeError, match="call backward first"):
        GradScaler().step(torch.optim.SGD([weight()], 1.0))


def test_an_empty_state_is_refused():
    with pytest.raises(RuntimeError, match="the state is empty"):
        GradScaler().load_state_dict({})


def test_nan_is_not_overflow():
    scaler, param = GradScaler(init_scale=1.0), weight()
    optimizer = torch.optim.SGD([param], 1.0)
    with pytest.raises(FloatingPointError, match="this is NaN, not overflow"):
        for _ in range(30):
            optimizer.zero_grad()
            backward(scaler, param, NAN)
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 2.0**-25
    assert param.item() == 1


@pytest.mark.parametrize(
    "options",
    [
        {"init_scale": 0},
        {"init_scale": INF},
        {"growth_interval": 0},
        {"growth_factor": 0.5},
        {"backoff_factor": 2},
    ],
)
def test_bad_settings_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        GradScaler(**options)


def test_a_scale_in_the_place_of_the_device_or_one_that_is_not_positive_is_refused():
    with pytest.raises(TypeError, match='such as "cpu", not 128'):
        GradScaler(128.0)
    for bad in (0, -1.0, NAN, INF):
        with pytest.raises(ValueError, match="new_scale has to be positive"):
            GradScaler().update(bad)


# Between ranks


def scales_of(rank, world_size, agree):
    """Six steps of a parameter of one's own; rank 1 overflows in the fourth."""
    group = dist.group.WORLD if agree else None
    scaler, param = GradScaler(growth_interval=3, group=group), weight()
    optimizer, scales = torch.optim.SGD([param], 0.1), []
    for step in range(6):
        optimizer.zero_grad()
        backward(scaler, param, INF if (rank, step) == (1, 3) else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [*scales, round(param.item(), 3)]


def test_ranks_of_a_group_skip_together_and_without_one_part_silently():
    together = launch(scales_of, 2, True, timeout=60)
    assert together[0] == together[1]
    assert together[0][2:4] == [2.0**17, 2.0**16]
    alone = launch(scales_of, 2, False, timeout=60)
    assert alone[0][:3] == alone[1][:3]
    assert alone[0][5] == 4 * alone[1][5]
    assert alone[0][6] < alone[1][6]  # one more step
