"""Fashion-MNIST as two tensors, verified, and minibatches of them.

The four files of data/ are in the IDX format of the MNIST database (LeCun, Cortes,
Burges): two zero bytes, one for the type of the elements, one for the number of
dimensions, each dimension as a big-endian uint32, then the elements. The data are those
of Xiao, Rasul and Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking
machine learning algorithms" (2017). Notebook 02 uses this file.

    python -m d2lpar --download

fetches the four files into data/, for a module that was installed without the
repository. Nothing else here asks the network for anything.
"""

import argparse
import contextlib
import gzip
import hashlib
import math
import os
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import torch

from .devices import as_device, try_gpu

LABELS = "t-shirt", "trouser", "pullover", "dress", "coat"
LABELS += "sandal", "shirt", "sneaker", "bag", "ankle boot"
# Of images and labels, for training and then for testing: name, and SHA-256 when
# decompressed.
FILES = {
    "train-images-idx3": (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"
    ),
    "train-labels-idx1": (
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"
    ),
    "t10k-images-idx3": (
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"
    ),
    "t10k-labels-idx1": (
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"
    ),
}
# The address that https://github.com/zalandoresearch/fashion-mnist names. It speaks no
# https: what vouches for the files are their checksums.
ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
COMMAND = "python -m d2lpar --download"
WHERE = (
    f"Fetch the four files into data/ with {COMMAND}, or pass root=, or set"
    " D2LPAR_DATA, to a folder that holds them, such as data/ of d2lpar's repository."
)


class DataError(ValueError):
    """A data file is missing or wrong; the message names the file and what to do."""

    def __init__(self, path: Path, problem: str, remedy: str = ""):
        remedy = (
            remedy or f"Restore it (git checkout data/) or fetch it again ({COMMAND})."
        )
        super().__init__(f"{path}: {problem}. {remedy}")


def read_idx(path: str | Path, sha256: str | None = None) -> torch.Tensor:
    """Read a file in IDX format, gzipped or not, into a uint8 tensor.

    Raises DataError for a file that is missing, damaged, not IDX of unsigned bytes, or
    not the one whose decompressed bytes have this SHA-256.
    """
    content = _read(path := Path(path))
    if len(content) < 4 or content[:3] != b"\0\0\x08":  # 8: of unsigned bytes
        start = content[:4].hex(" ")
        raise DataError(
            path, f"it starts with {start or 'nothing'}, where IDX has 00 00 08"
        )
    num_dims, first = content[3], 4 + 4 * content[3]  # the place of the first element
    if not 1 <= num_dims <= 3:
        raise DataError(path, f"it has {num_dims} dimensions: images have 3, labels 1")
    if len(content) < first:
        raise DataError(path, "it is cut short, within its dimensions")
    shape = struct.unpack_from(f">{num_dims}I", content, 4)
    missing = math.prod(shape) - (len(content) - first)
    if missing:
        problem = (
            f"is cut short by {missing}"
            if missing > 0
            else f"is too long by {-missing}"
        )
        raise DataError(
            path, f"it {problem} bytes: it declares {' x '.join(map(str, shape))}"
        )
    digest = hashlib.sha256(content).hexdigest()
    if sha256 not in (None, digest):
        raise DataError(
            path, f"the SHA-256 of its decompressed bytes is {digest}, not {sha256}"
        )
    return torch.frombuffer(content, dtype=torch.uint8)[first:].reshape(shape)


def _read(path: Path) -> bytearray:
    """Return the bytes of a file, decompressed."""
    if not path.is_file():  # reading a pipe would wait for a writer
        problem = "this is a folder" if path.is_dir() else "there is no such file"
        raise DataError(path, problem, WHERE)
    try:
        content = path.read_bytes()
        return bytearray(
            gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        )
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:  # cut short, or changed
        raise DataError(path, f"its gzip stream is damaged ({error})") from None
    except OSError as error:
        raise DataError(
            path, f"it cannot be read ({error.strerror or error})"
        ) from None


