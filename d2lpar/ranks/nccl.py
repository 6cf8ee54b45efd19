"""How messages travel between GPUs: NCCL's, where a process group has them.

We have not run this between GPUs: the tests run it over gloo. Source: torch's
batch_isend_irecv.
"""

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from .transport import DATA, Messages, Work


class NcclMessages(Messages):
    """NCCL's messages, for groups that have it: CUDA tensors stay on the GPU.

    NCCL wants all messages of a step in one batch, which is waited for as a whole.
    Notes and CPU tensors travel by the group's backend for the CPU, if it has one.
    """

    piece_bytes = sys.maxsize  # no piece would arrive before the others

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group)
        if "cpu" not in _backends(group):
            self.device = _gpu_of(group)

    def home(self, tensor: torch.Tensor) -> torch.device:
        """Return the tensor's GPU; for a CPU tensor, where notes lie."""
        return tensor.device if self._is_batched(tensor) else self.device

    def _post(
        self, moves: list[tuple[Callable, torch.Tensor, int]], tag: int = DATA
    ) -> list[Work]:
        if not moves or not self._is_batched(moves[0][1]):
            return super()._post(moves, tag)
        peers = [self.world_ranks[peer] for *_, peer in moves]
        batch = [
            dist.P2POp(kind, t, self.world_ranks[peer], self.group)
            for kind, t, peer in moves
        ]
        works = dist.batch_isend_irecv(batch)  # NCCL has one work for all
        return [(peers, work) for work in works] * (len(moves) // len(works))

    def _is_batched(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda


def messages_for(group: dist.ProcessGroup) -> Messages:
    """Return the messages of a group: NCCL's where it has that for GPUs."""
    return (NcclMessages if _backends(group).get("cuda") == "nccl" else Messages)(group)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return which backend sends the tensors of which kind of device."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def _gpu_of(group: dist.ProcessGroup) -> torch.device:
    """Return a group's GPU, or that of the local rank: not the thread's current one."""
    if group.bound_device_id:
        return group.bound_device_id
    number = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    return torch.device("cuda", number % torch.cuda.device_count())
