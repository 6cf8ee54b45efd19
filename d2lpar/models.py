"""Workshop. Networks as lists of layers, to be cut: LeNet, a ResNet, a GPT.

Each is an ``nn.Sequential`` that takes one tensor and returns the logits. The ResNet is
He et al., "Deep Residual Learning for Image Recognition" (2016), with Dive into Deep
Learning's stem for small images. The GPT is GPT-2 (Radford et al., 2019) without
dropout, and its head has its own weight; chapter 14 shows it.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from .training import init_params


def lenet_layers(scale=0.01, generator=None) -> nn.Sequential:
    """Return ``lenet`` as four layers: images (n, 1, 28, 28) to logits (n, 10).

    The parameters are those of ``init_params``, in their order and shapes.
    """
    W1, b1, W2, b2, W3, b3, W4, b4 = init_params(scale, generator)
    crop = nn.ZeroPad2d((0, -2, 0, -2))
    conv1 = crop, Affine(F.conv2d, W1, b1), nn.ReLU(), nn.AvgPool2d(2)
    conv2 = Affine(F.conv2d, W2, b2), nn.ReLU(), nn.AvgPool2d(2)
    linear1 = nn.Flatten(), Affine(linear, W3, b3), nn.ReLU()
    linear2 = (Affine(linear, W4, b4),)
    layers = [nn.Sequential(*parts) for parts in (conv1, conv2, linear1, linear2)]
    return nn.Sequential(*layers)


class Affine(nn.Module):
    """A convolution or a linear layer: ``function(X, W, b)``."""

    def __init__(self, function: Callable, W: torch.Tensor, b: torch.Tensor):
        super().__init__()
        self.function, self.W, self.b = function, nn.Parameter(W), nn.Parameter(b)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Return what the layer makes of a batch ``X``."""
        return self.function(X, self.W, self.b)


def linear(X: torch.Tensor, W: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``X @ W + b``: W is of shape (inputs, outputs), unlike nn.Linear's."""
    return torch.addmm(b, X, W)


def resnet(widths=(64, 128, 256, 512), num_classes=10, in_channels=1) -> nn.Sequential:
    """Return a ResNet, two blocks for each of ``widths``: images to their logits.

    With the default widths it is ResNet-18, without normalisation in the shortcuts. The
    image is halved before each width but the first.
    """
    before = widths[0]
    convolution = nn.Conv2d(in_channels, before, 3, padding=1)
    layers = [nn.Sequential(convolution, nn.BatchNorm2d(before), nn.ReLU())]
    for i, width in enumerate(widths):
        layers += [
            Residual(before, width, stride=2 if i else 1),
            Residual(width, width),
        ]
        before = width
    head = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes)
    )
    return nn.Sequential(*layers, head)


class Residual(nn.Module):
    """Two convolutions, their output plus the input: (n, c, h, w) to the same."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut = nn.Identity()
        if stride > 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Return (n, out_channels, h / stride, w / stride)."""
        return F.relu(self.convolutions(X) + self.shortcut(X))


def gpt(vocab_size, width=128, num_heads=4, num_blocks=4, length=64) -> nn.Sequential:
    """Return a decoder: tokens (n, length) to logits (n, length, vocab_size)."""
    layers = [Embedding(vocab_size, width, length)]
    layers += [Block(width, num_heads) for _ in range(num_blocks)]
    return nn.Sequential(*layers, Head(vocab_size, width))


class Embedding(nn.Module):
    """A vector per token plus one per position: (n, length) to (n, length, width)."""

    def __init__(self, vocab_size, width, length):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(length, width)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + self.positions(positions)


class Block(nn.Module):
    """Attention and MLP, each added to its input: (n, length, width) to the same."""

    def __init__(self, width, num_heads):
        super().__init__()
        layers = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, num_heads)
        self.norm2, self.mlp = nn.LayerNorm(width), nn.Sequential(*layers)

    def forward(self, X):
        X = X + self.attention(self.norm1(X))
        return X + self.mlp(self.norm2(X))


class Attention(nn.Module):
    """Each position sees itself and those before it: (n, length, width) to the same."""

    def __init__(self, width, num_heads):
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width {width} is not a multiple of {num_heads} heads")
        self.head_width = width // num_heads
        self.inputs = nn.Linear(width, 3 * width)  # outputs: q, k, v of head 0, of 1, …
        self.output = nn.Linear(width, width)

    def forward(self, X):
        heads = self.inputs(X).unflatten(-1, (-1, 3, self.head_width))
        q, k, v = heads.permute(3, 0, 2, 1, 4)  # each (n, heads, length, head_width)
        return self.output(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Head(nn.Sequential):
    """LayerNorm, then the next token's logits: width to vocab_size numbers each."""

    def __init__(self, vocab_size, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocab_size, bias=False)


GPT_LAYERS = {Embedding, Block, Attention, Head, nn.Sequential, nn.Embedding, nn.Linear}
GPT_LAYERS |= {nn.LayerNorm, nn.GELU}
