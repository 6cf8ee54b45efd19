"""Layers that are cut: each rank or device computes a part of every layer.

Read ``layers`` first, which cuts linear layers by columns and rows between ranks.
``vocabulary`` computes the cross-entropy of logits that are cut by class. ``channels``
cuts LeNet over devices, as AlexNet was cut.
"""

from .channels import split_channels, split_lenet
from .layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelLeNet,
    TensorParallelMLP,
    copy_to_group,
    reduce_from_group,
)
from .vocabulary import vocab_parallel_cross_entropy
