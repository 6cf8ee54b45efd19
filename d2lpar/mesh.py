"""Ranks in a grid with named axes: who shares what with whom.

Chapter 18 writes this file. Its source: torch's DeviceMesh.
"""

from collections import Counter
from math import prod

import torch
import torch.distributed as dist

from . import ranks


class Mesh:
    """All ranks as a grid of ``sizes``, {axis: number}; neighbours differ in the last.

    ``mesh["tp"]`` is the group of the ranks that differ from this one in tp alone,
    ``mesh["dp", "cp"]`` of those that differ in dp, in cp or in both. A group is made
    when it is first asked for, by all ranks of the mesh, and stays, like torch's.
    """

    def __init__(self, sizes):
        k, self.sizes = dist.get_world_size(), dict(sizes)
        ranks.agree(f"a mesh of {self.sizes}")
        if (size := prod(sizes.values())) != k:
            factors = " · ".join(f"{axis} {n}" for axis, n in sizes.items())
            raise ValueError(f"{factors} = {size} ranks, but there are {k}")
        self.grid = torch.arange(k).view(*sizes.values())
        self.place = self.place_of(dist.get_rank())
        self.groups = {(*range(k),): dist.group.WORLD}  # by their ranks

    def place_of(self, rank):
        """Return where a rank is, as {axis: place}."""
        found = (self.grid == rank).nonzero()[0].tolist()
        return dict(zip(self.sizes, found))

    def __getitem__(self, axes):
        axes = (axes,) if isinstance(axes, str) else axes
        if unknown := set(axes) - set(self.sizes):
            raise KeyError(f"the mesh has {list(self.sizes)}, and not {list(unknown)}")
        index = [slice(None) if a in axes else i for a, i in self.place.items()]
        own = tuple(self.grid[tuple(index)].flatten().tolist())
        if own not in self.groups:
            ranks.agree(f"a group along {axes}")
            numbers = [i for i, axis in enumerate(self.sizes) if axis in axes]
            axes_last = self.grid.movedim(numbers, [*range(-len(numbers), 0)])
            all_groups = axes_last.reshape(-1, len(own)).tolist()  # [[0, 2], …]
            self.groups[own], _ = dist.new_subgroups_by_enumeration(all_groups)
        return self.groups[own]

    def sent(self, ledger):
        """Return {axes: bytes} that this rank sent to ranks that differ in ``axes``."""
        sent = Counter()
        for (_, dst), nbytes in ledger.bytes.items():  # of what this rank sends
            there = self.place_of(dst)
            differ = [a for a in self.sizes if there[a] != self.place[a]]
            sent[" and ".join(differ)] += nbytes
        return dict(sent)
