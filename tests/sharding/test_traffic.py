"""Messages in one order, and gathers that begin ahead of time."""

from dataclasses import dataclass

import torch
from helpers import LIMIT, attempt, in_ranks, on_ranks
from torch import nn

from d2lpar import fully_shard, ranks


class Watches(nn.Linear):
    """A layer that waits in both passes for what is gathered ahead, and notes names."""

    def forward(self, X):
        self.note()
        if X.requires_grad:
            X.register_hook(lambda grad: self.note())
        return super().forward(X)

    def note(self):
        ahead = [unit for unit in self._unit.traffic.units if unit.coming]
        for unit in ahead:
            # it arrives while this layer computes
            assert unit.coming.result(LIMIT).numel()
        self.ahead.append([unit.name for unit in ahead])


def net(prefetch, width=8, layer=nn.Linear):
    model = nn.Sequential(
        *[part for _ in range(3) for part in (layer(width, width), nn.Tanh())]
    )
    for i in (0, 2, 4):
        model[i].ahead = []
        fully_shard(model[i], reshard_after_forward=True)
    model.gain = nn.Parameter(torch.ones(1))
    model.forward = lambda X: model.gain * nn.Sequential.forward(model, X)
    return fully_shard(model, prefetch=prefetch, reshard_after_forward=True)


def messages(model, X):
    model.timeline = []
    model(X).sum().backward()
    return [(what, name) for what, name, _, _ in model.timeline]


def messages_are_those_of_the_passes(rank, k):
    """Also those that begin ahead: none is too many, and none comes twice."""
    X = torch.ones(2, 8)
    gathers = [("gather", name) for name in ("root", "0", "2", "4")]
    for prefetch in (False, True):
        model = net(prefetch)
        first, second, third = (messages(model, X) for _ in range(3))
        assert first[:4] == gathers
        assert sorted(first) == sorted(second) == sorted(third)
        assert second == third
        backward = second[4:]
        assert [name for what, name in backward if what == "reduce"] == [
            "4",
            "2",
            "0",
            "root",
        ]
        assert ("gather", "0") not in backward  # X wants no gradient
        ahead = backward.index(("gather", "2")) < backward.index(("reduce", "4"))
        assert ahead == prefetch
        assert all(begin <= end for _, _, begin, end in model.timeline)


def several_outputs_begin_one_backward_pass(rank, k):
    """The second output is from the middle: its hook is called with the pass begun."""
    counts = []
    for prefetch in (False, True):
        model = net(prefetch)
        early = []
        model[2].register_forward_hook(
            lambda *args, early=early: early.append(args[-1])
        )
        inner = model.forward
        model.forward = lambda X, inner=inner, early=early: (inner(X), early.pop())
        for _ in range(3):
            model.timeline = []
            sum(output.sum() for output in model(torch.ones(2, 8))).backward()
        counts.append([(what, name) for what, name, *_ in model.timeline])
    assert sorted(counts[0]) == sorted(counts[1])
    assert counts[1][4:].index(("gather", "2")) < counts[1][4:].index(("reduce", "4"))


@dataclass
class Record:
    value: torch.Tensor


def an_output_in_a_dataclass_begins_a_backward_pass(rank, k):
    """Without a tensor that tells of backward, nothing would be gathered ahead."""
    model = net(True)
    inner = model.forward
    model.forward = lambda X: Record(inner(X))
    for _ in range(2):
        model.timeline = []
        model(torch.ones(2, 8)).value.sum().backward()
    backward = [(what, name) for what, name, *_ in model.timeline[4:]]
    assert backward.index(("gather", "2")) < backward.index(("reduce", "4"))


