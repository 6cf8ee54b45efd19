"""Which examples a rank reads: an epoch is dealt out like cards, in turn.

All ranks shuffle alike, from the same seed, and rank r of k takes places r, r + k, r +
2k, … of the order. So nothing is sent, and k ranks with b examples each see together
one process's batch of k·b. Notebook 08 uses this file. Source:
``torch.utils.data.distributed.DistributedSampler``.
"""

from collections.abc import Iterator, Sized
from operator import index

import torch
import torch.distributed as dist
from torch.utils.data import Sampler


def check_sampler(k: int, rank: int, drop_last: bool, pad: bool) -> None:
    """Refuse a rank that is none of ``k``, and a contradiction."""
    if not 0 <= rank < k:
        raise ValueError(
            f"rank must be from 0 to num_replicas - 1 = {k - 1}, not {rank}"
        )
    if drop_last and not pad:
        raise ValueError(
            "drop_last leaves examples out, pad=False keeps each: choose one"
        )


class DistributedSampler(Sampler[int]):
    """The indices of the examples of one rank, for a ``DataLoader``'s ``sampler=``.

    They are torch's: all ranks have equally many; if examples do not suffice, the order
    starts again or, with ``drop_last``, is cut short. With ``pad=False``, which is
    ours, none is repeated, and a rank may have one less than rank 0, so a batch less:
    use ``DistributedDataParallel.join``. Call ``set_epoch`` before every epoch: without
    it, every epoch has the same order.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
    ):
        k = index(dist.get_world_size() if num_replicas is None else num_replicas)
        self.rank = index(dist.get_rank() if rank is None else rank)
        check_sampler(k, self.rank, drop_last, pad)
        self.dataset, self.shuffle, self.seed = dataset, shuffle, index(seed)
        self.num_replicas, self.drop_last, self.pad = k, drop_last, pad
        self.epoch = self.start = 0
        n = len(dataset)
        each = n // k if drop_last else -(-n // k)
        self.total_size = each * k if pad else n
        self.num_samples = len(range(self.rank, self.total_size, k))

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Take the order of ``epoch``, from this rank's example number ``start`` on.

        ``start``, which is ours, is for a resume: how many examples the training loop
        has used (a ``DataLoader`` with workers reads ahead). The next call resets it.
        """
        if not 0 <= start <= self.num_samples:
            raise ValueError(
                f"start must be from 0 to {self.num_samples}, not {start!r}"
            )
        self.epoch, self.start = index(epoch), index(start)

    def __len__(self) -> int:
        return self.num_samples - self.start

    def __iter__(self) -> Iterator[int]:
        n = len(self.dataset)
        # as torch's sampler
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = (
            torch.randperm(n, generator=generator) if self.shuffle else torch.arange(n)
        )
        if self.total_size > n:
            order = order.repeat(-(-self.total_size // n))
        own = order[self.rank : self.total_size : self.num_replicas]
        return iter(own[self.start :].tolist())
