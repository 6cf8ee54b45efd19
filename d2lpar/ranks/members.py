"""What a rank keeps for each of its process groups: a transport, a time limit, the calls so far.

It is made at the group's first call and lives as long as the group: nothing here holds a group that
was destroyed. A *line* is a second transport in the same group, for another thread of each rank:
what travels over it has an order of its own. Notebook 05 uses this file.
"""

import threading
import weakref
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .agreement import agree
from .lanes import CHANNELS, SLOTS, Lanes, SharedMemory
from .nccl import NcclMessages, messages_for
from .transport import Messages, Transport, group_like

TIMEOUT = 300.0  # seconds that a call waits for the others, unless it is told


class Member:
    """A rank's part in a group, or in a line. It gives the channel of its lanes back at its end."""

    def __init__(
        self,
        transport: Transport,
        timeout: float = TIMEOUT,  # of a call that names none
        memory: SharedMemory | None = None,  # of the default group's: lanes for further groups
        channel: int = 0,  # 0, the default group's, is not given back
    ):
        self.transport, self.timeout, self.memory = transport, timeout, memory
        self.channel = channel
        self.calls = self.lines = 0
        self.has_joined = True  # False until it is known whether lanes take the place of messages
        self.joining = threading.Lock()

    def __del__(self):
        if self.channel and not self.transport.broken:  # else messages may still be under way
            self.memory.used[self.channel] = False


_members: WeakKeyDictionary[dist.ProcessGroup, Member] = WeakKeyDictionary()


def use_lanes(memory: SharedMemory, timeout: float) -> None:
    """Let the default group, and the next ones that this rank takes part in, use ``memory``."""
    group = dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    lanes = Lanes(dist.get_rank(), ranks, memory, channel=0)
    _members[group] = Member(lanes, timeout, memory)


def use_messages(group: dist.ProcessGroup | None = None, timeout: float | None = None) -> None:
    """Let ``group`` send torch.distributed's messages where it would have lanes: call on all ranks.

    To compare the two, or to see what happens between machines. ``timeout`` is then that of calls
    that name none; those of other groups take the default group's.
    """
    group = group or dist.group.WORLD
    before = _members.get(group) or _members.get(dist.group.WORLD)
    timeout = timeout or (before.timeout if before else TIMEOUT)
    memory = before.memory if before and group is dist.group.WORLD else None
    member = Member(messages_for(group), timeout, memory)
    if group in _members:
        member.lines = _members[group].lines  # which may still be in use
    _members[group] = member


def member_of(
    group: "dist.ProcessGroup | Member | None", timeout: float | None
) -> tuple[Member, float]:
    """Return what this rank keeps for ``group``, and for how long to wait: for a module of ours."""
    check_group(group)
    group = group or dist.group.WORLD
    member = group if isinstance(group, Member) else _members.get(group)
    known = member or _members.get(dist.group.WORLD)
    if timeout is None:
        timeout = known.timeout if known else TIMEOUT
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    if not member:
        fresh = Member(messages_for(group), known.timeout if known else TIMEOUT)
        fresh.has_joined = False
        member = _members.setdefault(group, fresh)  # two threads have the same
    if not member.has_joined:
        _join(member, timeout)
    return member, timeout


def check_group(group: "dist.ProcessGroup | Member | None") -> None:
    """Raise ValueError unless there is such a group, and this rank is a member."""
    if not dist.is_initialized():
        raise ValueError("there is no process group: call this inside launch or under torchrun")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is no member of the group")


def _join(member: Member, timeout: float) -> None:
    """Let lanes take the place of messages if all members have a channel free; only once."""
    with member.joining:
        world = _members.get(dist.group.WORLD)
        memory = world and world.memory
        if not member.has_joined and memory and (lanes := _with_lanes(member, memory, timeout)):
            member.transport, member.memory = lanes.transport, memory
            member.channel, lanes.channel = lanes.channel, 0  # who is to give it back
        member.has_joined = True


def line_of(group: dist.ProcessGroup | None, timeout: float | None = None) -> Member:
    """Return a line of its own in ``group``, to be passed to calls as their group.

    Called by all ranks of the group. It has lanes if the group has and a channel is free, else
    messages with tags of its own, or, over NCCL, which knows no tags, a group of its own. Messages
    share the group's connections: once such a line has failed, the group is of no more use either.
    """
    member, timeout = member_of(group, timeout)
    group = group or dist.group.WORLD
    member.lines += 1
    if isinstance(member.transport, Lanes):
        memory = _members[dist.group.WORLD].memory
        if line := _with_lanes(member, memory, timeout):
            return line
    if not isinstance(member.transport, NcclMessages):
        return Member(Messages(group, member.lines, member.transport), member.timeout)
    own = group_like(group)
    line = Member(messages_for(own), member.timeout)
    weakref.finalize(line, destroy, own)
    return line


def destroy(group: dist.ProcessGroup) -> None:
    """Destroy a group that ``group_like`` has made, where that is safe.

    One of some ranks only stays until all groups are destroyed: torch names it by counting those
    that there are, and would give its name, with all that is stored under it, to a later one.
    """
    with suppress(ValueError, AssertionError):  # all have been destroyed already
        if group.size() == dist.get_world_size():
            dist.destroy_process_group(group)


def _with_lanes(member: Member, memory: SharedMemory, timeout: float) -> Member | None:
    """Return a member like ``member`` with lanes in a channel that is free on all its ranks."""
    transport = member.transport
    if len(transport.ranks) == 1:
        return None
    member.calls += 1
    free = sum(1 << c for c in range(CHANNELS) if _is_free(memory, c, transport))
    with transport.call("find a channel"):
        for theirs in agree(transport, member.calls, "find a channel", free, timeout):
            free &= theirs
    if not free:
        return None
    channel = free.bit_length() - 1
    memory.used[channel] = True
    lanes = Lanes(transport.member, transport.ranks, memory, channel)
    return Member(lanes, member.timeout, memory, channel)


def _is_free(memory: SharedMemory, channel: int, transport: Transport) -> bool:
    """Say whether this rank does not use a channel, and all that it has sent there was taken."""
    if memory.used[channel]:
        return False
    me = transport.ranks[transport.member]
    for i in transport.others:
        empty, _ = memory.semaphores[(channel, me, transport.ranks[i])]
        held = sum(empty.acquire(False) for _ in range(SLOTS))
        for _ in range(held):
            empty.release()
        if held < SLOTS:
            return False
    return True
