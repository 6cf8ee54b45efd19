"""Every epoch is dealt out once, in torch's order; a rank can begin in the middle."""

import inspect
from functools import partial

import pytest
import torch
from helpers import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from d2lpar.distributed.sampler import DistributedSampler

SIZES, RANKS = st.integers(0, 60), st.integers(1, 9)
EPOCHS, SEEDS = st.integers(-2, 5), st.integers(0, 5)


@given(
    n=SIZES,
    k=RANKS,
    epoch=EPOCHS,
    seed=SEEDS,
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_sequences_and_attributes_are_torchs(n, k, epoch, seed, shuffle, drop_last):
    before = torch.get_rng_state()
    for rank in range(k):
        ours, theirs = (
            kind(range(n), k, rank, shuffle, seed, drop_last)
            for kind in (DistributedSampler, TorchSampler)
        )
        for sampler in (ours, theirs):
            sampler.set_epoch(epoch)
        assert list(ours) == list(theirs) and len(ours) == len(theirs)
        for name, value in vars(theirs).items():
            assert getattr(ours, name) == value, name
    # no number of the program's is used up
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_are_torchs_and_then_ours():
    ours, theirs = (
        [(p.name, p.default) for p in inspect.signature(kind).parameters.values()]
        for kind in (DistributedSampler, TorchSampler)
    )
    assert ours == [*theirs, ("pad", True)]


@given(n=SIZES, k=RANKS, epoch=EPOCHS, seed=SEEDS, shuffle=st.booleans())
def test_without_padding_each_example_is_dealt_out_once_in_one_order(
    n, k, epoch, seed, shuffle
):
    generator = torch.Generator().manual_seed(seed + epoch)
    order = (
        torch.randperm(n, generator=generator).tolist() if shuffle else list(range(n))
    )
    for rank in range(k):
        sampler = DistributedSampler(range(n), k, rank, shuffle, seed, pad=False)
        sampler.set_epoch(epoch)
        assert list(sampler) == order[rank::k] and len(sampler) == len(order[rank::k])


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = []
    for epoch, seed in [(0, 0), (1, 0), (0, 7)]:
        sampler = DistributedSampler(range(100), 2, 0, seed=seed)
        sampler.set_epoch(epoch)
        orders.append(tuple(sampler))
        assert tuple(sampler) == orders[-1]  # set_epoch was forgotten
    assert len(set(orders)) == 3


@given(n=SIZES, k=RANKS, pad=st.booleans(), data=st.data())
def test_a_rank_goes_on_where_it_was(n, k, pad, data):
    rank = data.draw(st.integers(0, k - 1))
    sampler = DistributedSampler(range(n), k, rank, pad=pad)
    sampler.set_epoch(3)
    whole, ahead = list(sampler), iter(sampler)
    start = data.draw(st.integers(0, len(whole)))
    sampler.set_epoch(3, start)
    assert list(sampler) == whole[start:] and len(sampler) == len(whole) - start
    assert list(ahead) == whole  # as a DataLoader with workers reads ahead
    sampler.set_epoch(4)
    assert len(sampler) == len(whole)  # the next epoch is a whole one


@pytest.mark.parametrize("batched", [False, True], ids=["sampler", "batch_sampler"])
def test_a_data_loader_reads_the_ranks_own_examples_and_resumes(batched):
    X = 10 * torch.arange(23)
    sampler = DistributedSampler(X, num_replicas=2, rank=1, pad=False)
    how = (
        {"batch_sampler": BatchSampler(sampler, 4, drop_last=False)} if batched else {}
    )
    batches = DataLoader(X, **how or {"batch_size": 4, "sampler": sampler})
    seen = [batch.tolist() for batch in batches]
    assert seen == [part.tolist() for part in X[list(sampler)].split(4)]
    sampler.set_epoch(0, start=2 * 4)
    assert [batch.tolist() for batch in batches] == seen[2:] and len(batches) == 1


def asks_the_process_group(rank, world_size):
    told = [
        DistributedSampler(range(11), k, r)
        for k, r in [(None, None), (4, None), (4, 3)]
    ]
    assert [(s.num_replicas, s.rank) for s in told] == [(2, rank), (4, rank), (4, 3)]


test_unless_told = on_ranks(2, [asks_the_process_group])
make = partial(DistributedSampler, range(7), 2, 1)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: DistributedSampler(range(4)), ValueError, "init_process_group"),
        (
            lambda: DistributedSampler(range(4), 2, 2),
            ValueError,
            "num_replicas - 1 = 1, not 2",
        ),
        (
            lambda: DistributedSampler(range(4), 2, -1),
            ValueError,
            "num_replicas - 1 = 1, not -1",
        ),
        (lambda: DistributedSampler(range(4), 2.0, 0), TypeError, "integer"),
        (lambda: make(drop_last=True, pad=False), ValueError, r"drop_last.*pad=False"),
        (lambda: make().set_epoch(1.0), TypeError, "integer"),
        (
            lambda: make().set_epoch(1, 5),
            ValueError,
            "start must be from 0 to 4, not 5",
        ),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error, match=words):
        call()
