"""Collectives between real ranks: right to the last bit; loud when ranks disagree."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT, SCHEDULES, SOON, attempt, both_ways, in_ranks, take

import d2lpar
from d2lpar import cost, count_bytes, launch, ranks
from d2lpar.schedules import halving_doubling, recursive_doubling, ring, star

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
DTYPES = FLOATS + INTEGERS
SHAPES = [(), (0,), (1,), (3,), (7,), (2, 3, 5), (4, 0, 2)]
TORCHS = {"sum": "SUM", "max": "MAX", "min": "MIN"}


def values(rank, shape, dtype):
    """Numbers that hang on rank and index, and whose sums depend on their order."""
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) * (rank + 1) % 13
    if dtype == torch.bool:
        return numbers % 3 > 0
    if dtype.is_complex:
        return torch.complex(numbers / 7 + 1, numbers / 3 - 1).to(dtype)
    if dtype.is_floating_point:
        return (numbers / 7 + 0.5 + rank / 3).to(dtype)
    return (numbers + 1 + rank).to(dtype)


def same(got, want, *what):
    """Equal to the last bit."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    assert torch.equal(got, want), (what, got, want)


# Right to the last bit: what the same collective does on a list of tensors.


@both_ways
@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
@in_ranks()
def test_allreduce_has_the_bits_of_the_list_form_and_torchs_sums(rank, k, way):
    take(way)
    cases = [(s, "sum", t, SHAPES[5]) for s in SCHEDULES for t in DTYPES]
    cases += [(None, "sum", torch.float32, shape) for shape in (*SHAPES, (k - 1,))]
    cases += [(s, op, torch.float64, (7,)) for s in SCHEDULES for op in ("mean", "max")]
    if k in (2, 3):  # in several pieces
        cases += [(s, "sum", torch.float32, (600_001,)) for s in (None, *SCHEDULES)]
    for schedule, op, dtype, shape in cases:
        mine = values(rank, shape, dtype)
        data = [values(r, shape, dtype) for r in range(k)]
        ranks.allreduce(mine, schedule, op)
        d2lpar.allreduce(data, schedule or ranks.choose(mine.nbytes, k), op)
        same(mine, data[rank], schedule, op, dtype, shape)
    for op, name in TORCHS.items():  # whole numbers: every order has one sum
        for numel in (1, 5, 1003):
            mine = torch.randint(100, (numel,)).float()
            theirs = mine.clone()
            ranks.allreduce(mine, op=op)
            dist.all_reduce(theirs, getattr(dist.ReduceOp, name))
            same(mine, theirs, op, numel)


@both_ways
@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
@in_ranks()
def test_the_other_collectives_are_the_list_forms_and_torchs(rank, k, way):
    take(way)
    for n, dtype in enumerate(DTYPES):
        shape = [(5,), (k + 1, 3), (0,), (2 * k, 2), (1, 4)][n % 5]
        data = [values(r, shape, dtype) for r in range(k)]
        for src in range(k):
            mine = data[rank].clone()
            ranks.broadcast(mine, src)
            same(mine, data[src], "from", src)
        mine, theirs = data[rank].clone(), [tensor.clone() for tensor in data]
        same(ranks.reduce_scatter(mine), d2lpar.reduce_scatter(theirs)[rank], shape)
        same(mine, theirs[rank], "the other rows")
        for rows in ([2] * k, list(range(k)), [0] * k):
            shards = [values(r, (rows[r], 3), dtype) for r in range(k)]
            same(ranks.all_gather(shards[rank]), torch.cat(shards), rows)
    parts = [values(rank + i, (4, 3), torch.float32) for i in range(k)]
    theirs = torch.empty(4 * k, 3)
    dist.all_to_all_single(theirs, torch.cat(parts))
    same(torch.cat(ranks.all_to_all(parts)), theirs)
    # member i sends i + j rows to member j
    parts = [values(rank, (rank + i, 2), torch.int64) for i in range(k)]
    for i, part in enumerate(ranks.all_to_all(parts)):
        same(part, values(i, (rank + i, 2), torch.int64), "from", i)
    time.sleep(0.05 * rank)
    before, _, after = time.monotonic(), ranks.barrier(), time.monotonic()
    assert after >= ranks.all_gather(torch.tensor([before], dtype=torch.float64)).max()


LAYOUTS = {
    "rows, every other column": ((6, 5), lambda t: t[1:, ::2]),
    "conjugated later": ((6,), torch.conj),
    "negated later": ((1,), lambda t: t.conj().imag if t.is_complex() else t),
}


