"""Every epoch is dealt out in torch's order; without padding, each example once."""

import inspect

import pytest
import torch
from helpers import in_ranks
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from d2lpar import DistributedSampler

SIZES, RANKS = st.integers(0, 60), st.integers(1, 9)
EPOCHS, SEEDS, EITHER = st.integers(-2, 5), st.integers(0, 5), st.booleans()


@given(SIZES, RANKS, EPOCHS, SEEDS, EITHER, EITHER)
@example(2, 9, 0, 0, True, False)  # the order begins again, and again
def test_the_sequences_are_torchs(n, k, epoch, seed, shuffle, drop_last):
    before = torch.get_rng_state()
    for rank in range(k):
        args = range(n), k, rank, shuffle, seed, drop_last
        ours, theirs = DistributedSampler(*args), TorchSampler(*args)
        assert list(ours) == list(theirs)  # of epoch 0
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert list(ours) == list(ours) == list(theirs) and len(ours) == len(theirs)
    # no number of the program's own is used up
    assert torch.equal(torch.get_rng_state(), before)


@given(SIZES, RANKS, EPOCHS, SEEDS, EITHER)
def test_without_padding_each_example_is_dealt_out_once(n, k, epoch, seed, shuffle):
    alone = TorchSampler(range(n), 1, 0, shuffle, seed)
    alone.set_epoch(epoch)
    for rank in range(k):
        sampler = DistributedSampler(range(n), k, rank, shuffle, seed, pad=False)
        sampler.set_epoch(epoch)
        own = list(alone)[rank::k]
        assert list(sampler) == own and len(sampler) == len(own)


def test_the_parameters_are_torchs_and_then_pad_which_has_a_name():
    ours, theirs = (
        [*inspect.signature(kind).parameters.values()]
        for kind in (DistributedSampler, TorchSampler)
    )
    found = [(param.name, param.default, param.kind) for param in ours]
    expected = [(param.name, param.default, param.kind) for param in theirs]
    assert found == [*expected, ("pad", True, inspect.Parameter.KEYWORD_ONLY)]


@in_ranks(2)
def test_unless_told_it_asks_the_process_group(rank, k):
    told = [DistributedSampler(range(11), *args) for args in ((), (4,), (4, 3))]
    assert [(s.num_replicas, s.rank) for s in told] == [(2, rank), (4, rank), (4, 3)]
    assert list(told[0]) == list(TorchSampler(range(11)))


def test_what_does_not_fit_is_an_error():
    for rank in (2, -1):
        with pytest.raises(ValueError, match=f"rank {rank} is none of 0 to 1"):
            DistributedSampler(range(4), 2, rank)
    with pytest.raises(ValueError, match=r"drop_last .* pad=False"):
        DistributedSampler(range(4), 2, 1, drop_last=True, pad=False)
    with pytest.raises(ValueError, match="init_process_group"):
        DistributedSampler(range(4))
