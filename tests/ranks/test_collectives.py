"""Collectives between real ranks: right to the last bit; loud when ranks disagree."""

import math
import os
import signal
import threading
import time
from dataclasses import make_dataclass
from datetime import timedelta
from functools import partial

import psutil
import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT, SOON, attempt, both_ways, in_ranks, take, transport_of

from d2lpar import ranks
from d2lpar.collectives import cost, lists
from d2lpar.collectives.lists import OPS
from d2lpar.collectives.schedules import (
    Move,
    direct,
    halving_doubling,
    recursive_doubling,
    ring,
    star,
    tree,
)
from d2lpar.devices import count_bytes
from d2lpar.ranks import collectives, launcher
from d2lpar.ranks.lanes import Lanes
from d2lpar.ranks.launcher import RankError, launch

SCHEDULES = (star, ring, tree, direct, halving_doubling, recursive_doubling)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
DTYPES = FLOATS + INTEGERS
TORCHS = {"sum": "SUM", "product": "PRODUCT", "max": "MAX", "min": "MIN", "mean": "SUM"}
WAYS = ("lanes", "messages")


def values(rank, shape, dtype):
    """Numbers that hang on rank and index, and whose sums depend on their order."""
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) * (rank + 1) % 13
    if dtype == torch.bool:
        return numbers % 3 > 0
    if dtype.is_complex:
        return torch.complex(numbers / 7 + 1, numbers / 3 - 1).to(dtype)
    return (
        numbers / 7 + 0.5 + rank / 3 if dtype.is_floating_point else numbers + 1 + rank
    ).to(dtype)


def defined(op, dtype):
    if op == "mean":
        return dtype.is_floating_point or dtype.is_complex
    return op not in ("max", "min") or not dtype.is_complex


