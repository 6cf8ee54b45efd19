"""Chapter 14. Tensor parallelism: a GPT whose layers are cut over ranks.

Attention is cut by heads, the MLP by hidden features, embedding and loss by vocabulary,
and with sequence parallelism all that lies between, by tokens. Sources: Shoeybi et al.,
"Megatron-LM" (2019); Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (2022).
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from . import ranks
from .ddp import share
from .losses import wide
from .models import Attention


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
    """Like Copy, but each rank begins with its tokens only, (n, length / k, …)."""

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
    """Like Sum, but each rank ends with its tokens only, (n, length / k, …)."""

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
    """Return this rank's part of a tensor, cut along ``dim``, as a view."""
    n = even_share(tensor.shape[dim], what, group)
    return tensor.narrow(dim, group.me * n, n)


def own_param(param, dim, group, what="features"):
    """Return this rank's part of a parameter, as a new one."""
    own = own_part(param.detach(), dim, group, what).clone()
    part = nn.Parameter(own, param.requires_grad)
    part.cut_dim = dim  # chapter 18 asks for it
    return part


def gathered_linear(X, W, b, group):
    """Return a linear layer's outputs for the tokens of all ranks."""
    return F.linear(Gather.apply(X, group), W, b)


class ColumnParallelLinear(nn.Module):
    """This rank's outputs of ``whole``, an nn.Linear: (…, in) to (…, own outputs).

    With ``sequence``, from (n, length / k, in), and autograd keeps no more than that.
    """

    def __init__(self, whole, group=None, sequence=False):
        super().__init__()
        self.group, self.sequence = ranks.group_of(group), sequence
        self.weight = own_param(whole.weight, 0, self.group)
        self.bias = None if whole.bias is None else own_param(whole.bias, 0, self.group)

    def forward(self, X):
        """Return this rank's outputs."""
        W, b, group = self.weight, self.bias, self.group
        if self.sequence:  # W and b are arguments, so fully_shard gathers them again
            return checkpoint(gathered_linear, X, W, b, group, use_reentrant=False)
        return F.linear(Copy.apply(X, group), W, b)


class RowParallelLinear(nn.Module):
    """``whole``, an nn.Linear, of this rank's inputs: (…, own inputs) to (…, out)."""

    def __init__(self, whole, group=None, sequence=False):
        super().__init__()
        self.group, self.sequence = ranks.group_of(group), sequence
        self.weight, self.bias = own_param(whole.weight, 1, self.group), whole.bias

    def forward(self, X):
        """Return the sum over the ranks, with ``sequence`` of own tokens, plus bias."""
        Y = F.linear(X, self.weight)
        Y = (Scatter if self.sequence else Sum).apply(Y, self.group)
        bias = Copy.apply(self.bias, self.group) if self.sequence else self.bias
        return Y if bias is None else Y + bias


class VocabParallelEmbedding(nn.Module):
    """``whole``, an nn.Embedding, of which this rank has a part of the vocabulary."""

    def __init__(self, whole, group=None, sequence=False):
        super().__init__()
        self.group, self.sequence = ranks.group_of(group), sequence
        self.weight = own_param(whole.weight, 0, self.group, "tokens")

    def forward(self, tokens):
        """Return (n, length, width), with ``sequence`` (n, length / k, width)."""
        place, is_own = own_places(tokens, len(self.weight), self.group)
        own = torch.where(is_own[..., None], F.embedding(place, self.weight), 0)
        return (Scatter if self.sequence else Sum).apply(own, self.group)


class SequenceParallelNorm(nn.LayerNorm):
    """A LayerNorm of this rank's tokens; its gradients are summed over the ranks."""

    def forward(self, X):
        """Normalise each token."""
        params = [Copy.apply(param, self.group) for param in (self.weight, self.bias)]
        return F.layer_norm(X, self.normalized_shape, *params, self.eps)


def own_places(tokens, n, group):
    """Return each token's place among this rank's ``n``, and whether it has one."""
    end, place = n * group.size, tokens - group.me * n
    wrong = tokens[(tokens < 0) | (tokens >= end)]
    if len(wrong):
        raise ValueError(f"token {wrong[0]} is not between 0 and {end - 1}")
    is_own = (place >= 0) & (place < n)
    return torch.where(is_own, place, 0), is_own


def vocab_parallel_cross_entropy(logits, target, group=None):
    """Return the mean loss, of ``target`` (…) and this rank's part of the logits."""
    group, logits = ranks.group_of(group), logits.to(wide(logits.dtype))
    place, is_own = own_places(target, logits.shape[-1], group)
    largest = logits.detach().amax(-1)
    ranks.allreduce(largest, op="max", group=group)
    shifted = logits - largest[..., None]  # so that no exponential is over 1
    picked = torch.where(is_own, shifted.gather(-1, place[..., None])[..., 0], 0)
    sums = Sum.apply(torch.stack([shifted.exp().sum(-1), picked]), group)  # (2, …)
    return (sums[0].log() - sums[1]).mean()


PLAN = {
    ColumnParallelLinear: ("inputs", "mlp.0", "logits"),
    RowParallelLinear: ("output", "mlp.2"),
    VocabParallelEmbedding: ("tokens",),
}


def cut_layers(model, group=None, sequence=False):
    """Cut a GPT, or some of its blocks, in place; return it. Tied weights are untied.

    The weights are the first rank's. All ranks pass the same tokens. With ``sequence``
    they have only their own between layers that are cut: (n, length / k, width).
    """
    group, made = ranks.group_of(group), {}
    share(model.parameters(), group)
    for name, part in model.named_modules():
        if isinstance(part, Attention):
            even_share(part.output.in_features // part.head_width, "heads", group)
        for kind, endings in PLAN.items():
            if name.endswith(endings):
                made[name] = kind(part, group, sequence)
        if sequence and isinstance(part, nn.Linear) and name not in made:
            raise ValueError(f"sequence parallelism does not know the layer {name}")
    for name, layer in made.items():
        model.set_submodule(name, layer)
    for name, part in model.named_modules() if sequence else ():
        if isinstance(part, nn.LayerNorm):
            part.__class__, part.group = SequenceParallelNorm, group
        elif name.endswith("positions"):
            part.register_forward_hook(
                lambda _, given, P: own_part(Copy.apply(P, group), 0, group, "tokens")
            )
    return model
