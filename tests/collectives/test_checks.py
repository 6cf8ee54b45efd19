"""What is refused, and in which words; and what only looks as if elements shared a place."""

import pytest
import torch

from d2lpar import all_gather, allreduce, broadcast, naive_allreduce, reduce_scatter, ring_allreduce



def leaf():
    return torch.ones(3, requires_grad=True)


BASE = torch.zeros(10)
REFUSED = [
    ([], ValueError, "data is empty"),
    (torch.ones(2, 3), TypeError, "must be a list of tensors, one per device, not Tensor"),
    ([torch.ones(3), 1.0], TypeError, r"data\[1\] is a float, not a tensor"),
    (
        [torch.ones(3), torch.ones(3), torch.ones(4)],
        ValueError,
        r"data\[0\] has shape \(3,\), but data\[2\] has shape \(4,\)",
    ),
    (
        [torch.ones(3), torch.ones(3).double()],
        ValueError,
        r"data\[0\] has dtype torch.float32, but data\[1\] has dtype torch.float64",
    ),
    ([BASE, torch.zeros(10), BASE], ValueError, r"data\[0\] and data\[2\] are the same tensor"),
    ([BASE, BASE.view(10)], ValueError, r"data\[0\] \(storage offset 0\) and data\[1\] .* share"),
    (
        [torch.zeros(4), BASE[0:4], BASE[3:7]],
        ValueError,
        r"data\[1\] \(storage offset 0\) and data\[2\] \(storage offset 3\) share memory",
    ),
    ([BASE[0:8:2], BASE[1:5]], ValueError, "share memory"),
    ([torch.zeros(1).expand(3), torch.zeros(3)], ValueError, r"data\[0\] is an expanded view"),
    ([torch.arange(20.0).as_strided((2, 3), (4, 2)), torch.zeros(2, 3)], ValueError, r"data\[0\]"),
    ([torch.ones(3), leaf()], ValueError, r"data\[1\] requires gradients, .*no_grad"),
    ([leaf() * 2, torch.ones(3)], ValueError, r"data\[0\] requires gradients"),
]


@pytest.mark.parametrize(("data", "error", "words"), REFUSED, ids=lambda value: str(value)[:25])
def test_wrong_lists_are_refused_and_left_as_they_were(data, error, words):
    before = [t.clone() if isinstance(t, torch.Tensor) else t for t in data]
    for function in (naive_allreduce, ring_allreduce, reduce_scatter, broadcast):
        with pytest.raises(error, match=words):
            function(data)
    for now, then in zip(data, before, strict=True):
        assert now is then or torch.equal(now, then)


@pytest.mark.parametrize(
    ("shards", "error", "words"),
    [
        ([], ValueError, "empty"),
        ([torch.ones(2, 3), torch.ones(2, 4)], ValueError, r"\(3,\), but data\[1\] .* \(4,\)"),
        ([torch.ones(2), torch.ones(2).int()], ValueError, "float32, but .* torch.int32"),
        ([torch.ones(2), leaf()], ValueError, "requires gradients"),
    ],
    ids=lambda value: str(value)[:25],
)
def test_wrong_shards_are_refused(shards, error, words):
    with pytest.raises(error, match=words):
        all_gather(shards)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    ("convert", "words"),
    [
        (torch.Tensor.to_sparse, r"data\[1\] is sparse \(torch.sparse_coo\): pass its .to_dense"),
        (torch.Tensor.to_sparse_csr, r"data\[1\] is sparse \(torch.sparse_csr\): pass its .to_den"),
        (lambda tensor: tensor.to("meta"), r"data\[1\] is a meta tensor, which has no elements"),
    ],
)
def test_tensors_without_elements_in_rows_are_refused(convert, words):
    for function in (naive_allreduce, ring_allreduce, reduce_scatter, broadcast, all_gather):
        with pytest.raises(ValueError, match=words):
            function([torch.eye(2), convert(torch.eye(2))])
        with pytest.raises(ValueError, match=words.replace("1", "0")):
            function([convert(torch.eye(2)), convert(torch.eye(2))])


def test_parameters_are_taken_inside_no_grad():
    data = [leaf(), leaf()]
    with torch.no_grad():
        allreduce(data)
    assert data[0].tolist() == [2, 2, 2] and data[0].requires_grad


@pytest.mark.parametrize(
    ("size", "stride", "folded"),
    [
        ((2, 3), (3, 1), False),
        ((2, 3), (1, 2), False),  # transposed
        ((3,), (0,), True),  # expanded
        ((1, 3), (0, 1), False),  # a dimension of 1 is never stepped along
        ((2, 3), (2, 1), True),  # windows that overlap
        ((0, 3), (0, 0), False),  # no elements
    ],
)
def test_folded_tensors_have_room_for_two_elements_in_one_place(size, stride, folded):
    assert is_folded(torch.arange(20.0).as_strided(size, stride)) == folded
