"""d2lpar: how networks are trained on many devices, built by hand on torch.

All public names are here, as in ``d2lpar.train``, ``d2lpar.ring``. The figures,
``d2lpar.plot``, are imported on their own, since they need matplotlib.
"""

from . import ranks
from .batch_norm import SyncBatchNorm
from .checkpoint import load_checkpoint, save_checkpoint
from .collectives import (
    all_gather,
    allreduce,
    broadcast,
    reduce_scatter,
    ring_allreduce,
)
from .context_parallel import own_tokens, ring_attention, ulysses_attention
from .data import DataError, load_book, load_data_fashion_mnist, text_batch
from .data_parallel import DataParallel, gather, parallel_apply, replicate, scatter
from .ddp import DistributedDataParallel, NaiveDistributedDataParallel
from .devices import (
    Ledger,
    choose_devices,
    count_bytes,
    hardware,
    to_device,
    try_all_gpus,
    try_gpu,
)
from .experts import MixtureOfExperts, ParallelExperts, balance_loss
from .language_model import MeshTrainer
from .losses import ChunkedLoss, DataParallelCriterion, DataParallelModel
from .memory import peak_memory, saved_memory
from .mesh import Mesh, gpt_mesh
from .mixed_precision import GradScaler, MasterWeights, autocast, initialize
from .pipeline import DistributedPipeline, Pipeline, cut
from .pipeline_schedules import (
    bubble,
    clock,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble,
)
from .planning import Plan, fastest
from .ranks import MismatchError, PeerError, RankError, launch
from .sampler import DistributedSampler
from .schedules import (
    Move,
    cost,
    direct,
    halving_doubling,
    recursive_doubling,
    ring,
    star,
    tree,
    two_level,
    verify_allreduce,
)
from .sharding import (
    ShardedOptimizer,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
)
from .tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    cut_layers,
    vocab_parallel_cross_entropy,
)
from .training import (
    accuracy,
    get_params,
    init_params,
    lenet,
    loss,
    naive_allreduce,
    sgd,
    split_batch,
    train,
    train_batch,
)

__version__ = "3.0.0"
