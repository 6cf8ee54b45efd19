"""What the mean of a loss divides by, known or given."""

from collections.abc import Callable, Sequence
from copy import copy
from math import nan

import torch
from torch import nn

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
