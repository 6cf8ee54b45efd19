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
from d2lpar.ranks import launcher
from d2lpar.ranks.launcher import RankError, launch

SCHEDULES = (star, ring, tree, direct, halving_doubling, recursive_doubling)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
DTYPES = FLOATS + INTEGERS
TRANSPORTS = ("lanes", "messages")
SOON = 8.0  # seconds, for what takes milliseconds on a machine that is not busy

both = pytest.mark.parametrize("way", TRANSPORTS)


def values(rank, shape, dtype):
    """Numbers that hang on rank and index, and whose sums depend on their order."""
    index = torch.arange(torch.Size(shape).numel()).reshape(shape)
    numbers = index * (rank + 1) % 13
    if dtype == torch.bool:
        return numbers % 3 > 0
    if dtype.is_complex:
        return torch.complex(numbers / 7 + 1, numbers / 3 - 1).to(dtype)
    return (
        (numbers / 7 + 0.5 + rank / 3).to(dtype)
        if dtype.is_floating_point
        else ((numbers + 1 + rank).to(dtype))
    )


def raw(tensor):
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def defined(op, dtype):
    if op == "mean":
        return dtype.is_floating_point or dtype.is_complex
    return op not in ("max", "min") or not dtype.is_complex


def group_for(way):
    """The default group, with lanes, or another one of all ranks, with messages."""
    if way == "lanes":
        return dist.group.WORLD
    group = dist.new_group()
    ranks.use_messages(group)
    return group


def attempt(call, *args, **kwargs):
    """What an error is, says and names, and how long it took; "ok" and the result without one."""
    begin = time.monotonic()
    try:
        result = call(*args, **kwargs)
    except Exception as error:
        seconds = time.monotonic() - begin
        return type(error).__name__, str(error), getattr(error, "ranks", ()), seconds
    return "ok", result, (), time.monotonic() - begin


def compare(complaints, digest, what, got, want):
    digest.update(raw(got))
    if got.shape != want.shape or got.dtype != want.dtype or raw(got) != raw(want):
        complaints.append(f"{what}: {got} is not {want}")


def nobody_complains(results):
    """Each rank returns its complaints, and a digest of results that must be the same on all."""
    assert not [c for complaints, _ in results for c in complaints[:3]]
    assert len({digest for _, digest in results}) == 1


# Right to the last bit.


@both
@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_allreduce_has_the_bits_of_the_list_form(k, way):
    shapes = [(), (0,), (1,), (k - 1,), (k + 1,), (7, 3), (2, 3, 5), (4, 0, 2), (97,)]
    schedules = (None, *SCHEDULES)
    cases = [
        (schedule, op, dtype)
        for schedule in schedules
        for op in OPS
        for dtype in DTYPES
        if defined(op, dtype)
    ]
    cases = cases[:: {2: 2, 3: 3, 4: 5, 8: 17}.get(k, 1)]
    cases = [(*case, shapes[i % len(shapes)]) for i, case in enumerate(cases)]
    cases += [(s, "sum", torch.float32, shape) for s in schedules for shape in shapes]

    def check(rank, k, way, cases):
        group = group_for(way)
        complaints, digest = [], blake2b()
        for n, (schedule, op, dtype, shape) in enumerate(cases):
            mine = values(rank, shape, dtype)
            ranks.allreduce(mine, schedule, op, group, check=n % 2 == 0)
            data = [values(r, shape, dtype) for r in range(k)]
            nbytes = lists.flatten(data[0], widen=True).nbytes
            chosen = schedule or ranks.choose(nbytes, k)
            lists.allreduce(data, chosen, op)
            what = f"{schedule} {op} {dtype} {shape}"
            compare(complaints, digest, what, mine, data[rank])
        return complaints, digest.digest()

    nobody_complains(launch(check, k, way, cases))


