"""When buckets are sent, how torch's hooks are called, and what is left at the end."""

import gc
import os
import threading
import time
import weakref
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import (
    LIMIT,
    MEAN,
    both_ways,
    breaks,
    clones,
    close,
    gradient,
    grads,
    linear,
    mlp,
    on_ranks,
    randn,
    rows,
    take,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from d2lpar import DistributedDataParallel, count_bytes, launch, ranks
from d2lpar.distributed.reducer import AVERAGES, Reducer, _on_gradient
from d2lpar.ranks.lanes import Lanes

TORCHS = nn.parallel.DistributedDataParallel
TINY = 1e-4  # MiB: 104 bytes, so that nearly every parameter has a bucket of its own


def late_mean(seconds, bucket):
    """A communication hook."""
    time.sleep(seconds)
    ranks.allreduce(bucket.buffer(), op="mean")
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def sends_while_backward_runs(rank, k):
    module, stamps = mlp(4, 4, 4, 4, 4, dtype=torch.float32), []
    for layer in module[::2]:
        layer.weight.register_hook(
            lambda grad: (time.sleep(0.05), stamps.append(time.perf_counter()))[0]
        )
    model = DistributedDataParallel(module, bucket_cap_mb=20 * 4 / 2**20)
    model.timeline = []
    model(torch.ones(2, 4)).sum().backward()
    numbers, begins, ends = zip(*model.timeline, strict=True)
    assert numbers == (0, 1, 2, 3)
    assert begins[0] < stamps[-1], "it waited for the end of backward"
    assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))


def sends_in_order(rank, k):
    """Whatever the order in which the buckets get full."""
    module = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(X):
        for i in [0, 1, 2, 3] if rank else [3, 1, 0, 2]:
            X = module[i](X).tanh()
        return X

    module.forward = forward
    model = DistributedDataParallel(module, bucket_cap_mb=1e-5)
    model.timeline = []
    model(torch.ones(2, 3)).sum().backward()
    ours = clones(grads(module))
    assert [number for number, _, _ in model.timeline] == list(range(8))
    module.zero_grad()
    module.forward(torch.ones(2, 3)).sum().backward()
    for grad in grads(module):
        ranks.allreduce(grad, op="mean")
    torch.testing.assert_close(ours, grads(module))


def sends_each_gradient_once(rank, k):
    module = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10))
    nbytes, sent = sum(param.nbytes for param in module.parameters()), []
    for cap, buckets in ((25, 1), (TINY, 4)):
        model = DistributedDataParallel(module, bucket_cap_mb=cap)
        with count_bytes() as ledger:
            model(torch.ones(2, 100)).sum().backward()
        assert len(model.reducer.buckets) == buckets
        assert nbytes <= ledger.sent(rank) <= nbytes + 5 * 4 + 64
        sent.append(ledger.messages.total())
    assert sent[0] < sent[1]


def a_broken_pass_leaves_nothing(rank, k):
    module = mlp(3, 3, 3, 3)
    model = DistributedDataParallel(module, bucket_cap_mb=TINY)
    model.register_comm_hook(0.1, late_mean)  # what the broken pass sends is under way
    X = randn(4, 3).split(2)

    def breaks_off():
        handle = breaks(module[0])
        with pytest.raises(ZeroDivisionError):
            model(X[rank] * 5).square().sum().backward()
        handle.remove()
        model.zero_grad()

    breaks_off()
    model(X[rank]).square().sum().backward()
    ours = clones(grads(module))
    breaks_off()
    with model.no_sync():
        (model(torch.cat(X)).square().sum() / k).backward()
    close(ours, grads(module))


def averages_when_the_wrapper_is_dropped(rank, k):
    @dataclass(slots=True)
    class Output:
        parts: list

    for wrap, unwrap in [
        (lambda X: X, lambda X: X),
        (lambda X: {"a": [X]}, lambda output: output["a"][0]),
        (lambda X: Output([Output([X])]), lambda output: output.parts[0].parts[0]),
    ]:
        module = linear()
        module.register_forward_hook(
            lambda module, inputs, output, wrap=wrap: wrap(output)
        )
        loss = unwrap(DistributedDataParallel(module)(rows(rank))).sum()
        gc.collect()
        loss.backward()
        assert gradient(module) == MEAN
        del loss
        assert not module.weight._post_accumulate_grad_hooks
    # tensors that are not found: the next pass
    for kind in DistributedDataParallel, TORCHS:
        module = linear()
        module.register_forward_hook(
            lambda module, inputs, output: SimpleNamespace(hidden=output)
        )
        model = kind(module)
        model(rows(rank)).hidden.sum().backward()
        assert gradient(module) == MEAN


