"""Try an answer to an exercise: a solution, a stub, or a wrong one, to be refused.

A chapter's wrong answers are in tests/exercises/NN_name.toml: the id of the exercise's
solution cell, why the answer is wrong, the answer itself (``old`` in the solution
replaced by ``new``, or a whole ``answer``), and a regular expression for what the check
says. ``[needs]`` names exercises that an older torch cannot do, with the version that
can; they are left out there. By hand: nothing else tries wrong answers.
"""

import contextlib
import linecache
import re
import tomllib
from functools import cache
from importlib.metadata import version
from typing import NamedTuple

import torch
from exercises import MASTERS, SOLUTION, masters, role, solution
from packaging.version import Version

from d2lpar.checks import AnswerError

SENTENCE = 400  # characters that a check may say


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


@cache
def exercises_of(name: str) -> tuple[str, list[Exercise]]:
    """Return a master's setup, and those exercises whose check this torch can do."""
    setup, exercises, number, answer = "", [], 0, None
    for cell in masters()[name].cells:
        heading = re.match(r"## (?:Exercise )?(\d+)\b", cell.source)
        if heading and cell.cell_type == "markdown":
            number = int(heading[1])
        kind = role(cell)
        if kind == "setup":
            setup += cell.source + "\n"
        elif kind == "solution":
            answer = cell
        elif kind == "check":
            marks = r"^[ \t]*### (BEGIN|END) HIDDEN TESTS\n?"
            check = re.sub(marks, "", cell.source, flags=re.M)
            exercises.append(Exercise(number, answer.id, answer.source, check))
    needs, has = listed(name).get("needs", {}), Version(version("torch"))
    return setup, [e for e in exercises if has >= Version(needs.get(e.id, "0"))]


@cache
def listed(name: str) -> dict:
    """Return what a chapter's list of wrong answers holds."""
    return tomllib.loads((MASTERS / f"{name}.toml").read_text("utf-8"))


def wrong_answers(name: str, exercise: Exercise) -> list[dict]:
    """Return an exercise's wrong answers, each with its ``answer`` in full."""
    wrong = [w for w in listed(name)["wrong"] if w["exercise"] == exercise.id]
    return [w | {"answer": w.get("answer") or _changed(exercise, w)} for w in wrong]


def _changed(exercise: Exercise, wrong: dict) -> str:
    """Return the solution with its old text replaced, which stands in it once."""
    regions = [region for _, region in SOLUTION.findall(exercise.answer)]
    if (count := sum(region.count(wrong["old"]) for region in regions)) != 1:
        place = f"{exercise.id}, {wrong['why']}"
        raise ValueError(f"{place}: the old text stands {count} times in the solution")
    [region] = [region for region in regions if wrong["old"] in region]
    changed = region.replace(wrong["old"], wrong["new"])
    return solution(exercise.answer.replace(region, changed))


def fresh(setup: str) -> dict:
    """Return a namespace like that of a new kernel in which the setup cell has run."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    namespace = {"__name__": "__main__"}  # so that functions travel to ranks by value
    run_cell("setup", setup, namespace)
    return namespace


def run_cell(name: str, source: str, namespace: dict) -> None:
    """Run a cell, whose source tracebacks and ranks will find."""
    place, lines = f"<{name}>", source.splitlines(keepends=True)
    linecache.cache[place] = len(source), None, lines, place
    exec(compile(source, place, "exec"), namespace)


def attempt(namespace: dict, exercise: Exercise, answer: str) -> str:
    """Run an answer and its check; return the sentence with which this refuses it.

    Like a student who runs all cells, this goes on to the check when the answer itself
    raises.
    """
    with contextlib.suppress(Exception):
        run_cell(exercise.id, answer, namespace)
    try:
        run_cell(f"{exercise.id}-check", exercise.check, namespace)
    except AnswerError as refused:
        return str(refused)
    return ""


def flaw(number: int, refusal: str, pattern: str = "") -> str:
    """Return what is wrong with a check's refusal of a wrong answer, or ""."""
    if not refusal:
        return "it is accepted"
    sentence = refusal.startswith(f"{number}: ") and "\n" not in refusal
    if not sentence or not 12 < len(refusal) <= SENTENCE:
        return f"this is not one sentence that begins with {number}: {refusal!r}"
    found = re.search(pattern, refusal)
    return "" if found else f"{refusal!r} does not match {pattern!r}"
