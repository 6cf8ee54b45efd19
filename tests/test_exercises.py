"""The exercises: students get what masters give, and checks tell right from wrong."""

import ast
import re
from functools import cache

import answers
import exercises
import nbformat
import pytest
from answers import attempt, exercises_of, flaw, fresh, wrong_answers
from exercises import CHAPTERS, MASTERS, STUDENTS, role
from nbformat.v4 import new_code_cell, new_notebook

from d2lpar import data
from d2lpar.checks import STUB

NAMES = sorted(path.stem for path in CHAPTERS.glob("*.ipynb"))
ORDER = r"text setup( text)?( text( setup)? solution check( manual)?| text manual)+"

each_chapter = pytest.mark.parametrize("name", NAMES)
each_master = pytest.mark.parametrize("name", [*NAMES, "museum"])
each_exercise = pytest.mark.parametrize(
    ("name", "exercise"),
    [(name, e) for name in exercises.masters() for e in exercises_of(name)[1]],
    ids=lambda value: getattr(value, "id", value),
)


# What students get


def test_students_get_what_the_masters_give_with_the_texts_of_the_chapters():
    texts = exercises.expected()
    assert {path for path in texts if path.parent == STUDENTS} == {
        *STUDENTS.glob("*.ipynb")
    }
    assert {path.stem for path in MASTERS.glob("*.*")} == {*NAMES, "museum"}
    stale = [path for path, text in texts.items() if path.read_text("utf-8") != text]
    assert stale == []  # make exercises


@each_master
def test_a_master_has_its_cells_in_order_with_the_marks_of_nbgrader(name):
    nb = exercises.masters()[name]
    nbformat.validate(nb)
    kinds = [role(cell) for cell in nb.cells]
    assert re.fullmatch(ORDER, " ".join(kinds)), kinds
    ids = {kind: [] for kind in kinds}
    for kind, cell in zip(kinds, nb.cells, strict=True):
        mark = cell.metadata.get("nbgrader", {})
        ids[kind].append(cell.id)
        assert cell.cell_type == "markdown" or mark
        assert mark.get("grade_id", cell.id) == cell.id and not cell.get("outputs")
        assert (mark.get("points", 0) > 0) == (kind in ("check", "manual")), cell.id
        assert mark.get("locked", False) == (kind in ("setup", "check")), cell.id
        answer = exercises.SOLUTION.search(cell.source)
        assert bool(answer) == (kind in ("solution", "manual")), cell.id
        if kind == "solution":  # what is left must be Python, and begin with the stub
            compile(exercises.unsolved(cell.source), cell.id, "exec")
    assert ids["check"] == [f"{id}-check" for id in ids["solution"]]
    listed = {wrong["exercise"] for wrong in answers.listed(name)["wrong"]}
    assert listed == set(ids["solution"])


@each_chapter
def test_every_exercise_of_the_chapter_is_there_and_all_kinds_are(name):
    texts = exercises.chapter_texts(name)
    headings = [c.source.partition("\n")[0] for c in exercises.masters()[name].cells]
    assert [h for h in headings if h.startswith("## ")] == [h for h in texts if h]
    last = nbformat.read(CHAPTERS / f"{name}.ipynb", as_version=4).cells[-1].source
    assert f"[With checks](exercises/{name}.ipynb)" in last
    assert len(texts) > 3
    for asked in (r"[Pp]redict", r"[Rr]epair", r"(?i)\btorch|\bdist\.|`nn\."):
        assert any(re.search(asked, text) for text in texts.values()), asked


def definitions(source):
    """The functions and classes at the top of a piece of code, as (name, dump)."""
    lines = [line for line in source.splitlines() if not line.startswith(("!", "%"))]
    kinds = ast.FunctionDef | ast.ClassDef
    tree = ast.parse("\n".join(lines))
    return [(n.name, ast.dump(n)) for n in tree.body if isinstance(n, kinds)]


@each_chapter
def test_what_the_setup_takes_from_the_chapter_is_the_chapters(name):
    cells = nbformat.read(CHAPTERS / f"{name}.ipynb", as_version=4).cells
    own = [c for c in cells if not c.source.startswith(("%%", "#@save"))]
    shown = [d for c in own if c.cell_type == "code" for d in definitions(c.source)]
    setup = definitions(exercises_of(name)[0])
    assert [n for n, code in setup if n in dict(shown) and (n, code) not in shown] == []


