"""What every committed notebook must be, without executing it; what the tools promise.

Each check takes a notebook and yields complaints. It is applied to every notebook of
the book, and to a small one that it must refuse.
"""

import base64
import contextlib
import copy
import io
import re
import tempfile
from html.parser import HTMLParser
from itertools import zip_longest
from pathlib import Path

import live_cells
import nbformat
import psutil
import pytest
import run_notebooks
import saved_cells
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from d2lpar import plot

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROVISIONAL = (  # the end of the book takes its place; it has one exercise
    "18_comparison"
)
MAX_BYTES = 700_000
MAX_CELLS, MAX_WORDS = 60, 2_000
HOSTED = "# A hosted copy first needs: %pip install git+ADDRESS  (of this repository)"
BRIDGE = "## From ours to torch's"

# Home folders, temporary ones, and where packages are installed.
MACHINE_PATH = re.compile(
    r"/(?:home|root|tmp|Users|private/var|var/folders)/|site-packages"
    r"|[A-Z]:\\(?:Users|Windows|Program)"
)


def code(nb):
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def outputs(nb):
    """(where it stands, the output, its data, all its text) of each output."""
    for number, cell in enumerate(code(nb), 1):
        for output in cell.outputs:
            data = output.get("data", {})
            texts = [output.get("text", ""), *output.get("traceback", [])]
            texts += [
                str(value)
                for mime, value in data.items()
                if not mime.endswith(("png", "jpeg"))
            ]
            yield f"cell [{number}]", output, data, "\n".join(texts)


def prose(nb):
    """The markdown, without the code that it quotes."""
    text = "\n\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def check_file(nb):
    ids = [cell.get("id") for cell in nb.cells]
    if None in ids or len(set(ids)) < len(ids):
        yield "cells without an id, or with another's: make refresh"
        return  # nbformat would repair them
    try:
        nbformat.validate(nb)
    except nbformat.ValidationError as error:
        yield f"not valid: {error.message}"
        return
    if nb.metadata != run_notebooks.METADATA or any(
        "execution" in c.metadata for c in nb.cells
    ):
        yield f"metadata of one machine or run, {dict(nb.metadata)}: make refresh"
    if (size := len(nbformat.writes(nb).encode())) > MAX_BYTES:
        yield f"{size} bytes, more than {MAX_BYTES}"


