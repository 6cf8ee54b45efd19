"""A batch of any structure, split over devices, and joined again.

``scatter`` and ``gather`` are the first and the last of the four functions that make DataParallel.
Notebook 04 builds this file. Source: ``torch.nn.parallel.scatter`` and ``gather``, which need GPUs.
"""

import warnings
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ..devices import check_devices, to_device


def scatter(inputs: Any, devices: Sequence[torch.device], dim: int = 0) -> list[Any]:
    """Split every tensor of ``inputs`` along ``dim``; return a list of what each device gets.

    Tuples, lists and dicts, nested in any way, are rebuilt around the shards; what is no tensor
    goes to every device by reference. The shards differ by at most one row and keep the order; with
    fewer rows than devices the last ones are empty. A single device gets all as it is. Gradients
    flow back.

    Raises:
        ValueError: there is no device; there are several, and two tensors differ in their size
            along ``dim``, or one does not have that dimension.
        TypeError: ``devices`` is no list; there are several, and there is a PackedSequence.
    """
    devices = check_devices(devices)
    if len(devices) > 1:
        num_rows(inputs, dim)
    return _scatter(inputs, devices, dim)


def _scatter(inputs: Any, devices: list[torch.device], dim: int) -> list[Any]:
    k = len(devices)
    if isinstance(inputs, torch.Tensor):
        shards = [inputs] if k == 1 else _split(inputs, k, dim)
        src = position(inputs.device, devices)
        return [to_device(shards[i], devices[i], src, i) for i in range(k)]
    if isinstance(inputs, PackedSequence):
        if k > 1:
            raise TypeError("cannot split a PackedSequence by rows: pass padded sequences, lengths")
        return [inputs.to(devices[0])]  # its batch_sizes stay on the CPU
    if isinstance(inputs, (tuple, list, dict)):
        parts = [_scatter(part, devices, dim) for part in parts_of(inputs)]
        return [rebuild(inputs, [shards[i] for shards in parts]) for i in range(k)]
    return [inputs] * k


def _split(rows: torch.Tensor, k: int, dim: int) -> Sequence[torch.Tensor]:
    few, more = divmod(rows.shape[dim], k)
    shards = rows.split([few + (i < more) for i in range(k)], dim)
    if rows.requires_grad:  # autograd lets nobody write to such views, not even ReLU(inplace=True)
        return [shard.clone() for shard in shards]
    return shards


