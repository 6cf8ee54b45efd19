"""Charts, images and the live board: their words, their values and what they refuse."""

import base64
import io
import sys
import types

import numpy as np
import pytest
import text_layout
import torch
from PIL import Image
from text_layout import elements, texts

from d2lpar import plot
from d2lpar.plot import charts


def history(epochs, num_epochs=10):
    return types.SimpleNamespace(
        loss=[2.0 / (i + 1) for i in range(epochs)],
        accuracy=[0.1 * i for i in range(epochs)],
        seconds=[0.25, 9.0, 0.1, 0.2, 0.5, *[0.25] * epochs][:epochs],
        devices="2 virtual devices",
        hardware="a machine with 2 cores",
        num_epochs=num_epochs,
    )


def test_links_shows_every_link_with_its_bytes_the_largest_first():
    picture = plot.links({("host", 0): 1000, (0, 1): 500, (1, 0): 2_000_000})
    words = texts(picture)
    names = [word for word in words if "→" in word]
    assert names == ["1 → 0", "host → 0", "0 → 1"]  # from the top down
    assert picture.figure.axes[0].yaxis_inverted()
    assert picture.alt == "Bytes per link. : 1 → 0 2 MB, host → 0 1 kB, 0 → 1 500 B."


def test_links_compared_show_what_a_link_does_not_carry():
    picture = plot.links({"star": {(0, 2): 4_000_000, (2, 0): 1_500}, "ring": {(0, 1): 9_000}})
    assert {"star", "ring"} <= set(texts(picture))
    assert picture.alt == (
        "Bytes per link. star: 0 → 2 4 MB, 0 → 1 0 B, 2 → 0 1.5 kB. "
        "ring: 0 → 2 0 B, 0 → 1 9 kB, 2 → 0 0 B."
    )


def test_many_links_are_added_up_per_device():
    everyone = {(a, b): 1_000 * (a + 1) for a in range(8) for b in range(8) if a != b}
    picture = plot.links(everyone)
    assert not [word for word in texts(picture) if "→" in word]
    assert "7 sends 56 kB" in picture.alt  # 7 times 8 kB
    assert "7 receives 28 kB" in picture.alt  # 1 + 2 + … + 7 kB
    assert "0 receives 35 kB" in picture.alt  # 2 + 3 + … + 8 kB
    assert "17 receives 1 kB" in plot.links({(0, i): 1000 for i in range(1, 18)}).alt


def test_bars_and_stacks_carry_names_values_and_parts():
    picture = plot.bars({"a": 0.00123, "b": (2.0, 1.5, 2.5)}, x_label="time", unit="seconds")
    assert {"a", "b", "1.23 ms", "2 s (1.5 s to 2.5 s)", "time"} <= set(texts(picture))
    assert picture.alt == "Bars: time. a 1.23 ms, b 2 s (1.5 s to 2.5 s)."
    assert [bar.get_width() for bar in picture.figure.axes[0].patches] == [0.00123, 2.0]
    values = {"device 0": {"kept": 3_000_000, "sent": 1_000_000}, "device 1": {"sent": 500}}
    picture = plot.stacks(values, x_label="memory", unit="bytes", title="All")
    words = {"device 0", "device 1", "4 MB", "500 B", "kept", "sent", "memory"}
    assert words <= set(texts(picture))
    assert picture.alt == (
        "Bars: All. device 0 4 MB (kept 3 MB, sent 1 MB); device 1 500 B (sent 500 B)."
    )


def test_parts_of_a_stack_lie_side_by_side_in_the_colour_and_hatch_of_their_kind():
    axes = plot.stacks({"a": {"x": 1, "y": 3}, "b": {"y": 2}}).figure.axes[0]
    parts = [(p.get_x(), p.get_width(), p.get_facecolor(), p.get_hatch()) for p in axes.patches]
    x, nothing, y, other = parts  # x of all and then y of all
    assert x[:2] == (0, 1) and nothing[1] == 0 and y[:2] == (1, 3) and other[:2] == (0, 2)
    assert x[2:] == nothing[2:] != y[2:] == other[2:] and x[3] != y[3]


def test_curves_have_labels_units_and_different_dashes():
    sizes = [10**i for i in range(3, 9)]
    series = {name: (sizes, [1e-9 * i * x for x in sizes]) for i, name in enumerate("abcd", 1)}
    picture = plot.curves(
        series, "size", "time", log_x=True, log_y=True, x_unit="bytes", y_unit="seconds"
    )
    words = texts(picture)
    assert {"a", "b", "c", "d", "size", "time", "1 MB", "10 ms"} <= set(words)
    assert [word for word in words if word in series] == list("dcba")  # as the curves end
    assert "a: from 1 µs at 1 kB to 100 ms at 100 MB" in picture.alt
    assert len({str(dash) for dash in charts.DASHES}) == len(set(charts.MARKERS)) == 8


