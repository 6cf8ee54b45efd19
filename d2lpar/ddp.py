"""DistributedDataParallel: a replica a rank, and gradients averaged while backward still runs.

Above stands the naive version: one allreduce a parameter, once backward is over. The other one
copies gradients into flat *buckets*, in the order in which backward is expected to make them (the
reverse of the parameters'), and hands each bucket to a communication thread as soon as it is full.
Notebook 05 builds this file. Source: Li et al., "PyTorch Distributed: Experiences on Accelerating
Data Parallel Training" (VLDB 2020), and ``torch.nn.parallel.DistributedDataParallel``.
"""

import contextvars
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from . import ranks
from .buckets import Bucket, make_buckets
from .sender import Sender
from .transport import group_like


class NaiveDistributedDataParallel(nn.Module):
    """The replica of a module on one rank; call ``average_gradients`` after each backward.

    Raises what ``share_state`` raises.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module, self.group = module, group
        share_state(module, group)

    def forward(self, *args, **kwargs):
        """Call the module."""
        return self.module(*args, **kwargs)

    def average_gradients(self) -> None:
        """Replace each gradient in place by the mean over the ranks; a missing one counts as 0."""
        for param in self.module.parameters():
            if param.requires_grad:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                ranks.allreduce(param.grad, op="mean", group=self.group)


def share_state(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Check that all ranks have the same module, and copy rank 0's state into it in place.

    The state is all parameters and buffers. Rank 0 is the first rank of ``group``.

    Raises:
        ValueError: on every rank, naming the first parameter or buffer that differs.
    """
    state = [*module.named_parameters(), *module.named_buffers()]
    mine = "".join(f"\n{name}, {_kind(tensor)}" for name, tensor in state)
    text = torch.frombuffer(bytearray(mine.encode() + b"\0"), dtype=torch.uint8)
    texts = bytes(ranks.all_gather(text, group).tolist()).decode().split("\0")[:-1]
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    first = texts[0].split("\n")
    for rank, other in zip(members, texts, strict=True):
        if other != texts[0]:
            other = other.split("\n")
            i = next(i for i in range(len(first) + 1) if first[i : i + 1] != other[i : i + 1])
            kinds = [(lines[i : i + 1] or ["nothing more"])[0] for lines in (first, other)]
            raise ValueError(
                f"the ranks have different modules: number {i} of the parameters and buffers is "
                f"{kinds[0]} on rank {members[0]}, but {kinds[1]} on rank {rank}"
            )
    for _, tensor in state:
        ranks.broadcast(tensor.detach(), members[0], group)


def _kind(tensor: torch.Tensor) -> str:
    frozen = " (frozen)" * (isinstance(tensor, nn.Parameter) and not tensor.requires_grad)
    strides = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{strides}{frozen}"


class _Plans(NamedTuple):
    """What one rank, or any of several, is about to do inside ``join``."""

    present: bool  # it has a batch
    averages: bool
    shares_buffers: bool