@both_ways
@in_ranks(3)
def test_any_layout_is_right_and_its_neighbours_stay(rank, k, way):
    take(way)
    for name, (shape, view) in LAYOUTS.items():
        for dtype in (torch.bfloat16, torch.complex64):
            whole = [values(r, shape, dtype) for r in range(k)]
            data = [view(tensor).clone().resolve_conj() for tensor in whole]
            joined = ranks.all_gather(view(whole[rank]))
            same(joined, torch.cat(data), name)
            d2lpar.allreduce(data, ring)
            want = whole[rank].clone()
            view(want).copy_(data[rank])
            ranks.allreduce(view(whole[rank]), ring)
            same(whole[rank], want, name)


@both_ways
@in_ranks(2)
def test_what_arrives_is_what_was_sent(rank, k, way):
    take(way)
    image = values(0, (2, 3, 4, 5), torch.float32)
    tensors = [values(0, (3, 5), dtype) for dtype in DTYPES]
    tensors += [values(0, shape, torch.float32) for shape in SHAPES]
    tensors += [image.permute(3, 1, 0, 2), image[:, 1, ::2], torch.ones(1_250_001)]
    for i, tensor in enumerate(tensors):
        if rank == i % 2:
            ranks.send(tensor, 1 - rank)
            tensor += tensor.new_ones(())  # it may be written to
        else:
            got = ranks.receive(1 - rank)
            same(got, tensor, i)
            tensor += tensor.new_ones(())  # the tensors share memory


# The ranks differ: everyone says so, nothing has happened, and the group goes on.


# what is called with t, usually and by the odd rank; what each says of it
MISMATCHES = [
    ("allreduce(t)", "broadcast(t)", "allreduce, sum", "broadcast, from"),
    ("agree('step 2')", "agree('step 3')", "step 2", "step 3"),
    ("allreduce(t)", "allreduce(t, op='max')", "sum", "max"),
    ("reduce_scatter(t, 'mean')", "reduce_scatter(t, 'min')", "mean", "min"),
    ("allreduce(t.view(2, 3))", "allreduce(t.view(3, 2))", "[2, 3]", "[3, 2]"),
    ("reduce_scatter(t)", "reduce_scatter(t.view(1, 6))", "[6]", "[1, 6]"),
    ("all_gather(t.view(2, 3))", "all_gather(t.view(3, 2))", "[0, 3]", "[0, 2]"),
    ("all_to_all([t] * k)", "all_to_all([t.int()] * k)", "float32", "int32"),
    ("allreduce(t)", "allreduce(t.view(torch.int32))", "float32", "int32"),
    ("allreduce(t, star)", "allreduce(t, ring)", "star (", "ring ("),
    ("broadcast(t)", "broadcast(t, 1)", "from rank 0", "from rank 1"),
    # what only one rank cannot do
    ("allreduce(t)", "allreduce(t, op='avg')", "sum", "ValueError: op is 'avg'"),
    ("barrier()", "barrier(timeout=0)", "no data", "ValueError: timeout must be"),
    ("allreduce(t)", "allreduce([1.0])", "sum", "TypeError: the tensor is a list"),
    ("broadcast(t)", "broadcast(t, 9)", "from", "ValueError: src is 9, but the group"),
    ("barrier()", "allreduce(t.requires_grad_())", "barrier", "requires gradients"),
    ("all_to_all([t] * k)", "all_to_all([])", "of rows", "0 parts for"),
    ("barrier()", "all_to_all([t, t.int(), t][:k])", "barrier", "not all parts have"),
]


def call(text, t, k):
    """Make a call that is written in a table."""
    names = {**vars(ranks), "torch": torch, "ring": ring, "star": star, "k": k, "t": t}
    return attempt(lambda: eval(text, names))


@both_ways
@pytest.mark.parametrize("k", [2, 3])
@in_ranks()
def test_every_rank_learns_of_a_difference_and_the_group_goes_on(rank, k, way):
    take(way)
    odd = k // 2
    for usual, unusual, *words in MISMATCHES:
        tensor = torch.arange(6.0) * (rank + 1)
        kind, text, _, seconds = call(unusual if rank == odd else usual, tensor, k)
        lines = str(text).splitlines()[1:]
        assert kind == "MismatchError" and len(lines) == k, (unusual, text)
        assert seconds < SOON
        for r, line in enumerate(lines):
            assert line.startswith(f"rank {r}, call ") and words[r == odd] in line
        same(tensor.detach(), torch.arange(6.0) * (rank + 1), unusual)
        tensor = torch.ones(2)
        ranks.allreduce(tensor)
        same(tensor, torch.full((2,), float(k)), "after", unusual)
        if "k" in unusual or k > 2:
            continue
        kind, text, *_ = call(unusual, torch.arange(6.0), k)  # an error that all have
        error = words[1].partition(":")[0]
        assert kind == error or not error.endswith("Error"), (kind, text)


