"""A checkpoint comes back bit for bit or not at all; no kill or error loses the old."""

import errno
import math
import os
import re
import stat
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch

from d2lpar.checkpoint import (
    CheckpointError,
    load_checkpoint,
    remove_unfinished,
    save_checkpoint,
)

DTYPES = [torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES += [
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
]
SMALL = {"w": torch.tensor([1.0, math.nan]), "n": torch.tensor(7, dtype=torch.uint8)}
INFO = {"step": 3}


def raw(tensor):
    """Dtype, shape and bytes: equal only where every bit is, in NaNs too."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tensor.shape, bytes(data.tolist())


def same(tensors, others):
    return {n: raw(t) for n, t in tensors.items()} == {
        n: raw(t) for n, t in others.items()
    }


def checks_out(path, tensors, info):
    loaded, loaded_info = load_checkpoint(path)
    return same(loaded, tensors) and loaded_info == info


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def path(tmp_path):
    """The path of a small checkpoint."""
    save_checkpoint(tmp_path / "x", SMALL, INFO)
    return tmp_path / "x"


def test_tensors_of_any_dtype_shape_and_bits_come_back_and_so_does_information(
    tmp_path,
):
    tensors = {'"é\\': torch.zeros(3, 0), "": torch.tensor(True)}
    for dtype in DTYPES:
        # NaNs too
        bits = torch.randint(2 if dtype == torch.bool else 256, (6 * dtype.itemsize,))
        for shape in ((6,), (2, 3), (1, 6, 1)):
            tensors[f"{dtype} {shape}"] = bits.byte().view(dtype).reshape(shape)
        tensors[f"{dtype}"] = bits.byte().view(dtype)[0]
    info = {
        "list": [1, 1.0, -0.0, 1e-300, True, None, 10**30],
        "é\0": {"": "\u2028", "{": {}},
    }
    save_checkpoint(tmp_path / "x", tensors, info)
    assert checks_out(tmp_path / "x", tensors, info)
    # and not 1 for True, 1.0 or -0.0
    assert repr(load_checkpoint(tmp_path / "x")[1]) == repr(info)
    # as any other reader sees it
    assert same(safetensors.torch.load_file(tmp_path / "x"), tensors)


def test_what_safetensors_itself_refuses_is_saved(tmp_path):
    base = torch.arange(24.0).reshape(2, 3, 4)
    parameter = torch.nn.Parameter(base.clone())
    tensors = {"transposed": base.mT, "expanded": torch.tensor([1.0, 2.0]).expand(3, 2)}
    tensors |= {"parameter": parameter, "tied": parameter, "part of another": base[0]}
    tensors["channels last"] = torch.rand(2, 3, 4, 5).to(
        memory_format=torch.channels_last
    )
    save_checkpoint(tmp_path / "x", tensors)
    loaded, _ = load_checkpoint(tmp_path / "x")
    assert same(loaded, tensors)
    assert (
        not any(tensor.requires_grad for tensor in loaded.values())
        and parameter.requires_grad
    )
    loaded["tied"].zero_()
    assert torch.equal(loaded["parameter"], parameter)  # its own memory, and writable
    assert load_checkpoint(tmp_path / "x", device="meta")[0]["tied"].is_meta


def test_the_same_gives_the_same_file_and_nothing_is_pickled(path, monkeypatch):
    before = path.read_bytes()
    for module in ("pickle", "_pickle", "torch.serialization"):
        monkeypatch.setitem(sys.modules, module, None)
    save_checkpoint(str(path), dict(reversed(SMALL.items())), INFO)
    assert path.read_bytes() == before and checks_out(path, SMALL, INFO)


@pytest.mark.gpu
def test_a_checkpoint_moves_between_cpu_and_gpu(tmp_path):
    tensors = {
        "w": torch.rand(5, 3, device="cuda").T,
        "n": torch.tensor(3, device="cuda"),
    }
    save_checkpoint(tmp_path / "x", tensors)
    on_gpu, _ = load_checkpoint(tmp_path / "x", device="cuda")
    assert same(on_gpu, tensors) and all(tensor.is_cuda for tensor in on_gpu.values())


JSON = "would not come back from JSON"


@pytest.mark.parametrize(
    ("tensors", "info", "kind", "words"),
    [
        (
            {"state": {"w": torch.ones(1)}},
            None,
            TypeError,
            "tensors['state'] must be a tensor",
        ),
        (
            {"w": torch.ones(1, dtype=torch.complex64)},
            None,
            ValueError,
            "torch.complex64",
        ),
        ({"w": torch.eye(2).to_sparse()}, None, ValueError, "torch.sparse_coo"),
        ({"__metadata__": torch.ones(1)}, None, ValueError, 'the name "__metadata__"'),
        ({}, {"bad": math.nan}, ValueError, "not JSON compliant"),
        ({}, {"bad": (1, 2)}, ValueError, JSON),
        ({}, {"bad": {1: 2}}, ValueError, JSON),
        ({}, {"bad": torch.tensor(1)}, TypeError, "Tensor is not JSON serializable"),
    ],
)
def test_what_cannot_be_saved_is_named(path, tensors, info, kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        save_checkpoint(path, tensors, info)
    assert checks_out(path, SMALL, INFO) and names(path.parent) == ["x"]


def test_a_place_that_is_no_file_is_named(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    os.mkfifo("pipe")  # reading it would wait for a writer
    os.symlink("/dev/zero", "zero")  # this would never end
    no_file, device = "it is a folder, a pipe or a device", "it is a folder or a device"
    loads = {"./nothing": "No such file", "x/y": "Not a directory"}
    for name, words in (loads | dict.fromkeys((".", "pipe", "zero"), no_file)).items():
        with pytest.raises(
            CheckpointError, match="Give the name of a checkpoint"
        ) as error:
            load_checkpoint(name)
        assert str(error.value).startswith(f"{name}: it cannot be read ({words}")
    saves = {"no/x": "No such file or directory", "x" * 256: "File name too long"}
    for name, words in (
        saves | dict.fromkeys((".", "pipe", "/dev/null"), device)
    ).items():
        with pytest.raises(CheckpointError) as error:
            save_checkpoint(name, SMALL)
        assert str(error.value).startswith(f"{name}: it cannot be saved ({words}")
    assert stat.S_ISFIFO(os.stat("pipe").st_mode) and names(path.parent) == [
        "pipe",
        "x",
        "zero",
    ]
    save_checkpoint("y" * 255, SMALL, INFO)
    assert checks_out("y" * 255, SMALL, INFO)


def test_a_symbolic_link_is_followed_and_others_may_read_the_file(path):
    (path.parent / "latest").symlink_to("x")
    save_checkpoint(path.parent / "latest", {}, {"step": 4})
    assert (path.parent / "latest").is_symlink() and checks_out(path, {}, {"step": 4})
    (path.parent / "plain").touch()
    assert path.stat().st_mode == (path.parent / "plain").stat().st_mode


def refused(path, content):
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"^{path}: .*damaged.*older checkpoint"):
        load_checkpoint(path)


def test_every_flipped_bit_is_found(path):
    content = path.read_bytes()
    for i in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[i // 8] ^= 1 << i % 8
        refused(path, flipped)


def test_what_is_cut_short_goes_on_or_is_another_file_is_refused(path):
    content = path.read_bytes()
    for other in (
        *(content[:length] for length in range(len(content))),
        content + b"\0",
    ):
        refused(path, other)
    refused(path, safetensors.torch.save(SMALL, {"checkpoint": "0" * 64 + " {}"}))
    refused(path, safetensors.torch.save(SMALL))


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()]
)
def test_a_save_that_fails_midway_changes_nothing(path, monkeypatch, failing, error):
    words = (
        f"^{path}: it cannot be saved .No space left"
        if isinstance(error, OSError)
        else "^$"
    )
    with monkeypatch.context() as patch, pytest.raises(BaseException, match=words):
        patch.setattr(os, failing, Mock(side_effect=error))
        save_checkpoint(path, {"w": torch.ones(9)}, {"step": 4})
    assert checks_out(path, SMALL, INFO) and names(path.parent) == ["x"]


def test_what_killed_saves_have_left_is_deleted_and_nothing_else(path, monkeypatch):
    folder, link = path.parent, path.parent / "latest"
    link.symlink_to("x")
    # longer than what is kept of names
    others = [folder / ("long" * 50 + str(i)) for i in (1, 2)]
    with monkeypatch.context() as patch:  # nothing is renamed, and nothing is deleted
        for where, name in ((os, "replace"), (Path, "unlink")):
            patch.setattr(where, name, Mock(side_effect=OSError))
        for target in (path, path, *others):
            with pytest.raises(CheckpointError):
                save_checkpoint(target, {})
    kept = {
        "x",
        "latest",
        "x.tmp",
        "x.y.tmp",
        f"x.{'0' * 31}.tmp",
        f"xx.{'0' * 32}.tmp",
    }
    for name in kept - {"x", "latest"}:
        (folder / name).touch()
    left = set(names(folder)) - kept
    assert len(left) == 4 and all(
        re.fullmatch(r".*\.[0-9a-f]{32}\.tmp", name) for name in left
    )
    remove_unfinished(link)
    assert set(names(folder)) == kept | (
        left := {name for name in left if name[0] == "l"}
    )
    remove_unfinished(others[0])
    assert len(set(names(folder)) & left) == 1
    remove_unfinished(others[1])
    assert set(names(folder)) == kept and checks_out(path, SMALL, INFO)


def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_the_return(
    path, monkeypatch
):
    calls = []

    def record(name, do):
        def recorded(place, *args):
            calls.append((name, os.stat(place).st_ino, os.stat(place).st_size))
            do(place, *args)

        monkeypatch.setattr(os, name, recorded)

    record("fsync", os.fsync)
    record("replace", os.replace)
    save_checkpoint(path, SMALL, {"step": 4})
    new, folder = ((p.stat().st_ino, p.stat().st_size) for p in (path, path.parent))
    # of the whole file
    assert calls == [("fsync", *new), ("replace", *new), ("fsync", *folder)]


SAVER = """
    import os, random, signal, sys, time
    import torch
    from d2lpar.checkpoint import load_checkpoint, save_checkpoint

    path, size, random = sys.argv[1], 500_000, random.Random(0)
    torch.set_num_threads(1)

    def save(step):
        a, b = torch.full((size,), step), torch.full((size + step,), float(step))
        tensors = {"a": a, "b": b}
        save_checkpoint(path, tensors, {"step": step})

    save(0)
    step = total = 0
    for _ in range(6):
        told, tell = os.pipe()
        if (child := os.fork()) == 0:
            os.close(told)  # then a child whose parent is gone cannot go on
            for step in range(step + 1, 10**6):
                save(step)
                os.write(tell, b".")  # one for each save that has returned
        os.close(tell)
        returned = len(os.read(told, 1))  # however slow the disk is, one save is done
        time.sleep(random.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it ended by itself"
        returned += len(os.read(told, 10**6))
        os.close(told)
        tensors, info = load_checkpoint(path)
        last, step = step + returned, info["step"]
        assert set(tensors) == {"a", "b"} and len(tensors["b"]) == size + step
        assert all((tensor == step).all() for tensor in tensors.values()), "mixed"
        assert step in (last, last + 1), f"{step} is there after {last} was saved"
        total += returned
    print(total)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    program = [sys.executable, "-c", textwrap.dedent(SAVER), str(tmp_path / "x")]
    result = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    # in each run a save was done, and the next one under way
    assert int(result.stdout) >= 6


def test_of_saves_at_the_same_time_one_wins_and_a_reader_sees_only_whole_ones(tmp_path):
    path, size = tmp_path / "x", 100_000

    def save(writer):
        for step in range(writer, 20, 2):
            save_checkpoint(
                path, {"w": torch.full((size + step,), step)}, {"step": step}
            )

    save(18)
    with ThreadPoolExecutor(2) as threads:
        writers = [threads.submit(save, writer) for writer in (0, 1)]
        running = True
        while running:
            running = any(writer.running() for writer in writers)
            tensors, info = load_checkpoint(path)
            step = info["step"]
            assert torch.equal(tensors["w"], torch.full((size + step,), step))
    assert [writer.result() for writer in writers] == [None, None] and names(
        tmp_path
    ) == ["x"]
    assert step in (18, 19)  # the last of one of the two
