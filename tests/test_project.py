"""The project holds together: dependencies, the README, imports, sizes."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import exercises
import pytest
import size
import website
import yaml  # jupyter brings it
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import d2lpar

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "d2lpar"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.stem[0] != "_")
ROOMS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))

# From the ground up: a file imports only from files above it. "" is outside of the
# rooms.
HOUSE = (
    ("", "guards devices data network models checkpoint"),
    ("collectives", "schedules cost lists"),
    (
        "ranks",
        "transport nccl lanes agreement members moves collectives point_to_point",
    ),
    ("ranks", "worker launcher torchrun grid"),
    ("data_parallel", "scattering replicas loss chunks sampler"),
    (
        "data_parallel",
        "buckets batch_norm state_sharing uneven reducer ddp_arguments ddp",
    ),
    ("mixed_precision", "casting grad_scaler opt_levels"),
    (
        "sharding",
        "shards clipping full_state optimizer traffic addresses units sharded_module",
    ),
    ("pipeline", "schedules stages partition local distributed"),
    ("tensor_parallel", "layers vocabulary channels"),
    ("study", "memory iteration splits methods checks"),
    ("", "training train_ddp plot"),
)
ORDER = [f"{room}.{file}".strip(".") for room, files in HOUSE for file in files.split()]
MAX_LINES = 350
MAX_FUNCTION = 50  # lines of code
MAX_BYTES = 30 * 2**20
GENERATED = re.compile(
    r"\.git|\.venv|build|work|.*\.egg-info|__pycache__|\..*_cache|\.hypothesis"
    r"|\.ipynb_.*"
)
MAX_NAMES = 80


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def files():
    """The project's own files; not asked of git, so that an archive passes too."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not GENERATED.fullmatch(name)]
        yield from (Path(folder, name) for name in names)


def dotted(path):
    """A module's name within the package, such as mixed_precision.casting."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


each_module = pytest.mark.parametrize("path", MODULES, ids=dotted)


# Dependencies and versions: each stands in one place, and where it is repeated it is
# the same


PYPROJECT = tomllib.loads(read("pyproject.toml"))
PROJECT = PYPROJECT["project"]
RUN_TIME = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = PROJECT["optional-dependencies"]
NEEDS = RUN_TIME + [Requirement(line) for extra in EXTRAS.values() for line in extra]
LOWEST = PROJECT["requires-python"].removeprefix(">=")


def workflow():
    """The only job of the workflow that code hosts run."""
    (job,) = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"].values()
    return job


def test_constraints_pin_what_pyproject_lists_and_nothing_else():
    lines = [
        line.partition("#")[0].strip() for line in read("constraints.txt").splitlines()
    ]
    pins = [Requirement(line) for line in lines if line]
    version = {canonicalize_name(pin.name): str(pin.specifier) for pin in pins}
    wanted = sorted(canonicalize_name(need.name) for need in NEEDS)
    assert (
        sorted(version) == sorted(canonicalize_name(pin.name) for pin in pins) == wanted
    )
    for need in NEEDS:
        assert re.fullmatch(
            r"==[\d.]+", exact := version[canonicalize_name(need.name)]
        ), need
        assert need.specifier.contains(exact[2:]), need


def test_versions_are_the_same_everywhere():
    version = re.search(
        r'^__version__ = "(.+)"$', read("d2lpar/__init__.py"), flags=re.M
    )[1]
    assert "version" in PROJECT["dynamic"] and f"\nversion: {version}\n" in read(
        "CITATION.cff"
    )
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + LOWEST.replace(".", "")
    assert f"version_info < ({LOWEST.replace('.', ', ')})" in read("Makefile")
    assert all(
        f"Python {LOWEST} or newer" in read(name) for name in ("Makefile", "README.md")
    )
    [lowest] = [m for m in workflow()["strategy"]["matrix"]["include"] if "torch" in m]
    assert lowest["python"] == LOWEST
    torch = lowest["torch"].removesuffix(".0")
    assert Requirement(f"torch>={torch}") in RUN_TIME
    assert all(
        f"{torch} or newer" in read(n) for n in ("README.md", "docs/students.md")
    )
    entries = re.findall(r"^\s*-\s*(.*?)\s*$", read("environment.yml"), flags=re.M)
    python, *rest = entries[entries.index("pip") - 1 :]
    assert rest == ["pip", "pip:", "-c constraints.txt", "-e .[dev]"]
    # One version: with ">=" conda takes the newest Python, for which wheels may be
    # missing.
    assert SpecifierSet(PROJECT["requires-python"]).contains(
        python.removeprefix("python=")
    )


# The README and the commands that it shows


def readme_commands():
    """The lines that begin with make, in the README's blocks of code."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", read("README.md"), flags=re.M | re.S)
    lines = [
        line.partition("#")[0].strip(" $") for line in "\n".join(blocks).splitlines()
    ]
    return [line for line in lines if line.startswith("make ")]


