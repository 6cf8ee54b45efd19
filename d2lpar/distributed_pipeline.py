"""A pipeline between ranks: each has one stage, and sends on what it has computed.

The schedule is the one that ``pipeline`` runs in one process. A rank makes its own actions in their
order. What an action needs it waits for; what an action has made a thread sends, so that no stage
waits for the next one to be ready. Notebook 06 builds this file. Source: the schedules of
``torch.distributed.pipelining``.
"""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import nn

from .agreement import agree
from .parallel_loss import Count
from .pipeline import Losses, make_ticks, require_number, run_actions, split_rows
from .pipeline_schedules import (
    Action,
    PipelineSchedule,
    Span,
    one_f_one_b,
    own_actions,
    source,
    target,
)
from .point_to_point import receive, send
from .ranks import member_of
from .sender import Sender
from .stages import Stage
from .transport import group_like


class DistributedPipeline(nn.Module):
    """The stage of one rank; ``forward_backward`` on all ranks makes one training step's gradients.

    Rank r of the group has stage r. What ``Pipeline`` says of micro-batches, of the loss and of
    BatchNorm holds here, too. Where the group's backend is NCCL, which wants sends and receives in
    pairs, messages go through a gloo group of the pipeline's own.

    Args:
        stage: this rank's layers, on the device where they are to be computed.
        criterion: called with (output, target), on the last rank.
        num_microbatches: into how many parts a batch is cut.
        schedule: a function (num_stages, num_microbatches) -> ticks.
        group: the process group; None: all ranks.
        recompute: whether to keep only the stage's inputs, and make its forward pass twice.
        count: see ``DataParallelCriterion``.
        timeout: seconds to wait for a message; None: the group's.

    Attributes:
        timeline: None; a list here is given a ``Span`` for each of this rank's actions. Where the
            machine's clock is common, that of several ranks can be joined.
        peak_live: of how many micro-batches this stage kept activations at most, in the last batch.

    Raises:
        MismatchError: on every rank, when schedule or number of micro-batches differ.
        ValueError: see ``Pipeline``.
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
        self.stage, self.criterion, self.count = stage, criterion, count
        self.num_microbatches = num_microbatches
        if dist.get_backend(group) == dist.Backend.NCCL:
            group = group_like(group, dist.Backend.GLOO)
        self.group, self.timeout = group, timeout
        member, limit = member_of(group, timeout)
        self.ranks, self.number = member.transport.ranks, member.transport.member
        self.is_first, self.is_last = self.number == 0, self.number == len(self.ranks) - 1
        ticks = make_ticks(schedule, len(self.ranks), num_microbatches)
        digest = blake2b(repr(ticks).encode(), digest_size=4).hexdigest()
        name = getattr(schedule, "__name__", "schedule")
        plan = f"pipeline of {len(self.ranks)} stages, {name} ({digest}), {num_microbatches} parts"
        agree(member.transport, 0, plan, 0, limit)
        require_number(criterion, count)
        self.actions = own_actions(ticks, self.number)
        self.recompute = recompute
        self.timeline: list[Span] | None = None
        self.peak_live = 0
        self.senders = {"forward": Sender(), "backward": Sender()}  # so that none waits for both
        for sender in self.senders.values():
            weakref.finalize(self, sender.stop)

    @property
    def device(self) -> torch.device:
        """Where the stage's parameters are; the CPU if it has none."""
        return next((param.device for param in self.stage.parameters()), torch.device("cpu"))

    def forward_backward(
        self, X: torch.Tensor | None = None, y: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Add to the gradients of this stage; return the batch's loss on the last rank, else None.

        The first rank needs ``X``, the last ``y``; what others are given is not looked at.

        Raises:
            ValueError: see ``Pipeline.forward_backward``.
            PeerError: a neighbour did not send or receive in time, or is gone.
        """
        X_parts, y_parts = self._parts(X, y)
        stage, losses = Stage(self.stage, self.recompute), None
        if self.is_last:
            losses = Losses(self.criterion, self.count, y_parts)
            stage.finish = losses.of
        mail = Mail(self, X_parts, stage)
        run_actions(self.actions, {self.number: stage}, mail, self.timeline)
        wait_for(mail.sent)
        self.peak_live = stage.peak
        return losses.total if losses else None

    @torch.no_grad()
    def forward(self, X: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the model's output for ``X``, given on the first rank, on the last; else None."""
        X_parts, _ = self._parts(X, None, trains=False)
        mail, outputs = Mail(self, X_parts), []
        for i in range(self.num_microbatches):
            action = Action(self.number, i, "forward")
            output = self.stage(mail.receive(action))
            mail.send(action, output)
            if self.is_last:
                outputs.append(output)
        wait_for(mail.sent)
        return torch.cat(outputs) if self.is_last else None

    def receive(self, action: Action) -> torch.Tensor:
        """Wait for the result of ``action``, of another stage."""
        label = f"{action.kind} {action.microbatch}"
        src = self.ranks[action.stage]
        return receive(src, label, self.device, self.group, self.timeout)

    def send(self, action: Action, stage: int, result: torch.Tensor) -> Future:
        """Let a thread send the result of ``action`` to ``stage``; return its future."""
        label, wants_gradient = f"{action.kind} {action.microbatch}", result.requires_grad
        dst = self.ranks[stage]
        call = partial(send, result.detach(), dst, label, self.group, self.timeout, wants_gradient)
        context = copy_context()  # the thread counts bytes where we do
        return self.senders[action.kind].submit(context.run, call)

    def _parts(self, X, y, trains: bool = True):
        if self.is_first and X is None:
            raise ValueError("the first rank needs the inputs X")
        if self.is_last and trains and y is None:
            raise ValueError("the last rank needs the targets y")
        return split_rows(
            X if self.is_first else None, y if self.is_last else None, self.num_microbatches
        )


class Mail:
    """Mail between ranks: waits for what comes, and lets threads send."""

    def __init__(self, pipeline: DistributedPipeline, X_parts, stage: Stage | None = None):
        self.pipeline, self.X_parts, self.stage = pipeline, X_parts, stage
        self.sent: list[Future] = []

    def receive(self, action: Action) -> torch.Tensor | None:
        """Wait for what ``action`` works on: activations or a gradient, None if it needs none."""
        _, i, kind = action
        need = source(action, len(self.pipeline.ranks))
        if kind == "forward" and need is None:
            return self.X_parts[i].to(self.pipeline.device)
        if need is None or (kind == "backward" and not self.stage.live[i][1].requires_grad):
            return None
        return self.pipeline.receive(need)

    def send(self, action: Action, result: torch.Tensor | None) -> None:
        """Let a thread send the result of ``action`` to the rank that works on it, if any does."""
        there = target(action, len(self.pipeline.ranks))
        if there and result is not None:
            self.sent.append(self.pipeline.send(action, there.stage, result))


def wait_for(sent: list[Future]) -> None:
    """Wait until all is sent; raise the first error."""
    for future in sent:
        future.result()
