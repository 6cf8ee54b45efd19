"""A GPT cut over ranks: their parts together are the network of one process."""

from copy import deepcopy
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from helpers import attempt, close, everyones, in_ranks, on_ranks, randn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from d2lpar import count_bytes, ranks
from d2lpar.memory import saved_memory
from d2lpar.models import Block, gpt
from d2lpar.tensor_parallel import (
    ColumnParallelLinear,
    Copy,
    Gather,
    RowParallelLinear,
    Scatter,
    Sum,
    VocabParallelEmbedding,
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


def groups_of(rank):
    """All four ranks, two of them, and this one alone."""
    yield None
    for parts in ([[0, 3], [1, 2]], [[0], [1], [2], [3]]):
        yield dist.new_subgroups_by_enumeration(parts)[0]


# The four functions


def numbers(rank, dtype):
    """Whole numbers that tell rank and place, (n = 2, length = 4), exact in 16 bits."""
    return (torch.arange(8.0).reshape(2, 4) + 16 * rank).to(dtype)


def what_goes_forward_in_one_function_comes_back_in_another(rank, world_size):
    for group, dtype in product(groups_of(rank), (torch.float64, torch.bfloat16)):
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        everyone = [numbers(r, dtype) for r in members]
        mine, total, joined = (
            numbers(rank, dtype),
            sum(everyone),
            torch.cat(everyone, 1),
        )
        own = total.chunk(len(members), 1)[dist.get_rank(group)]
        results = {Copy: mine, Sum: total, Gather: joined, Scatter: own}
        for forward, back in ((Copy, Sum), (Sum, Copy), (Gather, Scatter)):
            for function, other in ((forward, back), (back, forward)):
                X = numbers(rank, dtype).requires_grad_()
                Y = function.apply(
                    X.T.contiguous().T, group_of := ranks.group_of(group)
                )
                assert torch.equal(Y, results[function]), function
                grad = torch.full_like(Y, rank + 1.0)
                [X_grad] = torch.autograd.grad(Y, X, grad)
                assert torch.equal(X_grad, other.apply(grad, group_of)), function
                assert torch.equal(X.detach(), mine), "the input was overwritten"


# Layers and networks


def layers_are_those_of_one_process(rank, world_size):
    for group, bias in product(groups_of(rank), (True, False)):
        torch.manual_seed(1)
        whole = nn.Linear(8, 12, bias).double()
        columns = ColumnParallelLinear(whole, group)
        rows = RowParallelLinear(deepcopy(whole), group)
        X, own = randn(2, 3, 8).requires_grad_(), randn(2, 3, 8).requires_grad_()
        part_of_X = last(X, group)
        Y, *outputs = whole(X), columns(own), rows(part_of_X)
        for output in (Y, *outputs):
            (output * part(randn(2, 3, 12, seed=2), output, group)).sum().backward()
            close(output, part(Y, output, group))
        close([own.grad, part_of_X.grad], [X.grad, part(X.grad, part_of_X, group)])
        for layer in (columns, rows):
            for param, other in zip(layer.parameters(), whole.parameters()):
                close(param.grad, part(other.grad, param, group))


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


def without_gradients_nothing_is_kept(rank, world_size):
    X, _ = text()
    for sequence in BOTH:
        ours = cut_layers(small_gpt(), None, sequence)
        with torch.no_grad():
            logits, saved = saved_memory(partial(ours, X))
        assert saved == 0 and not logits.requires_grad


def what_is_frozen_stays_frozen(rank, world_size):
    for sequence in BOTH:
        model, (X, y) = small_gpt(), text()
        model[1].requires_grad_(False)
        model[2].norm1.requires_grad_(False)
        frozen = [not param.requires_grad for param in model.parameters()]
        vocab_parallel_cross_entropy(cut_layers(model, None, sequence)(X), y).backward()
        assert [param.grad is None for param in model.parameters()] == frozen


def losses_are_torchs(rank, world_size):
    """Also of huge logits, and with tokens, each rank's first one, that cannot be."""
    targets = torch.arange(1, 6), torch.tensor(17)
    for group in groups_of(rank):
        for scale, y in product((1.0, 1e4), targets):
            whole = scale * randn(*y.shape, TOKENS)
            whole[..., ::6] = -torch.inf
            own, whole = last(whole, group), whole.requires_grad_()
            loss = vocab_parallel_cross_entropy(own, y, group)
            (2 * loss).backward()
            right = F.cross_entropy(whole.view(-1, TOKENS), y.view(-1))
            (2 * right).backward()
            close([loss, own.grad], [right, part(whole.grad, own, group)])


def what_does_not_divide_is_named_and_nothing_has_been_cut(rank, world_size):
    def refused(words, call, *args):
        assert attempt(call, *args)[:2] == ("ValueError", words)

    odd = gpt(24, width=24, num_heads=6, num_blocks=1, length=6)
    refused("6 heads cannot be divided among 4 ranks", cut_layers, odd)
    large = gpt(118, width=16, num_blocks=1)
    refused("118 tokens cannot be divided among 4 ranks", cut_layers, large)
    for model in (odd, large):
        assert all(
            type(part).__module__ != cut_layers.__module__ for part in model.modules()
        )
    embedding, layer = nn.Embedding(118, 4), nn.Linear(6, 10)
    refused(
        "118 tokens cannot be divided among 4 ranks", VocabParallelEmbedding, embedding
    )
    refused("10 features cannot be divided among 4 ranks", ColumnParallelLinear, layer)
    refused("6 features cannot be divided among 4 ranks", RowParallelLinear, layer)
    cut = cut_layers(small_gpt(), None, True)
    refused("6 tokens cannot be divided among 4 ranks", cut, text()[0][:, :6])
    wrong = torch.tensor([[3, 24]])
    refused("token 24 is not between 0 and 23", cut, wrong)
    logits = torch.zeros(1, 2, 6)
    refused(
        "token -1 is not between 0 and 23",
        vocab_parallel_cross_entropy,
        logits,
        -wrong // 24,
    )
    cut(text()[0])  # the group can still be used


test_four_ranks = on_ranks(
    4,
    [
        what_goes_forward_in_one_function_comes_back_in_another,
        layers_are_those_of_one_process,
        training_parts_is_training_the_whole,
        without_gradients_nothing_is_kept,
        what_is_frozen_stays_frozen,
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
    for num_tokens in (10, 1000):
        logits = randn(7, num_tokens // 2).requires_grad_()
        with count_bytes() as ledger:
            vocab_parallel_cross_entropy(logits, torch.arange(7)).backward()
        assert ledger.bytes == {(rank, 1 - rank): 3 * 7 * 8}


# Against torch's own


def plan_of(layer, between, sequence):
    """What torch's parallelize_module is told about a layer of the GPT."""
    columns = ColwiseParallel(input_layouts=between)
    rows = RowwiseParallel(output_layouts=between)
    norm = {"norm1": SequenceParallel(use_local_output=True)}
    if hasattr(layer, "mlp"):
        norm |= {"norm2": norm["norm1"]}
        ends = {"attention.inputs": columns, "attention.output": rows}
        return (norm if sequence else {}) | ends | {"mlp.0": columns, "mlp.2": rows}
    if hasattr(layer, "logits"):
        out = {"output_layouts": Shard(-1), "use_local_output": False}
        head = {"logits": ColwiseParallel(input_layouts=between, **out)}
        return head | ({"norm": norm["norm1"]} if sequence else {})
    return {"tokens": RowwiseParallel(input_layouts=Replicate())}


@pytest.mark.parametrize("sequence", BOTH)
@in_ranks(2)
def test_a_gpt_cut_by_torch_has_our_gradients(rank, k, sequence):
    mesh, between = init_device_mesh("cpu", (k,)), Shard(1) if sequence else Replicate()
    theirs, ours, (X, y) = small_gpt(), cut_layers(small_gpt(), None, sequence), text()
    for layer in theirs:
        parallelize_module(layer, mesh, plan_of(layer, between, sequence))
    if sequence:
        out = {"output_layouts": Replicate(), "desired_output_layouts": Shard(1)}
        parallelize_module(theirs[0], mesh, PrepareModuleOutput(**out))
    loss = vocab_parallel_cross_entropy(ours(X), y)
    loss.backward()
    with loss_parallel():
        right = loss_of(theirs(X), y)
        right.backward()
    close(loss, right.full_tensor())
    for p, q in zip(ours.parameters(), theirs.parameters()):
        whole = q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad
        close(p.grad, part(whole, p))


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
