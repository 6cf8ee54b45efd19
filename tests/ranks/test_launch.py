"""Ranks from everywhere code is written, and none left behind however the run ends."""

import contextlib
import ctypes
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from d2lpar import ranks
from d2lpar.ranks import RankError, launch

launcher = sys.modules["d2lpar.ranks.launch"]
LIMIT = 200  # seconds for what takes one to ten: a machine may be busy


def alive(*pids):
    """Those of them that run; one that waits for its parent's notice does not."""
    running = psutil.process_iter(["status"])
    running = [p.pid for p in running if p.info["status"] != psutil.STATUS_ZOMBIE]
    return [pid for pid in pids if pid in running]


def wait_until(condition):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"waited {LIMIT} s in vain"
        time.sleep(0.02)


def test_functions_of_all_kinds_and_their_arguments(tmp_path, monkeypatch):
    big, one = torch.arange(5_000_000), torch.ones(1)  # 40 MB
    for rank, found in enumerate(launch(lambda r, k, x: x + one * r, 2, big)):
        assert torch.equal(found, big + one * rank)
    assert launch(lambda rank, world_size: torch.ops.aten.neg(one), 1) == [-one]
    (tmp_path / "beside.py").write_text("class A:\n    def f(self, r, k): return 7 + r")
    monkeypatch.syspath_prepend(tmp_path)
    import beside

    assert launch(beside.A().f, 2) == [7, 8]


def test_surroundings_are_those_of_the_call_not_of_the_first_one(tmp_path, monkeypatch):
    def surroundings(rank, world_size):
        names = "NEW", "GONE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
        values = [os.environ.get(name) for name in names]
        drawn = torch.randint(10**9, ()).item(), random.random()
        kind = torch.ones(1).dtype, torch.get_num_threads()
        place = os.getcwd(), tempfile.gettempdir(), sys.path, sys.argv
        return values, drawn, kind, place, psutil.Process().parent().ppid()

    monkeypatch.setenv("GONE", "here")
    [(values, first, kind, _, server)] = launch(surroundings, 1, threads=2)
    assert (values, kind) == ([None, "here", "0", "0", "1", "1"], (torch.float32, 2))
    monkeypatch.setenv("NEW", "seen")
    monkeypatch.delenv("GONE")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    torch.set_default_dtype(torch.float64)
    try:
        results = launch(surroundings, 2)
    finally:
        torch.set_default_dtype(torch.float32)
    place = str(tmp_path), str(tmp_path), sys.path, sys.argv
    for rank, (values, _, *others) in enumerate(results):
        assert values == ["seen", None, str(rank), str(rank), "2", "2"]
        assert others == [(torch.float64, 1), place, server]
    (_, same, *_), (_, other, *_) = results
    assert same == first and not set(other) & set(first)
    wait_until(lambda: not psutil.Process(server).children())


def test_the_group_is_ready_and_on_loopback_only_and_all_stay(monkeypatch):
    def check(rank, world_size):
        tensor, pids = torch.tensor([float(rank + 1)]), [None] * world_size
        dist.all_reduce(tensor, group=dist.new_group(list(range(world_size))))
        assert (tensor.item(), dist.get_rank(), dist.get_backend()) == (6, rank, "gloo")
        sockets = psutil.Process().net_connections(kind="inet")
        assert {s.laddr.ip for s in sockets} <= {"127.0.0.1", "::1"}
        assert [s for s in sockets if not s.raddr], "we do not see where gloo listens"
        dist.all_gather_object(pids, os.getpid())
        time.sleep(0.2 * (world_size - rank))  # the last one returns first
        return alive(pids[-1]) != []

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    assert launch(check, 3) == [True, True, True]


@pytest.mark.parametrize(
    "words, error, timeout, args",
    [
        ("world_size must be at least 1, got 0", ValueError, 1, (abs, 0)),
        ("timeout must be above 0.*, got 0", ValueError, 0, (abs, 1)),
        (r"got 3; write launch\(f, 2\), not launch\(f\(\)\)", TypeError, 1, (3, 2)),
        ("abs>.* cannot be sent.*generator", TypeError, 1, (abs, 1, (n for n in ()))),
    ],
)
def test_bad_input_starts_nothing(words, error, timeout, args, monkeypatch):
    monkeypatch.delattr(launcher, "_start")
    with pytest.raises(error, match=words):
        launch(*args, timeout=timeout)


