"""LeNet with its channels cut over several devices, as AlexNet was over two, in one process.

Each device has some of the output channels of every layer. Where a layer *exchanges*, it takes all
channels of the layer before, most of which come from other devices; where it does not, only those
of its own device: nothing is sent, and the network is another one, with fewer weights. Notebook 07
uses this file and builds ``split_lenet``. Source: Krizhevsky, Sutskever and Hinton, "ImageNet
Classification with Deep Convolutional Neural Networks" (2012), section 3.2 and figure 2.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from ..devices import to_device
from ..guards import checked
from ..network import channels_last

LAYERS = ("conv1", "conv2", "linear1", "linear2")
EXCHANGES = LAYERS[1:]  # those that can; the first layer takes the image


def check_split(params, devices, exchange=EXCHANGES):
    """Refuse layers that cannot exchange, and more devices than outputs."""
    if isinstance(exchange, str) or not set(exchange) <= set(EXCHANGES):
        raise ValueError(f"exchange is {exchange!r}, but may name {', '.join(EXCHANGES)}")
    if not 1 <= len(devices) <= 10:
        raise ValueError(f"{len(devices)} devices for channels that can be cut for 1 to 10")


@checked(check_split)
def split_channels(
    params: list[torch.Tensor],
    devices: Sequence[torch.device],
    exchange: Sequence[str] = EXCHANGES,
) -> list[list[torch.Tensor]]:
    """Cut LeNet's eight parameters by output channels: for each device its own, gradients on.

    The weights of a layer that does not exchange lose those from other devices' channels.

    Args:
        params: see ``init_params``.
        devices: at most 10, since ``linear2`` has 10 outputs.
        exchange: the layers that take all channels; the first one takes the image.
    """
    k = len(devices)
    device_params = []
    for d, device in enumerate(devices):
        own = []
        for i, layer in enumerate(LAYERS):
            W, b = params[2 * i : 2 * i + 2]
            out_dim = 0 if layer.startswith("conv") else 1  # a linear layer's weight is (in, out)
            W = W.tensor_split(k, out_dim)[d]
            if i > 0 and layer not in exchange:
                W = own_inputs(W, 1 - out_dim, params[2 * i - 1].numel(), d, k)
            W = channels_last(W) if layer.startswith("conv") else W
            own += [W, b.tensor_split(k)[d]]
        device_params.append(
            [param.detach().to(device, copy=True).requires_grad_() for param in own]
        )
    return device_params


def own_inputs(W: torch.Tensor, dim: int, num_channels: int, d: int, k: int) -> torch.Tensor:
    """Return the part of ``W`` along ``dim`` that takes the input channels of device ``d`` of k.

    A channel is several inputs of a linear layer.
    """
    each = W.shape[dim] // num_channels
    channels = torch.arange(num_channels).tensor_split(k)[d]
    return W.narrow(dim, int(channels[0]) * each, len(channels) * each)


def split_lenet(
    X: torch.Tensor,
    device_params: list[list[torch.Tensor]],
    devices: Sequence[torch.device],
    exchange: Sequence[str] = EXCHANGES,
) -> torch.Tensor:
    """Return the logits, of shape (n, 10), on ``devices[0]``; gradients flow back.

    Every device gets the images, of shape (n, 1, 28, 28). ``device_params`` are those of
    ``split_channels`` for the same ``devices`` and ``exchange``.
    """
    parts = [to_device(X, device, "host", d) for d, device in enumerate(devices)]
    for i, layer in enumerate(LAYERS):
        if layer in exchange:
            parts = exchanged(parts, devices)
        parts = [
            apply_layer(layer, part, *params[2 * i : 2 * i + 2])
            for part, params in zip(parts, device_params, strict=True)
        ]
    return joined(parts, devices, 0)


def apply_layer(layer: str, X: torch.Tensor, W: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return what one layer of LeNet makes of ``X``: (n, channels, …), for its own weights."""
    if layer.startswith("conv"):
        return F.avg_pool2d(F.conv2d(X, W, b).relu_(), 2)
    output = torch.addmm(b, X.flatten(1), W)
    return output.relu_() if layer == "linear1" else output


def exchanged(parts: list[torch.Tensor], devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Give every device the channels of all: k(k - 1) messages."""
    return [joined(parts, devices, d) for d in range(len(devices))]


def joined(parts: list[torch.Tensor], devices: Sequence[torch.device], d: int) -> torch.Tensor:
    """Join the channels of all devices on device ``d``."""
    there = [to_device(part, devices[d], src, d) for src, part in enumerate(parts)]
    return torch.cat(there, dim=1)
