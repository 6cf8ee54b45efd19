"""Which examples a rank reads: every epoch is dealt out like cards, each example to one rank.

All ranks shuffle alike, from the same seed, and rank r of k takes places r, r + k, r + 2k, … of
the order. So nothing has to be sent, and k ranks with b examples each see together the very batch
of k·b examples that one process would see.

Notebook 05 builds this file. Source: torch's ``torch.utils.data.distributed.DistributedSampler``,
which makes all ranks equally long by repeating or dropping examples; here each counts once.
"""

from collections.abc import Iterator, Sized

import torch
import torch.distributed as dist
from torch.utils.data import Sampler


class DistributedSampler(Sampler[int]):
    """The indices of the examples of one rank, for a ``DataLoader``'s ``sampler=``.

    Every epoch is a partition: no example is repeated, none is dropped, and the ranks' lengths
    differ by at most one. So a rank may have one batch less than rank 0: a loop with a collective
    call in every batch must let all ranks make as many steps as rank 0.

    Call ``set_epoch`` before every epoch: without it, every pass has the same order.

    Args:
        dataset: the examples, or anything else with their number as its length.
        num_replicas: the number of ranks. None: as many as are in the default process group.
        rank: the rank that reads. None: this process's rank in the default process group.
        shuffle: False keeps the order of the data set, in every epoch.
        seed: of the order of the examples; it must be the same on all ranks.

    Raises:
        TypeError: the data set has no length.
        ValueError: num_replicas, rank or seed is not a whole number, or out of range.
        RuntimeError: num_replicas or rank is None, and there is no default process group.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ):
        if not hasattr(dataset, "__len__"):
            kind = type(dataset).__name__
            raise TypeError(f"dataset must have a length, as range(10) has; {kind} has none")
        if None in (num_replicas, rank) and not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "there is no process group to ask for num_replicas and rank: pass both, or call "
                "torch.distributed.init_process_group first"
            )
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
        if type(num_replicas) is not int or num_replicas < 1:
            raise ValueError(
                f"num_replicas must be a whole number of at least 1, not {num_replicas!r}"
            )
        if type(rank) is not int or not 0 <= rank < num_replicas:
            raise ValueError(
                f"rank must be a whole number from 0 to {num_replicas - 1}, not {rank!r}"
            )
        if type(seed) is not int:
            raise ValueError(f"seed must be a whole number, not {seed!r}")
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle, self.seed = shuffle, seed
        self.epoch = self.start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Take the order of ``epoch``, from this rank's example number ``start`` on.

        ``start`` is for a resume in the middle of an epoch: how many of its examples this rank has
        used already. It holds until the next ``set_epoch``. The sampler does not count them itself:
        a ``DataLoader`` with workers reads ahead, so only the training loop knows what was used.

        Raises:
            ValueError: epoch or start is not a whole number, or out of range.
        """
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch must be a whole number of at least 0, not {epoch!r}")
        num_own = len(self._places())
        if type(start) is not int or not 0 <= start <= num_own:
            raise ValueError(
                f"start must be a whole number from 0 to {num_own}, the number of examples of "
                f"rank {self.rank}, not {start!r}"
            )
        self.epoch, self.start = epoch, start

    def _places(self) -> range:
        return range(self.rank, len(self.dataset), self.num_replicas)

    def __len__(self) -> int:
        return len(self._places()) - self.start

    def __iter__(self) -> Iterator[int]:
        n = len(self.dataset)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)  # as torch's sampler
        order = torch.randperm(n, generator=generator) if self.shuffle else torch.arange(n)
        own = order[self.rank :: self.num_replicas]
        return iter(own[self.start :].tolist())
