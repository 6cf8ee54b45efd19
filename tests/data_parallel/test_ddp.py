"""Replicas that stay equal: what a rank's gradients are, whatever its model and its batches.

A rank's function and what it uses stand inside functions, so that they travel by value.
"""

import gc
import inspect
import time
import weakref
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from d2lpar import DistributedDataParallel, NaiveDistributedDataParallel, count_bytes, ranks
from d2lpar.ranks.launcher import launch

LIMIT = 60  # seconds, for what takes less than one
TINY = 1e-4  # MiB: 104 bytes, so that nearly every parameter has a bucket of its own


def _build():
    def mlp(dtype=torch.float32):
        return nn.Sequential(
            nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)
        ).to(dtype)

    def conv():
        layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)
        return nn.Sequential(*layers)

    return mlp, conv


def _seeded(model, seed):
    """What the model of ``seed`` is, whoever makes it."""
    torch.manual_seed(seed)
    return model()


mlp, conv = _build()


def _measures():
    def state(module):
        return [tensor.detach().clone() for tensor in module.state_dict().values()]

    def grads(module):
        return [None if p.grad is None else p.grad.clone() for p in module.parameters()]

    def distance(ours, theirs):
        """The largest difference; infinite where one is None, or in shape or dtype another."""
        largest = 0.0
        for a, b in zip(ours, theirs, strict=True):
            if a is None or b is None:
                largest = max(largest, 0.0 if a is b else float("inf"))
            elif a.shape != b.shape or a.dtype != b.dtype:
                return float("inf")
            elif a.numel():
                largest = max(largest, float((a.double() - b.double()).abs().max().nan_to_num(1e9)))
        return largest

    def gather(tensors, group=None):
        """All ranks' copies, by torch's own collective: what is tested is not what tells."""
        copies = [None] * dist.get_world_size(group)
        dist.all_gather_object(copies, tensors, group)
        return copies

    def apart(tensors, group=None):
        copies = gather(tensors, group)
        return max(distance(copies[0], other) for other in copies)

    class SGD:
        """Gradient descent with momentum, as torch's."""

        def __init__(self, module):
            self.params, self.velocity = list(module.parameters()), {}

        def zero_grad(self, set_to_none=True):
            for param in self.params:
                if param.grad is not None:
                    param.grad = None if set_to_none else param.grad.zero_()

        @torch.no_grad()
        def step(self):
            for i, param in enumerate(self.params):
                if param.grad is not None:
                    last = self.velocity.get(i, torch.zeros_like(param))
                    self.velocity[i] = 0.9 * last + param.grad
                    param -= 0.1 * self.velocity[i]

    return state, grads, distance, gather, apart, SGD


state, grads, distance, gather, apart, SGD = _measures()


# The definition: what k ranks do with shards is what one process does with the whole.


@pytest.mark.parametrize("k", [2, 4])
def test_training_on_shards_is_training_on_the_whole_batch(k):
    dtype = torch.float64  # five steps amplify the rounding of float32

    def train(rank, world_size):
        def run(kind, model, **kwargs):
            replica = kind(model, **kwargs) if kind else model
            return replica, SGD(model)

        data = torch.Generator().manual_seed(7)
        X = torch.randn(5, 4 * world_size, 6, generator=data, dtype=dtype)
        y = torch.randn(5, 4 * world_size, 1, generator=data, dtype=dtype)
        results = {}
        naive, bucketed = NaiveDistributedDataParallel, DistributedDataParallel
        for name, kind, kwargs in [
            ("naive", naive, {}),
            ("25", bucketed, {"bucket_cap_mb": 25}),
            ("tiny", bucketed, {"bucket_cap_mb": TINY}),
            ("none", None, {}),
        ]:
            torch.manual_seed(100 + rank)
            model = mlp(dtype)
            before = apart(state(model))
            mine = gather(state(model))[0]
            replica, optimizer = run(kind, model, **kwargs)
            wrapped = distance(state(model), mine)
            if kind is None:
                for tensor, first in zip(model.parameters(), mine, strict=True):
                    tensor.data.copy_(first)
            whole = mlp(dtype)
            for tensor, first in zip(whole.parameters(), mine, strict=True):
                tensor.data.copy_(first)
            one = SGD(whole)
            for step in range(5):
                shard = slice(4 * rank, 4 * rank + 4)
                optimizer.zero_grad()
                nn.functional.mse_loss(replica(X[step, shard]), y[step, shard]).backward()
                if kind is naive:
                    replica.average_gradients()
                optimizer.step()
                one.zero_grad()
                nn.functional.mse_loss(whole(X[step]), y[step]).backward()
                one.step()
            results[name] = (
                before,
                wrapped,
                distance(state(model), state(whole)),
                apart(state(model)),
            )
        return results

    for results in launch(train, k, timeout=LIMIT):
        for name, (before, wrapped, from_whole, apart_after) in results.items():
            assert before > 1e-2, "the ranks began with the same parameters: nothing was tested"
            if name == "none":
                assert from_whole > 1e-3 and apart_after > 1e-3, "averaging made no difference"
            else:
                assert wrapped == 0, name
                assert from_whole < 1e-12, name
                assert apart_after == 0, name


