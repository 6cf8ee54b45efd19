"""The project holds together: dependencies, README, imports, sizes."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType

import exercises
import pytest
import website
import yaml  # jupyter brings it
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from saved_cells import chapter_of

import d2lpar

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "d2lpar"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.stem[0] != "_")
ROOMS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))

MAX_LINES = 320
MAX_FUNCTION = 32  # lines without a docstring, each statement on one
MAX_BYTES = 30 * 2**20
MAX_NAMES = 90
GENERATED = r"\.git|\.venv|build|work|.*\.egg-info|__pycache__|\..*_cache|\.hypothesis"


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def files():
    """The project's own files; not asked of git, so that an archive passes too."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [f for f in folders if not re.fullmatch(GENERATED, f)]
        yield from (Path(folder, name) for name in names)


def dotted(path, package=PACKAGE):
    """A module's name within the package, such as ranks.launch."""
    return ".".join(path.relative_to(package).with_suffix("").parts)


each_module = pytest.mark.parametrize("path", MODULES, ids=dotted)


# What stands in several places is the same there


PYPROJECT = tomllib.loads(read("pyproject.toml"))
PROJECT = PYPROJECT["project"]
RUN_TIME = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
WORKFLOW = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]["book"]


def test_constraints_pin_what_pyproject_lists_and_nothing_else():
    lines = [
        line.partition("#")[0].strip() for line in read("constraints.txt").split("\n")
    ]
    pins = {canonicalize_name((r := Requirement(n)).name): r for n in lines if n}
    needs = {
        canonicalize_name(r.name): r for r in [*RUN_TIME, *map(Requirement, EXTRAS)]
    }
    assert pins.keys() == needs.keys()
    for name, pin in pins.items():
        [exact] = pin.specifier
        assert exact.operator == "==" and needs[name].specifier.contains(exact.version)


def test_versions_are_the_same_everywhere():
    assert f"\nversion: {d2lpar.__version__}\n" in read("CITATION.cff")
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + lowest.replace(".", "")
    assert f"version_info < ({lowest.replace('.', ', ')})" in read("Makefile")
    for page in ("Makefile", "README.md", "docs/students.md"):
        assert f"Python {lowest} or newer" in read(page)
    [oldest] = [m for m in WORKFLOW["strategy"]["matrix"]["include"] if "torch" in m]
    torch = oldest["torch"].removesuffix(".0")
    assert oldest["python"] == lowest and Requirement(f"torch>={torch}") in RUN_TIME
    for page in ("README.md", "docs/students.md"):
        assert f"{torch} or newer" in read(page)
    assert "-c constraints.txt" in read("environment.yml")


# The commands, and the pages that name them


def targets():
    """The groups of the Makefile, and the targets of each."""
    groups = re.split(r"^## ", read("Makefile"), flags=re.M)[1:]
    names = [re.findall(r"^([a-z-]+):.*## ", group, flags=re.M) for group in groups]
    return dict(zip([group.partition("\n")[0] for group in groups], names, strict=True))


def named(page):
    """The targets that a page names."""
    return set(re.findall(r"(?:`|^\$ |^)make ([a-z-]+)", read(page), flags=re.M))


