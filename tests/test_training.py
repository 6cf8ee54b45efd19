from functools import partial

import pytest
import torch

from d2lpar import (
    accuracy,
    allreduce,
    choose_devices,
    count_bytes,
    get_params,
    init_params,
    lenet,
    loss,
    naive_allreduce,
    ring_allreduce,
    split_batch,
    train,
    train_batch,
    training,
    tree,
)
from d2lpar.data import Minibatches

CPU = torch.device("cpu")


# In float64, unless it is said: kernels round differently, and a tolerance must not hang on one.


def batch(rows, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(rows, 1, 28, 28, generator=generator, dtype=dtype)
    return X, torch.randint(10, (rows,), generator=generator)


def replicas(k, dtype=torch.float64, scale=0.1):
    params = [p.to(dtype) for p in init_params(scale, torch.Generator().manual_seed(1))]
    devices, _ = choose_devices(k)
    return [get_params(params, device) for device in devices], devices


def largest_difference(params, others):
    return max((a - b).abs().max().item() for a, b in zip(params, others, strict=True))


def step_with_autograd_alone(X, y, params, lr):
    """One step of gradient descent on the mean loss, without any part of ours but the network."""
    params = [p.detach().clone().requires_grad_() for p in params]
    grads = torch.autograd.grad(loss(lenet(X, params), y).mean(), params)
    return [p.detach() - lr * g for p, g in zip(params, grads, strict=True)]


def test_get_params_gives_independent_copies_that_record_gradients():
    params = init_params()
    before = [p.clone() for p in params]
    copies = [get_params(params, CPU) for _ in range(2)]
    with torch.no_grad():
        for p in copies[0]:
            p.add_(1)
    assert all(p.requires_grad and p.is_leaf for copy in copies for p in copy)
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(copies[1], before, strict=True))
    assert all(a.stride() == b.stride() for a, b in zip(copies[0], params, strict=True))


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 256])
@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_shards_differ_by_at_most_a_row_and_lose_none(rows, k):
    X, y = batch(rows)
    X_shards, y_shards = split_batch(X, y, [CPU] * k)
    assert len(X_shards) == len(y_shards) == k
    sizes = [len(shard) for shard in X_shards]
    assert sizes == [len(shard) for shard in y_shards]
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat(X_shards), X) and torch.equal(torch.cat(y_shards), y)


def test_splitting_counts_what_leaves_the_host():
    X, y = batch(6, torch.float32)
    with count_bytes() as ledger:
        split_batch(X, y, [CPU] * 2)
    assert ledger.bytes == {("host", i): 3 * (28 * 28 * 4 + 8) for i in range(2)}


def test_split_batch_names_what_does_not_fit():
    X, y = batch(6)
    with pytest.raises(ValueError, match=r"X has shape \(6, 1, 28, 28\), but y has shape \(5,\)"):
        split_batch(X, y[:5], [CPU])
    with pytest.raises(ValueError, match="devices is empty"):
        split_batch(X, y, [])


@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rows", [3, 8, 21])
@pytest.mark.parametrize("reduce", [naive_allreduce, ring_allreduce], ids=lambda f: f.__name__)
def test_one_step_is_the_same_on_any_number_of_devices(k, rows, reduce):
    X, y = batch(rows)
    device_params, devices = replicas(k)
    expected = step_with_autograd_alone(X, y, device_params[0], lr=0.3)
    assert largest_difference(device_params[0], expected) > 1e-3  # the step does something
    total = train_batch(X, y, device_params, devices, 0.3, reduce)
    assert largest_difference(device_params[0], expected) < 1e-12
    start = replicas(1)[0][0]
    torch.testing.assert_close(total, loss(lenet(X, start), y).sum().detach())
    assert not total.requires_grad


@pytest.mark.parametrize("k", [2, 3, 4, 8])
def test_ten_steps_in_float64_agree_and_replicas_stay_equal_to_the_bit(k):
    one, many = replicas(1), replicas(k)
    for seed in range(10):
        X, y = batch(5 + seed, seed=seed)  # ragged, and at times fewer rows than devices
        train_batch(X, y, *one, lr=0.5)
        train_batch(X, y, *many, lr=0.5, allreduce=lambda data: allreduce(data, tree))
    assert largest_difference(one[0][0], many[0][0]) < 1e-10
    for params in many[0][1:]:
        assert all(torch.equal(a, b) for a, b in zip(params, many[0][0], strict=True))


# Mutants: each a bug that others have published, and each must break the equality above.


def gap_to_one_device(k=4, rows=21, monkeypatch=None, **patches):
    X, y = batch(rows)
    device_params, devices = replicas(k)
    expected = step_with_autograd_alone(X, y, device_params[0], lr=0.3)
    for name, function in patches.items():
        monkeypatch.setattr(training, name, function)
    train_batch(X, y, device_params, devices, 0.3, training.ring_allreduce)
    return max(largest_difference(params, expected) for params in device_params)


