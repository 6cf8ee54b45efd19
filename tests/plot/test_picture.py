"""What all pictures have in common, and the fixed ones in notebooks/img."""

import base64
import io
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import pytest
import torch
from matplotlib.colors import to_hex
from PIL import Image
from text_layout import SVG, complaints, elements, texts

from d2lpar import plot
from d2lpar.collectives.schedules import ring, tree
from d2lpar.pipeline.schedules import gpipe, predict
from d2lpar.plot import picture
from d2lpar.plot.picture import PALETTE, Picture
from d2lpar.study.iteration import Step

ROOT = Path(__file__).parents[2]
FIXED = sorted((ROOT / "notebooks" / "img").glob("*.svg"))
WORDS = """a < b & "c" > 'd' $x$"""
LONG = f"{WORDS} on 64 threads of Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz, torch 2.13.0"


def board():
    board, history = plot.Board(WORDS), dict.fromkeys(("loss", "accuracy", "seconds"), (2.0, 1.0))
    board(SimpleNamespace(**history, num_epochs=9, devices=WORDS, hardware=WORDS))
    return board.picture


PICTURES = {
    "schedule": lambda: plot.schedule(tree, 3, title=LONG),
    "iteration": lambda: plot.iteration({WORDS: [Step(WORDS, {(0, 1): 2}, (1,))]}),
    "timeline": lambda: plot.timeline([(WORDS, WORDS, 0, 1), ("b", "z", 1, 1)], LONG),
    "pipeline": lambda: plot.pipeline({WORDS: predict(gpipe(2, 2))}, LONG),
    "links": lambda: plot.links({WORDS: {(0, 1): 4_000_000, ("host", 0): 15}}),
    "curves": lambda: plot.curves({WORDS: ([1, 2], [3, 4]), "b": ([1], [2])}, LONG, "z", LONG),
    "bars": lambda: plot.bars({WORDS: (2, 1, 3), "recursive_doubling": 1}, LONG, "seconds", LONG),
    "stacks": lambda: plot.stacks({WORDS: {WORDS: 1, "$z": 2}, "b": {"$z": 0.5}}, LONG),
    "images": lambda: plot.images(torch.zeros(3, 1, 28, 28), [WORDS[:9], "b", "c"]),
    "board": board,
}


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_a_picture_is_xml_with_an_alternative_text_and_a_png_and_the_same_bytes_again(draw):
    picture = draw()
    root = ET.fromstring(picture.svg)
    assert root.tag == SVG + "svg" and root.get("role") == "img"
    assert root.get("aria-label") == root.find(SVG + "title").text == picture.alt == repr(picture)
    assert len(picture.alt) > 8
    assert draw().svg == picture.svg
    assert list(complaints(picture.svg)) == []
    ground = root.find(SVG + "rect")  # for dark pages
    assert ground.get("fill") == "#FFF" and ground.get("width") == "100%"
    assert "<style" not in picture.svg  # it would change the other pictures of a page
    assert len(picture.svg) < 40_000

    data, metadata = picture._repr_mimebundle_()
    png = base64.b64decode(data.pop("image/png"))
    assert data == {"image/svg+xml": picture.svg, "text/plain": picture.alt}
    image = Image.open(io.BytesIO(png))
    width, height = (float(root.get(name)) for name in ("width", "height"))
    assert image.size == (pytest.approx(2 * width, abs=2), pytest.approx(2 * height, abs=2))
    assert metadata == {"image/png": {"alt": picture.alt, "width": image.width // 2}}
    assert len(image.getcolors()) <= 64 and len(png) < 60_000
    assert image.convert("RGB").getpixel((8, 8)) == (255, 255, 255)
    assert picture.png() == png


def test_words_and_colours_are_in_the_png():
    words = picture.text(50 + 30j, "MMM", picture.BOLD)
    square = f'<rect x="10" y="50" width="20" height="20" fill="{PALETTE[1]}"/>'
    image = Image.open(io.BytesIO(Picture.around(words + square, 200, 80, "MMM").png()))
    image = image.convert("RGB")
    assert "#{:02X}{:02X}{:02X}".format(*image.getpixel((40, 120))) == PALETTE[1]
    left, _, right, _ = image.crop((0, 0, 400, 90)).point(lambda v: 255 - v).getbbox()
    assert left == pytest.approx(100, abs=4)
    assert right == pytest.approx(100 + 2 * picture.text_width("MMM", bold=True), abs=4)


def test_save_writes_the_svg(tmp_path):
    drawn = plot.schedule(ring, 4, title="Ring allreduce on 4 devices")
    drawn.save(tmp_path / "ring.svg")
    assert (tmp_path / "ring.svg").read_text("utf-8") == drawn.svg


@pytest.mark.parametrize("path", FIXED, ids=lambda path: path.stem)
def test_the_fixed_drawings_are_legible_and_shown_with_their_alternative_text(path):
    svg = path.read_text("utf-8")
    assert list(complaints(svg)) == []
    root = ET.fromstring(svg)
    assert root.find(SVG + "rect").get("fill") == "#FFF" and len(root.get("aria-label")) > 99
    shown = "".join(p.read_text("utf-8") for p in (ROOT / "notebooks").glob("*.ipynb"))
    assert f"](img/{path.name})" in shown


def test_the_fixed_drawing_of_number_formats_says_what_torch_says():
    drawn = (ROOT / "notebooks" / "img" / "number_formats.svg").read_text("utf-8")
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        info, name = torch.finfo(kind), str(kind).removeprefix("torch.")
        least = torch.tensor(info.tiny * info.eps, dtype=kind)
        assert least > 0 and least / 2 == 0  # the smallest there is
        words = f"{name} from {least:.1e} to {info.max:.1e}, {info.eps:.1e} apart at 1"
        assert words in drawn


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ('<g transform="translate(70 50)"><text x="0" y="0">Width</text></g>', "leaves the"),
        ('<text x="50" y="50" text-anchor="end">One</text><text x="44" y="56">Two</text>', "overl"),
        ('<rect x="10" y="40" width="20" height="20"/><text x="12" y="55">One</text>', "fills its"),
    ],
)
def test_a_text_without_room_is_seen(body, complaint):
    svg = Picture.around(body, 100, 100, "words").svg
    [found] = complaints(svg)
    assert complaint in found
    assert list(complaints(svg.replace("<text", '<text font-size="5"'))) == []


