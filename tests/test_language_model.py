"""A GPT on a mesh trains as on one device; what is sent is as planned."""

from functools import partial

import pytest
import torch
from helpers import LIMIT, close
from torch.nn import functional as F

from d2lpar import MeshTrainer, MixtureOfExperts, launch
from d2lpar.language_model import whole_state
from d2lpar.models import gpt
from d2lpar.planning import Plan

VOCAB, WIDTH, LENGTH, N = 24, 16, 16, 8
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)


def model(plan):
    """Return a GPT that is large enough for a plan, the same everywhere."""
    torch.manual_seed(0)
    whole = gpt(VOCAB, WIDTH, 4, max(2, plan.pp * plan.v), LENGTH)
    for block in whole[1:-1] if plan.ep > 1 else ():
        block.mlp = MixtureOfExperts(WIDTH, 4, top_k=2)
    return whole.double()


def batches(num=3, n=N):
    generator = torch.Generator().manual_seed(1)
    pieces = torch.randint(VOCAB, (num, n, LENGTH + 1), generator=generator)
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in pieces]


def on_one_device(plan, max_norm):
    """Return the losses, the norms and in the end the weights of three steps."""
    whole, found = model(plan), []
    optimizer = SGD(whole.parameters())
    for X, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(whole(X).flatten(0, 1), y.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found, whole.state_dict()


def on_mesh(rank, world_size, plan, max_norm):
    """Return the same from this rank; of the weights, those of its layers."""
    torch.manual_seed(0)
    trainer = MeshTrainer(model(plan), plan, SGD)
    norms, update = [], trainer.update
    trainer.update = lambda *args: norms.append(update(*args).item())
    losses = [trainer.step(*batch, max_norm) for batch in batches()]
    return list(zip(losses, norms)), whole_state(trainer)


PLANS = [
    Plan(),
    Plan(dp=2, pp=2, tp=2, m=2),
    Plan(dp=2, pp=2, tp=2, m=2, zero=1, sequence=True),
    Plan(pp=2, tp=2, cp=2, m=4, sequence=True),
    Plan(dp=2, tp=2, cp=2, zero=1, m=2),
    Plan(dp=2, cp=2, pp=2, m=2, v=2),
    Plan(dp=4, ep=2, tp=2),
    Plan(dp=2, ep=2, pp=2, cp=2, m=2, zero=1),
    Plan(dp=4, ep=4, pp=2, m=2, v=2),
    Plan(dp=4, ep=2, zero=1, tp=2, m=2),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("max_norm", [torch.inf, 0.1])
def test_a_mesh_trains_as_one_device(plan, max_norm):
    found, weights = on_one_device(plan, max_norm)
    k, state = plan.dp * plan.tp * plan.pp * plan.cp, {}
    for ours, layers in launch(on_mesh, k, plan, max_norm, timeout=LIMIT):
        close(torch.tensor(ours), torch.tensor(found))
        state |= layers
    assert state.keys() == weights.keys()
    for name, weight in weights.items():
        close(state[name], weight)
