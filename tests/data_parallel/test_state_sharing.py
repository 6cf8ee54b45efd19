"""All ranks begin with one rank's state, or learn how their modules differ."""

import pytest
import torch
from helpers import LIMIT, attempts
from torch import nn

from d2lpar import DistributedDataParallel, NaiveDistributedDataParallel, count_bytes, launch
from d2lpar.data_parallel import state_sharing
from d2lpar.data_parallel.state_sharing import share_state, share_tensors


def model(rank):
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module.register_buffer("mask", torch.tensor([rank == 0, rank == 1]), persistent=False)
    module.register_buffer("turned", torch.zeros(2, 3).t())
    module.sixteen = nn.Parameter(torch.zeros(3, dtype=torch.float16), requires_grad=False)
    for tensor in (*module.parameters(), *module[1].buffers(), module.turned):
        tensor.data.fill_(rank)
    return module


def values(tensors):
    return {value for tensor in tensors for value in tensor.flatten().tolist()}


def takes_rank_0s_state(rank, k):
    for share in (share_state, NaiveDistributedDataParallel, DistributedDataParallel):
        module = model(rank)
        share(module)
        assert values(module.parameters()) | values(module[1].buffers()) == {0}
        assert module.mask.tolist() == [True, False] and values([module.turned]) == {0}
    share_state(module := model(rank), buffers=False)
    assert values(module.parameters()) == {0} and values([module.turned]) == {rank}


def takes_another_ranks_buffers(rank, k):
    module = model(rank)
    share_tensors(module.buffers(), 1)
    assert module.mask.tolist() == [False, True] and values([module.turned]) == {1}
    assert values(module[1].buffers()) == {1} and values(module.parameters()) == {rank}


def sends_few_messages(rank, k):
    """As float32 travel, in this order, 12 bytes and five times 80 and 16; then int64, and bool."""
    for limit, messages in ((2**20, 1 + 2), (100, 6 + 2), (1, 11 + 2)):
        state_sharing.MESSAGE_BYTES = limit
        module = nn.Sequential(*[nn.Linear(5, 4) for _ in range(5)])
        module.sixteen = nn.Parameter(torch.zeros(3, dtype=torch.float16))
        with torch.no_grad():
            for param in module.parameters():
                param.fill_(rank + 0.5)
        large, flags = torch.tensor(2**53 + rank), torch.tensor([rank == 1] * 3)
        with count_bytes() as ledger:
            share_tensors([*module.parameters(), large, flags], 1)
        assert values(module.parameters()) == {1.5}
        assert large.item() == 2**53 + 1 and flags.all()
        if rank == 1:
            assert sum(n for (src, _), n in ledger.messages.items() if src == 1) == messages * (
                k - 1
            )


def is_seen_by_autograd_unless_it_is_data(rank, k):
    module, X = model(rank), torch.ones(2, 3, requires_grad=True)
    mean = module[1].running_mean
    loss = (X * mean).sum()
    share_tensors([mean.data], 1)
    loss.backward()  # with the numbers of rank 1: as torch, we do not keep the old ones
    assert values([X.grad]) == {1}
    loss = (X * mean).sum()
    share_tensors([mean], 0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def odd_module(case):
    """What rank 2 has instead of a Linear and a BatchNorm."""
    linear, norm = nn.Linear(2, 3), nn.BatchNorm1d(3)
    module = nn.Sequential(linear, norm)
    if case == "name":
        module = nn.Sequential(linear)
        module.add_module("norm", norm)
    elif case == "shape":
        module = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    elif case == "dtype":
        linear.double()
    elif case == "order":
        linear._parameters = dict(reversed(linear._parameters.items()))
    elif case == "one more":
        module.append(nn.Linear(3, 1))
    elif case == "more at the end":
        norm.register_buffer("late", torch.zeros(1))
    elif case == "one less":
        module[1] = nn.BatchNorm1d(3, affine=False)
    elif case == "strides":  # gradients lie in a bucket as their parameters do
        linear.weight.data = linear.weight.data.t().contiguous().t()
    elif case == "frozen":
        norm.requires_grad_(False)
    elif case == "buffers":
        module[1] = nn.BatchNorm1d(3, track_running_stats=False)
    return module


DIFFERENCES = {  # case: what rank 0 has, what rank 2 has
    "name": ("1.weight, float32 [3]", "norm.weight, float32 [3]"),
    "shape": ("0.weight, float32 [3, 2]", "0.weight, float32 [4, 2]"),
    "dtype": ("0.weight, float32 [3, 2]", "0.weight, float64 [3, 2]"),
    "order": ("0.weight, float32 [3, 2]", "0.bias, float32 [3]"),
    "one more": ("1.running_mean, float32 [3]", "2.weight, float32 [1, 3]"),
    "more at the end": ("nothing more", "1.late, float32 [1]"),
    "one less": ("1.weight, float32 [3]", "1.running_mean, float32 [3]"),
    "frozen": ("1.weight, float32 [3]", "1.weight, float32 [3] (frozen)"),
    "buffers": ("1.running_mean, float32 [3]", "nothing more"),
    "strides": ("0.weight, float32 [3, 2]", "0.weight, float32 [3, 2] with strides [1, 3]"),
}


def refuses_modules_that_differ(rank, k):
    for case, (mine, other) in DIFFERENCES.items():
        for kind in (DistributedDataParallel, NaiveDistributedDataParallel):
            with pytest.raises(ValueError) as caught:
                kind(odd_module(case if rank == 2 else "even"))
            assert f" is {mine} on rank 0, but {other} on rank 2" in str(caught.value), case
    DistributedDataParallel(nn.Linear(2, 2))  # the group is as usable as before


CHECKS = [
    takes_rank_0s_state,
    takes_another_ranks_buffers,
    sends_few_messages,
    is_seen_by_autograd_unless_it_is_data,
    refuses_modules_that_differ,
]


@pytest.fixture(scope="module")
def found():
    return launch(attempts, 3, {check.__name__: check for check in CHECKS}, timeout=LIMIT)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_state(found, check):
    assert [of_rank[check.__name__] for of_rank in found] == [("ok", None)] * 3
