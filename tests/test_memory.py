"""How many bytes a computation takes, counted to the last one."""

from contextlib import nullcontext

import pytest
import torch

from d2lpar import parallel_apply
from d2lpar.memory import peak_memory, saved_memory, watched
from d2lpar.ranks import Sender

CPU, META = torch.device("cpu"), torch.device("meta")
N = 1000
KB = 4 * N  # bytes of a float32 tensor of N numbers
OLD = torch.ones(N)


def drop_then_make():
    x = torch.empty(3 * N)
    del x
    torch.empty(2 * N)


def many_in_turn_then_kept():
    for _ in range(50):  # the allocator gives the same address again
        OLD * 2
    return [OLD * 2 for _ in range(50)]


def backward():
    x = torch.ones(N, requires_grad=True)
    x.exp().backward(OLD)  # the result saved, then the gradient beside it and x


def use_what_was_there():
    OLD.add_(1).sub_(1)
    return torch.zeros(2 * N)


PEAKS = {
    "views": (lambda: (OLD.view(10, -1).add_(0), OLD.expand(50, N), OLD.split(9)), 0),
    "two": (lambda: [torch.zeros(N), torch.zeros(N)], 2 * KB),
    "a chain": (lambda: OLD.exp().exp().exp(), 2 * KB),  # an input lives until the end
    "dropped, then another": (drop_then_make, 3 * KB),
    "in place": (lambda: torch.zeros(N).add_(1).relu_().mul_(OLD), KB),
    "many": (many_in_turn_then_kept, 50 * KB),
    # with what is between
    "strided": (lambda: torch.empty_strided((2,), (N - 1,)), KB),
    "backward": (backward, 3 * KB),
    "several results": (lambda: torch.ones(N).max(0), KB + 4 + 8),
    "another device": (lambda: torch.ones(N, device=META) + 1, 0),
    "what was there": (use_what_was_there, 2 * KB),
}


@pytest.mark.parametrize("name", PEAKS)
def test_peak_memory_is_exact(name):
    function, expected = PEAKS[name]
    for _ in range(2):  # what an earlier call has seen is forgotten
        assert peak_memory(function, CPU) == expected
    if name == "another device":
        assert peak_memory(function, META) == 2 * KB


def test_what_a_communication_thread_makes_is_counted_until_it_is_freed():
    sender, kept = Sender(), []

    def function():
        kept.append(sender.submit(torch.zeros, N).result())
        sender.submit(OLD.exp).result()  # freed at once
        kept.append(torch.ones(N))

    assert peak_memory(function, CPU) == 2 * KB
    with pytest.raises(ZeroDivisionError):
        peak_memory(lambda: OLD + 1 / 0, CPU)
    assert isinstance(watched(), nullcontext)  # nothing counts any more
    sender.stop()


def test_what_the_threads_of_parallel_apply_make_is_counted():
    def make():
        return parallel_apply([torch.zeros] * 2, [N, 2 * N])

    assert peak_memory(make, CPU) == 3 * KB
    assert peak_memory(lambda: (peak_memory(make, CPU), make()), CPU) == 3 * KB


def test_saved_memory_counts_what_backward_needs_once():
    x, w = torch.ones(N, requires_grad=True), torch.ones(N, requires_grad=True)

    def chain():
        a = x.exp()  # saves a
        b = a * w  # saves a and w
        return b.sin().sum()  # saves b

    for without, expected in [((), 3 * KB), ([w], 2 * KB), ([w, x], 2 * KB)]:
        result, saved = saved_memory(chain, without)
        assert saved == expected
    result.backward()
    torch.testing.assert_close(x.grad, torch.e * torch.tensor(torch.e).cos().expand(N))
    assert saved_memory(lambda: {"a": [x.exp(), None], "b": x.sin()})[1] == KB  # x
    assert saved_memory(lambda: x.detach().sin())[1] == 0
    assert saved_memory(lambda: x[: N // 2].sin())[1] == KB  # the whole storage
