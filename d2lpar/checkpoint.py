"""Checkpoints: one file that survives a kill, and in which no changed bit goes unseen.

A job that is killed while it writes over its only checkpoint has lost the old one and the new one.
So the new one is written beside the old one and brought to the disk (fsync), and only then takes
its name, in one step (rename). For the order of these steps see Pillai et al., "All File Systems
Are Not Created Equal: On the Complexity of Crafting Crash-Consistent Applications" (OSDI 2014).

The file is in the safetensors format (https://github.com/huggingface/safetensors): the length of
the header as a little-endian uint64, the header in JSON, the bytes of the tensors. Nothing is
pickled, so loading runs no code from the file. The header's metadata is one text in JSON: a SHA-256
of the whole file, taken while zeros stand in the digest's own place, and what else there is to
know. Notebook 05 uses this file.
"""

import contextlib
import hashlib
import json
import os
import stat
import uuid
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from .devices import as_device

_NO_DIGEST = b"0" * 64
_BEFORE_DIGEST = rb'"checkpoint":"{\"sha256\": \"'  # no name has it: its quotes are escaped
_DTYPES = frozenset({torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64})
_DTYPES |= {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded; the message names the file and what to do."""


def save_checkpoint(
    path: str | Path, tensors: dict[str, torch.Tensor], info: dict[str, Any] | None = None
) -> None:
    """Save tensors, and information about them, as one file in place of the one that was there.

    Once this returns, the checkpoint is on the disk. A process that is killed before leaves the old
    file or the new one whole, and perhaps beside it a ``<name>.<32 hex digits>.tmp`` (of a long
    name, the beginning), which can be deleted. A save that raises leaves no such file. Of several
    saves at once, one wins.

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
    info = {} if info is None else info
    _check_info(info)
    text = json.dumps({"sha256": _NO_DIGEST.decode(), "info": info})
    content = bytearray(safetensors.torch.save(_plain_copies(tensors), {"checkpoint": text}))
    place = _place_of_digest(content)
    content[place] = hashlib.sha256(content).hexdigest().encode()
    _replace(path, content)


def load_checkpoint(
    path: str | Path, device: torch.device | str = "cpu"
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return ``(tensors, info)`` as they were saved, bit for bit; the tensors are on ``device``.

    Raises:
        CheckpointError: there is no such file, or it is not what save_checkpoint wrote: another
            file, cut short, or changed in as little as one bit.
        ValueError: this machine has no such device.
    """
    device = as_device(device)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe may never end, and a device does not
            raise OSError("it is a folder, a pipe or a device")
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        problem = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
        raise CheckpointError(f"{path}: {problem}. Give the name of a checkpoint.") from error
    if flaw := _flaw(content):
        raise CheckpointError(f"{path}: {flaw}. Copy it anew, or load an older checkpoint.")
    try:
        tensors = safetensors.torch.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        info = json.loads(header["__metadata__"]["checkpoint"])["info"]
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


def _check_info(info: dict[str, Any]) -> None:
    """Raise unless the information comes back from JSON as it is."""
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


def _place_of_digest(content: bytes | bytearray) -> slice:
    begin = content.index(_BEFORE_DIGEST) + len(_BEFORE_DIGEST)
    return slice(begin, begin + len(_NO_DIGEST))


def _flaw(content: bytes) -> str | None:
    """Return how this differs from what save_checkpoint wrote, or None if in no bit."""
    if _BEFORE_DIGEST not in content:
        return "there is no checkpoint in it: it is another file, cut short, or damaged"
    place = _place_of_digest(content)
    blank = bytearray(content)
    blank[place] = _NO_DIGEST
    found, saved = hashlib.sha256(blank).hexdigest(), content[place].decode(errors="replace")
    if found != saved:
        return f"it is cut short or damaged: its SHA-256 is {found}, and was {saved} when saved"
    return None


def _replace(path: str | Path, content: bytearray) -> None:
    """Let this be the content of the file, in one step that happens wholly or not at all."""
    target = _target(path)
    temporary = target.with_name(f"{target.name[:50]}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
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


def _target(path: str | Path) -> Path:
    """Return the file that has this name, or will have it; raise unless it can be written."""
    try:
        target = Path(os.path.realpath(path))
        is_folder, in_the_way = target.parent.is_dir(), target.exists() and not target.is_file()
    except (OSError, ValueError) as error:  # a name of over 255 characters, or with a NUL
        problem = f"no file can have this name here ({getattr(error, 'strerror', None) or error})"
        raise CheckpointError(f"{path}: {problem}. Give another.") from error
    if not is_folder:
        raise CheckpointError(f"{path}: there is no folder {target.parent}. Make it first.")
    if in_the_way:
        raise CheckpointError(f"{path}: this is a folder or a device. Give the name of a file.")
    return target


def _sync_folder(folder: Path) -> None:
    """Bring the new name to the disk, where the system lets one open a folder."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
