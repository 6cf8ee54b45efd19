"""Let nbgrader make and grade a course from the exercises, with students of four kinds.

python tools/course_trial.py [03 museum]    all, or those whose names begin so

``blank`` hands in what was handed out, ``solved`` the solutions, ``forged`` has
replaced the checks by others that say done, and ``own`` has solved the notebook of
notebooks/exercises. They must get 0, all, 0 and all points of the checks, and
nbgrader may warn of changed checks only where ``forged`` has changed them.
"""

import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from exercises import CONFIG, STUDENTS, make_course, masters, role, solution

# It looks for alembic on the path, and warns of its own use of a database.
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
ENV = os.environ | {"PATH": PATH, "PYTHONWARNINGS": "ignore"}


def nbgrader(course: Path, *words: str) -> list[str]:
    """Run a command of nbgrader in the course; return what it warns of."""
    command = [sys.executable, "-m", "nbgrader", *words, "--log-level=WARN"]
    ran = subprocess.run(command, cwd=course, env=ENV, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"nbgrader {' '.join(words)}: {ran.stderr}")
    return [line for line in ran.stderr.splitlines() if "WARNING" in line]


def hand_in(course: Path, name: str, master: nbformat.NotebookNode) -> None:
    """Have the assignment made, and handed in by all students."""
    nbgrader(course, "generate_assignment", name)
    released = course / "release" / name / f"{name}.ipynb"
    sources = {cell.id: solution(cell.source) for cell in master.cells}
    for student in ("blank", "solved", "forged", "own"):
        given = STUDENTS / f"{name}.ipynb" if student == "own" else released
        nb = nbformat.read(given, as_version=4)
        for cell in nb.cells:
            if student in ("solved", "own") and role(cell) == "solution":
                cell.source = sources[cell.id]
            elif student == "forged" and role(cell) == "check":
                cell.source = 'print("1: done.")'
        target = course / "submitted" / student / name / f"{name}.ipynb"
        target.parent.mkdir(parents=True)
        nbformat.write(nb, target)


status = 0
chosen = tuple(sys.argv[1:] or [""])
with tempfile.TemporaryDirectory(prefix="course-") as folder:
    course = Path(folder)
    make_course(course)
    (course / "nbgrader_config.py").write_text(CONFIG, encoding="utf-8")
    for name, master in masters().items():
        if name.startswith(chosen):
            hand_in(course, name, master)
            honest = nbgrader(course, "autograde", name, "--student=[!f]*")
            forged = nbgrader(course, "autograde", name, "--student=forged")
            nbgrader(course, "export", "--to=grades.csv")
            with (course / "grades.csv").open(newline="", encoding="utf-8") as file:
                rows = [
                    row for row in csv.DictReader(file) if row["assignment"] == name
                ]
            points = {row["student_id"]: float(row["raw_score"]) for row in rows}
            checks = [cell for cell in master.cells if role(cell) == "check"]
            best = sum(cell.metadata.nbgrader.points for cell in checks)
            print(f"{name}: {points} of {best}", *honest, sep="\n  ", flush=True)
            wanted = {"blank": 0, "solved": best, "forged": 0, "own": best}
            changed = [line for line in forged if "'checksum'" in line]
            status |= points != wanted or honest != [] or len(changed) != len(checks)
sys.exit(status)
