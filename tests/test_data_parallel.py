"""DataParallel and its functions: the module on shards is the module on the batch.

The other oracle is torch's own ``nn.DataParallel``, which needs GPUs only for what it
calls in C++: here three functions of the CPU take their place.
"""

import threading
from collections import OrderedDict, namedtuple
from copy import deepcopy
from functools import partial

import pytest
import torch
from helpers import close, grads, mlp, randn
from torch import nn
from torch.nn.parallel import replicate as torch_replicate
from torch.nn.parallel import scatter_gather
from torch.nn.utils.parametrizations import weight_norm

from d2lpar import DataParallel, count_bytes, gather, parallel_apply, replicate, scatter
from d2lpar.models import lenet_layers

CPU = torch.device("cpu")
TWO, THREE = [CPU] * 2, [CPU] * 3
Pair = namedtuple("Pair", "x y")
linear = partial(nn.Linear, dtype=torch.float64)


class Apply(nn.Module):
    """A module that does what a function does, with itself and all arguments."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


class OnCPU:
    """What torch's own functions call for Scatter, Gather and Broadcast."""

    def __init__(self, function):
        self.apply = function


def copies_on(tensors, devices, detach=False):
    return [
        [t.detach().clone() if detach else t.clone() for t in tensors] for _ in devices
    ]


@pytest.fixture
def torchs(monkeypatch):
    """``torchs(module, k, dim)``: torch's class, on k virtual devices."""

    def split(devices, sizes, dim, tensor):
        return tensor.chunk(len(devices), dim)

    def join(device, dim, *tensors):
        return torch.cat(tensors, dim) if tensors[0].dim() else torch.stack(tensors)

    monkeypatch.setattr(scatter_gather, "Scatter", OnCPU(split))
    monkeypatch.setattr(scatter_gather, "Gather", OnCPU(join))
    # the module, which its package hides behind the function of that name
    there = torch_replicate.__globals__
    monkeypatch.setitem(there, "_broadcast_coalesced_reshape", copies_on)

    def make(module, k, dim=0):
        model = nn.DataParallel(module, dim=dim)
        model.device_ids, model.src_device_obj = list(range(k)), CPU
        model.output_device, model.dim = 0, dim
        model.parallel_apply = lambda replicas, args, kwargs: [
            replica(*a, **o) for replica, a, o in zip(replicas, args, kwargs)
        ]
        return model

    return make


def frozen():
    module = Apply(lambda self, X: self.body(X), body=mlp(4, 7, 3), unused=linear(4, 4))
    module.body[0].weight.requires_grad_(False)
    return module


def tied():
    first, last = linear(4, 4), linear(4, 4)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last, nn.Tanh(), first)


MODULES = {  # name: (build, batch, dimension of the rows)
    "mlp": (partial(mlp, 4, 7, 3), randn(7, 4), 0),
    "frozen and unused": (frozen, randn(7, 4), 0),
    "tied": (tied, randn(7, 4), 0),
    "weight_norm": (lambda: weight_norm(linear(4, 3)), randn(7, 4), 0),
    "LSTM, rows second": (lambda: nn.LSTM(4, 3).double(), randn(5, 7, 4), 1),
    "LeNet": (lambda: lenet_layers(0.1).double(), randn(5, 1, 28, 28), 0),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("k", [1, 3])
def test_output_and_gradients_are_those_of_the_plain_module_and_of_torchs(
    name, k, torchs
):
    build, X, dim = MODULES[name]
    plain, found = build(), []
    ours, theirs = deepcopy(plain), deepcopy(plain)
    models = plain, DataParallel(ours, [CPU] * k, dim=dim), torchs(theirs, k, dim)
    for module, model in zip((plain, ours, theirs), models, strict=True):
        output = model(X)
        output = output[0] if isinstance(output, tuple) else output
        (output**3).sum().backward()
        state = [*module.parameters(), *module.buffers()]
        found.append([output, *(t.grad for t in state)])
    for expected, mine, other in zip(*found, strict=True):
        close(mine, expected)
        if other is not None or "unused" not in name:
            close(mine, other)
    assert any(grad is not None and grad.norm() > 1e-4 for grad in found[0][1:])


def test_replicas_are_called_with_hooks_and_in_the_modules_own_mode():
    seen, module = [], nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4)).double()
    module.register_forward_hook(lambda *_: seen.append("called"))
    X = randn(6, 4)
    for mode in (False, True):
        output = DataParallel(module.train(mode), TWO)(input=X)
        assert torch.equal(output != X / (1 + 1e-5) ** 0.5, output == output) == mode
    assert seen == ["called"] * 4  # on both devices, by keyword, too


def test_what_is_one_in_the_module_is_one_in_a_replica():
    module = nn.Sequential(linear(2, 2), nn.Sequential(linear(2, 2)), None)
    module[1][0].weight, module.again = module[0].weight, module[0]
    for replica in replicate(module, TWO):
        assert replica.again is replica[0] is not module[0] and replica[2] is None
        assert replica[1][0].weight is replica[0].weight


