"""Let nbgrader make and grade a course from the exercises, with students of four kinds.

    python tools/course_trial.py              all chapters
    python tools/course_trial.py 03 museum    those whose names begin so

``blank`` hands in what was handed out, ``solved`` the solutions, ``forged`` has
replaced the checks by others that say done, and ``own`` has solved the notebook of
notebooks/exercises instead of the one that nbgrader made. The exit status is 1 unless
nbgrader hands out the same cells as we do, and gives these students 0, all, 0 and all
points of the checks. What a person grades is left out.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from answers import masters
from exercises import CONFIG, MASTERS, STUDENTS, make_course, role, solution
from nbformat import NotebookNode
from run_notebooks import read

LIMIT = 900  # seconds for a command of nbgrader
FORGED = 'print("1: done.")'


def nbgrader(course: Path, *arguments: str) -> None:
    """Run a command of nbgrader in the course; RuntimeError says why it failed."""
    # It looks for alembic on the path.
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    )
    command = [sys.executable, "-m", "nbgrader", *arguments]
    options = {"capture_output": True, "text": True, "env": os.environ | {"PATH": path}}
    done = subprocess.run(command, cwd=course, timeout=LIMIT, **options)
    if done.returncode:
        said = f"{done.stdout}{done.stderr}"
        raise RuntimeError(
            f"nbgrader {' '.join(arguments)} ends with {done.returncode}:\n{said}"
        )


def submissions(name: str, released: NotebookNode) -> dict[str, NotebookNode]:
    """Return what each student hands in."""
    sources = {
        cell.id: solution(cell.source) for cell in read(MASTERS / f"{name}.ipynb").cells
    }
    found = {"blank": released, "forged": nbformat.from_dict(released)}
    for cell in found["forged"].cells:
        if role(cell) == "check":
            cell.source = FORGED
    for student, nb in (
        ("solved", released),
        ("own", read(STUDENTS / f"{name}.ipynb")),
    ):
        found[student] = nbformat.from_dict(nb)
        for cell in found[student].cells:
            if role(cell) == "solution":
                cell.source = sources[cell.id]
    return found


def hand_in(course: Path, name: str) -> list[str]:
    """Have the assignment made, and handed in by all students; return what differs."""
    nbgrader(course, "generate_assignment", name)
    released = nbformat.read(course / "release" / name / f"{name}.ipynb", as_version=4)
    for student, nb in submissions(name, released).items():
        folder = course / "submitted" / student / name
        folder.mkdir(parents=True)
        nbformat.write(nb, folder / f"{name}.ipynb")
    ours = {cell.id: cell.source for cell in read(STUDENTS / f"{name}.ipynb").cells}
    theirs = {cell.id: cell.source for cell in released.cells}
    differ = [
        id for id in ours.keys() | theirs.keys() if ours.get(id) != theirs.get(id)
    ]
    return [f"nbgrader hands out another cell {id}" for id in sorted(differ)]


def grades(course: Path) -> dict[tuple[str, str], float]:
    """Return the points of each (assignment, student)."""
    nbgrader(course, "export", "--to=grades.csv")
    with (course / "grades.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        (row["assignment"], row["student_id"]): float(row["raw_score"]) for row in rows
    }


def points(name: str) -> float:
    """Return the points of all checks of a master."""
    cells = read(MASTERS / f"{name}.ipynb").cells
    return sum(cell.metadata.nbgrader.points for cell in cells if role(cell) == "check")


def try_course(course: Path, names: list[str]) -> list[str]:
    """Make a course, and have these assignments graded; return what is wrong."""
    make_course(course)
    (course / "nbgrader_config.py").write_text(CONFIG, encoding="utf-8")
    complaints = []
    for name in names:
        complaints += [f"{name}: {line}" for line in hand_in(course, name)]
        begin = time.perf_counter()
        nbgrader(course, "autograde", name)
        seconds = (time.perf_counter() - begin) / 4
        found, best = grades(course), points(name)
        given = {
            student: found[name, student]
            for student in ("blank", "solved", "forged", "own")
        }
        shown = ", ".join(f"{student} {score:g}" for student, score in given.items())
        print(
            f"{name:30} of {best:g} points: {shown}; {seconds:.1f} s per student",
            flush=True,
        )
        if list(given.values()) != [0, best, 0, best]:
            complaints.append(f"{name}: {shown}, and not 0, {best:g}, 0, {best:g}")
    return complaints


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="how the names of the chapters begin")
    options = parser.parse_args(arguments)
    chosen = masters(options.names)
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        complaints = try_course(Path(folder), chosen)
    print(
        *complaints,
        f"{len(chosen)} assignments, {len(complaints)} complaints",
        sep="\n",
    )
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