def what_is_not_needed_after_all_is_dropped(rank, k):
    """A pass that is unlike the last one: it is right, and the next one again."""

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(fully_shard(nn.Linear(4, 4)) for _ in range(4))

        def forward(self, X, order):
            for i in order:
                X = self.parts[i](X)
            return X

    torch.manual_seed(0)
    model = fully_shard(Skips(), prefetch=True)
    torch.manual_seed(0)
    weights = [
        (layer.weight, layer.bias) for layer in (nn.Linear(4, 4) for _ in range(4))
    ]
    X = torch.ones(2, 4)
    for order in ([0, 1, 2, 3], [0, 2, 1], [3, 2, 1, 0], [0, 0, 3], [1], [0, 1, 2, 3]):
        expected = X
        for i in order:
            expected = nn.functional.linear(expected, *weights[i])
        found = model(X, order)
        torch.testing.assert_close(found, expected)
        found.sum().backward()
        assert [unit.coming for unit in model._units()] == [None] * 5


def what_changes_after_it_was_gathered_ahead_is_gathered_again(rank, k):
    model = net(True)
    alone = nn.Sequential(
        *[part for _ in range(3) for part in (nn.Linear(8, 8), nn.Tanh())]
    )
    with torch.no_grad():
        for i in (0, 2, 4):
            model[i].unshard()
            alone[i].weight.copy_(model[i].weight)
            alone[i].bias.copy_(model[i].bias)
            model[i].reshard()
    for own in (model, alone):

        def double(*_, weight=own[2].weight):
            with torch.no_grad():
                weight.mul_(2)

        own[0].register_forward_hook(double)
    X = torch.ones(2, 8)
    for _ in range(3):
        found = model(X)
        torch.testing.assert_close(found, alone(X))
        found.sum().backward()


def a_part_alone_is_no_part_of_a_pass(rank, k):
    """Called often without the model, it leaves no trace; the model says what stays."""
    model = nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4))
    X = torch.ones(2, 4)
    with torch.no_grad():
        model[0](X)  # before the model is known
    fully_shard(model)
    model(X)
    assert model[0]._unit.whole is None and model._unit.whole is not None
    traffic = model._unit.traffic
    for _ in range(3):
        with torch.no_grad():
            model[0](X)
    assert [unit.name for unit in traffic._now] == ["root", "0"]


def a_part_of_two_models_is_refused(rank, k):
    shared = fully_shard(nn.Linear(4, 4))
    first, second = (
        fully_shard(nn.Sequential(shared, nn.Linear(4, 4))) for _ in range(2)
    )
    X = torch.ones(2, 4)
    for _ in range(2):  # and neither call breaks the first model
        first(X).sum().backward()
        kind, text, *_ = attempt(second, X)
        assert kind == "RuntimeError" and text.startswith(
            "0 belongs to another sharded model"
        )
    around = fully_shard(nn.Sequential(first))
    around(X).sum().backward()  # the whole of it may become a part


def one_thread_and_one_line_serve_all_units(rank, k):
    model = net(True)
    model[0](torch.ones(2, 8))  # it is its own root, until the model is called
    model(torch.ones(2, 8)).sum().backward()
    assert {id(unit.traffic) for unit in model._units()} == {id(model._unit.traffic)}
    assert [unit.name for unit in model._units()] == ["root", "0", "2", "4"]
    group = torch.ones(1)
    ranks.allreduce(group)  # the group itself is free for others
    assert group.item() == k


test_on_two = on_ranks(
    2,
    [
        messages_are_those_of_the_passes,
        several_outputs_begin_one_backward_pass,
        an_output_in_a_dataclass_begins_a_backward_pass,
        what_is_not_needed_after_all_is_dropped,
        what_changes_after_it_was_gathered_ahead_is_gathered_again,
        a_part_alone_is_no_part_of_a_pass,
        a_part_of_two_models_is_refused,
        one_thread_and_one_line_serve_all_units,
    ],
)


@in_ranks(2)
def test_the_next_unit_is_gathered_while_one_computes(rank, k):
    for prefetch in (False, True):
        model = net(prefetch, layer=Watches)
        for _ in range(2):
            for i in (0, 2, 4):
                model[i].ahead.clear()
            model(torch.ones(2, 8)).sum().backward()
        # forward, then backward: the first layer's weight is not asked for there
        expected = (
            ([["2"]], [["4"], []], [[], ["2"]])
            if prefetch
            else ([[]], [[], []], [[], []])
        )
        assert tuple(model[i].ahead for i in (0, 2, 4)) == expected