def torchs_hooks(rank, k):
    def run(kind, hook=None, state=None):
        model = kind(mlp(6, 5, 4, dtype=torch.float32))
        if hook:
            model.register_comm_hook(state, hook)
        for i in range(3):
            model.zero_grad()
            X = randn(4, 6, seed=10 * i + rank, dtype=torch.float32)
            model(X).square().mean().backward()
        return torch.cat([grad.flatten() for grad in grads(model)])

    plain, halves = run(DistributedDataParallel), default_hooks.fp16_compress_hook
    wrapped = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    low_rank = [
        powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2) for _ in range(2)
    ]
    for hook, states, least, most in [
        (default_hooks.allreduce_hook, [None, dist.group.WORLD], 0, 0),
        (halves, [None, None], 1e-8, 1e-3),
        (wrapped, [None, None], 1e-8, 1e-3),
        (powerSGD_hook.powerSGD_hook, low_rank, 1e-3, 9),
    ]:
        ours = run(DistributedDataParallel, hook, states[0])
        torch.testing.assert_close(
            ours, run(TORCHS, hook, states[1]), rtol=0, atol=1e-5
        )
        assert least <= (ours - plain).abs().max() <= most


def hooks_keep_the_order_of_backward(rank, k):
    def late(name, bucket):
        if (name, rank) == ("second", 1):
            # if it were another thread, the first one's hook would overtake
            time.sleep(0.2)
        return default_hooks.allreduce_hook(None, bucket)

    def run(kind):
        first, second = (kind(mlp(5, 5, seed=seed)) for seed in (0, 1))
        first.register_comm_hook("first", late)
        second.register_comm_hook("second", late)
        second(first(randn(4, 5, seed=rank))).square().mean().backward()
        return grads(first) + grads(second)

    close(run(DistributedDataParallel), run(TORCHS))


def hook_sees_each_bucket_undivided(rank, k):
    def keep(state, bucket):
        last = bucket.is_last()
        state.append(
            (bucket.index(), last, bucket.buffer().tolist(), len(bucket.parameters()))
        )
        future = torch.futures.Future()
        future.set_result(torch.zeros_like(bucket.buffer()))
        return future

    state, module = [], nn.Sequential(linear(), linear())
    model = DistributedDataParallel(module, bucket_cap_mb=1e-6)
    loss = model(rows(rank)).sum()
    model.register_comm_hook(state, keep)
    loss.backward()
    assert state == [(0, False, [rank + 1.0], 1), (1, True, [rank + 1.0], 1)]
    assert [grad.item() for grad in grads(model)] == [0, 0]


def refuses_hooks_and_sparse_gradients(rank, k):
    hooked, plain = DistributedDataParallel(linear()), DistributedDataParallel(linear())
    hooked.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    by_rows = DistributedDataParallel(linear(), weight="rows")
    sparse = DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
    loss = sparse(torch.tensor([1])).sum()
    for call, kind, words in [
        (lambda: hooked.register_comm_hook(None, print), RuntimeError, "only once"),
        (
            lambda: plain.register_comm_hook(None, "allreduce"),
            TypeError,
            "must be a function",
        ),
        (lambda: by_rows.register_comm_hook(None, print), ValueError, "rows"),
        (
            lambda: hooked(rows(rank)).sum().backward(),
            TypeError,
            "return a .*Future, not Tensor",
        ),
        (loss.backward, ValueError, r"Embedding\(sparse=False"),
    ]:
        with pytest.raises(kind, match=words):
            call()


test_buckets_and_hooks = on_ranks(
    2,
    [
        sends_while_backward_runs,
        sends_in_order,
        sends_each_gradient_once,
        a_broken_pass_leaves_nothing,
        averages_when_the_wrapper_is_dropped,
        torchs_hooks,
        hooks_keep_the_order_of_backward,
        hook_sees_each_bucket_undivided,
        refuses_hooks_and_sparse_gradients,
    ],
)


