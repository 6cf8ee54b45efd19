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
from d2lpar import launch, peak_memory, planning, ranks, schedules
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
    assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys(
        order, 3
    )
    assert min(seconds["b"]) >= 0.02  # on rank 0, too, which does not wait there


# What real ranks send and hold


def cut_model(plan):
    """Return the GPT that a plan describes."""
    torch.manual_seed(0)
    embedding, *blocks, _ = model = gpt(48, 64, 4, 4, 32)
    for block in blocks:
        if plan.ep > 1:
            block.mlp = d2lpar.MixtureOfExperts(64, 4)
            block.mlp.experts = d2lpar.ParallelExperts(block.mlp.experts)
        if plan.cp > 1:
            forms = d2lpar.ring_attention, d2lpar.ulysses_attention
            block.attention.attend = forms[plan.ulysses]
        if plan.recompute:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if plan.zero == 3:
            dtype = torch.bfloat16 if plan.item == 2 else None
            d2lpar.fully_shard(block, param_dtype=dtype)
    if plan.cp > 1:
        own = d2lpar.own_tokens(torch.arange(32), dim=0)
        embedding.positions.register_forward_pre_hook(lambda *_: (own,))
    if plan.tp > 1:
        return d2lpar.cut_layers(model, sequence=plan.sequence)
    if plan.zero == 3:
        return d2lpar.fully_shard(model, param_dtype=dtype)
    if plan.zero or plan.pp > 1 or plan.ep > 1:
        return model
    return d2lpar.DistributedDataParallel(model) if plan.dp * plan.cp > 1 else model


def backward(plan, model, X, rank):
    """Return a function that makes a step's passes on this rank's rows or tokens."""
    if plan.pp > 1:
        stages = d2lpar.cut(model, plan.pp * plan.v, [0, 1, 1, 1, 1, 0])
        schedule = partial(interleaved, v=plan.v) if plan.v > 1 else one_f_one_b
        pipe = d2lpar.DistributedPipeline(stages, Total(), plan.m, schedule)
        return lambda: pipe.forward_backward(X, X)
    own = X.chunk(plan.dp)[rank] if plan.dp > 1 else X
    own = d2lpar.own_tokens(own) if plan.cp > 1 else own
    return lambda: model(own).float().square().mean().backward()


class Total(torch.nn.Module):
    reduction = "sum"

    def forward(self, output, _):
        return output.square().sum()


def measure(rank, k, plan):
    """Return what a step sends, what of the model is here, and the peak of the rest."""
    ranks.collectives.choose = lambda nbytes, k: schedules.ring
    X = torch.randint(48, (N, 32), generator=torch.Generator().manual_seed(1))
    model = cut_model(plan)
    step, params = backward(plan, model, X, rank), list(model.parameters())
    if plan.zero in (1, 2):
        optimizer = d2lpar.ShardedOptimizer(params, torch.optim.Adam)
        for param in params if plan.zero == 2 else ():
            param.register_post_accumulate_grad_hook(optimizer.reduce)
    with d2lpar.count_bytes() as ledger:
        step()
        if plan.zero in (1, 2):
            optimizer.step()
    return ledger.sent(rank), sum(p.numel() for p in params), peak_memory(step, "cpu")


