"""Copy notebooks/ to work/; a copy that was changed is never overwritten.

    python tools/work_copies.py

A copy that was not changed is renewed. Where a notebook and its copy have both changed,
the new one is placed beside the copy, with a line that says so. Saving in JupyterLab
changes nothing that git watches, so that ``git pull`` goes through. work/.copies.json
holds what was copied: file names with a hash each.
"""

import argparse
import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def digest(path: Path) -> str:
    """Return a hash of a file; of a notebook, only of its cells as they are shown."""
    content = path.read_bytes()
    if path.suffix == ".ipynb":
        try:
            cells = json.loads(content)["cells"]
        except (ValueError, KeyError, TypeError):
            pass  # no notebook any more
        else:
            content = json.dumps(_shown(cells), sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()


def _shown(value: Any) -> Any:
    """Leave out what JupyterLab changes unasked: counts, cuts, metadata."""
    if isinstance(value, dict):
        kept = value.keys() - {"metadata", "execution_count"}
        tags = value.get("metadata", {}).get("tags", [])
        return {key: _shown(value[key]) for key in kept} | (
            {"tags": tags} if tags else {}
        )
    if isinstance(value, list):
        texts = all(isinstance(item, str) for item in value)
        return "".join(value) if texts else [_shown(item) for item in value]
    return value


def refresh(notebooks: Path, work: Path) -> list[str]:
    """Bring all files to ``work``; return a line for each placed beside a copy."""
    record = work / ".copies.json"
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
    # none yet, or cut short: then every copy counts as changed
    except (OSError, ValueError):
        known = {}
    lines = []
    for source in sorted(notebooks.rglob("*")):
        name = source.relative_to(notebooks)
        if source.is_dir() or any(part.startswith(".") for part in name.parts):
            continue
        placed = _place(source, name, work, known)
        if placed != name:
            lines.append(
                f"{name}: you have changed your copy, so the new one is beside it:"
                f" {placed}"
            )
    work.mkdir(exist_ok=True)
    temporary = record.with_suffix(".tmp")
    temporary.write_text(json.dumps(known, indent=1), encoding="utf-8")
    temporary.replace(record)
    return lines


def _place(source: Path, name: Path, work: Path, known: dict[str, str]) -> Path:
    """Copy to the first free place; return ``name`` if there was nothing to do."""
    new = digest(source)
    for place in _places(name):
        target = work / place
        if known.get(place.as_posix()) == new and (target.exists() or place != name):
            # it was placed; if it was beside the copy, and removed since, it stays so
            return name
        if not target.exists() or digest(target) in (new, *known.values()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            known[place.as_posix()] = new
            return place


def _places(name: Path) -> Iterator[Path]:
    yield name
    for number in itertools.count(1):
        yield name.with_name(
            f"{name.stem}.new{number if number > 1 else ''}{name.suffix}"
        )


def main() -> None:
    """Run the command line."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    for line in refresh(ROOT / "notebooks", ROOT / "work"):
        print(line)


if __name__ == "__main__":
    main()