def same(got, want, *what):
    """Equal to the last bit, also in the signs of zero and NaN."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    flat = [
        t.resolve_conj().resolve_neg().reshape(-1).contiguous() for t in (got, want)
    ]
    assert torch.equal(*[t.view(torch.uint8) for t in flat]), what


# Right to the last bit: the oracle is the same collective on a list of tensors.


def lazy(k):
    yield from ring(k)


class Rounds:
    def __call__(self, k):
        return ring(k)


def like_the_list(schedule, op, data):
    """What ``ranks.allreduce`` should leave on each rank."""
    data = [tensor.clone() for tensor in data]
    nbytes = lists.flatten(data[0], widen=True).nbytes
    lists.allreduce(data, schedule or ranks.choose(nbytes, len(data)), op)
    return data


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@in_ranks()
def test_allreduce_has_the_bits_of_the_list_form(rank, k):
    shapes = [(), (0,), (k - 1,), (k + 1,), (2, 3, 5), (4, 0, 2)]
    schedules = (None, *SCHEDULES)
    cases = [
        (s, op, t) for s in schedules for op in OPS for t in DTYPES if defined(op, t)
    ]
    cases = [(*case, shapes[i % len(shapes)]) for i, case in enumerate(cases[::k])]
    cases += [(s, "sum", torch.float32, shape) for s in schedules for shape in shapes]
    cases += [(s, "sum", torch.float32, (7, 3)) for s in (lazy, Rounds())]
    if k == 3:  # in several pieces
        cases += [(s, "mean", torch.float32, (1_000_003,)) for s in schedules]
    special = torch.tensor([0.0, -0.0, math.nan, -math.nan])
    for way in WAYS:
        take(way)
        for n, (schedule, op, dtype, shape) in enumerate(cases):
            mine = values(rank, shape, dtype)
            ranks.allreduce(mine, schedule, op, check=n % 2 == 0, timeout=math.inf)
            for want in like_the_list(
                schedule, op, [values(r, shape, dtype) for r in range(k)]
            ):
                same(mine, want, schedule, op, dtype, shape)
        for numel in (1, 33, 300_001):  # in one vector, in several, in several pieces
            data = [
                special.repeat(2 + numel // 4)[r : r + numel].clone() for r in range(k)
            ]
            for schedule in SCHEDULES:
                for op in ("sum", "product", "max", "min"):
                    mine = data[rank].clone()
                    ranks.allreduce(mine, schedule, op)
                    for want in like_the_list(schedule, op, data):
                        same(mine, want, schedule, op, numel)
        for op, name in TORCHS.items():  # and torch's own, up to rounding
            mine, theirs = (values(rank, (7, 3), torch.float64) for _ in range(2))
            ranks.allreduce(mine, op=op)
            dist.all_reduce(theirs, getattr(dist.ReduceOp, name))
            torch.testing.assert_close(mine, theirs / k if op == "mean" else theirs)


@both_ways
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@in_ranks()
def test_the_other_collectives_have_the_bits_of_the_list_form(rank, k, way):
    take(way)
    for n, dtype in enumerate(DTYPES[:: max(1, k - 1)]):
        shape = [(5,), (), (0,), (k + 1, 3), (2 * k, 2), (1, 4)][n % 6]
        for src in range(k):
            mine = values(rank, shape, dtype)
            ranks.broadcast(mine, src, check=src % 2 == 0)
            same(mine, values(src, shape, dtype), "from", src)
        for op in [op for op in OPS if defined(op, dtype)]:
            mine, data = (
                values(rank, shape, dtype),
                [values(r, shape, dtype) for r in range(k)],
            )
            shard, shards = (
                ranks.reduce_scatter(mine, op),
                lists.reduce_scatter(data, op),
            )
            same(shard, shards[rank], op, shape)
            same(mine, data[rank], "the rest", op, shape)
            assert (
                mine.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
            )
        for rows in ([2] * k, list(range(k)), [0] * k, [k - r for r in range(k)], None):
            sizes = [()] * k if rows is None else [(r, 3) for r in rows]
            shards = [values(r, sizes[r], dtype) for r in range(k)]
            same(ranks.all_gather(shards[rank]), lists.all_gather(shards)[rank], rows)
            same(shards[rank], values(rank, sizes[rank], dtype), "the shard itself")
    if k == 3:  # in several pieces
        data = [values(r, (300_001 + r, 3), torch.float64) for r in range(k)]
        same(ranks.all_gather(data[rank]), torch.cat(data))
    time.sleep(0.1 * rank)
    before, _, after = time.monotonic_ns(), ranks.barrier(), time.monotonic_ns()
    assert after >= max(ranks.all_gather_int(before))
    numbers = [ranks.all_gather_int(n) for n in (rank, -rank, 2**62 + rank)]
    assert numbers == [
        [f(r) for r in range(k)] for f in (int, int.__neg__, (2**62).__add__)
    ]


LAYOUTS = {
    "transposed": ((4, 3), torch.t),
    "channels_last": (
        (2, 3, 4, 5),
        lambda t: t.as_strided((2, 3, 4, 5), (60, 1, 15, 3)),
    ),
    "rows, every other column": ((6, 5), lambda t: t[1:, ::2]),
    "a slice": ((20,), lambda t: t[3:17]),
    "one element": ((5,), lambda t: t[2]),
    "a real part": (
        (12,),
        lambda t: torch.view_as_real(t)[:, 0] if t.is_complex() else t[::2],
    ),
    "conjugated later": ((6,), torch.conj),
}


@both_ways
@in_ranks(3)
def test_any_layout_is_right_and_its_neighbours_stay(rank, k, way):
    take(way)
    for name, (shape, view) in LAYOUTS.items():
        for dtype in (torch.bfloat16, torch.complex64):
            data = [
                view(values(r, shape, dtype)).clone().resolve_conj() for r in range(k)
            ]
            shards = [tensor.clone() for tensor in data]
            lists.reduce_scatter(shards)
            calls = [(partial(ranks.broadcast, src=1), data[1])]
            calls += [(ranks.reduce_scatter, shards[rank])]
            for schedule in (None, ring, halving_doubling):
                want = like_the_list(schedule, "sum", data)[rank]
                calls.append((partial(ranks.allreduce, schedule=schedule), want))
            for call, part in calls:
                whole, want = values(rank, shape, dtype), values(rank, shape, dtype)
                call(view(whole))
                view(want).copy_(part)
                same(whole, want, name, call)
            joined = ranks.all_gather(view(values(rank, shape, dtype)))
            same(joined, torch.cat([torch.atleast_1d(d) for d in data]), name)
    with torch.no_grad():
        weights = torch.ones(4, requires_grad=True)
        ranks.allreduce(weights)
        same(weights, torch.full((4,), 3.0))


@both_ways
@in_ranks(4)
def test_groups_of_some_ranks(rank, k, way):
    members_of = [(1, 3), (0, 2), (3, 2, 1), (0, 1), (1, 2), (0, 1, 3)]
    groups, kinds = {members: dist.new_group(members) for members in members_of}, set()
    for members, group in groups.items():  # {1, 3} and {0, 2} at the same time
        if rank not in members:
            assert attempt(ranks.barrier, group)[0] == "ValueError"
            continue
        lanes = ranks.all_gather_int(type(transport_of(group, way)) is Lanes, group)
        assert len(set(lanes)) == 1  # a channel that all have free, or messages
        kinds.update(lanes)
        order = dist.get_process_group_ranks(group)
        me = order.index(rank)
        data = [values(r, (7, 2), torch.float64) for r in order]
        total, mine = sum(data), data[me].clone()
        with count_bytes() as ledger:
            ranks.allreduce(mine, ring, group=group)
        torch.testing.assert_close(mine, total)
        assert set(ledger.bytes) == {(rank, order[(me + 1) % len(order)])}
        for src in order:
            mine = data[me].clone()
            ranks.broadcast(mine, src, group)
            same(mine, data[order.index(src)])
        shard = ranks.reduce_scatter(data[me].clone(), group=group)
        torch.testing.assert_close(shard, total.tensor_split(len(order))[me])
        same(ranks.all_gather(data[me], group), torch.cat(data))
        outside = next(r for r in range(k) if r not in members)
        kind, text, *_ = attempt(ranks.broadcast, data[me], outside, group)
        assert (
            kind == "ValueError" and f"src is {outside}" in text and str(order) in text
        )
        odd = rank == max(members)
        kind, text, *_ = attempt(ranks.allreduce, torch.ones(3 + odd), group=group)
        assert kind == "MismatchError" and all(f"rank {r}" in text for r in members)
    assert rank != 1 or kinds == (
        {0, 1} if way == "lanes" else {0}
    )  # it is in five groups


# The ranks differ: everyone says so, nothing has happened, and the group goes on.


def renamed(k):
    return star(k)


renamed.__qualname__ = "ring"


def swap(k):
    return [[Move(r, 1 - r, None, False) for r in range(2)]]


def to_itself(k):
    return [[Move(0, 0, None, True)]]


Unhashable = make_dataclass(
    "Unhashable", [], namespace={"__call__": lambda self, k: ring(k)}
)
# what is called with t, usually and by the odd rank; what each says of it
DIFFERENCES = [
    ("allreduce(t)", "broadcast(t)", "allreduce, sum", "broadcast, from"),
    ("barrier()", "all_gather_int(5)", "barrier", "all_gather_int"),
    ("allreduce(t)", "allreduce(t, op='max')", "sum", "max"),
    ("reduce_scatter(t, 'mean')", "reduce_scatter(t, 'product')", "mean", "product"),
    ("allreduce(t)", "allreduce(t[:5])", "[6]", "[5]"),
    ("allreduce(t.view(2, 3))", "allreduce(t.view(3, 2))", "[2, 3]", "[3, 2]"),
    ("reduce_scatter(t)", "reduce_scatter(t.view(1, 6))", "[6]", "[1, 6]"),
    (
        "all_gather(t.view(2, 3))",
        "all_gather(t.view(3, 2))",
        "rows of float32 [3]",
        "[2]",
    ),
    ("allreduce(t)", "allreduce(t.double())", "float32", "float64"),
    ("allreduce(t)", "allreduce(t.view(torch.int32))", "float32", "int32"),
    ("allreduce(t.bfloat16())", "allreduce(t.half())", "bfloat16", " float16"),
    ("allreduce(t, star)", "allreduce(t, ring)", "schedule star", "schedule ring"),
    ("allreduce(t, ring)", "allreduce(t, renamed)", "schedule ring", "schedule ring"),
    ("broadcast(t)", "broadcast(t, 1)", "from rank 0", "from rank 1"),
    ("barrier(label='a')", "barrier(label='b')", "barrier 'a'", "barrier 'b'"),
]
DIFFERENCES += [
    (f"{name}(t, label='a')", f"{name}(t, label='b')", f"{name} 'a'", f"{name} 'b'")
    for name in ("allreduce", "reduce_scatter", "all_gather", "broadcast")
]


def call(text, t, **options):
    """Make a call that is written in a table; ``options`` come last."""
    names = {
        **vars(ranks),
        "torch": torch,
        "ring": ring,
        "star": star,
        "renamed": renamed,
    }
    names |= {"swap": swap, "to_itself": to_itself, "Unhashable": Unhashable, "t": t}
    text = (
        text[:-1]
        + "".join(f", {name}={value}" for name, value in options.items())
        + ")"
    )
    return attempt(lambda: eval(text, names))


@both_ways
@pytest.mark.parametrize("k", [2, 3])
@in_ranks()
def test_every_rank_learns_of_a_difference_and_the_group_goes_on(rank, k, way):
    take(way)
    odd = k // 2
    for usual, unusual, *words in DIFFERENCES:
        tensor = torch.arange(6.0) * (rank + 1)
        kind, text, _, seconds = call(unusual if rank == odd else usual, tensor)
        lines = str(text).splitlines()[1:]
        assert kind == "MismatchError" and len(lines) == k and seconds < SOON, (
            unusual,
            text,
        )
        for r, line in enumerate(lines):
            assert line.startswith(f"rank {r}, call ") and words[r == odd] in line
        same(tensor, torch.arange(6.0) * (rank + 1), unusual)
        ranks.allreduce(tensor)
        same(tensor, torch.arange(6.0) * sum(range(1, k + 1)), "after", unusual)


def test_torch_is_silently_wrong_about_a_dtype_an_op_and_a_layout():
    def theirs(rank, k):
        six = torch.arange(6.0) + 2
        cases = [
            (six.int() if rank else six, "SUM"),
            (six, "MAX" if rank else "SUM"),
            (six.view(3, 2).t() if rank else six.view(3, 2).t().contiguous(), "SUM"),
        ]
        for tensor, op in cases:
            right = tensor.clone() * 2
            alone = dist.new_group(
                timeout=timedelta(seconds=2)
            )  # one that may be left broken
            kind, *_ = attempt(
                dist.all_reduce, tensor, getattr(dist.ReduceOp, op), alone
            )
            yield kind == "ok" and torch.equal(tensor, right)

    first, second = launch(lambda *args: list(theirs(*args)), 2, timeout=LIMIT)
    assert not any(map(bool.__and__, first, second)), "then our checks are not needed"


# Arguments that cannot be: alike on all ranks, and where only one rank has them.


REFUSED = [  # a call with t, of four ones; error, words
    ("allreduce(t, op='avg')", "ValueError", "op is 'avg', which is none of sum,"),
    ("allreduce(t.to(torch.uint16))", "ValueError", "torch has no sum of torch.uint16"),
    ("allreduce(t.int(), op='mean')", "ValueError", "the mean of torch.int32"),
    ("reduce_scatter(t + 0j, op='max')", "ValueError", "max is not defined for"),
    ("allreduce(t.clone().requires_grad_())", "ValueError", "requires gradients"),
    ("allreduce(t[:1].expand(4))", "ValueError", "is an expanded view (strides (0,))"),
    ("allreduce([1.0, 2.0])", "TypeError", "the tensor is a list, not a tensor"),
    ("broadcast(None)", "TypeError", "the tensor is a NoneType, not a tensor"),
    (
        "allreduce(t, 'max')",
        "TypeError",
        "schedule must be a function such as ring, not 'max'",
    ),
    ("allreduce(t, Unhashable())", "TypeError", "unhashable type: 'Unhashable'"),
    ("allreduce(t, to_itself)", "ValueError", "does not send a chunk between two of 2"),
    ("allreduce(t, swap)", "ValueError", "while it is overwritten"),
    ("broadcast(t, 2)", "ValueError", "src is 2, but the group has the ranks [0, 1]"),
    ("reduce_scatter(t.to('meta'))", "ValueError", "is a meta tensor"),
    ("broadcast(t.to_sparse())", "ValueError", "pass its .to_dense()"),
    ("all_gather(t.view(2, 2).to_sparse_csr())", "ValueError", "sparse_csr"),
    (
        "all_gather_int(2**63)",
        "ValueError",
        f"number must be an int of 64 bits, not {2**63}",
    ),
    (
        "all_gather_int(1.5)",
        "TypeError",
        "'float' object cannot be interpreted as an integer",
    ),
]


@both_ways
@in_ranks(2)
def test_bad_arguments_are_refused_alike_on_all_ranks(rank, k, way):
    take(way)
    for text, error, words in REFUSED:
        every = [call(text, torch.ones(4))]
        if not text.startswith("all_gather"):
            every.append(call(text, torch.ones(4), check=False))
        assert all(kind == error and words in said for kind, said, *_ in every), (
            words,
            every,
        )
        kind, said, *_ = call(text if rank else "barrier()", torch.ones(4))
        assert kind == "MismatchError" and f"{error}: " in said
    tensor = torch.ones(3)
    ranks.allreduce(tensor)
    same(tensor, torch.full((3,), 2.0))


def test_without_a_process_group():
    for call in (
        partial(ranks.send, torch.ones(2), 1),
        partial(ranks.receive, 1),
        ranks.barrier,
    ):
        with pytest.raises(
            ValueError, match="there is no process group: call this inside launch"
        ):
            call()


# A rank does not come.


@both_ways
@pytest.mark.parametrize("missing", [(2,), (2, 3)], ids=str)
@in_ranks(4)
def test_missing_ranks_are_named_by_all_others(rank, k, missing, way):
    take(way)
    ranks.barrier()
    if rank in missing:  # it has returned, but stays connected
        return
    if (
        missing == (2, 3) and way == "lanes"
    ):  # fill the one to rank 2, which takes nothing
        for _ in range(2):
            ranks.broadcast(torch.ones(2), check=False)
    kind, text, named, seconds = attempt(ranks.allreduce, torch.ones(4), timeout=0.5)
    assert kind == "PeerError" and named == missing and 0.4 < seconds < 0.5 + SOON
    assert ("rank 2 " if len(missing) == 1 else "ranks 2, 3 ") in text
    kind, again, _, seconds = attempt(ranks.allreduce, torch.ones(4), timeout=20)
    assert kind == "PeerError" and seconds < SOON
    assert "can no longer be used" in again and text in again


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_dead_rank_is_named_at_once(when, monkeypatch, capsys):
    monkeypatch.setattr(launcher, "GRACE", 10)  # time to speak for the other

    def check(rank, k):
        take("messages")
        ranks.barrier()
        time.sleep(0.3 * (rank == (when == "meanwhile")))
        if rank == 1:
            os._exit(3)
        kind, _, named, seconds = attempt(ranks.barrier, timeout=30)
        print(kind, named, seconds < 0.3 + SOON)

    with pytest.raises(RankError, match="rank 1: died"):
        launch(check, 2, timeout=LIMIT)
    assert capsys.readouterr().out == "[rank 0] PeerError (1,) True\n"


@pytest.mark.parametrize(
    "timeouts", [(1.1, 0.9, 0.7), (0.7, 0.9, 1.1)], ids=["last", "first"]
)
@in_ranks(4)
def test_in_the_middle_of_a_ring_all_name_the_one_that_is_missing(
    rank, k, timeouts
):  # the neighbour of the missing rank gives up last, or first
    if rank < 3:
        call = partial(attempt, ranks.allreduce, torch.ones(8), ring, check=False)
        kind, text, named, seconds = call(timeout=timeouts[rank])
        assert (kind, named) == ("PeerError", (3,)) and "rank 3 " in text
        assert seconds < timeouts[rank] + SOON


@both_ways
def test_ranks_in_a_circle_name_the_one_that_has_stopped_and_nobody_itself(way):
    def check(rank, k):
        take(way)
        pids = ranks.all_gather_int(os.getpid())
        if rank == 0:  # in its sleep: it waits for rank 3
            threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGSTOP]).start()
        while rank == 3 and psutil.Process(pids[0]).status() != psutil.STATUS_STOPPED:
            time.sleep(0.05)
        outcome = attempt(ranks.allreduce, torch.ones(8), ring, check=False, timeout=1)
        if rank == 1:
            time.sleep(1)  # so that the others have given up too
            os.kill(pids[0], signal.SIGCONT)
        return outcome

    for rank, (kind, text, named, _) in enumerate(launch(check, 4, timeout=LIMIT)):
        assert kind == "PeerError" and named and rank not in named
        assert way == "lanes" or "or waited for another rank" in text
        assert way == "messages" or rank == 0 or named == (0,)


# A rank fails by itself. That stands for a full memory.


def fails_once(home, name):
    """Let a function of this rank's collectives fail at its next call only."""
    function = getattr(home, name)

    def fail(*args, **kwargs):
        setattr(home, name, function)
        raise MemoryError("no room for a copy")

    setattr(home, name, fail)


