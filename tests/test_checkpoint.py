"""A checkpoint comes back bit for bit or not at all, and no kill and no failure loses the old."""

import errno
import hashlib
import json
import math
import os
import stat
import subprocess
import sys
import textwrap
import threading

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from d2lpar import checkpoint
from d2lpar.checkpoint import CheckpointError, load_checkpoint, save_checkpoint

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
DTYPES = (torch.bool, *FLOATS, *SIGNED, *UNSIGNED)
SMALL = {"w": torch.tensor([1.0, math.nan]), "n": torch.tensor(7, dtype=torch.uint8)}
INFO = {"step": 3}


def raw(tensor):
    """Dtype, shape and bytes: equal only where every bit is, in NaNs too."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tensor.shape, bytes(data.tolist())


def same(tensors, others):
    return {n: raw(t) for n, t in tensors.items()} == {n: raw(t) for n, t in others.items()}


def checks_out(path, tensors, info):
    loaded, loaded_info = load_checkpoint(path)
    return same(loaded, tensors) and loaded_info == info


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def refused(path, *words):
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path)
    text = str(error.value)
    assert text.startswith(f"{path}: "), text
    assert all(word in text for word in words), text
    return text


@pytest.fixture
def path(tmp_path):
    """The path of a small checkpoint."""
    save_checkpoint(tmp_path / "x", SMALL, INFO)
    return tmp_path / "x"


# What is saved comes back.


@given(data=st.data(), dtype=st.sampled_from(DTYPES), shape=st.lists(st.integers(0, 4), max_size=3))
def test_tensors_of_any_dtype_shape_and_bits_come_back(tmp_path_factory, data, dtype, shape):
    size = math.prod(shape) * dtype.itemsize
    bits = data.draw(st.binary(min_size=size, max_size=size))  # every NaN can be among them
    if dtype == torch.bool:
        bits = bytes(byte & 1 for byte in bits)
    flat = torch.frombuffer(bytearray(bits), dtype=dtype) if bits else torch.empty(0, dtype=dtype)
    tensors = {"tensor": flat.reshape(shape), "": torch.tensor(True), '"é\\': torch.zeros(3, 0)}
    path = tmp_path_factory.getbasetemp() / "any"
    save_checkpoint(path, tensors)
    assert checks_out(path, tensors, {})
    assert same(safetensors.torch.load_file(path), tensors)  # as any other reader sees it


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
LEAVES |= st.floats(allow_nan=False, allow_infinity=False)
KEYS = st.text(max_size=5) | st.sampled_from(["sha256", "info", "__metadata__"])
VALUES = st.recursive(
    LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v), max_leaves=9
)


@given(st.dictionaries(KEYS, VALUES, max_size=3))
def test_info_comes_back(tmp_path_factory, info):
    path = tmp_path_factory.getbasetemp() / "info"
    save_checkpoint(path, {}, info)
    tensors, loaded = load_checkpoint(path)
    assert tensors == {}
    assert repr(loaded) == repr(info)  # and not 1 for True, 1.0 or -0.0


def test_a_training_step_resumes_where_it_was(tmp_path):
    """What a user saves: a model's state, an optimizer's and the random generator's."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()

    def state():
        of_parameters = enumerate(optimizer.state.values())
        moments = {f"momentum.{i}": s["momentum_buffer"] for i, s in of_parameters}
        return {**model.state_dict(), **moments, "rng": torch.get_rng_state()}

    step()
    save_checkpoint(tmp_path / "x", state(), {"lr": 0.1})
    step()
    expected = {name: tensor.clone() for name, tensor in state().items()}
    tensors, _ = load_checkpoint(tmp_path / "x")
    model.load_state_dict({name: tensors[name] for name in model.state_dict()})
    for i, s in enumerate(optimizer.state.values()):
        s["momentum_buffer"] = tensors[f"momentum.{i}"]
    torch.set_rng_state(tensors["rng"])
    step()
    assert same(state(), expected)


def test_what_safetensors_itself_refuses_is_saved(tmp_path):
    base = torch.arange(24.0).reshape(2, 3, 4)
    parameter = torch.nn.Parameter(base.clone())
    tensors = {
        "transposed": base.mT,
        "strided": base[:, ::2, 1],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "negative bit": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "parameter": parameter,
        "tied": parameter,
        "part of another": base[0],
        "result": parameter * 2,
    }
    save_checkpoint(tmp_path / "x", tensors)
    loaded, _ = load_checkpoint(tmp_path / "x")
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor.detach()), name
        assert loaded[name].is_contiguous() and not loaded[name].requires_grad
    loaded["tied"].zero_()
    assert torch.equal(loaded["parameter"], parameter)  # tensors of their own, and writable
    assert parameter.requires_grad


