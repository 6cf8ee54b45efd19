"""Run the benchmarks, each in its own process, and end with a table of all goals.

python benchmarks [ddp pipeline]    all, or bench_ddp.py and bench_pipeline.py

A goal that is missed is no failure: the machine may be another one, or busy.
"""

import subprocess
import sys
from pathlib import Path

GOAL = "goal "  # what a line begins with that timing.print_goal has printed
scripts = {p.stem[6:]: p for p in sorted(Path(__file__).parent.glob("bench_*.py"))}
goals, status = [], 0
for name in sys.argv[1:] or scripts:
    if name not in scripts:
        sys.exit(f"no benchmark {name}: there are {', '.join(scripts)}")
    print(f"\n== {name}", flush=True)
    command = [sys.executable, "-u", str(scripts[name])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(GOAL):
                goals.append(line.removeprefix(GOAL).rstrip())
    if process.returncode:
        status = process.returncode
        goals.append(f"{'FAILED':16} {name}, exit status {status}")
print("\n== all goals: median (quartiles), bound, the reference against itself")
print(*goals, sep="\n")
sys.exit(status)
