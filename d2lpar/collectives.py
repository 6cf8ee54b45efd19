"""Chapter 03. A schedule run on a list of tensors, one per device.

Everything happens in one process, as in the book.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from .devices import to_device
from .schedules import (
    Move,
    Schedule,
    Steps,
    checked_steps,
    chunks_of,
    even_bounds,
    num_chunks,
    ring,
    tree_broadcast,
)

# A mean is a sum that is divided in the end.
OPS = {"sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum}


def allreduce(
    data: Sequence[torch.Tensor], schedule: Schedule = ring, op: str = "sum"
) -> None:
    """Reduce in place: then each tensor of ``data`` holds the reduction of all.

    ``op`` is "sum", "mean", "max" or "min". With the book's schedules, a sum has the
    same bits on all devices and in every run. Floats of 16 bits are sent and added as
    float32, and rounded once.
    """
    check_data(data, op)
    steps = checked_steps(schedule, len(data))
    flats = [flatten(tensor) for tensor in data]
    bounds = even_bounds(flats[0].numel(), num_chunks(steps))
    run_steps(steps, flats, bounds, op)
    for tensor, flat in zip(data, flats):
        put_back(tensor, flat, op, len(data))


def ring_allreduce(data: Sequence[torch.Tensor]) -> None:
    """Sum in place by chunks around a ring: each sends 2(k - 1)/k of its own."""
    allreduce(data, ring)


def reduce_scatter(data: Sequence[torch.Tensor], op: str = "sum") -> list[torch.Tensor]:
    """Reduce in place and return each device's part: part r of ``tensor_split``.

    This is the first half of the ring. The other rows are left with partial results.
    """
    check_data(data, op)
    k, flats = len(data), [flatten(tensor) for tensor in data]
    row = data[0].shape[1:].numel()
    bounds = [row * n for n in even_bounds(len(data[0]), k)]
    run_steps(ring(k)[: k - 1], flats, bounds, op)
    for tensor, flat in zip(data, flats):
        put_back(tensor, flat, op, k)
    return [tensor.detach().tensor_split(k)[r] for r, tensor in enumerate(data)]


def all_gather(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a new tensor on each device: all ``shards`` joined along dimension 0.

    This is the ring's second half. Shards may differ in length.
    """
    check_data(shards, rows=True)
    k, shape = len(shards), (sum(map(len, shards)), *shards[0].shape[1:])
    bounds = [0, *accumulate(shard.numel() for shard in shards)]
    wholes = [shard.new_empty(shape) for shard in shards]
    for r, shard in enumerate(shards):
        wholes[r].view(-1)[bounds[r] : bounds[r + 1]] = shard.detach().reshape(-1)
    run_steps(ring(k)[k - 1 :], [whole.view(-1) for whole in wholes], bounds)
    return wholes


def broadcast(data: Sequence[torch.Tensor], src: int = 0) -> None:
    """Copy ``data[src]`` into all other tensors of ``data``, down a tree."""
    check_data(data)
    if src not in range(len(data)):
        raise ValueError(f"src is {src!r}, but the positions are 0 to {len(data) - 1}")
    flats = [tensor.detach().reshape(-1) for tensor in data]
    run_steps(tree_broadcast(len(data), src), flats, [0, flats[0].numel()])
    for tensor, flat in zip(data, flats):
        put_back(tensor, flat)


def run_steps(
    steps: Steps, flats: list[torch.Tensor], bounds: list[int], op: str = "sum"
) -> None:
    """Make all moves in place; take all messages of a step before writing any."""
    for step in steps:
        messages = []
        for m in step:
            part, device = part_of(flats[m.src], m, bounds), flats[m.dst].device
            messages.append(to_device(part, device, m.src, m.dst).clone())
        for m, message in zip(step, messages):
            write(part_of(flats[m.dst], m, bounds), message, op if m.reduce else None)


def part_of(flat: torch.Tensor, move: Move, bounds: list[int]) -> torch.Tensor:
    """Return a view of the elements of the chunks that a move carries."""
    chunks = chunks_of(move, len(bounds) - 1)
    return flat[bounds[chunks.start] : bounds[chunks.stop]]


def write(part: torch.Tensor, message: torch.Tensor, op: str | None) -> None:
    """Reduce a message into ``part``, or copy it there where there is no ``op``."""
    if op is None:
        part.copy_(message)
    else:
        OPS[op](part, message, out=part)


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in one dimension: a view, if they can be added in place."""
    flat = tensor.detach().reshape(-1)
    is_narrow = tensor.is_floating_point() and tensor.itemsize < 4
    return flat.float() if is_narrow else flat


def put_back(tensor: torch.Tensor, flat: torch.Tensor, op="sum", k: int = 1) -> None:
    """Divide where the mean was asked for; copy where ``flat`` is itself a copy."""
    if op == "mean":
        flat /= k
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def check_data(data: Sequence[torch.Tensor], op="sum", rows: bool = False) -> None:
    """Refuse tensors that do not go together; with ``rows``, lengths may differ."""
    if not isinstance(data, (list, tuple)) or not data:
        raise TypeError(f"data must be a list with a tensor per device, not {data!r}")
    places = {}
    for i, tensor in enumerate(data):
        check_tensor(tensor, f"data[{i}]", op)
        first, kind = (kind_of(t[:0] if rows else t) for t in (data[0], tensor))
        if kind != first:
            raise ValueError(f"data[0] is {first}, but data[{i}] is {kind}")
        if tensor.numel() and places.setdefault(tensor.data_ptr(), i) != i:
            j = places[tensor.data_ptr()]
            raise ValueError(f"data[{j}] and data[{i}] share memory: pass copies")


def check_tensor(tensor: torch.Tensor, name: str, op: str = "sum") -> None:
    """Refuse, by its ``name``, what cannot be sent or reduced."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor")
    if tensor.requires_grad and torch.is_grad_enabled():
        way_out = "pass its .grad or its .detach(), or call inside torch.no_grad()"
        raise ValueError(f"{name} requires gradients, which are not kept: {way_out}")
    if op not in OPS:
        raise ValueError(f"op is {op!r}, which is none of {', '.join(OPS)}")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"the mean of {kind_of(tensor)} is not whole: take the sum")
    if op in ("max", "min") and tensor.is_complex():
        raise ValueError(f"{name} is complex: its numbers have no order, so no {op}")


def kind_of(tensor: torch.Tensor) -> str:
    """Return dtype and shape in words."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
