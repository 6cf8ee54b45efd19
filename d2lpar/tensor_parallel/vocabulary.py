"""The cross-entropy of logits that are cut by class: no rank ever has all of a row.

Of a row each rank needs the largest logit, the sum of the exponentials and the target's
logit. Notebook 14 builds this file. Source: Shoeybi et al., "Megatron-LM" (2019),
section 3.
"""

import torch

from .. import ranks
from ..guards import checked
from ..ranks._old import Group
from .layers import place_in


def own_classes(num_classes: int, group: Group = None) -> tuple[int, int]:
    """Return the first class of this rank, and the one after its last."""
    k, me = place_in(group)
    if num_classes < k:
        raise ValueError(f"{num_classes} classes are too few for {k} ranks")
    each, larger = divmod(num_classes, k)
    begin = me * each + min(me, larger)
    return begin, begin + each + (me < larger)


def check_loss(logits, target, num_classes, group, reduction, ignore_index) -> None:
    """Refuse wrong shapes, targets that are no class, unknown reductions."""
    begin, end = own_classes(num_classes, group)
    if logits.shape != (*target.shape, end - begin):
        raise ValueError(
            f"logits have shape {list(logits.shape)}, but"
            f" {[*target.shape, end - begin]} is right: this rank has the classes"
            f" {begin} to {end - 1} of {num_classes}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f'reduction is {reduction!r}, which is none of "mean", "sum", "none"'
        )
    wrong = target[(target != ignore_index) & ((target < 0) | (target >= num_classes))]
    if len(wrong):
        raise ValueError(
            f"target {wrong[0].item()} is none of the {num_classes} classes"
        )


@checked(check_loss)
def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    num_classes: int,
    group: Group = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return ``F.cross_entropy`` of the whole logits without gathering them.

    ``logits`` are (…, own classes), as ``ColumnParallelLinear(…, num_classes)`` returns
    them. ``target`` (…) is equal on all ranks: classes from 0 to num_classes - 1,
    counted over all ranks. The "mean" is over the targets that are not
    ``ignore_index``, whose loss and gradient are 0. Sends 3 numbers per row forward, in
    two allreduces, and nothing backward. Computes in float32 (or float64), and keeps
    the probabilities of the rank's own classes for backward.
    """
    kept = target != ignore_index
    begin, _ = own_classes(num_classes, group)
    losses = _CrossEntropy.apply(logits, target, kept, begin, group)
    if reduction == "none":
        return losses
    return losses.sum() / kept.sum() if reduction == "mean" else losses.sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, kept, begin, group):
        wide = logits.double() if logits.dtype == torch.float64 else logits.float()
        largest = wide.amax(-1)  # (…)
        ranks.allreduce(largest, op="max", group=group)
        # (…, own classes): no exponential is over 1
        shifted = wide - largest[..., None]
        is_own = (target >= begin) & (target < begin + logits.shape[-1])
        place = torch.where(is_own, target - begin, 0)[..., None]  # (…, 1)
        picked = torch.where(is_own, shifted.gather(-1, place)[..., 0], 0)  # (…)
        exps = shifted.exp_()
        sums = torch.stack([exps.sum(-1), picked])  # (2, …)
        ranks.allreduce(sums, group=group)
        ctx.save_for_backward(exps.div_(sums[0][..., None]), place, is_own, kept)
        return torch.where(kept, sums[0].log() - sums[1], 0)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # create_graph=True
            raise NotImplementedError("the gradient's own gradient is not implemented")
        probs, place, is_own, kept = ctx.saved_tensors
        logits_grad = probs.scatter_add(-1, place, -is_own[..., None].to(probs.dtype))
        logits_grad *= torch.where(kept, grad, 0)[..., None]
        return logits_grad, None, None, None, None
