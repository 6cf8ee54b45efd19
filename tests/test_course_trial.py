"""nbgrader hands out what we do, and gives each kind of student the points due."""

from importlib.util import find_spec

import course_trial
import exercises
import nbformat
import pytest

NAME = "03_allreduce"
needs_nbgrader = pytest.mark.skipif(
    find_spec("nbgrader") is None,
    reason="needs nbgrader: make course-trial installs it",
)


@needs_nbgrader
def test_nbgrader_hands_out_our_cells_and_grades_the_checks(capsys):
    assert course_trial.main([NAME]) == 0, capsys.readouterr().out
    assert "blank 0, solved 16, forged 0, own 16" in capsys.readouterr().out


def grader(scores, changed=""):
    """A stand-in for nbgrader that gives these scores and changes a cell handed out."""

    def run(course, command, *arguments):
        if command == "generate_assignment":
            nb = exercises.student(
                course_trial.read(course / "source" / NAME / f"{NAME}.ipynb")
            )
            for cell in nb.cells:
                cell.source += "#" * (cell.id == changed)
            target = course / "release" / NAME / f"{NAME}.ipynb"
            target.parent.mkdir(parents=True)
            nbformat.write(nb, target)
        elif command == "export":
            rows = [f"{NAME},{student},{score}" for student, score in scores.items()]
            (course / "grades.csv").write_text(
                "\n".join(["assignment,student_id,raw_score", *rows])
            )

    return run


RIGHT = {"blank": 0, "solved": 16, "forged": 0, "own": 16}


@pytest.mark.parametrize(
    "scores, changed, complaint",
    [
        (RIGHT, "", "1 assignments, 0 complaints"),
        (RIGHT | {"forged": 16}, "", "forged 16, own 16, and not 0, 16, 0, 16"),
        (RIGHT | {"blank": 1}, "", "blank 1"),
        (RIGHT | {"own": 15}, "", "own 15"),
        (RIGHT, "two-way-check", "nbgrader hands out another cell two-way-check"),
    ],
)
def test_what_is_not_so_is_named(monkeypatch, capsys, scores, changed, complaint):
    monkeypatch.setattr(course_trial, "nbgrader", grader(scores, changed))
    assert course_trial.main(["03"]) == (complaint != "1 assignments, 0 complaints")
    assert complaint in capsys.readouterr().out


def test_students_hand_in_what_their_names_say():
    released = exercises.student(course_trial.read(exercises.MASTERS / f"{NAME}.ipynb"))
    handed_in = course_trial.submissions(NAME, released)
    stubs = {
        student: sum(
            exercises.STUB in cell.source
            for cell in nb.cells
            if cell.cell_type == "code"
        )
        for student, nb in handed_in.items()
    }
    assert (
        stubs["blank"] == stubs["forged"] >= 6 and stubs["solved"] == stubs["own"] == 0
    )
    checks = [
        c.source for c in handed_in["forged"].cells if exercises.role(c) == "check"
    ]
    assert checks == [course_trial.FORGED] * 6
    assert handed_in["blank"] == released
