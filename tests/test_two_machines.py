"""Two machines train like one. A cut cable ends it, a stranger does not."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path

import psutil
import pytest
import torch
import two_machines as tm
from helpers import LIMIT, SCHEDULES, SOON

from d2lpar import launch
from d2lpar.checkpoint import load_checkpoint
from d2lpar.collectives.cost import closed_form
from d2lpar.collectives.schedules import ring

ROOT = Path(__file__).resolve().parents[1]
# seconds for a training that takes ten; without a limit of its own it waits for 300
LONG = 120
OPTIONS, STEPS = ("--examples=2560", "--epochs=2"), 20
WHY_NOT = tm.missing()
needs_two_machines = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

TOGETHER = """if True:
    import sys
    from d2lpar import train_ddp

    print("ready", flush=True)
    sys.stdin.readline()  # the time limit counts from here
    train_ddp.main()
"""
RANKS = """if True:
    import sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from d2lpar import ranks
    from d2lpar.collectives import schedules

    def told():
        print("ready", flush=True)
        return sys.stdin.readline().strip()

    limit, (elements, timeout) = timedelta(seconds=60), map(int, sys.argv[1:])
    store, rank, k = next(dist.rendezvous("env://", timeout=limit))
    told()
    dist.init_process_group("gloo", None, limit, k, rank, store)
    while name := told():
        tensor = torch.arange(elements, dtype=torch.float64) + rank
        ranks.allreduce(tensor, getattr(schedules, name), timeout=timeout)
        assert torch.equal(tensor, k * torch.arange(elements) + k * (k - 1) / 2)
"""
STRANGER = """if True:
    import socket, sys

    address, ports, greetings = map(str.split, sys.argv[1:])
    kept = []
    for port in ports:
        for words in greetings:
            kept.append(socket.create_connection((*address, int(port)), timeout=10))
            kept[-1].sendall(bytes.fromhex(words[1:]))
    print("ready", flush=True)
    sys.stdin.read()  # and silence
"""


def start(begin, *words):
    """Start processes whose output is printed here, and which take commands."""
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }
    return begin(sys.executable, *words, **pipes, cwd=ROOT, text=True)


def torchrun(machines, *words):
    """The README's second command, on both machines."""
    meet = f"--master_addr={machines[0].address}", f"--master_port={tm.PORT}"
    command = "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", *meet
    return [
        start(
            partial(machine.start, env=tm.environment()),
            *command,
            f"--node_rank={i}",
            *words,
        )
        for i, machine in enumerate(machines)
    ]


def without_torchrun(machines, *words):
    """The same ranks, but nobody looks after them."""
    return start(partial(tm.start_ranks, machines, 1), *words)


def until_ready(*processes):
    """Wait until all are where they ask what to do."""
    for process in processes:
        lines = iter(process.stdout.readline, "")
        seen = []
        while (line := next(lines, None)) != "ready\n":
            assert line is not None, "".join(seen)  # it has ended
            seen.append(line)


def tell(*processes, word=""):
    """Tell all what to do next."""
    for process in processes:
        process.stdin.write(f"{word}\n")
        process.stdin.flush()


def ends(processes):
    """Each one's exit status, and what it has printed."""
    return [(p.communicate(timeout=LONG)[0], p.returncode)[::-1] for p in processes]


def wait_until(condition):
    """Wait until something is so."""
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def under_way(machines):
    """Wait until the ranks train: until two gradients or so have crossed the cable."""
    wait_until(lambda: min(machine.sent() for machine in machines) > 1e6)


def greet(machine, address, ports, greetings):
    """Let a stranger in a machine connect to ports, greet, and stay."""
    lists = (
        " ".join(map(str, ports)),
        " ".join(f"x{words.hex()}" for words in greetings),
    )
    until_ready(start(machine.start, "-c", STRANGER, address, *lists))


