"""DistributedDataParallel: each rank has a replica, and all average their gradients.

The naive class sends each gradient after backward. The other one sends them in buckets
while backward goes on. Chapter 07 writes this file. Sources: Li et al., "PyTorch
Distributed" (VLDB 2020), and ``torch.nn.parallel.DistributedDataParallel``.
"""

import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import nn

# a private name, which torch's own FSDP uses, too
from torch.utils._pytree import tree_leaves

from . import ranks
from .data_parallel import scatter


class NaiveDistributedDataParallel(nn.Module):
    """A replica on one rank; call ``average_gradients`` after each backward pass."""

    def __init__(self, module, process_group=None):
        super().__init__()
        self.module, self.group = module, ranks.group_of(process_group)
        share([*module.parameters(), *module.buffers()], self.group)

    def forward(self, *args, **kwargs):
        """Call the module."""
        return self.module(*args, **kwargs)

    def average_gradients(self):
        """Replace each gradient by its mean over the ranks."""
        for param in self.module.parameters():
            if param.grad is not None:
                ranks.allreduce(param.grad, op="mean", group=self.group)


def share(tensors, group):
    """Copy the tensors of the group's first rank, in place, to all others."""
    for tensor in tensors:
        ranks.broadcast(tensor.detach(), group.ranks[0], group)


def fill_buckets(params, max_bytes):
    """Deal params out, in order, to lists of one dtype and at most ``max_bytes``."""
    buckets, room = [], -1
    for param in params:
        if param.nbytes > room or param.dtype != buckets[-1][0].dtype:
            buckets.append([])  # a parameter that is larger stays alone
            room = max_bytes
        buckets[-1].append(param)
        room -= param.nbytes
    return buckets


def pack(params):
    """Return the gradients side by side, then for each one whether it is there."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    used = grads[0].new_tensor([param.grad is not None for param in params])
    return torch.cat([*(grad.flatten() for grad in grads), used])


def unpack(flat, params):
    """Set the gradients to what ``flat`` holds, but for those that no rank has."""
    *means, used = flat.split([*(param.numel() for param in params), len(params)])
    for p, mean, is_used in zip(params, means, used.tolist()):
        if is_used:
            mean = mean.view_as(p)  # next, with p's strides, as autograd wants it
            p.grad = mean if p.is_contiguous() else torch.empty_like(p).copy_(mean)


def add_hooks(reducer, params):
    """Let autograd call ``reducer.is_ready``, for as long as there is this reducer."""
    me = weakref.ref(reducer)  # a parameter may live longer
    for param in params:
        hook = param.register_post_accumulate_grad_hook(lambda p: me().is_ready(p))
        weakref.finalize(reducer, hook.remove)


class Reducer:
    """Averages gradients in buckets, which a thread sends while backward goes on."""

    def __init__(self, params, max_bytes, group):
        self.buckets = fill_buckets(reversed(params), max_bytes)
        self.bucket_of = {p: b for b, params in enumerate(self.buckets) for p in params}
        self.group, self.thread = ranks.own_group(group), ThreadPoolExecutor(1)
        self.num_passes, self.is_running = 0, False
        add_hooks(self, params)

    def expect(self, output):
        """Average in each backward pass through the tensors of ``output``."""
        self.num_passes, self.is_running = self.num_passes + 1, False
        nodes = {getattr(leaf, "grad_fn", None) for leaf in tree_leaves(output)}
        if nodes <= {None}:
            raise TypeError("return tensors with gradients, also in tuples or dicts")
        for node in nodes - {None}:
            node.register_prehook(self.begin)

    def begin(self, _):
        """Begin to average; let autograd call ``finish`` in the end: a private name."""
        if self.is_running:
            return
        self.is_running, self.sent = True, []
        self.missing = [set(params) for params in self.buckets]
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        plan = f"the backward pass after forward pass {self.num_passes}"
        self.agreed = self.thread.submit(ranks.agree, plan, self.group)

    def is_ready(self, param):
        """Send each bucket that is complete: autograd has added up a gradient."""
        if not self.is_running:
            return
        missing = self.missing[self.bucket_of[param]]
        if param not in missing or getattr(param.grad, "requires_grad", False):
            raise RuntimeError("a gradient came twice in one pass, or with a graph")
        missing.remove(param)
        while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
            self.send()

    def send(self):
        """Hand the next bucket to the thread."""
        flat = pack(self.buckets[len(self.sent)])
        self.sent.append(self.thread.submit(self.average, flat))

    def average(self, flat):
        """Average a bucket over the ranks: the work of the thread."""
        ranks.allreduce(flat, op="mean", group=self.group)
        return flat

    @torch.no_grad()
    def finish(self):
        """Send the other buckets, wait for all, and hand the means out."""
        while len(self.sent) < len(self.buckets):
            self.send()
        self.agreed.result()
        for params, future in zip(self.buckets, self.sent):
            unpack(future.result(), params)
        self.is_running = False


class DistributedDataParallel(nn.Module):
    """A replica on one rank: ``backward`` leaves the mean of all ranks' gradients.

    The arguments mean what they mean in torch's class. A gradient that is missing on
    some ranks counts as 0 there; one that is missing on all stays None. All ranks make
    equally many forward passes with gradients. What does not go through the output, as
    a penalty on its gradient, is not averaged.
    """

    def __init__(
        self,
        module,
        device_ids=None,
        *,
        process_group=None,
        bucket_cap_mb=25,
        broadcast_buffers=True,
        find_unused_parameters=False,  # ours always finds them
    ):
        super().__init__()
        self.module, self.device_ids = module, device_ids
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.group = ranks.group_of(process_group)
        params = [param for param in module.parameters() if param.requires_grad]
        where = {param.device for param in params}
        if device_ids and where != {torch.device(f"cuda:{i}") for i in device_ids}:
            problem = f"device_ids is {device_ids}, but the module is on {where}"
            raise ValueError(f"{problem}: leave device_ids out, or move the module")
        share([*module.parameters(), *module.buffers()], self.group)
        self.reducer = Reducer(params, bucket_cap_mb * 2**20, self.group)

    def forward(self, *args, **kwargs):
        """Call the module; before that, share buffers where torch's class does."""
        averages = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self.require_forward_param_sync and self.broadcast_buffers:
            share(self.module.buffers(), self.group)
        self.require_forward_param_sync = averages
        if self.device_ids:
            [(args, kwargs)] = scatter((args, kwargs), self.device_ids)
        output = self.module(*args, **kwargs)
        if averages:
            trained = {p for p in self.module.parameters() if p.requires_grad}
            if trained - self.reducer.bucket_of.keys():
                problem = "the module has parameters to train that came after wrapping"
                raise ValueError(f"{problem}: change the module first, then wrap it")
            self.reducer.expect(output)
        return output

    @contextmanager
    def no_sync(self):
        """Let each rank add up gradients alone, after forward passes made inside."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before
