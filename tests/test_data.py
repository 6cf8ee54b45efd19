"""Data other than those published are refused; minibatches have all examples once."""

import gzip
import hashlib
import os
import struct
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
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


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The address of four small files, which are the data set, and their folder."""
    (there := tmp_path / "server").mkdir()
    monkeypatch.setattr(data, "FILES", dict.fromkeys(data.FILES, DIGEST))
    for name in data.FILES:
        write(there / f"{name}-ubyte.gz", ZIPPED)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("D2LPAR_DATA", raising=False)
    asked = partial(SimpleHTTPRequestHandler, directory=there)
    with ThreadingHTTPServer(("127.0.0.1", 0), asked) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield f"http://127.0.0.1:{server.server_port}", there
        server.shutdown()


def test_a_download_fetches_what_is_missing_or_wrong(tmp_path, monkeypatch, server):
    address, there = server
    monkeypatch.setattr(
        data, "__file__", str(tmp_path / "installed" / "d2lpar" / "data.py")
    )
    monkeypatch.chdir(tmp_path)
    first, second, *_ = sorted(path.name for path in there.iterdir())
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / first, ZIPPED[:-1])
    data.main(["--download", "--from", address])
    assert data._find_data() == Path("data")
    assert [path.read_bytes() for path in Path("data").iterdir()] == [ZIPPED] * 4
    write(there / first, b"something else")  # and nobody asks for it again
    (tmp_path / "data" / second).unlink()
    assert data.download(address=f"{address}/") == Path("data")
    monkeypatch.setenv("D2LPAR_DATA", str(tmp_path / "else" / "where"))
    with pytest.raises(SystemExit, match="starts with 73 6f 6d 65, where IDX has"):
        data.main(["--download", "--from", address])


def test_a_download_that_fails_names_file_and_address_and_loses_nothing(
    tmp_path, server
):
    address, there = server
    [first, *_] = data.FILES
    path = write(tmp_path / f"{first}-ubyte.gz", b"an old file, and wrong")
    for wrong in (f"{address}/nowhere", "http://127.0.0.1:1", str(there)):
        with pytest.raises(DataError) as error:
            data.download(tmp_path, wrong)
        words = f"{path}: {wrong}/{path.name} cannot be fetched ("
        assert str(error.value).startswith(words) and "--from" in str(error.value)
    write(there / path.name, gzip.compress(CONTENT + b"x"))
    with pytest.raises(DataError, match="too long by 1 bytes"):
        data.download(tmp_path, address)
    assert path.read_bytes().startswith(b"an old")


def test_the_command_without_an_option_asks_nobody(tmp_path, monkeypatch, server):
    monkeypatch.setattr(data, "download", None)
    monkeypatch.setenv("D2LPAR_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match=r"-idx3-ubyte\.gz: there is no such file"):
        data.main([])


@pytest.mark.gpu
def test_on_a_gpu_the_data_set_lives_there():
    train_iter, _ = load_data_fashion_mnist(256)
    X, y = next(iter(train_iter))
    assert X.is_cuda and y.is_cuda and train_iter.images.is_cuda
