"""Chapter 04. Collectives between ranks, each of which makes its own moves.

They mean what those in ``d2lpar.collectives`` mean, but a rank passes its own tensor
instead of a list. First all ranks compare what they are about to do, their *plans*:
where these differ, torch over gloo aborts or is silently wrong. Chapter 04 writes this
file. Source of the comparison: torch's ProcessGroupWrapper.

``group`` is a process group of torch.distributed, or what ``own_group`` returns.
``timeout``, in seconds, is for the whole call. Every call may raise

- MismatchError, on all ranks, if their plans differ, or only some of them can do it.
  Nothing has been sent, and the group can still be used. If one of the calls is
  ``send`` or ``receive``, it cannot, and some ranks may get a PeerError.
- PeerError, if a rank did not call or answer in time, or ended. The group can no
  longer be used.
- BusyError, if a call of another thread is under way in the group.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from zlib import crc32

import torch

from ..collectives import check_tensor, flatten, kind_of, part_of, put_back
from ..schedules import (
    Schedule,
    Steps,
    checked_steps,
    even_bounds,
    fingerprint,
    halving_doubling,
    num_chunks,
    power_of_two,
    recursive_doubling,
    ring,
    tree_broadcast,
)
from .transport import Group, MismatchError, group_of

PLAN = 200  # characters of a plan at most: with its number it must fit into a note


def allreduce(
    tensor: torch.Tensor,
    schedule: Schedule | None = None,
    op: str = "sum",
    group=None,
    timeout: float | None = None,
) -> None:
    """Reduce in place: then ``tensor`` holds, on every rank, the reduction of all.

    ``schedule`` is a function such as ``ring``; None: what ``choose`` returns. With the
    book's schedules, a sum has the same bits on all ranks and in every run.
    """
    with calling("allreduce", group, timeout) as call:
        check_tensor(tensor, "the tensor", op)
        flat, k = sendable(flatten(tensor), call.group), call.group.size
        schedule = schedule or choose(flat.nbytes, k)
        steps = checked_steps(schedule, k)
        name = getattr(schedule, "__name__", "steps")
        call.agree(f"{op} of {kind_of(tensor)}, {name} ({fingerprint(steps, k)})")
        call.run(steps, flat, even_bounds(flat.numel(), num_chunks(steps)), op)
        put_back(tensor, flat, op, k)


def reduce_scatter(
    tensor: torch.Tensor, op: str = "sum", group=None, timeout: float | None = None
) -> torch.Tensor:
    """Reduce in place; return this rank's rows of ``tensor``, as ``tensor_split`` cuts.

    This is the first half of the ring. The other rows are left with partial results.
    """
    with calling("reduce_scatter", group, timeout) as call:
        check_tensor(tensor, "the tensor", op)
        flat, k = sendable(flatten(tensor), call.group), call.group.size
        row = tensor.shape[1:].numel()
        bounds = [row * n for n in even_bounds(len(tensor), k)]
        call.agree(f"{op} of {kind_of(tensor)}")
        call.run(ring(k)[: k - 1], flat, bounds, op)
        put_back(tensor, flat, op, k)
        return tensor.detach().tensor_split(k)[call.group.me]


def all_gather(
    shard: torch.Tensor, group=None, timeout: float | None = None
) -> torch.Tensor:
    """Return all ranks' shards as a new tensor, joined along dimension 0.

    This is the second half of the ring. Shards may differ in length.
    """
    with calling("all_gather", group, timeout) as call:
        check_tensor(shard, "the shard")
        own, k, me = sendable(shard, call.group), call.group.size, call.group.me
        rows = call.agree(f"of rows like {kind_of(shard[:0])}", [len(shard)] * k)
        bounds = [0, *accumulate(n * shard.shape[1:].numel() for n in rows)]
        flat = own.new_empty(bounds[-1])
        flat[bounds[me] : bounds[me + 1]] = own
        call.run(ring(k)[k - 1 :], flat, bounds)
        return flat.view(sum(rows), *shard.shape[1:]).to(shard.device)


def all_to_all(
    parts: list[torch.Tensor], group=None, timeout: float | None = None
) -> list[torch.Tensor]:
    """Send ``parts[i]`` to member i; return what each member has sent to this rank.

    Parts may differ in length along dimension 0.
    """
    with calling("all_to_all", group, timeout) as call:
        if len(parts) != call.group.size:
            raise ValueError(f"{len(parts)} parts for {call.group.size} ranks")
        for i, part in enumerate(parts):
            check_tensor(part, f"parts[{i}]")
        me, others, like = call.group.me, call.group.others, parts[0][:0]
        if {kind_of(part[:0]) for part in parts} != {kind_of(like)}:
            raise ValueError(f"not all parts have rows like {kind_of(like)}")
        flats = [sendable(part, call.group) for part in parts]
        rows = call.agree(f"of rows like {kind_of(like)}", list(map(len, parts)))
        result = [flats[0].new_empty(n, *like.shape[1:]) for n in rows]
        result[me].view(-1).copy_(flats[me])
        sends = [(i, flats[i]) for i in others]
        receives = [(i, result[i].view(-1), None) for i in others]
        call.group.exchange(sends, receives, call.deadline)
        return [part.to(like.device) for part in result]


def broadcast(
    tensor: torch.Tensor, src: int = 0, group=None, timeout: float | None = None
) -> None:
    """Copy the tensor of rank ``src`` in place to all others, down a binomial tree.

    ``src`` is a rank of the world, as in torch.
    """
    with calling("broadcast", group, timeout) as call:
        check_tensor(tensor, "the tensor")
        flat, members = sendable(tensor, call.group), call.group.ranks
        if src not in members:
            raise ValueError(f"src is {src!r}, but the group has the ranks {members}")
        call.agree(f"from rank {src} of {kind_of(tensor)}")
        steps = tree_broadcast(call.group.size, members.index(src))
        call.run(steps, flat, [0, flat.numel()])
        put_back(tensor, flat)


def barrier(group=None, timeout: float | None = None) -> None:
    """Return when all ranks of the group have called."""
    with calling("barrier", group, timeout) as call:
        call.agree("no data")


def agree(plan: str, group=None, timeout: float | None = None) -> None:
    """Raise MismatchError on all ranks unless all have the same ``plan``, any text."""
    with calling("agree", group, timeout) as call:
        call.agree(f"on {plan}")


def send(
    tensor: torch.Tensor, dst: int, group=None, timeout: float | None = None
) -> None:
    """Send ``tensor`` to rank ``dst`` of the world, after a note that says what it is.

    Return when ``tensor`` may be overwritten: perhaps only when ``dst`` has received
    it, so two ranks that first send to each other may wait for each other.
    """
    check_tensor(tensor, "the tensor")
    group = group_of(group, timeout)
    member, deadline = group.member(dst), group.deadline(timeout)
    flat = sendable(tensor, group).cpu()
    with group.alone(f"send to rank {dst}", ("send", member)):
        group.tell({member: f"0 send {kind_of(tensor)}"}, [], deadline)
        group.exchange([(member, flat)], [], deadline)


def receive(src: int, group=None, timeout: float | None = None) -> torch.Tensor:
    """Return what rank ``src`` of the world sends next, as a new tensor on the CPU.

    MismatchError, if it makes another call; then the group can no longer be used here.
    """
    group = group_of(group, timeout)
    member, deadline = group.member(src), group.deadline(timeout)
    with group.alone(f"receive from rank {src}", ("receive", member)):
        _, plan = group.tell({}, [member], deadline)[member].split(" ", 1)
        if not plan.startswith("send "):
            said = f"rank {src} does not send a tensor, it says: {plan}"
            group.broken = said if plan.startswith("call ") else group.broken
            raise MismatchError(said, plan)
        _, dtype, shape = plan.split(" ", 2)
        tensor = torch.empty(json.loads(shape), dtype=getattr(torch, dtype))
        group.exchange([], [(member, tensor.view(-1), None)], deadline)
        return tensor


def choose(nbytes: int, k: int) -> Schedule:
    """Return the schedule for ``nbytes`` bytes on ``k`` ranks.

    Short tensors need few messages in a row, long ones few bytes. Between two ranks
    the bytes are equal, and recursive doubling takes one step instead of two.
    """
    if k == 2 or nbytes <= 2**19:
        return recursive_doubling
    return halving_doubling if k == power_of_two(k) else ring


# What all collectives have in common


class Call:
    """A rank's call of a collective: it compares plans, then makes its own moves."""

    def __init__(self, name: str, group: Group):
        self.name, self.group, self.deadline = name, group, group.deadline(None)
        self.has_asked = False  # whether the others know of this call

    def agree(self, what: str, numbers: list[int] | None = None) -> list[int]:
        """Compare plans; return the number that each member has for this rank."""
        self.has_asked, group = True, self.group
        plan = f"call {group.calls}{group.context}: {self.name}, {what}"
        if len(plan := ascii(plan)[1:-1]) > PLAN:
            plan = f"{plan[: PLAN - 9]} {crc32(plan.encode()):08x}"
        mine = {i: f"{n} {plan}" for i, n in enumerate(numbers or [0] * group.size)}
        notes = {i: mine[i] for i in group.others}
        theirs = mine | group.tell(notes, group.others, self.deadline)
        pairs = [theirs[i].split(" ", 1) for i in range(group.size)]
        if any(text != plan for _, text in pairs):
            lines = ["the ranks are about to do different things"]
            for rank, (_, text) in zip(group.ranks, pairs):
                lines.append(f"rank {rank}, {text}")
                if text.startswith("send "):  # by the function ``send``
                    group.broken = f"rank {rank} sent a tensor that nobody received"
            raise MismatchError("\n".join(lines))
        return [int(number) for number, _ in pairs]

    def run(self, steps: Steps, flat: torch.Tensor, bounds: list[int], op="sum"):
        """Make this rank's moves: chunk c of ``flat`` is bounds[c] to bounds[c + 1]."""
        me = self.group.me
        for step in steps:
            sends, receives = [], []
            for m in step:
                part = part_of(flat, m, bounds)
                if m.src == me:
                    sends.append((m.dst, part))
                if m.dst == me:
                    receives.append((m.src, part, op if m.reduce else None))
            self.group.exchange(sends, receives, self.deadline)


@contextmanager
def calling(name: str, group, timeout: float | None) -> Iterator[Call]:
    """Make a call; an error before the ranks have agreed is compared like a plan.

    One that all ranks have is raised as it is; one that only some have becomes a
    MismatchError on all.
    """
    group = group_of(group, timeout)
    with group.alone(name, "send", "receive"):
        group.calls += 1
        call = Call(name, group)
        try:
            call.deadline = group.deadline(timeout)  # an invalid one is told to all
            yield call
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if not call.has_asked:
                call.agree(text)
            elif not isinstance(error, MismatchError):
                group.broken = group.broken or text  # the others go on without us
            raise


def sendable(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the elements side by side, on the device from which they are sent."""
    flat = tensor.detach().reshape(-1).contiguous()
    flat = flat.resolve_conj().resolve_neg()  # a view may defer a negation
    return flat if group.transport.has_nccl else flat.cpu()
