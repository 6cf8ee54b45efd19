"""The networks to be cut: they are what they are called, and marked where they are."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from d2lpar import init_params, lenet
from d2lpar.models import Attention, Residual, gpt, lenet_layers, resnet

SMALL = {"width": 16, "num_heads": 4, "num_blocks": 2, "length": 6}
small_gpt = partial(gpt, 50, **SMALL)
MODELS = {
    "lenet": (lenet_layers, torch.rand(3, 1, 28, 28), (3, 10)),
    "resnet": (lambda: resnet((4, 8)), torch.rand(3, 1, 28, 28), (3, 10)),
    "gpt": (small_gpt, torch.randint(50, (3, 6)), (3, 6, 50)),
}


@pytest.mark.parametrize("make, X, shape", MODELS.values(), ids=MODELS)
def test_a_model_is_a_list_of_layers(make, X, shape):
    model = make()
    assert isinstance(model, nn.Sequential) and len(model) >= 4
    for layer in model:
        X = layer(X)
    assert X.shape == shape
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


def test_the_image_is_halved_before_each_width_but_the_first():
    X, sizes = torch.rand(2, 1, 28, 28), []
    for layer in resnet((4, 8, 16))[:-1]:
        X = layer(X)
        sizes.append((X.shape[1], X.shape[3]))
    assert sizes == [(4, 28)] * 3 + [(8, 14)] * 2 + [(16, 7)] * 2


@pytest.mark.parametrize("out_channels, stride", [(4, 1), (8, 1), (8, 2)])
def test_a_residual_block_adds_its_input(out_channels, stride):
    block, X = Residual(4, out_channels, stride), torch.randn(2, 4, 6, 6)
    conv1, norm1, conv2, norm2 = (block.convolutions[i] for i in (0, 1, 3, 4))
    inner = norm2(conv2(F.relu(norm1(conv1(X)))))
    expected = F.relu(inner + (X if out_channels == 4 else block.shortcut(X)))
    torch.testing.assert_close(block(X), expected)


def test_a_gpt_computes_what_torchs_layers_compute():
    model, tokens = small_gpt(), torch.randint(50, (3, 5))
    embedding, *blocks, head = model
    X = embedding.tokens.weight[tokens] + embedding.positions.weight[:5]
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    for block in blocks:
        for norm in (block.norm1, block.norm2):
            nn.init.normal_(norm.weight)
        inputs, output = block.attention.inputs, block.attention.output
        # ours are ordered by head, then q, k, v; torch's the other way round
        own = [p.unflatten(0, (4, 3, 4)).transpose(0, 1) for p in inputs.parameters()]
        own += [*output.parameters(), *block.mlp.parameters()]
        own += [*block.norm1.parameters(), *block.norm2.parameters()]
        options = {"activation": F.gelu, "batch_first": True, "norm_first": True}
        torchs = nn.TransformerEncoderLayer(16, 4, 64, dropout=0.0, **options)
        for param, value in zip(torchs.parameters(), own, strict=True):
            param.data.copy_(value.reshape(param.shape))
        X = torchs(X, mask, is_causal=True)
    logits = F.linear(head.norm(X), head.logits.weight)
    torch.testing.assert_close(model(tokens), logits)


def test_attention_may_be_another():
    attention, X = Attention(16, 4), torch.randn(2, 5, 16)
    attention.attend = lambda q, k, v: v
    values = attention.inputs(X).unflatten(-1, (4, 3, 4))[:, :, :, 2].flatten(2)
    torch.testing.assert_close(attention(X), attention.output(values))


def test_heads_that_do_not_divide_the_width_are_an_error():
    with pytest.raises(ValueError, match="width 30 is not a multiple of 4 heads"):
        gpt(50, width=30)
