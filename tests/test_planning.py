"""What a plan sends and holds is what real ranks send and hold; time is by hand."""

from functools import partial
from itertools import product
from math import prod
from time import sleep

import pytest
import torch
from helpers import LIMIT, attempt
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import d2lpar
from d2lpar import count_bytes, launch, peak_memory, planning, ranks, schedules
from d2lpar.mesh import gpt_mesh
from d2lpar.models import gpt
from d2lpar.pipeline_schedules import clock, interleaved, one_f_one_b
from d2lpar.planning import Machine, Plan, Transformer, gpt_numbers

NET, N = gpt_numbers(4, 64, 32, 48), 8
EXPERTS = NET._replace(weights=4 * 64**2, expert=8 * 64**2, num_experts=4, top_k=1)


def test_flops_and_weights_are_those_of_the_gpt():
    net, model = gpt_numbers(2, 24, 10, 30), gpt(30, 24, 3, 2, 10)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(3, 10, dtype=torch.long))
    square = 2 * 2 * 10 * 24  # torch counts all pairs of tokens, and not half of them
    assert counter.get_total_flops() == 30 * (planning.forward_flops(net) + square)
    matrices = [p.numel() for name, p in model.named_parameters() if p.dim() == 2]
    _, _, [(ends, copies), (weights, _), (experts, _)] = planning.share(net, Plan(), 3)
    assert (ends, copies, weights, experts) == (60 * 24, 1, sum(matrices) - 70 * 24, 0)


def test_a_token_meets_only_its_experts_but_they_are_all_there():
    more = EXPERTS._replace(num_experts=8)
    assert planning.forward_flops(more) == planning.forward_flops(NET)
    _, _, [*_, (experts, copies)] = planning.share(more, Plan(dp=4, ep=2), N)
    assert (experts, copies) == (4 * 4 * 8 * 64**2, 2)


def in_turn(rank, world_size):
    order, steps = [], {}
    for name in "abc":
        wait = 0.02 if (name, rank) == ("b", 1) else 0
        steps[name] = lambda name=name, wait=wait: (order.append(name), sleep(wait))
    seconds = planning.time_in_turn(steps, rounds=3)
    refused = attempt(planning.time_in_turn, {"ab"[rank]: lambda: None})[0]
    return "".join(order), seconds, refused


def test_all_take_turns_and_the_slowest_rank_counts():
    first, second = launch(in_turn, 2, timeout=LIMIT)
    assert first == second
    order, seconds, refused = first
    assert order == "abccbaabccba" and refused == "MismatchError"
    assert [len(times) for times in seconds.values()] == [3] * 3  # after a warm-up
    assert min(seconds["b"]) >= 0.02  # on rank 0, too, which does not wait there


# What real ranks send and hold


