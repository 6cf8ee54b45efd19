"""A model split over devices by layers, plainly and as a pipeline.

In ``SplitModel`` only one device works at a time. In ``Pipeline`` GPUs can work at the
same time, since their calls return at once. All work is in the default streams, so a
copy between GPUs waits for what is queued on both; torchgpipe gives copies their own
streams. Not run on a GPU. Notebook 13 builds this file. Source: Huang et al., GPipe
(2019), and Kim et al., "torchgpipe" (2020).
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..data_parallel import position
from ..devices import check_devices, to_device
from .counts import Count, find_count, shares
from .schedules import (
    Action,
    PipelineSchedule,
    Span,
    check_pipeline,
    one_f_one_b,
    target,
)
from .stages import Stage, modules_of, one_tensor


class SplitModel(nn.Module):
    """A model whose stages are moved to several devices: the plain split."""

    def __init__(self, stages: Sequence[nn.Module], devices: Sequence[torch.device]):
        super().__init__()
        self.devices, stages = check_devices(devices), modules_of(stages, "stages")
        if len(stages) != len(self.devices):
            raise ValueError(
                f"there are {len(stages)} stages for {len(self.devices)} devices"
            )
        self.stages = nn.ModuleList(
            stage.to(device) for stage, device in zip(stages, self.devices, strict=True)
        )

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Return the last stage's output, on the last device; gradients flow back."""
        src = position(X.device, self.devices)
        for s, (stage, device) in enumerate(
            zip(self.stages, self.devices, strict=True)
        ):
            arrived = to_device(X, device, src, s)
            X = one_tensor(stage(arrived))
            src = s
        return X


class Pipeline(SplitModel):
    """The same model, trained in micro-batches that follow a schedule.

    ``forward_backward`` does what ``criterion(model(X), y).backward()`` does with the
    whole model, up to rounding, also for a criterion that ignores targets or weighs
    classes. BatchNorm is the exception: in training it normalises each micro-batch with
    its own mean and variance, and updates its running statistics m times. The call
    ``pipeline(X)`` is the plain split, for evaluation. Set ``timeline`` to a list, and
    each action adds a ``Span``: on GPUs that is when the calls were made, not when the
    work was done. ``peak_live`` is the largest number of micro-batches whose
    activations each stage kept at once, in the last batch.

    Args:
        stages: one per device, as ``cut`` returns them, from tensor to tensor.
        devices: where the stages are moved.
        criterion: called with (output, target), on the last device.
        num_microbatches: in a batch; fewer if it has fewer rows.
        schedule: such as ``gpipe``; any other is checked, see ``check_pipeline``.
        recompute: whether a stage keeps only inputs and outputs.
        count: see ``counts.find_count``.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        devices: Sequence[torch.device],
        criterion: Callable,
        num_microbatches: int,
        schedule: PipelineSchedule = one_f_one_b,
        recompute: bool = False,
        count: Count | None = None,
    ):
        super().__init__(stages, devices)
        check_criterion(criterion, count)
        self.criterion = on_device(criterion, self.devices[-1])
        self.num_microbatches, self.recompute, self.count = (
            num_microbatches,
            recompute,
            count,
        )
        self.ticks = schedule(len(self.stages), num_microbatches)
        check_pipeline(self.ticks, len(self.stages), num_microbatches)
        self.timeline: list[Span] | None = None
        self.peak_live: list[int] = []

    def forward_backward(self, X: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add to the gradients of all parameters; return the loss, detached."""
        check_batch(X, y)
        mail = LocalMail(X.tensor_split(self.num_microbatches), self.devices)
        losses = Losses(
            self.criterion, self.count, y.tensor_split(self.num_microbatches)
        )
        stages = [Stage(stage, self.recompute) for stage in self.stages]
        stages[-1].finish = losses.of
        run_actions(chain(*self.ticks), stages, mail, self.timeline)
        self.peak_live = [stage.peak for stage in stages]
        return losses.total


