"""Collectives between ranks: processes that send each other tensors.

Read ``transport`` first: a message travels by torch.distributed's send and receive
(``nccl`` between GPUs), or over ``lanes`` in shared memory. Then ``agreement``,
``moves`` and ``collectives``: all ranks agree on what they do, and each makes its own
moves of a schedule; ``members`` keeps what belongs to a group. ``point_to_point`` sends
one tensor. ``launcher`` starts ranks, ``worker`` is what runs in one, ``torchrun``
joins those that torchrun has started, and ``grid`` puts them in rows and columns.
"""

from .agreement import agree
from .collectives import (
    all_gather,
    all_gather_int,
    allreduce,
    barrier,
    broadcast,
    choose,
    reduce_scatter,
)
from .grid import make_grid
from .lanes import Lanes
from .launcher import RankError, launch
from .members import member_of, use_messages
from .moves import own_moves
from .nccl import NcclMessages
from .point_to_point import Sender, receive, send
from .torchrun import process_group
from .transport import BusyError, Messages, MismatchError, PeerError
from .worker import be_rank