def test_the_numbers_along_an_axis_are_those_of_the_devices_and_keep_apart():
    words = texts(plot.curves({"a": ([2, 4, 8], [0.1, 0.2, 0.3])}, "k", "y", log_x=True))
    assert [word for word in words if word in ("2", "3", "4", "5", "8")] == ["2", "4", "8"]
    xs = [1, 2, 4, 8, 1000, 1001]
    curves = plot.curves({"a": (xs, xs)}, "x", "y", log_x=True)
    links = plot.links({name: {(0, 1): 150_000_000} for name in "abcd"})
    for picture in (curves, links):
        assert list(text_layout.complaints(picture.svg)) == []


def test_images_are_pixels_in_rows_with_titles_where_0_is_white():
    X = torch.rand(10, 1, 28, 28)
    X[3, 0, 0, :3] = torch.tensor([0.0, 0.25, 1.0])
    picture = plot.images(X, titles=[f"title {i}" for i in range(10)], columns=4)
    assert texts(picture) == [f"title {i}" for i in range(10)]
    assert plot.images(X[:, 0], columns=4).svg == plot.images(X, columns=4).svg
    drawn = elements(picture, "image")
    png = drawn[3].get("{http://www.w3.org/1999/xlink}href").partition(",")[2]
    pixels = np.array(Image.open(io.BytesIO(base64.b64decode(png))))
    assert pixels.shape == (28, 28) and pixels[0, :3].tolist() == [255, 191, 0]
    places = [(float(one.get("x")) // 190, float(one.get("y")) // 210) for one in drawn]
    assert places == [(i % 4, i // 4) for i in range(10)]
    for image, title in zip(drawn, elements(picture, "text"), strict=True):
        left, width = float(image.get("x")), float(image.get("width"))
        assert left + width / 2 == float(title.get("x"))
        assert 0 < float(image.get("y")) - float(title.get("y")) < 12  # it stands above


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot.bars({}), "0 bars"),
        (lambda: plot.links({}), "0 bars"),
        (lambda: plot.stacks({"a": {}}), "0 kinds of parts, but 1 to 8"),
        (lambda: plot.stacks({"a": dict.fromkeys(range(9), 1)}), "9 kinds of parts"),
        (lambda: plot.curves({}, "x", "y"), "0 series"),
        (lambda: plot.curves({str(i): ([1], [1]) for i in range(9)}, "x", "y"), "9 series"),
        (lambda: plot.curves({"a": ([1, 2, 3], [1, 2])}, "x", "y"), "'a' has 3 x .* 2 y"),
        (lambda: plot.curves({"a": ([], [])}, "x", "y"), "'a' has 0 x .* 0 y"),
        (lambda: plot.curves({"a": ([0, 1], [1, 1])}, "x", "y", log_x=True), "cannot show 0"),
        (lambda: plot.images(torch.rand(3, 1, 28, 28), ["a"]), "3 images and 1 titles"),
        (lambda: plot.images(torch.rand(0, 1, 28, 28)), "0 images"),
    ],
)
def test_what_cannot_be_drawn_is_an_error_with_the_numbers(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


class Notebook:
    """Stands in for a running IPython, with a clock: keeps what is displayed and updated."""

    def __init__(self, monkeypatch):
        self.shown, self.updates, self.excluded, self.seconds = [], [], [], 100.0
        display = types.SimpleNamespace(display=self.display)
        module = types.SimpleNamespace(get_ipython=object, display=display)
        monkeypatch.setitem(sys.modules, "IPython", module)
        monkeypatch.setattr(charts.time, "monotonic", lambda: self.seconds)

    def display(self, picture, display_id, exclude):
        assert display_id is True
        self.shown.append(picture)
        self.excluded.append(exclude)
        return types.SimpleNamespace(update=self.update)

    def update(self, picture, exclude):
        self.updates.append(picture)
        self.excluded.append(exclude)


def train(board, num_epochs, after_epoch=lambda: None):
    run = history(0, num_epochs)
    for epoch in range(num_epochs + 1):
        vars(run).update(vars(history(epoch, num_epochs)))
        board(run)
        after_epoch()


def test_the_board_updates_one_display_a_few_times_a_second_and_always_at_the_end(monkeypatch):
    notebook, board = Notebook(monkeypatch), plot.Board()
    train(board, 10, lambda: setattr(notebook, "seconds", notebook.seconds + 0.1))
    assert len(notebook.shown) == 1
    assert 2 <= len(notebook.updates) <= 4  # one second of epochs
    assert "epoch 10 of 10" in notebook.updates[-1].alt  # though 0.1 seconds after the one before
    assert board.picture is notebook.updates[-1]
    *live, last = notebook.excluded  # a PNG takes as long as a few updates
    assert set(live) == {("image/png",)} and not last


def test_the_board_shows_a_second_run_in_a_second_display(monkeypatch):
    notebook, board = Notebook(monkeypatch), plot.Board()
    train(board, 2)
    train(board, 2)
    assert len(notebook.shown) == len(notebook.updates) == 2


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
    train(board, 3)
    assert "A run: epoch 3 of 3" in board.picture.alt
    run = history(2)
    run.loss = [float("nan"), float("inf")]
    board(run)
    assert "training loss inf" in board.picture.alt
