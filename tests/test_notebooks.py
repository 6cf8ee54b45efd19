"""What every committed notebook must be, checked without executing it.

Each check takes a notebook and yields complaints. It is applied to every notebook of the book, and
to a small one that it must refuse.
"""

import contextlib
import copy
import json
import re
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import psutil
import pytest
import run_notebooks
import saved_cells
import text_layout
import torch
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from d2lpar import launch
from d2lpar.collectives.schedules import recursive_doubling
from d2lpar.plot.picture import Picture

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 700_000

# Home folders, temporary ones, and where packages are installed.
MACHINE_PATH = re.compile(
    r"/(?:home|root|tmp|Users|private/var|var/folders)/|site-packages"
    r"|[A-Z]:\\(?:Users|Windows|Program)"
)


def code(nb):
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def outputs(nb):
    for number, cell in enumerate(code(nb), 1):
        for output in cell.outputs:
            yield number, output


def texts(output):
    """All text of an output; pictures in base64 are no text."""
    yield output.get("text", "")
    yield "\n".join(output.get("traceback", []))
    for mime, data in output.get("data", {}).items():
        if mime not in ("image/png", "image/jpeg"):
            yield data if isinstance(data, str) else json.dumps(data)


def prose(nb):
    """The markdown, without the code that it quotes."""
    text = "\n\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def headings(nb):
    return re.findall(r"^(#{1,6})\s+(.+?)\s*$", prose(nb), flags=re.M)


def check_valid(nb):
    ids = [cell.get("id") for cell in nb.cells]
    if None in ids or len(set(ids)) < len(ids):
        yield "cells without an id, or with another's: make refresh"
        return  # nbformat would repair them
    try:
        nbformat.validate(nb)
    except nbformat.ValidationError as error:
        yield f"not valid: {error.message}"


def check_metadata(nb):
    if nb.metadata != run_notebooks.METADATA:
        yield f"metadata of a machine, {dict(nb.metadata)}: make refresh"
    if any("execution" in cell.metadata for cell in nb.cells):
        yield "times of execution in a cell's metadata: make refresh"


