"""Workshop. Fashion-MNIST and the book's own text, checked by their SHA-256.

The files of data/ are in MNIST's IDX format: two zero bytes, the kind of the elements,
the number of dimensions, each dimension as a big-endian uint32, then the elements. The
data are those of Xiao, Rasul and Vollgraf, "Fashion-MNIST: a novel image dataset for
benchmarking machine learning algorithms" (2017).
"""

import gzip
import hashlib
import math
import os
import struct
import zlib
from pathlib import Path
from urllib.request import urlopen

import torch

from .devices import as_device, try_gpu

LABELS = "t-shirt", "trouser", "pullover", "dress", "coat"
LABELS += "sandal", "shirt", "sneaker", "bag", "ankle boot"
# The four files, and the SHA-256 of what they hold when they are decompressed
FILES = dict(
    line.split()
    for line in """
train-images-idx3 c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888
train-labels-idx1 bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9
t10k-images-idx3 5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b
t10k-labels-idx1 0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34
""".strip().splitlines()
)
# The text of book.txt: the chapters' Markdown of November 2026, which stays as it is
BOOK = "ed7ad9dea3829110a408957b30f712c6e560d42dc570523dded82156a5b34efa"
# The address that https://github.com/zalandoresearch/fashion-mnist names: no https
ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
REMEDY = "Restore it with git checkout data/, or fetch the images with python -m d2lpar"
REMEDY += " --download. D2LPAR_DATA may name another folder."


class DataError(ValueError):
    """A data file is missing or wrong; the message names the file and what to do."""


def read_whole(path: Path, sha256: str, unpack=gzip.decompress) -> bytearray:
    """Return what a file holds, unpacked; raise DataError if it is not whole."""
    try:
        content = bytearray(unpack(path.read_bytes()))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}). {REMEDY}") from None
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise DataError(f"{path} has the SHA-256 {found}, not {sha256}. {REMEDY}")
    return content


def read_idx(path: Path, sha256: str) -> torch.Tensor:
    """Read a gzipped IDX file of unsigned bytes."""
    content = read_whole(path, sha256)
    num_dims = content[3]
    shape = struct.unpack_from(f">{num_dims}I", content, 4)
    values = torch.frombuffer(content, dtype=torch.uint8)
    return values[4 + 4 * num_dims :].reshape(shape)


class Minibatches:
    """Minibatches ``(X, y)`` of a data set, in a new order each time you iterate.

    ``images`` are uint8 of shape (n, height, width), ``labels`` of shape (n,). ``X`` is
    float32 in [0, 1] of shape (batch_size, 1, height, width) and ``y`` int64 of shape
    (batch_size,); the last minibatch holds what is left over. ``len`` counts them.
    """

    def __init__(self, images, labels, batch_size: int, seed: int = 0):
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be a positive int, not {batch_size!r}")
        self.images, self.labels, self.batch_size = images, labels, batch_size
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return math.ceil(len(self.images) / self.batch_size)

    def __iter__(self):
        order = torch.randperm(len(self.images), generator=self._generator)
        for rows in order.to(self.images.device).split(self.batch_size):
            yield self.take(rows)

    def take(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the minibatch ``(X, y)`` of the examples with these indices."""
        X = self.images[rows].unsqueeze(1).float().div_(255)  # (len(rows), 1, 28, 28)
        return X, self.labels[rows].long()


def load_data_fashion_mnist(
    batch_size: int, root: str | Path | None = None, seed: int = 0, device=None
) -> tuple[Minibatches, Minibatches]:
    """Return ``(train_iter, test_iter)`` of Fashion-MNIST: 60,000 and 10,000 rows.

    ``root`` is the folder with the four files. None: what the environment variable
    D2LPAR_DATA names, else data/ of this repository, of the working directory, or of
    its parent. ``seed`` is that of the order. The data set lives on ``device``, by
    default the first GPU, else the CPU.
    """
    folder = _find_data(root)
    device = try_gpu() if device is None else as_device(device)
    parts = [read_idx(folder / f"{n}-ubyte.gz", s).to(device) for n, s in FILES.items()]
    train, test = parts[:2], parts[2:]
    return Minibatches(*train, batch_size, seed), Minibatches(*test, batch_size, seed)


def load_book(root: str | Path | None = None) -> tuple[torch.Tensor, str]:
    """Return the book's own text as numbers, and its vocabulary: one of each character.

    A character's number is its place in that. ``root`` as for the images.
    """
    text = read_whole(_find_data(root) / "book.txt", BOOK, unpack=bytes).decode()
    vocab = "".join(sorted(set(text)))
    number = {character: i for i, character in enumerate(vocab)}
    return torch.tensor([number[character] for character in text]), vocab


def text_batch(
    tokens: torch.Tensor, n: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``n`` random pieces of a text, (n, length), and the tokens that follow."""
    starts = torch.randint(len(tokens) - length, (n, 1), generator=generator)
    pieces = tokens[starts + torch.arange(length + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def _find_data(root: str | Path | None) -> Path:
    """Return the folder that is named, else the first one with the data."""
    if named := root or os.environ.get("D2LPAR_DATA"):
        return Path(named)
    folders = [Path(__file__).parents[1] / "data", Path("data"), Path("../data")]
    return next(
        (f for f in folders if (f / "train-images-idx3-ubyte.gz").exists()), folders[1]
    )


def download(root: str | Path = "data", address: str = ADDRESS) -> None:
    """Fetch the four files into a folder; each takes its place when it is whole."""
    (folder := Path(root)).mkdir(parents=True, exist_ok=True)
    for name, sha256 in FILES.items():
        path = folder / f"{name}-ubyte.gz"
        part = path.with_suffix(".part")
        with urlopen(f"{address.rstrip('/')}/{path.name}", timeout=30) as response:
            part.write_bytes(response.read())
        read_idx(part, sha256)
        part.replace(path)
