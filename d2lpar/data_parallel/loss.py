"""A loss computed in parts, on several devices, and put together as if on one.

Each part's mean is weighted by the number that it was divided by. Notebook 06 builds
this file. Source: H. Zhang's PyTorch-Encoding, which takes the plain mean of the parts'
means.
"""

from collections.abc import Callable, Sequence
from copy import copy
from math import nan
from typing import Any

import torch
from torch import nn

from ..devices import check_devices, to_device
from ..guards import checked
from .replicas import parallel_apply, replicate, widened
from .scattering import num_rows, scatter

# targets -> the number that the mean over them is divided by
Count = Callable[..., float]

# Losses of torch.nn whose mean counts every element of the target alike.
PER_ELEMENT = (
    nn.L1Loss,
    nn.MSELoss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.SoftMarginLoss,
    nn.HingeEmbeddingLoss,
    nn.KLDivLoss,
    nn.PoissonNLLLoss,
    nn.GaussianNLLLoss,
    nn.MultiMarginLoss,
    nn.MultiLabelMarginLoss,
    nn.MultiLabelSoftMarginLoss,
)
PER_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)  # may weigh classes, or ignore one


def check_outputs(self: "DataParallelCriterion", outputs, targets) -> None:
    """Refuse all but one output per device, with as many rows as its targets."""
    most, k = len(self.devices) or 1, len(outputs)
    if isinstance(outputs, torch.Tensor) or not 1 <= k <= most:
        found = "a tensor" if isinstance(outputs, torch.Tensor) else f"{k} outputs"
        raise ValueError(
            f"outputs must be the list that DataParallelModel returns, for {most} "
            f"device{'s' * (most > 1)}, not {found}"
        )
    rows = num_rows(targets, self.dim) if k > 1 else None
    if rows is not None:
        few, more = divmod(rows, k)
        for i, output in enumerate(outputs):
            rows = few + (i < more)
            if isinstance(output, torch.Tensor) and num_rows(output, self.dim) != rows:
                found = num_rows(output, self.dim)
                raise ValueError(
                    f"output {i} has {found} rows, but its part of the targets {rows}"
                )


class DataParallelCriterion(nn.Module):
    """A loss of outputs on several devices: the same as one device would compute.

    Called with the outputs of ``DataParallelModel`` and the whole batch's targets, it
    computes each part where its output is, and puts them together on ``devices[0]`` by
    ``criterion.reduction``: "none" joins them, "sum" adds them, "mean" weights each by
    its share of the number that the mean is divided by. That is known of most torch
    losses; for others pass ``count``: target, … -> that number. Without ``devices``,
    the batch is one output. The rows are dimension ``dim``.
    """

    def __init__(
        self,
        criterion: Callable,
        devices: Sequence,
        count: Count | None = None,
        dim: int = 0,
    ):
        super().__init__()
        find_count(criterion, count)
        self.criterion, self.dim, self.count = criterion, dim, count
        self.devices = check_devices(devices) if devices else []

    @checked(check_outputs)
    def forward(self, outputs: Sequence[Any], *targets: Any) -> torch.Tensor:
        """Return the loss, on ``devices[0]``."""
        if not self.devices:
            return self.criterion(outputs[0], *targets)
        devices = self.devices[: len(outputs)]
        shards = scatter(targets, devices, self.dim)
        criterion, weights = shares(self.criterion, self.count, shards)
        criteria = copies_for(devices, criterion)
        losses = parallel_apply(
            [criteria[i] for i in weights], [(outputs[i], *shards[i]) for i in weights]
        )
        there = [
            to_device(loss, devices[0], i, 0)
            for i, loss in zip(weights, losses, strict=True)
        ]
        return put_together(criterion, there, list(weights.values()), self.dim)


def find_count(criterion: Callable, count: Count | None = None) -> Count | None:
    """Return what counts a target for the mean, None without mean; raise if unknown."""
    if getattr(criterion, "reduction", None) in ("sum", "none"):
        return None
    if count is not None:
        return count
    if type(criterion) in PER_ELEMENT:
        return lambda target, *_: target.numel()
    if type(criterion) in PER_CLASS:
        return lambda target: summed_weights(criterion, target)
    name = getattr(criterion, "__name__", type(criterion).__name__)
    raise ValueError(
        f"it is not known what {name} divides its mean by: pass count, a function of"
        " the target that returns this number"
    )


def summed_weights(
    criterion: nn.CrossEntropyLoss | nn.NLLLoss, target: torch.Tensor
) -> float:
    """Return the sum of the class weights of those targets that are not ignored."""
    if target.is_floating_point():  # a probability for each class: every row counts
        return target.numel() / target.shape[min(1, target.dim() - 1)]
    kept = target[target != criterion.ignore_index]
    if criterion.weight is None:
        return kept.numel()
    return criterion.weight.to(kept.device)[kept.long()].double().sum().item()


def shares(
    criterion: Callable, count: Count | None, targets: Sequence[tuple]
) -> tuple[Callable, dict[int, float]]:
    """Return what to call for a part's loss, and by what factor each counts.

    For a sum, or without reduction, that is 1, for a mean the part's share of the
    count; parts that count nothing are left out. The mean over nothing is left to the
    criterion (torch's give NaN).
    """
    parts, counts_of = range(len(targets)), find_count(criterion, count)
    if counts_of is None:
        return criterion, dict.fromkeys(parts, 1.0)
    counts = [float(counts_of(*target)) for target in targets]
    total = sum(counts)
    if count is None and getattr(criterion, "label_smoothing", 0):
        criterion = copy(criterion)  # a part that counts nothing still has a sum
        criterion.reduction = "sum"
        return criterion, dict.fromkeys(parts, 1 / total if total else nan)
    return criterion, {i: counts[i] / total for i in parts if counts[i]} or {0: 1.0}


def put_together(
    criterion: Callable,
    losses: list[torch.Tensor],
    weights: Sequence[float],
    dim: int = 0,
) -> torch.Tensor:
    """Return the loss of the whole from its parts', on one device; see ``shares``."""
    if getattr(criterion, "reduction", None) == "none":
        return torch.cat(losses, dim)
    total = 0
    for loss, weight in zip(losses, weights, strict=True):
        if loss.dim():
            raise ValueError(
                f"the loss of a part has shape {list(loss.shape)}, and is no number"
            )
        total = total + widened(loss) * weight
    return total.to(losses[0].dtype)


def copies_for(devices: list[torch.device], module: Callable) -> list[Callable]:
    """Replicate a module for several devices; a function or one device needs none."""
    if isinstance(module, nn.Module) and len(devices) > 1:
        return replicate(module, devices)
    return [module] * len(devices)
