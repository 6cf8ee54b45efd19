import pytest
import torch

from d2lpar.collectives.schedules import Move, halving_doubling, ring, star, tree_broadcast
from d2lpar.ranks.moves import Part, even_bounds, make_moves, own_moves
from d2lpar.ranks.transport import take


@pytest.mark.parametrize("numel", [0, 1, 7, 12])
@pytest.mark.parametrize("n", [1, 3, 5])
def test_bounds_are_those_of_tensor_split(numel, n):
    sizes = [len(part) for part in torch.zeros(numel).tensor_split(n)]
    assert even_bounds(numel, n) == [sum(sizes[:i]) for i in range(n + 1)]


@pytest.mark.parametrize("schedule", [ring, star, halving_doubling])
def test_all_members_moves_together_are_the_schedule(schedule):
    steps = schedule(4)
    members = [own_moves(schedule, 4, member, "sum") for member in range(4)]
    assert {n for _, n in members} == {own_moves(schedule, 4, 0, "max")[1]}
    for number, step in enumerate(steps):
        own = [moves[number] for moves, _ in members]
        sent = {(r, dst, chunk) for r in range(4) for dst, chunk in own[r].sends}
        taken = {(src, r, c, into is take) for r in range(4) for src, c, into in own[r].receives}
        assert sent == {(m.src, m.dst, m.chunk) for m in step}
        assert taken == {(m.src, m.dst, m.chunk, not m.reduce) for m in step}


def test_further_arguments_go_to_the_schedule_and_a_bad_one_is_refused():
    assert own_moves(tree_broadcast, 3, 2, "sum", 2)[0][0].sends
    with pytest.raises(ValueError, match="sends chunk 0 while it is overwritten"):
        own_moves(
            lambda k: [[Move(0, 1, 0, True), Move(1, 0, 1, True), Move(1, 2, 0, True)]], 3, 0, "sum"
        )


def test_a_part_sends_and_receives_views_of_its_elements():
    class Noted:
        def exchange(self, sends, receives, timeout):
            self.calls.append((sends, receives, timeout))

    transport = Noted()
    transport.calls = []
    steps, n = own_moves(ring, 3, 1, "sum")
    flat = torch.arange(7.0)
    make_moves(Part(steps, flat, even_bounds(7, n)), transport, 2.5)
    assert [timeout for *_, timeout in transport.calls] == [2.5] * 4
    [[send], [receive], _], *_ = transport.calls
    assert (send.dst, send.message.tolist()) == (2, [0.0, 1.0, 2.0])
    assert (receive.src, receive.part.tolist()) == (0, [5.0, 6.0])
    receive.into(receive.part, torch.ones(2))
    assert flat.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0]
