"""The archives for a package index hold all of the module, nothing else, and work."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import d2lpar

ROOT = Path(__file__).resolve().parents[1]
TEXTS = {"README.md", "LICENSE", "MANIFEST.in", "pyproject.toml"}
BUILD = "import sys; from setuptools import build_meta; "
BUILD += "print(getattr(build_meta, f'build_{sys.argv[1]}')(sys.argv[2]))"


def run(*words, cwd, **variables):
    """Run a command that must succeed; return what it prints."""
    outer = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = {"cwd": cwd, "env": outer | variables, "text": True, "timeout": 100}
    done = subprocess.run(words, capture_output=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind, source, folder):
    """Build an archive as pip does, without the environment it would fetch first."""
    said = run(sys.executable, "-c", BUILD, kind, str(folder), cwd=source)
    return folder / said.splitlines()[-1]


def test_source_archive_and_wheel_have_the_module_which_works_elsewhere(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    for name in ("d2lpar", "tests", "data"):
        ignored = shutil.ignore_patterns("__pycache__", "*.gz")
        shutil.copytree(ROOT / name, tmp_path / "tree" / name, ignore=ignored)
    for name in TEXTS:
        shutil.copy(ROOT / name, tmp_path / "tree")
    with tarfile.open(build("sdist", tmp_path / "tree", tmp_path)) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.2, of Debian 12, has none
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path / "unpacked")
    [source] = (tmp_path / "unpacked").iterdir()
    module = {p.relative_to(ROOT).as_posix() for p in (ROOT / "d2lpar").rglob("*.py")}
    module |= {"d2lpar/py.typed"}
    found = {p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()}
    own = {name for name in found if "egg-info" not in name}
    assert own - {"PKG-INFO", "setup.cfg"} == module | TEXTS

    wheel = build("wheel", source, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        about = {name for name in archive.namelist() if ".dist-info/" in name}
        assert set(archive.namelist()) - about == module
        [path] = [name for name in about if name.endswith("/METADATA")]
        text = archive.read(path).decode()
    assert f"\nVersion: {d2lpar.__version__}\n" in text and "--download" in text
    assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []  # into the repository

    offline = "--no-index", "--no-deps", "--no-cache-dir", "--target", "installed"
    run(sys.executable, "-m", "pip", "install", "-q", *offline, wheel, cwd=tmp_path)
    place = {"PYTHONPATH": str(tmp_path / "installed")}
    program = "import d2lpar; print(d2lpar.__file__, d2lpar.ranks.allreduce.__name__)"
    said = run(sys.executable, "-c", program, cwd=tmp_path, **place)
    assert said.split() == [str(tmp_path / "installed/d2lpar/__init__.py"), "allreduce"]
    command = tmp_path / "installed" / "bin" / "d2lpar-train"
    assert "--resume" in run(command, "--help", cwd=tmp_path, **place)
