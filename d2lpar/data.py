"""Fashion-MNIST as two tensors, verified, and minibatches of them.

The four files of data/ are in the IDX format of the MNIST database (LeCun, Cortes, Burges): two
zero bytes, one for the type of the elements, one for the number of dimensions, each dimension as a
big-endian uint32, then the elements. The data are those of Xiao, Rasul and Vollgraf,
"Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms" (2017).
Notebook 02 uses this file.
"""

import gzip
import hashlib
import math
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from .devices import as_device, try_gpu

LABELS = (
    "t-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)

_PUBLISHED = "https://github.com/zalandoresearch/fashion-mnist"
_UNSIGNED_BYTE = 0x08  # the only element type of MNIST's files
_LARGEST = 1 << 30  # bytes; nothing near it is a file of this family
_CHUNK = 1 << 20  # bytes to read at a time, so that memory grows with the file, not with its claims

# File name and SHA-256 of the decompressed bytes, for the images and the labels of each split.
_TRAIN = (
    (
        "train-images-idx3-ubyte.gz",
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    (
        "train-labels-idx1-ubyte.gz",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
)
_TEST = (
    (
        "t10k-images-idx3-ubyte.gz",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    (
        "t10k-labels-idx1-ubyte.gz",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
)


class DataError(ValueError):
    """A data file is missing or wrong; the message names the file and what to do."""

    def __init__(self, path: Path, problem: str, remedy: str = ""):
        remedy = remedy or "Restore it (git checkout data/) or download it again."
        super().__init__(f"{path}: {problem}. {remedy}")


def read_idx(path: str | Path, sha256: str | None = None) -> torch.Tensor:
    """Read a file in IDX format, with or without gzip, into a uint8 tensor of its dimensions.

    The structure is checked first, then, where ``sha256`` is given, the SHA-256 of the decompressed
    bytes. Memory grows with what the file holds, never with what its header claims.

    Raises:
        DataError: the file is missing, not a file, cut short, too long, damaged, of another format
            or element type, or not the one with this checksum.
    """
    path = Path(path)
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise DataError(path, "this is no file but a pipe or a device")  # opening it may hang
        with path.open("rb") as raw:
            zipped = raw.peek(2)[:2] == b"\x1f\x8b"
            with gzip.open(raw) if zipped else raw as file:
                shape = _read_shape(path, file)
                body = _read_body(path, file, shape)
                if zipped:
                    _check_gzip_length(path, raw, file.tell())
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(path, "there is no such file", _where_to_find_it()) from None
    except IsADirectoryError:
        raise DataError(path, "this is a folder", "Name the file inside it.") from None
    except EOFError:
        raise DataError(path, "its gzip stream is cut short") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(path, f"its gzip stream is damaged ({error})") from None
    except OSError as error:
        problem = f"it cannot be read ({error.strerror or error})"
        raise DataError(path, problem, "Check that you may read it.") from None
    images = torch.zeros(shape, dtype=torch.uint8)
    if body:
        images = torch.frombuffer(body, dtype=torch.uint8).reshape(shape)
    if sha256 is not None:
        _check_sha256(path, images, sha256)
    return images


def _read_shape(path: Path, file) -> tuple[int, ...]:
    magic = file.read(4)
    if len(magic) < 4:
        raise DataError(path, f"it ends after {len(magic)} of the 4 bytes of its magic number")
    if magic[:2] != b"\0\0":
        problem = f"it starts with {magic[:2].hex(' ')}, neither gzip (1f 8b) nor IDX (00 00)"
        raise DataError(path, problem)
    if magic[2] != _UNSIGNED_BYTE:
        problem = f"its elements are of IDX type 0x{magic[2]:02x}, not 0x08 (unsigned bytes)"
        raise DataError(path, problem)
    num_dims = magic[3]
    if not 1 <= num_dims <= 3:
        raise DataError(path, f"it declares {num_dims} dimensions: images have 3, labels 1")
    sizes = file.read(4 * num_dims)
    if len(sizes) < 4 * num_dims:
        problem = f"it ends after {len(sizes)} of the {4 * num_dims} bytes of its dimensions"
        raise DataError(path, problem)
    shape = struct.unpack(f">{num_dims}I", sizes)
    if math.prod(max(size, 1) for size in shape) > _LARGEST:
        declared = " x ".join(map(str, shape))
        raise DataError(path, f"it declares {declared} bytes, over the limit of {_LARGEST}")
    return shape


def _read_body(path: Path, file, shape: tuple[int, ...]) -> bytearray:
    expected = math.prod(shape)
    body = bytearray()
    while len(body) < expected and (part := file.read(min(_CHUNK, expected - len(body)))):
        body += part
    if len(body) < expected:
        declared = " x ".join(map(str, shape))
        problem = f"it is cut short: {len(body)} of {declared} = {expected} bytes are there"
        raise DataError(path, problem)
    if file.read(1):  # reading to the end also makes gzip verify its own checksum
        raise DataError(path, f"it goes on after the {expected} bytes that it declares")
    return body


def _check_gzip_length(path: Path, raw, num_bytes: int) -> None:
    raw.seek(-4, os.SEEK_END)  # gzip ends with its length; the module skips zeros behind that
    if struct.unpack("<I", raw.read(4))[0] != num_bytes:
        raise DataError(path, "it goes on after the end of its gzip stream")


def _check_sha256(path: Path, tensor: torch.Tensor, sha256: str) -> None:
    header = bytes([0, 0, _UNSIGNED_BYTE, tensor.dim()]) + struct.pack(
        f">{tensor.dim()}I", *tensor.shape
    )
    digest = hashlib.sha256(header)
    digest.update(tensor.numpy())
    if digest.hexdigest() != sha256.lower():
        problem = f"the SHA-256 of its decompressed bytes is {digest.hexdigest()}, not {sha256}"
        raise DataError(path, problem)


class Minibatches:
    """Minibatches ``(X, y)`` of a data set: iterate as often as you like, each pass in a new order.

    ``images`` are uint8 of shape (n, height, width), ``labels`` of shape (n,). ``X`` is float32 in
    [0, 1] of shape (batch_size, 1, height, width) and ``y`` int64 of shape (batch_size,), on the
    device of ``images``; the last minibatch holds what is left over. ``len`` counts minibatches.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, batch_size: int, seed: int = 0):
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be a positive int, not {batch_size!r}")
        if len(images) != len(labels):
            raise ValueError(f"there are {len(labels)} labels for {len(images)} images")
        self.images, self.labels, self.batch_size = images, labels, batch_size
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return math.ceil(len(self.images) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(len(self.images), generator=self._generator)
        order = order.to(self.images.device)
        for start in range(0, len(order), self.batch_size):
            yield self.take(order[start : start + self.batch_size])

    def take(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the minibatch ``(X, y)`` of the examples with these indices."""
        X = self.images[rows].unsqueeze(1).float().div_(255)  # (len(rows), 1, 28, 28)
        return X, self.labels[rows].long()


def load_data_fashion_mnist(
    batch_size: int,
    root: str | Path | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> tuple[Minibatches, Minibatches]:
    """Return ``(train_iter, test_iter)``: Fashion-MNIST's 60,000 and 10,000 examples, in batches.

    Args:
        batch_size: examples in a minibatch.
        root: the folder with the four files. None: what the environment variable D2LPAR_DATA
            names, else data/ of this repository, of the working directory, or of its parent.
        seed: of the order of the examples, which is another one in each pass.
        device: where the data set lives. None: the first GPU, else the CPU.

    Raises:
        DataError: a file is missing or wrong, or images and labels do not belong together.
        ValueError: batch_size is not a positive int.
    """
    root = Path(root or os.environ.get("D2LPAR_DATA") or _find_data()).expanduser()
    device = try_gpu() if device is None else as_device(device)
    splits = [_load_split(root, *split) for split in (_TRAIN, _TEST)]
    return tuple(Minibatches(X.to(device), y.to(device), batch_size, seed) for X, y in splits)


def _find_data() -> Path:
    """Return the first folder that holds the data; an installed module has none beside it."""
    name = _TRAIN[0][0]
    folders = (Path(__file__).parents[1] / "data", Path("data"), Path("..", "data"))
    for folder in folders:
        if (folder / name).exists():
            return folder
    problem = f"it is in none of the folders {', '.join(map(str, folders))}"
    raise DataError(Path(name), problem, _where_to_find_it())


def _where_to_find_it() -> str:
    return (
        "Pass root=, or set D2LPAR_DATA, to a folder that holds the four files:"
        f" data/ of d2lpar's repository, or what is published at {_PUBLISHED}"
    )


def _load_split(root: Path, images_file, labels_file) -> tuple[torch.Tensor, torch.Tensor]:
    (images_name, images_sha256), (labels_name, labels_sha256) = images_file, labels_file
    images_path, labels_path = root / images_name, root / labels_name
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.dim() != 3 or images.shape[1:] != (28, 28):
        raise DataError(images_path, f"its shape is {tuple(images.shape)}, not (n, 28, 28)")
    if labels.dim() != 1:
        raise DataError(labels_path, f"its shape is {tuple(labels.shape)}, not (n,)")
    if len(images) != len(labels):
        problem = f"it has {len(labels)} labels for the {len(images)} images of {images_name}"
        raise DataError(labels_path, problem)
    if len(labels) and labels.max() >= len(LABELS):
        i = int(labels.argmax())
        raise DataError(labels_path, f"label {i} is {labels[i]}, where 0 to 9 are allowed")
    _check_sha256(images_path, images, images_sha256)
    _check_sha256(labels_path, labels, labels_sha256)
    return images, labels
