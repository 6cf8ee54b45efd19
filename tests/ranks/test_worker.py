"""What a rank prints comes in whole lines; its parent kills whatever is left."""

import multiprocessing
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

from d2lpar import launch
from d2lpar.ranks import worker


def test_lines_come_whole_labelled_and_in_order(monkeypatch, capsys):
    def write(name):
        for _ in range(50):
            sys.stdout.write(f"{name}\n{name}\n")
            time.sleep(0)

    def print_in_pieces(rank, world_size):
        threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in range(100):
            print(f"line {number}", end=" ")
            print("of rank", rank, flush=True)
        print("to stderr", file=sys.stderr)
        print("two\nlines, the last unfinished", end="")

    written = []
    with monkeypatch.context() as patched:  # print asks for no more
        stream = SimpleNamespace(write=written.append, flush=lambda: None)
        patched.setattr(sys, "stdout", stream)
        launch(print_in_pieces, 3)
    # so lines of others cannot come between
    assert all(text.endswith("\n") for text in written)
    lines = "".join(written).splitlines()
    for rank in range(3):
        label = f"[rank {rank}] "
        mine = [line.removeprefix(label) for line in lines if line.startswith(label)]
        assert mine.count("a") == mine.count("b") == 100
        expected = [f"line {number} of rank {rank}" for number in range(100)]
        expected += ["two", "lines, the last unfinished"]
        assert [line for line in mine if line not in ("a", "b")] == expected
    assert len(lines) == 3 * 302
    errors = capsys.readouterr().err.splitlines()
    assert sorted(errors) == [f"[rank {r}] to stderr" for r in (0, 1, 2)]


def test_one_that_has_just_ended_does_not_save_the_others():
    gone, left = (subprocess.Popen(["sleep", n]) for n in ("0", "100"))
    assert gone.wait() == 0
    ours, caller = multiprocessing.Pipe()
    with ours:
        caller.close()
        worker._kill({left.pid: 0, gone.pid: 1}, ours, 10.0)
    assert left.wait(timeout=50) < 0