@pytest.mark.parametrize("kind", [NaiveDistributedDataParallel, DistributedDataParallel])
def test_parameters_and_buffers_begin_as_rank_0s(kind):
    def wrap(rank, world_size):
        torch.manual_seed(rank)
        model = conv()
        model.register_buffer("mask", torch.rand(3) < 0.5 if rank else torch.ones(3).bool(), False)
        model[1].running_mean.fill_(rank)
        model[1].num_batches_tracked.fill_(rank)
        model[4].weight.requires_grad_(False)  # frozen ones are shared too
        first = gather([*state(model), model.mask])[0]
        before = apart(state(model))
        kind(model)
        return before, distance([*state(model), model.mask], first)

    assert all(before > 0.5 and after == 0 for before, after in launch(wrap, 3, timeout=LIMIT))


# Torch's own class as the reference


@pytest.mark.parametrize("k", [2, 3])
def test_gradients_and_buffers_are_torchs(k):
    def train(rank, world_size):
        def batches(n):
            data = torch.Generator().manual_seed(50 + rank)
            return [
                (
                    torch.randn(5, 1, 6, 6, generator=data, dtype=torch.float64),
                    torch.randint(2, (5,), generator=data),
                )
                for _ in range(n)
            ]

        def run(kind, zero, **kwargs):
            model = _seeded(conv, 3).double()
            replica = kind(model, **kwargs)
            optimizer = SGD(model)
            trace = []
            for X, y in batches(4):
                zero(optimizer)
                nn.functional.cross_entropy(replica(X), y).backward()
                trace += grads(model)
                optimizer.step()
            trace += state(model)
            replica.eval()
            with torch.no_grad():
                trace.append(replica(torch.ones(2, 1, 6, 6, dtype=torch.float64)))
            return trace + state(model)

        ways = {
            "set to None": SGD.zero_grad,
            "set to 0": partial(SGD.zero_grad, set_to_none=False),
            "added up": lambda optimizer: None,
        }
        distances = {}
        for name, zero in ways.items():
            theirs = run(nn.parallel.DistributedDataParallel, zero)
            for cap in (25, TINY):
                ours = run(DistributedDataParallel, zero, bucket_cap_mb=cap)
                distances[name, cap] = distance(ours, theirs)
        return distances

    for distances in launch(train, k, timeout=LIMIT):
        for way, from_torch in distances.items():
            assert from_torch <= (0 if k == 2 and "added up" not in way else 1e-12), way


# no_sync


def test_no_sync_adds_up_micro_batches():
    def train(rank, world_size):
        data = torch.Generator().manual_seed(50)
        X, y = (
            torch.randn(world_size, 3, 4, 6, generator=data),
            torch.randn(world_size, 3, 4, 1, generator=data),
        )

        def run(kind, cap, steps=2):
            torch.manual_seed(3)
            model = mlp()
            replica = kind(model, bucket_cap_mb=cap)
            inside = []
            for _ in range(steps):
                for p in model.parameters():
                    p.grad = None
                with replica.no_sync():
                    for i in range(2):
                        (nn.functional.mse_loss(replica(X[rank, i]), y[rank, i]) / 3).backward()
                        inside.append(apart(grads(model)))
                (nn.functional.mse_loss(replica(X[rank, 2]), y[rank, 2]) / 3).backward()
            return min(inside), grads(model)

        whole = _seeded(mlp, 3)
        nn.functional.mse_loss(whole(X.reshape(-1, 6)), y.reshape(-1, 1)).backward()
        _, theirs = run(nn.parallel.DistributedDataParallel, 25)
        results = []
        for cap in (25, TINY):
            inside, ours = run(DistributedDataParallel, cap)
            results.append((inside, distance(ours, theirs), distance(ours, grads(whole))))
        # A forward pass made inside is not averaged, though its backward pass is outside.
        model = _seeded(mlp, 3)
        replica = DistributedDataParallel(model)
        with replica.no_sync():
            loss = replica(X[rank, 0]).sum()
        loss.backward()
        local = apart(grads(model))
        return results, local

    for results, local in launch(train, 2, timeout=LIMIT):
        assert local > 1e-3
        for inside, from_torch, from_whole in results:
            assert inside > 1e-3, "the gradients inside no_sync were those of all ranks"
            assert from_torch == 0
            assert from_whole < 1e-6


