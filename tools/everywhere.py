"""Run the numerical tests with other processors' kernels and other numbers of threads.

    python tools/everywhere.py              all runs
    python tools/everywhere.py -x -k ddp    what is added goes to pytest

Kernels add up in different orders, so what a test asserts must not depend on them.
Random tests draw new examples in each run. A setting that this machine lacks is named
and left out.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

# What of tests/ computes nothing: launcher, notebooks, drawings, and the project's own.
LEFT_OUT = (
    "test_plot.py",
    "ranks/test_launcher.py",
    "test_everywhere.py",
    "test_notebooks.py",
)
LEFT_OUT += (
    "test_course_trial.py",
    "test_project.py",
    "test_time_limit.py",
    "test_work_copies.py",
)
LEFT_OUT += ("browser", "test_clusters.py", "test_packaging.py", "test_ring_picture.py")
LEFT_OUT += ("test_website.py",)


class Setting(NamedTuple):
    """A kind of kernels, as torch names it (None: the best), and a thread count."""

    kernels: str | None
    threads: int


RUNS = (Setting("DEFAULT", 1), Setting("AVX2", 2), Setting(None, 2), Setting(None, 4))

# Torch takes its kernels from three libraries: its own, oneDNN and MKL (which heeds its
# variable on Intel's processors only).
LIMITS = {
    "DEFAULT": ("default", "SSE41", "SSE4_2"),
    "AVX2": ("avx2", "AVX2", "AVX2"),
}
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")

PROBE = (
    "import torch; print(torch.get_num_threads(),"
    " torch.backends.cpu.get_cpu_capability())"
)


def environment(setting: Setting) -> dict[str, str]:
    """Return the environment in which torch, also in ranks, uses this setting."""
    unset = (*VARIABLES, "MKL_NUM_THREADS")
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    if setting.kernels:
        variables |= dict(zip(VARIABLES, LIMITS[setting.kernels], strict=True))
    variables["OMP_NUM_THREADS"] = str(setting.threads)
    # or MKL would use no more threads than there are cores
    variables["MKL_DYNAMIC"] = "FALSE"
    return variables


def probe(setting: Setting) -> Setting:
    """Return what torch in fact uses when it is started with this setting."""
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(
        command, env=environment(setting), capture_output=True, text=True, check=True
    )
    threads, kernels = done.stdout.strip().split(" ", 1)
    return Setting(kernels, int(threads))


def available(runs: tuple[Setting, ...]) -> dict[str, Setting]:
    """Return what this machine has of these settings, named; print what it lacks."""
    found = {}
    for setting in runs:
        real = probe(setting)
        wanted = setting._replace(kernels=setting.kernels or real.kernels)
        name = _describe(real)
        if real != wanted:
            print(f"left out: {_describe(wanted)}: this machine gives {name}")
        elif name in found:
            print(f"left out: the machine's best kernels: they are {name} again")
        else:
            found[name] = setting
    return found


def command(arguments: list[str]) -> list[str]:
    """Return the command line of one run."""
    for name in LEFT_OUT:
        if not (ROOT / "tests" / name).exists():
            raise FileNotFoundError(
                f"tests/{name}, left out by {__file__}, does not exist"
            )
    ignored = [f"--ignore=tests/{name}" for name in LEFT_OUT]
    options = ["-q", "-rfE", "--hypothesis-profile=random"]
    return [sys.executable, "-m", "pytest", *options, *ignored, *arguments]


def main(arguments: list[str]) -> int:
    """Make all runs, also after one that failed; return the exit status."""
    results = []
    for name, setting in available(RUNS).items():
        print(f"\n== {name}", flush=True)
        begin = time.monotonic()
        done = subprocess.run(command(arguments), cwd=ROOT, env=environment(setting))
        status = done.returncode
        results.append(status)
        outcome = "passed" if status == 0 else f"FAILED (exit status {status})"
        print(
            f"== {name}: {outcome} after {time.monotonic() - begin:.0f} s", flush=True
        )
    return int(any(results))


def _describe(setting: Setting) -> str:
    return f"{setting.kernels} kernels, {setting.threads} thread" + "s" * (
        setting.threads > 1
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
