"""d2lpar: how deep networks are trained on many devices, every part built by hand on torch.

Each room is one subject, from the ground up: ``collectives``, ``ranks``, ``data_parallel``,
``mixed_precision``, ``sharding``, ``pipeline``, ``tensor_parallel``, ``study``, ``plot``. A room,
and each of the names below, is loaded when it is first used.
"""

from importlib import import_module

__version__ = "2.0.0"

# Where a name of d2lpar lives. Those of __all__ come first, then names of the first edition.
_NAMES = (
    ("training", "train"),
    ("data", "load_data_fashion_mnist"),
    ("devices", "count_bytes try_all_gpus try_gpu"),
    ("ranks", "launch"),
    ("data_parallel", "DataParallel DataParallelCriterion DataParallelModel ChunkedLoss"),
    ("data_parallel", "DistributedDataParallel DistributedSampler SyncBatchNorm"),
    ("mixed_precision", "GradScaler autocast"),
    ("sharding", "ShardedOptimizer fully_shard"),
    ("pipeline", "DistributedPipeline Pipeline cut"),
    ("tensor_parallel", "ColumnParallelLinear RowParallelLinear"),
)
_EARLIER_NAMES = (
    ("devices", "Ledger choose_devices to_device"),
    ("data", "DataError read_idx"),
    ("network", "init_params lenet loss sgd"),
    ("checkpoint", "CheckpointError load_checkpoint save_checkpoint"),
    ("collectives", "Move direct halving_doubling recursive_doubling ring star tree"),
    ("collectives", "all_gather allreduce broadcast naive_allreduce reduce_scatter ring_allreduce"),
    ("ranks", "MismatchError PeerError RankError"),
    ("data_parallel", "NaiveDistributedDataParallel gather parallel_apply replicate scatter"),
    ("mixed_precision", "initialize"),
    ("pipeline", "Action SplitModel gpipe one_f_one_b sequential"),
    ("tensor_parallel", "vocab_parallel_cross_entropy"),
    ("training", "History accuracy get_params print_progress split_batch train_batch"),
)
_ROOMS = ("collectives", "ranks", "data_parallel", "mixed_precision", "sharding", "pipeline")
_ROOMS += ("tensor_parallel", "study", "plot")
__all__ = [*_ROOMS, *(name for _, names in _NAMES for name in names.split())]


def __getattr__(name: str):
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    if name == "move":  # what to_device was called in the first edition
        name = "to_device"
    for home, names in _NAMES + _EARLIER_NAMES:
        if name in names.split():
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return [*__all__, "__version__"]
