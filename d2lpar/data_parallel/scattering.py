"""A batch of any structure, split over devices, and joined again.

Notebook 05 builds this file. Source: ``torch.nn.parallel.scatter`` and ``gather``,
which need GPUs.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ..devices import check_devices, to_device
from ..guards import checked


def check_scatter(inputs: Any, devices: Sequence[torch.device], dim: int) -> None:
    """Raise unless there are devices and, for several of them, rows to split."""
    if len(check_devices(devices)) > 1:
        if has_packed(inputs):
            raise TypeError(
                "cannot split a PackedSequence by rows: pass padded sequences, lengths"
            )
        num_rows(inputs, dim)


@checked(check_scatter)
def scatter(inputs: Any, devices: Sequence[torch.device], dim: int = 0) -> list[Any]:
    """Split every tensor of ``inputs`` along ``dim``; return what each device gets.

    Nested tuples, lists and dicts are rebuilt around the shards; other values go to
    every device by reference. Shards keep the order and differ by at most one row, so
    the last may be empty. One device gets all as it is, several only tensors of one
    size along ``dim``. Gradients flow back.
    """
    devices = check_devices(devices)
    k = len(devices)
    if isinstance(inputs, torch.Tensor):
        shards = [inputs] if k == 1 else shards_of(inputs, k, dim)
        src = position(inputs.device, devices)
        return [to_device(shards[i], devices[i], src, i) for i in range(k)]
    if isinstance(inputs, (tuple, list, dict)):
        parts = [scatter(part, devices, dim) for part in parts_of(inputs)]
        return [rebuild(inputs, [shards[i] for shards in parts]) for i in range(k)]
    return [inputs] * k


def shards_of(rows: torch.Tensor, k: int, dim: int = 0) -> Sequence[torch.Tensor]:
    """Split a tensor in ``k``; the first parts get one row more if some are left."""
    few, more = divmod(rows.shape[dim], k)
    shards = rows.split([few + (i < more) for i in range(k)], dim)
    # autograd forbids writing to such views, as ReLU(inplace=True) does
    if rows.requires_grad:
        return [shard.clone() for shard in shards]
    return shards


def num_rows(inputs: Any, dim: int = 0) -> int | None:
    """Return the size of all tensors of ``inputs`` along ``dim``; None without any."""
    tensors = tensors_of(inputs)
    for tensor in tensors:
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(
                f"a tensor of shape {list(tensor.shape)} has no dimension {dim} to"
                " split: to give every device the same number, pass it as a Python"
                " number"
            )
        if tensor.shape[dim] != tensors[0].shape[dim]:
            raise ValueError(
                f"tensors of shapes {list(tensors[0].shape)} and {list(tensor.shape)}"
                f" differ in dimension {dim}, along which they are to be split"
            )
    return tensors[0].shape[dim] if tensors else None


def check_gather(outputs: Sequence[Any], **_) -> None:
    """Raise unless the outputs have the same structure."""
    kinds = [_kind(output) for output in outputs]
    for i, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(f"output 0 is {kinds[0]}, but output {i} is {kind}")


@checked(check_gather)
def gather(outputs: Sequence[Any], device: torch.device, dim: int = 0) -> Any:
    """Join the outputs of several devices on ``device``: the reverse of ``scatter``.

    Tensors without dimensions become a vector. Tuples, lists and dicts may be nested.
    Strings, numbers and None must be the same on all devices; nothing else is allowed.
    Gradients flow back.
    """
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return join_tensors(outputs, device, dim)
    if isinstance(first, dict):
        groups = [[output[key] for output in outputs] for key in first]
    elif isinstance(first, (tuple, list)):
        groups = zip(*outputs, strict=True)
    else:
        return first
    return rebuild(first, [gather(group, device, dim) for group in groups])


def join_tensors(
    tensors: Sequence[torch.Tensor], device: torch.device, dim: int
) -> torch.Tensor:
    """Move the tensors to ``device``, and join them there."""
    [device] = check_devices([device])
    dst = position(device, [tensor.device for tensor in tensors])
    there = [to_device(tensor, device, i, dst) for i, tensor in enumerate(tensors)]
    return torch.cat(there, dim) if there[0].dim() else torch.stack(there)


def _kind(output: Any) -> str:
    """Say in words what of ``output`` must be the same on all devices."""
    if isinstance(output, torch.Tensor):
        return "a tensor"
    if isinstance(output, dict):
        return f"a dict with the keys {sorted(output, key=repr)}"
    if isinstance(output, (tuple, list)) and not isinstance(output, PackedSequence):
        return f"a {type(output).__name__} of {len(output)}"
    if output is None or isinstance(output, (str, bytes, int, float)):
        return repr(output)
    raise TypeError(
        f"cannot gather a {type(output).__name__}: return tensors, or tuples of them"
    )


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """List the tensors of a nested structure, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (tuple, list, dict)):
        return [tensor for part in parts_of(tree) for tensor in tensors_of(part)]
    return []


def has_packed(tree: Any) -> bool:
    """Tell whether there is a PackedSequence in a nested structure."""
    if isinstance(tree, PackedSequence):
        return True
    return isinstance(tree, (tuple, list, dict)) and any(
        map(has_packed, parts_of(tree))
    )


def parts_of(tree: tuple | list | dict) -> list:
    """List the items of a tuple or list, or the values of a dict."""
    return list(tree.values() if isinstance(tree, dict) else tree)


def rebuild(tree: tuple | list | dict, parts: list) -> Any:
    """Return a tuple, list or dict of the type of ``tree``, around other parts."""
    if isinstance(tree, dict):
        like = copy(tree)  # of a defaultdict, say, with its factory
        for key, part in zip(tree, parts, strict=True):
            like[key] = part
        return like
    if isinstance(tree, PackedSequence):
        parts[1] = parts[1].cpu()  # batch_sizes, which torch wants there
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def position(device: torch.device, devices: Sequence[torch.device]) -> int | str:
    """Return where ``devices`` first names ``device``; else its name in the ledger."""
    if device in devices:
        return devices.index(device)
    return "host" if device.type == "cpu" else str(device)
