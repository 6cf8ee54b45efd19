"""Agreement: one short note each. For different plans see test_collectives."""

import torch
from helpers import attempt, both_ways, in_ranks, take

from d2lpar import ranks
from d2lpar.ranks.agreement import NOTE


@both_ways
@in_ranks(2)
def test_a_call_that_only_one_rank_has_made_or_checked_is_noticed(rank, k, way):
    take(way)
    # the same plan as the next one, but a call more: nobody waits for anything
    if rank == 0:
        ranks.broadcast(torch.ones(0), check=False)
    kind, text, *_ = attempt(ranks.broadcast, torch.ones(0))
    assert (
        kind == "MismatchError"
        and "rank 0, call 2" in text
        and "rank 1, call 1" in text
    )
    kind, text, named, _ = attempt(
        ranks.broadcast, torch.ones(8), check=rank > 0, timeout=1
    )
    if rank:  # what is no note is not taken for one
        assert kind == "PeerError" and named == (0,)
        assert way == "messages" or "rank 0 did not compare plans" in text


def test_a_note_is_short():
    assert NOTE.size == 32
