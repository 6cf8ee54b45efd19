"""The project holds together: dependencies, the README, imports, sizes.

What a test finds is given as a list of complaints, so that a failure shows all of them at once.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import size
import yaml  # jupyter brings it
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import d2lpar

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "d2lpar"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
ROOMS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))

# From the ground up: a file imports only from files above it. "" is outside of the rooms.
HOUSE = (
    ("", "guards devices data network models checkpoint"),
    ("collectives", "schedules cost lists"),
    ("ranks", "transport nccl lanes agreement members collectives point_to_point"),
    ("ranks", "worker launcher grid"),
    ("data_parallel", "scattering replicas loss chunks sampler"),
    ("data_parallel", "buckets batch_norm state_sharing uneven reducer ddp_arguments ddp"),
    ("mixed_precision", "casting grad_scaler opt_levels"),
    ("pipeline", "schedules stages partition local distributed"),
    ("tensor_parallel", "layers vocabulary channels"),
    ("study", "memory iteration splits methods"),
    ("plot", "picture charts board drawings iterations"),
    ("", "training train_ddp"),
)
ORDER = [f"{room}.{file}".strip(".") for room, files in HOUSE for file in files.split()]
MAX_LINES = 350
MAX_FUNCTION = 45  # lines of code
MAX_BYTES = 30 * 2**20
GENERATED = re.compile(
    r"\.git|\.venv|build|work|.*\.egg-info|__pycache__|\..*_cache|\.hypothesis|\.ipynb_.*"
)
FIRST_EDITION = """
    ranks SyncBatchNorm CheckpointError load_checkpoint save_checkpoint ChunkedLoss all_gather
    allreduce broadcast naive_allreduce reduce_scatter ring_allreduce DataError
    load_data_fashion_mnist read_idx DataParallel DataParallelModel parallel_apply replicate
    DistributedDataParallel NaiveDistributedDataParallel Ledger choose_devices count_bytes move
    try_all_gpus try_gpu DistributedPipeline RankError launch GradScaler autocast initialize
    init_params lenet loss sgd DataParallelCriterion cut Pipeline SplitModel Action gpipe
    one_f_one_b sequential MismatchError PeerError DistributedSampler gather scatter Move direct
    halving_doubling recursive_doubling ring star tree ColumnParallelLinear RowParallelLinear
    History accuracy get_params print_progress split_batch train train_batch
    vocab_parallel_cross_entropy
"""
MUTABLE = {"list", "dict", "set", "bytearray", "deque", "defaultdict", "Counter", "OrderedDict"}
MUTABLE |= {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet"}


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def files():
    """The project's own files. Not asked of git, so that a downloaded archive passes too."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not GENERATED.fullmatch(name)]
        yield from (Path(folder, name) for name in names)


