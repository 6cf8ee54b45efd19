"""A mesh has the groups of torch's DeviceMesh, and says who asks for another one."""

import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT, attempt

from d2lpar import Mesh, count_bytes, launch, ranks
from d2lpar.schedules import ring

members = dist.get_process_group_ranks
SIZES = [{"pp": 2, "dp": 2, "tp": 2}, {"dp": 3, "tp": 2}, {"cp": 1, "tp": 4}]


def groups_of(rank, k, sizes):
    dist.new_group([0, 1])  # of which others know nothing
    ours = Mesh(sizes)
    theirs = dist.init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))
    assert (*ours.place.values(),) == theirs.get_coordinate()
    first, *_, last = sizes
    for axes in (*zip(sizes), (first, last), (*sizes,)):
        part = theirs[axes] if len(axes) == 1 else theirs[axes]._flatten()
        assert members(ours.get_group(*axes)) == members(part.get_group())
    assert ours.get_group(first, last) is ours.get_group(first, last)
    return len(ours.groups)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_places_and_groups_are_torchs(sizes):
    k = torch.tensor([*sizes.values()]).prod().item()
    numbers = launch(groups_of, k, sizes, timeout=LIMIT)
    # three axes, two of them, all; where the same ranks meet, they share a group
    assert numbers == [{8: 5, 6: 3, 4: 2}[k]] * k


def mistakes(rank, k):
    mesh, other = Mesh({"dp": 2, "tp": 2}), Mesh({"tp": 2, "dp": 2})
    return [
        attempt(Mesh, {"pp": 3, "dp": 2, "tp": 1})[:2],
        attempt(Mesh, {"dp": 2, "tp": 2 + (rank == 1)})[:2],
        attempt(Mesh, {"dp": 2, "tp": 2} if rank < 2 else {"tp": 2, "dp": 2})[:2],
        attempt(lambda: mesh.get_group("dp", "cp"))[:2],
        attempt(lambda: mesh.get_group("dp" if rank else "tp"))[:2],
        attempt(lambda: (other if rank else mesh).get_group("tp"))[:2],
        attempt(lambda: members(mesh.get_group("tp")))[:2],
    ]


def test_what_is_wrong_is_named():
    for rank, found in enumerate(launch(mistakes, 4, timeout=LIMIT)):
        size, one, order, unknown, alone, mixed, good = found
        assert size == ("ValueError", "pp 3 · dp 2 · tp 1 = 6 ranks, but there are 4")
        assert one[0] == "MismatchError" and "{'dp': 2, 'tp': 3}" in one[1]
        assert order[0] == "MismatchError" and "{'tp': 2, 'dp': 2}" in order[1]
        assert unknown == ("ValueError", "the mesh has ['dp', 'tp'], and not ['cp']")
        assert alone[0] == "MismatchError" and "along ('tp',)" in alone[1]
        assert mixed[0] == "MismatchError" and "of {'tp': 2, 'dp': 2}" in mixed[1]
        assert good == ("ok", [rank // 2 * 2, rank // 2 * 2 + 1])  # as before


def send_along(rank, k, sizes):
    mesh = Mesh(sizes)
    with count_bytes() as ledger:
        for number, axes in enumerate([*zip(sizes), ("pp", "tp")], 1):
            data = torch.zeros(100 * number, dtype=torch.uint8)
            ranks.allreduce(data, ring, group=mesh.get_group(*axes))
    return mesh.sent(ledger)


def test_what_is_sent_is_known_by_axis():
    found = launch(send_along, 8, {"pp": 2, "dp": 2, "tp": 2}, timeout=LIMIT)
    for rank, sent in enumerate(found):
        # a ring of the four ranks 0, 1, 4, 5 goes along tp, and back along both
        along = {"tp": 600} if rank % 2 == 0 else {"pp and tp": 600}
        right = {"pp": 100, "dp": 200, "tp": 300}
        assert sent == right | {a: right.get(a, 0) + n for a, n in along.items()}
