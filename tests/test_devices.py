"""Which devices there are, what moves between them, and how it is counted."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import d2lpar
from d2lpar import Ledger, choose_devices, count_bytes, to_device
from d2lpar.devices import as_device, check_devices, hardware

CPU, GPUS = torch.device("cpu"), [torch.device("cuda", 0), torch.device("cuda", 1)]


def pretend_gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_gpus_are_used_where_there_are_enough_and_else_the_cpu(monkeypatch):
    pretend_gpus(monkeypatch, 0)
    assert d2lpar.try_gpu() == d2lpar.try_gpu(3) == CPU
    assert d2lpar.try_all_gpus() == [CPU]
    assert choose_devices(3) == ([CPU] * 3, "3 virtual devices on cpu")
    assert choose_devices(1) == ([CPU], "cpu")
    pretend_gpus(monkeypatch, 2)
    assert [d2lpar.try_gpu(i) for i in (1, 2, -1)] == [GPUS[1], CPU, CPU]
    assert d2lpar.try_all_gpus() == GPUS
    assert choose_devices(2) == (GPUS, "cuda:0, cuda:1")
    assert choose_devices(1) == (GPUS[:1], "cuda:0")
    words = "3 virtual devices on cuda:0, cuda:1"
    assert choose_devices(3) == ([*GPUS, GPUS[0]], words)


def test_a_device_that_is_not_there_is_named_wherever_devices_are_given(monkeypatch):
    pretend_gpus(monkeypatch, 2)
    linear, absent = torch.nn.Linear(2, 2), torch.device("cuda", 7)
    for device, use in (
        ("cuda:7", as_device),
        (7, as_device),
        ("no_such", lambda device: check_devices(["cpu", device])),
        (absent, lambda device: d2lpar.DataParallel(linear, ["cpu", device])),
        (absent, lambda device: d2lpar.peak_memory(list, device)),
        (absent, lambda device: d2lpar.load_data_fashion_mnist(8, device=device)),
    ):
        words = f"there is no device {device!r}: GPUs that torch sees here: 2. Use"
        with pytest.raises(ValueError) as error:
            use(device)
        assert str(error.value).startswith(words)
    assert check_devices(["cpu", CPU]) == [torch.empty(0).device] * 2
    for call, error, words in (
        (lambda: choose_devices("2"), ValueError, "must be a positive int, not '2'"),
        (lambda: choose_devices(0), ValueError, "must be a positive int, not 0"),
        (lambda: check_devices(2), TypeError, "a list of devices, not 2"),
        (lambda: check_devices("cpu"), TypeError, "a list of devices, not 'cpu'"),
        (lambda: check_devices([]), ValueError, "devices is empty"),
    ):
        with pytest.raises(error, match=words):
            call()


def test_hardware_names_threads_torch_and_the_processor(monkeypatch):
    for n, words in (1, "1 thread of "), (4, "4 threads of "):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=n: n)
        assert words in hardware() and torch.__version__ in hardware()
    pretend_gpus(monkeypatch, 3)
    names = ["A", "B", "A"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: names[i])
    assert hardware().startswith("2 x A, 1 x B, 4 threads of ")


def test_moving_counts_bytes_per_link_and_copies_nothing_within_one_memory():
    x = torch.arange(6, dtype=torch.float64)
    with count_bytes() as ledger:
        assert to_device(x, CPU, 0, 1) is x
        to_device(x[:2], CPU, 0, 1)
        to_device(x.float(), CPU, 1, 2)
        to_device(x, CPU, 2, 2)  # goes nowhere
        to_device(x[:1].expand(5), CPU, "host", 2)  # all five would be sent
    assert ledger.bytes == {(0, 1): 64, (1, 2): 24, ("host", 2): 40}
    assert ledger.messages == {(0, 1): 2, (1, 2): 1, ("host", 2): 1}
    assert (ledger.sent(0), ledger.sent(1), ledger.sent(2)) == (64, 24, 0)


def test_a_gradient_travels_back_once_and_is_counted():
    x = torch.ones(3, requires_grad=True)
    assert to_device(x, CPU, 0, 1) is x  # no ledger
    with count_bytes() as ledger:
        y = to_device(x, CPU, 0, 1)
        assert y is not x and y.data_ptr() == x.data_ptr()
        (y.exp() + y).sum().backward()  # two uses
        torch.testing.assert_close(x.grad, torch.e + torch.ones(3))
        to_device(2 * x, CPU, 2, 3).relu_().sum().backward()  # it may be written to
        assert to_device(x, CPU, 1, 1) is x
        to_device(x.detach(), CPU, 4, 5)
        with torch.no_grad():
            to_device(x, CPU, 4, 5)
        to_device(x, CPU, 4, 5)  # of which no loss is made
        x.sum().backward()
    there_and_back = dict.fromkeys([(0, 1), (1, 0), (2, 3), (3, 2)], 12)
    assert ledger.bytes == there_and_back | {(4, 5): 36}


def test_counting_ends_with_the_block_also_after_an_error_and_sees_all_threads():
    def move(_):
        for _ in range(5_000):
            to_device(torch.zeros(1), CPU, 0, 1)

    with count_bytes() as outer:
        with pytest.raises(KeyError), count_bytes() as inner:
            to_device(torch.zeros(1), CPU, 1, 0)
            raise KeyError
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(move, range(4)))
    to_device(torch.zeros(1), CPU, 0, 1)
    assert outer.bytes == {(0, 1): 80_000} and inner.bytes == {(1, 0): 4}
    assert Ledger.current is None
