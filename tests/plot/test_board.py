import base64
import io
import re
import subprocess
import sys
import types
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
import text_layout
import torch
from PIL import Image

from d2lpar import plot
from d2lpar.collectives.schedules import ring, tree
from d2lpar.plot import board, drawing

SVG = "{http://www.w3.org/2000/svg}"
STAR_BYTES = {(0, 1): 4_000_000, (0, 2): 4_000_000, (1, 0): 4_000_000, (2, 0): 1_500}


def history(epochs, num_epochs=10):
    return types.SimpleNamespace(
        loss=[2.0 / (i + 1) for i in range(epochs)],
        accuracy=[0.1 * i for i in range(epochs)],
        seconds=[0.25] * epochs,
        devices="2 virtual devices",
        hardware="a machine with 2 cores",
        num_epochs=num_epochs,
    )


def board_after(epochs):
    board = plot.Board()
    board(history(epochs))
    return board.picture


PICTURES = {
    "schedule": lambda: plot.schedule(ring, 4),
    "schedule with a title": lambda: plot.schedule(tree, 3, title='Up & "down" <the tree>'),
    "links": lambda: plot.links(STAR_BYTES, title="star & co"),
    "curves": lambda: plot.curves({"<a>": ([1, 2], [3, 4]), "b": ([1], [2])}, "x & y", "z"),
    "bars": lambda: plot.bars({"a $x$ <b>": 1, "b $": 2}, x_label="time"),
    "stacks": lambda: plot.stacks({"<a>": {"x & y": 1, "$z": 2}, "b": {"$z": 0.5}}, "a < b"),
    "timeline": lambda: plot.timeline([("<a>", "x & y", 0, 1), ("b", "z", 1, 1)], "a < b"),
    "images": lambda: plot.images(
        torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    ),
    "board": lambda: board_after(3),
}


def texts(picture):
    return [element.text for element in ET.fromstring(picture.svg).iter(SVG + "text")]


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_every_picture_is_xml_with_its_alternative_text_and_the_same_bytes_again(draw):
    picture = draw()
    root = ET.fromstring(picture.svg)
    assert root.tag == SVG + "svg"
    assert root.get("role") == "img"
    assert root.get("aria-label") == root.find(SVG + "title").text == picture.alt == repr(picture)
    assert len(picture.alt) > 8
    assert draw().svg == picture.svg
    assert list(text_layout.complaints(picture.svg)) == []
    ground = root.find(SVG + "rect")  # for dark pages
    assert ground.get("fill") == "#FFF" and ground.get("width") == "100%"
    assert "<style" not in picture.svg  # it would change the other pictures of a page
    assert len(picture.svg) < 40_000


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_every_picture_is_shown_as_png_too_twice_as_large_in_64_colours(draw):
    picture = draw()
    data, metadata = picture._repr_mimebundle_()
    png = base64.b64decode(data.pop("image/png"))
    assert data == {"image/svg+xml": picture.svg, "text/plain": picture.alt}
    image = Image.open(io.BytesIO(png))
    width, height = (float(ET.fromstring(picture.svg).get(name)) for name in ("width", "height"))
    assert image.size == (2 * width, pytest.approx(2 * height, abs=2))
    assert metadata == {"image/png": {"alt": picture.alt, "width": width}}
    assert len(image.getcolors()) <= 64 and len(png) < 60_000
    assert image.convert("RGB").getpixel((8, 8)) == (255, 255, 255)
    assert picture.png() == png


def test_words_and_colours_are_in_the_png():
    words = drawing.text(50 + 30j, "MMM", 'font-weight="bold"')
    square = f'<rect x="10" y="50" width="20" height="20" fill="{drawing.PALETTE[1]}"/>'
    image = Image.open(io.BytesIO(drawing.picture(words + square, 200, 80, "MMM").png()))
    image = image.convert("RGB")
    red, green, blue = image.getpixel((40, 120))
    assert f"#{red:02X}{green:02X}{blue:02X}" == drawing.PALETTE[1]
    left, _, right, _ = image.crop((0, 0, 400, 90)).point(lambda v: 255 - v).getbbox()
    assert left == pytest.approx(100, abs=4)
    assert right == pytest.approx(100 + 2 * drawing.text_width("MMM", bold=True), abs=4)


