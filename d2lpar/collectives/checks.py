"""What tensors a collective refuses: those that would give a wrong result, or lose one.

Errors name the positions and both values. Notebook 02 shows what would happen without them.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch


def check_tensors(data: Sequence[torch.Tensor]) -> None:
    """Refuse what is no list of dense tensors of one dtype, one per device."""
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
    """Refuse, by its ``name``, what is no tensor of numbers side by side, or wants a gradient."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is sparse ({tensor.layout}): pass its .to_dense()")
    if tensor.is_meta:
        raise ValueError(f"{name} is a meta tensor, which has no elements to send")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires gradients, which a collective does not record: pass its "
            ".grad or its .detach(), or call inside torch.no_grad()"
        )


def check_alike(values: Sequence, what: str) -> None:
    """Refuse values, of ``what`` each of a list of tensors has, that differ."""
    for i, value in enumerate(values):
        if value != values[0]:
            raise ValueError(f"data[0] has {what} {values[0]}, but data[{i}] has {what} {value}")


def check_memory(data: Sequence[torch.Tensor]) -> None:
    """Refuse tensors that share an element of memory: it would be reduced into itself."""
    spans = []  # (device, first byte, last byte) of every tensor that has elements
    for tensor in data:
        if tensor.numel():
            num_bytes = _reach(tensor) * tensor.element_size()
            spans.append((str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + num_bytes))
    spans.sort()
    if any(a[0] == b[0] and a[2] > b[1] for a, b in pairwise(spans)) or any(map(is_folded, data)):
        _check_elements(data)


def is_folded(tensor: torch.Tensor) -> bool:
    """Tell whether the strides leave room for two elements in one place: an expanded view, say."""
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return tensor.numel() > 0
        reach += (size - 1) * stride
    return False


def _reach(tensor: torch.Tensor) -> int:
    """Return the number of elements of memory from the tensor's first to its last, inclusive."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _check_elements(data: Sequence[torch.Tensor]) -> None:
    """Compare the address of every element: columns of one matrix interleave, but are apart."""
    addresses, owners = [], []
    for i, tensor in enumerate(data):
        offsets = torch.arange(_reach(tensor)).as_strided(tensor.shape, tensor.stride())
        addresses.append(tensor.data_ptr() + offsets.reshape(-1) * tensor.element_size())
        owners.append(torch.full((tensor.numel(),), i))
    sorted_addresses, order = torch.cat(addresses).sort()
    clashes = (sorted_addresses.diff() < data[0].element_size()).nonzero()
    if len(clashes):
        first = int(clashes[0])
        i, j = sorted(torch.cat(owners)[order[first : first + 2]].tolist())
        raise ValueError(_shared_memory(data, i, j))


def _shared_memory(data: Sequence[torch.Tensor], i: int, j: int) -> str:
    if i == j:
        strides = data[i].stride()
        return f"data[{i}] is an expanded view (strides {strides}): pass its .clone()"
    if data[i] is data[j]:
        return f"data[{i}] and data[{j}] are the same tensor: pass a copy for each device"
    places = [f"data[{n}] (storage offset {data[n].storage_offset()})" for n in (i, j)]
    return f"{places[0]} and {places[1]} share memory: pass a copy for each device"
