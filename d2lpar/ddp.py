"""Chapter 07. DistributedDataParallel: all ranks average their gradients.

The naive class sends each gradient after backward. The other one sends them in buckets
while backward goes on. Sources: Li et al., "PyTorch Distributed" (VLDB 2020), and
``torch.nn.parallel.DistributedDataParallel``.
"""

import weakref
from concurrent.futures import wait
from contextlib import contextmanager

import torch
from torch import nn

from . import ranks
from .data_parallel import scatter


class NaiveDistributedDataParallel(nn.Module):
    """A replica on one rank; call ``average_gradients`` after each backward pass.

    All ranks must have used the same parameters.
    """

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
        ranks.broadcast(tensor.data, group.ranks[0], group)  # unseen by autograd


def fill_buckets(params, cap_bytes):
    """Deal params out, in order, to lists of one dtype, full at ``cap_bytes``."""
    buckets, room = [], 0
    for param in params:
        if room <= 0 or param.dtype != buckets[-1][0].dtype:
            room = cap_bytes if buckets else min(2**20, cap_bytes)  # the first is small
            buckets.append([])
        buckets[-1].append(param)
        room -= param.nbytes
    return buckets


def pack(params, out=None):
    """Return the gradients side by side, then for each one whether it is there."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    there = grads[0].new_tensor([param.grad is not None for param in params])
    return torch.cat([*(grad.flatten() for grad in grads), there], out=out)


def average(flat, group):
    """Average a flat tensor over the ranks, in place, and return it."""
    ranks.allreduce(flat, op="mean", group=group)
    return flat


def unpack(flat, params):
    """Copy the means into the gradients, except those that no rank has."""
    *means, there = flat.split([*(param.numel() for param in params), len(params)])
    for p, mean, is_there in zip(params, means, there.tolist()):
        if is_there:
            if p.grad is None:
                p.grad = torch.empty_like(p)
            p.grad.copy_(mean.view_as(p))


class Reducer:
    """Averages gradients in buckets: a thread sends each one that is complete."""

    def __init__(self, params, cap_bytes, group):
        self.buckets = fill_buckets(reversed(params), cap_bytes)
        self.flats = [pack(params) for params in self.buckets]  # for all passes
        self.bucket_of = {p: b for b, params in enumerate(self.buckets) for p in params}
        self.group, self.thread = ranks.own_group(group), ranks.Sender()
        self.averages = self.waits = False  # waits: a forward pass, for its backward
        self.num_forwards = self.num_backwards = 0
        self.sent = []  # a future for each bucket
        self.running = None  # autograd's number of the backward pass that is running
        me = weakref.ref(self)  # parameters may live longer
        for p in params:
            hook = p.register_post_accumulate_grad_hook(lambda p: me().mark_ready(p))
            weakref.finalize(self, hook.remove)

    def expect(self, averages):
        """Average from now on, if this forward pass or one that waits asks for it."""
        self.averages = self.waits = averages or self.waits
        self.num_forwards += averages

    def mark_ready(self, param):
        """Cross a gradient off, and send what is complete: autograd calls this."""
        if self.averages:
            if param.grad.requires_grad:
                raise RuntimeError("a gradient has a graph: leave create_graph out")
            number = torch._C._current_graph_task_id()  # private
            if self.running != number:
                self.begin(number)
            self.missing[self.bucket_of[param]].remove(param)
            self.send_complete()

    def begin(self, number):
        """Mark all gradients as missing, and say in plans which pass this is."""
        wait(self.sent)  # of a pass that has not finished: its flats are used again
        self.running, self.missing = number, [set(params) for params in self.buckets]
        passes = f"{self.num_forwards} forward and {self.num_backwards} backward passes"
        self.sent, self.group.context = [], f" after {passes}"
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # private

    def send_complete(self):
        """Hand the thread the next buckets, as long as they miss nothing."""
        while (b := len(self.sent)) < len(self.buckets) and not self.missing[b]:
            flat = pack(self.buckets[b], out=self.flats[b])
            self.sent.append(self.thread.submit(average, flat, self.group))

    def finish(self):
        """Send the other buckets, wait for all, and hand the means out."""
        if self.running is not None:  # else a pass inside this one has finished
            self.running, self.missing = None, [set() for _ in self.buckets]
            self.send_complete()  # nothing is missing any more: all the rest
            while self.sent:  # an error in a future that is kept would keep the graph
                self.sent.pop(0).result()
            self.waits = False
            for flat, params in zip(self.flats, self.buckets):
                unpack(flat, params)
            self.num_backwards += 1


class DistributedDataParallel(nn.Module):
    """A replica on one rank: ``backward`` leaves the mean of all ranks' gradients.

    Arguments are named as torch's. After a forward pass outside ``no_sync``, every
    backward pass through the parameters averages. All ranks make equally many passes. A
    gradient that is missing on some ranks counts as 0 there; one that is missing on all
    stays None. Register your own hooks on parameters before you wrap: what a later one
    changes may have been sent already.
    """

    def __init__(
        self,
        module,
        device_ids=None,
        *,
        process_group=None,
        bucket_cap_mb=25,
        broadcast_buffers=True,
        find_unused_parameters=False,  # they are found anyway
    ):
        super().__init__()
        self.module, self.group = module, ranks.group_of(process_group)
        self.device_ids, self.broadcast_buffers = device_ids, broadcast_buffers
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        params = [param for param in module.parameters() if param.requires_grad]
        devices = {str(param.device) for param in module.parameters()}
        if device_ids and devices != {f"cuda:{i}" for i in device_ids}:
            problem = f"device_ids is {device_ids}, the module is on {devices}"
            raise ValueError(f"{problem}: leave device_ids out, or move the module")
        ranks.agree(f"a module with {len(params)} parameters to train", self.group)
        buffers = module.buffers() if broadcast_buffers else ()
        share([*module.parameters(), *buffers], self.group)
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
        if torch.is_grad_enabled():
            self.reducer.expect(averages)
        if averages:
            trained = {p for p in self.module.parameters() if p.requires_grad}
            if trained - self.reducer.bucket_of.keys():
                raise ValueError("new parameters: change the module before wrapping")
        return output

    @contextmanager
    def no_sync(self):
        """Let each rank add up gradients alone, after forward passes made inside."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before
