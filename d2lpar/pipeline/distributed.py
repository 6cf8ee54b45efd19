"""A pipeline between ranks: each has one stage, and sends on what it has computed.

The schedule is the one that ``pipeline`` runs in one process. A rank makes its own actions in their
order. What an action needs it waits for; what an action has made a thread sends, so that no stage
waits for another one to be ready. Notebook 06 builds this file. Source: the schedules of
``torch.distributed.pipelining``.
"""

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import nn

from ..data_parallel.loss import Count
from ..ranks.agreement import agree
from ..ranks.members import destroy, group_like, member_of
from ..ranks.point_to_point import Sender, check_send, receive, send
from .local import Losses, make_ticks, noting, on_device, require_number, run_actions, split_rows
from .schedules import (
    Action,
    PipelineSchedule,
    Span,
    check_order,
    one_f_one_b,
    own_actions,
    source,
    target,
)
from .stages import Stage, call


class DistributedPipeline(nn.Module):
    """The stage of one rank; ``forward_backward`` on all ranks makes one training step's gradients.

    Rank r of the group has stage r. What ``Pipeline`` says of micro-batches, of the loss and of
    BatchNorm holds here, too. Where the group's backend is NCCL, which wants sends and receives in
    pairs, messages go through a gloo group, one for each pipeline. On GPUs, call it in the default
    stream; not run on a GPU. Copy ``.stage``, not this.

    Args:
        stage: this rank's layers, on the device where they are to be computed.
        criterion: called with (output, target), on the last rank.
        num_microbatches: see ``Pipeline``.
        schedule: a function (num_stages, num_microbatches) -> ticks, in which each stage works on
            micro-batches in the order in which they are sent.
        group: the process group; None: all ranks.
        recompute: whether to keep only inputs and outputs, and to compute the rest again.
        count: see ``DataParallelCriterion``.
        timeout: seconds to wait for a message; None: the group's.

    Attributes:
        timeline: None; a list here is given a ``Span`` for each of this rank's actions. Where the
            machine's clock is common, that of several ranks can be joined.
        peak_live: of how many micro-batches this stage kept activations at most, in the last batch.

    Raises:
        MismatchError: on every rank, when schedule or number of micro-batches differ.
        ValueError: see ``Pipeline``; this rank is no member of ``group``.
        TypeError: ``stage`` is no module.
    """

    def __init__(
        self,
        stage: nn.Module,
        criterion: Callable,
        num_microbatches: int,
        schedule: PipelineSchedule = one_f_one_b,
        group: dist.ProcessGroup | None = None,
        recompute: bool = False,
        count: Count | None = None,
        timeout: float | None = None,
    ):
        super().__init__()
        member, limit = member_of(group, timeout)
        if dist.get_backend(group) == dist.Backend.NCCL:
            group = group_like(group, dist.Backend.GLOO)
            weakref.finalize(self, destroy, group)
            member, limit = member_of(group, timeout)
        self.group, self.timeout, self.transport = group, timeout, member.transport
        self.ranks, self.number = self.transport.ranks, self.transport.member
        self.is_first, self.is_last = self.number == 0, self.number == len(self.ranks) - 1
        ticks = self._agreed_ticks(schedule, num_microbatches, limit)
        require_number(criterion, count)
        if not isinstance(stage, nn.Module):
            text = f"stage must be this rank's module, not a {type(stage).__name__}"
            raise TypeError(f"{text}: such as cut(model, num_stages)[rank]")
        self.stage, self.count, self.num_microbatches = stage, count, num_microbatches
        self.criterion = on_device(criterion, self.device) if self.is_last else criterion
        self.actions = own_actions(ticks, self.number)
        self.recompute = recompute
        self.timeline: list[Span] | None = None
        self.peak_live = 0
        self._calls = 0
        self._sender = Sender()
        weakref.finalize(self, self._sender.stop)

    @property
    def device(self) -> torch.device:
        """Where the stage's parameters are; the CPU if it has none."""
        return next((param.device for param in self.stage.parameters()), torch.device("cpu"))

    def forward_backward(
        self, X: torch.Tensor | None = None, y: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Add to the gradients of this stage; return the batch's loss on the last rank, else None.

        The first rank needs ``X``, the last ``y``; what others are given is not looked at. After an
        error in the middle the group is of no more use: nobody knows which messages are under way.

        Raises:
            ValueError: see ``Pipeline.forward_backward``.
            PeerError: a neighbour did not send or receive in time, or is gone.
            MismatchError: a neighbour works on another batch, or evaluates.
        """
        self._calls += 1
        X_parts, y_parts = self._parts(X, y)
        stage, losses = Stage(self.stage, self.recompute), None
        if self.is_last:
            losses = Losses(self.criterion, self.count, y_parts)
            stage.finish = losses.of
        with self._mail("batch", X_parts, stage) as mail:
            run_actions(self.actions, {self.number: stage}, mail, self.timeline)
        self.peak_live = stage.peak
        return losses.total if losses else None

    @torch.no_grad()
    def forward(self, X: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the model's output for ``X``, given on the first rank, on the last; else None.

        Raises what ``forward_backward`` raises.
        """
        self._calls += 1
        if self.is_first and X is None:
            raise ValueError("the first rank needs the inputs X")
        X_parts = X.tensor_split(self.num_microbatches) if self.is_first else None
        outputs = []
        with self._mail("evaluation", X_parts) as mail:
            for i in range(self.num_microbatches):
                action = Action(self.number, i, "forward")
                output = mail.receive(action)
                if i == 0 or len(output):  # else no row was left
                    with noting(action):
                        output = call(self.stage, output)
                    outputs.append(output)
                mail.send(action, output)
        return torch.cat(outputs) if self.is_last else None

    def _agreed_ticks(self, schedule, num_microbatches, limit: float) -> list[list[Action]]:
        """Make the ticks, after a look whether all ranks would make the same."""
        error, p = None, len(self.ranks)
        try:
            ticks = make_ticks(schedule, p, num_microbatches)
            check_order(ticks, p)
            digest = blake2b(repr(ticks).encode(), digest_size=4).hexdigest()
        except (TypeError, ValueError) as wrong:
            error, digest = wrong, "which is none"
        name = getattr(schedule, "__name__", "schedule")
        plan = f"pipeline of {p} stages, {name} ({digest}), {num_microbatches!r} micro-batches"
        with self.transport.call(plan):
            agree(self.transport, 0, plan, 0, limit)
        if error:
            raise error
        return ticks

    def _parts(self, X, y):
        if self.is_first and X is None:
            raise ValueError("the first rank needs the inputs X")
        if self.is_last and y is None:
            raise ValueError("the last rank needs the targets y")
        return split_rows(
            X if self.is_first else None, y if self.is_last else None, self.num_microbatches
        )

    @contextmanager
    def _mail(self, kind: str, X_parts, stage: Stage | None = None) -> Iterator["Mail"]:
        """Wait in the end until all is sent; on an error see that the group is not used again."""
        mail = Mail(self, f"of {kind} {self._calls}", X_parts, stage)
        try:
            yield mail
            for future in mail.sent:  # each has the limit of its message
                future.result()
        except BaseException as error:
            errors = [future.exception() for future in mail.sent if future.done()]
            first = next(filter(None, errors), error)  # that of the thread explains ours
            self.transport.give_up(first)
            if first is not error:
                raise first from error
            raise

    def receive(self, action: Action, words: str) -> torch.Tensor:
        """Wait for the result of ``action``, of another stage; ``words`` tell the call."""
        label, src = f"{action.kind} {action.microbatch} {words}", self.ranks[action.stage]
        return receive(src, label, self.device, self.group, self.timeout)

    def send(self, action: Action, words: str, stage: int, result: torch.Tensor) -> Future:
        """Let a thread send the result of ``action`` to ``stage``; return its future."""
        label, dst = f"{action.kind} {action.microbatch} {words}", self.ranks[stage]
        message, wants_gradient = result.detach(), result.requires_grad
        check_send(message, dst, label)
        context = copy_context()  # the thread counts bytes where we do
        options = self.group, self.timeout, wants_gradient
        return self._sender.submit(context.run, send, message, dst, label, *options)


class Mail:
    """Mail between ranks: waits for what comes, and lets a thread send."""

    def __init__(self, pipeline: DistributedPipeline, words: str, X_parts, stage: Stage | None):
        self.pipeline, self.words, self.X_parts, self.stage = pipeline, words, X_parts, stage
        self.sent: list[Future] = []

    def receive(self, action: Action) -> torch.Tensor | None:
        """Wait for what ``action`` works on: activations or a gradient, None if it needs none."""
        _, i, kind = action
        need = source(action, len(self.pipeline.ranks))
        if kind == "forward" and need is None:
            return self.X_parts[i].to(self.pipeline.device)
        if need is None or (kind == "backward" and not self.stage.live[i][1].requires_grad):
            return None
        return self.pipeline.receive(need, self.words)

    def send(self, action: Action, result: torch.Tensor | None) -> None:
        """Let a thread send the result of ``action`` to the rank that works on it, if any does."""
        there = target(action, len(self.pipeline.ranks))
        if there and result is not None:
            self.sent.append(self.pipeline.send(action, self.words, there.stage, result))
