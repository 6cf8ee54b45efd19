"""Chapter 05. DataParallel, taken apart: scatter, replicate, apply, gather.

In each iteration, one process splits the batch, copies the module to every device, and
joins the outputs. Source: ``torch.nn.parallel``.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

# a private name, which torch's own FSDP uses, too
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .devices import as_device, check_devices, record_message, to_device
from .memory import watched


def scatter(inputs, devices, dim=0):
    """Split every tensor of ``inputs`` along ``dim``; return what each device gets.

    Tuples, lists and dicts may be nested; anything else goes to every device. Tensors
    are split by ``chunk``, as torch's scatter does, which may give fewer shards than
    devices: 2, 2 and 1 for 5 rows and 4 devices. Shards are copies, and may be written
    to. A single device gets the inputs as they are. Gradients flow back.
    """
    devices = check_devices(devices)
    leaves, tree = tree_flatten(inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if len(devices) > 1:
        if not all(tensor.dim() for tensor in tensors):
            raise ValueError("a tensor without dimensions has no rows: pass a number")
        sizes = sorted({tensor.size(dim) for tensor in tensors})
        if len(sizes) > 1:
            raise ValueError(f"tensors to split have {sizes} rows: pass equally many")
    columns = [shards_of(leaf, devices, dim) for leaf in leaves]
    # zip stops where the tensors' shards end
    return [tree_unflatten(parts, tree) for _, *parts in zip(devices, *columns)]


def shards_of(leaf, devices, dim):
    """Return a tensor's shards, or anything else for each device."""
    if not isinstance(leaf, torch.Tensor):
        return [leaf] * len(devices)
    src, shards = position(leaf.device, devices), [leaf]
    if len(devices) > 1:
        shards = [part.clone() for part in leaf.chunk(len(devices), dim)]
    pairs = enumerate(zip(shards, devices))
    return [to_device(shard, device, src, i) for i, (shard, device) in pairs]


def position(device, devices):
    """Return where ``devices`` names ``device``, or "host": its name in the ledger."""
    return devices.index(device) if device in devices else "host"


class Broadcast(torch.autograd.Function):
    """Copies of a tensor for all devices; their gradients are added up in backward."""

    @staticmethod
    def forward(ctx, tensor, devices):
        """Return a copy per device; that of device 0 shares the tensor's memory."""
        ctx.devices = devices
        for i in range(1, len(devices)):
            record_message(tensor, 0, i)
        others = [tensor.to(device, copy=True) for device in devices[1:]]
        return tensor.detach(), *others

    @staticmethod
    def backward(ctx, *grads):
        """Return the sum of the copies' gradients, and None for ``devices``."""
        moved = [to_device(grad, ctx.devices[0], i, 0) for i, grad in enumerate(grads)]
        return sum(moved[1:], moved[0]), None


def replicate(module, devices):
    """Return a copy of ``module`` per device; gradients of all flow to ``module``.

    Tied parameters stay tied. Replica 0 shares the module's memory, so that its running
    statistics go on; what the others write into theirs is lost.
    """
    devices, state = check_devices(devices), [*module.parameters(), *module.buffers()]
    if elsewhere := {str(tensor.device) for tensor in state} - {str(devices[0])}:
        raise ValueError(f"the module is on {elsewhere}: move it to {devices[0]}")
    copies = {tensor: Broadcast.apply(tensor, devices) for tensor in state}
    replicas = []
    for i in range(len(devices)):
        twins = {tensor: copies[tensor][i] for tensor in state}
        replicas.append(with_twins(module, twins))
    return replicas


def with_twins(module, twins):
    """Return a shallow copy of a module, with the twins of its tensors and modules."""
    if module is None or module in twins:
        return twins.get(module)
    replica = twins[module] = module.__new__(type(module))
    vars(replica).update(vars(module))
    for name in ("_parameters", "_buffers"):
        own = vars(module)[name].items()
        setattr(replica, name, {key: twins.get(tensor) for key, tensor in own})
    parts = module._modules.items()
    replica._modules = {key: with_twins(part, twins) for key, part in parts}
    return replica


def parallel_apply(modules, inputs, kwargs=None):
    """Call all modules at the same time, in threads; return the outputs, in order.

    ``inputs[i]`` is the tuple of arguments of ``modules[i]``, or its only one. Threads
    take over the caller's grad mode and torch's autocast.
    """
    grad = torch.is_grad_enabled()
    kind = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    cast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def call(module, args, options):
        args = args if isinstance(args, tuple | list) else (args,)
        # torch keeps these settings for each thread
        with torch.set_grad_enabled(grad), torch.autocast(*cast), watched():
            return module(*args, **options)

    calls = zip(modules, inputs, kwargs or [{}] * len(modules), strict=True)
    with ThreadPoolExecutor(max(1, len(modules))) as pool:
        futures = [pool.submit(call, *each) for each in calls]
    return [future.result() for future in futures]


def gather(outputs, device, dim=0):
    """Join the outputs of several devices on ``device``: the reverse of ``scatter``.

    Tensors without dimensions, such as losses, become a vector. Gradients flow back.
    """
    columns, trees = zip(*map(tree_flatten, outputs))
    if any(tree != trees[0] for tree in trees):
        raise ValueError(f"the outputs are not built alike: {trees}")
    joined = [join(parts, as_device(device), dim) for parts in zip(*columns)]
    return tree_unflatten(joined, trees[0])


def join(parts, device, dim):
    """Return the parts as one tensor on ``device``; None if all of them are None."""
    if all(part is None for part in parts):
        return None
    for part in parts:
        if not isinstance(part, torch.Tensor):
            raise TypeError(f"cannot gather a {type(part).__name__}: return tensors")
    dst = position(device, [part.device for part in parts])
    moved = [to_device(part, device, i, dst) for i, part in enumerate(parts)]
    return torch.cat(moved, dim) if parts[0].dim() else torch.stack(moved)


class DataParallel(nn.Module):
    """A module on several devices, used like the module, as ``nn.DataParallel``.

    ``device_ids`` are devices, or numbers of GPUs: ``["cpu"] * 3`` are three virtual
    devices. The module is on the first; the outputs are joined on ``output_device``, by
    default the first, too. The rows are dimension ``dim``.
    """

    def __init__(self, module, device_ids, output_device=None, dim=0):
        super().__init__()
        self.module, self.dim = module, dim
        self.devices = check_devices(device_ids)
        there = self.devices[0] if output_device is None else output_device
        self.output_device = as_device(there)

    def forward(self, *inputs, **kwargs):
        """Return the module's output for the whole batch."""
        devices = self.devices
        if not any(map(torch.is_tensor, tree_leaves((inputs, kwargs)))):
            devices = devices[:1]  # nothing to split
        shards = scatter((inputs, kwargs), devices, self.dim)
        args, kwargs = zip(*shards)
        if len(devices) == 1:
            return self.module(*args[0], **kwargs[0])
        replicas = replicate(self.module, devices[: len(shards)])
        outputs = parallel_apply(replicas, args, kwargs)
        return gather(outputs, self.output_device, self.dim)
