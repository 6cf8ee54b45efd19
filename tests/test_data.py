"""Data other than those published are refused; minibatches have all examples once."""

import contextlib
import gzip
import hashlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from d2lpar import DataError, data, load_data_fashion_mnist
from d2lpar.data import Minibatches, read_idx

IMAGES = torch.arange(2 * 3 * 4, dtype=torch.uint8).reshape(2, 3, 4)


def idx(tensor):
    """The bytes of a uint8 tensor in IDX format."""
    header = struct.pack(f">4B{tensor.dim()}I", 0, 0, 8, tensor.dim(), *tensor.shape)
    return header + bytes(tensor.reshape(-1).tolist())


CONTENT = idx(IMAGES)
ZIPPED, DIGEST = gzip.compress(CONTENT, mtime=0), hashlib.sha256(CONTENT).hexdigest()


def write(path, content):
    path.write_bytes(content)
    return path


def refused(path, words="", sha256=None):
    with pytest.raises(DataError) as error:
        read_idx(path, sha256)
    text = str(error.value)
    assert text.startswith(f"{path}: ") and words in text and "\n" not in text, text


@pytest.mark.parametrize("shape", [(2, 3, 4), (24,), (0, 28, 28)])
def test_reads_what_was_written(tmp_path, shape):
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.uint8).reshape(shape)
    for content in (idx(tensor), gzip.compress(idx(tensor))):
        path = write(tmp_path / "x", content)
        read = read_idx(path, hashlib.sha256(idx(tensor)).hexdigest())
        assert read.dtype == torch.uint8 and torch.equal(read, tensor)
        assert torch.equal(read_idx(str(path)), tensor)


def test_each_wrong_content_is_named(tmp_path):
    # and no memory is asked for
    huge = b"\0\0\x08\3" + struct.pack(">3I", *[2**32 - 1] * 3)
    for content, words in (
        (b"", "starts with nothing"),
        (b"PK\3\4 zip", "starts with 50 4b 03 04, where IDX has 00 00 08"),
        # of floats
        (b"\0\0\x0d\1" + struct.pack(">If", 1, 0.5), "starts with 00 00 0d 01"),
        (b"\0\0\x08\0", "0 dimensions: images have 3, labels 1"),
        (b"\0\0\x08\4" + struct.pack(">4I", 1, 1, 1, 1) + b"x", "4 dimensions"),
        (CONTENT[:9], "cut short, within its dimensions"),
        (CONTENT[:-2], "cut short by 2 bytes: it declares 2 x 3 x 4"),
        (huge, "cut short by"),
        (gzip.compress(CONTENT + b"\0"), "too long by 1 bytes: it declares 2 x 3 x 4"),
        (ZIPPED[:-1], "gzip stream is damaged (Compressed file ended"),
        (ZIPPED + b"x", "gzip stream is damaged"),
    ):
        refused(write(tmp_path / "x", content), words)


def test_a_place_that_is_no_file_is_named(tmp_path):
    refused(
        tmp_path / "nothing",
        "no such file. Fetch the four files into data/ with python -m d2lpar",
    )
    refused(tmp_path, "this is a folder")
    os.mkfifo(tmp_path / "pipe")  # and is not waited for
    refused(tmp_path / "pipe", "no such file")


