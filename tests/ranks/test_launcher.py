"""Ranks from everywhere that code is written, and none left behind however the run ends."""

import contextlib
import ctypes
import errno
import gc
import json
import multiprocessing
import multiprocessing.resource_tracker
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.request
import uuid

import psutil
import pytest
import torch
import torch.distributed as dist

from d2lpar import ranks
from d2lpar.ranks import launcher
from d2lpar.ranks.lanes import SharedMemory
from d2lpar.ranks.launcher import RankError, launch

LIMIT = 200  # seconds, for what takes one to ten: a machine may be busy, and no test is about speed


def rank_and_size(rank, world_size):  # found by its name: a rank that uses it imports this file
    return rank, world_size


def alive(pid):
    """Whether the process runs; one that waits for its parent to take notice does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_until(condition, what):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"waited {LIMIT} s in vain: {what}"
        time.sleep(0.02)


# What a rank is given, and what comes back.


@pytest.mark.parametrize("k", [1, 2, 4])
def test_results_come_in_the_order_of_ranks(k):
    def later_ranks_are_faster(rank, world_size):
        time.sleep(0.02 * (world_size - rank))
        return rank, world_size

    assert launch(later_ranks_are_faster, k) == [(rank, k) for rank in range(k)]


def test_arguments_closures_lambdas_and_methods():
    offset = 10

    def with_closure(rank, world_size, factor, *, power=1):
        return offset + factor * rank**power

    class Scaler:
        def scale(self, rank, world_size, factor):
            return factor * rank

    assert launch(with_closure, 2, 3) == [10, 13]
    assert launch(lambda rank, world_size, *args: (rank, args), 2, "a", [1]) == [
        (0, ("a", [1])),
        (1, ("a", [1])),
    ]
    assert launch(Scaler().scale, 2, 5) == [0, 5]


def test_function_of_an_importable_module_needs_only_the_callers_path(tmp_path, monkeypatch):
    assert launch(rank_and_size, 2) == [(0, 2), (1, 2)]
    (tmp_path / "beside_the_script.py").write_text("def f(rank, world_size): return 7 + rank\n")
    monkeypatch.syspath_prepend(tmp_path)
    import beside_the_script

    assert launch(beside_the_script.f, 2) == [7, 8]


def test_the_group_is_ready():
    def add_up(rank, world_size):
        tensor = torch.full((5,), float(rank + 1))
        dist.all_reduce(tensor)
        pair = dist.new_group([0, 1])
        return tensor, dist.get_rank(), dist.get_world_size(), dist.get_backend(), pair is not None

    for rank, (tensor, *group) in enumerate(launch(add_up, 3)):
        assert tensor.tolist() == [6.0] * 5
        assert group == [rank, 3, "gloo", True]


def test_arguments_and_results_of_tens_of_megabytes():
    big = torch.arange(5_000_000)  # 40 MB
    results = launch(lambda rank, world_size, tensor: tensor + rank, 2, big)
    assert all(torch.equal(result, big + rank) for rank, result in enumerate(results))


def test_surroundings_are_those_of_the_call_not_of_the_first_one(tmp_path, monkeypatch):
    def surroundings(rank, world_size):
        names = ["D2LPAR_NEW", "D2LPAR_GONE", "RANK", "WORLD_SIZE", "LOCAL_RANK"]
        return [os.environ.get(name) for name in names], os.getcwd()

    monkeypatch.setenv("D2LPAR_GONE", "here")
    assert launch(surroundings, 1)[0][0] == [None, "here", "0", "1", "0"]
    monkeypatch.setenv("D2LPAR_NEW", "seen")
    monkeypatch.delenv("D2LPAR_GONE")
    monkeypatch.chdir(tmp_path)
    for rank, (values, directory) in enumerate(launch(surroundings, 2)):
        assert values == ["seen", None, str(rank), "2", str(rank)]
        assert os.path.samefile(directory, tmp_path)
    assert "RANK" not in os.environ


def test_one_thread_a_rank_unless_told_otherwise():
    def threads(rank, world_size):
        return torch.get_num_threads()

    assert launch(threads, 2) == [1, 1]
    assert launch(threads, 1, threads=2) == [2]


@pytest.mark.skipif(sys.platform == "win32", reason="no fork server")
def test_ranks_come_from_one_warm_server():
    def parent(rank, world_size):
        return os.getppid()

    assert len({*launch(parent, 2), *launch(parent, 1)} - {os.getpid()}) == 1


def test_spawn_where_there_is_no_fork_server(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    offset = 5
    parents = launch(lambda rank, world_size: (offset + rank, os.getppid()), 2)
    assert parents == [(5, os.getpid()), (6, os.getpid())]


def test_lanes_without_what_linux_alone_has(monkeypatch):
    """On macOS there is no /dev/shm, and no room can be reserved in a file."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, *how: path != "/dev/shm" and access(path, *how))
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    memory = SharedMemory.create(2, multiprocessing.get_context("spawn"))
    memory.remove()
    assert os.path.dirname(memory.path) == tempfile.gettempdir()

    def add_up(rank, world_size):
        if hasattr(os, "sched_yield"):
            del os.sched_yield
        tensor = torch.full((10,), rank + 1.0)
        ranks.allreduce(tensor)
        return tensor.tolist()

    assert launch(add_up, 2) == [[3.0] * 10] * 2