# join


def test_join_with_uneven_numbers_of_batches_is_torchs():
    k = 3  # so that one rank leaves, and then another one

    def train(rank, world_size):
        def run(kind, divide, count):
            torch.manual_seed(3)
            model = conv().double()
            replica = kind(model)
            optimizer = SGD(model)
            data = torch.Generator().manual_seed(50 + rank)
            with replica.join(divide_by_initial_world_size=divide):
                for _ in range(count):
                    X = torch.randn(5, 1, 6, 6, generator=data, dtype=torch.float64)
                    optimizer.zero_grad()
                    replica(X).square().mean().backward()
                    optimizer.step()
            return [p.detach() for p in model.parameters()], list(model.buffers())

        results = []
        for count in (2 + rank, 1 + world_size - rank):  # the last rank has most, or the first
            both = []
            for divide in (True, False):
                ours, buffers = run(DistributedDataParallel, divide, count)
                theirs, their_buffers = run(nn.parallel.DistributedDataParallel, divide, count)
                both.append(ours)
                from_torch = distance([*ours, *buffers], [*theirs, *their_buffers])
                results.append((apart([*ours, *buffers]), from_torch, int(buffers[-1])))
            results.append(distance(*both))
        return results

    for results in launch(train, k, timeout=LIMIT):
        for i in (0, 3):
            for from_others, from_torch, batches in results[i : i + 2]:
                assert from_others == 0
                assert from_torch < 1e-12
                assert batches == k + 1
            assert results[i + 2] > 1e-4, "divide_by_initial_world_size made no difference"


@pytest.mark.parametrize("broadcast", [True, False])
def test_join_ends_with_the_buffers_of_one_rank_only_if_they_are_broadcast(broadcast):
    def train(rank, world_size, broadcast):
        def run(kind):
            replica = kind(nn.BatchNorm1d(1), broadcast_buffers=broadcast)
            with replica.join():
                for _ in range(1 + 2 * rank):
                    replica(torch.randn(3, 1)).sum().backward()
            return replica.module.num_batches_tracked.item()

        return run(DistributedDataParallel), run(nn.parallel.DistributedDataParallel)

    counts = launch(train, 2, broadcast, timeout=LIMIT)
    assert counts == [(3, 3)] * 2 if broadcast else counts == [(1, 1), (3, 3)]


def test_join_may_come_again_and_be_followed_by_plain_steps():
    def train(rank, world_size):
        model = conv()
        replica = DistributedDataParallel(model)
        optimizer = SGD(model)

        def step():
            optimizer.zero_grad()
            replica(torch.randn(5, 1, 6, 6)).square().mean().backward()
            optimizer.step()

        differ = []
        for count in (1 + rank, 0 if rank else 2, 2):
            with replica.join():
                for _ in range(count):
                    step()
            differ.append(apart(state(model)))
        step()
        return differ, apart(grads(model))  # the momentum of a rank that left early is another

    assert launch(train, 2, timeout=15) == [([0, 0, 0], 0)] * 2


def test_join_with_rows_and_no_sync():
    def train(rank, world_size):
        model = _seeded(mlp, 3).double()
        replica = DistributedDataParallel(model, weight="rows", bucket_cap_mb=TINY)
        optimizer = SGD(model)
        whole = _seeded(mlp, 3).double()
        one = SGD(whole)
        data = torch.Generator().manual_seed(9)
        X = torch.randn(3, 2, 4, 6, generator=data, dtype=torch.float64)  # step, rank, row
        with replica.join():
            for step in range(3 if rank else 1):
                optimizer.zero_grad()
                with replica.no_sync():
                    replica(X[step, rank, :3]).square().mean().backward()
                model.zero_grad()
                replica.reducer._weight_is_used = True  # what no_sync has added up was dropped
                replica(X[step, rank, : 2 + rank]).square().mean().backward()
                optimizer.step()
        for step in range(3):
            one.zero_grad()
            rows = [X[step, 1, :3]] if step else [X[0, 0, :2], X[0, 1, :3]]
            whole(torch.cat(rows)).square().mean().backward()
            one.step()
        return apart(state(model)), distance(state(model), state(whole))

    assert all(a == 0 and b < 1e-12 for a, b in launch(train, 2, timeout=LIMIT))


# weight="rows"


