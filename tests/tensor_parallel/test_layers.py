"""Layers cut in parts: together, the ranks' parts are the layer of one process."""

from functools import partial

import torch
import torch.distributed as dist
from helpers import attempt, close, on_ranks, randn
from torch import nn

from d2lpar import count_bytes, init_params
from d2lpar.models import lenet_layers
from d2lpar.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelLeNet,
    TensorParallelMLP,
    copy_to_group,
    own_part,
    reduce_from_group,
)

IN, OUT = 6, 7  # features: uneven parts


def groups_of(rank):
    """All four ranks, a group of two and this rank alone, each with its ranks."""
    yield None, range(4)
    for parts in ([[0, 3], [1, 2]], [[0], [1], [2], [3]]):
        group, _ = dist.new_subgroups_by_enumeration(parts)
        yield group, next(members for members in parts if rank in members)


def numbers(rank, dtype=torch.float32):
    """Whole numbers that tell rank and place, with exact sums in every dtype."""
    return (torch.arange(1, 7).reshape(2, 3) + 10 * rank).to(dtype)


def part(tensor, dim, group=None):
    """This rank's, by torch itself; None: the tensor is not cut."""
    if dim is None:
        return tensor
    return tensor.tensor_split(dist.get_world_size(group), dim)[dist.get_rank(group)]


def seeded(seed, make, *args, **kwargs):
    torch.manual_seed(seed)
    return make(*args, **kwargs)


def lenet_params():
    return init_params(0.1, torch.Generator().manual_seed(9))


def whole_mlp():
    return nn.Sequential(nn.Linear(IN, OUT), nn.GELU(), nn.Linear(OUT, IN))


def whole_lenet():
    return lenet_layers(0.1, torch.Generator().manual_seed(9))


def each_operator_is_the_others_way_back(rank, world_size):
    for group, members in groups_of(rank):
        for dtype in (torch.float32, torch.bfloat16):
            X, grad = numbers(rank, dtype), numbers(rank + 4, dtype)
            X_sum, grad_sum = (
                sum(numbers(m + i, dtype) for m in members) for i in (0, 4)
            )
            for operator, forward, backward, ones in (
                (copy_to_group, X, grad_sum, len(members)),
                (reduce_from_group, X_sum, grad, 1),
            ):
                leaf = X.clone().requires_grad_()
                output = operator(leaf, group)
                output.backward(grad)
                close((output.detach(), leaf.grad), (forward, backward))
                assert torch.equal(leaf, X) and torch.equal(
                    grad, numbers(rank + 4, dtype)
                )
                strided = operator(leaf.T, group)
                close(strided.detach(), forward.T)
                # whose gradient is expanded
                [back] = torch.autograd.grad(strided.sum(), leaf)
                close(back, torch.full_like(X, ones))


def cases():
    """Ours, the whole one, X's shape, where X, output and parameters are cut."""
    for bias in (True, False):
        kinds = ColumnParallelLinear, RowParallelLinear, nn.Linear
        columns, rows, whole = (partial(kind, IN, OUT, bias) for kind in kinds)
        yield columns, whole, (5, IN), None, -1, [0, 0]
        yield rows, whole, (2, 3, IN), -1, None, [1, None]
    ours, whole = partial(TensorParallelMLP, IN, OUT), whole_mlp
    yield ours, whole, (2, 3, IN), None, None, [0, 0, 1, None]
    ours, cuts = (
        partial(TensorParallelLeNet, lenet_params()),
        [0, 0, 1, None, 1, 0, 0, None],
    )
    yield ours, whole_lenet, (8, 1, 28, 28), None, None, cuts