def test_an_error_that_follows_from_another_is_not_the_first(monkeypatch):
    """The others may learn of a rank's failure, and report theirs, before it reports its own."""
    monkeypatch.setattr(launcher, "GRACE", 10)

    def fail(rank, world_size):
        if rank == 1:
            raise ranks.PeerError("rank 0 gave up", [0])
        time.sleep(0.2)
        raise ValueError("the cause")

    with pytest.raises(RankError, match=r"^rank 0: ValueError: the cause") as caught:
        launch(fail, 2)
    assert caught.value.rank == 0 and sorted(caught.value.errors) == [0, 1]


def test_two_threads_may_launch_at_once():
    main_file, results = sys.modules["__main__"].__file__, {}

    def one(number):
        results[number] = launch(lambda rank, world_size: (number, rank), 2)

    callers = [threading.Thread(target=one, args=(number,)) for number in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(LIMIT)
    assert results == {number: [(number, 0), (number, 1)] for number in range(3)}
    assert sys.modules["__main__"].__file__ == main_file


def test_a_rank_stays_until_all_have_finished():
    def uneven(rank, world_size):
        pids = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
        dist.all_gather(pids, torch.tensor([os.getpid()]))
        others = dist.new_group([1, 2])
        if rank == 0:
            return True
        for _ in range(10):
            time.sleep(0.02)
            dist.all_reduce(torch.ones(1), group=others)
        return psutil.Process(int(pids[0])).status() != psutil.STATUS_ZOMBIE

    assert launch(uneven, 3) == [True, True, True]


@pytest.mark.parametrize("interface", [None, "eth0", "no_such_interface"])
def test_sockets_are_on_loopback_only(interface, monkeypatch):
    def addresses(rank, world_size):
        dist.all_reduce(torch.ones(1), group=dist.new_group(list(range(world_size))))
        sockets = psutil.Process().net_connections(kind="inet")
        return [s.laddr.ip for s in sockets], [s.laddr.ip for s in sockets if not s.raddr]

    # Whatever the caller is set to: gloo would follow it, or the name of the machine.
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    for mine, listening in launch(addresses, 2):
        assert listening, "gloo listens somewhere, or this test looks in the wrong place"
        assert set(mine) <= {"127.0.0.1", "::1"}


# What goes wrong, said so that a student can mend it.


def test_an_exception_ends_all_at_once_and_names_its_rank():
    def one_fails(rank, world_size):
        if rank == 0:
            dist.barrier()  # would wait for ever
        if rank == 1:
            raise ValueError("no good")
        time.sleep(1000)

    begin = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 1: ValueError: no good\n") as caught:
        launch(one_fails, 3, timeout=1000)
    assert time.monotonic() - begin < LIMIT
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.rank == 1 and list(caught.value.errors) == [1]
    text = str(caught.value)
    assert 'raise ValueError("no good")' in text and ", in one_fails" in text
    assert "launcher.py" not in text.replace("test_launcher.py", "")


def test_the_first_to_fail_is_the_one_raised():
    def both_fail(rank, world_size):
        time.sleep(0.03 * (world_size - rank))
        raise KeyError(rank)

    with pytest.raises(RankError, match=r"^rank 2: KeyError: 2\n") as caught:
        launch(both_fail, 3)
    assert caught.value.rank == 2
    others = set(caught.value.errors) - {2}  # those that came in time: it depends on the machine
    assert all(f"rank {rank} (KeyError)" in str(caught.value) for rank in others)


def test_an_exception_keeps_its_cause():
    def chained(rank, world_size):
        try:
            {}["missing"]
        except KeyError as error:
            raise OSError("no file") from error

    with pytest.raises(RankError, match="rank 0: OSError: no file") as caught:
        launch(chained, 1)
    assert "KeyError: 'missing'" in str(caught.value) and '{}["missing"]' in str(caught.value)


@pytest.mark.parametrize(
    ("last_deed", "how"),
    [
        (lambda: os._exit(3), "exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (lambda: ctypes.string_at(0), "SIGSEGV"),
    ],
)
def test_a_death_is_named_not_the_broken_connections_of_the_others(last_deed, how):
    def one_dies(rank, world_size):
        if rank == 1:
            last_deed()
        dist.barrier()

    with pytest.raises(RankError, match=rf"^rank 1: died .*{how}") as caught:
        launch(one_dies, 3, timeout=LIMIT)
    assert caught.value.rank == 1


def test_a_call_with_wrong_arguments_and_an_exit_are_failures_too():
    with pytest.raises(RankError, match=r"TypeError: .* takes 1 positional argument"):
        launch(lambda rank: rank, 1)
    with pytest.raises(RankError, match="rank 0: SystemExit: 4"):
        launch(lambda rank, world_size: sys.exit(4), 1)


def test_a_result_that_cannot_travel_is_an_error_of_its_rank():
    def a_generator(rank, world_size):
        return (i for i in range(3)) if rank == 1 else rank

    with pytest.raises(RankError, match=r"rank 1: TypeError: the result \(generator\) cannot be"):
        launch(a_generator, 2)


def test_a_hanging_rank_is_named_with_the_place_where_it_hangs(capsys):
    def one_hangs(rank, world_size):
        print("half a line", end="")
        if rank == 1:
            time.sleep(1000)  # here it hangs
        if rank == 2:
            dist.barrier()  # here it waits

    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch(one_hangs, 3, timeout=1)
    assert 1 <= time.monotonic() - begin < LIMIT
    text = str(caught.value)
    assert text.startswith("rank 1, rank 2 did not finish within 1 s (finished: 0)")
    assert caught.value.rank == 1 and set(caught.value.errors) == {1, 2}
    assert "# here it hangs" in caught.value.errors[1] and ", in one_hangs" in text
    assert "# here it waits" in caught.value.errors[2]
    assert "multiprocessing" not in text  # the stack begins at the function of the user
    assert capsys.readouterr().out.count("half a line\n") == 3


def test_a_rank_that_cannot_answer_is_named_all_the_same():
    def keep_the_interpreter(rank, world_size):
        ctypes.PyDLL(None).sleep(1000)  # C code that never lets another thread run

    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0 did not finish within 0.5 s .*\s+.*\s+no answer"):
        launch(keep_the_interpreter, 1, timeout=0.5)
    assert time.monotonic() - begin < LIMIT


def test_printing_without_end_is_no_way_to_escape_the_limit(capsys):
    def chatter(rank, world_size):
        while True:
            print("still here")

    with pytest.raises(RankError, match="rank 0, rank 1 did not finish within"):
        launch(chatter, 2, timeout=0.5)


def test_bad_input_is_refused_before_anything_starts():
    for size in (0, -1, 2.0, "2", True):
        with pytest.raises(ValueError, match="world_size must be a whole number"):
            launch(rank_and_size, size)
    with pytest.raises(ValueError, match="threads must be a whole number"):
        launch(rank_and_size, 1, threads=0)
    for timeout in (0, -1, float("nan"), float("inf"), None):
        with pytest.raises(ValueError, match="timeout must be"):
            launch(rank_and_size, 1, timeout=timeout)
    with pytest.raises(TypeError, match="launch needs a function, got 3"):
        launch(3, 2)


def test_what_cannot_be_pickled_is_named():
    lock = threading.RLock()

    def uses_a_lock(rank, world_size):
        return lock.acquire()

    with pytest.raises(TypeError, match=r"'lock' \(RLock\), which the function uses, cannot be"):
        launch(uses_a_lock, 1)
    with pytest.raises(TypeError, match=r"argument 1 \(generator\) cannot be sent"):
        launch(rank_and_size, 1, 0, (i for i in ()))


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


def test_what_cannot_be_unpickled_is_named():
    words = "rank 0: TypeError: argument 1 cannot be unpickled in the rank: ValueError: invalid"
    with pytest.raises(RankError, match=words):
        launch(rank_and_size, 1, 0, Unreadable())
    unreadable = Unreadable()
    with pytest.raises(RankError, match="TypeError: the function cannot be unpickled in the rank"):
        launch(lambda rank, world_size: unreadable, 1)


def test_a_deleted_working_directory_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(RuntimeError, match=r"working directory.* has been deleted: change to"):
        launch(rank_and_size, 2)


def test_what_the_system_refuses_is_named():
    """Each in a process of its own: what has been started once needs nothing more."""
    source = """
    import resource
    from d2lpar.ranks.launcher import launch
    if {few}:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    try:
        launch(abs, 16)
    except RuntimeError as error:
        print(error)
    if {few}:
        print(launch(lambda rank, world_size: rank, 2))
    """
    with script(textwrap.dedent(source).format(few=True)) as (process, _):
        out, _ = process.communicate(timeout=LIMIT)
        assert "the ranks cannot be started: this process may not open as many files" in out
        assert out.endswith("[0, 1]\n"), out
    with tempfile.TemporaryDirectory(prefix="long" * 25) as folder:
        with script(textwrap.dedent(source).format(few=False), TMPDIR=folder) as (process, _):
            out, _ = process.communicate(timeout=LIMIT)
        assert f"{folder}/pymp-" in out and "start Python with TMPDIR set to" in out, out


def test_a_rank_may_have_processes_which_end_with_it(capfd):
    def work(rank, world_size):
        numbers = torch.utils.data.TensorDataset(torch.arange(10.0))
        loader = torch.utils.data.DataLoader(numbers, 4, num_workers=2, persistent_workers=True)
        total = sum(float(X.sum()) for (X,) in loader)
        pool = multiprocessing.Pool(1)  # left open, as the loader is
        pool.apply(print, ["from the pool"])  # and not through the rank's line to its caller
        return total, [child.pid for child in psutil.Process().children(recursive=True)]

    for total, children in launch(work, 2, timeout=LIMIT):
        assert total == 45 and len(children) == 3
        wait_until(lambda pids=children: not any(map(alive, pids)), "processes are left")
    assert "[rank" not in capfd.readouterr().out


def test_a_death_is_seen_although_a_child_lives_on_and_the_child_ends(tmp_path):
    def die(rank, world_size):
        child = multiprocessing.Process(target=time.sleep, args=(1000,))
        child.start()
        (tmp_path / "pid").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError, match=r"^rank 0: died .*SIGKILL"):
        launch(die, 1, timeout=LIMIT)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not alive(pid), "the child of the rank is left")


