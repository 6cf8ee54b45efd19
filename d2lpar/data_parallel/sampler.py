"""Which examples a rank reads: every epoch is dealt out like cards, one to each rank in turn.

All ranks shuffle alike, from the same seed, and rank r of k takes places r, r + k, r + 2k, … of
the order. So nothing has to be sent, and k ranks with b examples each see together the very batch
of k·b examples that one process would see.

Notebook 05 builds this file. Source: torch's ``torch.utils.data.distributed.DistributedSampler``,
whose sequences these are.
"""

import math
import operator
from collections.abc import Iterator, Sized

import torch
import torch.distributed as dist
from torch.utils.data import Sampler


class DistributedSampler(Sampler[int]):
    """The indices of the examples of one rank, for a ``DataLoader``'s ``sampler=``.

    All ranks have equally many, as with torch's: where the examples do not suffice, the order is
    continued from its beginning. With ``pad=False`` no example is repeated, and a rank may have one
    less than rank 0, and so a batch less: a loop with a collective call in every batch must then
    let all ranks make as many steps as rank 0, or use ``DistributedDataParallel.join``.

    Call ``set_epoch`` before every epoch: without it, every pass has the same order.

    Args:
        dataset: the examples, or anything else with their number as its length.
        num_replicas: the number of ranks. None: as many as are in the default process group.
        rank: the rank that reads. None: this process's rank in the default process group.
        shuffle: False keeps the order of the data set, in every epoch.
        seed: of the order of the examples; it must be the same on all ranks.
        drop_last: leave out the last examples of the order, instead of repeating some.
        pad: False deals out each example exactly once. This is ours, not torch's.

    Attributes:
        num_samples: how many examples this rank has in an epoch.
        total_size: how many all ranks have together.

    Raises:
        TypeError: the data set has no length.
        ValueError: num_replicas, rank or seed is not a whole number, or out of range; ``drop_last``
            is set and ``pad`` is not.
        RuntimeError: num_replicas or rank is None, and there is no default process group.
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
        if not hasattr(dataset, "__len__"):
            kind = type(dataset).__name__
            raise TypeError(f"dataset must have a length, as range(10) has; {kind} has none")
        if None in (num_replicas, rank) and not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "there is no process group to ask for num_replicas and rank: pass both, or call "
                "torch.distributed.init_process_group first"
            )
        if drop_last and not pad:
            raise ValueError("drop_last leaves examples out, pad=False keeps each: choose one")
        self.dataset, self.shuffle, self.drop_last, self.pad = dataset, shuffle, drop_last, pad
        k = dist.get_world_size() if num_replicas is None else num_replicas
        self.num_replicas = k = _whole("num_replicas", k, 1)
        self.rank = _whole("rank", dist.get_rank() if rank is None else rank, 0, k - 1)
        self.seed = _whole("seed", seed)
        self.epoch = self.start = 0
        n = len(dataset)
        each = n // k if drop_last else -(-n // k)
        self.total_size = each * k if pad else n
        self.num_samples = len(range(self.rank, self.total_size, k))

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Take the order of ``epoch``, from this rank's example number ``start`` on.

        ``start``, which torch's has not, is for a resume in the middle of an epoch: how many of its
        examples this rank has used already. It holds until the next ``set_epoch``. The sampler does
        not count them itself: a ``DataLoader`` with workers reads ahead, so only the training loop
        knows what was used.

        Raises:
            ValueError: epoch or start is not a whole number, or start is out of range.
        """
        epoch = _whole("epoch", epoch)
        self.start = _whole("start", start, 0, self.num_samples)
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples - self.start

    def __iter__(self) -> Iterator[int]:
        n = len(self.dataset)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)  # as torch's sampler
        order = torch.randperm(n, generator=generator) if self.shuffle else torch.arange(n)
        if self.total_size > n:
            order = order.repeat(-(-self.total_size // n))
        own = order[self.rank : self.total_size : self.num_replicas]
        return iter(own[self.start :].tolist())


def _whole(name: str, value, least: float = -math.inf, most: float = math.inf) -> int:
    """Return a whole number of Python's or numpy's as an int, if it is in range."""
    try:
        number = operator.index(value)
    except TypeError:
        number = math.nan
    if not least <= number <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
    return number
