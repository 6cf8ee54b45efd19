"""What the site is made from: schedules for its players, pages of the reference."""

import json
import shutil
import subprocess
from itertools import product

import nbformat
import pytest
import website
from test_project import HOUSE, PACKAGE, ROOT

from d2lpar import collectives, pipeline
from d2lpar.collectives.cost import walk

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")


def javascript(file, program, data):
    """What a program prints, as JSON; ``players`` is what a site's file exports."""
    text = f"const players = require('./docs/_static/{file}.js'); let text = '';"
    text += "process.stdin.on('data', (part) => (text += part)).on('end', () => {"
    text += (
        "const data = JSON.parse(text);"
        f" console.log(JSON.stringify(({program})(data))); }});"
    )
    options = {
        "input": json.dumps(data),
        "capture_output": True,
        "text": True,
        "timeout": 100,
    }
    done = subprocess.run(["node", "-e", text], cwd=ROOT, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
def test_the_schedule_player_knows_what_python_knows():
    exported = website.exported_schedules()
    cases = list(product(exported, range(2, 9), (0, 4, 4000, 4_000_000)))
    program = """(data) => data.cases.map(([name, k, nbytes]) => {
        const schedule = data.exported[name][k];
        return [players.holdings(schedule, k), players.costs(schedule, k, nbytes)];
    })"""
    found = javascript("schedules", program, {"exported": exported, "cases": cases})
    for (name, k, nbytes), (states, costs) in zip(cases, found, strict=True):
        schedule = website.SCHEDULES[name]
        expected = collectives.holdings(schedule(k), k)
        assert [
            [[tuple(c) for c in held] for held in state] for state in states
        ] == expected
        cost = walk(schedule, k, nbytes)
        assert len(costs) == cost.steps + 1 and costs[0] == {
            "sent": [0] * k,
            "seconds": 0,
        }
        assert tuple(costs[-1]["sent"]) == cost.sent
        assert costs[-1]["seconds"] == pytest.approx(cost.seconds, rel=1e-12)


@needs_node
def test_the_pipeline_player_knows_what_python_knows():
    exported = website.exported_pipelines()
    cases = list(product(exported, range(2, 7), range(1, 13), (1, 2, 3), (0, 0.5)))
    program = """(data) => data.cases.map(([name, p, m, backward, transfer]) => {
        const orders = data.exported[name][`${p},${m}`];
        const spans = players.predict(orders, 1, backward, transfer);
        const { bubble, duration, mostLive } = players;
        return [spans, bubble(spans), duration(spans), mostLive(orders)];
    })"""
    found = javascript("pipelines", program, {"exported": exported, "cases": cases})
    for (name, p, m, backward, transfer), results in zip(cases, found, strict=True):
        spans, bubble, duration, most = results
        ticks = website.PIPELINES[name](p, m)
        expected = pipeline.predict(ticks, 1, backward, transfer)
        kind = {True: "forward", False: "backward"}
        seen = {
            (s["stage"], s["microbatch"], kind[s["forward"]], s["start"], s["end"])
            for s in spans
        }
        assert seen == set(map(tuple, expected)) and len(spans) == len(expected)
        assert [s["end"] for s in spans] == [span.end for span in expected]
        assert bubble == pytest.approx(pipeline.bubble(expected), abs=1e-12)
        assert duration == expected[-1].end
        live = pipeline.live_counts(a for tick in ticks for a in tick)
        assert most == [max(counts) for counts in live.values()]


@needs_node
def test_players_write_numbers_with_three_digits_and_a_unit():
    program = "(data) => [data.map(players.bytes), data.map(players.time)]"
    sizes, times = javascript(
        "schedules", program, [0, 1, 999, 1333333, 2.5e9, 1.5e-5, 0.02]
    )
    assert sizes[:5] == ["0 B", "1 B", "999 B", "1.33 MB", "2.5 GB"]
    assert times[0] == "0 µs" and times[5:] == ["15 µs", "20 ms"]


def test_what_is_exported_is_what_the_module_returns():
    exported = website.exported_schedules()
    assert list(exported) == list(website.SCHEDULES)
    assert all(list(by_size) == list(range(2, 9)) for by_size in exported.values())
    whole = {
        "chunks": 1,
        "steps": [
            [[1, 0, 0, 1, 1], [2, 0, 0, 1, 1]],
            [[0, 1, 0, 1, 0], [0, 2, 0, 1, 0]],
        ],
    }
    assert exported["star"][3] == whole  # a move of the whole tensor has all chunks
    assert exported["ring"][2]["steps"] == [
        [[0, 1, 1, 2, 1], [1, 0, 0, 1, 1]],
        [[0, 1, 0, 1, 0], [1, 0, 1, 2, 0]],
    ]
    # a range of chunks
    assert exported["halving_doubling"][4]["steps"][0][0] == [0, 2, 2, 4, 1]
    orders = website.exported_pipelines()["one_f_one_b"]["2,3"]
    assert orders == [[1, 2, -1, 3, -2, -3], [1, -1, 2, -2, 3, -3]]


def test_the_reference_has_every_room_file_and_name():
    places = [
        f"{room}.{file}".strip(".") for room, files in HOUSE for file in files.split()
    ]
    shown = [*website.GROUND, *website.ROOF]
    for room in sorted({room for room, _ in HOUSE if room}):
        order = website.reading_order(PACKAGE / room)
        shown += [f"{room}.{file}" for file in order]
        page = website.module_page(
            room, f"d2lpar.{room}", order, website.exported_names(PACKAGE / room)
        )
        for file, names in website.exported_names(PACKAGE / room).items():
            assert (
                f".. automodule:: d2lpar.{room}.{file}\n   :members:"
                f" {', '.join(names)}\n" in page
            )
    assert sorted(shown) == sorted(set(places) - {"guards"})


def test_the_front_page_has_the_question_of_each_chapter():
    chapters = website.chapters(ROOT / "notebooks")
    assert [chapter["number"] for chapter in chapters] == sorted(
        path.name[:2] for path in (ROOT / "notebooks").glob("*.ipynb")
    )
    page = website.chapter_list(chapters)
    for chapter in chapters:
        assert all(chapter.values()) and chapter["question"].endswith("?")
        assert (
            f"]({'notebooks'}/{chapter['name']}.ipynb)" in page
            and chapter["question"] in page
        )


def test_an_exercise_begins_with_what_the_chapter_defined_folded_away(tmp_path):
    path = tmp_path / "03_allreduce.ipynb"
    shutil.copy(ROOT / "notebooks" / "exercises" / path.name, path)
    website.fold_setup(path)
    cells = [
        cell
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "code"
    ]
    folded = ["hide-input" in cell.metadata.get("tags", []) for cell in cells]
    assert folded == [True] + [False] * (len(cells) - 1)
    assert cells[0].metadata.nbgrader.grade_id == "setup"