def test_a_rank_cannot_launch():
    def nested(rank, world_size):
        return launch(print, 2)

    def nested_in_a_pool(rank, world_size):
        with multiprocessing.Pool(1) as pool:
            return pool.apply(launch, (print, 2))

    for function in (nested, nested_in_a_pool):
        with pytest.raises(RankError, match="launch was called from a rank"):
            launch(function, 1)


# Output.


def test_lines_come_whole_labelled_and_in_order(capsys):
    def print_in_pieces(rank, world_size):
        dist.barrier()
        for number in range(100):
            print(f"line {number}", end=" ")
            sys.stdout.write("of rank ")
            print(rank, flush=True)
        print("two\nlines")
        print("to stderr", file=sys.stderr)
        print("the end, unfinished", end="")

    launch(print_in_pieces, 3)
    captured = capsys.readouterr()
    for rank in range(3):
        label = f"[rank {rank}] "
        mine = [line for line in captured.out.splitlines() if line.startswith(label)]
        expected = [f"line {number} of rank {rank}" for number in range(100)]
        expected += ["two", "lines", "the end, unfinished"]
        assert mine == [label + line for line in expected]
    assert len(captured.out.splitlines()) == 3 * 103
    assert sorted(captured.err.splitlines()) == [f"[rank {r}] to stderr" for r in range(3)]


