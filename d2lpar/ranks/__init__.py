"""Collectives between ranks: processes that send each other tensors.

``collectives`` is the file of chapter 04: each rank makes its own moves of a schedule.
``transport`` says how messages travel, over ``lanes`` between the ranks of one machine.
``launch`` starts ranks from anywhere, and ``worker`` is what runs in them.
"""

from ._old import make_grid
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
from .transport import (
    BusyError,
    Group,
    MismatchError,
    PeerError,
    Sender,
    group_of,
    own_group,
    use_messages,
)
