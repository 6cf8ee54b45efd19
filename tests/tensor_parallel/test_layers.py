"""Layers cut in parts: together, the ranks' parts are the layer of one process."""

import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT, attempt, close, randn
from torch import nn

from d2lpar import count_bytes, init_params, launch, lenet
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


def numbers(rank, shape=(2, 3), dtype=torch.float32):
    """Whole numbers that tell rank and place, and whose sums are exact in every dtype."""
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) + 1 + 10 * rank).to(dtype)


def total(ranks, *args):
    return sum(numbers(rank, *args) for rank in ranks)


def part(tensor, dim, group=None):
    """This rank's, by torch itself; None: the tensor is not cut."""
    if dim is None:
        return tensor
    return tensor.tensor_split(dist.get_world_size(group), dim)[dist.get_rank(group)]


def seeded(seed, make, *args, **kwargs):
    torch.manual_seed(seed)
    return make(*args, **kwargs)


def whole_mlp():
    return nn.Sequential(nn.Linear(IN, OUT), nn.GELU(), nn.Linear(OUT, IN))


def lenet_params():
    return init_params(0.1, torch.Generator().manual_seed(9))


class WholeLeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.params = nn.ParameterList(lenet_params())

    def forward(self, X):
        return lenet(X, self.params)


# The two operators


@pytest.mark.parametrize("k", [1, 2, 3])
def test_each_operator_is_the_others_way_back(k):
    def run(rank, world_size):
        members = range(world_size)
        for dtype in (torch.float32, torch.bfloat16):
            X, grad = numbers(rank, dtype=dtype), numbers(rank + 4, dtype=dtype)
            X_sum, grad_sum = total(members).to(dtype), total(m + 4 for m in members).to(dtype)
            for operator, *expected in (
                (copy_to_group, X, grad_sum),
                (reduce_from_group, X_sum, grad),
            ):
                leaf = X.clone().requires_grad_()
                output = operator(leaf)
                output.backward(grad)
                close((output.detach(), leaf.grad), tuple(expected))
                assert torch.equal(leaf, X) and torch.equal(grad, numbers(rank + 4, dtype=dtype))
                strided = operator(leaf.T)
                close(strided.detach(), expected[0].T)
                [back] = torch.autograd.grad(strided.sum(), leaf)  # whose gradient is expanded
                ones = world_size if operator is copy_to_group else 1
                close(back, torch.full_like(X, ones))

    launch(run, k, timeout=LIMIT)


def test_groups_smaller_than_the_world_do_not_mix():
    groups = [[0, 3], [1, 2]]

    def run(rank, world_size):
        group, _ = dist.new_subgroups_by_enumeration(groups)
        members = next(ranks for ranks in groups if rank in ranks)
        leaf = numbers(rank).requires_grad_()
        copy_to_group(leaf, group).backward(numbers(rank + 4))
        close(leaf.grad, total(m + 4 for m in members))
        close(reduce_from_group(numbers(rank), group), total(members))
        row = seeded(rank, RowParallelLinear, IN, OUT, group=group)
        close(row.bias, seeded(members[0], nn.Linear, IN, OUT).bias)
        column = seeded(9, ColumnParallelLinear, IN, OUT, group=group)
        close(column.weight.data, part(seeded(9, nn.Linear, IN, OUT).weight.data, 0, group))
        X, images = torch.ones(2, IN), torch.ones(2, 1, 28, 28)
        outputs = seeded(9, TensorParallelMLP, IN, OUT, group=group)(X), seeded(9, whole_mlp)(X)
        torch.testing.assert_close(*outputs)
        net = TensorParallelLeNet(lenet_params(), group)
        torch.testing.assert_close(net(images), lenet(images, lenet_params()))

    launch(run, 4, timeout=LIMIT)


# Layers and networks: (ours, the whole one, shape of X, along which dimensions X, the output and
# the parameters are cut)

COLUMNS, ROWS, MLP, LENET = (
    (ColumnParallelLinear, nn.Linear, None, -1, [0, 0]),
    (RowParallelLinear, nn.Linear, -1, None, [1, None]),
    (lambda: TensorParallelMLP(IN, OUT), whole_mlp, None, None, [0, 0, 1, None]),
    (
        lambda: TensorParallelLeNet(lenet_params()),
        WholeLeNet,
        *(None, None, [0, 0, 1, None, 1, 0, 0, None]),
    ),
)


