"""Checkpoints: one file that survives a kill, and in which no changed bit goes unseen.

A job that is killed while it writes over its only checkpoint has lost the old one and the new one.
So the new one is written beside the old one and brought to the disk (fsync), and only then takes
its name, in one step (rename). For the order of these steps see Pillai et al., "All File Systems
Are Not Created Equal: On the Complexity of Crafting Crash-Consistent Applications" (OSDI 2014).

The file is in the safetensors format (https://github.com/huggingface/safetensors): the length of
the header as a little-endian uint64, the header in JSON, the bytes of the tensors. Nothing is
pickled, so loading runs no code from the file. The header begins with a SHA-256 of the whole file,
taken while zeros stand in the digest's own place. Notebook 05 uses this file.
"""

import contextlib
import hashlib
import json
import os
import re
import uuid
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

_NO_DIGEST = b"0" * 64
_START = re.compile(rb'\{"__metadata__":\{"sha256":"([0-9a-f]{64})","data_bytes":"(\d{1,19})",')
_LARGEST_HEADER = 100_000_000  # bytes; readers of safetensors refuse more
_DTYPES = frozenset({torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64})
_DTYPES |= {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded; the message names the file and what to do."""


def save_checkpoint(
    path: str | Path, tensors: dict[str, torch.Tensor], info: dict[str, Any] | None = None
) -> None:
    """Save tensors, and information about them, as one file in place of the one that was there.

    Once this returns, the checkpoint is on the disk. A process that is killed before leaves the old
    file or the new one whole, and perhaps a ``<name>.<32 hex digits>.tmp`` beside it, which can be
    deleted. A save that raises leaves no such file. Of several saves at once, one wins.

    The tensors may be on any device, require gradients, and have any strides. Two that share
    memory, such as tied weights, are both written, and are two tensors when loaded. While it
    saves, about three more copies of all tensors are in memory.

    Args:
        path: the file to write, in a folder that exists; if it is a symbolic link, its target.
        tensors: by name; dense, of bool, integers of any width, or floats of 16, 32 or 64 bits.
        info: what else there is to know, such as the step: str, int, finite float, bool, None, and
            lists and dicts (with str keys) of them. None: nothing, which is loaded as ``{}``.

    Raises:
        CheckpointError: the file cannot be written: no such folder, the disk is full, ...
        TypeError: tensors or info is no dict, a name is no str, or what it names is no tensor.
        ValueError: a tensor cannot be saved, or info would not come back from JSON as it is.
    """
    head, data = _serialize(_plain_copies(tensors), _as_json({} if info is None else info))
    _replace(path, head, data)


def load_checkpoint(
    path: str | Path, device: torch.device | str = "cpu"
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return ``(tensors, info)`` as they were saved, bit for bit; the tensors are on ``device``.

    Raises:
        CheckpointError: there is no such file, or it is not what save_checkpoint wrote: another
            file, cut short, or changed in as little as one bit.
    """
    content = _read(path)
    if flaw := _flaw(content):
        raise CheckpointError(f"{path}: {flaw}. Copy it anew, or load an older checkpoint.")
    try:
        header, _ = _split(content)
        tensors = safetensors.torch.load(content)
        info = json.loads(header["__metadata__"]["info"])
    except Exception as error:  # not damage, but for instance a dtype that is not known here
        problem = f"it is whole, but cannot be read ({type(error).__name__}: {error})"
        remedy = "Load it with the versions of d2lpar, torch and safetensors that saved it."
        raise CheckpointError(f"{path}: {problem}. {remedy}") from error
    return {name: tensor.to(device) for name, tensor in tensors.items()}, info


def _plain_copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy each to the CPU, contiguous and into memory of its own: safetensors takes no others."""
    if not isinstance(tensors, dict):
        raise TypeError(f"tensors must be a dict of tensors by name, not {type(tensors).__name__}")
    copies = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor must be a str, not {name!r}")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensors[{name!r}] must be a tensor, not {type(tensor).__name__}")
        if name == "__metadata__":
            raise ValueError("a tensor cannot be named '__metadata__': safetensors uses this name")
        if tensor.dtype not in _DTYPES or tensor.layout != torch.strided or tensor.is_meta:
            kind = f"({tensor.dtype}, {tensor.layout}, on {tensor.device})"
            allowed = "dense ones of bool, ints, and floats of 16 to 64 bits can be"
            raise ValueError(f"tensors[{name!r}] {kind} cannot be saved: {allowed}")
        copies[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copies


def _as_json(info: dict[str, Any]) -> str:
    if not isinstance(info, dict):
        raise TypeError(f"info must be a dict, not {type(info).__name__}")
    for key, value in info.items():
        try:
            same = json.loads(json.dumps({key: value}, allow_nan=False)) == {key: value}
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:  # a tuple would come back as a list, for instance, and a key 1 as "1"
            allowed = "str, int, finite float, bool, None, and lists and dicts (with str keys)"
            raise ValueError(f"info[{key!r}] would not come back from JSON as it is: use {allowed}")
    return json.dumps(info)


def _serialize(tensors: dict[str, torch.Tensor], info: str) -> tuple[bytes, memoryview]:
    """Return the two parts of the file: the header with its length, and the bytes of the tensors.

    The header is written anew, since safetensors orders metadata at random: here the digest always
    has the same place, and the same checkpoint is always the same file.
    """
    header, data = _split(safetensors.torch.save(tensors))
    metadata = {"sha256": _NO_DIGEST.decode(), "data_bytes": str(len(data)), "info": info}
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    if len(text) > _LARGEST_HEADER:
        raise ValueError(f"names and info take {len(text)} bytes, over {_LARGEST_HEADER}")
    head = len(text).to_bytes(8, "little") + text
    digest = _sha256(head, data).encode()
    return head.replace(_NO_DIGEST, digest, 1), data  # the first 64 zeros are those in _START


def _split(content: bytes) -> tuple[dict, memoryview]:
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), memoryview(content)[end:]


def _sha256(*parts: bytes | memoryview) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _flaw(content: bytes) -> str | None:
    """Return how this differs from what save_checkpoint wrote, or None if in no bit."""
    start = _START.match(content, 8)
    if not start:
        return "it does not begin as a checkpoint does: it is another file, cut short, or damaged"
    size = 8 + int.from_bytes(content[:8], "little") + int(start[2])
    if len(content) != size:
        what = "cut short" if len(content) < size else "too long"
        return f"it is {what} or damaged: it has {len(content)} bytes, not {size}"
    view = memoryview(content)
    digest = _sha256(view[: start.start(1)], _NO_DIGEST, view[start.end(1) :])
    if digest != start[1].decode():
        return f"it is damaged: its SHA-256 is {digest}, and was {start[1].decode()} when saved"
    return None


def _replace(path: str | Path, *parts: bytes | memoryview) -> None:
    """Let the file consist of these parts, in one step that happens wholly or not at all."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise CheckpointError(f"{path}: there is no folder {target.parent}. Make it first.")
    if target.exists() and not target.is_file():
        raise CheckpointError(f"{path}: this is a folder or a device. Give the name of a file.")
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())  # else the new name may reach the disk before the content does
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        problem = f"it cannot be saved ({error.strerror or error}), and nothing is half written"
        raise CheckpointError(f"{path}: {problem}. Mend the cause and save again.") from error
    finally:  # also after Ctrl-C; once renamed, it is no longer there
        with contextlib.suppress(OSError):
            temporary.unlink()


def _sync_folder(folder: Path) -> None:
    """Bring the new name to the disk, where the system lets one open a folder."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: str | Path) -> bytes:
    try:
        if Path(path).is_file():  # else reading may hang, if it is a pipe
            return Path(path).read_bytes()
        problem = "this is no file" if Path(path).exists() else "there is no such file"
    except OSError as error:
        problem = f"it cannot be read ({error.strerror or error})"
    raise CheckpointError(f"{path}: {problem}. Give the name of a file that save_checkpoint wrote.")
