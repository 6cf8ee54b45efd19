"""Which backward passes average, how a hook of torch's is called, and what is left at the end."""

import copy
import gc
import io
import os
import threading
import time
import warnings
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.checkpoint import checkpoint

from d2lpar import DistributedDataParallel, ranks
from d2lpar.data_parallel.reducer import Reducer, _on_gradient
from d2lpar.ranks.lanes import Lanes
from d2lpar.ranks.launcher import launch

LIMIT = 60  # seconds, for what takes less than one
TORCHS = nn.parallel.DistributedDataParallel
MEAN = 1.5  # of the gradients of sum(weight * (rank + 1)) over two ranks


def linear():
    return nn.Linear(1, 1, bias=False)


def rows(rank):
    return torch.full((1, 1), rank + 1.0)


def gradient(module):
    return next(module.parameters()).grad.item()


# Which backward passes average


def test_wrapper_that_is_dropped_before_backward_still_averages():
    def train(rank, world_size):
        found = []
        for wrap in (lambda output: output, lambda output: {"a": [output]}):
            module = linear()
            forward = module.forward
            module.forward = lambda X: wrap(forward(X))  # noqa: B023
            output = DistributedDataParallel(module)(rows(rank))
            while not isinstance(output, torch.Tensor):
                output = output["a"] if isinstance(output, dict) else output[0]
            loss = output.sum()
            del output
            gc.collect()
            loss.backward()
            found.append(gradient(module))
            del loss
            found.append(len(module.weight._post_accumulate_grad_hooks))
        return found

    assert launch(train, 2, timeout=LIMIT) == [[MEAN, 0, MEAN, 0]] * 2


def test_no_sync_after_a_backward_pass_that_was_broken_off_does_not_average():
    def train(rank, world_size):
        module = nn.Sequential(linear(), linear())
        model = DistributedDataParallel(module, bucket_cap_mb=1e-6)
        broken = module[0].register_forward_hook(
            lambda module, inputs, output: (output.register_hook(lambda grad: 1 / 0), output)[1]
        )
        output = model(rows(rank)).sum()
        with pytest.raises(ZeroDivisionError):
            output.backward()
        broken.remove()
        model.zero_grad()
        with model.no_sync():
            model(rows(rank)).sum().backward()
        return module[1].weight.grad.item() / module[0].weight.item()

    assert launch(train, 2, timeout=LIMIT) == pytest.approx([1, 2])


def test_outputs_in_nested_dataclasses_hold_the_reducer():
    def train(rank, world_size):
        @dataclass(slots=True)
        class Output:
            parts: list

        module = linear()
        forward = module.forward
        module.forward = lambda X: Output([Output([forward(X)])])
        output = DistributedDataParallel(module)(rows(rank)).parts[0].parts[0]
        gc.collect()
        output.sum().backward()
        return gradient(module)

    assert launch(train, 2, timeout=LIMIT) == [MEAN] * 2


def test_only_passes_of_the_wrapper_average_as_with_torch():
    def train(rank, world_size):
        def run(kind):
            module = linear()
            first, second = kind(module), kind(module)
            trace = []

            def step(call):
                module.zero_grad()
                call(rows(rank)).sum().backward()
                trace.append(gradient(module))

            for call in (first, module, second, module, first, second):
                step(call)
            return trace

        return run(DistributedDataParallel), run(TORCHS)

    for rank, (ours, theirs) in enumerate(launch(train, 2, timeout=LIMIT)):
        alone = rank + 1.0
        assert ours == theirs == [MEAN, alone, MEAN, alone, MEAN, MEAN]


def test_second_backward_pass_through_an_output_averages_too():
    def train(rank, world_size):
        module = linear()
        loss = DistributedDataParallel(module)(rows(rank)).sum()
        loss.backward(retain_graph=True)
        first = gradient(module)
        loss.backward()
        return first, gradient(module)

    assert launch(train, 2, timeout=LIMIT) == [(MEAN, 2 * MEAN)] * 2


def test_require_backward_grad_sync_may_be_set_by_hand():
    def train(rank, world_size):
        module = linear()
        model = DistributedDataParallel(module)
        model.require_backward_grad_sync = False
        model(rows(rank)).sum().backward()
        alone = gradient(module)
        model.require_backward_grad_sync = True
        model(rows(rank)).sum().backward()
        return alone, gradient(module)

    assert launch(train, 2, timeout=LIMIT) == [(rank + 1.0, 2 * MEAN) for rank in range(2)]


