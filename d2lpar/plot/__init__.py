"""Pictures for notebooks.

``board`` draws with matplotlib: curves, bars, stacks, links, images and the live board. The others
write SVG by hand: ``drawing`` a schedule or a timeline, ``gantt`` a pipeline over time, ``figures``
the book's own figures, ``number_formats`` what 16 and 32 bits can hold.
"""

from .board import Board, bars, curves, images, links, stacks
from .drawing import schedule, timeline
from .figures import columns_and_rows, data_parallel, iteration, ranks_and_nodes, three_splits
from .gantt import pipeline
from .number_formats import number_lines
