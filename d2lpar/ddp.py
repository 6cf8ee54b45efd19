"""DistributedDataParallel: each rank has a replica, and all average their gradients.

The naive class sends each gradient after backward. The other one sends them in buckets
while backward goes on. Chapter 07 writes this file. Sources: Li et al., "PyTorch
Distributed" (VLDB 2020), and ``torch.nn.parallel.DistributedDataParallel``.
"""

import weakref
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

# a private name, which torch's own FSDP uses, too
from torch.utils._pytree import tree_leaves

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


def fill_buckets(params, max_bytes):
    """Deal params out, in order, to lists of one dtype and at most ``max_bytes``."""
    buckets, room = [], 0
    for param in params:
        if not buckets or param.nbytes > room or param.dtype != buckets[-1][0].dtype:
            buckets.append([])  # a parameter that is larger will be alone
            room = max_bytes
        buckets[-1].append(param)
        room -= param.nbytes
    return buckets


def pack(params):
    """Return the gradients side by side, then for each one whether it is there."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    there = grads[0].new_tensor([param.grad is not None for param in params])
    return torch.cat([*(grad.flatten() for grad in grads), there])


def average(flat, group):
    """Average a flat tensor over the ranks, in place, and return it."""
    ranks.allreduce(flat, op="mean", group=group)
    return flat


def unpack(flat, params):
    """Let the gradients be views of ``flat``, except those that no rank has."""
    *means, there = flat.split([*(param.numel() for param in params), len(params)])
    for p, mean, is_there in zip(params, means, there.tolist()):
        if is_there:
            mean = mean.view_as(p)
            # autograd wants gradients to lie in memory like their parameters
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
        self.group, self.thread = ranks.own_group(group), ranks.Sender()
        self.num_passes, self.expected, self.running = 0, None, lambda: None
        add_hooks(self, params)

    def expect(self, output):
        """Average in the next backward pass, and in all through ``output``."""
        self.num_passes += 1
        self.announce(self.num_passes)
        for leaf in tree_leaves(output):
            if node := getattr(leaf, "grad_fn", None):
                node.register_prehook(partial(self.announce, self.num_passes))

    def announce(self, number, _=None):
        """Expect gradients, of forward pass ``number``."""
        self.expected = number

    def is_ready(self, param):
        """Send what is complete: autograd has added up the gradient of ``param``."""
        if self.running() is None and self.expected:
            self.begin()
        if self.running() is None:
            return
        missing = self.missing[self.bucket_of[param]]
        if param not in missing or getattr(param.grad, "requires_grad", False):
            raise RuntimeError("a gradient came twice in one pass, or with a graph")
        missing.remove(param)
        self.send()

    def begin(self):
        """Begin to average, and let autograd call ``finish`` in the end."""
        finish = partial(self.finish)  # autograd drops it in the end, or at an error
        self.running, self.sent = weakref.ref(finish), []
        self.missing = [set(params) for params in self.buckets]
        torch.autograd.Variable._execution_engine.queue_callback(finish)  # private
        plan = f"the backward pass after forward pass {self.expected}"
        self.agreed = self.thread.submit(ranks.agree, plan, self.group)

    def send(self):
        """Hand the thread the next buckets, as long as they miss nothing."""
        while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
            flat = pack(self.buckets[len(self.sent)])
            self.sent.append(self.thread.submit(average, flat, self.group))

    @torch.no_grad()
    def finish(self):
        """Send the other buckets, wait for all, and hand the means out."""
        self.missing, self.expected = [set() for _ in self.buckets], None
        self.send()
        agreed, sent = self.agreed, self.sent
        self.agreed, self.sent = None, []
        agreed.result()  # an error's traceback holds the graph: it must not stay here
        for params, future in zip(self.buckets, sent):
            unpack(future.result(), params)


class DistributedDataParallel(nn.Module):
    """A replica on one rank: ``backward`` leaves the mean of all ranks' gradients.

    The arguments mean what they mean in torch's class. A gradient that is missing on
    some ranks counts as 0 there; one that is missing on all stays None. All ranks make
    equally many forward passes with gradients. Register your own hooks on parameters
    before wrapping.
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
        self.module, self.device_ids = module, device_ids
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.group = ranks.group_of(process_group)
        params = [param for param in module.parameters() if param.requires_grad]
        if device_ids and not all(param.is_cuda for param in params):
            problem = f"device_ids is {device_ids}, but the module is on the CPU"
            raise ValueError(f"{problem}: leave device_ids out, or move the module")
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
