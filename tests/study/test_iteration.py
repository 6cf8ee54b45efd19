"""An iteration of each form: its bytes and memory, worked out by hand; and whose mean is right."""

from collections import Counter
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from d2lpar import (
    ChunkedLoss,
    DataParallel,
    DataParallelCriterion,
    DataParallelModel,
    DistributedDataParallel,
    count_bytes,
    get_params,
    launch,
    split_batch,
    train_batch,
)
from d2lpar.data_parallel.scattering import scatter
from d2lpar.network import LeNet
from d2lpar.ranks.collectives import choose
from d2lpar.study.iteration import FORMS, loss_of, memory_of, trace

CPU = torch.device("cpu")
CRITERION = nn.CrossEntropyLoss()
PARAMS = 4 * (6 * 5 + 5 + 5 * 4 + 4)  # bytes, of which a row has: …
INPUT, HIDDEN, OUTPUT, LABEL = 4 * 6, 4 * 5, 4 * 4, 8
IN_ONE_PROCESS = ["DataParallel", "balanced"]


def mlp(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), *more, nn.ReLU(), nn.Linear(5, 4))


def batch(rows):
    return torch.randn(rows, 6), torch.randint(4, (rows,))


def rows_of(rows, k):
    return [rows // k + (i < rows % k) for i in range(k)]


def out(*each):
    """What device 0 sends to devices 1, 2, …."""
    return {(0, i): n for i, n in enumerate(each, 1)}


def back(*each):
    return {(i, 0): n for i, n in enumerate(each, 1)}


# What is sent


@pytest.mark.parametrize("rows", [8, 11])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("form", IN_ONE_PROCESS)
def test_the_bytes_of_each_step(form, k, rows):
    others, everyone = rows_of(rows, k)[1:], tuple(range(k))
    whole = [PARAMS] * (k - 1)
    outputs, numbers = [n * OUTPUT for n in others], [4] * (k - 1)
    inputs = [n * (INPUT + LABEL * (form == "balanced")) for n in others]
    begin = [
        ("scatter the batch", out(*inputs), ()),
        ("replicate the module", out(*whole), ()),
        ("forward", {}, everyone),
    ]
    middle = {
        "DataParallel": [
            ("gather the outputs", back(*outputs), ()),
            ("loss", {}, (0,)),
            ("scatter the gradients", out(*outputs), ()),
        ],
        "balanced": [
            ("loss", {}, everyone),
            ("add up the losses", back(*numbers), ()),
            ("scatter the gradients", out(*numbers), ()),
        ],
    }
    end = [("backward", {}, everyone), ("add up the gradients", back(*whole), ())]
    assert trace(form, mlp(), CRITERION, *batch(rows), [CPU] * k) == begin + middle[form] + end


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_bytes_of_ddp_are_those_of_its_schedule(k):
    steps = trace("DDP", mlp(), CRITERION, *batch(9), [CPU] * k)
    everyone = tuple(range(k))
    assert [(step.name, step.busy) for step in steps] == [
        ("forward", everyone),
        ("loss", everyone),
        ("backward", everyone),
        ("allreduce the gradients", ()),
    ]
    message = PARAMS + 4 * (4 + 1)  # with who has used each parameter, and the rows
    moves = [move for step in choose(message, k)(k) for move in step]
    assert all(move.chunk is None for move in moves)
    assert steps[-1].bytes == Counter(
        {link: message * n for link, n in Counter((m.src, m.dst) for m in moves).items()}
    )
    assert sum(steps[-1].bytes.values()) == 2 * (k - 1) * message


@pytest.mark.parametrize("form", IN_ONE_PROCESS)
def test_buffers_are_sent_and_frozen_parameters_come_not_back(form):
    model = mlp(nn.BatchNorm1d(5))
    model[0].requires_grad_(False)
    steps = trace(form, model, CRITERION, *batch(8), [CPU] * 3)
    sent = {step.name: step.bytes for step in steps}
    more, buffers = 4 * (5 + 5), 4 * (5 + 5) + 8
    assert sent["replicate the module"] == out(*[PARAMS + more + buffers] * 2)
    assert sent["add up the gradients"] == back(*[PARAMS + more - 4 * 35] * 2)


@pytest.mark.parametrize("form", IN_ONE_PROCESS)
def test_sparse_gradients_are_sent_as_rows_with_their_numbers(form):
    model = nn.Sequential(nn.Embedding(100, 4, sparse=True), nn.Flatten())
    X = torch.tensor([[1, 2], [1, 3], [5, 5], [5, 5]])  # device 1 uses one row
    steps = trace(form, model, CRITERION, X, torch.arange(4), [CPU] * 2)
    assert steps[-1] == ("add up the gradients", back(1 * (8 + 4 * 4)), ())


@pytest.mark.parametrize("form", IN_ONE_PROCESS)
def test_the_steps_are_all_that_the_classes_send_and_their_loss_is_that_of_one_device(form):
    model, (X, y), devices = mlp(), batch(10), [CPU] * 3
    steps = trace(form, model, CRITERION, X, y, devices)
    with count_bytes() as ledger:
        loss = loss_of(form, model, CRITERION, X, y, devices)
        loss.backward()
    assert sum((Counter(step.bytes) for step in steps), Counter()) == ledger.bytes
    torch.testing.assert_close(loss, CRITERION(model(X), y))


def state(model):
    return [tensor.clone() for tensor in model.state_dict().values()]


@pytest.mark.parametrize("look", [trace, memory_of])
@pytest.mark.parametrize("form", FORMS)
def test_looking_changes_nothing(form, look):
    model, criterion, (X, y) = mlp(nn.BatchNorm1d(5)), nn.CrossEntropyLoss(), batch(8)
    criterion.scale = nn.Parameter(torch.ones(4))
    criterion.register_forward_pre_hook(lambda module, args: (module.scale * args[0], args[1]))
    X.requires_grad_()
    before = state(model)
    look(form, model, criterion, X, y, [CPU] * 2)
    assert all(torch.equal(a, b) for a, b in zip(state(model), before, strict=True))
    assert all(tensor.grad is None for tensor in (X, criterion.scale, *model.parameters()))
    assert model.training


@pytest.mark.parametrize("look", [trace, memory_of])
def test_what_cannot_be_looked_at_is_named(look):
    model, (X, y) = mlp(), batch(3)
    with pytest.raises(ValueError, match=r"form is 'ddp', which is none of DataParallel, bal.*DDP"):
        look("ddp", model, CRITERION, X, y, [CPU])
    for form in FORMS:
        with pytest.raises(ValueError, match="3 rows are too few for 4 devices"):
            look(form, model, CRITERION, X, y, [CPU] * 4)
        with pytest.raises(ValueError, match="devices is empty"):
            look(form, model, CRITERION, X, y, [])


# What is kept


@pytest.mark.parametrize("rows", [8, 11])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_what_each_device_holds(form, k, rows):
    held = memory_of(form, mlp(), CRITERION, *batch(rows), [CPU] * k)
    expected = [
        {
            "parameters": PARAMS,
            "gradients": PARAMS + n * OUTPUT,
            "outputs": n * OUTPUT,
            "activations": n * (INPUT + HIDDEN),
        }
        for n in rows_of(rows, k)
    ]
    if form == "DataParallel":
        losses_of = {0: rows}
        if k > 1:  # the outputs side by side, and their gradient, of which its own is a part
            expected[0]["outputs"] += rows * OUTPUT
            expected[0]["gradients"] += (rows - rows_of(rows, k)[0]) * OUTPUT
    else:
        losses_of = dict(enumerate(rows_of(rows, k)))
    for i, n in losses_of.items():
        expected[i]["activations"] += n * OUTPUT + 4  # log-probabilities, and how many they are
    if form != "DDP" and k > 1:
        expected[0]["gradients"] += PARAMS  # the sum
    assert held == (expected, "counted")


def test_on_gpus_every_device_is_measured_after_a_warm_up(monkeypatch):
    devices, ran, study = [torch.device("cuda", i) for i in range(2)], [], "d2lpar.study.iteration"

    def loss_of(form, model, criterion, X, y, devices):
        ran.append(len(X))
        return criterion(model(X), y)

    monkeypatch.setattr(f"{study}.check_devices", lambda devices: devices)
    monkeypatch.setattr(f"{study}.scatter", lambda batch, devices: scatter(batch, [CPU] * 2))
    monkeypatch.setattr(f"{study}.loss_of", loss_of)
    monkeypatch.setattr(f"{study}.peak_memory", lambda run, device: run() or 10 + device.index)
    monkeypatch.setattr(nn.Module, "to", lambda module, device: module)
    for form, expected in (("DataParallel", [5] * 4), ("balanced", [5] * 4), ("DDP", [3, 3, 2, 2])):
        ran.clear()
        X, y = torch.ones(5, 2), torch.zeros(5).long()
        held = memory_of(form, nn.Linear(2, 3), CRITERION, X, y, devices)
        assert held == ([{"in all": 10}, {"in all": 11}], "peak of the allocator")
        assert ran == expected


def test_targets_are_counted_where_they_have_to_travel():
    X, y = torch.randn(4, 2, device="meta"), torch.zeros(4).long()
    model = nn.Linear(2, 3, device="meta")
    steps = trace("DataParallel", model, CRITERION, X, y, [torch.device("meta")] * 2)
    assert steps[0].bytes == {(0, 1): 2 * 2 * 4, ("host", 0): 4 * 8}


def test_only_dataparallel_fills_its_first_device():
    model, X = nn.Linear(2, 1000), torch.randn(64, 2)
    spread = {}
    for form in FORMS:
        held, _ = memory_of(form, model, CRITERION, X, torch.zeros(64).long(), [CPU] * 4)
        first, *others = [sum(device.values()) for device in held]
        assert len(set(others)) == 1
        spread[form] = first / others[0]
    assert spread["DataParallel"] > 4
    assert 1 < spread["balanced"] < 1.1
    assert spread["DDP"] == 1


# Who divides the gradient rightly

BATCHES = {"even": (8, 0), "uneven": (7, 0), "ignored": (8, 3)}  # rows, of which are ignored
K = 2


@cache
def lenet_and_batch(name):
    rows, ignored = BATCHES[name]
    draw = torch.Generator().manual_seed(1)
    X = torch.rand(rows, 1, 28, 28, generator=draw, dtype=torch.float64)
    y = torch.randint(10, (rows,), generator=draw)
    y[:ignored] = CRITERION.ignore_index
    return LeNet(0.1, torch.Generator().manual_seed(2)).double(), X, y


def book(model, X, y, devices):
    device_params = [get_params(list(model.params), device) for device in devices]
    before = get_params(list(model.params), CPU)
    train_batch(X, y, device_params, devices, lr=1.0)
    return [(a - b).detach() for a, b in zip(before, device_params[0], strict=True)]


def dataparallel(model, X, y, devices):
    return CRITERION(DataParallel(model, devices)(X), y)


def loss_inside(model, X, y, devices):
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, X, y):
            return CRITERION(self.model(X), y)

    return DataParallel(WithLoss(), devices)(X, y).mean()


