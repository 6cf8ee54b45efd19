"""What a schedule costs: steps, bytes per participant and link, seconds on an alpha-beta model.

The model is Hockney's (1994): a message of n bytes takes ``alpha + n * beta`` seconds. Within a
step a participant sends its messages one after the other, and receives at the same time; the step
takes as long as its busiest participant. So a hub's queue is seen, which counting steps would hide.
The closed forms follow Thakur, Rabenseifner and Gropp (2005). Notebook 03 builds this file.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

from .schedules import (
    Move,
    Schedule,
    check_steps,
    direct,
    halving_doubling,
    num_chunks,
    recursive_doubling,
    ring,
    star,
    steps_of,
    tree,
)


@dataclass(frozen=True)
class Cost:
    """The cost of running a schedule once.

    Attributes:
        steps: how many, one after the other.
        sent: bytes that each participant sends.
        received: bytes that each participant receives.
        busiest_link: bytes over the busiest of the one-way links (source, destination).
        seconds: predicted time.
    """

    steps: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    busiest_link: int
    seconds: float


def walk(
    schedule: Schedule,
    k: int,
    nbytes: int,
    alpha: float = 1e-5,
    beta: float = 1e-10,
    itemsize: int = 4,
) -> Cost:
    """Follow every move of ``schedule`` with a clock; good for up to about a thousand participants.

    Args:
        schedule: a function k -> steps.
        k: participants.
        nbytes: bytes of the tensor that each of them holds.
        alpha: latency, seconds a message.
        beta: inverse bandwidth, seconds a byte. The defaults are 10 µs and 10 GB/s.
        itemsize: bytes an element: a chunk is a whole number of elements.

    Raises:
        ValueError: ``k`` or ``itemsize`` is not positive, another number is negative, ``nbytes`` is
            no multiple of ``itemsize``, or see ``schedules.check_steps``.
    """
    _check(k, nbytes, alpha, beta, itemsize)
    steps = steps_of(schedule, k)
    check_steps(steps, k)
    sent, received, seconds = [0] * k, [0] * k, 0.0
    links = defaultdict(int)
    for messages in _messages(steps, nbytes, itemsize):
        for src, dst, size in messages:
            sent[src] += size
            received[dst] += size
            links[src, dst] += size
        seconds += step_seconds(messages, alpha, beta)
    busiest_link = max(links.values(), default=0)
    return Cost(len(steps), tuple(sent), tuple(received), busiest_link, seconds)


def step_seconds(messages: list[tuple[int, int, int]], alpha: float, beta: float) -> float:
    """Return how long the busiest participant takes for a step's (src, dst, bytes)."""
    sending, receiving = defaultdict(float), defaultdict(float)  # seconds of each participant
    for src, dst, size in messages:
        sending[src] += alpha + size * beta
        receiving[dst] += alpha + size * beta
    return max([*sending.values(), *receiving.values()], default=0.0)


def link_bytes(
    schedule: Schedule, k: int, nbytes: int, itemsize: int = 4
) -> dict[tuple[int, int], int]:
    """Return the bytes that ``schedule`` sends over each link (source, destination) it uses.

    Takes and raises what ``walk`` does.
    """
    _check(k, nbytes, 0, 0, itemsize)
    steps = steps_of(schedule, k)
    check_steps(steps, k)
    links = defaultdict(int)
    for messages in _messages(steps, nbytes, itemsize):
        for src, dst, size in messages:
            links[src, dst] += size
    return dict(links)


def closed_form(
    schedule: Schedule,
    k: int,
    nbytes: int,
    alpha: float = 1e-5,
    beta: float = 1e-10,
    itemsize: int = 4,
) -> Cost:
    """Return what ``walk`` returns, from a formula: for 100,000 participants as soon as for 4.

    Takes and raises what ``walk`` does; there is a formula for star, ring, tree, direct,
    halving_doubling and recursive_doubling, and a ValueError for any other schedule.
    """
    _check(k, nbytes, alpha, beta, itemsize)
    formulas = {
        star: _star,
        ring: _ring,
        tree: _tree,
        direct: _direct,
        halving_doubling: _halving_doubling,
        recursive_doubling: _recursive_doubling,
    }
    if schedule not in formulas:
        name = getattr(schedule, "__name__", repr(schedule))
        if name in [known.__name__ for known in formulas]:
            raise ValueError(f"this {name} is not collectives.{name}, which has a closed form")
        raise ValueError(f"there is no closed form for {name}: use walk, up to about 1,000")
    if k == 1:
        return Cost(0, (0,), (0,), 0, 0.0)
    return formulas[schedule](k, nbytes, alpha, beta, itemsize)


def _star(k: int, n: int, alpha: float, beta: float, itemsize: int) -> Cost:
    amounts = ((k - 1) * n,) + (n,) * (k - 1)
    return Cost(2, amounts, amounts, n, 2 * (k - 1) * (alpha + n * beta))


