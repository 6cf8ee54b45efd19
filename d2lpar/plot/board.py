"""The live board: loss and accuracy of a training run, drawn while it runs."""

import math
import statistics
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator

from .charts import DASHES, MARKERS, chart, new_figure, styled
from .picture import PALETTE, Picture, quantity


class Board:
    """The live board: ``train(…, on_progress=Board())`` draws loss and accuracy after every epoch.

    It updates one display, at most once in ``interval`` seconds and after a run's last epoch. Only
    then does it add the PNG, which takes longer. ``picture`` is what it drew last.
    """

    def __init__(self, title: str = "", interval: float = 0.3):
        self.title, self.interval = title, interval
        self.picture: Picture | None = None
        self._history = self._handle = None
        self._drawn = -math.inf

    def __call__(self, history: Any) -> None:
        """Draw ``history``: its loss, accuracy and seconds, each a list with a number per epoch."""
        epochs = len(history.loss)
        new_run = history is not self._history
        late = time.monotonic() - self._drawn >= self.interval
        last = epochs >= history.num_epochs
        if epochs == 0 or not (new_run or late or last):
            return
        self._history = history
        self.picture = _draw_board(history, self.title)
        exclude = () if last else ("image/png",)
        if new_run:
            self._handle = _display(self.picture, exclude)
        elif self._handle is not None:
            self._handle.update(self.picture, exclude=exclude)
        self._drawn = time.monotonic()


def _display(picture: Picture, exclude: Sequence[str]) -> Any:
    """Show the picture in the running notebook and return its handle; None outside of one."""
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        return None
    return ipython.display.display(picture, display_id=True, exclude=exclude)


@styled
def _draw_board(history: Any, title: str) -> Picture:
    figure = new_figure(270, layout="none")  # found in no time
    figure.subplots_adjust(0.05, 0.26, 0.98, 0.82 if title else 0.91)
    epochs = range(1, len(history.loss) + 1)
    words = [f"epoch {len(epochs)} of {history.num_epochs}"]
    halves = {"training loss": history.loss, "test accuracy": history.accuracy}
    for i, (name, values) in enumerate(halves.items()):
        axes, last = figure.add_subplot(1, 2, i + 1), f"{values[-1]:.3f}"
        axes.plot(epochs, values, color=PALETTE[i], marker=MARKERS[i], linestyle=DASHES[i])
        axes.set(xlabel="epoch", title=f"{name}: {last}", xlim=(0.5, history.num_epochs + 0.5))
        axes.set_ylim(0, 1 if i else None)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.grid()
        words.append(f"{name} {last}")
    words.append(f"{quantity(statistics.median(history.seconds), 'seconds')} per epoch")
    caption = f"{history.devices}; {history.hardware}; {words[-1]}"
    figure.supxlabel("\n".join(textwrap.wrap(caption, 110)), x=0.02, y=0.03, ha="left", fontsize=11)
    figure.suptitle(title, x=0.02, y=0.96, ha="left", fontweight="bold")
    return chart(figure, f"{title or 'Training'}: {', '.join(words)}; {history.devices}.")
