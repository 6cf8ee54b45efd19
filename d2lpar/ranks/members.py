"""What a rank keeps for a process group, from its first call until the group ends.

A *line* is a second transport in the same group, for another thread of each rank: what
travels over it has its own order.
"""

import threading
import weakref
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .agreement import agree
from .lanes import CHANNELS, Lanes, SharedMemory
from .nccl import NcclMessages, messages_for
from .transport import Messages, Transport

Group = dist.ProcessGroup | None  # None: all ranks
TIMEOUT = 300.0  # seconds that a call waits for the others, unless it is told


class Member:
    """A rank's part in a group, or in a line."""

    def __init__(self, transport: Transport, timeout: float):
        self.transport = transport
        self.timeout = timeout  # of a call that names none
        # the default group's: for lanes in any group
        self.memory: SharedMemory | None = None
        self.calls = self.lines = 0
        # False until it is known whether lanes take the place of messages
        self.has_joined = True
        self.joining = threading.Lock()


_members: WeakKeyDictionary[dist.ProcessGroup, Member] = WeakKeyDictionary()


def use_lanes(memory: SharedMemory, timeout: float) -> None:
    """Let the default group, and the next ones with this rank, use ``memory``."""
    group = dist.group.WORLD
    lanes = Lanes(
        dist.get_rank(), dist.get_process_group_ranks(group), memory, channel=0
    )
    _members[group] = Member(lanes, timeout)
    _members[group].memory = memory


def use_messages(group: Group = None, timeout: float | None = None) -> None:
    """Let ``group`` send torch.distributed's messages, not use lanes: on all ranks.

    ``timeout`` becomes that of calls that name none; None leaves it.
    """
    check_group(group)
    group = group or dist.group.WORLD
    member = _known(group)
    member.transport, member.has_joined, member.calls = messages_for(group), True, 0
    member.timeout = timeout or member.timeout


def member_of(group: Group | Member, timeout: float | None) -> tuple[Member, float]:
    """Return what this rank keeps for ``group``, and for how long to wait."""
    check_group(group)
    member = group if isinstance(group, Member) else _known(group or dist.group.WORLD)
    timeout = member.timeout if timeout is None else timeout
    if not timeout > 0:
        raise ValueError(
            f"timeout must be a positive number of seconds, not {timeout!r}"
        )
    if not member.has_joined:
        with member.joining:
            if not member.has_joined:
                member.transport = _find_lanes(member, timeout) or member.transport
                member.has_joined = True
    return member, timeout


def check_group(group: Group | Member) -> None:
    """Raise ValueError unless there is such a group, and this rank is a member."""
    if not dist.is_initialized():
        raise ValueError(
            "there is no process group: call this inside launch or under torchrun"
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is no member of the group")


def _known(group: dist.ProcessGroup) -> Member:
    """Return a group's member: at first with messages and the default timeout."""
    if member := _members.get(group):
        return member
    world = _members.get(dist.group.WORLD)
    member = Member(messages_for(group), world.timeout if world else TIMEOUT)
    member.has_joined = False
    return _members.setdefault(group, member)  # two threads have the same


def _find_lanes(member: Member, timeout: float) -> Lanes | None:
    """Return lanes in a channel that is free on all ranks of the group, if any is."""
    world, transport = _members.get(dist.group.WORLD), member.transport
    if not world or not world.memory or len(transport.world_ranks) == 1:
        return None
    memory, world_ranks, me = world.memory, transport.world_ranks, transport.member
    others = [world_ranks[i] for i in transport.others]
    free = sum(
        1 << c for c in range(CHANNELS) if memory.is_free(c, world_ranks[me], others)
    )
    member.calls += 1
    with transport.call("find a channel"):
        for theirs in agree(transport, member.calls, "find a channel", free, timeout):
            free &= theirs
    return Lanes(me, world_ranks, memory, free.bit_length() - 1) if free else None


def line_of(group: Group, timeout: float | None = None) -> Member:
    """Return a new line in ``group``, to pass to calls as their group: on all ranks.

    It has lanes if the group has and a channel is free; else messages with their own
    tags, and when they fail, so does the group. NCCL knows no tags: there the line has
    its own group.
    """
    member, timeout = member_of(group, timeout)
    group = group or dist.group.WORLD
    member.lines += 1
    transport = member.transport
    if isinstance(transport, Lanes) and (lanes := _find_lanes(member, timeout)):
        return Member(lanes, member.timeout)
    if not isinstance(transport, NcclMessages):
        return Member(Messages(group, member.lines, transport), member.timeout)
    own = group_like(group)
    line = Member(messages_for(own), member.timeout)
    weakref.finalize(line, destroy, own)
    return line


def group_like(group: Group, backend: str | None = None) -> dist.ProcessGroup:
    """Return a new group of the same ranks, by default of the same backend: on all."""
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    # Only for the members of a group, torch finds its name by counting the groups of
    # each: with all ranks it need not.
    only_members = len(members) < dist.get_world_size()
    backend = backend or dist.get_backend(group)
    return dist.new_group(
        members, backend=backend, use_local_synchronization=only_members
    )


def destroy(group: dist.ProcessGroup) -> None:
    """Destroy a group that ``group_like`` has made, unless it is of some ranks only.

    Torch would give its name, with all that is stored under it, to a later one.
    """
    with suppress(ValueError, AssertionError):  # all have been destroyed already
        if group.size() == dist.get_world_size():
            dist.destroy_process_group(group)