@both_ways
@pytest.mark.parametrize(
    ("schedule", "bad", "k"), [(star, 0, 3), (star, 1, 2), (ring, 1, 3)]
)
@in_ranks()
def test_a_rank_that_fails_is_named_and_nobody_takes_its_note_for_data(
    rank, k, schedule, way, bad
):
    def three_calls(place):
        """Of which the second one fails on a rank."""
        group = dist.new_group()
        take(way, group)
        for number in range(3):
            if rank == bad and number == 1:
                fails_once(*place)
            tensor = torch.full((8,), rank + 1.0)
            kind, text, named, _ = attempt(
                ranks.allreduce, tensor, schedule, group=group, timeout=60
            )
            yield kind, text, named, tensor.unique().tolist()

    total = [float(sum(range(1, k + 1)))]
    # Nothing has been sent: all learn why, and go on
    first, failed, third = three_calls((collectives, "messages_of"))
    assert failed[0] == "MismatchError" and failed[3] == [rank + 1.0]
    assert (
        f"\nrank {bad}, call " in failed[1]
        and ": allreduce, MemoryError: no room" in failed[1]
    )
    assert first == third == ("ok", None, (), total)
    for place in (collectives._Call, "exchange"), (collectives, "put_back"):
        first, *others = three_calls(place)
        assert first == ("ok", None, (), total)
        if rank == bad:
            assert others[0][:2] == ("MemoryError", "no room for a copy")
            assert (
                "can no longer be used since an earlier call: MemoryError"
                in others[1][1]
            )
            continue
        # Over lanes a short message goes along with the check: all that is sent in a
        # star
        along = (schedule, way) == (star, "lanes") and bad != 0
        for kind, _, named, numbers in others:
            if kind == "ok":  # the other one had sent all its messages before it failed
                assert numbers == total and (along or place[1] == "put_back")
            else:
                assert kind == "PeerError" and (
                    bad in named or not named or way == "messages"
                )
        assert others[1][0] == "PeerError"