@both
@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_signs_of_zero_and_nan_are_the_same_on_all_ranks(k, way):
    def check(rank, k, way):
        group = group_for(way)
        complaints, digest = [], blake2b()
        special = torch.tensor([0.0, -0.0, math.nan, -math.nan])
        for numel in (1, 4, 33, 300_001):  # in one vector, in several, in several pieces
            data = [special.repeat(2 + numel // 4)[r : r + numel].clone() for r in range(k)]
            for schedule in SCHEDULES:
                for op in ("sum", "product", "max", "min"):
                    mine, copies = data[rank].clone(), [d.clone() for d in data]
                    ranks.allreduce(mine, schedule, op, group)
                    digest.update(raw(mine))
                    lists.allreduce(copies, schedule, op)
                    if {raw(copy) for copy in copies} != {raw(mine)}:
                        complaints.append(f"{schedule.__name__} {op} {numel}: the list differs")
        return complaints, digest.digest()

    nobody_complains(launch(check, k, way))


@both
def test_large_tensors_have_the_bits_of_the_list_form(way):
    def check(rank, k, way):
        group = group_for(way)
        complaints, digest = [], blake2b()
        for schedule in (None, ring, halving_doubling, recursive_doubling):
            mine = values(rank, (1_000_003,), torch.float32)
            ranks.allreduce(mine, schedule, "mean", group)
            data = [values(r, (1_000_003,), torch.float32) for r in range(k)]
            chosen = schedule or ranks.choose(4 * 1_000_003, k)
            lists.allreduce(data, chosen, "mean")
            digest.update(raw(mine))
            if not torch.equal(mine, data[rank]):
                complaints.append(f"{schedule}: differs")
        mine = values(rank, (1_000_003,), torch.float64)
        ranks.broadcast(mine, 2, group)
        if not torch.equal(mine, values(2, (1_000_003,), torch.float64)):
            complaints.append("broadcast: differs")
        whole = ranks.all_gather(values(rank, (300_001 + rank, 3), torch.float16), group)
        want = [values(r, (300_001 + r, 3), torch.float16) for r in range(k)]
        if not torch.equal(whole, torch.cat(want)):
            complaints.append("all_gather: differs")
        return complaints, digest.digest()

    nobody_complains(launch(check, 3, way))


@both
@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_the_other_collectives_have_the_bits_of_the_list_form(k, way):
    def check(rank, k, way):
        group = group_for(way)
        complaints, digest = [], blake2b()
        for n, dtype in enumerate(DTYPES[:: {2: 1, 3: 2, 4: 3, 8: 5}.get(k, 1)]):
            shape = [(5,), (), (0,), (k + 1, 3), (2 * k, 2), (1, 4)][n % 6]
            for src in range(k):
                mine = values(rank, shape, dtype)
                ranks.broadcast(mine, src, group, check=src % 2 == 0)
                compare(complaints, digest, f"from {src}", mine, values(src, shape, dtype))
            for op in OPS:
                if not defined(op, dtype):
                    continue
                mine = values(rank, shape, dtype)
                shard = ranks.reduce_scatter(mine, op, group)
                data = [values(r, shape, dtype) for r in range(k)]
                shards = lists.reduce_scatter(data, op)
                compare(complaints, blake2b(), f"{op} {shape}", shard, shards[rank])
                compare(complaints, blake2b(), f"the rest: {op} {shape}", mine, data[rank])
                inside = mine.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
                if not inside:
                    complaints.append("the shard is no part of the tensor")
            for rows in ([2] * k, list(range(k)), [0] * k, [k - r for r in range(k)], None):
                sizes = [()] * k if rows is None else [(r, 3) for r in rows]
                mine = values(rank, sizes[rank], dtype)
                shards = [values(r, sizes[r], dtype) for r in range(k)]
                whole = ranks.all_gather(mine, group)
                compare(complaints, digest, f"rows {rows}", whole, lists.all_gather(shards)[rank])
                compare(complaints, blake2b(), "the shard itself", mine, shards[rank])
        ranks.barrier(group)
        return complaints, digest.digest()

    nobody_complains(launch(check, k, way))


LAYOUTS = {
    "transposed": ((4, 3), torch.t),
    "channels_last": ((2, 3, 4, 5), lambda t: t.as_strided((2, 3, 4, 5), (60, 1, 15, 3))),
    "columns": ((6, 5), lambda t: t[:, 1:4]),
    "rows, every other column": ((6, 5), lambda t: t[1:, ::2]),
    "a slice": ((20,), lambda t: t[3:17]),
    "one element": ((5,), lambda t: t[2]),
    "a diagonal of blocks": ((3, 3, 2), lambda t: t[1:, :2, 1]),
}
STRIDED = {
    "every third": ((31,), lambda t: t[1::3]),
    "one column": ((6, 5), lambda t: t[:, 2]),
    "every other column": ((6, 4), lambda t: t[:, ::2]),
    "a real part": ((12,), lambda t: torch.view_as_real(t)[:, 0] if t.is_complex() else t[::2]),
}


@both
@pytest.mark.parametrize("layouts", [LAYOUTS, STRIDED], ids=["layouts", "strided"])
def test_any_layout_is_right_and_its_neighbours_stay(way, layouts):
    def check(rank, k, way, layouts):
        group = group_for(way)
        complaints, digest = [], blake2b()
        for name, (shape, view) in layouts.items():
            for dtype in (torch.bfloat16, torch.complex64):
                data = [view(values(r, shape, dtype)).clone() for r in range(k)]
                calls = [
                    (ranks.broadcast, lambda data: lists.broadcast(data, 1), {"src": 1}),
                    (ranks.reduce_scatter, lists.reduce_scatter, {}),
                ]
                for schedule in (None, ring, halving_doubling):
                    same = partial(
                        lists.allreduce,
                        schedule=schedule or ranks.choose(lists.flatten(data[0], True).nbytes, k),
                    )
                    calls.append((ranks.allreduce, same, {"schedule": schedule}))
                for call, same, options in calls:
                    whole, want = values(rank, shape, dtype), values(rank, shape, dtype)
                    call(view(whole), group=group, timeout=2, **options)
                    copies = [d.clone() for d in data]
                    same(copies)
                    view(want).copy_(copies[rank])
                    what = f"{name} {dtype} {call.__name__} {options}"
                    compare(complaints, blake2b(), what, whole, want)
                joined = ranks.all_gather(view(values(rank, shape, dtype)), group, timeout=2)
                want = torch.cat([torch.atleast_1d(d) for d in data])
                compare(complaints, digest, f"{name} {dtype} all_gather", joined, want)
        return complaints, digest.digest()

    nobody_complains(launch(check, 3, way, layouts, timeout=20))


@both
def test_lazily_conjugated_numbers(way):
    def check(rank, k, way):
        group = group_for(way)
        want = [values(r, (6,), torch.complex64).conj().resolve_conj() for r in range(k)]
        mine = values(rank, (6,), torch.complex64).conj()
        mine = mine if rank else mine.resolve_conj()  # lazy on one rank, done on the other
        ranks.allreduce(mine, ring, "sum", group, timeout=2)
        lists.allreduce(want, ring)
        complaints, digest = [], blake2b()
        compare(complaints, digest, "conj", mine, want[rank])
        return complaints, digest.digest()

    nobody_complains(launch(check, 2, way, timeout=20))


@both
def test_groups_of_some_ranks(way):
    def check(rank, k, way):
        groups = {members: dist.new_group(members) for members in [(1, 3), (0, 2), (3, 2, 1)]}
        if way == "messages":
            for members, group in groups.items():
                if rank in members:
                    ranks.use_messages(group)
        complaints = []
        for members, group in groups.items():  # {1, 3} and {0, 2} at the same time
            if rank not in members:
                continue
            order = dist.get_process_group_ranks(group)
            data = [values(r, (7, 2), torch.float32) for r in order]
            shards = [d.clone() for d in data]
            lists.allreduce(data, ring)
            lists_of = lists.reduce_scatter([d.clone() for d in shards])
            me = order.index(rank)
            for schedule in (ring, star):
                mine = shards[me].clone()
                with count_bytes() as ledger:
                    ranks.allreduce(mine, schedule, group=group)
                if not torch.allclose(mine, data[me]):
                    complaints.append(f"{rank}: allreduce in {members}")
                if {src for src, _ in ledger.bytes} != {rank} or not {
                    dst for _, dst in ledger.bytes
                } <= set(order):
                    complaints.append(f"{rank}: ledger {ledger.bytes}")
            for src in order:
                mine = shards[me].clone()
                ranks.broadcast(mine, src, group)
                if not torch.equal(mine, shards[order.index(src)]):
                    complaints.append(f"{rank}: broadcast from {src} in {members}")
            if not torch.equal(ranks.reduce_scatter(shards[me].clone(), group=group), lists_of[me]):
                complaints.append(f"{rank}: reduce_scatter in {members}")
            if not torch.equal(ranks.all_gather(shards[me], group), torch.cat(shards)):
                complaints.append(f"{rank}: all_gather in {members}")
            outside = next(r for r in range(k) if r not in members)
            kind, text, *_ = attempt(ranks.broadcast, shards[me], outside, group)
            if kind != "ValueError" or f"src is {outside}" not in text or str(order) not in text:
                complaints.append(f"{rank}: src outside: {kind} {text}")
            odd = rank == max(members)
            kind, text, *_ = attempt(ranks.allreduce, torch.ones(3 + odd), group=group)
            if kind != "MismatchError" or not all(f"rank {r}" in text for r in members):
                complaints.append(f"{rank}: {kind} {text}")
            if "rank 0" in text and 0 not in members:
                complaints.append(f"{rank}: names a position, no rank: {text}")
        return complaints

    assert launch(check, 4, way) == [[]] * 4


@both
def test_errors_in_a_group_name_ranks_of_the_world(way):
    def check(rank, k, way):
        group = dist.new_group([1, 3])
        if rank not in (1, 3):
            return attempt(ranks.barrier, group)[:2]
        if way == "messages":
            ranks.use_messages(group)
        ranks.barrier(group)
        if rank == 3:
            return None
        return attempt(ranks.allreduce, torch.ones(2), group=group, timeout=0.3)

    outside, late, other, gone = launch(check, 4, way)
    assert outside == other == ("ValueError", "this rank is no member of the group")
    assert gone is None
    assert late[0] == "PeerError" and late[2] == (3,) and "rank 3 " in late[1]


# The ranks differ: everyone says so, nothing has happened, and the group goes on.


def difference(name, odd, group, tensor):
    """One call, in which the odd rank does something else."""
    ten = torch.ones
    call, arguments = {
        "function": (ranks.broadcast if odd else ranks.allreduce, (tensor,)),
        "function, same rows": (ranks.reduce_scatter if odd else ranks.allreduce, (tensor,)),
        "barrier": (ranks.barrier if odd else ranks.allreduce, () if odd else (tensor,)),
        "op": (partial(ranks.allreduce, op="max" if odd else "sum"), (tensor,)),
        "op of reduce_scatter": (
            partial(ranks.reduce_scatter, op="product" if odd else "mean"),
            (tensor,),
        ),
        "shape": (ranks.allreduce, (tensor[:5] if odd else tensor,)),
        "shape of as many": (ranks.allreduce, (tensor.view(3, 2) if odd else tensor.view(2, 3),)),
        "one more dimension": (ranks.reduce_scatter, (tensor.view(1, 6) if odd else tensor,)),
        "columns": (ranks.all_gather, (ten(2, 4) if odd else ten(2, 3),)),
        "dtype": (ranks.allreduce, (tensor.double() if odd else tensor,)),
        "dtype of the same size": (
            ranks.allreduce,
            (tensor.view(torch.int32) if odd else tensor,),
        ),
        "float16 and bfloat16": (
            ranks.allreduce,
            (tensor.half() if odd else tensor.bfloat16(),),
        ),
        "dtype of broadcast": (ranks.broadcast, (tensor.long() if odd else tensor.double(),)),
        "schedule": (ranks.allreduce, (tensor, ring if odd else star)),
        "schedule and none": (ranks.allreduce, (tensor, ring if odd else None)),
        "src": (ranks.broadcast, (tensor, 2 if odd else 0)),
        "no tensor": (ranks.allreduce, ([1.0] if odd else tensor,)),
        "mean of ints": (partial(ranks.allreduce, op="mean"), (ten(6).int() if odd else tensor,)),
        "unknown op": (partial(ranks.allreduce, op="avg" if odd else "sum"), (tensor,)),
    }[name]
    return attempt(call, *arguments, group=group, timeout=10)


DIFFERENCES = {  # and what the message says of both
    "function": ("allreduce", "broadcast"),
    "function, same rows": ("allreduce", "reduce_scatter"),
    "barrier": ("allreduce", "barrier"),
    "op": ("sum", "max"),
    "op of reduce_scatter": ("mean", "product"),
    "shape": ("[6]", "[5]"),
    "shape of as many": ("[2, 3]", "[3, 2]"),
    "one more dimension": ("[6]", "[1, 6]"),
    "columns": ("[3]", "[4]"),
    "dtype": ("float32", "float64"),
    "dtype of the same size": ("float32", "int32"),
    "float16 and bfloat16": ("bfloat16", " float16"),
    "dtype of broadcast": ("float64", "int64"),
    "schedule": ("star", "ring"),
    "schedule and none": ("None", "ring"),
    "src": ("from rank 0", "from rank 2"),
    "no tensor": ("float32", "list"),
    "mean of ints": ("float32", "int32"),
    "unknown op": ("sum", "avg"),
}


@both
@pytest.mark.parametrize("k", [2, 3, 4])
def test_every_rank_learns_of_a_difference_and_the_group_goes_on(k, way):
    names = {n: w for n, w in DIFFERENCES.items() if n != "src" or k > 2}

    def check(rank, k, way, names):
        group = group_for(way)
        complaints = []
        odd = k // 2
        for name, (usual, unusual) in names.items():
            tensor = torch.arange(6.0) * (rank + 1)
            ranks.barrier(group)
            kind, text, _, seconds = difference(name, rank == odd, group, tensor)
            lines = str(text).splitlines()[1:]
            if kind != "MismatchError" or len(lines) != k:
                complaints.append(f"{name}: {kind}: {text}")
                continue
            for r, line in enumerate(lines):
                if not line.startswith(f"rank {r},") or (
                    (unusual if r == odd else usual) not in line
                ):
                    complaints.append(f"{name}: {line}")
            if seconds > SOON:
                complaints.append(f"{name}: {seconds} s")
            if not torch.equal(tensor, torch.arange(6.0) * (rank + 1)):
                complaints.append(f"{name}: the tensor is now {tensor}")
            ranks.allreduce(tensor, group=group)
            if not torch.equal(tensor, torch.arange(6.0) * sum(range(1, k + 1))):
                complaints.append(f"after {name}: {tensor}")
        return complaints

    assert launch(check, k, way, names) == [[]] * k


@both
def test_numbers_of_all_ranks_go_along_with_the_check(way):
    def check(rank, k, way):
        group = group_for(way)
        numbers = [ranks.all_gather_int(n, group) for n in (rank, -rank, 2**62 + rank)]
        refused = [attempt(ranks.all_gather_int, n, group)[:2] for n in (2**63, 1.5)]
        refused.append(attempt(ranks.all_gather_int, 1.5 if rank else 1, group)[:2])
        mixed = attempt(ranks.all_gather_int if rank else ranks.barrier, *[5] * rank, group=group)
        return numbers, refused, mixed[0], ranks.all_gather_int(7, group)

    for numbers, refused, mixed, after in launch(check, 2, way):
        assert numbers == [[0, 1], [0, -1], [2**62, 2**62 + 1]]
        assert [kind for kind, _ in refused] == ["ValueError"] * 2 + ["MismatchError"]
        assert refused[0][1] == f"number must be an int of 64 bits, not {2**63}"
        assert (mixed, after) == ("MismatchError", [7, 7])


@both
def test_a_rank_that_skips_a_call(way):
    def check(rank, k, way):
        group = group_for(way)
        loss, weights = torch.ones(1), torch.ones(3)
        if rank != 1:
            first = attempt(ranks.allreduce, loss, group=group)
        else:
            first = attempt(ranks.allreduce, weights, group=group)
        ranks.allreduce(weights, group=group)
        return first, loss.tolist(), weights.tolist()

    for (kind, text, _, seconds), loss, weights in launch(check, 3, way):
        assert kind == "MismatchError" and seconds < SOON
        assert "float32 [1]" in text and "float32 [3]" in text
        assert (loss, weights) == ([1.0], [3.0] * 3)


@both
def test_a_label_shows_at_once_which_of_several_equal_calls_was_skipped(way):
    def check(rank, k, way):
        group, shard = group_for(way), torch.ones(3)
        calls = {
            "allreduce": lambda **c: ranks.allreduce(shard, **c),
            "reduce_scatter": lambda **c: ranks.reduce_scatter(shard, **c),
            "all_gather": lambda **c: ranks.all_gather(shard, **c),
            "broadcast": lambda **c: ranks.broadcast(shard, **c),
            "barrier": lambda **c: ranks.barrier(**c),
            "all_gather_int": lambda **c: ranks.all_gather_int(rank, **c),
        }
        texts = {}
        for name, call in calls.items():
            call(group=group, label="step 0")
            kind, text, *_ = attempt(call, group=group, label=f"step {1 + (rank == 1)}")
            texts[name] = f"{kind}: {text}"
            call(group=group, label="step 3")
        return texts

    for texts in launch(check, 3, way):
        for name, text in texts.items():
            assert text.startswith("MismatchError: ")
            first, second, third = [line.partition(": ")[2] for line in text.splitlines()[1:]]
            assert first == third and first.startswith(f"{name} 'step 1'")
            assert second.startswith(f"{name} 'step 2'")


@both
def test_calls_are_numbered_so_that_one_that_went_unchecked_is_missed(way):
    def check(rank, k, way):
        group = group_for(way)
        ranks.barrier(group)
        if rank == 0:  # the same plan, but one call more: nobody waits for anything here
            ranks.broadcast(torch.ones(0), 0, group, check=False)
        return attempt(ranks.allreduce, torch.ones(2), group=group)

    for kind, text, *_ in launch(check, 2, way):
        assert kind == "MismatchError"
        assert "rank 0, call 3" in text and "rank 1, call 2" in text


QUIET = ("shape of as many", "dtype of the same size", "op", "layout")


def test_where_torch_is_silently_wrong_this_is_right_or_says_so():
    def check(rank, k):
        outcomes = {}
        for name in QUIET:
            tensor = (torch.arange(6.0) + 2) * (rank + 1)
            options = {}
            if name == "shape of as many":
                tensor = tensor.view((3, 2) if rank else (2, 3))
            elif name == "dtype of the same size":
                tensor = tensor.int() if rank else tensor
            elif name == "op":
                options = {"op": dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM}
            else:
                tensor = tensor.view(2, 3)
                tensor = tensor.t().contiguous().t() if rank else tensor
            right = (torch.arange(6.0) + 2) * (2 if "op" in options and rank else 3)
            theirs = tensor.clone(memory_format=torch.preserve_format)
            alone = dist.new_group(timeout=timedelta(seconds=2))  # one that may be left broken
            kind, *_ = attempt(dist.all_reduce, theirs, group=alone, **options)
            # Right: what this rank would have, had all called what it called.
            fine = kind == "ok" and torch.equal(theirs.double().reshape(-1), right.double())
            op = "max" if options and rank else "sum"
            ours = attempt(ranks.allreduce, tensor, op=op)
            outcomes[name] = fine, kind, ours[0], tensor.double().reshape(-1).tolist()
        return outcomes

    outcomes = launch(check, 2, timeout=60)
    for name in QUIET:
        theirs = [outcome[name][:2] for outcome in outcomes]
        if name not in ("shape of as many", "dtype of the same size"):
            assert not all(fine for fine, _ in theirs), name
        for rank, outcome in enumerate(outcomes):
            _, _, kind, numbers = outcome[name]
            if name == "layout":
                assert kind == "ok" and numbers == [3.0 * (i + 2) for i in range(6)]
            else:
                assert kind == "MismatchError", name
                assert numbers == [(rank + 1.0) * (i + 2) for i in range(6)]
    wrong = outcomes[0]["dtype of the same size"][:2], outcomes[1]["dtype of the same size"][:2]
    assert not all(fine for fine, _ in wrong)


@pytest.mark.parametrize("fault", ["requires grad", "expanded"])
def test_a_tensor_refused_on_one_rank_is_an_error_on_all(fault):
    def check(rank, k, fault):
        tensor = torch.ones(3)
        if rank == 0:
            tensor = (
                tensor.requires_grad_() if fault == "requires grad" else torch.ones(1).expand(3)
            )
        return attempt(ranks.allreduce, tensor, timeout=5)

    for kind, text, *_ in launch(check, 2, fault):
        assert kind in ("ValueError", "MismatchError"), text


def test_schedules_of_one_name_that_differ():
    def check(rank, k):
        def mine(k):
            return ring(k) if rank else star(k)

        return attempt(ranks.allreduce, torch.ones(6), mine, timeout=5)

    assert [kind for kind, *_ in launch(check, 2)] == ["MismatchError"] * 2


def test_a_schedule_that_is_an_object():
    def check(rank, k):
        class Rounds:
            def __call__(self, k):
                return ring(k)

        several = [Rounds() for _ in range(100 * rank + 1)]
        tensor = torch.ones(6)
        return attempt(ranks.allreduce, tensor, several[-1], timeout=5)[0], tensor.tolist()

    assert launch(check, 2) == [("ok", [2.0] * 6)] * 2


# A rank does not come.


@both
@pytest.mark.parametrize("missing", [(2,), (1, 3)], ids=str)
def test_missing_ranks_are_named_by_all_others(missing, way):
    def check(rank, k, way, missing):
        group = group_for(way)
        ranks.barrier(group)
        if rank in missing:  # it has returned, but stays connected
            return None
        first = attempt(ranks.allreduce, torch.ones(4), group=group, timeout=0.5)
        return first, attempt(ranks.allreduce, torch.ones(4), group=group, timeout=20)

    for rank, outcome in enumerate(launch(check, 4, way, missing)):
        if rank in missing:
            assert outcome is None
            continue
        (kind, text, named, seconds), again = outcome
        assert kind == "PeerError" and named == missing
        assert ("rank 2 " if len(missing) == 1 else "ranks 1, 3 ") in text
        assert 0.4 < seconds < 0.5 + SOON
        assert again[0] == "PeerError" and again[3] < SOON
        assert "of no more use" in again[1] and text in again[1]


@both
def test_a_stopped_rank_is_named(way):
    def check(rank, k, way):
        group = group_for(way)
        pids = ranks.all_gather(torch.tensor(os.getpid()), group).tolist()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return "went on"
        outcome = attempt(ranks.barrier, group, timeout=0.3)
        if rank == 0:
            time.sleep(0.3)  # so that the others have given up too
            os.kill(pids[1], signal.SIGCONT)
        return outcome

    first, stopped, last = launch(check, 3, way)
    assert stopped == "went on"
    for kind, text, named, seconds in (first, last):
        assert kind == "PeerError" and named == (1,) and "rank 1" in text
        assert seconds < 0.5 + SOON


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_dead_rank_is_named_at_once(when, monkeypatch, capsys):
    monkeypatch.setattr(launcher, "GRACE", 10)  # time to speak for the others

    def check(rank, k, when):
        group = group_for("messages")
        ranks.barrier(group)
        if rank == 1:
            time.sleep(0.3 * (when == "meanwhile"))
            os._exit(3)
        time.sleep(0.3 * (when == "before"))
        kind, _, named, seconds = attempt(ranks.barrier, group, timeout=30)
        again = attempt(ranks.barrier, group, timeout=1)[1]
        print(kind, named, seconds < 0.3 + SOON, "of no more use" in again)

    with pytest.raises(RankError, match="rank 1: died"):
        launch(check, 3, when)
    first = [f"[rank {rank}] PeerError (1,) True True" for rank in (0, 2)]
    # One that calls later may find that the other one has given up already, and name that.
    later = [f"[rank {rank}] PeerError ({2 - rank},) True True" for rank in (0, 2)]
    outcomes = first, [first[0], later[1]], [later[0], first[1]]
    assert sorted(capsys.readouterr().out.splitlines()) in outcomes


@pytest.mark.parametrize(
    "timeouts",
    [
        (1.1, 0.9, 0.7),
        (0.7, 0.9, 1.1),
    ],
    ids=["neighbour gives up last", "neighbour gives up first"],
)
def test_in_the_middle_of_a_ring_all_name_the_one_that_is_missing(timeouts):
    def check(rank, k, timeouts):
        if rank == 3:
            return None
        timeout = timeouts[rank]
        return attempt(ranks.allreduce, torch.ones(8), ring, check=False, timeout=timeout)

    *outcomes, missing = launch(check, 4, timeouts)
    assert missing is None
    for timeout, (kind, text, named, seconds) in zip(timeouts, outcomes, strict=True):
        assert (kind, named) == ("PeerError", (3,)) and "rank 3 " in text
        assert seconds < timeout + SOON


def test_the_timeout_holds_for_the_first_call_in_a_group():
    def check(rank, k):
        group = dist.new_group()
        return attempt(ranks.barrier, group, timeout=0.3) if rank else None

    _, (kind, _, named, seconds) = launch(check, 2, timeout=20)
    assert (kind, named) == ("PeerError", (0,))
    assert seconds < SOON  # and not 18


def test_messages_have_the_timeout_that_they_are_given():
    def check(rank, k):
        ranks.use_messages(timeout=0.3)
        if rank == 1:
            return None
        group = dist.new_group([0])
        ranks.barrier(group)
        outcome = attempt(ranks.barrier)
        return outcome[0], outcome[-1] < SOON, ranks.member_of(group, None)[1]

    assert launch(check, 2, timeout=20)[0] == ("PeerError", True, 0.3)


def test_all_missing_are_named_although_a_lane_is_full():
    def check(rank, k):
        if rank > 1:
            return None
        for _ in range(2):  # on its way to rank 2, which takes nothing
            ranks.broadcast(torch.ones(2), check=False)
        return attempt(ranks.barrier, timeout=0.5)

    first, second, *_ = launch(check, 4)
    assert first[2] == second[2] == (2, 3)


def fails_once(name):
    """Let a function of ranks fail at its next call only: that stands for a full memory."""
    function = getattr(ranks.collectives, name)

    def fail(*args, **kwargs):
        setattr(ranks.collectives, name, function)
        raise MemoryError("no room for a copy")

    setattr(ranks.collectives, name, fail)


@both
@pytest.mark.parametrize("place", ["_message_of", "make_moves", "divide", "put_back"])
@pytest.mark.parametrize("schedule", [star, ring])
@pytest.mark.parametrize(("bad", "k"), [(0, 3), (2, 3), (1, 2)])
def test_a_rank_that_fails_after_the_agreement_is_named_and_nobody_takes_its_note_for_data(
    schedule, place, way, bad, k
):
    def check(rank, k, schedule, place, way, bad):
        group, outcomes = group_for(way), []
        for step in range(3):
            if rank == bad and step == 1:
                fails_once(place)
            tensor = torch.full((8,), rank + 1.0)
            outcome = attempt(ranks.allreduce, tensor, schedule, group=group, timeout=60)
            outcomes.append((*outcome[:3], tensor.unique().tolist()))
        return outcomes

    others = launch(check, k, schedule, place, way, bad, timeout=30)
    failed, total = others.pop(bad), float(sum(range(1, k + 1)))
    assert failed[1][:2] == ("MemoryError", "no room for a copy")
    assert "of no more use since an earlier call: MemoryError: no room" in failed[2][1]
    for outcomes in (failed, *others):
        assert outcomes[0] == ("ok", None, (), [total])
    # Over lanes a short message goes along with the check; in a star it is all that a rank sends.
    along = (place, schedule, way) == ("make_moves", star, "lanes") and bad != 0
    for outcomes in others:
        for kind, _, named, numbers in outcomes[1:]:
            if kind == "ok":  # the other one had sent all its messages before it failed
                assert numbers == [total] and (along or place in ("divide", "put_back"))
            elif named:
                assert (kind == "PeerError" and bad in named) or way == "messages"
        assert outcomes[2][0] == "PeerError"


@both
@pytest.mark.parametrize("odd", ["meta", "sparse", "CSR"])
def test_tensors_without_numbers_side_by_side_are_refused_alike(odd, way):
    def check(rank, k, odd, way):
        group, usual = group_for(way), torch.ones(3, 3)
        convert = {
            "meta": lambda: usual.to("meta"),
            "sparse": usual.to_sparse,
            "CSR": usual.to_sparse_csr,
        }[odd]
        unusual = convert()
        calls = (ranks.allreduce, ranks.reduce_scatter, ranks.all_gather, ranks.broadcast)
        complaints = []
        for call in calls:
            one = attempt(call, unusual if rank else usual, group=group)
            if one[0] != "MismatchError" or f"{odd.lower()[:4]}" not in one[1].lower():
                complaints.append(one)
            every = attempt(call, unusual, group=group)
            words = "is a meta tensor" if odd == "meta" else "pass its .to_dense()"
            if every[0] != "ValueError" or words not in every[1]:
                complaints.append(every)
        ranks.allreduce(usual, group=group)
        return complaints, usual.unique().tolist()

    assert launch(check, 2, odd, way) == [([], [2.0])] * 2


@both
def test_ranks_in_a_circle_name_the_one_that_has_stopped_and_nobody_itself(way):
    def check(rank, k, way):
        group = group_for(way)
        pids = ranks.all_gather(torch.tensor(os.getpid()), group).tolist()
        if rank == 0:  # in its sleep: it waits for rank 3
            threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGSTOP]).start()
        while rank == 3 and psutil.Process(pids[0]).status() != psutil.STATUS_STOPPED:
            time.sleep(0.05)
        numbers = torch.ones(8)
        outcome = attempt(ranks.allreduce, numbers, ring, group=group, check=False, timeout=1)
        if rank == 1:
            time.sleep(1)  # so that the others have given up too
            os.kill(pids[0], signal.SIGCONT)
        return outcome

    for rank, (kind, text, named, _) in enumerate(launch(check, 4, way)):
        assert kind == "PeerError" and named and rank not in named
        if way == "messages":
            assert "or waits itself for another rank" in text
        elif rank:
            assert named == (0,)


