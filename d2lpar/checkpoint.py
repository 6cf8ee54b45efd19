"""Checkpoints: a file that survives a kill, loaded bit for bit or not at all.

A job that is killed while it writes over its only checkpoint loses the old one and the
new one. So the new one is written beside it and brought to the disk (fsync), and only
then takes its name, in one step (rename): see Pillai et al., "All File Systems Are Not
Created Equal" (OSDI 2014).

The format is safetensors (https://github.com/huggingface/safetensors): nothing is
pickled, so loading runs no code from the file. Its metadata hold the rest, as JSON, and
a SHA-256 of that and of every tensor's name, dtype, shape and bytes. Notebook 08 uses
this file.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import uuid
import zlib
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from .devices import as_device
from .guards import checked


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded; the message says what to do."""


def check_save(tensors, info, **_) -> None:
    """Refuse what would not come back as it is."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"tensors[{name!r}] must be a tensor, not {type(tensor).__name__}"
            )
        if tensor.layout != torch.strided or tensor.is_complex():
            kind = f"{tensor.dtype}, {tensor.layout}"
            raise ValueError(
                f"tensors[{name!r}] ({kind}) must be a dense one of real numbers"
            )
    if "__metadata__" in tensors:
        raise ValueError(
            'no tensor may have the name "__metadata__": safetensors needs it itself'
        )
    # a tuple would become a list
    if json.loads(json.dumps(info, allow_nan=False)) != info:
        allowed = (
            "str, int, float, bool, None, and lists and dicts (with str keys) of them"
        )
        raise ValueError(f"info would not come back from JSON as it is: use {allowed}")


@checked(check_save)
def save_checkpoint(
    path: str | Path,
    tensors: dict[str, torch.Tensor],
    info: dict[str, Any] | None = None,
) -> None:
    """Save tensors, and information about them, as one file in place of the old one.

    Once this returns, the checkpoint is on the disk. A process that is killed before
    leaves the old file or the new one whole, and perhaps beside it a ``<name>.<32 hex
    digits>.tmp``, which ``remove_unfinished`` deletes. A save that raises leaves none.
    Of several saves at once, one wins.

    The folder of ``path`` exists; a symbolic link stays, and its target is replaced.
    Tensors are dense, on any device; two that share memory, such as tied weights, are
    two when loaded. ``info`` is whatever else JSON brings back as it is.
    CheckpointError: the file cannot be written.
    """
    # safetensors takes only tensors that are contiguous and have memory of their own
    copy = {"copy": True, "memory_format": torch.contiguous_format}
    tensors = {
        name: tensor.detach().to("cpu", **copy) for name, tensor in tensors.items()
    }
    text = json.dumps(info or {})
    metadata = {"checkpoint": f"{_digest(tensors, text)} {text}"}
    _replace(path, safetensors.torch.save(tensors, metadata))


def load_checkpoint(
    path: str | Path, device: torch.device | str = "cpu"
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return ``(tensors, info)`` as saved, bit for bit; the tensors are on ``device``.

    Raises CheckpointError for a file that is not there, or not as ``save_checkpoint``
    wrote it.
    """
    device = as_device(device)
    remedy = "Copy it again, or load an older checkpoint."
    damaged = CheckpointError(
        f"{path}: it is no checkpoint, or cut short, or damaged. {remedy}"
    )
    try:
        # reading a pipe would wait for a writer
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError("it is a folder, a pipe or a device")
        content = Path(path).read_bytes()  # at once: safe_open would open a name twice
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        saved, _, text = header["__metadata__"]["checkpoint"].partition(" ")
        tensors = safetensors.torch.load(content)
    except OSError as error:
        problem = f"it cannot be read ({error.strerror or error})"
        raise CheckpointError(
            f"{path}: {problem}. Give the name of a checkpoint."
        ) from error
    except Exception as error:  # its kind depends on where the damage is
        raise damaged from error
    if _digest(tensors, text) != saved:
        raise damaged
    return {name: tensor.to(device) for name, tensor in tensors.items()}, json.loads(
        text
    )


def remove_unfinished(path: str | Path) -> None:
    """Delete what killed saves have left; call it while nobody saves."""
    target = Path(os.path.realpath(path))
    pattern = re.compile(re.escape(_beginning(target)) + r"[0-9a-f]{24}\.tmp")
    for other in target.parent.iterdir():
        if pattern.fullmatch(other.name):
            other.unlink(missing_ok=True)


def _beginning(target: Path) -> str:
    """Return how the names of a checkpoint's temporary files begin."""
    return f"{target.name[:50]}.{zlib.crc32(os.fsencode(target.name)):08x}"


def _digest(tensors: dict[str, torch.Tensor], text: str) -> str:
    """Return the SHA-256 of the text, and of tensors with names and shapes."""
    named = sorted(tensors.items())
    kinds = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in named]
    digest = hashlib.sha256(json.dumps([text, kinds]).encode())
    for _, tensor in named:
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _replace(path: str | Path, content: bytes) -> None:
    """Let this be the content of the file, wholly or not at all."""
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f"{_beginning(target)}{uuid.uuid4().hex[:24]}.tmp")
    try:
        if target.exists() and not target.is_file():
            raise OSError("it is a folder or a device")
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            # else the new name may reach the disk before the content does
            os.fsync(file.fileno())
        os.replace(temporary, target)
        if os.name != "nt":  # where a folder cannot be opened
            folder = os.open(target.parent, os.O_RDONLY)
            os.fsync(folder)  # brings the new name to the disk
            os.close(folder)
    except OSError as error:
        problem = (
            f"it cannot be saved ({error.strerror or error}), and nothing is half"
            " written"
        )
        raise CheckpointError(
            f"{path}: {problem}. Mend the cause and save again."
        ) from error
    finally:  # also after Ctrl-C; once renamed, it is no longer there
        with contextlib.suppress(OSError):
            temporary.unlink()
