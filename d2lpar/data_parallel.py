"""DataParallel, taken apart: scatter, replicate, parallel_apply, gather.

One process drives all devices. In each iteration it splits the batch, copies the module
to every device, calls the copies in threads and joins their outputs. Chapter 05 writes
this file. Source: ``torch.nn.parallel``, whose functions need GPUs.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch
from torch import nn

from .devices import as_device, check_devices, record_message, to_device


def scatter(inputs, devices, dim=0):
    """Split every tensor of ``inputs`` along ``dim``; return what each device gets.

    Tuples, lists and dicts may be nested; what is no tensor goes to every device. It
    splits by ``chunk``, as torch's does: there are fewer shards than devices where
    there are not enough rows. Gradients flow back.
    """
    if len(sizes := rows_of(inputs, dim)) > 1:
        raise ValueError(
            f"the tensors to split have {sizes} rows, and need equally many"
        )
    if isinstance(inputs, torch.Tensor):
        devices = check_devices(devices)
        src = position(inputs.device, devices)
        shards = zip(inputs.chunk(len(devices), dim), devices)
        return [to_device(shard, d, src, i) for i, (shard, d) in enumerate(shards)]
    if isinstance(inputs, tuple | list | dict) and inputs:
        columns = [scatter(part, devices, dim) for part in parts_of(inputs)]
        return [rebuild(inputs, parts) for parts in zip(*columns)]
    return [inputs] * len(devices)


def rows_of(inputs, dim=0):
    """Return the different sizes along ``dim`` of all tensors in ``inputs``, sorted."""
    if isinstance(inputs, torch.Tensor):
        return [inputs.size(dim)]
    if isinstance(inputs, tuple | list | dict):
        return sorted({n for part in parts_of(inputs) for n in rows_of(part, dim)})
    return []


def parts_of(tree):
    """Return the items of a tuple or list, or the values of a dict."""
    return list(tree.values() if isinstance(tree, dict) else tree)


def rebuild(tree, parts):
    """Return a tuple, list or dict of the type of ``tree``, with other parts."""
    if isinstance(tree, dict):
        return type(tree)(zip(tree, parts))
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def position(device, devices):
    """Return where ``devices`` names ``device``, or "host": its name in the ledger."""
    return devices.index(device) if device in devices else "host"


class Broadcast(torch.autograd.Function):
    """Copies of tensors for all devices; their gradients are added up in backward."""

    @staticmethod
    def forward(ctx, devices, *tensors):
        """Return the copies for device 0, which share memory, then those for 1, …."""
        ctx.devices = devices
        ctx.set_materialize_grads(False)  # of a copy that is not used, it is None
        copies = [tensor.detach() for tensor in tensors]
        for i in range(1, len(devices)):
            for tensor in tensors:
                record_message(tensor, 0, i)
                copies.append(tensor.to(devices[i], copy=True))
        trained = [tensor.requires_grad for tensor in tensors] * len(devices)
        frozen = [copy for copy, is_trained in zip(copies, trained) if not is_trained]
        ctx.mark_non_differentiable(*frozen)
        return tuple(copies)

    @staticmethod
    def backward(ctx, *grads):
        """Add up the gradients of tensor j: they are at positions j, j + n, …."""
        n, sums = len(grads) // len(ctx.devices), []
        for j in range(n):
            found = [(i, g) for i, g in enumerate(grads[j::n]) if g is not None]
            there = [to_device(g, ctx.devices[0], i, 0) for i, g in found]
            sums.append(sum(there) if there else None)
        return None, *sums  # None is for the argument ``devices``


def replicate(module, devices):
    """Return a copy of ``module`` per device; gradients of all flow to ``module``.

    Tied parameters stay tied. Replica 0 works on the module's own buffers, so that its
    running statistics go on; what the others write into theirs is lost.
    """
    devices, params = check_devices(devices), list(module.parameters())
    state = params + list(module.buffers())
    if elsewhere := {str(tensor.device) for tensor in state} - {str(devices[0])}:
        raise ValueError(f"the module is on {elsewhere}: move it to {devices[0]}")
    copies, replicas = Broadcast.apply(devices, *state), []
    for i in range(len(devices)):
        replaced = state if i else params
        twins = dict(zip(replaced, copies[i * len(state) :]))
        replicas.append(with_twins(module, twins))
    return replicas


def with_twins(module, twins):
    """Return a shallow copy of ``module``, with the twins of its tensors in it."""
    replica = module.__new__(type(module))
    vars(replica).update(vars(module))
    for name in ("_parameters", "_buffers"):
        own = vars(module)[name].items()
        setattr(replica, name, {key: twins.get(tensor, tensor) for key, tensor in own})
    parts = module._modules.items()
    replica._modules = {key: part and with_twins(part, twins) for key, part in parts}
    return replica


def parallel_apply(modules, inputs, kwargs=None):
    """Call each module in a thread of its own; return the outputs, in order.

    ``inputs[i]`` is the tuple of arguments of ``modules[i]``, or its only one. Threads
    have the caller's grad mode and autocast. An error says which replica it was.
    """
    grad = torch.is_grad_enabled()
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    regions = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]

    def call(i, module, args, options):
        args = args if isinstance(args, tuple | list) else (args,)
        with ExitStack() as stack:  # torch keeps these settings for each thread
            stack.enter_context(torch.set_grad_enabled(grad))
            for region in regions:
                stack.enter_context(torch.autocast(*region))
            try:
                return module(*args, **options)
            except Exception as error:
                error.add_note(f"This was replica {i}.")
                raise

    with ThreadPoolExecutor(max(1, len(modules))) as pool:
        options = kwargs or [{}] * len(modules)
        return list(pool.map(call, range(len(modules)), modules, inputs, options))


def gather(outputs, device, dim=0):
    """Join the outputs of several devices on ``device``: the reverse of ``scatter``.

    Tensors without dimensions, such as losses, become a vector. Gradients flow back.
    """
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        dst = position(device, [output.device for output in outputs])
        there = [to_device(output, device, i, dst) for i, output in enumerate(outputs)]
        return torch.cat(there, dim) if first.dim() else torch.stack(there)
    if isinstance(first, dict):
        groups = [[output[key] for output in outputs] for key in first]
    elif isinstance(first, tuple | list):
        groups = zip(*outputs, strict=True)
    elif first is None:
        return None
    else:
        problem = f"cannot gather a {type(first).__name__}"
        raise TypeError(f"{problem}: return tensors, or tuples, lists, dicts of them")
    return rebuild(first, [gather(group, device, dim) for group in groups])


class DataParallel(nn.Module):
    """A module on several devices, used like the module, as ``nn.DataParallel``.

    ``device_ids`` are devices, their names, or numbers of GPUs: ``["cpu"] * 3`` are
    three virtual devices. The module is on the first; the outputs are joined on
    ``output_device``, by default the first, too. The rows are dimension ``dim``.
    """

    def __init__(self, module, device_ids, output_device=None, dim=0):
        super().__init__()
        self.module, self.dim = module, dim
        self.devices = check_devices(device_ids)
        there = self.devices[0] if output_device is None else output_device
        self.output_device = as_device(there)

    def forward(self, *inputs, **kwargs):
        """Return the module's output for the whole batch."""
        has_rows = rows_of((inputs, kwargs), self.dim)
        devices = self.devices if has_rows else self.devices[:1]
        shards = scatter((inputs, kwargs), devices, self.dim)
        args, kwargs = zip(*shards)
        if len(devices) == 1:
            return self.module(*args[0], **kwargs[0])
        replicas = replicate(self.module, devices[: len(shards)])
        outputs = parallel_apply(replicas, args, kwargs)
        return gather(outputs, self.output_device, self.dim)
