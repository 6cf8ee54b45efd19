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
    ("plot", "picture charts drawings iterations"),
    ("", "training train_ddp"),
)
ORDER = [f"{room}.{file}".strip(".") for room, files in HOUSE for file in files.split()]
MAX_LINES = 350
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


def test_constraints_pin_every_direct_dependency_once_and_nothing_else():
    wanted = sorted(canonicalize_name(need.name) for need in direct_dependencies())
    assert sorted(canonicalize_name(pin.name) for pin in pins()) == wanted
    assert [str(pin) for pin in pins() if not re.fullmatch(r"==[\d.]+", str(pin.specifier))] == []


def test_pins_satisfy_pyproject():
    version = {canonicalize_name(pin.name): str(pin.specifier)[2:] for pin in pins()}
    for need in direct_dependencies():
        assert need.specifier.contains(version[canonicalize_name(need.name)]), need
    assert version["torch"] == "2.13.0"
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
    version = re.search(
        r'^__version__ = "(\d+\.\d+\.\d+)"$', read("d2lpar/__init__.py"), flags=re.M
    )
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


def test_ci_runs_the_two_commands_of_the_readme():
    lines = [line.partition("#")[0].strip() for line in read(".ci/run").splitlines()]
    steps = [line for line in lines if line and not line.startswith(("set ", "cd "))]
    always = [step["run"] for step in workflow()["steps"] if "run" in step and "if" not in step]
    commands = ["make notebooks", "make test"]
    assert sorted(readme_commands()[:2]) == sorted(steps) == sorted(always) == commands


def workflow():
    """The only job of the workflow that code hosts run."""
    (job,) = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"].values()
    return job


def test_the_workflow_tries_linux_macos_and_the_lowest_versions():
    machines = workflow()["strategy"]["matrix"]["include"]
    assert {machine["os"] for machine in machines} == {"ubuntu-latest", "macos-latest"}
    (torch,) = [need for need in direct_dependencies() if need.name == "torch"]
    (lowest,) = [machine for machine in machines if "torch" in machine]
    assert project()["requires-python"] == f">={lowest['python']}"
    assert f"{torch.specifier}.0" == f">={lowest['torch']}"


def test_the_workflow_may_only_read_and_ends():
    assert yaml.safe_load(read(".github/workflows/ci.yml"))["permissions"] == {"contents": "read"}
    assert "permissions" not in workflow()
    assert workflow()["timeout-minutes"] <= 90


def test_ci_stops_at_the_first_command_that_fails():
    assert "set -euo pipefail" in read(".ci/run").splitlines()


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


def test_readme_shows_only_commands_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), flags=re.M))
    shown = set(re.findall(r"`make ([a-z-]+)", read("README.md")))
    shown |= {command.split()[1] for command in readme_commands()}
    assert shown - targets == set()


def test_readme_maps_every_room_and_every_notebook():
    rows = re.findall(r"^\| `(\w+)/` \|", read("README.md"), flags=re.M)
    assert rows == list(dict.fromkeys(room for room, _ in HOUSE if room))
    named = set(re.findall(r"\b\d\d_\w+\.ipynb", read("README.md")))
    assert sorted(named) == sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_readme_is_short():
    assert len(read("README.md").splitlines()) < 100


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
    source = "from d2lpar.cost import x\nfrom . import ddp\ndef f():\n    import d2lpar.plot\n"
    (tmp_path / "x.py").write_text(source + "from .ranks import y\nimport d2lpar, torch.nn\n")
    assert sorted(inner_imports(tmp_path / "x.py")) == ["", "cost", "ddp", "plot", "ranks"]
    (tmp_path / "room").mkdir()
    source = "from . import a\nfrom .b import x\nfrom .. import ranks\nfrom ..c import y\n"
    (tmp_path / "room" / "y.py").write_text(source + "from d2lpar.room import z\n")
    expected = ["c", "ranks", "room", "room.a", "room.b"]
    assert sorted(inner_imports(tmp_path / "room" / "y.py")) == expected


@pytest.mark.parametrize(
    "name, file, allowed",
    [
        ("mixed_precision.casting", "mixed_precision/opt_levels.py", True),
        ("mixed_precision.opt_levels", "mixed_precision/casting.py", False),
        ("mixed_precision", "study/methods.py", True),
        ("mixed_precision", "mixed_precision/grad_scaler.py", False),  # its own room's front door
        ("mixed_precision", "data_parallel/ddp.py", False),
        ("devices", "plot/charts.py", True),
        ("training", "plot/charts.py", False),
        ("nothing", "data_parallel/ddp.py", False),
    ],
)
def test_a_room_is_above_when_all_its_files_are(name, file, allowed):
    assert stands_above(name, PACKAGE / file) == allowed


@each_module
def test_module_is_short_and_tested(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
    room = path.relative_to(PACKAGE).parent
    assert (ROOT / "tests" / room / f"test_{path.name}").exists()


@each_module
def test_no_file_bears_the_name_of_something_in_it(path):
    top = ast.parse(path.read_text(encoding="utf-8")).body
    assert path.stem not in {getattr(node, "name", "") for node in top}


def test_names_of_the_package_are_loaded_when_first_used():
    """``__all__`` has the rooms and about 20 names; those of the first edition stay importable."""
    program = "import sys, d2lpar; print(d2lpar.ranks.__name__, 'd2lpar.pipeline' in sys.modules, "
    program += "d2lpar.DataParallel.__module__); from d2lpar import *; print(plot.bars)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    first, second = done.stdout.splitlines()
    assert first == "d2lpar.ranks False d2lpar.data_parallel.replicas"
    assert second.startswith("<function bars")
    rooms = {path.name for path in ROOMS}
    assert rooms <= set(d2lpar.__all__)
    assert 15 <= len(set(d2lpar.__all__) - rooms) <= 25
    for name in FIRST_EDITION.split():
        assert getattr(d2lpar, name) is not None
    with pytest.raises(AttributeError, match="module 'd2lpar' has no attribute 'alreduce'"):
        d2lpar.alreduce  # noqa: B018


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


def test_import_needs_no_matplotlib():
    heavy = "{'matplotlib', 'resvg_py', 'PIL', 'IPython', 'jupyter_client', 'nbformat'}"
    program = f"import sys, d2lpar; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT
    )
    assert (result.stdout, result.stderr) == ("[]\n", "")


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
