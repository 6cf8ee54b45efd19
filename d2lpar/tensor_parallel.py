"""Tensor parallelism: a GPT whose layers are cut over the ranks of a group.

Attention is cut by heads, the MLP by hidden features, embedding and loss by vocabulary.
Sequence parallelism also cuts what lies between them, by tokens. Chapter 14 writes this
file. Sources: Shoeybi et al., "Megatron-LM" (2019); Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (2022).
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from . import ranks
from .ddp import share
from .models import Attention, Block, Embedding, Head


class Copy(torch.autograd.Function):
    """Before a layer that is cut: its input, equal on all ranks, is copied to each."""

    @staticmethod
    def forward(ctx, X, group):
        """Return ``X``. Nothing is sent."""
        ctx.group = group
        return X

    @staticmethod
    def backward(ctx, grad):
        """Add up the gradients of all ranks."""
        return Sum.apply(grad, ctx.group), None


class Sum(torch.autograd.Function):
    """After a layer that is cut: the results of all ranks are added up."""

    @staticmethod
    def forward(ctx, X, group):
        """Return the sum."""
        ctx.group, total = group, X.clone()
        ranks.allreduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        """Return the sum's gradient, equal on all ranks. Nothing is sent."""
        return Copy.apply(grad, ctx.group), None


class Gather(torch.autograd.Function):
    """Like Copy, from each rank's tokens, (n, length / k, …), to those of all."""

    @staticmethod
    def forward(ctx, X, group):
        """Join the tokens of all ranks."""
        ctx.group = group
        return ranks.all_gather(X.transpose(0, 1), group).transpose(0, 1)

    @staticmethod
    def backward(ctx, grad):
        """Add up the gradients, for this rank's tokens."""
        return Scatter.apply(grad, ctx.group), None


class Scatter(torch.autograd.Function):
    """Like Sum, but each rank gets the sum of its tokens only, (n, length / k, …)."""

    @staticmethod
    def forward(ctx, X, group):
        """Return this rank's tokens of the sum."""
        ctx.group = group
        rows = X.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        own = ranks.reduce_scatter(rows, group=group)  # a view: it keeps all rows alive
        return own.transpose(0, 1).clone()

    @staticmethod
    def backward(ctx, grad):
        """Join the gradients of all tokens."""
        return Gather.apply(grad, ctx.group), None


def even_share(number, what, group):
    """Return how many of ``number`` heads, features or tokens each rank has."""
    if number % group.size:
        raise ValueError(f"{number} {what} cannot be divided among {group.size} ranks")
    return number // group.size


def own_part(tensor, dim, group, what="features"):
    """Return a copy of this rank's part of a tensor, cut along ``dim``."""
    n = even_share(tensor.shape[dim], what, group)
    return tensor.detach().narrow(dim, group.me * n, n).clone()


def own_param(param, dim, group, what="features"):
    """Return this rank's part of a parameter as a new one; of None, None."""
    if param is None:
        return None
    return nn.Parameter(own_part(param, dim, group, what), param.requires_grad)


def sum_gradients(params, group):
    """Add up the gradients of parameters that each rank applies to its own tokens."""
    for param in (param for param in params if param.requires_grad):
        param.register_hook(lambda grad: Sum.apply(grad, group))


