"""Splitting a batch of any structure, and joining it again."""

from collections import Counter, OrderedDict, defaultdict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from d2lpar import count_bytes, gather, scatter, split_batch

CPU = torch.device("cpu")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
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
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@st.composite
def batches(draw):
    """A nested structure whose tensors all have n rows along dim, with n and dim."""
    n, dim = draw(st.integers(0, 9)), draw(st.sampled_from([0, 1, -1, -2]))

    def tensor(shape, dtype):
        shape = [n, *shape] + [2] * (dim in (1, -2))
        return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype).movedim(0, dim)

    shapes = st.lists(st.integers(0, 3), max_size=2)
    dtypes = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16])
    leaves = st.builds(tensor, shapes, dtypes) | st.sampled_from([None, 7, 2.5, "x", True])
    trees = st.recursive(
        leaves,
        lambda parts: (
            st.lists(parts, max_size=3)
            | st.lists(parts, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("cab") | st.integers(0, 2), parts, max_size=3)
            | st.builds(Pair, parts, parts)
            | st.dictionaries(st.sampled_from("ab"), parts).map(OrderedDict)
        ),
        max_leaves=6,
    )
    return draw(trees), dim


# Scatter.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [0, 1, 2, 5, 8, 21])
@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_a_tensor_is_split_as_split_batch_splits_it(k, n, device):
    devices = [torch.device(device, 0) if device == "cuda" else CPU] * k
    X, y = rows(n, 2, 3), rows(n)
    shards = scatter((X, y), devices)
    expected = list(zip(*split_batch(X, y, devices), strict=True))
    assert same(shards, expected)
    assert [len(X) for X, _ in shards] == [n // k + (i < n % k) for i in range(k)]
    assert all(part.device == devices[0] for shard in shards for part in shard)
    assert torch.equal(torch.cat([X for X, _ in shards]).cpu(), X)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_any_dimension_can_be_split(dim):
    X = rows(5, 6, 7)
    for k in (1, 2, 4, 9):
        shards = scatter(X, [CPU] * k, dim)
        assert same(shards, list(X.tensor_split(k, dim)))
        assert same(gather(shards, CPU, dim), X)


def test_containers_are_rebuilt_with_their_types():
    groups = defaultdict(list, a=rows(3), b=[rows(3, 2)])
    batch = (groups, Pair(rows(3), None), OrderedDict(z=rows(3), y=4), [(), {}, []])
    one, two = scatter(batch, [CPU] * 2)
    for shard, part in ((one, slice(0, 2)), (two, slice(2, 3))):
        a, b = defaultdict(list, a=rows(3)[part], b=[rows(3, 2)[part]]), Pair(rows(3)[part], None)
        assert same(shard, (a, b, OrderedDict(z=rows(3)[part], y=4), [(), {}, []]))
        assert shard[0].default_factory is list and shard[0]["new"] == []
    assert "new" not in groups and len(groups["a"]) == 3  # the caller's own is as it was


def test_a_dict_that_counts_in_update_is_kept():
    assert scatter(Counter(a=2), [CPU] * 2) == [Counter(a=2)] * 2
    assert gather([Counter(a=2)] * 2, CPU) == Counter(a=2)


@pytest.mark.parametrize("k", [1, 2])
def test_a_shard_with_a_history_may_be_written_to(k):
    X = rows(4).requires_grad_()
    doubled = 2 * X
    for shard in scatter(doubled, [CPU] * k):
        shard.relu_()
    gather(scatter(doubled, [CPU] * k), CPU).square().sum().backward()
    assert torch.equal(X.grad, 8 * X.detach())  # and the caller's own tensor is as it was


@pytest.mark.parametrize("empty", [(), {}, []], ids=repr)
def test_an_empty_container_stays_one(empty):
    shards = scatter(empty, [CPU] * 3)
    assert same(shards, [empty] * 3)
    assert same(gather(shards, CPU), empty)
    if empty != ():
        assert len({id(shard) for shard in shards} | {id(empty)}) == 4  # no two devices share one


@pytest.mark.parametrize("thing", [object(), "words", 3.5, None, {1, 2}, print], ids=str)
def test_what_is_no_tensor_goes_everywhere_by_reference(thing):
    assert all(shard is thing for shard in scatter(thing, [CPU] * 3))
    for shard in scatter((rows(4), [thing], {"key": thing}), [CPU] * 3):
        assert shard[1][0] is thing and shard[2]["key"] is thing


def test_shards_are_on_their_devices():
    X = rows(5, 2)
    first, second, third = scatter([X], [CPU, torch.device("meta"), CPU])
    assert first[0].device == third[0].device == CPU
    assert second[0].device.type == "meta" and second[0].shape == (2, 2)
    with count_bytes() as ledger:
        scatter(X, ["meta", "meta"])
    assert ledger.bytes == {("host", 0): 3 * 16, ("host", 1): 2 * 16}


@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_flow_back_to_where_they_belong(dim):
    X = rows(3, 3).requires_grad_()
    shards = scatter({"X": X}, [CPU] * 2, dim)
    sum((i + 2) * (shard["X"] ** 2).sum() for i, shard in enumerate(shards)).backward()
    factors = torch.tensor([2.0, 2, 3]).reshape(-1, 1) if dim == 0 else torch.tensor([2.0, 2, 3])
    assert torch.equal(X.grad, 2 * X.detach() * factors)


def test_shards_that_are_not_used_have_gradient_zero_and_send_nothing():
    X = rows(4, 2).requires_grad_()
    with count_bytes() as ledger:
        shards = scatter(X, [CPU] * 4)
        (5 * shards[2]).sum().backward()
    assert X.grad.tolist() == [[0, 0], [0, 0], [5, 5], [0, 0]]
    assert (ledger.bytes[1, 0], ledger.bytes[2, 0]) == (0, 16)


def test_the_ledger_counts_shards_and_their_gradients():
    X, y = rows(5, 3).requires_grad_(), rows(5, dtype=torch.int32)
    with count_bytes() as ledger:
        shards = scatter((X, y), [CPU] * 3)
        sum(X.sum() for X, _ in shards).backward()
    there, back = {(0, 1): 2 * (24 + 4), (0, 2): 24 + 4}, {(1, 0): 2 * 24, (2, 0): 24}
    assert ledger.bytes == there | back
    assert ledger.messages == {(0, 1): 2, (0, 2): 2, (1, 0): 1, (2, 0): 1}


def test_scatter_names_what_cannot_be_split():
    with pytest.raises(ValueError, match="devices is empty"):
        scatter(rows(3), [])
    for devices in ("cpu", CPU):
        with pytest.raises(TypeError, match="must be a list of devices, not "):
            scatter(rows(3), devices)
    with pytest.raises(ValueError, match=r"\[4, 2\] and \[3\] differ in dimension 0"):
        scatter((rows(4, 2), [{"y": rows(3)}]), [CPU] * 2)
    with pytest.raises(ValueError, match=r"\[4, 2\] and \[4, 3\] differ in dimension -1"):
        scatter((rows(4, 2), rows(4, 3)), [CPU] * 2, dim=-1)
    with pytest.raises(ValueError, match=r"shape \[\] has no dimension 0 .* as a Python number"):
        scatter((rows(4), torch.tensor(1.0)), [CPU] * 2)
    for dim in (2, -3):
        with pytest.raises(ValueError, match=rf"shape \[4, 2\] has no dimension {dim} "):
            scatter(rows(4, 2), [CPU] * 2, dim)


def test_a_single_device_gets_all_as_it_is():
    batch = (rows(4, 2), [{"y": rows(3)}], torch.tensor(1.0))
    [alone] = scatter(batch, [CPU])
    assert same(alone, batch)


# Gather.


@given(batches(), st.integers(1, 5))
def test_gather_is_the_reverse_of_scatter(batch, k):
    tree, dim = batch
    shards = scatter(tree, [CPU] * k, dim)
    assert len(shards) == k
    assert same(gather(shards, CPU, dim), tree)


def test_outputs_of_unlike_sizes_are_joined_in_order():
    parts = [rows(2, 3), rows(0, 3) + 9, rows(1, 3) + 50, rows(4, 3) + 90]
    assert same(gather(parts, CPU), torch.cat(parts))
    assert same(gather([part.T for part in parts], CPU, dim=-1), torch.cat(parts).T)
    assert gather(parts, torch.device("meta")).device.type == "meta"


def test_numbers_become_a_vector_with_a_gradient():
    leaves = [torch.tensor(float(i), requires_grad=True) for i in range(3)]
    vector = gather([leaf**2 for leaf in leaves], CPU)
    assert vector.tolist() == [0, 1, 4]
    (vector * torch.tensor([5.0, 6, 7])).sum().backward()
    assert [leaf.grad.item() for leaf in leaves] == [0, 12, 28]
    assert gather([torch.tensor(2)], CPU).tolist() == [2]


def test_each_output_gets_its_part_of_the_gradient():
    parts = [rows(n, 2).requires_grad_() for n in (2, 0, 1)]
    weights = rows(3, 2) + 1
    (gather([{"x": part} for part in parts], CPU)["x"] * weights).sum().backward()
    assert [part.grad.tolist() for part in parts] == [[[1, 2], [3, 4]], [], [[5, 6]]]


def test_what_is_no_tensor_must_be_the_same_and_is_kept():
    outputs = [(rows(1), None, 3, "words", 1.5, b"x", [1j, True, {}]) for _ in range(3)]
    joined = gather(outputs, CPU)
    assert same(joined, (torch.zeros(3).double(), None, 3, "words", 1.5, b"x", [1j, True, {}]))
    assert gather([None, None], CPU) is None


def test_the_keys_of_dicts_may_differ_in_their_order():
    joined = gather([{"a": rows(1), "b": rows(2) + 5}, {"b": rows(1) + 8, "a": rows(1) + 1}], CPU)
    assert list(joined) == ["a", "b"]
    assert joined["a"].tolist() == [0, 1] and joined["b"].tolist() == [5, 6, 8]


def test_named_tuples_and_default_dicts_keep_their_types():
    outputs = [defaultdict(int, p=Pair(rows(1), [rows(2)])) for _ in range(2)]
    joined = gather(outputs, CPU)
    assert same(joined["p"], Pair(torch.zeros(2).double(), [rows(2).repeat(2)]))
    assert type(joined) is defaultdict and joined["other"] == 0
    assert all(len(output["p"].x) == 1 and "other" not in output for output in outputs)


X = rows(2, 3)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([], "outputs is empty"),
        ([{"a": X}, {"b": X}], r"output 0 is a dict with the keys \['a'\], but output 1 .*'b'"),
        ([{"a": X}, {"a": X}, {"a": X, 3: X}], r"but output 2 is a dict with the keys"),
        ([(X, X), (X,)], "output 0 is a tuple of 2, but output 1 is a tuple of 1"),
        ([[X], (X,)], "output 0 is a list of 1, but output 1 is a tuple of 1"),
        ([X, {"a": X}], "output 0 is a tensor, but output 1 is a dict"),
        ([[X, None], [X, X]], "output 0 is None, but output 1 is a tensor"),
        ([X, 3.0], "output 0 is a tensor, but output 1 is 3.0"),
        ([3, 4], "output 0 is 3, but output 1 is 4"),
        (["a", "a", "b"], "output 0 is 'a', but output 2 is 'b'"),
        (
            [X, rows(2, 4)],
            r"outputs of shapes \[2, 3\], \[2, 4\] cannot be joined along dimension 0",
        ),
        ([X, X, rows(2)], r"shapes \[2, 3\], \[2, 3\], \[2\] cannot"),
        ([X, X.sum()], r"shapes \[2, 3\], \[\] cannot"),
        ([rows(0), rows(2, 3)], r"shapes \[0\], \[2, 3\] cannot"),
        ([X.sum(), rows(1)], r"shapes \[\], \[1\] cannot"),
    ],
)
def test_gather_names_what_does_not_fit(outputs, words):
    with pytest.raises(ValueError, match=words):
        gather(outputs, CPU)