def run_actions(
    actions: Iterable[Action],
    stages: Sequence[Stage] | Mapping[int, Stage],
    mail: Any,
    timeline: list[Span] | None = None,
) -> None:
    """Make ``actions`` in turn; ``mail`` brings what they need, takes results."""
    for action in actions:
        stage, arrived = stages[action.stage], mail.receive(action)
        run = stage.forward if action.kind == "forward" else stage.backward
        begin = time.perf_counter()
        try:
            result = run(action.microbatch, arrived)
        except Exception as error:
            error.add_note(f"This was the pipeline's {action}.")
            raise
        if timeline is not None:
            timeline.append(Span(*action, begin, time.perf_counter()))
        mail.send(action, result)


class LocalMail:
    """Mail between stages of one process: a result moves to the next device."""

    def __init__(
        self, X_parts: Sequence[torch.Tensor], devices: Sequence[torch.device]
    ):
        self.X_parts, self.devices = X_parts, devices
        self.arrived: dict[Action, torch.Tensor] = {}  # for actions to come

    def receive(self, action: Action) -> torch.Tensor | None:
        """Return what ``action`` works on: activations, a gradient, or None."""
        if action.stage == 0 and action.kind == "forward":
            X = self.X_parts[action.microbatch]
            return to_device(X, self.devices[0], position(X.device, self.devices), 0)
        return self.arrived.pop(action, None)

    def send(self, action: Action, result: torch.Tensor | None) -> None:
        """Move the result of ``action`` to the stage that works on it, if any."""
        there = target(action, len(self.devices))
        if there and result is not None:
            device = self.devices[there.stage]
            arrived = to_device(result.detach(), device, action.stage, there.stage)
            self.arrived[there] = arrived.requires_grad_(result.requires_grad)


class Losses:
    """The loss of each micro-batch, weighted to add up to that of the batch.

    A mean is weighted by the micro-batch's share of the whole mean's divisor, usually
    of its rows.
    """

    def __init__(
        self, criterion: Callable, count: Count | None, y_parts: Sequence[torch.Tensor]
    ):
        self.y_parts = y_parts
        self.criterion, self.weights = shares(
            criterion, count, [(y,) for y in y_parts if len(y)]
        )
        # of the batch, detached; of 16-bit losses it is a float32
        self.total = torch.zeros(())

    def of(self, i: int, output: torch.Tensor) -> torch.Tensor:
        """Return the weighted loss of micro-batch ``i``, whose output this is."""
        y = self.y_parts[i].to(output.device)
        check_rows(i, output, y)
        if i not in self.weights:  # it has no rows, or all its targets are ignored
            return output.new_zeros(())
        loss = self.criterion(output, y) * self.weights[i]
        check_number(loss)
        self.total = self.total + loss.detach()
        return loss


def on_device(criterion: Callable, device: torch.device) -> Callable:
    """Move a criterion that is a module: it may have class weights."""
    return criterion.to(device) if isinstance(criterion, nn.Module) else criterion


def check_criterion(criterion: Callable, count: Count | None) -> None:
    """Refuse losses of micro-batches that do not add up to the batch's."""
    if find_count(criterion, count) is None and criterion.reduction == "none":
        raise ValueError(
            'a criterion with reduction="none" returns no number: use "mean" or "sum"'
        )


def check_rows(i: int, output: torch.Tensor, y: torch.Tensor) -> None:
    """Refuse an output of micro-batch ``i`` without a row for each target."""
    if output.dim() and len(output) != len(y):
        raise ValueError(
            f"micro-batch {i} has {len(output)} rows of outputs, but {len(y)} targets:"
            " X and y must be of one batch, and every stage must keep the rows"
        )


def check_number(loss: torch.Tensor) -> None:
    """Raise ValueError for a loss that is no number."""
    if loss.dim():
        raise ValueError(
            f"the criterion returns shape {list(loss.shape)}, and no number"
        )


def check_batch(X: torch.Tensor | None, y: torch.Tensor | None) -> None:
    """Refuse a batch that cannot be cut; a rank may have only a part of it."""
    if X is not None and y is not None and X.shape[:1] != y.shape[:1]:
        raise ValueError(
            f"X has shape {list(X.shape)}, but y has shape {list(y.shape)}"
        )
    for rows in (X, y):
        if rows is not None and not (rows.dim() and len(rows)):
            raise ValueError(f"a batch of shape {list(rows.shape)} has no rows to cut")
    if X is not None and X.requires_grad:
        raise ValueError(
            "X requires gradients, and they would end at the first stage: put what made"
            " X into that stage, or pass X.detach()"
        )
