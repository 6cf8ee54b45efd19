"""Channels cut over devices, with and without exchange between layers."""

from collections import Counter
from itertools import combinations

import pytest
import torch
from helpers import randn
from torch.nn import functional as F

from d2lpar import count_bytes, init_params, lenet
from d2lpar.tensor_parallel.channels import (
    EXCHANGES,
    LAYERS,
    split_channels,
    split_lenet,
)

CPU = torch.device("cpu")
ROWS = 3
# that a layer makes
CHANNELS = {"conv1": 20, "conv2": 50, "linear1": 128, "linear2": 10}
# uneven
SPLITS = [(3, exchange) for n in range(4) for exchange in combinations(EXCHANGES, n)]
SPLITS += [(1, EXCHANGES), (10, EXCHANGES)]


def images():
    return randn(ROWS, 1, 28, 28, dtype=torch.float32)


def params_of(scale=0.1):
    params = init_params(scale, torch.Generator().manual_seed(2))
    return [torch.randn_like(p) * scale if p.dim() == 1 else p for p in params]


def widths(layer, k):
    return [len(part) for part in torch.arange(CHANNELS[layer]).tensor_split(k)]


def blocks(params, k, exchange):
    """For each weight its own places on each device: a mask of the whole weight."""
    masks = []
    for i, layer in enumerate(LAYERS):
        W, own = params[2 * i], []
        for d in range(k):
            mask = torch.zeros_like(W, dtype=torch.bool)
            # (own outputs, inputs, …)
            place = mask.transpose(0, int(i > 1)).tensor_split(k)[d]
            if i == 0 or layer in exchange:
                place[:] = True
            else:
                before = LAYERS[i - 1]
                first = sum(widths(before, k)[:d])
                inputs = place.unflatten(1, (CHANNELS[before], -1))
                inputs[:, first : first + widths(before, k)[d]] = True
            own.append(mask)
        masks.append(own)
    return masks


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("k", "exchange"), SPLITS)
def test_without_an_exchange_it_is_lenet_without_the_weights_between_devices(
    k, exchange
):
    """And with all exchanges it is LeNet."""
    params, devices = params_of(), [CPU] * k
    masks = blocks(params, k, exchange)
    whole = [p.clone() for p in params]
    for i, own in enumerate(masks):
        whole[2 * i] *= sum(own)
    whole = [p.requires_grad_() for p in whole]
    split = split_channels(params, devices, exchange)
    X, other = images().requires_grad_(), images().requires_grad_()
    ours, theirs = split_lenet(X, split, devices, exchange), lenet(other, whole)
    close(ours, theirs)
    assert ((ours - lenet(images(), params)).abs().max() > 1e-2) == (len(exchange) < 3)
    for logits in (ours, theirs):
        F.cross_entropy(logits, torch.arange(ROWS)).backward()
    close(X.grad, other.grad)
    for d in range(k):
        for i, own in enumerate(masks):
            close(split[d][2 * i].grad.flatten(), whole[2 * i].grad[own[d]])
            close(split[d][2 * i + 1].grad, whole[2 * i + 1].grad.tensor_split(k)[d])


def test_a_device_has_copies_of_its_own_channels_with_gradients_on():
    params = [p.requires_grad_() for p in params_of()]
    before = [p.detach().clone() for p in params]

    def weights(exchange, k):
        split = split_channels(params, [CPU] * k, exchange)
        for param in (param for own in split for param in own):
            assert param.is_leaf and param.requires_grad
            param.detach().fill_(7)
        return [[tuple(p.shape) for p in own[::2]] for own in split]

    for exchange, shapes in [
        (EXCHANGES, [(10, 1, 3, 3), (25, 20, 5, 5), (800, 64), (128, 5)]),
        (["linear1"], [(10, 1, 3, 3), (25, 10, 5, 5), (800, 64), (64, 5)]),
        ([], [(10, 1, 3, 3), (25, 10, 5, 5), (400, 64), (64, 5)]),
    ]:
        assert weights(exchange, 2) == [shapes] * 2
    uneven = [own[1:3] for own in weights([], 3)]
    assert uneven[0] == uneven[1] == [(17, 7, 5, 5), (17 * 16, 43)]
    assert uneven[2] == [(16, 6, 5, 5), (16 * 16, 42)]
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert all(p.requires_grad for p in params)


def between(k, layer, numbers):
    """Bytes from device to device, of a layer with so many numbers a channel."""
    own = widths(layer, k)
    links = [(s, d) for s in range(k) for d in range(k) if s != d]
    return Counter({(s, d): 4 * ROWS * own[s] * numbers for s, d in links})


@pytest.mark.parametrize("k, exchange", SPLITS)
def test_the_bytes_are_those_of_the_channels_that_cross(k, exchange):
    devices = [CPU] * k
    split = split_channels(params_of(), devices, exchange)
    with count_bytes() as ledger:
        logits = split_lenet(images(), split, devices, exchange)
        messages = sum(ledger.messages.values())
        forward = ledger.bytes.copy()
        logits.sum().backward()
    layers = {
        "conv2": between(k, "conv1", 12 * 12),
        "linear1": between(k, "conv2", 4 * 4),
        "linear2": between(k, "linear1", 1),
    }
    to_first = between(k, "linear2", 1)
    sent = Counter({link: nbytes for link, nbytes in to_first.items() if link[1] == 0})
    sent += sum((layers[layer] for layer in exchange), Counter())
    assert (
        forward == Counter({("host", d): 4 * ROWS * 26 * 26 for d in range(k)}) + sent
    )
    assert messages == k + len(exchange) * k * (k - 1) + k - 1
    assert ledger.bytes - forward == Counter({(d, s): n for (s, d), n in sent.items()})


def test_each_part_is_on_its_device_and_the_logits_on_the_first():
    devices = [torch.device("meta"), CPU]
    split = split_channels(params_of(), devices, [])
    assert [{p.device for p in own} for own in split] == [
        {device} for device in devices
    ]
    assert all(p.is_leaf and p.requires_grad for own in split for p in own)
    logits = split_lenet(images(), split, devices, [])
    assert logits.device == devices[0] and logits.shape == (ROWS, 10)


def test_what_cannot_be_cut_is_an_error():
    for exchange in (["conv1"], ["conv2", "linear3"], "conv2", [0]):
        words = r"exchange is .*, but may name conv2, linear1, linear2"
        with pytest.raises(ValueError, match=words):
            split_channels(params_of(), [CPU] * 2, exchange)
    for k in (0, 11):
        words = f"{k} devices for channels that can be cut for 1 to 10"
        with pytest.raises(ValueError, match=words):
            split_channels(params_of(), [CPU] * k)
