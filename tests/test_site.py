"""The scripts of the site's players and puzzles, against the module: run by Node.js."""

import json
import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest
import website

from d2lpar.pipeline_schedules import bubble, clock, kept, play, spell
from d2lpar.schedules import Move, check_steps, chunks_of, cost, verify_allreduce

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not shutil.which("node"), reason="needs Node.js")
PROGRAM = """
const site = require("./docs/_static/FILE");
const spelled = (ranks) => ranks.map(({ word, stages }) => site.spell(word, stages));
const calls = JSON.parse(require("fs").readFileSync(0, "utf8"));
const call = ([name, first, ...rest]) => {
  if (name === "play" || name === "clock") first = spelled(first);
  try { return site[name](first, ...rest); } catch (error) { return error.message; }
};
console.log(JSON.stringify(calls.map(call)));
"""


def in_node(file, calls):
    """Call functions of a script, [name, arguments…]; return what they return or throw.

    For ``play`` and ``clock``, words are made into actions first.
    """
    command = ["node", "-e", PROGRAM.replace("FILE", file)]
    text = json.dumps(calls)
    done = subprocess.run(
        command, input=text, text=True, cwd=ROOT, check=True, capture_output=True
    )
    return json.loads(done.stdout)


def refusal(check, *args):
    """What Python says against a schedule, or nothing."""
    try:
        check(*args)
    except ValueError as error:
        return str(error)
    return ""


def some_steps(random):
    """Two steps of moves among four, mostly wrong ones, in which two may exchange."""
    chunks, moves = (0, 1, 2, None, range(2), range(1, 3)), []
    for _ in range(random.randrange(1, 7)):
        (src, dst), chunk = random.sample(range(4), 2), random.choice(chunks)
        moves.append(Move(src, dst, chunk, random.random() < 0.7))
        if random.random() < 0.4:
            back = chunk if random.random() < 0.7 else random.choice(chunks)
            moves.append(Move(dst, src, back, random.random() < 0.9))
    return [moves[:2], moves[2:]]


def test_the_page_judges_an_allreduce_as_python_does():
    random, k, last = Random(0), 4, [Move(2, 3, 3, True)]  # so that there are 4 chunks
    all_steps = [[*some_steps(random), last] for _ in range(2000)]
    all_steps += [schedule(k) for schedule in website.SCHEDULES.values()]
    pages = list(map(website.exported_schedule, all_steps))
    found = in_node("allreduce.js", [["checkSteps", page["steps"]] for page in pages])
    assert found == [refusal(check_steps, steps, k) for steps in all_steps]
    right = [i for i, words in enumerate(found) if not words]
    assert 200 < len(right) < 1800
    calls = [["verifyAllreduce", pages[i], k] for i in right]
    calls += [["costs", pages[i], k, 4012, 2e-5, 1e-9] for i in right]
    calls += [["stepsInPython", pages[i]] for i in right]
    found = iter(in_node("allreduce.js", calls))
    schedules = [lambda k, steps=all_steps[i]: steps for i in right]
    for schedule in schedules:
        assert next(found) == refusal(verify_allreduce, schedule, k)
    for schedule in schedules:
        expected = cost(schedule, k, 4012, lambda src, dst: (2e-5, 1e-9))
        end = next(found)[-1]
        assert end["sent"] == [expected.sent(r) for r in range(k)]
        assert end["seconds"] == pytest.approx(expected.seconds, rel=1e-12)
    for i in right:  # what is copied means the same
        names = {"Move": Move}
        exec(next(found), names)
        copied = [
            [m._replace(chunk=chunks_of(m, 4)) for m in s] for s in names["steps"]
        ]
        whole = [[m._replace(chunk=chunks_of(m, 4)) for m in s] for s in all_steps[i]]
        assert copied == whole


