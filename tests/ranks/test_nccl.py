"""NCCL's messages: what can be tried without GPUs, over gloo; and the choice."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT, attempt, in_ranks

from d2lpar import ranks
from d2lpar.collectives.schedules import direct, recursive_doubling, ring, star, tree
from d2lpar.ranks import nccl
from d2lpar.ranks.launcher import launch
from d2lpar.ranks.nccl import NcclMessages, messages_for
from d2lpar.ranks.transport import Messages


class OverGloo(NcclMessages):
    """Sends CPU tensors as NCCL's messages, a step's all at once, but over gloo."""

    batches = 0

    def _is_batched(self, tensor):
        return True

    def _post(self, moves, tag=0):
        self.batches += bool(moves)
        return super()._post(moves, tag)


def test_a_step_is_one_batch_and_right():
    def check(rank, k):
        transport = OverGloo(dist.group.WORLD)
        ranks.use_messages()
        ranks.member_of(None, None)[0].transport = transport
        for numel in (0, 3, 1_000_003):
            for schedule in (star, ring, tree, direct, recursive_doubling):
                tensor = torch.arange(float(numel)) * (rank + 1)
                transport.batches = 0
                ranks.allreduce(tensor, schedule)
                assert torch.equal(tensor, torch.arange(float(numel)) * 6), schedule
                # 1 for the notes
                assert transport.batches <= 1 + len(list(schedule(k)))
        return transport.tell(b"%d" % rank, 30)

    assert launch(check, 3, timeout=LIMIT) == [[b"0", b"1", b"2"]] * 3


@in_ranks(2)
def test_plans_say_by_which_backend_a_tensor_goes_where_that_may_differ(rank, k):
    group = dist.new_group()
    transport = ranks.member_of(group, None)[0].transport = NcclMessages(group)
    if rank:  # here it is as if the tensor were on a GPU
        transport.home = lambda tensor: torch.device("meta")
    kind, text, *_ = attempt(ranks.allreduce, torch.ones(3), group=group)
    _, usual, odd = text.splitlines()
    assert kind == "MismatchError" and "sum of float32 [3], " in usual
    assert "sum of float32 [3] on meta, " in odd


class Group:
    """Stands for a process group on GPUs."""

    bound_device_id = None


@pytest.mark.parametrize(
    ("backends", "kind", "notes"),
    [
        ("cpu:gloo,cuda:gloo", Messages, "cpu"),
        # of a group made without naming a backend
        ("cpu:gloo,cuda:nccl", NcclMessages, "cpu"),
        ("cuda:nccl", NcclMessages, "cuda:1"),
    ],
)
def test_messages_are_nccls_where_a_group_has_it_for_gpus(
    backends, kind, notes, monkeypatch
):
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 5)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(8)))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "1")
    group = Group()  # kept: a transport does not keep it
    transport = messages_for(group)
    assert type(transport) is kind and str(transport.device) == notes
    assert transport.home(torch.ones(1)) == transport.device
    on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 3))
    assert str(transport.home(on_gpu)) == ("cuda:3" if kind is NcclMessages else "cpu")


def test_the_gpu_is_that_of_the_group_or_of_the_rank_and_not_the_threads(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch.cuda, "current_device", lambda: pytest.fail("each thread has one")
    )
    monkeypatch.setattr(dist, "get_rank", lambda: 6)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    group = Group()
    assert nccl._gpu_of(group) == torch.device("cuda", 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert nccl._gpu_of(group) == torch.device("cuda", 3)
    group.bound_device_id = torch.device("cuda", 1)
    assert nccl._gpu_of(group) == torch.device("cuda", 1)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["nccl", None])
def test_gpus(backend):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    def check(rank, k, backend):
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        group = dist.new_group(backend=backend or "cpu:gloo,cuda:nccl")
        ranks.use_messages(group)
        for where in (device, torch.device("cpu")):
            for schedule in (ring, star, recursive_doubling):
                tensor = torch.arange(1003.0, device=where) * (rank + 1)
                ranks.allreduce(tensor, schedule, group=group)
                assert torch.equal(tensor.cpu(), torch.arange(1003.0) * 3)

    launch(check, 2, backend)