def dotted(path):
    """A module's name within the package, such as mixed_precision.casting."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


each_module = pytest.mark.parametrize("path", MODULES, ids=dotted)


# Dependencies


def project():
    return tomllib.loads(read("pyproject.toml"))["project"]


def direct_dependencies():
    listed = project()["dependencies"] + project()["optional-dependencies"]["dev"]
    return [Requirement(line) for line in listed]


def pins():
    lines = [line.partition("#")[0].strip() for line in read("constraints.txt").splitlines()]
    return [Requirement(line) for line in lines if line]


def test_constraints_pin_what_pyproject_lists_and_nothing_else():
    version = {canonicalize_name(pin.name): str(pin.specifier) for pin in pins()}
    wanted = sorted(canonicalize_name(need.name) for need in direct_dependencies())
    assert sorted(version) == sorted(canonicalize_name(pin.name) for pin in pins()) == wanted
    for need in direct_dependencies():
        assert re.fullmatch(r"==[\d.]+", exact := version[canonicalize_name(need.name)]), need
        assert need.specifier.contains(exact[2:]), need
    assert version["torch"] == "==2.13.0"
    assert Requirement("torch>=2.6") in direct_dependencies()


def test_environment_lists_nothing_of_its_own():
    text = re.sub(r"#.*", "", read("environment.yml"))
    entries = re.findall(r"^\s*-\s*(.*?)\s*$", text.partition("dependencies:")[2], flags=re.M)
    python, *rest = entries
    assert rest == ["pip", "pip:", "-c constraints.txt", "-e .[dev]"]
    # One version: with ">=" conda takes the newest Python, for which wheels may be missing.
    minor = re.fullmatch(r"python=(3\.\d+)", python).group(1)
    assert SpecifierSet(project()["requires-python"]).contains(minor)


def test_the_version_stands_in_one_place_and_is_cited():
    line = r'^__version__ = "(\d+\.\d+\.\d+)"$'
    version = re.search(line, read("d2lpar/__init__.py"), flags=re.M)
    assert "version" in project()["dynamic"]
    assert f"\nversion: {version.group(1)}\n" in read("CITATION.cff")


def test_a_wheel_holds_every_folder_of_the_module_and_says_that_it_is_typed():
    setuptools = tomllib.loads(read("pyproject.toml"))["tool"]["setuptools"]
    assert setuptools["packages"]["find"]["include"] == ["d2lpar*"]
    for name in setuptools["package-data"]["d2lpar"]:
        assert (ROOT / "d2lpar" / name).is_file()
    code = {path.parent for path in (ROOT / "d2lpar").rglob("*.py")}
    assert [folder for folder in code if not (folder / "__init__.py").exists()] == []


def test_the_lowest_python_is_the_same_everywhere():
    lowest = project()["requires-python"].removeprefix(">=")
    ruff = tomllib.loads(read("pyproject.toml"))["tool"]["ruff"]["target-version"]
    assert ruff == "py" + lowest.replace(".", "")
    assert f"version_info < ({lowest.replace('.', ', ')})" in read("Makefile")
    assert f"Python {lowest} or newer" in read("Makefile")
    assert f"Python {lowest} or newer" in read("README.md")


@each_module
def test_module_imports_only_what_pyproject_lists(path):
    listed = {Requirement(line).name.replace("-", "_") for line in project()["dependencies"]}
    listed |= {"PIL"}  # matplotlib's own
    outside = {name.partition(".")[0] for name in imports(path)} - {"d2lpar"}
    assert outside - sys.stdlib_module_names - listed == set()


# The README and the commands that it shows


def readme_commands():
    """The lines that begin with make, in the README's blocks of code."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", read("README.md"), flags=re.M | re.S)
    lines = [line.partition("#")[0].strip(" $") for line in "\n".join(blocks).splitlines()]
    return [line for line in lines if line.startswith("make ")]


def workflow():
    """The only job of the workflow that code hosts run."""
    (job,) = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"].values()
    return job


def test_ci_runs_the_two_commands_of_the_readme_and_stops_at_the_first_that_fails():
    lines = [line.partition("#")[0].strip() for line in read(".ci/run").splitlines()]
    steps = [line for line in lines if line and not line.startswith(("set ", "cd "))]
    always = [step["run"] for step in workflow()["steps"] if "run" in step and "if" not in step]
    commands = ["make notebooks", "make test"]
    assert sorted(readme_commands()[:2]) == sorted(steps) == sorted(always) == commands
    assert "set -euo pipefail" in lines


def test_the_workflow_tries_linux_macos_and_the_lowest_versions_may_only_read_and_ends():
    machines = workflow()["strategy"]["matrix"]["include"]
    assert {machine["os"] for machine in machines} == {"ubuntu-latest", "macos-latest"}
    (torch,) = [need for need in direct_dependencies() if need.name == "torch"]
    (lowest,) = [machine for machine in machines if "torch" in machine]
    assert project()["requires-python"] == f">={lowest['python']}"
    assert f"{torch.specifier}.0" == f">={lowest['torch']}"
    assert yaml.safe_load(read(".github/workflows/ci.yml"))["permissions"] == {"contents": "read"}
    assert "permissions" not in workflow() and workflow()["timeout-minutes"] <= 90


