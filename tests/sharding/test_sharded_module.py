"""ZeRO-2 and 3: the update of one device, whatever the model, and what is refused."""

import gc
import inspect
import threading
import weakref
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT, attempt, close, everyones, in_ranks, mlp, on_ranks, randn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from d2lpar import (
    DistributedDataParallel,
    GradScaler,
    count_bytes,
    fully_shard,
    ranks,
)
from d2lpar.ranks import RankError, launch
from d2lpar.sharding import FSDPModule, Shard, full_state_dict, load_full_state_dict

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAMW = partial(torch.optim.AdamW, lr=0.01)
WAYS = [
    {"reshard_after_forward": reshards, "prefetch": prefetch}
    for reshards, prefetch in product((True, False, None), (True, False))
]
ROWS = 12


def policy(**values):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(**values)


# Models: each is sharded part by part, as ``PARTS`` says, and then as a whole


class Convolutions(nn.Module):
    """Weights in channels_last, BatchNorm, a parameter in the model itself."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5, track_running_stats=True).eval()
        self.last = nn.Linear(20, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, X):
        X = self.norm(self.first(X.view(-1, 2, 4, 4))).tanh().flatten(1)
        return self.last(X) * self.scale


class Tied(nn.Module):
    """Two layers with one weight; a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Linear(32, 4, bias=False), nn.Linear(4, 4)
        self.last = nn.Linear(4, 32, bias=False)
        self.last.weight = nn.Parameter(self.first.weight.T.detach().clone())
        self.side = nn.Linear(32, 4, bias=False)
        self.side.weight = self.first.weight

    def forward(self, X):
        hidden = self.again(self.again(self.first(X)).tanh()).tanh() + self.side(X)
        return self.last(hidden)


class Partly(nn.Module):
    """A unit in part frozen, in part unused; one unit is not used at all."""

    def __init__(self):
        super().__init__()
        self.used = nn.Sequential(nn.Linear(32, 4), nn.Tanh(), nn.Linear(4, 4))
        self.used[0].requires_grad_(False)
        self.used.spare = nn.Linear(4, 4)
        self.used.forward = lambda X: self.used[2](self.used[1](self.used[0](X)))
        self.unused, self.frozen = (
            nn.Linear(3, 3),
            nn.Linear(4, 4).requires_grad_(False),
        )

    def forward(self, X):
        return self.frozen(self.used(X)).tanh()


class Sequences(nn.Module):
    """An LSTM keeps a list of its weights; attention uses another's weight."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, X):
        X, _ = self.lstm(X.view(-1, 8, 4))
        return self.attention(X, X, X, need_weights=False)[0]


class Nested(nn.Module):
    """A unit in a unit in a unit, each of which has parameters."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(
            nn.Sequential(nn.Linear(32, 8), nn.Tanh()), nn.Linear(8, 4)
        )
        self.gain, self.spare = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(1))

    def forward(self, X):
        return self.block(X) * self.gain


MODELS = {  # the model, and which of its parts are units
    "layers": (lambda: mlp(32, 7, 5, 4), ["0", "2", "4"]),
    "one unit": (lambda: mlp(32, 7, 5, 4), []),
    "convolutions": (Convolutions, ["first", "norm", "last"]),
    "tied": (Tied, ["again"]),
    "partly": (Partly, ["used", "unused", "frozen"]),
    "sequences": (Sequences, ["lstm", "attention"]),
    "nested": (Nested, ["block.0", "block"]),
}


def build(name, seed=0):
    torch.manual_seed(seed)
    return MODELS[name][0]().double()


def shard(model, parts, **options):
    for part in parts:
        fully_shard(model.get_submodule(part), **options)
    return fully_shard(model, **options)


def inputs(rank=0, k=1, step=0):
    return randn(ROWS, 32, seed=step).tensor_split(k)[rank]


