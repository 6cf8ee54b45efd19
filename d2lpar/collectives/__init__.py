"""Collectives in one process: a list of tensors, one per participant, and a schedule.

A schedule is data: the steps, and in each step who sends which chunk to whom. Read
``schedules`` first, then ``lists``, which runs one on tensors, and ``cost``, which
follows one with a clock.
"""

from .cost import Cost, closed_form, walk
from .lists import (
    all_gather,
    allreduce,
    broadcast,
    naive_allreduce,
    reduce_scatter,
    ring_allreduce,
)
from .schedules import (
    Move,
    Schedule,
    check_steps,
    direct,
    halving_doubling,
    holdings,
    num_chunks,
    recursive_doubling,
    ring,
    star,
    tree,
    tree_broadcast,
    verify_allreduce,
)
