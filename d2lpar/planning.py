"""Chapter 17. Planning: what a training step of a GPT takes on many devices.

A plan says into how many parts a step is cut. What each rank sends, holds and waits for
follows from a few numbers. Sources, on arXiv: 2104.04473 and 2205.05198 (Megatron),
1910.02054 (ZeRO).
"""

import time
from itertools import product
from math import ceil
from typing import NamedTuple

import torch

from . import ranks


class Transformer(NamedTuple):
    """A GPT in numbers."""

    num_blocks: int
    width: int
    length: int  # tokens of a sequence
    vocab_size: int
    weights: int  # of a block, which every token meets
    q: int  # width of a token's queries
    kv: int  # width of its keys, and of its values
    expert: int = 0  # weights of one expert
    num_experts: int = 0  # of a block
    top_k: int = 0  # of these, for each token


def gpt_numbers(num_blocks, width, length, vocab_size):
    """Return the numbers of ``gpt``, but for biases, norms and positions."""
    sizes = num_blocks, width, length, vocab_size
    return Transformer(*sizes, weights=12 * width**2, q=width, kv=width)


def forward_flops(net):
    """Return the floating-point operations of a token's forward pass."""
    met = net.weights + net.top_k * net.expert  # a product and a sum with each
    attention = net.length * net.q  # scores and values, of length / 2 tokens
    return 2 * (net.num_blocks * (met + attention) + net.vocab_size * net.width)


class Machine(NamedTuple):
    """Devices in nodes, and links: (alpha, beta), seconds per message and per byte."""

    flops: float  # per second and device
    near: tuple[float, float]  # the link inside a node
    far: tuple[float, float] = (0.0, 0.0)  # between nodes
    node: int = 8  # devices
    memory: float = 80e9  # bytes of a device
    overhead: float = 0.0  # seconds of a block, however little it computes
    overlap: bool = True  # whether gradients travel while devices compute


def time_in_turn(steps, rounds=7):
    """Return {name: seconds per round} of {name: function}; the slowest rank counts."""
    seconds, names = {name: [] for name in steps}, list(steps)
    for _ in range(1 + rounds):  # the first one warms up
        for name in names:
            ranks.agree(name)
            begin = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - begin)
        names.reverse()
    own = torch.tensor([list(seconds.values())], dtype=torch.float64)
    return dict(zip(seconds, ranks.all_gather(own).amax(dim=0)[:, 1:].tolist()))


class Plan(NamedTuple):
    """How a step is cut, for dp · tp · pp · cp devices."""

    dp: int = 1  # parts of the batch
    tp: int = 1  # of each layer
    pp: int = 1  # of the stack of blocks
    cp: int = 1  # of each sequence
    ep: int = 1  # of the experts, among the ranks of dp
    m: int = 1  # micro-batches
    v: int = 1  # stages of a rank
    zero: int = 0  # 1 shards the optimiser's state, 2 gradients too, 3 parameters too
    recompute: bool = False  # each block, in backward
    sequence: bool = False  # sequence parallelism, with tp
    ulysses: bool = False  # instead of ring attention, with cp
    item: int = 4  # bytes per number, except for gradients: these have 4


def axes(plan):
    """Return {axis: (distance of neighbours, number of ranks)}; tp is the nearest."""
    dp, tp, pp, cp, ep = plan[:5]
    found = {"tp": (1, tp), "cp": (tp, cp), "ep": (tp * cp, ep)}
    found |= {"dp": (tp, cp * dp), "pp": (tp * cp * dp, pp)}  # cp averages, too
    return {axis: (stride, size) for axis, (stride, size) in found.items() if size > 1}