@pytest.mark.parametrize("name", ["curves", "bars", "stacks", "links"])
def test_a_chart_gives_its_figure_to_restyle_and_save(name, tmp_path):
    picture = PICTURES[name]()
    picture.figure.axes[0].set_title("Mine", loc="left")
    picture.figure.savefig(tmp_path / "chart.pdf")
    picture.figure.savefig(tmp_path / "chart.svg", metadata={"Date": None})
    assert (tmp_path / "chart.pdf").read_bytes().startswith(b"%PDF")
    saved = (tmp_path / "chart.svg").read_text()
    assert "Mine" in saved and "star" not in saved
    assert "Mine" not in picture.svg
    assert PICTURES["schedule"]().figure is None


def test_the_numbers_along_an_axis_keep_apart():
    xs = [1, 2, 4, 8, 1000, 1001]
    curves = plot.curves({"a": (xs, xs)}, "x", "y", log_x=True)
    links = plot.links({name: {(0, 1): 150_000_000} for name in "abcd"})
    for picture in (curves, links):
        assert list(text_layout.complaints(picture.svg)) == []
    assert {"2", "4", "8"} <= set(texts(plot.curves({"a": (xs[:4],) * 2}, "", "", log_x=True)))


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ('<text x="70" y="50">Width</text>', "leaves the picture"),
        ('<text x="10" y="50">One</text><text x="30" y="55">Two</text>', "overlap"),
        ('<rect x="10" y="40" width="20" height="20"/><text x="12" y="55">One</text>', "fills its"),
        ('<g transform="translate(70 50)"><text x="0" y="0">Width</text></g>', "leaves the"),
        ('<text x="50" y="50" text-anchor="end">One</text><text x="44" y="56">Two</text>', "overl"),
    ],
)
def test_a_text_without_room_is_seen(body, complaint):
    svg = drawing.picture(body, 100, 100, "words").svg
    [found] = text_layout.complaints(svg)
    assert complaint in found
    assert list(text_layout.complaints(svg.replace("<text", '<text font-size="5"'))) == []
    [found] = text_layout.complaints(drawing.picture("", 9, 9, "").svg.replace("DejaVu", "My"))
    assert "not in DejaVu Sans" in found


PROCESSOR = "64 threads of Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz, torch 2.13.0+cpu"
RANGES = {"recursive_doubling": (0.1, 0.09, 0.12), "star": (0.2, 0.1, 0.3)}
CURVES = {name: ([1, 10], values[:2]) for name, values in RANGES.items()}
LONG = {
    "bars": lambda words: plot.bars(RANGES, words, "seconds", words),
    "curves": lambda words: plot.curves(CURVES, words, "time", words, log_x=True),
    "stacks": lambda words: plot.stacks({"all": {"activations": 1, "parameters": 2}}, words),
    "timeline": lambda words: plot.timeline([("rank 0: main", "forward", 0, 1)], words),
    "schedule": lambda words: plot.schedule(ring, 4, words),
}


@pytest.mark.parametrize("draw", LONG.values(), ids=LONG)
def test_a_long_name_of_a_processor_fits_into_the_picture(draw):
    assert list(text_layout.complaints(draw(f"One step, {PROCESSOR}").svg)) == []


def test_a_picture_does_not_depend_on_the_users_settings():
    import matplotlib as mpl

    before = PICTURES["curves"]().svg
    with mpl.rc_context({"font.size": 30, "axes.grid": True, "svg.fonttype": "path"}):
        assert PICTURES["curves"]().svg == before


def test_save_writes_the_svg(tmp_path):
    picture = plot.schedule(ring, 4)
    picture.save(tmp_path / "ring.svg")
    assert (tmp_path / "ring.svg").read_text(encoding="utf-8") == picture.svg