def test_links_lead_somewhere_and_the_museum_has_its_exhibits():
    for path in STUDENTS.glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        text = "\n".join(c.source for c in cells if c.cell_type == "markdown")
        prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        for link in re.findall(r"\]\(((?!https?:|#)[^)\s]+)\)", prose):
            assert (STUDENTS / link).exists(), (path.name, link)
        if path.stem == "museum":
            exhibits = re.findall(r"^## (\d+)\. ", text, flags=re.M)
            assert exhibits == [str(i) for i in range(1, 21)]


# What the checks say


@pytest.fixture(scope="module", autouse=True)
def read_once():
    """Each setup would read the data again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "read_idx", cache(data.read_idx))
        yield


@each_exercise
def test_a_solution_is_done_and_a_stub_and_wrong_answers_are_refused(
    name, exercise, request, capsys
):
    number, setup = exercise.number, exercises_of(name)[0]
    assert attempt(fresh(setup), exercise, exercise.solution) == ""
    said, complained = capsys.readouterr()
    assert said.splitlines()[-1].startswith(f"{number}: done") and not complained, said
    stub = exercises.unsolved(exercise.answer)
    assert flaw(number, attempt(fresh(setup), exercise, stub)) == ""
    wrong = wrong_answers(name, exercise)
    assert len({w["answer"] for w in wrong}) >= 3
    for w in wrong if request.config.getoption("all_answers") else wrong[:1]:
        refusal = attempt(fresh(setup), exercise, w["answer"])
        assert flaw(number, refusal, w["says"]) == "", w["why"]


@each_master
def test_solutions_are_done_one_after_the_other(name, request):
    if not request.config.getoption("all_answers"):
        pytest.skip("make exercises tries this, too")
    setup, tried = exercises_of(name)
    kernel = fresh(setup)
    assert [attempt(kernel, e, e.solution) for e in tried] == [""] * len(tried) != []


# The tools, on an exercise of their own


CHECK = """with exercise(1) as done:
    assert double(2) == 4, f"double(2) is {double(2)}: how often is x counted?"
    ### BEGIN HIDDEN TESTS
    assert double(3) == 6, f"double(3) is {double(3)}."
    ### END HIDDEN TESTS
    done("4.")"""
ANSWER = '''def double(x):
    """Return twice x."""
    ### BEGIN SOLUTION
    return 2 * x
    ### END SOLUTION
'''


def test_a_student_gets_stubs_and_visible_checks_and_locked_cells():
    nb = new_notebook(cells=[new_code_cell(ANSWER), new_code_cell(CHECK)])
    nb.cells[1].metadata.nbgrader = {"grade": True, "locked": True}
    given, check = exercises.student(nb).cells
    assert given.source == f'def double(x):\n    """Return twice x."""\n    {STUB}'
    assert "double(2)" in check.source and "double(3)" not in check.source
    assert check.metadata.editable is False and "editable" not in given.metadata
    assert exercises.solution(ANSWER).splitlines()[-1] == "    return 2 * x"


def test_what_a_check_accepts_or_says_badly_is_told(capsys):
    one = answers.Exercise(1, "double", ANSWER, CHECK)
    setup = "from d2lpar.checks import exercise"
    assert attempt(fresh(setup), one, one.solution) == ""
    assert capsys.readouterr().out == "1: done. 4.\n"
    refusal = attempt(fresh(setup), one, "def double(x):\n    return 3 * x")
    assert refusal.startswith("1: double(2) is 6") and flaw(1, refusal, "is 6") == ""
    assert flaw(1, "") == "it is accepted" and "does not match" in flaw(1, refusal, "7")
    for said in (refusal[3:], f"{refusal}\n", "1: no", refusal * 99, f"2{refusal[1:]}"):
        assert "this is not one sentence that begins with 1" in flaw(1, said)
    for old, times in (("r", 2), ("nowhere", 0)):
        with pytest.raises(ValueError, match=f"double, why: .* stands {times} times"):
            answers._changed(one, {"old": old, "new": "y", "why": "why"})
    changed = answers._changed(one, {"old": "2 * x", "new": "x * x", "why": ""})
    assert changed.splitlines()[-1] == "    return x * x"
