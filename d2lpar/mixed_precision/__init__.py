"""Mixed precision: 16 bits where they are fast, 32 where needed, and a scaled loss.

Read ``casting`` first (which function computes in what), then ``grad_scaler`` (a loss
that is scaled, a sum that is divided in two parts) and ``opt_levels`` (apex's O0 to O3,
master weights).
"""

from .casting import autocast
from .grad_scaler import GradScaler, predivide
from .opt_levels import MasterWeights, initialize