def measure(rank, k, plan):
    """Return what a step sends along axes, own parameters, and the passes' peak."""
    ranks.collectives.choose = lambda *_: schedules.ring  # as planned
    torch.manual_seed(0)
    model, tokens = gpt(48, 64, 4, 4, 32), torch.randint(48, (2, N, 32))
    for block in model[1:-1]:
        if plan.ep > 1:
            block.mlp = d2lpar.MixtureOfExperts(64, 4)
        if plan.recompute:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    mesh = gpt_mesh(plan.pp, plan.dp // plan.ep, plan.ep, plan.cp, plan.tp)
    schedule = partial(interleaved, v=plan.v) if plan.v > 1 else one_f_one_b
    how = torch.optim.Adam, plan.m, schedule, plan.sequence
    trainer = d2lpar.MeshTrainer(model, mesh, *how)
    for block in model[1:-1] if plan.ulysses else ():
        block.attention.attend = d2lpar.ulysses_attention
    passes = partial(trainer.forward_backward, *tokens)
    with count_bytes() as ledger:
        passes()
    peak = peak_memory(passes, "cpu")  # gradients are there already
    with count_bytes() as update:
        trainer.update()
    sent = mesh.sent(ledger) | {"dp": update.sent(rank)}
    return sent, sum(param.numel() for param in trainer.params.values()), peak


PLANS = {
    "data": {"dp": 4},
    "pipeline": {"pp": 2, "m": 8},
    "interleaved": {"pp": 2, "m": 8, "v": 2},
    "tensor": {"tp": 4},
    "tensor, recomputed": {"tp": 4, "recompute": True},
    "sequence": {"tp": 4, "sequence": True},
    "sequence, recomputed": {"tp": 4, "sequence": True, "recompute": True},
    "ring": {"cp": 4},
    "ring, recomputed": {"cp": 4, "recompute": True},
    "Ulysses": {"cp": 4, "ulysses": True},
    "Ulysses, recomputed": {"cp": 4, "ulysses": True, "recompute": True},
    "experts": {"dp": 4, "ep": 4},
    "three axes": {"pp": 2, "dp": 2, "tp": 2, "m": 2},
    "three others": {"pp": 2, "cp": 2, "tp": 2, "sequence": True},
}


@pytest.mark.parametrize("name", PLANS)
def test_ranks_send_and_hold_what_was_planned(name):
    plan = Plan(**PLANS[name], zero=1)
    net = EXPERTS if plan.ep > 1 else NET
    sent, counts, peaks = zip(*launch(measure, prod(plan[:4]), plan, timeout=LIMIT))
    planned = planning.sent(net, plan, N)
    assert all(own.keys() <= planned.keys() | {"dp"} for own in sent)
    # biases, norms and positions are not planned; nor whom a router prefers
    extra = {"dp": 0.1, "ep": 0.1, "tp": 0.04}
    for axis, (_, nbytes) in planned.items():
        rel = extra.get(axis, 1e-6)
        assert max(own[axis] for own in sent) == pytest.approx(nbytes, rel), axis
    _, _, params = planning.share(net, plan, N)
    assert max(counts) == pytest.approx(sum(number for number, _ in params), rel=0.1)
    activations = planning.held(net, plan, N)["activations"]
    assert 0.95 < max(peaks) / activations < 1.5


SMALL = Transformer(4, 8, 4, 16, 96, q=8, kv=2, expert=32, num_experts=4, top_k=2)


@pytest.mark.parametrize(
    "axis, messages, nbytes, plan",  # of 8 sequences of 4 tokens, by hand
    [
        ("cp", 40, 2560, Plan(cp=4, tp=2)),  # 10 turns of keys and values per block
        ("cp", 40, 3584, Plan(cp=4, item=2)),  # 6 of 16 bits, and 4 of float32
        ("cp", 16, 1920, Plan(cp=4, tp=2, ulysses=True)),
        ("ep", 24, 9216, Plan(dp=4, ep=4, recompute=True)),
        ("pp", 8, 1024, Plan(pp=4, tp=2, m=4, sequence=True)),
        ("tp", 108, 13824, Plan(tp=4, pp=2, m=2)),  # half of the blocks and ends
        ("dp", 6, 6912, Plan(dp=2, cp=2)),
        ("dp", 291, 10368, Plan(dp=4, zero=2, m=2)),
        ("dp", 72, 20736, Plan(dp=4, zero=3, m=2)),
    ],
)
def test_messages_and_bytes_by_hand(axis, messages, nbytes, plan):
    assert planning.sent(SMALL, plan, 8)[axis] == (messages, nbytes)


def test_shares_by_hand():
    five = SMALL._replace(num_blocks=5)  # the fuller of two ranks has four stages
    params = [(16 * 8, 1), (4 * 96, 1), (4 * 4 * 32, 1)]
    assert planning.share(five, Plan(pp=2, v=2), 8) == (32, 4, params)
    params = [(2 * 16 * 8 / 2, 4), (4 * 96 / 2, 4), (4 * 4 * 32 / 2 / 2, 2)]
    assert planning.share(SMALL, Plan(dp=4, ep=2, tp=2), 8) == (8, 4, params)
    assert planning.axes(Plan(2, 2, 1, 2, 2))["ep"] == (4, 2)
    held = planning.held(SMALL, Plan(tp=2, item=2), 8)  # blocks, and float32 logits
    assert held["activations"] == 32 * (4 * (4 + 12 / 2) * 8 * 2 + 2 * 16 / 2 * 4)
    held = planning.held(SMALL, Plan(pp=4, m=8), 8)  # four of eight micro-batches
    assert held["activations"] == 4 * 4 * 16 * 8 * 4


@pytest.mark.parametrize(
    "item, zero, each",  # value, gradient, Adam's two; 16 bits: and a float32 value
    [
        (4, 0, 16),
        (4, 3, 16 / 4),
        (2, 0, 18),
        (2, 1, 6 + 12 / 4),
        (2, 2, 2 + 16 / 4),
        (2, 3, 16 / 4),  # the shards are float32
    ],
)
def test_bytes_per_parameter(item, zero, each):
    blocks, ends = 4 * 12 * 64**2, 2 * 48 * 64
    held = planning.held(NET, Plan(dp=4, zero=zero, item=item), N)["parameters"]
    whole = (item + 4) * (blocks / 4 + ends) if zero == 3 else 0  # a block, both ends
    assert held == pytest.approx(each * (blocks + ends) + whole)


# Time


@pytest.mark.parametrize("p, m, v", [(1, 1, 1), (2, 4, 1), (4, 8, 1), (4, 8, 2)])
def test_a_pipeline_idles_as_the_clock_says(p, m, v):
    spans = clock(interleaved(p, m, v) if v > 1 else one_f_one_b(p, m))
    busy = sum(span.end - span.start for span in spans[0])
    net, machine = gpt_numbers(p * v, 8, 4, 0), Machine(1.0, (0.0, 0.0))
    spent = planning.spent(net, Plan(pp=p, m=m, v=v), m, machine)
    end = max(own[-1].end for own in spans)
    assert sum(spent.values()) / spent["computing"] == pytest.approx(end / busy)


def test_seconds_by_hand():
    """1 FLOP/s, near links of 10 s per message, far ones of 100 s per byte."""
    net = Transformer(1, 2, 4, 0, weights=6, q=2, kv=2)
    machine = Machine(1.0, (10.0, 0.0), (0.0, 100.0), node=2, overhead=7.0)
    late, spent = machine._replace(overlap=False), partial(planning.spent, net, n=4)
    flops = 4 * 4 * 3 * 2 * (6 + 4 * 2)  # rows, tokens, passes, of a token
    assert spent(Plan(), machine=late) == {"computing": flops + 7, "bubble": 0}
    again = spent(Plan(recompute=True), machine=late)["computing"]
    assert again == pytest.approx(4 / 3 * (flops + 7))
    tensor = spent(Plan(tp=2), machine=late)  # 8 halves, and 4 for both ends
    assert tensor == {"computing": flops / 2 + 7, "tp": 120, "bubble": 0}
    travel = 6 * 8 * 3 / 4 * 50  # two ranks of a node share what goes to the other
    assert spent(Plan(dp=4), machine=late)["dp"] == pytest.approx(travel)
    assert spent(Plan(dp=2), machine=machine)["dp"] == 0
    deep = net._replace(num_blocks=3)  # two of which are in a stage
    pipe = {"computing": 2 * flops + 28, "pp": 20, "bubble": flops + 14 + 10}
    assert planning.spent(deep, Plan(pp=2, m=2), 4, late) == pipe
    near = planning.spent(deep, Plan(dp=2, pp=2, m=2), 4, late._replace(node=8))
    assert near["bubble"] == flops / 2 + 14 + 10  # nobody waits for gradients
    for zero, hides in enumerate((1 / 3, 1 / 2, 2 / 3, 1)):
        plan = Plan(dp=4, zero=zero, m=2)
        after, during = (planning.spent(deep, plan, 8, x) for x in (late, machine))
        hidden = hides * after["computing"]
        assert after["dp"] - during["dp"] == pytest.approx(hidden)


@pytest.mark.parametrize(
    "plan, axis, beta",
    [
        (Plan(tp=4, cp=2), "cp", 1),
        (Plan(tp=16), "tp", 1),  # eight neighbours share eight far links
        (Plan(tp=2, dp=8), "dp", 2),
        (Plan(cp=16), "cp", 8),  # only one rank's neighbour is in another node
        (Plan(dp=16, ep=16), "ep", 8),  # each rank has its own rows for other nodes
        (Plan(dp=8, pp=2), "pp", 8),
    ],
)
def test_which_link_an_axis_uses(plan, axis, beta):
    machine = Machine(1.0, (0.0, 1.0), (0.5, 8.0), node=8)
    stride, size = planning.axes(plan)[axis]
    alpha = 0.0 if stride * size <= 8 else 0.5
    assert planning.link_of(axis, plan, machine) == (alpha, beta)
    fast = machine._replace(far=(0.5, 1.0))  # no faster than what is near
    assert planning.link_of(axis, plan, fast) == (alpha, 1.0)


# All plans


def test_all_plans_are_there_once():
    net, expected = EXPERTS._replace(num_blocks=6), set()
    found = list(planning.all_plans(net, 16, 8))
    for cuts in product([1, 2, 4, 8, 16], repeat=7):
        dp, tp, pp, _, ep, m, v = cuts
        fits = prod(cuts[:4]) == 8 and 16 % (dp * m) == 0
        fits = fits and pp <= 6 and ep <= min(dp, 4)  # blocks, experts
        rounds = pp > 1 and m % pp == 0 and pp * v <= 6 + 2  # an end may be a stage
        if fits and (v == 1 or rounds):
            for zero, again in product(range(4), (False, True)):
                expected.add(Plan(*cuts, zero, again, sequence=tp > 1, item=2))
    assert set(found) == expected and len(found) == len(expected)


def test_the_fastest_plans_fit():
    machine = Machine(1e9, (1e-6, 1e-9), (1e-5, 1e-8), node=2, memory=1e6)
    found = planning.fastest(NET, N, 8, machine, count=3)
    fitting = []
    for plan in planning.all_plans(NET, N, 8):
        if sum(planning.held(NET, plan, N).values()) <= 1e6:
            fitting.append(sum(planning.spent(NET, plan, N, machine).values()))
    assert [seconds for seconds, _ in found] == sorted(fitting)[:3]
    assert 3 < len(fitting) < len(list(planning.all_plans(NET, N, 8)))
    assert planning.fastest(NET, N, 8, machine._replace(memory=1)) == []
