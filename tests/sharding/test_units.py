"""What a sharded step sends, and its memory: what equal results cannot show."""

from functools import partial

import pytest
import torch
from helpers import in_ranks, on_ranks
from torch import nn

from d2lpar import count_bytes, fully_shard
from d2lpar.memory import peak_memory

WIDTH, LAYERS = 256, 8
UNIT = WIDTH * WIDTH + WIDTH  # numbers in a unit
LAST = WIDTH * 10 + 10


def net(prefetch=False, reshards=True, **options):
    torch.manual_seed(0)
    layers = [
        part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())
    ]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, reshard_after_forward=reshards, **options)
    return fully_shard(model, prefetch=prefetch, **options)


X, Y = torch.randn(32, WIDTH), torch.randint(10, (32,))


def step(model, optimizer=None, X=X):
    nn.functional.cross_entropy(model(X).float(), Y).backward()
    if optimizer:
        optimizer.step()
        optimizer.zero_grad()


def peak(optimizer_class=torch.optim.Adam, **options):
    """The most bytes that training takes, per parameter of the whole model."""

    def train():
        model = net(**options)
        optimizer = optimizer_class(model.parameters(), lr=0.001)
        for _ in range(3):
            step(model, optimizer)

    return peak_memory(train, "cpu") / (LAYERS * UNIT + LAST)


# 16/k bytes for a parameter, its gradient and Adam's state. Beside that at most two
# units are alive: the whole parameters and their gradients, or the gradients side by
# side and in one line; and Adam's own temporaries. With prefetch, one unit more.
ONE_UNIT = 4 * UNIT / (LAYERS * UNIT + LAST)


@pytest.mark.parametrize("k", [2, 4])
@in_ranks()
def test_the_peak_is_the_kth_part_of_all_and_two_units(rank, k):
    lean = peak()
    assert 16 / k < lean < 16 / k + 2.3 * ONE_UNIT
    assert lean < {2: 13.2, 4: 9.4}[k]
    assert peak(prefetch=True) < lean + ONE_UNIT
    # ZeRO-2: whole parameters once, from forward to backward
    kept = peak(reshards=False)
    assert 16 / k - 4 / k + 4 - ONE_UNIT < kept + 4 / k < 16 / k + 4 + 3 * ONE_UNIT
    assert kept > lean + 4 - 4 / k - 2 * ONE_UNIT


@in_ranks(2)
def test_nothing_but_shards_is_left_between_the_passes(rank, k):
    model = net()
    step(model)
    assert len(list(model.parameters())) == 2 * (LAYERS + 1)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    for unit in model._units():
        grads = [shard.grad for shard in unit.shards if shard.grad.numel()]
        held = {
            g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in grads
        }
        assert sum(held.values()) == sum(grad.nbytes for grad in grads)

    def forward():
        kept.append(model(X))

    kept = []  # one unit at a time is whole; activations stay
    activations = (2 * LAYERS - LAYERS) * X.nbytes + 2 * X.nbytes
    assert peak_memory(forward, "cpu") < 4 * UNIT * 1.51 + 2 * activations
    assert [unit.whole for unit in model._units()] == [None] * (LAYERS + 2)


@pytest.mark.parametrize("k", [2, 3, 4])
@in_ranks()
def test_bytes_are_what_the_formulas_say(rank, k):
    """In DDP steps: ZeRO-2 sends 1, ZeRO-3 1.5 without the first layer's gather."""
    n = LAYERS * UNIT + LAST
    for options, gathers in (
        ({}, 2),
        ({"reshards": False}, 1),
        ({"prefetch": True}, 2),
    ):
        model = net(**options)
        for _ in range(3):
            with count_bytes() as ledger:
                step(model)
        # reduced, gathered, gathered again
        numbers = n + n + (gathers - 1) * (n - UNIT)
        everyones = torch.tensor([float(ledger.sent(rank))])
        torch.distributed.all_reduce(everyones)
        assert everyones.item() == 4 * (k - 1) * numbers, options
    with torch.no_grad(), count_bytes() as ledger:
        model(X)
    everyones = torch.tensor([float(ledger.sent(rank))])
    torch.distributed.all_reduce(everyones)
    assert everyones.item() == 4 * (k - 1) * n
    model = net()
    with count_bytes() as ledger:  # the gradient of X needs the first layer's weight
        step(model, X=X.clone().requires_grad_())
    everyones = torch.tensor([float(ledger.sent(rank))])
    torch.distributed.all_reduce(everyones)
    assert everyones.item() == 4 * (k - 1) * 3 * n


def sixteen_bits_halve_what_is_gathered_and_not_what_is_reduced(rank, k):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    n, counts = LAYERS * UNIT + LAST, []
    for policy in (None, MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        model = net(mp_policy=policy)
        with count_bytes() as ledger:
            step(model)
        counts.append(ledger.sent(rank))
    assert counts == [2 * (n + n + n - UNIT), 2 * n + n + n - UNIT]
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}


def frozen_units_are_freed_in_backward(rank, k):
    """Nothing is reduced in them, so nothing but the next unit can free them."""

    def pass_through():
        model[0].bias.requires_grad_(True)
        step(model)
        wholes.append([unit.whole is None for unit in model._units()])

    wholes, model = [], net().requires_grad_(False)
    pass_through()
    assert peak_memory(pass_through, "cpu") < 4 * (3.2 * UNIT) + 20 * X.nbytes
    assert all(map(all, wholes))


def a_broken_rule_of_the_unit_is_seen_by_its_versions(rank, k):
    """A whole that was kept while its shards changed is not used."""
    model = net(reshards=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model)
    before = model(X)  # never goes backward, so its units stay whole
    assert model[0]._unit.whole is not None
    optimizer.step()
    assert not torch.allclose(model(X), before)


test_on_two = on_ranks(
    2,
    [
        sixteen_bits_halve_what_is_gathered_and_not_what_is_reduced,
        frozen_units_are_freed_in_backward,
        a_broken_rule_of_the_unit_is_seen_by_its_versions,
    ],
)


@in_ranks(3)
def test_empty_shards_train_with_every_optimizer(rank, k):
    """A unit of one number: two ranks have nothing."""
    for optimizer_class in (
        torch.optim.SGD,
        torch.optim.Adam,
        partial(torch.optim.AdamW, foreach=True),
        partial(torch.optim.AdamW, fused=True),
    ):
        model = fully_shard(nn.Linear(1, 1, bias=False))
        model.unshard()
        start = model.weight.item()
        model.reshard()
        optimizer = optimizer_class(model.parameters(), lr=0.25)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        model.unshard()
        assert abs(model.weight.item() - start) > 0.2
