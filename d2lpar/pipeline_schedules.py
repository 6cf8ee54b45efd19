"""Chapter 12. Pipelines as data: which rank does what, in which order.

A schedule is a function ``(p, m) -> orders``: for p ranks and m micro-batches, a list
of actions per rank. Sources, on arXiv: 1811.06965 (GPipe), 2006.09503 (1F1B),
2104.04473 (interleaved 1F1B), 2401.10241 (zero bubble).
"""

from collections import Counter, deque
from itertools import accumulate, chain, product
from typing import NamedTuple

KINDS = {"F": "forward", "B": "backward", "W": "weight"}


class Action(NamedTuple):
    """A pass of ``microbatch`` on ``stage``: "forward", "backward" or "weight".

    With a "weight", "backward" computes the gradient of the input alone.
    """

    stage: int
    microbatch: int
    kind: str

    def __str__(self):
        stage, i, kind = self
        return f"{kind} pass of micro-batch {i} on stage {stage}"


def spell(word, *stages):
    """Return the actions of a word: in "FFBB", the second F is that of micro-batch 1.

    Capital letters are passes of the first stage, small letters of the second.
    """
    order = []
    for n, letter in enumerate(word):
        stage = stages[0] if letter.isupper() else stages[1]
        order.append(Action(stage, word[:n].count(letter), KINDS[letter.upper()]))
    return order


def sequential(p, m):
    """One micro-batch at a time, forward and back: the plain split."""
    return [spell("FB" * m, r) for r in range(p)]


def gpipe(p, m):
    """All micro-batches forward, then all backward: a rank keeps up to m."""
    return [spell("F" * m + "B" * m, r) for r in range(p)]


def one_f_one_b(p, m):
    """After p - r forward passes, rank r does one backward, one forward, in turn."""
    orders = []
    for r in range(p):
        warm_up = min(m, p - r)
        word = "F" * warm_up + "BF" * (m - warm_up) + "B" * warm_up
        orders.append(spell(word, r))
    return orders


def in_rounds(kind, stages, p, m):
    """Return passes of p micro-batches on each stage in turn, then of the next p."""
    passes = product(range(0, m, p), stages, range(p))
    return [Action(stage, first + i, kind) for first, stage, i in passes]


def interleaved(p, m, v=2, ahead=2):
    """1F1B with v stages per rank, warmed up by ``ahead`` passes per later rank."""
    if m % p:
        raise ValueError(f"{p} ranks take rounds of {p} micro-batches: {m} do not fit")
    orders = []
    for r in range(p):
        stages = range(r, v * p, p)
        forward = in_rounds("forward", stages, p, m)
        backward = in_rounds("backward", stages[::-1], p, m)
        warm_up = min(v * m, (v - 1) * p + ahead * (p - 1 - r) + 1)
        turns = chain(*zip(backward, forward[warm_up:]))  # as long as there are both
        orders.append([*forward[:warm_up], *turns, *backward[len(forward) - warm_up :]])
    return orders


def zero_bubble(p, m):
    """ZB-H1: 1F1B in which rank r runs each "weight" up to r micro-batches late."""
    orders = []
    for r in range(p):
        warm_up = min(m, p - r)
        lag = min(r, m - warm_up)
        steady = "BF" * lag + "BWF" * (m - warm_up - lag)
        orders.append(spell("F" * warm_up + steady + "BW" * warm_up + "W" * lag, r))
    return orders


def zero_bubble_v(p, m):
    """ZB-V: micro-batches go down the ranks, and then up again.

    Rank r has the stages r (capitals) and 2p - 1 - r (small letters).
    """
    n, orders = max(m, 2 * p - 1), []
    for r in range(p):
        warm_up = "F" * (2 * (p - r) - 1) + "fF" * r + "fbw" * (p - r)
        steady = "FBWfbw" * (n - 2 * p + 1 + r) + "BWfbw" * (p - 1 - r)
        cool_down = "Bb" * r + "BW" * (p - r) + "w" * r + "W" * r
        order = spell(warm_up + steady + cool_down, r, 2 * p - 1 - r)
        orders.append([a for a in order if a.microbatch < m])  # those that are there
    return orders


def source(action, num_stages):
    """Return the action of another stage whose result ``action`` works on, if any."""
    stage, microbatch, kind = action
    if kind == "forward" and stage > 0:
        return Action(stage - 1, microbatch, kind)
    if kind == "backward" and stage < num_stages - 1:
        return Action(stage + 1, microbatch, kind)


def targets(orders):
    """Return for each action the one on another stage that works on its result."""
    n = len(placement(orders))
    return {source(a, n): a for a in chain(*orders) if source(a, n)}