def environment_of(target):
    """What the recipe of a target sees, without running it: every command is env's."""
    command = ["make", "-s", "-o", ".venv/installed", target, "PY=env; true"]
    outer = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC", "MAKE", "MFLAGS"))}
    found = subprocess.run(command, cwd=ROOT, env=outer, capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in found.stdout.splitlines() if "=" in line)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_what_runs_the_book_keeps_the_memory_of_tensors_and_what_tests_it_does_not():
    for target in ("notebooks", "refresh", "lab", "bench"):
        found = environment_of(target)
        # 32 MiB: an older glibc forgets a larger threshold, and then hands all back
        assert int(found["MALLOC_MMAP_THRESHOLD_"]) == 2**25
        assert int(found["MALLOC_TRIM_THRESHOLD_"]) >= 2**29
    assert "MALLOC_TRIM_THRESHOLD_" not in environment_of("test")


def test_readme_is_short_shows_only_commands_that_exist_and_maps_rooms_and_notebooks():
    text = read("README.md")
    assert len(text.splitlines()) < 100
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), flags=re.M))
    shown = set(re.findall(r"`make ([a-z-]+)", text))
    assert shown | {command.split()[1] for command in readme_commands()} <= targets
    rows = re.findall(r"^\| `(\w+)/` \|", text, flags=re.M)
    assert rows == list(dict.fromkeys(room for room, _ in HOUSE if room))
    named = set(re.findall(r"\b\d\d_\w+\.ipynb", text))
    assert sorted(named) == sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


# The module


def imports(path):
    """The full names of the modules that a file of the package imports, wherever in it."""
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


def inner_imports(path):
    return [name.partition(".")[2] for name in imports(path) if name.split(".")[0] == "d2lpar"]


def stands_above(name, path):
    """Whether a module, or the whole room of that name, stands above a file in the order."""
    place = ORDER.index(dotted(path))
    files = [i for i, other in enumerate(ORDER) if other == name or other.startswith(f"{name}.")]
    return bool(files) and max(files) < place


def test_every_module_has_its_place():
    assert sorted(map(dotted, MODULES)) == sorted(ORDER)


@each_module
def test_imports_point_one_way(path):
    assert [name for name in inner_imports(path) if not stands_above(name, path)] == []


def test_imports_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "room").mkdir()
    source = "from . import a\nfrom .b import x\nfrom .. import ranks\nfrom ..c import y\n"
    source += "def f():\n    import d2lpar.plot, torch.nn\nfrom d2lpar.room import z\n"
    (tmp_path / "room" / "y.py").write_text(source + "import d2lpar\n")
    expected = ["", "c", "plot", "ranks", "room", "room.a", "room.b"]
    assert sorted(inner_imports(tmp_path / "room" / "y.py")) == expected


@pytest.mark.parametrize(
    ("name", "file", "allowed"),
    [
        ("mixed_precision.casting", "mixed_precision/opt_levels.py", True),
        ("mixed_precision.opt_levels", "mixed_precision/casting.py", False),
        ("mixed_precision", "study/methods.py", True),
        ("mixed_precision", "mixed_precision/grad_scaler.py", False),  # its own room's front door
        ("nothing", "data_parallel/ddp.py", False),
    ],
)
def test_a_room_is_above_when_all_its_files_are(name, file, allowed):
    assert stands_above(name, PACKAGE / file) == allowed


