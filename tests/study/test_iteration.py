"""An iteration of each form: its bytes and memory, worked out by hand."""

from collections import Counter
from copy import deepcopy

import pytest
import torch
from torch import nn

from d2lpar import count_bytes
from d2lpar.data_parallel.scattering import scatter
from d2lpar.ranks.collectives import choose
from d2lpar.study.iteration import FORMS, loss_of, memory_of, trace

CPU = torch.device("cpu")
CRITERION = nn.CrossEntropyLoss()
PARAMS = 4 * (6 * 5 + 5 + 5 * 4 + 4)  # bytes, of which a row has: …
INPUT, HIDDEN, OUTPUT, LABEL = 4 * 6, 4 * 5, 4 * 4, 8
in_one_process = pytest.mark.parametrize("form", ["DataParallel", "balanced"])
k_and_rows = pytest.mark.parametrize(("k", "rows"), [(1, 8), (4, 11)])


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


@k_and_rows
@in_one_process
def test_the_bytes_of_each_step(form, k, rows):
    others, everyone = rows_of(rows, k)[1:], tuple(range(k))
    whole = [PARAMS] * (k - 1)
    outputs, numbers = [n * OUTPUT for n in others], [4] * (k - 1)
    inputs = [n * (INPUT + LABEL * (form == "balanced")) for n in others]
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
    assert trace(form, mlp(), CRITERION, *batch(rows), [CPU] * k) == [
        ("scatter the batch", out(*inputs), ()),
        ("replicate the module", out(*whole), ()),
        ("forward", {}, everyone),
        *middle[form],
        ("backward", {}, everyone),
        ("add up the gradients", back(*whole), ()),
    ]


@pytest.mark.parametrize("k", [1, 3])
def test_the_bytes_of_ddp_are_those_of_its_schedule(k):
    *steps, last = trace("DDP", mlp(), CRITERION, *batch(9), [CPU] * k)
    everyone = tuple(range(k))
    assert steps == [(name, {}, everyone) for name in ("forward", "loss", "backward")]
    message = PARAMS + 4 * (4 + 1)  # with who has used each parameter, and the rows
    moves = [move for step in choose(message, k)(k) for move in step]
    assert all(move.chunk is None for move in moves)
    sent = {
        link: message * n for link, n in Counter((m.src, m.dst) for m in moves).items()
    }
    assert last == ("allreduce the gradients", sent, ())


@in_one_process
def test_buffers_are_sent_and_frozen_parameters_come_not_back(form):
    model = mlp(nn.BatchNorm1d(5))
    model[0].requires_grad_(False)
    steps = trace(form, model, CRITERION, *batch(8), [CPU] * 3)
    sent = {step.name: step.bytes for step in steps}
    more, buffers = 4 * (5 + 5), 4 * (5 + 5) + 8
    assert sent["replicate the module"] == out(*[PARAMS + more + buffers] * 2)
    assert sent["add up the gradients"] == back(*[PARAMS + more - 4 * 35] * 2)


@in_one_process
def test_the_steps_are_all_that_the_classes_send_and_their_loss_is_that_of_one_device(
    form,
):
    model, (X, y), devices = mlp(), batch(10), [CPU] * 3
    steps = trace(form, model, CRITERION, X, y, devices)
    with count_bytes() as ledger:
        loss = loss_of(form, model, CRITERION, X, y, devices)
        loss.backward()
    assert sum((Counter(step.bytes) for step in steps), Counter()) == ledger.bytes
    torch.testing.assert_close(loss, CRITERION(model(X), y))


def test_targets_are_counted_where_they_have_to_travel():
    X, y = torch.randn(4, 2, device="meta"), torch.zeros(4).long()
    model = nn.Linear(2, 3, device="meta")
    steps = trace("DataParallel", model, CRITERION, X, y, [torch.device("meta")] * 2)
    assert steps[0].bytes == {(0, 1): 2 * 2 * 4, ("host", 0): 4 * 8}


@pytest.mark.parametrize("look", [trace, memory_of])
@pytest.mark.parametrize("form", FORMS)
def test_looking_changes_nothing_and_names_what_cannot_be_looked_at(form, look):
    model, criterion, (X, y) = mlp(nn.BatchNorm1d(5)), nn.CrossEntropyLoss(), batch(8)
    criterion.scale = nn.Parameter(torch.ones(4))
    criterion.register_forward_pre_hook(
        lambda module, args: (module.scale * args[0], args[1])
    )
    X.requires_grad_()
    before = deepcopy(model.state_dict())
    look(form, model, criterion, X, y, [CPU] * 2)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(
        tensor.grad is None for tensor in (X, criterion.scale, *model.parameters())
    )
    assert model.training
    for name, devices, words in (
        ("ddp", [CPU], r"form is 'ddp', which is none of DataParallel, bal.*DDP"),
        (form, [CPU] * 9, "8 rows are too few for 9 devices"),
        (form, [], "devices is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            look(name, model, CRITERION, X, y, devices)


# What is kept


@k_and_rows
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
    losses_of = [rows] if form == "DataParallel" else rows_of(rows, k)
    for own, n in zip(expected, losses_of, strict=False):
        own["activations"] += n * OUTPUT + 4  # log-probabilities, and how many they are
    # the outputs side by side, and their gradient, of
    if form == "DataParallel" and k > 1:
        expected[0]["outputs"] += rows * OUTPUT  # which its own is a part
        expected[0]["gradients"] += (rows - rows_of(rows, k)[0]) * OUTPUT
    if form != "DDP" and k > 1:
        expected[0]["gradients"] += PARAMS  # the sum
    assert held == (expected, "counted")


def test_on_gpus_every_device_is_measured_after_a_warm_up(monkeypatch):
    devices, ran, study = (
        [torch.device("cuda", i) for i in range(2)],
        [],
        "d2lpar.study.iteration",
    )

    def loss_of(form, model, criterion, X, y, devices):
        ran.append(len(X))
        return criterion(model(X), y)

    monkeypatch.setattr(f"{study}.check_devices", lambda devices: devices)
    monkeypatch.setattr(
        f"{study}.scatter", lambda batch, devices: scatter(batch, [CPU] * 2)
    )
    monkeypatch.setattr(f"{study}.loss_of", loss_of)
    monkeypatch.setattr(
        f"{study}.peak_memory", lambda run, device: run() or 10 + device.index
    )
    monkeypatch.setattr(nn.Module, "to", lambda module, device: module)
    for form, expected in (("balanced", [5] * 4), ("DDP", [3, 3, 2, 2])):
        ran.clear()
        X, y = torch.ones(5, 2), torch.zeros(5).long()
        held = memory_of(form, nn.Linear(2, 3), CRITERION, X, y, devices)
        assert held == ([{"in all": 10}, {"in all": 11}], "peak of the allocator")
        assert ran == expected
