"""What every committed notebook must be, without executing it.

Each check takes a notebook and yields complaints. It is applied to every notebook of
the book, and to a small one that it must refuse.
"""

import base64
import copy
import io
import re
from itertools import zip_longest
from pathlib import Path

import nbformat
import pytest
import saved_cells
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from d2lpar import plot

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES, MAX_CELLS, MAX_WORDS = 400_000, 50, 2_200
HOSTED = "# A hosted copy first needs: %pip install git+ADDRESS  (of this repository)"
BRIDGE = "## From ours to torch's"
TABLE = r"^\|.*ours.*\|.*torch.*\|.*differs.*\|"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}
HEAD = r"# .+\n\n\*.+\?\*\n\n- \*\*You need\*\* .+\n- \*\*You will have built\*\* .+\n"
HEAD += r"- \*\*It takes\*\* about (\d+) min.+"
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
            texts += [str(data[mime]) for mime in data if not mime.endswith("png")]
            yield f"cell [{number}]", output, data, "\n".join(texts)


def prose(nb):
    """The markdown, without the code that it quotes."""
    text = "\n\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def words(nb):
    """The words that are read: no tables, images, addresses, numbers and exercises."""
    text = prose(nb).partition("## Exercises\n")[0]
    text = re.sub(r"^# \d+\.|^Next: .*$", "", text, flags=re.M)
    text = re.sub(r"^\|.*$|!\[[^\]]*\]\([^)]*\)|\]\([^)]*\)", "", text, flags=re.M)
    return len(re.findall(r"\w\S*", text))


def minutes(nb):
    """How long a careful reader takes: docs/teaching.md says at what speed."""
    lines = sum(len(cell.source.splitlines()) for cell in code(nb)[1:])
    printed = sum(text.count("\n") for _, _, data, text in outputs(nb) if not data)
    figures = sum("image/png" in data for _, _, data, _ in outputs(nb))
    return words(nb) / 100 + lines / 8 + printed / 10 + 1.5 * figures


def check_file(nb):
    ids = [cell.get("id") for cell in nb.cells]
    if None in ids or len(set(ids)) < len(ids):  # nbformat would repair them
        yield "cells without an id, or with another's"
        return
    try:
        nbformat.validate(nb)
    except nbformat.ValidationError as error:
        yield f"not valid: {error.message}"
        return
    if nb.metadata != METADATA or any("execution" in c.metadata for c in nb.cells):
        yield f"metadata of one machine or run, {dict(nb.metadata)}: make refresh"
    text = nbformat.writes(nb)
    if len(text.encode()) > MAX_BYTES:
        yield f"{len(text.encode())} bytes, more than {MAX_BYTES}"
    if saved_cells.formatted(text).strip() != text.strip():
        yield "not formatted: make format"