def test_no_pyplot_is_imported_and_no_figure_stays_open():
    code = (
        "import sys; from d2lpar import plot\n"
        "from types import SimpleNamespace as History\n"
        "one = dict(loss=[1], accuracy=[1], seconds=[1], devices='', hardware='', num_epochs=1)\n"
        "plot.bars({'a': 1}); plot.Board()(History(**one))\n"
        "assert 'matplotlib.pyplot' not in sys.modules, 'pyplot'\n"
        "assert 'IPython' not in sys.modules, 'IPython'\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


# Charts


def test_links_shows_every_link_with_its_bytes_the_largest_first():
    picture = plot.links(STAR_BYTES)
    words = texts(picture)
    names = [word for word in words if "→" in word]
    assert names == ["0 → 1", "0 → 2", "1 → 0", "2 → 0"]
    assert words.count("4 MB") >= 3 and "1.5 kB" in words
    assert "0 → 1 4 MB" in picture.alt and "2 → 0 1.5 kB" in picture.alt


def test_links_shows_what_comes_from_the_host():
    assert "host → 0 1 kB" in plot.links({("host", 0): 1000, (0, 1): 500}).alt


def test_links_compared_show_what_a_link_does_not_carry():
    picture = plot.links({"star": STAR_BYTES, "ring": {(0, 1): 9_000, (1, 2): 9_000}})
    assert {"star", "ring"} <= set(texts(picture))
    star_words, ring_words = picture.alt.removeprefix("Bytes per link. ").split(". ring: ")
    assert "1 → 2 0 B" in star_words and "0 → 1 4 MB" in star_words
    assert "1 → 2 9 kB" in ring_words and "2 → 0 0 B" in ring_words


def test_many_links_are_added_up_per_device():
    everyone = {(a, b): 1_000 * (a + 1) for a in range(8) for b in range(8) if a != b}
    picture = plot.links(everyone)
    assert not [word for word in texts(picture) if "→" in word]
    assert "7 sends 56 kB" in picture.alt  # 7 times 8 kB
    assert "7 receives 28 kB" in picture.alt  # 1 + 2 + … + 7 kB
    assert "0 receives 35 kB" in picture.alt  # 2 + 3 + … + 8 kB


def test_bars_carry_names_values_and_spread():
    picture = plot.bars({"a": 0.00123, "b": (2.0, 1.5, 2.5)}, x_label="time", unit="seconds")
    assert {"a", "b", "1.23 ms", "2 s (1.5 s to 2.5 s)", "time"} <= set(texts(picture))
    assert picture.alt == "Bars: time. a 1.23 ms, b 2 s (1.5 s to 2.5 s)."


def test_stacks_carry_names_totals_and_parts():
    values = {"device 0": {"kept": 3_000_000, "sent": 1_000_000}, "device 1": {"sent": 500}}
    picture = plot.stacks(values, x_label="memory", unit="bytes", title="All")
    assert {"device 0", "device 1", "4 MB", "500 B", "kept", "sent", "memory"} <= set(
        texts(picture)
    )
    assert picture.alt == (
        "Bars: All. device 0 4 MB (kept 3 MB, sent 1 MB); device 1 500 B (sent 500 B)."
    )


def test_parts_of_a_stack_lie_side_by_side_in_the_colour_and_hatch_of_their_kind():
    root = ET.fromstring(plot.stacks({"a": {"x": 1, "y": 3}, "b": {"y": 2}}).svg)
    parts = []  # (fill, left, right), x of all and then y of all
    for path in root.iter(SVG + "path"):
        if path.get("clip-path"):
            xs = [float(x) for x in re.findall(r"[ML] (\S+)", path.get("d"))]
            parts.append((re.search(r"fill: ([^;]+)", path.get("style"))[1], min(xs), max(xs)))
    (x, left, middle), (_, *nothing), (y, begin, right), (other, start, end) = parts
    assert x == drawing.PALETTE[0].lower() and y == other and y.startswith("url")
    assert nothing == [left, left] and begin == middle and start == left
    lengths = [(b - a) / (middle - left) for a, b in ((begin, right), (start, end))]
    assert lengths == pytest.approx([3, 2])


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
    assert len({str(dash) for dash in board.DASHES}) == len(set(board.MARKERS)) == 8


def test_a_logarithmic_axis_of_device_counts_shows_them():
    words = texts(plot.curves({"a": ([2, 4, 8], [0.1, 0.2, 0.3])}, "k", "y", log_x=True))
    assert [word for word in words if word in ("2", "3", "4", "5", "8")] == ["2", "4", "8"]


def test_images_are_pixels_and_titles():
    X = torch.rand(10, 1, 28, 28)
    picture = plot.images(X, titles=[f"title {i}" for i in range(10)], columns=4)
    assert len(list(ET.fromstring(picture.svg).iter(SVG + "image"))) == 10
    assert texts(picture) == [f"title {i}" for i in range(10)]
    assert plot.images(X[:, 0], columns=4).svg == plot.images(X, columns=4).svg


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot.bars({}), "0 bars"),
        (lambda: plot.links({}), "0 bars"),
        (lambda: plot.stacks({}), "0 kinds of parts, but 1 to 8"),
        (lambda: plot.stacks({"a": {}}), "0 kinds of parts"),
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


