"""What autograd keeps of a sharded unit: addresses of its parameters."""

import torch
from helpers import close, grads, on_ranks, randn
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from d2lpar import fully_shard
from d2lpar.sharding.addresses import is_view

ROWS = 12


def test_a_view_shows_the_numbers_as_they_are():
    whole = torch.arange(8.0)
    shown = whole, whole[2:4], whole.view(2, 4).T, whole.detach(), whole[:0]
    assert all(is_view(tensor, whole) for tensor in shown)
    others = (
        whole.clone(),
        whole[:2].to_sparse(),
        whole.view(torch.int32),
        whole.view(torch.int64),
    )
    negated = torch.view_as_complex(whole.view(4, 2)).conj().imag
    assert negated.is_neg()
    assert not any(is_view(tensor, whole) for tensor in (*others, negated))


class Views(nn.Module):
    """What it keeps for backward is not the weight as it is: complex, negated."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(randn(32, 4, 2))
        self.graph = randn(ROWS, ROWS).relu()

    def forward(self, X):
        turned = (X.to(torch.complex128) @ torch.view_as_complex(self.weight)).conj()
        edges = self.graph[: len(X), : len(X)]
        hidden = turned.real * torch.view_as_complex(self.weight).conj().imag[0]
        rows = torch.sparse.mm(edges.to_sparse(), hidden)
        return torch.sparse.mm(edges.to_sparse_csr(), rows + X @ self.weight[..., 0])


def what_backward_needs_may_be_of_any_kind(rank, k):
    alone, model = Views(), fully_shard(Views(), reshard_after_forward=True)
    X = [randn(ROWS, 32).requires_grad_() for _ in range(2)]
    for net, own in zip((alone, model), X, strict=True):
        net(own).square().mean().backward()
    close(X[0].grad, X[1].grad)
    [grad] = grads(alone)
    for shard in model.parameters():
        close(shard.grad, grad.flatten()[shard.span])


def activations_go_with_the_output(rank, k):
    """Also without a backward pass, and where an operation keeps its own output."""
    for layer in (nn.Tanh(), nn.GELU()):
        model = fully_shard(
            nn.Sequential(nn.Linear(4, 4), layer), reshard_after_forward=True
        )
        output = model(torch.ones(2, 4))
        memory = StorageWeakRef(output.untyped_storage())
        del output
        assert memory.expired()


def what_is_kept_may_be_differentiated_again(rank, k):
    """The penalty of a gradient: its gradient goes through what was kept."""
    torch.manual_seed(0)
    alone, model = (
        nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 1)) for _ in "ab"
    )
    model.load_state_dict(alone.state_dict())
    fully_shard(model, reshard_after_forward=True)
    for net in (alone, model):
        X = torch.ones(2, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(net(X).sum(), X, create_graph=True)
        slope.square().sum().backward()
    for param, shard in zip(alone.parameters(), model.parameters(), strict=True):
        assert (param.grad is None) == (shard.grad is None)
        if shard.grad is not None:
            torch.testing.assert_close(shard.grad, param.grad.flatten()[shard.span])


test_on_two = on_ranks(
    2,
    [
        what_backward_needs_may_be_of_any_kind,
        activations_go_with_the_output,
        what_is_kept_may_be_differentiated_again,
    ],
)