def check_execution(nb):
    counts = [cell.execution_count for cell in code(nb)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"cells not executed once, in order, in a fresh kernel: {counts}"
    for place, output, _, text in outputs(nb):
        stderr = output.get("name") == "stderr" or "Warning" in text
        if stderr or output.output_type == "error":
            yield f"{place}: an error, a warning, or stderr: {text[:200]}"


def check_cells(nb):
    """Half of the cells are short, none long but classes; prose before every two."""
    lengths = [len(cell.source.splitlines()) for cell in code(nb)]
    for length, cell in zip(lengths, code(nb), strict=True):
        listing = 35 if cell.source.startswith("#@save") else 25
        whole = re.search(r"^class ", cell.source, flags=re.M) or cell is code(nb)[0]
        if not 1 <= length <= (60 if whole else listing):
            yield f"a code cell of {length} lines: {cell.source[:60]}"
    own = [c.source.splitlines() for c in code(nb)[1:] if c.source[:6] != "#@save"]
    own = list(map(len, own))
    if 2 * sum(length < 16 for length in own) < len(own):
        yield f"not half of the cells of its own have fewer than 16 lines: {own}"
    kinds = "".join(cell.cell_type[0] for cell in nb.cells)
    if "ccc" in kinds or kinds.startswith("c"):
        yield f"more than two code cells without prose before them: {kinds}"


def check_first_cell(nb):
    """Imports and settings, which nobody reads: folded, if they are long."""
    first = code(nb)[0]
    if re.search(r"^(def|class) ", first.source, flags=re.M):
        yield "the first code cell defines something"
    is_long = len(first.source.splitlines()) > 8
    folded = {"jupyter": {"source_hidden": True}, "tags": ["hide-input"]}
    if first.metadata != (folded if is_long else {}):
        yield f"the first code cell should {'' if is_long else 'not '}be folded"


def check_exercises(nb):
    """At the end three to five exercises, each with a target."""
    text = prose(nb).rpartition("## Exercises\n")[2]
    items = re.split(r"^(?:\d+[.)]|[-*])\s", text, flags=re.M)[1:]
    if len(items) not in (3, 4, 5) or not all("target" in i.lower() for i in items):
        yield f"not 3 to 5 exercises, or one without a target: {items}"


def check_chapter(nb):
    """A chapter is one sitting, says what it takes, ends in torch's and the answer."""
    if not re.match(HEAD, nb.cells[0].source):
        yield f"no question, or not what it needs, builds, takes: {nb.cells[0].source}"
    elif abs(int(re.match(HEAD, nb.cells[0].source)[1]) - minutes(nb)) > 10:
        yield f"it takes about {minutes(nb):.0f} minutes, and says otherwise"
    if not code(nb)[0].source.startswith(HOSTED):
        yield f"the first code cell does not begin with {HOSTED!r}"
    if len(nb.cells) > MAX_CELLS or words(nb) > MAX_WORDS:
        yield f"{len(nb.cells)} cells of {MAX_CELLS}, {words(nb)} words of {MAX_WORDS}"
    headings = re.findall(r"^##? .+", prose(nb), flags=re.M)
    ends = headings[-2:] == ["## Summary", "## Exercises"]
    if not ends or BRIDGE not in headings or sum(h[:2] == "# " for h in headings) != 1:
        yield f"not one title, {BRIDGE!r}, at the end Summary and Exercises: {headings}"
    bridge = "\n".join(cell.source for cell in nb.cells).partition(BRIDGE)[2]
    runs = any(c.source in bridge and "torch" in c.source for c in code(nb))
    if not runs or not re.search(TABLE, bridge, flags=re.M):
        yield "no table (ours | torch's | what differs), or torch's own does not run"


def check_machine(nb):
    """No path of a machine, and no default repr, which may show an address."""
    shown = [text for *_, text in outputs(nb)]
    for found in re.findall(r"<Figure size|<[^<>]* at 0x[0-9a-f]+>", "\n".join(shown)):
        yield f"an output shows {found!r}: end the line with a semicolon"
    for text in [*(cell.source for cell in nb.cells), *shown]:
        yield from (f"a path of a machine: {f}" for f in MACHINE_PATH.findall(text))


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
    if re.search(r"!\[\s*\]\([^)]*\)|<img\b(?![^>]*\balt=[\"'][^\"'])", prose(nb)):
        yield "an image without alternative text"


def check_tables(nb):
    """A table ends at an empty line: what follows at once becomes one of its rows."""
    for row, text in re.findall(r"^(\|.*)\n([^|\n].*)", prose(nb), flags=re.M):
        yield f"no empty line between {row[:40]!r} and {text[:40]!r}"


def check_links(nb):
    """Links to other chapters and to drawings lead somewhere."""
    for found in re.findall(r"\]\(((?!https?:|#)[^)\s]+)\)", prose(nb)):
        if not (ROOT / "notebooks" / found.partition("#")[0]).exists():
            yield f"a link that leads nowhere: {found}"


CHECKS = [value for name, value in globals().items() if name.startswith("check_")]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook(path):
    nb = nbformat.read(path, as_version=4)
    assert [complaint for check in CHECKS for complaint in check(nb)] == []


def test_saved_cells_hold_what_the_module_holds():
    notebooks = [nbformat.read(path, as_version=4) for path in NOTEBOOKS]
    assert list(saved_cells.mend(notebooks)) == []  # make format


def test_notebooks_are_numbered_in_reading_order():
    assert len(NOTEBOOKS) == len({path.name[:3] for path in NOTEBOOKS})
    for path, following in zip_longest(NOTEBOOKS, NOTEBOOKS[1:]):
        cells = nbformat.read(path, as_version=4).cells
        assert cells[0].source.startswith(f"# {int(path.name[:2])}. "), path.name
        leads = re.findall(r"^Next: \[.+\]\((.+)\)\.$", cells[-1].source, flags=re.M)
        assert leads == ([following.name] if following else []), path.name


# The checks, checked


def figure(alt="a ring of 4"):
    picture = plot.bars({"ring": 4})
    picture.alt = alt
    data, metadata = picture._repr_mimebundle_()
    return new_output("display_data", data, metadata=metadata)


def shown(text, name="stdout"):
    return new_output("stream", name=name, text=text)


TOP = """# A title

*Why?*

- **You need** time.
- **You will have built** it.
- **It takes** about 5 min to read.
"""
TORCHS = f"{BRIDGE}\n\n| ours | torch's | what differs |\n|---|---|---|\n"
END = "## Summary\n\n## Exercises\n\n1. A. *Target: 1.*\n2. B. *Target: 2.*\n"
END += "3. C. *Target: 3.*\n"


def good():
    nb = new_notebook(metadata=copy.deepcopy(METADATA))
    nb.cells = [
        new_markdown_cell(TOP),
        new_code_cell(HOSTED + "\n1 + 1", execution_count=1, outputs=[shown("2\n")]),
        new_code_cell("#@save ring\ndef ring(k):\n    return k", execution_count=2),
        new_markdown_cell(TORCHS),
        new_code_cell("torch.draw(ring)", execution_count=3, outputs=[figure()]),
        new_markdown_cell(END),
    ]
    return nb


def source(text, cell=1):
    return lambda nb: nb.cells[cell].update(source=text)


def output(*values):
    return lambda nb: nb.cells[1].update(outputs=list(values))


HOME = "/".join(["", "home", "me", "x.py"])
SVG = {"image/svg+xml": '<svg xmlns="http://www.w3.org/2000/svg"></svg>'}
BAD = [  # (the check that must refuse, how to spoil the good notebook)
    (check_file, lambda nb: nb.cells[1].update(id=nb.cells[2].id)),
    (check_file, lambda nb: nb.cells[1].pop("outputs")),
    (check_file, lambda nb: nb.metadata.kernelspec.update(name="my-env")),
    (check_file, lambda nb: nb.cells[1].metadata.update(execution={})),
    (check_file, output(shown("x" * MAX_BYTES))),
    (check_file, source("x=1")),
    (check_execution, lambda nb: nb.cells[1].update(execution_count=3)),
    (check_execution, output(new_output("error", ename="E", evalue="", traceback=[]))),
    (check_execution, output(shown("x", name="stderr"))),
    (check_execution, output(shown("x.py:1: UserWarning: y"))),
    (check_cells, source("x\n" * 26, cell=4)),
    (check_cells, source("#@save x\n" + "x\n" * 35, cell=2)),
    (check_cells, lambda nb: [cell.update(source="x\n" * 16) for cell in code(nb)]),
    (check_cells, lambda nb: nb.cells.insert(1, new_code_cell("x"))),
    (check_cells, lambda nb: nb.cells.pop(0)),
    (check_first_cell, source("x\n" * 9)),
    (check_first_cell, source("def f():\n    pass")),
    (check_first_cell, lambda nb: nb.cells[1].metadata.update(tags=["hide-input"])),
    (check_exercises, source(END.replace("3. C", "C"), cell=-1)),
    (check_exercises, source(END.replace("*Target: 2.*", ""), cell=-1)),
    (check_exercises, source(END + "4. Target\n5. Target\n6. Target", cell=-1)),
    (check_chapter, source(TOP.replace("?", "."), cell=0)),
    (check_chapter, source(TOP.replace("It takes", "Time"), cell=0)),
    (check_chapter, source(TOP.replace("about 5", "about 20"), cell=0)),
    (check_chapter, source("1 + 1")),
    (check_chapter, lambda nb: nb.cells.extend([new_markdown_cell("x")] * 55)),
    (check_chapter, source(TOP + "word " * 2_200, cell=0)),
    (check_chapter, source("# A second title", cell=3)),
    (check_chapter, source(END.replace("## Summary", "## The end"), cell=-1)),
    (check_chapter, source(BRIDGE, cell=3)),
    (check_chapter, source("draw()", cell=4)),
    (check_machine, source(f"open('{HOME}')")),
    (check_machine, output(shown(HOME))),
    (check_machine, output(shown("[<matplotlib.lines.Line2D at 0x7f3a>]"))),
    (check_figures, output(figure(alt=""))),
    (check_figures, source("# A\n![](a.png)", cell=0)),
    (check_figures, output(new_output("display_data", SVG))),
    (check_figures, output(figure() | {"metadata": {}})),
    (check_figures, output(figure() | {"data": figure("another").data})),
    (check_tables, source(TORCHS + "\n| a | b | c |\nText", cell=3)),
    (check_links, source(TOP + "[next](99_next.ipynb)", cell=0)),
]


def test_each_check_accepts_a_good_notebook_and_refuses_a_bad_one():
    assert [complaint for check in CHECKS for complaint in check(good())] == []
    for number, (check, spoil) in enumerate(BAD):
        nb = good()
        spoil(nb)
        assert list(check(nb)), (number, check)
