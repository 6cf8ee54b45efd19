"""Collectives between ranks: processes that send each other tensors.

``launcher`` starts ranks, and ``worker`` is what runs in one. A message travels over a
``transport``: torch.distributed's messages (``nccl`` between GPUs), or ``lanes`` in shared memory.
``members`` keeps what belongs to a group. In ``collectives`` all ranks first agree on what they do
(``agreement``), then each makes its own moves of a schedule. ``point_to_point`` sends one tensor,
and ``grid`` puts ranks in rows and columns.
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
from .nccl import NcclMessages
from .point_to_point import Sender, receive, send
from .transport import BusyError, Messages, MismatchError, PeerError
from .worker import be_rank
