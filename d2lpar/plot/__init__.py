"""Pictures for notebooks; read ``picture`` first.

``charts`` draws curves, bars, stacks and links with matplotlib, ``board`` a training run while it
runs. ``drawings`` and ``iterations`` write SVG: schedules, timelines, pipelines, images, and the
steps of an iteration. A schedule has one colour in all.
"""

from .board import Board
from .charts import bars, curves, links, stacks
from .drawings import images, pipeline, schedule, timeline
from .iterations import iteration
from .picture import PALETTE, Picture
