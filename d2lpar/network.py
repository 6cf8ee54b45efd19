"""LeNet from raw tensors: parameters, forward, loss, SGD.

The network, its shapes and its names are those of Dive into Deep Learning, section
"Training on Multiple GPUs"; LeNet is from LeCun et al., "Gradient-based learning
applied to document recognition" (1998). Notebook 02 builds this file.
"""

import torch
from torch.nn import functional as F


def init_params(scale=0.01, generator=None):
    """Return ``[W1, b1, …, W4, b4]``: weights N(0, scale²), biases zero.

    Shapes: (20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10),
    (10,). The gradients are off; ``get_params`` makes the copies that are trained.
    ``generator`` is a ``torch.Generator``, None: torch's global one.
    """
    shapes = (20, 1, 3, 3), (50, 20, 5, 5), (800, 128), (128, 10)
    W1, W2, W3, W4 = (
        torch.randn(shape, generator=generator) * scale for shape in shapes
    )
    b1, b2, b3, b4 = torch.zeros(20), torch.zeros(50), torch.zeros(128), torch.zeros(10)
    return [channels_last(W1), b1, channels_last(W2), b2, W3, b3, W4, b4]


def channels_last(weight):
    """Return the same numbers with channels last in memory, faster on a CPU.

    ``weight.to(memory_format=torch.channels_last)`` would leave W1 alone, whose one
    input channel fits either format, and it is the strides of W1 that choose the format
    of all that follows.
    """
    return torch.empty_like(weight, memory_format=torch.channels_last).copy_(weight)


def lenet(X, params):
    """Return the logits, of shape (n, 10), of images ``X`` of shape (n, 1, 28, 28)."""
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    X = X[:, :, :-2, :-2]  # the second pooling drops what comes from the other pixels
    h1 = F.avg_pool2d(F.conv2d(X, W1, b1).relu_(), 2)  # (n, 20, 12, 12)
    h2 = F.avg_pool2d(F.conv2d(h1, W2, b2).relu_(), 2)  # (n, 50, 4, 4)
    h3 = torch.addmm(b3, h2.flatten(1), W3).relu_()  # (n, 128)
    return torch.addmm(b4, h3, W4)  # (n, 10)


def loss(y_hat, y):
    """Return the cross-entropy of each example, (n,): neither summed nor averaged."""
    return F.cross_entropy(y_hat, y, reduction="none")


@torch.no_grad()
def sgd(params, lr, batch_size):
    """Subtract lr / batch_size times the summed gradient in place, then clear it.

    ``batch_size`` counts the rows of the whole batch, over all devices.
    """
    for param in params:
        param.sub_(param.grad, alpha=lr / batch_size)
        param.grad = None
