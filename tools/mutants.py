"""Break the module in one place after the other: each time, the named test must fail.

python tools/mutants.py [ranks ddp]    all of tests/mutants.toml, or of such files

Made in copies of the working tree. By hand: mutmut and its like try thousands, most of
which mean nothing, and take the minutes of a test with processes for each.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "work", "data", "__pycache__")
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]


def mutants() -> list[tuple[str, dict]]:
    """Return (file, fault) of each; a fault has what breaks, old, new, and test."""
    lists = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text("utf-8"))
    return [(file, fault) for file, faults in lists.items() for fault in faults]


def broken(text: str, fault: dict) -> str:
    """Return a file's text with the fault, whose old text must stand there once."""
    if (count := text.count(fault["old"])) != 1:
        raise ValueError(f"{fault['breaks']}: the old text stands there {count} times")
    return text.replace(fault["old"], fault["new"])


def survives(file: str, fault: dict) -> str:
    """Try a fault in a copy of the tree; return what is wrong, or ""."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        (tree / "data").symlink_to(ROOT / "data")
        path = tree / "d2lpar" / file
        path.write_text(broken(path.read_text("utf-8"), fault), "utf-8")
        env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        words = [*PYTEST, f"tests/{fault['test']}"]
        done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True)
    failed = done.returncode == 1  # otherwise it has passed, or none was run
    return "" if failed else f"{file}: {fault['breaks']}: {done.stdout[-400:]}"


def main(names: list[str]) -> int:
    """Try those of files whose names contain one of these, or all."""
    chosen = [m for m in mutants() if not names or any(n in m[0] for n in names)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = [line for line in pool.map(survives, *zip(*chosen, strict=True)) if line]
    print(*said, f"{len(chosen) - len(said)} of {len(chosen)} are caught", sep="\n")
    return int(bool(said) or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