def num_rows(inputs: Any, dim: int = 0) -> int | None:
    """Return the size that all tensors of ``inputs`` have along ``dim``; None without tensors.

    Raises ValueError where they differ, or lack the dimension.
    """
    tensors = tensors_of(inputs)
    for tensor in tensors:
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(
                f"a tensor of shape {list(tensor.shape)} has no dimension {dim} to split: to give "
                "every device the same number, pass it as a Python number"
            )
        if tensor.shape[dim] != tensors[0].shape[dim]:
            shapes = [list(tensor.shape) for tensor in (tensors[0], tensor)]
            raise ValueError(
                f"tensors of shapes {shapes[0]} and {shapes[1]} differ in dimension {dim}, along "
                "which they are to be split; what all devices need alike can be a module's buffer"
            )
    return tensors[0].shape[dim] if tensors else None


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """List the tensors of a nested structure, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (tuple, list, dict)):
        return [tensor for part in parts_of(tree) for tensor in tensors_of(part)]
    return []


def parts_of(tree: tuple | list | dict) -> list:
    """List the items of a tuple or list, or the values of a dict."""
    return list(tree.values() if isinstance(tree, dict) else tree)


def rebuild(tree: tuple | list | dict, parts: list) -> Any:
    """Return a tuple, list or dict like ``tree``, of the same type, around other parts."""
    if isinstance(tree, dict):
        like = copy(tree)  # of a defaultdict, say, with its factory
        for key, part in zip(tree, parts, strict=True):
            like[key] = part
        return like
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def gather(outputs: Sequence[Any], device: torch.device, dim: int = 0) -> Any:
    """Join the outputs of several devices on ``device``: the reverse of ``scatter``.

    Tensors are joined along ``dim``; those without dimensions become a vector. Tuples, lists and
    dicts, nested in any way, are rebuilt around the results. Strings, numbers and None must be the
    same on all devices. Gradients flow back.

    Raises:
        ValueError: there is no output; or two differ in structure (the keys of dicts, the lengths
            of lists), in shape beyond ``dim``, or in what is no tensor.
        TypeError: an output is or holds an object of another type.
    """
    if not outputs:
        raise ValueError("outputs is empty: there is nothing to gather")
    [device] = check_devices([device])
    return gather_with(outputs, lambda *tensors: _join(tensors, device, dim))


def gather_with(outputs: Sequence[Any], join: Callable) -> Any:
    """Rebuild output 0 around what ``join`` makes of the tensors in the same place of each."""
    first, outlines = outputs[0], [_outline(output) for output in outputs]
    for i, outline in enumerate(outlines):
        if outline != outlines[0]:
            raise ValueError(f"output 0 is {outlines[0]}, but output {i} is {outline}")
    if isinstance(first, torch.Tensor):
        return join(*outputs)
    if isinstance(first, dict):
        return rebuild(
            first, [gather_with([output[key] for output in outputs], join) for key in first]
        )
    if isinstance(first, (tuple, list)):
        return rebuild(first, [gather_with(parts, join) for parts in zip(*outputs, strict=True)])
    return first


def _outline(output: Any) -> str:
    """Say in words what of ``output`` must be the same on all devices."""
    if isinstance(output, torch.Tensor):
        return "a tensor"
    if isinstance(output, dict):
        return f"a dict with the keys {sorted(output, key=repr)}"
    if isinstance(output, (tuple, list)) and not isinstance(output, PackedSequence):
        return f"a {type(output).__name__} of {len(output)}"
    if output is None or isinstance(output, (str, bytes, int, float, complex)):
        return repr(output)
    raise TypeError(f"cannot gather a {type(output).__name__}: return tensors, or tuples of them")


def _join(tensors: list[torch.Tensor], device: torch.device, dim: int) -> torch.Tensor:
    dst = position(device, [tensor.device for tensor in tensors])
    there = [to_device(tensor, device, i, dst) for i, tensor in enumerate(tensors)]
    if all(tensor.dim() == 0 for tensor in there):
        return torch.stack(there)
    shapes = [list(tensor.shape) for tensor in there]
    rows = [_row(shape, dim) for shape in shapes]
    if any(row is None or row != rows[0] for row in rows):
        words = ", ".join(map(str, shapes))
        raise ValueError(f"outputs of shapes {words} cannot be joined along dimension {dim}")
    return torch.cat(there, dim)


def _row(shape: list[int], dim: int) -> list[int] | None:
    """Return the shape without dimension ``dim``; None if it has no such dimension."""
    if not -len(shape) <= dim < len(shape):
        return None
    return [n for d, n in enumerate(shape) if d != dim % len(shape)]


def chosen_devices(
    device_ids: Sequence[int | str | torch.device] | None,
    devices: Sequence[torch.device] | None = None,
) -> tuple[list[torch.device], list[int | torch.device]]:
    """Return the devices that torch's ``device_ids`` names, and again with GPUs as numbers.

    None: all GPUs. Without any GPU, None and numbers name no device. ``devices`` is the first
    edition's name of ``device_ids``.
    """
    device_ids = renamed(device_ids, devices, stacklevel=4)
    gpus = range(torch.cuda.device_count())
    named = gpus if device_ids is None else device_ids
    if isinstance(named, Sequence) and not isinstance(named, str):
        if not gpus and (device_ids is None or named) and all(isinstance(d, int) for d in named):
            return [], []
        named = [torch.device("cuda", d) if isinstance(d, int) else d for d in named]
    chosen = check_devices(named)
    return chosen, [device.index if device.type == "cuda" else device for device in chosen]


def renamed(device_ids: Sequence | None, devices: Sequence | None, stacklevel: int = 3):
    """Return the one that was given; warn of the old name."""
    if devices is None:
        return device_ids
    if device_ids is not None:
        raise TypeError("devices is the old name of device_ids: pass one of them")
    warnings.warn("devices is now device_ids", DeprecationWarning, stacklevel)
    return devices


def position(device: torch.device, devices: Sequence[torch.device]) -> int | str:
    """Return where ``devices`` names ``device`` first; else what the ledger is to call it."""
    if device in devices:
        return devices.index(device)
    return "host" if device.type == "cpu" else str(device)
