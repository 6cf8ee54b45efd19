"""ZeRO-1: the update of one device, from a part of the state on each rank."""

import inspect
from functools import partial
from itertools import chain

import pytest
import torch
from helpers import attempt, clones, close, everyones, in_ranks, mlp, on_ranks, randn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

from d2lpar import DistributedDataParallel, GradScaler, ShardedOptimizer
from d2lpar.memory import peak_memory

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
WAYS = {
    "SGD": SGD,
    "SGD, all": partial(SGD, dampening=0.1, maximize=True, foreach=True),
    "Nesterov": partial(SGD, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "Adam, all": partial(
        torch.optim.Adam,
        lr=0.02,
        betas=(0.8, 0.95),
        eps=1e-6,
        weight_decay=0.1,
        amsgrad=True,
        foreach=True,
        maximize=True,
    ),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
}
ROWS = 12


class Odd(nn.Module):
    """Weights in channels_last, a number, one element, tied, frozen, unused ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(2, 5, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.linear = nn.Linear(20, 7)
        self.tied, self.tied_too = (
            nn.Linear(7, 7, bias=False),
            nn.Linear(7, 7, bias=False),
        )
        self.tied_too.weight = self.tied.weight
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.double()

    def forward(self, X):
        X = self.conv(X).tanh().flatten(1) * self.scale
        return self.tied_too(self.tied(self.frozen(self.linear(X)).tanh())) + self.one


def images(rank=0, k=1, step=0):
    return randn(ROWS, 2, 4, 4, seed=step).tensor_split(k)[rank]


def backward(output):
    output.square().sum().div(ROWS).backward()


def mean(output):
    loss = output.square().sum(1).mean()
    loss.backward()
    return loss


def state_of(module):
    return clones(module.state_dict().values())


def alone(way, steps=3, model=Odd):
    model = model()
    optimizer = way(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        mean(model(images(step=step)))
        optimizer.step()
    return model, optimizer


def sharded(model, way, **options):
    return ShardedOptimizer(model.parameters(), way.func, **options, **way.keywords)


def trains(rank, k, way, averages, steps=3):
    """A model, the module that is called, and the optimiser, after some steps."""
    model = Odd()
    net = model if averages else DistributedDataParallel(model)
    optimizer = sharded(model, way, averages=averages)
    for step in range(steps):
        optimizer.zero_grad()
        mean(net(images(rank, k, step)))
        optimizer.step()
    return model, net, optimizer


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("averages", [True, False])
@in_ranks()
def test_it_updates_as_one_device_does(rank, k, averages):
    for way in WAYS.values():
        model, _, _ = trains(rank, k, way, averages)
        close(state_of(model), state_of(alone(way)[0]))


def in_float32(rank, make, wrap=None):
    """The parameters after three steps of two ranks."""
    model = Odd().float()
    net = wrap(model) if wrap else model
    optimizer = make(model)
    for step in range(3):
        optimizer.zero_grad()
        mean(net(images(rank, 2, step).float()))
        optimizer.step()
    return state_of(model)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
@in_ranks(2)
def test_two_ranks_have_the_bits_of_ddp_and_of_torchs_optimizer(rank, k, name):
    way = WAYS[name]
    for ddp in (
        DistributedDataParallel,
        partial(TorchsDDP, find_unused_parameters=True),
    ):
        theirs = in_float32(rank, lambda model: way(model.parameters()), ddp)
        ours = in_float32(rank, lambda model: sharded(model, way), ddp)
        assert all(map(torch.equal, ours, theirs))

    # which warns about torch.jit
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def torchs(model):
        trained = [param for param in model.parameters() if param.requires_grad]
        return ZeroRedundancyOptimizer(trained, way.func, **way.keywords)

    assert all(map(torch.equal, in_float32(rank, torchs, ddp), theirs))
    ours = in_float32(rank, lambda model: sharded(model, way, averages=True))
    assert all(map(torch.equal, ours, theirs))


def takes_what_torchs_takes(rank, k):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ours, theirs = (
        inspect.signature(c) for c in (ShardedOptimizer, ZeroRedundancyOptimizer)
    )
    names = [name for name in ours.parameters if name != "averages"]
    assert names == list(theirs.parameters)
    for cls in (ZeroRedundancyOptimizer, ShardedOptimizer):
        group = {"params": mlp(3, 3).parameters(), "lr": 0.5}
        optimizer = cls(
            [group], torch.optim.SGD, None, True, False, lr=1.0, momentum=0.5
        )
        assert [g["lr"] for g in optimizer.param_groups] == [0.5]
        assert (
            optimizer.param_groups[0]["momentum"]
            == optimizer.defaults["momentum"]
            == 0.5
        )


def schedulers_set_what_it_uses(rank, k):
    kinds = (
        partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        # momentum, too
        partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=4),
    )
    for kind in kinds:
        found = []
        for make in (
            partial(sharded, averages=True),
            lambda model, way: way(model.parameters()),
        ):
            model = mlp(4, 5, 3)
            optimizer = make(model, SGD)
            scheduler = kind(optimizer)
            for step in range(3):
                optimizer.zero_grad()
                mean(model(randn(4, 4, seed=step)))
                optimizer.step()
                scheduler.step()
            found.append(state_of(model))
        close(*found)


def what_a_scheduler_set_last_is_saved(rank, k):
    model = mlp(4, 3)
    optimizer = sharded(model, SGD, averages=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    mean(model(randn(4, 4)))
    optimizer.step()
    scheduler.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.7})
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.7]
    state = optimizer.full_state_dict()
    assert (
        [group["lr"] for group in state["param_groups"]] == [0.05, 0.7]
        if rank == 0
        else not state
    )


class Counts(torch.optim.SGD):
    """An optimiser that counts its steps in its groups, as some with a schedule do."""

    def step(self):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step()


def an_optimizer_may_change_its_settings(rank, k):
    model = mlp(4, 3)
    optimizer = ShardedOptimizer(model.parameters(), Counts, lr=1.0, averages=True)
    for _ in range(3):
        optimizer.step()
    assert optimizer.param_groups[0]["steps"] == 3


def a_closure_is_called_once_with_gradients(rank, k):
    model, calls = mlp(4, 5, 3), []
    X = randn(6, 4).tensor_split(k)[rank]
    optimizer = sharded(model, SGD, averages=True)

    def closure():
        optimizer.zero_grad()
        calls.append(mean(model(X)))
        return calls[-1]

    assert optimizer.step(closure) is calls[0] and len(calls) == 1
    other = mlp(4, 5, 3)
    alone = SGD(other.parameters())
    mean(other(randn(6, 4)))
    alone.step()
    close(state_of(model), state_of(other))


def groups_have_their_settings_and_may_come_later(rank, k):
    found = []
    for make in (partial(ShardedOptimizer, averages=True), None):
        model = mlp(4, 5, 6, 3)
        first = [{"params": list(model[0].parameters()), "lr": 0.3}]
        first.append({"params": [model[2].weight], "momentum": 0.0})
        optimizer = make(first, SGD.func, **SGD.keywords) if make else SGD(first)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.05})
            optimizer.zero_grad()
            model.zero_grad()
            mean(model(randn(4, 4, seed=step)))
            optimizer.step()
        found.append(state_of(model))
    close(*found)


def a_parameter_may_be_unfrozen_later(rank, k):
    found = []
    for make in (
        partial(sharded, averages=True),
        lambda model, way: way(model.parameters()),
    ):
        model = mlp(4, 5, 3)
        model[0].requires_grad_(False)
        optimizer = make(model, SGD)
        for step in range(3):
            if step == 1:
                model[0].requires_grad_(True)
            optimizer.zero_grad()
            mean(model(randn(4, 4, seed=step)))
            optimizer.step()
        found.append(state_of(model))
    close(*found)


def what_some_ranks_have_not_used_counts_as_zero_there(rank, k):
    a, b, c = (nn.Parameter(torch.ones(5)) for _ in range(3))
    optimizer = ShardedOptimizer(
        [a, b, c], torch.optim.SGD, lr=1.0, weight_decay=1.0, averages=True
    )
    used = b if rank else a
    (3 * used).sum().backward()
    optimizer.step()
    close(a.detach(), torch.full((5,), 1 - 1 - 3 / k))
    close(b.detach(), torch.full((5,), 1 - 1 - 3 * (k - 1) / k))
    close(c.detach(), torch.ones(5))  # used by none: not even the decay of weights


def gradients_may_lie_otherwise_than_their_parameters(rank, k):
    model = nn.Conv2d(2, 4, 3).double().to(memory_format=torch.channels_last)
    nn.init.zeros_(model.weight)
    optimizer = ShardedOptimizer(
        model.parameters(), torch.optim.SGD, lr=1.0, averages=rank < 9
    )
    # contiguous: a hook or a user may set such a one
    model.weight.grad = randn(4, 2, 3, 3)
    model.bias.grad = torch.zeros(4, dtype=torch.float64)
    optimizer.step()
    close(model.weight.detach(), -randn(4, 2, 3, 3))


def a_model_may_change_its_memory_format_before_the_first_step(rank, k):
    model = nn.Conv2d(2, 4, 3).double()
    before = model.weight.detach().clone()
    optimizer = ShardedOptimizer(
        model.parameters(), torch.optim.SGD, lr=1.0, averages=True
    )
    model.to(memory_format=torch.channels_last)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    close(model.weight.detach(), before - 1)


def its_state_would_not_follow_it_later(rank, k):
    model = nn.Conv2d(2, 4, 3)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, averages=True)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model.to(memory_format=memory_format)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        kind, text, *_ = attempt(optimizer.step)
    assert (
        kind == "RuntimeError"
        and "choose the memory_format before the first step" in text
    )


def each_rank_keeps_its_part_of_the_state_and_no_copy_of_parameters(rank, k):
    model, _, optimizer = trains(rank, k, WAYS["Adam"], averages=True)
    held = [
        x.numel()
        for values in optimizer.state.values()
        for x in values.values()
        if x.dim()
    ]
    used = [
        p.numel()
        for name, p in model.named_parameters()
        if name.split(".")[0] not in UNTRAINED
    ]
    assert abs(sum(held) - 2 * sum(used) / k) <= 2 * len(used)
    assert sum(chain(*everyones(held))) == 2 * sum(used)
    for param, shard in optimizer.shards.items():
        assert shard.untyped_storage().data_ptr() == param.untyped_storage().data_ptr()
        assert shard.grad is None
    assert all(param.grad is None for param in model.parameters())


UNTRAINED = "frozen", "unused"


def gradients_that_were_scattered_wait_for_the_step(rank, k):
    """Once more changes nothing, not even where a gradient is laid out differently."""
    for averages in (True, False):
        weight = nn.Parameter(torch.zeros(4, 6).T)
        optimizer = ShardedOptimizer(
            [weight], torch.optim.SGD, lr=1.0, averages=averages
        )
        weight.grad = torch.ones(6, 4)
        for _ in range(2):
            optimizer.scatter_gradients()
        for shard in optimizer.shards.values():
            shard.grad.mul_(0.5)
        optimizer.step()
        assert torch.equal(weight.detach(), torch.full((6, 4), -0.5))
        weight.grad = None
        optimizer.step()
        assert torch.equal(weight.detach(), torch.full((6, 4), -0.5))


def a_step_takes_the_newest_gradients(rank, k):
    """Those of a step that was skipped were scattered, and then cleared."""
    for averages in (True, False):
        model = nn.Linear(4, 3)
        optimizer = ShardedOptimizer(
            model.parameters(), torch.optim.SGD, lr=1.0, averages=averages
        )
        before = state_of(model)
        for value in (torch.inf, 1.0):
            (optimizer if averages else model).zero_grad()
            for param in model.parameters():
                param.grad = torch.full_like(param, value)
            if value == torch.inf:
                optimizer.scatter_gradients()
        optimizer.step()
        close(state_of(model), [x - 1 for x in before])


def gradients_that_wait_for_the_step_are_not_lost(rank, k):
    """New ones would replace them, also on other parameters or another rank."""
    first, second = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    optimizer = ShardedOptimizer(
        [first, second], torch.optim.SGD, lr=1.0, averages=True
    )
    first.sum().backward()
    optimizer.scatter_gradients()
    if rank == 0:
        second.sum().backward()
    for call in (optimizer.scatter_gradients, optimizer.step):
        kind, text, *_ = attempt(call)
        assert kind == "RuntimeError" and "call step, or zero_grad" in text
    second.grad = None
    optimizer.step()
    assert first.tolist() == [-1.0] * 4


def an_optimizer_of_16_bits_gathers_16_bits(rank, k):
    model = mlp(6, 5, dtype=torch.bfloat16)
    optimizer = ShardedOptimizer(
        model.parameters(), torch.optim.SGD, lr=1.0, averages=True
    )
    before = state_of(model)
    for param in model.parameters():
        param.grad = torch.full_like(param, rank + 1.0)
    optimizer.step()
    mean_grad = sum(range(1, k + 1)) / k
    for now, then in zip(state_of(model), before, strict=True):
        assert now.dtype == torch.bfloat16
        assert torch.equal(now, then - torch.tensor(mean_grad, dtype=torch.bfloat16))


def ranks_agree_to_skip_a_step(rank, k):
    model = mlp(4, 3, dtype=torch.float32)
    optimizer = ShardedOptimizer(
        model.parameters(), torch.optim.SGD, lr=1.0, averages=True
    )
    scaler = GradScaler(init_scale=8.0, group=torch.distributed.group.WORLD)
    before = state_of(model)
    for param in model.parameters():
        param.grad = torch.full_like(param, torch.inf if rank == 1 else 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert all(map(torch.equal, state_of(model), before))
    assert everyones(scaler.get_scale()) == [4.0] * k
    optimizer.zero_grad()
    mean(model(torch.ones(2, 4)))
    scaler.step(optimizer)
    assert not torch.equal(model[0].weight, before[0])


test_on_two = on_ranks(
    2,
    [
        takes_what_torchs_takes,
        schedulers_set_what_it_uses,
        what_a_scheduler_set_last_is_saved,
        an_optimizer_may_change_its_settings,
        a_closure_is_called_once_with_gradients,
        groups_have_their_settings_and_may_come_later,
        a_parameter_may_be_unfrozen_later,
        what_some_ranks_have_not_used_counts_as_zero_there,
        gradients_may_lie_otherwise_than_their_parameters,
        a_model_may_change_its_memory_format_before_the_first_step,
        its_state_would_not_follow_it_later,
        gradients_that_were_scattered_wait_for_the_step,
        a_step_takes_the_newest_gradients,
        gradients_that_wait_for_the_step_are_not_lost,
        each_rank_keeps_its_part_of_the_state_and_no_copy_of_parameters,
        an_optimizer_of_16_bits_gathers_16_bits,
        ranks_agree_to_skip_a_step,
    ],
)
test_on_three = on_ranks(
    3,
    [
        what_some_ranks_have_not_used_counts_as_zero_there,
        each_rank_keeps_its_part_of_the_state_and_no_copy_of_parameters,
        an_optimizer_of_16_bits_gathers_16_bits,
    ],
)


def eight_layers():
    layers = [part for _ in range(8) for part in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def peak(wrap=None, averages=True):
    """The most bytes that training takes, per parameter."""

    def train():
        model = eight_layers()
        X, y = torch.randn(32, 256), torch.randint(10, (32,))
        net = wrap(model) if wrap else model
        optimizer = ShardedOptimizer(
            model.parameters(), torch.optim.Adam, averages=averages
        )
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(X), y).backward()
            optimizer.step()

    return peak_memory(train, "cpu") / sum(
        param.numel() for param in eight_layers().parameters()
    )


@pytest.mark.parametrize("k", [2, 4])
@in_ranks()
def test_the_peak_has_one_kth_of_the_state_and_no_flat_copy(rank, k):
    assert peak() < {2: 12.4, 4: 10.4}[k]
    # and DDP's buckets
    assert peak(DistributedDataParallel, averages=False) < {2: 17, 4: 15}[k]


class Picky(torch.optim.SGD):
    """An optimiser that checks each group."""

    def add_param_group(self, param_group):
        if param_group.get("lr", 1.0) < 0:
            raise ValueError("the learning rate is negative")
        super().add_param_group(param_group)


def refusals(rank, k):
    params = list(mlp(3, 3).parameters())
    gaps = nn.Parameter(torch.zeros(4, 6)[:, ::2])
    cases = {
        (
            "TypeError optimizer_class has to be a class"
            " such as torch.optim.Adam, not 'Adam'"
        ): partial(ShardedOptimizer, params, "Adam"),
        "NotImplementedError overlap_with_ddp is not supported": partial(
            ShardedOptimizer, params, torch.optim.SGD, None, False, True
        ),
        "ValueError a parameter of shape [4, 3] has strides [6, 2]": partial(
            ShardedOptimizer, [gaps], torch.optim.SGD
        ),
        "RuntimeError this rank has only a part of the state": ShardedOptimizer(
            params, torch.optim.SGD
        ).state_dict,
        "ValueError optimizer got an empty parameter list": partial(
            ShardedOptimizer, [], torch.optim.SGD
        ),
    }
    for expected, call in cases.items():
        kind, text, *_ = attempt(call)
        assert f"{kind} {text}".startswith(expected), (kind, text)
    optimizer = ShardedOptimizer(params, torch.optim.SGD, lr=1.0)
    kind, *_ = attempt(optimizer.add_param_group, {"params": [gaps]})
    assert kind == "ValueError"
    optimizer.step()  # as if nothing had been added
    assert len(optimizer.param_groups) == 1
    optimizer = ShardedOptimizer(params, Picky, lr=1.0)
    more = [nn.Parameter(torch.ones(3))]
    assert (
        attempt(optimizer.add_param_group, {"params": more, "lr": -1.0})[0]
        == "ValueError"
    )
    more[0].grad = torch.ones(3)
    optimizer.step()
    optimizer.add_param_group({"params": more, "lr": 1.0})
    optimizer.step()
    assert len(optimizer.param_groups) == 2 and more[0].tolist() == [0.0] * 3
    table = nn.Embedding(5, 2, sparse=True)
    for averages in (True, False):
        optimizer = ShardedOptimizer(
            table.parameters(), torch.optim.SGD, averages=averages
        )
        table(torch.tensor([1])).sum().backward()
        kind, text, *_ = attempt(optimizer.step)
        assert (kind, "sparse" in text) == ("ValueError", True), (kind, text)


test_what_is_refused = on_ranks(2, [refusals])


def test_there_has_to_be_a_group():
    with pytest.raises(ValueError, match="there is no process group"):
        ShardedOptimizer(mlp(3, 3).parameters(), torch.optim.SGD)