def test_ci_runs_the_two_commands_of_the_readme_on_linux_and_macos_and_may_only_read():
    lines = [line.partition("#")[0].strip() for line in read(".ci/run").splitlines()]
    steps = [line for line in lines if line and not line.startswith(("set ", "cd "))]
    always = [
        step["run"]
        for step in workflow()["steps"]
        if "run" in step and "if" not in step
    ]
    commands = ["make notebooks", "make test"]
    assert sorted(readme_commands()[:2]) == sorted(steps) == sorted(always) == commands
    assert "set -euo pipefail" in lines  # it stops at the first that fails
    machines = {
        machine["os"] for machine in workflow()["strategy"]["matrix"]["include"]
    }
    assert machines == {"ubuntu-latest", "macos-latest"}
    assert yaml.safe_load(read(".github/workflows/ci.yml"))["permissions"] == {
        "contents": "read"
    }


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_what_runs_the_book_keeps_the_memory_of_tensors_and_what_tests_it_does_not():
    outer = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("MALLOC", "MAKE", "MFLAGS"))
    }
    for target in ("notebooks", "refresh", "lab", "bench", "test"):
        # What the recipe sees, without running it: every command is env's.
        command = ["make", "-s", "-o", ".venv/installed", target, "PY=env; true"]
        said = subprocess.run(
            command, cwd=ROOT, env=outer, capture_output=True, text=True
        ).stdout
        # 32 MiB: an older glibc forgets a larger threshold, and then hands all back
        found = re.findall(r"^MALLOC_(?:MMAP|TRIM)_THRESHOLD_=(\d+)$", said, flags=re.M)
        assert set(map(int, found)) == (set() if target == "test" else {2**25, 2**30})


def test_readme_is_short_shows_only_commands_that_exist_and_maps_rooms_and_notebooks():
    text = read("README.md")
    assert len(text.splitlines()) < 100
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), flags=re.M))
    shown = set(re.findall(r"`make ([a-z-]+)", text))
    assert shown | {command.split()[1] for command in readme_commands()} <= targets
    rows = re.findall(r"^\| `(\w+)/` \|", text, flags=re.M)
    assert rows == list(dict.fromkeys(room for room, _ in HOUSE if room))
    named = set(re.findall(r"\b\d\d_\w+\.ipynb", text))
    assert sorted(named) == sorted(
        path.name for path in (ROOT / "notebooks").glob("*.ipynb")
    )
    times = re.findall(r"^\| \[(\w+)\.ipynb\].*\| (\d+ min) \|$", text, flags=re.M)
    chapters = website.chapters(ROOT / "notebooks")
    assert times == [(chapter["name"], chapter["time"]) for chapter in chapters]


