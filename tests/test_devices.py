"""Which devices there are, what moves between them, and how it is counted."""

import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional as F

import d2lpar
from d2lpar import (
    Ledger,
    choose_devices,
    count_bytes,
    devices,
    to_device,
    try_all_gpus,
    try_gpu,
)
from d2lpar.checkpoint import load_checkpoint
from d2lpar.devices import as_device, check_devices, describe, hardware, num_bytes
from d2lpar.study.memory import peak_memory

CPU = torch.device("cpu")


def pretend_gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_gpus_are_used_where_there_are_enough_and_else_the_cpu(monkeypatch):
    pretend_gpus(monkeypatch, 0)
    assert try_gpu() == try_gpu(3) == CPU and try_all_gpus() == [CPU]
    assert choose_devices(3) == ([CPU] * 3, "3 virtual devices on cpu")
    assert choose_devices(1) == ([CPU], "cpu") and describe([CPU]) == "cpu"
    pretend_gpus(monkeypatch, 2)
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert [try_gpu(i) for i in (1, 2, -1)] == [gpus[1], CPU, CPU]
    assert try_all_gpus() == gpus
    assert choose_devices(2) == (gpus, "cuda:0, cuda:1")
    assert choose_devices(3) == (
        [*gpus, gpus[0]],
        "3 virtual devices on cuda:0, cuda:1",
    )


@pytest.mark.parametrize(
    "device", ["cuda:7", torch.device("cuda", 7), 7, "no_such_kind"]
)
def test_a_device_that_is_not_there_is_named_wherever_devices_are_given(
    monkeypatch, device
):
    pretend_gpus(monkeypatch, 0)
    linear, X = torch.nn.Linear(2, 2), torch.ones(4, 2)
    for use in (
        lambda: as_device(device),
        lambda: d2lpar.scatter(X, ["cpu", device]),
        lambda: d2lpar.gather([X, X], device),
        lambda: d2lpar.DataParallel(linear, ["cpu", device]),
        lambda: d2lpar.Pipeline([linear, linear], ["cpu", device], F.mse_loss, 2),
        lambda: peak_memory(list, device),
        lambda: d2lpar.load_data_fashion_mnist(8, device=device),
        lambda: load_checkpoint("any", device),
        lambda: d2lpar.get_params(list(linear.parameters()), device),
        lambda: d2lpar.split_batch(X, X, ["cpu", device]),
    ):
        with pytest.raises(
            ValueError, match=r"there is no device .* sees no GPU"
        ) as error:
            use()
        assert repr(device) in str(error.value)


def test_a_device_that_is_there_is_named_as_tensors_name_it(monkeypatch):
    assert check_devices(["cpu", CPU]) == [torch.empty(0).device] * 2
    pretend_gpus(monkeypatch, 2)
    for call, error, words in (
        (lambda: as_device("cuda:7"), ValueError, "torch sees GPUs 0 to 1"),
        (lambda: choose_devices("2"), ValueError, "must be a positive int, not '2'"),
        (
            lambda: check_devices("cpu"),
            TypeError,
            "must be a list of devices, not 'cpu'",
        ),
        (lambda: check_devices([]), ValueError, "devices is empty"),
    ):
        with pytest.raises(error, match=words):
            call()
    full = torch.OutOfMemoryError("out of memory")
    monkeypatch.setattr(torch, "empty", Mock(side_effect=full))
    # a device that is full is not called absent
    with pytest.raises(torch.OutOfMemoryError):
        as_device("cuda:0")


def test_hardware_names_threads_torch_and_the_processor(monkeypatch):
    for n, words in (1, "1 thread of "), (4, "4 threads of "):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=n: n)
        assert hardware().startswith(words) or f", {words}" in hardware()
    assert torch.__version__ in hardware()
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(devices, "Path", lambda name: Path("no such file"))
    assert "4 threads of riscv64" in hardware()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(
        devices.subprocess, "check_output", lambda *_, **__: "Apple M4\n"
    )
    assert "4 threads of Apple M4," in hardware()