@in_ranks(2)
def test_long_plans_are_compared_to_their_end(rank, k):
    ranks.agree("é" * 1000)
    for plan in (f"{rank}" + "x" * 1000, "x" * 1000 + f"{rank}", "éü"[rank]):
        assert attempt(ranks.agree, plan)[0] == "MismatchError"
    schedule = partial(ring) if rank else partial(star)  # of different steps
    schedule.__name__ = "x" * 1000
    assert attempt(ranks.allreduce, torch.ones(3), schedule)[0] == "MismatchError"
    ranks.barrier()


@both_ways
@in_ranks(2)
def test_a_rank_that_receives_learns_that_another_call_was_made(rank, k, way):
    take(way)
    if rank:
        kind, text, *_ = attempt(ranks.receive, 0)
        assert kind == "MismatchError" and "rank 0" in text and "sum of" in text
        kind, text, *_ = attempt(ranks.receive, 0)
        assert kind == "PeerError" and "no longer be used since: rank 0" in text
    else:
        assert attempt(ranks.allreduce, torch.ones(3), timeout=0.5)[0] == "PeerError"


@both_ways
@in_ranks(3)
def test_no_call_takes_a_tensor_that_was_sent_for_a_sum(rank, k, way):
    take(way)
    if rank == 1:
        attempt(ranks.send, torch.ones(3), 0, timeout=1)
    else:
        kind, text, *_ = attempt(ranks.allreduce, torch.ones(3), timeout=1)
        assert kind in ("MismatchError", "PeerError")
        if rank == 0 and way == "lanes":  # gloo's sends wait to be received
            assert "rank 1, send float32 [3]" in text
    kind, text, *_ = attempt(ranks.allreduce, torch.ones(3), timeout=1)
    assert kind == "PeerError", (kind, text)


@both_ways
@in_ranks(2)
def test_a_rank_that_fails_after_all_have_agreed_makes_no_more_calls(rank, k, way):
    take(way)
    tensor = torch.ones(3)
    if rank == 0:
        ranks.collectives.Call.run = lambda *args: 1 / 0
        assert attempt(ranks.allreduce, tensor)[0] == "ZeroDivisionError"
        kind, text, *_ = attempt(ranks.barrier, timeout=1)
        assert kind == "PeerError" and "since: ZeroDivisionError" in text
    else:
        assert attempt(ranks.allreduce, tensor, timeout=1)[0] == "PeerError"


@in_ranks(1)
def test_what_is_no_group_of_processes_with_cpus_is_refused(rank, k):
    kind, text, *_ = attempt(ranks.barrier, [0])
    assert kind == "TypeError" and "group is [0]" in text
    kind, text, *_ = attempt(ranks.barrier, dist.new_group(backend="cuda:gloo"))
    assert kind == "ValueError" and 'the backend "cpu:gloo,cuda:nccl"' in text


def test_without_a_process_group():
    with pytest.raises(ValueError, match="no process group: call this inside launch"):
        ranks.barrier()


# A rank does not come, or fails.


@both_ways
@pytest.mark.parametrize("missing", [(2,), (2, 3)], ids=str)
@in_ranks(4)
def test_missing_ranks_are_named_by_all_others(rank, k, missing, way):
    take(way)
    ranks.barrier()
    if rank in missing:  # it has returned, but stays connected
        return
    kind, text, named, seconds = attempt(ranks.allreduce, torch.ones(4), timeout=0.5)
    assert kind == "PeerError" and named == missing and 0.4 < seconds < 0.5 + SOON
    names = "rank 2 " if len(missing) == 1 else "ranks 2, 3 "
    assert f"{names}did not call in time" in text
    kind, again, _, seconds = attempt(ranks.allreduce, torch.ones(4), timeout=20)
    assert kind == "PeerError" and seconds < SOON
    assert "can no longer be used since" in again and text in again


# What is counted.


@both_ways
def test_the_ledger_holds_what_this_rank_sent(way):
    def check(rank, k):
        take(way)
        for i, schedule in enumerate(SCHEDULES):
            with count_bytes() as ledger:
                ranks.allreduce(torch.ones(13, dtype=FLOATS[i % 3]), schedule)
            links = cost(schedule, k, 13 * 4).bytes.items()
            assert ledger.bytes == {
                link: n for link, n in links if link[0] == rank and n
            }
        with count_bytes() as ledger:
            ranks.broadcast(torch.ones(5, dtype=torch.int8))
            ranks.barrier()
        return dict(ledger.bytes)

    links = {0: {(0, 2): 5, (0, 1): 5}, 2: {(2, 3): 5}}
    assert launch(check, 4, timeout=LIMIT) == [links.get(rank, {}) for rank in range(4)]


def test_short_tensors_need_few_messages_and_long_ones_few_bytes():
    assert ranks.choose(4, 4) is recursive_doubling is ranks.choose(2**24, 2)
    assert ranks.choose(2**24, 4) is halving_doubling
    assert ranks.choose(2**24, 6) is ring