def test_lines_of_threads_do_not_mix(capsys):
    def threads_print(rank, world_size):
        def write(name):
            for _ in range(50):
                for piece in (name, name, name, "\n"):
                    sys.stdout.write(piece)
                    time.sleep(0)

        threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    launch(threads_print, 1)
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted([f"[rank 0] {3 * name}" for name in "abc"] * 50)


def test_each_write_of_the_caller_is_made_of_whole_lines(monkeypatch):
    pieces = []
    monkeypatch.setattr(sys.stdout, "write", lambda text: pieces.append(text))
    launch(lambda rank, world_size: print("some", "words"), 2)
    assert sorted(pieces) == ["[rank 0] some words\n", "[rank 1] some words\n"]


# Nothing is left behind.


def test_nothing_accumulates_in_the_caller():
    def fail_at(rank, world_size, failing):
        if rank == failing:
            raise ValueError

    open_files = psutil.Process().num_fds
    launch(fail_at, 2, None)
    folder, before = launcher.get_temp_dir(), open_files()
    for failing in (None, 0, 1):
        with contextlib.suppress(RankError):
            launch(fail_at, 2, failing)
    assert open_files() == before
    assert not [name for name in os.listdir(folder) if name.startswith("store")]
    assert not multiprocessing.active_children()


