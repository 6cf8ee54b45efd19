"""The live board: when it draws, and where."""

import sys
from types import SimpleNamespace

from text_layout import texts

from d2lpar import plot


def history(epochs, num_epochs=10):
    columns = {
        "loss": [2 / (i + 1) for i in range(epochs)],
        "accuracy": [0.1] * (epochs - 1) + [0.4],
    }
    columns["seconds"] = [0.25, 9.0, 0.1, 0.2, 0.5, *[0.25] * epochs][:epochs]
    where = {"devices": "2 virtual devices", "hardware": "a machine with 2 cores"}
    return SimpleNamespace(**columns, **where, num_epochs=num_epochs)


def train(board, num_epochs, after_epoch=lambda: None):
    run = history(0, num_epochs)
    for epoch in range(num_epochs + 1):
        vars(run).update(vars(history(epoch, num_epochs)))
        board(run)
        after_epoch()


def test_the_board_updates_one_display_a_few_times_a_second_and_always_at_the_end(monkeypatch):
    """In what stands in for a running IPython, with a clock."""
    shown, updates, now = [], [], [100.0]

    def display(picture, display_id, exclude):
        shown.append((picture, exclude))
        return SimpleNamespace(update=lambda picture, exclude: updates.append((picture, exclude)))

    ipython = SimpleNamespace(get_ipython=object, display=SimpleNamespace(display=display))
    ipython.version_info = (9, 0)  # matplotlib asks
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    board = plot.Board()
    train(board, 10, lambda: now.append(now.pop() + 0.1))
    assert len(shown) == 1 and 2 <= len(updates) <= 4  # one second of epochs
    *live, (picture, exclude) = shown + updates
    assert "epoch 10 of 10" in picture.alt  # though 0.1 seconds after the one before
    assert board.picture is picture
    assert not exclude and {without for _, without in live} == {("image/png",)}  # it takes long
    train(board, 2)
    assert len(shown) == 2  # the second run has its own display
    assert "epoch 2 of 2" in updates[-1][0].alt and len(updates) <= 5


def test_the_board_says_where_it_ran_and_keeps_its_axis_and_its_picture():
    board = plot.Board("A run")
    board(history(0))
    assert board.picture is None  # nothing to draw yet
    board(history(5))
    words = texts(board.picture)
    assert "2 virtual devices; a machine with 2 cores; 250 ms per epoch" in words  # the median
    assert words.count("10") == 2  # both axes reach to the last epoch from the start
    assert "training loss: 0.400" in words
    assert "A run: epoch 5 of 10, training loss 0.400, test accuracy 0.400" in board.picture.alt
    run = history(2)
    run.loss = [float("nan"), float("inf")]
    board(run)
    assert "training loss inf" in board.picture.alt
