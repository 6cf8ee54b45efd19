"""Run a schedule on a list of tensors, one per device: allreduce, broadcast, parts.

Everything happens in one process, as in the book. Notebook 03 builds ``run_schedule``.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise

import torch

from ..devices import to_device
from ..guards import checked
from .schedules import (
    Schedule,
    checked_steps,
    num_chunks,
    ring,
    sent_and_written,
    star,
    tree_broadcast,
)

OPS = {"sum": torch.add, "mean": torch.add}  # which is divided in the end
OPS |= {"max": torch.maximum, "min": torch.minimum, "product": torch.mul}


def check_allreduce(data, schedule=ring, op="sum") -> None:
    """Refuse what would go wrong or lose a tensor, naming positions and values."""
    check_tensors(data)
    check_alike([tuple(tensor.shape) for tensor in data], "shape")
    check_op(op, data[0].dtype)
    check_memory(data)
    if not callable(schedule):
        raise TypeError(
            f"schedule must be a function such as ring, not {type(schedule).__name__}"
        )


@checked(check_allreduce)
def allreduce(
    data: Sequence[torch.Tensor], schedule: Schedule = ring, op: str = "sum"
) -> None:
    """Reduce in place: then each tensor of ``data`` holds the reduction of all.

    The tensors have one shape and dtype, and share no memory; they need not be
    contiguous. If one requires gradients, call this in ``no_grad``. ``schedule`` is a
    function such as ``ring`` or ``tree``; ``op`` is "sum", "mean" (not of integers),
    "max", "min" or "product". The sum, mean, max or min of finite numbers is equal to
    the last bit, on all devices and in every run. float16, bfloat16 and narrower types
    are sent and reduced as float32, and rounded once, at the end.
    """
    steps = checked_steps(schedule, len(data))
    flats = [flatten(tensor, widen=True) for tensor in data]
    bounds = bounds_of(flats[0].tensor_split(num_chunks(steps)))
    run_schedule(steps, flats, bounds, op)
    divide(flats, op, len(data))
    put_back(data, flats)


def naive_allreduce(data: Sequence[torch.Tensor]) -> None:
    """Sum in place, the book's way: add all to ``data[0]``, then copy it to all."""
    allreduce(data, star)


def ring_allreduce(data: Sequence[torch.Tensor]) -> None:
    """Sum in place by chunks around a ring: no position sends more than its share."""
    allreduce(data, ring)


@checked(check_allreduce)
def reduce_scatter(data: Sequence[torch.Tensor], op: str = "sum") -> list[torch.Tensor]:
    """Reduce in place and return each device's part: shard r on device r.

    This is the first half of the ring. Shard r is
    ``data[r].tensor_split(len(data))[r]``; the other rows of ``data[r]`` hold partial
    results. A tensor without a dimension counts as one row.
    """
    k = len(data)
    flats = [flatten(tensor, widen=True) for tensor in data]
    bounds = bounds_of(torch.atleast_1d(data[0]).tensor_split(k))
    run_schedule(ring(k)[: k - 1], flats, bounds, op)
    divide([part_of(flat, r, bounds) for r, flat in enumerate(flats)], op, k)
    put_back(data, flats)
    return [
        torch.atleast_1d(tensor.detach()).tensor_split(k)[r]
        for r, tensor in enumerate(data)
    ]


def check_shards(shards) -> None:
    """Refuse shards that cannot be joined along dimension 0."""
    check_tensors(shards)
    check_alike(
        [tuple(torch.atleast_1d(shard).shape[1:]) for shard in shards], "rows of shape"
    )


