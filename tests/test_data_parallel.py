"""DataParallel and its functions: the module on shards is the module on the batch.

The other oracle is torch's own ``nn.DataParallel``, in which functions of the CPU stand
in for what needs GPUs.
"""

import threading
from collections import namedtuple
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import close, mlp, randn
from torch import nn
from torch.nn.parallel import replicate as torch_replicate
from torch.nn.parallel import scatter_gather

from d2lpar import DataParallel, count_bytes, gather, parallel_apply, replicate, scatter

CPU = torch.device("cpu")
TWO, THREE = [CPU] * 2, [CPU] * 3
Pair = namedtuple("Pair", "x y")
linear = partial(nn.Linear, dtype=torch.float64)


def as_module(function):
    module = nn.Module()
    module.forward = function
    return module


@pytest.fixture
def torchs(monkeypatch):
    """``torchs(module, k, dim)``: torch's class, on k virtual devices."""

    def split(devices, sizes, dim, tensor):
        return tensor.chunk(len(devices), dim)

    def join(device, dim, *tensors):
        return torch.cat(tensors, dim) if tensors[0].dim() else torch.stack(tensors)

    def copies(tensors, devices, detach=False):
        return [[tensor.clone() for tensor in tensors] for _ in devices]

    monkeypatch.setattr(scatter_gather, "Scatter", SimpleNamespace(apply=split))
    monkeypatch.setattr(scatter_gather, "Gather", SimpleNamespace(apply=join))
    # the module, which its package hides behind the function of that name
    there = torch_replicate.__globals__
    monkeypatch.setitem(there, "_broadcast_coalesced_reshape", copies)

    def make(module, k, dim=0):
        model = nn.DataParallel(module)
        model.device_ids, model.src_device_obj = list(range(k)), CPU
        model.output_device, model.dim = 0, dim
        model.parallel_apply = parallel_apply
        return model

    return make


def shared():
    """A frozen layer; one that is called twice, whose weight a third one has, too."""
    frozen, first, last = (linear(4, 4) for _ in range(3))
    frozen.requires_grad_(False)
    last.weight = first.weight
    layers = nn.Sequential(frozen, first, nn.Tanh(), last, nn.Tanh(), first)
    layers.unused = nn.Parameter(randn(2))
    return layers


