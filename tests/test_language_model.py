"""A GPT on a mesh trains as on one device; what it sends and keeps is as planned."""

from functools import partial
from math import prod

import pytest
import torch
from helpers import LIMIT, attempt, close
from torch.nn import functional as F

from d2lpar import MeshTrainer, MixtureOfExperts, count_bytes, launch, planning, ranks
from d2lpar.language_model import whole_state
from d2lpar.models import gpt
from d2lpar.planning import Plan, gpt_numbers
from d2lpar.schedules import ring

VOCAB, WIDTH, LENGTH, N = 24, 16, 16, 8
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)


def model(plan):
    """Return a GPT that is large enough for a plan, the same everywhere."""
    torch.manual_seed(0)
    whole = gpt(VOCAB, WIDTH, 4, max(2, plan.pp * plan.v), LENGTH)
    for block in whole[1:-1:2] if plan.ep > 1 else ():  # others have none
        block.mlp = MixtureOfExperts(WIDTH, 4, top_k=2)
    return whole.double()


def batches(num=3, n=N):
    generator = torch.Generator().manual_seed(1)
    pieces = torch.randint(VOCAB, (num, n, LENGTH + 1), generator=generator)
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in pieces]


def on_one_device(plan, max_norm):
    """Return the losses of three steps, and the weights in the end."""
    whole, found = model(plan), []
    optimizer = SGD(whole.parameters())
    for X, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(whole(X).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
        optimizer.step()
        found.append(loss.item())
    return found, whole.state_dict()


def on_mesh(rank, world_size, plan, max_norms):
    """Return the same for each norm; of the weights, those that this rank has."""
    results = []
    for max_norm in max_norms:
        torch.manual_seed(rank)  # all draw the same weights, and nothing else
        trainer = MeshTrainer(model(plan), plan, SGD)
        losses = [trainer.step(*batch, max_norm) for batch in batches()]
        results.append((losses, whole_state(trainer)))
    return results


PLANS = {
    "one rank": Plan(),
    "interleaved": Plan(dp=2, pp=2, tp=2, m=2, v=2),
    "sequence": Plan(dp=2, pp=2, tp=2, m=2, zero=1, sequence=True),
    "context": Plan(pp=2, tp=2, cp=2, m=4, sequence=True),
    "no pipeline": Plan(dp=2, tp=2, cp=2, zero=1, m=2),
    "no layer is cut": Plan(dp=2, pp=4, m=4),
    "experts": Plan(dp=2, ep=2, pp=2, cp=2, m=2, zero=1),
    "cut, and experts": Plan(dp=4, ep=2, tp=2, m=2),
    "experts, interleaved": Plan(dp=4, ep=4, pp=2, m=2, v=2),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_mesh_trains_as_one_device(plan):
    limits, k = (torch.inf, 0.1), prod(plan[:4])
    of_ranks = launch(on_mesh, k, plan, limits, timeout=LIMIT)
    for max_norm, *results in zip(limits, *of_ranks):
        found, weights = on_one_device(plan, max_norm)
        state = {}
        for ours, layers in results:
            close(torch.tensor(ours), torch.tensor(found))
            assert all(torch.equal(layers[n], state.get(n, layers[n])) for n in layers)
            state |= layers
        assert state.keys() == weights.keys()
        for name, weight in weights.items():
            close(state[name], weight)


def begin(rank, world_size, plan):
    torch.manual_seed(rank)
    trainer = MeshTrainer(gpt(VOCAB, WIDTH, 4, 2, LENGTH), plan, SGD)
    state = whole_state(trainer)
    before = {name: weight.clone() for name, weight in state.items()}
    trainer.step(*batches(1)[0])
    assert all(torch.equal(state[name], before[name]) for name in state)
    return state


def test_replicas_begin_alike_even_if_ranks_draw_other_weights():
    state = {}
    for layers in launch(begin, 8, Plan(dp=2, pp=2, tp=2, m=2), timeout=LIMIT):
        assert all(torch.equal(layers[n], state.get(n, layers[n])) for n in layers)
        state |= layers


# What a rank keeps and sends


def keep(rank, world_size, plan):
    trainer = MeshTrainer(model(plan), plan, torch.optim.Adam)
    trainer.step(*batches(1)[0])
    states = [x for _, o, _ in trainer.parts for x in o.state.values()]
    params = sum(param.numel() for param in trainer.model.parameters())
    return params, sum(state["exp_avg"].numel() for state in states)


@pytest.mark.parametrize("zero", [0, 1])
def test_each_number_is_kept_on_as_many_ranks_as_planned(zero):
    plan = Plan(dp=2, pp=2, tp=2, m=2, zero=zero)
    whole = dict(model(plan).named_parameters())
    not_cut = ("norm", "positions", "output.bias", "mlp.2.bias")
    twice = [p for name, p in whole.items() if any(part in name for part in not_cut)]
    number = sum(param.numel() for param in [*whole.values(), *twice])
    params, moments = zip(*launch(keep, 8, plan, timeout=LIMIT))
    assert sum(params) == 2 * number and sum(moments) == number * (1 if zero else 2)


def send(rank, world_size, plan):
    ranks.collectives.choose = lambda *_: ring  # as planned
    trainer = MeshTrainer(model(plan).float(), plan, SGD)
    with count_bytes() as passes:
        trainer.forward_backward(*batches(1)[0])
    with count_bytes() as update:
        trainer.update()
    params = sum(param.numel() for param in trainer.model.parameters())
    return trainer.mesh.sent(passes), update.sent(rank) / params


@pytest.mark.parametrize("name", ["sequence", "context"])
def test_bytes_are_sent_along_the_axes_as_planned(name):
    plan = PLANS[name]
    net = gpt_numbers(2, WIDTH, LENGTH, VOCAB)
    passes, updates = zip(*launch(send, 8, plan, timeout=LIMIT))
    planned = planning.sent(net, plan, N)
    for axis in planned.keys() - {"dp"}:
        most = max(sent[axis] for sent in passes)  # norms and losses are not planned
        assert most == pytest.approx(planned[axis][1], rel=0.15 if axis == "tp" else 0)
    assert all(sent.keys() <= planned.keys() - {"dp"} for sent in passes)
    assert updates == pytest.approx([8 / 2] * 8, rel=0.1)  # there, and back


# Mistakes of a reader


def refused(rank, world_size):
    tied = model(Plan())
    tied[-1].logits.weight = tied[0].tokens.weight
    make = partial(MeshTrainer, optimizer_class=SGD)
    trainer = make(model(Plan()), Plan(dp=2, m=2))
    return [
        attempt(call)[:2]
        for call in (
            lambda: make(model(Plan()), Plan(dp=4)),
            lambda: make(model(Plan()), Plan(dp=2, zero=2)),
            lambda: make(model(Plan()), Plan(dp=2, recompute=True)),
            lambda: make(tied, Plan(tp=2)),
            lambda: make(model(Plan(ep=2)), Plan(dp=2, ep=4)),
            lambda: make(model(Plan()), Plan(dp=2, ep=2, item=2)),
            lambda: make(model(Plan(ep=2)), Plan(tp=2, sequence=True)),
            lambda: trainer.step(*batches(1, n=6)[0]),
            lambda: trainer.step(*[part.roll(rank, 0) for part in batches(1)[0]]),
        )
    ]


def test_what_does_not_fit_is_named():
    for found in launch(refused, 2, timeout=LIMIT):
        kinds, texts = zip(*found)
        assert kinds == ("ValueError",) * 8 + ("MismatchError",), texts
        assert "dp 4 · ep 1 · cp 1 · tp 1 = 4 ranks, but there are 2" in texts[0]
        reasons = ["ZeRO-2 or 3", "Ulysses or recomputation", "tied weights"]
        reasons += ["ep 4, which does not divide dp 2"]
        reasons += ["experts with sequence parallelism"]
        reasons.insert(4, "numbers of 2 bytes, ep 2 without experts")
        assert [*texts[1:7]] == [f"not combined here: {reason}" for reason in reasons]
        assert "6 sequences cannot be divided among dp 2 · ep 1" in texts[7]
        assert "a batch with the digest" in texts[8]
