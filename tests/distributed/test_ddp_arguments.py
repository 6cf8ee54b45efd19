"""DistributedDataParallel takes what torch's takes, and names what it refuses."""

import inspect
from math import nan

import pytest
import torch
import torch.distributed as dist
from helpers import attempt, on_ranks
from torch import nn

from d2lpar import DistributedDataParallel, SyncBatchNorm
from d2lpar.distributed.ddp_arguments import REFUSED, check_gpu

TORCHS = nn.parallel.DistributedDataParallel
TAKEN = {
    "device_ids": [],
    "output_device": None,
    "dim": 1,
    "broadcast_buffers": True,
    "init_sync": False,
    "process_group": None,
    "bucket_cap_mb": 3,
    "find_unused_parameters": True,
    "check_reduction": True,
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "batched_grad_copy": True,
    "forward_sync_buffers": True,
}
PLACE = "but the module is on cpu: .* leave both out"


def test_parameters_are_torchs_and_then_ours():
    ours, theirs = (
        [
            (p.name, p.kind, p.default)
            for p in inspect.signature(kind).parameters.values()
        ]
        for kind in (DistributedDataParallel, TORCHS)
    )
    # torch 2.11 has not all, and True for broadcast_buffers
    names = {name for name, *_ in theirs}
    theirs = [(*p[:2], None) if p[0] == "broadcast_buffers" else p for p in theirs]
    assert [p for p in ours if p[0] in names] == theirs
    assert [p[0] for p in ours if p[1] is inspect.Parameter.KEYWORD_ONLY] == ["weight"]
    assert names - {"module"} <= {*TAKEN, *REFUSED}


def takes(rank, k):
    """What is taken makes no difference to the mean, and is kept as with torch's."""
    for name, value in [*TAKEN.items(), ("process_group", dist.new_group())]:
        model = DistributedDataParallel(nn.Linear(2, 2), **{name: value})
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
        assert model.module.weight.grad.unique().tolist() == [1.5], name
    given = {"find_unused_parameters": True, "gradient_as_bucket_view": True, "dim": 1}
    ours, theirs = (
        kind(nn.Linear(2, 2), **given) for kind in (DistributedDataParallel, TORCHS)
    )
    flags = "require_backward_grad_sync", "require_forward_param_sync"
    for name in {*TAKEN, *flags} & set(dir(ours)) & set(dir(theirs)):
        assert getattr(ours, name) == getattr(theirs, name), name


def waits_for_nobody_without_init_sync(rank, k):
    group, beside = dist.new_group(), dist.new_group()
    if rank == 1:
        dist.recv(torch.empty(1), 0, beside)  # not before rank 0 has wrapped its module
    model = DistributedDataParallel(
        nn.Linear(2, 2), process_group=group, init_sync=False
    )
    if rank == 0:
        dist.send(torch.empty(1), 1, beside)
    model(torch.full((1, 2), 1.0 + rank)).sum().backward()
    assert model.module.weight.grad.unique().tolist() == [1.5]


def raises(rank, k):
    group, lazy = dist.new_group(), nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    norm = nn.Sequential(nn.Linear(2, 2), SyncBatchNorm(2))
    for given, error, words in [
        *(
            ({"device_ids": ids}, ValueError, PLACE)
            for ids in ([0], ["cuda:1"], [0, 1])
        ),
        ({"output_device": torch.device("cuda", 1)}, ValueError, PLACE),
        ({"device_ids": ["cpu"]}, ValueError, "non cpu device"),
        ({"device_ids": 0}, TypeError, "device_ids must be a list of one GPU"),
        ({"device_ids": "cuda"}, TypeError, "device_ids must be a list of one GPU"),
        ({"device_ids": group}, TypeError, "process_group="),
        ({"init_sync": group}, TypeError, "process_group="),  # by position
        (
            {"weight": "row"},
            ValueError,
            'weight must be "equal" or "rows", not \'row\'',
        ),
        *(
            ({"bucket_cap_mb": cap}, ValueError, f"positive, not {cap}")
            for cap in (0, -1, nan)
        ),
        *(
            ({name: 1}, NotImplementedError, f"^{name}=1 .* use torch")
            for name in REFUSED
        ),
        ({"mixed_precision": []}, NotImplementedError, "^mixed_precision="),
        ({"device_mesh": torch.zeros(2)}, NotImplementedError, "^device_mesh="),
        ({"module": lazy}, ValueError, r"^1\.weight has no shape yet"),
        (
            {"module": norm, "weight": "rows"},
            ValueError,
            r"loss by rows \* k / all rows",
        ),
        ({"module": nn.ReLU()}, ValueError, "nothing to average"),
    ]:
        with pytest.raises(error, match=words):
            DistributedDataParallel(**{"module": nn.Linear(2, 2), **given})


test_arguments = on_ranks(2, [takes, waits_for_nobody_without_init_sync, raises])


def test_without_a_process_group_it_says_what_to_do():
    kind, words, *_ = attempt(DistributedDataParallel, nn.Linear(2, 2))
    assert kind == "ValueError" and "inside launch or under torchrun" in words


@pytest.mark.gpu
def test_gpu_of_the_module_may_be_named():
    module = nn.Linear(2, 2).to("cuda:0")
    for device_ids in ([0], ["cuda:0"], [torch.device("cuda", 0)]):
        check_gpu(module, device_ids, None)
    with pytest.raises(ValueError, match="on cuda:0"):
        check_gpu(module, [1], None)