@pytest.mark.parametrize(
    "deed, words",
    [
        (lambda: {}["a"], r"KeyError: 'a'\n\nTraceback .*\n  File .*, in one_fails\n"),
        (sys.exit, r"SystemExit\n"),
        (input, "EOFError"),
        (lambda: (n for n in ()), "TypeError: cannot return a generator to the ca"),
        (lambda: os._exit(3), r"died before it had finished \(exit code 3\)"),
    ],
)
def test_the_rank_that_failed_is_named_not_one_that_misses_it(
    deed, words, capsys, monkeypatch
):
    def one_fails(rank, world_size):
        if rank == 0:  # it may learn of the failure, and report its own, before
            raise ranks.PeerError("rank 1 is gone", (1,))
        time.sleep(0.1)
        for number in range(100):
            print(number)
        return deed()

    monkeypatch.setattr(launcher, "GRACE", LIMIT)
    with pytest.raises(RankError, match=f"^rank 1: {words}") as caught:
        launch(one_fails, 2)
    assert caught.value.rank == 1 and sorted(caught.value.errors) == [0, 1]
    assert caught.value.errors[0].startswith("PeerError: rank 1 is gone\n")
    lines = [f"[rank 1] {number}" for number in range(100)]  # its last words, too
    assert capsys.readouterr().out.splitlines() == lines


def test_the_first_failure_is_named_unless_a_rank_died(monkeypatch):
    def fail(rank, world_size):
        time.sleep(0.8 - 0.4 * rank)
        if rank == world_size - 3:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError

    monkeypatch.setattr(launcher, "GRACE", LIMIT)
    with pytest.raises(RankError, match=r"^rank 1: ValueError\n"):
        launch(fail, 2)
    with pytest.raises(RankError, match=r"^rank 0: died .*SIGKILL"):
        launch(fail, 3)


def test_ranks_that_do_not_finish_are_named_with_the_place_where_each_stands(capsys):
    def some_hang(rank, world_size):
        print("half a line", end="")
        if rank == 1:
            time.sleep(1000)  # here it hangs
        if rank == 2:
            dist.barrier()  # here it waits
        if rank == 3:
            ctypes.PyDLL(None).sleep(1000)  # C code that never lets another thread run
        while rank == 4:
            print("no way to escape the limit")

    with pytest.raises(RankError) as caught:
        launch(some_hang, 5, timeout=1)
    text, errors = str(caught.value), caught.value.errors
    words = "rank 1, rank 2, rank 3, rank 4 did not finish within 1 s (finished: 0)\n"
    assert text.startswith(words) and list(errors) == [1, 2, 3, 4]
    assert re.match(r"  File .*, in some_hang\n.*# here it hangs", errors[1])
    assert "# here it waits" in errors[2] and "no answer: " in errors[3]
    assert capsys.readouterr().out.count("half a line\n") == 3


def test_a_refusal_and_a_kill_are_told_and_leave_nothing(monkeypatch, capsys, tmp_path):
    assert launch(max, 2) == [2, 2]
    before = psutil.Process().num_fds()
    with monkeypatch.context() as patch:
        pipes = [multiprocessing.Pipe(), OSError("Too many open files")]
        patch.setattr(multiprocessing, "Pipe", Mock(side_effect=pipes))
        with pytest.raises(RuntimeError, match="cannot be started: Too many"):
            launch(max, 2)
    assert psutil.Process().num_fds() == before

    def kill(rank, world_size, whose):
        parent = psutil.Process().parent()
        server = parent.ppid()  # once it is killed, the parent has another parent
        os.kill(server if whose == "server" else parent.pid, signal.SIGKILL)
        while whose == "parent":
            print("and it goes on")
        return server

    [server] = launch(kill, 1, "server")
    wait_until(lambda: not alive(server))
    assert launch(max, 2) == [2, 2]
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a parent leaves its folder if killed
    with pytest.raises(RuntimeError, match="the ranks are gone: what had"):
        launch(lambda *args: print(os.getpid()) or kill(*args), 1, "parent")
    pid = int(capsys.readouterr().out.splitlines()[0].removeprefix("[rank 0] "))
    wait_until(lambda: not alive(pid))


