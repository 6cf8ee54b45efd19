"""Collectives between ranks: each rank makes its own moves of a schedule, over a transport.

The functions have the names and the meaning of those in ``collectives``, but a rank passes its own
tensor instead of a list. Before anything is reduced, all ranks compare what they are about to do:
torch does that only under TORCH_DISTRIBUTED_DEBUG=DETAIL, and without it gloo aborts or is silently
wrong. Notebook 05 builds this file.
"""

from collections.abc import Callable
from itertools import accumulate

import torch
import torch.distributed as dist

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
from ..collectives.schedules import Schedule, direct, recursive_doubling, ring, star, tree_broadcast
from .agreement import MismatchError, agree, describe_schedule, describe_tensor
from .members import Member, member_of, use_lanes, use_messages
from .moves import Part, even_bounds, make_moves, own_moves
from .nccl import NcclMessages
from .transport import BusyError, PeerError, Transport

__all__ = (
    "BusyError",
    "MismatchError",
    "PeerError",
    "all_gather",
    "all_gather_int",
    "allreduce",
    "barrier",
    "broadcast",
    "choose",
    "reduce_scatter",
    "use_lanes",
    "use_messages",
)


def allreduce(
    tensor: torch.Tensor,
    schedule: Schedule | None = None,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
    check: bool = True,
    timeout: float | None = None,
    *,
    label: str = "",
) -> None:
    """Reduce in place: afterwards ``tensor`` holds, on every rank, the reduction of all of them.

    Sums, means, maxima and minima of finite numbers are equal to the last bit in every run, and on
    all ranks that have equally many threads: in an exchange both partners compute. (The last bits
    of a product of complex numbers hang on the strides, and NaN has many forms.) float16 and
    bfloat16 travel and are reduced as float32, and are rounded once, at the end.

    A rank that leaves out one of several *equal* calls is not seen at once: its next call meets the
    others' earlier one, the results are mixed, and only at the end one rank waits for a call that
    never comes. A ``label`` tells such calls apart. In threads, which may begin in another order on
    each rank, each thread should have a group of its own.

    Args:
        tensor: of the same shape and dtype on every rank, contiguous or not.
        schedule: a function k -> steps, such as ``ring``; None: ``choose`` does, by size and k.
        op: "sum", "mean", "max", "min" or "product".
        group: a process group of which this rank is a member; None: all ranks.
        check: whether the ranks first compare what they are about to do. Over gloo this costs one
            exchange of 32 bytes; over lanes a short message goes along with them. Without it a
            mistake may hang, abort or go unseen.
        timeout: seconds to wait for the others, in each step.
        label: what is reduced, such as "step 3": compared by the check.

    Raises:
        MismatchError: on every rank, when what they are about to do differs.
        PeerError: a rank did not call or did not answer in time, gave up or is gone. A rank
            gives up when it fails after the check, and the group is then of no more use.
        BusyError: another thread of this rank has a call under way in this group, which is then of
            no more use.
        ValueError: ``op`` is unknown or not defined for the dtype; ``tensor`` requires gradients
            outside ``no_grad``, is sparse or a meta tensor, or holds one place of memory
            twice; ``schedule`` sends and writes the same chunk in one step, not by an exchange; or
            there is no process group.
        TypeError: ``tensor`` is no tensor, or ``schedule`` no function.
    """
    member, timeout = member_of(group, timeout)
    transport = member.transport
    k = len(transport.ranks)
    what = f"{op} of {_described(tensor, transport)}, {describe_schedule(schedule, k)}"
    plan = _plan("allreduce", label, what)

    def prepare() -> Part:
        if schedule is not None and not callable(schedule):
            kind = type(schedule).__name__
            raise TypeError(f"schedule must be a function such as ring, not {kind}")
        flat = _message_of(tensor, transport)
        steps, n = own_moves(schedule or choose(flat.nbytes, k), k, transport.member, op)
        return Part(steps, flat, even_bounds(flat.numel(), n))

    with transport.call(plan):
        part, _ = _agreed(plan, prepare, tensor, op, member, check, timeout)
        with transport.guard():
            make_moves(part, transport, timeout)
            divide([part.flat], op, k)
            put_back([tensor], [part.flat])


