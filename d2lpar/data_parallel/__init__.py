"""Data parallelism: a replica of the module on every device or rank, and a part of each batch.

One process: ``scattering`` splits a batch and joins outputs, ``replicas`` calls copies of a module,
``loss`` and ``chunks`` compute the loss in parts. Many processes: ``sampler`` deals out examples;
``ddp`` averages gradients, with ``ddp_arguments``, ``state_sharing``, ``buckets``, ``reducer``, and
``uneven`` for ranks with fewer batches or rows; ``batch_norm`` takes all ranks' statistics.
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