# Threads.


@both
@pytest.mark.parametrize("checked", [True, False])
def test_a_call_beside_that_of_another_thread_is_refused_and_all_ranks_learn_of_it(checked, way):
    def check(rank, k, checked, way):
        group = group_for(way)
        ranks.barrier(group)
        transport = ranks.member_of(group, None)[0].transport
        beside = dist.new_group()
        options = {"group": group, "check": checked, "timeout": 60}
        if rank:
            dist.recv(torch.empty(1), 0, beside)  # not before rank 0 has given up
            return attempt(ranks.allreduce, torch.ones(3), **options)
        outcomes = []

        def first():
            outcomes.append(attempt(ranks.allreduce, torch.ones(3), **options))

        thread = threading.Thread(target=first, name="first")
        thread.start()
        while not transport.under_way:
            time.sleep(0.01)
        outcomes.append(attempt(ranks.allreduce, torch.zeros(3), **options))
        for other in range(1, k):
            dist.send(torch.empty(1), other, beside)
        thread.join()
        outcomes.append(attempt(ranks.allreduce, torch.ones(3), **options))
        return outcomes

    (first, second, third), *others = launch(check, 3, checked, way, timeout=30)
    for kind, text, *_ in (first, second):
        assert kind == "BusyError"
        assert "thread 'MainThread' called allreduce, sum of float32 [3]" in text
        assert "of thread 'first' was under way" in text
    assert third[0] == "PeerError" and "since an earlier call: BusyError: thread" in third[1]
    for kind, _, named, _ in others:  # gloo may first see one that has given up for this reason
        assert kind == "PeerError" and (0 in named or (way == "messages" and named))


