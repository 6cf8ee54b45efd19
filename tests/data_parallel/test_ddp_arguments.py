"""DistributedDataParallel takes what torch's takes, and says by name what it refuses."""

import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from d2lpar import DistributedDataParallel
from d2lpar.data_parallel.ddp_arguments import check_gpu
from d2lpar.ranks.launcher import launch

LIMIT = 60  # seconds, for what takes less than one
TORCHS = nn.parallel.DistributedDataParallel


def parameters_of(kind):
    return list(inspect.signature(kind).parameters.values())


def test_parameters_are_torchs_and_then_ours():
    ours, theirs = parameters_of(DistributedDataParallel), parameters_of(TORCHS)
    names = {p.name for p in theirs}
    shared = [p for p in ours if p.name in names]  # torch 2.6 has not all, init_sync for one
    assert [p.name for p in shared] == [p.name for p in theirs]
    assert [p.kind for p in shared] == [p.kind for p in theirs]
    for p, q in zip(shared, theirs, strict=True):  # torch 2.6 has True, 2.13 None, which means it
        assert p.default == q.default or (p.name, q.default) == ("broadcast_buffers", True)
    own = [p for p in ours if p.kind is p.KEYWORD_ONLY]
    assert len(ours) - len(own) >= len(theirs)
    assert {p.name for p in own} == {"weight", "group"}


def test_every_parameter_is_taken_or_refused_by_name():
    values = {
        "device_ids": [],
        "dim": 1,
        "broadcast_buffers": True,
        "init_sync": False,
        "bucket_cap_mb": 3,
        "find_unused_parameters": True,
        "check_reduction": True,
        "gradient_as_bucket_view": True,
        "static_graph": True,
        "batched_grad_copy": True,
        "forward_sync_buffers": True,
    }
    refused = {
        "delay_all_reduce_named_params",
        "param_to_hook_all_reduce",
        "mixed_precision",
        "device_mesh",
        "skip_all_reduce_unused_params",
        "bucket_cap_mb_list",
    }

    def wrap(rank, world_size):
        outcomes = {}
        for p in parameters_of(TORCHS)[1:]:
            value = values.get(p.name, [("a", 1)])
            if p.name == "process_group":
                value = dist.new_group()
            if p.name == "output_device":
                value = None
            try:
                model = DistributedDataParallel(nn.Linear(2, 2), **{p.name: value})
                model(torch.full((1, 2), 1.0 + rank)).sum().backward()
                grad = model.module.weight.grad
                outcomes[p.name] = p.name not in refused and grad.unique().tolist() == [1.5]
            except NotImplementedError as error:
                outcomes[p.name] = str(error).startswith(f"{p.name}=")
                assert "torch.nn.parallel.DistributedDataParallel" in str(error)
                assert p.name in refused
        return outcomes

    for outcomes in launch(wrap, 2, timeout=LIMIT):
        assert [name for name, good in outcomes.items() if not good] == []
        assert set(outcomes) == {p.name for p in parameters_of(TORCHS)[1:]}


def test_attributes_are_torchs():
    def wrap(rank, world_size):
        given = {"find_unused_parameters": True, "gradient_as_bucket_view": True, "dim": 1}
        models = [kind(nn.Linear(2, 2), **given) for kind in (DistributedDataParallel, TORCHS)]
        names = [
            "device_ids",
            "output_device",
            "dim",
            "find_unused_parameters",
            "gradient_as_bucket_view",
            "static_graph",
            "broadcast_buffers",
            "require_backward_grad_sync",
            "require_forward_param_sync",
            "process_group",
        ]
        return [name for name in names if getattr(models[0], name) != getattr(models[1], name)]

    assert launch(wrap, 2, timeout=LIMIT) == [[], []]