def test_links_of_the_pages_lead_somewhere_and_their_commands_exist():
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), flags=re.M))
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(((?!https?:|#)[^)\s]+)\)", text):
            assert (page.parent / link.partition("#")[0]).exists(), (page.name, link)
        assert (
            set(re.findall(r"(?:`|^\$ |^)make ([a-z-]+)", text, flags=re.M)) <= targets
        )


def wrong_references(text):
    """The chapters that a text names but that do not exist, or that its link misses."""
    there = {int(path.name[:2]) for path in (ROOT / "notebooks").glob("*.ipynb")}
    named = re.findall(r"\b(?:[Cc]hapter|[Nn]otebook)s? (\d+)\b", text)
    yield from (number for number in named if int(number) not in there)
    links = re.findall(r"\[(?:[Cc]hapter )?(\d+)\]\([^)]*?(\d\d)_\w+\.ipynb\)", text)
    yield from (link for link in links if int(link[0]) != int(link[1]))


def test_references_to_chapters_are_to_chapters_that_exist():
    wrong = (
        "chapter 2, Notebook 99, [chapter 03](03_x.ipynb), [chapter 04](../05_x.ipynb)"
    )
    assert list(wrong_references(wrong)) == ["99", ("04", "05")]
    kinds = {".py", ".md", ".ipynb", ".toml", ".html", ".js"}
    for path in files():
        if path.suffix in kinds and path != Path(__file__).resolve():
            assert list(wrong_references(path.read_text(encoding="utf-8"))) == [], path


def test_a_syllabus_names_exercises_that_there_are():
    rows = re.findall(
        r"^\|.*\|.*\|.*\| (.*\d.*) \|$", read("docs/teaching.md"), flags=re.M
    )
    named = [part.partition(": ") for row in rows for part in row.split("; ")]
    assert len(rows) > 10
    for chapter, _, numbers in named:
        if chapter[:2].isdigit():
            [path] = (ROOT / "notebooks").glob(f"{chapter}_*.ipynb")
            there = len(exercises.chapter_texts(path.stem)) - 1
            first, _, last = numbers.partition(" to ")
            listed = [int(n) for n in re.findall(r"\d+", f"{first} {last}")]
            assert listed and max(listed) <= there and listed == sorted(listed), (
                chapter,
                numbers,
            )


# The module


def imports(path):
    """The full names of the modules that a file of the package imports anywhere."""
    package = ["d2lpar", *path.relative_to(PACKAGE).parent.parts]
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


def stands_above(name, path):
    """Whether a module, or the room of that name, stands above a file in the order."""
    places = [i for i, other in enumerate(ORDER) if f"{other}.".startswith(f"{name}.")]
    return bool(places) and max(places) < ORDER.index(dotted(path))


@each_module
def test_imports_point_one_way_and_only_to_what_pyproject_lists(path):
    # matplotlib's own
    listed = {need.name.replace("-", "_") for need in RUN_TIME} | {"PIL", "numpy"}
    complaints = []
    for name in imports(path):
        top, _, inner = name.partition(".")
        known = stands_above(inner, path) if top == "d2lpar" else top in listed
        if not known and top not in sys.stdlib_module_names:
            complaints.append(name)
    assert complaints == []


def test_imports_are_seen_and_so_is_what_stands_above(tmp_path, monkeypatch):
    casting, opt_levels = (
        PACKAGE / "mixed_precision" / f"{n}.py" for n in ("casting", "opt_levels")
    )
    assert stands_above("mixed_precision.casting", opt_levels)
    assert stands_above("mixed_precision", PACKAGE / "study" / "methods.py")
    assert not stands_above("mixed_precision.opt_levels", casting)
    assert not stands_above("mixed_precision", opt_levels)  # its own room's front door
    assert not stands_above("nothing", opt_levels)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "room").mkdir()
    source = (
        "from . import a\nfrom .b import x\nfrom .. import ranks\nfrom ..c import y\n"
    )
    source += "def f():\n    import d2lpar.plot, torch.nn\nfrom d2lpar.room import z\n"
    (tmp_path / "room" / "y.py").write_text(source)
    inner = ["c", "plot", "ranks", "room", "room.a", "room.b"]
    expected = [*(f"d2lpar.{name}" for name in inner), "torch.nn"]
    assert sorted(imports(tmp_path / "room" / "y.py")) == expected


@each_module
def test_module_is_short_has_tests_and_no_state(path):
    text = path.read_text(encoding="utf-8")
    top = ast.parse(text).body
    assert len(text.splitlines()) <= MAX_LINES
    assert [
        name for number, name in size.functions(path) if number > MAX_FUNCTION
    ] == []
    room = path.relative_to(PACKAGE).parent
    assert (ROOT / "tests" / room / f"test_{path.name}").exists()
    # none bears its file's name
    assert path.stem not in {getattr(node, "name", "") for node in top}
    # A table in capitals is a constant. What belongs to a group lives in one place.
    assert not re.search(r"^\s+global ", text, flags=re.M)
    variables = [node for node in top if isinstance(node, ast.Assign | ast.AnnAssign)]
    made = [ast.unparse(node) for node in variables if is_mutable(node.value)]
    assert [
        line for line in made if not re.match("[A-Z_]+ ", line)
    ] == [] or path.stem == "members"


def is_mutable(value):
    kinds = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    made = (
        r"(\w+\.)?(list|dict|set|deque|bytearray|\w*[dD]ict(ionary)?|Counter|Weak\w+)\("
    )
    return isinstance(value, kinds) or bool(re.match(made, ast.unparse(value)))


def test_every_module_has_its_place():
    assert sorted(map(dotted, MODULES)) == sorted(ORDER)
    assert {path.name for path in ROOMS} == {room for room, _ in HOUSE if room}


def test_mutable_state_and_the_lines_of_functions_are_seen(tmp_path, monkeypatch):
    values = (
        "[], {1: 2}, collections.deque(), defaultdict(list), WeakKeyDictionary(),"
        " (1,), f()"
    )
    seen = [is_mutable(value) for value in ast.parse(values).body[0].value.elts]
    assert seen == [True] * 5 + [False] * 2
    monkeypatch.setattr(size, "PACKAGE", tmp_path)
    code = (
        '@cache\ndef f(x):\n    """One.\n\n    Two.\n    """\n    # why\n\n   '
        " return x\n"
    )
    (tmp_path / "x.py").write_text(code)
    assert size.functions(tmp_path / "x.py") == [(3, "x.py: f")]


def test_public_names_are_plain_few_and_need_no_matplotlib():
    program = "import sys, d2lpar; print(sorted({'matplotlib', 'PIL', 'IPython'} & set("
    program += "sys.modules))); from d2lpar import plot; print(plot.bars.__module__)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.stderr, done.stdout.splitlines()) == ("", ["[]", "d2lpar.plot"])
    names = {
        name: value
        for name, value in vars(d2lpar).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert 60 <= len(names) <= MAX_NAMES
    assert [n for n in names if not names[n].__module__.startswith("d2lpar.")] == []
    assert [n for n in ("train", "ring", "fully_shard") if n not in names] == []
    assert not hasattr(d2lpar, "__getattr__")


def test_chapters_import_public_names_but_for_those_that_go_with_their_listings():
    private = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text = "".join(json.loads(path.read_text("utf-8"))["cells"][1]["source"])
        lines = re.findall(
            r"^from d2lpar[^(]*?import (\([^)]*\)|.*)$", text, flags=re.M
        )
        found = re.findall(r"\b_\w+", "\n".join(lines))
        private |= {path.name[:2]: found} if found else {}
    assert set(private) <= {"05", "07", "10", "11", "13"}
    assert sum(map(len, private.values())) <= 13


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: path.name)
def test_a_room_begins_with_its_order_and_only_shows_its_files(room):
    """``__init__`` is a docstring naming all files, and ``from .file import name``."""
    text, *shown = ast.parse((room / "__init__.py").read_text(encoding="utf-8")).body
    stems = {path.stem for path in room.glob("*.py")} - {"__init__"}
    assert [stem for stem in stems if f"``{stem}``" not in text.value.value] == []
    assert all(isinstance(node, ast.ImportFrom) and node.level == 1 for node in shown)
    assert {node.module for node in shown} == stems


# All files


def test_no_file_is_large_or_names_a_place_on_a_machine():
    assert [path for path in files() if path.stat().st_size > MAX_BYTES] == []
    place = re.compile(rb"/(?:home|root|Users|var/folders)/\w|site\W?packages/\w")
    text = [path for path in files() if path.suffix not in (".gz", ".png")]
    assert [path for path in text if place.search(path.read_bytes())] == []