def runs(pid):
    """Whether a process has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_is_missing_for_two_machines_is_named(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000, raising=False)
    assert tm.missing() == "two machines need Linux and root"
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "ip" else tool)
    assert tm.missing().endswith("a program that is not installed: ip (of iproute2)")
    monkeypatch.setattr(shutil, "which", lambda tool: tool)

    def refused(address):
        raise OSError("the kernel refuses namespaces: unshare failed")

    monkeypatch.setattr(tm, "Machine", refused)
    assert tm.missing().endswith(
        "cannot be made: the kernel refuses namespaces: unshare failed"
    )


@needs_two_machines
def test_nothing_is_left_of_two_machines_whose_maker_is_killed():
    program = """if True:
        import sys, two_machines as tm
        with tm.two_machines() as machines:
            for machine in machines:
                machine.start("sleep", "600")
            while not all(machine.processes() for machine in machines):
                pass
            print(*[p.pid for m in machines for p in m.processes()], flush=True)
            sys.stdin.read()
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=env, cwd=ROOT, **pipes
    ) as maker:
        sleepers = list(map(int, maker.stdout.readline().split()))
        assert len(sleepers) == 2 and all(map(runs, sleepers))
        maker.kill()
    wait_until(lambda: not any(map(runs, sleepers)))


@needs_two_machines
@pytest.mark.skipif(not shutil.which("tc"), reason="needs tc (of iproute2)")
@pytest.mark.parametrize(
    ("delay", "seen"), [("", "rate 100Mbit"), ("3ms", "delay 3ms")]
)
def test_a_cable_can_be_slow(delay, seen):
    with tm.two_machines() as machines:
        try:
            machines[0].slow_down("100mbit", delay)
        except OSError as error:
            pytest.skip(f"the kernel has no such queue: {error}")
        shown = [
            machine.run("tc", "qdisc", "show", "dev", tm.CABLE) for machine in machines
        ]
        assert [seen in text for text in shown] == [True, False]