def test_what_is_saved_is_not_changed_and_the_same_gives_the_same_file(tmp_path, path):
    before = path.read_bytes()
    save_checkpoint(str(path), dict(reversed(SMALL.items())), INFO)
    assert path.read_bytes() == before
    assert len(before) % 8 == 1  # a header of a multiple of 8, two float32 and a byte
    with safetensors.safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["checkpoint"])["info"] == INFO


def test_nothing_is_pickled(tmp_path, monkeypatch):
    for module in ("pickle", "_pickle", "torch.serialization"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(torch, "save", None)
    monkeypatch.setattr(torch, "load", None)
    save_checkpoint(tmp_path / "x", SMALL, INFO)
    assert checks_out(tmp_path / "x", SMALL, INFO)


@pytest.mark.gpu
def test_a_checkpoint_moves_between_cpu_and_gpu(tmp_path):
    tensors = {"w": torch.rand(5, 3, device="cuda").T, "n": torch.tensor(3, device="cuda")}
    save_checkpoint(tmp_path / "x", tensors)
    assert checks_out(tmp_path / "x", tensors, {})
    on_gpu, _ = load_checkpoint(tmp_path / "x", device="cuda")
    assert same(on_gpu, tensors) and all(tensor.is_cuda for tensor in on_gpu.values())


def test_load_puts_the_tensors_on_the_device(path):
    tensors, _ = load_checkpoint(path, device="meta")
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}


# What cannot come back is refused before anything is written.