def reduce_scatter(
    tensor: torch.Tensor,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
    check: bool = True,
    timeout: float | None = None,
    *,
    label: str = "",
) -> torch.Tensor:
    """Reduce in place, and leave each rank its part: return shard r of ``tensor`` on rank r.

    This is the first half of the ring. Shard r is ``tensor.tensor_split(k)[r]``, rows of dimension
    0, now reduced; the other rows are left with partial results. A tensor without a dimension
    counts as one row. Arguments and errors are those of ``allreduce``.
    """
    member, timeout = member_of(group, timeout)
    transport = member.transport
    k, me = len(transport.ranks), transport.member
    plan = _plan("reduce_scatter", label, f"{op} of {_described(tensor, transport)}")

    def prepare() -> Part:
        steps, _ = own_moves(ring, k, me, op)
        bounds = bounds_of(torch.atleast_1d(tensor.detach()).tensor_split(k))
        return Part(steps[: k - 1], _message_of(tensor, transport), bounds)

    with transport.call(plan):
        part, _ = _agreed(plan, prepare, tensor, op, member, check, timeout)
        with transport.guard():
            make_moves(part, transport, timeout)
            divide([part_of(part.flat, me, part.bounds)], op, k)
            put_back([tensor], [part.flat])
    return torch.atleast_1d(tensor.detach()).tensor_split(k)[me]


def all_gather(
    shard: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
    *,
    label: str = "",
) -> torch.Tensor:
    """Return all ranks' shards joined along dimension 0: a new tensor.

    This is the second half of the ring. The shards may differ in their number of rows, so the ranks
    have to tell each other, and compare what they do anyway; one without a dimension counts as a
    row. Arguments and errors are those of ``allreduce``.
    """
    member, timeout = member_of(group, timeout)
    transport = member.transport
    k, me = len(transport.ranks), transport.member
    plan = _plan("all_gather", label, f"rows of {_described(shard, transport, first=1)}")

    def prepare() -> Part:
        steps, _ = own_moves(ring, k, me, "sum")
        own = _message_of(shard, transport, widen=False)
        alone = [0] * (me + 1) + [own.numel()] * (k - me)  # as if only this rank had rows
        return Part(steps[k - 1 :], own, alone)

    with transport.call(plan):
        part, rows = _agreed(plan, prepare, shard, "sum", member, True, timeout)
        with transport.guard():
            shape = torch.atleast_1d(shard).shape[1:]
            bounds = [0, *accumulate(n * shape.numel() for n in rows)]
            flat = part.flat.new_empty(bounds[-1])
            part_of(flat, me, bounds).copy_(part.flat)
            make_moves(Part(part.steps, flat, bounds), transport, timeout)
            return flat.reshape(sum(rows), *shape).to(shard.device)


def broadcast(
    tensor: torch.Tensor,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    check: bool = True,
    timeout: float | None = None,
    *,
    label: str = "",
) -> None:
    """Copy the tensor of rank ``src`` in place into that of every other, down a binomial tree.

    ``src`` is a rank of the world, as in torch. The other arguments and errors are those of
    ``allreduce``.
    """
    member, timeout = member_of(group, timeout)
    transport = member.transport
    k = len(transport.ranks)
    plan = _plan("broadcast", label, f"from rank {src} of {_described(tensor, transport)}")

    def prepare() -> Part:
        if src not in transport.ranks:
            members = list(transport.ranks)
            raise ValueError(f"src is {src!r}, but the group has the ranks {members}")
        root = transport.ranks.index(src)
        steps, _ = own_moves(tree_broadcast, k, transport.member, "sum", root)
        return Part(steps, _message_of(tensor, transport, widen=False), [])

    with transport.call(plan):
        part, _ = _agreed(plan, prepare, tensor, "sum", member, check, timeout)
        with transport.guard():
            make_moves(part, transport, timeout)
            put_back([tensor], [part.flat])


def barrier(
    group: dist.ProcessGroup | None = None, timeout: float | None = None, *, label: str = ""
) -> None:
    """Return when all ranks of the group have called. Errors are those of ``allreduce``."""
    _all_told(0, _plan("barrier", label), group, timeout)


