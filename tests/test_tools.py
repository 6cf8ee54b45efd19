"""The tools, on projects of their own; and the files of docs/clusters."""

import ast
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import mutants
import nbformat
import psutil
import pytest
import run_notebooks
import saved_cells
import timing
import website
import yaml  # jupyter brings it
from nbformat.v4 import new_code_cell, new_notebook
from torch.distributed.run import get_args_parser

from d2lpar.train_ddp import arguments

ROOT = Path(__file__).resolve().parents[1]


def notebook(*sources):
    return new_notebook(cells=[new_code_cell(source) for source in sources])


# Running notebooks


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Folders for notebooks, with an exercise, and for results."""
    (tmp_path / "notebooks" / "exercises").mkdir(parents=True)
    nbformat.write(notebook("2"), tmp_path / "notebooks" / "exercises" / "01_a.ipynb")
    monkeypatch.setattr(run_notebooks, "FOLDER", tmp_path / "notebooks")
    monkeypatch.setattr(run_notebooks, "BUILD", tmp_path / "build")
    return tmp_path


def test_a_notebook_is_run_refreshed_and_becomes_a_page(project, capsys):
    path = project / "notebooks" / "01_a.ipynb"
    nb = notebook("print(1, end='')\nprint(2)", "1 + 1")
    nb.cells.insert(0, nbformat.v4.new_markdown_cell("[Next](02_b.ipynb)"))
    nbformat.write(nb, path)
    assert run_notebooks.main(["02"]) == 1  # there is none
    assert run_notebooks.main(["--refresh", "01"]) == 0
    assert re.search(r"01_a.ipynb +\d+\.\d s\n1 notebooks in", capsys.readouterr().out)
    assert path.read_text() == (project / "build" / "01_a.ipynb").read_text()
    cells = nbformat.read(path, as_version=4).cells[1:]
    assert cells[0].outputs[0].text == "12\n" and cells[1].execution_count == 2
    assert nbformat.read(path, as_version=4).metadata == nb.metadata
    page = (project / "build" / "01_a.html").read_text()
    assert 'href="02_b.html"' in page and "<script" not in page
    assert (project / "build" / "exercises" / "01_a.ipynb").exists()


CHILD = "import os, subprocess, time\nprint(subprocess.Popen(['sleep', '600']).pid)"


def ends(pid):
    process = psutil.Process(pid) if psutil.pid_exists(pid) else None
    return process is None or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ("1 / 0  # here", "ZeroDivisionError: division by zero"),
        ("time.sleep(600)", "Cell execution timed out"),
        ("os.kill(os.getpid(), 9)", "Kernel died"),
    ],
)
def test_what_fails_hangs_or_dies_is_named_and_leaves_nothing(
    project, capsys, fails, words
):
    nbformat.write(notebook(CHILD, fails), project / "notebooks" / "01_a.ipynb")
    assert run_notebooks.main(["--refresh", "--limit=2"]) == 1
    said = capsys.readouterr().out
    assert (
        f"In this cell:\n\n{fails}\n" in said and words in said and "\x1b" not in said
    )
    built = nbformat.read(project / "build" / "01_a.ipynb", as_version=4)
    assert words == "Kernel died" or ends(int(built.cells[0].outputs[0].text))
    kept = nbformat.read(project / "notebooks" / "01_a.ipynb", as_version=4)
    assert kept.cells[0].outputs == []


@pytest.mark.alone
def test_an_interrupt_leaves_nothing(tmp_path):
    (tmp_path / "notebooks").mkdir()
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    wait = "print(open('pid', 'w').write(str(os.getpid())))\ntime.sleep(600)"
    nbformat.write(notebook(CHILD, wait), tmp_path / "notebooks" / "01_a.ipynb")
    runner = subprocess.Popen([sys.executable, tmp_path / "tools" / "run_notebooks.py"])
    pid = tmp_path / "notebooks" / "pid"
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.1)
    started = psutil.Process(runner.pid).children(recursive=True)
    assert int(pid.read_text()) in [process.pid for process in started]
    runner.send_signal(signal.SIGINT)
    assert runner.wait(60) != 0
    assert psutil.wait_procs(started, timeout=10)[1] == []


# Saved cells


MODULE = '''"""Chapter 03. A file."""

from math import pi

SIZES = 1, 2
# What a whole circle has.
CIRCLE = 2 * pi


@cache
def area(r):
    """Return the area.

    Of a circle.
    """
    return pi * r**2  # as Archimedes says


class Box:
    """A box."""

    size = 2
'''
CELLS = [
    "#@save shapes\nSIZES = 1, 2",
    "#@save shapes\n# What a whole circle has.\nCIRCLE = 2 * pi",
    "#@save shapes\n" + MODULE[MODULE.index("@cache") :].rstrip("\n"),
]


def mend(tmp_path, cells, module=MODULE):
    (tmp_path / "shapes.py").write_text(module)
    nb = notebook(*cells)
    nb.cells.insert(0, nbformat.v4.new_markdown_cell("# 3. Shapes"))
    said = list(saved_cells.mend([nb], tmp_path))
    return said, [cell.source for cell in nb.cells[1:]]


def test_a_cell_holds_the_module_word_for_word_and_each_definition_is_in_one(tmp_path):
    assert mend(tmp_path, [*CELLS, "1 + 1"]) == ([], [*CELLS, "1 + 1"])
    stub = "#@save shapes\ndef area(): ...\nclass Box: ..."
    for spoilt in (stub, CELLS[2].replace("Archimedes", "Euclid")):
        said, cells = mend(tmp_path, [*CELLS[:2], spoilt])
        assert (
            said == ["area, Box: not word for word that of shapes"] and cells == CELLS
        )
    said, _ = mend(tmp_path, [*CELLS[1:], CELLS[1]])
    assert said == [
        "SIZES of shapes stands in 0 cells, and not in one",
        "CIRCLE of shapes stands in 2 cells, and not in one",
    ]
    wrong = [*CELLS, "#@save shapes\ndef volume(): ..."]
    assert mend(tmp_path, wrong) == (["shapes has no volume"], wrong)
    said, _ = mend(tmp_path, CELLS, MODULE + "\n\nfor i in SIZES:\n    CIRCLE += i\n")
    assert len(said) == 1 and said[0].startswith("for i in SIZES")


def test_a_file_is_shown_whole_in_its_chapter_and_one_of_the_workshop_in_part(tmp_path):
    said, _ = mend(tmp_path, [])
    assert len(said) == 4 and "SIZES of shapes stands in 0 cells" in said[0]
    said, _ = mend(tmp_path, CELLS, MODULE.replace("Chapter 03", "Chapter 04"))
    assert said == ["shapes is chapter 4's, and not 3's"] * 3
    workshop = MODULE.replace("Chapter 03", "Workshop")
    assert mend(tmp_path, CELLS[:1], workshop) == ([], CELLS[:1])


# Copies for readers, mutants, goals


def test_a_hosted_notebook_installs_the_book_and_its_links_lead_there():
    text = "![A](img/a.svg) [next](02_b.ipynb) [play](../docs/p.md) [x](https://x.y)"
    text += " [file](../d2lpar/a.py) [below](#here)"
    nb = new_notebook(cells=[nbformat.v4.new_markdown_cell(text)])
    website.hosted(nb, "notebooks", "https://github.com/a/b", "https://a.github.io/b")
    nbformat.validate(nb)
    assert nb.cells[1].source.startswith(
        "!git clone -q --depth 1 https://github.com/a/b"
    )
    assert re.findall(r"\]\((.*?)\)", nb.cells[0].source) == [
        "https://raw.githubusercontent.com/a/b/hosted/notebooks/img/a.svg",
        "https://a.github.io/b/notebooks/02_b.html",
        "https://a.github.io/b/docs/p.html",
        "https://x.y",
        "https://github.com/a/b/tree/hosted/d2lpar/a.py",
        "#here",
    ]
    readme = "[1](notebooks/01_a.ipynb) [C](CHANGELOG.md)"  # which has no page
    assert website.absolute_links(readme, "", "https://a", "https://b").split() == [
        "[1](https://b/notebooks/01_a.html)",
        "[C](https://a/tree/hosted/CHANGELOG.md)",
    ]


def test_copies_have_no_outputs_and_what_a_reader_has_stays(tmp_path):
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    (tmp_path / "notebooks" / "img").mkdir(parents=True)
    (tmp_path / "notebooks" / "img" / "a.png").write_bytes(b"\x89PNG")
    nb = notebook("1 + 1")
    nb.cells[0].update(execution_count=1, outputs=[nbformat.v4.new_output("stream")])
    nbformat.write(nb, tmp_path / "notebooks" / "01_a.ipynb")
    copy, command = tmp_path / "work" / "01_a.ipynb", tmp_path / "tools/work_copies.py"
    for mine in (None, "mine"):
        if mine:
            copy.write_text(mine)
            (tmp_path / "work" / "img" / "a.png").unlink()
        subprocess.run([sys.executable, command], check=True)
        assert (tmp_path / "work" / "img" / "a.png").read_bytes() == b"\x89PNG"
        if not mine:
            [cell] = nbformat.read(copy, as_version=4).cells
            assert (cell.source, cell.outputs) == ("1 + 1", [])
            assert cell.execution_count is None
    assert copy.read_text() == "mine"


def test_each_mutant_fits_once_and_names_a_test():
    assert len(mutants.mutants()) >= 60
    for file, fault in mutants.mutants():
        text = (ROOT / "d2lpar" / file).read_text("utf-8")
        ast.parse(mutants.broken(text, fault))
        path, _, name = fault["test"].partition("::")
        test = name.partition("[")[0]
        pattern = rf"^def {test}\(|^{test} = on_ranks\("
        assert re.search(pattern, (ROOT / "tests" / path).read_text("utf-8"), re.M), (
            fault
        )
    with pytest.raises(ValueError, match="the old text stands there 2 times"):
        mutants.broken("a + a", {"breaks": "it", "old": "a", "new": "b"})


@pytest.mark.parametrize("assertion", ["add(1, 2) == 3", "add(1, 0) == 1"])
def test_a_mutant_that_fails_its_test_is_caught(
    tmp_path, monkeypatch, capsys, assertion
):
    for name in ("d2lpar", "tests", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "d2lpar" / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    test = f"from d2lpar.sums import add\n\ndef test_sum():\n    assert {assertion}\n"
    (tmp_path / "tests" / "test_sums.py").write_text(test)
    fault = 'breaks = "no sum"\nold = "+"\nnew = "-"\ntest = "test_sums.py::test_sum"\n'
    (tmp_path / "tests" / "mutants.toml").write_text(f'[["sums.py"]]\n{fault}')
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    weak = "1, 0" in assertion
    assert mutants.main(["sums"]) == weak
    said = capsys.readouterr().out
    assert f"{1 - weak} of 1 are caught" in said and ("sums.py: no sum" in said) == weak


def test_a_goal_is_met_or_missed(capsys):
    for value, goal, again, verdict in (
        (0.9, 1.0, 1.0, "met"),
        (1.05, 1.0, 1.08, "met within noise"),
        (1.05, 1.0, 0.93, "met within noise"),  # as far off, below
        ((0.5, 1.05, 2.0), 1.0, 1.02, "MISSED"),  # the median counts
    ):
        timing.print_goal("a : b", value, goal, again)
        assert re.match(rf"goal {verdict}  +\d", capsys.readouterr().out), verdict
    timing.print_goal("a : b", 1.4, 1.5, at_least=True)
    assert "goal MISSED" in capsys.readouterr().out


# The files of docs/clusters


def test_the_schedulers_files_are_sound(monkeypatch):
    folder = ROOT / "docs" / "clusters"
    for name in ("train.sbatch", "two_machines.sh"):
        subprocess.run(["bash", "-n", folder / name], check=True)
    text = (folder / "train.sbatch").read_text("utf-8")
    comments, _, commands = text.partition("\nset -euo pipefail\n")
    assert "#SBATCH --requeue" in comments and "#SBATCH" not in commands
    job = yaml.safe_load((folder / "pytorchjob.yaml").read_text("utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert set(job["spec"]["pytorchReplicaSpecs"]) == {"Master", "Worker"}
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        [container] = replica["template"]["spec"]["containers"]
        first, *words = container["command"] + container["args"]
        launched = get_args_parser().parse_args(words)
        assert (first, launched.training_script) == ("torchrun", "d2lpar.train_ddp")
        assert arguments(launched.training_script_args).resume
