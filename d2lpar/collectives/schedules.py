"""Collectives as data: who sends which chunk to whom, at which step.

A schedule is a function ``k -> steps`` for ``k`` participants. The steps happen one
after the other; the moves of one step happen at the same time. Notebook 03 builds this
file. Sources: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
of workstations" (2009), for the ring; Rabenseifner, "Optimization of collective
reduction operations" (2004), for halving and doubling; Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH" (2005), for the binomial
tree and recursive doubling.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple


class Move(NamedTuple):
    """A message: ``src`` sends ``chunk`` to ``dst``, to be reduced or just taken.

    ``chunk`` is an int, a ``range`` of chunks sent as one message, or None for the
    whole tensor.
    """

    src: int
    dst: int
    chunk: int | range | None
    reduce: bool


Schedule = Callable[[int], list[list[Move]]]


def star(k: int) -> list[list[Move]]:
    """All send whole tensors to participant 0, which adds up and sends the sum back.

    2 steps; the hub receives and sends k - 1 whole tensors. This is the book's
    ``allreduce``.
    """
    collect = [Move(i, 0, None, True) for i in range(1, k)]
    hand_out = [Move(0, i, None, False) for i in range(1, k)]
    return [collect, hand_out] if k > 1 else []


def ring(k: int) -> list[list[Move]]:
    """In each step, all send one chunk to the next one, twice around the ring.

    2(k - 1) steps of one chunk: no participant sends more than 2(k - 1)/k of the
    tensor. After the first k - 1 steps (the reduce-scatter) participant r holds the
    whole sum of chunk r.
    """
    steps = []
    for s in range(k - 1):  # chunk c starts at participant c + 1 and is complete at c
        steps.append([Move(r, (r + 1) % k, (r - s - 1) % k, True) for r in range(k)])
    for s in range(k - 1):  # and goes round once more, to be taken by all
        steps.append([Move(r, (r + 1) % k, (r - s) % k, False) for r in range(k)])
    return steps


def tree(k: int) -> list[list[Move]]:
    """Pairs, then pairs of pairs: the sum climbs a tree to 0 and comes back.

    2·ceil(log2 k) steps, each of whole tensors.
    """
    up, distance = [], 1
    while distance < k:
        senders = range(distance, k, 2 * distance)
        up.append([Move(r, r - distance, None, True) for r in senders])
        distance *= 2
    down = [[Move(m.dst, m.src, None, False) for m in step] for step in reversed(up)]
    return up + down


def direct(k: int) -> list[list[Move]]:
    """Participant c adds up chunk c from all the others, and hands the sum to all.

    2 steps of k - 1 chunks per participant: exercise 3 of the book's section on several
    GPUs.
    """
    pairs = [(r, (r + i) % k) for i in range(1, k) for r in range(k)]
    collect = [Move(src, dst, dst, True) for src, dst in pairs]
    hand_out = [Move(src, dst, src, False) for src, dst in pairs]
    return [collect, hand_out] if k > 1 else []


def halving_doubling(k: int) -> list[list[Move]]:
    """Partners swap halves of what they hold, then quarters, …, and back again.

    For a power of two: 2·log2 k steps and the ring's bytes. Otherwise the first
    2^floor(log2 k) do that; the others hand in whole tensors one step before, and get
    the result one step after.
    """
    p = 1 << (k.bit_length() - 1)
    fold = [Move(r, r - p, None, True) for r in range(p, k)]
    unfold = [Move(r - p, r, None, False) for r in range(p, k)]
    halving, doubling = [], []
    m = p // 2
    # partners are m apart; a block of m chunks, aligned at a multiple of m, is swapped
    while m:
        # the block that r keeps
        block = [range(r // m * m, r // m * m + m) for r in range(p)]
        halving.append([Move(r, r ^ m, block[r ^ m], True) for r in range(p)])
        doubling.append([Move(r, r ^ m, block[r], False) for r in range(p)])
        m //= 2
    steps = [fold] + halving + doubling[::-1] + [unfold]
    return [step for step in steps if step]


def recursive_doubling(k: int) -> list[list[Move]]:
    """Partners exchange whole tensors and both add; then pairs of partners.

    floor(log2 k) steps of whole tensors, and two more unless k is a power of two.
    """
    p = 1 << (k.bit_length() - 1)
    fold = [Move(r, r - p, None, True) for r in range(p, k)]
    unfold = [Move(r - p, r, None, False) for r in range(p, k)]
    doubling, m = [], 1
    while m < p:
        doubling.append([Move(r, r ^ m, None, True) for r in range(p)])
        m *= 2
    return [step for step in [fold, *doubling, unfold] if step]


def tree_broadcast(k: int, src: int = 0) -> list[list[Move]]:
    """The second half of ``tree``, renumbered so that ``src`` is the root."""
    steps = tree(k)
    return [
        [Move((m.src + src) % k, (m.dst + src) % k, None, False) for m in step]
        for step in steps[len(steps) // 2 :]
    ]


def steps_of(schedule: Schedule, k: int, *args) -> list[list[Move]]:
    """Return the steps as lists, also where a schedule yields its steps or moves."""
    return [list(step) for step in schedule(k, *args)]


def num_chunks(steps: Sequence[Sequence[Move]]) -> int:
    """Return how many chunks a schedule cuts the tensor into: 1 + the largest named."""
    named = [m.chunk for step in steps for m in step if m.chunk is not None]
    return 1 + max((c[-1] if isinstance(c, range) else c for c in named), default=0)


def chunks_of(move: Move, n: int) -> range:
    """Return the chunks that a move carries, of the ``n`` that make up the tensor."""
    if move.chunk is None:
        return range(n)
    return (
        move.chunk
        if isinstance(move.chunk, range)
        else range(move.chunk, move.chunk + 1)
    )


def check_steps(steps: Sequence[Sequence[Move]], k: int) -> None:
    """Raise ValueError unless the moves of each step can happen at the same time.

    A chunk that is sent must not be written in the same step, nor one that is taken be
    written twice: nobody could say which comes first. The exception is an exchange: two
    participants send each other the same chunk, to reduce it, and no other message in
    this step.
    """
    for m in chain.from_iterable(steps):
        chunks = chunks_of(m, 1)
        if m.src == m.dst or not (0 <= m.src < k and 0 <= m.dst < k):
            raise ValueError(
                f"{m} does not send a chunk between two of {k} participants"
            )
        if not chunks or chunks.start < 0 or chunks.step != 1:
            raise ValueError(
                f"{m} names no chunk: a number from 0, a range of them, or None"
            )
    n = num_chunks(steps)
    for number, step in enumerate(steps, start=1):
        sent = Counter((m.src, c) for m in step for c in chunks_of(m, n))
        written = Counter((m.dst, c) for m in step for c in chunks_of(m, n))
        taken = {(m.dst, c) for m in step if not m.reduce for c in chunks_of(m, n)}
        exchanged = {(m.dst, c) for m in exchanges(step) for c in chunks_of(m, n)}
        for participant, chunk in taken:
            if written[participant, chunk] > 1:
                raise ValueError(
                    f"in step {number} participant {participant} takes chunk {chunk}"
                    " while another message writes to it, too: use two steps"
                )
        for place in sent.keys() & written.keys():
            if place not in exchanged or sent[place] + written[place] > 2:
                raise ValueError(
                    f"in step {number} participant {place[0]} sends chunk {place[1]}"
                    " while it is overwritten: use two steps, or let two exchange the"
                    " chunk and both reduce it"
                )


def exchanges(step: Sequence[Move]) -> set[Move]:
    """Return the moves by which two participants swap one chunk, and no more."""
    moves, messages = set(step), Counter((m.src, m.dst) for m in step)
    return {
        m
        for m in step
        if m.reduce and (m.dst, m.src, m.chunk, True) in moves
        if messages[m.src, m.dst] == messages[m.dst, m.src] == 1
    }


# The same steps come again with every tensor. They are compared, and not the functions
# that make them, which may return other steps tomorrow.
_check_once = lru_cache(maxsize=128)(check_steps)


def checked_steps(schedule: Schedule, k: int) -> list[list[Move]]:
    """Return ``schedule(k)``'s steps; ``check_steps`` checks equal ones only once."""
    steps = steps_of(schedule, k)
    _check_once(tuple(map(tuple, steps)), k)
    return steps