def test_rows_make_the_mean_over_all_rows():
    def train(rank, world_size):
        rows = [5, 1, 0][rank]
        data = torch.Generator().manual_seed(50)
        X, y = torch.randn(6, 6, generator=data), torch.randn(6, 1, generator=data)
        begin = [0, 5, 6][rank]
        whole = _seeded(mlp, 3)
        nn.functional.mse_loss(whole(X), y).backward()
        results = {}
        for weight in ("rows", "equal"):
            for cap in (25, TINY):
                model = _seeded(mlp, 3)
                replica = DistributedDataParallel(model, bucket_cap_mb=cap, weight=weight)
                for _ in range(2):  # the rows of the first step are not counted in the second
                    model.zero_grad()
                    out = replica(X[begin : begin + rows])
                    nn.functional.mse_loss(out, y[begin : begin + rows]).backward()
                results[weight, cap] = distance(grads(model), grads(whole))
        # Rows of two forward passes add up: by no_sync, and by one backward pass for both.
        first = [2, 1, 1][rank]
        parts = X[:first], X[: first + 1]
        expected = _seeded(mlp, 3)
        total = sum(2 * n + 1 for n in (2, 1, 1))
        for n in (2, 1, 1):
            loss = expected(X[:n]).square().mean() + expected(X[: n + 1]).square().mean()
            (loss * (2 * n + 1) / total).backward()
        for way in ("no_sync", "one backward"):
            model = _seeded(mlp, 3)
            replica = DistributedDataParallel(model, weight="rows")
            if way == "no_sync":
                with replica.no_sync():
                    replica(parts[0]).square().mean().backward()
                replica(parts[1]).square().mean().backward()
            else:
                sum(replica(part).square().mean() for part in parts).backward()
            results[way] = distance(grads(model), grads(expected))
        return results

    for results in launch(train, 3, timeout=LIMIT):
        for key, value in results.items():
            if "equal" in key:
                assert value > 1e-3, key
            else:
                assert value < 1e-6, key


# Parameters that are not used in the plain way.


def _odd_models():
    class Branches(nn.Module):
        """Branch a on rank 0 and b on the others; c nowhere, and d from step 1 on."""

        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(3, 3) for _ in range(4))
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
            self.tied = nn.Linear(3, 3, bias=False)
            self.tied_too = nn.Linear(3, 3, bias=False)
            self.tied_too.weight = self.tied.weight

        def forward(self, X, rank, step):
            X = self.tied_too(self.tied(self.frozen(X)).tanh())
            X = self.a(X) if rank == 0 else self.b(X)
            return self.d(X) if step == 1 else X

    return Branches


Branches = _odd_models()


def test_unused_frozen_tied_and_late_parameters_are_torchs():
    def train(rank, world_size):
        def run(kind, set_to_none, **kwargs):
            model = _seeded(Branches, 3)
            replica = kind(model, **kwargs)
            optimizer = SGD(model)
            data = torch.Generator().manual_seed(50 + rank)
            trace, nones = [], []
            for step in range(4):
                optimizer.zero_grad(set_to_none=set_to_none)
                replica(torch.randn(4, 3, generator=data), rank, step).square().mean().backward()
                optimizer.step()
                trace += grads(model)
                nones.append([name for name, p in model.named_parameters() if p.grad is None])
            return trace + state(model), nones

        torchs = nn.parallel.DistributedDataParallel
        results = []
        for none in (True, False):
            theirs, their_nones = run(torchs, none, find_unused_parameters=True)
            for cap in (25, TINY):
                ours, our_nones = run(DistributedDataParallel, none, bucket_cap_mb=cap)
                results.append((none, distance(ours, theirs), our_nones, our_nones == their_nones))
        return results

    unused = ["c.weight", "c.bias", "frozen.weight", "frozen.bias"]
    late = ["c.weight", "c.bias", "d.weight", "d.bias", "frozen.weight", "frozen.bias"]
    for results in launch(train, 2, timeout=LIMIT):
        for set_to_none, from_torch, nones, same_nones in results:
            assert from_torch == 0 and same_nones
            assert nones == [late, unused, *([late] * 2 if set_to_none else [unused] * 2)]


def test_parameter_that_only_a_rank_that_has_left_used_keeps_no_gradient():
    def train(rank, world_size):
        model = _seeded(Branches, 3)
        replica = DistributedDataParallel(model)
        with replica.join():
            for step in range(1 + 2 * rank):  # rank 0 leaves with gradients of branch a
                model.zero_grad()
                replica(torch.ones(4, 3), rank, step).square().mean().backward()
        return model.a.weight.grad is None

    assert launch(train, 2, timeout=LIMIT)[1]


# Kinds of parameters.