# Threads.


@both_ways
@in_ranks(3)
def test_a_call_beside_that_of_another_thread_is_refused_and_all_ranks_learn_of_it(
    rank, k, way
):
    transport, beside = transport_of(way=way), dist.new_group()
    call = partial(attempt, ranks.allreduce, torch.ones(3), label="A")
    if rank:
        dist.recv(torch.empty(1), 0, beside)  # not before rank 0 has given up
        kind, _, named, _ = (
            call()
        )  # gloo may first see one that has given up for this reason
        assert kind == "PeerError" and (0 in named or (way == "messages" and named))
        return
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(call()), name="first")
    thread.start()
    while not transport.under_way:
        time.sleep(0.01)
    outcomes.append(call(label="B"))
    for other in range(1, k):
        dist.send(torch.empty(1), other, beside)
    thread.join()
    for kind, text, *_ in outcomes:
        assert (
            kind == "BusyError" and "thread 'MainThread' called allreduce 'B'" in text
        )
        assert "while allreduce 'A' of thread 'first' was under way" in text
    kind, text, *_ = call()
    assert kind == "PeerError" and "since an earlier call: BusyError: thread" in text


# What is counted.


@both_ways
def test_the_ledger_holds_what_this_rank_sent(way):
    def check(rank, k):
        take(way)
        for i, schedule in enumerate(SCHEDULES * 2):
            tensors = [torch.ones(13, dtype=FLOATS[i % 3]) for _ in range(k)]
            with count_bytes() as ledger:
                ranks.allreduce(tensors[0].clone(), schedule, check=i < len(SCHEDULES))
            with count_bytes() as whole:  # the list form's
                lists.allreduce(tensors, schedule)
            assert ledger.bytes == {
                link: n for link, n in whole.bytes.items() if link[0] == rank and n
            }
            assert (
                ledger.sent(rank)
                == cost.walk(schedule, k, 13 * 4, itemsize=4).sent[rank]
            )
        with count_bytes() as ledger:
            ranks.broadcast(torch.ones(5, dtype=torch.int8))
            ranks.barrier()
        return dict(ledger.bytes)

    links = {0: {(0, 2): 5, (0, 1): 5}, 2: {(2, 3): 5}}
    assert launch(check, 4, timeout=LIMIT) == [links.get(rank, {}) for rank in range(4)]
