"""One tensor from rank to rank: what was sent arrives, or an error says why not."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT, SOON, attempt, both_ways, in_ranks, take, transport_of

from d2lpar import count_bytes
from d2lpar.ranks.point_to_point import HEADER, Sender, receive, send
from d2lpar.ranks.transport import Send

HEADER_BYTES = HEADER.size
FLOATS = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
)
OTHERS = (
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bool,
)


def values(shape, dtype=torch.float32):
    numbers = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
    if dtype == torch.bool:
        return numbers % 3 == 0
    return (numbers * (1 + 2j) if dtype.is_complex else numbers % 99).to(dtype)


def tensors():
    image, waves = values((2, 3, 4, 5)), values((3, 2), torch.complex64)
    found = [values((3, 5), dtype) for dtype in FLOATS + OTHERS]
    found += [
        values(()),
        values((0,)),
        values((2, 0, 3)),
        values((1, 2, 1, 3, 1, 2, 2, 2)),
    ]
    found += [image.permute(3, 1, 0, 2), image[:, 1, ::2], values((1, 3)).expand(4, 3)]
    found += [
        image.to(memory_format=torch.channels_last),
        waves.conj(),
        waves.conj().imag,
        waves.mH,
    ]
    found += [values((1_250_001,)), values((3, 700_001), torch.int16).T]  # 5 MB; 4 MB
    return found


@both_ways
@in_ranks(2)
def test_what_arrives_is_what_was_sent(rank, k, way):
    take(way)
    for i, tensor in enumerate(tensors()):
        if rank == i % 2:
            send(tensor, 1 - rank, f"tensor {i}")
            continue
        got = receive(1 - rank, f"tensor {i}")
        assert (got.dtype, got.shape, got.requires_grad) == (
            tensor.dtype,
            tensor.shape,
            False,
        )
        assert torch.equal(got.to(torch.complex128), tensor.to(torch.complex128)), i


@both_ways
@in_ranks(2)
def test_gradients_devices_labels_and_order(rank, k, way):
    take(way)
    if rank == 0:
        param, message = torch.ones(2, requires_grad=True), torch.zeros(3)
        send(param.detach(), 1, wants_gradient=True)
        with torch.no_grad():
            send(param, 1)
        send(torch.ones(2, 3), 1)
        for i in range(5):
            send(message, 1, str(i))
            message += 1  # it may be written to after it was sent
        send(torch.ones(3), 1, "gradient 41")
        send(torch.ones(2), 1, "é" * 16)
        return
    wants, not_told, elsewhere = receive(0), receive(0), receive(0, device="meta")
    (wants * 2).sum().backward()
    assert (
        wants.is_leaf and wants.grad.tolist() == [2, 2] and not not_told.requires_grad
    )
    assert elsewhere.is_meta
    time.sleep(0.1)
    assert [receive(0, str(i)).tolist() for i in range(5)] == [
        [i] * 3 for i in range(5)
    ]
    kind, text, *_ = attempt(receive, 0, "gradient 4")
    assert kind == "MismatchError" and "rank 0 has sent 'gradient 41'" in text
    assert "'gradient 4' was expected" in text
    assert receive(0, "é" * 16).tolist() == [1, 1]  # the next message comes


@both_ways
@pytest.mark.parametrize("what", ["sends nothing", "takes nothing"])
@in_ranks(3)
def test_a_missing_rank_is_named_in_time(rank, k, way, what):
    take(way)
    if rank:
        return
    arguments = (
        (receive, 2) if what == "sends nothing" else (send, torch.ones(1_250_000), 2)
    )
    kind, text, named, seconds = attempt(*arguments, timeout=0.3)
    assert (
        kind == "PeerError"
        and named == (2,)
        and "rank 2" in text
        and 0.2 < seconds < SOON
    )
    kind, again, *_ = attempt(*arguments, timeout=LIMIT)
    assert kind == "PeerError" and f"since an earlier call: PeerError: {text}" in again


ONES = torch.ones(2)
REFUSED = [  # arguments of send, error, words
    ((ONES, 0), "ValueError", "dst is 0, but the other ranks of the group are [1]"),
    ((ONES, 2), "ValueError", "dst is 2, but the other ranks"),
    ((torch.ones((1,) * 9), 1), "ValueError", "[1, 1, 1, 1, 1, 1, 1, 1, 1]"),
    ((ONES, 1, "x" * 33), "ValueError", "x" * 33),
    ((ONES, 1, "é" * 17), "ValueError", "a label of 32 bytes"),
    ((ONES.clone().requires_grad_(), 1), "ValueError", "requires gradients"),
    (([1.0], 1), "TypeError", "list, not a tensor"),
    ((ONES, 1, "", None, 0), "ValueError", "timeout must be a positive number"),
]


@in_ranks(2)
def test_what_cannot_be_sent_is_refused_before_anything_is_sent(rank, k):
    if rank == 0:
        for arguments, error, words in REFUSED:
            kind, text, *_ = attempt(send, *arguments)
            assert kind == error and words in text
        send(torch.ones(2), 1, "x" * 32)
        return
    kind, text, *_ = attempt(receive, 0, "", "no_such_kind")
    assert kind == "ValueError" and "there is no device 'no_such_kind'" in text
    for src in (1, 2, -1):
        kind, text, *_ = attempt(receive, src)
        assert kind == "ValueError" and f"src is {src}, but the other ranks" in text
    assert receive(0, "x" * 32).tolist() == [1, 1]


@in_ranks(4)
def test_a_group_has_ranks_of_the_world_and_messages_of_its_own(rank, k):
    group, other = dist.new_group([1, 3]), 4 - rank
    refused = attempt(send, torch.ones(1), 0, group=group)[:2]
    if rank in (0, 2):
        assert refused == ("ValueError", "this rank is no member of the group")
        return
    assert f"the other ranks of the group are [{other}]" in refused[1]
    if rank == 3:
        assert receive(1, "here", group=group).tolist() == [0, 1, 2, 3]
        assert receive(1, "world").item() == 0
        return
    send(torch.zeros(1), 3, "world")
    with count_bytes() as ledger:
        send(torch.arange(4.0), other, "here", group)
    assert ledger.bytes == {(1, 3): HEADER_BYTES + 16} and ledger.messages == {
        (1, 3): 2
    }


@both_ways
@in_ranks(2)
def test_what_was_not_sent_as_a_message_ends_the_use_of_the_group(rank, k, way):
    transport = transport_of(way=way)
    if rank == 0:  # it sends its tensor without a header
        transport.exchange([Send(1, torch.ones(HEADER_BYTES // 4))], [], LIMIT)
        return
    kind, text, *_ = attempt(receive, 0, "loss")
    assert kind == "MismatchError"
    assert "'loss' was expected, but rank 0 makes another call" in text
    kind, again, *_ = attempt(receive, 0, "loss")
    assert (
        kind == "PeerError" and f"since an earlier call: MismatchError: {text}" in again
    )


@both_ways
@in_ranks(2)
def test_one_thread_may_send_while_another_receives(rank, k, way):
    transport, received = transport_of(way=way), []
    thread = threading.Thread(target=lambda: received.append(receive(1 - rank)))
    thread.start()
    while "receive" not in transport.under_way and not received:
        time.sleep(0.01)
    send(torch.zeros(3), 1 - rank)
    thread.join()
    assert received[0].tolist() == [0.0] * 3


# The thread that sends.


def test_calls_are_made_in_order_in_one_other_thread_until_it_is_stopped():
    sender, go, made = Sender(), threading.Event(), []
    first = sender.submit(go.wait, 5)
    failed, cancelled = sender.submit(int, "x"), sender.submit(int, "6")
    threads = [sender.submit(threading.current_thread) for _ in range(3)]
    for i in range(50):
        sender.submit(made.append, i)
    assert cancelled.cancel()
    last = sender.submit(int, "7")
    sender.stop()
    go.set()
    assert first.result(timeout=5)
    with pytest.raises(ValueError, match="'x'"):
        failed.result(timeout=5)
    [thread] = {future.result(timeout=5) for future in threads}
    assert thread is not threading.current_thread()
    thread.join(timeout=5)
    assert (
        not thread.is_alive()
        and last.result(timeout=0) == 7
        and made == list(range(50))
    )


def test_waiting_thread_holds_nothing():
    sender, tensor = Sender(), torch.ones(1)
    sender.submit(tensor.item).result(timeout=5)
    gone = weakref.ref(tensor)
    del tensor
    limit = time.monotonic() + 5  # for the thread to come back to its queue
    while gone() and time.monotonic() < limit:
        gc.collect()
    assert gone() is None
    sender.stop()


def test_process_ends_although_a_call_does_not():
    script = (
        "from time import sleep; from d2lpar.ranks import Sender;"
        " Sender().submit(sleep, 60)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], timeout=40, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