def test_for_any_number_of_rows_it_trains_as_one_device():
    plain, ours = mlp(4, 7, 3), mlp(4, 7, 3)
    for module in (plain, DataParallel(ours, THREE)):
        for n in (8, 5, 1, 2, 0, 13):  # fewer than devices, too
            (module(randn(n, 4)) - randn(n, 3, seed=1)).square().sum().backward()
            with torch.no_grad():
                for param in module.parameters():
                    param -= 0.05 * param.grad
                    param.grad = None
    close(list(ours.parameters()), list(plain.parameters()))


def test_nested_inputs_and_outputs_are_those_of_torchs(torchs):
    def forward(self, batch, scale, *, extra, mask=None):
        X, y = batch["pair"]
        assert mask is None and type(batch) is OrderedDict and type(scale) is int
        return {"sum": [X + y * scale], "out": (Pair(extra["E"], None),)}

    module = Apply(forward)
    for n, k in ((7, 3), (3, 8), (1, 3)):
        batch = OrderedDict(pair=Pair(randn(n, 2), randn(n, 2, seed=1)), n=n)
        options = {"extra": {"E": randn(n, seed=2)}, "mask": None}
        outputs = [
            model(batch, 3, **options)
            for model in (module, DataParallel(module, [CPU] * k), torchs(module, k))
        ]
        for output in outputs[1:]:
            close(output, outputs[0])
            assert type(output["out"][0]) is Pair and list(output) == ["sum", "out"]


@pytest.mark.parametrize("args", [(), (3, [None])])
def test_without_tensors_to_split_the_module_runs_once(args):
    calls, weight = [], nn.Parameter(randn(2))
    module = Apply(lambda self, *args: calls.append(args) or self.weight, weight=weight)
    output = DataParallel(module, THREE)(*args)
    assert torch.equal(output, weight) and calls == [args]


def test_losses_become_a_vector_as_torchs_and_stay_numbers_on_a_single_device(torchs):
    module, X = Apply(lambda self, X: X.mean()), torch.tensor([1.0, 2, 6, 8, 9])
    assert DataParallel(module, [CPU])(X).shape == ()
    assert DataParallel(module, TWO)(X).tolist() == [3, 8.5]
    assert DataParallel(module, TWO)(X[:1]).tolist() == [1]
    close(DataParallel(module, TWO)(X), torchs(module, 2)(X))
    assert DataParallel(module, TWO, "meta")(X).device.type == "meta"


def test_running_statistics_go_on_with_the_first_shard():
    plain, ours = nn.BatchNorm1d(3, momentum=None), nn.BatchNorm1d(3, momentum=None)
    for n in (6, 4):
        X = torch.randn(n, 3)
        plain(X[: n // 2])
        DataParallel(ours, TWO)(X)
    close(list(ours.buffers()), list(plain.buffers()))
    assert ours.num_batches_tracked == 2 and ours.running_mean.abs().max() > 1e-2


# The four functions.


def test_scatter_is_torchs_and_gather_its_reverse(torchs):
    tree = {"X": randn(7, 2), "more": [randn(7), (None, "word", 3.5)]}
    for k in (1, 2, 3, 4, 9):
        shards = scatter(tree, [CPU] * k)
        theirs = scatter_gather.scatter(tree, list(range(k)))
        assert len(shards) == len(theirs)
        for mine, other in zip(shards, theirs, strict=True):
            close(mine["X"], other["X"])
            close(mine["more"][0], other["more"][0])
            assert mine["more"][1] == other["more"][1] == (None, "word", 3.5)
        tensors = [{"b": s["more"][0], "a": (s["X"], None)} for s in shards]
        whole = gather(tensors, CPU)
        close(whole, scatter_gather.gather(tensors, 0))
        close(whole, {"b": tree["more"][0], "a": (tree["X"], None)})
    assert [s.shape for s in scatter(randn(2, 5), TWO, dim=-1)] == [(2, 3), (2, 2)]
    # keys in another order on another device are no mistake
    joined = gather([{"a": randn(1), "b": None}, {"b": None, "a": randn(1)}], CPU)
    close(joined["a"], randn(1).repeat(2))


def test_replicas_but_the_first_share_nothing_with_the_module():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU())
    replicas = replicate(module, THREE)

    def storages(part):
        state = [*part.parameters(), *part.buffers()]
        return {tensor.untyped_storage().data_ptr() for tensor in state}

    owned = [storages(replica) for replica in replicas]
    assert owned[0] == storages(module)
    assert len(set.union(*owned)) == sum(map(len, owned))
    for replica in replicas:
        assert all(
            map(
                torch.equal, replica.state_dict().values(), module.state_dict().values()
            )
        )
        assert not set(replica.modules()) & set(module.modules())
        assert all(p.requires_grad and not p.is_leaf for p in replica.parameters())
    replicas[1][0].mark = replicas[1].train(False)
    assert module.training and not hasattr(module[0], "mark")
    with torch.no_grad():
        assert not any(p.requires_grad for p in replicate(module, TWO)[1].parameters())


def test_each_module_has_its_thread_its_arguments_and_its_place():
    barrier = threading.Barrier(4, timeout=20)

    def meet(self, *args, **kwargs):
        barrier.wait()  # all are called at the same time
        return args, kwargs, threading.get_ident()

    inputs, kwargs = [(1, 2), [3, 4], {"a": 5}, "six"], [{"b": i} for i in range(4)]
    found = parallel_apply([Apply(meet)] * 4, inputs, kwargs)
    args, options, threads = zip(*found, strict=True)
    assert args == ((1, 2), (3, 4), ({"a": 5},), ("six",))
    assert list(options) == kwargs and len({*threads}) == 4
    assert parallel_apply([], []) == []


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.enable_grad,
    ],
)
def test_every_thread_has_grad_mode_and_autocast_of_the_caller(mode):
    def settings(*_):
        product = torch.ones(1, 2, requires_grad=True) @ torch.ones(2, 1)
        return product.requires_grad, product.dtype

    with mode():
        expected = settings()
        assert parallel_apply([Apply(settings)] * 3, [()] * 3) == [expected] * 3


