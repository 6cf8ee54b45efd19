"""What a rank does besides its function: it prints, and stays to the end."""

import multiprocessing
import os
import sys
import threading
import time
from itertools import chain

import psutil
import torch.distributed as dist

from d2lpar import ranks
from d2lpar.ranks.launcher import launch


def test_lines_come_whole_labelled_and_in_order(monkeypatch, capsys):
    def write(name):
        for _ in range(50):
            for piece in (name, name, name, "\n"):
                sys.stdout.write(piece)
                time.sleep(0)

    def print_in_pieces(rank, world_size):
        dist.barrier()
        threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for number in range(100):
            print(f"line {number}", end=" ")
            sys.stdout.write("of rank ")
            print(rank, flush=True)
        for thread in threads:
            thread.join()
        print("two\nlines")
        print("to stderr", file=sys.stderr)
        print("the end, unfinished", end="")

    writes = []
    with monkeypatch.context() as patched:
        patched.setattr(sys.stdout, "write", writes.append)
        launch(print_in_pieces, 3)
    # so lines of others cannot come between
    assert all(text.endswith("\n") for text in writes)
    lines = "".join(writes).splitlines()
    for rank in range(3):
        label = f"[rank {rank}] "
        mine = [line.removeprefix(label) for line in lines if line.startswith(label)]
        assert mine.count("aaa") == mine.count("bbb") == 50
        expected = [f"line {number} of rank {rank}" for number in range(100)]
        expected += ["two", "lines", "the end, unfinished"]
        assert [line for line in mine if line not in ("aaa", "bbb")] == expected
    assert len(lines) == 3 * 203
    errors = capsys.readouterr().err.splitlines()
    assert sorted(errors) == [f"[rank {r}] to stderr" for r in (0, 1, 2)]


def test_a_rank_stays_until_all_have_finished():
    def uneven(rank, world_size):
        first, *_ = ranks.all_gather_int(os.getpid())
        time.sleep(0.2 * rank)
        return psutil.Process(first).status() != psutil.STATUS_ZOMBIE

    assert launch(uneven, 2) == [True, True]


def test_no_semaphore_of_a_rank_is_left():
    def make_locks(rank, world_size):  # as a progress bar does
        methods = None, "spawn"
        make_locks.kept = [
            multiprocessing.get_context(method).Lock() for method in methods
        ]
        return [lock._semlock.name for lock in make_locks.kept]

    for name in chain(*launch(make_locks, 2)):  # None: it has no name any more
        assert not (name and os.path.exists(f"/dev/shm/sem.{name[1:]}"))
