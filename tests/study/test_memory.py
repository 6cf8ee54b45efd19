"""How many bytes a computation takes, counted to the last one; and what a loss in chunks saves."""

import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from d2lpar import ChunkedLoss
from d2lpar.study.memory import peak_memory, saved_memory

CPU = torch.device("cpu")
N = 1000
KB = 4 * N  # bytes of a float32 tensor of N numbers
OLD = torch.ones(N)


def drop_then_make():
    x = torch.empty(3 * N)
    del x
    torch.empty(2 * N)


def views():
    x = torch.zeros(4 * N)
    return x.view(2, -1).T[0], x[5:], x.detach(), x.reshape(4, N)


def in_place():
    torch.zeros(N).add_(1).relu_().mul_(OLD)


def many_in_turn():
    for _ in range(50):  # the allocator gives the same address again
        OLD * 2


def many_kept():
    return [OLD * 2 for _ in range(50)]


def many_in_turn_then_kept():
    many_in_turn()  # what is freed is forgotten, and counts when it comes again
    return many_kept()


def backward():
    x = torch.ones(N, requires_grad=True)
    y = x.exp()
    y.backward(OLD)  # y saved, then the gradient beside x and y


def error():
    with pytest.raises(RuntimeError):
        OLD + torch.zeros(N + 1)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: None, 0),
        (lambda: torch.zeros(N), KB),
        (lambda: torch.zeros(N, dtype=torch.float64), 2 * KB),
        (lambda: [torch.zeros(N), torch.zeros(N)], 2 * KB),
        (lambda: OLD.exp().exp().exp(), 2 * KB),  # an operation's input lives until it is done
        (drop_then_make, 3 * KB),
        (views, 4 * KB),
        (in_place, KB),
        (lambda: OLD.view(10, -1).add_(0), 0),
        (lambda: OLD.expand(50, N), 0),
        (many_in_turn, KB),
        (many_kept, 50 * KB),
        (many_in_turn_then_kept, 50 * KB),
        (lambda: torch.empty_strided((2,), (N - 1,)), KB),  # what is between is kept, too
        (backward, 3 * KB),
        (lambda: torch.empty(0), 0),
        (lambda: OLD.split(100), 0),
        (lambda: torch.ones(N).max(0), KB + 4 + 8),
        (error, KB + 4),
    ],
)
def test_peak_memory_is_exact(function, expected):
    assert peak_memory(function, CPU) == expected
    assert peak_memory(function, CPU) == expected  # what an earlier call has seen is forgotten


def test_what_was_there_before_is_not_counted_nor_its_end():
    old = [torch.ones(5 * N)]

    def function():
        old[0].add_(1)
        old.clear()
        return torch.zeros(2 * N)

    assert peak_memory(function, CPU) == 2 * KB


def test_peak_memory_hands_on_an_error_and_counts_no_longer():
    with pytest.raises(ZeroDivisionError):
        peak_memory(lambda: 1 / 0, CPU)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_peak_memory_counts_its_device_alone():
    assert peak_memory(lambda: torch.ones(N, device="meta") + 1, CPU) == 0
    assert peak_memory(lambda: torch.ones(N, device="meta") + 1, torch.device("meta")) == 2 * KB


def test_peak_memory_does_not_see_what_other_threads_make():
    """As its docstring says; torch's dispatch modes are per thread."""

    def of_two_threads():
        other = threading.Thread(target=torch.zeros, args=(1000,))
        other.start()
        other.join()
        torch.zeros(10)

    assert peak_memory(of_two_threads, CPU) == 40


def test_peak_memory_leaves_nothing_behind_on_tensors_that_live_on():
    x, before = torch.ones(N), len(weakref.finalize._registry)
    for _ in range(3):
        assert peak_memory(lambda: x + 1, CPU) == KB
    assert len(weakref.finalize._registry) == before


def test_the_peak_of_a_gpu_is_what_grew_above_what_was_there(monkeypatch):
    calls = []
    monkeypatch.setattr("d2lpar.study.memory.as_device", torch.device)
    for name, result in (
        ("synchronize", None),
        ("memory_allocated", 100),
        ("reset_peak_memory_stats", None),
        ("max_memory_allocated", 350),
    ):
        monkeypatch.setattr(
            torch.cuda,
            name,
            lambda device, name=name, result=result: (calls.append(name), result)[1],
        )
    assert peak_memory(lambda: calls.append("call"), torch.device("cuda", 1)) == 250
    order = ["memory_allocated", "reset_peak_memory_stats", "call", "synchronize"]
    assert [name for name in calls if name in order][-4:] == order


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


