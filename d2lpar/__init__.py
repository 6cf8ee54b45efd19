"""d2lpar: how deep networks are trained on many devices, every part built by hand on torch.

The notebooks of this repository build what stands here; each file is one concept.
"""

from . import ranks
from .batch_norm import SyncBatchNorm
from .checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from .chunks import ChunkedLoss
from .collectives import (
    all_gather,
    allreduce,
    broadcast,
    naive_allreduce,
    reduce_scatter,
    ring_allreduce,
)
from .data import DataError, load_data_fashion_mnist, read_idx
from .data_parallel import DataParallel, DataParallelModel, parallel_apply, replicate
from .ddp import DistributedDataParallel, NaiveDistributedDataParallel
from .devices import Ledger, choose_devices, count_bytes, move, try_all_gpus, try_gpu
from .distributed_pipeline import DistributedPipeline
from .launcher import RankError, launch
from .mixed_precision import GradScaler, autocast, initialize
from .network import init_params, lenet, loss, sgd
from .parallel_loss import DataParallelCriterion
from .partition import cut
from .pipeline import Pipeline, SplitModel
from .pipeline_schedules import Action, gpipe, one_f_one_b, sequential
from .ranks import MismatchError, PeerError
from .sampler import DistributedSampler
from .scattering import gather, scatter
from .schedules import Move, direct, halving_doubling, recursive_doubling, ring, star, tree
from .tensor_parallel import ColumnParallelLinear, RowParallelLinear
from .training import (
    History,
    accuracy,
    get_params,
    print_progress,
    split_batch,
    train,
    train_batch,
)
from .vocab_parallel import vocab_parallel_cross_entropy

__version__ = "0.1.0"
