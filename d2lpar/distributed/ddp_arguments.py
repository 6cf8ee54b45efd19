"""What ``torch.nn.parallel.DistributedDataParallel`` takes, and ours refuses."""

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _get_device_index

from ..ranks.transport import check_group
from .batch_norm import SyncBatchNorm

REFUSED = (
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
    "mixed_precision",
    "device_mesh",
    "skip_all_reduce_unused_params",
    "bucket_cap_mb_list",
)


def check_arguments(
    *, module, device_ids, init_sync, process_group, bucket_cap_mb, weight, **others
) -> None:
    """Refuse arguments that are not supported, and what cannot be meant."""
    for name in REFUSED:
        if others[name] is not None and others[name] is not False:
            raise NotImplementedError(
                f"{name}={others[name]!r} is not supported here: use "
                "torch.nn.parallel.DistributedDataParallel for it"
            )
    if any(isinstance(value, dist.ProcessGroup) for value in (device_ids, init_sync)):
        # given by position, where torch has another argument
        raise TypeError("pass the process group as process_group=")
    check_group(process_group)
    if weight not in ("equal", "rows"):
        raise ValueError(f'weight must be "equal" or "rows", not {weight!r}')
    if bucket_cap_mb is not None and not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb must be positive, not {bucket_cap_mb!r}")
    check_module(module, weight)
    check_gpu(module, device_ids, others["output_device"])


def check_module(module: nn.Module, weight: str) -> None:
    """Refuse a module that is lazy, has nothing to train or does not fit ``weight``."""
    norms = (SyncBatchNorm, nn.SyncBatchNorm)
    if weight == "rows" and any(isinstance(part, norms) for part in module.modules()):
        raise ValueError(
            'weight="rows" weights gradients, and with SyncBatchNorm those contain'
            " the other ranks' losses: weight each rank's loss by rows * k / all rows"
            " instead"
        )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ValueError(
                f"{name} has no shape yet: call the module on a batch first"
            )
    if not any(param.requires_grad for param in module.parameters()):
        raise ValueError(
            "no parameter of the module requires gradients: nothing to average"
        )


def check_gpu(module: nn.Module, device_ids, output_device) -> None:
    """Refuse ``device_ids`` that are not a list of the one GPU of the module."""
    if not isinstance(device_ids, (list, tuple, type(None))):
        raise TypeError(
            f"device_ids must be a list of one GPU, such as [0], not {device_ids!r}"
        )
    devices = {param.device for param in module.parameters()}
    numbers, output = gpu_numbers(device_ids, output_device)
    named = [torch.device("cuda", number) for number in numbers or ()]
    if output is not None and named != list(devices):
        where = " and ".join(sorted(map(str, devices)))
        raise ValueError(
            f"device_ids={device_ids} and output_device={output_device}, but the module"
            f" is on {where}: device_ids can name the one GPU on which a module is;"
            " leave both out, or move the module there first, as by module.to(0)"
        )


def gpu_numbers(device_ids, output_device) -> tuple[list[int] | None, int | None]:
    """Return ``device_ids`` and ``output_device`` as torch does, as numbers."""
    numbers = [_get_device_index(device, optional=True) for device in device_ids or ()]
    if output_device is not None:
        return numbers or None, _get_device_index(output_device, optional=True)
    return (numbers, numbers[0]) if numbers else (None, None)
