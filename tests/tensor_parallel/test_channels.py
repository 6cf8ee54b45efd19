"""Channels cut over devices: LeNet where all are exchanged, else a network with fewer weights."""

from collections import Counter
from itertools import combinations

import pytest
import torch
from torch.nn import functional as F

from d2lpar import count_bytes, init_params, lenet
from d2lpar.tensor_parallel.channels import EXCHANGES, LAYERS, split_channels, split_lenet

CPU = torch.device("cpu")
META = torch.device("meta")
ROWS = 3
CHANNELS = {"conv1": 20, "conv2": 50, "linear1": 128, "linear2": 10}  # that a layer makes
SUBSETS = [subset for n in range(4) for subset in combinations(EXCHANGES, n)]


def images(rows=ROWS):
    return torch.randn(rows, 1, 28, 28, generator=torch.Generator().manual_seed(1))


def params_of(scale=0.1):
    params = init_params(scale, torch.Generator().manual_seed(2))
    return [torch.randn_like(p) * scale if p.dim() == 1 else p for p in params]


def widths(layer, k):
    return [len(part) for part in torch.arange(CHANNELS[layer]).tensor_split(k)]


def out_dim(layer):
    return 0 if layer.startswith("conv") else 1


def blocks(params, k, exchange):
    """For each weight its own places on each device: a mask of the whole weight."""
    masks = []
    for i, layer in enumerate(LAYERS):
        W, own = params[2 * i], []
        for d in range(k):
            mask = torch.zeros_like(W, dtype=torch.bool)
            place = mask.transpose(0, out_dim(layer)).tensor_split(k)[d]  # (own outputs, inputs, …)
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


def gradients(logits):
    F.cross_entropy(logits, torch.arange(len(logits))).backward()


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("k", "exchange"),
    [(k, EXCHANGES) for k in (1, 2, 4, 10)] + [(3, subset) for subset in SUBSETS],  # 3: uneven
)
def test_without_an_exchange_it_is_lenet_without_the_weights_between_devices(k, exchange):
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
    gradients(ours)
    gradients(theirs)
    close(X.grad, other.grad)
    for d in range(k):
        for i, own in enumerate(masks):
            close(split[d][2 * i].grad.flatten(), whole[2 * i].grad[own[d]])
            close(split[d][2 * i + 1].grad, whole[2 * i + 1].grad.tensor_split(k)[d])


def test_a_device_has_its_own_channels_of_each_layer():
    def shapes(exchange):
        split = split_channels(params_of(), [CPU] * 2, exchange)
        assert [p.shape for p in split[0]] == [p.shape for p in split[1]]
        return [tuple(p.shape) for p in split[0][::2]]

    assert shapes(EXCHANGES) == [(10, 1, 3, 3), (25, 20, 5, 5), (800, 64), (128, 5)]
    assert shapes(["linear1"]) == [(10, 1, 3, 3), (25, 10, 5, 5), (800, 64), (64, 5)]
    assert shapes([]) == [(10, 1, 3, 3), (25, 10, 5, 5), (400, 64), (64, 5)]
    uneven = split_channels(params_of(), [CPU] * 3, [])
    assert [tuple(own[2].shape) for own in uneven] == [(17, 7, 5, 5), (17, 7, 5, 5), (16, 6, 5, 5)]
    assert [len(own[4]) for own in uneven] == [17 * 16, 17 * 16, 16 * 16]


def test_each_device_gets_copies_with_gradients_on():
    params = [p.requires_grad_() for p in params_of()]
    before = [p.detach().clone() for p in params]
    for own in split_channels(params, [CPU] * 2):
        for param in own:
            assert param.is_leaf and param.requires_grad
            param.detach().fill_(7)
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert [p.requires_grad for p in params] == [True] * 8


# What is sent


def between(k, layer, numbers):
    """Bytes from each device to each other, of a layer whose channel is so many numbers a row."""
    own = widths(layer, k)
    links = [(s, d) for s in range(k) for d in range(k) if s != d]
    return {(s, d): 4 * ROWS * own[s] * numbers for s, d in links}


def back(counts):
    return {(dst, src): nbytes for (src, dst), nbytes in counts.items()}


@pytest.mark.parametrize(
    "k, exchange",
    [(3, subset) for subset in SUBSETS] + [(k, subset) for k in (1, 2) for subset in SUBSETS[::7]],
)
def test_the_bytes_are_those_of_the_channels_that_cross(k, exchange):
    devices = [CPU] * k
    split = split_channels(params_of(), devices, exchange)
    with count_bytes() as ledger:
        logits = split_lenet(images(), split, devices, exchange)
        messages = sum(ledger.messages.values())
        forward = ledger.bytes.copy()
        logits.sum().backward()
    layers = {
        "conv2": between(k, "conv1", 13 * 13),
        "linear1": between(k, "conv2", 4 * 4),
        "linear2": between(k, "linear1", 1),
    }
    to_first = between(k, "linear2", 1)
    sent = Counter({link: nbytes for link, nbytes in to_first.items() if link[1] == 0})
    sent += sum((Counter(layers[layer]) for layer in exchange), Counter())
    assert forward == Counter({("host", d): 4 * ROWS * 28 * 28 for d in range(k)}) + sent
    assert messages == k + len(exchange) * k * (k - 1) + k - 1
    assert ledger.bytes - forward == back(sent)


# Where it is


def test_each_part_is_on_its_device_and_the_logits_on_the_first():
    devices = [META, CPU]
    split = split_channels(params_of(), devices, [])
    assert [{p.device for p in own} for own in split] == [{META}, {CPU}]
    assert all(p.is_leaf and p.requires_grad for own in split for p in own)
    logits = split_lenet(images(), split, devices, [])
    assert logits.device == META and logits.shape == (ROWS, 10)
    only = split_lenet(images(), split_channels(params_of(), [META] * 3), [META] * 3)
    assert only.device == META and only.shape == (ROWS, 10)


# What does not fit


@pytest.mark.parametrize("exchange", [["conv1"], ["conv2", "linear3"], "conv2", [0]], ids=repr)
def test_a_layer_that_cannot_exchange_is_an_error(exchange):
    with pytest.raises(ValueError, match=r"exchange is .*, but may name conv2, linear1, linear2"):
        split_channels(params_of(), [CPU] * 2, exchange)


@pytest.mark.parametrize("k", [0, 11])
def test_too_few_or_too_many_devices_are_an_error(k):
    with pytest.raises(ValueError, match=f"{k} devices for channels that can be cut for 1 to 10"):
        split_channels(params_of(), [CPU] * k)
