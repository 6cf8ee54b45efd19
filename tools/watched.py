"""A training of two ranks in processes of its own, watched: what ``soak.py`` kills.

``victim.py`` is the training. It says in a file where it is.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[1]
TRAINING = ROOT / "tools" / "victim.py"
# the environment variable by which the processes of a run are known
MARK = "D2LPAR_SOAK"
BATCH = 256
LIMIT = 120.0  # seconds for a run that takes ten
SOON = 45.0  # seconds in which nothing of a killed run may be left
LOOK = 0.005  # seconds


class Size(NamedTuple):
    """How much is trained, and after how many steps a checkpoint is saved."""

    examples: int = 2000
    epochs: int = 3
    every: int = 2

    @property
    def batches(self) -> int:
        """The steps of an epoch."""
        return -(-self.examples // BATCH)

    @property
    def steps(self) -> int:
        """The steps of a run."""
        return self.epochs * self.batches

    @property
    def saves(self) -> int:
        """The checkpoints of a run."""
        return self.epochs * -(-self.batches // self.every)

    def options(self) -> list[str]:
        """Return what the training is told."""
        return [f"--{name}={value}" for name, value in self._asdict().items()]


class Run:
    """Processes of a training, which end at the latest with the ``with`` block."""

    def __init__(
        self, folder: Path, name: str, way: str, size: Size, halt=None, how=(), **also
    ):
        self.log, self.output = folder / f"{name}.log", folder / f"{name}.txt"
        self.checkpoint, self.mark = folder / "saved" / "net", uuid.uuid4().hex
        self.log.touch()
        self.checkpoint.parent.mkdir(exist_ok=True)
        torchrun = (
            "-m",
            "torch.distributed.run",
            "--nproc_per_node=2",
            *(how or ["--standalone"]),
        )
        command = [
            sys.executable,
            *(torchrun if way == "messages" else ()),
            str(TRAINING),
        ]
        command += [
            str(self.log),
            json.dumps(halt),
            *size.options(),
            f"--batch-size={BATCH}",
        ]
        command += [f"--checkpoint={self.checkpoint}", "--resume-if-there"]
        env = {
            **os.environ,
            MARK: self.mark,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(folder),
            **also,
        }
        env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # as in launch
        with self.output.open("w") as file:
            options = {"stdout": file, "stderr": file, "start_new_session": True}
            self.process = subprocess.Popen(command, env=env, **options)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(LIMIT)

    def said(self, kind: str) -> list[list[str]]:
        """Return what the ranks have said of a kind, without the word for the kind."""
        lines = [line.split() for line in self.log.read_text("utf-8").splitlines()]
        return [words for first, *words in lines if first == kind]

    def pids(self) -> list[int]:
        """Return the latest processes of ranks 0 and 1; none before both have begun."""
        found = {rank: int(pid) for rank, pid in self.said("rank")}
        return [found["0"], found["1"]] if len(found) == 2 else []

    def processes(self) -> list[psutil.Process]:
        """Return all processes that it has started, and theirs, and so on."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def until(self, condition: Callable[[], object], limit: float = LIMIT) -> None:
        """Wait until it is so, or the run has ended, or the time is up."""
        deadline = time.monotonic() + limit
        while (
            not condition()
            and self.process.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(LOOK)

    def end(self) -> list[str]:
        """Wait until all is over; return what is left that should be gone."""
        self.until(lambda: False)
        deadline = time.monotonic() + SOON
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(LOOK)
        found = [f"process {process.pid} is left" for process in left]
        names = [name for names in self.said("memory") for name in names]
        return found + [f"{name} is left" for name in names if os.path.exists(name)]

    def judge(self, saved: int, size: Size) -> list[str]:
        """Say what is wrong about a run that has ended and had begun as saved."""
        found, steps = [], len(self.said("step"))
        if self.process.returncode:
            found += [
                f"exit status {self.process.returncode}",
                self.output.read_text("utf-8"),
            ]
        if steps != size.steps - saved:
            found.append(
                f"it took {steps} steps, after {saved} of {size.steps} had been saved"
            )
        names = sorted(os.listdir(self.checkpoint.parent))
        return found + [
            f"{name} lies beside the checkpoint" for name in names if name != "net"
        ]
