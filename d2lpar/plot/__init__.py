"""Pictures for notebooks; read ``picture`` first.

``charts`` draws with matplotlib: curves, bars, stacks, links, images and the live board. The others
write SVG by hand: ``steps`` who sends what to whom (a schedule, an iteration, data-parallel
training), ``spans`` what happens when (a timeline, a pipeline). A schedule has one colour in all.
"""

from .charts import Board, bars, curves, images, links, stacks
from .picture import PALETTE, Picture
from .spans import pipeline, timeline
from .steps import data_parallel, iteration, schedule