def needs(action, num_stages):
    """Return the actions that must be done before ``action``."""
    before = [source(action, num_stages)]
    earlier = {"backward": "forward", "weight": "backward"}
    if action.kind in earlier:
        before.append(action._replace(kind=earlier[action.kind]))
    return [need for need in before if need]


def placement(orders):
    """Return on which rank each stage lives, {stage: rank}; raise if it is on two."""
    place = {}
    for rank, order in enumerate(orders):
        for stage, _, _ in order:
            if place.setdefault(stage, rank) != rank:
                raise ValueError(f"stage {stage} is on ranks {place[stage]} and {rank}")
    return dict(sorted(place.items()))


def is_split(orders):
    """Tell whether backward passes are split in two: whether there is a "weight"."""
    return any(action.kind == "weight" for action in chain(*orders))


def check_complete(orders):
    """Raise ValueError unless each micro-batch makes each pass on each stage once."""
    counts = Counter(chain(*orders))
    if not counts:
        raise ValueError("the schedule has no actions")
    num_stages = 1 + max(action.stage for action in counts)
    m = 1 + max(action.microbatch for action in counts)
    kinds = ["forward", "backward"] + ["weight"] * is_split(orders)
    wanted = {Action(*each): 1 for each in product(range(num_stages), range(m), kinds)}
    for action in [*wanted, *counts]:
        if action not in wanted:
            raise ValueError(f"{action!r} is no action of a pipeline")
        if counts[action] != wanted[action]:
            raise ValueError(f"{action} occurs {counts[action]} times, not once")


def play(orders):
    """Let the ranks go through their lists; return the ticks, lists of actions.

    In a tick each rank does its next action, if all that it needs was done before. A
    ValueError says which action is missing or there twice, or which waits for which.
    """
    check_complete(orders)
    num_stages = len(placement(orders))
    todo, done, ticks = [deque(order) for order in orders], set(), []
    while any(todo):
        heads = [actions[0] for actions in todo if actions]
        tick = [head for head in heads if done.issuperset(needs(head, num_stages))]
        if not tick:
            lacks = [n for n in needs(heads[-1], num_stages) if n not in done]
            raise ValueError(f"tick {len(ticks)}: {heads[-1]} waits for {lacks[0]}")
        for actions in todo:
            if actions and actions[0] in tick:
                actions.popleft()
        done.update(tick)
        ticks.append(tick)
    return ticks


class Span(NamedTuple):
    """An action and the time that it took: ``start`` to ``end``."""

    action: Action
    start: float
    end: float


def clock(orders, forward=1.0, backward=1.0, weight=1.0, transfer=0.0):
    """Return when each action begins and ends: a list of spans per rank.

    Ranks begin an action as soon as they are free and its input is there. The costs are
    in any unit, and may be a list with one for each stage. A backward pass that is not
    split costs backward + weight. A result reaches another rank ``transfer`` later:
    messages are late, but they never queue, and senders go on at once.
    """
    ticks, place, split = play(orders), placement(orders), is_split(orders)
    costs = {}
    for kind, cost in zip(KINDS.values(), [forward, backward, weight]):
        costs[kind] = list(cost) if hasattr(cost, "__len__") else [cost] * len(place)
        if len(costs[kind]) != len(place):
            raise ValueError(f"{kind} has {len(cost)} costs for {len(place)} stages")
    free, ends, spans = [0.0] * len(orders), {}, [[] for _ in orders]
    for action in chain(*ticks):
        stage, _, kind = action
        rank, sender = place[stage], source(action, len(place))
        start = free[rank]
        if sender:  # all else was earlier in the rank's list
            travel = transfer if place[sender.stage] != rank else 0.0
            start = max(start, ends[sender] + travel)
        end = start + costs[kind][stage]
        if kind == "backward" and not split:
            end += costs["weight"][stage]
        free[rank] = ends[action] = end
        spans[rank].append(Span(action, start, end))
    return spans


def bubble(spans):
    """Return the idle part of all ranks' time, from the first start to the last end."""
    every = list(chain(*spans))
    total = max(span.end for span in every) - min(span.start for span in every)
    busy = sum(span.end - span.start for span in every)
    return 1 - busy / (len(spans) * total)


def kept(order):
    """Return, after each action of a rank, how many activations it keeps.

    Those of a micro-batch on a stage count as one, until the last pass that needs them.
    """
    last = "weight" if is_split([order]) else "backward"
    changes = {"forward": 1, last: -1}
    return list(accumulate(changes.get(action.kind, 0) for action in order))
