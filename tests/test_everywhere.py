"""The settings of ``make test-everywhere`` take effect; what is left out exists."""

import subprocess
import sys

import everywhere
import pytest
from everywhere import Setting

SEEN = """
import os, torch
from d2lpar import launch

def seen(rank, world_size):
    from torch.backends.cpu import get_cpu_capability
    return get_cpu_capability(), os.environ.get("MKL_ENABLE_INSTRUCTIONS")

print(seen(0, 1), torch.get_num_threads(), *launch(seen, 2))
"""


def test_a_setting_reaches_this_process_and_its_ranks():
    # which every processor has; and more threads than some
    setting = Setting("DEFAULT", 3)
    assert everywhere.probe(setting) == setting
    options = {
        "env": everywhere.environment(setting),
        "capture_output": True,
        "text": True,
    }
    done = subprocess.run([sys.executable, "-c", SEEN], check=True, **options)
    one = "('DEFAULT', 'SSE4_2')"
    assert done.stdout == f"{one} 3 {one} {one}\n"


def test_what_a_machine_lacks_is_named_and_left_out(monkeypatch, capsys):
    monkeypatch.setattr(
        everywhere, "probe", lambda s: Setting("DEFAULT", min(s.threads, 2))
    )
    assert everywhere.available(everywhere.RUNS) == {
        "DEFAULT kernels, 1 thread": Setting("DEFAULT", 1),
        "DEFAULT kernels, 2 threads": Setting(None, 2),
    }
    assert capsys.readouterr().out.splitlines() == [
        (
            "left out: AVX2 kernels, 2 threads: this machine gives DEFAULT kernels, 2"
            " threads"
        ),
        (
            "left out: DEFAULT kernels, 4 threads: this machine gives DEFAULT kernels,"
            " 2 threads"
        ),
    ]
    monkeypatch.setattr(
        everywhere, "probe", lambda s: s._replace(kernels=s.kernels or "AVX2")
    )
    assert len(everywhere.available(everywhere.RUNS)) == 3
    assert (
        "left out: the machine's best kernels: they are AVX2" in capsys.readouterr().out
    )


def test_all_runs_are_made_and_one_that_fails_is_told(monkeypatch, capsys):
    commands = []

    def run(command, cwd, env):
        commands.append(
            (command[-1], env.get("ATEN_CPU_CAPABILITY"), env["OMP_NUM_THREADS"])
        )
        return subprocess.CompletedProcess(command, int(len(commands) == 1))

    runs = {"a": Setting("DEFAULT", 1), "b": Setting(None, 4)}
    monkeypatch.setattr(everywhere, "available", lambda _: runs)
    monkeypatch.setattr(everywhere.subprocess, "run", run)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")  # whatever is set outside
    assert everywhere.main(["-x"]) == 1
    assert commands == [("-x", "default", "1"), ("-x", None, "4")]
    assert "== a: FAILED (exit status 1)" in capsys.readouterr().out
    assert "--ignore=tests/ranks/test_launcher.py" in everywhere.command([])
    monkeypatch.setattr(everywhere, "LEFT_OUT", ("browser", "test_gone.py"))
    with pytest.raises(FileNotFoundError, match=r"tests/test_gone\.py"):
        everywhere.command([])
