import inspect

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from d2lpar import launch
from d2lpar.data_parallel.sampler import DistributedSampler

SIZES = st.integers(0, 60)
RANKS = st.integers(1, 9)
EPOCHS = st.integers(0, 5)
SEEDS = st.integers(0, 5)


def deal(n, k, epoch=0, pad=False, **options):
    """The indices of each of k ranks."""
    samplers = [DistributedSampler(range(n), k, rank, pad=pad, **options) for rank in range(k)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    hands = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(hand) for hand in hands]
    return hands


def permutation(n, seed):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


# A partition


@given(n=SIZES, k=RANKS, epoch=EPOCHS, shuffle=st.booleans())
def test_every_epoch_deals_out_each_example_once(n, k, epoch, shuffle):
    hands = deal(n, k, epoch, shuffle=shuffle)
    assert sorted(index for hand in hands for index in hand) == list(range(n))
    lengths = [len(hand) for hand in hands]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


def test_10_001_examples_on_4_ranks_count_10_001():
    hands = deal(10_001, 4)
    assert [len(hand) for hand in hands] == [2501, 2500, 2500, 2500]
    assert len(set().union(*hands)) == 10_001


@given(n=SIZES, k=RANKS, epoch=EPOCHS, seed=SEEDS)
def test_the_ranks_share_one_order_and_take_turns_in_it(n, k, epoch, seed):
    order = permutation(n, seed + epoch)
    hands = deal(n, k, epoch, seed=seed)
    assert [hands[place % k][place // k] for place in range(n)] == order


@given(n=SIZES, k=RANKS, b=st.integers(1, 8))
def test_a_step_of_all_ranks_is_the_batch_of_one_process(n, k, b):
    [alone] = deal(n, 1)
    hands = deal(n, k)
    for step in range(-(-n // (k * b))):
        together = [index for hand in hands for index in hand[step * b : (step + 1) * b]]
        assert sorted(together) == sorted(alone[step * k * b : (step + 1) * k * b])


# Epochs and seeds


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [deal(100, 2, epoch, seed=seed)[0] for epoch, seed in [(0, 0), (1, 0), (0, 7)]]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_a_forgotten_set_epoch_gives_the_same_order_again():
    sampler = DistributedSampler(range(100), 2, 0)
    assert list(sampler) == list(sampler) == deal(100, 2, epoch=0)[0]


def test_without_shuffle_the_order_is_that_of_the_data_set():
    assert deal(7, 3, epoch=4, shuffle=False) == [[0, 3, 6], [1, 4], [2, 5]]


# As torch's


@given(
    n=SIZES,
    k=RANKS,
    epoch=st.integers(-2, 5),
    seed=SEEDS,
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_sequences_and_attributes_are_torchs(n, k, epoch, seed, shuffle, drop_last):
    for rank in range(k):
        ours, theirs = (
            kind(range(n), k, rank, shuffle, seed, drop_last)
            for kind in (DistributedSampler, TorchSampler)
        )
        for sampler in (ours, theirs):
            sampler.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)
        for name, value in vars(theirs).items():
            assert getattr(ours, name) == value, name


def test_parameters_are_torchs_and_then_ours():
    ours, theirs = (
        list(inspect.signature(kind).parameters.values())
        for kind in (DistributedSampler, TorchSampler)
    )
    shared = ours[: len(theirs)]
    assert [(p.name, p.default) for p in shared] == [(p.name, p.default) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_numpys_whole_numbers_are_taken():
    five = np.int64(5)
    sampler = DistributedSampler(range(23), num_replicas=five, rank=np.int32(4), seed=five)
    sampler.set_epoch(np.int64(2), start=np.int64(1))
    assert list(sampler) == deal(23, 5, epoch=2, seed=5, pad=True)[4][1:]


def test_no_random_number_of_the_program_is_used_up():
    before = torch.get_rng_state()
    deal(100, 2)
    assert torch.equal(torch.get_rng_state(), before)


# Starting in the middle


@given(n=SIZES, k=RANKS, data=st.data())
def test_a_start_in_the_middle_goes_on_where_the_epoch_stood(n, k, data):
    rank = data.draw(st.integers(0, k - 1))
    sampler = DistributedSampler(range(n), k, rank, pad=data.draw(st.booleans()))
    sampler.set_epoch(3)
    whole = list(sampler)
    start = data.draw(st.integers(0, len(whole)))
    sampler.set_epoch(3, start=start)
    assert len(sampler) == len(whole) - start
    assert list(sampler) == list(sampler) == whole[start:]
    sampler.set_epoch(4)
    assert len(sampler) == len(whole)  # the next epoch is a whole one


# In a DataLoader

X = 10 * torch.arange(23)


@pytest.mark.parametrize("batched", [False, True], ids=["sampler", "batch_sampler"])
def test_a_data_loader_reads_the_ranks_own_examples_and_resumes(batched):
    sampler = DistributedSampler(X, num_replicas=2, rank=1, pad=False)
    how = {"batch_sampler": BatchSampler(sampler, 4, drop_last=False)} if batched else {}
    batches = DataLoader(X, **how or {"batch_size": 4, "sampler": sampler})
    sampler.set_epoch(1)
    seen = [batch.tolist() for batch in batches]
    assert [len(batch) for batch in seen] == [4, 4, 3] and len(batches) == 3
    assert [x for batch in seen for x in batch] == X[deal(23, 2, epoch=1)[1]].tolist()
    sampler.set_epoch(1, start=2 * 4)
    assert [batch.tolist() for batch in batches] == seen[2:] and len(batches) == 1


def test_reading_ahead_changes_nothing():
    sampler = DistributedSampler(X, num_replicas=2, rank=1, pad=False)
    whole = list(sampler)
    ahead = iter(sampler)
    assert [next(ahead) for _ in range(9)] == whole[:9]  # as a DataLoader with workers does
    sampler.set_epoch(0, start=4)
    assert list(sampler) == whole[4:]
    assert list(ahead) == whole[9:]


# The process group


def test_the_process_group_says_how_many_and_which_unless_told():
    def own(rank, world_size):
        told = [
            DistributedSampler(range(11), k, r, pad=False)
            for k, r in [(None, None), (4, None), (4, 3)]
        ]
        return [(sampler.num_replicas, sampler.rank) for sampler in told], list(told[0])

    for rank, (found, hand) in enumerate(launch(own, 2)):
        assert found == [(2, rank), (4, rank), (4, 3)]
        assert hand == deal(11, 2)[rank]


@pytest.mark.parametrize("known", [{}, {"num_replicas": 2}, {"rank": 0}], ids=str)
def test_without_a_process_group_both_must_be_given(known):
    with pytest.raises(RuntimeError, match="pass both, or call"):
        DistributedSampler(range(4), **known)


# Errors


@pytest.mark.parametrize("k", [0, -1, 2.0, "2"])
def test_a_wrong_number_of_ranks_is_an_error(k):
    with pytest.raises(ValueError, match=f"num_replicas must be .* from 1 to inf, not {k!r}"):
        DistributedSampler(range(4), k, 0)


@pytest.mark.parametrize("rank", [-1, 2, 0.0, "0"])
def test_a_wrong_rank_is_an_error(rank):
    with pytest.raises(ValueError, match=f"rank must be .* from 0 to 1, not {rank!r}"):
        DistributedSampler(range(4), 2, rank)


@pytest.mark.parametrize("seed", [None, 0.5, "0"])
def test_a_wrong_seed_is_an_error(seed):
    with pytest.raises(ValueError, match=f"seed must be a whole number .*, not {seed!r}"):
        DistributedSampler(range(4), 2, 0, seed=seed)


@pytest.mark.parametrize(
    ("epoch", "start", "message"),
    [
        (1.0, 0, "epoch must be .* not 1.0"),
        (None, 0, "epoch must be .* not None"),
        (1, -1, "start must be .* from 0 to 4, not -1"),
        (1, 5, "start must be .* from 0 to 4, not 5"),
        (1, 2.0, "start must be .* not 2.0"),
    ],
)
def test_a_wrong_epoch_or_start_is_an_error_and_changes_nothing(epoch, start, message):
    sampler = DistributedSampler(range(7), 2, 1)
    sampler.set_epoch(2, start=1)
    before = list(sampler)
    with pytest.raises(ValueError, match=message):
        sampler.set_epoch(epoch, start)
    assert list(sampler) == before


def test_to_keep_all_and_to_drop_some_is_an_error():
    with pytest.raises(ValueError, match=r"drop_last.*pad=False"):
        DistributedSampler(range(4), 2, 0, drop_last=True, pad=False)


class Stream(IterableDataset):
    def __iter__(self):
        yield 0


@pytest.mark.parametrize("dataset", [Stream(), 10], ids=["Stream", "int"])
def test_a_data_set_without_a_length_is_an_error(dataset):
    with pytest.raises(TypeError, match=f"must have a length.*{type(dataset).__name__} has none"):
        DistributedSampler(dataset, 2, 0)