def test_a_packed_sequence_is_not_cut():
    with pytest.raises(TypeError, match="pass padded sequences, lengths"):
        scatter(nn.utils.rnn.pack_sequence([rows(3)]), [CPU] * 2)
    [alone] = scatter(PACKED, [CPU])
    assert type(alone) is type(PACKED) and torch.equal(alone.data, PACKED.data)
    [moved] = scatter(PACKED, ["meta"])  # in place of a GPU
    assert moved.data.is_meta and moved.batch_sizes.device.type == "cpu"


def test_gather_names_a_dimension_that_is_not_there():
    with pytest.raises(ValueError, match="cannot be joined along dimension 2"):
        gather([X, X], CPU, dim=2)
    with pytest.raises(ValueError, match="cannot be joined along dimension 1"):
        gather([X, rows(3, 3)], CPU, dim=1)


PACKED = nn.utils.rnn.pack_sequence([rows(2), rows(1)])


@pytest.mark.parametrize("thing", [object(), {1}, range(2), PACKED], ids=lambda t: type(t).__name__)
def test_gather_names_a_type_that_it_cannot_join(thing):
    with pytest.raises(TypeError, match=f"cannot gather a {type(thing).__name__}"):
        gather([[X, thing], [X, thing]], CPU)


def test_the_ledger_counts_outputs_and_their_gradients():
    parts = [rows(n, 3).requires_grad_() for n in (2, 2, 1)]
    with count_bytes() as ledger:
        joined = gather([(part, rows(1, dtype=torch.int32)) for part in parts], CPU)
        joined[0].sum().backward()
    there, back = {(1, 0): 48 + 4, (2, 0): 24 + 4}, {(0, 1): 48, (0, 2): 24}
    assert ledger.bytes == there | back
    assert ledger.messages == {(1, 0): 2, (2, 0): 2, (0, 1): 1, (0, 2): 1}