@pytest.mark.parametrize("as_view", [False, True])
def test_gradient_that_was_kept_is_written_over_only_if_it_is_a_view(as_view):
    def train(rank, world_size):
        module = linear()
        model = DistributedDataParallel(module, gradient_as_bucket_view=as_view)
        model(rows(rank)).sum().backward()
        kept = module.weight.grad
        module.zero_grad()
        model(10 * rows(rank)).sum().backward()
        return kept.item(), gradient(module)

    kept = 10 * MEAN if as_view else MEAN
    assert launch(train, 2, timeout=LIMIT) == [(kept, 10 * MEAN)] * 2


def test_gradients_of_gradients_are_refused():
    def train(rank, world_size):
        module = linear()
        model = DistributedDataParallel(module)
        with (
            warnings.catch_warnings(action="ignore"),  # torch's: the graph is a cycle
            pytest.raises(RuntimeError, match="without create_graph"),
        ):
            model(rows(rank)).square().sum().backward(create_graph=True)
        module.zero_grad()
        ranks.barrier()
        model(rows(rank)).sum().backward()  # and afterwards all is well
        return gradient(module)

    assert launch(train, 2, timeout=LIMIT) == [MEAN] * 2


def test_parameter_that_was_unfrozen_is_refused_by_name():
    def train(rank, world_size):
        module = nn.Sequential(linear(), linear())
        module[1].requires_grad_(False)
        model = DistributedDataParallel(module)
        module[1].requires_grad_(True)
        with pytest.raises(ValueError, match=r"1\.weight was unfrozen after wrapping"):
            model(rows(rank))
        DistributedDataParallel(module)(rows(rank)).sum().backward()
        return gradient(module[1]) == MEAN * module[0].weight.item()

    assert all(launch(train, 2, timeout=LIMIT))