@each_module
def test_module_is_short_and_tested(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES
    assert [name for number, name in size.functions(path) if number > MAX_FUNCTION] == []
    room = path.relative_to(PACKAGE).parent
    assert (ROOT / "tests" / room / f"test_{path.name}").exists()
    top = ast.parse("\n".join(lines)).body  # no file bears the name of something in it
    assert path.stem not in {getattr(node, "name", "") for node in top}


def test_lines_of_functions_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(size, "PACKAGE", tmp_path)
    code = '@cache\ndef f(x):\n    """One.\n\n    Two.\n    """\n    # why\n\n    return x\n'
    (tmp_path / "x.py").write_text(code)
    assert size.functions(tmp_path / "x.py") == [(3, "x.py: f")]


def printed_by(program):
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_names_of_the_package_are_loaded_when_first_used():
    """``__all__`` has the rooms and about 20 names; those of the first edition stay importable."""
    program = "import sys, d2lpar; print(d2lpar.ranks.__name__, 'd2lpar.pipeline' in sys.modules, "
    program += "d2lpar.DataParallel.__module__); from d2lpar import *; print(plot.bars)"
    first, second = printed_by(program)
    assert first == "d2lpar.ranks False d2lpar.data_parallel.replicas"
    assert second.startswith("<function bars")
    rooms = {path.name for path in ROOMS}
    assert rooms <= set(d2lpar.__all__)
    assert 15 <= len(set(d2lpar.__all__) - rooms) <= 25
    assert [name for name in FIRST_EDITION.split() if not hasattr(d2lpar, name)] == []
    with pytest.raises(AttributeError, match="module 'd2lpar' has no attribute 'alreduce'"):
        d2lpar.alreduce  # noqa: B018


def test_import_needs_no_matplotlib():
    heavy = "{'matplotlib', 'resvg_py', 'PIL', 'IPython', 'jupyter_client', 'nbformat'}"
    assert printed_by(f"import sys, d2lpar; print(sorted({heavy} & set(sys.modules)))") == ["[]"]


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: path.name)
def test_a_room_begins_with_its_order_and_only_shows_its_files(room):
    """``__init__`` is a docstring that names every file, and ``from .file import name``."""
    text, *shown = ast.parse((room / "__init__.py").read_text(encoding="utf-8")).body
    stems = {path.stem for path in room.glob("*.py")} - {"__init__"}
    assert [stem for stem in stems if f"``{stem}``" not in text.value.value] == []
    assert all(isinstance(node, ast.ImportFrom) and node.level == 1 for node in shown)
    assert {node.module for node in shown} == stems
    aliases = [alias for node in shown for alias in node.names]
    assert [alias.name for alias in aliases if alias.name in stems or alias.asname] == []


def mutable_state(tree):
    """Yield the names of module-level variables that hold something mutable, or are rebound."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and _is_mutable(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (ast.unparse(target) for target in targets)


def _is_mutable(value):
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in MUTABLE
    return isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))


@each_module
def test_no_mutable_state(path):
    """A table in capitals is a constant, which nothing changes."""
    found = set(mutable_state(ast.parse(path.read_text(encoding="utf-8"))))
    variables = {name for name in found if not name.lstrip("_").isupper()}
    assert len(variables) <= (path.stem == "members"), found  # it keeps what belongs to a group


def test_mutable_state_is_seen():
    bad = "a = []\nb: dict = {}\nc = collections.deque()\ndef f():\n    global d\n"
    assert sorted(mutable_state(ast.parse(bad))) == ["a", "b", "c", "d"]
    good = "B = frozenset({1})\nC = (1,)\nx: int\ndef f():\n    g = []\n"
    assert list(mutable_state(ast.parse(good))) == []


# All files


def test_no_file_is_large():
    assert [path for path in files() if path.stat().st_size > MAX_BYTES] == []


def test_no_file_names_a_place_on_a_machine():
    place = re.compile(rb"/(?:home|root|Users|var/folders)/\w|site\W?packages/\w")
    text = [path for path in files() if path.suffix not in (".gz", ".png")]
    assert [path for path in text if place.search(path.read_bytes())] == []
