"""Kill a training of two ranks at random moments, resume it, and compare its bits.

    python tools/soak.py 100                 a hundred rounds
    python tools/soak.py 1 --seed 4711       the round that had this seed, once more
    python tools/soak.py 0 --restarts 20     torchrun goes on by itself
    python tools/soak.py 0 --changes 4       a second torchrun is killed, or joins later

Everything about a round follows from its seed: the way that messages travel (lanes in
shared memory, or gloo's messages under torchrun), the victim (rank 0, rank 1, both, or
what has started them), and the moment: within a save, or at any time of the run. The
victim is killed (SIGKILL), and nothing of the run may be left, neither a process nor
shared memory. Then the same command goes on from the checkpoint, without the steps that
were saved. Its last checkpoint must have the bits of a run that nobody disturbed, and
no other file may lie beside it. ``victim.py`` is the training.

With ``--restarts`` torchrun starts the ranks again (``--max-restarts``), under
``--standalone`` and under a fixed port in turn. With ``--changes`` there are two
torchruns of one rank each, as on two machines (``--nnodes=1:2``): the run goes on with
another number of ranks, and rounds differently.
"""

import argparse
import contextlib
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from watched import LIMIT, Run, Size

from d2lpar.checkpoint import CheckpointError, load_checkpoint

WAYS = "lanes", "messages"
STARTER = "the starter"  # torchrun, or the process that has called launch
VICTIMS = "rank 0", "rank 1", "both ranks", STARTER
STAGES = {
    "write": "half written",
    "fsync": "written",
    "rename": "on the disk",
    "folder": "renamed",
    "saved": "done",
}
MOMENT = 0.2  # seconds, in which a few steps are taken, or an epoch ends
AFTER, FAILED = "after its end", "failed by itself"


class Plan(NamedTuple):
    """One round."""

    seed: int
    way: str
    victim: str
    # in which save, before which of its stages, for how many seconds
    halt: tuple | None
    # where there is no halt: after this one, from 0, and a moment; -1: before the first
    step: int
    part: float  # of that moment, or of the time until the first step


class Usual(NamedTuple):
    """An undisturbed run: what it ends with, and how long until its first step."""

    content: bytes
    tensors: dict
    seconds: float  # from its start
    rank_seconds: float  # from the start of both ranks


