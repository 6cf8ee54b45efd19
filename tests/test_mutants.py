"""The lists of mutants fit the module; ``make mutants`` tries them."""

import subprocess
from pathlib import Path

import mutants
import pytest
from mutants import Mutant

ROOT = Path(__file__).resolve().parents[1]
LISTS = {room: mutants.read_list(room) for room in mutants.all_rooms()}
FAULT = Mutant("no sum", "sums.py", "a + b", "a - b", "tests/test_sums.py::test_sum")


def test_each_room_has_ten_and_all_have_120():
    rooms = {path.parent.name for path in (ROOT / "d2lpar").glob("*/__init__.py")}
    assert set(LISTS) == rooms | {"ground", "roof"}
    assert [room for room in LISTS if len(LISTS[room]) < 10] == []
    assert sum(map(len, LISTS.values())) >= 120


@pytest.mark.parametrize("room", LISTS)
def test_each_fits_once_and_names_a_test(room):
    complaints = []
    for mutant in LISTS[room]:
        try:
            compile(mutants.mutated(mutant, ROOT), mutant.file, "exec")
        except (OSError, SyntaxError, ValueError) as error:
            complaints.append(f"{mutant.breaks}: {error}")
        path, _, name = mutant.test.partition("::")
        text = (ROOT / path).read_text("utf-8") if (ROOT / path).exists() else ""
        test = name.partition("[")[0]
        if f"\ndef {test}(" not in text and f"\n{test} = on_ranks(" not in text:
            complaints.append(f"{mutant.breaks}: there is no {mutant.test}")
    assert complaints == []


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A module of one function, its test, and a list of one fault."""
    (tmp_path / "d2lpar").mkdir()
    (tmp_path / "tests" / "mutants").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "d2lpar" / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    test = (
        "from d2lpar.sums import add\n\ndef test_sum():\n    assert add(2, {}) == {}\n"
    )
    (tmp_path / "tests" / "test_sums.py").write_text(test.format(3, 5))
    (tmp_path / "tests" / "test_weak.py").write_text(test.format(0, 2))
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    return tmp_path


def try_faults(monkeypatch, *faults):
    monkeypatch.setattr(mutants, "read_list", lambda room: list(faults))
    return mutants.main(["roof"])


def test_a_fault_is_caught_and_the_tree_stays(project, monkeypatch, capsys):
    assert try_faults(monkeypatch, FAULT) == 0
    assert "1 of 1 mutants are caught" in capsys.readouterr().out
    assert "a + b" in (project / "d2lpar" / "sums.py").read_text()


@pytest.mark.parametrize(
    "change, complaint",
    [
        (
            {"test": "tests/test_weak.py::test_sum"},
            "no sum: tests/test_weak.py::test_sum passes",
        ),
        ({"old": "a * b"}, "no sum: sums.py has the old text 0 times"),
        ({"new": "a +"}, "no sum: pytest ends with status"),
    ],
)
def test_what_survives_or_cannot_be_tried_is_named(
    change, complaint, project, monkeypatch, capsys
):
    assert try_faults(monkeypatch, FAULT._replace(**change)) == 1
    printed = capsys.readouterr().out
    assert complaint in printed and "0 of 1 mutants are caught" in printed


def test_tests_must_pass_without_any_fault(project, monkeypatch, capsys):
    (project / "d2lpar" / "sums.py").write_text(
        "def add(a, b):\n    return a + b + 1\n"
    )
    assert try_faults(monkeypatch, FAULT) == 1
    assert "without any fault, these tests should pass" in capsys.readouterr().out


def test_only_the_lists_of_the_rooms_that_are_asked_for_are_read(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "ground.toml").write_text("no TOML")
    (tmp_path / "roof.toml").write_text("mutant = []")
    monkeypatch.setattr(mutants, "LISTS", tmp_path)
    monkeypatch.setattr(mutants, "run_tests", lambda *args, **options: (0, ""))
    assert mutants.main(["roof"]) == 0
    assert mutants.main(["kitchen"]) == 2
    assert "no list for kitchen: there are ground, roof" in capsys.readouterr().out


def test_a_test_that_takes_too_long_counts_as_failed(project, monkeypatch):
    limits = []

    def run(*args, timeout, **options):
        limits.append(timeout)
        if timeout is not None:
            raise subprocess.TimeoutExpired(args, timeout)
        return subprocess.CompletedProcess(args, 0, "")

    monkeypatch.setattr(mutants.subprocess, "run", run)
    assert try_faults(monkeypatch, FAULT) == 0
    assert limits == [None, 300]  # all together, without any fault, have no limit
