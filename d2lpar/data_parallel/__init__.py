"""Data parallelism: each device or rank has a replica, and a part of each batch.

In one process, read ``scattering`` (split a batch, join outputs), ``replicas`` (call
copies of a module in threads), ``loss`` and ``chunks`` (a loss in parts). In many, read
``sampler``, ``buckets``, ``reducer`` and ``ddp``, which averages gradients in backward;
``state_sharing`` gives all ranks the same start, ``ddp_arguments`` checks, ``uneven``
is for ranks with fewer batches or rows, and ``batch_norm`` takes its statistics over
all ranks.
"""

from .batch_norm import SyncBatchNorm
from .buckets import Bucket
from .chunks import ChunkedLoss
from .ddp import DistributedDataParallel, NaiveDistributedDataParallel
from .ddp_arguments import check_module
from .loss import DataParallelCriterion
from .reducer import Reducer
from .replicas import DataParallel, DataParallelModel, parallel_apply, replicate
from .sampler import DistributedSampler
from .scattering import gather, scatter
from .state_sharing import share_state
from .uneven import Join