def test_moving_counts_bytes_per_link_and_copies_nothing_within_one_memory():
    x = torch.arange(6, dtype=torch.float64)
    with count_bytes() as ledger:
        assert to_device(x, CPU, 0, 1) is x
        to_device(x[:2], CPU, 0, 1)
        to_device(x.float(), CPU, 1, 2)
        to_device(x, CPU, 2, 2)  # goes nowhere
        to_device(x, CPU, "host", 2)
    assert ledger.bytes == {(0, 1): 64, (1, 2): 24, ("host", 2): 48}
    assert ledger.messages == {(0, 1): 2, (1, 2): 1, ("host", 2): 1}
    assert (ledger.sent(0), ledger.received(0)) == (64, 0)
    assert (ledger.sent(2), ledger.received(2)) == (0, 72)


def test_a_gradient_travels_back_once_and_is_counted_where_the_tensor_was():
    x = torch.ones(3, requires_grad=True)
    with count_bytes() as ledger:
        y = to_device(x, CPU, 0, 1)
    assert y is not x and y.data_ptr() == x.data_ptr()
    (y.exp() + y).sum().backward()  # after the block, and for two uses
    torch.testing.assert_close(x.grad, torch.e + torch.ones(3))
    x.sum().backward()  # not by way of y
    assert ledger.bytes == {(0, 1): 12, (1, 0): 12}
    y.sum().backward()  # a second pass sends it again
    assert ledger.bytes[1, 0] == 24
    weight = torch.ones(5, 2, requires_grad=True)
    with count_bytes() as ledger:
        F.embedding(
            torch.tensor([1]), to_device(weight, CPU, 0, 1), sparse=True
        ).sum().backward()
    assert weight.grad.is_sparse and ledger.bytes[1, 0] == 8 + 2 * 4


def test_what_was_moved_may_be_written_to_and_a_missing_gradient_is_not_made_up():
    class Ends(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: 2 * x)
        backward = staticmethod(lambda ctx, grad: None)

    x = torch.ones(3, requires_grad=True)
    with count_bytes():
        Ends.apply(to_device(x, CPU, 0, 1)).sum().backward()
        assert x.grad is None
        to_device(2 * x, CPU, 0, 1).relu_().sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_nothing_travels_back_of_what_needs_no_gradient_or_goes_nowhere():
    x = torch.ones(3, requires_grad=True)
    assert to_device(x, CPU, 0, 1) is x  # no ledger
    with count_bytes() as ledger:
        assert to_device(x, CPU, 1, 1) is x
        to_device(x.detach(), CPU, 0, 1)
        with torch.no_grad():
            to_device(x, CPU, 0, 1)
        to_device(x, CPU, 0, 1)  # of which no loss is made
    x.sum().backward()
    assert ledger.bytes == {(0, 1): 36}


def test_the_bytes_of_a_message():
    assert num_bytes(torch.zeros(3, 4, dtype=torch.float16).T) == 24
    assert num_bytes(torch.zeros(1).expand(5)) == 20  # all five would be sent
    assert num_bytes(torch.zeros(10)[:2]) == 8 and num_bytes(torch.zeros(0)) == 0
    assert num_bytes(torch.tensor([[0.0, 1, 0], [2, 0, 3]]).to_sparse()) == 3 * (
        2 * 8 + 4
    )
    twice = torch.sparse_coo_tensor(
        [[1, 1, 2]], torch.ones(3, 5), (9, 5), check_invariants=True
    )
    assert num_bytes(twice) == 2 * (8 + 5 * 4)


def test_counting_ends_with_the_block_also_after_an_error():
    with count_bytes() as outer:
        with pytest.raises(KeyError), count_bytes() as inner:
            to_device(torch.zeros(1), CPU, 1, 0)
            raise KeyError
        to_device(torch.zeros(1), CPU, 0, 1)
    to_device(torch.zeros(1), CPU, 0, 1)
    assert outer.bytes == {(0, 1): 4} and inner.bytes == {(1, 0): 4}  # and they nest


def test_threads_do_not_lose_counts():
    ledger = Ledger()
    with ThreadPoolExecutor(4) as threads:
        list(
            threads.map(
                lambda _: [ledger.record(0, 1, 1) for _ in range(20_000)], range(4)
            )
        )
    assert ledger.bytes == {(0, 1): 80_000}


@pytest.mark.gpu
def test_moving_between_a_gpu_and_the_host():
    with count_bytes() as ledger:
        y = to_device(torch.ones(4), torch.device("cuda", 0), "host", 0)
    assert y.device == torch.device("cuda", 0) and ledger.bytes == {("host", 0): 16}