@lru_cache(maxsize=1024)
def sent_and_written(step: tuple[Move, ...], n: int) -> frozenset[tuple[int, int]]:
    """Return each (participant, chunk), of ``n``, that a step both sends and writes."""
    sent = {(m.src, c) for m in step for c in chunks_of(m, n)}
    return frozenset(
        sent.intersection((m.dst, c) for m in step for c in chunks_of(m, n))
    )


def holdings(
    steps: Sequence[Sequence[Move]], k: int
) -> list[list[list[tuple[int, ...]]]]:
    """Check ``steps``; return who holds what at the start and after each step.

    ``holdings(steps, k)[step][participant][chunk]`` is a sorted tuple of those whose
    contribution is in that chunk; one that was added twice stands there twice. Step 0
    is the start.
    """
    steps = [list(step) for step in steps]  # a generator would be used up by the check
    check_steps(steps, k)
    n = num_chunks(steps)
    states = [[[(participant,)] * n for participant in range(k)]]
    for step in steps:
        before, after = states[-1], [list(held) for held in states[-1]]
        for m in step:
            for c in chunks_of(m, n):
                got = before[m.src][c]
                after[m.dst][c] = (
                    tuple(sorted(after[m.dst][c] + got)) if m.reduce else got
                )
        states.append(after)
    return states


def verify_allreduce(schedule: Schedule, k: int) -> None:
    """Raise ValueError unless ``schedule(k)`` gives each every contribution once."""
    for r, held in enumerate(holdings(schedule(k), k)[-1]):
        for c, contributions in enumerate(held):
            if contributions != tuple(range(k)):
                wrong = (
                    f"participant {r} ends with the contributions {contributions} in"
                    f" chunk {c}"
                )
                raise ValueError(f"{wrong}, not with those of 0 to {k - 1}, each once")