STATE = randn(1, 7, 3), randn(1, 7, 3)
MODULES = {  # name: (build, arguments, dimension of the rows)
    "frozen, shared, unused": (shared, (randn(7, 4),), 0),
    "LSTM, rows second": (lambda: nn.LSTM(4, 3).double(), (randn(5, 7, 4), STATE), 1),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("k", [1, 3])
def test_output_and_gradients_are_the_plain_modules_and_torchs(name, k, torchs):
    build, args, dim = MODULES[name]
    plain, found = build(), []
    ours, theirs = deepcopy(plain), deepcopy(plain)
    models = plain, DataParallel(ours, [CPU] * k, dim=dim), torchs(theirs, k, dim)
    for module, model in zip((plain, ours, theirs), models, strict=True):
        output = model(*args)
        output = output[0] if isinstance(output, tuple) else output
        (output**3).sum().backward()
        found.append([output, *(param.grad for param in module.parameters())])
    for expected, mine, other in zip(*found, strict=True):
        close(mine, expected)
        close(other, expected)


def test_nested_inputs_and_outputs_are_those_of_torchs(torchs):
    def forward(batch, scale, *, extra, mask=None):
        X, y = batch["pair"]
        assert mask is None and type(scale) is int
        return {"sum": [X + y * scale], "out": (Pair(extra["E"], None),)}

    module = as_module(forward)
    for n, k in ((7, 3), (3, 8), (1, 3)):
        args = {"pair": Pair(randn(n, 2), randn(n, 2, seed=1)), "n": n}, 3
        options = {"extra": {"E": randn(n, seed=2)}, "mask": None}
        for model in (DataParallel(module, [CPU] * k), torchs(module, k)):
            output = model(*args, **options)
            close(output, forward(*args, **options))
            assert type(output["out"][0]) is Pair


def test_one_device_gets_all_as_it_is_and_several_get_copies_to_write_to():
    args = torch.tensor(2.0), randn(3, 3), randn(1, 3)
    module = as_module(lambda scale, X, more: scale * X + more)
    close(DataParallel(module, [CPU])(*args), module(*args))
    module, X = nn.Sequential(nn.ReLU(inplace=True), linear(2, 2)), randn(5, 2)
    DataParallel(module, TWO)(X)
    close(X, randn(5, 2))  # as before


def test_without_tensors_to_split_the_module_runs_once():
    calls = []
    DataParallel(as_module(lambda *args: calls.append(args)), THREE)(3, [None])
    assert calls == [(3, [None])]


def test_losses_become_a_vector_as_torchs_and_stay_numbers_on_a_single_device(torchs):
    module, X = as_module(torch.mean), torch.tensor([1.0, 2, 6, 8, 9])
    assert DataParallel(module, [CPU])(X).shape == ()
    assert DataParallel(module, TWO)(X).tolist() == [3, 8.5]
    close(DataParallel(module, TWO)(X), torchs(module, 2)(X))
    assert DataParallel(module, TWO, "meta")(X).device.type == "meta"


def test_statistics_go_on_with_the_first_shard():
    plain, ours = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    for n in (6, 4):
        X = torch.randn(n, 3)
        plain(X[: n // 2])
        DataParallel(ours, TWO)(X)
    close(list(ours.buffers()), list(plain.buffers()))
    close(DataParallel(ours.eval(), TWO)(X), plain.eval()(X))


def test_scatter_is_torchs_and_gather_its_reverse(torchs):
    batch = {"X": randn(7, 2), "words": (None, "word", 3.5)}
    for k in (1, 2, 3, 4, 9):
        shards = scatter(batch, [CPU] * k)
        theirs = scatter_gather.scatter(batch, list(range(k)))
        for mine, other in zip(shards, theirs, strict=True):
            close(mine["X"], other["X"])
            assert mine["words"] == batch["words"]
        close(gather([(shard["X"], None) for shard in shards], CPU), (batch["X"], None))


def test_replicas_have_copies_and_what_is_one_in_the_module_is_one_in_them():
    module = nn.Sequential(linear(2, 2), nn.Sequential(linear(2, 2)), None)
    module[1][0].weight, module.again = module[0].weight, module[0]
    module.norm = nn.BatchNorm1d(2)
    state, memory = module.state_dict(), set()
    for i, replica in enumerate(replicate(module, THREE)):
        assert replica.again is replica[0] is not module[0] and replica[2] is None
        assert replica[1][0].weight is replica[0].weight
        for name, tensor in replica.state_dict(keep_vars=True).items():
            assert torch.equal(tensor, state[name])
            assert (tensor.data_ptr() == state[name].data_ptr()) == (i == 0)
            memory.add(tensor.data_ptr())
        replica.eval()
    assert len(memory) == 3 * 8 and module.training and module.norm.training


def test_each_module_has_its_thread_its_arguments_and_its_place():
    barrier = threading.Barrier(4, timeout=20)

    def meet(*args, **kwargs):
        barrier.wait()  # all are called at the same time
        return args, kwargs

    inputs, kwargs = [(1, 2), [3, 4], {"a": 5}, "six"], [{"b": i} for i in range(4)]
    found = parallel_apply([as_module(meet)] * 4, inputs, kwargs)
    args, options = zip(*found, strict=True)
    assert args == ((1, 2), (3, 4), ({"a": 5},), ("six",)) and list(options) == kwargs


def test_every_thread_has_grad_mode_and_autocast_of_the_caller():
    def settings():
        product = torch.ones(1, 2, requires_grad=True) @ torch.ones(2, 1)
        return product.requires_grad, product.dtype

    module, half, bhalf = as_module(settings), torch.float16, torch.bfloat16
    modes = torch.no_grad(), torch.autocast("cpu", half), torch.autocast("cpu", bhalf)
    for mode in (*modes, torch.enable_grad()):
        with mode:
            expected = settings()
            assert parallel_apply([module] * 3, [()] * 3) == [expected] * 3


def test_an_iteration_sends_the_batch_the_outputs_and_twice_the_parameters():
    k, X, size = 4, randn(8, 6), (35 + 10 + 12) * 8
    module = nn.Sequential(linear(6, 5), nn.BatchNorm1d(5).double(), linear(5, 2))
    with count_bytes() as ledger:
        DataParallel(module, [CPU] * k)(X).sum().backward()
    inputs, buffers, outputs = 2 * 6 * 8, (5 + 5 + 1) * 8, 2 * 2 * 8
    there = {(0, i): inputs + size + buffers + outputs for i in range(1, k)}
    assert ledger.bytes == there | {(i, 0): outputs + size for i in range(1, k)}
    with count_bytes() as ledger:
        scatter(randn(5, 2), ["meta", "meta"])  # from where no device is
        gather([randn(1), randn(1)], "meta")  # to where none is
    assert {*ledger.bytes} == {("host", 0), ("host", 1), (0, "host"), (1, "host")}


def test_errors_name_what_is_wrong():
    model, norm = DataParallel(mlp(4, 3), TWO), nn.BatchNorm1d(2)
    for call, error, words in (
        (lambda: model(randn(4, 4), y=randn(3)), ValueError, r"\[3, 4\] rows"),
        (lambda: model(torch.tensor(2.0)), ValueError, "no rows: pass a number"),
        (lambda: gather([(1.5,), (1.5,)], CPU), TypeError, "cannot gather a float"),
        (lambda: gather([randn(1), None], CPU), TypeError, "cannot gather a NoneT"),
        (lambda: gather([{}, {"b": 1}], CPU), ValueError, "not built alike"),
        (lambda: replicate(norm, ["meta"]), ValueError, r"'cpu'\}: move it to meta"),
    ):
        with pytest.raises(error, match=words):
            call()
