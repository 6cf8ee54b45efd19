"""A GPT cut over ranks: their parts together are the network of one process."""

from copy import deepcopy
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from helpers import (
    attempt,
    close,
    everyones,
    grid,
    groups_of,
    in_ranks,
    on_ranks,
    randn,
)
from torch import nn
from torch.nn import functional as F

from d2lpar import count_bytes, fully_shard, ranks
from d2lpar.memory import saved_memory
from d2lpar.models import Block, gpt
from d2lpar.tensor_parallel import (
    ColumnParallelLinear,
    Copy,
    Gather,
    RowParallelLinear,
    Scatter,
    Sum,
    cut_layers,
    vocab_parallel_cross_entropy,
)

TOKENS, LENGTH = 24, 8
BOTH = False, True  # without and with sequence parallelism


def small_gpt(seed=0):
    torch.manual_seed(seed)
    return gpt(TOKENS, width=16, num_heads=4, num_blocks=2, length=LENGTH).double()


def text(seed=0):
    """Tokens of every rank's part, and those that follow."""
    torch.manual_seed(seed)
    return torch.randint(TOKENS, (2, 5, LENGTH)).unbind()


def loss_of(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def part(tensor, like, group=None):
    """This rank's part of a tensor, which is cut where ``like`` is shorter."""
    dims = [d for d in range(tensor.dim()) if tensor.shape[d] != like.shape[d]]
    for dim in dims:
        tensor = tensor.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
    return tensor


def last(tensor, group):
    """A copy of this rank's part of the last dimension."""
    k, me = dist.get_world_size(group), dist.get_rank(group)
    return tensor.detach().chunk(k, -1)[me].clone().requires_grad_()


# The four functions


def numbers(rank, dtype):
    """Whole numbers that tell rank and place, (n = 2, length = 4), exact in 16 bits."""
    return (torch.arange(8.0).reshape(2, 4) + 16 * rank).to(dtype)


def what_goes_forward_in_one_function_comes_back_in_another(rank, world_size):
    pairs = [(Copy, Sum), (Sum, Copy), (Gather, Scatter), (Scatter, Gather)]
    for group, dtype in product(groups_of(rank), (torch.float64, torch.bfloat16)):
        group, mine = ranks.group_of(group), numbers(rank, dtype)
        everyone = [numbers(r, dtype) for r in group.ranks]
        results = {Copy: mine, Sum: sum(everyone), Gather: torch.cat(everyone, 1)}
        results[Scatter] = results[Sum].chunk(group.size, 1)[group.me]
        for forward, back in pairs:
            for X in (numbers(rank, dtype), numbers(rank, dtype).T.contiguous().T):
                Y = forward.apply(X.requires_grad_(), group)
                assert torch.equal(Y, results[forward]), forward
                assert torch.equal(X.detach(), mine), "the input was overwritten"
                grad = torch.full_like(Y, rank + 1.0)
                [X_grad] = torch.autograd.grad(Y, X, grad)
                assert torch.equal(X_grad, back.apply(grad, group)), forward
                assert grad.eq(rank + 1).all(), "the gradient was overwritten"
                assert Y.untyped_storage().nbytes() == Y.nbytes, "more is kept alive"


# Layers and networks


def layers_are_those_of_one_process(rank, world_size):
    for group, bias in product(groups_of(rank), (True, False)):
        torch.manual_seed(1)
        whole = nn.Linear(8, 12, bias).double()
        X, weights = randn(2, 3, 8).requires_grad_(), randn(2, 3, 12, seed=2)
        Y = whole(X)
        (Y * weights).sum().backward()
        for kind in (ColumnParallelLinear, RowParallelLinear):
            layer = kind(deepcopy(whole), group)
            given = (
                X.detach().clone() if kind is ColumnParallelLinear else last(X, group)
            )
            output = layer(given.requires_grad_())
            close(output, part(Y, output, group))
            (output * part(weights, output, group)).sum().backward()
            close(given.grad, part(X.grad, given, group))
            for param, other in zip(layer.parameters(), whole.parameters()):
                close(param.grad, part(other.grad, param, group))
                assert param.untyped_storage().nbytes() == param.nbytes, "all is kept"
            frozen = kind(deepcopy(whole).requires_grad_(False), group).parameters()
            assert not any(param.requires_grad for param in frozen)


def training_parts_is_training_the_whole(rank, world_size):
    """Two steps, in float64; the weights are those of a group's first rank."""
    for group, sequence in product(groups_of(rank), BOTH):
        first = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
        ours, whole = cut_layers(small_gpt(rank), group, sequence), small_gpt(first)
        for step in range(2):
            X, y = text(step)
            loss, right = vocab_parallel_cross_entropy(ours(X), y, group), whole(X)
            loss.backward()
            loss_of(right, y).backward()
            close(loss, loss_of(right, y))
            close(ours(X), part(right, ours(X), group))
            for p, q in zip(ours.parameters(), whole.parameters()):
                close(p.grad, part(q.grad, p, group))
                for param in (p, q):
                    param.data -= 0.1 * param.grad
                    param.grad = None
        assert len(set(everyones(loss.item(), group))) == 1, "not the same bits"


def shards_and_layers_may_both_be_cut(rank, world_size):
    """A GPT of two ranks whose parameters two more ranks share, with sequence."""
    row, column = grid(2, 2)
    whole, (X, y) = small_gpt(), text()
    ours = cut_layers(small_gpt(), row, sequence=True)
    for layer in (*ours, ours):
        fully_shard(layer, group=column)
    vocab_parallel_cross_entropy(ours(X), y, row).backward()
    loss_of(whole(X), y).backward()
    for model in (ours, whole):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        close(ours(X), part(whole(X), ours(X), row))


def losses_are_torchs(rank, world_size):
    """Also of huge logits, and with tokens, each rank's first one, that cannot be."""
    targets = torch.arange(1, 6), torch.tensor(17)
    for group in groups_of(rank):
        first = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
        for scale, y in product((1.0, 1e4), targets):
            whole = scale * (10 * first + randn(*y.shape, TOKENS, seed=first))
            whole[..., ::6] = -torch.inf
            own, whole = last(whole, group), whole.requires_grad_()
            loss = vocab_parallel_cross_entropy(own, y, group)
            (2 * loss).backward()
            right = F.cross_entropy(whole.view(-1, TOKENS), y.view(-1))
            (2 * right).backward()
            close([loss, own.grad], [right, part(whole.grad, own, group)])
    half = randn(5, TOKENS).bfloat16()  # computed in float32, as torch's autocast would
    loss = vocab_parallel_cross_entropy(last(half, None), targets[0])
    torch.testing.assert_close(loss, F.cross_entropy(half.float(), targets[0]))


def what_does_not_divide_is_named_and_nothing_has_been_cut(rank, world_size):
    def refused(words, call, *args):
        assert attempt(call, *args)[:2] == ("ValueError", words)

    parts, four = partial(map, type), "cannot be divided among 4 ranks"
    odd = gpt(24, width=24, num_heads=6, num_blocks=1, length=6)
    large = gpt(118, width=16, num_blocks=1)
    for model, what in ((odd, "6 heads"), (large, "118 tokens")):
        before = [*parts(model.modules())]
        refused(f"{what} {four}", cut_layers, model)
        assert [*parts(model.modules())] == before
    more = small_gpt().insert(1, nn.Linear(16, 16))  # would see own tokens only
    unknown = "sequence parallelism does not know the layer 1"
    refused(unknown, cut_layers, more, None, True)
    refused(f"10 features {four}", ColumnParallelLinear, nn.Linear(6, 10))
    refused(f"6 features {four}", RowParallelLinear, nn.Linear(6, 10))
    cut, (X, y) = cut_layers(small_gpt(), None, True), text()
    refused(f"6 tokens {four}", cut, X[:, :6])
    refused("token 24 is not between 0 and 23", cut, torch.tensor([[3, 24]]))
    loss = partial(vocab_parallel_cross_entropy, cut(X))  # the group can still be used
    refused("token -1 is not between 0 and 23", loss, torch.where(y > 20, -1, y))


test_four_ranks = on_ranks(
    4,
    [
        what_goes_forward_in_one_function_comes_back_in_another,
        layers_are_those_of_one_process,
        training_parts_is_training_the_whole,
        shards_and_layers_may_both_be_cut,
        losses_are_torchs,
        what_does_not_divide_is_named_and_nothing_has_been_cut,
    ],
)


# Bytes and memory, in units of a block's activation


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("sequence", BOTH)
@in_ranks()
def test_a_block_sends_and_keeps_what_its_formulas_say(rank, k, sequence):
    n, length, width = 32, 64, 64
    unit = 8 * n * length * width
    block = cut_layers(Block(width, 8).double(), None, sequence)
    X = randn(n, length // k if sequence else length, width).requires_grad_()
    with count_bytes() as ledger:
        Y, saved = saved_memory(lambda: block(X), without=block.parameters())
        forward = ledger.sent(rank)
        Y.sum().backward()
    extra = ledger.sent(rank) - forward * 2  # sums of gradients, and gathers once more
    assert forward == 4 * (k - 1) / k * unit
    assert (saved / unit) == pytest.approx(16 / k if sequence else 4 + 12 / k, rel=0.02)
    if not sequence:
        assert extra == 0
    else:
        small = 6 * width * 8  # weights and biases of the norms, biases of the rows
        assert extra - 2 * (k - 1) / k * unit == pytest.approx(small, abs=small)


@in_ranks(2)
def test_three_numbers_per_token_are_sent_whatever_the_vocabulary(rank, k):
    for vocab_size in (10, 1000):
        logits = randn(7, vocab_size // 2).requires_grad_()
        with count_bytes() as ledger:
            vocab_parallel_cross_entropy(logits, torch.arange(7)).backward()
        assert ledger.bytes == {(rank, 1 - rank): 3 * 7 * 8}


@pytest.mark.gpu
@pytest.mark.parametrize("sequence", BOTH)
@in_ranks(2)
def test_on_a_gpu_it_is_the_same(rank, k, sequence):
    (X, y), grads = text(), []
    for device in ("cpu", "cuda:0"):
        model = cut_layers(small_gpt().to(device), None, sequence)
        loss = vocab_parallel_cross_entropy(model(X.to(device)), y.to(device))
        loss.backward()
        grads.append([loss.cpu(), *(p.grad.cpu() for p in model.parameters())])
    close(*grads)
