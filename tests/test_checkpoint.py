"""A checkpoint comes back bit for bit or not at all; no kill or error loses the old."""

import os
import pickle
import signal
from collections import defaultdict
from functools import partial
from itertools import count

import pytest
import safetensors.torch
import torch
from helpers import LIMIT, randn
from torch import nn

from d2lpar import RankError, checkpoint, launch, load_checkpoint, save_checkpoint
from d2lpar.checkpoint import CheckpointError

SMALL = {"w": torch.tensor([1.0, torch.nan]), "step": 3}


def raw(state):  # all as text: the structure, and the bytes of each tensor
    def bits(tensor):
        return tensor.dtype, tensor.shape, tensor.ravel().view(torch.uint8).tolist()

    return repr(torch.utils._pytree.tree_map_only(torch.Tensor, bits, state))


def step(state=None):  # a new model and its Adam take it from there
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight  # tied
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.5, 0.9))
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    model(randn(5, 4, dtype=torch.float32)).pow(2).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def test_all_that_a_run_needs_comes_back_bit_for_bit(tmp_path, monkeypatch):
    path, bits = str(tmp_path / "x"), torch.randint(256, (48,)).byte()
    state, X = step() | {"generator": torch.get_rng_state()}, randn(2, 3, 4)
    state["views"] = [X.mT, X[0, :, 1], X[:1].expand(3, 3, 4), X > 0]
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64):
        state[str(dtype)] = bits.view(dtype), bits.view(dtype)[0], torch.zeros(0, 2)
    state["others"] = [1, 1.0, -0.0, 1e-300, 10**30, True, None, torch.nan, "é\0\u2028"]
    state[7] = {None: (), "": {}, "deep": [[("a", {1: 2.5})]]}
    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.delattr(pickle, name)  # nothing is pickled
    save_checkpoint(path, state)
    assert raw(loaded := load_checkpoint(path)) == raw(state)
    assert raw(step(loaded)) == raw(step(state))


def test_no_code_is_imported_from_a_file(tmp_path, monkeypatch):
    state = {"a": defaultdict(os.abort, {"b": 1})}  # which state["a"]["c"] would call
    with pytest.raises(TypeError, match=r"cannot hold a .*defaultdict"):
        save_checkpoint(path := tmp_path / "x", state)
    with monkeypatch.context() as patch:
        patch.setattr(
            checkpoint, "KINDS", [*checkpoint.KINDS, "collections.defaultdict"]
        )
        save_checkpoint(path, state)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_checkpoint(path)


def test_whatever_is_no_whole_checkpoint_is_refused(tmp_path):
    save_checkpoint(path := tmp_path / "x", SMALL)
    number = int.from_bytes(content := path.read_bytes())
    files = [(number ^ 1 << i).to_bytes(len(content)) for i in range(8 * len(content))]
    files += [content[:length] for length in range(len(content))]  # 0: an empty one
    torch.save(tensors := {"0": SMALL["w"]}, path)
    files += content + b"\0", path.read_bytes(), safetensors.torch.save(tensors)
    for other in files:
        path.write_bytes(other)
        with pytest.raises(CheckpointError, match=f"^{path}: it is no checkpoint of "):
            load_checkpoint(path)
    path.write_bytes(number.to_bytes(len(content)))  # a control
    assert raw(load_checkpoint(path)) == raw(SMALL)
    with pytest.raises(FileNotFoundError, match="nothing"):
        load_checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize("failing", ["json", "fsync", "replace"])
def test_a_save_that_fails_leaves_the_old_one(tmp_path, monkeypatch, failing):
    save_checkpoint(path := tmp_path / "x", SMALL)
    with monkeypatch.context() as patch, pytest.raises((ZeroDivisionError, TypeError)):
        patch.setattr(os, failing, lambda *args: 1 / 0, raising=False)
        save_checkpoint(path, {"w": torch.ones(9), "a set": failing == "json" and {1}})
    assert raw(load_checkpoint(path)) == raw(SMALL)
    save_checkpoint(path, {"step": 4})  # what is left there is in nobody's way
    assert load_checkpoint(path) == {"step": 4} and os.listdir(tmp_path) == ["x"]


def test_the_content_reaches_the_disk_before_the_name(tmp_path, monkeypatch):
    calls, path = [], tmp_path / "x"

    def record(name, do, place, *args):
        calls.append((name, os.stat(place).st_ino, os.stat(place).st_size))
        do(place, *args)

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, partial(record, name, getattr(os, name)))
    save_checkpoint(path, SMALL)
    new, folder = ((p.stat().st_ino, p.stat().st_size) for p in (path, tmp_path))
    assert calls == [("fsync", *new), ("replace", *new), ("fsync", *folder)]


def saves_until_killed(rank, k, path, seconds):
    signal.setitimer(signal.ITIMER_REAL, seconds)  # the system kills, at any moment
    for step in count(load_checkpoint(path)["step"]):
        save_checkpoint(path, {"w": torch.full((500_000,), step), "step": step})


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    save_checkpoint(path := tmp_path / "x", {"w": torch.zeros(1), "step": 0})
    for kills in count(1):
        with pytest.raises(RankError, match="SIGALRM"):
            launch(saves_until_killed, 1, path, 0.02 * kills, timeout=LIMIT)
        state = load_checkpoint(path)
        assert (state["w"] == state["step"]).all()
        if kills >= 5 and state["step"] > 0 and len(os.listdir(tmp_path)) > 1:
            break  # one has come in the middle of a save
