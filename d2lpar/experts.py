"""Chapter 16. A mixture of experts: a router sends each token to a few of them.

Sources: Lepikhin et al., "GShard" (2020); Fedus et al., "Switch Transformers" (2021).
"""

from math import ceil

import torch
import torch.distributed as dist
from torch import nn

from . import ranks
from .tensor_parallel import even_share


def line_up(chosen, num_experts, capacity_factor=None):
    """Return the choices in the order of their experts, and how many each one has.

    ``chosen`` has the expert of each choice. An expert serves the first ones, up to
    ``capacity_factor`` times an even share; others are dropped. None: it serves all.
    """
    order, counts = chosen.argsort(stable=True), chosen.bincount(minlength=num_experts)
    if capacity_factor is not None:
        capacity = ceil(capacity_factor * len(chosen) / num_experts)
        lines = order.split(counts.tolist())
        order = torch.cat([line[:capacity] for line in lines])
        counts = counts.clamp(max=capacity)
    return order, counts


class Experts(nn.ModuleList):
    """MLPs, each of which has rows of its own."""

    def forward(self, X, counts):
        """Let the first one work on the first counts[0] rows of X, and so on."""
        parts = X.split(counts.tolist())
        return torch.cat([expert(part) for expert, part in zip(self, parts)])


class MixtureOfExperts(nn.Module):
    """Adds up what ``top_k`` experts make of each token: (…, width) to the same.

    A router chooses and weights them. What an expert does not serve adds nothing.
    """

    def __init__(self, width, num_experts, top_k=1, capacity_factor=None):
        super().__init__()
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"capacity_factor is {capacity_factor}: it must be > 0")
        self.top_k, self.capacity_factor, hidden = top_k, capacity_factor, 4 * width
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = Experts(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(num_experts)
        )

    def forward(self, X):
        """Route each token, let the experts work, and add up."""
        tokens = X.flatten(0, -2)
        probs = self.router(tokens).softmax(-1)  # (tokens, experts)
        weights, chosen = probs.topk(self.top_k)  # (tokens, top_k)
        if self.top_k > 1:  # a single one would always be 1
            weights = weights / weights.sum(-1, keepdim=True)
        self.routed = probs, chosen.flatten()  # with the graph, for balance_loss
        order, counts = line_up(chosen.flatten(), probs.shape[1], self.capacity_factor)
        token = order // self.top_k
        outputs = self.experts(tokens[token], counts) * weights.flatten()[order, None]
        return outputs.new_zeros(tokens.shape).index_add(0, token, outputs).view_as(X)


def balance_loss(layer, group=None):
    """Return 1 if the last call chose all experts equally often, else mostly more.

    Shares are of all ranks. If these have equally many tokens, the mean of their losses
    is one device's.
    """
    probs, chosen = layer.routed
    shares = chosen.bincount(minlength=probs.shape[1]).to(probs.dtype) / len(chosen)
    if dist.is_initialized():
        ranks.allreduce(shares, op="mean", group=group)
    return probs.shape[1] * (shares * probs.mean(0)).sum()


class Exchange(torch.autograd.Function):
    """Rows travel to other ranks; their gradients come back, times ``scale``."""

    @staticmethod
    def forward(ctx, X, go, group, scale):
        """Send rank i the next go[i] rows; join those that come."""
        parts = ranks.all_to_all(X.split(go), group)
        ctx.scale, come = scale, [len(part) for part in parts]
        ctx.back = come, group, 1 / scale  # for second derivatives
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        """Send each gradient to where its row came from."""
        return Exchange.apply(ctx.scale * grad, *ctx.back), None, None, None


class ParallelExperts(nn.ModuleDict):
    """This rank's share of ``whole``, which is Experts, under the names there."""

    def __init__(self, whole, group=None):
        group = ranks.group_of(group)
        n = even_share(len(whole), "experts", group)
        super().__init__([*whole.named_children()][group.me * n :][:n])
        self.group = group
        for param in self.parameters():
            param.is_expert = True  # a mark: the group's other ranks have no copy

    def forward(self, X, counts):
        """Send rows to their experts and back. Gradients there are of the mean loss."""
        group, counts = self.group, counts.view(self.group.size, -1)
        come = torch.stack(ranks.all_to_all([*counts], group))  # (rank, own expert)
        X = Exchange.apply(X, counts.sum(1).tolist(), group, group.size)
        expert = torch.arange(len(self), device=X.device).repeat(group.size)
        order = expert.repeat_interleave(come.flatten()).argsort(stable=True)
        outputs = Experts(self.values())(X[order], come.sum(0))[order.argsort()]
        return Exchange.apply(outputs, come.sum(1).tolist(), group, 1 / group.size)