def test_no_truncation_and_no_flipped_bit_changes_what_is_read(tmp_path):
    for content in (CONTENT, ZIPPED):
        for length in range(len(content)):
            refused(
                write(tmp_path / "x", content[:length]),
                "Restore it (git checkout data/)",
            )
    refused(
        write(tmp_path / "x", CONTENT), f"is {DIGEST}, not {'0' * 64}", sha256="0" * 64
    )
    refusals = 0
    for i in range(len(ZIPPED) * 8):
        flipped = bytearray(ZIPPED)
        flipped[i // 8] ^= 1 << i % 8
        try:  # a few bits, such as those of gzip's time stamp, mean nothing
            assert torch.equal(read_idx(write(tmp_path / "x", flipped), DIGEST), IMAGES)
        except DataError:
            refusals += 1
    assert refusals > len(ZIPPED) * 8 / 2


def test_each_of_the_four_files_has_its_checksum(tmp_path, monkeypatch):
    labels = torch.tensor([1, 9], dtype=torch.uint8)
    paths = [tmp_path / f"{name}-ubyte.gz" for name in data.FILES]
    contents = [idx(labels if "labels" in path.name else IMAGES) for path in paths]
    for path, content in zip(paths, contents, strict=True):
        write(path, gzip.compress(content))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: the SHA-256"):
        load_data_fashion_mnist(16, root=tmp_path)
    sums = [hashlib.sha256(content).hexdigest() for content in contents]
    monkeypatch.setattr(data, "FILES", dict(zip(data.FILES, sums, strict=True)))
    assert len(load_data_fashion_mnist(2, root=tmp_path)) == 2
    for path, content in zip(paths, contents, strict=True):
        write(path, gzip.compress(content[:-1] + bytes([content[-1] ^ 1])))
        with pytest.raises(DataError, match=f"{path.name}: the SHA-256"):
            load_data_fashion_mnist(2, root=tmp_path)
        write(path, gzip.compress(content))


def test_where_the_data_are_looked_for(tmp_path, monkeypatch):
    """Root, D2LPAR_DATA, the repository, the folder one works in, then its parent."""
    monkeypatch.setenv("D2LPAR_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="nowhere"):
        load_data_fashion_mnist(16)
    with pytest.raises(DataError, match="elsewhere"):
        load_data_fashion_mnist(16, root=tmp_path / "elsewhere")
    monkeypatch.delenv("D2LPAR_DATA")
    repository = Path(data.__file__).parents[1] / "data"
    installed, notebooks = tmp_path / "installed", tmp_path / "course" / "notebooks"
    (notebooks / "data").mkdir(parents=True)
    monkeypatch.chdir(notebooks)
    other = write(notebooks / "data" / "train-images-idx3-ubyte.gz", b"something else")
    assert len(load_data_fashion_mnist(16)[0].images) == 60_000
    other.unlink()
    monkeypatch.setattr(data, "__file__", str(installed / "d2lpar" / "data.py"))
    with pytest.raises(DataError) as error:
        load_data_fashion_mnist(16)
    places = [
        str(installed / "data"),
        "data",
        "../data",
        "root=",
        "D2LPAR_DATA",
        "--download",
    ]
    assert all(place in str(error.value) for place in places)
    os.symlink(repository, tmp_path / "course" / "data")
    for folder in (notebooks, notebooks.parent):
        monkeypatch.chdir(folder)
        assert len(load_data_fashion_mnist(16)[0].images) == 60_000


def test_fashion_mnist_is_whole():
    train_iter, test_iter = load_data_fashion_mnist(256, device="cpu")
    assert (
        train_iter.labels.bincount().tolist() == [6_000] * 10 and len(train_iter) == 235
    )
    batches = list(test_iter)
    assert len(batches) == len(test_iter) == 40 and len(batches[-1][0]) == 10_000 % 256
    assert torch.cat([y for _, y in batches]).bincount().tolist() == [1_000] * 10
    X, y = batches[0]
    assert (X.shape, X.dtype) == ((256, 1, 28, 28), torch.float32)
    assert (y.shape, y.dtype) == ((256,), torch.int64)
    assert X.min() == 0 and X.max() == 1


def test_each_pass_has_every_example_once_in_another_order():
    images = (
        torch.arange(1000)
        .remainder(256)
        .to(torch.uint8)
        .reshape(-1, 1, 1)
        .repeat(1, 2, 2)
    )
    batches = Minibatches(images, torch.arange(1000), 64, seed=3)
    passes = [torch.cat([y for _, y in batches]) for _ in range(3)]
    both = [(a, b) for (_, a), (_, b) in zip(batches, batches, strict=True)]  # at once
    passes += [torch.cat(side) for side in zip(*both, strict=True)]
    for i, order in enumerate(passes):
        assert torch.equal(order.sort().values, torch.arange(1000))
        assert not any(
            torch.equal(order, other) for other in [*passes[:i], torch.arange(1000)]
        )
    for X, y in batches:  # images and labels stay together
        assert torch.equal((X[:, 0, 0, 0] * 255).round().long(), y % 256)
    loads = [
        load_data_fashion_mnist(64, seed=seed, device="cpu")[0] for seed in (0, 0, 1)
    ]
    one, again, other = (next(iter(batches))[1].tolist() for batches in loads)
    assert one == again != other


def test_odd_numbers_of_examples():
    assert list(Minibatches(IMAGES[:0], torch.arange(0), 4)) == []
    with pytest.raises(ValueError, match="3 labels for 2 images"):
        Minibatches(IMAGES, torch.arange(3), 4)
    for batch_size in (0, 2.5):
        with pytest.raises(ValueError, match="batch_size must be a positive int"):
            Minibatches(IMAGES, torch.arange(2), batch_size)


# Fetching, from a server on this machine


class Server(ThreadingHTTPServer):
    """Hands out ``files`` by name; hangs up after ``cut`` bytes of an answer."""

    daemon_threads = True  # one that stalls is not waited for

    def __init__(self, files, ranges=True, cut=None, stalls=False, chunked=False):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.ranges, self.cut, self.chunked = files, ranges, cut, chunked
        self.asked, self.stalls, self.ends = [], stalls, threading.Event()
        self.address = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.ends.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        server, content = self.server, self.server.files.get(self.path[1:])
        wanted = self.headers.get("Range", "")
        server.asked.append((self.path[1:], wanted))
        if content is None:
            return self.send_error(404)
        first = (
            int(wanted.removeprefix("bytes=").removesuffix("-") or 0)
            if server.ranges
            else 0
        )
        if wanted and first >= len(content):
            return self.send_error(416)
        self.send_response(206 if server.ranges and wanted else 200)
        if not server.chunked:
            self.send_header("Content-Length", len(content) - first)
        self.end_headers()
        with contextlib.suppress(OSError):  # the other side is gone
            self.wfile.write(content[first:][: server.cut])
            if server.stalls:
                server.ends.wait(60)


def set_up(monkeypatch):
    """Let the data set be four small files; return their bytes, by name."""
    random = torch.Generator().manual_seed(0)
    tensors = [torch.randint(256, (100, 20, 20), generator=random) for _ in data.FILES]
    contents = {
        name: idx(tensor) for name, tensor in zip(data.FILES, tensors, strict=True)
    }
    sums = {
        name: hashlib.sha256(content).hexdigest() for name, content in contents.items()
    }
    monkeypatch.setattr(data, "FILES", sums)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("D2LPAR_DATA", raising=False)
    return {
        f"{name}-ubyte.gz": gzip.compress(content) for name, content in contents.items()
    }


def whole(folder, files):
    """Whether a folder holds these files, and nothing else."""
    return {path.name: path.read_bytes() for path in folder.iterdir()} == files


def fails(words, *args, **kwargs):
    with pytest.raises(DataError) as error:
        data.download(*args, **kwargs)
    text = str(error.value)
    assert all(word in text for word in words) and "\n" not in text, text


FIRST = "train-images-idx3-ubyte.gz"


def test_a_download_fetches_what_is_missing_or_wrong_and_nothing_else(
    tmp_path, monkeypatch
):
    files = set_up(monkeypatch)
    monkeypatch.setattr(
        data, "__file__", str(tmp_path / "installed" / "d2lpar" / "data.py")
    )
    monkeypatch.chdir(tmp_path)
    with Server(files) as server:
        # where it is looked for
        assert data.download(address=server.address) == Path("data")
        assert whole(tmp_path / "data", files) and data._find_data() == Path("data")
        assert server.asked == [(name, "") for name in files]
        server.files = files | {
            f"mirror/{name}": content for name, content in files.items()
        }
        monkeypatch.setenv("D2LPAR_DATA", str(tmp_path / "else" / "where"))
        data.download(address=f"{server.address}/mirror/")
        assert whole(tmp_path / "else" / "where", files)
        *_, other, last = files
        # whole, and not the one
        write(tmp_path / "data" / other, gzip.compress(idx(IMAGES)))
        (tmp_path / "data" / last).unlink()
        server.asked.clear()
        data.download("data", server.address)
    assert whole(tmp_path / "data", files) and server.asked == [(other, ""), (last, "")]
    data.download("data", "http://nobody.invalid")  # all is there, and nobody is asked


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no_ranges"])
def test_a_download_that_was_cut_goes_on_where_it_stopped(
    tmp_path, monkeypatch, ranges
):
    files = set_up(monkeypatch)
    with Server(files, cut=9_000) as server:
        left = len(files[FIRST]) - 9_000
        fails(
            [FIRST, server.address, f"{left} bytes too early", "goes on"],
            tmp_path,
            server.address,
        )
    part = tmp_path / f"{FIRST}.part"
    assert whole(tmp_path, {part.name: files[FIRST][:9_000]})
    with Server(files, ranges) as server:
        data.download(tmp_path, server.address)
    assert server.asked[0] == (FIRST, "bytes=9000-") and len(server.asked) == 4
    assert whole(tmp_path, files)


def test_a_part_that_is_too_long_starts_again(tmp_path, monkeypatch):
    files = set_up(monkeypatch)
    write(tmp_path / f"{FIRST}.part", files[FIRST] + b"and more")
    with Server(files) as server:
        data.download(tmp_path, server.address)
    assert [wanted for _, wanted in server.asked[:2]] == [
        f"bytes={len(files[FIRST]) + 8}-",
        "",
    ]
    assert whole(tmp_path, files)


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "no_length"])
def test_what_is_not_the_file_never_takes_its_place(tmp_path, monkeypatch, chunked):
    files = set_up(monkeypatch)
    old = write(tmp_path / FIRST, b"an old file, and wrong")
    flipped = bytearray(files[FIRST])
    flipped[len(flipped) // 2] ^= 1
    other = gzip.compress(idx(IMAGES))
    for content, words in (
        (bytes(flipped), "gzip stream is damaged"),
        (files[FIRST][:-100], "gzip stream is damaged"),
        (other, f"SHA-256 of its decompressed bytes is {DIGEST}"),
        (b"<html>Please log in", "starts with 3c 68 74 6d, where IDX has 00 00 08"),
    ):
        with Server({FIRST: content}, chunked=chunked) as server:
            fails([FIRST, server.address, words, "--from"], tmp_path, server.address)
        assert whole(
            tmp_path, {FIRST: old.read_bytes()}
        ) and old.read_bytes().startswith(b"an old")


def test_a_server_that_has_nothing_or_says_nothing_is_named(tmp_path, monkeypatch):
    files = set_up(monkeypatch)
    with Server({}) as server:
        words = [
            FIRST,
            f"{server.address}/{FIRST} answers 404 (Not Found)",
            "--from ADDRESS",
        ]
        fails(words, tmp_path / "new", server.address)
    assert not (tmp_path / "new").exists()
    fails(
        [FIRST, server.address, "Connection refused", "proxy"], tmp_path, server.address
    )
    with Server(files, cut=9_000, stalls=True) as server:
        fails([FIRST, "timed out", "goes on"], tmp_path, server.address, timeout=0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:  # which never answers
        address = f"http://127.0.0.1:{mute.getsockname()[1]}"
        fails([FIRST, "timed out"], tmp_path, address, timeout=0.3)
    for address in ("ftp://127.0.0.1", str(tmp_path)):
        with pytest.raises(ValueError, match="starts with http:// or https://"):
            data.download(tmp_path, address)


def test_a_disk_that_is_full_is_named(tmp_path, monkeypatch):
    files = set_up(monkeypatch)
    write(tmp_path / "data", b"no folder")
    with Server(files) as server:
        words = ["data/", FIRST, "cannot be written (File exists)", "--download FOLDER"]
        fails(words, tmp_path / "data", server.address)
        if os.path.exists("/dev/full"):
            os.symlink("/dev/full", tmp_path / f"{FIRST}.part")
            fails(
                ["cannot be written (No space left", "Make room"],
                tmp_path,
                server.address,
            )
    assert not (tmp_path / FIRST).exists()


def test_the_command_fetches_checks_and_can_be_interrupted(tmp_path):
    """In its own process, with the real files; and Python has nothing to warn of."""
    repository = Path(data.__file__).parents[1]
    files = {
        path.name: path.read_bytes() for path in (repository / "data").glob("*.gz")
    }
    environment = {k: v for k, v in os.environ.items() if k != "D2LPAR_DATA"}
    environment |= {
        "PYTHONPATH": str(repository),
        "no_proxy": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }

    def command(*options):
        words = [sys.executable, "-W", "error", "-m", "d2lpar", *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        # What a shell starts in the background inherits that an interrupt is ignored.
        inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return subprocess.Popen(words, cwd=tmp_path, env=environment, **pipes)
        finally:
            signal.signal(signal.SIGINT, inherited)

    with Server(files, cut=10**6, stalls=True) as server:
        process = command("--download", "--from", server.address)
        part, until = tmp_path / "data" / f"{FIRST}.part", time.monotonic() + 100
        while not (part.exists() and part.stat().st_size > 900_000):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        said, warned = process.communicate(timeout=100)
    assert (process.returncode, said) == (130, ""), warned
    assert "goes on where this stopped" in warned
    assert "Traceback" not in warned
    with Server(files) as server:
        said, warned = command("--download", "--from", server.address).communicate(
            timeout=100
        )
    assert (said, warned) == ("data: the four files are there, and right\n", "")
    assert server.asked[0][1].startswith("bytes=") and whole(tmp_path / "data", files)


def test_the_command_without_an_option_asks_nobody(tmp_path, monkeypatch, capsys):
    set_up(monkeypatch)
    monkeypatch.setattr(data, "download", None)
    monkeypatch.setenv("D2LPAR_DATA", str(tmp_path))
    with pytest.raises(SystemExit) as stopped:
        data.main([])
    words = (
        f"d2lpar: {tmp_path / FIRST}: there is no such file. Fetch the four files"
        " into data/"
    )
    assert stopped.value.code.startswith(words) and capsys.readouterr().out == ""


@pytest.mark.gpu
def test_on_a_gpu_the_data_set_lives_there():
    train_iter, _ = load_data_fashion_mnist(256)
    X, y = next(iter(train_iter))
    assert X.is_cuda and y.is_cuda and train_iter.images.is_cuda
