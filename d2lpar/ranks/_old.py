"""What only the rooms of later chapters still need; their issues empty this file.

Ranks in rows and columns, and labelled messages for a pipeline.
"""

import json

import torch
import torch.distributed as dist

from ..collectives import check_tensor, kind_of
from .collectives import sendable
from .transport import MismatchError, group_of

Group = dist.ProcessGroup | None  # None: all ranks


def make_grid(
    num_rows: int, num_columns: int
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the process groups of this rank's row and column: called by all ranks.

    Rank r is in row r // num_columns: the ranks of a row are neighbours, usually on one
    machine.
    """
    world_size = dist.get_world_size()
    if num_rows < 1 or num_rows * num_columns != world_size:
        raise ValueError(
            f"{world_size} ranks do not make {num_rows} rows of {num_columns} columns"
        )
    places = torch.arange(world_size).view(num_rows, num_columns)
    row, _ = dist.new_subgroups_by_enumeration(places.tolist())
    column, _ = dist.new_subgroups_by_enumeration(places.T.tolist())
    return row, column


def send_labelled(
    tensor: torch.Tensor,
    dst: int,
    label: str,
    group=None,
    timeout: float | None = None,
    wants_gradient: bool = False,
) -> None:
    """Send a tensor with a label, which the receiver must expect."""
    group = group_of(group)
    check_tensor(tensor, "the tensor")
    member, deadline = group.member(dst), group.deadline(timeout)
    flat = sendable(tensor, group).cpu()
    with group.alone(f"send of {label!r} to rank {dst}", ("send", member)):
        note = f"0 send {kind_of(tensor)} {wants_gradient:d} {label}"
        group.tell({member: note}, [], deadline)
        group.exchange([(member, flat)], [], deadline)


def receive_labelled(
    src: int, label: str, device, group=None, timeout: float | None = None
) -> torch.Tensor:
    """Return on ``device`` what comes next; MismatchError if its label is another."""
    group = group_of(group)
    member, deadline = group.member(src), group.deadline(timeout)
    with group.alone(f"receive of {label!r} from rank {src}", ("receive", member)):
        _, plan = group.tell({}, [member], deadline)[member].split(" ", 1)
        if not plan.startswith("send "):
            group.broken = f"{label!r} was expected, but rank {src} says: {plan}"
            raise MismatchError(group.broken)
        kind, _, rest = plan.removeprefix("send ").partition("]")
        dtype, _, shape = kind.partition(" ")
        wants_gradient, found = rest.split(maxsplit=1)
        tensor = torch.empty(json.loads(shape + "]"), dtype=getattr(torch, dtype))
        group.exchange([], [(member, tensor.view(-1), None)], deadline)
    if found != label:
        raise MismatchError(
            f"rank {src} has sent {found!r}, but {label!r} was expected"
        )
    return tensor.to(device).requires_grad_(wants_gradient == "1")
