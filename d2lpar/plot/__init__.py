"""Pictures for notebooks; read ``picture`` first.

``charts`` draws with matplotlib: curves, bars, stacks, links, images and the live board. Written by
hand are ``drawings`` (a schedule, a timeline, a pipeline over time) and ``iterations``. A schedule
has one colour in all.
"""

from .charts import Board, bars, curves, images, links, stacks
from .drawings import pipeline, schedule, timeline
from .iterations import iteration
from .picture import PALETTE, Picture
