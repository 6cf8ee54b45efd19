"""Ranks in rows and columns, for two ways of splitting at once.

A row works on one replica of the model, cut among its ranks; a column averages the
gradients of one part of it. Notebook 17 uses this file. Source:
``torch.distributed.device_mesh``.
"""

import torch
import torch.distributed as dist

from ..guards import checked


def check_grid(num_rows, num_columns) -> None:
    """Refuse a grid that does not hold each rank once."""
    world_size = dist.get_world_size()
    if num_rows < 1 or num_rows * num_columns != world_size:
        raise ValueError(
            f"{world_size} ranks do not make {num_rows} rows of {num_columns} columns"
        )


@checked(check_grid)
def make_grid(
    num_rows: int, num_columns: int
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the process groups of this rank's row and column: called by all ranks.

    Rank r is in row r // num_columns: the ranks of a row are neighbours, usually on one
    machine.
    """
    places = torch.arange(dist.get_world_size()).view(num_rows, num_columns)
    row, _ = dist.new_subgroups_by_enumeration(places.tolist())
    column, _ = dist.new_subgroups_by_enumeration(places.T.tolist())
    return row, column