def test_mixed_dtypes_strides_and_sizes():
    def train(rank, world_size):
        class Mixed(nn.Module):
            def __init__(self):
                super().__init__()
                self.p_half = nn.Parameter(torch.full((5,), 1.0, dtype=torch.float16))
                self.p_brain = nn.Parameter(torch.full((5,), 1.0, dtype=torch.bfloat16))
                self.p_double = nn.Parameter(torch.ones(5, dtype=torch.float64))
                self.p_single = nn.Parameter(torch.ones(5))
                self.p_scalar = nn.Parameter(torch.tensor(1.0))
                self.p_empty = nn.Parameter(torch.empty(0, 3))
                weight = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
                self.p_conv = nn.Parameter(weight)

            def forward(self, factors):
                return sum(
                    (p * factors[name].to(p.dtype)).sum() for name, p in self.named_parameters()
                )

        def factors(r):
            data = torch.Generator().manual_seed(r)
            return {
                name: torch.randn(p.shape, generator=data).to(p.dtype)
                for name, p in model.named_parameters()
            }

        results = []
        for weight, cap in [("equal", 25), ("equal", TINY)]:
            torch.manual_seed(3)
            model = Mixed()
            replica = DistributedDataParallel(model, bucket_cap_mb=cap, weight=weight)
            everyone = [factors(r) for r in range(world_size)]
            for _ in range(2):
                model.zero_grad()
                replica(everyone[rank]).backward()
            off = {}
            for name, p in model.named_parameters():
                wide = torch.float32 if p.dtype.itemsize == 2 else p.dtype
                mean = sum(f[name].to(wide) * (1 / world_size) for f in everyone).to(p.dtype)
                assert p.grad.dtype == p.dtype and p.grad.shape == p.shape
                assert p.grad.stride() == p.stride()
                off[name] = distance([p.grad], [mean])
            results.append((off, apart(grads(model))))
        return results

    for results in launch(train, 2, timeout=LIMIT):
        for off, between in results:
            assert set(off.values()) == {0} and between == 0


def test_complex_parameters_among_real_ones():
    def train(rank, world_size):
        class Both(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Parameter(torch.ones(2, dtype=torch.complex64))
                self.b = nn.Parameter(torch.ones(2))

            def forward(self, X):
                return (self.a * X).abs().sum() + (self.b * X).sum()

        results = []
        for weight in ("equal", "rows"):
            model = Both()
            replica = DistributedDataParallel(model, weight=weight)
            replica(torch.full((1, 2), 1.0 + rank)).backward()
            results.append([p.grad.tolist() for p in model.parameters()])
        return results

    for equal, rows in launch(train, 2, timeout=LIMIT):
        assert equal == rows == [[1.5, 1.5], [1.5, 1.5]]


# What is refused.


def test_modules_that_differ_are_refused_on_every_rank():
    def wrap(rank, world_size):
        odd = rank == 2
        linear = nn.Linear(2, 3)

        def model(case):
            if not odd:
                return nn.Sequential(linear, nn.BatchNorm1d(3))
            if case == "name":
                named = nn.Sequential(linear)
                named.add_module("norm", nn.BatchNorm1d(3))
                return named
            if case == "shape":
                return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
            if case == "dtype":
                return nn.Sequential(nn.Linear(2, 3).double(), nn.BatchNorm1d(3))
            if case == "order":
                swapped = nn.Linear(2, 3)
                swapped._parameters = dict(reversed(swapped._parameters.items()))
                return nn.Sequential(swapped, nn.BatchNorm1d(3))
            if case == "one more":
                return nn.Sequential(linear, nn.BatchNorm1d(3), nn.Linear(3, 1))
            if case == "more at the end":
                longer = nn.Sequential(linear, nn.BatchNorm1d(3))
                longer.register_buffer("late", torch.zeros(1))
                return longer
            if case == "one less":
                return nn.Sequential(linear, nn.BatchNorm1d(3, affine=False))
            if case == "strides":  # gradients lie in a bucket as their parameters do
                with torch.no_grad():
                    linear.weight.set_(linear.weight.t().contiguous().t())
                return nn.Sequential(linear, nn.BatchNorm1d(3))
            if case == "frozen":
                return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3).requires_grad_(False))
            return nn.Sequential(linear, nn.BatchNorm1d(3, track_running_stats=False))  # no buffers

        cases = (
            "name",
            "shape",
            "dtype",
            "order",
            "one more",
            "more at the end",
            "one less",
            "frozen",
            "buffers",
            "strides",
        )
        messages = {}
        for case in cases:
            for kind in (DistributedDataParallel, NaiveDistributedDataParallel):
                try:
                    kind(model(case))
                    messages[case, kind.__name__] = None
                except ValueError as error:
                    messages[case, kind.__name__] = str(error)
        DistributedDataParallel(nn.Linear(2, 2))  # the group is as usable as before
        return messages

    results = launch(wrap, 3, timeout=LIMIT)
    assert results[0] == results[1] == results[2]
    expected = {
        "name": ("1.weight, float32 [3] on rank 0", "norm.weight, float32 [3] on rank 2"),
        "shape": ("0.weight, float32 [3, 2] on rank 0", "0.weight, float32 [4, 2] on rank 2"),
        "dtype": ("0.weight, float32 [3, 2] on rank 0", "0.weight, float64 [3, 2] on rank 2"),
        "order": ("0.weight, float32 [3, 2] on rank 0", "0.bias, float32 [3] on rank 2"),
        "one more": ("1.running_mean, float32 [3] on rank 0", "2.weight, float32 [1, 3] on rank 2"),
        "one less": ("1.weight, float32 [3] on rank 0", "1.running_mean, float32 [3] on rank 2"),
        "frozen": ("1.weight, float32 [3] on rank 0", "1.weight, float32 [3] (frozen) on rank 2"),
        "buffers": ("1.running_mean, float32 [3] on rank 0", "nothing more on rank 2"),
        "strides": ("0.weight, float32 [3, 2] on rank 0", "[3, 2] with strides [1, 3] on rank 2"),
    }
    for (case, _), message in results[0].items():
        assert message is not None, f"{case}: accepted"
        for words in expected.get(case, ("on rank 0", "late, float32 [1] on rank 2")):
            assert words in message, case