def test_temporary_files_of_a_rank_are_where_the_callers_are():
    found = launch(lambda rank, world_size: tempfile.gettempdir(), 2)
    assert found == [tempfile.gettempdir()] * 2


STRICT = ["-W", "error"]
if torch.__version__.startswith("2.6."):  # its compiler leaves a folder to be removed at the end
    STRICT += ["-W", "ignore:Implicitly cleaning up:ResourceWarning"]


@contextlib.contextmanager
def script(source, *, how="file", **variables):
    """Run a script in a session and with a temporary directory of its own; yield both."""
    with tempfile.TemporaryDirectory(prefix="d2l-") as folder:
        main, scratch = os.path.join(folder, "main.py"), os.path.join(folder, "t")
        os.mkdir(scratch)
        with open(main, "w+") as file:
            file.write(textwrap.dedent(source))
            file.seek(0)
            process = subprocess.Popen(
                [sys.executable, *STRICT, "-" if how == "stdin" else main],
                stdin=file if how == "stdin" else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "TMPDIR": scratch, **variables},
                text=True,
                start_new_session=True,
            )
        try:
            yield process, scratch
        finally:
            for other in session(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
            process.communicate()


def session(leader):
    """The processes of a session that are still running."""
    pids = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader and alive(pid):
                pids.append(pid)
    return pids


def shared_memory_of(pids):
    """The files in shared memory that these processes have mapped.

    None on macOS: files that are mapped there lie in the temporary directory.
    """
    names = set()
    if not hasattr(psutil.Process, "memory_maps"):
        return names
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            names |= {m.path for m in psutil.Process(pid).memory_maps() if "/dev/shm/" in m.path}
    return names


HANG = """
    import os, signal, sys, threading, time
    from d2lpar.ranks.launcher import launch

    # A background job of a shell script ignores SIGINT, and what it starts inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def hang(rank, world_size):
        print("pid", os.getpid())
        time.sleep(1000)
"""


def ranks_of(process, number):
    """Wait until that many ranks have printed their process ids, and return these."""
    pids = []
    while len(pids) < number:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        pids += [int(pid) for pid in re.findall(r"^\[rank \d\] pid (\d+)$", line)]
    return pids


@pytest.mark.parametrize("deadly", [signal.SIGKILL, signal.SIGTERM])
def test_killing_the_caller_leaves_nothing(deadly):
    with script(HANG + "\n    launch(hang, 3, timeout=1000)") as (process, scratch):
        ranks = ranks_of(process, 3)
        shared = shared_memory_of(session(process.pid))
        assert all(map(alive, ranks)) and os.listdir(scratch)
        process.send_signal(deadly)
        wait_until(lambda: not session(process.pid), "processes are left")
        wait_until(lambda: not os.listdir(scratch), "files are left")
        assert not [name for name in shared if os.path.exists(name)]


def test_interrupting_leaves_nothing_and_the_next_launch_works():
    source = """
    def interrupt(seconds):  # as Control-C does: the whole process group
        timer = threading.Timer(seconds, os.killpg, (0, signal.SIGINT))
        timer.start()
        return timer

    for seconds in (0.3, 0.0, 0.005, 0.01, 0.02):  # the first while the server still imports
        try:
            interrupt(seconds)
            launch(hang, 3, timeout=1000)
        except KeyboardInterrupt:
            assert launch(lambda rank, world_size: rank, 2) == [0, 1]
            print("interrupted", flush=True)
    try:
        launch(hang, 3, timeout=1000)
    except KeyboardInterrupt:
        print("left", os.listdir(os.environ["TMPDIR"]), flush=True)
        time.sleep(1000)
    """
    with script(HANG + source) as (process, scratch):
        for _ in range(5):
            while "interrupted" not in (line := process.stdout.readline()):
                assert line, process.stderr.read()
        ranks = ranks_of(process, 3)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline().startswith("left ['pymp-")
        assert not any(map(alive, ranks))
        assert "store" not in str(list(os.walk(scratch)))
        names = [" ".join(psutil.Process(pid).cmdline()) for pid in session(process.pid)]
        assert len(names) == 3, names  # the script, the fork server and the resource tracker
        process.kill()
        wait_until(lambda: not session(process.pid), "processes are left")
        assert process.stderr.read() == ""


@pytest.mark.parametrize("method", [None, "spawn"])
def test_no_semaphore_of_a_rank_is_left(method):
    """Those of a progress bar, for instance, which makes a lock for processes."""

    def make_lock(rank, world_size):
        make_lock.kept = multiprocessing.get_context(method).Lock()
        return make_lock.kept._semlock.name

    for name in launch(make_lock, 2):  # None: it has no name any more
        assert not (name and os.path.exists(f"/dev/shm/sem.{name[1:]}"))


@pytest.mark.parametrize("moment", ["a semaphore is made", "all is made"])
def test_an_interrupt_while_the_lanes_are_made_leaves_nothing(moment, monkeypatch):
    made = []

    def register(name, kind):  # the semaphore is there, and nobody yet feels responsible for it
        made.append(f"/dev/shm/sem.{name[1:]}")
        if moment == "a semaphore is made" and len(made) == 3:
            signal.raise_signal(signal.SIGINT)
        real_register(name, kind)

    def create(*args):
        memory = real_create(*args)
        made.append(memory.path)
        if moment == "all is made":
            signal.raise_signal(signal.SIGINT)
        return memory

    real_register, real_create = multiprocessing.resource_tracker.register, SharedMemory.create
    monkeypatch.setattr(multiprocessing.resource_tracker, "register", register)
    monkeypatch.setattr(SharedMemory, "create", create)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(rank_and_size, 2)
    finally:
        signal.signal(signal.SIGINT, handler)
    gc.collect()  # the traceback held them
    assert len(made) > 3 and not [name for name in made if os.path.exists(name)]


# Scripts, standard input, notebooks.


@pytest.mark.parametrize("how", ["guarded file", "unguarded file", "stdin"])
def test_scripts_run_their_top_level_once(how):
    guard = 'if __name__ == "__main__":' if how == "guarded file" else "if True:"
    source = f"""
    import os, threading
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

    {guard}
        print(launch(f, 2, Point(1)) == [Point(10), Point(20)])
        print([type(point) is Point for point in launch(f, 2, Point(1))])
        try:
            launch(f, 2, None)
        except RankError as error:
            print(error)
        threads = [threading.Thread(target=launch, args=(f, k, Point(1))) for k in (1, 3, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    """
    with script(source, how=how.split()[-1]) as (process, scratch):
        out, err = process.communicate(timeout=LIMIT)
        assert (process.returncode, err) == (0, "")
        lines = out.splitlines()
        assert "True" in lines and "[True, True]" in lines
        assert lines.count("[rank 1] hello") >= 2 + 2 and lines.count("[rank 4] hello") == 1
        assert ", in f" in out and "ValueError: nothing" in out
        assert how == "stdin" or 'raise ValueError("nothing")' in out
        with open(os.path.join(scratch, "runs")) as file:
            assert file.read() == "once\n"
        assert os.listdir(scratch) == ["runs"]


CELLS = [
    """
    import os, sys, time
    import torch, torch.distributed as dist
    from d2lpar.ranks.launcher import RankError, launch
    _ = torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # threads of OpenMP, after which fork hangs
    """,
    """
    def add_up(rank, world_size):
        tensor = torch.tensor([rank + 1])
        dist.all_reduce(tensor)
        print("hello from a cell")
        return tensor.item()

    launch(add_up, 2)
    """,
    """
    def step(rank, world_size):
        if rank == 1:
            raise ValueError("no good")  # in a cell
        dist.barrier()

    try:
        launch(step, 2)
    except RankError as error:
        print(error)
    """,
    """
    def stuck(rank, world_size):
        print("pid", os.getpid())
        time.sleep(1000)  # stuck in a cell

    try:
        launch(stuck, 2, timeout=0.5)
    except RankError as error:
        print(error)
    """,
]


def check_cells(outputs):
    """Compare the text that each of CELLS has put out."""
    assert outputs[0] == ""
    assert outputs[1].count("hello from a cell\n") == 2 and outputs[1].endswith("[3, 3]")
    assert "[rank 0] hello" in outputs[1] and "[rank 1] hello" in outputs[1]
    assert outputs[2].startswith("rank 1: ValueError: no good\n")
    assert 'File "<cell>", line 3, in step\n' in outputs[2]
    assert 'raise ValueError("no good")  # in a cell\n' in outputs[2]
    assert "rank 0, rank 1 did not finish within 0.5 s" in outputs[3]
    assert outputs[3].count('File "<cell>", line 3, in stuck\n') == 2
    assert outputs[3].count("time.sleep(1000)  # stuck in a cell\n") == 2
    assert not any("ipykernel" in output for output in outputs)


def text_of(outputs):
    return "".join(o.get("text") or o["data"]["text/plain"] for o in outputs)


def test_cells_under_nbconvert(tmp_path):
    import nbformat  # here, not above: a rank that imports this file need not load it

    cells = [nbformat.v4.new_code_cell(textwrap.dedent(cell).strip()) for cell in CELLS]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "in.ipynb")
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "in.ipynb"]
    subprocess.run(
        [*command, "--output", "out.ipynb"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=LIMIT,
    )
    executed = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    check_cells([text_of(cell.outputs) for cell in executed.cells])


class Lab:
    """A JupyterLab server on loopback, and one kernel of it, used as the browser uses them."""

    def __init__(self, folder):
        self.folder, self.channels = folder, None
        self.token = uuid.uuid4().hex
        self.scratch = tempfile.TemporaryDirectory(prefix="d2l-")  # its kernel will be killed
        variables = {name: str(folder) for name in ("HOME", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
        variables["TMPDIR"] = self.scratch.name
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
        command += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", "--ServerApp.port_retries=0"]
        self.server = subprocess.Popen(
            [*command, f"--IdentityProvider.token={self.token}"],
            cwd=folder,
            env={**os.environ, **variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def open(self):
        import websocket

        wait_until(self.find_server, "the server has not written where it listens")
        wait_until(self.answers, "the server does not answer")
        self.kernel = "/api/kernels/" + self.ask("/api/kernels", b"{}")["id"]
        url = f"ws{self.url[4:]}{self.kernel}/channels?token={self.token}"
        self.channels = websocket.create_connection(url, timeout=LIMIT)

    def find_server(self):
        for path in self.folder.glob("jpserver-*.json"):
            with contextlib.suppress(ValueError):  # half written
                self.url = "http://127.0.0.1:" + str(json.loads(path.read_text())["port"])
                return True
        return False

    def answers(self):
        with contextlib.suppress(OSError):
            return bool(self.ask("/api"))
        return False

    def ask(self, path, data=None, method=None):
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=LIMIT) as reply:
            return json.loads(reply.read() or b"null")

    def begin(self, source):
        """Send a cell to the kernel; return the identity of the request."""
        header = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "version": "5.3"}
        header |= {"session": "test", "username": "test"}
        content = {"code": textwrap.dedent(source).strip(), "silent": False, "stop_on_error": False}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content}
        self.channels.send(json.dumps({**message, "channel": "shell", "buffers": []}))
        return header["msg_id"]

    def outputs(self, request):
        """The outputs of a cell, one after the other, until the kernel is idle again."""
        while True:
            message = json.loads(self.channels.recv())
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] in ("stream", "execute_result", "error"):
                yield message["content"]
            elif message["content"].get("execution_state") == "idle":
                return

    def close(self):
        if self.channels:
            self.channels.close()
        for pid in [self.server.pid, *self.kernel_processes()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.server.wait()
        self.scratch.cleanup()

    def kernel_processes(self):
        with contextlib.suppress(psutil.NoSuchProcess):
            return [p.pid for p in psutil.Process(self.server.pid).children(recursive=True)]
        return []


def test_cells_in_jupyterlab_and_an_interrupted_one(tmp_path):
    lab = Lab(tmp_path)
    try:
        lab.open()
        check_cells([text_of(list(lab.outputs(lab.begin(cell)))) for cell in CELLS])

        pids, errors = [], []
        for output in lab.outputs(lab.begin("launch(stuck, 2, timeout=1000)")):
            pids += map(int, re.findall(r"pid (\d+)", output.get("text", "")))
            errors += [output["ename"]] if "ename" in output else []
            if len(pids) == 2 and not errors:
                assert all(map(alive, pids))
                lab.ask(lab.kernel + "/interrupt", b"")
        assert errors == ["KeyboardInterrupt"]
        assert not any(map(alive, pids))
        assert text_of(list(lab.outputs(lab.begin("launch(add_up, 2)")))).endswith("[3, 3]")

        for output in lab.outputs(lab.begin("launch(stuck, 2, timeout=1000)")):
            if "pid" in output["text"]:
                break
        processes = lab.kernel_processes()
        assert len(processes) >= 4  # the kernel, its fork server, two ranks
        lab.ask(lab.kernel, method="DELETE")  # "Shut Down Kernel"
        wait_until(lambda: not any(map(alive, processes)), "processes of the kernel are left")
    finally:
        lab.close()


def test_ranks_draw_different_numbers_and_the_same_in_every_run():
    def draw(rank, world_size):
        return torch.rand(1).item()

    first = launch(draw, 3)
    assert len(set(first)) == 3
    assert launch(draw, 3) == first


def test_what_a_rank_has_started_ends_with_it():
    def start_and_fork(rank, world_size):
        sleeper = subprocess.Popen(["sleep", "300"])
        return sleeper.pid, os.fork()

    for pids in launch(start_and_fork, 2):
        for pid in pids:
            wait_until(lambda pid=pid: not alive(pid), "the end of a rank's child")


def test_a_folder_with_files_named_as_modules_does_not_disturb(tmp_path):
    for name in ("random.py", "queue.py", "d2lpar.py"):
        (tmp_path / name).write_text("raise RuntimeError('imported by accident')\n")
    script = tmp_path / "scripts" / "script.py"
    script.parent.mkdir()
    script.write_text(
        "from d2lpar import launch\nprint(launch(lambda rank, world_size: rank, 2))\n"
    )
    ran = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT
    )
    assert ran.stdout == "[0, 1]\n", ran.stderr


def test_a_result_that_cannot_be_read_back_names_its_rank():
    def two_arguments(rank, world_size):
        class Two(Exception):
            def __init__(self, a, b):
                super().__init__(a)

        return Two(1, 2) if rank else None

    with pytest.raises(RankError, match="rank 1: its result cannot be read back: TypeError"):
        launch(two_arguments, 2)


def test_what_the_callers_stdout_cannot_encode_is_escaped():
    code = "from d2lpar import launch\nlaunch(lambda r, k: print('a \\u2192 b'), 1)"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert ran.stdout == "[rank 0] a \\u2192 b\n", ran.stderr


@pytest.mark.parametrize(
    "error",
    [ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), EOFError("unexpected EOF")],
    ids=["before it was asked", "before it answered"],
)
def test_server_that_has_just_ended_is_named(error):
    words = "has just ended; call launch again"
    with pytest.raises(RuntimeError, match=words), launcher._named_causes():
        raise error
