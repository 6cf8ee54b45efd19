"""Buckets hold every gradient once, in the order of backward, and give it back."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from d2lpar.distributed.buckets import make_buckets

MIB = 2**20
WIDE = [torch.float32, torch.float64, torch.complex64]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DTYPES = st.sampled_from([*WIDE, torch.float16, torch.bfloat16])


def parameters(*shapes, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def positions(buckets, params):
    """The parameters' numbers, one list per bucket."""
    number = {id(param): i for i, param in enumerate(params)}
    return [[number[id(param)] for param in bucket.params] for bucket in buckets]


@pytest.mark.parametrize(
    ("sizes", "cap", "expected"),
    [
        ((10, 20, 30, 40), 400, [[3, 2, 1, 0]]),
        ((10, 20, 30, 40), 280, [[3, 2], [1, 0]]),
        ((10, 20, 30, 40), 279, [[3], [2, 1, 0]]),
        ((1, 1000, 1), 100, [[2], [1], [0]]),
    ],
)
def test_order_is_reversed_and_caps_are_respected(sizes, cap, expected):
    params = parameters(*sizes)
    assert positions(make_buckets(params, cap / MIB), params) == expected


@given(
    st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=12), st.integers(1, 400)
)
def test_every_parameter_lies_in_one_place(described, cap):
    params = [
        nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in described
    ]
    buckets = make_buckets(params, cap / MIB)
    numbers = positions(buckets, params)
    assert sorted(i for members in numbers for i in members) == list(range(len(params)))
    assert all(members == sorted(members, reverse=True) for members in numbers)
    assert [b.manifest.numel() for b in buckets] == [0] * (len(buckets) - 1) + [
        len(params) + 1
    ]
    for bucket in buckets:
        dtypes = {p.dtype if p.dtype in WIDE else torch.float32 for p in bucket.params}
        assert dtypes == {bucket.flat.dtype}
        assert (
            bucket.values.nbytes <= cap
            or sum(p.numel() > 0 for p in bucket.params) == 1
        )
        # No two gradients share a place: numbers written into all views are all found
        # again.
        bucket.flat.fill_(-1)
        for i, (param, view) in enumerate(
            zip(bucket.params, bucket.views, strict=True)
        ):
            assert view.shape == param.shape
            view.fill_(i)
        bucket.manifest.fill_(100)
        assert (bucket.flat != -1).all()
        assert all((view == i).all() for i, view in enumerate(bucket.views))


@given(SHAPES, DTYPES, st.sampled_from([1.0, 0.5, 3.0]), st.booleans())
def test_what_is_filled_in_comes_out(shape, dtype, weight, as_view):
    params = parameters(shape, 2, dtype=dtype)
    (bucket,) = make_buckets(params, 25)
    grad = torch.randn(shape).to(dtype)
    held = params[0].grad = grad.clone()
    bucket.flat.fill_(5)
    bucket.fill(weight)
    bucket.hand_out(1, as_view)
    expected = (grad.to(bucket.flat.dtype) * weight).to(dtype)
    assert params[0].grad.dtype == dtype and params[1].grad is None
    assert torch.equal(params[0].grad, expected)
    assert (bucket.views[0] == 0).all() and (
        bucket.manifest == 5
    ).all()  # no gradient: zeros
    is_view = as_view and dtype in WIDE
    assert (params[0].grad is held) == (not is_view)
    bucket.fill(2) if is_view else bucket.flat.fill_(7)  # in place where it is the view
    assert torch.equal(params[0].grad, expected * 2 if is_view else expected)
    params[0].grad = torch.full_like(grad, float("nan"))  # a mean over no rows
    bucket.fill(0)
    assert (bucket.views[1] == 0).all()


def test_strides_are_the_parameters():
    weight = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    turned = nn.Parameter(torch.zeros(3, 4).t())
    expanded = nn.Parameter(
        torch.zeros(1, 4).expand(3, 4)
    )  # not dense: the bucket's view is
    (bucket,) = make_buckets([weight, turned, expanded], 25)
    assert [view.stride() for view in bucket.views] == [(4, 1), (1, 4), weight.stride()]
    weight.grad = torch.randn_like(weight)
    bucket.fill(1)
    assert torch.equal(bucket.views[2], weight.grad)
    bucket.flat.copy_(torch.arange(bucket.flat.numel()))
    expected = bucket.views[1].clone()
    bucket.hand_out(1, as_view=False)  # no gradient yet: a tensor of its own
    bucket.flat.zero_()
    assert (
        torch.equal(turned.grad, expected) and turned.grad.stride() == turned.stride()
    )


def test_buckets_answer_as_torchs_grad_buckets():
    params = parameters(3, (2, 2))
    first, last = make_buckets(params, 1 / MIB)
    assert [(b.index(), b.is_last()) for b in (first, last)] == [(0, False), (1, True)]
    assert first.parameters() == [params[1]] and last.parameters() == [params[0]]
    assert (
        first.buffer().numel() == 4 and last.buffer().numel() == 3
    )  # without the manifest
    rounded = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16)
    last.set_buffer(
        rounded
    )  # as fp16_compress_wrapper does, for the hook that it calls
    assert last.buffer() is rounded and torch.equal(*last.gradients(), rounded)
    last.fill(1.0)  # the next pass
    assert last.buffer().dtype == torch.float32 and len(last.buffer()) == 3
    public = {name for name in dir(dist.GradBucket) if not name.startswith("_")}
    assert public <= set(dir(first))