def plan(seed: int, size: Size, victims: tuple = VICTIMS) -> Plan:
    """Return a seed's round; 16 in a row have all ways, victims and kinds of moment."""
    draw = random.Random(seed)
    way, victim = WAYS[seed % 2], victims[seed // 2 % len(victims)]
    # Rank 0 halts until it is ended. But where rank 1 is the victim, it goes on with
    # its save.
    seconds = draw.uniform(0, 0.2) if victim == "rank 1" else LIMIT
    halt = draw.randint(1, size.saves), draw.choice(list(STAGES)), seconds
    step = draw.randrange(-size.steps // 3, size.steps)
    return Plan(seed, way, victim, None if seed // 8 % 2 else halt, step, draw.random())


def undisturbed(way: str, size: Size) -> Usual:
    """Train once, and measure how long it takes."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        begin = time.monotonic()
        with Run(Path(folder), "undisturbed", way, size) as run:
            run.until(run.pids)
            ranks = time.monotonic()
            run.until(lambda: run.said("step"))
            step = time.monotonic()
            if complaints := run.end() + run.judge(0, size):
                raise SystemExit("\n".join(["the undisturbed run:", *complaints]))
            tensors, _ = load_checkpoint(run.checkpoint)
            return Usual(
                run.checkpoint.read_bytes(), tensors, step - begin, step - ranks
            )


def kill(run: Run, plan: Plan, usual: Usual, size: Size) -> str:
    """Kill the victim in its moment; return when and where that was."""
    if plan.halt:
        save, stage, _ = plan.halt
        moment = f"save {save} {STAGES[stage]}"
        run.until(lambda: run.said("halts"))
    elif plan.step < 0:
        moment, seconds = "about its start", usual.seconds
        if plan.victim != STARTER:
            run.until(run.pids)
            seconds = usual.rank_seconds
        run.until(lambda: False, plan.part * seconds)
    else:
        moment = "while it trains"
        run.until(lambda: len(run.said("step")) > plan.step)
        run.until(lambda: False, plan.part * MOMENT)
    if run.process.poll() is not None or run.said("end"):
        moment = AFTER if run.said("end") else FAILED
    pids = {
        "rank 0": run.pids()[:1],
        "rank 1": run.pids()[1:],
        "both ranks": run.pids(),
    }
    if run.process.poll() is None:
        for pid in pids.get(plan.victim, [run.process.pid]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    epoch, batch = divmod(len(run.said("step")), size.batches)
    return f"{moment:20} epoch {epoch + 1} batch {batch}"


def saved_steps(run: Run, size: Size) -> tuple[int, list[str]]:
    """Return how far a killed run's checkpoint is, and what is wrong about that."""
    told = max((int(steps) for [steps] in run.said("saved")), default=0)
    saved = 0
    if run.checkpoint.exists():
        _, info = load_checkpoint(run.checkpoint)
        saved = info["epoch"] * size.batches + info["batch"]
    wrong = not told <= saved <= len(run.said("step"))
    return saved, [f"it is at step {saved} after step {told} was saved"] * wrong


def go_on(plan: Plan, usual: Usual, size: Size) -> tuple[str, list[str]]:
    """Kill a run, and resume it; return when it was killed, and what is wrong."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        with Run(Path(folder), "killed", plan.way, size, plan.halt) as run:
            moment = kill(run, plan, usual, size)
            complaints = run.end() + ["it was not killed"] * (FAILED in moment)
            saved, wrong = saved_steps(run, size)
        with Run(Path(folder), "resumed", plan.way, size) as run:
            complaints += wrong + run.end() + run.judge(saved, size)
            if (
                not run.checkpoint.exists()
                or run.checkpoint.read_bytes() != usual.content
            ):
                complaints.append("different")
    return moment, complaints


def restart(plan: Plan, usual: Usual, size: Size) -> tuple[str, list[str]]:
    """Kill a run that torchrun starts again; return when, and what is wrong."""
    where = "--standalone" if plan.seed % 2 else f"--master_port={free_port()}"
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        how = "--max-restarts=3", where
        with Run(Path(folder), "restarted", "messages", size, plan.halt, how) as run:
            moment = kill(run, plan, usual, size)
            complaints = run.end()
            if run.process.returncode:
                complaints += [
                    f"exit status {run.process.returncode}",
                    run.output.read_text(),
                ]
            attempts = sum(rank == "0" for rank, _ in run.said("rank"))
            if attempts > 2 or (attempts < 2 and AFTER not in moment):
                complaints.append(f"it took {attempts} attempts, not 2")
            if (
                not run.checkpoint.exists()
                or run.checkpoint.read_bytes() != usual.content
            ):
                complaints.append("different")
    return f"{where.partition('=')[0]:13} {moment}", complaints


def change(plan: Plan, usual: Usual, size: Size) -> tuple[str, list[str]]:
    """Kill the second torchrun, or let it join late; return when, and what is wrong."""
    grows, port, step = plan.seed % 2, free_port(), max(plan.step, 1)
    how = (
        "--nnodes=1:2 --nproc_per_node=1 --max-restarts=3 --rdzv-id=soak"
        " --rdzv-backend=c10d"
    )
    how = [*how.split(), "--local-addr=127.0.0.1", f"--rdzv-endpoint=127.0.0.1:{port}"]
    conf = "--rdzv-conf=last_call_timeout=4,keep_alive_interval=1,is_host="
    # Without this, torchrun 2.13 waits in vain for an address when the second one
    # joins.
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder, way = Path(name), plan.way
        with Run(
            folder, "first", way, size, None, [*how, f"{conf}1"], **fresh
        ) as first:
            if grows:
                first.until(lambda: len(first.said("step")) >= step)
            with Run(
                folder, "second", way, size, None, [*how, f"{conf}0"], **fresh
            ) as second:
                if not grows:
                    first.until(
                        lambda: second.said("rank") and len(first.said("step")) >= step
                    )
                    second.process.kill()
                complaints = first.end() + second.end()
                text = first.output.read_text() + second.output.read_text()
        counts = "1 ranks, this one has 2" if grows else "2 ranks, this one has 1"
        tensors, info = load_checkpoint(first.checkpoint)
        if f"its run had {counts}" not in text or info["epoch"] < size.epochs:
            complaints += [f"exit status {first.process.returncode}", text]
    far = distance(tensors, usual.tensors)
    return (
        f"{'joins' if grows else 'killed'} after step {step}, {far:.0e} apart",
        complaints,
    )


def distance(ours: dict, theirs: dict) -> float:
    """Return the largest difference of two networks' parameters, over the largest."""
    # as many as there are ranks
    parameters = [name for name in theirs if name != "losses"]
    gap = max((ours[name] - theirs[name]).abs().max() for name in parameters)
    return (gap / max(theirs[name].abs().max() for name in parameters)).item()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def soak(plans: list[Plan], attempt: Callable, size: Size, aim: str) -> bool:
    """Make the rounds, with a line for each; say whether all were good."""
    begin, good = time.monotonic(), 0
    usual = {
        way: undisturbed(way, size) for way in sorted({plan.way for plan in plans})
    }
    if len({run.content for run in usual.values()}) > 1:
        raise SystemExit(
            "undisturbed runs over lanes and over messages end with different bits"
        )
    for i, plan in enumerate(plans, 1):
        try:
            moment, complaints = attempt(plan, usual[plan.way], size)
        except CheckpointError as error:
            moment, complaints = "", [str(error)]
        good += not complaints
        names = f"{plan.way:8} {plan.victim:11} {moment:36}"
        print(
            f"{i:3} seed {plan.seed} {names}",
            "; ".join(complaints) or "good",
            flush=True,
        )
    print(f"{good} of {len(plans)} {aim}, in {(time.monotonic() - begin) / 60:.1f} min")
    return good == len(plans)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rounds", type=int, help="how many")
    parser.add_argument(
        "--seed", type=int, help="of the first round; the next has the next one"
    )
    parser.add_argument(
        "--restarts", type=int, default=0, help="how many times by torchrun"
    )
    parser.add_argument(
        "--changes", type=int, default=0, help="how often the ranks' number changes"
    )
    options = parser.parse_args(arguments)
    # and with it what it has started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    seed = random.randrange(10**6) if options.seed is None else options.seed
    size, good = Size(), True
    if options.rounds:
        plans = [plan(seed + i, size) for i in range(options.rounds)]
        good &= soak(plans, go_on, size, "end with the bits of the undisturbed run")
    if options.restarts:
        plans = [plan(seed + i, size, VICTIMS[:3]) for i in range(options.restarts)]
        plans = [plan._replace(way="messages") for plan in plans]
        good &= soak(plans, restart, size, "go on by themselves to the same bits")
    if options.changes:
        size = size._replace(epochs=15)  # so that the second one has time to join
        plans = [plan(seed + i, Size()) for i in range(options.changes)]
        plans = [plan._replace(way="messages", victim="a torchrun") for plan in plans]
        good &= soak(plans, change, size, "go on with more or fewer ranks")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
