"""Attention to a sequence that is cut over ranks is that of one process."""

from functools import partial
from itertools import product

import pytest
import torch
from helpers import attempt, close, groups_of, in_ranks, on_ranks, randn
from torch.nn import functional as F

from d2lpar import autocast, context_parallel, count_bytes, own_tokens, ranks
from d2lpar import ring_attention as ring
from d2lpar import ulysses_attention as ulysses
from d2lpar.context_parallel import meetings, zigzag
from d2lpar.memory import peak_memory

WAYS = ring, ulysses


def contiguous(length, k):
    return torch.arange(length).view(k, -1)


def shuffled(length, k):
    return randn(length).argsort().view(k, -1)  # the same everywhere


def texts(length=24, heads=4, width=3):
    """Queries, keys and values of two texts, and the gradient of what they become."""
    return [randn(2, heads, length, width, seed=seed) for seed in range(4)]


def results(attend, q, k, v, grad, *args):
    """What attention makes of tensors, and their gradients."""
    inputs = [X.detach().requires_grad_() for X in (q, k, v)]
    out = attend(*inputs, *args)
    out.backward(grad)
    return [out.detach(), *(X.grad for X in inputs)]


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def values_and_gradients_are_torchs(rank, world_size):
    whole, right = texts(), results(sdpa, *texts())
    few = texts(4)[:3]  # a token of each rank
    found = ring(*(own_tokens(X, 2, None, contiguous) for X in few), None, contiguous)
    close(found, own_tokens(sdpa(*few), 2, None, contiguous))
    low = torch.full_like(whole[0], 100), torch.full_like(whole[0], -100), whole[2]
    close(ring(*(own_tokens(X, 2) for X in low)), own_tokens(sdpa(*low), 2))
    for group, order in product(groups_of(rank), (contiguous, zigzag, shuffled)):
        own = [own_tokens(X, 2, group, order) for X in whole]
        for way, tile in ((ring, 2), (ring, 5), (ring, 128), (ulysses, 128)):
            context_parallel.TILE = tile
            found = results(way, *own, group, order)
            close(found, [own_tokens(X, 2, group, order) for X in right])
        close(own, [own_tokens(X, 2, group, order) for X in whole])


def sixteen_bits_are_as_exact_as_in_torch(rank, world_size):
    """A sum of many tiles in 16 bits would be ten times less exact."""
    context_parallel.TILE = 2
    for scale in (1, 3):
        whole = [scale * randn(2, 4, 128, 3, seed=i).bfloat16() for i in range(4)]
        exact = results(sdpa, *(X.float() for X in whole))
        with autocast("cpu"), torch.autocast("cpu"):
            ours = results(ring, *(own_tokens(X, 2) for X in whole))
        for found, theirs, right in zip(ours, results(sdpa, *whole), exact):
            theirs, right = own_tokens(theirs, 2), own_tokens(right, 2)
            assert found.dtype == torch.bfloat16
            assert (found - right).abs().mean() < 1.5 * (theirs - right).abs().mean()


def what_does_not_divide_is_named_and_nothing_is_lost(rank, world_size):
    def refused(error, words, call, *args):
        kind, text, *_ = attempt(call, *args)
        assert kind == error and words in text, (kind, text)

    cut = "tokens cannot be cut into 8 chunks"
    refused("ValueError", f"60 {cut}", own_tokens, randn(2, 60))
    words = "6 heads cannot be divided among 4 ranks"
    refused("ValueError", words, ulysses, *texts(8, heads=6)[:3])
    q, k = texts(4)[0], texts(6)[0]
    refused("ValueError", "[2, 4, 4, 3], [2, 4, 6, 3]", ring, q, k, k)
    refused("ValueError", "must have one shape", ring, q, q, k)
    for way in WAYS:
        refused("ValueError", f"12 {cut}", way, *texts(3)[:3])
        refused("MismatchError", "rank 0, call", way, *texts(4 if rank else 6)[:3])
    q = texts(2)[0].requires_grad_()
    loss = ring(q, q, q).square().sum()
    backward = partial(torch.autograd.grad, loss, q, create_graph=True)
    refused("RuntimeError", "no second derivative", backward)


test_four_ranks = on_ranks(
    4,
    [
        values_and_gradients_are_torchs,
        sixteen_bits_are_as_exact_as_in_torch,
        what_does_not_divide_is_named_and_nothing_is_lost,
    ],
)


@in_ranks(4)
def test_bytes_are_those_of_the_formulas(rank, world_size):
    for group in groups_of(rank):
        k, own = ranks.group_of(group).size, [own_tokens(X, 2, group) for X in texts()]
        for way, sent in ((ring, 6 * k - 4), (ulysses, 8 * (k - 1) / k)):
            with count_bytes() as ledger:
                results(way, *own, group)
            assert ledger.sent(rank) == (k > 1) * sent * own[0].nbytes
        half = [X.bfloat16() for X in own]  # whose gradients travel in 32 bits
        with count_bytes() as ledger:
            results(ring, *half, group)
        assert ledger.sent(rank) == (k > 1) * (8 * k - 4) * half[0].nbytes


@in_ranks(2)
def test_memory_grows_with_the_length_not_its_square(rank, k):
    def peak(length):
        own = [own_tokens(X, 2) for X in texts(length)]
        return peak_memory(lambda: results(ring, *own), "cpu")

    context_parallel.TILE = 32
    assert peak(512) < 2.1 * peak(256)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_the_zigzag_gives_all_ranks_the_same_work(k):
    for length, tiles in ((1024, 4), (602, 4), (10, 2)):  # of a rank
        work = {}
        for order in (zigzag, contiguous):
            places = order(k * length, k)
            pairs = [[len([*meetings(own, here)]) for here in places] for own in places]
            work[order] = torch.tensor(pairs).sum(1).tolist()
        one = tiles * (tiles + 1) // 2
        assert work[contiguous] == [one + rank * tiles**2 for rank in range(k)]
        assert work[zigzag] == [sum(work[contiguous]) / k] * k


@pytest.mark.gpu
@in_ranks(2)
def test_on_a_gpu_it_is_the_same(rank, k):
    right = results(sdpa, *texts())
    for way in WAYS:
        found = results(way, *(own_tokens(X.cuda(), 2) for X in texts()))
        close([X.cpu() for X in found], [own_tokens(X, 2) for X in right])
