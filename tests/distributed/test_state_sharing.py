"""All ranks begin with one rank's state, or learn how their modules differ."""

import pytest
import torch
from helpers import on_ranks
from torch import nn

from d2lpar import DistributedDataParallel, NaiveDistributedDataParallel, count_bytes
from d2lpar.distributed import state_sharing
from d2lpar.distributed.state_sharing import share_state, share_tensors


def model(rank):
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module.register_buffer(
        "mask", torch.tensor([rank == 0, rank == 1]), persistent=False
    )
    module.register_buffer("turned", torch.zeros(2, 3).t())
    module.sixteen = nn.Parameter(
        torch.zeros(3, dtype=torch.float16), requires_grad=False
    )
    for tensor in (*module.parameters(), *module[1].buffers(), module.turned):
        tensor.data.fill_(rank)
    return module


def values(*tensors):
    return {value for tensor in tensors for value in tensor.flatten().tolist()}


def takes_one_ranks_state(rank, k):
    def others_buffers(module):
        share_tensors(module.buffers(), 1)

    for share, params, buffers in [
        (share_state, 0, 0),
        (NaiveDistributedDataParallel, 0, 0),
        (DistributedDataParallel, 0, 0),
        (lambda module: share_state(module, buffers=False), 0, rank),
        (others_buffers, rank, 1),
    ]:
        share(module := model(rank))
        assert values(*module.parameters()) == {params}
        assert values(*module[1].buffers(), module.turned) == {buffers}
        assert module.mask.tolist() == [buffers == 0, buffers == 1]


def sends_few_messages(rank, k):
    """As float32: 12 bytes, then five times 80 and 16; after these, int64 and bool."""
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
        assert values(*module.parameters()) == {1.5}
        assert large.item() == 2**53 + 1 and flags.all()
        sent = sum(n for (src, _), n in ledger.messages.items() if src == 1)
        assert rank != 1 or sent == messages * (k - 1)


def is_seen_by_autograd_unless_it_is_data(rank, k):
    module, X = model(rank), torch.ones(2, 3, requires_grad=True)
    mean = module[1].running_mean
    loss = (X * mean).sum()
    share_tensors([mean.data], 1)
    loss.backward()  # with the numbers of rank 1: as torch, we do not keep the old ones
    assert values(X.grad) == {1}
    loss = (X * mean).sum()
    share_tensors([mean], 0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def renamed(module):
    module._modules["norm"] = module._modules.pop("1")


def reordered(module):
    module[0]._parameters = dict(reversed(module[0]._parameters.items()))


def turned(module):
    """Gradients lie in a bucket as their parameters do."""
    module[0].weight.data = module[0].weight.data.t().contiguous().t()


WEIGHT, SCALE = "0.weight, float32 [3, 2]", "1.weight, float32 [3]"
DIFFERENCES = [  # what rank 2 does to its module, what rank 0 has, and what rank 2
    (renamed, SCALE, "norm.weight, float32 [3]"),
    (lambda m: m.insert(0, nn.Linear(2, 4)), WEIGHT, "0.weight, float32 [4, 2]"),
    (lambda m: m[0].double(), WEIGHT, "0.weight, float64 [3, 2]"),
    (reordered, WEIGHT, "0.bias, float32 [3]"),
    (
        lambda m: m[1].register_buffer("late", torch.zeros(1)),
        "nothing more",
        "1.late, float32 [1]",
    ),
    (
        lambda m: m[1].register_buffer("running_mean", None),
        "1.running_mean, float32 [3]",
        "",
    ),
    (lambda m: m[1].requires_grad_(False), SCALE, SCALE + " (frozen)"),
    (turned, WEIGHT, WEIGHT + " with strides [1, 3]"),
]


def refuses_modules_that_differ(rank, k):
    for change, mine, other in DIFFERENCES:
        for kind in (DistributedDataParallel, NaiveDistributedDataParallel):
            module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
            if rank == 2:
                change(module)
            with pytest.raises(ValueError) as caught:
                kind(module)
            assert f" is {mine} on rank 0, but {other}" in str(caught.value)
            assert "on rank 2" in str(caught.value)
    DistributedDataParallel(nn.Linear(2, 2))  # the group is as usable as before


test_state = on_ranks(
    3,
    [
        takes_one_ranks_state,
        sends_few_messages,
        is_seen_by_autograd_unless_it_is_data,
        refuses_modules_that_differ,
    ],
)