def test_saved_memory_leaves_out_the_result_and_all_that_needs_no_gradient():
    x = torch.ones(N, requires_grad=True)
    assert saved_memory(x.exp)[1] == 0  # exp saves its result
    assert saved_memory(lambda: {"a": [x.exp()], "b": x.sin()})[1] == KB  # sin saves x
    assert saved_memory(lambda: x.detach().sin())[1] == 0
    assert saved_memory(torch.no_grad()(lambda: x.sin()))[1] == 0
    assert saved_memory(lambda: x[: N // 2].sin())[1] == KB  # the whole storage


def test_saved_memory_counts_sparse_tensors():
    weight, eye = torch.ones(5, 2, requires_grad=True), torch.eye(5).to_sparse()
    _, saved = saved_memory(lambda: torch.sparse.mm(eye, weight), [weight])
    assert saved == 5 * (2 * 8 + 4)
    assert saved_memory(lambda: (weight * 2).to_sparse(), [weight])[0].is_sparse


def test_saved_memory_of_a_network():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    X = torch.ones(3, 6)
    output, saved = saved_memory(partial(model, X), model.parameters())
    assert saved == 4 * (3 * 6 + 3 * 5)  # what each Linear was given
    assert output.shape == (3, 4)


# Logits that never exist at once


class Counting(nn.Linear):
    """Writes down how many rows it is given."""

    def __init__(self, *args):
        super().__init__(*args)
        self.rows = []

    def forward(self, X):
        self.rows.append(len(X))
        return super().forward(X)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 4, 7, 100])
def test_a_generator_never_sees_more_than_a_chunk_neither_forward_nor_backward(k, size, recompute):
    generator, hidden = Counting(3, 5), torch.randn(2, 10, 3, requires_grad=True)
    loss = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU] * k, size, recompute=recompute)
    total = loss(hidden, torch.randint(5, (2, 10)))
    shards = [20 // k + (i < 20 % k) for i in range(k)]
    chunks = [min(size, n - begin) for n in shards for begin in range(0, n, size)]
    assert sorted(generator.rows) == sorted(chunks)
    total.backward()
    assert sorted(generator.rows) == sorted((1 + recompute) * chunks)


def peak_of_step(size, k=1, n=512, d=8, classes=2000, recompute=False):
    torch.manual_seed(0)
    generator, target = nn.Linear(d, classes), torch.randint(classes, (n,))
    hidden = torch.randn(n, d, requires_grad=True)
    whole = nn.CrossEntropyLoss()
    chunked = ChunkedLoss(generator, whole, [CPU] * k, size or 1, recompute=recompute)

    def step():
        (chunked(hidden, target) if size else whole(generator(hidden), target)).backward()

    return peak_memory(step, CPU)


@pytest.mark.parametrize("recompute", [False, True])
def test_memory_shrinks_with_the_chunks(recompute):
    peak = partial(peak_of_step, recompute=recompute)
    whole, one, two, eight = map(peak, (None, 512, 256, 64))
    assert whole > 2 * 512 * 2000 * 4  # logits, and what backward keeps of them
    assert one == pytest.approx(whole, rel=0.1)
    assert two == pytest.approx(whole / 2, rel=0.15)
    assert eight < whole / 5


def test_scores_of_a_pass_without_gradients_are_in_chunks_too():
    generator, hidden, target = nn.Linear(8, 2000), torch.randn(512, 8), torch.zeros(512).long()
    loss = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU], 64)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert peak_memory(partial(loss, hidden, target), CPU) < 4 * 64 * 2000 * 4
            result, expected = loss(hidden, target), F.cross_entropy(generator(hidden), target)
        assert not result.requires_grad
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("size", [2, 5])
def test_backward_computes_with_the_very_mask_of_forward(size):
    generator = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 4), nn.Dropout(0.5))
    hidden, target = torch.randn(5, 6, requires_grad=True), torch.tensor([0, 1, 2, 3, 0])
    torch.manual_seed(7)
    parts = [
        F.cross_entropy(generator(h), t, reduction="sum")
        for h, t in zip(hidden.split(size), target.split(size), strict=True)
    ]
    expected = sum(parts) / 5
    tensors = hidden, *generator.parameters()
    by_hand = torch.autograd.grad(expected, tensors)
    torch.manual_seed(7)
    loss = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU], size)(hidden, target)
    after = torch.rand(1)
    torch.rand(100)  # whoever draws in between
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, tensors), by_hand)
    torch.manual_seed(7)
    for h in hidden.split(size):
        generator(h)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("k", [1, 3])
