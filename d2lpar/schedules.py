"""Chapter 03. Collectives as data: who sends which chunk to whom, at which step.

A schedule is a function ``k -> steps`` for ``k`` participants. The steps happen one
after the other; the moves of one step happen at the same time. Chapter 03 writes this
file. Sources: Patarasu and Yuan (2009) for the ring; Rabenseifner (2004) for halving
and doubling; Thakur, Rabenseifner and Gropp (2005) for the tree, recursive doubling and
what all of them cost.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple


class Move(NamedTuple):
    """A message: ``src`` sends ``chunk`` to ``dst``, which reduces or takes it.

    ``chunk`` is an int, a ``range`` of chunks sent as one message, or None for the
    whole tensor.
    """

    src: int
    dst: int
    chunk: int | range | None
    reduce: bool


Steps = Sequence[Sequence[Move]]
Schedule = Callable[[int], Steps]


def star(k: int) -> Steps:
    """All send whole tensors to participant 0, which adds up and sends the sum back."""
    collect = [Move(r, 0, None, True) for r in range(1, k)]
    hand_out = [Move(0, r, None, False) for r in range(1, k)]
    return [collect, hand_out] if k > 1 else []


def ring(k: int) -> Steps:
    """In each step, all send one chunk to the next one, twice around the ring.

    After the first k - 1 steps, the reduce-scatter, participant r has the whole sum of
    chunk r.
    """
    steps = []
    for s in range(k - 1):  # chunk c starts at participant c + 1 and is complete at c
        steps.append([Move(r, (r + 1) % k, (r - s - 1) % k, True) for r in range(k)])
    for s in range(k - 1):  # and goes round once more, to be taken by all
        steps.append([Move(r, (r + 1) % k, (r - s) % k, False) for r in range(k)])
    return steps


def tree(k: int) -> Steps:
    """Pairs, then pairs of pairs: the sum climbs a tree to 0 and comes back."""
    up, distance = [], 1
    while distance < k:
        senders = range(distance, k, 2 * distance)
        up.append([Move(r, r - distance, None, True) for r in senders])
        distance *= 2
    down = [[Move(m.dst, m.src, None, False) for m in step] for step in reversed(up)]
    return up + down


def tree_broadcast(k: int, src: int = 0) -> Steps:
    """The second half of ``tree``, renumbered so that ``src`` is the root."""
    down = tree(k)[len(tree(k)) // 2 :]
    return [
        [Move((m.src + src) % k, (m.dst + src) % k, None, False) for m in step]
        for step in down
    ]


def direct(k: int) -> Steps:
    """Participant c adds up chunk c from all the others, and hands the sum to all."""
    pairs = [(r, (r + i) % k) for i in range(1, k) for r in range(k)]
    collect = [Move(src, dst, dst, True) for src, dst in pairs]
    hand_out = [Move(src, dst, src, False) for src, dst in pairs]
    return [collect, hand_out] if k > 1 else []


def recursive_doubling(k: int) -> Steps:
    """Partners exchange whole tensors and both add; then pairs of partners."""
    p, steps, distance = power_of_two(k), [], 1
    while distance < p:
        steps.append([Move(r, r ^ distance, None, True) for r in range(p)])
        distance *= 2
    return folded(steps, p, k)


def halving_doubling(k: int) -> Steps:
    """Partners swap halves of what they hold, then quarters, …, and back again."""
    p, halving, doubling = power_of_two(k), [], []
    m = p // 2
    while m:  # partners are m apart, and each keeps a block of m chunks
        kept = [range(r // m * m, r // m * m + m) for r in range(p)]
        halving.append([Move(r, r ^ m, kept[r ^ m], True) for r in range(p)])
        doubling.append([Move(r, r ^ m, kept[r], False) for r in range(p)])
        m //= 2
    return folded(halving + doubling[::-1], p, k)


def power_of_two(k: int) -> int:
    """Return the largest power of two up to ``k``."""
    return 1 << (k.bit_length() - 1)


def folded(steps: Steps, p: int, k: int) -> Steps:
    """Let ``p`` and beyond hand in their tensors before, and get the sum after."""
    if p == k:
        return steps
    hand_in = [Move(r, r - p, None, True) for r in range(p, k)]
    get_back = [Move(r - p, r, None, False) for r in range(p, k)]
    return [hand_in, *steps, get_back]


def two_level(k: int, size: int = 4) -> Steps:
    """Reduce-scatter in each node of ``size``, allreduce between nodes, all-gather.

    Participants 0 to size - 1 are in node 0, and so on. The i-th of each node sums
    block i of the tensor, of one chunk per node, around a ring of nodes.
    """
    if k % size:
        raise ValueError(f"{k} participants do not make whole nodes of {size}")
    nodes = k // size
    inside = []
    for step in ring(size):
        moves = []
        for first in range(0, k, size):
            for m in step:
                block = range(m.chunk * nodes, (m.chunk + 1) * nodes)
                moves.append(Move(first + m.src, first + m.dst, block, m.reduce))
        inside.append(moves)
    between = []
    for step in ring(nodes):
        moves = []
        for i in range(size):
            for m in step:
                src, dst = m.src * size + i, m.dst * size + i
                moves.append(Move(src, dst, i * nodes + m.chunk, m.reduce))
        between.append(moves)
    return inside[: size - 1] + between + inside[size - 1 :]


def num_chunks(steps: Steps) -> int:
    """Return how many chunks a schedule cuts the tensor into: 1 + the largest named."""
    named = [m.chunk for step in steps for m in step if m.chunk is not None]
    return max((c.stop if isinstance(c, range) else c + 1 for c in named), default=1)


def chunks_of(move: Move, n: int) -> range:
    """Return the chunks that a move carries, of the ``n`` that make up the tensor."""
    if move.chunk is None:
        return range(n)
    if isinstance(move.chunk, range):
        return move.chunk
    return range(move.chunk, move.chunk + 1)


def even_bounds(numel: int, n: int) -> list[int]:
    """Return where ``tensor_split`` cuts: chunk c is bounds[c] to bounds[c + 1]."""
    each, larger = divmod(numel, n)  # the first ones have one element more
    return [c * each + min(c, larger) for c in range(n + 1)]


def check_steps(steps: Steps, k: int) -> None:
    """Raise ValueError unless the moves of each step can happen at the same time.

    A chunk that is sent must not be written in the same step, and one that is taken
    must be written only once. But two may exchange a chunk, if both reduce it and
    nothing else passes between them.
    """
    n = num_chunks(steps)
    for number, step in enumerate(steps, start=1):
        sent, written = defaultdict(list), defaultdict(list)
        for m in step:
            chunks = chunks_of(m, n)
            if m.src == m.dst or not (0 <= m.src < k and 0 <= m.dst < k):
                raise ValueError(f"{m} is not between two of {k} participants")
            if not chunks or chunks[0] < 0 or chunks.step != 1:
                raise ValueError(f"{m} names no chunk: a number, a range, or None")
            for chunk in chunks:
                sent[m.src, chunk].append(m)
                written[m.dst, chunk].append(m)
        for (r, chunk), moves in written.items():
            if problem := conflict(sent[r, chunk], moves, step):
                where = f"in step {number} chunk {chunk} of participant {r}"
                raise ValueError(f"{where} {problem}")


def conflict(sent: list[Move], written: list[Move], step: list[Move]) -> str:
    """Return why a chunk cannot be sent and written by these moves of a step, or ""."""
    if not sent:
        if len(written) == 1 or all(m.reduce for m in written):
            return ""
        return "arrives more than once, and is not reduced each time: use two steps"
    m = sent[0]  # allowed if it and its mirror image are all that the two send
    back = Move(m.dst, m.src, m.chunk, True)
    between = [move for move in step if {move.src, move.dst} == {m.src, m.dst}]
    if m.reduce and [*sent, *written] == [m, back] and len(between) == 2:
        return ""
    return (
        "is sent, and the same step changes it: use two steps, or let two exchange it"
        " and nothing else, and both reduce it"
    )


@lru_cache(maxsize=128)
def fingerprint(steps: Steps, k: int) -> str:
    """Check steps, in tuples; return a few letters that tell them from others."""
    check_steps(steps, k)
    return blake2b(repr(steps).encode(), digest_size=4).hexdigest()


def checked_steps(schedule: Schedule, k: int) -> Steps:
    """Return the steps of a schedule once they are checked."""
    steps = tuple(map(tuple, schedule(k)))
    fingerprint(steps, k)
    return steps


def holdings(steps: Steps, k: int) -> list[list[list[tuple[int, ...]]]]:
    """Return who holds what at the start and after each step.

    ``holdings(steps, k)[step][participant][chunk]`` is a sorted tuple of those whose
    contribution is in that chunk; one that was added twice stands there twice.
    """
    check_steps(steps, k)
    n = num_chunks(steps)
    states = [[[(participant,)] * n for participant in range(k)]]
    for step in steps:
        before, after = states[-1], [list(held) for held in states[-1]]
        for m in step:
            for c in chunks_of(m, n):
                own = after[m.dst][c] if m.reduce else ()
                after[m.dst][c] = tuple(sorted(own + before[m.src][c]))
        states.append(after)
    return states


def verify_allreduce(schedule: Schedule, k: int) -> None:
    """Raise ValueError unless all end with every contribution exactly once."""
    for r, held in enumerate(holdings(schedule(k), k)[-1]):
        for c, contributions in enumerate(held):
            if contributions != tuple(range(k)):
                raise ValueError(
                    f"participant {r} ends with the contributions {contributions} in"
                    f" chunk {c}, not with those of 0 to {k - 1}, each once"
                )


class Cost(NamedTuple):
    """What it costs to run a schedule once."""

    steps: int
    seconds: float
    bytes: Counter  # of each link (src, dst)

    def sent(self, participant: int) -> int:
        """Return the bytes that leave a participant."""
        return sum(n for (src, _), n in self.bytes.items() if src == participant)


def cost(
    schedule: Schedule, k: int, nbytes: int, link=lambda src, dst: (1e-5, 1e-10)
) -> Cost:
    """Follow the moves of a schedule with a clock, for float32 numbers of ``nbytes``.

    ``link(src, dst)`` returns a link's alpha, in seconds per message, and beta, in
    seconds per byte: a message of n bytes takes alpha + n * beta (Hockney, 1994). A
    participant sends the messages of a step one after the other, and receives at the
    same time; the step ends when the busiest one is done.
    """
    steps = checked_steps(schedule, k)
    bounds = even_bounds(nbytes // 4, num_chunks(steps))
    seconds, sizes = 0.0, Counter()
    for step in steps:
        busy = Counter()  # seconds of each participant
        for m in step:
            chunks = chunks_of(m, len(bounds) - 1)
            size = 4 * (bounds[chunks.stop] - bounds[chunks.start])
            alpha, beta = link(m.src, m.dst)
            busy["sends", m.src] += alpha + size * beta
            busy["receives", m.dst] += alpha + size * beta
            sizes[m.src, m.dst] += size
        seconds += max(busy.values(), default=0.0)
    return Cost(len(steps), seconds, sizes)
