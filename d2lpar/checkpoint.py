"""Workshop. Checkpoints that survive a kill, and load bit for bit or not at all.

A job that is killed while it writes over its only checkpoint loses the old one and the
new one. So the new one is written beside it, brought to the disk (fsync), and only then
takes its name, in one step (rename): see Pillai et al., "All File Systems Are Not
Created Equal" (OSDI 2014). The format is safetensors: loading runs no code from the
file. Its header has everything that is no tensor, as JSON, and a SHA-256 of the whole
file.
"""

import hashlib
import json
import os
from pathlib import Path

import safetensors.torch
import torch

# a private name, which torch's own FSDP uses, too
from torch.utils import _pytree as pytree

PLACE = b"SHA-256 " + b"-" * 64  # of the digest, in the file from which it is computed
# Containers that a state may have
KINDS = ["builtins.dict", "builtins.list", "builtins.tuple", "collections.OrderedDict"]


class CheckpointError(RuntimeError):
    """A file cannot be loaded as a checkpoint."""


def save_checkpoint(path, state):
    """Write ``state`` to a file, in place of an older one of this name.

    ``state`` is a dict, as deep as you like, of tensors and what JSON can hold. A kill
    leaves the old file or the new one whole, and perhaps a ``<path>.unfinished``.
    """
    leaves, tree = pytree.tree_flatten(state)
    tensors = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            # a copy: two that share memory, such as tied weights, become two
            tensors[str(i)] = leaf.detach().to("cpu", copy=True).contiguous()
            leaves[i] = None
    text = json.dumps({"leaves": leaves, "tree": pytree.treespec_dumps(tree)})
    back = json.loads(text)
    read = back["leaves"], read_tree(back["tree"])
    if repr(read) != repr((leaves, tree)):  # NaN does not equal itself
        raise TypeError("the state would not come back from JSON as it is")
    content = safetensors.torch.save(tensors, {"digest": PLACE.decode(), "state": text})
    digest = f"SHA-256 {hashlib.sha256(content).hexdigest()}"
    replace_file(Path(path), content.replace(PLACE, digest.encode(), 1))


def replace_file(path, content):
    """Let this be the file's content: all of it, or the old one stays."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with open(unfinished, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # or the name may reach the disk before the content
    os.replace(unfinished, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # brings the new name to the disk
    os.close(folder)


def read_tree(text):
    """Return the structure that ``treespec_dumps`` has written, of KINDS alone."""
    specs = [json.loads(text)[1]]
    while specs:
        spec = specs.pop()
        if spec["type"] not in [*KINDS, None]:  # torch would import what the file names
            raise TypeError(f"a state cannot hold a {spec['type']}")
        specs += spec["children_spec"]
    return pytree.treespec_loads(text)


def load_checkpoint(path):
    """Return the state that was saved; its tensors are on the CPU.

    CheckpointError: the file is cut short or damaged, or is no checkpoint.
    """
    content = Path(path).read_bytes()
    try:
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length])["__metadata__"]
        digest = metadata["digest"].encode()
        whole = content.replace(digest, PLACE, 1)
        if digest != b"SHA-256 " + hashlib.sha256(whole).hexdigest().encode():
            raise ValueError("the digest is another")
        tensors = safetensors.torch.load(content)
        state = json.loads(metadata["state"])
        leaves, tree = state["leaves"], read_tree(state["tree"])
    except Exception as error:  # its kind depends on where the damage is
        problem = "it is no checkpoint of save_checkpoint, or cut short, or damaged"
        raise CheckpointError(f"{path}: {problem}; load an older one") from error
    for i, tensor in tensors.items():
        leaves[int(i)] = tensor
    return pytree.tree_unflatten(leaves, tree)
