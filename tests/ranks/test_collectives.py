"""Collectives between real ranks: right to the last bit, and loud when the ranks disagree."""

import math
import os
import signal
import threading
import time
from dataclasses import make_dataclass
from datetime import timedelta
from functools import partial
from hashlib import blake2b

import psutil
import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT, SOON, attempt, both_ways, take

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
from d2lpar.ranks.launcher import RankError, launch

SCHEDULES = (star, ring, tree, direct, halving_doubling, recursive_doubling)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
DTYPES = FLOATS + INTEGERS
TORCHS = {"sum": "SUM", "product": "PRODUCT", "max": "MAX", "min": "MIN", "mean": "SUM"}


def values(rank, shape, dtype):
    """Numbers that hang on rank and index, and whose sums depend on their order."""
    index = torch.arange(torch.Size(shape).numel()).reshape(shape)
    numbers = index * (rank + 1) % 13
    if dtype == torch.bool:
        return numbers % 3 > 0
    if dtype.is_complex:
        return torch.complex(numbers / 7 + 1, numbers / 3 - 1).to(dtype)
    if dtype.is_floating_point:
        return (numbers / 7 + 0.5 + rank / 3).to(dtype)
    return (numbers + 1 + rank).to(dtype)


def raw(tensor):
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def defined(op, dtype):
    if op == "mean":
        return dtype.is_floating_point or dtype.is_complex
    return op not in ("max", "min") or not dtype.is_complex


class Judge:
    """What a rank complains of, and a digest of results that must be the same on all ranks."""

    def __init__(self):
        self.complaints, self.digest = [], blake2b()

    def compare(self, what, got, want, on_all=True):
        if on_all:
            self.digest.update(raw(got))
        if got.shape != want.shape or got.dtype != want.dtype or raw(got) != raw(want):
            self.complaints.append(f"{what}: {got} is not {want}")

    def verdict(self):
        return self.complaints[:3], self.digest.digest()


def nobody_complains(results):
    assert not [complaint for complaints, _ in results for complaint in complaints]
    assert len({digest for _, digest in results}) == 1


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


@both_ways
@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_allreduce_has_the_bits_of_the_list_form(k, way):
    shapes = [(), (0,), (1,), (k - 1,), (k + 1,), (7, 3), (2, 3, 5), (4, 0, 2), (97,)]
    schedules = (None, *SCHEDULES)
    cases = [(s, op, t) for s in schedules for op in OPS for t in DTYPES if defined(op, t)]
    cases = cases[:: {2: 2, 3: 3, 4: 5, 8: 17}.get(k, 1)]
    cases = [(*case, shapes[i % len(shapes)]) for i, case in enumerate(cases)]
    cases += [(s, "sum", torch.float32, shape) for s in schedules for shape in shapes]
    cases += [(s, "sum", torch.float32, (7, 3)) for s in (lazy, Rounds())]
    if k == 3:  # in several pieces
        several = (None, ring, halving_doubling, recursive_doubling)
        cases += [(s, "mean", torch.float32, (1_000_003,)) for s in several]

    def check(rank, k):
        take(way)
        judge = Judge()
        for n, (schedule, op, dtype, shape) in enumerate(cases):
            mine = values(rank, shape, dtype)
            ranks.allreduce(mine, schedule, op, check=n % 2 == 0, timeout=math.inf)
            want = like_the_list(schedule, op, [values(r, shape, dtype) for r in range(k)])
            judge.compare(f"{schedule} {op} {dtype} {shape}", mine, want[rank])
        for op, name in TORCHS.items():  # and torch's own, up to rounding
            mine, theirs = (values(rank, (7, 3), torch.float64) for _ in range(2))
            ranks.allreduce(mine, op=op)
            dist.all_reduce(theirs, getattr(dist.ReduceOp, name))
            torch.testing.assert_close(mine, theirs / k if op == "mean" else theirs)
        return judge.verdict()

    nobody_complains(launch(check, k, timeout=LIMIT))