def assert_trains_alike(case, shape, *args):
    """Three steps of SGD, in float64: several steps amplify the rounding of float32."""
    ours, theirs, X_cut, output_cut, cuts = case
    ours, theirs = (seeded(1, make, *args).double() for make in (ours, theirs))
    pairs = list(zip(ours.parameters(), theirs.parameters(), cuts, strict=False))
    assert len(pairs) == len(list(theirs.parameters()))
    for step in range(3):
        X = randn(*shape, seed=step).requires_grad_()
        own_X = part(X.detach(), X_cut).clone().requires_grad_()
        mine, whole = ours(own_X), theirs(X)
        mine.square().sum().backward()
        whole.square().sum().backward()
        close(mine, part(whole, output_cut))
        close(own_X.grad, part(X.grad, X_cut))
        for param, other, cut in pairs:
            close(param.grad, part(other.grad, cut))
            for p in (param, other):
                p.data -= 0.01 * p.grad
                p.grad = None
    for param, other, cut in pairs:
        close(param.data, part(other.data, cut))


def sent(make, X):
    """Bytes and messages of a forward and of a backward pass between two ranks."""
    net = seeded(1, make)
    with count_bytes() as forward:
        output = net(X)
    with count_bytes() as backward:
        output.sum().backward()
    return [
        (sum(ledger.bytes.values()), sum(ledger.messages.values()))
        for ledger in (forward, backward)
    ]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_training_parts_is_training_the_whole(k):
    def run(rank, world_size):
        for shape in ((5, IN), (2, 3, IN)):
            for bias in (True, False):
                assert_trains_alike(COLUMNS, shape, IN, OUT, bias)
                assert_trains_alike(ROWS, shape, IN, OUT, bias)
        assert_trains_alike(MLP, (2, 3, IN))
        assert_trains_alike(LENET, (8, 1, 28, 28))

    launch(run, k, timeout=LIMIT)


def test_the_mlp_has_one_allreduce_each_way_and_lenet_two():
    def run(rank, world_size):
        one = 2 * 3 * IN * 4, 1
        assert sent(MLP[0], torch.ones(2, 3, IN, requires_grad=True)) == [one, one]
        forward, hidden, images = 4 * (50 * 8 * 8 + 10) * 4, 4 * 800 * 4, 4 * 26 * 26 * 4
        X = torch.ones(4, 1, 28, 28)
        assert sent(LENET[0], X) == [(forward, 2), (hidden, 1)]
        assert sent(LENET[0], X.requires_grad_()) == [(forward, 2), (hidden + images, 2)]

    launch(run, 2, timeout=LIMIT)


# Where the parts come from


def test_with_one_seed_the_parts_make_the_layer_of_one_process():
    def run(rank, world_size):
        torch.manual_seed(4)
        ours = ColumnParallelLinear(IN, OUT), RowParallelLinear(OUT, IN)
        state = torch.get_rng_state()
        torch.manual_seed(4)
        theirs = nn.Linear(IN, OUT), nn.Linear(OUT, IN)
        for layer, whole, cuts in zip(ours, theirs, ([0, 0], [1, None]), strict=True):
            for param, other, cut in zip(layer.parameters(), whole.parameters(), cuts, strict=True):
                assert torch.equal(param, part(other, cut))
        assert torch.equal(state, torch.get_rng_state())
        layer, drawn = (seeded(rank, kind, IN, OUT) for kind in (RowParallelLinear, nn.Linear))
        assert torch.equal(layer.weight, part(drawn.weight, 1))
        assert torch.equal(layer.bias, drawn.bias) == (rank == 0)  # the first rank's
        whole = torch.arange(10.0, requires_grad=True)
        own = own_part(whole, 0)
        own += 100  # it is a copy, and keeps no more than itself
        assert own.untyped_storage().nbytes() == 4 * len(own) and not own.requires_grad
        assert whole.tolist() == list(range(10))
        return layer.bias.tolist(), layer(torch.ones(2, layer.weight.shape[1])).tolist()

    results = launch(run, 3, timeout=LIMIT)
    assert results == results[:1] * 3


def test_fewer_columns_rows_or_channels_than_ranks_are_an_error():
    def run(rank, world_size):
        few = [param[:2] if i < 2 else param for i, param in enumerate(init_params())]
        makers = [
            lambda: ColumnParallelLinear(8, 2),
            lambda: RowParallelLinear(2, 8),
            lambda: TensorParallelMLP(8, 2),
            lambda: TensorParallelLeNet(few),
            lambda: own_part(torch.ones(5, 2), 1),
        ]
        assert ColumnParallelLinear(1, 3).weight.shape[0] == 1  # as many as ranks are enough
        return {attempt(make)[:2] for make in makers}

    words = "2 columns, rows or channels are too few for 3 ranks"
    assert launch(run, 3, timeout=LIMIT) == [{("ValueError", words)}] * 3