@both
def test_threads_may_call_one_after_the_other_and_each_in_a_group_of_its_own(way):
    def check(rank, k, way):
        groups, sums = [group_for(way), dist.new_group()], []

        def work(group, number, turns):
            for _ in range(turns):
                tensor = torch.full((3,), number)
                ranks.allreduce(tensor, group=group)
                sums.append((number, tensor.unique().tolist()))

        for number in (1.0, 2.0):
            thread = threading.Thread(target=work, args=(groups[0], number, 3))
            thread.start()
            thread.join()
        ranks.barrier(groups[1])
        threads = [threading.Thread(target=work, args=(g, 3.0, 50)) for g in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sums

    for sums in launch(check, 2, way):
        assert sums == [(1.0, [2.0])] * 3 + [(2.0, [4.0])] * 3 + [(3.0, [6.0])] * 100


# What is counted.


@both
def test_the_ledger_holds_what_this_rank_sent(way):
    def check(rank, k, way):
        group = group_for(way)
        sent = {}
        for schedule in SCHEDULES:
            for checked in (True, False):
                for dtype in (torch.float32, torch.float16, torch.int8):
                    with count_bytes() as ledger:
                        ranks.allreduce(
                            torch.ones(13, dtype=dtype), schedule, "sum", group, checked
                        )
                    sent[schedule.__name__, checked, dtype] = dict(ledger.bytes)
        for checked in (True, False):
            with count_bytes() as ledger:
                ranks.broadcast(torch.ones(5), 0, group, checked)
            sent["broadcast", checked] = dict(ledger.bytes)
        with count_bytes() as ledger:
            ranks.barrier(group)
        return sent, dict(ledger.bytes)

    for rank, (sent, barrier) in enumerate(launch(check, 4, way)):
        assert barrier == {}
        for schedule in SCHEDULES:
            for dtype in (torch.float32, torch.float16, torch.int8):
                size = max(dtype.itemsize, 4 if dtype.is_floating_point else 1)
                with count_bytes() as ledger:
                    lists.allreduce([torch.ones(13, dtype=dtype) for _ in range(4)], schedule)
                own = {link: n for link, n in ledger.bytes.items() if link[0] == rank and n}
                for checked in (True, False):
                    bytes_sent = sent[schedule.__name__, checked, dtype]
                    assert bytes_sent == own, (schedule, checked, dtype)
                    walked = cost.walk(schedule, 4, 13 * size, itemsize=size)
                    assert sum(bytes_sent.values()) == walked.sent[rank]
        links = {0: {(0, 2): 20, (0, 1): 20}, 2: {(2, 3): 20}}.get(rank, {})
        assert sent["broadcast", True] == sent["broadcast", False] == links


# Arguments that cannot be.


@both
def test_bad_arguments_are_refused_alike_on_all_ranks(way):
    def check(rank, k, way):
        group = group_for(way)
        ones = torch.ones(4)
        bad_moves = [Move(0, 0, None, True)]
        make_unhashable = make_dataclass(
            "Unhashable", [], namespace={"__call__": lambda self, k: ring(k)}
        )
        calls = {
            "op": lambda **c: ranks.allreduce(ones, op="avg", **c),
            "no sum": lambda **c: ranks.allreduce(torch.ones(4).to(torch.uint16), **c),
            "mean of ints": lambda **c: ranks.allreduce(ones.int(), op="mean", **c),
            "max of complex": lambda **c: ranks.reduce_scatter(ones + 0j, op="max", **c),
            "grad": lambda **c: ranks.allreduce(torch.ones(4, requires_grad=True), **c),
            "expanded": lambda **c: ranks.allreduce(torch.ones(1).expand(4), **c),
            "list": lambda **c: ranks.allreduce([1.0, 2.0], **c),
            "none": lambda **c: ranks.broadcast(None, **c),
            "schedule": lambda **c: ranks.allreduce(ones, 5, **c),
            "unhashable": lambda **c: ranks.allreduce(ones, make_unhashable(), **c),
            "moves": lambda **c: ranks.allreduce(ones, lambda k: [bad_moves], **c),
            "src": lambda **c: ranks.broadcast(ones, 2, **c),
        }
        outcomes = {}
        for checked in (True, False):
            for name, call in calls.items():
                outcomes[name, checked] = attempt(call, group=group, check=checked)[:2]
        for timeout in (0, -1.0, "1", float("nan")):
            outcomes["timeout", timeout] = attempt(ranks.barrier, group, timeout)[:2]
        with torch.no_grad():
            weights = torch.ones(4, requires_grad=True)
            ranks.allreduce(weights, group=group)
        ranks.allreduce(ones, group=group)
        return outcomes, weights.tolist(), ones.tolist()

    said = {
        "op": ("ValueError", "op is 'avg', which is none of sum, mean"),
        "no sum": ("ValueError", "torch has no sum of torch.uint16: convert"),
        "mean of ints": ("ValueError", "the mean of torch.int32"),
        "max of complex": ("ValueError", "max is not defined for torch.complex64"),
        "grad": ("ValueError", "the tensor requires gradients"),
        "expanded": ("ValueError", "the tensor is an expanded view (strides (0,))"),
        "list": ("TypeError", "the tensor is a list, not a tensor"),
        "none": ("TypeError", "the tensor is a NoneType, not a tensor"),
        "schedule": ("TypeError", "schedule must be a function such as ring, not int"),
        "unhashable": (
            "TypeError",
            "Unhashable, a schedule, is not hashable: make it @dataclass(frozen=True)",
        ),
        "moves": ("ValueError", "does not send a chunk between two of 2 participants"),
        "src": ("ValueError", "src is 2, but the group has the ranks [0, 1]"),
        "timeout": ("ValueError", "timeout must be a positive number of seconds, not"),
    }
    for outcomes, *sums in launch(check, 2, way):
        assert sums == [[2.0] * 4] * 2
        for (name, _), (kind, text) in outcomes.items():
            assert kind == said[name][0] and said[name][1] in text, (name, kind, text)


@both
def test_a_schedule_may_yield_its_steps(way):
    def check(rank, k, way):
        def lazy(k):
            yield from ring(k)

        tensor = torch.arange(6.0) + rank
        ranks.allreduce(tensor, lazy, group=group_for(way))
        return tensor.tolist()

    assert launch(check, 3, way) == [[3.0 * i + 3 for i in range(6)]] * 3


@pytest.mark.parametrize("schedule", [0, "", [ring], "ring"])
def test_a_schedule_that_is_no_function(schedule):
    def check(rank, k, schedule):
        return attempt(ranks.allreduce, torch.ones(2), schedule)[:2]

    for kind, text in launch(check, 2, schedule):
        assert kind == "TypeError" and "schedule must be a function such as ring" in text


def test_without_a_process_group():
    calls = (ranks.allreduce, ranks.reduce_scatter, ranks.all_gather, ranks.broadcast)
    for call in calls:
        with pytest.raises(ValueError, match="there is no process group: call this inside launch"):
            call(torch.ones(2))
    with pytest.raises(ValueError, match="there is no process group"):
        ranks.barrier()


@both
def test_an_endless_timeout(way):
    def check(rank, k, way):
        return attempt(ranks.barrier, group_for(way), float("inf"))[0]

    assert launch(check, 2, way, timeout=20) == ["ok", "ok"]


@both
def test_a_schedule_that_sends_what_it_overwrites_is_refused(way):
    def swap(k):
        return [[Move(r, 1 - r, None, False) for r in range(2)]]

    def check(rank, k, way):
        tensor = torch.arange(5.0)
        outcome = attempt(ranks.allreduce, tensor, swap, group=group_for(way))
        return outcome[0], "while it is overwritten" in str(outcome), tensor.tolist()

    assert launch(check, 2, way) == [("ValueError", True, [0, 1, 2, 3, 4])] * 2
