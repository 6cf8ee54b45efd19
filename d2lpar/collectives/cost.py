"""What a schedule costs: steps, bytes sent, and seconds on an alpha-beta model.

The model is Hockney's (1994): a message of n bytes takes ``alpha + n * beta`` seconds.
In a step a participant sends its messages one after the other, and receives at the same
time; the busiest one decides how long the step takes. The closed forms follow Thakur,
Rabenseifner and Gropp (2005).
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

from ..guards import checked
from .schedules import (
    Schedule,
    check_steps,
    chunks_of,
    direct,
    halving_doubling,
    num_chunks,
    ring,
    star,
    steps_of,
    tree,
)


@dataclass(frozen=True)
class Cost:
    """The cost of running a schedule once."""

    steps: int
    sent: tuple[int, ...]  # bytes, by each participant
    received: tuple[int, ...]
    busiest_link: int  # bytes; a link has one source and one destination
    seconds: float


def check_numbers(k, nbytes, alpha, beta, itemsize, **_) -> None:
    """Refuse numbers that no tensor and no network have."""
    if k < 1 or itemsize < 1:
        raise ValueError(f"k and itemsize must be positive, not {k} and {itemsize}")
    if not (nbytes >= 0 and alpha >= 0 and beta >= 0):
        raise ValueError(
            f"nbytes, alpha, beta must not be negative: {nbytes}, {alpha}, {beta}"
        )
    if nbytes % itemsize:
        raise ValueError(
            f"{nbytes} bytes are no whole number of elements of {itemsize} bytes"
        )


@checked(check_numbers)
def walk(
    schedule: Schedule,
    k: int,
    nbytes: int,
    alpha: float = 1e-5,
    beta: float = 1e-10,
    itemsize=4,
) -> Cost:
    """Follow every move of ``schedule`` with a clock.

    This is good for up to some 1,000 participants. ``nbytes`` is the size of the whole
    tensor. ``alpha`` is in seconds per message and ``beta`` in seconds per byte: by
    default 10 µs, and 10 GB/s. An element has ``itemsize`` bytes.
    """
    steps = steps_of(schedule, k)
    check_steps(steps, k)
    n = num_chunks(steps)
    ends = [0, *accumulate(_chunk_sizes(nbytes, n, itemsize))]
    sent, received, seconds = [0] * k, [0] * k, 0.0
    links = defaultdict(int)
    for step in steps:
        messages = []
        for m in step:
            own = chunks_of(m, n)
            size = ends[own.stop] - ends[own.start]
            messages.append((m.src, m.dst, size))
            sent[m.src] += size
            received[m.dst] += size
            links[m.src, m.dst] += size
        seconds += step_seconds(messages, alpha, beta)
    busiest_link = max(links.values(), default=0)
    return Cost(len(steps), tuple(sent), tuple(received), busiest_link, seconds)


def step_seconds(
    messages: list[tuple[int, int, int]], alpha: float, beta: float
) -> float:
    """Return how long the busiest participant takes for a step's (src, dst, bytes)."""
    # seconds of each participant
    sending, receiving = defaultdict(float), defaultdict(float)
    for src, dst, size in messages:
        sending[src] += alpha + size * beta
        receiving[dst] += alpha + size * beta
    return max([*sending.values(), *receiving.values()], default=0.0)


def _chunk_sizes(nbytes: int, num_chunks: int, itemsize: int) -> list[int]:
    """Return the bytes of each chunk, cut as by ``tensor_split``: larger ones first."""
    each, remainder = divmod(nbytes // itemsize, num_chunks)
    return [(each + (i < remainder)) * itemsize for i in range(num_chunks)]


@checked(check_numbers)
def closed_form(
    schedule: Schedule,
    k: int,
    nbytes: int,
    alpha: float = 1e-5,
    beta: float = 1e-10,
    itemsize=4,
) -> Cost:
    """Return what ``walk`` returns, by a formula: as fast for k = 100,000 as for 4.

    There is a formula for star, ring, tree, direct and halving_doubling.
    """
    if schedule not in FORMULAS:
        name = f"{schedule.__module__}.{schedule.__qualname__}"
        raise ValueError(
            f"there is no closed form for {name}: use walk, for up to about k = 1,000"
        )
    if k == 1:
        return Cost(0, (0,), (0,), 0, 0.0)
    return FORMULAS[schedule](k, nbytes, alpha, beta, itemsize)


def _star(k: int, n: int, alpha: float, beta: float, itemsize: int) -> Cost:
    amounts = ((k - 1) * n,) + (n,) * (k - 1)
    return Cost(2, amounts, amounts, n, 2 * (k - 1) * (alpha + n * beta))


def _tree(k: int, n: int, alpha: float, beta: float, itemsize: int) -> Cost:
    rounds = (k - 1).bit_length()  # ceil(log2 k)
    amounts = [n if r else 0 for r in range(k)]  # all but the root have a parent, …
    for j in range(rounds):  # … and r has a child 2^j further on if 2^(j + 1) divides r
        for r in range(0, k - 2**j, 2 ** (j + 1)):
            amounts[r] += n
    return Cost(
        2 * rounds, tuple(amounts), tuple(amounts), n, 2 * rounds * (alpha + n * beta)
    )


def _ring(k: int, n: int, alpha: float, beta: float, itemsize: int) -> Cost:
    c = _chunk_sizes(n, k, itemsize)
    # r sends all chunks but r, which it completes, then all but r + 1, which its
    # successor did
    sent = tuple(2 * n - c[r] - c[(r + 1) % k] for r in range(k))
    received = (sent[-1], *sent[:-1])  # each receives just what its predecessor sends
    return Cost(
        2 * (k - 1), sent, received, max(sent), 2 * (k - 1) * (alpha + c[0] * beta)
    )


def _direct(k: int, n: int, alpha: float, beta: float, itemsize: int) -> Cost:
    c = _chunk_sizes(n, k, itemsize)
    amounts = tuple(n - c[r] + (k - 1) * c[r] for r in range(k))
    # the others' chunks, or k - 1 times its own
    busiest = max(n - c[-1], (k - 1) * c[0])
    return Cost(
        2, amounts, amounts, c[0] + c[1], 2 * ((k - 1) * alpha + busiest * beta)
    )


def _halving_doubling(k: int, n: int, alpha: float, beta: float, itemsize: int) -> Cost:
    p = 1 << (k.bit_length() - 1)
    c = _chunk_sizes(n, p, itemsize)
    ends = [0, *accumulate(c)]
    # r gives away all but its own chunk, in blocks, …
    amounts = [n - size for size in c]
    seconds, m = 0.0, 1
    while m < p:  # … and receives every aligned block of m chunks that holds its own
        for r in range(p):
            amounts[r] += ends[r // m * m + m] - ends[r // m * m]
        # the first block of m chunks is the largest
        seconds += 2 * (alpha + ends[m] * beta)
        m *= 2
    if k > p:  # the others hand in a whole tensor and get one back
        amounts = [amount + n * (r + p < k) for r, amount in enumerate(amounts)] + [
            n
        ] * (k - p)
        seconds += 2 * (alpha + n * beta)
    steps = 2 * (p.bit_length() - 1) + 2 * (k > p)
    return Cost(steps, tuple(amounts), tuple(amounts), n, seconds)


FORMULAS = {star: _star, ring: _ring, tree: _tree, direct: _direct}
FORMULAS[halving_doubling] = _halving_doubling
