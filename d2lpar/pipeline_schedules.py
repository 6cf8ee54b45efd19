"""Pipelines as data: which stage does what with which micro-batch, and when.

A pipeline schedule is a function ``(num_stages, num_microbatches) -> ticks``. The
actions of one tick happen at the same time. Notebook 12 builds this file. Sources:
Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism" (2019); one forward, one backward is PipeDream-Flush of Narayanan et al.,
"Memory-Efficient Pipeline-Parallel DNN Training" (2021).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, product, starmap
from typing import NamedTuple

from ..guards import checked


class Action(NamedTuple):
    """A pass of ``microbatch`` on ``stage``, of ``kind`` "forward" or "backward"."""

    stage: int
    microbatch: int
    kind: str

    def __str__(self):
        return f"{self.kind} of micro-batch {self.microbatch} on stage {self.stage}"


class Span(NamedTuple):
    """An action with the time that it took: ``start`` to ``end``, in seconds."""

    stage: int
    microbatch: int
    kind: str
    start: float
    end: float


PipelineSchedule = Callable[[int, int], list[list[Action]]]


def sequential(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """One action at a time: each micro-batch passes all stages forward and backward.

    2·m·p ticks for p stages and m micro-batches.
    """
    ticks = []
    for i in range(num_microbatches):
        ticks += [[Action(s, i, "forward")] for s in range(num_stages)]
        ticks += [[Action(s, i, "backward")] for s in reversed(range(num_stages))]
    return ticks


def gpipe(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """All micro-batches forward, one tick apart, and then back the same way: GPipe.

    2(m + p - 1) ticks for p stages and m micro-batches. A stage keeps the activations
    of up to m.
    """
    forward = [[] for _ in range(num_microbatches + num_stages - 1)]
    for s in range(num_stages):
        for i in range(num_microbatches):
            forward[s + i].append(Action(s, i, "forward"))
    backward = [
        [Action(s, i, "backward") for s, i, _ in tick] for tick in reversed(forward)
    ]
    return forward + backward


def one_f_one_b(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Each stage runs backward as soon as it can, then forward again, in turn: 1F1B.

    As many ticks as ``gpipe``, but stage s of p keeps activations of at most p - s
    micro-batches.
    """
    p = num_stages
    ticks = [[] for _ in range(2 * (num_microbatches + p - 1))]
    for s in range(p):
        for i in range(num_microbatches):
            warms_up = i < p - s  # no backward pass is ready yet
            ticks[s + i if warms_up else s + 2 * i].append(Action(s, i, "forward"))
            ticks[2 * p - 1 - s + 2 * i].append(Action(s, i, "backward"))
    return ticks


def source(action: Action, num_stages: int) -> Action | None:
    """Return another stage's action whose result ``action`` works on, if any."""
    s, i, kind = action
    s += -1 if kind == "forward" else 1
    return Action(s, i, kind) if 0 <= s < num_stages else None


def target(action: Action, num_stages: int) -> Action | None:
    """Return another stage's action that works on the result of ``action``, if any."""
    s, i, kind = action
    s += 1 if kind == "forward" else -1
    return Action(s, i, kind) if 0 <= s < num_stages else None


def needs(action: Action, num_stages: int) -> list[Action]:
    """Return the actions that must be done before ``action``."""
    before = [source(action, num_stages)]
    if action.kind == "backward":
        before.append(action._replace(kind="forward"))
    return [need for need in before if need]


def own_actions(ticks: list[list[Action]], stage: int) -> list[Action]:
    """Return what one stage does, in order."""
    return [action for action in chain(*ticks) if action.stage == stage]


def _check_sizes(num_stages, num_microbatches, **_) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"{num_stages} stages and {num_microbatches} micro-batches: need one each"
        )