def test_the_true_code_has_no_gap():
    assert gap_to_one_device() < 1e-12


@pytest.mark.parametrize("k", [2, 3, 4])
def test_sharing_parameters_between_replicas_would_multiply_the_update(k, monkeypatch):
    """On virtual devices ``tensor.to(device)`` is the tensor itself; this is what follows."""

    def books_allreduce(data):
        for i in range(1, len(data)):
            data[0][:] += data[i]
        for i in range(1, len(data)):
            data[i][:] = data[0]

    @torch.no_grad()
    def books_sgd(params, lr, batch_size):
        for param in params:
            param -= lr * param.grad / batch_size
            param.grad.zero_()

    monkeypatch.setattr(training, "sgd", books_sgd)
    X, y = batch(8)
    (start,), (cpu,) = replicas(1)
    one_step = step_with_autograd_alone(X, y, start, lr=0.1)
    for shared, factor in ((False, 1), (True, 2 ** (k - 1))):
        params = get_params(start, cpu)
        device_params = [params if shared else get_params(start, cpu) for _ in range(k)]
        train_batch(X, y, device_params, [cpu] * k, 0.1, books_allreduce)
        for after, before, right in zip(device_params[0], start, one_step, strict=True):
            torch.testing.assert_close(after - before, factor * (right - before))
    with pytest.raises(ValueError, match="the same tensor"):  # ours refuses
        train_batch(X, y, device_params, [cpu] * k, 0.1)


def test_a_mean_of_means_is_caught(monkeypatch):
    def sgd(params, lr, batch_size):
        for param, shard_grad in zip(params, [p.grad for p in params], strict=True):
            param.data.sub_(shard_grad, alpha=lr / 4)

    def mean_loss(y_hat, y):
        return loss(y_hat, y).mean()

    assert gap_to_one_device(monkeypatch=monkeypatch, sgd=sgd, loss=mean_loss) > 1e-5
    assert gap_to_one_device(rows=20, monkeypatch=monkeypatch) < 1e-12  # right for even shards


def test_dropped_rows_are_caught(monkeypatch):
    def shards(X, y, devices):
        rows = len(X) // len(devices)
        parts = [slice(i * rows, (i + 1) * rows) for i in range(len(devices))]
        return [X[part] for part in parts], [y[part] for part in parts]

    assert gap_to_one_device(monkeypatch=monkeypatch, split_batch=shards) > 1e-5


def test_a_forgotten_allreduce_is_caught(monkeypatch):
    gap = gap_to_one_device(monkeypatch=monkeypatch, ring_allreduce=lambda data: None)
    assert gap > 1e-4


def test_a_second_division_by_k_is_caught(monkeypatch):
    def mean_allreduce(data):
        allreduce(data, op="mean")

    assert gap_to_one_device(monkeypatch=monkeypatch, ring_allreduce=mean_allreduce) > 1e-4


def test_rebinding_the_list_instead_of_writing_in_place_is_caught(monkeypatch):
    def rebinding(data):
        data[:] = [sum(data)] * len(data)

    assert gap_to_one_device(monkeypatch=monkeypatch, ring_allreduce=rebinding) > 1e-4


def test_gradients_that_an_interrupted_call_left_behind_do_not_count():
    def interrupted(data):
        raise KeyboardInterrupt

    X, y = batch(8)
    device_params, devices = replicas(2)
    expected = step_with_autograd_alone(X, y, device_params[0], lr=0.3)
    with pytest.raises(KeyboardInterrupt):
        train_batch(X, y, device_params, devices, 0.3, interrupted)
    train_batch(X, y, device_params, devices, 0.3)
    assert largest_difference(device_params[0], expected) < 1e-12


def test_train_batch_names_what_does_not_fit():
    X, y = batch(4)
    device_params, devices = replicas(2)
    with pytest.raises(ValueError, match="the batch is empty"):
        train_batch(X[:0], y[:0], device_params, devices, 0.1)
    with pytest.raises(ValueError, match="2 replicas for 3 devices"):
        train_batch(X, y, device_params, [CPU] * 3, 0.1)
    with pytest.raises(ValueError, match="2 replicas for 3 devices"):
        accuracy(device_params, [CPU] * 3, [(X, y)])


@pytest.mark.parametrize("k", [1, 3, 8])
def test_accuracy_counts_every_example_once(k):
    device_params, devices = replicas(k, torch.float32)
    images = (batch(101)[0][:, 0] * 255).to(torch.uint8)
    labels = lenet(images.unsqueeze(1) / 255, device_params[0]).argmax(dim=1)
    labels[:30] = (labels[:30] + 1) % 10
    test_iter = Minibatches(images, labels, 20)  # the last one has a single row
    assert accuracy(device_params, devices, test_iter) == pytest.approx(71 / 101)


