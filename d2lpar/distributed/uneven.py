"""Ranks with fewer batches than others, or with fewer rows in them.

Notebook 07 uses this file. Source: ``torch.distributed.algorithms.join``.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from .. import ranks
from .state_sharing import share_tensors

# What a rank is about to do, as it tells the others before each forward pass inside
# join
ABSENT = 0  # it has no batch left
PRESENT = 1  # a forward pass without gradients, or in no_sync
TRAINS = 2  # a forward pass whose gradients are averaged


class Join:
    """What a wrapper knows inside ``join``: who still has batches."""

    def __init__(self, model, divide_by_all: bool, throws: bool):
        self.model, self.divide_by_all, self.throws = model, divide_by_all, throws
        self.active = self.everyone = dist.get_process_group_ranks(model.process_group)

    @property
    def weight(self) -> float:
        """What each rank's gradients count."""
        return 1 / len(self.everyone if self.divide_by_all else self.active)

    @property
    def source(self) -> int:
        """The rank whose buffers all take: the last of those that ended last."""
        return self.active[-1]

    def roll_call(self, plan: int) -> int:
        """Tell all ranks what this one is about to do; return the most any is."""
        plans = ranks.all_gather(
            torch.tensor([plan]), self.model.process_group
        ).tolist()
        active = [
            rank
            for rank, plan in zip(self.everyone, plans, strict=True)
            if plan != ABSENT
        ]
        if self.throws and 0 < len(active) < len(plans):
            raise RuntimeError(
                "a rank has no batch left, and throw_on_early_termination is set"
            )
        self.active = active or self.active
        return max(plans)

    def keep_up(self) -> None:
        """Take part in all that others send, without a batch, until none has one."""
        model = self.model
        while plan := self.roll_call(ABSENT):
            if model.will_sync_module_buffers():
                model._share_buffers()
            if plan == TRAINS:
                model.reducer.connect()
                model.reducer.finish(absent=True)
            model.require_forward_param_sync = plan == TRAINS
        buffers = model.module.buffers() if model.broadcast_buffers else ()
        share_tensors(
            [*model.module.parameters(), *buffers], self.source, model.process_group
        )


def num_rows(args: tuple, kwargs: dict) -> int:
    """Return dimension 0 of the first tensor that forward is given."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim():
            return len(value)
    raise ValueError(
        'weight="rows" needs a tensor with rows among the arguments of forward'
    )


@contextmanager
def naming_join() -> Iterator[None]:
    """Let an error that names a missing rank also name the most likely cause."""
    try:
        yield
    except ranks.PeerError as error:
        if not error.peers:
            raise
        words = (
            "if it had fewer batches than this rank, put the loop into `with"
            " model.join():`"
        )
        raise ranks.PeerError(f"{error}; {words}", error.peers) from None