def trains(model, way=SGD, rank=0, k=1, steps=3, optimizer=None):
    """The model's optimiser, after some steps."""
    optimizer = optimizer or way(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        model(
            inputs(rank, k, step).to(next(model.parameters()).dtype)
        ).square().mean().backward()
        optimizer.step()
    return optimizer


def check_equal(model, other):
    """The full state of a sharded model is that of another one."""
    state = full_state_dict(model)
    if dist.get_rank() == 0:
        expected = other.state_dict()
        assert list(state) == list(expected)
        close(list(state.values()), list(expected.values()))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
@in_ranks()
def test_it_updates_as_one_device_does(rank, k, name):
    alone = build(name)
    trains(alone)
    for way in WAYS:
        # rank 0's state counts
        model = shard(build(name, seed=rank), MODELS[name][1], **way)
        trains(model, rank=rank, k=k)
        check_equal(model, alone)


def in_bits(rank, model, net, way):
    trains(net, way, rank, 2, optimizer=way(model.parameters()))
    return model


@pytest.mark.parametrize("way", [SGD, ADAMW], ids=["SGD", "AdamW"])
@in_ranks(2)
def test_two_ranks_have_the_bits_of_ddp_and_of_torchs_fully_shard(rank, k, way):
    from torch.distributed import fsdp

    ddp = mlp(32, 7, 5, 4, dtype=torch.float32)
    in_bits(rank, ddp, DistributedDataParallel(ddp), way)
    for options in WAYS:
        ours = shard(mlp(32, 7, 5, 4, dtype=torch.float32), ["0", "2", "4"], **options)
        state = full_state_dict(in_bits(rank, ours, ours, way))
        assert all(
            torch.equal(state[name], x) for name, x in ddp.state_dict().items() if state
        )
    theirs = mlp(32, 7, 5, 4, dtype=torch.float32)
    for i in (0, 2, 4):
        fsdp.fully_shard(theirs[i])
    in_bits(rank, theirs, fsdp.fully_shard(theirs), way)
    for name, x in theirs.state_dict().items():
        assert torch.equal(x.full_tensor(), ddp.state_dict()[name])


def it_takes_what_torchs_takes(rank, k):
    from torch.distributed import fsdp

    ours, theirs = (
        inspect.signature(f).parameters for f in (fully_shard, fsdp.fully_shard)
    )
    named = [name for name in theirs if name != "dp_mesh_dims"]  # newer than 2.11
    assert [name for name in ours if name not in ("group", "prefetch")] == named
    assert (
        ours["reshard_after_forward"].default is theirs["reshard_after_forward"].default
    )
    for name in ("unshard", "reshard", "set_requires_gradient_sync"):
        ours, theirs = (getattr(cls, name) for cls in (FSDPModule, fsdp.FSDPModule))
        assert set(inspect.signature(ours).parameters) <= set(
            inspect.signature(theirs).parameters
        )
    states = []
    # one script
    for module in fsdp, __import__("d2lpar.sharding", fromlist=["sharding"]):
        model = mlp(32, 7, 4)
        for layer in (model[0], model[2]):
            module.fully_shard(layer, reshard_after_forward=True, mp_policy=policy())
        module.fully_shard(
            model, mp_policy=policy(), offload_policy=fsdp.OffloadPolicy()
        )
        assert isinstance(model, module.FSDPModule) and isinstance(model, nn.Sequential)
        optimizer = SGD(model.parameters())
        for step in range(4):
            model.set_requires_gradient_sync(step % 2 == 1)
            model(inputs(rank, k, step)).square().mean().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        model.unshard()
        states.append(
            [getattr(p, "full_tensor", p.clone)() for p in model.parameters()]
        )
        model.reshard()
    assert len(states[0]) == 4


def the_root_is_read_by_unshard_and_parts_are_shards(rank, k):
    model = shard(build("nested"), ["block"])
    whole = build("nested").gain
    assert all(
        isinstance(param, Shard) and param.dim() == 1 for param in model.parameters()
    )
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in build("nested").named_parameters()
    ]
    sizes = everyones([param.numel() for param in model.parameters()])
    assert list(map(sum, zip(*sizes, strict=True))) == [
        p.numel() for p in build("nested").parameters()
    ]
    totals = list(map(sum, sizes))
    assert max(totals) - min(totals) <= 2  # one per unit
    model.unshard()
    close(model.gain, whole)
    assert isinstance(model.block[1].weight, Shard)  # the unit alone
    trained = model(inputs())
    trained.sum().backward()  # it was whole already, and gradients find their way
    assert all(
        shard.grad is not None for shard in model.parameters() if shard.numel() > 1
    )
    model.reshard()
    assert isinstance(model.gain, Shard)