CIRCULAR = {}
CIRCULAR["self"] = CIRCULAR


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"ok": 1, "bad": math.nan}, "'bad'"),
        ({"bad": [1, {"x": -math.inf}]}, "'bad'"),
        ({"bad": (1, 2)}, "'bad'"),
        ({"bad": {1: 2}}, "'bad'"),
        ({1: "one", "1": "two"}, "1"),
        ({None: 1}, "None"),
        ({("a", "b"): 1}, "('a', 'b')"),
        ({"bad": torch.tensor(1)}, "'bad'"),
        ({"bad": b"bytes"}, "'bad'"),
        ({"bad": {1, 2}}, "'bad'"),
        ({"bad": "\ud83d\ude00"}, "'bad'"),  # two halves of a pair come back as one character
        (CIRCULAR, "'self'"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_info_that_json_would_change_is_refused(path, value, key):
    with pytest.raises(ValueError, match="would not come back from JSON") as error:
        save_checkpoint(path, {}, value)
    assert f"info[{key}]" in str(error.value)
    assert checks_out(path, SMALL, INFO)


@pytest.mark.parametrize(
    ("tensors", "info", "kind", "words"),
    [
        ([torch.ones(1)], None, TypeError, "tensors must be a dict of tensors by name, not list"),
        ({3: torch.ones(1)}, None, TypeError, "must be a str, not 3"),
        ({"w": [1.0]}, None, TypeError, "tensors['w'] must be a tensor, not list"),
        ({"state": {"w": torch.ones(1)}}, None, TypeError, "tensors['state']"),
        ({"w": torch.ones(1, dtype=torch.complex128)}, None, ValueError, "torch.complex128"),
        ({"w": torch.ones(1, dtype=torch.complex64)}, None, ValueError, "torch.complex64"),
        ({"w": torch.ones(1, device="meta")}, None, ValueError, "on meta"),
        ({"w": torch.eye(2).to_sparse()}, None, ValueError, "torch.sparse_coo"),
        ({"__metadata__": torch.ones(1)}, None, ValueError, "__metadata__"),
        ({"\ud800": torch.ones(1)}, None, ValueError, "surrogates"),
        ({}, [], TypeError, "info must be a dict, not list"),
    ],
    ids=str,
)
def test_what_cannot_be_saved_is_named(path, tensors, info, kind, words):
    with pytest.raises(kind) as error:
        save_checkpoint(path, tensors, info)
    assert words in str(error.value)
    assert checks_out(path, SMALL, INFO) and names(path.parent) == ["x"]


def test_a_header_that_readers_refuse_is_not_written(path):
    with pytest.raises(safetensors.SafetensorError, match="header too large"):
        save_checkpoint(path, SMALL, {"log": "x" * 100_000_000})
    assert checks_out(path, SMALL, INFO) and names(path.parent) == ["x"]


# No damage is loaded.


def test_every_flipped_bit_is_found(path):
    content = path.read_bytes()
    for i in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[i // 8] ^= 1 << i % 8
        path.write_bytes(flipped)
        refused(path)
    path.write_bytes(content)
    assert checks_out(path, SMALL, INFO)


def test_every_truncation_and_every_appended_byte_is_found(path):
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        refused(path, "cut short", "older checkpoint")
    for byte in range(256):
        path.write_bytes(content + bytes([byte]))
        refused(path, "damaged", "SHA-256")


def test_the_halves_of_two_checkpoints_make_no_whole_one(path):
    one = path.read_bytes()
    save_checkpoint(path, {**SMALL, "w": torch.tensor([1.0, 2.0])}, INFO)
    two = path.read_bytes()
    path.write_bytes(one[:-9] + two[-9:])
    refused(path, "SHA-256")


def test_what_looks_like_the_digest_does_not_confuse(tmp_path):
    zeros = "0" * 64
    field = f'{checkpoint._BEFORE_DIGEST.decode()}{zeros}"'
    info = {"sha256": zeros, field: field, zeros: [field, json.dumps({"sha256": zeros})]}
    tensors = {name: torch.tensor(list(field.encode()), dtype=torch.uint8) for name in info}
    save_checkpoint(tmp_path / "x", tensors, info)
    assert checks_out(tmp_path / "x", tensors, info)
    content = bytearray((tmp_path / "x").read_bytes())
    for place in (content.rindex(zeros.encode()), content.index(zeros.encode())):
        (tmp_path / "x").write_bytes(content[:place] + b"1" + content[place + 1 :])
        refused(tmp_path / "x", "SHA-256")


def test_files_of_others_are_refused(path):
    safetensors.torch.save_file(SMALL, path, {"sha256": "0" * 64})
    refused(path, "there is no checkpoint in it")
    torch.save(SMALL, path)
    refused(path, "there is no checkpoint in it")
    path.write_text("step 3")
    refused(path, "there is no checkpoint in it")


def sealed(header, data=b"", info="{}"):
    """A file with a right digest, whatever is in it."""
    metadata = {"checkpoint": f'{{"sha256": "{"0" * 64}", "info": {info}}}'}
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    content = len(text).to_bytes(8, "little") + text + data
    return content.replace(b"0" * 64, hashlib.sha256(content).hexdigest().encode(), 1)


@pytest.mark.parametrize(
    ("header", "info"),
    [
        ({"w": {"dtype": "X9", "shape": [1], "data_offsets": [0, 1]}}, "{}"),
        ({"w": {"dtype": "F8_E8M0", "shape": [1], "data_offsets": [0, 1]}}, "{}"),
        ({"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, "{}"),
        ({"w": []}, "{}"),
        ({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, "{"),
    ],
)
def test_errors_of_safetensors_and_json_do_not_leak(path, header, info):
    path.write_bytes(sealed(header, b"x", info))
    refused(path, "whole, but cannot be read", "versions")
    path.write_bytes(sealed({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"x"))
    assert load_checkpoint(path)[0]["w"].tolist() == [ord("x")]


def test_a_missing_file_a_folder_and_a_file_as_folder(path, monkeypatch):
    refused(path.parent / "nothing", "cannot be read (No such file", "the name of a checkpoint")
    refused(path.parent, "cannot be read")
    refused(path / "y", "cannot be read")
    monkeypatch.chdir(path.parent)
    refused("./nothing", "No such file")  # the name as it was given
    with pytest.raises(CheckpointError, match=r"^no/x: there is no folder .*no\. Make it first"):
        save_checkpoint("no/x", SMALL)
    with pytest.raises(CheckpointError, match="a folder or a device"):
        save_checkpoint(path.parent, SMALL)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_or_a_device_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "x")
    with pytest.raises(CheckpointError, match="a folder or a device"):
        save_checkpoint(tmp_path / "x", SMALL)
    assert stat.S_ISFIFO((tmp_path / "x").stat().st_mode)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_only_a_regular_file_is_read(tmp_path):
    """Reading a pipe would wait for a writer, and reading a device would never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path / "link"):
        refused(path, "a folder, a pipe or a device", "Give the name of a checkpoint")


@pytest.mark.parametrize("name", ["x" * 256, "a\0b"])
def test_an_impossible_name_is_refused(tmp_path, name):
    refused(tmp_path / name, "cannot be read")
    with pytest.raises(CheckpointError, match=r"no file can have this name here .*Give another"):
        save_checkpoint(tmp_path / name, SMALL)
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127])
def test_a_name_as_long_as_names_may_be(tmp_path, name):
    save_checkpoint(tmp_path / name, SMALL, INFO)
    assert checks_out(tmp_path / name, SMALL, INFO) and names(tmp_path) == [name]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads all")
def test_an_unreadable_file(path):
    path.chmod(0)
    refused(path, "cannot be read")


def test_a_symbolic_link_is_followed(path):
    link = path.parent / "latest"
    link.symlink_to("x")
    save_checkpoint(link, {}, {"step": 4})
    assert link.is_symlink()
    assert checks_out(path, {}, {"step": 4}) and checks_out(link, {}, {"step": 4})


def test_whoever_may_read_other_new_files_may_read_a_checkpoint(path):
    (path.parent / "plain").touch()
    assert path.stat().st_mode == (path.parent / "plain").stat().st_mode


# A save that fails leaves the old file, and nothing else.


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_save_that_fails_midway_changes_nothing(path, monkeypatch, failing, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
        save_checkpoint(path, {"w": torch.ones(9)}, {"step": 4})
    monkeypatch.undo()
    if isinstance(error, OSError):
        assert str(caught.value).startswith(f"{path}: it cannot be saved (No space left)")
    assert checks_out(path, SMALL, INFO)
    assert names(path.parent) == ["x"]


def test_a_disk_that_is_full_halfway_changes_nothing(path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))  # of any file, in bytes
    try:
        with pytest.raises(CheckpointError, match=r"it cannot be saved \(File too large\)"):
            save_checkpoint(path, {"w": torch.ones(10_000)}, {"step": 4})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checks_out(path, SMALL, INFO)
    assert names(path.parent) == ["x"]


def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_the_return(
    path, monkeypatch
):
    calls, fsync, replace = [], os.fsync, os.replace

    def recorded_fsync(descriptor):
        status = os.fstat(descriptor)
        kind = "folder" if stat.S_ISDIR(status.st_mode) else "file"
        calls.append((f"fsync {kind}", status.st_ino, status.st_size))
        fsync(descriptor)

    def recorded_replace(source, target):
        calls.append(("replace", os.stat(source).st_ino, os.stat(source).st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    save_checkpoint(path, SMALL, {"step": 4})
    new = (path.stat().st_ino, path.stat().st_size)
    expected = [("fsync file", *new), ("replace", *new)]
    if os.name != "nt":
        expected.append(("fsync folder", path.parent.stat().st_ino, path.parent.stat().st_size))
    assert calls == expected  # of the whole file, thus nothing is left in Python's buffer


# Kills.

SAVER = """
    import os, random, signal, sys, time
    import torch
    from d2lpar.checkpoint import load_checkpoint, save_checkpoint

    path, size, random = sys.argv[1], 500_000, random.Random(0)
    torch.set_num_threads(1)

    def save(step):
        tensors = {"a": torch.full((size,), step), "b": torch.full((size + step,), float(step))}
        save_checkpoint(path, tensors, {"step": step})

    def save_in_a_loop(first, tell):
        for step in range(first, 10**6):
            save(step)
            os.write(tell, b".")  # one for each save that has returned

    def check(first, returned):
        tensors, info = load_checkpoint(path)
        step = info["step"]
        assert set(tensors) == {"a", "b"} and len(tensors["b"]) == size + step
        assert all((tensor == step).all() for tensor in tensors.values()), "mixed"
        last = first + returned - 1
        assert step in (last, last + 1), f"{step} is there after {last} was saved"
        return step

    save(0)
    step, total = 0, 0
    for _ in range(12):
        told, tell = os.pipe()
        if (child := os.fork()) == 0:
            os.close(told)  # then a child whose parent is gone cannot go on
            save_in_a_loop(step + 1, tell)
        os.close(tell)
        returned = len(os.read(told, 1))  # however slow the disk is, one save is done
        time.sleep(random.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it ended by itself"
        returned += len(os.read(told, 10**6))
        os.close(told)
        step = check(step + 1, returned)
        total += returned
    print(total)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    program = [sys.executable, "-c", textwrap.dedent(SAVER), str(tmp_path / "x")]
    result = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 12  # in each run a save was done, and the next one under way


# Several at once.


def test_of_saves_at_the_same_time_one_wins_and_a_reader_sees_only_whole_ones(tmp_path):
    path, size, problems = tmp_path / "x", 100_000, []

    def save(writer):
        try:
            for step in range(writer, 40, 2):
                save_checkpoint(path, {"w": torch.full((size + step,), step)}, {"step": step})
        except Exception as error:
            problems.append(error)

    save(38)
    writers = [threading.Thread(target=save, args=(writer,)) for writer in (0, 1)]
    for writer in writers:
        writer.start()
    while True:
        running = any(writer.is_alive() for writer in writers)
        tensors, info = load_checkpoint(path)
        step = info["step"]
        assert torch.equal(tensors["w"], torch.full((size + step,), step))
        if not running:
            break
    assert problems == []
    assert step in (38, 39)  # the last of one of the two
    assert names(tmp_path) == ["x"]
