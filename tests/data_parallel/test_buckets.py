"""Buckets hold every gradient once, in the order of backward, and give it back."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from d2lpar.data_parallel.buckets import make_buckets

WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)

MIB = 2**20


def parameters(*shapes, dtype=torch.float32):
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def positions(buckets, params):
    """The parameters' numbers, a list a bucket."""
    number = {id(param): i for i, param in enumerate(params)}
    return [[number[id(param)] for param in bucket.params] for bucket in buckets]


def test_order_is_reversed_and_caps_are_respected():
    params = parameters(10, 20, 30, 40)
    assert positions(make_buckets(params, 400 / MIB), params) == [[3, 2, 1, 0]]
    assert positions(make_buckets(params, 399 / MIB), params) == [[3, 2, 1], [0]]
    assert positions(make_buckets(params, 280 / MIB), params) == [[3, 2], [1, 0]]
    assert positions(make_buckets(params, 1 / MIB), params) == [[3], [2], [1], [0]]


def test_larger_parameter_is_alone():
    params = parameters(1, 1000, 1)
    assert positions(make_buckets(params, 100 / MIB), params) == [[2], [1], [0]]


def test_kinds_are_apart_and_16_bits_lie_as_32():
    types = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64]
    params = [nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in types]
    buckets = make_buckets(params, 25)
    kinds = {bucket.flat.dtype: [param.dtype for param in bucket.params] for bucket in buckets}
    assert kinds == {
        torch.float32: [torch.float16, torch.bfloat16, torch.float32],
        torch.float64: [torch.float64],
        torch.complex64: [torch.complex64],
    }
    assert all(bucket.flat.dtype == bucket.flat.dtype for bucket in buckets)


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
kinds = st.sampled_from([*WIDE, torch.float16, torch.bfloat16])


@given(st.lists(st.tuples(shapes, kinds), min_size=1, max_size=12), st.integers(1, 400))
def test_every_parameter_lies_in_one_place(described, cap):
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in described]
    buckets = make_buckets(params, cap / MIB)
    numbers = positions(buckets, params)
    assert sorted(i for members in numbers for i in members) == list(range(len(params)))
    assert all(members == sorted(members, reverse=True) for members in numbers)
    assert [b.manifest.numel() for b in buckets] == [0] * (len(buckets) - 1) + [len(params) + 1]
    for bucket in buckets:
        nbytes = sum(param.numel() for param in bucket.params) * bucket.flat.dtype.itemsize
        assert nbytes <= cap or sum(param.numel() > 0 for param in bucket.params) == 1
        # No two gradients share a place: numbers written into all views are all found again.
        bucket.flat.fill_(-1)
        for i, (param, view) in enumerate(zip(bucket.params, bucket.views, strict=True)):
            assert view.shape == param.shape
            assert view.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
            view.fill_(i)
        bucket.manifest.fill_(100)
        assert (bucket.flat != -1).all()
        assert all((view == i).all() for i, view in enumerate(bucket.views))


@given(shapes, kinds, st.sampled_from([1.0, 0.5, 3.0]), st.booleans())
def test_what_is_filled_in_comes_out(shape, dtype, weight, as_view):
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)), *parameters(2, dtype=dtype)]
    (bucket,) = make_buckets(params, 25)
    grad = torch.randn(shape).to(dtype)
    params[0].grad = grad.clone()
    held = params[0].grad
    bucket.fill(weight)
    bucket.hand_out(1, as_view)
    expected = (grad.to(bucket.flat.dtype) * weight).to(dtype)
    assert params[0].grad.dtype == dtype and params[1].grad is None
    assert torch.equal(params[0].grad, expected)
    assert (bucket.views[0] == 0).all() and (bucket.manifest == 0).all()
    if as_view and dtype in WIDE and grad.numel():
        assert params[0].grad.data_ptr() == bucket.views[1].data_ptr()
        bucket.fill(2)  # in place: the gradient is the view
        assert torch.equal(params[0].grad, grad * weight * 2)
    else:
        bucket.flat.fill_(7)  # by the next pass
        assert torch.equal(params[0].grad, expected)
    assert (params[0].grad is held) == (not (as_view and dtype in WIDE))


def test_parameter_without_a_gradient_is_given_a_tensor_of_its_own():
    turned = nn.Parameter(torch.zeros(3, 4).t())
    (bucket,) = make_buckets([turned], 25)
    bucket.flat.copy_(torch.arange(bucket.flat.numel()))
    expected = bucket.views[0].clone()
    bucket.hand_out(0, as_view=False)
    bucket.flat.zero_()
    assert torch.equal(turned.grad, expected) and turned.grad.stride() == turned.stride()


def test_buckets_answer_as_torchs_grad_buckets():
    params = parameters(3, (2, 2))
    first, last = make_buckets(params, 1 / MIB)
    assert [(b.index(), b.is_last()) for b in (first, last)] == [(0, False), (1, True)]
    assert first.parameters() == [params[1]] and last.parameters() == [params[0]]
    assert first.buffer().numel() == 4 and last.buffer().numel() == 3  # without the manifest
    rounded = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16)
    last.set_buffer(rounded)  # as fp16_compress_wrapper does, for the hook that it calls
    assert last.buffer() is rounded and torch.equal(*last.gradients(), rounded)
    last.fill(1.0)  # the next pass
    assert last.buffer().dtype == torch.float32 and len(last.buffer()) == 3
    public = {name for name in dir(dist.GradBucket) if not name.startswith("_")}
    assert public <= set(dir(first))


def test_bucket_is_full_when_all_are_ready():
    (bucket,) = make_buckets(parameters(1, 2), 25)
    for i, full in ((1, False), (0, True)):
        bucket.ready.add(i)
        assert bucket.is_full == full


def test_strides_are_the_parameters():
    weight = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    turned = nn.Parameter(torch.zeros(3, 4).t())
    expanded = nn.Parameter(torch.zeros(1, 4).expand(3, 4))  # not dense: the bucket's view is
    (bucket,) = make_buckets([weight, turned, expanded], 25)
    assert [view.stride() for view in bucket.views] == [(4, 1), (1, 4), weight.stride()]
    for param in (weight, turned):
        param.grad = torch.randn_like(param)
    bucket.fill(1)
    assert torch.equal(bucket.views[2], weight.grad)
    assert torch.equal(bucket.views[1], turned.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_0_and_no_gradient_write_zeros(dtype):
    (param,) = parameters(4, dtype=dtype)
    (bucket,) = make_buckets([param], 25)
    bucket.flat.fill_(5)
    param.grad = torch.full_like(param, float("nan"))
    bucket.fill(0)
    assert (bucket.views[0] == 0).all()
    bucket.flat.fill_(5)
    param.grad = None
    bucket.fill(1)
    assert (bucket.views[0] == 0).all() and (bucket.manifest == 5).all()


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    (bucket,) = make_buckets([embedding.weight], 25)
    with pytest.raises(ValueError, match="sparse"):
        bucket.fill(1)
