"""Chapter 15. Context parallelism: attention to a sequence cut over ranks.

Each rank has its own tokens of all heads: (n, heads, length / k, head_width). Sources:
Liu et al., "Ring Attention with Blockwise Transformers" (2023); Jacobs et al.,
"DeepSpeed Ulysses" (2023).
"""

from functools import partial
from itertools import product
from math import ceil

import torch
from torch.nn import functional as F

from . import ranks
from .losses import wide
from .mixed_precision import autocast
from .models import Attention, Embedding
from .tensor_parallel import even_share

TILE = 256  # tokens: how many queries meet how many keys at a time


def zigzag(length, k):
    """Return the places of each rank's tokens, early and late ones: (k, length / k)."""
    if length % (2 * k):
        raise ValueError(f"{length} tokens cannot be cut into {2 * k} chunks")
    chunks = torch.arange(length).view(2 * k, -1)
    return torch.cat([chunks[:k], chunks[k:].flip(0)], dim=1)


def own_tokens(X, dim=1, group=None, order=zigzag):
    """Return this rank's tokens of ``X``, whose dimension ``dim`` is the sequence."""
    group = ranks.group_of(group)
    own = order(X.shape[dim], group.size)[group.me]
    return X.index_select(dim, own.to(X.device))


def scores(q, k, mask):
    """Return how well each key fits each query: minus infinity where not ``mask``."""
    S = (q / q.shape[-1] ** 0.5) @ k.mT
    return S if mask.all() else S.masked_fill(~mask.to(q.device), -torch.inf)


def attend(q, out, lse, k, v, mask):
    """Let queries meet more keys: update ``out`` and the scores' logsumexp in place."""
    S = scores(q, k, mask)
    both = torch.logaddexp(lse, S.logsumexp(-1, keepdim=True))
    out.mul_((lse - both).exp()).add_(S.sub_(both).exp_() @ v)
    lse.copy_(both)


def attend_backward(q, out, lse, grad, k, v, mask):
    """Return what these keys add to the gradients of q, k and v, given that of out."""
    P = scores(q, k, mask).sub_(lse).exp_()
    D = (grad * out).sum(-1, keepdim=True)
    S_grad = (grad @ v.mT).sub_(D).mul_(P).div_(q.shape[-1] ** 0.5)
    return S_grad @ k, S_grad.mT @ q, P.mT @ grad


def meetings(own, here):
    """Yield (queries, keys, mask) of the tiles where own tokens may see those here."""
    # even: then, in zigzag order, below, no tile has tokens of both halves
    cuts = 2 * ceil(len(own) / (2 * TILE))
    bounds = sorted({len(own) * i // cuts for i in range(cuts + 1)})
    for queries, keys in product(map(slice, bounds, bounds[1:]), repeat=2):
        if own[queries].max() >= here[keys].min():
            yield queries, keys, own[queries, None] >= here[keys]


def shift(tensor, group):
    """Send ``tensor`` to the next rank; return what the previous one sends."""
    parts = [tensor[:0]] * group.size
    parts[(group.me + 1) % group.size] = tensor
    return ranks.all_to_all(parts, group)[group.me - 1]


class Ring(torch.autograd.Function):
    """Keys and values travel around the ranks, and meet each rank's queries."""

    @staticmethod
    def forward(ctx, q, k, v, group, places):
        """Return the attention of own queries to all keys."""
        kv, q_wide = torch.stack([k, v]), q.to(wide(q.dtype))
        out = torch.zeros_like(q_wide)
        lse = torch.full_like(out[..., :1], -1e30)  # not -inf: -inf - -inf is NaN
        with torch.autocast(q.device.type, enabled=False), autocast(enabled=False):
            for stop in range(group.size):
                kv = shift(kv, group) if stop else kv
                for i, j, mask in meetings(places[group.me], places[group.me - stop]):
                    own = (X[..., i, :] for X in (q_wide, out, lse))  # views
                    attend(*own, *kv[..., j, :].to(lse.dtype), mask)
        ctx.ring = group, places
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        """The gradients of keys and values travel along with these, and then home."""
        if torch.is_grad_enabled():  # by create_graph=True
            raise RuntimeError("ring attention has no second derivative")
        group, places = ctx.ring
        q, k, v, out, lse = ctx.saved_tensors
        q, out, grad = (X.to(lse.dtype) for X in (q, out, grad))
        kv = torch.stack([k, v])
        q_grad, kv_grad = torch.zeros_like(q), torch.zeros_like(kv, dtype=q.dtype)
        with torch.autocast(q.device.type, enabled=False):  # ours is off in backward
            for stop in range(group.size):
                kv = shift(kv, group) if stop else kv
                for i, j, mask in meetings(places[group.me], places[group.me - stop]):
                    own = (X[..., i, :] for X in (q, out, lse, grad))
                    parts = attend_backward(*own, *kv[..., j, :].to(q.dtype), mask)
                    q_grad[..., i, :] += parts[0]
                    kv_grad[..., j, :] += torch.stack(parts[1:])
                kv_grad = shift(kv_grad, group)
        return q_grad, *kv_grad, None, None


def ring_attention(q, k, v, group=None, order=zigzag):
    """Return the attention of own queries; keys and values travel around a ring."""
    shapes = [list(X.shape) for X in (q, k, v)]
    if shapes != [shapes[0]] * 3:
        raise ValueError(f"q, k and v must have one shape, and have {shapes}")
    group = ranks.group_of(group)
    return Ring.apply(q, k, v, group, order(q.shape[2] * group.size, group.size))


class Swap(torch.autograd.Function):
    """Swap own tokens of all heads for all tokens of own heads, or back."""

    @staticmethod
    def forward(ctx, X, cut, join, group):
        """Send each rank its part of dimension ``cut``; join what comes at ``join``."""
        ctx.back = join, cut, group
        return torch.cat(ranks.all_to_all(X.chunk(group.size, cut), group), join)

    @staticmethod
    def backward(ctx, grad):
        """Swap the gradient back."""
        return Swap.apply(grad, *ctx.back), None, None, None


def ulysses_attention(q, k, v, group=None, order=zigzag):
    """Return the attention of own queries; each rank computes some of the heads."""
    group = ranks.group_of(group)
    even_share(q.shape[1], "heads", group)
    places = order(q.shape[2] * group.size, group.size).flatten()
    qkv = Swap.apply(torch.stack([q, k, v]), 2, 3, group)[..., places.argsort(), :]
    out = F.scaled_dot_product_attention(*qkv, is_causal=True)
    return Swap.apply(out[:, :, places], 2, 1, group)


def own_positions(group, layer, args):
    """Replace the places 0, 1, … of this rank's tokens by those in the whole text."""
    places = torch.arange(len(args[0]) * group.size, device=args[0].device)
    return own_tokens(places, 0, group)


def cut_sequence(model, group=None, attention=ring_attention):
    """Let a GPT compute with this rank's tokens, in place; return it."""
    group = ranks.group_of(group)
    for part in model.modules():
        if isinstance(part, Attention):
            part.attend = partial(attention, group=group)
        elif isinstance(part, Embedding):
            part.positions.register_forward_pre_hook(partial(own_positions, group))
    return model
