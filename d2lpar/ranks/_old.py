"""What only the rooms of later chapters still need; their issues empty this file.

Ranks in rows and columns.
"""

import torch
import torch.distributed as dist


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
