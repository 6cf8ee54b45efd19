"""LeNet by hand and its gradients are torch's; the loss and the step are the book's."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from d2lpar import init_params, lenet, loss, sgd

SHAPES = [
    (20, 1, 3, 3),
    (20,),
    (50, 20, 5, 5),
    (50,),
    (800, 128),
    (128,),
    (128, 10),
    (10,),
]


def as_torch_has_it(tensor):
    """A linear layer's weight is (out, in) in torch, and (in, out) in the book."""
    return tensor.T if tensor.dim() == 2 else tensor


def test_parameters_have_the_books_shapes_and_scale_and_come_from_the_generator():
    a, b, c = (
        init_params(0.5, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)
    )
    assert [tuple(p.shape) for p in a] == SHAPES
    for param in a:
        assert param.dtype == torch.float32 and not param.requires_grad
        if param.dim() == 1:
            assert not param.any()
        else:
            assert abs(param.std() - 0.5) < 0.05 and abs(param.mean()) < 0.1
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a[0], c[0])


def test_lenet_and_its_gradients_equal_those_of_torch_nn():
    params = [p.double().requires_grad_() for p in init_params(0.1)]
    X, y = torch.randn(7, 1, 28, 28, dtype=torch.float64), torch.arange(7)
    net = nn.Sequential(
        *(nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)),
    ).double()
    net.load_state_dict(
        dict(zip(net.state_dict(), map(as_torch_has_it, params), strict=True))
    )
    torch.testing.assert_close(lenet(X, params), net(X))
    loss(lenet(X, params), y).sum().backward()
    F.cross_entropy(net(X), y, reduction="sum").backward()
    for mine, other in zip(params, net.parameters(), strict=True):
        torch.testing.assert_close(as_torch_has_it(mine.grad), other.grad)


def test_channels_last_changes_strides_but_not_results():
    params, X = init_params(), torch.rand(5, 1, 28, 28)
    assert [p.stride()[1] for p in (params[0], params[2])] == [1, 1]
    plain = [p.clone(memory_format=torch.contiguous_format) for p in params]
    torch.testing.assert_close(lenet(X, params), lenet(X, plain), rtol=1e-5, atol=1e-7)
    # of larger images
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        lenet(torch.rand(3, 1, 32, 32), params)


def test_no_rows_give_no_logits_and_zero_gradients():
    params = [p.requires_grad_() for p in init_params()]
    X, y = torch.zeros(0, 1, 28, 28), torch.zeros(0, dtype=torch.long)
    loss(lenet(X, params), y).sum().backward()
    assert lenet(X, params).shape == (0, 10) and not any(p.grad.any() for p in params)


def test_the_loss_is_one_number_per_example():
    y_hat, y = torch.randn(4, 10), torch.tensor([3, 1, 4, 1])
    by_hand = -y_hat.log_softmax(dim=1)[torch.arange(4), y]
    torch.testing.assert_close(loss(y_hat, y), by_hand)


def test_sgd_divides_by_the_full_batch_and_clears_the_gradient():
    param = torch.tensor([1.0, 2.0], requires_grad=True)
    param.grad = torch.tensor([8.0, -8.0])
    sgd([param], lr=0.5, batch_size=4)
    assert param.tolist() == [0.0, 3.0]
    assert param.grad is None and param.requires_grad