@checked(_check_sizes)
def check_pipeline(
    ticks: list[list[Action]], num_stages: int, num_microbatches: int
) -> None:
    """Check that the ticks make a step; a ValueError names the first wrong action.

    Every micro-batch passes every stage once forward and once backward, no stage has
    two actions in a tick, and each action comes after those that it needs.
    """
    everything = product(
        range(num_stages), range(num_microbatches), ("forward", "backward")
    )
    # done: action -> its tick
    wanted, done = dict.fromkeys(starmap(Action, everything)), {}
    for tick, actions in enumerate(ticks):
        busy = [action.stage for action in actions]
        for action in actions:
            if action not in wanted:
                sizes = f"{num_stages} stages and {num_microbatches} micro-batches"
                raise ValueError(f"{action!r} is no action of {sizes}")
            if action in done:
                raise ValueError(
                    f"tick {tick}: {action} was done in tick {done[action]}"
                )
            if busy.count(action.stage) > 1:
                raise ValueError(f"tick {tick}: stage {action.stage} has two actions")
            for need in needs(action, num_stages):
                if need not in done:
                    raise ValueError(f"tick {tick}: {action} comes before {need}")
        done |= dict.fromkeys(actions, tick)
    for action in wanted:
        if action not in done:
            raise ValueError(f"{action} is missing")


def check_order(ticks: list[list[Action]], num_stages: int) -> None:
    """Check that neighbours take micro-batches in one order, as messages arrive."""
    order = defaultdict(list)
    for stage, microbatch, kind in chain(*ticks):
        order[kind, stage].append(microbatch)
    for kind, s in product(("forward", "backward"), range(num_stages - 1)):
        if order[kind, s] != order[kind, s + 1]:
            raise ValueError(
                f"stages {s} and {s + 1} process micro-batches {kind} in different"
                " orders"
            )


def _check_times(ticks, forward, backward, **_) -> None:
    num_stages = len({action.stage for action in chain(*ticks)})
    for kind, times in {"forward": forward, "backward": backward}.items():
        if isinstance(times, Sequence) and len(times) != num_stages:
            raise ValueError(f"{kind} has {len(times)} times for {num_stages} stages")


@checked(_check_times)
def predict(
    ticks: list[list[Action]],
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    transfer: float = 0.0,
) -> list[Span]:
    """Return when each action begins and ends, in the order in which they end.

    A stage makes its actions in the order of the ticks, each as soon as it is free and
    its input has come. ``forward`` and ``backward`` are seconds per micro-batch, of all
    stages or a list for each. After ``transfer`` seconds the next stage has a result;
    the sender does not wait.
    """
    num_stages = len({action.stage for action in chain(*ticks)})
    seconds = {
        kind: times if isinstance(times, Sequence) else [times] * num_stages
        for kind, times in {"forward": forward, "backward": backward}.items()
    }
    free, ends, spans = [0.0] * num_stages, {}, []
    for action in chain(*ticks):
        need = source(action, num_stages)
        arrives = ends[need] + transfer if need else 0.0
        start = max(free[action.stage], arrives)
        end = start + seconds[action.kind][action.stage]
        free[action.stage] = ends[action] = end
        spans.append(Span(*action, start, end))
    return sorted(spans, key=lambda span: (span.end, span.start))


def bubble(spans: Iterable[Span]) -> float:
    """Return the idle part of stages' time, 0 to 1, from first start to last end.

    With m micro-batches and p equal stages it is (p - 1)/(m + p - 1) in ``gpipe`` and
    1F1B.
    """
    spans = list(spans)
    duration = max(span.end for span in spans) - min(span.start for span in spans)
    num_stages = len({span.stage for span in spans})
    busy = sum(span.end - span.start for span in spans)
    return 1 - busy / (num_stages * duration) if duration else 0.0


def live_counts(actions: Iterable[Action | Span]) -> dict[int, list[int]]:
    """Return how many micro-batches' activations each stage keeps after each action."""
    counts = defaultdict(list)
    for action in actions:
        before = counts[action.stage][-1] if counts[action.stage] else 0
        counts[action.stage].append(before + (1 if action.kind == "forward" else -1))
    return dict(sorted(counts.items()))