# What spoils the group


def hook_is_never_done(rank, k):
    model = DistributedDataParallel(linear())
    ranks.transport.here.timeout = 1
    model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    with pytest.raises(TimeoutError, match=r"had no result after 1 s"):
        model(rows(rank)).sum().backward()


def rank_takes_no_part(rank, k):
    model = DistributedDataParallel(linear())
    ranks.transport.here.timeout = 0.3
    loss = model(rows(rank)).sum()
    if rank == 0:
        with pytest.raises(ranks.PeerError, match=r"rank 1.*with model\.join\(\)"):
            loss.backward()
    else:
        time.sleep(0.6)


@pytest.mark.parametrize("check", [hook_is_never_done, rank_takes_no_part])
def test_nobody_waits_without_limit(check):
    launch(check, 2, timeout=20)


def test_hooks_of_several_threads_take_turns():
    class Slow(Reducer):
        inside = most = 0

        def _note(self, bucket, i):
            Slow.inside += 1
            Slow.most = max(Slow.most, Slow.inside)
            time.sleep(0.01)
            Slow.inside -= 1

    reducer = Slow([nn.Parameter(torch.ones(2)) for _ in range(4)], None, 25)
    reducer._state = AVERAGES
    call = partial(_on_gradient, weakref.ref(reducer), reducer.buckets[0])
    threads = [threading.Thread(target=call, args=(i, None)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Slow.most == 1


# What is left


def left(module):
    gc.collect()
    return {
        "files": len(os.listdir("/proc/self/fd"))
        if os.path.isdir("/proc/self/fd")
        else 0,
        "groups": len(dist.distributed_c10d._world.pg_map),
        "hooks": sum(
            len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()
        ),
        "threads": sum(
            thread.name == "communication" for thread in threading.enumerate()
        ),
    }


@both_ways
def test_nothing_is_left_of_a_wrapper(way):
    def wrap(rank, world_size):
        take(way)
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        ranks.barrier()
        before, kinds, buckets = left(module), set(), []
        for i in range(8):
            model = DistributedDataParallel(module)
            if i % 4:
                for _ in range(2):
                    model(torch.randn(4, 3)).sum().backward()
                kinds.add(type(model.reducer._line.transport))
            if i == 7:
                handle = breaks(module[0])
                with pytest.raises(ZeroDivisionError):
                    model(torch.randn(4, 3)).sum().backward()
                handle.remove()
            buckets.append(weakref.ref(model.reducer.buckets[0]))
            del model
        limit = time.monotonic() + 20
        while (after := left(module)) != before and time.monotonic() < limit:
            time.sleep(0.01)  # a thread ends on its own
        assert after == before and before["hooks"] == before["threads"] == 0
        assert kinds == ({Lanes} if way == "lanes" else kinds - {Lanes})
        assert all(bucket() is None for bucket in buckets)

    launch(wrap, 2, timeout=LIMIT)


def test_end_of_all_groups_and_of_the_program_is_quiet(capfd):
    def wrap(rank, world_size):
        models = [DistributedDataParallel(linear()) for _ in range(2)]
        loss = [model(rows(rank)).sum() for model in models]
        loss[0].backward()
        dist.destroy_process_group()
        del models[0]
        gc.collect()
        return [model.module.weight.grad is None for model in models]

    assert launch(wrap, 2, timeout=LIMIT) == [[True]] * 2
    assert capfd.readouterr().err == ""


@pytest.mark.gpu
def test_gradients_of_any_stream_are_averaged_on_gpus():
    """Not run on a GPU. Inputs move to the rank's own; one may serve both ranks."""

    def train(rank, world_size):
        device = torch.device("cuda", rank % torch.cuda.device_count())
        module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to(device)
        model = DistributedDataParallel(
            module, device_ids=[device.index], bucket_cap_mb=1
        )
        X = torch.randn(64, 512, generator=torch.Generator().manual_seed(rank))
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for _ in range(3):
                model.zero_grad()
                model(X).square().sum().backward()
            ours = clones(grads(module))
        module.zero_grad()
        module(X.to(device)).square().sum().backward()
        for grad in grads(module):
            ranks.allreduce(grad, op="mean")
        torch.testing.assert_close(ours, grads(module))

    launch(train, 2, timeout=LIMIT)
