"""A process that torchrun starts finds its place, and its attempt's other ranks."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from helpers import TORCHRUN

from d2lpar.ranks._old import is_alone, meet, place


def test_a_process_finds_its_place():
    assert place(TORCHRUN) == (3, 1, 4, 2) and not is_alone(TORCHRUN)
    assert place({"PATH": "/bin"}) == (0, 0, 1, 1) and is_alone({"PATH": "/bin"})


def test_place_names_what_is_missing_and_contradictions():
    for changes, words in (
        (
            {"RANK": "", "MASTER_ADDR": ""},
            "not set: RANK, MASTER_ADDR; torchrun sets all of them",
        ),
        (
            {"RANK": "4"},
            "contradict each other: RANK=4, LOCAL_RANK=1, WORLD_SIZE=4, LOCAL_WORLD",
        ),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5"),
        ({"RANK": "0"}, "RANK=0, LOCAL_RANK=1"),
    ):
        with pytest.raises(ValueError, match=words):
            place({**TORCHRUN, **changes})


def test_ranks_meet_where_no_earlier_attempt_has_been():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))

    def attempt(address, late):
        def rank(i):
            time.sleep(0.1 * (i == late))
            part = meet(store, i, 3, 20)
            if i == 0:
                part.set("address", address)
            return part.get("address").decode()

        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(rank, range(3)))

    # who finds what the others, and the attempts before, have left
    for late in range(3):
        assert attempt(f"of attempt {late}", late) == [f"of attempt {late}"] * 3
    with pytest.raises(TimeoutError, match=r"^ranks 1, 2 did not come within 0\.1 s$"):
        meet(store, 0, 3, 0.1)
    with ThreadPoolExecutor(1) as threads:  # one that has asked, and died
        store.set_timeout(timedelta(seconds=0.1))
        with pytest.raises(RuntimeError, match="imeout"):
            threads.submit(meet, store, 1, 3, 20).result()
    store.set_timeout(timedelta(seconds=20))
    assert attempt("of the last", late=1) == ["of the last"] * 3
