"""Mixed precision: 16 bits where they are fast, 32 where they are needed, and a scaled loss.

Read ``casting`` first (which function computes in what), then ``grad_scaler`` (a loss that is
scaled), ``opt_levels`` (apex's O0 to O3, master weights) and ``predivision`` (sums in float16).
"""

from .casting import autocast
from .grad_scaler import GradScaler
from .opt_levels import MasterWeights, initialize
from .predivision import predivide
