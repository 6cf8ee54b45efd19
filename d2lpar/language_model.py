"""A GPT trained on every mesh: the splits of this book, combined.

Chapter 18 writes this file. Its sources are those of the classes that it combines.
"""

from functools import partial

import torch
from torch import nn

from . import ranks
from .context_parallel import own_tokens, ring_attention
from .ddp import average, pack, share, unpack
from .experts import MixtureOfExperts, ParallelExperts
from .mesh import Mesh
from .models import Block, Embedding
from .pipeline import DistributedPipeline, cut
from .pipeline_schedules import interleaved, one_f_one_b
from .sharding import ShardedOptimizer
from .tensor_parallel import cut_layers, vocab_parallel_cross_entropy

DATA = "dp", "ep", "cp"  # ranks that differ in these have other tokens
EXPERTS = "dp", "cp"  # ranks that differ only in these have the same experts


def check_plan(plan, model):
    """Refuse what is not combined here."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    has_experts = any(".experts." in name for name in names)
    refused = {
        "ZeRO-2 or 3": plan.zero > 1,
        "Ulysses or recomputation": plan.ulysses or plan.recompute,
        f"numbers of {plan.item} bytes": plan.item != 4,
        "experts with sequence parallelism": plan.sequence and has_experts,
        f"ep {plan.ep} without experts": plan.ep > 1 and not has_experts,
        "tied weights": len(names) > len(list(model.parameters())),
        f"ep {plan.ep}, which does not divide dp {plan.dp}": plan.dp % plan.ep > 0,
    }
    if found := [what for what, is_asked in refused.items() if is_asked]:
        raise ValueError(f"not combined here: {', '.join(found)}")


def mesh_of(plan):
    """Return the mesh of a plan, in chapter 17's order: neighbours differ in tp."""
    sizes = {"pp": plan.pp, "dp": plan.dp // plan.ep, "ep": plan.ep}
    mesh = Mesh(sizes | {"cp": plan.cp, "tp": plan.tp})
    for axes in ("pp", "ep", "cp", "tp", DATA, EXPERTS):
        ranks.group_of(mesh[axes])  # made now: not all ranks will use all of them
    return mesh


def cut_layer(layer, plan, mesh):
    """Leave of a layer of a GPT, in place, what this rank keeps and computes."""

    def own_positions(_, args):
        places = torch.arange(plan.cp * len(args[0]), device=args[0].device)
        return own_tokens(places, 0, mesh["cp"])

    if plan.tp > 1:
        cut_layers(layer, mesh["tp"], plan.sequence)
    if plan.cp > 1 and isinstance(layer, Embedding):
        layer.positions.register_forward_pre_hook(own_positions)
    if plan.cp > 1 and isinstance(layer, Block):
        layer.attention.attend = partial(ring_attention, group=mesh["cp"])
    if plan.ep > 1 and isinstance(getattr(layer, "mlp", None), MixtureOfExperts):
        layer.mlp.experts = ParallelExperts(layer.mlp.experts, mesh["ep"])


class TokenLoss(nn.Module):
    """The tokens' losses, added up, from this rank's part of their logits."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, logits, y):
        """Return the sum; the pipeline divides it by the number of tokens."""
        return y.numel() * vocab_parallel_cross_entropy(logits, y, self.group)


def pipeline_of(model, plan, mesh):
    """Return a pipeline of ``model``; only own layers are left in that, and cut."""
    costs = [0.0, *[1.0] * (len(model) - 2), 0.1]  # of embedding, blocks and head
    stages, loss = cut(model, plan.pp * plan.v, costs), TokenLoss(mesh["tp"])
    order = partial(interleaved, v=plan.v) if plan.v > 1 else one_f_one_b
    pipe = DistributedPipeline(stages, loss, plan.m, order, torch.numel, mesh["pp"])
    own = set(pipe.stages.modules())
    for i, layer in enumerate(list(model)):
        if layer in own:
            cut_layer(layer, plan, mesh)
        else:
            model[i] = nn.Identity()
    return pipe


def averaging(params, optimizer_class, *, group, **defaults):
    """Return an optimiser that has ``take_gradients``, like ShardedOptimizer."""
    share(params, group)
    optimizer = optimizer_class(params, **defaults)
    optimizer.take_gradients = lambda: unpack(average(pack(params), group), params)
    return optimizer


def total_norm(parts, plan):
    """Return the norm of the whole model's gradient: each number is counted once."""
    total = torch.zeros((), dtype=torch.float64)
    for params, optimizer, replicas in parts:
        for param, rows in zip(params, optimizer.param_groups[0]["params"]):
            copies = replicas if hasattr(param, "cut_dim") else replicas * plan.tp
            if rows.grad is not None:  # the parameter itself, or with ZeRO-1 own rows
                total = total + rows.grad.double().square().sum() / copies
    ranks.allreduce(total)
    return total.sqrt()


class MeshTrainer:
    """Trains this rank's part of a GPT, on the mesh of a plan.

    All ranks pass the same ``model``, then the same batches; each leaves in the model
    its own part. The optimiser must treat each number alone, as Adam does.
    """

    def __init__(self, model, plan, optimizer_class, **defaults):
        check_plan(plan, model)
        self.model, self.plan, self.mesh = model, plan, mesh_of(plan)
        self.pipeline, self.parts = pipeline_of(model, plan, self.mesh), []
        make = partial(ShardedOptimizer if plan.zero else averaging, **defaults)
        named = list(model.named_parameters())
        experts = [param for name, param in named if ".experts." in name]
        others = [param for name, param in named if ".experts." not in name]
        for params, axes in ((others, DATA), (experts, EXPERTS)):
            if params:  # a stage may have no experts
                group = ranks.group_of(self.mesh[axes])
                optimizer = make(params, optimizer_class, group=group)
                self.parts.append((params, optimizer, 1 if plan.zero else group.size))

    def own(self, tokens):
        """Return of sequences (n, length) this rank's, and of these its tokens."""
        dp, ep, m = self.mesh.sizes["dp"], self.mesh.sizes["ep"], self.plan.m
        if len(tokens) % (dp * ep * m):
            parts = f"dp {dp} · ep {ep} ranks, each with {m} micro-batches"
            raise ValueError(f"{len(tokens)} sequences cannot be divided among {parts}")
        rows = tokens.unflatten(0, (dp, ep, -1))
        rows = rows[self.mesh.place["dp"], self.mesh.place["ep"]]
        return own_tokens(rows, 1, self.mesh["cp"]) if self.plan.cp > 1 else rows

    def forward_backward(self, X, y):
        """Add to gradients; return the mean loss of own tokens, on the last stage."""
        tokens = torch.cat([X, y]).flatten()
        weighted = tokens * torch.arange(len(tokens), device=tokens.device)
        ranks.agree(f"a batch with the digest {weighted.sum()}")
        return self.pipeline.forward_backward(self.own(X), self.own(y))

    def update(self, max_norm=torch.inf):
        """Average gradients, clip them, change parameters; return the norm before."""
        for _, optimizer, _ in self.parts:
            optimizer.take_gradients()
        norm = total_norm(self.parts, self.plan)
        for _, optimizer, _ in self.parts:
            if max_norm < torch.inf:
                rows = optimizer.param_groups[0]["params"]
                nn.utils.clip_grads_with_norm_(rows, max_norm, norm)
            optimizer.step()
            optimizer.zero_grad()
        return norm

    def step(self, X, y, max_norm=torch.inf):
        """Train on a batch, the same on all ranks; return its loss, on all of them."""
        loss = self.forward_backward(X, y)
        self.update(max_norm)
        total = torch.tensor(0.0 if loss is None else float(loss), dtype=torch.float64)
        ranks.allreduce(total)
        num_losses = self.mesh.grid.numel() / self.plan.pp  # ranks of the last stage
        return total.item() / num_losses


def whole_state(trainer):
    """Return {name: tensor} of this rank's layers, as in the whole model."""
    model, mesh, state = trainer.model, trainer.mesh, {}
    for name, param in model.named_parameters():
        whole, dim = param.detach().clone(), getattr(param, "cut_dim", None)
        if dim is not None:
            rows = ranks.all_gather(whole.movedim(dim, 0), mesh["tp"])
            whole = rows.movedim(0, dim)
        block, is_own, expert = name.partition(".own.")
        if is_own:  # its number is that among own experts
            number, rest = expert.split(".", 1)
            number = int(number) + model.get_submodule(block).before
            name = f"{block}.{number}.{rest}"
        state[name] = whole
    return state