def test_pages_name_commands_and_files_that_exist_and_each_command_is_named():
    readers, teachers, contributors = map(set, targets().values())
    assert len(readers | teachers | contributors) + len(["help"]) <= 15
    assert named("README.md") | named("docs/students.md") == readers | {"site"}
    assert teachers <= named("docs/teaching.md")
    assert contributors <= named("CONTRIBUTING.md")
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(((?!https?:|#)[^)\s]+)\)", text):
            assert (page.parent / link.partition("#")[0]).exists(), (page.name, link)
        assert named(page) <= readers | teachers | contributors, page


def test_ci_runs_the_two_commands_of_the_readme_and_nothing_else():
    always = [s["run"] for s in WORKFLOW["steps"] if "run" in s and "if" not in s]
    steps = read(".ci/run").splitlines()[-2:]
    assert steps == always == ["make test", "make notebooks"]
    assert all(f"\n$ {command} " in read("README.md") for command in steps)


def test_what_runs_the_book_keeps_the_memory_of_tensors_and_what_tests_it_does_not():
    outer = {
        k: v for k, v in os.environ.items() if not k.startswith(("MAL", "MAK", "MF"))
    }
    for target in ("notebooks", "refresh", "lab", "bench", "test"):
        # What the recipe sees, without running it: every command is env's.
        words = ["make", "-s", "-o", ".venv/installed", target, "PY=env; true"]
        run = subprocess.run(words, cwd=ROOT, env=outer, capture_output=True, text=True)
        # 32 MiB: an older glibc forgets a larger threshold, and then hands all back
        found = re.findall(r"^MALLOC_\w+_THRESHOLD_=(\d+)$", run.stdout, flags=re.M)
        assert set(map(int, found)) == (set() if target == "test" else {2**25, 2**30})


def test_the_readme_is_short_and_its_table_has_each_chapter_with_its_files():
    assert len(read("README.md").splitlines()) < 90
    table = [pair for *_, chapters in website.parts() for pair in chapters.items()]
    assert [name for name, _ in table] == [*website.chapters()]
    chapters = {dotted(path): chapter_of(path.read_text("utf-8")) for path in MODULES}
    for name, listed in table:
        written = [
            file for file, chapter in chapters.items() if chapter == int(name[:2])
        ]
        assert sorted(listed) == sorted(written), name
    workshop = [file for file, chapter in chapters.items() if not chapter]
    named = re.findall(r"`(\w+)`", read("README.md").partition("the workshop,")[2])
    assert {file for file in workshop if not file.startswith("ranks.")} <= {*named}


def test_the_teachers_table_has_each_chapter_with_its_time():
    rows = re.findall(
        r"^\| (\d\d) \| .* \| (\d+ min) \|", read("docs/teaching.md"), re.M
    )
    assert rows == [(name[:2], c["time"]) for name, c in website.chapters().items()]


def wrong_references(text):
    """The chapters that a text names but that do not exist, or that its link misses."""
    there = {int(path.name[:2]) for path in (ROOT / "notebooks").glob("*.ipynb")}
    numbers = re.findall(r"\b(?:[Cc]hapter|[Nn]otebook)s? (\d+)\b", text)
    yield from (number for number in numbers if int(number) not in there)
    links = re.findall(r"\[(?:[Cc]hapter )?(\d+)\]\([^)]*?(\d\d)_\w+\.ipynb\)", text)
    yield from (link for link in links if int(link[0]) != int(link[1]))


def test_references_to_chapters_are_to_chapters_that_exist():
    wrong = "chapter 2, Notebook 99, [chapter 03](03_x.ipynb), [chapter 04](05_x.ipynb)"
    assert list(wrong_references(wrong)) == ["99", ("04", "05")]
    kinds = {".py", ".md", ".ipynb", ".toml", ".html", ".js"}
    for path in files():
        if path.suffix in kinds and path != Path(__file__).resolve():
            assert list(wrong_references(path.read_text(encoding="utf-8"))) == [], path


def test_a_syllabus_names_exercises_that_there_are():
    rows = re.findall(r"^\|.*\|.*\|.*\| (.*\d.*) \|$", read("docs/teaching.md"), re.M)
    parts = [part.partition(": ") for row in rows for part in row.split("; ")]
    assert len(rows) > 10
    for chapter, _, numbers in parts:
        if chapter[:2].isdigit():
            [path] = (ROOT / "notebooks").glob(f"{chapter}_*.ipynb")
            there = len(exercises.chapter_texts(path.stem)) - 1
            listed = list(map(int, re.findall(r"\d+", numbers)))
            assert listed and max(listed) <= there and listed == sorted(listed), chapter


# The module


def imports(path, package):
    """The full names of the modules that a file of the package imports anywhere."""
    package = ["d2lpar", *path.relative_to(package).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            if source == "d2lpar" or not node.module:  # from d2lpar import ranks
                yield from (f"{source}.{alias.name}" for alias in node.names)
            else:
                yield source


def graph(package):
    """For each file of the package, those of the package that it imports."""
    files = {dotted(path, package): path for path in package.rglob("*.py")}
    names = {f"d2lpar.{file}".removesuffix(".__init__"): file for file in files}
    found = {file: set(imports(path, package)) for file, path in files.items()}
    ours = {file: {n for n in found[file] if n.startswith("d2lpar")} for file in files}
    return {file: {names[name] for name in ours[file]} for file in files}


def late(package):
    """Files of a chapter that need, in turn, one of a later chapter."""
    needs, latest = graph(package), {}
    for file in TopologicalSorter(needs).static_order():
        path = package / f"{file.replace('.', '/')}.py"
        chapter = chapter_of(path.read_text("utf-8"))
        latest[file] = max([chapter, *(latest[other] for other in needs[file])])
        if chapter and latest[file] > chapter:
            yield file


@each_module
def test_a_file_imports_from_others_only_what_pyproject_lists(path):
    listed = {
        need.name.replace("-", "_") for need in RUN_TIME
    } | sys.stdlib_module_names
    listed |= {"d2lpar", "PIL", "numpy"}  # the latter are matplotlib's own
    assert {name.partition(".")[0] for name in imports(path, PACKAGE)} <= listed


def test_files_come_in_the_order_of_their_chapters_and_none_imports_in_a_circle():
    assert list(late(PACKAGE)) == []


def test_imports_are_seen_and_so_are_late_ones_and_circles(tmp_path):
    (tmp_path / "room").mkdir()
    sources = {
        "c": '"""Workshop. C."""\nimport torch.nn',
        "plot": '"""Chapter 09. Figures."""',
        "room/__init__": "from .y import z",
        "room/a": '"""Chapter 03. A."""\nfrom .b import x\nfrom . import b',
        "room/b": "def f():\n    from ..c import y",
        "room/y": '"""Chapter 04. Y."""\ndef f():\n    import d2lpar.plot, torch.nn',
        "top": '"""Chapter 08. T."""\nfrom . import room\nfrom d2lpar.c import d',
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    assert sorted(late(tmp_path)) == ["room.y", "top"]
    (tmp_path / "c.py").write_text("from d2lpar import top")
    with pytest.raises(CycleError):
        list(late(tmp_path))
    (tmp_path / "c.py").write_text("from d2lpar import missing")
    with pytest.raises(KeyError, match="missing"):
        graph(tmp_path)


def mutable(source):
    """Whether an expression makes something that can change."""
    made = (
        r"(\w+\.)?(list|dict|set|deque|bytearray|\w*[dD]ict(ionary)?|Counter|Weak\w+)\("
    )
    return bool(re.match(rf"[\[{{]|{made}", source))


@each_module
def test_a_file_is_short_has_short_functions_tests_and_no_state(path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= MAX_LINES
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            words = len((ast.get_docstring(node) or "").splitlines())
            assert len(ast.unparse(node).splitlines()) - words <= MAX_FUNCTION, (
                node.name
            )
    room = path.relative_to(PACKAGE).parent
    assert (ROOT / "tests" / room / f"test_{path.name}").exists()
    # A table in capitals is a constant. What belongs to a group lives in one place.
    assert not re.search(r"^\s+global ", text, flags=re.M)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and path.stem != "members":
            kept = mutable(ast.unparse(node.value))
            assert not kept or re.match("[A-Z_]+ ", ast.unparse(node))


def test_mutable_state_is_seen():
    sources = [
        "[]",
        "{1: 2}",
        "collections.deque()",
        "WeakKeyDictionary()",
        "(1,)",
        "f()",
    ]
    assert list(map(mutable, sources)) == [True] * 4 + [False] * 2


def test_every_file_says_its_place_first_and_a_room_names_and_shows_its_files():
    for path in MODULES:
        place = r'"""(Workshop|Chapter \d\d)\. [A-Z].*\.'
        assert re.match(place, path.read_text("utf-8")), path
    for room in ROOMS:
        top = ast.parse((room / "__init__.py").read_text(encoding="utf-8")).body
        stems = {path.stem for path in room.glob("*.py")} - {"__init__"}
        assert [s for s in stems if f"``{s}``" not in top[0].value.value] == []
        assert {node.module for node in top[1:]} <= stems


def test_public_names_are_plain_few_and_need_no_matplotlib():
    program = (
        "import sys, d2lpar; print({'matplotlib', 'PIL', 'IPython'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, cwd=ROOT
    )
    assert (done.stderr, done.stdout) == (b"", b"set()\n")
    names = {n: v for n, v in vars(d2lpar).items() if n[0] != "_"}
    names = {n: v for n, v in names.items() if not isinstance(v, ModuleType)}
    assert 60 <= len(names) <= MAX_NAMES and {"train", "ring", "fully_shard"} <= {
        *names
    }
    assert [n for n in names if not names[n].__module__.startswith("d2lpar.")] == []
    assert not hasattr(d2lpar, "__getattr__")


def test_no_file_is_large_or_names_a_place_on_a_machine():
    place = re.compile(rb"/(?:home|root|Users|var/folders)/\w|site\W?packages/\w")
    for path in files():
        assert path.stat().st_size <= MAX_BYTES, path
        if path.suffix not in (".gz", ".png"):
            assert not place.search(path.read_bytes()), path
