"""The arguments of DistributedDataParallel that have to be looked at: those for GPUs, the refused.

Source: ``torch.nn.parallel.DistributedDataParallel``, whose arguments they are.
"""

import torch
import torch.distributed as dist
from torch import nn

from .batch_norm import SyncBatchNorm


def refuse(**arguments) -> None:
    """Raise NotImplementedError for the first argument that is neither None nor False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"{name}={value!r} is not supported here: use "
                "torch.nn.parallel.DistributedDataParallel for it"
            )


def refuse_groups(**arguments) -> None:
    """Raise TypeError for a group in another's place: the second here, the sixth in torch 2.6."""
    for name, value in arguments.items():
        if isinstance(value, dist.ProcessGroup):
            raise TypeError(f"{name} is a process group: pass it as process_group=")


def check_module(module: nn.Module, weight: str) -> None:
    """Raise ValueError where something is lazy, nothing is trained, or ``weight`` does not fit."""
    norms = (SyncBatchNorm, nn.SyncBatchNorm)
    if weight == "rows" and any(isinstance(part, norms) for part in module.modules()):
        raise ValueError(
            'weight="rows" weights gradients, and with SyncBatchNorm those contain the other '
            "ranks' losses: weight each rank's loss by rows * k / all rows instead"
        )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ValueError(f"{name} has no shape yet: call the module on a batch first")
    if not any(param.requires_grad for param in module.parameters()):
        raise ValueError("no parameter of the module requires gradients: nothing to average")


def check_gpu(module, device_ids, output_device) -> tuple[list[int] | None, int | None]:
    """Return ``device_ids`` and ``output_device`` as torch keeps them: as numbers of GPUs."""
    if not isinstance(device_ids, (list, tuple, type(None))):
        raise TypeError(f"device_ids must be a list of one GPU, such as [0], not {device_ids!r}")
    if not device_ids and output_device is None:
        return None, None
    devices = {param.device for param in module.parameters()}
    numbers = [_number(device) for device in device_ids or ()]
    if numbers not in [[device.index] for device in devices] or len(devices) > 1:
        where = " and ".join(sorted(map(str, devices)))
        raise ValueError(
            f"device_ids={device_ids} and output_device={output_device}, but the module is on "
            f"{where}: device_ids can name the one GPU on which a module is; leave both out, or "
            "move the module there first, as by module.to(0)"
        )
    return numbers, numbers[0] if output_device is None else _number(output_device)


def _number(device: int | str | torch.device) -> int:
    """Return the number of a GPU; that of "cuda" is the current one's."""
    if isinstance(device, int):
        return device
    index, kind = torch.device(device).index, torch.device(device).type
    if kind != "cuda":
        return -1  # no GPU: refused by its place
    return torch.cuda.current_device() if index is None else index