def linear(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def test_the_palette_stands_out_from_white_and_tells_neighbours_apart():
    # what a person without red or without green cones sees (Machado et al., 2009)
    protan = [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]
    deutan = [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]
    for colour in drawing.PALETTE:
        r, g, b = linear(colour)
        assert 1.05 / (0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05) >= 3  # WCAG, for graphics
    for matrix in (protan, deutan):
        seen = [
            [sum(m * c for m, c in zip(row, linear(colour), strict=True)) for row in matrix]
            for colour in drawing.PALETTE
        ]
        for a, b in pairwise(seen):
            assert max(abs(x - y) for x, y in zip(a, b, strict=True)) > 0.1


# The live board


class Notebook:
    """Stands in for a running IPython: counts what is displayed and updated."""

    def __init__(self, monkeypatch):
        self.shown, self.updates, self.excluded = [], [], []
        display = types.SimpleNamespace(display=self.display)
        module = types.SimpleNamespace(get_ipython=object, display=display)
        monkeypatch.setitem(sys.modules, "IPython", module)

    def display(self, picture, display_id, exclude):
        assert display_id is True
        self.shown.append(picture)
        self.excluded.append(exclude)
        return types.SimpleNamespace(update=self.update)

    def update(self, picture, exclude):
        self.updates.append(picture)
        self.excluded.append(exclude)


@pytest.fixture
def clock(monkeypatch):
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(board.time, "monotonic", lambda: now.seconds)
    return now


def grow(run, epochs):
    full = history(epochs)
    run.loss, run.accuracy, run.seconds = full.loss, full.accuracy, full.seconds


def test_the_board_updates_one_display_a_few_times_a_second_and_always_at_the_end(
    monkeypatch, clock
):
    notebook, board, run = Notebook(monkeypatch), plot.Board(), history(0)
    for epoch in range(1, 11):
        grow(run, epoch)
        board(run)
        clock.seconds += 0.1
    assert len(notebook.shown) == 1
    assert 2 <= len(notebook.updates) <= 4  # one second of epochs
    assert "epoch 10 of 10" in notebook.updates[-1].alt  # though 0.1 seconds after the one before
    assert board.picture is notebook.updates[-1]
    *live, last = notebook.excluded  # a PNG takes as long as a few updates
    assert set(live) == {("image/png",)} and not last


def test_the_board_shows_a_second_run_in_a_second_display(monkeypatch, clock):
    notebook, board = Notebook(monkeypatch), plot.Board()
    for _ in range(2):
        run = history(0, num_epochs=2)
        for epoch in (1, 2):
            grow(run, epoch)
            board(run)
    assert len(notebook.shown) == len(notebook.updates) == 2


def test_the_board_keeps_its_picture_outside_of_a_notebook(clock):
    board, run = plot.Board("A run"), history(0, num_epochs=3)
    board(run)
    assert board.picture is None  # nothing to draw yet
    for epoch in (1, 2, 3):
        grow(run, epoch)
        board(run)
    assert "A run: epoch 3 of 3, training loss 0.667, test accuracy 0.200" in board.picture.alt


def test_the_board_says_where_it_ran_and_keeps_its_axis():
    words = texts(board_after(1))
    assert "2 virtual devices; a machine with 2 cores; 250 ms per epoch" in words
    assert words.count("10") == 2  # both axes reach to the last epoch from the start
    assert "training loss: 2.000" in words


def test_the_board_survives_a_loss_that_is_not_a_number():
    board, run = plot.Board(), history(2)
    run.loss = [float("nan"), float("inf")]
    board(run)
    assert "training loss inf" in board.picture.alt


def test_a_picture_shows_itself_in_a_real_notebook_shell():
    code = (
        "from IPython.testing.globalipapp import start_ipython\n"
        "ip = start_ipython()\n"
        "from d2lpar import plot\n"
        "data, metadata = ip.display_formatter.format(plot.bars({'a': 1}))\n"
        "assert data['image/svg+xml'].startswith('<svg'), data\n"
        "assert data['image/png'].startswith('iVBO'), data\n"
        "assert metadata['image/png'] == {'alt': data['text/plain'], 'width': 760}, metadata\n"
        "assert data['text/plain'].startswith('Bars'), data\n"
        "live, _ = ip.display_formatter.format(plot.bars({'a': 1}), exclude=('image/png',))\n"
        "assert set(live) == {'image/svg+xml', 'text/plain'}, live\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
