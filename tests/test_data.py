"""Data other than those published are refused; minibatches have all examples once."""

import gzip
import hashlib
import os
import struct
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from d2lpar import DataError, data, load_data_fashion_mnist
from d2lpar.data import Minibatches, read_idx

IMAGES = torch.arange(2 * 3 * 4, dtype=torch.uint8).reshape(2, 3, 4)
HEADER = struct.pack(">4B3I", 0, 0, 8, 3, *IMAGES.shape)
CONTENT = HEADER + bytes(IMAGES.reshape(-1).tolist())
ZIPPED, DIGEST = gzip.compress(CONTENT, mtime=0), hashlib.sha256(CONTENT).hexdigest()
FIRST = "train-images-idx3-ubyte.gz"


def write(path, content):
    path.write_bytes(content)
    return path


def test_reads_what_was_written(tmp_path):
    read = read_idx(write(tmp_path / "x", ZIPPED), DIGEST)
    assert read.dtype == torch.uint8 and torch.equal(read, IMAGES)


def test_no_truncation_and_no_flipped_bit_changes_what_is_read(tmp_path):
    for length in range(len(ZIPPED)):
        with pytest.raises(DataError, match=r"x .*Restore it with git checkout"):
            read_idx(write(tmp_path / "x", ZIPPED[:length]), DIGEST)
    with pytest.raises(DataError, match=f"{DIGEST}, not {'0' * 64}"):
        read_idx(write(tmp_path / "x", ZIPPED), "0" * 64)
    refusals = 0
    for i in range(len(ZIPPED) * 8):
        flipped = bytearray(ZIPPED)
        flipped[i // 8] ^= 1 << i % 8
        try:  # a few bits, such as those of gzip's time stamp, mean nothing
            assert torch.equal(read_idx(write(tmp_path / "x", flipped), DIGEST), IMAGES)
        except DataError:
            refusals += 1
    assert refusals > len(ZIPPED) * 8 / 2


def test_where_the_data_are_looked_for(tmp_path, monkeypatch):
    """Root, D2LPAR_DATA, the repository, the folder one works in, then its parent."""
    monkeypatch.setenv("D2LPAR_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=f"nowhere.{FIRST} cannot be read .*No such"):
        load_data_fashion_mnist(16)
    with pytest.raises(DataError, match="elsewhere"):
        load_data_fashion_mnist(16, root=tmp_path / "elsewhere")
    monkeypatch.delenv("D2LPAR_DATA")
    repository = Path(data.__file__).parents[1] / "data"
    notebooks = tmp_path / "course" / "notebooks"
    (notebooks / "data").mkdir(parents=True)
    monkeypatch.chdir(notebooks)
    other = write(notebooks / "data" / FIRST, b"something else")
    assert len(load_data_fashion_mnist(16)[0].images) == 60_000
    other.unlink()
    elsewhere = tmp_path / "installed" / "d2lpar" / "data.py"
    monkeypatch.setattr(data, "__file__", str(elsewhere))
    with pytest.raises(DataError, match=r"data.train.* --download\. D2LPAR_DATA may"):
        load_data_fashion_mnist(16)
    os.symlink(repository, tmp_path / "course" / "data")
    for folder in (notebooks, notebooks.parent):
        monkeypatch.chdir(folder)
        assert len(load_data_fashion_mnist(16)[0].images) == 60_000


def test_fashion_mnist_is_whole():
    train_iter, test_iter = load_data_fashion_mnist(256, device="cpu")
    assert train_iter.labels.bincount().tolist() == [6_000] * 10
    batches = list(test_iter)
    assert len(train_iter) == 235 and len(batches) == len(test_iter) == 40
    assert torch.cat([y for _, y in batches]).bincount().tolist() == [1_000] * 10
    (X, y), (last, _) = batches[0], batches[-1]
    assert (X.shape, X.dtype) == ((256, 1, 28, 28), torch.float32)
    assert (y.shape, y.dtype) == ((256,), torch.int64) and len(last) == 10_000 % 256
    assert X.min() == 0 and X.max() == 1


def test_each_pass_has_every_example_once_in_another_order():
    values = torch.arange(1000).remainder(256).to(torch.uint8)
    images = values.reshape(-1, 1, 1).repeat(1, 2, 2)
    batches = Minibatches(images, torch.arange(1000), 64, seed=3)
    passes = [torch.arange(1000)]
    for _ in range(3):
        order = torch.cat([y for _, y in batches])
        assert torch.equal(order.sort().values, torch.arange(1000))
        assert not any(torch.equal(order, other) for other in passes)
        passes.append(order)
    for X, y in batches:  # images and labels stay together
        assert torch.equal((X[:, 0, 0, 0] * 255).round().long(), y % 256)
    loads = [load_data_fashion_mnist(64, seed=s, device="cpu")[0] for s in (0, 0, 1)]
    one, again, other = (next(iter(batches))[1].tolist() for batches in loads)
    assert one == again != other
    for batch_size in (0, 2.5):
        with pytest.raises(ValueError, match="batch_size must be a positive int"):
            Minibatches(IMAGES, torch.arange(2), batch_size)


def test_a_download_puts_whole_files_into_place_and_nothing_else(tmp_path, monkeypatch):
    (there := tmp_path / "server").mkdir()
    for name in data.FILES:
        write(there / f"{name}-ubyte.gz", ZIPPED)
    monkeypatch.setattr(data, "FILES", dict.fromkeys(data.FILES, DIGEST))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    asked = partial(SimpleHTTPRequestHandler, directory=there)
    with ThreadingHTTPServer(("127.0.0.1", 0), asked) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/"
            data.download(tmp_path / "data", address)
            write(there / FIRST, b"something else")
            with pytest.raises(DataError, match="cannot be read"):
                data.download(tmp_path / "data", address)
        finally:
            server.shutdown()
    files = [path for path in (tmp_path / "data").iterdir() if path.suffix == ".gz"]
    assert [path.read_bytes() for path in files] == [ZIPPED] * 4


def test_the_command_without_an_option_asks_nobody():
    words = [sys.executable, "-m", "d2lpar"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "--download" in said


@pytest.mark.gpu
def test_on_a_gpu_the_data_set_lives_there():
    train_iter, _ = load_data_fashion_mnist(256)
    X, y = next(iter(train_iter))
    assert X.is_cuda and y.is_cuda and train_iter.images.is_cuda
