"""Collectives between ranks: each makes its moves of a schedule, over a transport.

They mean what those in ``collectives`` mean, but a rank passes its own tensor instead
of a list. First, all ranks compare what they are about to do. Over gloo, torch aborts
or is silently wrong where that differs. Notebook 04 uses this file.
"""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate

import torch

from ..collectives.lists import (
    bounds_of,
    check_op,
    check_tensor,
    divide,
    flatten,
    is_expanded,
    part_of,
    put_back,
)
from ..collectives.schedules import (
    Schedule,
    direct,
    recursive_doubling,
    ring,
    star,
    tree_broadcast,
)
from .agreement import agree
from .members import Group, member_of
from .moves import even_bounds, messages_of, own_moves


def allreduce(
    tensor: torch.Tensor,
    schedule: Schedule | None = None,
    op: str = "sum",
    group: Group = None,
    check: bool = True,
    timeout: float | None = None,
    *,
    label: str = "",
) -> None:
    """Reduce in place: then ``tensor`` holds, on every rank, the reduction of all.

    The result is equal to the last bit on all ranks that have equally many threads, and
    in every run. float16 and bfloat16 travel and are reduced as float32, and are
    rounded once, at the end.

    ``schedule`` is a function k -> steps, such as ``ring``; None: what ``choose``
    returns. ``op``: "sum", "mean", "max", "min" or "product". With ``check`` the ranks
    first compare what they are about to do, in 32 bytes; without it a mistake may hang,
    abort or go unseen. A rank that leaves out one of several *equal* calls is noticed
    only at the end, unless a ``label``, such as "step 3", tells them apart. ``timeout``
    limits each step, in seconds. Give each thread its own group: threads may begin in
    another order on each rank.

    Raises:
        MismatchError: on every rank, when what they are about to do differs, or only
            some of them can do it. The group is still usable; after the next two errors
            it is not.
        PeerError: a rank did not call or answer in time, failed after the check, or is
            gone.
        BusyError: another thread of this rank has a call under way in this group.
        ValueError: this cannot be done with such a tensor, op or schedule, on any rank.
    """
    with _calling("allreduce", label, group, timeout, check) as call:
        check_reduction(tensor, op)
        if schedule is not None and not callable(schedule):
            raise TypeError(
                f"schedule must be a function such as ring, not {schedule!r}"
            )
        flat = call.flatten(tensor)
        moves = own_moves(schedule or choose(flat.nbytes, call.k), call.k, call.me, op)
        steps = messages_of(
            moves.steps, flat, even_bounds(flat.numel(), moves.num_chunks)
        )
        call.agree(f"{op} of {call.describe(tensor)}, {moves.name}", ahead=steps[:1])
        call.exchange(steps)
        divide([flat], op, call.k)
        put_back([tensor], [flat])


def reduce_scatter(
    tensor: torch.Tensor,
    op: str = "sum",
    group: Group = None,
    check: bool = True,
    timeout: float | None = None,
    *,
    label: str = "",
) -> torch.Tensor:
    """Reduce in place; return each rank its part: shard r of ``tensor`` on rank r.

    Shard r is ``tensor.tensor_split(k)[r]``, rows of dimension 0; the others are left
    with partial results. A tensor without a dimension counts as one row. For the rest
    see ``allreduce``, of which this is the ring's first half.
    """
    with _calling("reduce_scatter", label, group, timeout, check) as call:
        check_reduction(tensor, op)
        flat = call.flatten(tensor)
        shards = torch.atleast_1d(tensor.detach()).tensor_split(call.k)
        bounds = bounds_of(shards)
        half = own_moves(ring, call.k, call.me, op).steps[: call.k - 1]
        steps = messages_of(half, flat, bounds)
        call.agree(f"{op} of {call.describe(tensor)}", ahead=steps[:1])
        call.exchange(steps)
        divide([part_of(flat, call.me, bounds)], op, call.k)
        put_back([tensor], [flat])
        return shards[call.me]


def all_gather(
    shard: torch.Tensor,
    group: Group = None,
    timeout: float | None = None,
    *,
    label: str = "",
) -> torch.Tensor:
    """Return all ranks' shards as a new tensor, joined along dimension 0.

    This is the ring's second half. The shards may differ in their number of rows, which
    the check tells; one without a dimension counts as a row.
    """
    with _calling("all_gather", label, group, timeout) as call:
        check_reduction(shard)
        own, shape = call.flatten(shard, widen=False), torch.atleast_1d(shard).shape
        half = own_moves(ring, call.k, call.me, "sum").steps[call.k - 1 :]
        # only this rank has rows
        alone = [0] * (call.me + 1) + [own.numel()] * (call.k - call.me)
        ahead = messages_of(half[:1], own, alone)
        rows = call.agree(
            f"rows of {call.describe(shard, first=1)}", ahead, number=shape[0]
        )
        bounds = [0, *accumulate(n * shape[1:].numel() for n in rows)]
        flat = own.new_empty(bounds[-1])
        part_of(flat, call.me, bounds).copy_(own)
        call.exchange(messages_of(half, flat, bounds))
        return flat.reshape(sum(rows), *shape[1:]).to(shard.device)


