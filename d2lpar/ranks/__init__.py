"""Collectives between ranks: processes that send each other tensors.

``collectives`` is the file of chapter 04: each rank makes its own moves of a schedule.
``transport`` says how messages travel, over ``lanes`` between the ranks of one machine.
``sender`` is a thread for calls while the rank computes. ``launch`` starts ranks from
anywhere, and ``worker`` is what runs in them.
"""

from .collectives import (
    agree,
    all_gather,
    all_to_all,
    allreduce,
    barrier,
    broadcast,
    choose,
    receive,
    reduce_scatter,
    send,
)
from .launch import RankError, launch
from .sender import Sender
from .transport import (
    BusyError,
    Group,
    MismatchError,
    PeerError,
    group_of,
    own_group,
    use_messages,
)