def gradients_add_up_over_batches(rank, k):
    for way, waits in product(WAYS, (True, False)):
        alone, model = build("layers"), shard(build("layers"), ["0", "2"], **way)
        for step in range(3):
            alone(inputs(step=step)).square().mean().backward()
            if waits and step < 2:
                with model.no_sync(), count_bytes() as ledger:
                    model(inputs(rank, k, step)).square().mean().backward()
                assert all(param.grad is None for param in model.parameters())
                gathered = ledger.sent(rank)
            else:
                with count_bytes() as ledger:
                    model(inputs(rank, k, step)).square().mean().backward()
        assert ledger.sent(rank) > 1.3 * gathered  # gradients are sent only in the end
        compare_gradients(model, alone)


def compare_gradients(model, alone):
    """Each shard's gradient is its part of the whole one; None where that is None."""
    for (name, part), param in zip(
        model.named_parameters(), alone.parameters(), strict=True
    ):
        if param.grad is None:
            assert part.grad is None, name
        else:
            close(part.grad, param.grad.reshape(-1)[part.span])


class Chosen(nn.Module):
    """Layers to choose from; ``outer`` has an inner unit and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))
        self.outer = nn.Sequential(
            nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()
        )
        self.outer[0].requires_grad_(False)

    def forward(self, X, names, reentrant=None):
        for name in names:
            layer = getattr(self, name)
            X = (
                layer(X)
                if reentrant is None
                else checkpoint(layer, X, use_reentrant=reentrant)
            )
        return X


def chosen(**way):
    torch.manual_seed(0)
    model = Chosen().double()
    for part in (model.outer[2], model.outer, model.a, model.b) if way else ():
        fully_shard(part, **way)
    return fully_shard(model, **way) if way else model


def a_unit_that_only_passes_without_synchronisation_have_used_is_averaged(rank, k):
    for way in WAYS:
        alone, model = chosen(), chosen(**way)
        for net, args in ((alone, (0, 1)), (model, (rank, k))):
            for step, names in enumerate((["a", "c"], ["b", "c"])):
                if net is model:
                    net.set_requires_gradient_sync(step == 1)
                net(inputs(*args, step), names).square().mean().backward()
        compare_gradients(model, alone)


def a_frozen_unit_around_another_is_computed_again(rank, k):
    for way, reentrant in product(WAYS, (True, False)):
        alone, model = chosen(), chosen(**way)
        for net, args in ((alone, (0, 1)), (model, (rank, k))):
            for _ in range(2):
                X = inputs(*args).requires_grad_()
                net(X, ["a", "outer", "b"], reentrant).square().mean().backward()
        compare_gradients(model, alone)


def one_backward_pass_may_go_through_several_forward_passes(rank, k):
    for way in WAYS:
        alone, model = build("layers"), shard(build("layers"), ["0", "2"], **way)
        for net, args in ((alone, (0, 1)), (model, (rank, k))):
            first, second = (net(inputs(*args, step)) for step in range(2))
            (first.square().mean() + second.tanh().mean()).backward()
            third = net(inputs(*args, 2)).square().mean()
            third.backward(retain_graph=True)
            third.backward()
        compare_gradients(model, alone)


def a_hook_in_backward_may_call_the_model(rank, k):
    for way in WAYS:
        alone, model = build("layers"), shard(build("layers"), ["0", "2"], **way)
        for net, args in ((alone, (0, 1)), (model, (rank, k))):

            def again(*_, net=net, args=args):
                with torch.no_grad():
                    net(inputs(*args))

            # while the gradients of "2" are on their way
            net[1].register_full_backward_hook(again)
            for step in range(2):
                net(inputs(*args, step)).square().mean().backward()
        compare_gradients(model, alone)


def a_loss_may_go_backward_within_the_model(rank, k):
    """While a unit is in use, its gradients come; its parameters have to stay."""

    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = mlp(32, 8), mlp(8, 4)
            self.gain = nn.Parameter(torch.ones(8, dtype=torch.float64))

        def forward(self, X):
            X = self.first(X) * self.gain
            X.square().mean().backward()
            return self.second(X.detach() * self.gain)

    for way in WAYS:
        torch.manual_seed(0)
        alone, model = Local(), shard(Local(), ["first", "second"], **way)
        load_full_state_dict(model, alone.state_dict())
        for net, args in ((alone, (0, 1)), (model, (rank, k))):
            for step in range(2):
                net(inputs(*args, step)).square().mean().backward()
        compare_gradients(model, alone)


class Result(NamedTuple):
    value: torch.Tensor


class Wrapped:
    def __init__(self, value):
        self.value = value


def in_a_record(record, net, X):
    return record(nn.Sequential.forward(net, X))


def a_part_may_come_before_the_model_in_one_pass(rank, k):
    """Whatever tells of the backward pass: the outputs hold no tensor."""
    for way, record in product(WAYS, (Result, Wrapped)):
        alone, model = build("layers"), shard(build("layers"), ["0", "2"], **way)
        for net, args in ((alone, (0, 1)), (model, (rank, k))):
            net.forward = partial(in_a_record, record, net)
            for step in range(2):
                before = net[0](inputs(*args, step)).mean()
                (net(inputs(*args, step)).value.square().mean() + before).backward()
        compare_gradients(model, alone)


def hooks_see_each_gradient_that_has_come(rank, k):
    """So that an optimiser may update within backward, and keep no gradients."""
    for way in WAYS:
        alone, model = build("layers"), shard(build("layers"), ["0", "2"], **way)
        for net, args in ((alone, (0, 1)), (model, (rank, k))):
            optimizers = {param: SGD([param]) for param in net.parameters()}

            def update(param, optimizers=optimizers):
                optimizers[param].step()
                param.grad = None

            for param in net.parameters():
                param.register_post_accumulate_grad_hook(update)
            for step in range(3):
                net(inputs(*args, step)).square().mean().backward()
        assert all(param.grad is None for param in model.parameters())
        check_equal(model, alone)


def an_lstm_keeps_no_whole_weights(rank, k):
    model = shard(build("sequences"), ["lstm"])
    for _ in range(2):
        model(inputs()).sum().backward()
        assert all(isinstance(weight, Shard) for weight in model.lstm._flat_weights)


def a_parameter_that_was_replaced_is_refused(rank, k):
    model = shard(build("layers"), ["0"])
    other = dict(build("layers", seed=1).named_parameters())
    kind, text, *_ = attempt(torch.func.functional_call, model, other, inputs())
    assert (
        kind == "RuntimeError"
        and "the parameter weight of a Linear was replaced" in text
    )
    assert all(isinstance(param, Shard) for param in model.parameters())
    model(inputs()).sum().backward()
    model[0].weight = nn.Parameter(torch.ones(7, 32))
    kind, text, *_ = attempt(model, inputs())
    assert (
        kind == "RuntimeError"
        and "the parameter weight of a FSDPLinear was replaced" in text
    )
    assert model[0].weight.shape == (7, 32)


def no_sync_ends_as_it_began(rank, k):
    model = shard(build("layers"), ["0"])
    model[0].set_requires_gradient_sync(False)
    with model.no_sync(), model.no_sync():
        pass
    assert [unit.syncs for unit in model._units()] == [True, False]
    with model.no_sync():
        with model.no_sync():
            pass
        assert [unit.syncs for unit in model._units()] == [False, False]


def evaluation_frees_and_sees_the_newest_weights(rank, k):
    for way in WAYS:
        alone, model = build("layers"), shard(build("layers"), ["0", "2"], **way)
        optimizers = [SGD(net.parameters()) for net in (alone, model)]
        for step in range(2):
            for net, optimizer in zip((alone, model), optimizers, strict=True):
                trains(net, steps=1, optimizer=optimizer)
            for no_grad in (torch.no_grad, torch.inference_mode, torch.enable_grad):
                with no_grad():
                    close(
                        model(inputs(step=step)).detach(),
                        alone(inputs(step=step)).detach(),
                    )
        with torch.no_grad():
            model(inputs())
        assert [unit.whole for unit in model._units()] == [None] * 3


def an_error_in_backward_leaves_nothing_stale(rank, k):
    for way in WAYS:
        alone, model = build("layers"), shard(build("layers"), ["0", "2"], **way)
        optimizers = [SGD(net.parameters()) for net in (alone, model)]
        for net, optimizer in zip((alone, model), optimizers, strict=True):
            handle = net[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
            kind, *_ = attempt(net, torch.ones(2, 3))  # one in forward
            assert kind == "RuntimeError"
            assert all(isinstance(p, Shard) for p in model.parameters())
            assert attempt(net(inputs(step=9)).sum().backward)[0] == "ZeroDivisionError"
            handle.remove()
            trains(net, steps=2, optimizer=optimizer)
        check_equal(model, alone)


class Checkpointed(nn.Module):
    """Blocks that are computed again in backward, as ``how`` calls them."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.first = nn.Linear(32, 6)
        self.blocks = nn.ModuleList(Block(how) for _ in range(3))

    def forward(self, X):
        X = self.first(X)
        for block in self.blocks:
            inside = "inside" in self.how or "no" in self.how
            X = (
                block(X)
                if inside
                else checkpoint(block, X, use_reentrant="re" in self.how)
            )
        return X