def test_nothing_accumulates_and_nothing_has_a_name_that_could(tmp_path, monkeypatch):
    def make(rank, world_size, failing):
        # a lock of a semaphore has a name, which is taken away when the rank ends
        make.kept = multiprocessing.get_context("spawn").Lock()
        lock, maps = make.kept._semlock.name[1:], Path("/proc/self/maps").read_text()
        shared = [line for line in maps.splitlines() if "/dev/shm/" in line]
        assert all("(deleted)" in line or lock in line for line in shared), shared
        if rank == failing:
            raise ValueError
        return f"/dev/shm/sem.{lock}"

    launch(make, 2, None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = psutil.Process().num_fds()
    assert not any(map(os.path.exists, launch(make, 2, None)))
    with pytest.raises(RankError, match=r"^rank 1: ValueError\n"):
        launch(make, 2, 1)
    assert (psutil.Process().num_fds(), os.listdir(tmp_path)) == (before, [])


def test_a_rank_may_have_processes_which_end_with_it(capfd):
    def send_a_part(connection, message):
        os.write(connection.fileno(), message[:2])
        os.kill(os.getpid(), signal.SIGKILL)

    def work(rank, world_size, dies):
        loader = DataLoader(range(10), 4, num_workers=2, persistent_workers=True)
        total = sum(X.sum().item() for X in loader)
        pool = multiprocessing.Pool(1)  # left open, as the loader is
        pool.apply(print, ["from the pool"])  # not through the rank's line
        subprocess.Popen(["sleep", "300"])
        multiprocessing.Process(target=time.sleep, args=(300,)).start()
        print(*[child.pid for child in psutil.Process().children(recursive=True)])
        if rank == dies:  # it is seen although they live on
            multiprocessing.connection.Connection._send = send_a_part
            print("more")
        return total

    assert launch(work, 2, None, timeout=LIMIT) == [45, 45]
    with pytest.raises(RankError, match=r"^rank 0: died .*SIGKILL"):
        launch(work, 2, 0, timeout=1e6)
    lines = capfd.readouterr().out.splitlines()
    found = [line[9:].split() for line in lines if line.startswith("[rank")]
    pids = [int(pid) for of_rank in found for pid in of_rank]
    assert len(pids) >= 15
    wait_until(lambda: not alive(*pids))


@contextlib.contextmanager
def script(source, folder):
    """Run a script with its own temporary folder, beside files named as modules."""
    main, scratch, here = (folder / name for name in ("main.py", "t", "here"))
    scratch.mkdir()
    here.mkdir()
    for name in ("random.py", "d2lpar.py"):
        (here / name).write_text("raise RuntimeError('imported by accident')\n")
    main.write_text(textwrap.dedent(source))
    process = subprocess.Popen(
        [sys.executable, "-W", "error", main],
        **dict.fromkeys(("stdout", "stderr"), subprocess.PIPE),
        cwd=here,
        env={**os.environ, "TMPDIR": str(scratch)},
        text=True,
        start_new_session=True,
    )
    try:
        yield process, scratch
    finally:
        for child in processes_in(scratch):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.communicate()


def processes_in(scratch):
    """The processes that run with this temporary folder, in whatever session."""
    everyone, here = psutil.process_iter(["environ"]), {"TMPDIR": str(scratch)}
    return [p for p in everyone if here.items() <= (p.info["environ"] or {}).items()]


def test_scripts_run_their_top_level_once_and_may_launch_from_threads(tmp_path):
    source = """
    import os, psutil
    from concurrent.futures import ThreadPoolExecutor
    from dataclasses import dataclass
    from d2lpar import RankError, launch

    with open(os.path.join(os.environ["TMPDIR"], "runs"), "a") as file:
        file.write("once\\n")
    FACTOR = 10

    @dataclass
    class Point:
        x: int

    def f(rank, world_size, point):
        return Point(FACTOR * point.x + rank)

    with ThreadPoolExecutor(4) as executor:  # one of the threads starts the server
        results = executor.map(lambda x: launch(f, 2, Point(x)), range(4))
        for x, points in enumerate(results):
            assert points == [Point(10 * x), Point(10 * x + 1)]
    [server] = psutil.Process().children()
    try:
        launch(f, 2, None)
    except RankError as error:
        print(error)
    """
    with script(source, tmp_path) as (process, scratch):
        out, err = process.communicate(timeout=LIMIT)
        assert (process.returncode, err) == (0, "")
        assert ", in f\n    return Point(FACTOR * point.x + rank)\n" in out
        assert (scratch / "runs").read_text() == "once\n"
        assert os.listdir(scratch) == ["runs"]


@pytest.mark.alone
def test_interrupting_or_killing_the_caller_leaves_nothing(tmp_path):
    source = """
    import ctypes, os, psutil, signal, threading, time
    from d2lpar import launch

    # A shell script's background job ignores SIGINT; what it starts inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def hang(rank, world_size):
        print("pid", os.getpid())
        if rank == 2:
            ctypes.PyDLL(None).sleep(1000)  # C code that never lets another thread run
        time.sleep(1000)

    for seconds in (0.3, 0.0, 0.005, 0.01, 0.02, 0.04, 0.5):  # at first it imports
        try:  # as Control-C does: the whole process group
            threading.Timer(seconds, os.killpg, (0, signal.SIGINT)).start()
            launch(hang, 3, timeout=1000)
        except KeyboardInterrupt:
            assert launch(lambda rank, world_size: rank, 2) == [0, 1]
            print("interrupted", flush=True)
    [server] = psutil.Process().children()
    while server.children():  # parents that are about to go
        time.sleep(0.01)
    print("left", os.listdir(os.environ["TMPDIR"]), flush=True)
    launch(hang, 3, timeout=1000)
    """
    with script(source, tmp_path) as (process, scratch):
        lines = iter(process.stdout.readline, "left []\n")
        assert len([line for line in lines if "interrupted" in line]) == 7
        assert all("pid" in process.stdout.readline() for _ in range(3))
        wait_until(lambda: len(processes_in(scratch)) == 6)  # with parent and server
        assert os.listdir(scratch)
        process.kill()
        wait_until(lambda: not processes_in(scratch))
        assert not os.listdir(scratch) and process.stderr.read() == ""


CELL = """
    import os, time, torch
    from d2lpar import RankError, launch

    _ = torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # OpenMP: a fork would hang

    def stuck(rank, world_size, seconds):
        print("pid", os.getpid())
        time.sleep(seconds)
        raise ValueError("no good")  # in a cell

    for seconds in 0, 1000:
        try:
            launch(stuck, 2, seconds, timeout=1)
        except RankError as error:
            print(error)
    """


@pytest.mark.alone
def test_cells_in_a_kernel_that_is_interrupted(tmp_path, monkeypatch):
    """Like JupyterLab, we start, interrupt and stop kernels with jupyter_client."""
    from jupyter_client.manager import start_new_kernel

    def pieces(cell):
        """Run a cell; yield what it puts out."""
        client.execute(textwrap.dedent(cell))
        while True:
            content = client.get_iopub_msg(timeout=LIMIT)["content"]
            if content.get("execution_state") == "idle":
                return
            data = content.get("data", {}).get("text/plain")
            yield content.get("text") or data or content.get("ename", "")

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    kernel, client = start_new_kernel(cwd=tmp_path)
    try:
        failed = "".join(pieces(CELL))
        place = '  File "<cell>", line {}, in stuck\n    {}\n'
        error = place.format(9, 'raise ValueError("no good")  # in a cell')
        assert error in failed and "ipykernel" not in failed
        assert failed.count(place.format(8, "time.sleep(seconds)")) == 2
        hanging, pids = pieces("launch(stuck, 2, 1000)"), []
        while len(pids) < 2:
            pids += map(int, re.findall(r"pid (\d+)", next(hanging)))
        kernel.interrupt_kernel()
        assert list(hanging)[-1] == "KeyboardInterrupt"
        wait_until(lambda: not alive(*pids))
        assert "".join(pieces("launch(max, 2)")).endswith("[2, 2]")
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
