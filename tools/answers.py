"""Try answers to the exercises: solutions, stubs, and wrong ones that must be refused.

    python tools/answers.py              of all chapters
    python tools/answers.py 03 museum    of those whose names begin so

A chapter's wrong answers are in tests/exercises/NN_name.toml: the id of the exercise's
solution cell, why the answer is wrong, the answer itself (``old`` in the solution
replaced by ``new``, or a whole ``answer``), and a regular expression for what the check
says. ``[needs]`` names exercises that an older torch cannot do, with the version that
can; they are left out there. Each chapter runs in a process of its own. Every answer
gets a fresh namespace, in which only the setup cell has run, so that no exercise needs
another one. The exit status is 1 when something is not as it should be.
"""

import argparse
import contextlib
import functools
import io
import json
import linecache
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import NamedTuple

from exercises import MASTERS, SOLUTION, role, solution, unsolved
from packaging.version import Version
from run_notebooks import read

LIMIT = 600  # seconds for a chapter's process
SENTENCE = 400  # characters that a check may say
KEYS = {"exercise", "why", "says"}


class Exercise(NamedTuple):
    """An exercise of a master: number, id and source of its answer, and its check."""

    number: int
    id: str
    answer: str  # with the marks of the solution
    check: str

    @property
    def solution(self) -> str:
        """The answer that earns all points."""
        return solution(self.answer)


def masters(begin: Sequence[str] = ()) -> list[str]:
    """Return the names of all masters, or of those that begin with one of ``begin``."""
    names = sorted(path.stem for path in MASTERS.glob("*.ipynb"))
    return [name for name in names if not begin or name.startswith(tuple(begin))]


def exercises_of(name: str) -> tuple[str, list[Exercise]]:
    """Return a master's setup, and those exercises whose check this torch can do."""
    setup, exercises, number, answer = "", [], 0, None
    for cell in read(MASTERS / f"{name}.ipynb").cells:
        heading = re.match(r"## (?:Exercise )?(\d+)\b", cell.source)
        if heading and cell.cell_type == "markdown":
            number = int(heading[1])
        kind = role(cell)
        if kind == "setup":
            setup += cell.source + "\n"
        elif kind == "solution":
            answer = cell
        elif kind == "check":
            exercises.append(
                Exercise(number, answer.id, answer.source, without_marks(cell.source))
            )
    needs, torch = listed(name).get("needs", {}), Version(version("torch"))
    return setup, [e for e in exercises if torch >= Version(needs.get(e.id, "0"))]


def listed(name: str) -> dict:
    """Return what a chapter's list of wrong answers holds."""
    return tomllib.loads((MASTERS / f"{name}.toml").read_text("utf-8"))


def without_marks(check: str) -> str:
    """Return a check with its hidden tests, but without the lines that mark them."""
    return re.sub(r"^[ \t]*### (BEGIN|END) HIDDEN TESTS\n?", "", check, flags=re.M)


def wrong_answers(name: str) -> list[dict]:
    """Return a chapter's wrong answers, each with its ``answer`` in full."""
    answers = {exercise.id: exercise.answer for exercise in exercises_of(name)[1]}
    entries = [
        entry for entry in listed(name)["wrong"] if entry.get("exercise") in answers
    ]
    for entry in entries:
        place = f"{name}.toml, {entry.get('exercise')}, {entry.get('why')}"
        if set(entry) not in (KEYS | {"answer"}, KEYS | {"old", "new"}):
            raise ValueError(f"{place}: it has {', '.join(entry)}")
        if "old" in entry:
            answer = answers[entry["exercise"]]
            found = [
                region
                for _, region in SOLUTION.findall(answer)
                if entry["old"] in region
            ]
            if len(found) != 1 or found[0].count(entry["old"]) != 1:
                raise ValueError(
                    f"{place}: the old text does not stand once in the solution"
                )
            changed = found[0].replace(entry["old"], entry["new"])
            entry["answer"] = solution(answer.replace(found[0], changed))
    return entries


def try_all(name: str) -> dict:
    """Run all answers of a chapter in this process; return what the checks said."""
    from d2lpar import data

    # each setup would read the files again
    data.read_idx = functools.cache(data.read_idx)
    setup, exercises = exercises_of(name)
    begin = time.perf_counter()
    namespace = fresh(setup)
    whole = [attempt(namespace, exercise, exercise.solution) for exercise in exercises]
    seconds = time.perf_counter() - begin
    wrong = wrong_answers(name)
    by_id = {exercise.id: exercise for exercise in exercises}
    return {
        "seconds": seconds,
        "whole": whole,
        "alone": [attempt(fresh(setup), e, e.solution) for e in exercises],
        "stub": [attempt(fresh(setup), e, unsolved(e.answer)) for e in exercises],
        "wrong": [
            attempt(fresh(setup), by_id[w["exercise"]], w["answer"]) for w in wrong
        ],
    }


def fresh(setup: str) -> dict:
    """Return a namespace like that of a new kernel in which the setup cell has run."""
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    namespace = {"__name__": "__main__"}  # so that functions travel to ranks by value
    run_cell("setup", setup, namespace)
    return namespace