def test_gpus_of_a_module_on_the_cpu_are_refused():
    def wrap(rank, world_size):
        messages = []
        for args, kwargs in [
            (([0],), {}),
            ((), {"device_ids": [rank]}),
            ((), {"device_ids": ["cuda:1"], "output_device": 1}),
            ((), {"output_device": torch.device("cuda", 1)}),
            ((), {"device_ids": [0, 1]}),
        ]:
            for kind in (DistributedDataParallel, TORCHS):
                with pytest.raises(ValueError) as caught:
                    kind(nn.Linear(2, 2), *args, **kwargs)
            with pytest.raises(ValueError) as caught:
                DistributedDataParallel(nn.Linear(2, 2), *args, **kwargs)
            messages.append(str(caught.value))
        return messages

    for messages in launch(wrap, 2, timeout=LIMIT):
        assert all("on cpu" in message and "leave both out" in message for message in messages)


def test_group_in_the_place_of_another_argument_is_refused():
    def wrap(rank, world_size):
        for place in ((), (None, None, 0, True)):
            with pytest.raises(TypeError, match="process_group="):
                DistributedDataParallel(nn.Linear(2, 2), *place, dist.new_group())

    launch(wrap, 2, timeout=LIMIT)


def test_old_name_of_process_group_still_works():
    def wrap(rank, world_size):
        group = dist.new_group()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = DistributedDataParallel(nn.Linear(2, 2), group=group)
        kinds = [w.category for w in caught if "process_group" in str(w.message)]
        with pytest.raises(TypeError, match="group is the old name of process_group"):
            DistributedDataParallel(nn.Linear(2, 2), process_group=group, group=group)
        return model.process_group is group, kinds

    assert launch(wrap, 2, timeout=LIMIT) == [(True, [DeprecationWarning])] * 2


def test_without_init_sync_nobody_waits_for_another_rank():
    def wrap(rank, world_size):
        group, beside = dist.new_group(), dist.new_group()
        if rank == 1:
            dist.recv(torch.empty(1), 0, beside)  # not before rank 0 has wrapped its module
        model = DistributedDataParallel(nn.Linear(2, 2), process_group=group, init_sync=False)
        if rank == 0:
            dist.send(torch.empty(1), 1, beside)
        nn.init.ones_(model.module.weight)
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
        return model.module.weight.grad.unique().tolist()

    assert launch(wrap, 2, timeout=20) == [[1.5]] * 2


@pytest.mark.parametrize(
    ("lazy", "name"), [(nn.LazyLinear(3), "1.weight"), (nn.LazyBatchNorm1d(), "1.weight")]
)
def test_lazy_modules_are_refused_by_name(lazy, name):
    def wrap(rank, world_size):
        with pytest.raises(ValueError, match="has no shape yet") as caught:
            DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), lazy))
        return str(caught.value).split()[0]

    assert launch(wrap, 2, timeout=LIMIT) == [name] * 2


def test_without_a_process_group_it_says_what_to_do():
    with pytest.raises(ValueError, match="inside launch or under torchrun"):
        DistributedDataParallel(nn.Linear(2, 2))


@pytest.mark.gpu
def test_gpu_of_the_module_may_be_named():
    module = nn.Linear(2, 2).to("cuda:0")
    for device_ids in ([0], ["cuda:0"], [torch.device("cuda", 0)]):
        assert check_gpu(module, device_ids, None) == ([0], 0)
    with pytest.raises(ValueError, match="on cuda:0"):
        check_gpu(module, [1], None)


@pytest.mark.parametrize("value", [[], torch.zeros(1), torch.ones(2), 0])
def test_what_is_refused_is_refused_whatever_its_truth_value(value):
    with pytest.raises(NotImplementedError, match="param_to_hook_all_reduce="):
        refuse(mixed_precision=None, batched=False, param_to_hook_all_reduce=value)


@pytest.mark.parametrize("device_ids", [0, 1, "cuda"])
def test_device_ids_must_be_a_list(device_ids):
    with pytest.raises(TypeError, match="device_ids must be a list of one GPU"):
        check_gpu(nn.Linear(1, 1), device_ids, None)


@pytest.mark.parametrize("given", [(["cpu"], None), (None, 0)])
def test_a_place_for_a_module_on_the_cpu_is_refused(given):
    with pytest.raises(ValueError, match="but the module is on cpu"):
        check_gpu(nn.Linear(1, 1), *given)