class DistributedDataParallel(nn.Module):
    """The replica of a module on one rank; after ``backward`` gradients are the mean over ranks.

    Use it as ``torch.nn.parallel.DistributedDataParallel``: it copies rank 0's parameters and
    buffers to all at construction, and its buffers again before a forward pass that follows one in
    training mode. Parameters may be frozen, tied, unused, and used by some ranks only; one that no
    rank has used keeps its ``.grad`` of None. A gradient is a view of its bucket, and is written
    over in the next backward pass, as with torch's ``gradient_as_bucket_view``.

    Not as in torch: every backward pass through the parameters averages, also the second one of a
    forward pass, and one of ``.module`` alone. Checkpointing needs ``use_reentrant=False``. Hooks
    on gradients must be registered before, since a gradient may be sent as soon as it is there.
    Copy ``.module``, not this. Each object takes a process group: the first three get lanes.

    Args:
        module: of the same parameters and buffers on all ranks.
        group: the process group; None: all ranks. The members of a smaller one must be members of
            equally many groups (``torch.distributed.new_group`` would wait for ever).
        bucket_cap_mb: the size of a bucket in MiB; a larger parameter has one of its own.
        weight: "equal": the mean over ranks, as in torch. "rows": each rank counts by its rows
            (dimension 0 of forward's first tensor), which makes of a loss that is a mean over the
            rank's rows the mean over all rows. The rows of several forward passes add up, also
            those of one that has gradients enabled and then no backward pass.

    Raises:
        ValueError: on every rank, when the modules differ, naming the first difference; no
            parameter requires gradients; an argument is out of range; from ``backward``, when a
            gradient is sparse.
        MismatchError, PeerError: see ``ranks.allreduce``; from ``backward`` too.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        weight: str = "equal",
    ):
        super().__init__()
        if weight not in ("equal", "rows"):
            raise ValueError(f'weight must be "equal" or "rows", not {weight!r}')
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb must be positive, not {bucket_cap_mb!r}")
        self.module, self.group, self._by_rows = module, group, weight == "rows"
        share_state(module, group)
        if len(set(ranks.all_gather(torch.tensor(self._by_rows), group).tolist())) > 1:
            raise ValueError(f"weight is {weight!r} on this rank, but not on all")
        params = [param for param in module.parameters() if param.requires_grad]
        if not params:
            raise ValueError("no parameter of the module requires gradients: nothing to average")
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.buckets = make_buckets(params, bucket_cap_mb)
        self.timeline: list | None = None  # a list here is given (bucket, begin, end) in seconds
        self._sender = Sender()
        weakref.finalize(self, self._sender.stop)
        # A group of its own: the order of its messages is that of the buckets, whatever the main
        # thread sends meanwhile.
        self._own_group = group_like(group)
        ranks.barrier(self._own_group)
        self.allreduce = ranks.allreduce  # what the thread calls: put a slower one here to compare
        self._syncs = self._will_sync = True  # False inside no_sync, and for its forward passes
        self._joins = self._shrinks = False  # inside join; and dividing by those that are left
        self._active = self.ranks  # those that have a batch: inside join they become fewer
        self._stale = False  # whether a forward pass may have changed the buffers
        self._rows = 0  # of the forward passes since the last averaging, …
        self._counts_anew = True  # … which ends with the first forward pass after it
        self._context = contextvars.copy_context()
        self._begin()
        me = weakref.ref(self)  # a hook lives as long as its parameter, and must not hold more
        for b, bucket in enumerate(self.buckets):
            for i, param in enumerate(bucket.params):
                param.register_post_accumulate_grad_hook(partial(_on_gradient, me, b, i))

    def forward(self, *args, **kwargs):
        """Call the module; before that, the ranks share their buffers where they may differ."""
        grad_enabled = torch.is_grad_enabled()
        if grad_enabled and self._joins:
            self._roll_call(present=True)
        if self._syncs and self._stale:
            self._share_buffers()
        self._stale = self._stale or self.training
        if grad_enabled:
            if self._expects_end:  # the last backward pass was broken off by an error
                wait(self._futures)  # what it has sent is still read, until allreduce's timeout
                self._begin()
                self._counts_anew = True
            self._will_sync = self._syncs
            if self._by_rows:
                self._rows = _num_rows(args, kwargs) + (0 if self._counts_anew else self._rows)
                self._counts_anew = False
        self._context = contextvars.copy_context()  # the thread counts bytes where forward does
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let each rank add up gradients alone, for the forward passes that are made inside.

        The first backward pass of a forward made outside then averages the sums, as in torch.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    @contextmanager
    def join(self, divide_by_initial_world_size: bool = True) -> Iterator[None]:
        """Let ranks have different numbers of batches, for the loop that is inside.

        A rank that has left the loop goes on to send zeros until all have left; then all take the
        parameters and buffers of a rank that was among the last. The sum of gradients is divided by
        the number of all ranks, or, if ``divide_by_initial_world_size`` is False, by that of the
        ranks that still have batches. With ``weight="rows"`` it is always divided by the rows.

        Every forward pass with gradients enabled must be followed by its backward pass, and one
        without them is for modules without buffers only, or for ``.module``.
        """
        self._joins, self._shrinks = True, not divide_by_initial_world_size
        try:
            yield
            while (plans := self._roll_call(present=False)).present:
                if plans.shares_buffers:
                    self._share_buffers()
                if plans.averages:
                    self._finish(absent=True)
            for tensor in [*self.module.parameters(), *self.module.buffers()]:
                ranks.broadcast(tensor.detach(), self._active[0], self.group)
            self._stale = False
        finally:
            self._joins, self._shrinks, self._active = False, False, self.ranks

    def _roll_call(self, present: bool) -> _Plans:
        """Learn who has a batch, and what those who have one are about to do."""
        syncs = present and self._syncs
        mine = _Plans(present, syncs, syncs and self._stale)
        plans = ranks.all_gather(torch.tensor([mine]), self.group)
        active = [
            r for r, has_batch in zip(self.ranks, plans[:, 0].tolist(), strict=True) if has_batch
        ]
        self._active = active or self._active
        return _Plans(*plans.any(dim=0).tolist())

    def _share_buffers(self) -> None:
        """Give everyone the buffers of the first rank that has a batch; one message a dtype."""
        buffers = list(self.module.buffers())
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            same = [buffer.detach() for buffer in buffers if buffer.dtype == dtype]
            flat = torch.cat([buffer.reshape(-1) for buffer in same])
            ranks.broadcast(flat, self._active[0], self.group)
            parts = flat.split([buffer.numel() for buffer in same])
            for buffer, part in zip(same, parts, strict=True):
                buffer.copy_(part.view_as(buffer))
        self._stale = False

    def _begin(self) -> None:
        """Make ready for the next backward pass."""
        self._futures: list[Future] = []  # of the buckets that are under way
        self._expects_end = False
        for bucket in self.buckets:
            bucket.ready.clear()

    @property
    def _weight(self) -> float:
        if self._by_rows:
            return self._rows
        return 1 / len(self._active if self._shrinks else self.ranks)

    def _gradient_is_ready(self, bucket: Bucket, i: int) -> None:
        if not self._expects_end:
            self._expects_end = True
            # torch has no public way to learn that backward is over; its own one is private.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if i in bucket.ready:
            raise RuntimeError(
                "a gradient was added to twice in one backward pass, and may have been sent in "
                "between: checkpoint with use_reentrant=False"
            )
        bucket.ready.add(i)
        while len(self._futures) < len(self.buckets) and self._next_bucket().is_full:
            self._send(self._next_bucket())

    def _next_bucket(self) -> Bucket:
        return self.buckets[len(self._futures)]

    def _send(self, bucket: Bucket, absent: bool = False) -> None:
        """Fill a bucket, and hand it to the communication thread."""
        bucket.fill(0 if absent else self._weight)
        if bucket is self.buckets[-1]:
            params = [param for b in self.buckets for param in b.params]
            used = [param.grad is not None and not absent for param in params]
            rows = 0 if absent else self._rows
            bucket.manifest.copy_(torch.tensor([*used, rows], dtype=bucket.dtype))
        self._futures.append(self._sender.submit(self._context.run, self._reduce, bucket))

    def _reduce(self, bucket: Bucket) -> None:
        begin = time.perf_counter()
        self.allreduce(bucket.flat, group=self._own_group)
        if self.timeline is not None:
            self.timeline.append((self.buckets.index(bucket), begin, time.perf_counter()))

    @torch.no_grad()
    def _finish(self, absent: bool = False) -> None:
        """Send what is left, wait for all, and hand out the gradients, unless we are ``absent``."""
        while len(self._futures) < len(self.buckets):
            self._send(self._next_bucket(), absent)  # not full: some are unused on this rank
        for future in self._futures:
            future.result()
        *users, rows = self.buckets[-1].manifest.tolist()
        if self._by_rows and rows:
            for bucket in self.buckets:
                bucket.flat.div_(rows.real)
        self._counts_anew = True  # the rows stay: one forward pass may have two backward passes
        self._begin()
        places = [(bucket, i) for bucket in self.buckets for i in range(len(bucket.params))]
        for (bucket, i), count in zip(places, users, strict=True):
            if count and not absent:
                bucket.empty(i)


def _on_gradient(me: weakref.ref, b: int, i: int, param: nn.Parameter) -> None:
    ddp = me()
    if ddp is not None and ddp._will_sync:
        ddp._gradient_is_ready(ddp.buckets[b], i)


def _num_rows(args: tuple, kwargs: dict) -> int:
    """Return dimension 0 of the first tensor that forward is given."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim():
            return len(value)
    raise ValueError('weight="rows" needs a tensor with rows among the arguments of forward')