# Against torch's own.


def gpus(k):
    if torch.cuda.device_count() < k:
        pytest.skip(f"needs {k} GPUs")
    return [torch.device("cuda", i) for i in range(k)]


@pytest.mark.gpu
@pytest.mark.parametrize("n", [2, 6, 8])
def test_shards_on_gpus_are_those_of_torch(n):
    devices = gpus(2)
    batch = (rows(n, 3).cuda(0), {"y": [rows(n).cuda(0)], "z": Pair(rows(n).cuda(0), None)})
    ours = scatter(batch, devices)
    theirs = torch.nn.parallel.scatter(batch, [0, 1])
    for i in range(2):
        assert same(ours[i], theirs[i])
        assert ours[i][0].device == ours[i][1]["z"].x.device == devices[i]
    joined = gather(ours, devices[0])
    assert same(joined, batch) and same(joined, torch.nn.parallel.gather(theirs, 0))


@pytest.mark.gpu
def test_gradients_across_gpus_are_those_of_torch():
    devices, grads = gpus(2), []
    for split, join in (
        (lambda X: scatter(X, devices), lambda parts: gather(parts, devices[0])),
        (
            lambda X: torch.nn.parallel.scatter(X, [0, 1]),
            lambda parts: torch.nn.parallel.gather(parts, 0),
        ),
    ):
        X = rows(5, 2).cuda(0).requires_grad_()
        joined = join([part**2 for part in split(X)])
        assert joined.device == devices[0]
        (joined * (rows(5, 2).cuda(0) + 1)).sum().backward()
        grads.append(X.grad)
    assert torch.equal(*grads)
