"""A pipeline between ranks: each has one stage, and sends on what it has computed.

Each rank runs its own actions in order; a thread sends the results, so no stage waits
for a receiver. Notebook 13 uses this file. Source: the schedules of
``torch.distributed.pipelining``.
"""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import nn

from .. import ranks
from ..ranks._old import receive_labelled, send_labelled
from ..ranks.transport import check_group, group_of
from .counts import Count
from .local import Losses, check_batch, check_criterion, on_device, run_actions
from .schedules import (
    Action,
    PipelineSchedule,
    Span,
    check_order,
    check_pipeline,
    one_f_one_b,
    own_actions,
    source,
    target,
)
from .stages import Stage, call


class DistributedPipeline(nn.Module):
    """The stage of one rank; ``forward_backward`` on all makes one step's gradients.

    Rank r of the group has stage r: ``stage`` is that module, on the device that
    computes it. What ``Pipeline`` says of micro-batches, of the loss and of BatchNorm,
    and its other arguments and attributes, holds here, too. All ranks need the same
    schedule and number of micro-batches, or each raises MismatchError; neighbours must
    work on micro-batches in the same order. ``timeout`` is how many seconds to wait for
    a message; None is the group's. If the group's backend is NCCL, which wants sends
    and receives in pairs, messages go through a gloo group. On GPUs, call it in the
    default stream; not run on a GPU. Copy ``.stage``, not this.
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
        check_group(group)
        if dist.get_backend(group) == dist.Backend.NCCL:
            members = dist.get_process_group_ranks(group or dist.group.WORLD)
            group = dist.new_group(members, backend=dist.Backend.GLOO)
        check_criterion(criterion, count)
        if not isinstance(stage, nn.Module):
            raise TypeError(
                "stage must be one module, such as cut(model, num_stages)[rank]"
            )
        self.stage, self.group, self.timeout = stage, group, timeout
        self.number, num_stages = dist.get_rank(group), dist.get_world_size(group)
        self.is_first, self.is_last = self.number == 0, self.number == num_stages - 1
        self.criterion = (
            on_device(criterion, self.device) if self.is_last else criterion
        )
        ticks = agreed_ticks(schedule, num_microbatches, group, timeout)
        self.actions = own_actions(ticks, self.number)
        self.num_microbatches, self.recompute, self.count = (
            num_microbatches,
            recompute,
            count,
        )
        self.timeline: list[Span] | None = None
        self.peak_live = 0
        self._calls = 0
        self._sender = ranks.Sender()
        weakref.finalize(self, self._sender.stop)

    @property
    def device(self) -> torch.device:
        """Where the stage's parameters are; the CPU if it has none."""
        return next(
            (param.device for param in self.stage.parameters()), torch.device("cpu")
        )

    def forward_backward(
        self, X: torch.Tensor | None = None, y: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Add to the stage's gradients; return the loss on the last rank only.

        The first rank needs ``X``, the last ``y``; what others are given is not looked
        at. After an error in the middle (PeerError or MismatchError when a neighbour is
        late, gone or at another call) the group can no longer be used: nobody knows
        which messages are under way.
        """
        # also if it is refused: the other ranks may have begun with this batch
        self._calls += 1
        X, y = X if self.is_first else None, y if self.is_last else None
        if self.is_last and y is None:
            raise ValueError("the last rank needs the targets y")
        check_batch(X, y)
        stage, losses = Stage(self.stage, self.recompute), None
        if self.is_last:
            losses = Losses(
                self.criterion, self.count, y.tensor_split(self.num_microbatches)
            )
            stage.finish = losses.of
        self._run(self.actions, stage, f"batch {self._calls}", X, self.timeline)
        self.peak_live = stage.peak
        return losses.total if losses else None

    @torch.no_grad()
    def forward(self, X: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the model's output on the last rank; ``X`` is given on the first."""
        self._calls += 1
        stage = Evaluation(self.stage)
        actions = [
            Action(self.number, i, "forward") for i in range(self.num_microbatches)
        ]
        self._run(actions, stage, f"evaluation {self._calls}", X)
        return torch.cat(stage.outputs) if self.is_last else None

    def _run(self, actions, stage, purpose, X, timeline=None) -> None:
        """Make actions, and wait until all is sent; an error breaks the group."""
        if self.is_first and X is None:
            raise ValueError("the first rank needs the inputs X")
        X_parts = X.tensor_split(self.num_microbatches) if self.is_first else None
        mail = Mail(
            self.group, self.timeout, self._sender, self.device, purpose, X_parts
        )
        try:
            run_actions(actions, {self.number: stage}, mail, timeline)
            for future in mail.sent:  # each has the limit of its message
                future.result()
        except BaseException as error:
            errors = [future.exception() for future in mail.sent if future.done()]
            # that of the thread explains ours
            first = next(filter(None, errors), error)
            group_of(self.group).broken = f"{type(first).__name__}: {first}"
            if first is not error:
                raise first from error
            raise


class Evaluation:
    """A stage that only runs forward, and keeps its outputs."""

    def __init__(self, module: nn.Module):
        self.module, self.outputs = module, []

    def forward(self, i: int, X: torch.Tensor) -> torch.Tensor:
        """Return micro-batch ``i``'s output; later ones without rows are passed on."""
        if i == 0 or len(X):
            X = call(self.module, X)
            self.outputs.append(X)
        return X


class Mail:
    """Mail between ranks; ``purpose``, as "batch 3", tells one call from others."""

    def __init__(
        self, group, timeout, sender: ranks.Sender, device, purpose: str, X_parts=None
    ):
        self.group, self.timeout, self.sender = group, timeout, sender
        self.device, self.purpose, self.X_parts = device, purpose, X_parts
        self.world_ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.sent: list[Future] = []
        # backward passes to which a gradient will come
        self.awaited: set[Action] = set()

    def receive(self, action: Action) -> torch.Tensor | None:
        """Wait for what ``action`` works on, if any: activations or a gradient."""
        need = source(action, len(self.world_ranks))
        if action.kind == "forward" and need is None:
            return self.X_parts[action.microbatch].to(self.device)
        if action.kind == "backward" and action not in self.awaited:
            return None
        src = self.world_ranks[need.stage]
        where = self.label(need), self.device, self.group, self.timeout
        return receive_labelled(src, *where)

    def send(self, action: Action, result: torch.Tensor | None) -> None:
        """Let a thread send ``action``'s result to the rank that needs it, if any."""
        there = target(action, len(self.world_ranks))
        if there is None or result is None:
            return
        if action.kind == "forward" and result.requires_grad:
            self.awaited.add(action._replace(kind="backward"))
        message, dst, label = (
            result.detach(),
            self.world_ranks[there.stage],
            self.label(action),
        )
        arguments = message, dst, label, self.group, self.timeout, result.requires_grad
        context = copy_context()  # the thread counts bytes where we do
        self.sent.append(self.sender.submit(context.run, send_labelled, *arguments))

    def label(self, action: Action) -> str:
        """Return the label of the message with the result of ``action``."""
        return f"{action.kind} {action.microbatch} of {self.purpose}"


def agreed_ticks(schedule, num_microbatches, group, timeout) -> list[list[Action]]:
    """Make the ticks; raise MismatchError on all ranks unless all make the same."""
    num_stages = dist.get_world_size(group)
    ticks, problem = [], None
    try:
        ticks = schedule(num_stages, num_microbatches)
        check_pipeline(ticks, num_stages, num_microbatches)
        check_order(ticks, num_stages)
    except (TypeError, ValueError) as error:  # the others must not wait for this rank
        problem = error
    digest = blake2b(repr(problem or ticks).encode(), digest_size=4).hexdigest()
    name = getattr(schedule, "__name__", "schedule")
    plan = (
        f"pipeline of {num_stages} stages, {name} ({digest}), {num_microbatches}"
        " micro-batches"
    )
    ranks.agree(f"{plan}: {problem}" if problem else plan, group, timeout)
    if problem:
        raise problem
    return ticks
