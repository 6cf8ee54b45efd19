"""One tensor from rank to rank: what arrives is what was sent, or an error says why not."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from d2lpar import count_bytes, ranks
from d2lpar.ranks.launcher import launch
from d2lpar.ranks.point_to_point import DTYPES, HEADER, receive, send
from d2lpar.ranks.transport import Send

SOON = 8.0  # seconds, for what takes milliseconds on a machine that is not busy
LIMIT = 30

both = pytest.mark.parametrize("way", ["lanes", "messages"])


def go(way):
    if way == "messages":
        ranks.use_messages()


def values(shape, dtype=torch.float32):
    numbers = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
    if dtype == torch.bool:
        return numbers % 3 == 0
    return (numbers % 99).to(dtype) * (1 + 2j if dtype.is_complex else 1)


def tensors():
    square, image = values((4, 4)), values((2, 3, 4, 5))
    waves = values((3, 2), torch.complex64)
    found = [values((3, 5), dtype) for dtype in DTYPES]
    found += [values(()), values((), torch.bool), values((0,)), values((2, 0, 3)), values((1,))]
    found += [values((1, 2, 1, 3, 1, 2, 2, 2)), values((7,) + (1,) * 7, torch.int16)]
    found += [square.T, square[:, 1], square[::2, 1::2], image.permute(3, 1, 0, 2)]
    found += [image.to(memory_format=torch.channels_last), values((1, 3)).expand(4, 3)]
    found += [waves.conj(), waves.imag, waves.conj().imag, waves.mH]
    found += [values((1_250_001,)), values((3, 700_001), torch.int16).T]  # 5 MB; 4 MB
    return found


def attempt(call, *args, **kwargs):
    """What an error is, says and names, and how long it took; "ok" without one."""
    begin = time.monotonic()
    try:
        call(*args, **kwargs)
    except Exception as error:
        seconds = time.monotonic() - begin
        return type(error).__name__, str(error), getattr(error, "ranks", ()), seconds
    return "ok", "", (), time.monotonic() - begin


@both
def test_what_arrives_is_what_was_sent(way):
    def talk(rank, k):
        go(way)
        complaints = []
        for i, tensor in enumerate(tensors()):
            if rank == i % 2:
                before = tensor.clone()
                send(tensor, 1 - rank, f"tensor {i}")
                same = torch.equal(tensor, before)
            else:
                got = receive(1 - rank, f"tensor {i}")
                same = torch.equal(got, tensor) and got.shape == tensor.shape
                same = same and got.dtype == tensor.dtype and not got.requires_grad
            if not same:
                complaints.append((i, tensor.dtype, tensor.shape))
        return complaints

    assert launch(talk, 2, timeout=LIMIT) == [[], []]


@both
def test_whether_a_gradient_is_wanted_and_where_the_tensor_is_to_lie(way):
    def talk(rank, k):
        go(way)
        if rank == 0:
            param = torch.ones(2, requires_grad=True)
            send(param.detach(), 1, wants_gradient=True)
            with torch.no_grad():
                send(param, 1)
            send(torch.ones(2, 3), 1)
            return None
        wants, not_told, elsewhere = receive(0), receive(0), receive(0, device="meta")
        (wants * 2).sum().backward()
        return wants.is_leaf, wants.grad.tolist(), not_told.requires_grad, str(elsewhere.device)

    assert launch(talk, 2, timeout=LIMIT)[1] == (True, [2, 2], False, "meta")


@both
def test_messages_come_in_order_and_may_be_written_to_after_they_were_sent(way):
    def talk(rank, k):
        go(way)
        if rank == 1:
            time.sleep(0.1)
            return [receive(0, str(i)).tolist() for i in range(5)]
        message = torch.zeros(3)
        for i in range(5):
            send(message, 1, str(i))
            message += 1

    assert launch(talk, 2, timeout=LIMIT)[1] == [[i] * 3 for i in range(5)]


@both
def test_another_label_is_an_error_that_names_both_and_the_next_message_comes(way):
    def talk(rank, k):
        go(way)
        if rank == 0:
            send(torch.ones(3), 1, "gradient 41")
            send(torch.ones(2), 1, "é" * 16)
            return None
        return attempt(receive, 0, "gradient 4"), receive(0, "é" * 16).tolist()

    (kind, text, _, _), after = launch(talk, 2, timeout=LIMIT)[1]
    assert kind == "MismatchError" and after == [1, 1]
    assert "rank 0 has sent 'gradient 41'" in text and "'gradient 4' was expected" in text


@both
def test_a_rank_that_sends_nothing_is_named_in_time(way):
    def talk(rank, k):
        go(way)
        return attempt(receive, 2, timeout=0.3) if rank == 0 else None

    kind, text, named, seconds = launch(talk, 3, timeout=LIMIT)[0]
    assert kind == "PeerError" and named == (2,) and "rank 2" in text
    assert 0.2 < seconds < SOON


@both
def test_a_rank_that_takes_nothing_is_named_in_time(way):
    def talk(rank, k):
        go(way)
        return attempt(send, torch.ones(1_250_000), 2, timeout=0.3) if rank == 0 else None

    kind, text, named, seconds = launch(talk, 3, timeout=LIMIT)[0]
    assert kind == "PeerError" and named == (2,) and "rank 2" in text
    assert 0.2 < seconds < SOON


def refused_by_send():
    ones = torch.ones(2)
    return [
        ((ones, 0), "ValueError", "dst is 0, but the other ranks of the group are [1]"),
        ((ones, 2), "ValueError", "dst is 2, but the other ranks"),
        ((ones, -1), "ValueError", "dst is -1, but the other ranks"),
        ((torch.ones((1,) * 9), 1), "ValueError", "[1, 1, 1, 1, 1, 1, 1, 1, 1]"),
        ((ones, 1, "x" * 33), "ValueError", "x" * 33),
        ((ones, 1, "é" * 17), "ValueError", "a label of 32 bytes"),
        ((ones.to(torch.float8_e4m3fn), 1), "ValueError", "torch.float8_e4m3fn of shape [2]"),
        ((ones.clone().requires_grad_(), 1), "ValueError", "requires gradients"),
        (([1.0], 1), "TypeError", "list, not a tensor"),
        ((ones, 1, "", None, 0), "ValueError", "timeout must be a positive number"),
    ]


def test_what_cannot_be_sent_is_refused_before_anything_is_sent():
    def talk(rank, k):
        if rank == 1:
            kind, text, *_ = attempt(receive, 0, "", "no_such_kind")
            assert kind == "ValueError" and "there is no device 'no_such_kind'" in text
            return [attempt(receive, src) for src in (1, 2, -1)], receive(0, "x" * 32).tolist()
        errors = [attempt(send, *arguments) for arguments, *_ in refused_by_send()]
        send(torch.ones(2), 1, "x" * 32)
        return errors

    found, (refused, after) = launch(talk, 2, timeout=LIMIT)
    for (_, error, words), (kind, text, *_) in zip(refused_by_send(), found, strict=True):
        assert kind == error and words in text
    for src, (kind, text, *_) in zip((1, 2, -1), refused, strict=True):
        assert kind == "ValueError" and f"src is {src}, but the other ranks" in text
    assert after == [1, 1]


def test_outside_of_ranks_there_is_no_process_group():
    for call in (lambda: send(torch.ones(1), 1), lambda: receive(1)):
        with pytest.raises(ValueError, match="there is no process group"):
            call()


def test_in_a_group_ranks_and_positions_are_those_of_the_world():
    def talk(rank, k):
        group = dist.new_group([1, 3])
        if rank in (0, 2):
            return attempt(send, torch.ones(1), 1, group=group)
        other = 4 - rank
        refused = attempt(send, torch.ones(1), 0, group=group)
        if rank == 3:
            return refused, receive(other, "here", group=group).tolist()
        with count_bytes() as ledger:
            send(torch.arange(4.0), other, "here", group)
        return refused, dict(ledger.bytes), dict(ledger.messages)

    zero, one, two, three = launch(talk, 4, timeout=LIMIT)
    assert zero[:2] == two[:2] == ("ValueError", "this rank is no member of the group")
    assert "the other ranks of the group are [3]" in one[0][1]
    assert "the other ranks of the group are [1]" in three[0][1]
    assert one[1:] == ({(1, 3): HEADER.size + 16}, {(1, 3): 2})
    assert three[1] == [0, 1, 2, 3]


def test_a_group_has_messages_of_its_own():
    def talk(rank, k):
        group = dist.new_group()
        if rank == 0:
            send(torch.zeros(1), 1, "world")
            send(torch.ones(1), 1, "group", group)
            return None
        return receive(0, "group", group=group).item(), receive(0, "world").item()

    assert launch(talk, 2, timeout=LIMIT)[1] == (1, 0)


@both
def test_what_was_not_sent_as_a_message_ends_the_use_of_the_group(way):
    nothing = torch.ones(HEADER.size // 4)

    def talk(rank, k):
        go(way)
        if rank == 0:  # it sends its tensor without a header
            transport = ranks.member_of(None, None)[0].transport
            transport.exchange([Send(1, nothing)], [], LIMIT)
            return None
        return attempt(receive, 0, "loss"), attempt(receive, 0, "loss")

    (kind, text, *_), (later, again, *_) = launch(talk, 2, timeout=LIMIT)[1]
    assert kind == "MismatchError" and "'loss' was expected, but rank 0 makes another call" in text
    assert later == "PeerError" and f"since an earlier call: MismatchError: {text}" in again


@both
def test_a_sender_without_memory_for_its_copy_is_missed_at_once(way):
    class NoRoom(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch.Tensor.contiguous:
                raise MemoryError("no room for a copy")
            return super().__torch_function__(function, types, args, kwargs or {})

    def talk(rank, k):
        go(way)
        if rank == 0:
            return attempt(send, torch.ones(2, 3).as_subclass(NoRoom), 1, timeout=2 * LIMIT)
        return attempt(receive, 0, timeout=2 * LIMIT)

    sender, receiver = launch(talk, 2, timeout=LIMIT)
    assert sender[:2] == ("MemoryError", "no room for a copy")
    assert receiver[0] == "PeerError" and receiver[2] == (0,)


@both
def test_two_threads_that_send_at_once_are_refused_and_the_receiver_learns_of_it(way):
    def talk(rank, k):
        go(way)
        ranks.barrier()
        transport = ranks.member_of(None, None)[0].transport
        if rank == 1:
            time.sleep(0.5)
            return attempt(receive, 0, "large", timeout=2 * LIMIT)
        large, outcomes = torch.ones(5_000_000), []

        def first():
            outcomes.append(attempt(send, large, 1, "large", timeout=2 * LIMIT))

        thread = threading.Thread(target=first, name="first")
        thread.start()
        while not transport.under_way:
            time.sleep(0.01)
        outcomes.append(attempt(send, large, 1, "other"))
        thread.join()
        return outcomes

    outcomes, received = launch(talk, 2, timeout=LIMIT)
    for kind, text, *_ in outcomes:
        assert (
            kind == "BusyError" and "called send of 'other' to rank 1 while send of 'large'" in text
        )
    assert received[0] == "PeerError" and received[2] == (0,)


@both
def test_a_thread_may_send_while_another_one_receives(way):
    def talk(rank, k):
        go(way)
        ranks.barrier()
        transport, received = ranks.member_of(None, None)[0].transport, []
        thread = threading.Thread(target=lambda: received.append(receive(1 - rank)))
        thread.start()
        while "receive" not in transport.under_way and not received:
            time.sleep(0.01)
        send(torch.zeros(3), 1 - rank)
        thread.join()
        return received[0].tolist()

    assert launch(talk, 2, timeout=LIMIT) == [[0.0] * 3] * 2
