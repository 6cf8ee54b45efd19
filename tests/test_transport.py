"""Messages over torch.distributed: in order, as they were when they were sent, and loud if late."""

import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from d2lpar.launcher import launch
from d2lpar.transport import (
    PIECE_BYTES,
    Messages,
    PeerError,
    Receive,
    Send,
    name_ranks,
    pieces_of,
    take,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

add = torch.Tensor.add_
SIZES = (0, 1, 7, PIECE_BYTES // 4, PIECE_BYTES // 4 + 1, 3 * PIECE_BYTES // 4 + 5)  # of floats


def failure(call, *args):
    begin = time.monotonic()
    try:
        call(*args)
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "ranks", ())
    return "ok", time.monotonic() - begin, ()


def test_pieces():
    for numel in SIZES:
        for dtype in (torch.uint8, torch.float32, torch.complex128):
            tensor = torch.arange(numel).to(dtype)
            pieces = pieces_of(tensor, 4096)
            assert all(0 < piece.nbytes <= 4096 for piece in pieces)
            assert sum(piece.numel() for piece in pieces) == numel
            assert not numel or torch.equal(torch.cat(list(pieces)), tensor)
            assert all(
                piece.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                for piece in pieces
            )
    assert name_ranks([3]) == "rank 3" and name_ranks([1, 3]) == "ranks 1, 3"


@pytest.mark.parametrize("k", [2, 4])
def test_tell_returns_all_notes_in_order_and_is_a_barrier(k):
    def check(rank, k):
        transport = Messages(dist.new_group())
        notes = [transport.tell(b"%d %d" % (rank, i), 30) for i in range(20)]
        time.sleep(0.2 * (rank == 1))
        before = time.monotonic()
        transport.tell(b"x" * 1000, 30)
        return notes, before, time.monotonic()

    results = launch(check, k)
    for notes, _, after in results:
        assert notes == [[b"%d %d" % (r, i) for r in range(k)] for i in range(20)]
        assert after >= max(before for _, before, _ in results)


def test_members_are_not_ranks():
    def check(rank, k):
        group = dist.new_group([2, 1])
        if rank == 0:
            return None
        transport = Messages(group)
        part = torch.zeros(3)
        other = 1 - transport.member
        message = torch.full((3,), float(rank))
        transport.exchange([Send(other, message)], [Receive(other, part, take)], 30)
        return transport.member, transport.ranks, transport.others, part.tolist()

    _, one, two = launch(check, 3)
    assert sorted([one[0], two[0]]) == [0, 1] and one[1] == two[1]
    assert one[1][one[0]] == 1 and two[1][two[0]] == 2
    assert one[2] == [two[0]] and (one[3], two[3]) == ([2.0] * 3, [1.0] * 3)


def test_several_messages_of_a_pair_arrive_in_order():
    def check(rank, k):
        transport = Messages(dist.group.WORLD)
        complaints = []
        for into in (take, add):
            messages = [torch.arange(n) + 100.0 * rank + i for i, n in enumerate(SIZES)]
            parts = [torch.ones(n) for n in SIZES]
            sends = [Send(1 - rank, message) for message in messages]
            receives = [Receive(1 - rank, part, into) for part in parts]
            transport.exchange(sends, receives, 30)
            for i, (part, n) in enumerate(zip(parts, SIZES, strict=True)):
                want = torch.arange(n) + 100.0 * (1 - rank) + i + (into is add)
                if not torch.equal(part, want):
                    complaints.append(f"{into}, {n} elements: {part}, not {want}")
        transport.exchange([], [], 30)
        none = torch.empty(0)
        transport.exchange([Send(1 - rank, none)], [Receive(1 - rank, none, add)], 30)
        return complaints

    assert launch(check, 2) == [[], []]


@pytest.mark.parametrize("numel", SIZES)
def test_partners_exchange_what_they_hold(numel):
    def check(rank, k, numel):
        transport = Messages(dist.group.WORLD)
        tensor = torch.arange(float(numel)) * (rank + 1)
        for i in range(5):  # each rank is sometimes behind
            time.sleep(0.01 * (i % 2 == rank))
            sends, receives = [Send(1 - rank, tensor)], [Receive(1 - rank, tensor, add)]
            transport.exchange(sends, receives, 30)
        return torch.equal(tensor, torch.arange(float(numel)) * 3 * 2**4)

    assert launch(check, 2, numel) == [True, True]


def test_several_sources_are_reduced_in_the_order_of_the_receives():
    def check(rank, k):
        transport = Messages(dist.group.WORLD)
        part = torch.full((3,), 1e8)
        if rank:  # the order matters: 1e8 + 1 is 1e8
            time.sleep(0.1 * (rank == 1))
            transport.exchange([Send(0, torch.tensor([1.0, -1e8, 5.0]) * rank)], [], 30)
            return None
        transport.exchange([], [Receive(src, part, add) for src in (1, 2, 3)], 30)
        return part.tolist()

    want = torch.full((3,), 1e8)
    for src in (1, 2, 3):
        want += torch.tensor([1.0, -1e8, 5.0]) * src
    assert launch(check, 4)[0] == want.tolist()


@pytest.mark.parametrize("what", ["tell", "receive", "send"])
def test_a_failed_call_marks_the_transport_as_broken(what):
    def check(rank, k, what):
        transport = Messages(dist.group.WORLD)
        if rank == 1:
            return None
        large = torch.ones(8 * PIECE_BYTES)
        calls = {
            "tell": lambda: transport.tell(b"hello", 0.3),
            "receive": lambda: transport.exchange([], [Receive(1, torch.ones(3), take)], 0.3),
            "send": lambda: transport.exchange([Send(1, large)], [], 0.3),
        }
        outcomes = [failure(calls[what])]
        broken = transport.broken
        outcomes += [failure(transport.tell, b"", 5), failure(transport.exchange, [], [], 5)]
        return outcomes, broken

    (first, *later), broken = launch(check, 2, what)[0]
    assert first[0] == "PeerError" and first[2] == (1,) and "rank 1" in first[1]
    assert broken == f"PeerError: {first[1]}"
    for kind, text, _ in later:
        assert kind == "PeerError" and "of no more use since an earlier call" in text
        assert first[1] in text


def test_peer_errors_are_runtime_errors():
    error = PeerError("ranks 1, 3 did not call", [1, 3])
    assert isinstance(error, RuntimeError) and error.ranks == (1, 3)