class ColumnParallelLinear(nn.Module):
    """This rank's outputs of ``whole``, an nn.Linear: (…, in) to (…, own outputs).

    With ``sequence``, X has this rank's tokens, the result those of all. Autograd keeps
    only the former, and backward gathers all once more.
    """

    def __init__(self, whole, group=None, sequence=False):
        super().__init__()
        self.group, self.sequence = ranks.group_of(group), sequence
        self.weight = own_param(whole.weight, 0, self.group)
        self.bias = own_param(whole.bias, 0, self.group)

    def forward(self, X):
        """Return this rank's outputs."""
        if not self.sequence:
            return self.columns(X, Copy)
        return checkpoint(self.columns, X, Gather, use_reentrant=False)

    def columns(self, X, enter):
        """Return this rank's outputs of the tokens that ``enter`` makes of ``X``."""
        return F.linear(enter.apply(X, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """``whole``, an nn.Linear, of this rank's inputs: (…, own inputs) to (…, out).

    ``whole.bias`` is added once, to the sum; with ``sequence``, that of its own tokens.
    """

    def __init__(self, whole, group=None, sequence=False):
        super().__init__()
        self.group, self.leave = ranks.group_of(group), Scatter if sequence else Sum
        self.weight = own_param(whole.weight, 1, self.group)
        self.bias = whole.bias
        if sequence and whole.bias is not None:
            sum_gradients([self.bias], self.group)

    def forward(self, X):
        """Return the sum of what all ranks make of their inputs, plus the bias."""
        Y = self.leave.apply(F.linear(X, self.weight), self.group)
        return Y if self.bias is None else Y + self.bias


class VocabParallelEmbedding(nn.Module):
    """``whole``, an nn.Embedding, of which this rank has some tokens' vectors."""

    def __init__(self, whole, group=None, sequence=False):
        super().__init__()
        self.group, self.leave = ranks.group_of(group), Scatter if sequence else Sum
        self.weight = own_param(whole.weight, 0, self.group, "tokens")

    def forward(self, tokens):
        """Return the tokens' vectors; each comes from the one rank that has it."""
        place, is_own = own_places(tokens, len(self.weight), self.group)
        own = torch.where(is_own[..., None], F.embedding(place, self.weight), 0)
        return self.leave.apply(own, self.group)


def own_places(tokens, n, group):
    """Return where tokens are among this rank's ``n``, and which of them it has."""
    num_tokens, place = n * group.size, tokens - group.me * n
    wrong = tokens[(tokens < 0) | (tokens >= num_tokens)]
    if len(wrong):
        raise ValueError(f"token {wrong[0]} is not between 0 and {num_tokens - 1}")
    is_own = (place >= 0) & (place < n)
    return torch.where(is_own, place, 0), is_own


def vocab_parallel_cross_entropy(logits, target, group=None):
    """Return ``F.cross_entropy``, the mean, of this rank's logits (…, own tokens).

    All ranks have the same ``target`` (…). For each, three numbers are combined.
    """
    group = ranks.group_of(group)
    place, is_own = own_places(target, logits.shape[-1], group)
    largest = logits.detach().amax(-1)
    ranks.allreduce(largest, op="max", group=group)
    shifted = logits - largest[..., None]  # so that no exponential is over 1
    picked = torch.where(is_own, shifted.gather(-1, place[..., None])[..., 0], 0)
    sums = Sum.apply(torch.stack([shifted.exp().sum(-1), picked]), group)  # (2, …)
    return (sums[0].log() - sums[1]).mean()


def cut_layers(model, group=None, sequence=False):
    """Cut a GPT, or some of its layers, in place; return it, with rank 0's weights.

    All ranks call it with the same tokens. With ``sequence``, they have only their own
    between the layers that are cut: a Block takes and returns (n, length / k, width).
    """
    group = ranks.group_of(group)
    for part in model.modules():
        if isinstance(part, Attention):
            even_share(part.output.in_features // part.head_width, "heads", group)
    share(model.parameters(), group)
    for part in list(model.modules()):
        if isinstance(part, Attention):
            part.inputs = ColumnParallelLinear(part.inputs, group, sequence)
            part.output = RowParallelLinear(part.output, group, sequence)
        elif isinstance(part, Block):
            part.mlp[0] = ColumnParallelLinear(part.mlp[0], group, sequence)
            part.mlp[2] = RowParallelLinear(part.mlp[2], group, sequence)
        elif isinstance(part, Embedding):
            part.tokens = VocabParallelEmbedding(part.tokens, group, sequence)
            if sequence:
                part.positions.register_forward_pre_hook(
                    lambda _, args: own_part(args[0], 0, group, "tokens")
                )
        elif isinstance(part, Head):
            part.logits = ColumnParallelLinear(part.logits, group, sequence)
        elif isinstance(part, nn.LayerNorm | nn.Embedding) and sequence:
            sum_gradients(part.parameters(), group)
    return model
