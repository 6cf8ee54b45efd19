"""Layers cut in parts: together, the ranks' parts are the layer of one process."""

import itertools
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from d2lpar import count_bytes, init_params, launch, lenet, ranks
from d2lpar.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelLeNet,
    TensorParallelMLP,
    copy_to_group,
    own_part,
    reduce_from_group,
)

LIMIT = 60  # seconds, for what takes less than one
IN, OUT = 6, 7  # features: uneven parts
LENET_CUTS = (0, 0, 1, None, 1, 0, 0, None)  # along which dimension each parameter is cut


def numbers(rank, shape=(2, 3), dtype=torch.float32):
    """Whole numbers that tell rank and place, and whose sums are exact in every dtype."""
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) + 1 + 10 * rank).to(dtype)


def distance(ours, theirs):
    """The largest difference; infinite where a shape or a dtype is another."""
    largest = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        largest = max(largest, float((a.double() - b.double()).abs().max().nan_to_num(1e9)))
    return largest


def complaint(call):
    try:
        call()
    except ValueError as error:
        return str(error)


@contextmanager
def counted_allreduces():
    """A list of how many numbers each allreduce sums up."""
    sizes, allreduce = [], ranks.allreduce

    def counted(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        allreduce(tensor, *args, **kwargs)

    ranks.allreduce = counted
    try:
        yield sizes
    finally:
        ranks.allreduce = allreduce


def part(tensor, dim, group=None):
    """This rank's, by torch itself; None: the tensor is not cut."""
    if dim is None:
        return tensor
    return tensor.tensor_split(dist.get_world_size(group), dim)[dist.get_rank(group)]


@torch.no_grad()
def step(params, lr):
    for param in params:
        param -= lr * param.grad
        param.grad = None


def training(layer, batches):
    """Output and gradients of every step of SGD, by name, and the parameters that are left."""
    trace = []
    for X, Y in batches:
        X = X.clone().requires_grad_()
        output = layer(X)
        ((output - Y) ** 2).sum().mul(0.05).backward()
        named = list(layer.named_parameters())
        trace += [("output", output.detach()), ("input", X.grad)]
        trace += [(name, param.grad.clone()) for name, param in named]
        step(layer.parameters(), 0.1)
    return trace + [(name, param.detach()) for name, param in named]


def batches_of(shape, num_outputs, steps=3):
    """In float64: several steps amplify the rounding of float32."""
    data = torch.Generator().manual_seed(5)
    shapes = shape, (*shape[:-1], num_outputs)
    return [
        tuple(torch.randn(shape, generator=data, dtype=torch.float64) for shape in shapes)
        for _ in range(steps)
    ]


def seeded(seed, kind, *args, **kwargs):
    torch.manual_seed(seed)
    return kind(*args, **kwargs)


# The two operators


@pytest.mark.parametrize("k", [1, 2, 3])
def test_each_operator_is_the_others_way_back(k):
    dtypes = torch.float32, torch.bfloat16

    def run(rank, world_size, operator, dtype):
        X, grad = numbers(rank, dtype=dtype), numbers(rank + 4, dtype=dtype)
        leaf = X.clone().requires_grad_()
        with counted_allreduces() as forward:
            output = operator(leaf)
        with counted_allreduces() as backward:
            output.backward(grad)
        intact = torch.equal(leaf, X) and torch.equal(grad, numbers(rank + 4, dtype=dtype))
        return (output.detach(), leaf.grad), (forward, backward), intact

    def run_all(*place):
        operators = copy_to_group, reduce_from_group
        return {dtype: [run(*place, operator, dtype) for operator in operators] for dtype in dtypes}

    for rank, results in enumerate(launch(run_all, k, timeout=LIMIT)):
        for dtype, (copied, reduced) in results.items():
            X, grad = numbers(rank, dtype=dtype), numbers(rank + 4, dtype=dtype)
            X_sum = sum(numbers(r) for r in range(k)).to(dtype)
            grad_sum = sum(numbers(r + 4) for r in range(k)).to(dtype)
            assert distance(copied[0], [X, grad_sum]) == 0
            assert distance(reduced[0], [X_sum, grad]) == 0
            assert copied[1:] == (([], [6]), True)
            assert reduced[1:] == (([6], []), True)


def test_tensors_may_be_strided_and_gradients_expanded():
    def run(rank, world_size):
        results = []
        for operator in (copy_to_group, reduce_from_group):
            leaf = numbers(rank, (3, 2)).requires_grad_()
            output = operator(leaf.T)
            ((rank + 1) * output.sum()).backward()
            results += [output.detach(), leaf.grad]
        return results

    X_sum = (numbers(0, (3, 2)) + numbers(1, (3, 2))).T
    for rank, results in enumerate(launch(run, 2, timeout=LIMIT)):
        ones = torch.ones(3, 2)
        wanted = [numbers(rank, (3, 2)).T, 3 * ones, X_sum, (rank + 1) * ones]
        assert distance(results, wanted) == 0


def test_groups_smaller_than_the_world_do_not_mix():
    groups = [[0, 3], [1, 2]]

    def run(rank, world_size):
        group, _ = dist.new_subgroups_by_enumeration(groups)
        leaf = numbers(rank).requires_grad_()
        copy_to_group(leaf, group).backward(numbers(rank + 4))
        reduced = reduce_from_group(numbers(rank), group)
        torch.manual_seed(rank)
        row = RowParallelLinear(IN, OUT, group=group)
        column = seeded(9, ColumnParallelLinear, IN, OUT, group=group)
        mlp = seeded(9, TensorParallelMLP, IN, OUT, group=group)
        whole = seeded(9, mlp_of_torch)
        X, images = torch.ones(2, IN), torch.ones(2, 1, 28, 28)
        params = init_params(0.1, torch.Generator().manual_seed(9))
        ours = mlp(X).detach(), TensorParallelLeNet(params, group)(images).detach()
        theirs = whole(X).detach(), lenet(images, params)
        return leaf.grad, reduced, row.bias.detach(), column.weight.detach(), (ours, theirs)

    results = launch(run, 4, timeout=LIMIT)
    weight = seeded(9, nn.Linear, IN, OUT).weight.detach()
    for members in groups:
        bias = seeded(members[0], nn.Linear, IN, OUT).bias.detach()
        wanted = [sum(numbers(m + 4) for m in members), sum(numbers(m) for m in members), bias]
        for place, rank in enumerate(members):
            *ours, own_weight, outputs = results[rank]
            assert distance(ours, wanted) == 0
            assert torch.equal(own_weight, weight.tensor_split(2)[place])
            assert distance(*outputs) < 1e-5


# Columns and rows

LAYERS = {  # for each kind, what is cut, and along which dimension
    ColumnParallelLinear: {"output": -1, "weight": 0, "bias": 0},
    RowParallelLinear: {"input": -1, "weight": 1},
}


@pytest.mark.parametrize("k", [1, 2, 4])
def test_training_columns_and_rows_is_training_linear(k):
    def compare(kind, shape, bias):
        cuts = LAYERS[kind]
        layer = seeded(1, kind, IN, OUT, bias).double()
        whole = seeded(1, nn.Linear, IN, OUT, bias).double()
        batches = batches_of(shape, OUT)
        own = [(part(X, cuts.get("input")), part(Y, cuts.get("output"))) for X, Y in batches]
        differ = {}
        for mine, their in zip(training(layer, own), training(whole, batches), strict=True):
            (name, ours), (_, theirs) = mine, their
            key = kind.__name__, len(shape), name
            difference = distance([ours], [part(theirs, cuts.get(name))])
            differ[key] = max(differ.get(key, 0), difference)
        assert len(differ) == 3 + bias
        return differ

    def run(rank, world_size):
        shapes = (5, IN), (2, 3, IN)
        cases = itertools.product(LAYERS, shapes, (True, False))
        return [(bias, compare(kind, shape, bias)) for kind, shape, bias in cases]

    for results in launch(run, k, timeout=LIMIT):
        for bias, differ in results:
            for what, difference in differ.items():
                assert difference < 1e-12, (what, bias)


def test_with_one_seed_the_parts_make_the_layer_of_one_process():
    k = 3

    def run(rank, world_size):
        torch.manual_seed(4)
        layers = [ColumnParallelLinear(IN, OUT), RowParallelLinear(OUT, IN)]
        return [dict(layer.state_dict()) for layer in layers], torch.get_rng_state()

    torch.manual_seed(4)
    first, second = nn.Linear(IN, OUT), nn.Linear(OUT, IN)
    results = launch(run, k, timeout=LIMIT)
    (columns, rows) = zip(*(layers for layers, _ in results), strict=True)
    assert torch.equal(torch.cat([own["weight"] for own in columns]), first.weight)
    assert torch.equal(torch.cat([own["bias"] for own in columns]), first.bias)
    assert torch.equal(torch.cat([own["weight"] for own in rows], 1), second.weight)
    assert all(torch.equal(own["bias"], second.bias) for own in rows)
    assert all(torch.equal(state, torch.get_rng_state()) for _, state in results)
    assert [own["weight"].shape for own in columns] == [(3, IN), (2, IN), (2, IN)]
    assert [own["weight"].shape for own in rows] == [(IN, 3), (IN, 2), (IN, 2)]


def test_with_other_seeds_the_row_bias_is_still_the_first_ranks():
    def run(rank, world_size):
        layer = seeded(rank, RowParallelLinear, IN, OUT)
        output = layer(torch.ones(2, layer.weight.shape[1]))
        return layer.weight.detach(), layer.bias.detach(), output.detach()

    results = launch(run, 3, timeout=LIMIT)
    drawn = [seeded(rank, nn.Linear, IN, OUT) for rank in range(3)]
    assert not torch.equal(drawn[0].bias, drawn[1].bias)
    for rank, (weight, bias, output) in enumerate(results):
        assert torch.equal(bias, drawn[0].bias)
        assert torch.equal(weight, drawn[rank].weight.tensor_split(3, 1)[rank])
        assert torch.equal(output, results[0][2])


def test_fewer_columns_rows_or_channels_than_ranks_are_an_error():
    def run(rank, world_size):
        few = [param[:2] if i < 2 else param for i, param in enumerate(init_params())]
        makers = {
            "columns": lambda: ColumnParallelLinear(8, 2),
            "rows": lambda: RowParallelLinear(2, 8),
            "hidden": lambda: TensorParallelMLP(8, 2),
            "filters": lambda: TensorParallelLeNet(few),
            "dimension": lambda: own_part(torch.ones(5, 2), 1),
        }
        said = {name: complaint(make) for name, make in makers.items()}
        return said, ColumnParallelLinear(1, 3).weight.shape[0]  # as many as ranks are enough

    for said, own in launch(run, 3, timeout=LIMIT):
        assert own == 1
        assert set(said.values()) == {"2 columns, rows or channels are too few for 3 ranks"}


def test_a_part_is_a_copy_that_keeps_only_itself():
    def run(rank, world_size):
        whole = torch.arange(10.0, requires_grad=True)
        own = own_part(whole, 0)
        own += 100
        return own, own.untyped_storage().nbytes(), whole.detach().tolist()

    (first, nbytes, whole), (second, *_) = launch(run, 2, timeout=LIMIT)
    assert whole == list(range(10)) and nbytes == 20
    assert torch.cat([first, second]).tolist() == list(range(100, 110))
    assert not first.requires_grad


# Whole networks


def mlp_of_torch():
    return nn.Sequential(nn.Linear(IN, OUT), nn.GELU(), nn.Linear(OUT, IN))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_mlp_is_that_of_one_process_with_one_allreduce_each_way(k):
    def run(rank, world_size):
        mlp = seeded(2, TensorParallelMLP, IN, OUT).double()
        whole = seeded(2, mlp_of_torch).double()
        batches = batches_of((2, 3, IN), IN)
        ours, theirs = training(mlp, batches), training(whole, batches)
        cuts = {"columns.weight": 0, "columns.bias": 0, "rows.weight": 1}
        theirs = [part(t, cuts.get(name)) for (name, _), (_, t) in zip(ours, theirs, strict=True)]
        X = batches[0][0].clone().requires_grad_()
        with counted_allreduces() as forward:
            output = mlp(X)
        with counted_allreduces() as backward:
            output.sum().backward()
        return distance([tensor for _, tensor in ours], theirs), forward, backward

    for difference, forward, backward in launch(run, k, timeout=LIMIT):
        assert difference < 1e-12
        assert forward == backward == [2 * 3 * IN]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_lenet_in_parts_trains_as_in_one_process(k):
    def run(rank, world_size):
        data = torch.Generator().manual_seed(6)
        params = [param.double() for param in init_params(0.1, data)]
        given = [param.clone() for param in params]
        net = TensorParallelLeNet(params)
        whole = [param.clone().requires_grad_() for param in params]
        differ = []
        for _ in range(3):
            X = torch.randn(8, 1, 28, 28, generator=data, dtype=torch.float64)
            y = torch.arange(8)
            mine, their = X.clone().requires_grad_(), X.clone().requires_grad_()
            ours, theirs = [net(mine)], [lenet(their, whole)]
            for logits in (ours[0], theirs[0]):
                F.cross_entropy(logits, y).backward()
            ours += [mine.grad, *(param.grad for param in net.params)]
            grads = [part(p.grad, dim) for p, dim in zip(whole, LENET_CUTS, strict=True)]
            differ.append(distance(ours, [theirs[0], their.grad, *grads]))
            step(net.params, 0.1)
            step(whole, 0.1)
        weights = [part(p, dim) for p, dim in zip(whole, LENET_CUTS, strict=True)]
        differ.append(distance(net.params, weights))
        copies = [net.params[3].detach(), net.params[7].detach()]
        return differ, copies, distance(params, given), distance(given, whole)

    results = launch(run, k, timeout=LIMIT)
    for differ, copies, changed, moved in results:
        assert max(differ) < 1e-12
        assert distance(copies, results[0][1]) == 0  # biases that all ranks have stay equal
        assert changed == 0 and moved > 1e-3


def test_lenet_needs_two_allreduces_each_way():
    def run(rank, world_size):
        net = TensorParallelLeNet(init_params(0.1))
        sizes = []
        for wants_gradient in (True, False):
            X = torch.ones(4, 1, 28, 28, requires_grad=wants_gradient)
            with counted_allreduces() as forward:
                logits = net(X)
            with counted_allreduces() as backward:
                logits.sum().backward()
            sizes.append((forward, backward))
        with count_bytes() as ledger, torch.no_grad():
            net(X)
        return sizes, sum(ledger.bytes.values())

    forward, hidden, images = [4 * 50 * 9 * 9, 4 * 10], 4 * 800, 4 * 28 * 28
    for sizes, nbytes in launch(run, 2, timeout=LIMIT):
        assert sizes == [(forward, [hidden, images]), (forward, [hidden])]
        assert nbytes == 4 * sum(forward)
