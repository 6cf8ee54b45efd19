"""The thread that makes calls while its rank computes."""

import subprocess
import sys

import torch

from d2lpar.ranks import Sender


def test_a_process_that_ends_does_not_wait_for_its_calls():
    code = "import d2lpar, time; d2lpar.ranks.Sender().submit(time.sleep, 999)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_call_initialises_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "stream", None)  # even stream(None) would
    assert Sender().submit(max, 1, 2).result(9) == 2
