"""The exercises: students get what masters give, and checks tell right from wrong.

tools/answers.py tries the answers, a chapter in a process; here its findings are held
to.
"""

import ast
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import answers
import exercises
import nbformat
import pytest
import run_notebooks
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from d2lpar import data
from d2lpar.study.checks import STUB

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
NAMES = [*CHAPTERS, "museum"]
PROVISIONAL = (  # the end of the book takes its place; it has one exercise
    "18_comparison"
)
EXHIBITS = 13
MANUAL_ANSWER = 40  # characters of a model answer, at least

each_master = pytest.mark.parametrize("name", NAMES)
each_chapter = pytest.mark.parametrize("name", CHAPTERS)


def master(name):
    return run_notebooks.read(exercises.MASTERS / f"{name}.ipynb")


def definitions(source):
    """The functions and classes at the top of a piece of code, as (name, dump)."""
    kinds = ast.FunctionDef | ast.ClassDef
    return [
        (n.name, ast.dump(n)) for n in ast.parse(source).body if isinstance(n, kinds)
    ]


def assigned(source):
    """The names that a cell gives values to, outside of its functions and classes."""
    names, waiting = set(), [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif not isinstance(
            node, ast.Lambda | ast.ListComp | ast.GeneratorExp | ast.DictComp
        ):
            waiting += ast.iter_child_nodes(node)
    return names


# What students get


def test_there_is_a_master_for_each_chapter_and_for_the_museum():
    assert answers.masters() == sorted(NAMES)
    assert sorted(path.stem for path in exercises.MASTERS.glob("*.toml")) == sorted(
        NAMES
    )


def test_students_get_what_the_masters_give_with_the_texts_of_the_chapters():
    assert exercises.differences() == []  # make exercises


def check_form(nb):
    """Yield what is wrong with a master's cells: their order, marks or contents."""
    kinds = [exercises.role(cell) for cell in nb.cells]
    order = " ".join(kinds)
    # The museum has a cell between an exhibit and its repair that shows what goes
    # wrong.
    if not re.fullmatch(
        r"text setup( text)?( text( setup)? solution check( manual)?| text manual)+",
        order,
    ):
        yield (
            "not a title, a setup, and text, solution and check of each exercise:"
            f" {order}"
        )
    if nb.metadata != run_notebooks.METADATA or any(
        cell.get("outputs") for cell in nb.cells
    ):
        yield "metadata or outputs of a run"
    marks = [
        cell.metadata["nbgrader"] for cell in nb.cells if "nbgrader" in cell.metadata
    ]
    if any(
        cell.cell_type == "code" and "nbgrader" not in cell.metadata
        for cell in nb.cells
    ):
        yield "a code cell without marks"
    ids = [mark["grade_id"] for mark in marks]
    if len(set(ids)) < len(ids):
        yield f"two cells with one id: {ids}"
    for kind, cell in zip(kinds, nb.cells, strict=True):
        mark = cell.metadata.get("nbgrader", {"grade_id": cell.id})
        if mark["grade_id"] != cell.id:
            yield f"{cell.id} has another id for nbgrader"
        if kind in ("check", "manual") and not mark["points"] > 0:
            yield f"{cell.id} has no points"
        if kind in ("setup", "check") and not mark["locked"]:
            yield f"{cell.id} is not locked"
        if kind in ("solution", "manual") and not exercises.SOLUTION.search(
            cell.source
        ):
            yield f"{cell.id} has no solution"
        if (
            kind == "manual"
            and len(exercises.SOLUTION.findall(cell.source)[0][1]) < MANUAL_ANSWER
        ):
            yield f"{cell.id} has no model answer"
        # A line that raises between two functions would leave the second one undefined.
        if kind == "solution" and re.search(
            r"^raise .*\n+\S", exercises.unsolved(cell.source), re.M
        ):
            yield (
                f"{cell.id}: a solution at the top level is not the last thing in its"
                " cell"
            )
    checks = [
        cell.id for kind, cell in zip(kinds, nb.cells, strict=True) if kind == "check"
    ]
    solutions = [
        cell.id
        for kind, cell in zip(kinds, nb.cells, strict=True)
        if kind == "solution"
    ]
    if checks != [f"{name}-check" for name in solutions]:
        yield f"checks have other ids than solutions: {checks}"


@each_master
def test_a_master_has_its_cells_in_order(name):
    nb = master(name)
    nbformat.validate(nb)
    assert list(check_form(nb)) == []


@each_master
def test_no_check_overwrites_what_belongs_to_another_exercise(name):
    setup, tried = answers.exercises_of(name)
    for one in tried:
        others = [
            assigned(setup),
            *(assigned(other.solution) for other in tried if other != one),
        ]
        lost = assigned(one.check) & set().union(*others)
        assert not lost, f"{one.id}-check changes {lost}"


@each_master
def test_a_student_sees_no_solution_and_no_hidden_test(name):
    text = (exercises.STUDENTS / f"{name}.ipynb").read_text("utf-8")
    assert not re.search(r"### (BEGIN|END)|HIDDEN TESTS", text)
    nb = nbformat.reads(text, as_version=4)
    for cell in nb.cells:
        if exercises.role(cell) == "solution":
            assert STUB in cell.source, cell.id
            compile(cell.source, cell.id, "exec")
    assert nb.metadata == run_notebooks.METADATA


@each_chapter
def test_every_exercise_of_the_chapter_is_there_and_the_chapter_links_to_them(name):
    texts = exercises.chapter_texts(name)
    headings = [cell.source.partition("\n")[0] for cell in master(name).cells]
    found = [heading for heading in headings if heading.startswith("## ")]
    assert found == [heading for heading in texts if heading]
    assert len(found) >= (1 if name == PROVISIONAL else 3)
    assert ("preface" in [cell.id for cell in master(name).cells]) == bool(texts[""])
    last = run_notebooks.read(ROOT / "notebooks" / f"{name}.ipynb").cells[-1].source
    assert (
        f"[With checks](exercises/{name}.ipynb)" in last.partition("## Exercises\n")[2]
    )


@pytest.mark.parametrize("name", [name for name in CHAPTERS if name != PROVISIONAL])
def test_a_chapter_asks_to_predict_to_repair_and_to_use_torch(name):
    texts = [text for heading, text in exercises.chapter_texts(name).items() if heading]
    for asked in (r"[Pp]redict", r"[Rr]epair", r"(?i)\btorch|\bdist\.|`nn\."):
        assert any(re.search(asked, text) for text in texts), asked


def test_names_that_a_cell_assigns_are_found():
    source = (
        "import a.b as c\nfor d in []:\n    with e as f: g: int = 1\ndef h():\n    i"
        " = 1\n"
    )
    assert assigned(source + "[j for j in []]; k = lambda l: [m := 1]") == set("cdfghk")


@each_chapter
def test_what_the_setup_takes_from_the_chapter_is_the_chapters(name):
    cells = run_notebooks.read(ROOT / "notebooks" / f"{name}.ipynb").cells
    shown = {}
    for cell in cells:
        if cell.cell_type == "code" and not cell.source.startswith(("%%", "#@save")):
            lines = [
                line
                for line in cell.source.splitlines()
                if not line.startswith(("!", "%"))
            ]
            for defined, code in definitions("\n".join(lines)):
                shown.setdefault(defined, []).append(code)
    setup, _ = answers.exercises_of(name)
    assert [
        n for n, code in definitions(setup) if n in shown and code not in shown[n]
    ] == []


def test_the_museum_has_its_exhibits():
    headings = [cell.source.partition("\n")[0] for cell in master("museum").cells]
    numbers = [
        int(n) for n in re.findall(r"^## (\d+)\. ", "\n".join(headings), flags=re.M)
    ]
    assert numbers == list(range(1, EXHIBITS + 1))


@each_master
def test_links_lead_somewhere(name):
    nb = nbformat.read(exercises.STUDENTS / f"{name}.ipynb", as_version=4)
    for cell in nb.cells:
        prose = cell.source.partition("```")[0] if cell.cell_type == "markdown" else ""
        for link in re.findall(r"\]\(((?!https?:|#)[^)\s]+)\)", prose):
            assert (exercises.STUDENTS / link).exists(), link


# What the checks say


@pytest.fixture(scope="session")
def trials(request):
    """A future of each trial that was asked for."""
    pool = ThreadPoolExecutor(answers.at_a_time())
    asked = [
        item
        for item in request.session.items
        if "trials" in getattr(item, "fixturenames", ())
    ]
    names = dict.fromkeys(item.callspec.params["name"] for item in asked)
    yield {name: pool.submit(answers.run, name) for name in names}
    pool.shutdown(cancel_futures=True)


@each_master
def test_solutions_are_done_and_stubs_and_wrong_answers_are_refused_with_a_sentence(
    name, trials
):
    found = trials[name].result()
    assert answers.complaints(name, found) == []
    assert len(found["whole"]) == len(answers.exercises_of(name)[1]) > 0


@each_master
def test_each_exercise_has_three_wrong_answers(name):
    entries = answers.listed(name)["wrong"]
    ids = {cell.id for cell in master(name).cells if exercises.role(cell) == "solution"}
    assert (
        {entry["exercise"] for entry in entries}
        == ids
        >= set(answers.listed(name).get("needs", {}))
    )
    for id in ids:
        wrong = [entry for entry in entries if entry["exercise"] == id]
        tried = {e.get("answer", (e.get("old"), e.get("new"))) for e in wrong}
        assert len(tried) >= 3 and all(len(e["says"]) > 3 for e in wrong), id


# The tools, on a master of their own


CHECK = """with exercise(1) as done:
    found = double(2)
    assert found == 4, f"double(2) is {found}: how often is x counted?"
    ### BEGIN HIDDEN TESTS
    assert double(3) == 6, f"double(3) is {double(3)}."
    ### END HIDDEN TESTS
    done("4.")"""
ANSWER = '''factor = None
### BEGIN SOLUTION
factor = 2
### END SOLUTION


def double(x):
    """Return twice x."""
    ### BEGIN SOLUTION
    return factor * x
    ### END SOLUTION
'''
WRONG = """
[[wrong]]
exercise = "double"
why = "three"
old = "factor * x"
new = "3 * x"
says = 'double\\(2\\) is 6: how often'

[[wrong]]
exercise = "double"
why = "a square"
answer = "def double(x):\\n    return x * x"
says = "is 9"
"""


def marked(kind, source, id, **marks):
    mark = {"schema_version": 3, "grade_id": id, "task": False}
    mark |= {"grade": False, "solution": False, "locked": False} | marks
    make = new_markdown_cell if kind == "markdown" else new_code_cell
    return make(source, id=id, metadata={"nbgrader": mark})


def toy(answer=ANSWER, check=CHECK):
    setup = "from d2lpar.study.checks import exercise"
    why = "Why?\n\n### BEGIN SOLUTION\nBecause.\n### END SOLUTION"
    return new_notebook(
        metadata=run_notebooks.METADATA,
        cells=[
            new_markdown_cell("# A toy", id="title"),
            marked("code", setup, "setup", locked=True),
            new_markdown_cell("## Exercise 1\n\nDouble it.", id="double-text"),
            marked("code", answer, "double", solution=True),
            marked("code", check, "double-check", grade=True, locked=True, points=2),
            marked("markdown", why, "double-why", grade=True, solution=True, points=1),
        ],
    )


@pytest.fixture
def masters(tmp_path, monkeypatch):
    """A folder with one master and its wrong answers, and nothing for students yet."""
    for module, name, folder in (
        (exercises, "MASTERS", "masters"),
        (answers, "MASTERS", "masters"),
        (exercises, "STUDENTS", "students"),
        (exercises, "CHAPTERS", "chapters"),
        (exercises, "ROOT", ""),
    ):
        monkeypatch.setattr(module, name, tmp_path / folder)
    monkeypatch.setattr(data, "read_idx", data.read_idx)  # a trial puts a cache there
    (tmp_path / "masters").mkdir()
    (tmp_path / "chapters").mkdir()
    nbformat.write(toy(), tmp_path / "masters" / "01_toy.ipynb")
    (tmp_path / "masters" / "01_toy.toml").write_text(WRONG)
    return tmp_path


def test_a_student_gets_stubs_the_visible_checks_and_locked_cells():
    nb = exercises.student(toy())
    sources = {cell.id: cell.source for cell in nb.cells}
    assert sources["double"] == ANSWER.replace(
        "### BEGIN SOLUTION\nfactor = 2\n### END SOLUTION", STUB
    ).replace(
        "### BEGIN SOLUTION\n    return factor * x\n    ### END SOLUTION", STUB
    ).rstrip("\n")
    assert sources["double-check"] == re.sub(r" +### B.*\n.*\n.*### END.*\n", "", CHECK)
    assert sources["double-why"] == f"Why?\n\n{exercises.TEXT_STUB}"
    locked = [cell.id for cell in nb.cells if cell.metadata.get("editable") is False]
    assert locked == ["setup", "double-check"]


def test_students_notebooks_are_written_checked_and_removed(masters, capsys):
    students = masters / "students"
    assert exercises.main(["--check"]) == 1 and not students.exists()
    assert exercises.main([]) == 0
    assert exercises.main(["--check"]) == 0
    made = (students / "01_toy.ipynb").read_text()
    (students / "01_toy.ipynb").write_text(made.replace("Double", "Triple"))
    (students / "02_gone.ipynb").write_text(made)
    capsys.readouterr()
    assert exercises.main(["--check"]) == 1
    assert (
        capsys.readouterr().out.count("is not what the masters give: make exercises")
        == 2
    )
    assert exercises.main([]) == 0 and (students / "01_toy.ipynb").read_text() == made
    assert not (students / "02_gone.ipynb").exists()


def test_a_masters_texts_are_those_of_its_chapter(masters):
    text = "## Exercises\n\n*[With checks](x.ipynb)*\n\nFirst read this.\n\n"
    text += "1. Double *x*.\n\n   ```python\n   x = 1\n   ```\n2. More.\n"
    nb = new_notebook(cells=[new_markdown_cell(text)])
    nbformat.write(nb, masters / "chapters" / "01_toy.ipynb")
    assert exercises.chapter_texts("01_toy") == {
        "": "First read this.",
        "## Exercise 1": "Double *x*.\n\n```python\nx = 1\n```",
        "## Exercise 2": "More.",
    }
    assert exercises.main(["--check"]) == 1 and exercises.main([]) == 0
    for path in (
        masters / "masters" / "01_toy.ipynb",
        masters / "students" / "01_toy.ipynb",
    ):
        cells = nbformat.read(path, as_version=4).cells
        tagged = [
            cell.id
            for cell in cells
            if cell.metadata.get("tags") == ["raises-exception"]
        ]
        assert tagged == ["double", "double-check"]  # "run all" does not stop there
        assert (
            cells[2].source == "## Exercise 1\n\nDouble *x*.\n\n```python\nx = 1\n```"
        )


def test_a_course_has_every_master_and_what_a_teacher_has_changed_stays(
    masters, capsys
):
    course = masters / "course"
    assert exercises.main([f"--course={course}"]) == 0
    copied = course / "source" / "01_toy" / "01_toy.ipynb"
    assert copied.read_text() == (masters / "masters" / "01_toy.ipynb").read_text()
    assert STUB in (course / "nbgrader_config.py").read_text()
    copied.write_text("mine")
    (course / "nbgrader_config.py").write_text("mine too")
    assert (
        exercises.main([f"--course={course}"]) == 0
        and "left as it is" in capsys.readouterr().out
    )
    assert (copied.read_text(), (course / "nbgrader_config.py").read_text()) == (
        "mine",
        "mine too",
    )


def try_here(name="01_toy"):
    """The complaints of a trial in this process, through JSON as in one of its own."""
    return answers.complaints(name, json.loads(json.dumps(answers.try_all(name))))


def test_answers_that_are_as_they_should_be_give_no_complaint(masters):
    assert try_here() == []


@pytest.mark.parametrize(
    "old, new, complaint",
    [
        (
            "factor = 2",
            "factor = 1",
            "double: the solution, after the others, is not simply done",
        ),
        ("factor = 2", "factor = 1", "double: the solution, alone, is not simply done"),
        (
            "factor = 2",
            "factor = 2; half = double / 2",
            "the solution, alone, is not simply done",
        ),
        ('done("4.")', "1 / 0", "is not simply done: .*ZeroDivisionError"),
        ('done("4.")', "import sys; print(1, file=sys.stderr)", "is not simply done"),
        ("assert found == 4", "assert found", "double, three: .* does not match"),
        (
            "assert double(3) == 6",
            "assert double(3)",
            "double, a square: it is accepted",
        ),
        ("how often is x counted?", "", "double, three: .* does not match"),
        (
            "double(2) is {found}",
            "double(2)\\nis {found}",
            "three: this is not one sentence",
        ),
        (
            "exercise(1)",
            "exercise(2)",
            "three: this is not one sentence that begins with 1",
        ),
        (
            "is {double(3)}.",
            "is {double(3)}" + 500 * ".",
            "square: this is not one sentence",
        ),
        ("with exercise(1) as done", "for done in [print]", "no AnswerError but"),
        (
            "exercise(1)",
            "exercise(2)",
            "the stub: this is not one sentence that begins with 1",
        ),
    ],
)
def test_answers_that_are_not_as_they_should_be_are_named(masters, old, new, complaint):
    path = masters / "masters" / "01_toy.ipynb"
    path.write_text(
        path.read_text().replace(json.dumps(old)[1:-1], json.dumps(new)[1:-1])
    )
    found = "\n".join(try_here())
    assert re.search(complaint, found), found


def test_one_exercise_must_not_need_another(masters):
    nb = toy()
    more = [cell.copy() for cell in toy().cells[2:5]]
    for cell, source in zip(
        more,
        (
            "## Exercise 2\n\nTwice.",
            "### BEGIN SOLUTION\ntwice = double\n### END SOLUTION",
            CHECK,
        ),
        strict=True,
    ):
        source = source.replace("exercise(1)", "exercise(2)").replace("double", "twice")
        cell.update(id=cell.id.replace("double", "twice"))
        cell.source = source.replace("twice = twice", "twice = double")
    nb.cells += more
    nbformat.write(nb, masters / "masters" / "01_toy.ipynb")
    complaints = try_here()
    assert len(complaints) == 1 and complaints[0].startswith(
        "twice: the solution, alone, is not"
    )


def test_an_exercise_that_needs_a_newer_torch_is_left_out(masters):
    for version, found in (("2.0", 1), ("99", 0)):
        (masters / "masters" / "01_toy.toml").write_text(
            f'needs.double = "{version}"\n{WRONG}'
        )
        assert len(answers.exercises_of("01_toy")[1]) == found
        assert len(answers.wrong_answers("01_toy")) == 2 * found and try_here() == []


@pytest.mark.parametrize(
    "cores, threads, side_by_side", [(8, None, 8), (8, "2", 4), (2, "4", 1)]
)
def test_chapters_that_run_side_by_side_share_the_cores(
    monkeypatch, cores, threads, side_by_side
):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert answers.at_a_time() == side_by_side


def test_a_wrong_answer_must_fit_the_solution(masters):
    for old, new in (("factor * x", "factor"), ('why = "three"', 'because = "three"')):
        (masters / "masters" / "01_toy.toml").write_text(WRONG.replace(old, new, 1))
        with pytest.raises(ValueError, match=r"01_toy.toml, double, "):
            answers.wrong_answers("01_toy")