def test_of_several_errors_the_first_is_raised_with_a_note():
    began = threading.Barrier(3, timeout=20)

    def fail(self, i):
        began.wait()
        return 1 / i

    with pytest.raises(ZeroDivisionError) as caught:
        parallel_apply([Apply(fail)] * 3, [1, 0, 0])
    assert caught.value.__notes__ == ["This was replica 1."]


def test_an_iteration_sends_the_batch_the_outputs_and_twice_the_parameters():
    k, X, size = 4, randn(8, 6), (35 + 10 + 12) * 8
    module = nn.Sequential(linear(6, 5), nn.BatchNorm1d(5).double(), linear(5, 2))
    with count_bytes() as ledger:
        DataParallel(module, [CPU] * k)(X).sum().backward()
    inputs, buffers, outputs = 2 * 6 * 8, (5 + 5 + 1) * 8, 2 * 2 * 8
    there = {(0, i): inputs + size + buffers + outputs for i in range(1, k)}
    assert ledger.bytes == there | {(i, 0): outputs + size for i in range(1, k)}
    with count_bytes() as ledger:
        DataParallel(module.eval(), [CPU] * k)(X[:2])  # to the device with rows alone
    assert set(ledger.bytes) == {(0, 1), (1, 0)}
    with count_bytes() as ledger:
        scatter(randn(5, 2), ["meta", "meta"])  # from where no device is
    assert ledger.bytes == {("host", 0): 3 * 16, ("host", 1): 2 * 16}


ERRORS = [
    (
        lambda: scatter((randn(4, 2), [randn(3)]), TWO),
        ValueError,
        r"have \[3, 4\] rows",
    ),
    (lambda: DataParallel(mlp(4, 3), TWO)(randn(4, 4), y=randn(3)), ValueError, "3, 4"),
    (lambda: gather([[{1}], [{1}]], CPU), TypeError, "cannot gather a set: return"),
    (lambda: gather([(1.5,), (1.5,)], CPU), TypeError, "cannot gather a float"),
    (lambda: gather([(randn(1),), ()], CPU), ValueError, "shorter"),
    (lambda: gather([{"a": None}, {"a": None, "b": 1}], CPU), ValueError, "other keys"),
    (lambda: gather([None, randn(1)], CPU), TypeError, "cannot gather a NoneType"),
    (lambda: parallel_apply([mlp(4, 3)] * 2, [()]), ValueError, "shorter"),
    (
        lambda: DataParallel(mlp(4, 3), TWO, "cuda:99"),
        ValueError,
        "no device 'cuda:99'",
    ),
    (
        lambda: DataParallel(mlp(4, 3), ["meta", "cpu"])(randn(4, 4)),
        ValueError,
        r"the module is on \{'cpu'\}: move it to meta",
    ),
    (
        lambda: replicate(nn.BatchNorm1d(2, affine=False), [torch.device("meta")]),
        ValueError,
        "move it to meta",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), ERRORS)
def test_errors_name_what_is_wrong(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's own, of unlike GPUs
@pytest.mark.parametrize("name", ["frozen and unused", "tied", "weight_norm", "LeNet"])
def test_on_gpus_it_is_torchs_own(name):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    build, X, dim = MODULES[name]
    module, results = build(), []
    for kind in (nn.DataParallel, DataParallel):
        copied = deepcopy(module).cuda(0)
        output = kind(copied, [0, 1], dim=dim)(X.cuda(0))
        (output**2).sum().backward()
        results.append(
            (output, [g for g in grads(copied) if g is not None and g.any()])
        )
    torch.testing.assert_close(*results)
