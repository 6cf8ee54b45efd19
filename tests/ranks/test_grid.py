"""Ranks in rows and columns: two ways of splitting at once, one process's weights."""

import copy

import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT, attempt, clones, distance, in_ranks
from torch import nn
from torch.nn import functional as F

from d2lpar import (
    DistributedDataParallel,
    DistributedPipeline,
    NaiveDistributedDataParallel,
    cut,
    init_params,
    launch,
    lenet,
    ranks,
)
from d2lpar.ranks._old import make_grid
from d2lpar.study.layers import TensorParallelLeNet

STEPS, LR, ROWS = 5, 0.1, 16
LENET_CUTS = (
    0,
    0,
    1,
    None,
    1,
    0,
    0,
    None,
)  # along which dimension each parameter is cut


@pytest.mark.parametrize("rows, columns", [(1, 4), (4, 1), (2, 3)])
def test_rows_are_neighbours_and_columns_have_one_of_each_row(rows, columns):
    def run(rank, world_size):
        groups = make_grid(rows, columns)
        i, j = divmod(rank, columns)
        row = [i * columns + other for other in range(columns)]
        column = [other * columns + j for other in range(rows)]
        for group, members in zip(groups, (row, column), strict=True):
            assert dist.get_process_group_ranks(group) == members
            tensor = torch.tensor(10.0**rank, dtype=torch.float64)
            ranks.allreduce(tensor, group=group)
            assert tensor.item() == sum(10.0**r for r in members)

    launch(run, rows * columns, timeout=LIMIT)


@in_ranks(2)
def test_a_grid_of_another_size_than_the_world_is_an_error(rank, k):
    said = [
        attempt(make_grid, *sizes)[:2] for sizes in [(2, 2), (1, 1), (0, 2), (-1, -2)]
    ]
    assert [kind for kind, _ in said] == ["ValueError"] * 4
    assert said[0][1] == "2 ranks do not make 2 rows of 2 columns"
    row, _ = make_grid(1, 2)  # nothing was left half done
    assert dist.get_world_size(row) == 2


# Two ways at once


def train(params, add_gradients, part=0, of=1):
    """Some steps on this part of each batch; in float64, as they amplify rounding."""
    data = torch.Generator().manual_seed(4)
    for _ in range(STEPS):
        X = torch.randn(ROWS, 1, 28, 28, generator=data, dtype=torch.float64)
        y = torch.randint(10, (ROWS,), generator=data)
        add_gradients(*(rows.tensor_split(of)[part] for rows in (X, y)))
        with torch.no_grad():
            for param in params:
                param -= LR * param.grad
                param.grad = None


def tensor_split(row, column, averages):
    """A LeNet cut among a row: its parameters, what adds gradients, the right ones."""
    params = [p.double() for p in init_params(0.1, torch.Generator().manual_seed(3))]
    whole = [param.clone().requires_grad_() for param in params]
    train(whole, lambda X, y: F.cross_entropy(lenet(X, whole), y).backward())
    part = dist.get_rank(row)
    theirs = [
        p if dim is None else p.tensor_split(2, dim)[part]
        for p, dim in zip(whole, LENET_CUTS, strict=True)
    ]
    net = TensorParallelLeNet(params, row)
    replica = DistributedDataParallel(net, process_group=column) if averages else net
    return net.params, lambda X, y: F.cross_entropy(replica(X), y).backward(), theirs


def pipelined(row, column, averages):
    """The same of a LeNet whose layers are shared out among the ranks of a row."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)),
    ).double()
    for param in model.parameters():
        nn.init.normal_(param, std=0.1)
    whole, number = copy.deepcopy(model), dist.get_rank(row)
    train(
        list(whole.parameters()), lambda X, y: F.cross_entropy(whole(X), y).backward()
    )
    stages = cut(model, 2)
    stages[number] = replica = NaiveDistributedDataParallel(stages[number], column)
    criterion = nn.CrossEntropyLoss(reduction="sum")
    pipeline = DistributedPipeline(stages, criterion, 4, count=len, group=row)

    def add_gradients(X, y):
        pipeline.forward_backward(X, y)
        if averages:
            replica.average_gradients()

    return (
        list(replica.parameters()),
        add_gradients,
        list(cut(whole, 2)[number].parameters()),
    )


@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize("split", [tensor_split, pipelined])
@in_ranks(4)
def test_two_ways_at_once_get_the_weights_of_one_process(rank, k, split, averages):
    torch.manual_seed(3)
    row, column = make_grid(2, 2)
    params, add_gradients, theirs = split(row, column, averages)
    before = clones(params)
    train(params, add_gradients, dist.get_rank(column), 2)
    assert distance(before, theirs) > 1e-2, "nothing was trained"
    from_whole = distance(params, theirs)
    assert from_whole < 1e-12 if averages else from_whole > 1e-3
