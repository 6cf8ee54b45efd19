"""A GPT on a mesh trains as on one device (test_planning: what it sends and keeps)."""

from functools import partial
from math import prod

import pytest
import torch
from helpers import LIMIT, attempt, close
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from d2lpar import MeshTrainer, MixtureOfExperts, launch, ranks
from d2lpar.language_model import whole_state
from d2lpar.mesh import Mesh, gpt_mesh
from d2lpar.models import gpt
from d2lpar.pipeline_schedules import interleaved, zero_bubble

VOCAB, WIDTH, LENGTH, N = 24, 16, 16, 8


def SGD(params):
    """Return an optimizer that lets matrices decay, and nothing else."""
    params = list(params)
    matrices = {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1}
    others = {"params": [p for p in params if p.dim() < 2]}
    return torch.optim.SGD([matrices, others], lr=0.3, momentum=0.9)


def model(sizes, seed=0):
    """Return a GPT that is large enough for a mesh."""
    torch.manual_seed(seed)
    whole = gpt(VOCAB, WIDTH, 4, max(2, sizes.get("pp", 1)), LENGTH)
    for block in whole[1:-1:2] if "ep" in sizes else ():  # others have none
        block.mlp = MixtureOfExperts(WIDTH, 4, top_k=2)
    return whole.double()


def batches(num=3, n=N):
    generator = torch.Generator().manual_seed(1)
    pieces = torch.randint(VOCAB, (num, n, LENGTH + 1), generator=generator)
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in pieces]


