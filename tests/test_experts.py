"""Experts on several ranks do what they do on one device."""

from copy import deepcopy
from functools import partial
from math import ceil

import pytest
import torch
import torch.distributed as dist
from helpers import close, everyones, grads, groups_of, in_ranks, on_ranks, randn
from torch.nn import functional as F

from d2lpar import count_bytes, fully_shard, ranks
from d2lpar.experts import MixtureOfExperts, ParallelExperts, balance_loss


def layer(top_k=1, factor=None):
    torch.manual_seed(0)
    return MixtureOfExperts(6, 8, top_k, factor).double()


def spread(whole, group=None):
    part = deepcopy(whole)
    part.experts = ParallelExperts(part.experts, group)
    return part


def tokens_of(*numbers):
    return [randn(n, 6, seed=10 + i) for i, n in enumerate(numbers)]


def dense(whole, tokens):
    """All experts take all tokens. Return what counts, and the loss for balance."""
    probs = (tokens @ whole.router.weight.T).softmax(-1)
    weights, chosen = probs.topk(whole.top_k)
    total = weights.sum(-1, keepdim=True) if whole.top_k > 1 else 1
    is_chosen = F.one_hot(chosen, 8)  # (tokens, top_k, experts)
    place = is_chosen.flatten(0, 1).cumsum(0).view_as(is_chosen)  # 1, 2, … in a line
    limit = ceil((whole.capacity_factor or 1e9) * chosen.numel() / 8)
    gate = ((place <= limit) * is_chosen * (weights / total)[..., None]).sum(1)
    parts = [gate[:, [i]] * expert(tokens) for i, expert in enumerate(whole.experts)]
    return sum(parts), 8 * (is_chosen.double().mean((0, 1)) * probs.mean(0)).sum()


def results(call, X, *modules):
    """What a call makes of X, then the gradients: of X, and of each of the modules."""
    X = X.clone().requires_grad_()
    for module in modules:
        module.zero_grad()
    out = call(X)
    (out * randn(*out.shape, seed=1)).sum().backward()
    return out.detach(), X.grad, *map(grads, modules)


def slope(call, X):
    """The gradient of a loss, which has a gradient, too."""
    return torch.autograd.grad(call(X).square().sum(), X, create_graph=True)[0]


def mean(of_ranks):
    return [torch.stack(grads).mean(0) for grads in zip(*of_ranks, strict=True)]


@pytest.mark.parametrize("factor", [None, 0.3, 1, 1.5])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_a_layer_lets_each_token_pass_its_experts(top_k, factor):
    whole, X = layer(top_k, factor), randn(20, 6)
    right = results(lambda X: dense(whole, X)[0], X, whole)
    close(results(whole, X, whole), right)
    close(balance_loss(whole), dense(whole, X)[1])
    close(whole(X.view(2, 2, 5, 6)), right[0].view(2, 2, 5, 6))
    with pytest.raises(ValueError, match="capacity_factor is 0: it must be > 0"):
        layer(top_k, 0)


def values_and_gradients_are_those_of_one_device(rank, world_size):
    for group in groups_of(rank):
        k, me = ranks.group_of(group).size, ranks.group_of(group).me
        for top_k, numbers in ((1, (5, 7, 5, 9)), (2, (6, 0, 3, 1)), (8, (4, 4, 4, 4))):
            whole, X = layer(top_k), tokens_of(*numbers[:k])
            part, own = spread(whole, group), whole.experts[8 // k * me :][: 8 // k]
            for way in (type(whole).__call__, slope):
                call = partial(way, whole)
                rights = [results(call, x, whole.router, own) for x in X]
                found = results(partial(way, part), X[me], part.router, part.experts)
                close(found[:3], rights[me][:3])
                close(found[3], mean(right[3] for right in rights))


def replicas_are_averaged_by_fully_shard(rank, world_size):
    """Pairs share the experts: all gradients are those of the mean of four losses."""
    cut = dist.new_subgroups_by_enumeration
    pair, replicas = cut([[0, 1], [2, 3]])[0], cut([[0, 2], [1, 3]])[0]
    whole, X = layer(2), tokens_of(5, 6, 7, 8)
    part, own = spread(whole, pair), whole.experts[rank % 2 * 4 :][:4]
    fully_shard(part.experts, group=replicas)
    fully_shard(part)
    rights = [results(whole, x, whole.router, own)[2:] for x in X]
    found = results(part, X[rank], part.router, part.experts)[2:]
    for rows_of, right, group in zip(found, map(mean, zip(*rights)), (None, replicas)):
        for rows, of_all in zip(rows_of, right, strict=True):
            close(ranks.all_gather(rows, group).view_as(of_all), of_all)


def the_loss_for_balance_is_that_of_all_tokens(rank, world_size):
    whole, X = layer(2), tokens_of(8, 8, 8, 8)
    for group in groups_of(rank):
        whole(X[rank])
        of_group = torch.cat([X[i] for i in ranks.group_of(group).ranks])
        losses = balance_loss(whole, group), dense(whole, of_group)[1]
        pairs = [[x, *torch.autograd.grad(x, whole.router.weight)] for x in losses]
        for own, of_all in zip(*pairs):
            close(mean([x] for x in everyones(own.detach(), group)), [of_all.detach()])


def autocast_is_that_of_one_device(rank, world_size):
    whole, X = layer(2).float(), randn(9, 6).float()
    with torch.autocast("cpu"):
        assert torch.equal(spread(whole)(X), whole(X))


def bytes_are_those_of_the_rows_that_travel(rank, world_size):
    whole, X = layer(), randn(1, 6).expand(5, 6)  # all go to one expert
    part, home = spread(whole), whole.router(X[0]).argmax() // 2
    with count_bytes() as ledger:
        results(part, X)
    rows = 2 * (15 if rank == home else 5)
    assert ledger.sent(rank) == rows * 6 * 8 + 3 * 2 * 8  # and the counts
    with pytest.raises(ValueError, match="6 experts cannot be divided among 4 ranks"):
        ParallelExperts(whole.experts[:6])


test_four_ranks = on_ranks(
    4,
    [
        values_and_gradients_are_those_of_one_device,
        replicas_are_averaged_by_fully_shard,
        the_loss_for_balance_is_that_of_all_tokens,
        autocast_is_that_of_one_device,
        bytes_are_those_of_the_rows_that_travel,
    ],
)


@pytest.mark.gpu
@in_ranks(2)
def test_on_a_gpu_it_is_the_same(rank, k):
    whole, X = layer(2, factor=1), tokens_of(5, 6)[rank]
    found = results(spread(whole).cuda(), X.cuda())
    close([x.cpu() for x in found], [*results(whole, X)])
