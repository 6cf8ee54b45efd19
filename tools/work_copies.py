"""Copy to work/ what is not there yet of notebooks/, without outputs: predict first.

What a reader has there is not touched. For a fresh copy, rename or delete the old one.
"""

import shutil
from pathlib import Path

import nbformat
from nbconvert.preprocessors import ClearOutputPreprocessor

ROOT = Path(__file__).resolve().parents[1]
for source in sorted((ROOT / "notebooks").rglob("*.*")):
    name = source.relative_to(ROOT / "notebooks")
    copy = ROOT / "work" / name
    if not copy.exists() and ".ipynb_checkpoints" not in name.parts:
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".ipynb":
            nb = nbformat.read(source, as_version=4)
            nbformat.write(ClearOutputPreprocessor().preprocess(nb, {})[0], copy)
        else:
            shutil.copyfile(source, copy)
