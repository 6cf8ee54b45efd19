"""A sum over many ranks in float16: divided in part before, and in part after.

The largest float16 is 65,504: 64 gradients of 2,000 add up to more. If each is divided by 64 first,
the small ones are rounded to zero. The square root of the number of ranks before and again after
does half of either. ``dist.all_reduce``, and with it torch's DistributedDataParallel, adds in
float16. d2lpar's own collectives, and the buckets of its DistributedDataParallel, widen 16 bits to
float32 and need none of this. Notebook 08 uses
this file. Source: ``gradient_predivide_factor`` of apex's DistributedDataParallel, which NVIDIA
deleted in May 2025.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist


def predivide(factor: float) -> Callable[..., torch.futures.Future[torch.Tensor]]:
    """Return a communication hook that averages, with a division by ``factor`` before the sum.

    For ``model.register_comm_hook(process_group, predivide(factor))``, where ``model`` is torch's
    DistributedDataParallel or ours, and ``process_group`` None means all ranks. The sum over k
    ranks is divided by k / factor afterwards. 1 divides all at the end, k all at the beginning.

    Raises ValueError unless ``factor`` is positive and finite.
    """
    if not 0 < factor < math.inf:
        raise ValueError(f"factor has to be positive, not {factor}")

    def hook(process_group: dist.ProcessGroup | None, bucket: dist.GradBucket):
        k = dist.get_world_size(process_group)
        work = dist.all_reduce(bucket.buffer().div_(factor), group=process_group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0].div_(k / factor))

    return hook
