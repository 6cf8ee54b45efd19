"""Pictures for notebooks; read ``picture`` first.

``charts`` draws curves, bars, stacks and links with matplotlib, ``board`` a training run while it
runs. ``drawings``, ``iterations`` and ``thumbnails`` write SVG: schedules, timelines and
pipelines, the steps of an iteration, and images. A schedule has one colour in all.
"""

from .board import Board
from .charts import bars, curves, links, stacks
from .drawings import pipeline, schedule, timeline
from .iterations import iteration
from .picture import PALETTE, Picture
from .thumbnails import images
