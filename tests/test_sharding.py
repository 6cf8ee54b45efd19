"""Sharding: the training of DDP and of torch's fully_shard, in the memory of a part."""

import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT, attempt, close, everyones, in_ranks, mlp, on_ranks, randn
from torch import nn
from torch.distributed import fsdp, init_device_mesh
from torch.nn import functional as F
from torch.optim import SGD, AdamW, NAdam
from torch.utils.checkpoint import checkpoint

from d2lpar import (
    DistributedDataParallel,
    GradScaler,
    ShardedOptimizer,
    clip_grad_norm_,
    count_bytes,
    full_state_dict,
    fully_shard,
    launch,
    load_full_state_dict,
    peak_memory,
    ranks,
)
from d2lpar.sharding import rows_of


class Model(nn.Module):
    """Tied, frozen, unused and scalar parameters, a buffer, and odd numbers of rows."""

    def __init__(self, dtype=torch.float64, scale=1.5):
        super().__init__()
        torch.manual_seed(0)
        self.dtype, self.embedding = dtype, nn.Embedding(11, 6)
        layers = nn.LayerNorm(6), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)
        self.blocks = nn.ModuleList([nn.Sequential(*layers), nn.Linear(6, 6)])
        self.blocks[0][1].weight.requires_grad_(False)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(scale))
        self.unused, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(6, affine=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = x + block(x.to(self.dtype))  # a unit casts it back
        return self.head(self.norm.eval()(self.frozen(x)))


TOKENS = torch.arange(60).remainder(11)


def groups_of(model):
    """The usual rule: weight decay for what has two dimensions or more."""
    params = [*model.parameters()]
    decay = [param for param in params if param.dim() >= 2]
    others = [param for param in params if param.dim() < 2]
    return [{"params": decay, "weight_decay": 0.1}, {"params": others, "lr": 0.05}]


def units(model, shard=fully_shard, **options):
    for part in (*model.blocks, model.frozen, model):
        shard(part, **options)
    return model


def as_ddp(model, make):
    return DistributedDataParallel(model), make(groups_of(model))


def as_zero1(model, make):
    return model, ShardedOptimizer(groups_of(model), make.func, **make.keywords)


def as_zero2(model, make):
    model, optimizer = as_zero1(model, make)
    for param in [param for param in optimizer.shards if param.requires_grad]:
        param.register_post_accumulate_grad_hook(optimizer.reduce)
    return model, optimizer


def as_zero3(model, make, shard=fully_shard, **options):
    units(model, shard, **options)
    return model, make(groups_of(model))


def as_zero3_with_whole_parameters(model, make):
    optimizer = make(groups_of(model))  # before there are shards
    return units(model, reshard_after_forward=False), optimizer


def torchs(part, **options):
    """Torch's class, on CPUs even where there is a GPU."""
    mesh = init_device_mesh("cpu", (ranks.group_of(None).size,))
    return fsdp.fully_shard(part, mesh=mesh, **options)


WAYS = as_zero1, as_zero2, as_zero3, as_zero3_with_whole_parameters


def trained(way, make, rank, k, dtype, scale=1.5, device="cpu"):
    """The logits after three steps of two passes, and which have no gradient."""
    model, rows = Model(dtype, scale).to(device), TOKENS[rank::k].to(device)
    net, optimizer = way(model, make)
    for i in range(3):
        if i != 1:  # then gradients add up over two steps
            optimizer.zero_grad()
        for tokens in rows, rows.flip(0)[:10]:
            F.cross_entropy(net(tokens), tokens).backward()
        missing = [name for name, p in model.named_parameters() if p.grad is None]
        optimizer.step()
    with torch.no_grad():
        return model(TOKENS[:11].to(device)), missing


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@in_ranks()
def test_all_ways_train_as_ddp_does(rank, k):
    for make in partial(SGD, lr=0.1, momentum=0.9), partial(AdamW, lr=0.01):
        expected, missing = trained(as_ddp, make, rank, k, torch.float64)
        for way in WAYS:
            found, ours = trained(way, make, rank, k, torch.float64)
            close(found, expected, rtol=0, atol=1e-12)
            assert ours == missing or way in WAYS[:2]  # ZeRO-1 and 2 free gradients


@in_ranks(2)
def test_bits_are_those_of_torchs_fully_shard(rank, k):
    low = {"param_dtype": torch.bfloat16}
    policy = fsdp.MixedPrecisionPolicy(**low, reduce_dtype=torch.float32)
    args = partial(SGD, lr=0.1), rank, k, torch.float32, [1.5]  # torch has no scalars
    for ours, theirs in ({}, {}), (low, {"mp_policy": policy}):
        found, missing = trained(partial(as_zero3, **ours), *args)
        expected = trained(partial(as_zero3, shard=torchs, **theirs), *args)
        assert torch.equal(found, expected[0]) and missing == expected[1]


WIDTH, DEPTH, CLASSES = 128, 6, 10


def measured(stage, rank, k):
    """Three steps: the peak in bytes, the bytes sent in the last one, and the model."""
    models, ledgers = [], []

    def train():
        model = mlp(*[WIDTH] * (DEPTH + 1), CLASSES, dtype=torch.float32)
        for layer in model[::2] if stage >= 3 else ():
            fully_shard(layer, reshard_after_forward=stage == 3)
        make = partial(ShardedOptimizer, optimizer_class=AdamW) if stage < 3 else AdamW
        optimizer = make(model.parameters(), lr=0.01)
        for param in model.parameters() if stage == 2 else ():
            param.register_post_accumulate_grad_hook(optimizer.reduce)
        for _ in range(3):
            optimizer.zero_grad()
            with count_bytes() as ledger:
                model(torch.ones(2, WIDTH)).square().mean().backward()
                optimizer.step()
            ledgers.append(ledger)
        models.append(model)

    return peak_memory(train, "cpu"), ledgers[-1].sent(rank), models[0]


@pytest.mark.parametrize("k", [2, 4])
@in_ranks()
def test_peaks_and_bytes_are_those_of_the_formulas(rank, k):
    layer, last = WIDTH * WIDTH + WIDTH, -(-CLASSES // k) * k * (WIDTH + 1)
    whole = (DEPTH * layer + last) * 4 * (k - 1) / k  # gathered, or reduced, once
    count = DEPTH * layer + CLASSES * (WIDTH + 1)
    unit, first = 4 * layer / count, 4 * (k - 1) / k * layer
    bucket = -(-(2**18) // (4 * layer)) * unit
    for stage, expected, sent in [
        (1, 8 + 8 / k + bucket * (1 + 1 / k), 2 * whole),
        (2, 4 + 12 / k + bucket * (1 + 1 / k), 2 * whole),  # when rows are gathered
        (3, 16 / k + 2 * unit, 3 * whole - first),  # nobody wants the input's gradient
        (4, 4 + 12 / k + 1.5 * unit, 2 * whole),  # parameters stay whole
    ]:
        peak, found, model = measured(stage, rank, k)
        assert abs(peak / count - expected) < 0.4, (stage, peak / count, expected)
        assert found == sent, stage
    grads = [param.grad for param in model.parameters()]
    assert all(grad.untyped_storage().nbytes() == grad.nbytes for grad in grads)


class Recomputed(nn.Sequential):
    def forward(self, X):
        return checkpoint(super().forward, X, use_reentrant=False)


def gradients_peak_and_calls(around, inside):
    """Of three blocks, each with one wide part inside a unit."""
    torch.manual_seed(0)
    blocks = nn.Sequential()
    for _ in range(3):
        wide = inside(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 8))
        blocks.append(around(fully_shard(nn.Sequential(wide, nn.Linear(8, 8)))))

    def step():
        X = torch.ones(64, 8, requires_grad=True)
        blocks(X).square().sum().backward()

    calls, peak = ranks.group_of(None).calls, peak_memory(step, "cpu")
    calls = ranks.group_of(None).calls - calls
    return [param.grad for param in blocks.parameters()], peak, calls


@in_ranks(2)
def test_a_checkpoint_around_or_inside_a_unit_saves_its_activations(rank, k):
    expected, most, calls = gradients_peak_and_calls(nn.Sequential, nn.Sequential)
    for where in (Recomputed, nn.Sequential), (nn.Sequential, Recomputed):
        found, peak, *again = gradients_peak_and_calls(*where)
        assert all(map(torch.equal, found, expected)), where
        assert peak < most - 64 * 256 * 4, where  # one block's, of three
        assert again == [calls], where  # what is gathered in backward stays


as_it_is = nn.Identity()


def layers(shard, **options):
    model = mlp(6, 7, 1, dtype=torch.float32)
    for part in (*model[::2], model):
        shard(part, **options)
    return model


def it_begins_with_the_first_ranks_values(rank, k):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    model[1].running_mean.normal_()
    expected, _ = everyones(model.eval()(randn(1, 2)).detach())
    fully_shard(model[:2])
    ShardedOptimizer(model[2].parameters(), SGD, lr=1.0)
    assert torch.equal(model(randn(1, 2)), expected)


def after_an_error_in_forward_the_unit_is_closed(rank, k):
    model = layers(fully_shard)
    expected = model(torch.ones(2, 6)).detach()
    assert attempt(model, torch.ones(2, 5))[0] == "RuntimeError"
    assert all(param.is_leaf for param in model.parameters())
    assert torch.equal(model(torch.ones(2, 6)), expected)


def what_changes_the_rows_is_seen(rank, k):
    for reshard in True, False:
        model = layers(fully_shard, reshard_after_forward=reshard)
        model(torch.ones(2, 6))
        for param in model.parameters():
            param.data.fill_(0)
        with torch.no_grad():  # nothing is kept
            assert not model(torch.ones(2, 6)).any()
        assert model[0]._unit.shards.wholes is None


def a_parameter_has_one_unit_and_a_unit_one_dtype(rank, k):
    model = fully_shard(nn.Linear(2, 2))
    tied = nn.Linear(2, 2)
    tied.weight = model.weight
    for part in model, tied:
        assert "is in a unit already" in attempt(fully_shard, part)[1]
    make = partial(ShardedOptimizer, optimizer_class=SGD)
    assert "has left only rows" in attempt(make, model.parameters())[1]
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    assert "one dtype" in attempt(fully_shard, mixed)[1]


def a_gradient_that_only_some_ranks_have_is_named(rank, k):
    model = fully_shard(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    model.forward = lambda X: model[rank](X)
    kind, text, *_ = attempt(model(torch.ones(1, 2)).sum().backward)
    assert kind == "MismatchError" and "gradients 0 to 3 without [2, 3]" in text
    parts = [fully_shard(nn.Linear(2, 2)) for _ in range(2)]
    kind, text, *_ = attempt(parts[rank], torch.ones(1, 2))
    assert kind == "MismatchError" and "for Linear, sharded in call" in text
    parts = [nn.Linear(2, 2) for _ in range(2)]
    optimizers = [ShardedOptimizer(x.parameters(), SGD, lr=1.0) for x in parts]
    for part in parts:
        part(torch.ones(1, 2)).sum().backward()
    assert attempt(optimizers[rank].step)[0] == "MismatchError"


def a_step_without_gradients_on_one_rank_is_noticed(rank, k):
    layer = nn.Linear(2, 2)
    optimizer = ShardedOptimizer(layer.parameters(), SGD, lr=1.0)
    if rank == 0:
        layer(torch.ones(1, 2)).sum().backward()
        assert attempt(optimizer.step)[0] == "MismatchError"
    else:
        optimizer.step()
        layer(torch.ones(1, 2)).sum().backward()
        kind, text, *_ = attempt(optimizer.step)
        assert kind == "MismatchError" and "in step 0" in text and "in step 1" in text


def rows_have_the_dtype_that_the_model_has_by_now(rank, k):
    found, zero1 = [], partial(ShardedOptimizer, optimizer_class=AdamW)
    for shard, make in (as_it_is, AdamW), (as_it_is, zero1), (fully_shard, AdamW):
        model = layers(shard)
        optimizer = make(model.parameters(), lr=0.1)
        model.double()(randn(3, 6)).square().mean().backward()
        optimizer.step()
        found.append(model(randn(3, 6)))
    close(found[1:], found[:1] * 2)


def only_what_is_trained_is_sent(rank, k):
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = ShardedOptimizer([*layer.parameters(), layer.bias], SGD, lr=1.0)
    before = layer.bias.detach().clone()
    layer(torch.ones(1, 4)).sum().backward()
    with count_bytes() as ledger:
        optimizer.step()
    assert ledger.sent(rank) == 2 * 8  # of the bias' gradient and numbers, a half
    assert torch.equal(layer.bias, before - 1 - 1)  # as torch's, given it twice
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    fully_shard(layer)
    with count_bytes() as ledger:
        layer(torch.ones(1, 4)).sum().backward()
    assert ledger.sent(rank) == 40 + 8  # both are gathered, and one is reduced


def gradients_are_clipped_by_the_norm_of_all(rank, k):
    X = randn(3, 6, seed=rank, dtype=torch.float32)
    plain, sharded, zero1 = layers(as_it_is), layers(fully_shard), layers(as_it_is)
    optimizer = ShardedOptimizer(zero1.parameters(), SGD, lr=0.1)
    for net in DistributedDataParallel(plain), sharded, zero1:
        (net(X) + net(2 * X)).square().mean().backward()
    optimizer.take_gradients()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    for shards in list(sharded.parameters()), list(optimizer.shards.values()):
        norm = clip_grad_norm_(shards, 0.01).float()
        rows = [rows_of(param.grad, shards[0].group) for param in plain.parameters()]
        found = [norm, *[shard.grad for shard in shards]]
        close(found, [expected, *rows], rtol=1e-5, atol=1e-9)
    assert "no shards" in attempt(clip_grad_norm_, plain.parameters(), 1.0)[1]
    alone = [dist.new_group([each]) for each in range(k)][rank]
    groups = {plain[0].bias: None, plain[2].bias: alone}
    shards = ShardedOptimizer(groups, SGD, group=groups.get, lr=0.1).shards.values()
    assert "several groups" in attempt(clip_grad_norm_, shards, 1.0)[1]


def what_backward_needs_is_watched_and_freed(rank, k):
    model, X = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Tanh())), torch.ones(1, 2)
    output = model(X)
    freed = weakref.ref(output.untyped_storage())
    del output  # no backward pass
    assert freed() is None
    output = model(X).mul_(2)
    assert "changed in place" in attempt(output.sum().backward)[1]


def zero1_works_with_scaler_scheduler_and_more_groups(rank, k):
    found = []
    for sharded in True, False:
        model = layers(as_it_is)
        net = model if sharded else DistributedDataParallel(model)
        make = partial(ShardedOptimizer, optimizer_class=SGD) if sharded else SGD
        optimizer = make(model[0].parameters(), lr=0.1, momentum=0.9)
        optimizer.add_param_group({"params": model[2].weight, "lr": 0.2})
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        scaler = GradScaler(group=ranks.group_of(None), init_scale=4.0)
        for scale in 1.0, float("inf") if rank else 1.0, 1.0:
            optimizer.zero_grad()
            loss = net(randn(3, 6, seed=rank, dtype=torch.float32)).square().mean()
            scaler.scale(loss * scale).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        net(torch.ones(1, 6)).sum().backward()  # a batch that is left out
        optimizer.zero_grad()
        optimizer.step()
        found.append([*model.parameters(), torch.tensor(scaler.get_scale())])
    close(*found, rtol=0, atol=0)


test_on_two = on_ranks(
    2,
    [
        it_begins_with_the_first_ranks_values,
        after_an_error_in_forward_the_unit_is_closed,
        what_changes_the_rows_is_seen,
        a_parameter_has_one_unit_and_a_unit_one_dtype,
        a_gradient_that_only_some_ranks_have_is_named,
        a_step_without_gradients_on_one_rank_is_noticed,
        rows_have_the_dtype_that_the_model_has_by_now,
        only_what_is_trained_is_sent,
        gradients_are_clipped_by_the_norm_of_all,
        what_backward_needs_is_watched_and_freed,
        zero1_works_with_scaler_scheduler_and_more_groups,
    ],
)


def save_load_and_train(rank, k, way, state, steps):
    """Load what others have saved, make some steps, and save."""
    model, optimizer = way(Model(), partial(NAdam, lr=0.01))
    if state:
        load_full_state_dict(model, optimizer, state)
        kept = [x for of_one in optimizer.state.values() for x in of_one.values()]
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in kept)
    for _ in range(steps):
        optimizer.zero_grad()
        tokens = TOKENS[rank::k]
        F.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
    states = []
    peak = peak_memory(lambda: states.append(full_state_dict(model, optimizer)), "cpu")
    assert rank == 0 or peak < 2000, peak  # one tensor at a time
    return states[0]


@pytest.mark.parametrize("way", [as_zero1, as_zero3])
def test_a_state_is_loaded_by_any_number_of_ranks_or_one(way):
    run = partial(launch, save_load_and_train, timeout=LIMIT)
    state, nothing = run(2, way, None, 2)
    assert nothing == {}
    for k in 1, 3, 4:
        again = run(k, way, state, 0)[0]
        close(again, state, rtol=0, atol=0, check_dtype=False)  # torch casts products
    expected = run(2, way, state, 1)[0]["model"]
    model = Model()
    optimizer = NAdam(groups_of(model), lr=0.01)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    F.cross_entropy(model(TOKENS), TOKENS).backward()
    optimizer.step()
    close(model.state_dict(), expected)


@pytest.mark.gpu
@in_ranks(2)
def test_two_ranks_on_a_gpu_train_as_on_cpus(rank, k):
    for way in WAYS:
        run = partial(trained, way, partial(AdamW, lr=0.01), rank, k, torch.float64)
        on_gpu, on_cpu = run(device="cuda")[0], run()[0]
        close(on_gpu.cpu(), on_cpu)
