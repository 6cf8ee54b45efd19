"""The benchmarks' verdicts, and the goals that end ``make bench``; nothing is timed."""

import sys
from pathlib import Path

import bench

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import timing


def test_a_goal_is_met_or_missed(capsys):
    for value, goal, again, at_least, verdict in (
        (0.9, 1.0, 1.0, False, "met"),
        (1.05, 1.0, 1.08, False, "met within noise"),
        # the reference was as far off, below
        (1.05, 1.0, 0.93, False, "met within noise"),
        (1.05, 1.0, 1.02, False, "MISSED"),
        (1.4, 1.5, 1.0, True, "MISSED"),
        (1.4, 1.5, 1.1, True, "met within noise"),
        ((0.5, 1.05, 2.0), 1.0, 1.0, False, "MISSED"),  # the median counts
    ):
        timing.print_goal("a : b", value, goal, again, at_least)
        line = capsys.readouterr().out
        assert line.startswith(f"{bench.GOAL}{verdict:16}") and line.endswith(
            " a : b\n"
        )
        assert ("0.50 to 2.00" in line) == isinstance(value, tuple)
        assert (">= 1.50" if at_least else "<= 1.00") in line


def test_ratios_are_taken_round_by_round_against_the_reference(capsys):
    seconds = {
        "b": [1.0, 2.0, 4.0],
        timing.AGAIN: [1.1, 2.2, 4.4],
        "a": [2.1, 4.2, 8.4],
    }
    timing.print_ratios("Title", seconds, "b", {"a": 2.0, timing.AGAIN: 1.0})
    goals = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(bench.GOAL)
    ]
    assert len(goals) == 2
    assert (
        "met within noise  2.10" in goals[0] and "itself 1.10  Title: a : b" in goals[0]
    )


def test_the_table_has_all_goals_of_all_scripts(tmp_path, monkeypatch, capfd):
    (tmp_path / "benchmarks").mkdir()
    one, two = (tmp_path / "benchmarks" / f"bench_{name}.py" for name in ("one", "two"))
    one.write_text("print('a table'); print('goal MISSED  1')")
    two.write_text("print('goal met  2'); exit(3)")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    assert bench.main() == 3
    printed, _, table = capfd.readouterr().out.partition("== all goals")
    assert "a table\n" in printed and "== bench_one" in printed
    failed = f"{'FAILED':16} benchmarks/bench_two.py, exit status 3"
    assert table.splitlines()[1:] == ["MISSED  1", "met  2", failed]
    monkeypatch.setattr(sys, "argv", ["bench.py", "one", "three"])
    assert bench.main() == 2
    assert "no benchmark three: there are one, two" in capfd.readouterr().out