def test_the_palette_stands_out_from_white_and_tells_neighbours_apart():
    colours = [list(bytes.fromhex(c[1:])) for c in (*PALETTE, picture.DARK_GREY)]
    linear = (torch.tensor(colours) / 255).add(0.055).div(1.055).pow(2.4)  # but for the darkest
    luminance = linear @ torch.tensor([0.2126, 0.7152, 0.0722])
    assert (1.05 / (luminance + 0.05) >= 3).all()  # WCAG, for graphics
    # what a person without red or without green cones sees (Machado et al., 2009)
    protan = [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]
    deutan = [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]
    for matrix in (protan, deutan):
        seen = linear[:-1] @ torch.tensor(matrix).T
        assert (seen.diff(dim=0).abs().amax(dim=1) > 0.1).all()


def test_a_schedule_has_one_colour_in_every_picture():
    colour = picture.SCHEDULES["ring"]
    assert len(set(picture.SCHEDULES.values())) == len(picture.SCHEDULES)
    assert elements(plot.schedule(ring, 4), "path", stroke=colour, stroke_width="3")
    names = ["a", "b", "dist.all_reduce", "ring"]
    for order in (names, names[::-1]):
        drawn = plot.curves({name: ([1], [2]) for name in order}, "x", "y").figure.axes[0].lines
        colours = {line.get_label(): line.get_color() for line in drawn}
        assert colours["ring"] == colour and len(set(colours.values())) == 4
        assert colours["dist.all_reduce"] == picture.SCHEDULES["all_reduce"]
    assert picture.colour_of("ring, over gloo") == colour
    bars = plot.bars({"a": 1, "ring": 2}).figure.axes[0].patches
    links = plot.links({"star": {(0, 1): 1}, "ring": {(0, 1): 1}}).figure.axes[1].patches
    for patch in (bars[1], links[0]):
        assert to_hex(patch.get_facecolor()).upper() == colour


def test_nothing_is_imported_or_left_open_and_a_picture_shows_itself_in_a_notebook_shell():
    code = (
        "import sys; from d2lpar import plot\n"
        "from types import SimpleNamespace as History\n"
        "one = dict(loss=[1], accuracy=[1], seconds=[1], devices='', hardware='', num_epochs=1)\n"
        "plot.bars({'a': 1}); plot.Board()(History(**one))\n"
        "assert not {'matplotlib.pyplot', 'IPython'} & set(sys.modules)\n"
        "from IPython.testing.globalipapp import start_ipython\n"
        "show = start_ipython().display_formatter.format\n"
        "assert set(show(plot.bars({'a': 1}))[0]) == {'image/svg+xml', 'image/png', 'text/plain'}\n"
        "live, _ = show(plot.bars({'a': 1}), exclude=('image/png',))\n"
        "assert set(live) == {'image/svg+xml', 'text/plain'}, live\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def test_a_chart_ignores_the_users_settings_and_gives_its_figure_to_restyle_and_save(tmp_path):
    before = PICTURES["curves"]().svg
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "svg.fonttype": "path"}):
        assert PICTURES["curves"]().svg == before
    for name in ("curves", "bars", "stacks", "links"):
        picture = PICTURES[name]()
        picture.figure.axes[0].set_title("Mine", loc="left")
        picture.figure.savefig(tmp_path / "chart.pdf")
        picture.figure.savefig(tmp_path / "chart.svg", metadata={"Date": None})
        assert (tmp_path / "chart.pdf").read_bytes().startswith(b"%PDF")
        assert "Mine" in (tmp_path / "chart.svg").read_text() and "Mine" not in texts(picture)