def test_the_page_judges_a_pipeline_as_python_does():
    random = Random(0)
    chosen = [schedule(4, 8) for schedule in website.PIPELINES.values()]
    for _ in range(150):  # two neighbours change places: some then wait for ever
        words = website.exported_pipeline(random.choice(chosen[:6]))
        rank = random.choice(words)
        at, word = random.randrange(12), rank["word"]
        rank["word"] = word[:at] + word[at : at + 2][::-1] + word[at + 2 :]
        chosen.append([spell(own["word"], *own["stages"]) for own in words])
    pages = list(map(website.exported_pipeline, chosen))
    n = [sum(len(rank["stages"]) for rank in page) for page in pages]
    costs = {"forward": 0.5, "backward": 1, "weight": 1.5, "transfer": 0.25}
    calls = [["play", page, stages] for page, stages in zip(pages, n)]
    calls += [["clock", page, stages, costs] for page, stages in zip(pages, n)]
    calls += [["ordersInPython", page] for page in pages]
    found = iter(in_node("pipeline.js", calls))
    refused = [refusal(play, orders) for orders in chosen]
    assert 30 < refused.count("") < 130
    for orders, words in zip(chosen, refused):
        ticks = next(found)
        assert ticks == (words or [[a._asdict() for a in t] for t in play(orders)])
    right = []
    for orders, words in zip(chosen, refused):
        spans = next(found)
        if not words:
            expected = clock(orders, **costs)
            times = [[(span["start"], span["end"]) for span in own] for own in spans]
            assert times == [[span[1:] for span in own] for own in expected]
            right.append((orders, spans))
    for orders in chosen:
        names = {"spell": spell}
        exec(next(found), names)
        assert names["orders"] == orders
    split = [any(a.kind == "weight" for a in orders[0]) for orders, _ in right]
    calls = [["bubble", spans] for _, spans in right]
    for (_, spans), weights in zip(right, split):
        calls += [["mostKept", own, weights] for own in spans]
    found = in_node("pipeline.js", calls)
    expected = [bubble(clock(orders, **costs)) for orders, _ in right]
    assert found[: len(right)] == pytest.approx(expected, abs=1e-12)
    most = [max(kept(own)) for orders, _ in right for own in orders]
    assert found[len(right) :] == most


def test_each_level_lets_its_own_schedule_pass_and_refuses_others():
    levels, calls = website.allreduce_levels(), []
    for level, (name, k, _) in zip(levels, website.ALLREDUCE_LEVELS):
        for step in website.exported_schedule(website.SCHEDULES[name](k))["steps"]:
            for i, move in enumerate(step):
                calls.append(["levelRefusal", level, k, step[:i], move])
    assert set(in_node("allreduce.js", calls)) == {""}
    ring, tree = levels[3:5]
    first = {"src": 0, "dst": 1, "first": 0, "end": 1, "reduce": True}
    single = "a device sends at most one message in a step, and takes at most one"
    for level, change, says in (
        (ring, {"dst": 2}, "0 sends to 1 only, its neighbour"),
        (ring, {"src": 3, "dst": 1}, "3 sends to 0 only, its neighbour"),
        (ring, {}, single),
        (tree, {"src": 2}, single),
        (tree, {"dst": 2}, single),
    ):
        call = ["levelRefusal", level, 4, [first], first | change]
        assert in_node("allreduce.js", [call]) == [f"in this level {says}"]


def test_the_pages_have_as_many_levels_as_there_are_targets():
    for page, levels in (
        ("allreduce", website.ALLREDUCE_LEVELS),
        ("pipeline", website.PIPELINE_LEVELS),
    ):
        text = (ROOT / "docs" / f"{page}_puzzle.md").read_text("utf-8")
        assert text.count("<option value=") == text.count("    <p>") == len(levels)


def test_the_scripts_stay_small():
    texts = [path.read_text("utf-8") for path in (ROOT / "docs/_static").glob("*.js")]
    assert sum(len(text.splitlines()) for text in texts) <= 900