def use_tiny_data(monkeypatch, kind=Minibatches):
    """Take the first 512 training and 256 test images, in place of all of them."""
    whole = training.load_data_fashion_mnist

    def load(batch_size, **kwargs):
        sizes = (512, 256)
        return tuple(
            kind(full.images[:n], full.labels[:n], batch_size, kwargs["seed"])
            for full, n in zip(whole(batch_size, **kwargs), sizes, strict=True)
        )

    monkeypatch.setattr(training, "load_data_fashion_mnist", load)
    # The book's scale of 0.01 would need thousands of steps before the loss begins to fall.
    monkeypatch.setattr(training, "init_params", partial(init_params, 0.1))


@pytest.fixture
def tiny_data(monkeypatch):
    use_tiny_data(monkeypatch)


def test_training_records_its_history_and_learns(tiny_data, capsys):
    histories = []
    history = train(2, 32, 0.2, num_epochs=12, on_progress=lambda h: histories.append(len(h.loss)))
    assert histories == list(range(1, 13))
    assert len(history.loss) == len(history.accuracy) == len(history.seconds) == 12
    assert history.loss[0] == pytest.approx(2.303, abs=0.3)  # ln 10: as good as a guess
    assert history.loss[-1] < 1.6 and history.accuracy[-1] > 0.4
    assert min(history.seconds) > 0
    assert "2 virtual devices" in history.devices or "cuda" in history.devices
    assert torch.__version__ in history.hardware
    assert capsys.readouterr().out == ""
    first, second = history.device_params
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, second, strict=True))


def test_the_same_seed_gives_the_same_run_and_another_gives_another(tiny_data):
    def params(seed):
        run = train(1, 64, 0.5, num_epochs=1, seed=seed, on_progress=lambda history: None)
        return [p.cpu() for p in run.device_params[0]], run.loss

    (a, loss_a), (b, loss_b), (c, _) = params(0), params(0), params(1)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) and loss_a == loss_b
    assert largest_difference(a, c) > 1e-3


def test_the_same_seed_gives_the_same_run_on_any_number_of_devices(monkeypatch):
    class Doubles(Minibatches):
        """In float64: an epoch in float32 amplifies the rounding of one kernel or another."""

        def take(self, rows):
            X, y = super().take(rows)
            return X.double(), y

    def params_in_float64(generator):
        return [p.double() for p in init_params(0.1, generator)]

    use_tiny_data(monkeypatch, Doubles)
    monkeypatch.setattr(training, "init_params", params_in_float64)
    one, three = (train(k, 64, 0.5, num_epochs=1, on_progress=lambda history: None) for k in (1, 3))
    assert one.device_params[0][0].dtype == torch.float64
    assert largest_difference(one.device_params[0], three.device_params[0]) < 1e-10
    assert three.loss == pytest.approx(one.loss, rel=1e-10)


def test_progress_is_printed_a_line_an_epoch(tiny_data, capsys):
    train(1, 128, 0.1, num_epochs=2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert torch.__version__ in lines[0]
    assert lines[1].startswith("epoch  1/2: loss 2.") and "test accuracy" in lines[2]


def test_the_given_allreduce_is_the_one_that_is_used(tiny_data):
    calls = []

    def counting(data):
        calls.append(len(data))
        naive_allreduce(data)

    train(3, 256, 0.1, num_epochs=1, allreduce=counting, on_progress=lambda history: None)
    assert set(calls) == {3}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_devices": 0}, "number of devices must be a positive int, not 0"),
        ({"batch_size": 0}, "batch_size must be a positive int, not 0"),
        ({"num_epochs": 0}, "num_epochs must be positive, not 0"),
        ({"num_epochs": 2.5}, "num_epochs must be a whole number, not 2.5"),
        ({"lr": "0.1"}, "lr must be a number, not '0.1'"),
        ({"lr": 0}, "lr must be positive, not 0"),
        ({"lr": float("nan")}, "lr must be positive, not nan"),
    ],
)
def test_train_names_a_wrong_number(wrong, words):
    with pytest.raises(ValueError, match=words):
        train(**({"num_devices": 1, "batch_size": 256, "lr": 0.1} | wrong))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 2, 4])
def test_one_step_on_gpus_equals_one_on_the_cpu(k):
    X, y = batch(21)
    device_params, devices = replicas(k)
    assert all(device.type == "cuda" for device in devices)
    expected = step_with_autograd_alone(X, y, [p.cpu() for p in device_params[0]], lr=0.3)
    train_batch(X.cuda(), y.cuda(), device_params, devices, 0.3)
    for params in device_params:
        assert largest_difference([p.cpu() for p in params], expected) < 1e-5
