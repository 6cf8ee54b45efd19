"""Chapter 08. Which examples a rank reads: an order is dealt out like cards.

All ranks shuffle alike, from the same seed, so nothing is sent. Rank r of k takes the
places r, r + k, r + 2k, … of the order: k ranks with b rows each see together what one
process sees in a batch of k·b rows. Source: torch's class of this name.
"""

import torch
import torch.distributed as dist
from torch.utils.data import Sampler


class DistributedSampler(Sampler):
    """The numbers of one rank's examples, for a ``DataLoader``'s ``sampler=``.

    They are those of torch's class. All ranks get equally many: where examples are
    missing for that, the order begins again, or it is cut with ``drop_last``. With
    ``pad=False``, which torch's class lacks, each example is dealt out once, and some
    ranks get one less. Call ``set_epoch`` before each epoch, for another order.
    """

    def __init__(
        self,
        dataset,
        num_replicas=None,
        rank=None,
        shuffle=True,
        seed=0,
        drop_last=False,
        *,
        pad=True,
    ):
        k = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        if not 0 <= self.rank < k:
            raise ValueError(f"rank {self.rank} is none of 0 to {k - 1}")
        if drop_last and not pad:
            raise ValueError("drop_last leaves examples out, pad=False keeps all")
        self.dataset, self.num_replicas, self.epoch = dataset, k, 0
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        n = len(dataset)
        each = n // k if drop_last else -(-n // k)  # -(-n // k): rounded up
        self.total_size = each * k if pad else n  # places that are dealt out

    def set_epoch(self, epoch):
        """Take the order of this epoch from now on."""
        self.epoch = epoch

    def __len__(self):
        return len(range(self.rank, self.total_size, self.num_replicas))

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.arange(len(self.dataset))
        if self.shuffle:
            order = torch.randperm(len(order), generator=generator)
        # from its beginning again, where places are missing
        order = order.repeat(-(-self.total_size // max(len(order), 1)))
        return iter(order[self.rank : self.total_size : self.num_replicas].tolist())