def all_gather_int(
    number: int,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
    *,
    label: str = "",
) -> list[int]:
    """Return the number of every rank, each from -2^63 to 2^63 - 1: it goes along with the check.

    Other arguments and errors are those of ``allreduce``.
    """
    good = isinstance(number, int) and -(2**63) <= number < 2**63
    what = "" if good else f"of {number!r}"
    told = _all_told(number if good else 0, _plan("all_gather_int", label, what), group, timeout)
    if not good:
        raise ValueError(f"number must be an int of 64 bits, not {number!r}")
    return told


def _all_told(number: int, plan: str, group, timeout) -> list[int]:
    member, timeout = member_of(group, timeout)
    with member.transport.call(plan):
        member.calls += 1
        return agree(member.transport, member.calls, plan, number, timeout)


def choose(nbytes: int, k: int) -> Schedule:
    """Return the fastest schedule for ``nbytes`` bytes on ``k`` ranks, or nearly the fastest.

    Two ranks exchange whole tensors: in one step they send as much as otherwise in two. More ranks
    send few messages as long as a message costs more than its bytes, and few bytes after that.

    Measured on 2 cores of an AMD EPYC and of an Intel Xeon. With 3, 4 and 8 ranks star and direct
    cross between 1 and 4 MB, over lanes as over gloo's messages. Two ranks lose up to a quarter to
    the star where they send messages. More cores, or a network, will differ: for each size
    ``benchmarks/bench_ranks.py`` prints how much slower this choice is than the fastest.
    """
    if k == 2:
        return recursive_doubling
    return star if nbytes <= 2 * 2**20 else direct


def _message_of(tensor: torch.Tensor, transport: Transport, widen: bool = True) -> torch.Tensor:
    """Return the elements as they are sent: side by side, where the transport can read them."""
    flat = flatten(tensor, widen)
    if flat.is_conj() or flat.is_neg() or not flat.is_contiguous():
        flat = flat.resolve_conj().resolve_neg().contiguous()
    home = transport.home(tensor)
    return flat if flat.device == home else flat.to(home)


def _plan(name: str, label: str, what: str = "") -> str:
    """Say in one line what this rank is about to do: on all ranks the same."""
    return name + (f" {label!r}" if label else "") + (f", {what}" if what else "")


def _described(tensor, transport: Transport, first: int = 0) -> str:
    """Describe the tensor and, if that depends on it, by which of the group's backends it goes."""
    words = describe_tensor(tensor, first)
    if isinstance(transport, NcclMessages) and isinstance(tensor, torch.Tensor):
        words += f" over {transport.home(tensor).type}"
    return words


def _agreed(
    plan: str,
    prepare: Callable[[], Part],
    tensor: torch.Tensor,
    op: str,
    member: Member,
    check: bool,
    timeout: float,
) -> tuple[Part, list[int]]:
    """Prepare this member's part, compare plans, and return the part and everyone's rows.

    With ``check``, what fails here is raised when all have agreed on what to do: what is wrong with
    the arguments is then the same error on all ranks, and a difference between ranks comes first.
    """
    member.calls += 1
    failure, ahead, rows = None, None, []
    try:
        _check(tensor, op)
        part = prepare()
        ahead = part.sends(part.steps[0]) if part.steps else None
    except Exception as error:
        failure = error
    if check:
        rows = agree(member.transport, member.calls, plan, _rows(tensor), timeout, ahead)
    if failure is None:
        return part, rows
    if isinstance(failure, (MemoryError, RuntimeError)):  # it is this rank's alone: no room
        member.transport.give_up(failure)
    raise failure


def _check(tensor: torch.Tensor, op: str) -> None:
    check_tensor(tensor, "the tensor")
    check_op(op, tensor.dtype)
    if is_expanded(tensor):
        raise ValueError(f"the tensor is an expanded view (strides {tensor.stride()}): clone it")


def _rows(tensor) -> int:
    return len(tensor) if isinstance(tensor, torch.Tensor) and tensor.dim() else 1
