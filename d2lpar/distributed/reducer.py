"""The reducer: averages gradients between ranks while backward still runs.

A hook of each parameter notes that its gradient is there. As soon as a *bucket* has all
of its own, a communication thread sends it. When backward ends, the reducer waits for
the thread and hands out the averages. Notebook 07 uses this file. Sources: Li et al.
(see ``buckets``), torch's ``Reducer``.
"""

import time
import weakref
from collections.abc import Callable
from concurrent.futures import wait
from contextvars import copy_context
from functools import partial
from threading import Event, Lock

import torch
import torch.distributed as dist
from torch import nn

from .. import ranks
from .buckets import Bucket, make_buckets
from .uneven import naming_join

# What the reducer does with a gradient that backward makes
IGNORES = "ignores"  # it is the rank's own: no forward pass has announced it
EXPECTS = "expects"  # it begins a backward pass that averages
AVERAGES = "averages"  # such a pass is running, and will call _end


class Reducer:
    """Averages gradients in each backward pass that a forward pass has announced.

    It lives as long as its owner, or the graph of tensors it was told to ``expect``;
    its hooks, thread and line go with it. On GPUs, where it was not run, messages have
    their own stream.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        group: dist.ProcessGroup,
        bucket_cap_mb: float,
        by_rows: bool = False,
        as_view: bool = False,
    ):
        self.group, self.by_rows, self.as_view = group, by_rows, as_view
        self.buckets = make_buckets(params, bucket_cap_mb)
        # for the allreduce
        self.comm_hook: Callable[[Bucket], torch.futures.Future] | None = None
        # of (bucket, begin, end) in seconds, for each message
        self.timeline: list | None = None
        # in which the buckets' order is that of the messages
        self._line: ranks.Group | None = None
        # autograd has a thread for each device, and all call the hooks
        self._lock = Lock()
        self._streams = {  # of the messages, one per GPU
            param.device: torch.cuda.Stream(param.device)
            for param in params
            if param.is_cuda
        }
        self._sender = ranks.Sender()
        weakref.finalize(self, self._sender.stop)
        self._reset()
        self._add_hooks()

    def _add_hooks(self) -> None:
        # a hook lives as long as its parameter, and must not hold more
        me = weakref.ref(self)
        for bucket in self.buckets:
            for i, param in enumerate(bucket.params):
                on_gradient = partial(_on_gradient, me, bucket, i)
                handle = param.register_post_accumulate_grad_hook(on_gradient)
                weakref.finalize(self, handle.remove)

    def begin(self, weight: float) -> None:
        """Get ready for a forward pass; weights that are rows add up until backward."""
        # an error broke off the last backward
        if any(bucket.ready for bucket in self.buckets):
            wait(self._sent)  # its messages may still read the buckets
            self._reset()
        self._state = IGNORES
        adds_up = self.by_rows and not self._weight_is_used
        self._weight = self._weight + weight if adds_up else weight
        self._weight_is_used = False

    def expect(self, outputs: list[torch.Tensor]) -> None:
        """Average in the next backward pass and in each one through ``outputs``."""
        self.connect()
        self._state = EXPECTS
        for tensor in outputs:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._enter)

    def connect(self) -> None:
        """Get ready to send on a line of our own in the group: called by all ranks."""
        self._line = self._line or ranks.own_group(self.group)
        self._context = copy_context()  # the thread counts bytes where the caller does

    def _reset(self) -> None:
        self._state, self._weight_is_used = IGNORES, True
        self._sent = []  # a future for each bucket that is under way
        for bucket in self.buckets:
            bucket.ready.clear()

    def _enter(self, *_) -> None:
        """Average in this backward pass, even with others inside, until it ends."""
        if self._state != AVERAGES:
            self._state = AVERAGES
            # torch has no public way to learn that backward is over; its own one is
            # private.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _note(self, bucket: Bucket, i: int) -> None:
        """The i-th gradient of a bucket is there: send all buckets whose turn it is."""
        self._enter()
        self._check(bucket, i)
        bucket.ready.add(i)
        self._wait_for_gradients(bucket)
        while (
            len(self._sent) < len(self.buckets)
            and self.buckets[len(self._sent)].is_full
        ):
            self._send(self.buckets[len(self._sent)])

    def _check(self, bucket: Bucket, i: int) -> None:
        """Refuse a gradient that cannot be averaged."""
        if bucket.params[i].grad.requires_grad:
            raise RuntimeError(
                "a gradient of a gradient cannot be averaged: call backward without"
                " create_graph, or in no_sync"
            )
        if i in bucket.ready:
            raise RuntimeError(
                "a gradient was added to twice in one backward pass, and may have been"
                " sent in between: checkpoint with use_reentrant=False"
            )
        if bucket.params[i].grad.is_sparse:
            raise ValueError(
                "sparse gradients cannot be averaged: use Embedding(sparse=False)"
            )

    def _send(self, bucket: Bucket, absent: bool = False) -> None:
        # hooks divide themselves
        weight = 0 if absent else 1 if self.comm_hook else self._weight
        with self._beside(bucket):
            bucket.fill(weight)
            if bucket.is_last():
                params = [param for b in self.buckets for param in b.params]
                used = [param.grad is not None and not absent for param in params]
                bucket.manifest.copy_(
                    torch.tensor([*used, weight], dtype=bucket.flat.dtype)
                )
            # The hook is called here, so that all ranks send what it sends in the same
            # order.
            future = self.comm_hook and self.comm_hook(bucket)
        self._sent.append(
            self._sender.submit(self._context.run, self._reduce, bucket, future)
        )

    def _reduce(self, bucket: Bucket, future: torch.futures.Future | None) -> None:
        begin = time.perf_counter()
        with self._beside(bucket):
            if self.comm_hook:
                bucket.values.copy_(_result_of(future, ranks.transport.here.timeout))
                ranks.allreduce(bucket.manifest, group=self._line)
            else:
                ranks.allreduce(bucket.flat, group=self._line)
        if self.timeline is not None:
            self.timeline.append((bucket.number, begin, time.perf_counter()))

    def _end(self) -> None:
        self._state = IGNORES
        if any(bucket.ready for bucket in self.buckets):
            self.finish()

    @torch.no_grad()
    def finish(self, absent: bool = False) -> None:
        """Send what is left, wait, and hand out gradients unless we are ``absent``."""
        # not full: some are unused on this rank
        for bucket in self.buckets[len(self._sent) :]:
            self._wait_for_gradients(bucket)
            self._send(bucket, absent)
        with naming_join():
            for future in self._sent:
                future.result()
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        *users, rows = self.buckets[-1].manifest.tolist()
        # but the weight stays: one forward pass may have two backward passes
        self._reset()
        users = iter(users)
        for bucket in self.buckets:
            if self.by_rows and rows:
                bucket.flat.div_(rows.real)
            for i in range(len(bucket.params)):
                if next(users) and not absent:
                    bucket.hand_out(i, self.as_view)

    # On GPUs

    def _beside(self, bucket: Bucket):
        """Work in the messages' stream, beside the one where backward computes."""
        # of None: changes nothing
        return torch.cuda.stream(self._streams.get(bucket.flat.device))

    def _wait_for_gradients(self, bucket: Bucket) -> None:
        """Let the messages' stream wait for what the current one has to do by now."""
        if stream := self._streams.get(bucket.flat.device):
            stream.wait_event(torch.cuda.current_stream(stream.device).record_event())


def _on_gradient(me: weakref.ref, bucket: Bucket, i: int, _: torch.Tensor) -> None:
    reducer = me()
    if reducer is not None and reducer._state != IGNORES:
        with reducer._lock:
            reducer._note(bucket, i)


def _result_of(future: torch.futures.Future, timeout: float) -> torch.Tensor:
    """Wait for what a hook has begun; torch's ``wait`` alone has no limit."""
    if not hasattr(future, "wait"):  # torch's own are of a class without a public name
        kind = type(future).__name__
        raise TypeError(
            f"a communication hook must return a torch.futures.Future, not {kind}"
        )
    done = Event()
    future.add_done_callback(lambda _: done.set())
    if not done.wait(timeout):
        raise TimeoutError(
            f"the communication hook's future had no result after {timeout:g} s: has"
            " what was to set it failed, or has another rank not called its hook?"
        )
    return future.wait()
