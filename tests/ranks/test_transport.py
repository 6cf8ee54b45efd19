"""What fails in a transport. What is right, see the collectives."""

import contextlib
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT, attempt, in_ranks, transport_of

from d2lpar import ranks
from d2lpar.collectives.schedules import ring
from d2lpar.ranks.launcher import launch
from d2lpar.ranks.transport import (
    END,
    NOTES,
    BusyError,
    Messages,
    PeerError,
    Receive,
    Transport,
    take,
)


def test_a_note_is_not_taken_for_data():
    def check(rank, k):
        transport, part = Messages(dist.group.WORLD), torch.zeros(8)
        if rank == 0:  # its call has failed here, and it goes on with the next one
            return attempt(transport.tell, b"note" * 8, 1.0)[0]
        return attempt(transport.exchange, [], [Receive(0, part, take)], 0.5)[
            0
        ], part.sum().item()

    assert launch(check, 2, timeout=LIMIT) == ["PeerError", ("PeerError", 0.0)]


def test_a_connection_that_breaks_while_a_note_is_being_sent_is_noticed_at_once():
    def check(rank, k):
        transport, note = (
            transport_of(group := dist.new_group(), "messages"),
            bytes(2**26),
        )
        if rank == 0:
            wait = transport._wait
            transport._wait = lambda *args: (dist.send(torch.empty(1), 1), wait(*args))
            return attempt(transport.tell, note, 8)
        landing = torch.empty(len(note), dtype=torch.uint8)
        dist.recv(torch.empty(1), 0)  # rank 0 waits now
        dist.irecv(landing, 0, group, NOTES)  # and its note sets out
        with contextlib.suppress(RuntimeError):  # a wait in vain closes the connection
            dist.irecv(torch.empty(1), 0, group, END).wait(timedelta(milliseconds=1))

    kind, text, named, _ = launch(check, 2, timeout=LIMIT)[0]
    assert (kind, named) == ("PeerError", (1,)) and "Timed out" not in text


@in_ranks(2)
def test_what_is_to_come_is_asked_for_before_anything_is_sent(rank, k):
    """Else it waits behind the data: on a slow link an exchange takes twice as long."""
    transport, kinds = transport_of(way="messages"), []
    post = transport._post
    transport._post = lambda moves: (
        kinds.extend(kind for kind, *_ in moves) or post(moves)
    )
    ranks.allreduce(torch.ones(8), ring, check=False)
    assert kinds == [dist.irecv, dist.isend] * 2


# One call at a time.


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((), ()),
        (("send",), ()),
        (("receive",), ()),
        ((), ("receive",)),
        (("send",), ("send",)),
    ],
)
def test_a_second_call_is_refused_and_the_first_one_learns_of_it(first, second):
    transport, announced = Transport(0, [0, 1]), []
    transport._announce = announced.append  # to the other ranks
    words = "thread 'MainThread' called B while A of thread 'MainThread' was under way"
    refused = partial(pytest.raises, BusyError, match=words)
    with (
        refused(),
        transport.call("A", *first),
        refused(),
        transport.call("B", *second),
    ):
        pytest.fail("it was let in")
    assert isinstance(announced[0], BusyError) and not transport.under_way
    again = f"can no longer be used since an earlier call: BusyError: {words}"
    with pytest.raises(PeerError, match=again), transport.call("C"):
        pytest.fail("it was let in")
