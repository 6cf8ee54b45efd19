"""Saved cells that do nothing are found, without a run and in one."""

import live_cells
import pytest
from nbformat.v4 import new_code_cell, new_notebook

MARK = "#@save d2lpar.boxes\n"
SAVED = f"{MARK}def f(x):\n    return x"


def notebook(*cells):
    return new_notebook(cells=[new_code_cell(cell) for cell in cells])


@pytest.mark.parametrize(
    ("cells", "names"),
    [
        ([SAVED, "f(1)"], ""),
        ([SAVED, "def g():\n    return f(1)", "y = [g() for _ in range(2)]"], ""),
        ([SAVED, "@f\ndef g(): ...", "g"], ""),
        ([SAVED, f"{MARK}class A(A):\n    def g(self):\n        f(1)", "A()"], ""),
        ([SAVED, "%time f(1)\n!f", "%%writefile x.py\nf(1)"], "f"),
        ([SAVED, "def g():\n    return f(1)"], "f"),
        ([f"{MARK}def f():\n    g()\n\n\ndef g():\n    f()"], "f g"),
        ([SAVED, "f = 1"], "f"),
        (["from d2lpar.boxes import f", SAVED, "f(1)"], "f"),
        ([SAVED, "f(1)", "import numpy as f"], "f"),
    ],
)
def test_a_saved_name_that_nothing_runs_or_that_is_imported_is_named(cells, names):
    found = [
        complaint.partition(" ")[0] for complaint in live_cells.dead(notebook(*cells))
    ]
    assert found == names.split()


BOX = f'''{MARK}class Box:
    """A box."""

    size: int = 2

    def full(self):
        """Whether it is."""
        @staticmethod
        def inner():
            return 3

        return inner()

    @property
    def empty(self):
        for _ in range(2):
            pass


def one():
    """Only a docstring."""


def never():
    return 1'''


def test_a_run_records_what_is_entered(tmp_path):
    nb = notebook(BOX, "Box().full(), Box().full(), one()\nnever", "Box.empty.fget(1)")
    names = live_cells.recording(nb, tmp_path / "record")
    assert names == ["Box.empty", "Box.full", "never", "one"]
    space = {}
    for cell in nb.cells:
        exec(cell.source, space)
    assert (tmp_path / "record").read_text().split() == ["Box.full", "one", "Box.empty"]
