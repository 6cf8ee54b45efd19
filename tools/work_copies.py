"""Copy to work/ what is not there yet of notebooks/, without outputs: predict first.

What a reader has there is not touched. For a fresh copy, rename or delete the old one.
"""

import json
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for source in sorted((ROOT / "notebooks").rglob("*.*")):
    name = source.relative_to(ROOT / "notebooks")
    copy = ROOT / "work" / name
    if not copy.exists() and ".ipynb_checkpoints" not in name.parts:
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        if copy.suffix == ".ipynb":
            nb = json.loads(copy.read_text("utf-8"))
            for cell in nb["cells"]:
                if cell["cell_type"] == "code":
                    cell.update(outputs=[], execution_count=None)
            copy.write_text(json.dumps(nb, indent=1, ensure_ascii=False), "utf-8")
