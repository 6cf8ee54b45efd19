"""All ranks begin with one rank's state. How modules differ, and what is said of it: test_ddp."""

from functools import partial

import torch
from torch import nn

from d2lpar import count_bytes
from d2lpar.data_parallel import state_sharing
from d2lpar.data_parallel.state_sharing import share_state, share_tensors
from d2lpar.ranks.launcher import launch

LIMIT = 60  # seconds, for what takes less than one


def model(rank):
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module.register_buffer("mask", torch.tensor([rank == 0, rank == 1]))
    module.register_buffer("turned", torch.full((2, 3), float(rank)).t())
    for tensor in (*module.parameters(), module[1].running_mean, module[1].num_batches_tracked):
        tensor.data.fill_(rank)
    return module


def numbers(tensors):
    return {float(tensor.flatten()[0]) for tensor in tensors}


def test_buffers_of_one_rank_are_taken_by_all():
    def share(rank, world_size):
        module = model(rank)
        share_tensors(module.buffers(), 1)
        buffers = dict(module.named_buffers())
        return (
            buffers["mask"].tolist(),
            buffers["turned"].tolist(),
            buffers["1.running_mean"].tolist(),
            buffers["1.num_batches_tracked"].item(),
            numbers(module.parameters()),
        )

    for rank, found in enumerate(launch(share, 3, timeout=LIMIT)):
        assert found == ([False, True], [[1.0, 1.0]] * 3, [1.0] * 3, 1, {float(rank)})


def test_a_graph_that_has_saved_a_buffer_does_not_see_it_change():
    def share(rank, world_size):
        module = model(rank)
        X = torch.ones(2, 3, requires_grad=True)
        loss = (X * module[1].running_mean).sum()
        share_tensors([buffer.data for buffer in module.buffers()], 1)
        loss.backward()  # with the numbers of rank 1: as torch, we do not keep the old ones
        return X.grad.tolist()

    assert launch(share, 2, timeout=LIMIT) == [[[1.0] * 3] * 2] * 2


def test_buffers_may_be_left_out():
    def share(rank, world_size):
        module = model(rank)
        share_state(module, buffers=False)
        return numbers(module.parameters()), module[1].running_mean.tolist()

    expected = [({0.0}, [float(rank)] * 3) for rank in range(2)]
    assert launch(share, 2, timeout=LIMIT) == expected


def test_many_tensors_travel_in_few_messages_and_none_is_larger_than_allowed():
    def share(rank, world_size, limit):
        state_sharing.MESSAGE_BYTES = limit
        module = nn.Sequential(*[nn.Linear(10, 10) for _ in range(6)], nn.Linear(100, 10))
        module.register_buffer("count", torch.tensor(rank))
        module.half_weight = nn.Parameter(torch.full((3,), float(rank), dtype=torch.float16))
        with torch.no_grad():
            for param in module.parameters():
                param.fill_(rank)
        with count_bytes() as ledger:
            share_tensors([*module.parameters(), *module.buffers()], 1)
        return numbers(module.parameters()), module.count.item(), ledger.messages[1, 0]

    # 440 bytes per layer, then 4,000 and 40 of the last one; then float16; then int64
    for limit, messages in ((2**20, 3), (900, 3 + 2 + 2), (1, 14 + 2)):
        first, second = launch(share, 2, limit, timeout=LIMIT)
        assert first[:2] == second[:2] == ({1.0}, 1)
        assert second[2] == messages


def test_autograd_sees_that_parameters_change_and_odd_tensors_are_refused():
    def share(rank, world_size):
        weight = nn.Parameter(torch.ones(2))
        product, found = (weight * weight).sum(), []
        share_tensors([weight, nn.Parameter(torch.ones(3))], 0)
        odd = {"expanded": torch.ones(1).expand(3), "sparse": torch.eye(2).to_sparse()}
        for call in (product.backward, *(partial(share_tensors, [odd[n]], 0) for n in odd)):
            try:
                call()
            except (RuntimeError, ValueError) as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    for inplace, expanded, sparse in launch(share, 2, timeout=LIMIT):
        assert inplace.startswith("RuntimeError") and "inplace operation" in inplace
        assert expanded.startswith("ValueError: the tensor is an expanded view")
        assert sparse.startswith("ValueError: the tensor is sparse")
