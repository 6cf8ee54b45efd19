"""Chapter 18. A GPT, trained on every mesh."""

from zlib import crc32

import torch

from . import ranks
from .context_parallel import cut_sequence, own_tokens
from .ddp import share
from .experts import Experts, MixtureOfExperts, ParallelExperts
from .mesh import copied_along
from .models import GPT_LAYERS, Block, Embedding, Head
from .pipeline import DistributedPipeline, cut
from .pipeline_schedules import one_f_one_b, placement
from .sharding import ShardedOptimizer, clip_grad_norm_
from .tensor_parallel import cut_layers, own_part, vocab_parallel_cross_entropy


def refusals(model):
    """Return the reasons why a model cannot be trained on a mesh here."""
    if hasattr(model, "is_cut"):
        return ["a model that a mesh has cut already"]
    known = GPT_LAYERS | {MixtureOfExperts, Experts}  # GPT_LAYERS: what gpt() has
    found = sorted(kind.__name__ for kind in {*map(type, model.modules())} - known)
    kinds = [type(layer) for layer in model.children()]
    if kinds != [Embedding, *[Block] * (len(kinds) - 2), Head]:
        found.append("a model other than an Embedding, Blocks and a Head")
    params = [p for _, p in model.named_parameters(remove_duplicate=False)]
    if len({*params}) < len(params):
        found.append("tied weights")
    return found


def cut_gpt(model, mesh, sequence=False):
    """Share the first rank's weights, then cut each layer of a GPT, in place."""
    if found := refusals(model):
        raise ValueError(f"not combined with a mesh here: {', '.join(found)}")
    tp, cp, ep = (mesh.get_group(axis) for axis in ("tp", "cp", "ep"))
    mixtures = [x for x in model.modules() if isinstance(x, MixtureOfExperts)]
    own = [(x, ParallelExperts(x.experts, ep)) for x in mixtures if ep.size() > 1]
    share([*model.parameters()], ranks.group_of(None))
    if tp.size() > 1:
        cut_layers(model, tp, sequence)  # may refuse, as ParallelExperts may
    model.is_cut = True
    if cp.size() > 1:
        cut_sequence(model, cp)
    for mixture, experts in own:
        mixture.experts = experts


class TokenLoss(torch.nn.Module):
    """The tokens' losses, added up, from this rank's part of their logits."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, logits, y):
        """Return a sum, since the pipeline divides by the number of tokens."""
        return y.numel() * vocab_parallel_cross_entropy(logits, y, self.group)


class MeshTrainer:
    """Cuts a GPT in place, and trains it on a gpt_mesh, a batch in m micro-batches.

    ``make`` gets parameters, after the cut; like Adam, it must treat each number alone.
    """

    def __init__(self, model, mesh, make, m=1, schedule=one_f_one_b, sequence=False):
        self.mesh, self.batch_group = mesh, ranks.group_of(mesh.get_group("dp", "ep"))
        pp, loss = mesh.get_group("pp"), TokenLoss(mesh.get_group("tp"))
        num_stages = len(placement(schedule(pp.size(), m)))
        stages = cut([*model.children()], num_stages)
        cut_gpt(model, mesh, sequence)  # inside the stages' layers
        self.pipeline = DistributedPipeline(stages, loss, m, schedule, torch.numel, pp)
        kept = {*self.pipeline.stages.parameters()}  # not those of other stages
        self.params = {n: p for n, p in model.named_parameters() if p in kept}
        groups = {p: mesh.get_group(*copied_along(p, mesh)) for p in model.parameters()}
        self.optimizer = ShardedOptimizer(self.params.values(), make, group=groups.get)
        if self.optimizer.shards.keys() - kept:
            raise ValueError("make took other parameters than it got, after the cut")

    def own(self, tokens):
        """Return this rank's tokens of its own sequences; all are (n, length)."""
        cp = self.mesh.get_group("cp")
        rows = own_part(tokens, 0, self.batch_group, "sequences")
        return own_tokens(rows, 1, cp) if cp.size() > 1 else rows

    def forward_backward(self, X, y):
        """Add to gradients; return the mean loss of own tokens, on the last stage."""
        ranks.agree(f"a batch, digest {crc32(str([X.tolist(), y.tolist()]).encode())}")
        return self.pipeline.forward_backward(self.own(X), self.own(y))

    def update(self, max_norm=torch.inf):
        """Average and clip gradients, change parameters; return the unclipped norm."""
        self.optimizer.take_gradients()
        shards = self.optimizer.shards.values()  # each number is on one rank
        norm = clip_grad_norm_(shards, max_norm, ranks.group_of(None))
        self.optimizer.step()
        return norm

    def step(self, X, y, max_norm=torch.inf):
        """Train on a batch, the same on all ranks; return its loss on each."""
        self.optimizer.zero_grad()
        loss = self.forward_backward(X, y)
        self.update(max_norm)
        total = torch.zeros(()).double() if loss is None else loss.cpu().double()
        ranks.allreduce(total, op="mean")  # of pp ranks, one has a loss
        return total.item() * self.mesh.sizes["pp"]


def whole_state(trainer):
    """Return {name: whole tensor} of own layers. A collective call."""
    state, tp = {}, trainer.mesh.get_group("tp")
    for name, param in trainer.params.items():
        whole, dim = param.detach(), getattr(param, "cut_dim", None)
        if dim is not None:
            whole = ranks.all_gather(whole.movedim(dim, 0), tp).movedim(0, dim)
        state[name] = whole.clone()
    return state
