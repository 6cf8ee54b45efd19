"""The reducer: averages gradients between ranks while backward still runs.

It copies gradients into flat *buckets*, in the order in which backward is expected to make them
(the reverse of the parameters'), and hands each bucket to a communication thread as soon as it is
full. ``ddp`` has the module around it. Notebook 05 builds this file. Source: Li et al., "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training" (VLDB 2020), and torch's
``Reducer``.
"""

import contextvars
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from threading import Event, Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import ranks
from ..ranks.members import Member, line_of
from ..ranks.point_to_point import Sender
from .buckets import Bucket, make_buckets
from .scattering import tensors_of


class Reducer:
    """Averages the gradients of ``params`` in each backward pass that a forward pass has announced.

    It lives as long as its owner, or as the graph of a tensor that it was told to ``expect``, alone
    or in tuples, lists, dicts and dataclasses. With it go its hooks, its thread and its line. On a
    GPU messages travel in a stream of their own, which waits for the gradients' streams, and for
    which the caller's waits; not run on a GPU.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        group: dist.ProcessGroup,
        bucket_cap_mb: float,
        by_rows: bool,
        as_view: bool,
    ):
        self.group, self.by_rows, self.as_view = group, by_rows, as_view
        self.buckets = make_buckets(params, bucket_cap_mb)
        self.timeline: list | None = None
        self.hook: tuple[Any, Callable] | None = None  # (state, function), instead of allreduce
        self._line: Member | None = None  # in which the buckets' order is that of the messages
        self._weight = 1.0  # of this rank's gradients: its rows since the last averaging, …
        self._counts_anew = True  # … which ends with the first forward pass after it
        self._averages = False  # whether the next backward pass is to be averaged
        self._awaits_end = False  # whether this backward pass will call _end
        self._lock = Lock()  # autograd has a thread for each device, and all call the hooks
        self._streams = {  # of the messages, one per GPU
            bucket.device: torch.cuda.Stream(bucket.device)
            for bucket in self.buckets
            if bucket.device.type == "cuda"
        }
        self._context = contextvars.copy_context()
        self._begin()
        self._sender = Sender()
        me = weakref.ref(self)  # a hook lives as long as its parameter, and must not hold more
        handles = [
            param.register_post_accumulate_grad_hook(partial(_on_gradient, me, b, i))
            for b, bucket in enumerate(self.buckets)
            for i, param in enumerate(bucket.params)
        ]
        weakref.finalize(self, _let_go, handles, self._sender)

    # Before backward

    def prepare(self, weight: float) -> None:
        """Get ready for a forward pass with gradients; on this rank they count ``weight``."""
        if self._in_backward:  # the last backward pass was broken off by an error
            wait(self._futures)  # what it has sent is still read, until allreduce's timeout
            self._begin()
            self._counts_anew, self._averages = True, False
        self._awaits_end = False
        adds_up = self.by_rows and not self._counts_anew
        self._weight = weight + self._weight if adds_up else weight
        self._counts_anew = False
        self._context = contextvars.copy_context()  # the thread counts bytes where forward does

    def expect(self, output: Any) -> None:
        """Average in the next backward pass, and in each one that goes through ``output``."""
        self.connect()
        self._averages = True
        for tensor in _tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._enter)

    def connect(self) -> None:
        """Take a line in the group, unless there is one: called by all its ranks."""
        if self._line is None:
            self._line = line_of(self.group)

    def _begin(self) -> None:
        """Make ready for the next backward pass."""
        self._futures: list[Future] = []  # of the buckets that are under way
        self._in_backward = False
        for bucket in self.buckets:
            bucket.ready.clear()

    # During backward

    def _enter(self, *_) -> None:
        """A backward pass comes to an output: average in it, and finish when it ends."""
        self._averages = True
        self._await_end()  # already here, since a reentrant pass inside this one ends earlier

    def _await_end(self) -> None:
        if not self._awaits_end:
            self._awaits_end = True
            # torch has no public way to learn that backward is over; its own one is private.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._awaits_end = False
        if self._in_backward:
            self.finish()

    def _gradient_is_ready(self, bucket: Bucket, i: int) -> None:
        self._in_backward = True
        self._await_end()
        if bucket.params[i].grad.requires_grad:
            raise RuntimeError(
                "a gradient of a gradient cannot be averaged: call backward without create_graph, "
                "or in no_sync"
            )
        if i in bucket.ready:
            raise RuntimeError(
                "a gradient was added to twice in one backward pass, and may have been sent in "
                "between: checkpoint with use_reentrant=False"
            )
        bucket.ready.add(i)
        self._note_stream(bucket)
        while len(self._futures) < len(self.buckets) and self._next_bucket().is_full:
            self._send(self._next_bucket())

    def _next_bucket(self) -> Bucket:
        return self.buckets[len(self._futures)]

    def _send(self, bucket: Bucket, absent: bool = False) -> None:
        """Fill a bucket, and hand it to the communication thread."""
        weight = 1.0 if self.hook else self._weight  # torch's hooks divide by the ranks themselves
        with self._beside(bucket):
            bucket.fill(0 if absent else weight)
            if bucket.is_last():
                params = [param for b in self.buckets for param in b.params]
                used = [param.grad is not None and not absent for param in params]
                rows = 0 if absent else self._weight
                bucket.manifest.copy_(torch.tensor([*used, rows], dtype=bucket.dtype))
            reduced = self._call_hook(bucket)
        self._futures.append(self._sender.submit(self._context.run, self._reduce, bucket, reduced))

    def _call_hook(self, bucket: Bucket) -> torch.futures.Future | None:
        """Call the hook from backward, so that all ranks send what it sends in the same order."""
        if self.hook is None:
            return None
        state, function = self.hook
        reduced = function(state, bucket)
        if not hasattr(reduced, "wait"):  # torch's own are of a class without a public name
            kind = type(reduced).__name__
            raise TypeError(f"a communication hook must return a torch.futures.Future, not {kind}")
        return reduced

    def _reduce(self, bucket: Bucket, reduced: torch.futures.Future | None) -> None:
        begin = time.perf_counter()
        with self._beside(bucket):
            if reduced is None:
                ranks.allreduce(bucket.flat, group=self._line)
            else:
                bucket.values.copy_(_result_of(reduced, self._line.timeout))
                ranks.allreduce(bucket.manifest, group=self._line)
        if self.timeline is not None:
            self.timeline.append((bucket.number, begin, time.perf_counter()))

    # After backward

    @torch.no_grad()
    def finish(self, absent: bool = False) -> None:
        """Send what is left, wait for all, and hand out the gradients, unless we are ``absent``."""
        while len(self._futures) < len(self.buckets):
            self._note_stream(self._next_bucket())
            self._send(self._next_bucket(), absent)  # not full: some are unused on this rank
        with naming_join():
            for future in self._futures:
                future.result()
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        *users, rows = self.buckets[-1].manifest.tolist()
        if self.by_rows and rows:
            for bucket in self.buckets:
                bucket.flat.div_(rows.real)
        self._counts_anew = True  # the rows stay: one forward pass may have two backward passes
        self._averages = False
        self._begin()
        places = [(bucket, i) for bucket in self.buckets for i in range(len(bucket.params))]
        for (bucket, i), count in zip(places, users, strict=True):
            if count and not absent:
                bucket.hand_out(i, self.as_view)

    # On GPUs

    def _beside(self, bucket: Bucket):
        """Work in the stream of the messages, beside the one in which backward computes."""
        return torch.cuda.stream(self._streams.get(bucket.device))  # of None: changes nothing

    def _note_stream(self, bucket: Bucket) -> None:
        """Let the messages' stream wait for what the current one has to do by now."""
        if stream := self._streams.get(bucket.device):
            stream.wait_event(torch.cuda.current_stream(bucket.device).record_event())


