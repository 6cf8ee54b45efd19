"""What only notebooks use: they measure and predict. Read the files in any order.

``layers`` are networks that are cut over ranks, ``splits`` predicts a step in each way
to split one, ``methods`` puts all methods of the book side by side, and ``checks`` says
whether an exercise is solved.
"""

from .checks import exercise
from .methods import METHODS, PUBLISHED, RESNET50_BYTES
from .splits import SPLITS, Machine, cost_of, profile