class Block(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.body = how, mlp(6, 6, 6)

    def forward(self, X):
        if "inside" in self.how:
            return X + checkpoint(self.body, X, use_reentrant="re" in self.how)
        return X + self.body(X)


def checkpoints_compute_again_what_they_left_out(rank, k):
    for how, way in product(
        (["no"], ["outside"], ["inside"], ["outside", "re"], ["inside", "re"]), WAYS
    ):
        torch.manual_seed(0)
        alone = Checkpointed(["no"]).double()
        torch.manual_seed(0)
        model = Checkpointed(how).double()
        shard(model, ["blocks.0", "blocks.1", "blocks.2"], **way)
        trains(alone)
        trains(model, rank=rank, k=k)
        check_equal(model, alone)
        assert [unit.whole for unit in model._units()] == [None] * 4


def kept_by_a_checkpoint(model, X):
    """Bytes that a checkpoint around the model keeps for backward, beside its input."""
    from d2lpar.memory import saved_memory

    output, nbytes = saved_memory(lambda: model(X), without=[X])
    output.sum().backward()
    return nbytes


def a_checkpoint_around_a_unit_keeps_no_activations(rank, k):
    model = shard(mlp(6, 60, 60, 6), [])
    X = randn(8, 6)
    with_activations = kept_by_a_checkpoint(model, X)
    assert with_activations >= 8 * 60 * 2 * 8
    again = partial(checkpoint, model, use_reentrant=False)
    assert kept_by_a_checkpoint(again, X) < with_activations / 4


def replicas_of_shards_are_one_model(rank, k):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for name in ("layers", "convolutions", "partly"):
        alone = build(name)
        trains(alone)
        model = shard(build(name, seed=rank), MODELS[name][1], mesh=mesh)
        trains(model, rank=rank, k=k)
        check_equal(model, alone)
        own = torch.cat([param.detach() for param in model.parameters()])
        first, second = everyones(own)[rank % 2 :: 2]
        assert torch.equal(first, second)
        half = sum(param.numel() for param in alone.parameters()) / 2
        assert abs(len(own) - half) <= len(MODELS[name][1]) + 1


def a_mesh_of_one_dimension_or_a_group_says_who_shares(rank, k):
    pair = dist.new_group([0, 1]), dist.new_group([2, 3])
    model = shard(build("layers", seed=rank), ["0", "2"], group=pair[rank // 2])
    sizes = everyones(sum(param.numel() for param in model.parameters()))
    assert sizes[0] + sizes[1] == sum(
        param.numel() for param in build("layers").parameters()
    )
    alone = build("layers", seed=2 * (rank // 2))
    for net, args in ((model, (rank % 2, 2)), (alone, (0, 1))):
        trains(net, rank=args[0], k=args[1])
    state = full_state_dict(model)
    assert bool(state) == (rank % 2 == 0)
    if state:
        close(list(state.values()), list(alone.state_dict().values()))
    mesh = init_device_mesh("cpu", (4,))
    model = shard(build("layers"), ["0"], mesh=mesh)
    trains(model, rank=rank, k=k)
    alone = build("layers")
    trains(alone)
    check_equal(model, alone)


def sixteen_bits_are_torchs(rank, k):
    from torch.distributed import fsdp

    half = policy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32,
    )
    results = []
    for call, options in ((fsdp.fully_shard, {}), (fully_shard, {"prefetch": True})):
        model = mlp(32, 7, 5, 4, dtype=torch.float32)
        for i in (0, 2, 4):
            call(model[i], mp_policy=half, **options)
        call(model, mp_policy=half, **options)
        output = model(inputs(rank, k).float())
        assert output.dtype == torch.float32
        output.square().mean().backward()
        results.append((output.detach(), [p.grad for p in model.parameters()]))
    (theirs, full), (ours, parts) = results
    assert torch.equal(theirs, ours)
    for dtensor, part, shard in zip(full, parts, model.parameters(), strict=True):
        assert part.dtype == torch.float32
        assert torch.equal(dtensor.full_tensor().reshape(-1)[shard.span], part)


def inputs_and_outputs_are_cast_as_the_policy_says(rank, k):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, number, *, more):
            assert self.weight.dtype == torch.float16
            self.seen = number.dtype, more["x"].dtype, more["n"].dtype
            return {"y": more["x"].to(torch.float16) * self.weight, "n": more["n"]}

    for casts in (True, False):
        mp = policy(
            param_dtype=torch.float16,
            output_dtype=torch.float64,
            cast_forward_inputs=casts,
        )
        model = fully_shard(Pair(), mp_policy=mp)
        output = model(torch.ones(3), more={"x": torch.ones(3), "n": torch.arange(3)})
        given = torch.float16 if casts else torch.float32
        assert model.seen == (given, given, torch.int64)
        assert (output["y"].dtype, output["n"].dtype) == (torch.float64, torch.int64)
        assert model.weight.dtype == torch.float32  # the shard


def ignored_parameters_stay(rank, k):
    model = mlp(4, 3, 2)
    kept = model[0].weight
    fully_shard(model, ignored_params={kept})
    assert model[0].weight is kept and isinstance(model[0].bias, Shard)
    model(randn(3, 4)).sum().backward()
    assert kept.grad.shape == (3, 4)


def a_part_may_be_called_without_the_model(rank, k):
    """As a method other than forward does, before the first forward pass and later."""
    alone, model = build("layers"), shard(build("layers"), ["4"])
    for _ in range(2):
        for net in (alone, model):
            net[2](net[0](inputs())).sum().backward()
            net(inputs()).sum().backward()
        compare_gradients(model, alone)
    assert all(isinstance(param, Shard) for param in model.parameters())


def parameters_may_be_unfrozen_later(rank, k):
    alone, model = build("layers"), build("layers")
    for net in (alone, model):
        net[2].requires_grad_(False)
    shard(model, ["0", "2"])
    for net in (alone, model):
        optimizer = SGD(net.parameters())
        trains(net, steps=1, optimizer=optimizer)
        net[2].requires_grad_(True)
        trains(net, steps=2, optimizer=optimizer)
    check_equal(model, alone)


def a_rank_may_start_from_its_first_rank(rank, k):
    model = nn.BatchNorm1d(3)
    with torch.no_grad():
        model.weight.fill_(rank + 1.0)
        model.running_mean.fill_(rank + 5.0)
    fully_shard(model)
    assert model.running_mean.tolist() == [5.0] * 3
    model.unshard()
    assert model.weight.tolist() == [1.0] * 3
    model.reshard()


def what_cannot_be_sharded_is_named(rank, k):
    done = shard(mlp(4, 3, 2), [])
    tied, tied_too = nn.Linear(3, 3), nn.Linear(3, 3)
    tied_too.weight = tied.weight
    pair = nn.Sequential(tied, tied_too)
    fully_shard(tied)
    outer = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    shared = nn.ModuleList([outer[0], nn.Linear(2, 2)])
    fully_shard(outer)
    around = nn.Sequential(shared[0], shared[1])
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    whole_number = nn.Linear(2, 2)
    whole_number.table = nn.Parameter(torch.arange(3), requires_grad=False)
    gaps = nn.Linear(2, 2)
    gaps.weight = nn.Parameter(torch.zeros(2, 4)[:, ::2])
    cases = (
        (
            "TypeError module has to be one nn.Module, not a list",
            lambda: fully_shard([done]),
        ),
        (
            "ValueError this FSDPSequential has been sharded already",
            lambda: fully_shard(done),
        ),
        ("ValueError a ModuleList cannot be sharded", lambda: fully_shard(shared)),
        (
            "ValueError a DistributedDataParallel cannot be sharded",
            lambda: fully_shard(nn.parallel.DistributedDataParallel(mlp(2, 2))),
        ),
        (
            "ValueError a DistributedDataParallel cannot be sharded",
            lambda: fully_shard(DistributedDataParallel(mlp(2, 2))),
        ),
        (
            "NotImplementedError reshard_after_forward=2",
            lambda: fully_shard(mlp(2, 2), reshard_after_forward=2),
        ),
        (
            "TypeError mp_policy has to be torch's MixedPrecisionPolicy",
            lambda: fully_shard(mlp(2, 2), mp_policy=torch.bfloat16),
        ),
        (
            "TypeError ignored_params has to be a set of parameters, not generator",
            lambda: fully_shard(mlp(2, 2), ignored_params=mlp(2, 2).parameters()),
        ),
        (
            "NotImplementedError shard_placement_fn",
            lambda: fully_shard(mlp(2, 2), shard_placement_fn=lambda param: None),
        ),
        ("ValueError 1.weight belongs to another unit", lambda: fully_shard(pair)),
        ("ValueError weight belongs to another unit", lambda: fully_shard(tied_too)),
        ("ValueError weight belongs to another unit", lambda: fully_shard(outer[0])),
        ("ValueError 0.weight belongs to another unit", lambda: fully_shard(around)),
        (
            "ValueError the parameters of one unit must be of one kind, not 0.weight",
            lambda: fully_shard(mixed),
        ),
        ("ValueError table is torch.int64", lambda: fully_shard(whole_number)),
        ("ValueError weight has no memory yet", lambda: fully_shard(nn.LazyLinear(3))),
        (
            "ValueError weight has no memory yet",
            lambda: fully_shard(nn.Linear(3, 3, device="meta")),
        ),
        (
            "ValueError weight has no memory yet, or lies in it with gaps",
            lambda: fully_shard(gaps),
        ),
        (
            "ValueError pass a group, or a mesh",
            lambda: fully_shard(
                mlp(2, 2), mesh=init_device_mesh("cpu", (k,)), group=dist.group.WORLD
            ),
        ),
        (
            "MismatchError the ranks are about to do different things",
            lambda: fully_shard(mlp(2, 2 + rank)),
        ),
        (
            "RuntimeError this parameter was divided",
            lambda: nn.Sequential(tied_too)(torch.ones(3)),
        ),
        (
            "TypeError a sharded module cannot be copied",
            lambda: __import__("copy").deepcopy(done),
        ),
    )
    for expected, call in cases:
        kind, text, *_ = attempt(call)
        assert f"{kind} {text}".startswith(expected), (expected, kind, text)


def an_optimizer_that_came_too_early_is_refused(rank, k):
    model = mlp(4, 3)
    optimizer = SGD(model.parameters())
    fully_shard(model)
    for call in (optimizer.step, optimizer.zero_grad):
        kind, text, *_ = attempt(call)
        assert kind == "RuntimeError" and "make the optimiser afterwards" in text


def autocast_is_refused_where_it_would_keep_weights(rank, k):
    for way, refused in ((True, True), (False, False)):
        model = fully_shard(mlp(4, 3, dtype=torch.float32), reshard_after_forward=way)
        with torch.autocast("cpu", torch.bfloat16):
            kind, text, *_ = attempt(model, torch.ones(2, 4))
        assert (kind == "ValueError" and "use mp_policy" in text) == refused, (
            kind,
            text,
        )
        model(torch.ones(2, 4)).sum().backward()  # and nothing is left behind
    half = policy(param_dtype=torch.bfloat16)
    model = fully_shard(
        mlp(4, 3, dtype=torch.float32), reshard_after_forward=True, mp_policy=half
    )
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(2, 4)).sum().backward()


def ranks_agree_on_the_scale_and_on_skipped_steps(rank, k):
    """Only rank 1 has the infinity: its shards have it, and rank 0's do not."""
    scales, counts = [], []
    for group in (dist.group.WORLD, None):
        model = shard(mlp(4, 3, 2, dtype=torch.float32), ["0", "2"])
        optimizer = torch.optim.Adam(model.parameters())
        scaler = GradScaler(growth_interval=2, group=group)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            if rank == 1 and step == 3:
                model[0].weight.grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
        scales.append(everyones(scaler.get_scale()))
        counts.append(everyones(optimizer.state[model[0].weight]["step"].item()))
    assert scales[0][0] == scales[0][1] and counts[0] == [5, 5]
    # nothing else would tell
    assert scales[1][0] > scales[1][1] and counts[1] == [6, 5]


def nothing_outlives_the_model(rank, k):
    before = set(threading.enumerate())
    model = shard(mlp(4, 3, 2), ["0"])
    trains_on(model)
    [thread] = set(threading.enumerate()) - before
    unit, parameter = weakref.ref(model._unit), weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert unit() is None and parameter() is None
    thread.join(LIMIT)
    assert not thread.is_alive()


def trains_on(model):
    model(randn(2, 4)).sum().backward()


test_on_two = on_ranks(
    2,
    [
        it_takes_what_torchs_takes,
        the_root_is_read_by_unshard_and_parts_are_shards,
        gradients_add_up_over_batches,
        a_unit_that_only_passes_without_synchronisation_have_used_is_averaged,
        a_frozen_unit_around_another_is_computed_again,
        one_backward_pass_may_go_through_several_forward_passes,
        a_hook_in_backward_may_call_the_model,
        a_loss_may_go_backward_within_the_model,
        a_part_may_come_before_the_model_in_one_pass,
        hooks_see_each_gradient_that_has_come,
        an_lstm_keeps_no_whole_weights,
        a_parameter_that_was_replaced_is_refused,
        no_sync_ends_as_it_began,
        evaluation_frees_and_sees_the_newest_weights,
        an_error_in_backward_leaves_nothing_stale,
        checkpoints_compute_again_what_they_left_out,
        a_checkpoint_around_a_unit_keeps_no_activations,
        sixteen_bits_are_torchs,
        inputs_and_outputs_are_cast_as_the_policy_says,
        ignored_parameters_stay,
        a_part_may_be_called_without_the_model,
        parameters_may_be_unfrozen_later,
        a_rank_may_start_from_its_first_rank,
        what_cannot_be_sharded_is_named,
        an_optimizer_that_came_too_early_is_refused,
        autocast_is_refused_where_it_would_keep_weights,
        ranks_agree_on_the_scale_and_on_skipped_steps,
        nothing_outlives_the_model,
    ],
)
test_on_four = on_ranks(
    4,
    [
        replicas_of_shards_are_one_model,
        a_mesh_of_one_dimension_or_a_group_says_who_shares,
    ],
)


def fails_on_rank_1(rank, k, where):
    model = shard(mlp(4, 3, 2), ["0", "2"])
    for step in range(3):
        if rank == 1 and step == 1 and where == "forward":
            raise ZeroDivisionError("rank 1 breaks")
        output = model(randn(2, 4))
        if rank == 1 and step == 1:
            output.register_hook(lambda grad: 1 / 0)
        output.sum().backward()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_fails_is_named_at_once(where):
    with pytest.raises(RankError, match="rank 1: ZeroDivisionError"):
        launch(fails_on_rank_1, 3, where, timeout=LIMIT)


@in_ranks(3)
def test_a_rank_that_does_not_come_is_named_in_time(rank, k):
    model = shard(mlp(4, 3, 2), ["0", "2"])
    trains_on(model)
    ranks.transport.here.timeout = 1.0
    if rank != 1:
        kind, text, peers, seconds = attempt(trains_on, model)
        assert (kind, peers) == ("PeerError", (1,)), text
        assert seconds < 20


def test_there_has_to_be_a_group():
    with pytest.raises(ValueError, match="there is no process group"):
        fully_shard(mlp(3, 3))
