"""Pipelines: models cut into stages, batches into micro-batches, so that nobody idles.

Read ``schedules`` first: which stage does what when. ``partition`` cuts a model,
``stages`` runs a stage, ``local`` runs a schedule in one process, and ``distributed``
between ranks. ``counts`` knows what the mean of a loss divides by.
"""

from .distributed import DistributedPipeline
from .local import Pipeline, SplitModel
from .partition import balance, cut, layer_seconds
from .schedules import (
    Action,
    Span,
    bubble,
    check_pipeline,
    gpipe,
    live_counts,
    one_f_one_b,
    predict,
    sequential,
)
from .stages import Stage