def test_tied_weights_get_the_gradients_of_both_uses(k):
    embedding, tokens = nn.Embedding(9, 4).double(), torch.arange(9).repeat(3)
    generator = nn.Linear(4, 9, bias=False).double()
    generator.weight = embedding.weight
    target = (tokens + 1) % 9
    loss = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU] * k, 4)(embedding(tokens), target)
    expected = F.cross_entropy(embedding(tokens) @ embedding.weight.T, target)
    torch.testing.assert_close(loss, expected)
    for grads in zip(
        *[torch.autograd.grad(x, embedding.weight) for x in (loss, expected)], strict=True
    ):
        torch.testing.assert_close(*grads)


def test_the_hidden_states_need_no_gradient_and_the_generator_neither():
    generator, target = nn.Linear(4, 5), torch.arange(5)
    loss = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU] * 2, 2)
    loss(torch.randn(5, 4), target).backward()
    assert generator.weight.grad.abs().max() > 0
    generator.requires_grad_(False)
    hidden = torch.randn(5, 4, requires_grad=True)
    loss(hidden, target).backward()
    assert hidden.grad.abs().min() > 0


@pytest.mark.parametrize("recompute", [False, True])
def test_chunks_under_autocast_are_computed_in_16_bits_in_both_passes(recompute):
    seen = []

    def criterion(logits, target):
        seen.append(logits.dtype)
        return F.cross_entropy(logits, target)

    generator, hidden = nn.Linear(8, 50), torch.randn(40, 8, requires_grad=True)
    target = torch.randint(50, (40,))
    loss = ChunkedLoss(generator, criterion, [CPU] * 2, 7, count=len, recompute=recompute)
    with torch.autocast("cpu", torch.bfloat16):
        total = loss(hidden, target)
    total.backward()
    assert set(seen) == {torch.bfloat16} and len(seen) == (1 + recompute) * 6
    expected = F.cross_entropy(generator(hidden), target)
    torch.testing.assert_close(total, expected, rtol=0.02, atol=0)
    [grad] = torch.autograd.grad(expected, hidden)
    torch.testing.assert_close(hidden.grad, grad, rtol=0.1, atol=1e-3)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has it from 2.13 on")
def test_torchs_own_loss_in_chunks_agrees():
    generator, hidden = nn.Linear(8, 50).double(), torch.randn(40, 8).double().requires_grad_()
    target = torch.randint(50, (40,))
    target[:7] = -100
    tensors = hidden, generator.weight, generator.bias
    theirs = F.linear_cross_entropy(hidden, generator.weight, target, linear_bias=generator.bias)
    ours = ChunkedLoss(generator, nn.CrossEntropyLoss(), [CPU] * 3, 5)(hidden, target)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*[torch.autograd.grad(x, tensors) for x in (ours, theirs)])


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", None])
def test_a_wrong_size_of_chunks_is_named(size):
    with pytest.raises(ValueError, match=f"chunk_size must be a positive int, not {size!r}"):
        ChunkedLoss(nn.Linear(2, 2), nn.CrossEntropyLoss(), [CPU], size)


@pytest.mark.parametrize(
    ("hidden", "target", "words"),
    [
        ((3, 2), (4,), r"hidden has shape \[3, 2\], and target \[4\]"),
        ((2, 3, 4), (6,), r"hidden has shape \[2, 3, 4\], and target \[6\]"),
        ((6, 4), (2, 3), r"hidden has shape \[6, 4\], and target \[2, 3\]"),
        ((2, 3, 4), (2, 2, 5), r"hidden has shape \[2, 3, 4\], and target \[2, 2, 5\]"),
    ],
)
def test_positions_that_differ_are_named(hidden, target, words):
    loss = ChunkedLoss(nn.Linear(hidden[-1], 5), nn.CrossEntropyLoss(), [CPU], 2)
    with pytest.raises(ValueError, match=words):
        loss(torch.zeros(hidden), torch.zeros(target).long())


def test_hidden_states_have_a_dimension():
    with pytest.raises(ValueError, match=r"hidden has shape \[\], and target \[\]; they should be"):
        ChunkedLoss(nn.Linear(2, 2), nn.CrossEntropyLoss(), [CPU], 2)(
            torch.ones(()), torch.ones(())
        )
