"""A GPT on every mesh. Chapter 18 writes this; its sources are those of its parts."""

from zlib import crc32

import torch

from . import ranks
from .context_parallel import cut_sequence, own_tokens
from .ddp import share
from .experts import Experts, MixtureOfExperts, ParallelExperts
from .mesh import Mesh
from .models import GPT_LAYERS
from .pipeline import DistributedPipeline, cut
from .pipeline_schedules import one_f_one_b, placement
from .sharding import ShardedOptimizer, clip_grad_norm_
from .tensor_parallel import cut_layers, own_part, vocab_parallel_cross_entropy


def gpt_mesh(pp=1, dp=1, ep=1, cp=1, tp=1):
    """Return a mesh with the axes of a GPT. Neighbours differ in tp: it sends most."""
    return Mesh({"pp": pp, "dp": dp, "ep": ep, "cp": cp, "tp": tp})


def cut_gpt(model, mesh, sequence=False):
    """Cut each layer of a whole GPT, in place, to what this rank keeps and computes."""
    mixtures = [x for x in model.modules() if isinstance(x, MixtureOfExperts)]
    known = *GPT_LAYERS, MixtureOfExperts, Experts
    params = [p for _, p in model.named_parameters(remove_duplicate=False)]
    refused = {type(x).__name__ for x in model.modules() if type(x) not in known}
    refused |= {"layers cut by cp" for x in model.modules() if "attend" in vars(x)}
    refused |= {"tied weights"} if len({*params}) < len(params) else set()
    if refused:
        raise ValueError(f"not combined with a mesh here: {', '.join(sorted(refused))}")
    if mesh.sizes["tp"] > 1:
        cut_layers(model, mesh["tp"], sequence)
    if mesh.sizes["cp"] > 1:
        cut_sequence(model, mesh["cp"])
    for mixture in mixtures:
        mixture.experts = ParallelExperts(mixture.experts, mesh["ep"])


def copied_along(name, param):
    """Return the axes along which ranks have copies of a parameter of a cut GPT."""
    axes = ["dp", "cp"] if ".experts." in name else ["dp", "ep", "cp"]
    return axes if hasattr(param, "cut_dim") else [*axes, "tp"]


class TokenLoss(torch.nn.Module):
    """The tokens' losses, added up, from this rank's part of their logits."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, logits, y):
        """Return the sum; the pipeline divides it by the number of tokens."""
        return y.numel() * vocab_parallel_cross_entropy(logits, y, self.group)


class MeshTrainer:
    """Trains a whole GPT on a mesh, from the first rank's weights, in m micro-batches.

    All ranks pass the same batches. ``make``, like Adam, must treat each number alone.
    """

    def __init__(self, model, mesh, make, m=1, schedule=one_f_one_b, sequence=False):
        share(model.parameters(), ranks.group_of(None))
        cut_gpt(model, mesh, sequence)
        num_stages = len(placement(schedule(mesh.sizes["pp"], m)))
        parts = cut(model, num_stages), TokenLoss(mesh["tp"]), m, schedule
        self.pipeline = DistributedPipeline(*parts, count=torch.numel, group=mesh["pp"])
        self.mesh, self.params, copies = mesh, {}, {}
        kept = {*self.pipeline.stages.parameters()}
        for name, param in model.named_parameters():
            group = mesh[copied_along(name, param)]  # all ranks ask for all groups
            if param in kept:
                self.params[name] = param
                copies.setdefault(group, []).append(param)
        groups = [{"params": own, "group": group} for group, own in copies.items()]
        self.optimizer = ShardedOptimizer(groups, make)
        self.optimizer.zero_grad()  # of earlier backward passes

    def own(self, tokens):
        """Return this rank's tokens of its own sequences; all are (n, length)."""
        rows = own_part(tokens, 0, ranks.group_of(self.mesh["dp", "ep"]), "sequences")
        cp = ranks.group_of(self.mesh["cp"])
        return own_tokens(rows, 1, cp) if cp.size > 1 else rows

    def forward_backward(self, X, y):
        """Add to gradients; return the mean loss of own tokens, on the last stage."""
        ranks.agree(f"a batch, digest {crc32(torch.stack([X, y]).cpu().numpy())}")
        return self.pipeline.forward_backward(self.own(X), self.own(y))

    def update(self, max_norm=torch.inf):
        """Average gradients, clip them, change parameters; return the norm before."""
        self.optimizer.take_gradients()
        shards = self.optimizer.shards.values()  # each number is on one rank
        norm = clip_grad_norm_(shards, max_norm, ranks.group_of(None))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def step(self, X, y, max_norm=torch.inf):
        """Train on a batch, the same on all ranks; return its loss, on all of them."""
        loss = self.forward_backward(X, y)
        self.update(max_norm)
        total = torch.tensor(float(loss or 0), dtype=torch.float64)
        ranks.allreduce(total, op="mean")  # of pp ranks, one has a loss
        return total.item() * self.mesh.sizes["pp"]


def whole_state(trainer):
    """Return {name: tensor} of own layers, as in the whole model. All ranks call it."""
    state, tp = {}, trainer.mesh["tp"]
    for name, param in trainer.params.items():
        rows, dim = param.detach(), getattr(param, "cut_dim", None)
        if dim is not None:
            rows = ranks.all_gather(rows.movedim(dim, 0), tp).movedim(0, dim)
        state[name] = rows.clone()
    return state