@checked(check_shards)
def all_gather(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a new tensor on each device: all ``shards`` joined along dimension 0.

    This is the ring's second half. Shards may differ in length; one without a dimension
    is a row.
    """
    shards = [torch.atleast_1d(shard.detach()) for shard in shards]
    bounds = bounds_of(shards)
    flats = [shard.new_empty(bounds[-1]) for shard in shards]
    for r, shard in enumerate(shards):
        part_of(flats[r], r, bounds).copy_(shard.reshape(-1))
    k = len(shards)
    run_schedule(ring(k)[k - 1 :], flats, bounds)
    num_rows = sum(map(len, shards))
    return [flat.reshape(num_rows, *shards[0].shape[1:]) for flat in flats]


def broadcast(data: Sequence[torch.Tensor], src: int = 0) -> None:
    """Copy ``data[src]`` into all other tensors of ``data``, down a binomial tree."""
    check_allreduce(data)
    if src not in range(len(data)):
        raise ValueError(f"src is {src!r}, but the positions are 0 to {len(data) - 1}")
    flats = [flatten(tensor, widen=False) for tensor in data]
    run_schedule(tree_broadcast(len(data), src), flats)
    put_back(data, flats)


@torch.no_grad()
def run_schedule(
    steps, flats: list[torch.Tensor], bounds: Sequence[int] = (), op: str = "sum"
) -> None:
    """Run ``steps`` in place on flat tensors: chunk c is bounds[c] to bounds[c + 1]."""
    # each view is made once
    part = cache(lambda r, chunk: part_of(flats[r], chunk, bounds))
    n = num_chunks(steps)
    for step in steps:
        messages, overlaps = [], sent_and_written(tuple(step), n)
        for m in step:  # take all messages before writing any
            message = to_device(part(m.src, m.chunk), flats[m.dst].device, m.src, m.dst)
            messages.append(message.clone() if overlaps else message)
        for m, message in zip(step, messages, strict=True):
            if m.reduce:
                reducer(op, m.src < m.dst)(part(m.dst, m.chunk), message)
            else:
                part(m.dst, m.chunk).copy_(message)


def reducer(
    op: str, message_first: bool = False
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return the function that reduces its second tensor, a message, into its first.

    Its first operand is the lower participant's tensor, so two that exchange get the
    same bits.
    """
    function = OPS[op]
    if message_first:
        return lambda mine, message: function(message, mine, out=mine)
    return lambda mine, message: function(mine, message, out=mine)


def part_of(
    flat: torch.Tensor, chunk: int | range | None, bounds: Sequence[int]
) -> torch.Tensor:
    """Return a view of the elements of a chunk, of a range of chunks, or of all."""
    if chunk is None:
        return flat
    if isinstance(chunk, range):
        return flat[bounds[chunk[0]] : bounds[chunk[-1] + 1]]
    return flat[bounds[chunk] : bounds[chunk + 1]]


def bounds_of(parts: Sequence[torch.Tensor]) -> list[int]:
    """Return where each part begins in the flat whole, and where the last one ends."""
    return [0, *accumulate(part.numel() for part in parts)]


def flatten(tensor: torch.Tensor, widen: bool) -> torch.Tensor:
    """Return elements in one dimension: a view where the layout allows, else a copy."""
    flat = tensor.detach() if tensor.requires_grad else tensor
    # what needs no view has none: for a small message each costs time
    if flat.dim() != 1:
        flat = flat.reshape(-1)
    return flat.float() if widen and is_low_precision(tensor.dtype) else flat


def is_low_precision(dtype: torch.dtype) -> bool:
    """Tell whether to add numbers of ``dtype`` as float32, rounding at the end."""
    return dtype.is_floating_point and dtype.itemsize < 4


def divide(flats: Sequence[torch.Tensor], op: str, k: int) -> None:
    """Divide the sum of ``k`` in place where the mean was asked for."""
    if op == "mean":
        for flat in flats:
            flat.div_(k)


def put_back(data: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> None:
    """Copy results into the tensors of ``data`` of which the flat ones are copies."""
    for tensor, flat in zip(data, flats, strict=True):
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.reshape(tensor.shape))


# What a collective refuses, here and between ranks.


def check_tensors(data: Sequence[torch.Tensor]) -> None:
    """Accept only a list of dense tensors of one dtype, one per device."""
    if not isinstance(data, (list, tuple)):
        raise TypeError(
            f"data must be a list of tensors, one per device, not {type(data).__name__}"
        )
    if not data:
        raise ValueError("data is empty: it must hold one tensor per device")
    for i, tensor in enumerate(data):
        check_tensor(tensor, f"data[{i}]")
    check_alike([tensor.dtype for tensor in data], "dtype")


def check_tensor(tensor: torch.Tensor, name: str) -> None:
    """Refuse, by its ``name``, what cannot be sent, and what wants a gradient."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is sparse ({tensor.layout}): pass its .to_dense()")
    if tensor.is_meta:
        raise ValueError(f"{name} is a meta tensor, which has no elements to send")
    if tensor.requires_grad and torch.is_grad_enabled():
        way_out = "pass its .grad or its .detach(), or call inside torch.no_grad()"
        raise ValueError(
            f"{name} requires gradients, which a collective does not record: {way_out}"
        )


def check_alike(values: Sequence, what: str) -> None:
    """Refuse values, of ``what`` each of a list of tensors has, that differ."""
    for i, value in enumerate(values):
        if value != values[0]:
            raise ValueError(
                f"data[0] has {what} {values[0]}, but data[{i}] has {what} {value}"
            )


def check_memory(data: Sequence[torch.Tensor]) -> None:
    """Refuse an expanded tensor, and two tensors that overlap.

    It misses tensors that overlap if they are not contiguous and begin at different
    places.
    """
    for i, tensor in enumerate(data):
        if is_expanded(tensor):
            raise ValueError(
                f"data[{i}] is an expanded view, as of .expand(): pass its .clone()"
            )
    places = sorted(
        (tensor.data_ptr(), i) for i, tensor in enumerate(data) if tensor.numel()
    )
    for (begin, i), (next_begin, j) in pairwise(places):
        if next_begin < begin + (data[i].nbytes if data[i].is_contiguous() else 1):
            i, j = sorted((i, j))
            raise ValueError(
                f"data[{i}] and data[{j}] share memory: pass a copy for each device"
            )


def is_expanded(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has one place of memory for several elements."""
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    return not tensor.is_contiguous() and any(
        stride == 0 and n > 1 for stride, n in strides
    )


@cache
def check_op(op: str, dtype: torch.dtype) -> None:
    """Raise ValueError unless ``op`` is known and defined for ``dtype``."""
    if op not in OPS:
        raise ValueError(f"op is {op!r}, which is none of {', '.join(OPS)}")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(
            f"the mean of {dtype} is no {dtype}: take the sum, or convert to float"
        )
    if op in ("max", "min") and dtype.is_complex:
        raise ValueError(
            f"{op} is not defined for {dtype}: complex numbers have no order"
        )
    nothing = torch.empty(0, dtype=torch.float32 if is_low_precision(dtype) else dtype)
    try:
        reducer(op)(nothing, nothing)
    except RuntimeError as error:  # of which NotImplementedError is a kind
        raise ValueError(
            f"torch has no {op} of {dtype}: convert to another dtype"
        ) from error
