"""Break the module in one place after the other, and see that the named test notices.

    python tools/mutants.py                  all that stand in tests/mutants/
    python tools/mutants.py ranks sharding   those of some rooms

Each file of tests/mutants/ lists the mutants of one room: what breaks, the file, the
old text and the new one, the test that must fail. They are made in copies of the
working tree, never in the tree itself. The exit status is 1 when a mutant survives, or
cannot be tried.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LISTS = ROOT / "tests" / "mutants"
LIMIT = 300  # seconds for the test of one mutant
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
GENERATED = (".*", "build", "work", "data", "__pycache__", "*.egg-info")
FAILED = 1  # pytest's exit status when tests failed; others mean that none was run


class Mutant(NamedTuple):
    """A fault: ``old``, once in d2lpar's ``file``, becomes ``new``; ``test`` fails."""

    breaks: str
    file: str
    old: str
    new: str
    test: str


def all_rooms() -> list[str]:
    """Return the rooms that have a list."""
    return sorted(path.stem for path in LISTS.glob("*.toml"))


def read_list(room: str) -> list[Mutant]:
    """Return the mutants of a room."""
    entries = tomllib.loads((LISTS / f"{room}.toml").read_text("utf-8"))["mutant"]
    return [Mutant(**entry) for entry in entries]


def mutated(mutant: Mutant, root: Path) -> str:
    """Return the mutant's file with the fault; ValueError unless it fits once."""
    text = (root / "d2lpar" / mutant.file).read_text("utf-8")
    if (found := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.file} has the old text {found} times")
    return text.replace(mutant.old, mutant.new)


@contextmanager
def working_copy() -> Iterator[Path]:
    """Copy the tree; the data are linked."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder, "tree")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*GENERATED))
        (copy / "data").symlink_to(ROOT / "data")
        yield copy


def run_tests(
    copy: Path, tests: list[str], limit: float | None = LIMIT
) -> tuple[int, str]:
    """Run tests on the copy's module; return pytest's exit status and what it said."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options["env"] = os.environ | {
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        done = subprocess.run([*PYTEST, *tests], cwd=copy, timeout=limit, **options)
    except subprocess.TimeoutExpired:
        return FAILED, f"not done after {limit} s"
    return done.returncode, done.stdout


def complaint(mutant: Mutant, copy: Path) -> str:
    """Make the mutant in a copy, run its test, mend it; return what is wrong, or ""."""
    file = copy / "d2lpar" / mutant.file
    sound = file.read_text("utf-8")
    try:
        file.write_text(mutated(mutant, copy), "utf-8")
        status, said = run_tests(copy, [mutant.test])
    except ValueError as error:
        return str(error)
    finally:
        file.write_text(sound, "utf-8")
    if status == 0:
        return f"{mutant.test} passes"
    return "" if status == FAILED else f"pytest ends with status {status}:\n{said}"


def main(rooms: list[str]) -> int:
    """Try the mutants of these rooms, or of all; return the exit status."""
    there = all_rooms()
    if unknown := [room for room in rooms if room not in there]:
        print(f"no list for {', '.join(unknown)}: there are {', '.join(there)}")
        return 2
    mutants = [mutant for room in rooms or there for mutant in read_list(room)]
    begin, survivors = time.monotonic(), 0
    with ExitStack() as stack:
        copies = SimpleQueue()
        for _ in range(os.cpu_count() or 1):
            copies.put(stack.enter_context(working_copy()))

        def attempt(mutant: Mutant) -> str:
            copy = copies.get()
            try:
                return complaint(mutant, copy)
            finally:
                copies.put(copy)

        status, said = run_tests(
            ROOT, sorted({mutant.test for mutant in mutants}), limit=None
        )
        if status:
            print(f"without any fault, these tests should pass:\n{said}")
            return 1
        with ThreadPoolExecutor(copies.qsize()) as pool:
            for mutant, wrong in zip(mutants, pool.map(attempt, mutants), strict=True):
                if wrong:
                    survivors += 1
                    print(f"{mutant.file}, {mutant.breaks}: {wrong}", flush=True)
    caught = f"{len(mutants) - survivors} of {len(mutants)} mutants are caught"
    print(f"{caught}, in {time.monotonic() - begin:.0f} s")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