PLANS = {
    "data": Plan(dp=4),
    "ZeRO-1": Plan(dp=4, zero=1),
    "ZeRO-2": Plan(dp=4, zero=2),
    "ZeRO-3": Plan(dp=4, zero=3),
    "ZeRO-3, 16 bits": Plan(dp=4, zero=3, item=2),
    "recomputed": Plan(dp=4, recompute=True),
    "pipeline": Plan(pp=4, m=8),
    "pipeline of two": Plan(pp=2, m=8),
    "interleaved": Plan(pp=2, m=8, v=2),
    "tensor": Plan(tp=4),
    "tensor, recomputed": Plan(tp=4, recompute=True),
    "sequence": Plan(tp=4, sequence=True),
    "sequence, recomputed": Plan(tp=4, sequence=True, recompute=True),
    "ring": Plan(cp=4),
    "ring, recomputed": Plan(cp=4, recompute=True),
    "Ulysses": Plan(cp=4, ulysses=True),
    "Ulysses, recomputed": Plan(cp=4, ulysses=True, recompute=True),
    "experts": Plan(dp=4, ep=4),
    "experts, recomputed": Plan(dp=4, ep=4, recompute=True),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_ranks_send_and_hold_what_was_planned(plan):
    net = EXPERTS if plan.ep > 1 else NET
    sent, counts, peaks = zip(*launch(measure, prod(plan[:4]), plan, timeout=LIMIT))
    planned = planning.sent(net, plan, N)
    if plan.ep > 1:  # here nobody averages
        del planned["dp"]
    # biases, norms and positions are not planned; nor whom a router prefers
    assert max(sent) == pytest.approx(sum(b for _, b in planned.values()), rel=0.04)
    _, _, params = planning.share(net, plan, N)
    here = sum(number / (copies if plan.zero == 3 else 1) for number, copies in params)
    if plan.pp == 1:
        assert max(counts) == pytest.approx(here, rel=0.1)
    activations = planning.held(net, plan, N)["activations"]
    most = 3 if plan.recompute else 2 if plan.item == 2 else 1.5
    assert 0.95 < max(peaks) / activations < most


SMALL = Transformer(4, 8, 4, 16, 96, q=8, kv=2, expert=32, num_experts=4, top_k=2)


@pytest.mark.parametrize(
    "axis, messages, nbytes, plan",  # of 8 sequences of 4 tokens, by hand
    [
        ("cp", 40, 2560, Plan(cp=4, tp=2)),  # 10 turns of keys and values per block
        ("cp", 40, 3584, Plan(cp=4, item=2)),  # 6 of 16 bits, and 4 of float32
        ("cp", 16, 1920, Plan(cp=4, tp=2, ulysses=True)),
        ("ep", 16, 6144, Plan(dp=4, ep=4)),
        ("pp", 8, 1024, Plan(pp=4, tp=2, m=4, sequence=True)),
        ("pp", 8, 2048, Plan(pp=4, tp=2, m=4)),
        ("tp", 108, 13824, Plan(tp=4, pp=2, m=2)),  # half of the blocks and ends
        ("dp", 6, 6912, Plan(dp=2, cp=2)),
        ("dp", 6, 6912, Plan(dp=4, zero=1)),
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
    few, many = (planning.held(SMALL, Plan(pp=4, m=m), 8) for m in (2, 4))
    assert few == many  # twice the rows of half as many micro-batches


@pytest.mark.parametrize(
    "item, zero, each",  # value, gradient, Adam's two; 16 bits: and a float32 value
    [
        (4, 0, 16),
        (4, 1, 8 + 8 / 4),
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
    hidden = travel - 2 / 3 * (flops / 4 + 7)  # by backward
    assert spent(Plan(dp=4), machine=machine)["dp"] == pytest.approx(hidden)
    assert spent(Plan(dp=2), machine=machine)["dp"] == 0
    deep = net._replace(num_blocks=3)  # two of which are in a stage
    pipe = {"computing": 2 * flops + 28, "pp": 20, "bubble": flops + 14 + 10}
    assert planning.spent(deep, Plan(pp=2, m=2), 4, late) == pipe
    near = late._replace(node=8)
    assert planning.spent(deep, Plan(dp=2, pp=2, m=2), 4, near)["bubble"] == 696
    for zero, hides in enumerate((1 / 3, 1 / 2, 2 / 3, 1)):
        plan = Plan(dp=4, zero=zero, m=2)
        after, during = (
            planning.spent(deep, plan, 8, each) for each in (late, machine)
        )
        hidden = hides * after["computing"]
        assert after["dp"] - during["dp"] == pytest.approx(hidden)


@pytest.mark.parametrize(
    "plan, axis, beta",
    [
        (Plan(tp=8), "tp", 1),
        (Plan(tp=4, cp=2), "cp", 1),
        (Plan(tp=16), "tp", 1),  # eight neighbours share eight far links
        (Plan(tp=2, dp=8), "dp", 2),
        (Plan(cp=16), "cp", 8),  # only one rank's neighbour is in another node
        (Plan(tp=8, dp=2), "dp", 8),
        (Plan(dp=16, ep=16), "ep", 8),  # each rank has its own rows for other nodes
        (Plan(dp=8, pp=2), "pp", 8),
        (Plan(pp=8), "pp", 1),
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


@pytest.mark.parametrize("net", [NET._replace(num_blocks=6), EXPERTS])
def test_all_plans_are_there_once(net):
    plans = list(planning.all_plans(net, 16, 8))
    powers = [1, 2, 4, 8, 16]
    expected = set()
    for cuts in product(powers, repeat=7):
        dp, tp, pp, _, ep, m, v = cuts
        fits = prod(cuts[:4]) == 8 and 16 % (dp * m) == 0 and pp <= net.num_blocks
        fits = fits and ep <= min(dp, net.num_experts or 1)
        ends = net.num_blocks + 2  # an end may be a stage of its own
        if fits and (v == 1 or (pp > 1 and m % pp == 0 and pp * v <= ends and v <= 8)):
            for zero, again in product(range(4), (False, True)):
                expected.add(Plan(*cuts, zero, again, sequence=tp > 1, item=2))
    assert set(plans) == expected and len(plans) == len(expected)


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