class Minibatches:
    """Minibatches ``(X, y)`` of a data set, in a new order each time you iterate.

    ``images`` are uint8 of shape (n, height, width), ``labels`` of shape (n,). ``X`` is
    float32 in [0, 1] of shape (batch_size, 1, height, width) and ``y`` int64 of shape
    (batch_size,), on the device of ``images``; the last minibatch holds what is left
    over. ``len`` counts minibatches.
    """

    def __init__(
        self, images: torch.Tensor, labels: torch.Tensor, batch_size: int, seed: int = 0
    ):
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
    """Return ``(train_iter, test_iter)`` of Fashion-MNIST: 60,000 and 10,000 rows.

    ``root`` is the folder with the four files. None: what the environment variable
    D2LPAR_DATA names, else data/ of this repository, of the working directory, or of
    its parent. ``seed`` is that of the order, which changes with each pass. The data
    set lives on ``device``, by default the first GPU, else the CPU.
    """
    root = _root(root)
    device = try_gpu() if device is None else as_device(device)
    files = [
        read_idx(root / f"{name}-ubyte.gz", sha256) for name, sha256 in FILES.items()
    ]
    parts = [file.to(device) for file in files]
    return tuple(
        Minibatches(*part, batch_size, seed) for part in (parts[:2], parts[2:])
    )


def _root(root: str | Path | None) -> Path:
    return Path(root or os.environ.get("D2LPAR_DATA") or _find_data()).expanduser()


def _find_data() -> Path:
    """Return the first folder with the data; an installed module has none beside it."""
    name = f"{next(iter(FILES))}-ubyte.gz"
    folders = (Path(__file__).parents[1] / "data", Path("data"), Path("..", "data"))
    for folder in folders:
        if (folder / name).exists():
            return folder
    problem = f"it is in none of the folders {', '.join(map(str, folders))}"
    raise DataError(Path(name), problem, WHERE)


# Fetching the four files


def download(root: str | Path | None = None, address: str = ADDRESS) -> Path:
    """Fetch those of the four files that are missing or wrong, and return their folder.

    ``root`` is None: what D2LPAR_DATA names, else data/ of the working directory. A
    file takes its place once it is whole and right.
    """
    folder = Path(root or os.environ.get("D2LPAR_DATA") or "data").expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for name, sha256 in FILES.items():
        path = folder / f"{name}-ubyte.gz"
        with contextlib.suppress(DataError):
            read_idx(path, sha256)
            continue  # it is there, and right
        url, part = f"{address.rstrip('/')}/{path.name}", path.with_suffix(".part")
        try:
            with urlopen(url, timeout=30) as response:
                part.write_bytes(response.read())
        except (OSError, ValueError, HTTPException) as error:
            problem, remedy = f"{url} cannot be fetched ({error})", f"{COMMAND} --from"
            raise DataError(path, problem, f"Another address: {remedy} URL.") from None
        read_idx(part, sha256)
        part.replace(path)
    return folder


def main(argv: Sequence[str] | None = None) -> None:
    """Check the four files, and with ``--download`` fetch them before that."""
    parser = argparse.ArgumentParser(prog="python -m d2lpar", description=main.__doc__)
    words = "default: what D2LPAR_DATA names, else data"
    parser.add_argument("--download", nargs="?", const="", metavar="FOLDER", help=words)
    parser.add_argument("--from", dest="url", default=ADDRESS, help="its address")
    args = parser.parse_args(argv)
    try:
        fetched = args.download is not None and download(args.download, args.url)
        folder = fetched or _root(None)
        for name, sha256 in FILES.items():
            read_idx(folder / f"{name}-ubyte.gz", sha256)
        print(f"{folder}: the four files are there, and right")
    except (ValueError, OSError) as error:
        sys.exit(f"d2lpar: {error}")