def broadcast(
    tensor: torch.Tensor,
    src: int = 0,
    group: Group = None,
    check: bool = True,
    timeout: float | None = None,
    *,
    label: str = "",
) -> None:
    """Copy the tensor of rank ``src`` in place to all others, down a binomial tree.

    ``src`` is a rank of the world, as in torch. For the rest see ``allreduce``.
    """
    with _calling("broadcast", label, group, timeout, check) as call:
        check_reduction(tensor)
        if src not in call.world_ranks:
            raise ValueError(
                f"src is {src!r}, but the group has the ranks {list(call.world_ranks)}"
            )
        root = call.world_ranks.index(src)
        flat = call.flatten(tensor, widen=False)
        steps = messages_of(
            own_moves(tree_broadcast, call.k, call.me, "sum", root).steps, flat
        )
        call.agree(f"from rank {src} of {call.describe(tensor)}", ahead=steps[:1])
        call.exchange(steps)
        put_back([tensor], [flat])


def barrier(
    group: Group = None, timeout: float | None = None, *, label: str = ""
) -> None:
    """Return when all ranks of the group have called."""
    with _calling("barrier", label, group, timeout) as call:
        call.agree()


def all_gather_int(
    number: int, group: Group = None, timeout: float | None = None, *, label: str = ""
) -> list[int]:
    """Return the number of every rank, of 64 bits: it goes along with the check."""
    with _calling("all_gather_int", label, group, timeout) as call:
        if not -(2**63) <= operator.index(number) < 2**63:
            raise ValueError(f"number must be an int of 64 bits, not {number!r}")
        return call.agree(number=number)


def choose(nbytes: int, k: int) -> Schedule:
    """Return the schedule to use for ``nbytes`` bytes on ``k`` ranks of one machine.

    Two ranks exchange whole tensors: in one step they send as much as otherwise in two.
    Star and direct cross between 1 and 4 MB (2 cores, 3 to 8 ranks):
    ``benchmarks/bench_ranks.py``.
    """
    if k == 2:
        return recursive_doubling
    return star if nbytes <= 2 * 2**20 else direct


def check_reduction(tensor: torch.Tensor, op: str = "sum") -> None:
    """Refuse what cannot be sent, or not be reduced by ``op``."""
    check_tensor(tensor, "the tensor")
    check_op(op, tensor.dtype)
    if is_expanded(tensor):
        raise ValueError(
            f"the tensor is an expanded view (strides {tensor.stride()}): clone it"
        )


# What all collectives have in common


class _Call:
    """A rank's call of a collective: it agrees with others, and exchanges messages."""

    def __init__(
        self, name: str, label: str, group: Group, timeout: float | None, check: bool
    ):
        self.member, self.timeout = member_of(group, timeout)
        self.transport = self.member.transport
        self.world_ranks, self.me = self.transport.world_ranks, self.transport.member
        self.k = len(self.world_ranks)
        self.name, self.check = f"{name} {label!r}" if label else name, check
        self.has_asked = False  # whether the others know of this call

    def flatten(self, tensor: torch.Tensor, widen: bool = True) -> torch.Tensor:
        """Return the elements side by side, where the transport can read them."""
        flat = flatten(tensor, widen)
        # asking costs less
        if flat.is_conj() or flat.is_neg() or not flat.is_contiguous():
            flat = flat.resolve_conj().resolve_neg().contiguous()
        home = self.transport.home(tensor)
        return flat if flat.device == home else flat.to(home)

    def describe(self, tensor: torch.Tensor, first: int = 0) -> str:
        """Name dtype, shape, and the kind of device it is sent from, unless a CPU."""
        kind, home = (
            _kind(tensor.dtype, tensor.shape[first:]),
            self.transport.home(tensor).type,
        )
        return kind if home == "cpu" else f"{kind} on {home}"

    def agree(
        self, what: str = "", ahead: Sequence[tuple] = (), number: int = 0
    ) -> list[int]:
        """Compare plans, if wanted; return each ``number``. ``ahead``: first step."""
        self.has_asked = True
        if not self.check:
            return []
        plan = f"{self.name}, {what}" if what else self.name
        sends = ahead[0][0] if ahead else ()
        return agree(
            self.transport, self.member.calls, plan, number, self.timeout, sends
        )

    def exchange(self, steps: Sequence[tuple]) -> None:
        """Send and receive the messages of all steps."""
        for sends, receives in steps:
            self.transport.exchange(sends, receives, self.timeout)


@contextmanager
def _calling(
    name: str, label: str, group, timeout, check: bool = True
) -> Iterator[_Call]:
    """Make a call. An error before the ranks agree is compared like a plan.

    One that all ranks have, each raises itself; one that only some have is a
    MismatchError on all.
    """
    call = _Call(name, label, group, timeout, check)
    with call.transport.call(call.name):
        call.member.calls += 1
        try:
            yield call
        except Exception as error:
            if not call.has_asked:
                call.agree(f"{type(error).__name__}: {error}")
            raise


@lru_cache(maxsize=1024)
def _kind(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
