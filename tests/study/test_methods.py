"""The comparison: every method trains the same network, and its counts are right."""

import pytest
import torch
from helpers import attempt
from torch.nn import functional as F

from d2lpar import autocast
from d2lpar.models import lenet_layers
from d2lpar.ranks.launch import launch
from d2lpar.study import methods
from d2lpar.study.methods import (
    METHODS,
    PUBLISHED,
    predict_images,
    ratios,
    unrest,
)

PARAMETERS = 4 * sum(p.numel() for p in lenet_layers().parameters())  # bytes


def batch(rows=16):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(rows) % 10
    return torch.randn(rows, 1, 28, 28, generator=generator) + y.view(
        -1, 1, 1, 1
    ) / 4, y


def of_all(rank, world_size):
    (X, y), found = batch(), {}
    for name in METHODS:
        for bits in (32, 16):
            region = (
                autocast("cpu", torch.bfloat16, emulate=True) if bits == 16 else None
            )
            counts = methods.count_step(name, X, y, region)
            found[name, bits] = counts, methods.loss_after(10, name, X, y, region)
    return found


@pytest.fixture(scope="module")
def found():
    """By method and bits: the counts of each rank that takes part, and the losses."""
    results = launch(of_all, 2, timeout=120)
    return {
        key: [
            [x for x in column if x is not None]
            for column in zip(*[result[key] for result in results], strict=True)
        ]
        for key in results[0]
    }


def test_every_method_ends_where_one_device_does(found):
    (X, y), model = batch(), lenet_layers(0.05, torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), y)
        loss.backward()
        optimizer.step()
    assert loss < 2.2  # it does learn
    for (name, bits), (_, losses) in found.items():
        mean = sum(losses) / len(losses)
        assert abs(mean - loss) < (1e-2 if bits == 32 else 5e-2), (name, bits)
        if name in (*methods.DATA, *methods.SHARDED):  # each rank has its own rows
            assert abs(losses[0] - losses[1]) > 1e-2


def test_the_busiest_device_sends_what_can_be_counted_by_hand(found):
    sent = {
        key: [counts[:2] for counts in of_ranks] for key, (of_ranks, _) in found.items()
    }
    assert (
        sent["one device", 32] == [(0, 0)]
        and sent["torch's DDP", 32] == [(None, None)] * 2
    )
    for bits in (32, 16):  # the gradients, once around: they are float32 in both
        for n, messages in sent["DDP", bits] + sent["DDP, one bucket", bits]:
            assert 0 <= n - PARAMETERS <= 64 * messages  # and notes
    assert sent["DDP, one bucket", 32][0][1] < sent["DDP", 32][0][1]
    assert sent["ZeRO-1", 32] == [(PARAMETERS, 16)] * 2
    # convolutions always ask for their weight
    assert sent["ZeRO-3", 32] == [(1.5 * PARAMETERS, 12)] * 2
    images, outputs = 8 * 28 * 28 * 4, 8 * 10 * 4  # device 0 sends both to device 1
    assert sent["DataParallel", 32] == [(PARAMETERS + images + outputs, 10)]
    activations = 16 * 50 * 4 * 4  # of the second convolution, or their gradients
    messages = methods.MICROBATCHES
    assert sent["pipeline", 32] == [(4 * activations, messages)] * 2
    assert sent["pipeline", 16] == [(2 * activations, messages)] * 2


def test_what_is_held_and_the_peak(found):
    held = {name: sum(c.held for c in found[name, 32][0]) for name in METHODS}
    assert (
        held["one device"] == held["DataParallel"] == held["pipeline"] == 2 * PARAMETERS
    )
    assert held["DDP"] == held["torch's DDP"] == 2 * held["one device"]
    assert max(c.held for c in found["tensor split", 32][0]) < 0.51 * held["one device"]
    assert held["ZeRO-3"] == held["one device"] == held["ZeRO-1"] / 1.5
    peak = {key: [c.peak for c in counts] for key, (counts, _) in found.items()}
    one = peak["one device", 32][0]
    assert one > 3 * PARAMETERS  # weights, momentum, gradients
    assert peak["DataParallel", 32] == [None] and max(peak["pipeline", 32]) < one
    assert peak["DDP", 32] == pytest.approx(peak["torch's DDP", 32], rel=0.2)
    assert max(peak["ZeRO-3", 32]) < max(peak["ZeRO-1", 32]) < max(peak["DDP", 32])
    for name in ("one device", "DDP"):
        assert peak[name, 16][0] < peak[name, 32][0]


def refusals(rank, world_size):
    X, y = batch()
    calls = (methods.make, "ddp", X, y), (methods.make, "DDP", X[:15], y[:15])
    return [attempt(*call)[:2] for call in calls]


def test_what_cannot_be_made_is_named():
    unknown, uneven = launch(refusals, 2, timeout=60)[0]
    assert "there is no method 'ddp', but one device, DataParallel, DDP" in unknown[1]
    assert uneven == ("ValueError", "15 rows cannot be split evenly over 2 ranks")


def test_ratios_are_of_rounds_and_unrest_is_told():
    seconds = {"one": [4.0, 40.0, 8.0, 4.0], "two": [2.0, 20.0, 4.0, 4.0]}
    assert ratios(seconds, "one") == {"one": (1, 1, 1), "two": (2, 2, 2)}
    assert ratios(seconds, "two")["one"] == (0.5, 0.5, 0.5)
    assert unrest((0.8, 1.0, 1.25)) == ""
    assert "0.79 to 1.10 times as fast" in unrest((0.9, 1.0, 1.0), (0.79, 1.0, 1.1))
    assert unrest((0.9, 1.0, 1.26))


@pytest.mark.parametrize(
    ("name", "off"), list(zip(PUBLISHED, (3, 15, 4, 19), strict=True))
)
def test_eight_gpus_are_predicted_too_fast_by_what_the_model_leaves_out(name, off):
    row = PUBLISHED[name]
    predicted, bucket, star = (
        predict_images(row.one_gpu, row.link, method=name)
        for name in ("DDP", "DDP, one bucket", "DataParallel")
    )
    assert predicted == pytest.approx(8 * row.one_gpu)  # the gradients travel unseen
    assert round(100 * (predicted / row.eight_gpus - 1)) == off
    assert predicted > bucket > star > 0.9 * predicted


def test_a_slow_link_decides_alone():
    """14 messages of 102,228,128 / 8 bytes a step; forward: a third of 256 / 367 s."""
    travel = 14 * (1e-5 + 102_228_128 / 8 / 1e7)
    expected = 8 * 256 / (256 / 367 / 3 + travel)
    assert predict_images(367, 1e7) == pytest.approx(expected)
    with pytest.raises(
        ValueError, match="method 'ddp' is none of DDP, DDP, one bucket"
    ):
        predict_images(1.0, 1.0, method="ddp")
