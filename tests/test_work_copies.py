"""Copies of the notebooks: what a reader has changed is never overwritten."""

import json
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import work_copies
from nbformat import write
from nbformat.v4 import new_code_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[1]


def save(path, source):
    cell = new_code_cell(source, id="a", outputs=[new_output("stream", text="1\n")])
    path.parent.mkdir(exist_ok=True, parents=True)
    write(new_notebook(cells=[cell]), path)


def source(path):
    return json.loads(path.read_text())["cells"][0]["source"]


@pytest.fixture
def folders(tmp_path):
    save(tmp_path / "notebooks" / "01_a.ipynb", ["first"])
    return tmp_path / "notebooks", tmp_path / "work"


def names(folder):
    return sorted(
        path.name for path in folder.iterdir() if not path.name.startswith(".")
    )


def test_notebooks_and_their_pictures_are_copied(folders):
    notebooks, work = folders
    save(notebooks / "exercises" / "02_b.ipynb", "x")
    (notebooks / "img").mkdir()
    (notebooks / "img" / "a.png").write_bytes(b"\x89PNG")
    save(notebooks / ".ipynb_checkpoints" / "01_a-checkpoint.ipynb", "x")
    assert work_copies.refresh(*folders) == []
    assert names(work) == ["01_a.ipynb", "exercises", "img"]
    assert names(work / "exercises") == ["02_b.ipynb"]
    for path in ("01_a.ipynb", "img/a.png"):
        assert (work / path).read_bytes() == (notebooks / path).read_bytes()


@pytest.mark.parametrize("saved", [False, True], ids=["untouched", "opened and saved"])
def test_a_copy_that_was_not_changed_is_renewed(folders, saved):
    notebooks, work = folders
    save(notebooks / "01_a.ipynb", "two\nlines")
    work_copies.refresh(*folders)
    if saved:
        opened = json.loads((work / "01_a.ipynb").read_text())
        opened["metadata"]["language_info"] = {"version": "3.11.7"}
        opened["cells"][0] |= {
            "metadata": {"trusted": False},
            "source": ["two\n", "lines"],
        }
        (work / "01_a.ipynb").write_text(json.dumps(opened))
    save(notebooks / "01_a.ipynb", ["second"])
    assert work_copies.refresh(*folders) == []
    assert names(work) == ["01_a.ipynb"] and source(work / "01_a.ipynb") == ["second"]


@pytest.mark.parametrize(
    "mine",
    [{"source": ["mine"]}, {"outputs": []}, {"metadata": {"tags": ["mine"]}}],
    ids=list,
)
def test_a_copy_that_was_changed_stays_and_what_is_new_comes_beside_it(folders, mine):
    notebooks, work = folders
    work_copies.refresh(*folders)
    changed = json.loads((work / "01_a.ipynb").read_text())
    changed["cells"][0] |= mine
    (work / "01_a.ipynb").write_text(json.dumps(changed))
    before = (work / "01_a.ipynb").read_bytes()
    assert work_copies.refresh(*folders) == []  # nothing is new yet
    for text in ("second", "third"):
        save(notebooks / "01_a.ipynb", text)
        [line] = work_copies.refresh(*folders)
        assert (
            "01_a.ipynb: you have changed your copy" in line
            and "01_a.new.ipynb" in line
        )
        assert names(work) == ["01_a.ipynb", "01_a.new.ipynb"]
        assert source(work / "01_a.new.ipynb") == [text]
        assert work_copies.refresh(*folders) == []  # said once
    save(work / "01_a.new.ipynb", "mine too")  # which is not overwritten either
    save(notebooks / "01_a.ipynb", "fourth")
    assert "01_a.new2.ipynb" in work_copies.refresh(*folders)[0]
    sources = [source(work / name) for name in names(work)[1:]]
    assert (work / "01_a.ipynb").read_bytes() == before
    assert sources == [["mine too"], ["fourth"]]


def test_a_file_that_was_removed_comes_back_but_not_beside_a_copy(folders):
    notebooks, work = folders
    work_copies.refresh(*folders)
    (work / "01_a.ipynb").unlink()
    work_copies.refresh(*folders)
    assert source(work / "01_a.ipynb") == ["first"]
    save(work / "01_a.ipynb", "mine")
    save(notebooks / "01_a.ipynb", "second")
    work_copies.refresh(*folders)
    (work / "01_a.new.ipynb").unlink()
    assert work_copies.refresh(*folders) == [] and names(work) == ["01_a.ipynb"]
    save(work / "01_a.ipynb", "second")  # taken over
    save(notebooks / "01_a.ipynb", "third")
    assert work_copies.refresh(*folders) == [] and source(work / "01_a.ipynb") == [
        "third"
    ]


def test_what_is_no_notebook_any_more_and_what_has_no_record_stay(folders):
    _, work = folders
    work_copies.refresh(*folders)
    (work / ".copies.json").write_text('{"01_a')  # cut short
    (work / "01_a.ipynb").write_text("[]")
    assert len(work_copies.refresh(*folders)) == 1
    assert (work / "01_a.ipynb").read_text() == "[]"
    assert source(work / "01_a.new.ipynb") == ["first"]


def test_git_and_clean_leave_the_copies_alone(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("work", "build", "d2lpar", "tests", "tools", "benchmarks"):
        (tmp_path / name).mkdir()
    (tmp_path / "work" / "01_a.ipynb").touch()
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "work" / "01_a.ipynb").exists() and not (
        tmp_path / "build"
    ).exists()
    assert "work/" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_lab_opens_the_copies_and_asks_nothing_about_news():
    make = ["make", "--no-print-directory", "-n", "lab"]
    printed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True).stdout
    copies, lab = printed.replace("\\\n", "").splitlines()[-2:]
    assert copies.endswith("tools/work_copies.py")
    assert "--LabApp.default_url=/lab/tree/work " in lab
    assert "--LabApp.app_settings_dir=tools/lab " in lab
    [[plugin, settings]] = json.loads(
        (ROOT / "tools/lab/overrides.json").read_text()
    ).items()
    assert settings == {"fetchNews": "false"}
    schemas = Path(sysconfig.get_path("data"), "share", "jupyter", "lab", "schemas")
    schema = schemas.joinpath(*plugin.split(":")).with_suffix(".json")
    assert "false" in str(json.loads(schema.read_text())["properties"]["fetchNews"])