@needs_two_machines
def test_each_schedule_sends_over_the_cable_what_the_model_counts():
    elements, each = 125_000, 2  # 1 MB, and ranks of a machine
    with tm.two_machines() as machines:
        begin = partial(tm.start_ranks, machines, each)
        ranks = start(begin, "-c", RANKS, str(elements), str(LIMIT))
        until_ready(*ranks)
        tell(*ranks)
        until_ready(*ranks)
        for schedule in SCHEDULES:
            expected = [0, 0]
            for source, _, nbytes in chain(*tm.crossings(schedule, each, 8 * elements)):
                expected[source] += nbytes
            before = [machine.sent() for machine in machines]
            tell(*ranks, word=schedule.__name__)
            until_ready(*ranks)  # and has checked the sums
            for machine, number, then in zip(machines, expected, before, strict=True):
                assert number < machine.sent() - then < 1.1 * number + 20_000, schedule
        tell(*ranks)
        assert [code for code, _ in ends(ranks)] == [0] * 4


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The checkpoint of two ranks of this machine."""
    path = tmp_path_factory.mktemp("one") / "one"

    def work(rank, world_size):
        from d2lpar import train_ddp

        args = train_ddp.arguments([f"--checkpoint={path}", *OPTIONS])
        train_ddp.train_epochs(args, torch.device("cpu"))

    launch(work, 2, timeout=LONG)
    return path.read_bytes()


@needs_two_machines
def test_two_machines_train_like_one_and_send_what_a_ring_would(tmp_path, expected):
    path = tmp_path / "two"
    with tm.two_machines() as machines:
        words = "-m", "d2lpar.train_ddp", f"--checkpoint={path}", *OPTIONS
        outcomes = ends(torchrun(machines, *words))
        assert [code for code, _ in outcomes] == [0, 0], outcomes
        sent = [machine.sent() for machine in machines]
        assert [machine.processes() for machine in machines] == [[], []]
    assert path.read_bytes() == expected
    tensors, _ = load_checkpoint(path)
    size = sum(tensor.nbytes for name, tensor in tensors.items() if name != "losses")
    predicted = [STEPS * nbytes for nbytes in closed_form(ring, 2, size).sent]
    for number, least in zip(sent, predicted, strict=True):
        # Rank 0 sends its parameters first; and there are headers, and the store
        assert least < number < 1.1 * (least + size), (sent, predicted)


@needs_two_machines
def test_a_cable_that_is_cut_ends_both_sides_with_an_error_that_names_the_other(
    tmp_path,
):
    script = tmp_path / "script.py"
    script.write_text(TOGETHER)
    options = f"--timeout={SOON}", "--epochs=100"
    ways = {  # of cutting it, and of starting
        "pulled out": (lambda one, two: one.plug(False), torchrun),
        "silent": (lambda one, two: one.lose(two), without_torchrun),
    }
    with ExitStack() as stack:
        runs = {}
        for name, (_, begin) in ways.items():
            machines = stack.enter_context(tm.two_machines())
            path = f"--checkpoint={tmp_path / name}"
            runs[name] = machines, begin(machines, str(script), path, *options)
        for _, processes in runs.values():
            until_ready(*processes)
            tell(*processes)
        for name, (machines, _) in runs.items():
            under_way(machines)
            cut, _ = ways[name]
            cut(*machines)
        for name, (machines, processes) in runs.items():
            for i, (code, text) in enumerate(ends(processes)):
                assert (
                    code == 1 and f"PeerError: rank {1 - i} did not answer" in text
                ), (name, text)
            assert [machine.processes() for machine in machines] == [[], []]
            assert not (tmp_path / name).exists()  # it was in its first epoch


@needs_two_machines
def test_strangers_at_every_port_and_a_short_cut_change_nothing(tmp_path, expected):
    path = tmp_path / "two"
    store = b"\0\xce\xf7\x85<"  # how torch's begins; gloo waits for 8 bytes
    greetings = os.urandom(2**15), b"GET / HTTP/1.1\r\n\r\n", b"", store[:3], store
    with tm.two_machines() as machines:
        words = "-m", "d2lpar.train_ddp", f"--checkpoint={path}", *OPTIONS
        processes = torchrun(machines, *words)
        under_way(machines)
        agents = [
            child
            for process in processes
            for child in psutil.Process(process.pid).children()
        ]
        ranks = [child for agent in agents for child in agent.children()]
        for rank in ranks:
            rank.suspend()  # so that it does not end before all this has happened
        ports = [machine.ports() for machine in machines]
        # the store, and two gloos
        assert list(map(len, ports)) == [2, 1] and tm.PORT in ports[0]
        for machine, theirs, numbers in zip(
            machines, machines[::-1], ports[::-1], strict=True
        ):
            greet(machine, theirs.address, numbers, greetings)
        machines[0].plug(False)
        for rank in ranks:
            rank.resume()
        time.sleep(1)  # packets get lost, and are sent again
        assert [process.poll() for process in processes] == [None, None]
        machines[0].plug(True)
        outcomes = ends(processes)
        assert [code for code, _ in outcomes] == [0, 0], outcomes
    assert path.read_bytes() == expected


@needs_two_machines
def test_a_stranger_in_the_place_of_a_peer_is_noticed():
    """Gloo asks who connects only for a small number, which anybody can guess."""
    with tm.two_machines() as machines:
        ranks = start(partial(tm.start_ranks, machines, 1), "-c", RANKS, "4", "2")
        until_ready(*ranks)
        tell(ranks[0])  # to join: it waits for the other one, which would connect to it
        wait_until(lambda: machines[0].ports() - {tm.PORT})
        numbers = [n.to_bytes(8, sys.byteorder) for n in range(10)]
        greet(
            machines[1], machines[0].address, machines[0].ports() - {tm.PORT}, numbers
        )
        tell(ranks[1])
        until_ready(*ranks)
        tell(*ranks, word="ring")
        for i, (code, text) in enumerate(ends(ranks)):
            assert code == 1 and f"PeerError: rank {1 - i} did not answer" in text, text