def test_weights_that_differ_are_refused_on_every_rank():
    def wrap(rank, world_size):
        with pytest.raises(ValueError) as caught:
            DistributedDataParallel(nn.Linear(2, 2), weight=("equal", "rows")[rank == 1])
        return str(caught.value)

    words = ["weight is 'equal' on this rank, but not on all"] * 3
    words[1] = words[1].replace("equal", "rows")
    assert launch(wrap, 3, timeout=LIMIT) == words


def test_gradient_that_comes_twice_in_one_pass_is_refused():
    def train(rank, world_size):
        from torch.utils.checkpoint import checkpoint

        linear = nn.Linear(4, 4)
        replica = DistributedDataParallel(linear)
        X = torch.randn(2, 4, requires_grad=True)
        inner = checkpoint(linear, X, use_reentrant=True)  # a backward pass of its own
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            (inner + replica(X)).sum().backward()
        linear.zero_grad()
        inner = checkpoint(linear, X, use_reentrant=False)
        (inner + replica(X)).sum().backward()
        ours = linear.weight.grad.clone()
        (alone,) = torch.autograd.grad(2 * linear(X).sum(), linear.weight)
        ranks.allreduce(alone, op="mean")
        return distance([ours], [alone])

    assert max(launch(train, 2, timeout=LIMIT)) < 1e-6


def test_deleted_replica_leaves_no_memory_behind():
    def wrap(rank, world_size):
        replica = DistributedDataParallel(nn.Linear(4, 4))
        replica(torch.randn(2, 4)).sum().backward()
        alive = [
            weakref.ref(thing) for thing in (replica.reducer.buckets[0], replica.module.weight)
        ]
        del replica
        gc.collect()
        return [thing() is None for thing in alive]

    assert launch(wrap, 2, timeout=LIMIT) == [[True, True]] * 2


def test_arguments_are_checked():
    def wrap(rank, world_size):
        messages = []
        for module, kwargs in [
            (nn.Linear(2, 2), {"weight": "row"}),
            (nn.Linear(2, 2), {"weight": None}),
            (nn.Linear(2, 2), {"bucket_cap_mb": 0}),
            (nn.Linear(2, 2), {"bucket_cap_mb": -1}),
            (nn.Linear(2, 2), {"bucket_cap_mb": float("nan")}),
            (nn.ReLU(), {}),
            (nn.Linear(2, 2).requires_grad_(False), {}),
        ]:
            with pytest.raises(ValueError) as caught:
                DistributedDataParallel(module, **kwargs)
            messages.append(str(caught.value))
        replica = DistributedDataParallel(nn.Linear(2, 2), weight="rows")
        with pytest.raises(ValueError, match="tensor with rows"):
            replica(3)
        return messages

    for messages in launch(wrap, 2, timeout=LIMIT):
        assert all("weight must be" in message for message in messages[:2])
        assert all("bucket_cap_mb must be positive" in message for message in messages[2:5])
        assert all("requires grad" in message for message in messages[5:])


# How gradients travel.


def _autograd():
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, X):
            return X.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.05)
            return grad

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, X):
            return X.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("broken on purpose")

    return Slow, Broken


Slow, Broken = _autograd()