def _tree(k: int, n: int, alpha: float, beta: float, itemsize: int) -> Cost:
    rounds = (k - 1).bit_length()  # ceil(log2 k)
    amounts = [n if r else 0 for r in range(k)]  # all but the root have a parent, …
    for j in range(rounds):  # … and r has a child 2^j further on if 2^(j + 1) divides r
        for r in range(0, k - 2**j, 2 ** (j + 1)):
            amounts[r] += n
    return Cost(2 * rounds, tuple(amounts), tuple(amounts), n, 2 * rounds * (alpha + n * beta))


def _ring(k: int, n: int, alpha: float, beta: float, itemsize: int) -> Cost:
    c = _chunk_sizes(n, k, itemsize)
    # r sends all chunks but r, which it completes, then all but r + 1, which its successor did
    sent = tuple(2 * n - c[r] - c[(r + 1) % k] for r in range(k))
    received = (sent[-1], *sent[:-1])  # each receives just what its predecessor sends
    return Cost(2 * (k - 1), sent, received, max(sent), 2 * (k - 1) * (alpha + c[0] * beta))


def _direct(k: int, n: int, alpha: float, beta: float, itemsize: int) -> Cost:
    c = _chunk_sizes(n, k, itemsize)
    amounts = tuple(n - c[r] + (k - 1) * c[r] for r in range(k))
    busiest = max(n - c[-1], (k - 1) * c[0])  # the others' chunks, or k - 1 times its own
    return Cost(2, amounts, amounts, c[0] + c[1], 2 * ((k - 1) * alpha + busiest * beta))


def _halving_doubling(k: int, n: int, alpha: float, beta: float, itemsize: int) -> Cost:
    p = 1 << (k.bit_length() - 1)
    c = _chunk_sizes(n, p, itemsize)
    ends = [0, *accumulate(c)]
    amounts = [n - size for size in c]  # r gives away all but its own chunk, in blocks, …
    seconds, m = 0.0, 1
    while m < p:  # … and receives every aligned block of m chunks that holds its own
        for r in range(p):
            amounts[r] += ends[r // m * m + m] - ends[r // m * m]
        seconds += 2 * (alpha + ends[m] * beta)  # the first block of m chunks is the largest
        m *= 2
    if k > p:  # the others hand in a whole tensor and get one back
        amounts = [amount + n * (r + p < k) for r, amount in enumerate(amounts)] + [n] * (k - p)
        seconds += 2 * (alpha + n * beta)
    steps = 2 * (p.bit_length() - 1) + 2 * (k > p)
    return Cost(steps, tuple(amounts), tuple(amounts), n, seconds)


def _recursive_doubling(k: int, n: int, alpha: float, beta: float, itemsize: int) -> Cost:
    rounds = k.bit_length() - 1  # floor(log2 k)
    p = 1 << rounds
    steps = rounds + 2 * (k > p)  # and in each step the busiest participant sends one tensor
    amounts = [(rounds + (r + p < k)) * n for r in range(p)] + [n] * (k - p)
    return Cost(steps, tuple(amounts), tuple(amounts), n, steps * (alpha + n * beta))


def _messages(steps: list[list[Move]], nbytes: int, itemsize: int):
    """Yield, for each step, its messages as (source, destination, bytes)."""
    sizes = _chunk_sizes(nbytes, num_chunks(steps), itemsize)
    ends = [0, *accumulate(sizes)]
    for step in steps:
        yield [(src, dst, _size(chunk, ends)) for src, dst, chunk, _ in step]


def _size(chunk: int | range | None, ends: list[int]) -> int:
    if chunk is None:
        return ends[-1]
    first, last = (chunk[0], chunk[-1]) if isinstance(chunk, range) else (chunk, chunk)
    return ends[last + 1] - ends[first]


def _chunk_sizes(nbytes: int, num_chunks: int, itemsize: int) -> list[int]:
    """Return the bytes of each chunk, cut as by ``tensor_split``: the first are the larger ones."""
    each, remainder = divmod(nbytes // itemsize, num_chunks)
    return [(each + (i < remainder)) * itemsize for i in range(num_chunks)]


def _check(k: int, nbytes: int, alpha: float, beta: float, itemsize: int) -> None:
    if k < 1 or itemsize < 1:
        raise ValueError(f"k and itemsize must be positive, not {k} and {itemsize}")
    if not (nbytes >= 0 and alpha >= 0 and beta >= 0):
        raise ValueError(f"nbytes, alpha, beta must not be negative: {nbytes}, {alpha}, {beta}")
    if nbytes % itemsize:
        raise ValueError(f"{nbytes} bytes are no whole number of elements of {itemsize} bytes")