def check_execution(nb):
    counts = [cell.execution_count for cell in code(nb)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"cells not executed once, in order, in a fresh kernel: {counts}"
    for place, output, _, text in outputs(nb):
        if (
            output.output_type == "error"
            or output.get("name") == "stderr"
            or "Warning" in text
        ):
            yield (
                f"{place} ends in an error, writes to stderr, or shows a warning:"
                f" {text[:200]}"
            )


def check_cells(nb):
    """Half of the cells are short, none long but classes; prose before every two."""
    lengths = [len(cell.source.splitlines()) for cell in code(nb)]
    for length, cell in zip(lengths, code(nb), strict=True):
        listing = 35 if cell.source.startswith("#@save") else 25
        whole = re.search(r"^class ", cell.source, flags=re.M) or cell is code(nb)[0]
        if not 1 <= length <= (60 if whole else listing):
            yield f"a code cell of {length} lines: {cell.source[:60]}"
    # The chapters that are still to be rewritten have longer ones: in the end, 8 lines.
    if 2 * sum(length < 16 for length in lengths) < len(lengths):
        yield f"not half of the code cells have fewer than 16 lines: {lengths}"
    kinds = "".join(cell.cell_type[0] for cell in nb.cells)
    if "ccc" in kinds or kinds.startswith("c"):
        yield f"more than two code cells without prose before them: {kinds}"


def check_sections(nb):
    """One title, at the top; at the end three exercises or more, each with a target."""
    headings = re.findall(r"^(##?)\s+(.+?)\s*$", prose(nb), flags=re.M)
    if [level for level, _ in headings].count("#") != 1 or not nb.cells[
        0
    ].source.startswith("# "):
        yield f"not one title, at the top: {headings}"
    if headings[-1:] != [("##", "Exercises")]:
        yield f"the last section is {headings[-1:]}, not Exercises"
    items = re.split(
        r"^(?:\d+[.)]|[-*])\s", prose(nb).rpartition("Exercises\n")[2], flags=re.M
    )[1:]
    if len(items) < 3 or not all("target" in item.lower() for item in items):
        yield f"fewer than 3 exercises, or one without a target: {items}"


def check_chapter(nb):
    """A chapter is one sitting, says what it takes, ends in torch's and the answer."""
    head = nb.cells[0].source
    parts = (
        r"# .+\n\n\*.+\?\*\n\n- \*\*You need\*\* .+\n- \*\*You will have built\*\* .+\n"
    )
    if not re.match(parts + r"- \*\*It takes\*\* .+", head):
        yield (
            "does not begin with its question, what it needs, builds and takes:"
            f" {head[:400]}"
        )
    if not code(nb)[0].source.startswith(HOSTED):
        yield f"the first code cell does not begin with {HOSTED!r}"
    if len(nb.cells) > MAX_CELLS or words(nb) > MAX_WORDS:
        yield f"{len(nb.cells)} cells of {MAX_CELLS}, {words(nb)} words of {MAX_WORDS}"
    headings = [line.strip() for line in re.findall(r"^## .+", prose(nb), flags=re.M)]
    if BRIDGE not in headings or headings[-2:] != ["## Summary", "## Exercises"]:
        yield (
            f"lacks {BRIDGE!r}, or does not end with Summary and Exercises: {headings}"
        )
    bridge = "\n".join(cell.source for cell in nb.cells).partition(BRIDGE)[2]
    runs = [
        cell for cell in code(nb) if cell.source in bridge and "torch" in cell.source
    ]
    if (
        not re.search(r"^\|.*ours.*\|.*torch.*\|.*differs.*\|", bridge, flags=re.M)
        or not runs
    ):
        yield (
            "no table (ours | torch's | what differs), or no cell that runs torch's own"
        )


def words(nb):
    """The words that are read: no tables, images, addresses, numbers and exercises."""
    text = prose(nb).partition("## Exercises\n")[0]
    text = re.sub(r"^# \d+\.|^Next: .*$", "", text, flags=re.M)
    text = re.sub(r"^\|.*$|!\[[^\]]*\]\([^)]*\)|\]\([^)]*\)", "", text, flags=re.M)
    return len(re.findall(r"\w\S*", text))


def check_machine(nb):
    """No path of a machine, and no default repr, which may show an address."""
    for text in [
        *(cell.source for cell in nb.cells),
        *(text for *_, text in outputs(nb)),
    ]:
        for found in MACHINE_PATH.findall(text):
            yield f"a path of a machine: {found}"
    for place, *_, text in outputs(nb):
        if found := re.search(r"<Figure size|<[^<>]* at 0x[0-9a-f]+>", text):
            yield f"{place} shows {found.group()!r}: end the line with a semicolon"


def check_figures(nb):
    """A figure is a PNG, and its words stand in it, beside it and in its metadata."""
    for place, output, data, _ in outputs(nb):
        if "image/svg+xml" in data:
            yield f"{place} shows an SVG, which JupyterLab hides in a fresh clone"
        if "image/png" in data:
            drawn = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
            alt = output.get("metadata", {}).get("image/png", {}).get("alt")
            if not alt or {alt} != {drawn.info.get("Description"), data["text/plain"]}:
                yield f"{place} shows a figure without its alternative text"
    for image in re.findall(
        r"!\[\s*\]\([^)]*\)|<img\b(?![^>]*\balt=[\"'][^\"'])[^>]*>", prose(nb)
    ):
        yield f"no alternative text: {image}"


def check_live(nb):
    """What a saved cell shows is what the chapter runs."""
    yield from live_cells.dead(nb)


def check_links(nb):
    """Links to other chapters and to drawings lead somewhere."""
    for found in re.findall(r"\]\(((?!https?:|#)[^)\s]+)\)", prose(nb)):
        if not (ROOT / "notebooks" / found.partition("#")[0]).exists():
            yield f"a link that leads nowhere: {found}"


def check_code(nb):
    """What a cell shows of the module is the module's, and all is formatted."""
    for complaint in saved_cells.check(nb, ROOT / "d2lpar"):
        yield f"{complaint}: make saved-cells"
    text = nbformat.writes(nb)
    if saved_cells.formatted(text).strip() != text.strip():
        yield "not formatted: make format"


CHECKS = [
    value for name, value in sorted(globals().items()) if name.startswith("check_")
]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook(path):
    nb = nbformat.read(path, as_version=4)
    checks = [
        c for c in CHECKS if not (path.stem == PROVISIONAL and c is check_sections)
    ]
    assert [complaint for check in checks for complaint in check(nb)] == []


def test_notebooks_are_numbered_in_reading_order():
    numbers = [path.name[:3] for path in NOTEBOOKS]
    assert numbers == sorted(set(numbers)) and re.fullmatch(
        r"(\d\d_)+", "".join(numbers)
    ), numbers
    for path, following in zip_longest(NOTEBOOKS, NOTEBOOKS[1:]):
        cells = nbformat.read(path, as_version=4).cells
        assert cells[0].source.startswith(f"# {int(path.name[:2])}. "), path.name
        leads = re.findall(r"^Next: \[.+\]\((.+)\)\.$", cells[-1].source, flags=re.M)
        assert leads == ([following.name] if following else []), path.name


# The checks, checked


SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"></svg>'


def figure(alt="a ring of 4"):
    picture = plot.bars({"ring": 4})
    picture.alt = alt
    data, metadata = picture._repr_mimebundle_()
    return new_output("display_data", data, metadata=metadata)


def shown(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def good():
    exercises = "".join(f"{i}. Do it. *Target: {i} steps.*\n" for i in range(1, 4))
    nb = new_notebook(metadata=copy.deepcopy(run_notebooks.METADATA))
    nb.cells = [
        new_markdown_cell(HEAD),
        new_code_cell(HOSTED + "\n1 + 1", execution_count=1, outputs=[shown("2\n")]),
        new_code_cell(SHOWN, execution_count=2),
        new_markdown_cell(
            f"{BRIDGE}\n\n| ours | torch's | what differs |\n|---|---|---|\n"
        ),
        new_code_cell("torch.draw(ring)", execution_count=3, outputs=[figure()]),
        new_markdown_cell("## Summary\n\n## Exercises\n\n" + exercises),
    ]
    return nb


HEAD = """# A title

*Why?*

- **You need** time.
- **You will have built** it.
- **It takes** an hour.

```
# no title
```
"""
SHOWN = saved_cells.expected(
    "#@save d2lpar.collectives.schedules\ndef ring(k): ...", ROOT / "d2lpar"
)


def source(text, cell=1):
    return lambda nb: nb.cells[cell].update(source=text)


def output(*values):
    return lambda nb: nb.cells[1].update(outputs=list(values))


def last(old, new):
    return lambda nb: nb.cells[-1].update(source=nb.cells[-1].source.replace(old, new))


HOME = "/".join(["", "home", "me", "x.py"])
BAD = [  # (the check that must refuse, how to spoil the good notebook)
    (check_file, lambda nb: nb.cells[1].update(id=nb.cells[2].id)),
    (check_file, lambda nb: nb.cells[1].pop("outputs")),
    (check_file, lambda nb: nb.metadata.kernelspec.update(name="my-env")),
    (check_file, lambda nb: nb.cells[1].metadata.update(execution={})),
    (check_file, output(shown("x" * MAX_BYTES))),
    (check_execution, lambda nb: nb.cells[1].update(execution_count=3)),
    (check_execution, output(new_output("error", ename="E", evalue="", traceback=[]))),
    (check_execution, output(shown("x", name="stderr"))),
    (check_execution, output(shown("x.py:1: UserWarning: y"))),
    (check_cells, source("x\n" * 26, cell=2)),
    (check_cells, lambda nb: [cell.update(source="x\n" * 16) for cell in code(nb)]),
    (check_cells, lambda nb: nb.cells.insert(1, new_code_cell("x"))),
    (check_chapter, source(HEAD.replace("?", "."), cell=0)),
    (check_chapter, source(HEAD.replace("It takes", "Time"), cell=0)),
    (check_chapter, source("1 + 1")),
    (check_chapter, lambda nb: nb.cells.extend([new_markdown_cell("x")] * 55)),
    (check_chapter, source(HEAD + "word " * 1_990, cell=0)),
    (check_chapter, last("## Summary", "## The end")),
    (check_chapter, source(BRIDGE, cell=3)),
    (check_chapter, source("## Torch", cell=3)),
    (check_chapter, source("draw()", cell=4)),
    (check_live, source("torch.draw(star)", cell=4)),
    (check_live, source("from d2lpar.collectives.schedules import ring")),
    (check_cells, lambda nb: nb.cells.pop(0)),
    (check_sections, source("No title", cell=0)),
    (check_sections, last("## Exercises", "## Summary")),
    (check_sections, last("3. Do it", "Do it")),
    (check_sections, last("*Target: 2 steps.*", "")),
    (check_machine, source(f"open('{HOME}')")),
    (check_machine, output(shown(HOME))),
    (check_machine, output(shown("[<matplotlib.lines.Line2D at 0x7f3a>]"))),
    (check_figures, output(figure(alt=""))),
    (check_figures, source("# A\n![](a.png)", cell=0)),
    (check_figures, output(new_output("display_data", {"image/svg+xml": SVG}))),
    (check_figures, output(figure() | {"metadata": {}})),
    (check_figures, output(figure() | {"data": figure("another").data})),
    (check_links, source(HEAD + "[next](99_next.ipynb)", cell=0)),
    (check_code, source("#@save d2lpar.collectives.schedules\ndef ring(k): ...")),
    (check_code, source("x=1")),
]


def test_each_check_accepts_a_good_notebook_and_refuses_a_bad_one():
    assert [complaint for check in CHECKS for complaint in check(good())] == []
    for number, (check, spoil) in enumerate(BAD):
        nb = good()
        spoil(nb)
        assert list(check(nb)), (number, check)


# Saved cells


MODULE = '''\
import functools


@functools.cache
@checked(
    check_double,
)
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

    @checked(check_f)
    def f(self):
        """One line."""

        def inner():
            """Inner.

            More."""
            return 1  # trailing

        return inner


class Bag(list):
    """A bag.

    More.
    """

    size = 2  # at most

    # why
    def add(self, x):
        super().append(x)

    @property
    def full(self):
        return len(self) == self.size


def long():
    """{}.

    More.
    """
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

PIECES = {
    "class Bag:\n    def add(self): ...": (
        '#@save d2lpar.boxes\nclass Bag(list):\n    """A bag."""\n\n    size = 2  # at'
        " most\n\n    # why\n    def add(self, x):\n        super().append(x)"
    ),
    "class Bag(Bag):\n    def full(self): ...": (
        "#@save d2lpar.boxes\nclass Bag(Bag):\n"
        "    @property\n    def full(self):\n        return len(self) == self.size"
    ),
    "class Box(boxes.Box):\n    def f(self): ...": (
        SAVED.partition("\n\n\n")[0].replace(
            'class Box:\n    """A box that says "x" """\n\n', "class Box(boxes.Box):\n"
        )
    ),
}

NO_CELLS = [
    ("#@save d2lpar.boxes\nclass Bag(Bag):\n    def g(): ...", "Bag has no method g"),
    (
        "#@save d2lpar.boxes\nclass Bag(boxes.Bag):\n    def add(): ...",
        "super() in Bag.add",
    ),
    (
        "#@save d2lpar.boxes\ndef triple(): ...",
        "d2lpar/boxes.py has no function or class triple",
    ),
    (
        "#@save d2lpar.room.bags\ndef f(): ...",
        "d2lpar/room/bags.py, which does not exist",
    ),
    ("#@save d2lpar.boxes\ndef double(): ...\nx = 1", "line 3 of the cell is neither"),
    ("#@save d2lpar.boxes\ndef double(", "line 2 is no Python"),
    ("#@save d2lpar.boxes", "names no function or class"),
    ("#@save boxes\ndef double(): ...", "should read '#@save d2lpar.<file>'"),
    ("import os\n#@save d2lpar.boxes\ndef f(): ...", "has to be the cell's first line"),
    ("#@save d2lpar.boxes\ndef long(): ...", "1 to 85 columns"),
]


def test_a_saved_cell_shows_the_module_in_its_own_order_without_guards_and_names_errors(
    tmp_path,
):
    (tmp_path / "boxes.py").write_text(MODULE.format("x" * 82))
    stub = "#@save d2lpar.boxes\nclass Box: ...\ndef double(): ..."
    nb = new_notebook(cells=[new_code_cell(stub), new_code_cell("1 + 1")])
    assert (
        saved_cells.check(nb, tmp_path) and len(saved_cells.rewrite(nb, tmp_path)) == 1
    )
    assert [cell.source for cell in nb.cells] == [SAVED, "1 + 1"]
    assert saved_cells.check(nb, tmp_path) == saved_cells.rewrite(nb, tmp_path) == []
    for cell, complaint in NO_CELLS:
        with pytest.raises(ValueError, match=re.escape(complaint)):
            saved_cells.rewrite(new_notebook(cells=[new_code_cell(cell)]), tmp_path)


def test_a_class_is_shown_in_pieces(tmp_path):
    (tmp_path / "boxes.py").write_text(MODULE.format("x" * 82))
    nb = new_notebook(
        cells=[new_code_cell(f"#@save d2lpar.boxes\n{stub}") for stub in PIECES]
    )
    assert len(saved_cells.rewrite(nb, tmp_path)) == 3
    assert [cell.source for cell in nb.cells] == list(PIECES.values())
    assert saved_cells.check(nb, tmp_path) == []


# The runner, on notebooks that take no time


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    # the runner sets them
    for name in "IPYTHONDIR", "TMPDIR", "PYDEVD_DISABLE_FILE_VALIDATION":
        monkeypatch.setenv(name, "")


def run(folder, *cells, arguments=()):
    nb = new_notebook(
        cells=[new_markdown_cell("# [Next](02_next.ipynb)\n![x](img/ring.svg)")]
    )
    nb.cells += map(new_code_cell, cells)
    nbformat.write(nb, folder / "01_toy.ipynb")
    (folder / "img").mkdir()
    (folder / "img" / "ring.svg").write_text(SVG)
    (folder / "exercises").mkdir()
    (folder / "exercises" / "01_toy.ipynb").write_text("{}")
    build = folder / "build"
    status = run_notebooks.main([f"--folder={folder}", f"--build={build}", *arguments])
    return status, build / "01_toy.ipynb"


def test_runner_refreshes_and_leaves_no_temporary_files(tmp_path, monkeypatch, capsys):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    use = "from multiprocessing.util import get_temp_dir\nprint(get_temp_dir())"
    status, built = run(
        tmp_path, "print(1, end='')\nprint(2)", use, arguments=["--refresh"]
    )
    assert status == 0
    printed = capsys.readouterr().out
    assert re.search(r"01_toy.ipynb \.\.\. +\d+\.\d s\n1 notebook.* in \d+", printed)
    committed = tmp_path / "01_toy.ipynb"
    assert committed.read_text() == built.read_text()
    nb = nbformat.read(committed, as_version=4)
    assert nb.metadata == run_notebooks.METADATA
    assert [cell.execution_count for cell in code(nb)] == [1, 2]
    assert code(nb)[0].outputs == [shown("12\n")]
    assert (
        str(temporary) in code(nb)[1].outputs[0].text
        and list(temporary.iterdir()) == []
    )
    assert 'href="02_next.html"' in built.with_suffix(".html").read_text()
    assert (built.parent / "img" / "ring.svg").read_text() == SVG
    assert (built.parent / "exercises" / "01_toy.ipynb").read_text() == "{}"


def test_a_page_has_its_pictures_asks_nothing_of_the_network_and_is_scrolled_by_keys(
    tmp_path,
):
    (tmp_path / "ring.svg").write_text(SVG)
    png = figure(alt='<"4" & 5>')
    text = (
        "# A title\n[Away](https://d2l.ai) costs $1 or $2. ![a"
        " ring](ring.svg)\n```\nmake\n```"
    )
    cell = new_code_cell("x", outputs=[png, shown("x " * 99)])
    nb = new_notebook(cells=[new_markdown_cell(text), cell])
    page, found, parser = (
        run_notebooks.to_html(nb, tmp_path / "01_toy.ipynb"),
        [],
        HTMLParser(),
    )
    parser.handle_startendtag = lambda tag, attributes: found.append(
        (tag, dict(attributes))
    )
    parser.feed(page)
    images = [(image["alt"], image["src"][:14]) for tag, image in found if tag == "img"]
    svg, png = "data:image/svg", "data:image/png"
    assert images == [("a ring", svg), ('<"4" & 5>', png)]
    assert '<a href="https://d2l.ai">' in page  # followed only by those who want to
    assert "<script" not in page
    assert re.findall(r"""(?:src|<link [^>]*href)=["']?(?:https?:)?//""", page) == []
    assert re.findall(r"(?:@import|url\()[\s\"']*(?:https?:)?//", page) == []
    assert page.count('<pre tabindex="0">') == page.count("<pre") == 3


@pytest.mark.parametrize(
    "fails, arguments, reason",
    [
        ("1 / x  # here", "--refresh", "ZeroDivisionError: division by zero"),
        (
            "time.sleep(600)",
            "--idle-limit=2",
            "Nothing was computed for 2 s (--idle-limit)",
        ),
        (
            "while True: pass",
            "--notebook-limit=12",
            "used up its 12 s (--notebook-limit)",
        ),
    ],
)
def test_runner_stops_with_what_fails_or_hangs_and_all_that_it_started(
    tmp_path, capsys, fails, arguments, reason
):
    child = (
        "import subprocess, time\nx = 0\nprint(subprocess.Popen(['sleep', '600']).pid)"
    )
    status, built = run(tmp_path, child, fails, arguments=[arguments])
    report = capsys.readouterr().out
    assert status == 1 and f"In cell [2]:\n\n    {fails}" in report
    assert reason in report and "\x1b" not in report
    assert not built.with_suffix(".html").exists()
    # as it was
    assert not code(nbformat.read(tmp_path / "01_toy.ipynb", as_version=4))[1].outputs
    pid = int(code(nbformat.read(built, as_version=4))[0].outputs[0].text)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_runner_waits_as_long_as_a_cell_or_what_it_has_started_computes(tmp_path):
    spin = "import time; end = time.monotonic() + 4\nwhile time.monotonic() < end: pass"
    child = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {spin!r}])"
    status, _ = run(tmp_path, spin, child, arguments=["--idle-limit=2"])
    assert status == 0