def _hooks():
    def late_mean(seconds, bucket):
        """A communication hook."""
        time.sleep(seconds)
        ranks.allreduce(bucket.buffer(), op="mean")
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return late_mean


late_mean = _hooks()


def test_communication_begins_while_backward_runs():
    def train(rank, world_size):
        class Layer(nn.Linear):
            def forward(self, X):
                return Slow.apply(super().forward(X))

        torch.manual_seed(3)
        model = nn.Sequential(*(Layer(4, 4) for _ in range(4)))
        stamps = []
        model[0].weight.register_hook(lambda grad: stamps.append(time.perf_counter()))
        replica = DistributedDataParallel(model, bucket_cap_mb=20 * 4 / 2**20)

        replica.register_comm_hook(0.05, late_mean)
        replica.timeline = []
        replica(torch.ones(2, 4)).sum().backward()
        return replica.timeline, stamps[0], len(replica.reducer.buckets)

    for timeline, last_gradient, n in launch(train, 2, timeout=LIMIT):
        assert [bucket for bucket, _, _ in timeline] == list(range(n)) == [0, 1, 2, 3]
        assert timeline[0][1] < last_gradient, "it waited for the end of backward"
        assert all(one[2] <= after[1] for one, after in pairwise(timeline))


def test_buckets_go_in_order_when_gradients_come_in_any():
    def train(rank, world_size):
        model = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        order = [0, 1, 2, 3] if rank else [3, 1, 0, 2]

        def forward(X):
            for i in order:
                X = model[i](X).tanh()
            return X

        model.forward = forward
        replica = DistributedDataParallel(model, bucket_cap_mb=1e-5)
        replica.timeline = []
        replica(torch.ones(2, 3)).sum().backward()
        sent = [bucket for bucket, _, _ in replica.timeline]
        return sent == list(range(len(replica.reducer.buckets))) and len(sent) > 3, apart(
            grads(model)
        )

    assert launch(train, 2, timeout=LIMIT) == [(True, 0)] * 2


def test_state_dict_views_and_messages():
    def train(rank, world_size):
        model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10))
        nbytes = sum(p.numel() * 4 for p in model.parameters())
        sent = {}
        for cap in (25, TINY):
            replica = DistributedDataParallel(
                model, bucket_cap_mb=cap, gradient_as_bucket_view=True
            )
            with count_bytes() as ledger:
                replica(torch.ones(2, 100)).sum().backward()
            sent[cap] = ledger.sent(rank), ledger.messages.total(), len(replica.reducer.buckets)
            inside = []
            for bucket in replica.reducer.buckets:
                begin = bucket.flat.data_ptr()
                for param in bucket.params:
                    inside.append(begin <= param.grad.data_ptr() < begin + bucket.flat.nbytes)
            assert all(inside) and len(inside) == 4
        assert list(replica.state_dict()) == ["module." + name for name in model.state_dict()]
        return nbytes, sent

    for nbytes, sent in launch(train, 2, timeout=LIMIT):
        (large, few, one), (small, many, four) = sent[25], sent[TINY]
        assert (one, four) == (1, 4)
        assert nbytes <= large <= nbytes + 5 * 4 + 64
        assert nbytes <= small <= nbytes + 5 * 4 + 64
        assert many > few


# Errors.


def test_backward_that_broke_leaves_nothing_behind():
    def train(rank, world_size):
        torch.manual_seed(3)
        layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(X, breaks):
            X = layers[0](X)
            return layers[2](layers[1](Broken.apply(X) if breaks else X))

        layers.forward = forward
        replica = DistributedDataParallel(layers, bucket_cap_mb=TINY)

        replica.register_comm_hook(0.3, late_mean)  # what the broken pass sends is under way
        with pytest.raises(ArithmeticError, match="on purpose"):
            replica(torch.full((2, 3), 5.0 + rank), True).square().sum().backward()
        replica.zero_grad()
        replica(torch.full((2, 3), 1.0 + rank), False).square().sum().backward()
        ours = grads(layers)
        layers.zero_grad()
        for r in range(world_size):
            with replica.no_sync():
                out = replica(torch.full((2, 3), 1.0 + r), False)
            (out.square().sum() / world_size).backward()
        return distance(ours, grads(layers))

    assert max(launch(train, 2, timeout=LIMIT)) < 1e-5