def training_parts_is_training_the_whole(rank, world_size):
    """Three steps of SGD, in float64: several steps amplify the rounding of float32."""
    for group, _ in groups_of(rank):
        for make, make_whole, shape, X_cut, output_cut, cuts in cases():
            ours, theirs = (
                seeded(1, make, group=group).double(),
                seeded(1, make_whole).double(),
            )
            pairs = list(
                zip(ours.parameters(), theirs.parameters(), cuts, strict=False)
            )
            assert len(pairs) == len(list(theirs.parameters()))
            for step in range(3):
                X = randn(*shape, seed=step).requires_grad_()
                own_X = part(X.detach(), X_cut, group).clone().requires_grad_()
                mine, whole = ours(own_X), theirs(X)
                mine.square().sum().backward()
                whole.square().sum().backward()
                close(mine, part(whole, output_cut, group))
                close(own_X.grad, part(X.grad, X_cut, group))
                for param, other, cut in pairs:
                    close(param.grad, part(other.grad, cut, group))
                    for p in (param, other):
                        p.data -= 0.01 * p.grad
                        p.grad = None
            for param, other, cut in pairs:
                close(param.data, part(other.data, cut, group))


def with_one_seed_the_parts_make_the_layer_of_one_process(rank, world_size):
    torch.manual_seed(4)
    ours = ColumnParallelLinear(IN, OUT), RowParallelLinear(OUT, IN)
    state = torch.get_rng_state()
    torch.manual_seed(4)
    theirs = nn.Linear(IN, OUT), nn.Linear(OUT, IN)
    assert torch.equal(state, torch.get_rng_state())
    for layer, whole, cuts in zip(ours, theirs, ([0, 0], [1, None]), strict=True):
        for param, other, cut in zip(
            layer.parameters(), whole.parameters(), cuts, strict=True
        ):
            assert torch.equal(param, part(other, cut))
    for group, members in groups_of(rank):
        layer = seeded(rank, RowParallelLinear, IN, OUT, group=group)
        weights = seeded(rank, nn.Linear, IN, OUT).weight
        assert torch.equal(layer.weight, part(weights, 1, group))
        assert torch.equal(layer.bias, seeded(members[0], nn.Linear, IN, OUT).bias)
    whole = torch.arange(10.0, requires_grad=True)
    own = own_part(whole, 0)
    own += 100  # it is a copy, and keeps no more than itself
    assert own.untyped_storage().nbytes() == 4 * len(own) and not own.requires_grad
    assert whole.tolist() == list(range(10))


def fewer_columns_rows_or_channels_than_ranks_are_an_error(rank, world_size):
    few = [param[:2] if i < 2 else param for i, param in enumerate(init_params())]
    for make in (
        lambda: ColumnParallelLinear(8, 2),
        lambda: RowParallelLinear(2, 8),
        lambda: TensorParallelMLP(8, 2),
        lambda: TensorParallelLeNet(few),
        lambda: own_part(torch.ones(5, 2), 1),
    ):
        words = "2 columns, rows or channels are too few for 4 ranks"
        assert attempt(make)[:2] == ("ValueError", words)
    # as many as ranks are enough
    assert ColumnParallelLinear(1, 4).weight.shape[0] == 1


test_parts = on_ranks(
    4,
    [
        each_operator_is_the_others_way_back,
        training_parts_is_training_the_whole,
        with_one_seed_the_parts_make_the_layer_of_one_process,
        fewer_columns_rows_or_channels_than_ranks_are_an_error,
    ],
)


def the_mlp_has_one_allreduce_each_way_and_lenet_two(rank, world_size):
    one = 2 * 3 * IN * 4, 1  # bytes and messages
    outputs, hidden, images = 4 * (50 * 8 * 8 + 10) * 4, 4 * 800 * 4, 4 * 26 * 26 * 4
    mlp, net = TensorParallelMLP(IN, OUT), TensorParallelLeNet(lenet_params())
    for module, X, *expected in (
        (mlp, torch.ones(2, 3, IN, requires_grad=True), one, one),
        (net, torch.ones(4, 1, 28, 28), (outputs, 2), (hidden, 1)),
        (
            net,
            torch.ones(4, 1, 28, 28, requires_grad=True),
            (outputs, 2),
            (hidden + images, 2),
        ),
    ):
        with count_bytes() as forward:
            output = module(X)
        with count_bytes() as backward:
            output.sum().backward()
        ledgers = forward, backward
        sent = [
            (sum(each.bytes.values()), sum(each.messages.values())) for each in ledgers
        ]
        assert sent == expected, sent


test_traffic = on_ranks(2, [the_mlp_has_one_allreduce_each_way_and_lenet_two])
