"""DataParallel and its parts: the module on shards is the module on the batch."""

import gc
import inspect
import pickle
import threading
import weakref
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial

import helpers
import pytest
import torch
from helpers import close, grads, randn
from torch import nn

from d2lpar import (
    DataParallel,
    DataParallelModel,
    count_bytes,
    parallel_apply,
    replicate,
)
from d2lpar.data_parallel.scattering import tensors_of
from d2lpar.devices import to_device
from d2lpar.models import lenet_layers

CPU = torch.device("cpu")
TWO = [CPU] * 2
Pair = namedtuple("Pair", "x y")
linear = partial(nn.Linear, dtype=torch.float64)


class Apply(nn.Module):
    """A module that does what a function does, with ``self`` and all arguments."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def mlp():
    return helpers.mlp(4, 7, 3)


def tensors(module):
    return [*module.parameters(), *module.buffers()]


def storages(module):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors(module)}


# The definition: the module on shards is the module on the whole batch.


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("k", [1, 3])
def test_on_k_devices_it_trains_as_on_one(k, device):
    plain, ours = mlp(), mlp().to(device)
    for module, there in ((plain, "cpu"), (DataParallel(ours, [device] * k), device)):
        for n in (8, 5, 1, 2, 0, 13):
            X, y = randn(n, 4).to(there), randn(n, 3, seed=1).to(there)
            (module(X) - y).square().sum().backward()
            with torch.no_grad():
                for param in module.parameters():
                    param -= 0.05 * param.grad
                    param.grad = None
    close([p.cpu() for p in ours.parameters()], list(plain.parameters()))


def frozen():
    module = Apply(lambda self, X: self.body(X), body=mlp(), unused=linear(4, 4))
    module.body[0].weight.requires_grad_(False)
    return module


def tied():
    first, last = linear(4, 4), linear(4, 4)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last, nn.Tanh(), first)


def buffer_with_gradient():
    module = Apply(lambda self, X: torch.tanh(X * self.scale))
    module.register_buffer("scale", randn(4).requires_grad_())
    return module


def parameter_list():
    weights = nn.ParameterList([randn(4, 5), randn(5, 3)])
    return Apply(
        lambda self, X: torch.tanh(X @ self.weights[0]) @ self.weights[1],
        weights=weights,
    )


MODULES = {  # name: (build, batch, dimension of the rows)
    "frozen": (frozen, randn(7, 4), 0),
    "tied": (tied, randn(7, 4), 0),
    "weight_norm": (
        lambda: nn.utils.parametrizations.weight_norm(linear(4, 3)),
        randn(7, 4),
        0,
    ),
    "buffer with gradient": (buffer_with_gradient, randn(7, 4), 0),
    "parameters in a list": (parameter_list, randn(7, 4), 0),
    "LSTM": (lambda: nn.LSTM(4, 3, num_layers=2).double(), randn(5, 7, 4), 1),
    "LeNet": (lambda: lenet_layers(0.1).double(), randn(5, 1, 28, 28), 0),
    "sparse": (
        lambda: nn.Embedding(50, 3, sparse=True, dtype=torch.float64),
        torch.tensor([[7, 2], [7, 7], [49, 2]]),
        0,
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_all_replicas_are_summed_into_the_module(name):
    build, X, dim = MODULES[name]
    plain = build()
    ours, outputs = deepcopy(plain), []
    for module in (plain, DataParallel(ours, [CPU] * 3, dim=dim)):
        outputs.append(module(X))
        sum((output**3).sum() for output in tensors_of(outputs[-1])).backward()
    close(*outputs)
    for mine, other in zip(tensors(ours), tensors(plain), strict=True):
        sparse = mine.grad is not None and mine.grad.is_sparse
        close(*[t.grad.coalesce() if sparse else t.grad for t in (mine, other)])
    assert any(t.grad is not None and (t.grad**2).sum() > 1e-8 for t in tensors(ours))


def test_double_backward_is_that_of_the_plain_module():
    plain, X = mlp(), randn(5, 4)
    ours = deepcopy(plain)
    for module in (plain, DataParallel(ours, [CPU] * 3)):
        inputs = [X.clone().requires_grad_(), *module.parameters()]
        first = torch.autograd.grad(
            (module(inputs[0]) ** 2).sum(), inputs, create_graph=True
        )
        sum((grad**2).sum() for grad in first).backward()
    close(grads(ours), grads(plain))


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (torch.bfloat16, [256, 1, 1], 258),  # 256 + 1 is 256
        (torch.float16, [2048, 1, 1], 2050),
        # from the first device on; else 2**24 + 2
        (torch.float32, [2**24, 1, 1], 2**24),
        (torch.float32, [1, 1, 2**24], 2**24 + 2),
    ],
)
def test_gradients_are_added_in_order_and_low_precision_is_rounded_once(
    dtype, values, expected
):
    module = nn.Linear(1, 1, bias=False, dtype=dtype)
    DataParallel(module, [CPU] * 3)(
        torch.tensor(values, dtype=dtype)[:, None]
    ).sum().backward()
    assert module.weight.grad.dtype == dtype
    assert module.weight.grad.item() == expected


def test_backward_may_run_in_several_threads():
    module, X = mlp(), randn(8, 4)
    loss = DataParallel(module, TWO)(X).sum()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: loss.backward(retain_graph=True), range(20)))
    close(
        grads(module),
        list(torch.autograd.grad(20 * module(X).sum(), [*module.parameters()])),
    )


# Replicas.


def test_replicas_beyond_the_first_share_no_memory_with_the_module():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2))
    replicas = replicate(module, [CPU] * 3)
    owned = [storages(replica) for replica in replicas]
    assert owned[0] == storages(module)
    assert len(set.union(*owned)) == sum(map(len, owned))
    for replica in replicas:
        assert all(map(torch.equal, tensors(replica), tensors(module)))
        assert not set(replica.modules()) & set(module.modules())
        assert all(p.requires_grad and not p.is_leaf for p in replica.parameters())
        assert replica[2]._flat_weights[1] is replica[2].weight_hh_l0
    there = replicate(nn.BatchNorm1d(2), [CPU, torch.device("meta")])[1]
    assert {tensor.device.type for tensor in tensors(there)} == {"meta"}


def test_running_statistics_go_on_with_the_first_shard():
    plain = nn.BatchNorm1d(3, momentum=None)
    ours = deepcopy(plain)
    for n in (5, 4):
        X = torch.randn(n, 3)
        plain(X[: (n + 1) // 2])
        DataParallel(ours, TWO)(X)
    close(list(ours.buffers()), list(plain.buffers()))
    assert ours.num_batches_tracked == 2 and ours.running_mean.abs().max() > 1e-2


def test_what_a_replica_sets_on_itself_goes_with_it_but_for_the_buffers_of_the_first():
    def forward(self, X):
        self.last, self.training = X, False
        self.seen, self.empty.mask = self.seen + len(X), X
        return X

    inner = Apply(forward)
    inner.register_buffer("seen", torch.tensor(0))
    inner.empty = nn.Module()
    inner.empty.register_buffer("mask", None)
    for i, rows in ((1, 0), (0, 3), (1, 3), (0, 6)):
        X = replicate(nn.Sequential(inner), TWO)[i](randn(3, 1))
        assert inner.seen == rows and (inner.empty.mask is X) == (i == 0)
    assert not hasattr(inner, "last") and inner.training


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_recorded(mode):
    module, X = mlp(), randn(4, 4)
    with mode():
        output = DataParallel(module, TWO)(X)
        replicas = replicate(module, TWO)
    assert not output.requires_grad and output.is_inference() == (
        mode is torch.inference_mode
    )
    assert not any(
        p.requires_grad for replica in replicas for p in replica.parameters()
    )


def test_what_is_one_in_the_module_is_one_in_the_replica():
    module = nn.Sequential(linear(2, 2), nn.Sequential(linear(2, 2)))
    module[0].weight = module[1][0].weight
    module.again = module[1]
    module.register_buffer("zero", torch.zeros(1))
    module.parts = [module[0], "words", module.zero]
    module.by_name = {"layer": module[0], "word": 1}
    module.words = ["a", ["b"]]
    module.nested, module.method = (
        {"pairs": [(module[0], module.zero)]},
        module.again.forward,
    )
    for replica in replicate(module, TWO):
        assert replica[0].weight is replica[1][0].weight
        assert replica.again is replica[1]
        assert replica.parts[0] is replica[0] and replica.parts[2] is replica.zero
        assert replica.by_name["layer"] is replica[0] and replica.words is module.words
        [(first, second)] = replica.nested["pairs"]
        assert first is replica[0] and second is replica.zero
        assert replica.method.__self__ is replica.again
    assert module.parts[0] is module[0]


# Applying modules in parallel.


def test_each_module_has_its_thread_its_arguments_and_its_place():
    barrier = threading.Barrier(5, timeout=20)

    def meet(self, *args, **kwargs):
        barrier.wait()  # all are called at the same time
        return args, kwargs, threading.get_ident()

    inputs, kwargs = [(1, 2), [3, 4], {"a": 5}, "six", ()], [{"b": i} for i in range(5)]
    found, options, threads = zip(
        *parallel_apply([Apply(meet)] * 5, inputs, kwargs), strict=True
    )
    assert list(found) == [(1, 2), (3, 4), ({"a": 5},), ("six",), ()]
    assert list(options) == kwargs
    assert len(set(threads)) == 5 and threads[0] == threading.get_ident()


def modes(*_):
    autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
    product = torch.ones(1, 2) @ torch.ones(2, 1)
    grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return grad, autocast, product.dtype


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: torch.autocast("cpu", cache_enabled=False),
    ],
)
def test_every_thread_has_the_modes_of_the_caller(mode):
    before = modes()
    with mode():
        expected = modes()
        assert parallel_apply([Apply(modes)] * 3, [()] * 3) == [expected] * 3
        assert modes() == expected
    assert modes() == before


def test_the_ledger_counts_in_every_thread():
    module = Apply(lambda self, i: to_device(torch.zeros(1 + i), CPU, i, 9))
    with count_bytes() as ledger:
        parallel_apply([module] * 3, [0, 1, 2])
    assert ledger.bytes == {(0, 9): 4, (1, 9): 8, (2, 9): 12}


def test_of_several_exceptions_the_first_by_position_comes_with_a_note_when_all_ended():
    failed, ended = threading.Event(), []

    def fail(self, i):
        if i != 2:
            assert failed.wait(20)  # position 2 fails before the others
        failed.set()
        ended.append(i)
        if i:
            raise RuntimeError(f"at {i}")

    with pytest.raises(RuntimeError, match=r"^at 1") as caught:
        parallel_apply([Apply(fail)] * 4, range(4))
    assert sorted(ended) == [0, 1, 2, 3]
    assert caught.value.__notes__ == ["This was the replica on device 1 (cpu)."]
    assert caught.traceback[-1].name == "fail"


# The whole.


@pytest.mark.parametrize("n", [0, 1, 7])
def test_nested_inputs_and_outputs(n):
    def forward(self, batch, scale, *, extra):
        X, y = batch["pair"]
        return {"sum": [X + y * scale], "out": (Pair(extra["E"], None), "words")}

    X, y, E = randn(n, 2), randn(n, 2, seed=1), randn(n, seed=2)
    output = DataParallel(Apply(forward), [CPU] * 3)(
        {"pair": Pair(X, y)}, 3, extra={"E": E}
    )
    assert list(output) == ["sum", "out"] and type(output["out"][0]) is Pair
    close(output["sum"], [X + y * 3])
    assert torch.equal(output["out"][0].x, E) and output["out"][1] == "words"


@pytest.mark.parametrize(("k", "args"), [(1, ()), (4, ()), (4, (3, [None]))])
def test_without_tensors_to_split_the_module_runs_once(k, args):
    calls, weight = [], nn.Parameter(randn(2))

    def forward(self, *args):
        calls.append(args)
        return self.weight

    output = DataParallel(Apply(forward, weight=weight), [CPU] * k)(*args)
    assert torch.equal(output, weight) and calls == [args]
    output.sum().backward()
    assert weight.grad.tolist() == [1, 1]


def test_a_number_becomes_a_vector_but_stays_one_on_a_single_device():
    module, X = Apply(lambda self, X: X.mean()), torch.tensor([1.0, 2, 6, 8, 9])
    assert DataParallel(module, [CPU], "meta")(X).shape == ()  # wherever: as torch's
    assert DataParallel(module, TWO)(X).tolist() == [3, 8.5]
    assert DataParallel(module, TWO)(X[:1]).tolist() == [1]
    assert DataParallel(module, TWO, "meta")(X).device.type == "meta"
    anything = object()
    assert DataParallel(Apply(lambda self, X: anything), [CPU])(X) is anything


def test_without_the_gather_there_is_an_output_for_each_device_with_rows():
    module, X = mlp(), randn(5, 4)
    for k, n, sizes in ((3, 5, [2, 2, 1]), (8, 2, [1, 1]), (4, 0, [0]), (1, 5, [5])):
        outputs = DataParallelModel(module, [CPU] * k)(X[:n])
        assert type(outputs) is list and [len(output) for output in outputs] == sizes
        close(torch.cat(outputs), module(X[:n]))
        module.zero_grad()
        sum((output * 3).sum() for output in outputs).backward()
        close(module[2].bias.grad, torch.full((3,), 3.0 * n).double())


def test_one_iteration_moves_exactly_the_batch_the_outputs_and_the_parameters():
    k, X, size = 4, randn(8, 6), (35 + 10 + 12) * 8
    module = nn.Sequential(linear(6, 5), nn.BatchNorm1d(5).double(), linear(5, 2))
    with count_bytes() as ledger:
        total = DataParallel(module, [CPU] * k)(X).sum()
        # as on GPUs, where it has its own
        backward = threading.Thread(target=total.backward)
        backward.start()
        backward.join()

    inputs, buffers, outputs = 2 * 6 * 8, (5 + 5 + 1) * 8, 2 * 2 * 8
    # their gradients, too
    there = {(0, i): inputs + size + buffers + outputs for i in range(1, k)}
    assert ledger.bytes == there | {(i, 0): outputs + size for i in range(1, k)}


def test_nothing_is_kept_when_all_is_done_or_has_failed():
    gc.collect()
    gc.disable()
    try:
        data_parallel = DataParallel(mlp(), [CPU] * 3)
        dead = [
            weakref.ref(data_parallel.module),
            weakref.ref(data_parallel.module[0].weight),
        ]
        data_parallel(randn(6, 4)).sum().backward()
        modules = [Apply(lambda self, mine: 1 / (1 - mine)) for _ in range(3)]
        dead += [weakref.ref(module) for module in modules]
        with pytest.raises(ZeroDivisionError) as caught:
            parallel_apply(modules, range(3))
        del data_parallel, modules, caught
        assert [ref() for ref in dead] == [None] * 5
    finally:
        gc.enable()


def test_it_is_a_module_like_any_other():
    module, X = mlp(), randn(5, 4)
    data_parallel = DataParallel(module, ("cpu:0", CPU))
    assert list(data_parallel.state_dict()) == [
        f"module.{name}" for name in module.state_dict()
    ]
    for other in (pickle.loads(pickle.dumps(data_parallel)), deepcopy(data_parallel)):
        assert torch.equal(other(X), data_parallel(X))
        assert not storages(other) & storages(module)
        assert other.devices == other.device_ids == TWO and other.output_device == CPU


# Arguments.


def test_parameters_are_torchs():
    ours, theirs = (
        [
            (p.name, p.default, p.kind)
            for p in inspect.signature(kind).parameters.values()
        ]
        for kind in (DataParallel, nn.DataParallel)
    )
    assert ours == theirs


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU only")
@pytest.mark.parametrize("args", [(), ([0, 1],), (None, 0), ([],)], ids=str)
def test_without_a_gpu_it_calls_the_module_as_torchs_does(args):
    module = nn.BatchNorm1d(4).double()
    seen, X = [], randn(5, 4)
    module.register_forward_hook(lambda *_: seen.append(1))
    ours, theirs = DataParallel(module, *args), nn.DataParallel(module, *args)
    assert ours.device_ids == theirs.device_ids == []
    assert torch.equal(ours(X), theirs(X))
    [output] = DataParallelModel(module, *args[:1])(X)
    assert torch.equal(output, theirs(X)) and len(seen) == 4


def compiled_in_place():
    module = nn.ReLU()
    module.compile(backend="eager")
    return nn.Sequential(nn.ReLU(), module)


ERRORS = [
    (lambda: replicate(mlp(), []), ValueError, "devices is empty"),
    (
        lambda: replicate(mlp(), ["meta"]),
        ValueError,
        r"0\.weight is on cpu: move the module to me",
    ),
    (lambda: replicate(nn.LazyLinear(3), TWO), ValueError, "dummy batch"),
    (
        lambda: replicate(torch.compile(nn.ReLU(), backend="eager"), TWO),
        TypeError,
        "^the module is compiled: only ",
    ),
    (
        lambda: replicate(compiled_in_place(), TWO),
        TypeError,
        "^1 is compiled: only the orig",
    ),
    (lambda: parallel_apply([mlp()] * 2, [()]), ValueError, "shorter"),
    (lambda: parallel_apply([mlp()], [()], [{}] * 2), ValueError, "longer"),
    (
        lambda: DataParallel(mlp(), "cpu"),
        TypeError,
        "must be a list of devices, not 'cpu'",
    ),
    (
        lambda: DataParallel(mlp(), TWO, "cuda:99"),
        ValueError,
        "there is no device 'cuda:99'",
    ),
    (
        lambda: DataParallel(mlp(), TWO)(randn(4, 4), randn(3)),
        ValueError,
        "differ in dimension 0",
    ),
    (
        lambda: DataParallel(mlp(), TWO)(randn(4, 5)),
        RuntimeError,
        "shapes cannot be multiplied",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), ERRORS)
def test_errors_name_what_is_wrong(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.gpu
# torch's own, of unlike GPUs and of copied LSTM weights
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["frozen", "tied", "weight_norm", "LSTM"])
def test_on_gpus_it_is_torchs_own(name):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    build, X, dim = MODULES[name]
    module, results = build(), []
    for kind in (nn.DataParallel, DataParallel):
        copied = deepcopy(module).cuda(0)
        model = kind(copied, [0, 1], dim=dim)
        outputs = tensors_of(model(X.cuda(0)))
        sum((output**2).sum() for output in outputs).backward()
        results.append((outputs, grads(copied), model.device_ids, model.output_device))
    torch.testing.assert_close(*results)