@both_ways
@pytest.mark.parametrize("k", [2, 5])
def test_signs_of_zero_and_nan_are_the_same_on_all_ranks(k, way):
    def check(rank, k):
        take(way)
        judge, special = Judge(), torch.tensor([0.0, -0.0, math.nan, -math.nan])
        for numel in (1, 33, 300_001):  # in one vector, in several, in several pieces
            data = [special.repeat(2 + numel // 4)[r : r + numel].clone() for r in range(k)]
            for schedule in SCHEDULES:
                for op in ("sum", "product", "max", "min"):
                    mine = data[rank].clone()
                    ranks.allreduce(mine, schedule, op)
                    for want in like_the_list(schedule, op, data):
                        judge.compare(f"{schedule.__name__} {op} {numel}", mine, want)
        return judge.verdict()

    nobody_complains(launch(check, k, timeout=LIMIT))


@both_ways
@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_the_other_collectives_have_the_bits_of_the_list_form(k, way):
    def check(rank, k):
        take(way)
        judge = Judge()
        for n, dtype in enumerate(DTYPES[:: {2: 1, 3: 2, 4: 3, 8: 5}.get(k, 1)]):
            shape = [(5,), (), (0,), (k + 1, 3), (2 * k, 2), (1, 4)][n % 6]
            for src in range(k):
                mine = values(rank, shape, dtype)
                ranks.broadcast(mine, src, check=src % 2 == 0)
                judge.compare(f"from {src}", mine, values(src, shape, dtype))
            for op in [op for op in OPS if defined(op, dtype)]:
                mine = values(rank, shape, dtype)
                shard = ranks.reduce_scatter(mine, op)
                data = [values(r, shape, dtype) for r in range(k)]
                shards = lists.reduce_scatter(data, op)
                judge.compare(f"{op} {shape}", shard, shards[rank], on_all=False)
                judge.compare(f"the rest: {op} {shape}", mine, data[rank], on_all=False)
                if mine.untyped_storage().data_ptr() != shard.untyped_storage().data_ptr():
                    judge.complaints.append("the shard is no part of the tensor")
            for rows in ([2] * k, list(range(k)), [0] * k, [k - r for r in range(k)], None):
                sizes = [()] * k if rows is None else [(r, 3) for r in rows]
                shards = [values(r, sizes[r], dtype) for r in range(k)]
                whole = ranks.all_gather(shards[rank])
                judge.compare(f"rows {rows}", whole, lists.all_gather(shards)[rank])
                untouched = values(rank, sizes[rank], dtype)
                judge.compare("the shard itself", shards[rank], untouched, on_all=False)
        if k == 3:  # in several pieces
            data = [values(r, (300_001 + r, 3), torch.float64) for r in range(k)]
            judge.compare("large shards", ranks.all_gather(data[rank]), torch.cat(data))
        ranks.barrier()
        numbers = [ranks.all_gather_int(n) for n in (rank, -rank, 2**62 + rank)]
        assert numbers == [[f(r) for r in range(k)] for f in (int, int.__neg__, (2**62).__add__)]
        return judge.verdict()

    nobody_complains(launch(check, k, timeout=LIMIT))


LAYOUTS = {
    "transposed": ((4, 3), torch.t),
    "channels_last": ((2, 3, 4, 5), lambda t: t.as_strided((2, 3, 4, 5), (60, 1, 15, 3))),
    "columns": ((6, 5), lambda t: t[:, 1:4]),
    "rows, every other column": ((6, 5), lambda t: t[1:, ::2]),
    "a slice": ((20,), lambda t: t[3:17]),
    "one element": ((5,), lambda t: t[2]),
    "every third": ((31,), lambda t: t[1::3]),
    "one column": ((6, 5), lambda t: t[:, 2]),
    "a real part": ((12,), lambda t: torch.view_as_real(t)[:, 0] if t.is_complex() else t[::2]),
    "conjugated later": ((6,), torch.conj),
}


@both_ways
def test_any_layout_is_right_and_its_neighbours_stay(way):
    def check(rank, k):
        take(way)
        judge = Judge()
        for name, (shape, view) in LAYOUTS.items():
            for dtype in (torch.bfloat16, torch.complex64):
                data = [view(values(r, shape, dtype)).clone().resolve_conj() for r in range(k)]
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
                    judge.compare(f"{name} {dtype} {call}", whole, want, on_all=False)
                joined = ranks.all_gather(view(values(rank, shape, dtype)))
                want = torch.cat([torch.atleast_1d(d) for d in data])
                judge.compare(f"{name} {dtype} all_gather", joined, want)
        with torch.no_grad():
            weights = torch.ones(4, requires_grad=True)
            ranks.allreduce(weights)
            judge.compare("weights", weights.detach(), torch.full((4,), 3.0))
        return judge.verdict()

    nobody_complains(launch(check, 3, timeout=LIMIT))


@pytest.mark.parametrize("numel", [0, 1, 7, 12])
def test_bounds_are_those_of_tensor_split(numel):
    for n in (1, 3, 5):
        assert collectives.even_bounds(numel, n) == lists.bounds_of(
            torch.zeros(numel).tensor_split(n)
        )


@both_ways
def test_groups_of_some_ranks(way):
    def check(rank, k):
        groups = {members: dist.new_group(members) for members in [(1, 3), (0, 2), (3, 2, 1)]}
        complaints = []
        for members, group in groups.items():  # {1, 3} and {0, 2} at the same time
            if rank not in members:
                complaints += ["is let in"] * (attempt(ranks.barrier, group)[0] != "ValueError")
                continue
            take(way, group)
            order = dist.get_process_group_ranks(group)
            me = order.index(rank)
            data = [values(r, (7, 2), torch.float64) for r in order]
            total = sum(data)
            for schedule in (ring, star):
                mine = data[me].clone()
                with count_bytes() as ledger:
                    ranks.allreduce(mine, schedule, group=group)
                torch.testing.assert_close(mine, total)
                links = ledger.bytes.keys()
                if {src for src, _ in links} != {rank} or not {dst for _, dst in links} <= set(
                    order
                ):
                    complaints.append(f"ledger {ledger.bytes}")
            for src in order:
                mine = data[me].clone()
                ranks.broadcast(mine, src, group)
                if not torch.equal(mine, data[order.index(src)]):
                    complaints.append(f"broadcast from {src} in {members}")
            shard = ranks.reduce_scatter(data[me].clone(), group=group)
            torch.testing.assert_close(shard, total.tensor_split(len(order))[me])
            if not torch.equal(ranks.all_gather(data[me], group), torch.cat(data)):
                complaints.append(f"all_gather in {members}")
            outside = next(r for r in range(k) if r not in members)
            kind, text, *_ = attempt(ranks.broadcast, data[me], outside, group)
            if kind != "ValueError" or f"src is {outside}" not in text or str(order) not in text:
                complaints.append(f"src outside: {kind} {text}")
            odd = rank == max(members)
            kind, text, *_ = attempt(ranks.allreduce, torch.ones(3 + odd), group=group)
            if kind != "MismatchError" or not all(f"rank {r}" in text for r in members):
                complaints.append(f"{kind} {text}")
        if rank == 0:
            return complaints
        late = attempt(ranks.barrier, group, timeout=0.3) if rank == 1 else None
        if late and (late[0] != "PeerError" or set(late[2]) != {2, 3}):
            complaints.append(late)
        return complaints

    assert launch(check, 4, timeout=LIMIT) == [[]] * 4


# The ranks differ: everyone says so, nothing has happened, and the group goes on.


def renamed(k):
    return star(k)


renamed.__qualname__ = "ring"


def swap(k):
    return [[Move(r, 1 - r, None, False) for r in range(2)]]


def to_itself(k):
    return [[Move(0, 0, None, True)]]


Unhashable = make_dataclass("Unhashable", [], namespace={"__call__": lambda self, k: ring(k)})
DIFFERENCES = [  # what is called with t, usually and by the odd rank; what each says of it
    ("allreduce(t)", "broadcast(t)", "allreduce, sum", "broadcast, from"),
    ("allreduce(t)", "reduce_scatter(t)", "allreduce, sum", "reduce_scatter, sum"),
    ("allreduce(t)", "barrier()", "allreduce", "barrier"),
    ("barrier()", "all_gather_int(5)", "barrier", "all_gather_int"),
    ("allreduce(t)", "allreduce(t, op='max')", "sum", "max"),
    ("reduce_scatter(t, 'mean')", "reduce_scatter(t, 'product')", "mean", "product"),
    ("allreduce(t)", "allreduce(t[:5])", "[6]", "[5]"),
    ("allreduce(t.view(2, 3))", "allreduce(t.view(3, 2))", "[2, 3]", "[3, 2]"),
    ("reduce_scatter(t)", "reduce_scatter(t.view(1, 6))", "[6]", "[1, 6]"),
    ("all_gather(t.view(2, 3))", "all_gather(t.view(3, 2))", "rows of float32 [3]", "[2]"),
    ("allreduce(t)", "allreduce(t.double())", "float32", "float64"),
    ("allreduce(t)", "allreduce(t.view(torch.int32))", "float32", "int32"),
    ("allreduce(t.bfloat16())", "allreduce(t.half())", "bfloat16", " float16"),
    ("allreduce(t, star)", "allreduce(t, ring)", "schedule star", "schedule ring"),
    ("allreduce(t, ring)", "allreduce(t, renamed)", "schedule ring", "schedule ring"),
    ("broadcast(t)", "broadcast(t, 1)", "from rank 0", "from rank 1"),
    ("allreduce(t, label='a')", "allreduce(t, label='b')", "allreduce 'a'", "allreduce 'b'"),
    ("reduce_scatter(t, label='a')", "reduce_scatter(t, label='b')", "scatter 'a'", "scatter 'b'"),
    ("all_gather(t, label='a')", "all_gather(t, label='b')", "gather 'a'", "gather 'b'"),
    ("broadcast(t, label='a')", "broadcast(t, label='b')", "broadcast 'a'", "broadcast 'b'"),
    ("barrier(label='a')", "barrier(label='b')", "barrier 'a'", "barrier 'b'"),
]


def call(text, t, **options):
    """Make a call that is written in a table; ``options`` come last."""
    names = {**vars(ranks), "torch": torch, "ring": ring, "star": star, "renamed": renamed}
    names |= {"swap": swap, "to_itself": to_itself, "Unhashable": Unhashable, "t": t}
    text = text[:-1] + "".join(f", {name}={value}" for name, value in options.items()) + ")"
    return attempt(lambda: eval(text, names))


@both_ways
@pytest.mark.parametrize("k", [2, 3])
def test_every_rank_learns_of_a_difference_and_the_group_goes_on(k, way):
    def check(rank, k):
        take(way)
        complaints, odd = [], k // 2
        for usual, unusual, *words in DIFFERENCES:
            name, tensor = (usual, unusual), torch.arange(6.0) * (rank + 1)
            kind, text, _, seconds = call(unusual if rank == odd else usual, tensor)
            lines = str(text).splitlines()[1:]
            said = [
                line.startswith(f"rank {r}, call ") and words[r == odd] in line
                for r, line in enumerate(lines)
            ]
            if kind != "MismatchError" or said != [True] * k or seconds > SOON:
                complaints.append(f"{name}: {seconds} s, {kind}: {text}")
            if not torch.equal(tensor, torch.arange(6.0) * (rank + 1)):
                complaints.append(f"{name}: the tensor is now {tensor}")
            ranks.allreduce(tensor)
            if not torch.equal(tensor, torch.arange(6.0) * sum(range(1, k + 1))):
                complaints.append(f"after {name}: {tensor}")
        return complaints

    assert launch(check, k, timeout=LIMIT) == [[]] * k


@both_ways
def test_a_skipped_call_is_noticed(way):
    def check(rank, k):
        take(way)
        loss, weights = torch.ones(1), torch.ones(3)
        skipped = attempt(ranks.allreduce, weights if rank == 1 else loss)
        ranks.allreduce(weights)
        if rank == 0:  # the same plan as the next one, but a call more: nobody waits for anything
            ranks.broadcast(torch.ones(0), 0, check=False)
        unchecked = attempt(ranks.broadcast, torch.ones(0))
        return skipped[:2], loss.item(), weights.tolist(), unchecked[:2]

    for (kind, text), loss, weights, unchecked in launch(check, 3, timeout=LIMIT):
        assert kind == "MismatchError" and "float32 [1]" in text and "float32 [3]" in text
        assert (loss, weights) == (1.0, [3.0] * 3)
        assert unchecked[0] == "MismatchError"
        assert "rank 0, call 4" in unchecked[1] and "rank 1, call 3" in unchecked[1]


def test_where_torch_is_silently_wrong_this_is_right_or_says_so():
    def ours_and_theirs(rank, k):
        six = (torch.arange(6.0) + 2) * (rank + 1)
        cases = {
            "dtype of the same size": (six.int() if rank else six, "SUM", 3),
            "op": (six, "MAX" if rank else "SUM", 2 if rank else 3),
            "layout": (six.view(3, 2).t() if rank else six.view(3, 2).t().contiguous(), "SUM", 3),
        }
        outcomes = {}
        for name, (tensor, op, factor) in cases.items():
            right = (tensor / (rank + 1) * factor).to(tensor.dtype)  # had all called the same
            theirs = tensor.clone(memory_format=torch.preserve_format)
            alone = dist.new_group(timeout=timedelta(seconds=2))  # one that may be left broken
            kind, *_ = attempt(dist.all_reduce, theirs, getattr(dist.ReduceOp, op), alone)
            fine = kind == "ok" and torch.equal(theirs, right)
            before = tensor.clone()
            kind, *_ = attempt(ranks.allreduce, tensor, op=op.lower())
            outcomes[name] = fine, kind, torch.equal(tensor, right if kind == "ok" else before)
        return outcomes

    first, second = launch(ours_and_theirs, 2, timeout=LIMIT)
    for name in first:
        assert not (first[name][0] and second[name][0]), f"torch is right about {name}"
        kind = "ok" if name == "layout" else "MismatchError"
        assert first[name][1:] == second[name][1:] == (kind, True)


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
    ("allreduce(t, 'max')", "TypeError", "schedule must be a function such as ring, not str"),
    ("allreduce(t, Unhashable())", "TypeError", "unhashable type: 'Unhashable'"),
    ("allreduce(t, to_itself)", "ValueError", "does not send a chunk between two of 2"),
    ("allreduce(t, swap)", "ValueError", "while it is overwritten"),
    ("broadcast(t, 2)", "ValueError", "src is 2, but the group has the ranks [0, 1]"),
    ("allreduce(t.to('meta'))", "ValueError", "is a meta tensor"),
    ("reduce_scatter(t.to('meta'))", "ValueError", "is a meta tensor"),
    ("broadcast(t.to_sparse())", "ValueError", "pass its .to_dense()"),
    ("all_gather(t.view(2, 2).to_sparse_csr())", "ValueError", "sparse_csr"),
    ("all_gather_int(2**63)", "ValueError", f"number must be an int of 64 bits, not {2**63}"),
    ("all_gather_int(1.5)", "TypeError", "'float' object cannot be interpreted as an integer"),
]


@both_ways
def test_bad_arguments_are_refused_alike_on_all_ranks(way):
    def check(rank, k):
        take(way)
        complaints = []
        for text, error, words in REFUSED:
            every = [call(text, torch.ones(4))]
            if not text.startswith("all_gather"):
                every.append(call(text, torch.ones(4), check=False))
            if not all(kind == error and words in said for kind, said, *_ in every):
                complaints.append((error, words, every))
            kind, said, *_ = call(text if rank else "barrier()", torch.ones(4))
            if kind != "MismatchError" or f"{error}: " not in said:
                complaints.append((kind, said))
        for timeout in (0, -1.0, float("nan")):
            kind, text, *_ = attempt(ranks.barrier, timeout=timeout)
            if kind != "ValueError" or "timeout must be a positive number" not in text:
                complaints.append((kind, text))
        tensor = torch.ones(3)
        ranks.allreduce(tensor)
        return complaints, tensor.tolist()

    assert launch(check, 2, timeout=LIMIT) == [([], [2.0] * 3)] * 2


def test_without_a_process_group():
    calls = [ranks.allreduce, ranks.reduce_scatter, ranks.all_gather, ranks.broadcast]
    for call in [partial(call, torch.ones(2)) for call in calls] + [ranks.barrier]:
        with pytest.raises(ValueError, match="there is no process group: call this inside launch"):
            call()


# A rank does not come.


@both_ways
@pytest.mark.parametrize("missing", [(2,), (1, 3)], ids=str)
def test_missing_ranks_are_named_by_all_others(missing, way):
    def check(rank, k):
        take(way)
        ranks.barrier()
        if rank in missing:  # it has returned, but stays connected
            return None
        first = attempt(ranks.allreduce, torch.ones(4), timeout=0.5)
        return first, attempt(ranks.allreduce, torch.ones(4), timeout=20)

    for rank, outcome in enumerate(launch(check, 4, timeout=LIMIT)):
        if rank in missing:
            assert outcome is None
            continue
        (kind, text, named, seconds), again = outcome
        assert kind == "PeerError" and named == missing
        assert ("rank 2 " if len(missing) == 1 else "ranks 1, 3 ") in text
        assert 0.4 < seconds < 0.5 + SOON
        assert again[0] == "PeerError" and again[3] < SOON
        assert "of no more use" in again[1] and text in again[1]


def test_all_missing_are_named_although_a_lane_is_full():
    def check(rank, k):
        if rank > 1:
            return None
        for _ in range(2):  # on its way to rank 2, which takes nothing
            ranks.broadcast(torch.ones(2), check=False)
        return attempt(ranks.barrier, timeout=0.5)

    first, second, *_ = launch(check, 4, timeout=LIMIT)
    assert first[2] == second[2] == (2, 3)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_dead_rank_is_named_at_once(when, monkeypatch, capsys):
    monkeypatch.setattr(launcher, "GRACE", 10)  # time to speak for the others

    def check(rank, k):
        take("messages")
        ranks.barrier()
        if rank == 1:
            time.sleep(0.3 * (when == "meanwhile"))
            os._exit(3)
        time.sleep(0.3 * (when == "before"))
        kind, _, named, seconds = attempt(ranks.barrier, timeout=30)
        again = attempt(ranks.barrier, timeout=1)[1]
        print(kind, named, seconds < 0.3 + SOON, "of no more use" in again)

    with pytest.raises(RankError, match="rank 1: died"):
        launch(check, 3, timeout=LIMIT)
    first = [f"[rank {rank}] PeerError (1,) True True" for rank in (0, 2)]
    # One that calls later may find that the other one has given up already, and name that.
    later = [f"[rank {rank}] PeerError ({2 - rank},) True True" for rank in (0, 2)]
    outcomes = first, [first[0], later[1]], [later[0], first[1]]
    assert sorted(capsys.readouterr().out.splitlines()) in outcomes


@pytest.mark.parametrize("timeouts", [(1.1, 0.9, 0.7), (0.7, 0.9, 1.1)], ids=["last", "first"])
def test_in_the_middle_of_a_ring_all_name_the_one_that_is_missing(timeouts):
    def check(rank, k):  # the neighbour of the missing rank gives up last, or first
        if rank == 3:
            return None
        return attempt(ranks.allreduce, torch.ones(8), ring, check=False, timeout=timeouts[rank])

    *outcomes, missing = launch(check, 4, timeout=LIMIT)
    assert missing is None
    for timeout, (kind, text, named, seconds) in zip(timeouts, outcomes, strict=True):
        assert (kind, named) == ("PeerError", (3,)) and "rank 3 " in text
        assert seconds < timeout + SOON


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
        if way == "messages":
            assert "or waits itself for another rank" in text
        elif rank:
            assert named == (0,)


# A rank fails by itself. That stands for a full memory.


def fails_once(place):
    """Let a function of this rank's collectives fail at its next call only."""
    home, name = place
    function = getattr(home, name)

    def fail(*args, **kwargs):
        setattr(home, name, function)
        raise MemoryError("no room for a copy")

    setattr(home, name, fail)


@both_ways
@pytest.mark.parametrize("schedule", [star, ring])
@pytest.mark.parametrize(("bad", "k"), [(0, 3), (1, 2)])
def test_a_rank_that_fails_is_named_and_nobody_takes_its_note_for_data(schedule, way, bad, k):
    def check(rank, k):
        places = [(collectives, "messages_of"), (collectives._Call, "exchange")]
        places += [(collectives, "divide"), (collectives, "put_back")]
        found = {}
        for place in places:
            group, outcomes = dist.new_group() if found else None, []
            take(way, group)
            for step in range(3):
                if rank == bad and step == 1:
                    fails_once(place)
                tensor = torch.full((8,), rank + 1.0)
                outcome = attempt(ranks.allreduce, tensor, schedule, group=group, timeout=60)
                outcomes.append((*outcome[:3], tensor.unique().tolist()))
            found[place[1]] = outcomes
        return found

    results, total = launch(check, k, timeout=LIMIT), [float(sum(range(1, k + 1)))]
    for rank, found in enumerate(results):
        early = found.pop("messages_of")  # nothing has been sent: all learn why, and go on
        assert early[1][0] == "MismatchError" and early[1][3] == [rank + 1.0]
        assert f"rank {bad}, call 2: allreduce, MemoryError: no room for a copy" in early[1][1]
        assert early[0] == early[2] == ("ok", None, (), total)
    failed = results.pop(bad)
    for place, outcomes in failed.items():
        assert outcomes[1][:2] == ("MemoryError", "no room for a copy"), place
        assert "of no more use since an earlier call: MemoryError: no room" in outcomes[2][1]
    for place, outcomes in [item for found in results for item in found.items()]:
        assert outcomes[0] == ("ok", None, (), total)
        # Over lanes a short message goes along with the check; in a star it is all a rank sends.
        along = (place, schedule, way) == ("exchange", star, "lanes") and bad != 0
        for kind, _, named, numbers in outcomes[1:]:
            if kind == "ok":  # the other one had sent all its messages before it failed
                assert numbers == total and (along or place in ("divide", "put_back"))
            elif named:
                assert (kind == "PeerError" and bad in named) or way == "messages"
        assert outcomes[2][0] == "PeerError"


# Threads.


@both_ways
@pytest.mark.parametrize("checked", [True, False])
def test_a_call_beside_that_of_another_thread_is_refused_and_all_ranks_learn_of_it(checked, way):
    def check(rank, k):
        take(way)
        ranks.barrier()
        transport, beside = ranks.member_of(None, None)[0].transport, dist.new_group()
        call = partial(attempt, ranks.allreduce, torch.ones(3), check=checked, label="A")
        if rank:
            dist.recv(torch.empty(1), 0, beside)  # not before rank 0 has given up
            # gloo does not always wake a send, and unchecked a star begins with one
            return call(timeout=60 if checked or way == "lanes" else 2)
        outcomes = []
        thread = threading.Thread(target=lambda: outcomes.append(call(timeout=60)), name="first")
        thread.start()
        while not transport.under_way:
            time.sleep(0.01)
        outcomes.append(call(label="B"))
        for other in range(1, k):
            dist.send(torch.empty(1), other, beside)
        thread.join()
        return [*outcomes, call()]

    (first, second, third), *others = launch(check, 3, timeout=LIMIT)
    for kind, text, *_ in (first, second):
        assert kind == "BusyError" and "thread 'MainThread' called allreduce 'B'" in text
        assert "while allreduce 'A' of thread 'first' was under way" in text
    assert third[0] == "PeerError" and "since an earlier call: BusyError: thread" in third[1]
    for kind, _, named, _ in others:  # gloo may first see one that has given up for this reason
        assert kind == "PeerError" and (0 in named or (way == "messages" and named))


@both_ways
def test_threads_may_call_one_after_the_other_and_each_in_a_group_of_its_own(way):
    def check(rank, k):
        take(way)
        groups, sums = [None, dist.new_group()], []

        def work(group, number, turns):
            for _ in range(turns):
                tensor = torch.full((3,), number)
                ranks.allreduce(tensor, group=group)
                sums.append((number, tensor.unique().tolist()))

        for number in (1.0, 2.0):
            thread = threading.Thread(target=work, args=(None, number, 3))
            thread.start()
            thread.join()
        ranks.barrier(groups[1])
        threads = [threading.Thread(target=work, args=(g, 3.0, 50)) for g in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sums

    for sums in launch(check, 2, timeout=LIMIT):
        assert sums == [(1.0, [2.0])] * 3 + [(2.0, [4.0])] * 3 + [(3.0, [6.0])] * 100


# What is counted.


@both_ways
def test_the_ledger_holds_what_this_rank_sent(way):
    cases = [(s, checked) for s in SCHEDULES for checked in (True, False)]

    def check(rank, k):
        take(way)
        complaints = []
        for (schedule, checked), dtype in zip(cases, FLOATS[:3] * 4, strict=True):
            with count_bytes() as ledger:
                ranks.allreduce(torch.ones(13, dtype=dtype), schedule, check=checked)
            links = cost.link_bytes(schedule, 4, 13 * 4, itemsize=4)  # as float32
            own = {link: n for link, n in links.items() if link[0] == rank and n}
            walked = cost.walk(schedule, 4, 13 * 4, itemsize=4)
            if ledger.bytes != own or ledger.sent(rank) != walked.sent[rank]:
                complaints.append((schedule, checked, dict(ledger.bytes)))
        with count_bytes() as ledger:
            ranks.broadcast(torch.ones(5, dtype=torch.int8))
            ranks.barrier()
        return complaints, dict(ledger.bytes)

    links = {0: {(0, 2): 5, (0, 1): 5}, 2: {(2, 3): 5}}
    assert launch(check, 4, timeout=LIMIT) == [([], links.get(rank, {})) for rank in range(4)]
