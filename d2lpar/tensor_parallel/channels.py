"""LeNet with its channels cut over devices, as AlexNet was over two, in one process.

Each device has some of the output channels of every layer. A layer that *exchanges*
takes all channels of the layer before; one that does not takes only those of its
device: nothing is sent, and the network has fewer weights. Notebook 14 uses this file.
Source: Krizhevsky, Sutskever and Hinton, "ImageNet Classification with Deep
Convolutional Neural Networks" (2012), section 3.2.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from ..devices import to_device
from ..guards import checked

LAYERS = ("conv1", "conv2", "linear1", "linear2")
EXCHANGES = LAYERS[1:]  # those that can; the first layer takes the image


def check_split(devices, exchange, **_) -> None:
    """Refuse layers that cannot exchange, and more devices than outputs."""
    if isinstance(exchange, str) or not set(exchange) <= set(EXCHANGES):
        raise ValueError(
            f"exchange is {exchange!r}, but may name {', '.join(EXCHANGES)}"
        )
    if not 1 <= len(devices) <= 10:
        raise ValueError(
            f"{len(devices)} devices for channels that can be cut for 1 to 10"
        )


@checked(check_split)
def split_channels(
    params: list[torch.Tensor],
    devices: Sequence[torch.device],
    exchange: Sequence[str] = EXCHANGES,
) -> list[list[torch.Tensor]]:
    """Return each device's channels of LeNet's parameters, as copies.

    The weights of a layer not in ``exchange`` lose those from other devices' channels.
    """
    k = len(devices)
    device_params = [[] for _ in devices]
    for i, layer in enumerate(LAYERS):
        W, b = params[2 * i : 2 * i + 2]
        is_conv = layer.startswith("conv")
        outputs, inputs = (0, 1) if is_conv else (1, 0)  # dimensions of the weight
        for d, device in enumerate(devices):
            own_W, own_b = W.tensor_split(k, outputs)[d], b.tensor_split(k)[d]
            if i > 0 and layer not in exchange:
                num_channels = len(params[2 * i - 1])  # of the layer before
                own_W = own_inputs(own_W, inputs, num_channels, k)[d]
            if is_conv:
                own_W = own_W.to(memory_format=torch.channels_last)
            for param in (own_W, own_b):
                device_params[d].append(
                    param.detach().to(device, copy=True).requires_grad_()
                )
    return device_params


def own_inputs(
    W: torch.Tensor, dim: int, num_channels: int, k: int
) -> list[torch.Tensor]:
    """Cut the inputs of ``W`` into ``k`` parts of whole channels."""
    channels = W.unflatten(dim, (num_channels, -1))  # a channel is 16 inputs of linear1
    return [part.flatten(dim, dim + 1) for part in channels.tensor_split(k, dim)]


def split_lenet(
    X: torch.Tensor,
    device_params: list[list[torch.Tensor]],
    devices: Sequence[torch.device],
    exchange: Sequence[str] = EXCHANGES,
) -> torch.Tensor:
    """Return the logits, of shape (n, 10), on ``devices[0]``; gradients flow back.

    Every device gets the images (n, 1, 28, 28); ``device_params`` are those of
    ``split_channels``.
    """
    X = X[:, :, :-2, :-2]  # as in lenet
    parts = [to_device(X, device, "host", d) for d, device in enumerate(devices)]
    for i, layer in enumerate(LAYERS):
        if layer in exchange:
            parts = exchanged(parts, devices)
        parts = [
            apply_layer(layer, part, *params[2 * i : 2 * i + 2])
            for part, params in zip(parts, device_params, strict=True)
        ]
    return joined(parts, devices, 0)


def apply_layer(
    layer: str, X: torch.Tensor, W: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """Return a LeNet layer's output of ``X``: (n, channels, …), for its own weights."""
    if layer.startswith("conv"):
        return F.avg_pool2d(F.conv2d(X, W, b).relu_(), 2)
    output = torch.addmm(b, X.flatten(1), W)
    return output.relu_() if layer == "linear1" else output


def exchanged(
    parts: list[torch.Tensor], devices: Sequence[torch.device]
) -> list[torch.Tensor]:
    """Give every device the channels of all: k(k - 1) messages."""
    return [joined(parts, devices, d) for d in range(len(devices))]


def joined(
    parts: list[torch.Tensor], devices: Sequence[torch.device], d: int
) -> torch.Tensor:
    """Join the channels of all devices on device ``d``."""
    there = [to_device(part, devices[d], src, d) for src, part in enumerate(parts)]
    return torch.cat(there, dim=1)