def _on_gradient(me: weakref.ref, b: int, i: int, param: nn.Parameter) -> None:
    reducer = me()
    if reducer is not None and reducer._averages:
        with reducer._lock:
            reducer._gradient_is_ready(reducer.buckets[b], i)


def _result_of(future: torch.futures.Future, timeout: float) -> torch.Tensor:
    """Wait for what a communication hook has begun; torch's ``wait`` alone has no limit."""
    done = Event()
    future.add_done_callback(lambda _: done.set())
    if not done.wait(timeout):
        raise TimeoutError(
            f"the communication hook's future had no result after {timeout:g} s: has what was to "
            "set it failed, or has another rank not called its hook?"
        )
    return future.wait()


def _tensors_in(output: Any) -> list[torch.Tensor]:
    """Return the tensors of an output, of its dataclasses too."""
    if is_dataclass(output):
        output = [getattr(output, field.name) for field in fields(output)]
    if isinstance(output, (list, tuple, dict)):
        parts = output.values() if isinstance(output, dict) else output
        return [tensor for part in parts for tensor in _tensors_in(part)]
    return tensors_of(output)


def _let_go(handles: list, sender: Sender) -> None:
    for handle in handles:
        handle.remove()
    sender.stop()


@contextmanager
def naming_join() -> Iterator[None]:
    """Let an error that names a missing rank also name the most likely cause."""
    try:
        yield
    except ranks.PeerError as error:
        if not error.ranks:
            raise
        words = "if it had fewer batches than this rank, put the loop into `with model.join():`"
        raise ranks.PeerError(f"{error}; {words}", error.ranks) from None
