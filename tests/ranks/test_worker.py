"""What a rank does besides its function: what it prints comes in whole lines."""

import sys
import threading
import time
from types import SimpleNamespace

from d2lpar import launch


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
