"""The archives for a package index hold all of the module, nothing else, and work."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.version import Version

import d2lpar

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
SOURCES = {
    path.relative_to(ROOT).as_posix() for path in (ROOT / "d2lpar").rglob("*.py")
}
TEXTS = ("README.md", "LICENSE", "MANIFEST.in", "pyproject.toml")
LIMIT = 100  # seconds for a command that takes two
BUILD = "import sys; from setuptools import build_meta; "
BUILD += "print(getattr(build_meta, f'build_{sys.argv[1]}')(sys.argv[2]))"


def run(*words, cwd, **variables):
    """Run a command that must succeed; return what it prints."""
    outer = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = {"cwd": cwd, "env": outer | variables, "timeout": LIMIT, "text": True}
    done = subprocess.run(words, capture_output=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind, source, folder):
    """Build an archive as pip does, without the environment it would fetch first."""
    name = run(sys.executable, "-c", BUILD, kind, str(folder), cwd=source).splitlines()[
        -1
    ]
    return folder / name


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The working tree's source archive, and the wheel that is built from it alone."""
    folder = tmp_path_factory.mktemp("packaging")
    [needed] = map(Requirement, PYPROJECT["build-system"]["requires"])
    found = importlib.util.find_spec("setuptools") and version("setuptools")
    if not found or not needed.specifier.contains(found):
        pytest.skip(
            f"needs {needed} in the environment, which newer versions of torch bring"
        )
    for name in ("d2lpar", "tests", "data"):
        ignored = shutil.ignore_patterns("__pycache__", "*.gz")
        shutil.copytree(ROOT / name, folder / "tree" / name, ignore=ignored)
    for name in TEXTS:
        shutil.copy(ROOT / name, folder / "tree")
    sdist = build("sdist", folder / "tree", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    [source] = (folder / "unpacked").iterdir()
    return sdist, build("wheel", source, folder)


@pytest.fixture(scope="module")
def installed(archives, tmp_path_factory):
    """A folder with nothing but what the wheel installs."""
    folder = tmp_path_factory.mktemp("installed")
    if importlib.util.find_spec("pip") is None:
        pytest.skip("needs pip in the environment")
    offline = "--no-index", "--no-deps", "--disable-pip-version-check", "--no-cache-dir"
    command = (
        "-m",
        "pip",
        "install",
        "-q",
        *offline,
        "--target",
        str(folder),
        str(archives[1]),
    )
    run(sys.executable, *command, cwd=folder)
    return folder


def test_the_source_archive_has_what_building_needs_and_the_licence(archives):
    with tarfile.open(archives[0]) as archive:
        names = {
            name.partition("/")[2]
            for name in archive.getnames()
            if archive.getmember(name).isfile()
        }
    own = {name for name in names if not name.startswith("d2lpar.egg-info/")}
    built = {"PKG-INFO", "setup.cfg"}
    assert (
        own - built - set(TEXTS) == SOURCES | {"d2lpar/py.typed"} and set(TEXTS) <= own
    )


def test_the_wheel_has_every_room_and_nothing_but_the_module(archives):
    with zipfile.ZipFile(archives[1]) as archive:
        names = set(archive.namelist())
        assert archive.testzip() is None
    about = {name for name in names if ".dist-info/" in name}
    assert names - about == SOURCES | {"d2lpar/py.typed"}
    assert any(name.endswith("/licenses/LICENSE") for name in about)
    assert archives[1].name == f"d2lpar-{d2lpar.__version__}-py3-none-any.whl"


def test_what_an_index_shows_is_valid_and_has_no_link_into_the_repository(archives):
    with zipfile.ZipFile(archives[1]) as archive:
        [path] = [
            name for name in archive.namelist() if name.endswith(".dist-info/METADATA")
        ]
        about = Metadata.from_email(archive.read(path), validate=True)
    assert (about.name, about.version) == ("d2lpar", Version(d2lpar.__version__))
    assert about.license_expression == "MIT" and about.license_files == ["LICENSE"]
    assert set(about.provides_extra) == set(PROJECT["optional-dependencies"])
    needed = {str(need) for need in about.requires_dist if need.marker is None}
    assert needed == {str(Requirement(line)) for line in PROJECT["dependencies"]}
    assert about.description_content_type.startswith("text/markdown")
    assert "d2lpar-train" in about.description and "--download" in about.description
    links = re.findall(r"\]\(([^)]*)\)|(?:src|href)=\"([^\"]*)", about.description)
    assert [link for pair in links for link in pair if link and "://" not in link] == []


def test_twine_has_no_complaint(archives):
    if importlib.util.find_spec("twine") is None:
        pytest.skip("needs twine in the environment")
    said = run(
        sys.executable,
        "-m",
        "twine",
        "check",
        "--strict",
        *map(str, archives),
        cwd=ROOT,
    )
    assert said.count("PASSED") == 2


def test_what_was_installed_works_far_from_the_repository(installed, tmp_path):
    rooms = [
        room.name
        for room in (ROOT / "d2lpar").iterdir()
        if (room / "__init__.py").exists()
    ]
    program = f"import d2lpar; [getattr(d2lpar, room) for room in {rooms}]; "
    program += "print(d2lpar.__file__, d2lpar.train.__name__)"
    said = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(installed))
    assert said.split() == [str(installed / "d2lpar" / "__init__.py"), "train"]
    command = installed / "bin" / "d2lpar-train"
    said = run(str(command), "--help", cwd=tmp_path, PYTHONPATH=str(installed))
    assert "--epochs" in said and "--resume-if-there" in said
