"""Sharded training (ZeRO): a rank keeps a part of what all ranks keep in DDP.

Read ``shards`` first (a parameter's part on this rank), then ``optimizer``, where only
the state is divided (ZeRO-1). Gradients and parameters are divided too (ZeRO-2 and 3)
by ``units``, which are gathered before use and freed after it, ``addresses``, which
autograd keeps in place of parameters, ``traffic``, which puts messages in one order,
and ``sharded_module``, the entry. ``clipping`` takes a norm, ``full_state`` saves and
loads.
"""

from .addresses import Addresses
from .clipping import clip_grad_norm_
from .full_state import full_state_dict, load_full_state_dict
from .optimizer import ShardedOptimizer
from .sharded_module import FSDPModule, fully_shard
from .shards import Shard
from .traffic import Traffic
from .units import Unit
