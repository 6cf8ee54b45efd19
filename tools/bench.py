"""Run the benchmarks, each in its own process, and end with a table of all goals.

    python tools/bench.py                all of them
    python tools/bench.py ranks ddp      benchmarks/bench_ranks.py and bench_ddp.py

The exit status is that of the last script that failed. A goal that is missed is no
failure: the machine may be another one, or busy.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GOAL = "goal "  # what a line begins with that timing.print_goal has printed


def run(script: Path) -> tuple[list[str], int]:
    """Run one benchmark, show its output, and return its goals and exit status."""
    print(f"\n== {script.stem}", flush=True)
    goals = []
    command = [sys.executable, "-u", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(GOAL):
                goals.append(line.removeprefix(GOAL).rstrip())
    return goals, process.returncode


def main() -> int:
    """Run those that the command line names, or all."""
    names = sys.argv[1:]
    scripts = sorted((ROOT / "benchmarks").glob("bench_*.py"))
    known = {script.stem.removeprefix("bench_"): script for script in scripts}
    if unknown := [name for name in names if name not in known]:
        print(f"no benchmark {', '.join(unknown)}: there are {', '.join(known)}")
        return 2
    goals, status = [], 0
    for name in names or known:
        reached, code = run(known[name])
        goals += reached
        if code:
            status = code
            goals.append(
                f"{'FAILED':16} benchmarks/{known[name].name}, exit status {code}"
            )
    print("\n== all goals: median (quartiles), bound, the reference against itself")
    print("\n".join(goals) or "none in these")
    return status


if __name__ == "__main__":
    sys.exit(main())
