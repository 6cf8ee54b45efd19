"""The networks to be cut: they are what they are called, and marked where they are."""

from functools import partial

import pytest
import torch
from torch import nn

from d2lpar import init_params, lenet
from d2lpar.models import Copy, Sum, lenet_layers, resnet, transformer

SMALL = {"width": 16, "num_heads": 4, "num_blocks": 2, "length": 6}
small_transformer = partial(transformer, 50, **SMALL)
MODELS = {
    "lenet": (lenet_layers, torch.rand(3, 1, 28, 28), (3, 10)),
    "resnet": (lambda: resnet((4, 8)), torch.rand(3, 1, 28, 28), (3, 10)),
    "transformer": (small_transformer, torch.randint(50, (3, 6)), (3, 6, 50)),
}


@pytest.mark.parametrize("make, X, shape", MODELS.values(), ids=MODELS)
def test_a_model_is_a_list_of_layers_that_sums_what_it_copied(make, X, shape):
    model, marks = make(), []
    assert isinstance(model, nn.Sequential) and len(model) >= 4
    for part in model.modules():
        if isinstance(part, (Copy, Sum)):
            part.register_forward_hook(lambda part, *_: marks.append(type(part)))
    for layer in model:
        X = layer(X)
    assert X.shape == shape
    assert marks and marks == ([Copy, Sum] * len(marks))[: len(marks)]
    X.square().mean().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_lenet_layers_are_lenet():
    X = torch.rand(5, 1, 28, 28)
    model = lenet_layers(0.1, torch.Generator().manual_seed(0))
    params = init_params(0.1, torch.Generator().manual_seed(0))
    assert all(map(torch.equal, model.parameters(), params))
    assert torch.equal(model(X), lenet(X, params))


def test_default_resnet_is_resnet_18():
    model = resnet(num_classes=1000, in_channels=3)
    convolutions = [part for part in model.modules() if isinstance(part, nn.Conv2d)]
    assert sum(conv.kernel_size == (3, 3) for conv in convolutions) == 17
    trunk = sum(p.numel() for layer in list(model)[1:] for p in layer.parameters())
    # torchvision's resnet18 has 11,689,512, of which its stem's convolution and norm
    # are 9,536, and a norm on each of three shortcuts, 128, 256 and 512 wide, 1,792
    assert trunk == 11_689_512 - 9_536 - 1_792


def test_transformer_does_not_look_ahead():
    model, tokens = small_transformer().eval(), torch.randint(50, (2, 6))
    changed = tokens.clone()
    changed[:, 4] = (tokens[:, 4] + 1) % 50
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    # the last looks back
    assert (before[:, 4:] - after[:, 4:]).abs().amax(dim=(0, 2)).min() > 1e-4