def test_hooks_of_several_threads_take_turns():
    class Slow(Reducer):
        inside = most = 0

        def _gradient_is_ready(self, bucket, i):
            Slow.inside += 1
            Slow.most = max(Slow.most, Slow.inside)
            time.sleep(0.01)
            Slow.inside -= 1

    reducer = Slow([nn.Parameter(torch.ones(2)) for _ in range(4)], None, 25, False, False)
    reducer._averages = True
    me = weakref.ref(reducer)
    threads = [threading.Thread(target=_on_gradient, args=(me, 0, i, None)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Slow.most == 1


@pytest.mark.gpu
def test_gradients_of_any_stream_are_averaged_on_gpus():
    """Not run on a GPU. The inputs are moved to the rank's own; one GPU may serve both ranks."""

    def train(rank, world_size):
        device = torch.device("cuda", rank % torch.cuda.device_count())
        module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to(device)
        model = DistributedDataParallel(module, device_ids=[device.index], bucket_cap_mb=1)
        X = torch.randn(64, 512, generator=torch.Generator().manual_seed(rank))
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for _ in range(3):
                model.zero_grad()
                model(X).square().sum().backward()
            ours = [param.grad.clone() for param in module.parameters()]
        module.zero_grad()
        module(X.to(device)).square().sum().backward()
        for param, grad in zip(module.parameters(), ours, strict=True):
            ranks.allreduce(param.grad, op="mean")
            torch.testing.assert_close(grad, param.grad)

    launch(train, 2, timeout=LIMIT)


# Join


def test_ranks_that_are_out_of_batches_end_all_where_that_was_asked_for():
    def train(rank, world_size):
        def run(kind):
            model = kind(linear())
            steps = 0
            with (
                pytest.raises(RuntimeError),
                model.join(throw_on_early_termination=True),
            ):
                for _ in range(2 + rank):
                    model(rows(rank)).sum().backward()
                    steps += 1
            with model.join(enable=False):
                model(rows(rank)).sum().backward()
            return steps, gradient(model.module)

        return run(DistributedDataParallel), run(TORCHS)

    for ours, theirs in launch(train, 2, timeout=LIMIT):
        assert ours == theirs and ours[0] == 2


def test_passes_without_gradients_are_allowed_inside_join():
    def train(rank, world_size):
        model = DistributedDataParallel(nn.Sequential(linear(), nn.BatchNorm1d(1)))
        with model.join():
            for _ in range(1 + 2 * rank):
                with torch.no_grad():
                    model(torch.randn(3, 1))
                model(torch.randn(3, 1)).square().sum().backward()
        state = [None] * world_size
        dist.all_gather_object(state, [t.tolist() for t in model.state_dict().values()])
        return state[0] == state[1], model.module[1].num_batches_tracked.item()

    assert launch(train, 2, timeout=LIMIT) == [(True, 6)] * 2


@pytest.mark.parametrize("cap", [25, 1e-6])
def test_layers_checkpointed_with_reentrant_passes_are_averaged_with_the_others(cap):
    def train(rank, world_size, cap):
        class Checkpointed(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(linear() for _ in range(3))
                for param in self.parameters():
                    nn.init.ones_(param)

            def forward(self, X):
                plain, *others = self.layers
                X = plain(X)
                for layer in others:
                    X = checkpoint(layer, X, use_reentrant=True)
                return X

        model = DistributedDataParallel(Checkpointed(), bucket_cap_mb=cap)
        for _ in range(2):
            model.zero_grad()
            model(rows(rank)).sum().backward()
        return [param.grad.item() for param in model.parameters()]

    assert launch(train, 2, cap, timeout=LIMIT) == [[MEAN] * 3] * 2


# Communication hooks


def test_hooks_of_torch_do_what_they_do_with_torchs():
    def train(rank, world_size):
        def run(kind, hook, make_state):
            torch.manual_seed(3)
            module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
            model = kind(module, bucket_cap_mb=25)
            if hook:
                model.register_comm_hook(make_state(), hook)
            data = torch.Generator().manual_seed(rank)
            for _ in range(3):
                model.zero_grad()
                model(torch.randn(4, 6, generator=data)).square().mean().backward()
            return torch.cat([param.grad.flatten() for param in module.parameters()])

        def power():
            return powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)

        cases = {
            "allreduce": (default_hooks.allreduce_hook, lambda: None),
            "group": (default_hooks.allreduce_hook, lambda: dist.group.WORLD),
            "fp16": (default_hooks.fp16_compress_hook, lambda: None),
            "wrapped": (
                default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
                lambda: None,
            ),
            "powerSGD": (powerSGD_hook.powerSGD_hook, power),
        }
        plain = run(DistributedDataParallel, None, None)
        found = {}
        for name, case in cases.items():
            ours, theirs = run(DistributedDataParallel, *case), run(TORCHS, *case)
            found[name] = [(ours - other).abs().max().item() for other in (theirs, plain)]
        return found

    for found in launch(train, 2, timeout=LIMIT):
        assert all(from_torch < 1e-5 for from_torch, _ in found.values()), found
        assert found["allreduce"][1] == found["group"][1] == 0
        assert 0 < found["fp16"][1] < 1e-3 and 0 < found["wrapped"][1] < 1e-3
        assert found["powerSGD"][1] > 1e-3


def test_hooks_of_two_wrappers_keep_the_order_of_backward():
    def train(rank, world_size):
        def late(name, bucket):
            if (name, rank) == ("second", 1):
                time.sleep(0.2)  # if it were another thread, the first one's hook would overtake
            return default_hooks.allreduce_hook(None, bucket)

        def run(kind):
            torch.manual_seed(3)
            first, second = kind(nn.Linear(5, 5)), kind(nn.Linear(5, 5))
            first.register_comm_hook("first", late)
            second.register_comm_hook("second", late)
            second(first(torch.full((4, 5), rank + 1.0))).square().mean().backward()
            return [p.grad for model in (first, second) for p in model.parameters()]

        pairs = zip(run(DistributedDataParallel), run(TORCHS), strict=True)
        return [(ours - theirs).abs().max().item() for ours, theirs in pairs]

    for found in launch(train, 2, timeout=LIMIT):
        assert max(found) < 1e-6


def test_hook_that_returns_no_future_is_refused():
    def train(rank, world_size):
        model = DistributedDataParallel(linear())
        model.register_comm_hook(None, lambda state, bucket: bucket.buffer())
        with pytest.raises(TypeError, match=r"must return a torch\.futures\.Future, not Tensor"):
            model(rows(rank)).sum().backward()

    launch(train, 2, timeout=LIMIT)


def test_hook_whose_future_is_never_done_is_not_waited_for_without_limit():
    def train(rank, world_size):
        ranks.use_messages(timeout=0.5)
        model = DistributedDataParallel(linear())
        model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
        with pytest.raises(TimeoutError, match=r"had no result after 0\.5 s"):
            model(rows(rank)).sum().backward()

    launch(train, 2, timeout=20)


def test_hook_is_called_for_each_bucket_and_may_keep_a_state():
    def keep(state, bucket):
        last = bucket.is_last()
        state.append((bucket.index(), last, bucket.buffer().tolist(), len(bucket.parameters())))
        future = torch.futures.Future()
        future.set_result(torch.zeros_like(bucket.buffer()))
        return future

    def train(rank, world_size):
        module = nn.Sequential(linear(), linear())
        for param in module.parameters():
            param.data.fill_(1.0)
        model, state = DistributedDataParallel(module, bucket_cap_mb=1e-6), []
        model.register_comm_hook(state, keep)
        model(rows(rank)).sum().backward()
        with pytest.raises(RuntimeError, match="only once"):
            model.register_comm_hook(state, keep)
        with pytest.raises(TypeError, match="must be a function"):
            DistributedDataParallel(linear()).register_comm_hook(None, "allreduce")
        with pytest.raises(ValueError, match="rows"):
            DistributedDataParallel(linear(), weight="rows").register_comm_hook(None, keep)
        return state, [param.grad.item() for param in module.parameters()]

    for rank, (state, grads) in enumerate(launch(train, 2, timeout=LIMIT)):
        alone = [rank + 1.0]  # not divided by the number of ranks
        assert state == [(0, False, alone, 1), (1, True, alone, 1)]
        assert grads == [0, 0]


# Copies


@pytest.mark.parametrize("way", ["deepcopy", "save"])
def test_copy_is_a_wrapper_of_its_own(way):
    def train(rank, world_size):
        def twin(model):
            if way == "deepcopy":
                return copy.deepcopy(model)
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            return torch.load(file, weights_only=False)

        model = DistributedDataParallel(nn.BatchNorm1d(1), gradient_as_bucket_view=True)
        model(torch.randn(3, 1)).sum().backward()
        if rank == 0:
            twin(model)  # as for a moving average on one rank: no other need take part
        other = twin(model)
        for _ in range(2):
            model.zero_grad()
            other.zero_grad()
            X = torch.full((2, 1), rank + 1.0) * torch.tensor([[1.0], [2.0]])
            (other(X) * (rank + 1)).sum().backward()
        return (
            other.module.bias.grad.item(),
            model.module.bias.grad is None,
            other.gradient_as_bucket_view,
        )

    assert launch(train, 2, timeout=LIMIT) == [(2 * MEAN, True, True)] * 2


def test_copy_in_a_group_of_ones_own_says_what_to_do():
    def train(rank, world_size):
        model = DistributedDataParallel(linear(), process_group=dist.new_group())
        with pytest.raises(RuntimeError, match=r"copy \.module, and wrap the copy"):
            copy.deepcopy(model)

    launch(train, 2, timeout=LIMIT)


# What is left


def left(module):
    gc.collect()
    return {
        "files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        "groups": len(dist.distributed_c10d._world.pg_map),
        "hooks": sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()),
        "threads": sum(thread.name == "communication" for thread in threading.enumerate()),
    }


@pytest.mark.parametrize("way", ["lanes", "messages"])
def test_nothing_is_left_of_a_wrapper(way):
    def wrap(rank, world_size):
        if way == "messages":
            ranks.use_messages()
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        ranks.barrier()
        before, kinds = left(module), set()
        for i in range(8):
            model = DistributedDataParallel(module)
            if i % 4:
                for _ in range(2):
                    model(torch.randn(4, 3)).sum().backward()
                kinds.add(type(model.reducer._line.transport))
            if i == 7:
                with pytest.raises(RuntimeError):  # a broken pass
                    loss = model(torch.randn(4, 3)).sum()
                    loss.backward(torch.ones(3))
                del loss
            del model
        limit = time.monotonic() + 20
        while (after := left(module)) != before and time.monotonic() < limit:
            time.sleep(0.01)  # a thread ends on its own
        return before, after, kinds == ({Lanes} if way == "lanes" else kinds - {Lanes})

    for before, after, as_wanted in launch(wrap, 2, timeout=LIMIT):
        assert before == after and as_wanted
        assert before["hooks"] == before["threads"] == 0


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
