import gzip
import hashlib
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from d2lpar import DataError, data, load_data_fashion_mnist, read_idx
from d2lpar.data import Minibatches


def idx(tensor, magic=b"\0\0\x08"):
    """The bytes of a uint8 tensor in IDX format."""
    sizes = struct.pack(f">{tensor.dim()}I", *tensor.shape)
    return magic + bytes([tensor.dim()]) + sizes + bytes(tensor.reshape(-1).tolist())


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content)
    return path


IMAGES = torch.arange(2 * 3 * 4, dtype=torch.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("shape", [(2, 3, 4), (24,), (0,), (0, 28, 28), (6, 4)])
def test_reads_what_was_written(tmp_path, pack, shape):
    tensor = IMAGES.reshape(-1)[: int(torch.Size(shape).numel())].reshape(shape)
    path = write(tmp_path, "x", pack(idx(tensor)))
    read = read_idx(path, hashlib.sha256(idx(tensor)).hexdigest())
    assert read.dtype == torch.uint8
    assert torch.equal(read, tensor)
    assert torch.equal(read_idx(str(path)), tensor)


def refused(path, *words, sha256=None):
    with pytest.raises(DataError) as error:
        read_idx(path, sha256)
    text = str(error.value)
    assert text.startswith(f"{path}: "), text
    assert all(word in text for word in words), text
    assert "\n" not in text
    assert error.value.__cause__ is None
    return text


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_file_truncated_at_any_byte_is_refused(tmp_path, pack):
    content = pack(idx(IMAGES))
    for length in range(len(content)):
        refused(write(tmp_path, "x", content[:length]), "Restore it")


@pytest.mark.parametrize("tail", [b"\0", b"\0" * 8, b"x", gzip.compress(b"")], ids=repr)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_trailing_bytes_are_refused(tmp_path, pack, tail):
    refused(write(tmp_path, "x", pack(idx(IMAGES)) + tail))
    refused(write(tmp_path, "x", pack(idx(IMAGES) + tail)), "goes on after the 24 bytes")


def test_no_flipped_bit_changes_what_is_read(tmp_path):
    content, sha256 = gzip.compress(idx(IMAGES), mtime=0), hashlib.sha256(idx(IMAGES)).hexdigest()
    refusals = 0
    for i in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[i // 8] ^= 1 << i % 8
        path = write(tmp_path, "x", flipped)
        try:  # a few bits, such as those of gzip's time stamp, mean nothing
            assert torch.equal(read_idx(path, sha256), IMAGES)
        except DataError:
            refusals += 1
    assert refusals > len(content) * 8 / 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["0 of the 4 bytes"]),
        (b"PK\3\4 zip", ["50 4b", "neither gzip"]),
        (b"\0\0\x0d\1" + struct.pack(">If", 1, 0.5), ["0x0d", "0x08"]),
        (b"\0\0\x08\0", ["0 dimensions"]),
        (b"\0\0\x08\4" + struct.pack(">4I", 1, 1, 1, 1) + b"x", ["4 dimensions"]),
        (b"\0\0\x08\3" + struct.pack(">3I", *[2**32 - 1] * 3), ["4294967295 x", "limit"]),
        (b"\0\0\x08\3" + struct.pack(">3I", 0, 2**32 - 1, 2**32 - 1), ["limit"]),
        (b"\0\0\x08\1" + struct.pack(">I", 2**30) + b"x", ["1 of 1073741824 ="]),
        (gzip.compress(b"\0\0\x08\1" + struct.pack(">I", 2**30) + b"x"), ["1 of 1073741824 ="]),
        (b"\x1f\x8b nonsense", ["damaged"]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_each_wrong_content_is_named(tmp_path, content, words):
    refused(write(tmp_path, "x", content), *words)


def test_a_missing_file_a_folder_and_a_file_as_folder(tmp_path):
    refused(tmp_path / "nothing", "no such file", "D2LPAR_DATA")
    refused(tmp_path, "a folder")
    refused(write(tmp_path, "x", b"x") / "y", "no such file")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads all")
def test_an_unreadable_file(tmp_path):
    path = write(tmp_path, "x", idx(IMAGES))
    path.chmod(0)
    refused(path, "cannot be read")


def test_structure_is_checked_before_the_checksum(tmp_path):
    path = write(tmp_path, "x", idx(IMAGES)[:-1])
    assert "SHA-256" not in refused(path, "23 of 2 x 3 x 4 = 24", sha256="0" * 64)
    path = write(tmp_path, "x", idx(IMAGES))
    refused(path, "SHA-256", hashlib.sha256(idx(IMAGES)).hexdigest(), "0" * 64, sha256="0" * 64)


def test_huge_claims_allocate_nothing(tmp_path):
    """A header that declares a gigabyte must not make the reader ask for one."""
    resource = pytest.importorskip("resource")
    path = write(tmp_path, "x", gzip.compress(b"\0\0\x08\1" + struct.pack(">I", 2**30) + b"x" * 99))
    script = (
        "import resource, sys; from d2lpar import DataError, read_idx\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: read_idx(sys.argv[1])\n"
        "except DataError: pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    grown = subprocess.check_output([sys.executable, "-c", script, path], text=True, timeout=60)
    unit = 1024 if sys.platform == "darwin" else 1  # macOS counts bytes, Linux kilobytes
    assert int(grown) / unit < 50_000
    assert resource


def fake_splits(folder, *, labels=(1, 9), num_images=2, shape=(28, 28)):
    images = torch.zeros(num_images, *shape, dtype=torch.uint8)
    for (images_name, _), (labels_name, _) in (data._TRAIN, data._TEST):
        write(folder, images_name, gzip.compress(idx(images)))
        write(folder, labels_name, gzip.compress(idx(torch.tensor(labels, dtype=torch.uint8))))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"labels": (1, 10)}, ["labels-idx1", "label 1 is 10"]),
        ({"labels": (1, 2, 3)}, ["labels-idx1", "3 labels for the 2 images"]),
        ({"shape": (28, 27)}, ["images-idx3", "(2, 28, 27)", "(n, 28, 28)"]),
        ({"shape": (784,)}, ["images-idx3", "(2, 784)"]),
        ({}, ["images-idx3", "SHA-256"]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_the_loader_refuses_what_is_not_fashion_mnist(tmp_path, monkeypatch, wrong, words):
    fake_splits(tmp_path, **wrong)
    with pytest.raises(DataError) as error:
        load_data_fashion_mnist(16, root=tmp_path)
    assert all(word in str(error.value) for word in words), error.value
    monkeypatch.setenv("D2LPAR_DATA", str(tmp_path))
    with pytest.raises(DataError, match=words[0]):
        load_data_fashion_mnist(16)


@pytest.mark.parametrize("spoilt", range(4))
def test_each_of_the_four_files_has_its_checksum(tmp_path, monkeypatch, spoilt):
    fake_splits(tmp_path)
    names = [name for split in (data._TRAIN, data._TEST) for name, _ in split]
    sums = [hashlib.sha256(gzip.decompress((tmp_path / n).read_bytes())).hexdigest() for n in names]
    files = list(zip(names, sums, strict=True))
    monkeypatch.setattr(data, "_TRAIN", files[:2])
    monkeypatch.setattr(data, "_TEST", files[2:])
    assert len(load_data_fashion_mnist(2, root=tmp_path)) == 2
    content = bytearray(gzip.decompress((tmp_path / names[spoilt]).read_bytes()))
    content[-1] ^= 1
    write(tmp_path, names[spoilt], gzip.compress(content))
    with pytest.raises(DataError, match=f"{names[spoilt]}: the SHA-256"):
        load_data_fashion_mnist(2, root=tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x")
    refused(tmp_path / "x", "a pipe")


def test_root_wins_over_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("D2LPAR_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="nowhere"):
        load_data_fashion_mnist(16)
    with pytest.raises(DataError, match="elsewhere"):
        load_data_fashion_mnist(16, root=tmp_path / "elsewhere")


def test_an_installed_module_finds_the_data_near_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("D2LPAR_DATA", raising=False)
    repository = Path(data.__file__).parents[1] / "data"
    installed, notebooks = tmp_path / "installed", tmp_path / "course" / "notebooks"
    notebooks.mkdir(parents=True)
    (installed / "data").mkdir(parents=True)  # someone else's, without the four files
    monkeypatch.setattr(data, "__file__", str(installed / "d2lpar" / "data.py"))
    monkeypatch.chdir(notebooks)
    with pytest.raises(DataError) as error:
        load_data_fashion_mnist(16)
    places = [str(installed / "data"), "data", "../data"]
    assert all(place in str(error.value) for place in [*places, "root=", "D2LPAR_DATA", "https:"])

    os.symlink(repository, tmp_path / "course" / "data")
    for folder in (notebooks, notebooks.parent):
        monkeypatch.chdir(folder)
        assert len(load_data_fashion_mnist(16)[0].images) == 60_000


def test_the_repositorys_data_win_over_those_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("D2LPAR_DATA", raising=False)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", "train-images-idx3-ubyte.gz", b"something else")
    monkeypatch.chdir(tmp_path)
    assert len(load_data_fashion_mnist(16)[0].images) == 60_000


@pytest.fixture(scope="module")
def fashion_mnist():
    return load_data_fashion_mnist(256, device="cpu")


def test_fashion_mnist_is_whole(fashion_mnist):
    train_iter, test_iter = fashion_mnist
    for iterator, total in ((train_iter, 60_000), (test_iter, 10_000)):
        X, y = next(iter(iterator))
        assert (X.shape, X.dtype) == ((256, 1, 28, 28), torch.float32)
        assert (y.shape, y.dtype) == ((256,), torch.int64)
        assert X.min() == 0 and X.max() == 1
        assert len(list(iterator)) == len(iterator) == -(-total // 256)
        counts = sum(torch.bincount(y, minlength=10) for _, y in iterator)
        assert counts.tolist() == [total // 10] * 10


def test_each_pass_has_every_example_once_in_another_order(fashion_mnist):
    images = torch.arange(1000).remainder(256).to(torch.uint8).reshape(-1, 1, 1).repeat(1, 28, 28)
    batches = Minibatches(images, torch.arange(1000), 64, seed=3)
    passes = [torch.cat([y for _, y in batches]) for _ in range(3)]
    for order in passes:
        assert torch.equal(order.sort().values, torch.arange(1000))
        assert (order != torch.arange(1000)).any()
    assert not torch.equal(passes[0], passes[1])
    assert not torch.equal(passes[1], passes[2])
    for X, y in batches:  # images and labels stay together
        assert torch.equal((X[:, 0, 0, 0] * 255).round().long(), y % 256)


def test_the_same_seed_gives_the_same_order():
    def orders(seed):
        batches = Minibatches(IMAGES.repeat(50, 1, 1), torch.arange(100), 7, seed)
        return [y.tolist() for _ in range(2) for _, y in batches]

    assert orders(1) == orders(1) != orders(2)


def test_the_loader_passes_its_seed_on():
    def first(seed):
        return next(iter(load_data_fashion_mnist(64, seed=seed, device="cpu")[0]))[1].tolist()

    assert first(0) == first(0) != first(1)


def test_no_examples_give_no_minibatches_and_lengths_must_agree():
    assert list(Minibatches(IMAGES[:0], torch.arange(0), 4)) == []
    with pytest.raises(ValueError, match="3 labels for 2 images"):
        Minibatches(IMAGES, torch.arange(3), 4)


def test_two_passes_at_once_do_not_disturb_each_other():
    batches = Minibatches(IMAGES.repeat(50, 1, 1), torch.arange(100), 10)
    both = list(zip(batches, batches, strict=True))
    for side in (0, 1):
        assert sorted(torch.cat([pair[side][1] for pair in both]).tolist()) == list(range(100))


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, None])
def test_a_wrong_batch_size_is_named(batch_size):
    with pytest.raises(ValueError, match="batch_size must be a positive int"):
        load_data_fashion_mnist(batch_size)


@pytest.mark.gpu
def test_on_a_gpu_the_data_set_lives_there():
    train_iter, _ = load_data_fashion_mnist(256)
    X, y = next(iter(train_iter))
    assert X.is_cuda and y.is_cuda and train_iter.images.is_cuda
