"""Ranks from everywhere code is written, and none left behind however the run ends."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from d2lpar import ranks
from d2lpar.ranks import launcher
from d2lpar.ranks.lanes import SharedMemory
from d2lpar.ranks.launcher import RankError, launch

# seconds, for what takes one to ten: a machine may be busy, and no test is about speed
LIMIT = 200


def rank_and_size(
    rank, world_size
):  # found by its name: a rank that uses it imports this file
    return rank, world_size


def alive(pid):
    """Whether the process runs; one that waits for its parent's notice does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_until(condition, what):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"waited {LIMIT} s in vain: {what}"
        time.sleep(0.02)


# What a rank is given, and what comes back.


def test_functions_of_all_kinds_and_their_arguments(tmp_path, monkeypatch):
    big = torch.arange(5_000_000)  # 40 MB
    shared = []

    def with_closure(rank, world_size, tensor, same):
        return same is shared, tensor + rank

    class Scaler:
        def scale(self, rank, world_size, factor):
            return factor * rank

    for rank, (same, tensor) in enumerate(launch(with_closure, 2, big, shared)):
        assert same and torch.equal(tensor, big + rank)
    assert launch(Scaler().scale, 2, 5) == [0, 5]
    assert launch(lambda rank, world_size, *args: args, 1, "a", [1]) == [("a", [1])]
    (tmp_path / "beside_the_script.py").write_text(
        "def f(rank, world_size): return 7 + rank\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import beside_the_script

    assert launch(beside_the_script.f, 2) == [7, 8]


def test_the_group_is_ready_and_on_loopback_only(monkeypatch):
    def check(rank, world_size):
        tensor = torch.tensor([float(rank + 1)])
        dist.all_reduce(tensor, group=dist.new_group(list(range(world_size))))
        assert (tensor.item(), dist.get_rank(), dist.get_backend()) == (
            6.0,
            rank,
            "gloo",
        )
        sockets = psutil.Process().net_connections(kind="inet")
        assert {s.laddr.ip for s in sockets} <= {"127.0.0.1", "::1"}
        assert [s for s in sockets if not s.raddr], (
            "gloo listens somewhere, or we do not see it"
        )
        time.sleep(0.02 * (world_size - rank))  # the last one returns first
        return rank

    monkeypatch.setenv(
        "GLOO_SOCKET_IFNAME", "no_such_interface"
    )  # gloo would follow it
    assert launch(check, 3) == [0, 1, 2]


def test_surroundings_are_those_of_the_call_not_of_the_first_one(tmp_path, monkeypatch):
    def surroundings(rank, world_size):
        names = [
            "D2LPAR_NEW",
            "D2LPAR_GONE",
            "PYTHONSAFEPATH",
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
        ]
        place = tempfile.gettempdir(), torch.get_num_threads(), os.getppid()
        return (
            torch.rand(1),
            [os.environ.get(name) for name in names],
            os.getcwd(),
            *place,
        )

    monkeypatch.setenv("D2LPAR_GONE", "here")
    [(first, values, _, _, threads, server)] = launch(surroundings, 1, threads=2)
    assert (values, threads) == ([None, "here", None, "0", "1", "0"], 2)
    monkeypatch.setenv("D2LPAR_NEW", "seen")
    monkeypatch.delenv("D2LPAR_GONE")
    monkeypatch.chdir(tmp_path)
    for rank, (drawn, values, folder, *others) in enumerate(launch(surroundings, 2)):
        assert (drawn == first) == (
            rank == 0
        )  # the same in every run, and another on each rank
        assert values == ["seen", None, None, str(rank), "2", str(rank)]
        assert os.path.samefile(folder, tmp_path)
        assert others == [
            tempfile.gettempdir(),
            1,
            server,
        ]  # all come from one warm server
    assert "RANK" not in os.environ


def test_threads_may_launch_at_once():
    main = sys.modules["__main__"]
    with ThreadPoolExecutor(3) as executor:
        call = executor.map(lambda i: launch(lambda *sizes: (i, *sizes), 2), range(3))
        assert list(call) == [[(i, 0, 2), (i, 1, 2)] for i in range(3)]
    assert sys.modules["__main__"] is main


# What goes wrong, said so that a student can mend it.


def generator():
    yield


LOCK = threading.Lock()


def uses_a_lock(rank, world_size):
    return LOCK


@pytest.mark.parametrize(
    "call, error, words",
    [
        (
            lambda: launch(rank_and_size, 0),
            ValueError,
            "world_size must be at least 1, got 0",
        ),
        (lambda: launch(rank_and_size, 2.0), TypeError, "'float' object"),
        (
            lambda: launch(abs, 1, timeout=float("inf")),
            ValueError,
            "at most 1e6 seconds, got inf",
        ),
        (
            lambda: launch(3, 2),
            TypeError,
            r"got 3; write launch\(f, 2\), not launch\(f\(\)\)",
        ),
        (
            lambda: launch(abs, 1, generator()),
            TypeError,
            r"argument 0 \(generator\) cannot be",
        ),
        (
            lambda: launch(generator().send, 1),
            TypeError,
            "the function <.*> cannot be sent",
        ),
        (
            lambda: launch(uses_a_lock, 1),
            TypeError,
            r"'LOCK' \(lock\), which the function uses,",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_starts(call, error, words):
    with pytest.raises(error, match=words):
        call()


def chained():
    try:
        {}["a"]
    except KeyError as error:
        raise OSError("no file") from error


def launch_in_a_pool():
    with multiprocessing.Pool(1) as pool:
        pool.apply(launch, (print, 2))


@pytest.mark.parametrize(
    "deed, words",
    [
        (
            chained,
            r"^rank 1: OSError: no file\n(.*\n)*.*{}\[\"a\"\](.*\n)*KeyError: 'a'",
        ),
        (lambda: launch(), "^rank 1: TypeError: launch.. missing 2 required"),
        (lambda: exec("x ="), "^rank 1: SyntaxError: invalid syntax"),
        (lambda: sys.exit(4), "^rank 1: SystemExit: 4"),
        (generator, r"^rank 1: TypeError: the result \(generator\) cannot be sent"),
        (lambda: os._exit(3), r"^rank 1: died before it had finished \(exit code 3\)"),
        (lambda: ctypes.string_at(0), "^rank 1: died .*SIGSEGV"),
        (launch_in_a_pool, "^rank 1: RuntimeError: launch was called from a rank"),
    ],
)
def test_the_rank_that_failed_is_named_not_those_that_miss_it(deed, words):
    def one_fails(rank, world_size):
        if rank == 1:
            return deed()
        dist.barrier()  # would wait for ever

    with pytest.raises(RankError, match=words) as caught:
        launch(one_fails, 3, timeout=LIMIT)
    assert caught.value.rank == 1


class TwoArguments(Exception):
    def __init__(self, words, more):
        super().__init__(words)


def test_a_result_that_cannot_be_read_back_names_its_rank():
    with pytest.raises(
        RankError, match=r"^rank 1: its result cannot be read back: TypeE"
    ) as it:
        launch(lambda rank, world_size: TwoArguments("a", "b") if rank else None, 2)
    assert it.value.rank == 1


def test_an_error_that_follows_from_another_is_not_the_first(monkeypatch):
    """The others may learn of a rank's failure, and report theirs, before it does."""
    monkeypatch.setattr(launcher, "GRACE", 10)

    def fail(rank, world_size):
        if rank == 1:
            raise ranks.PeerError("rank 0 gave up", [0])
        time.sleep(0.4 - 0.1 * rank)
        raise ValueError("the cause")

    words = r"^rank 2: ValueError: the cause\n(.*\n)*.*, in fail"
    with pytest.raises(RankError, match=words) as it:
        launch(fail, 3)
    assert it.value.rank == 2 and sorted(it.value.errors) == [0, 1, 2]
    assert "failed too: rank 0 (ValueError), rank 1 (" in str(it.value)
    assert "launcher.py" not in str(it.value).replace("test_launcher.py", "")


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
    assert text.startswith(
        "rank 1, rank 2, rank 3, rank 4 did not finish within 1 s (finished: 0)"
    )
    assert caught.value.rank == 1 and sorted(errors) == [1, 2, 3, 4]
    assert "# here it hangs" in errors[1] and ", in some_hang" in text
    assert "# here it waits" in errors[2] and "no answer: " in errors[3]
    assert (
        "multiprocessing" not in errors[1]
    )  # the stack begins at the function of the user
    assert capsys.readouterr().out.count("half a line\n") == 3


def test_a_rank_that_stops_in_the_middle_of_a_message_does_not_block_the_caller(
    monkeypatch,
):
    def stop(rank, world_size):
        def send_a_part(connection, message):
            os.write(connection.fileno(), message[:2])
            os.kill(os.getpid(), signal.SIGSTOP)

        if rank == 1:
            multiprocessing.connection.Connection._send = send_a_part
        return rank

    monkeypatch.setattr(launcher, "ANSWER", 0.3)
    children = multiprocessing.active_children
    rescue = threading.Timer(30, lambda: [process.kill() for process in children()])
    rescue.start()
    with pytest.raises(RankError, match="rank 1"):
        launch(stop, 2, timeout=3)
    assert rescue.is_alive(), "it would have waited for ever"
    rescue.cancel()


def test_what_the_system_refuses_is_told_and_nothing_is_left(monkeypatch):
    real_start = multiprocessing.process.BaseProcess.start

    def start(process):
        if process.name == "d2lpar rank 1":
            raise OSError(24, "Too many open files")
        real_start(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    with pytest.raises(
        RuntimeError, match=r"the ranks cannot be started: .*Too many open"
    ):
        launch(rank_and_size, 2)
    assert not multiprocessing.active_children()
    assert launch(rank_and_size, 1) == [(0, 1)]


# Nothing is left behind.


def test_nothing_accumulates_in_the_caller():
    def fail_at(rank, world_size, failing):
        if rank == failing:
            raise ValueError

    open_files = psutil.Process().num_fds
    launch(fail_at, 2, None)
    folder, before = launcher.get_temp_dir(), open_files()
    for failing in (None, 1):
        with contextlib.suppress(RankError):
            launch(fail_at, 2, failing)
    assert open_files() == before
    assert not [name for name in os.listdir(folder) if name.startswith("store")]
    assert not multiprocessing.active_children()


def test_a_rank_may_have_processes_which_end_with_it(capfd):
    def work(rank, world_size):
        numbers = torch.utils.data.TensorDataset(torch.arange(10.0))
        loader = torch.utils.data.DataLoader(
            numbers, 4, num_workers=2, persistent_workers=True
        )
        total = sum(float(X.sum()) for (X,) in loader)
        pool = multiprocessing.Pool(1)  # left open, as the loader is
        pool.apply(
            print, ["from the pool"]
        )  # and not through the rank's line to its caller
        subprocess.Popen(["sleep", "300"])
        return total, [child.pid for child in psutil.Process().children(recursive=True)]

    for total, children in launch(work, 2, timeout=LIMIT):
        assert total == 45 and len(children) == 4
        wait_until(
            lambda pids=children: not any(map(alive, pids)), "processes are left"
        )
    assert "[rank" not in capfd.readouterr().out

    def die(rank, world_size):
        child = multiprocessing.Process(target=time.sleep, args=(1000,))
        child.start()
        print(child.pid)
        os.kill(os.getpid(), signal.SIGKILL)  # it is seen although the child lives on

    with pytest.raises(RankError, match=r"^rank 0: died .*SIGKILL"):
        launch(die, 1, timeout=LIMIT)
    pid = int(capfd.readouterr().out.removeprefix("[rank 0] "))
    wait_until(lambda: not alive(pid), "the child of a rank that died is left")


def test_an_interrupt_while_the_lanes_are_made_leaves_nothing(monkeypatch):
    made = []

    def create(*args):
        memory = real_create(*args)
        locks = [lock for pair in memory.semaphores.values() for lock in pair]
        made.extend(
            [memory.path, *(f"/dev/shm/sem.{s._semlock.name[1:]}" for s in locks)]
        )
        signal.raise_signal(signal.SIGINT)
        return memory

    real_create = SharedMemory.create
    monkeypatch.setattr(SharedMemory, "create", create)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(rank_and_size, 2)
    finally:
        signal.signal(signal.SIGINT, handler)
    gc.collect()  # the traceback held them
    assert len(made) > 3 and not [name for name in made if os.path.exists(name)]


@contextlib.contextmanager
def script(source, *, how="file"):
    """Run a script in a session and with a temporary directory of its own; yield both.

    Its folder has files named as modules, except on standard input: Python itself would
    import them
    """
    with tempfile.TemporaryDirectory(prefix="d2l-") as folder:
        main, scratch, here = (Path(folder) / name for name in ("main.py", "t", "here"))
        scratch.mkdir()
        here.mkdir()
        for name in ("random.py", "queue.py", "d2lpar.py"):
            (here / name).write_text("raise RuntimeError('imported by accident')\n")
        main.write_text(textwrap.dedent(source))
        with open(main if how == "stdin" else os.devnull) as stdin:
            process = subprocess.Popen(
                [sys.executable, "-W", "error", "-" if how == "stdin" else main],
                **{
                    "stdin": stdin,
                    "stdout": subprocess.PIPE,
                    "stderr": subprocess.PIPE,
                },
                cwd=folder if how == "stdin" else here,
                env={**os.environ, "TMPDIR": str(scratch)},
                text=True,
                start_new_session=True,
            )
        try:
            yield process, scratch
        finally:
            for pid in session(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate()


def session(leader):
    """The processes of a session that are still running."""

    def is_in(pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            return os.getsid(pid) == leader and alive(pid)

    return list(filter(is_in, psutil.pids()))


HANG = """
    import os, signal, sys, threading, time
    from d2lpar import launch

    # A shell script's background job ignores SIGINT; what it starts inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def hang(rank, world_size):
        print("pid", os.getpid())
        time.sleep(1000)
"""


def test_killing_the_caller_leaves_nothing():
    with script(HANG + "\n    launch(hang, 3, timeout=1000)") as (process, scratch):
        lines = (line for line in process.stdout if "pid" in line)
        assert len(list(islice(lines, 3))) == 3
        assert len(session(process.pid)) > 3 and os.listdir(scratch)
        process.kill()
        wait_until(lambda: not session(process.pid), "processes are left")
        wait_until(lambda: not os.listdir(scratch), "files are left")


@pytest.mark.alone
def test_interrupting_leaves_nothing_and_the_next_launch_works():
    source = """
    for seconds in (0.3, 0.0, 0.005, 0.01, 0.02, 0.5):  # 0.3: the server still imports
        try:  # as Control-C does: the whole process group
            threading.Timer(seconds, os.killpg, (0, signal.SIGINT)).start()
            launch(hang, 3, timeout=1000)
        except KeyboardInterrupt:
            assert launch(lambda rank, world_size: rank, 2) == [0, 1]
            print("interrupted", flush=True)
    print("left", os.listdir(os.environ["TMPDIR"]), flush=True)
    time.sleep(1000)
    """
    with script(HANG + source) as (process, scratch):
        interrupted = 0
        while not (line := process.stdout.readline()).startswith("left"):
            assert line, process.stderr.read()
            interrupted += "interrupted" in line
        assert interrupted == 6 and line.startswith("left ['pymp-")
        assert "store" not in str(list(os.walk(scratch)))
        names = [
            " ".join(psutil.Process(pid).cmdline()) for pid in session(process.pid)
        ]
        assert len(names) == 3, (
            names
        )  # the script, the fork server and the resource tracker
        process.kill()
        wait_until(lambda: not session(process.pid), "processes are left")
        assert process.stderr.read() == ""


# Scripts, standard input, notebooks.


@pytest.mark.parametrize("how", ["file", "stdin"])
def test_scripts_run_their_top_level_once(how):
    source = """
    import os
    from dataclasses import dataclass
    from d2lpar.ranks.launcher import RankError, launch

    with open(os.path.join(os.environ["TMPDIR"], "runs"), "a") as file:
        file.write("once\\n")
    FACTOR = 10

    @dataclass
    class Point:
        x: int

    def helper(x):
        return FACTOR * x

    def f(rank, world_size, point):
        print("hello")
        if point is None:
            raise ValueError("nothing")
        return Point(helper(point.x + rank))

    print(launch(f, 2, Point(1)) == [Point(10), Point(20)])
    try:
        launch(f, 2, None)
    except RankError as error:
        print(error)
    """
    with script(source, how=how) as (process, scratch):
        out, err = process.communicate(timeout=LIMIT)
        assert (process.returncode, err) == (0, "")
        lines = out.splitlines()
        assert "True" in lines and lines.count("[rank 1] hello") == 2
        assert ", in f" in out and "ValueError: nothing" in out
        assert how == "stdin" or 'raise ValueError("nothing")' in out
        assert (scratch / "runs").read_text() == "once\n" and os.listdir(scratch) == [
            "runs"
        ]


CELLS = """
    import os, time
    import torch, torch.distributed as dist
    from d2lpar.ranks.launcher import RankError, launch
    _ = torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # OpenMP: a fork would hang
    # Next cell
    def add_up(rank, world_size):
        tensor = torch.tensor([rank + 1])
        dist.all_reduce(tensor)
        print("hello from a cell")
        return tensor.item()

    launch(add_up, 2)
    # Next cell
    def step(rank, world_size):
        if rank == 1:
            raise ValueError("no good")  # in a cell
        dist.barrier()

    try:
        launch(step, 2)
    except RankError as error:
        print(error)
    # Next cell
    def stuck(rank, world_size):
        print("pid", os.getpid())
        time.sleep(1000)  # stuck in a cell

    try:
        launch(stuck, 2, timeout=0.5)
    except RankError as error:
        print(error)
    """
CELLS = [cell.strip() for cell in textwrap.dedent(CELLS).split("# Next cell")]


@pytest.mark.alone
def test_cells_in_a_kernel_as_jupyterlab_has_it_and_an_interrupted_one(
    tmp_path, monkeypatch
):
    """Like JupyterLab, we start, interrupt and stop kernels with jupyter_client."""
    from jupyter_client.manager import start_new_kernel

    def run(cell, look=lambda content: None):
        """Return what a cell puts out, joined; ``look`` sees each piece at once."""
        pieces = []

        def hook(message):
            content = message["content"]
            if message["msg_type"] in ("stream", "execute_result", "error"):
                data = content.get("data", {}).get("text/plain")
                pieces.append(content.get("text") or data or content["ename"])
                look(content)

        client.execute_interactive(cell, timeout=LIMIT, output_hook=hook)
        return "".join(pieces)

    def pids_in(content):
        return list(map(int, re.findall(r"pid (\d+)", content.get("text", ""))))

    def interrupt(content):
        pids.extend(pids_in(content))
        if len(pids) == 2 and "text" in content:
            assert all(map(alive, pids))
            kernel.interrupt_kernel()

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    kernel, client = start_new_kernel(cwd=tmp_path)
    try:
        nothing, added, failed, late = map(run, CELLS)
        assert nothing == ""
        assert added.count("hello from a cell\n") == 2 and added.endswith("[3, 3]")
        assert "[rank 0] hello" in added and "[rank 1] hello" in added
        assert failed.startswith("rank 1: ValueError: no good\n")
        assert 'File "<cell>", line 3, in step\n' in failed
        assert 'raise ValueError("no good")  # in a cell\n' in failed
        assert "rank 0, rank 1 did not finish within 0.5 s" in late
        assert late.count('File "<cell>", line 3, in stuck\n') == 2
        assert late.count("time.sleep(1000)  # stuck in a cell\n") == 2
        assert "ipykernel" not in failed + late
        pids = []
        assert run("launch(stuck, 2, timeout=1000)", interrupt).endswith(
            "KeyboardInterrupt"
        )
        assert not any(map(alive, pids)) and run("launch(add_up, 2)").endswith("[3, 3]")

        pids = []
        client.execute("launch(stuck, 2, timeout=1000)")
        while len(pids) < 2:
            pids += pids_in(client.get_iopub_msg(timeout=LIMIT)["content"])
        pids += [
            p.pid
            for p in psutil.Process(kernel.provisioner.pid).children(recursive=True)
        ]
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    assert len(pids) >= 4  # two ranks twice, the fork server and what else there is
    wait_until(lambda: not any(map(alive, pids)), "processes of the kernel are left")