def run_cell(name: str, source: str, namespace: dict) -> None:
    """Run a cell, whose source tracebacks and ranks will find."""
    place = f"<{name}>"
    linecache.cache[place] = (
        len(source),
        None,
        source.splitlines(keepends=True),
        place,
    )
    exec(compile(source, place, "exec"), namespace)


def attempt(namespace: dict, exercise: Exercise, answer: str) -> dict:
    """Run an answer and its check; return what they printed, and the check's error.

    Like a student who runs all cells, this goes on to the check when the answer itself
    raises.
    """
    from d2lpar.study.checks import AnswerError

    out, err, broken, error = io.StringIO(), io.StringIO(), None, None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_cell(exercise.id, answer, namespace)
        except Exception as raised:
            broken = repr(raised)
        try:
            run_cell(f"{exercise.id}-check", exercise.check, namespace)
        except AnswerError as refused:
            error = str(refused)
        except Exception as other:
            error = f"no AnswerError but {other!r}"
    printed, complained = out.getvalue(), err.getvalue()
    return {"printed": printed, "stderr": complained, "raised": broken, "error": error}


def at_a_time() -> int:
    """Return how many chapters fit side by side at OMP_NUM_THREADS cores each."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("OMP_NUM_THREADS", "1")))


def run(name: str) -> dict:
    """Try a chapter's answers in a process of its own; return what ``try_all`` does."""
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    command = [sys.executable, "-W", "error", __file__, "--in-this-process", name]
    options = {
        "capture_output": True,
        "text": True,
        "timeout": LIMIT,
        "env": environment,
    }
    begin = time.perf_counter()
    done = subprocess.run(command, **options)
    if done.returncode:
        raise RuntimeError(
            f"{name}: the answers cannot be tried:\n{done.stdout}{done.stderr}"
        )
    return json.loads(done.stdout.splitlines()[-1]) | {
        "process": time.perf_counter() - begin
    }


def complaints(name: str, found: dict) -> list[str]:
    """Return what is wrong: solutions that fail, and wrong answers that pass."""
    lines = []
    for exercise, *attempts in zip(
        exercises_of(name)[1], found["whole"], found["alone"], strict=True
    ):
        for how, said in zip(("after the others", "alone"), attempts, strict=True):
            last = next(iter(said["printed"].splitlines()[-1:]), "")
            bad = said["error"] or said["stderr"] or said["raised"]
            if bad or not last.startswith(f"{exercise.number}: done"):
                lines.append(
                    f"{exercise.id}: the solution, {how}, is not simply done: {said}"
                )
    for exercise, said in zip(exercises_of(name)[1], found["stub"], strict=True):
        lines += [
            f"{exercise.id}, the stub: {line}"
            for line in bad_refusal(exercise.number, said)
        ]
    numbers = {exercise.id: exercise.number for exercise in exercises_of(name)[1]}
    for wrong, said in zip(wrong_answers(name), found["wrong"], strict=True):
        bad = bad_refusal(numbers[wrong["exercise"]], said, wrong["says"])
        lines += [f"{wrong['exercise']}, {wrong['why']}: {line}" for line in bad]
    return lines


def bad_refusal(number: int, said: dict, pattern: str = "") -> list[str]:
    """Return what is wrong with what a check said of an answer that it must refuse."""
    text = said["error"]
    if text is None:
        return ["it is accepted"]
    if (
        not text.startswith(f"{number}: ")
        or "\n" in text
        or not 12 < len(text) <= SENTENCE
    ):
        return [f"this is not one sentence that begins with {number}: {text!r}"]
    if not re.search(pattern, text):
        return [f"{text!r} does not match {pattern!r}"]
    return []


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="how the names of the chapters begin")
    parser.add_argument("--in-this-process", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print what the checks say"
    )
    options = parser.parse_args(arguments)
    if options.in_this_process:
        print(json.dumps(try_all(options.in_this_process)))
        return 0
    chosen = masters(options.names)
    bad = refused = solved = 0
    with ThreadPoolExecutor(at_a_time()) as pool:
        for name, found in zip(chosen, pool.map(run, chosen), strict=True):
            wrong = complaints(name, found)
            solved, refused = (
                solved + len(found["whole"]),
                refused + len(found["wrong"]),
            )
            print(
                f"{name:30} {len(found['whole'])} exercises in {found['seconds']:.1f}"
                f" s, with {len(found['wrong'])} wrong answers and the rest"
                f" {found['process']:.1f} s",
                *wrong,
                sep="\n    ",
                flush=True,
            )
            if options.verbose:
                said = {
                    "done": found["whole"],
                    "stub": found["stub"],
                    "wrong": found["wrong"],
                }
                for kind, attempts in said.items():
                    for one in attempts:
                        print(f"    {kind}: {one['error'] or one['printed'].rstrip()}")
            bad += len(wrong)
    print(f"{solved} exercises, {refused} wrong answers, {bad} complaints")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
