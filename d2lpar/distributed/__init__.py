"""Distributed data parallel: each rank has a replica, and a part of each batch.

Read ``sampler``, ``buckets``, ``reducer`` and ``ddp``, which averages gradients in
backward; ``state_sharing`` gives all ranks the same start, ``ddp_arguments`` checks,
``uneven`` is for ranks with fewer batches or rows, and ``batch_norm`` takes its
statistics over all ranks.
"""

from .batch_norm import SyncBatchNorm
from .buckets import Bucket
from .ddp import DistributedDataParallel, NaiveDistributedDataParallel
from .ddp_arguments import check_module
from .reducer import Reducer
from .sampler import DistributedSampler
from .state_sharing import share_state
from .uneven import Join