def check_order(nb):
    counts = [cell.execution_count for cell in code(nb)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"cells not executed once, in order, in a fresh kernel: {counts}"


def check_errors(nb):
    for number, output in outputs(nb):
        if output.output_type == "error":
            yield f"cell [{number}] ends in {output.ename}"


def check_warnings(nb):
    for number, output in outputs(nb):
        if output.get("name") == "stderr":
            yield f"cell [{number}] writes to stderr: {output.text[:200]}"
        elif any("Warning" in text for text in texts(output)):
            yield f"cell [{number}] shows a warning"


def check_lengths(nb):
    lengths = [len(cell.source.splitlines()) for cell in code(nb)]
    for number, length in enumerate(lengths, 1):
        if not 1 <= length <= 25:
            yield f"cell [{number}] has {length} lines, not 1 to 25"
    short = sum(length < 8 for length in lengths)
    if 2 * short < len(lengths):
        yield f"only {short} of {len(lengths)} code cells have fewer than 8 lines"


def check_prose(nb):
    kinds = "".join(cell.cell_type[0] for cell in nb.cells)
    if "ccc" in kinds or kinds.startswith("c"):
        yield f"more than two code cells without prose before them: {kinds}"


def check_title(nb):
    first = nb.cells[0].source if nb.cells else ""
    titles = [text for level, text in headings(nb) if level == "#"]
    if len(titles) != 1 or not first.startswith("# "):
        yield f"not one title, at the top: {titles}"


def check_exercises(nb):
    sections = [text for level, text in headings(nb) if level in ("#", "##")]
    if not sections or sections[-1] != "Exercises":
        yield f"the last section is {sections[-1:]}, not Exercises"
        return
    items = re.split(r"^(?:\d+[.)]|[-*])\s", prose(nb).rpartition("Exercises\n")[2], flags=re.M)[1:]
    if len(items) < 3:
        yield f"{len(items)} exercises, fewer than 3"
    for number, item in enumerate(items, 1):
        if "target" not in item.lower():
            yield f"exercise {number} states no target"


def check_size(nb):
    size = len(nbformat.writes(nb).encode())
    if size > MAX_BYTES:
        yield f"{size} bytes, more than {MAX_BYTES}"


def check_paths(nb):
    for cell in nb.cells:
        for found in MACHINE_PATH.findall(cell.source):
            yield f"cell {cell.id} names a path of a machine: {found}"
    for number, output in outputs(nb):
        for found in MACHINE_PATH.findall("\n".join(texts(output))):
            yield f"cell [{number}] shows a path of a machine: {found}"


def check_alternative_text(nb):
    for number, output in outputs(nb):
        data, metadata = output.get("data", {}), output.get("metadata", {})
        for mime in data:
            if not mime.startswith("image/"):
                continue
            of_image = [metadata.get("alt"), metadata.get(mime, {}).get("alt")]
            if mime == "image/svg+xml":
                of_image.append(run_notebooks.alternative_text(data[mime]))
            if not any(of_image):
                yield f"cell [{number}] shows a figure without alternative text"
    for image in re.findall(r"!\[\s*\]\([^)]*\)|<img\b(?![^>]*\balt=[\"'][^\"'])[^>]*>", prose(nb)):
        yield f"no alternative text: {image}"


def check_untrusted(nb):
    """JupyterLab hides SVG as long as a notebook is not trusted, as in a fresh clone."""
    for number, output in outputs(nb):
        if "image/svg+xml" in (data := output.get("data", {})) and "image/png" not in data:
            yield f"cell [{number}] shows a figure as SVG only: make refresh"


def check_figures(nb):
    for number, output in outputs(nb):
        svg = output.get("data", {}).get("image/svg+xml")
        for complaint in text_layout.complaints(svg) if svg else ():
            yield f"cell [{number}] shows a figure in which {complaint}"


def check_reprs(nb):
    """A figure's or an object's default repr tells the reader nothing (and an address changes)."""
    for number, output in outputs(nb):
        for text in texts(output):
            found = re.search(r"<Figure size|<[^<>]* at 0x[0-9a-f]+>", text)
            if found:
                yield f"cell [{number}] shows {found.group()!r}: end the line with a semicolon"


def check_saved_cells(nb):
    for complaint in saved_cells.check(nb, ROOT / "d2lpar"):
        yield f"{complaint}: make saved-cells"


def check_format(nb):
    text = nbformat.writes(nb)
    if saved_cells.formatted(text).strip() != text.strip():
        yield "not formatted: make format"


CHECKS = [value for name, value in sorted(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook(path, check):
    assert list(check(nbformat.read(path, as_version=4))) == []


def test_names():
    """Two digits in reading order, without a gap: the order of a folder's listing."""
    names = [path.name for path in NOTEBOOKS]
    assert names
    assert all(re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", name) for name in names), names
    assert [int(name[:2]) for name in names] == list(range(1, len(names) + 1)), names


def test_the_executor_between_ranks_of_notebook_03_takes_exchanges_too():
    nb = nbformat.read(ROOT / "notebooks" / "03_allreduce.ipynb", as_version=4)
    [cell] = [c.source for c in code(nb) if c.source.startswith("def run_my_moves")]
    imports = "import torch, torch.distributed as dist\nfrom itertools import accumulate\n"
    imports += "from d2lpar.collectives import num_chunks\n"
    imports += "from d2lpar.collectives.lists import part_of\n"
    exec(imports + cell, names := {"__name__": "__main__"})
    run_my_moves = names["run_my_moves"]

    def add_up(rank, world_size):
        tensor = torch.full((5,), 10.0**rank)
        run_my_moves(recursive_doubling(world_size), tensor, rank)
        return tensor.tolist()

    assert launch(add_up, 4, timeout=60) == [[1111.0] * 5] * 4


# The checks, checked


SVG = Picture.around("", 100, 50, "a ring of 4").svg
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mP4DwABAQEAHLCMmQAAAABJRU5ErkJggg=="


def figure(svg=SVG, text="a ring of 4", alt="a ring of 4"):
    data = {"image/svg+xml": svg, "image/png": PNG, "text/plain": text}
    return new_output("display_data", data, metadata={"image/png": {"alt": alt, "width": 1}})


def shown(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def good():
    exercises = "".join(f"{i}. Do it. *Target: {i} steps.*\n" for i in range(1, 4))
    nb = new_notebook(metadata=copy.deepcopy(run_notebooks.METADATA))
    nb.cells = [
        new_markdown_cell("# A title\n\n```\n# no title\n```"),
        new_code_cell("1 + 1", execution_count=1, outputs=[shown("2\n")]),
        new_code_cell("draw()", execution_count=2, outputs=[figure()]),
        new_markdown_cell("## Exercises\n\n" + exercises),
    ]
    return nb


def test_checks_accept_a_good_notebook():
    assert [c for check in CHECKS for c in check(good())] == []


def source(text):
    return lambda nb: nb.cells[1].update(source=text)


def output(*values):
    return lambda nb: nb.cells[1].update(outputs=list(values))


def last(old, new):
    return lambda nb: nb.cells[-1].update(source=nb.cells[-1].source.replace(old, new))


HOME = "/".join(["", "home", "me", "x.py"])
BAD = [  # (the check that must refuse, how to spoil the good notebook)
    (check_valid, lambda nb: nb.cells[1].update(id=nb.cells[2].id)),
    (check_valid, lambda nb: nb.cells[1].pop("outputs")),
    (check_metadata, lambda nb: nb.metadata.kernelspec.update(name="my-env")),
    (check_metadata, lambda nb: nb.cells[1].metadata.update(execution={})),
    (check_order, lambda nb: nb.cells[1].update(execution_count=3)),
    (check_errors, output(new_output("error", ename="ValueError", evalue="", traceback=[]))),
    (check_warnings, output(shown("x", name="stderr"))),
    (check_warnings, output(shown("x.py:1: UserWarning: y"))),
    (check_lengths, source("x\n" * 26)),
    (check_lengths, source("")),
    (check_lengths, lambda nb: [cell.update(source="x\n" * 8) for cell in code(nb)]),
    (check_prose, lambda nb: nb.cells.insert(1, new_code_cell("x"))),
    (check_prose, lambda nb: nb.cells.pop(0)),
    (check_title, lambda nb: nb.cells[0].update(source="No title")),
    (check_title, last("## ", "# ")),
    (check_exercises, last("## Exercises", "## Summary")),
    (check_exercises, last("3. Do it", "Do it")),
    (check_exercises, last("*Target: 2 steps.*", "")),
    (check_exercises, lambda nb: nb.cells.append(new_markdown_cell("## More"))),
    (check_size, output(shown("x" * MAX_BYTES))),
    (check_paths, source(f"open('{HOME}')")),
    (check_paths, output(shown(HOME))),
    (check_paths, output(figure(text=HOME))),
    (check_alternative_text, output(figure(alt=""))),
    (check_alternative_text, output(new_output("display_data", {"image/png": PNG}))),
    (check_alternative_text, lambda nb: nb.cells[0].update(source="# A\n![](a.png)")),
    (check_alternative_text, lambda nb: nb.cells[0].update(source='# A\n<img src="a.png">')),
    (check_untrusted, output(new_output("display_data", {"image/svg+xml": SVG}))),
    (
        check_figures,
        output(figure(Picture.around('<text x="99" y="9">W</text>', 100, 50, "W").svg)),
    ),
    (check_reprs, output(figure(text="<Figure size 640x480 with 1 Axes>"))),
    (check_reprs, output(shown("[<matplotlib.lines.Line2D at 0x7f3a>]"))),
    (check_saved_cells, source("#@save d2lpar.collectives.schedules\ndef ring(k): ...")),
    (check_format, source("x=1")),
]


def test_each_check_refuses():
    for number, (check, spoil) in enumerate(BAD):
        nb = good()
        spoil(nb)
        assert list(check(nb)), (number, check)
    assert {check for check, _ in BAD} == set(CHECKS)


# Saved cells


MODULE = '''\
import functools


@functools.cache
def double(x):
    """Return twice x.

    More of it.
    """
    # a comment says why
    return 2 * x


class Box:
    """A box that says "x"
    and more.
    """

    def f(self):
        """One line."""

        def inner():
            """Inner.

            More."""
            return 1  # trailing

        return inner
'''

SAVED = '''\
#@save d2lpar.boxes
class Box:
    """A box that says "x" """

    def f(self):
        """One line."""

        def inner():
            """Inner."""
            return 1  # trailing

        return inner


@functools.cache
def double(x):
    """Return twice x."""
    # a comment says why
    return 2 * x'''


@pytest.fixture
def package(tmp_path):
    (tmp_path / "room").mkdir()
    for folder in (tmp_path, tmp_path / "room"):
        (folder / "boxes.py").write_text(MODULE)
    return tmp_path


def test_saved_cell_is_rewritten_in_its_own_order(package):
    stub = "#@save d2lpar.boxes\nclass Box: ...\ndef double(): ..."
    nb = new_notebook(cells=[new_code_cell(stub), new_code_cell("1 + 1")])
    assert saved_cells.check(nb, package)
    assert len(saved_cells.rewrite(nb, package)) == 1
    assert [cell.source for cell in nb.cells] == [SAVED, "1 + 1"]
    assert saved_cells.check(nb, package) == []
    assert saved_cells.rewrite(nb, package) == []


def test_saved_cells_are_formatted_as_ruff_does(package):
    assert saved_cells.expected(SAVED, package) == SAVED
    text = SAVED.replace("#@save", "# @save") + "\n"
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "x.py", "-"]
    result = subprocess.run(ruff, input=text, capture_output=True, text=True, cwd=ROOT)
    assert result.stdout == text, result.stderr


NO_CELLS = [
    ("#@save d2lpar.boxes\ndef triple(): ...", "d2lpar/boxes.py has no function or class triple"),
    ("#@save d2lpar.room.boxes\ndef f(): ...", "d2lpar/room/boxes.py has no function"),
    ("#@save d2lpar.room.bags\ndef f(): ...", "d2lpar/room/bags.py, which does not exist"),
    ("#@save d2lpar.boxes\ndef double(): ...\nx = 1", "line 3 of the cell is neither"),
    ("#@save d2lpar.boxes\ndef double(", "line 2 is no Python"),
    ("#@save d2lpar.boxes", "names no function or class"),
    ("#@save boxes\ndef double(): ...", "should read '#@save d2lpar.<file>'"),
    ("#@save d2lpar.a.room.boxes\ndef f(): ...", "should read '#@save d2lpar.<file>'"),
    ("import os\n#@save d2lpar.boxes\ndef f(): ...", "has to be the cell's first line"),
    ("#@save d2lpar.long\ndef f(): ...", "1 to 97 columns"),
]


def test_saved_cell_errors_name_both(package):
    (package / "long.py").write_text(f'def f():\n    """{"x" * 92}.\n\n    More.\n    """\n')
    for cell, complaint in NO_CELLS:
        with pytest.raises(ValueError, match=re.escape(complaint)):
            saved_cells.rewrite(new_notebook(cells=[new_code_cell(cell)]), package)


GUARDED = '''
class Box:
    @property
    @checked(
        check_area,
    )
    def area(self):
        """Return it.

        Raises ValueError.
        """
        return self.size**2


@checked(check_double)
def double(x):
    return 2 * x
'''


def test_saved_cell_shows_no_guards(package):
    (package / "room" / "boxes.py").write_text(GUARDED)
    box = saved_cells.expected("#@save d2lpar.room.boxes\nclass Box: ...", package)
    property = '    @property\n    def area(self):\n        """Return it."""'
    assert box.endswith(f"class Box:\n{property}\n        return self.size**2")
    double = saved_cells.expected("#@save d2lpar.room.boxes\ndef double(): ...", package)
    assert double == "#@save d2lpar.room.boxes\ndef double(x):\n    return 2 * x"


# The runner, on notebooks that take no time


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("IPYTHONDIR", "TMPDIR", "PYDEVD_DISABLE_FILE_VALIDATION"):  # the runner sets them
        monkeypatch.setenv(name, "")


def run(folder, *cells, arguments=()):
    nb = new_notebook(cells=[new_markdown_cell("# [Next](02_next.ipynb)")])
    nb.cells += [new_code_cell(cell) for cell in cells]
    nbformat.write(nb, folder / "01_toy.ipynb")
    build = folder / "build"
    status = run_notebooks.main(["--folder", str(folder), "--build", str(build), *arguments])
    return status, build / "01_toy.ipynb"


def test_runner_refreshes(tmp_path, capsys):
    svg = f"from IPython.display import SVG\nSVG({SVG!r})"
    status, built = run(tmp_path, "print(1, end='')\nprint(2)", svg, arguments=["--refresh"])
    assert status == 0
    printed = capsys.readouterr().out
    assert re.search(r"01_toy.ipynb \.\.\. +\d+\.\d s\n1 notebook.* in \d+", printed)
    committed = tmp_path / "01_toy.ipynb"
    assert committed.read_text() == built.read_text()
    nb = nbformat.read(committed, as_version=4)
    assert nb.metadata == run_notebooks.METADATA
    assert [cell.execution_count for cell in code(nb)] == [1, 2]
    assert code(nb)[0].outputs == [shown("12\n")]
    page = built.with_suffix(".html").read_text()
    assert 'alt="a ring of 4"' in page
    assert 'href="02_next.html"' in page


def test_runner_leaves_no_temporary_files(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    use = "from multiprocessing.util import get_temp_dir\nget_temp_dir()"
    status, built = run(tmp_path, use)
    assert status == 0
    assert str(temporary) in code(nbformat.read(built, 4))[0].outputs[0].data["text/plain"]
    assert list(temporary.iterdir()) == []


def page_of(*values, markdown="# A title"):
    code_cell = new_code_cell("x", outputs=list(values))
    nb = new_notebook(cells=[new_markdown_cell(markdown), code_cell])
    return run_notebooks.to_html(nb, Path("01_toy.ipynb"))


def images(page):
    """(alternative text, type) of every image."""
    found = []
    parser = HTMLParser()
    parser.handle_startendtag = lambda tag, attributes: (
        tag == "img" and found.append(dict(attributes))
    )
    parser.feed(page)
    return [(image["alt"], re.match("data:([^;]*);", image["src"])[1]) for image in found]


def test_a_page_shows_the_svg_and_either_form_has_its_alternative_text():
    both = figure(svg=SVG.replace("a ring of 4", "&quot;4&quot; &amp; 5"), alt='<"4" & 5>')
    assert images(page_of(both)) == [('"4" & 5', "image/svg+xml")]
    del both.data["image/svg+xml"]
    assert images(page_of(both)) == [('<"4" & 5>', "image/png")]


def test_a_page_shows_the_drawings_of_the_text_and_the_results_have_them_too(tmp_path):
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "ring.svg").write_text(SVG)
    nb = new_notebook(cells=[new_markdown_cell("![a ring](img/ring.svg)"), new_code_cell("1")])
    page = run_notebooks.to_html(nb, tmp_path / "01_toy.ipynb")
    assert images(page) == [("a ring", "image/svg+xml")]
    assert run(tmp_path, "1")[1].with_name("img").joinpath("ring.svg").read_text() == SVG


def test_a_page_asks_nothing_of_the_network():
    page = page_of(figure(), markdown="# A title\n\n[Away](https://d2l.ai) costs $1 or $2.")
    assert '<a href="https://d2l.ai">' in page  # followed only by those who want to
    assert "<script" not in page
    assert re.findall(r"""(?:src|<link [^>]*href)=["']?(?:https?:)?//""", page) == []
    assert re.findall(r"(?:@import|url\()[\s\"']*(?:https?:)?//", page) == []


def test_what_is_wide_on_a_page_can_be_scrolled_with_the_keyboard():
    page = page_of(shown("x " * 99), markdown="# A title\n\n```\nmake\n```")
    assert page.count('<pre tabindex="0">') == page.count("<pre") == 3


def test_runner_stops_with_the_cell_and_its_traceback(tmp_path, capsys):
    before = "x = 0"
    status, built = run(tmp_path, before, "1 / x  # here", arguments=["--refresh"])
    assert status == 1
    report = capsys.readouterr().out
    assert "In cell [2]:\n\n    1 / x  # here\n" in report
    assert "ZeroDivisionError: division by zero" in report
    assert "\x1b" not in report
    assert not built.with_suffix(".html").exists()
    assert not code(nbformat.read(tmp_path / "01_toy.ipynb", as_version=4))[1].outputs  # as it was


@pytest.mark.parametrize(
    "hangs, arguments, reason",
    [
        ("time.sleep(600)", ["--idle-limit=2"], "Nothing was computed for 2 s (--idle-limit)"),
        ("while True: pass", ["--notebook-limit=12"], "used up its 12 s (--notebook-limit)"),
    ],
)
def test_runner_does_not_wait_for_ever(tmp_path, capsys, hangs, arguments, reason):
    child = "import subprocess, time\nprint(subprocess.Popen(['sleep', '600']).pid)"
    status, built = run(tmp_path, child, hangs, arguments=arguments)
    assert status == 1
    report = capsys.readouterr().out
    assert f"In cell [2]:\n\n    {hangs}" in report
    assert reason in report
    pid = int(code(nbformat.read(built, as_version=4))[0].outputs[0].text)
    with contextlib.suppress(psutil.NoSuchProcess):  # what the cell started has ended with it
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_runner_waits_as_long_as_a_cell_or_what_it_has_started_computes(tmp_path):
    spin = "import time; end = time.monotonic() + 4\nwhile time.monotonic() < end: pass"
    child = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {spin!r}])"
    status, _ = run(tmp_path, spin, child, arguments=["--idle-limit=2"])
    assert status == 0
