"""NCCL's messages: what can be tried without GPUs, with gloo in NCCL's place, and the choice."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT, attempt

from d2lpar import ranks
from d2lpar.collectives.schedules import direct, recursive_doubling, ring, star, tree
from d2lpar.ranks import nccl
from d2lpar.ranks.launcher import launch
from d2lpar.ranks.nccl import NcclMessages, messages_for
from d2lpar.ranks.transport import Messages, Receive, Send, take

add = torch.Tensor.add_


class OverGloo(NcclMessages):
    """Sends CPU tensors as NCCL's messages are sent, all those of a step at once, but over gloo."""

    batches = 0

    def _is_batched(self, tensor):
        return True

    def _post(self, moves, tag=0):
        self.batches += 1
        return super()._post(moves, tag)


def test_a_step_is_one_batch_and_right():
    def check(rank, k):
        transport = OverGloo(dist.group.WORLD)
        complaints = []
        for numel in (0, 1, 1_000_003):
            for into, factor in ((take, 0), (add, 1)):
                tensor = torch.arange(float(numel)) * (rank + 1)
                before = transport.batches
                sends = [Send((rank + 1) % k, tensor.clone())]
                transport.exchange(sends, [Receive((rank - 1) % k, tensor, into)], 30)
                source = (rank - 1) % k + 1
                want = torch.arange(float(numel)) * (source + factor * (rank + 1))
                if not torch.equal(tensor, want) or transport.batches != before + 1:
                    complaints.append((numel, factor))
        usual = dist.new_group()
        ranks.use_messages(usual)
        ranks.member_of(None, None)[0].transport = transport
        for schedule in (star, ring, tree, direct, recursive_doubling):
            mine, theirs = (torch.linspace(0.1, 1 + rank, 1003) for _ in range(2))
            ranks.allreduce(mine, schedule)
            ranks.allreduce(theirs, schedule, group=usual)
            if not torch.equal(mine, theirs):
                complaints.append(schedule.__name__)
        return complaints, transport.tell(b"%d" % rank, 30)

    assert launch(check, 3, timeout=LIMIT) == [([], [b"0", b"1", b"2"])] * 3


def test_plans_say_by_which_backend_a_tensor_goes_where_that_may_differ():
    def check(rank, k):
        group = dist.new_group()
        transport = ranks.member_of(group, None)[0].transport = NcclMessages(group)
        if rank:  # here it is as if the tensor were on a GPU
            transport.home = lambda tensor: torch.device("meta")
        kind, text, *_ = attempt(ranks.allreduce, torch.ones(3), group=group)
        assert kind == "MismatchError"
        return text.splitlines()[1:]

    for usual, odd in launch(check, 2, timeout=LIMIT):
        assert "sum of float32 [3], " in usual and "sum of float32 [3] on meta, " in odd


@pytest.mark.parametrize(
    ("backends", "kind", "notes"),
    [
        ("cpu:gloo", Messages, "cpu"),
        ("cpu:gloo,cuda:gloo", Messages, "cpu"),
        ("cpu:gloo,cuda:nccl", NcclMessages, "cpu"),  # of a group made without naming a backend
        ("cuda:nccl", NcclMessages, "cuda:1"),
    ],
)
def test_messages_are_nccls_where_a_group_has_it_for_gpus(backends, kind, notes, monkeypatch):
    group = Group()
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 5)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(8)))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "1")
    transport = messages_for(group)
    assert type(transport) is kind and str(transport.device) == notes
    assert transport.home(torch.ones(1)) == transport.device
    on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 3))
    assert str(transport.home(on_gpu)) == ("cuda:3" if kind is NcclMessages else "cpu")


class Group:
    """Stands for a process group on GPUs."""

    bound_device_id = None


def test_the_gpu_is_that_of_the_group_or_of_the_rank_and_not_the_threads(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch.cuda, "current_device", lambda: pytest.fail("each thread has its own")
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
        results = []
        for where in (device, torch.device("cpu")):
            for schedule in (ring, star, recursive_doubling):
                tensor = torch.arange(1003.0, device=where) * (rank + 1)
                ranks.allreduce(tensor, schedule, group=group)
                results.append(torch.equal(tensor.cpu(), torch.arange(1003.0) * 3))
        return results

    assert launch(check, 2, backend) == [[True] * 6] * 2
