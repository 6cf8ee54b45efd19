"""Chapter 18. Ranks in a grid with named axes, and who shares what with whom.

Its source: torch's DeviceMesh.
"""

from collections import Counter
from math import prod

import torch
import torch.distributed as dist

from . import ranks


class Mesh:
    """All ranks as a grid of ``sizes``, {axis: number}; the last axis varies fastest.

    ``get_group("tp")`` has the ranks that differ from this one in tp alone,
    ``get_group("dp", "cp")`` those that differ in dp, in cp or in both. A group is made
    by all ranks of the mesh, at the first request, and, like torch's, stays.
    Meshes may share their ``groups``.
    """

    def __init__(self, sizes, groups=None):
        k = dist.get_world_size()
        ranks.agree(f"a mesh of {sizes}")
        if (size := prod(sizes.values())) != k:
            factors = " · ".join(f"{axis} {n}" for axis, n in sizes.items())
            raise ValueError(f"{factors} = {size} ranks, but there are {k}")
        self.sizes, self.grid = dict(sizes), torch.arange(k).view(*sizes.values())
        self.place = self.place_of(dist.get_rank())
        self.groups = {} if groups is None else groups  # by their ranks
        self.groups[tuple(range(k))] = dist.group.WORLD

    def place_of(self, rank):
        """Return where a rank is, as {axis: place}."""
        found = (self.grid == rank).nonzero()[0].tolist()
        return dict(zip(self.sizes, found))

    def get_group(self, *axes):
        """Return this rank's group along axes. A collective call: all ranks make it."""
        if unknown := set(axes) - set(self.sizes):
            raise ValueError(f"the mesh has {[*self.sizes]}, and not {sorted(unknown)}")
        along = [i for i, axis in enumerate(self.sizes) if axis in axes]
        others = [i for i, axis in enumerate(self.sizes) if axis not in axes]
        size = prod(self.grid.shape[i] for i in along)
        rows = self.grid.permute(*others, *along).reshape(-1, size)  # a group in each
        [own] = [tuple(row) for row in rows.tolist() if dist.get_rank() in row]
        if own not in self.groups:  # one row fixes the others: all decide alike
            ranks.agree(f"a group along {axes} of {self.sizes}")
            self.groups[own], _ = dist.new_subgroups_by_enumeration(rows.tolist())
        return self.groups[own]

    def sent(self, ledger):
        """Return the bytes that this rank sent, {"tp": …, "dp and tp": …}."""
        along = Counter()
        for (_, dst), nbytes in ledger.bytes.items():  # of what this rank sends
            there = self.place_of(dst)
            differ = [a for a in self.sizes if there[a] != self.place[a]]
            along[" and ".join(differ)] += nbytes
        return dict(along)


def gpt_mesh(pp=1, dp=1, ep=1, cp=1, tp=1, groups=None):
    """Return a mesh with all axes of a GPT; tp, waited for most often, is innermost."""
    return Mesh({"pp": pp, "dp": dp, "ep": ep, "cp": cp, "tp": tp}, groups)


def copied_along(param, mesh):
    """Return the axes along which ranks have copies of a parameter of a cut GPT."""
    expert, part = hasattr(param, "is_expert"), hasattr(param, "cut_dim")
    differ = {"pp": True, "ep": expert, "tp": part}  # here ranks have other parameters
    return [axis for axis in mesh.sizes if not differ.get(axis)]
