"""Splitting a batch of any structure, and joining it again."""

from collections import Counter, OrderedDict, defaultdict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from d2lpar import count_bytes, gather, scatter, split_batch

CPU = torch.device("cpu")
TWO = [CPU] * 2
Pair = namedtuple("Pair", "x y")


def rows(n, *shape, dtype=torch.float64):
    """No two numbers are the same, so that a lost or misplaced row shows."""
    return torch.arange(n * torch.Size(shape).numel(), dtype=dtype).reshape(n, *shape)


def same(a, b):
    """Equal in structure, types and values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@st.composite
def batches(draw):
    """A nested structure whose tensors all have n rows along dim, with n and dim."""
    n, dim = draw(st.integers(0, 9)), draw(st.sampled_from([0, 1, -1, -2]))

    def tensor(shape, dtype):
        shape = [n, *shape] + [2] * (dim in (1, -2))
        return (
            torch.arange(torch.Size(shape).numel())
            .reshape(shape)
            .to(dtype)
            .movedim(0, dim)
        )

    shapes = st.lists(st.integers(0, 3), max_size=2)
    dtypes = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16])
    leaves = st.builds(tensor, shapes, dtypes) | st.sampled_from(
        [None, 7, 2.5, "x", True]
    )
    trees = st.recursive(
        leaves,
        lambda parts: (
            st.lists(parts, max_size=3)
            | st.lists(parts, max_size=3).map(tuple)
            | st.dictionaries(
                st.sampled_from("cab") | st.integers(0, 2), parts, max_size=3
            )
            | st.builds(Pair, parts, parts)
        ),
        max_leaves=6,
    )
    return draw(trees), dim


@given(batches(), st.integers(1, 5))
def test_gather_is_the_reverse_of_scatter(batch, k):
    tree, dim = batch
    shards = scatter(tree, [CPU] * k, dim)
    assert len(shards) == k
    assert same(gather(shards, CPU, dim), tree)


@pytest.mark.parametrize(
    "device", ["cpu:0", pytest.param("cuda:0", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_a_tensor_is_split_as_split_batch_splits_it(k, device):
    devices = [torch.device(device)] * k
    for n in (0, 1, 2, 5, 8, 21):
        X, y = rows(n, 2, 3), rows(n)
        shards = scatter((X, y), devices)
        assert same(shards, list(zip(*split_batch(X, y, devices), strict=True)))
        assert [len(X) for X, _ in shards] == [n // k + (i < n % k) for i in range(k)]
        assert torch.equal(torch.cat([X for X, _ in shards]).cpu(), X)
    X = rows(5, 6, 7)
    for dim in (1, -1):
        shards = scatter(X.to(device), devices, dim)
        assert same([shard.cpu() for shard in shards], list(X.tensor_split(k, dim)))


def test_containers_are_rebuilt_with_their_types():
    groups, thing = defaultdict(list, a=rows(3)), object()
    batch = (groups, OrderedDict(z=rows(3), y=4), [], thing)
    shards = scatter(batch, TWO)
    for shard, part in zip(shards, (slice(0, 2), slice(2, 3)), strict=True):
        a, z = defaultdict(list, a=rows(3)[part]), OrderedDict(z=rows(3)[part], y=4)
        assert same(shard, (a, z, [], thing))
        assert shard[0]["new"] == []
    # the caller's own is as it was
    assert "new" not in groups and len(groups["a"]) == 3
    assert gather([shard[0] for shard in shards], CPU).default_factory is list
    assert shards[0][2] is not shards[1][2]  # nor do two devices share a list
    assert scatter(Counter(a=2), TWO) == [Counter(a=2)] * 2  # which counts in update


def test_shards_are_on_their_devices_and_a_single_one_gets_all_as_it_is():
    X = rows(5, 2)
    first, second, third = scatter([X], [CPU, torch.device("meta"), CPU])
    assert first[0].device == third[0].device == CPU
    assert second[0].device.type == "meta" and second[0].shape == (2, 2)
    assert gather(scatter(X, TWO), torch.device("meta")).device.type == "meta"
    batch = (X, rows(3), torch.tensor(1.0))
    assert same(scatter(batch, [CPU]), [batch])


def test_gradients_flow_back_to_where_they_belong():
    X = rows(3, 3).requires_grad_()
    doubled = 2 * X
    for shard in scatter(doubled, TWO):
        shard.relu_()  # may be written to, and the caller's own tensor is as it was
    shards = scatter({"X": doubled}, TWO)
    sum((i + 2) * (shard["X"] ** 2).sum() for i, shard in enumerate(shards)).backward()
    assert torch.equal(X.grad, 8 * X.detach() * torch.tensor([[2], [2], [3]]))
    parts = [rows(n, 2).requires_grad_() for n in (2, 0, 1)]
    (
        gather([{"x": part} for part in parts], CPU)["x"] * (rows(3, 2) + 1)
    ).sum().backward()
    assert [part.grad.tolist() for part in parts] == [[[1, 2], [3, 4]], [], [[5, 6]]]


def test_the_ledger_counts_shards_and_their_gradients():
    X, y = rows(5, 3).requires_grad_(), rows(5, dtype=torch.int32)
    with count_bytes() as ledger:
        shards = scatter((X, y), [CPU] * 3)
        (shards[0][0].sum() + shards[1][0].sum()).backward()
    # the third shard is not used, and sends nothing back
    assert X.grad[4].tolist() == [0, 0, 0]
    assert ledger.bytes == {(0, 1): 2 * (24 + 4), (0, 2): 24 + 4, (1, 0): 2 * 24}
    assert ledger.messages == {(0, 1): 2, (0, 2): 2, (1, 0): 1}
    with count_bytes() as ledger:
        scatter(rows(5, 2), ["meta", "meta"])
    assert ledger.bytes == {("host", 0): 3 * 16, ("host", 1): 2 * 16}


def test_the_ledger_counts_outputs_and_their_gradients():
    parts = [rows(n, 3).requires_grad_() for n in (2, 2, 1)]
    with count_bytes() as ledger:
        joined = gather([(part, rows(1, dtype=torch.int32)) for part in parts], CPU)
        joined[0].sum().backward()
    assert ledger.bytes == {(1, 0): 48 + 4, (2, 0): 24 + 4, (0, 1): 48, (0, 2): 24}


def test_numbers_become_a_vector_and_keys_may_have_any_order():
    leaves = [torch.tensor(float(i), requires_grad=True) for i in range(3)]
    vector = gather([leaf**2 for leaf in leaves], CPU)
    assert vector.tolist() == [0, 1, 4]
    (vector * torch.tensor([5.0, 6, 7])).sum().backward()
    assert [leaf.grad.item() for leaf in leaves] == [0, 12, 28]
    joined = gather([{"a": rows(1), "b": None}, {"b": None, "a": rows(1) + 1}], CPU)
    assert list(joined) == ["a", "b"] and joined["a"].tolist() == [0, 1]


X = rows(2, 3)
ERRORS = [
    (lambda: scatter(X, []), ValueError, "devices is empty"),
    (lambda: scatter(X, "cpu"), TypeError, "must be a list of devices, not "),
    (
        lambda: scatter((rows(4, 2), [rows(3)]), TWO),
        ValueError,
        r"4, 2\] and \[3\] differ",
    ),
    (lambda: scatter((X, rows(2, 2)), TWO, -1), ValueError, "differ in dimension -1"),
    (
        lambda: scatter(torch.tensor(1), TWO),
        ValueError,
        r"shape \[\] has .* Python number",
    ),
    (
        lambda: scatter([pack_sequence([X])], TWO),
        TypeError,
        "cannot split a PackedSequence",
    ),
    (lambda: scatter(X, TWO, -3), ValueError, r"shape \[2, 3\] has no dimension -3 "),
    (
        lambda: gather([{"a": X}, {"b": X}], CPU),
        ValueError,
        r"0 is a dict with .*'a'\], but .*'b'",
    ),
    (
        lambda: gather([X, X, {3: X}], CPU),
        ValueError,
        "output 0 is a tensor, but output 2 is a di",
    ),
    (
        lambda: gather([(X, X), (X,)], CPU),
        ValueError,
        "a tuple of 2, but output 1 is a tuple of 1",
    ),
    (
        lambda: gather([[X], (X,)], CPU),
        ValueError,
        "a list of 1, but output 1 is a tuple of 1",
    ),
    (
        lambda: gather(["a", "b"], CPU),
        ValueError,
        "output 0 is 'a', but output 1 is 'b'",
    ),
    (
        lambda: gather([[X, {1}], [X, {1}]], CPU),
        TypeError,
        "cannot gather a set: return tensors",
    ),
    (
        lambda: gather([pack_sequence([X])] * 2, CPU),
        TypeError,
        "cannot gather a PackedSequence",
    ),
    (lambda: gather([X, rows(2, 4)], CPU), RuntimeError, "Sizes of tensors must match"),
    (lambda: gather([X, X.sum()], CPU), RuntimeError, "zero-dimensional"),
]


@pytest.mark.parametrize(("call", "error", "words"), ERRORS)
def test_errors_name_what_does_not_fit(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [2, 5, 8])
def test_on_gpus_shards_and_gradients_are_those_of_torch(n):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    devices, results, theirs = (
        [torch.device("cuda", i) for i in range(2)],
        [],
        torch.nn.parallel,
    )
    for split, join in ((scatter, gather), (theirs.scatter, theirs.gather)):
        X = rows(n, 2).cuda(0).requires_grad_()
        batch = X, {"y": [rows(n).cuda(0)], "z": Pair(rows(n).cuda(0), None)}
        joined = join([(X**2, rest) for X, rest in split(batch, devices)], devices[0])
        (joined[0] * (rows(n, 2).cuda(0) + 1)).sum().backward()
        results.append((X.grad, joined))
    assert same(*results)
