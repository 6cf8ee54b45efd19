"""What a split costs: what the real thing sends, and what one computes by hand."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from d2lpar import (
    DistributedDataParallel,
    Pipeline,
    count_bytes,
    init_params,
    launch,
)
from d2lpar.memory import saved_memory
from d2lpar.models import Copy, Sum, lenet_layers
from d2lpar.study.layers import TensorParallelLeNet, transformer
from d2lpar.study.splits import SPLITS, Machine, cost_of, profile

MACHINE = Machine("test", flops=1e9, alpha=1e-4, beta=1e-9)
PARAMETERS = 4 * 129_068  # bytes of LeNet's
CONV1, CONV2 = 2 * 20 * 24 * 24 * 9, 2 * 50 * 8 * 8 * 20 * 25  # operations per image
LINEAR1, LINEAR2 = 2 * 800 * 128, 2 * 128 * 10


@pytest.fixture(scope="module")
def layers():
    return profile(lenet_layers(), torch.rand(2, 1, 28, 28))


def test_profile_of_lenet_by_hand(layers):
    assert [layer.flops for layer in layers] == [
        (0, CONV1),
        (0, CONV2),
        (0, LINEAR1),
        (0, LINEAR2),
    ]
    sizes = [20 * 10, 50 * 501, 128 * 801, 10 * 129]
    assert [layer.parameters for layer in layers] == [(0, 4 * size) for size in sizes]
    assert [layer.output for layer in layers] == [
        4 * 20 * 144,
        4 * 800,
        4 * 128,
        4 * 10,
    ]
    assert [layer.forward_sums for layer in layers] == [(), (4 * 3200,), (), (4 * 10,)]
    assert [layer.backward_sums for layer in layers] == [
        (),
        (),
        (4 * 800,),
        (),
    ]  # not the images'
    assert [layer.saved for layer in layers] == [
        (
            4 * 26 * 26,
            4 * 20 * 24 * 24,
        ),  # the cropped images; what the first ReLU returns
        (4 * 50 * 8 * 8, 4 * 20 * 12 * 12),  # behind the sum; the rank's own channels
        (4 * 800, 0),  # behind the copy
        (0, 4 * 128),  # the rank's own columns
    ]


def test_profile_divides_what_is_between_copy_and_sum():
    inside = nn.Sequential(Copy(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), Sum())
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh()), inside, nn.Linear(8, 2)
    )
    first, second, third = profile(model, torch.rand(3, 4))
    assert first.flops == (2 * 4 * 8, 0) and first.parameters == (4 * 40, 0)
    assert first.saved == (
        4 * 4,
        0,
    )  # its input; its output, tanh's, is the next layer's input
    assert not any(part._forward_pre_hooks for part in model.modules())
    assert second.flops == (0, 2 * 2 * 8 * 16) and second.parameters == (
        0,
        4 * (144 + 136),
    )
    assert second.saved == (
        4 * 8,
        4 * 16,
    )  # its input on every device, and tanh's output in parts
    assert (second.forward_sums, second.backward_sums) == ((4 * 8,), (4 * 8,))
    assert (
        third.flops == (2 * 8 * 2, 0)
        and third.forward_sums == third.backward_sums == ()
    )


def test_profile_counts_attention_and_does_not_depend_on_the_batch():
    model = transformer(50, width=16, num_heads=4, num_blocks=1, length=6)
    one, three = (profile(model, torch.randint(50, (n, 6))) for n in (1, 3))
    attention, linear = 2 * 2 * 6 * 6 * 16, 2 * 6 * 12 * 16 * 16
    assert sum(one[1].flops) == sum(three[1].flops) == linear + attention
    assert len(one[1].forward_sums) == len(one[1].backward_sums) == 2
    assert [layer.output for layer in one] == [layer.output for layer in three]


def test_saved_memory_is_autograds(layers):
    model, X = lenet_layers(), torch.rand(32, 1, 28, 28)
    _, saved = saved_memory(lambda: model(X), list(model.parameters()))
    one = cost_of("one device", layers, 32, 1, MACHINE)
    assert one.memory - 2 * PARAMETERS == pytest.approx(saved, rel=0.01)


def test_data_and_tensor_splits_send_what_the_real_ones_send(layers):
    def run(rank, k):
        X, y = torch.rand(16, 1, 28, 28), torch.randint(10, (16,))
        data = DistributedDataParallel(lenet_layers())
        tensor = TensorParallelLeNet(
            init_params(generator=torch.Generator().manual_seed(0))
        )
        sent = []
        for model in (data, tensor):
            with count_bytes() as ledger:
                F.cross_entropy(model(X), y).backward()
            sent.append(ledger.sent(rank))
        return *sent, sum(p.numel() for p in tensor.parameters())

    found = launch(run, 2)
    flags = 4 * 8  # DDP's own, behind the gradients
    cost = cost_of("data", layers, 64, 2, MACHINE)
    assert 0 <= max(data for data, *_ in found) - cost.bytes <= 2 * flags
    cost = cost_of("tensor", layers, 16, 2, MACHINE)
    assert cost.bytes == found[0][1]
    assert cost.messages == 3 * 2  # three sums, each a ring of two steps
    whole, divided = (sum(layer.saved[part] for layer in layers) for part in (0, 1))
    assert cost.memory == round(PARAMETERS + 16 * (whole + divided / 2))
    assert 4 * found[0][2] - PARAMETERS / 2 == 2 * (
        50 + 10
    )  # but for biases, whole on each rank


def test_tensor_split_holds_what_the_real_one_keeps(layers):
    def run(rank, k):
        network, X = TensorParallelLeNet(init_params()), torch.rand(16, 1, 28, 28)
        _, saved = saved_memory(lambda: network(X), list(network.parameters()))
        return saved

    whole, divided = (sum(layer.saved[part] for layer in layers) for part in (0, 1))
    kept = 4 * (
        28 * 28 - 26 * 26
    )  # the crop is a view here, which keeps the whole image
    assert sum(launch(run, 2)) == 16 * (2 * (whole + kept) + divided)


@pytest.mark.parametrize("ends", [(0, 2, 4), (0, 1, 2, 4), range(5)])
def test_pipeline_sends_what_a_pipeline_sends(layers, ends):
    k, model = len(ends) - 1, lenet_layers()
    stages = [model[a:b] for a, b in pairwise(ends)]
    pipeline = Pipeline(stages, ["cpu"] * k, nn.CrossEntropyLoss(reduction="sum"), 8)
    with count_bytes() as ledger:
        pipeline.forward_backward(torch.rand(64, 1, 28, 28), torch.randint(10, (64,)))
    cost = cost_of("pipeline", layers, 64, k, MACHINE, 8)
    assert cost.bytes == max(ledger.sent(s) for s in range(k))
    messages = [
        sum(n for (src, _), n in ledger.messages.items() if src == s) for s in range(k)
    ]
    assert cost.messages == max(messages)


def test_seconds_by_hand(layers):
    work = 3 * 64 * (CONV1 + CONV2 + LINEAR1 + LINEAR2) / 1e9
    data = cost_of("data", layers, 64, 2, MACHINE)  # backward hides what is sent, …
    assert data.seconds == pytest.approx(work / 2) and data.idle == pytest.approx(0)
    assert cost_of("data", layers, 63, 2, MACHINE) == data  # that of the largest shard
    slow = cost_of(
        "data", layers, 64, 2, MACHINE._replace(beta=1e-5)
    )  # … or hides itself
    sent = 2 * (1e-4 + PARAMETERS / 2 * 1e-5)
    assert slow.seconds == pytest.approx(work / 6 + sent)
    assert slow.idle == pytest.approx(1 - work / 2 / slow.seconds)
    tensor = cost_of("tensor", layers, 64, 2, MACHINE)
    sent = sum(2 * (1e-4 + 64 * 4 * size / 2 * 1e-9) for size in (3200, 800, 10))
    assert tensor.seconds == pytest.approx(work / 2 + sent)
    for split in SPLITS:  # of one device
        cost = cost_of(split, layers, 64, 1, MACHINE, 1)
        assert (cost.bytes, cost.messages, cost.idle) == (0, 0, pytest.approx(0))
        assert cost.seconds == pytest.approx(work)
        assert cost.memory == cost_of("one device", layers, 64, 1, MACHINE).memory


def test_pipeline_of_equal_layers_has_the_formulas_bubble():
    equal = profile(
        nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)]), torch.rand(4, 32)
    )
    fast = MACHINE._replace(alpha=0.0, beta=0.0)
    work = cost_of("one device", equal, 64, 1, fast).seconds
    for k, m in [(2, 4), (4, 8), (8, 8)]:
        cost = cost_of("pipeline", equal, 64, k, fast, m)
        assert cost.idle == pytest.approx((k - 1) / (m + k - 1))
        assert work / cost.seconds == pytest.approx(k * m / (m + k - 1))
    travel = 2 * (1e-4 + 64 * 4 * 32 * 1e-9)  # activations there, gradients back
    assert cost_of("pipeline", equal, 64, 2, MACHINE, 1).seconds == pytest.approx(
        work + travel
    )
    few, many = (cost_of("pipeline", equal, 64, 4, MACHINE, m) for m in (2, 16))
    assert many.memory < few.memory  # fewer rows at a time
    assert many.bytes == few.bytes and many.messages == 8 * few.messages


def test_errors(layers):
    with pytest.raises(
        ValueError, match="'rows', which is none of one device, data, pipeline"
    ):
        cost_of("rows", layers, 64, 2, MACHINE)
    with pytest.raises(ValueError, match="4 layers cannot be cut into 5 stages"):
        cost_of("pipeline", layers, 64, 5, MACHINE)