def on_one_device(sizes, max_norm):
    """Return the losses of three steps, and the weights in the end."""
    whole, found = model(sizes), []
    optimizer = SGD(whole.parameters())
    for X, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(whole(X).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
        optimizer.step()
        found.append(loss.item())
    return found, whole.state_dict()


def on_mesh(rank, world_size, sizes, max_norms, recompute=False, **options):
    results = []  # for each norm; of the weights, those that this rank has
    for max_norm in max_norms:
        whole = model(sizes, seed=rank)  # the first rank's weights count
        for block in whole[1:-1] if recompute else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        mesh = Mesh(dict.fromkeys(("pp", "dp", "ep", "cp", "tp"), 1) | sizes)
        trainer = MeshTrainer(whole, mesh, SGD, **options)
        trainer.forward_backward(*batches(1)[0])  # a step begins without gradients
        losses = [trainer.step(*batch, max_norm) for batch in batches()]
        results.append((losses, whole_state(trainer)))
        trainer.step(*batches(1)[0])  # changes nothing that was returned
    return results


TWICE = partial(interleaved, v=2)
MESHES = {
    "one rank": ({}, {}),
    "interleaved": ({"pp": 2, "dp": 2, "tp": 2}, {"m": 2, "schedule": TWICE}),
    "zero bubble": ({"pp": 2, "cp": 2, "tp": 2}, {"m": 4, "schedule": zero_bubble}),
    "sequence": ({"pp": 2, "dp": 2, "tp": 2}, {"m": 2, "sequence": True}),
    "context": ({"pp": 2, "cp": 2, "tp": 2}, {"m": 4, "sequence": True}),
    "recomputed": ({"dp": 2, "cp": 2, "tp": 2}, {"m": 2, "recompute": True}),
    "one more axis": ({"dp": 2, "more": 2, "tp": 2}, {"m": 2}),
    "no layer is cut": ({"pp": 4, "dp": 2}, {"m": 4}),
    "experts": ({"pp": 2, "ep": 2, "cp": 2}, {"m": 2}),
    "cut, and experts": ({"dp": 2, "ep": 2, "tp": 2}, {"m": 2}),
    "experts, interleaved": ({"pp": 2, "ep": 4}, {"m": 2, "schedule": TWICE}),
    "no experts along ep": ({"ep": 2, "tp": 2}, {}),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_trains_as_one_device(mesh):
    limits, (sizes, options) = (torch.inf, 0.1), MESHES[mesh]
    k = prod(sizes.values())
    of_ranks = launch(partial(on_mesh, **options), k, sizes, limits, timeout=LIMIT)
    for max_norm, *results in zip(limits, *of_ranks):
        found, weights = on_one_device(sizes, max_norm)
        state = {}
        for ours, layers in results:
            close(torch.tensor(ours), torch.tensor(found))
            assert all(torch.equal(layers[n], state.get(n, layers[n])) for n in layers)
            state |= layers
        assert state.keys() == weights.keys()
        for name, weight in weights.items():
            close(state[name], weight)


def in_16_bits(rank, world_size):
    trainer, found = MeshTrainer(model({}).float(), gpt_mesh(pp=2, tp=2), SGD, m=2), []
    for batch in batches():
        with torch.autocast("cpu", torch.bfloat16):  # keeps weights of 16 bits inside
            found.append(trainer.step(*batch))
    return found


def test_autocast_rounds_and_changes_nothing_else():
    right, _ = on_one_device({}, torch.inf)
    for found in launch(in_16_bits, 4, timeout=LIMIT):
        assert 1e-6 < (torch.tensor(found) - torch.tensor(right)).abs().max() < 2e-3


def keep(rank, world_size, sizes):
    trainer = MeshTrainer(model(sizes), gpt_mesh(**sizes), torch.optim.Adam, m=2)
    trainer.step(*batches(1)[0])
    states = trainer.optimizer.state.values()
    params = sum(param.numel() for param in trainer.params.values())
    return params, sum(state["exp_avg"].numel() for state in states)


def test_each_number_is_on_as_many_ranks_as_planned_and_its_moments_on_one():
    sizes = {"pp": 2, "dp": 2, "tp": 2}
    whole = dict(model(sizes).named_parameters())
    not_cut = ("norm", "positions", "output.bias", "mlp.2.bias")
    twice = [p for name, p in whole.items() if any(part in name for part in not_cut)]
    number = sum(param.numel() for param in [*whole.values(), *twice])
    params, moments = zip(*launch(keep, 8, sizes, timeout=LIMIT))
    assert sum(params) == 2 * number
    assert sum(moments) == sum(param.numel() for param in whole.values())


def own_places(rank, world_size):
    """Losses are right, too, if ranks do the same work: so look at tokens."""
    trainer = MeshTrainer(model({"ep": 2}), gpt_mesh(dp=2, ep=2, cp=2), SGD)
    ranks.agree = None  # no rank waits for others
    return trainer.own(torch.arange(N * LENGTH).view(N, LENGTH)).flatten()


def test_each_token_is_on_one_rank():
    found = torch.cat(launch(own_places, 8, timeout=LIMIT))
    assert torch.equal(found.sort().values, torch.arange(N * LENGTH))


def refused(rank, world_size):
    tied = model({})
    tied[-1].logits.weight = tied[0].tokens.weight
    experts, dropout = gpt(VOCAB, WIDTH, 4, 1, LENGTH), model({})
    experts[1].mlp = MixtureOfExperts(WIDTH, 3)
    dropout[1].mlp.append(torch.nn.Dropout())
    MeshTrainer(was_cut := model({}), gpt_mesh(pp=2), SGD, m=2)
    torch.nn.init.constant_(was_cut[0].tokens.weight, rank)
    (headless := model({}))[-1] = torch.nn.Linear(WIDTH, VOCAB)
    trainer, [(X, y)] = MeshTrainer(model({}), gpt_mesh(dp=2), SGD), batches(1)
    calls = [
        lambda: gpt_mesh(dp=4),
        lambda: MeshTrainer(tied, gpt_mesh(tp=2), SGD),
        lambda: MeshTrainer(dropout, gpt_mesh(tp=2), SGD),
        lambda: MeshTrainer(was_cut, gpt_mesh(dp=2), SGD),
        lambda: MeshTrainer(headless, gpt_mesh(tp=2), SGD),
        lambda: MeshTrainer(experts, gpt_mesh(tp=2), SGD, sequence=True),
        lambda: MeshTrainer(experts, gpt_mesh(pp=2), SGD, 2, TWICE),
        lambda: MeshTrainer(experts, gpt_mesh(ep=2), SGD),
        lambda: MeshTrainer(model({}), gpt_mesh(2), lambda _: SGD(tied.parameters())),
        lambda: trainer.step(*batches(1, n=5)[0]),
        lambda: trainer.step(X.roll(rank, 0), y),
        lambda: trainer.step(X, y[:, rank:]),
    ]
    found = [attempt(call)[:2] for call in calls]
    assert (was_cut[0].tokens.weight == rank).all()  # as before it was refused
    MeshTrainer(experts, gpt_mesh(tp=2), SGD)  # nothing has been cut
    return found


def test_what_does_not_fit_is_named():
    for found in launch(refused, 2, timeout=LIMIT):
        kinds, texts = zip(*found)
        assert kinds == ("ValueError",) * 10 + ("MismatchError",) * 2, texts
        assert "dp 4 · ep 1 · cp 1 · tp 1 = 4 ranks, but there are 2" in texts[0]
        reasons = ["tied weights", "Dropout", "a model that a mesh has cut already"]
        reasons += ["a model other than an Embedding, Blocks and a Head"]
        assert [*texts[1:5]] == [f"not combined with a mesh here: {r}" for r in reasons]
        assert "does not know the layer 1.mlp.router" in texts[5]
        assert "3 layers cannot be cut into 4 stages" in texts[6]
        assert "3 experts cannot be divided among 2 ranks" in texts[7]
        assert "make took other parameters" in texts[8]
        assert "5 sequences cannot be divided among 2 ranks" in texts[9]
        assert all("a batch, digest" in text for text in texts[10:])
