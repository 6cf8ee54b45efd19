"""Data other than those published are refused; minibatches have all examples once."""

import gzip
import hashlib
import struct
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from d2lpar import DataError, data, load_data_fashion_mnist
from d2lpar.data import Minibatches, load_book, read_idx, text_batch

IMAGES = torch.arange(2 * 3 * 4, dtype=torch.uint8).reshape(2, 3, 4)
HEADER = struct.pack(">4B3I", 0, 0, 8, 3, *IMAGES.shape)
CONTENT = HEADER + bytes(IMAGES.reshape(-1).tolist())
ZIPPED, DIGEST = gzip.compress(CONTENT, mtime=0), hashlib.sha256(CONTENT).hexdigest()
FIRST = "train-images-idx3-ubyte.gz"


def test_no_truncation_and_no_flipped_bit_changes_what_is_read(tmp_path):
    path, refusals = tmp_path / "x", 0
    path.write_bytes(ZIPPED)
    read = read_idx(path, DIGEST)
    assert read.dtype == torch.uint8 and torch.equal(read, IMAGES)
    with pytest.raises(DataError, match=f"{DIGEST}, not {'0' * 64}"):
        read_idx(path, "0" * 64)
    for length in range(len(ZIPPED)):
        path.write_bytes(ZIPPED[:length])
        with pytest.raises(DataError, match=r"x .*Restore it with git checkout"):
            read_idx(path, DIGEST)
    for i in range(len(ZIPPED) * 8):
        flipped = bytearray(ZIPPED)
        flipped[i // 8] ^= 1 << i % 8
        path.write_bytes(flipped)
        try:  # a few bits, such as those of gzip's time stamp, mean nothing
            assert torch.equal(read_idx(path, DIGEST), IMAGES)
        except DataError:
            refusals += 1
    assert refusals > len(ZIPPED) * 8 / 2


def test_where_the_data_are_looked_for(tmp_path, monkeypatch):
    """Root, D2LPAR_DATA, the repository, data/ of the working folder, of its parent."""
    monkeypatch.setenv("D2LPAR_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=f"nowhere.{FIRST} cannot be read .*No such"):
        load_data_fashion_mnist(16)
    with pytest.raises(DataError, match=r"elsewhere.* --download\. D2LPAR_DATA may"):
        load_data_fashion_mnist(16, root=tmp_path / "elsewhere")
    monkeypatch.delenv("D2LPAR_DATA")
    (tmp_path / "data").symlink_to(Path(data.__file__).parents[1] / "data")
    monkeypatch.setattr(data, "__file__", str(tmp_path / "installed" / "x" / "data.py"))
    (inner := tmp_path / "inner").mkdir()
    for folder in (tmp_path, inner):
        monkeypatch.chdir(folder)
        assert len(load_data_fashion_mnist(16)[0].images) == 60_000


def test_fashion_mnist_is_whole():
    train_iter, test_iter = load_data_fashion_mnist(256, device="cpu")
    assert train_iter.labels.bincount().tolist() == [6_000] * 10
    (X, y), *others = test_iter
    assert len(train_iter) == 235 and 1 + len(others) == len(test_iter) == 40
    assert test_iter.labels.bincount().tolist() == [1_000] * 10
    assert (X.shape, X.dtype) == ((256, 1, 28, 28), torch.float32)
    assert (y.shape, y.dtype) == ((256,), torch.int64)
    assert len(others[-1][0]) == 10_000 % 256 and X.min() == 0 and X.max() == 1


def test_the_books_text_is_whole_and_pieces_of_it_are_followed_by_their_next(tmp_path):
    tokens, vocab = load_book()
    assert (len(tokens), len(vocab)) == (264_704, 119)
    assert "".join(vocab[i] for i in tokens[:13]) == "# 1. Three wa"
    X, y = text_batch(torch.arange(9), 200, 6, torch.Generator().manual_seed(0))
    assert X.shape == (200, 6) and torch.equal(y, X + 1)
    assert X.min() == 0 and y.max() == 8
    (tmp_path / "book.txt").write_bytes(b"another")
    with pytest.raises(DataError, match=r"book.txt has the SHA-256 .*git checkout"):
        load_book(tmp_path)


def test_each_pass_has_every_example_once_in_another_order():
    values = torch.arange(1000).remainder(256).to(torch.uint8)
    images = values.reshape(-1, 1, 1).repeat(1, 2, 2)
    batches = Minibatches(images, torch.arange(1000), 64, 3)
    passes = [torch.arange(1000)]
    for _ in range(3):
        order = torch.cat([y for _, y in batches])
        assert torch.equal(order.sort().values, torch.arange(1000))
        assert not any(torch.equal(order, other) for other in passes)
        passes.append(order)
    for X, y in batches:  # images and labels stay together
        assert torch.equal((X[:, 0, 0, 0] * 255).round().long(), y % 256)
    loads = [load_data_fashion_mnist(64, seed=s)[0] for s in (0, 0, 1)]
    one, again, other = (next(iter(batches))[1].tolist() for batches in loads)
    assert one == again != other
    with pytest.raises(ValueError, match="batch_size must be a positive int"):
        Minibatches(IMAGES, torch.arange(2), 2.5)


def test_a_download_puts_whole_files_into_place_and_nothing_else(tmp_path, monkeypatch):
    (there := tmp_path / "server").mkdir()
    for name in data.FILES:
        (there / f"{name}-ubyte.gz").write_bytes(ZIPPED)
    monkeypatch.setattr(data, "FILES", dict.fromkeys(data.FILES, DIGEST))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    asked = partial(SimpleHTTPRequestHandler, directory=there)
    with ThreadingHTTPServer(("127.0.0.1", 0), asked) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        try:
            data.download(tmp_path / "data", address)
            (there / FIRST).write_bytes(b"something else")
            with pytest.raises(DataError, match="cannot be read"):
                data.download(tmp_path / "data", address)
        finally:
            server.shutdown()
    files = (tmp_path / "data").glob("*.gz")
    assert [path.read_bytes() for path in files] == [ZIPPED] * 4