def share(net, plan, n):
    """Return a rank's tokens in a micro-batch, blocks, and [(parameters, copies)]."""
    k, tokens = plan.dp * plan.cp, n * net.length / (plan.dp * plan.cp * plan.m)
    blocks = plan.v * ceil(net.num_blocks / plan.pp / plan.v)
    ends = net.vocab_size * net.width * (2 if plan.pp == 1 else 1) / plan.tp
    dense = blocks * net.weights / plan.tp
    experts = blocks * net.num_experts * net.expert / plan.ep / plan.tp
    return tokens, blocks, [(ends, k), (dense, k), (experts, k // plan.ep)]


def sent(net, plan, n):
    """Return {axis: (messages, bytes)}: what a rank sends in a step of n sequences."""
    tokens, blocks, params = share(net, plan, n)
    q, kv, rows = (tokens * x * plan.item for x in (net.q, net.kv, net.width))
    tp, pp, cp, ep, m = plan[1:6]
    again, sequence = plan.recompute, plan.sequence
    halves = 8 + 2 * sequence + (2 + sequence) * again  # not a block's last sum again
    turns, grads = (2 + again) * (cp - 1), cp * 4 / plan.item  # these are float32
    per_block = {  # calls, messages of each, bytes of each
        "tp": (halves, tp - 1, (1 - 1 / tp) * rows),
        "cp": (1, turns + cp, (turns + grads) * 2 * kv / tp),
        "ep": (4 + 2 * again, 1, (1 - 1 / ep) * net.top_k * rows),
    }
    if plan.ulysses:
        per_block["cp"] = 4 + 2 * again, 1, (1 - 1 / cp) * (q + kv) / tp
    # forward and back; of two ranks, each has an end, which sends once less
    travels = m * (2 * plan.v - (pp == 2))
    found = {"pp": (travels, travels * rows / (tp if sequence else 1))}
    for axis, (calls, messages, nbytes) in per_block.items():
        calls *= m * (blocks + (0.5 / pp if axis == "tp" else 0))  # embedding and head
        found[axis] = calls * messages, calls * nbytes
    # with zero = 0, 1, 2 and 3:
    per_param = [8, 4 + plan.item, 4 * m + plan.item, (4 + 2 * plan.item) * m]
    num_calls = [2, 2, 12 * m * blocks + 1, 3 * m * blocks]  # zero=2: of 12 tensors
    rest = sum((1 - 1 / k) * number for number, k in params)
    found["dp"] = num_calls[plan.zero] * (plan.dp * cp - 1), per_param[plan.zero] * rest
    return {axis: found[axis] for axis in axes(plan)}


def held(net, plan, n):
    """Return what the fullest rank holds: bytes of parameters, and of activations."""
    tokens, blocks, params = share(net, plan, n)
    each = [4, 4, 8] if plan.item == 4 or plan.zero == 3 else [2, 4, 12]
    whole, cut = sum(each[: 3 - plan.zero]), sum(each[3 - plan.zero :])
    own = sum(number * (whole + cut / k) for number, k in params)
    if plan.zero == 3:  # both ends are whole, and one block; their gradients, too
        ends, *of_blocks = [number for number, _ in params]
        own += (plan.item + 4) * (ends + sum(of_blocks) / blocks)
    divided = plan.tp if plan.sequence else 1
    of_block = 4 / divided + 12 / plan.tp
    alive = plan.pp if plan.v == 1 else plan.pp + (plan.pp - 1) / plan.v
    kept = min(alive, plan.m) * blocks * of_block
    if plan.recompute:  # inputs of blocks, and one whole block
        kept = min(alive, plan.m) * blocks / divided + of_block
    logits = net.vocab_size / plan.tp if plan.pp == 1 else 0  # float32, and softmax
    activations = tokens * (kept * net.width * plan.item + 8 * logits)
    return {"parameters": own, "activations": activations}


def link_of(axis, plan, machine):
    """Return (alpha, beta) of the links that an axis uses."""
    stride, size = axes(plan)[axis]
    if stride * size <= machine.node:
        return machine.near
    links = max(1, machine.node // stride) if axis in ("tp", "dp") else 1  # in a ring
    return machine.far[0], max(machine.far[1] / links, machine.near[1])


def spent(net, plan, n, machine):
    """Return for what the seconds of a step are spent: computing, axes, the bubble."""
    tokens, blocks, _ = share(net, plan, n)
    flops = forward_flops(net._replace(num_blocks=blocks * plan.pp)) / plan.pp / plan.tp
    passes = 4 if plan.recompute else 3  # of the length of forward; backward is two
    forward = flops * tokens / machine.flops + blocks * machine.overhead / 3
    found = {"computing": plan.m * passes * forward}
    for axis, (messages, nbytes) in sent(net, plan, n).items():
        alpha, beta = link_of(axis, plan, machine)
        found[axis] = messages * alpha + nbytes * beta
    stage = sum(found[axis] for axis in found if axis != "dp") / plan.m / plan.v
    if machine.overlap and "dp" in found:  # the last backward, micro-batch, or all
        hides = [(1 - 1 / passes) / plan.m, 1 / plan.m, 1 - 1 / passes, 1][plan.zero]
        found["dp"] = max(0, found["dp"] - hides * found["computing"])
    return found | {"bubble": (plan.pp - 1) * stage}


def all_plans(net, n, k):
    """Yield the plans for n sequences on k devices, powers of two, in 16 bits."""
    powers = [2**i for i in range(max(n, k).bit_length())]
    for dp, tp, pp, cp in product(powers, repeat=4):
        if dp * tp * pp * cp != k or n % dp or pp > net.num_blocks:
            continue
        eps = [ep for ep in powers if ep <= max(1, min(dp, net.num_experts))]
        ms = [m for m in powers if n // dp % m == 0]
        vs = [v for v in powers[:4] if v == 1 or 1 < pp <= (net.num_blocks + 2) / v]
        for ep, m, v, zero, again in product(eps, ms, vs, range(4), (False, True)):
            if v == 1 or m % pp == 0:  # interleaved, in rounds of pp
                yield Plan(dp, tp, pp, cp, ep, m, v, zero, again, tp > 1, item=2)


def fastest(net, n, k, machine, count=1):
    """Return the ``count`` fastest plans that fit, as (seconds, plan)."""
    timed = []
    for plan in all_plans(net, n, k):
        if sum(held(net, plan, n).values()) <= machine.memory:
            timed.append((sum(spent(net, plan, n, machine).values()), plan))
    return sorted(timed)[:count]