def test_rows_of_a_broken_pass_are_not_counted():
    def train(rank, world_size):
        model = _seeded(mlp, 3)
        forward = model.forward
        replica = DistributedDataParallel(model, weight="rows")
        model.forward = lambda X: model[1:](Broken.apply(model[0](X)))
        with pytest.raises(ArithmeticError):
            replica(torch.ones(1 + 9 * rank, 6)).sum().backward()
        model.forward = forward
        model.zero_grad()
        replica(torch.full((1 + rank, 6), 1.0 + rank)).square().mean().backward()
        ours = grads(model)
        model.zero_grad()
        X = torch.ones(3, 6)
        X[1:] = 2
        whole = _seeded(mlp, 3)
        whole(X).square().mean().backward()
        return distance(ours, grads(whole))

    assert max(launch(train, 2, timeout=LIMIT)) < 1e-6


def test_second_backward_pass_of_one_forward_pass_counts_its_rows():
    def train(rank, world_size):
        whole = _seeded(mlp, 3)
        X = torch.arange(18.0).reshape(3, 6) / 9
        (whole(X).mean() + whole(X).square().mean()).backward()
        model = _seeded(mlp, 3)
        replica = DistributedDataParallel(model, weight="rows")
        out = replica(X[:1] if rank == 0 else X[1:])
        out.mean().backward(retain_graph=True)
        out.square().mean().backward()
        return distance(grads(model), grads(whole))

    assert max(launch(train, 2, timeout=LIMIT)) < 1e-6


def test_buffers_are_shared_where_torch_shares_them():
    def train(rank, world_size):
        def run(kind, **kwargs):
            def spoil():
                for buffer in model.buffers():
                    buffer.add_(rank)

            def note():
                trace.extend(buffer.clone() for buffer in model.buffers())

            model = _seeded(conv, 3)
            spoil()
            replica, trace = kind(model, **kwargs), []
            note()
            X = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(rank))
            spoil()  # before the first forward pass
            replica(X).sum().backward()
            note()
            for mode in (True, False):  # evaluation is shared once, then no more
                replica.train(mode)
                for _ in range(2):
                    spoil()
                    with torch.no_grad():
                        replica(X)
                    note()
            with replica.no_sync():
                for _ in range(2):
                    spoil()
                    replica(X).sum().backward()
                    note()
            for _ in range(2):
                spoil()
                replica(X)  # and no backward pass
                note()
            return trace

        torchs = nn.parallel.DistributedDataParallel
        names = {"broadcast_buffers", "forward_sync_buffers", "init_sync"}
        names &= set(inspect.signature(torchs).parameters)  # torch 2.6 has the first one only
        cases = [{}, *({name: False} for name in sorted(names))]
        traces = [(run(DistributedDataParallel, **case), run(torchs, **case)) for case in cases]
        return [distance(*pair) for pair in traces], len(cases)

    for distances, n in launch(train, 2, timeout=LIMIT):
        assert distances == [0] * n


def test_rank_that_takes_no_part_is_an_error_of_the_others():
    def train(rank, world_size):
        replica = DistributedDataParallel(_seeded(mlp, 3))
        ranks.use_messages(timeout=0.5)
        loss = replica(torch.ones(2, 6)).sum()
        if rank == 1:
            time.sleep(1)
            return None
        with pytest.raises(ranks.PeerError) as caught:
            loss.backward()
        return str(caught.value)

    message = launch(train, 2, timeout=LIMIT)[0]
    assert "rank 1" in message and "model.join()" in message


# Groups.


def test_ranks_may_be_in_different_numbers_of_groups():
    def train(rank, world_size):
        dist.new_group([0, 2])
        replica = DistributedDataParallel(nn.Linear(1, 1))
        replica(torch.full((1, 1), float(rank))).sum().backward()
        return replica.module.weight.grad.item()

    assert launch(train, 3, timeout=20) == [1.0] * 3  # torch, with its local way, would wait


def test_group_of_some_ranks_has_a_source_of_its_own():
    def train(rank, world_size):
        group = dist.new_group([1, 3])
        model = mlp()
        if rank not in (1, 3):
            return None
        first = gather(state(model), group)
        replica = DistributedDataParallel(model, process_group=group)
        from_rank_1 = distance(state(model), first[0])
        replica(torch.full((2, 6), float(rank))).sum().backward()
        ours = grads(model)
        model.zero_grad()
        both = torch.tensor([1.0, 3.0]).repeat_interleave(2)[:, None].expand(4, 6)
        with replica.no_sync():
            (replica(both).sum() / 2).backward()
        differ, from_whole = distance(*first), distance(ours, grads(model))
        with replica.join():
            for _ in range(1 + rank):
                replica(torch.full((2, 6), float(rank))).sum().backward()
        return differ, from_rank_1, from_whole

    results = launch(train, 4, timeout=LIMIT)
    assert results[0] is results[2] is None
    for result in (results[1], results[3]):
        differ, from_rank_1, from_whole = result
        assert differ > 1e-2 and from_rank_1 == 0 and from_whole < 1e-5