def balanced(model, X, y, devices):
    return DataParallelCriterion(CRITERION, devices)(DataParallelModel(model, devices)(X), y)


def chunks(model, X, y, devices):
    generator = nn.Sequential(nn.Unflatten(1, X.shape[1:]), model)
    return ChunkedLoss(generator, CRITERION, devices, chunk_size=3)(X.flatten(1), y)


def mean_of_chunks(model, X, y, devices):
    parts = zip(X.split(4), y.split(4), strict=True)
    return torch.stack([CRITERION(model(X), y) for X, y in parts]).mean()


@cache
def ddp_gradients():
    """{(weight, batch): gradients}, from one launch."""

    def run(rank, world_size, tasks):
        found = {}
        for weight in ("equal", "rows"):
            for name, (model, X_shards, y_shards) in tasks.items():
                replica = DistributedDataParallel(model, weight=weight)
                F.cross_entropy(replica(X_shards[rank]), y_shards[rank]).backward()
                found[weight, name] = [param.grad.clone() for param in model.parameters()]
                model.zero_grad()
        return found

    tasks = {}
    for name in BATCHES:
        model, X, y = lenet_and_batch(name)
        tasks[name] = (model, *split_batch(X, y, [CPU] * K))
    first, second = launch(run, K, tasks)
    assert all(
        torch.equal(a, b) for name in first for a, b in zip(first[name], second[name], strict=True)
    )
    return first


@pytest.mark.parametrize(
    ("way", "even", "uneven", "ignored"),
    [
        (book, True, True, False),
        (dataparallel, True, True, True),
        (loss_inside, True, False, False),
        (balanced, True, True, True),
        (chunks, True, True, True),
        (mean_of_chunks, True, False, False),
        ("equal", True, False, False),
        ("rows", True, True, False),
    ],
    ids=lambda way: getattr(way, "__name__", str(way)),
)
def test_whether_the_gradient_is_that_of_one_device(way, even, uneven, ignored):
    for name, right in (("even", even), ("uneven", uneven), ("ignored", ignored)):
        model, X, y = lenet_and_batch(name)
        params = list(model.params)
        expected = torch.autograd.grad(CRITERION(model(X), y), params)
        if isinstance(way, str):
            found = ddp_gradients()[way, name]
        else:
            found = way(model, X, y, [CPU] * K)
            found = torch.autograd.grad(found, params) if isinstance(found, torch.Tensor) else found
        expected, found = (torch.cat([g.flatten() for g in grads]) for grads in (expected, found))
        error = float((found - expected).norm() / expected.norm())
        assert error < 1e-6 if right else error > 1e-3, (name, error)
