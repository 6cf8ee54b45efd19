"""Moves of one member: together, those of all members are the schedule."""

from itertools import pairwise

import pytest
import torch
from helpers import SCHEDULES
from hypothesis import given
from hypothesis import strategies as st

from d2lpar.collectives.lists import OPS
from d2lpar.collectives.schedules import Move, num_chunks, ring, steps_of
from d2lpar.ranks.moves import even_bounds, messages_of, own_moves


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_each_member_makes_the_moves_that_begin_or_end_with_it(schedule, k):
    all_moves = [own_moves(schedule, k, member, "sum") for member in range(k)]
    steps = steps_of(schedule, k)
    assert {moves.num_chunks for moves in all_moves} == {num_chunks(steps)}
    for i, step in enumerate(steps):
        sends, receives = zip(*(moves.steps[i] for moves in all_moves), strict=True)
        expected = {(m.src, m.dst, m.chunk) for m in step}
        assert {
            (src, *send) for src, own in enumerate(sends) for send in own
        } == expected
        found = {
            (src, dst, chunk)
            for dst, own in enumerate(receives)
            for src, chunk, _ in own
        }
        assert found == expected


@pytest.fixture
def fresh():
    """Own moves that were not made before, and are not kept."""
    own_moves.cache_clear()
    yield
    own_moves.cache_clear()


def test_what_arrives_is_reduced_in_the_order_of_members_or_taken(fresh, monkeypatch):
    """A difference shows the order; a sum would show it in the bits of NaN alone."""
    monkeypatch.setitem(OPS, "sum", torch.sub)
    for member, expected in ((0, [5 - 2, 2]), (1, [2 - 5, 2])):
        steps = own_moves(ring, 2, member, "sum").steps
        found = []
        for _, receives in steps:
            for _, _, into in receives:
                mine = torch.tensor([5])
                into(mine, torch.tensor([2]))
                found.append(mine.item())
        assert found == expected


def lying(k):
    """Another schedule of the same name."""
    return [[Move(0, 1, None, True)], [Move(1, 0, None, False)]]


def test_the_name_tells_schedules_of_one_name_apart(fresh, monkeypatch):
    monkeypatch.setattr(lying, "__qualname__", "ring")
    names = [own_moves(schedule, 2, 0, "sum").name for schedule in (lying, ring)]
    assert len(set(names)) == 2 and all(
        name.startswith("schedule ring (") for name in names
    )


@given(st.integers(0, 1000), st.integers(1, 64))
def test_bounds_are_where_tensor_split_cuts(numel, n):
    bounds = even_bounds(numel, n)
    sizes = [len(part) for part in torch.empty(numel).tensor_split(n)]
    assert [b - a for a, b in pairwise(bounds)] == sizes
    assert bounds[0] == 0 and bounds[-1] == numel


def test_messages_are_views_of_the_tensor():
    flat, bounds = torch.arange(7), even_bounds(7, 3)  # 3, 2 and 2 elements
    moves = own_moves(ring, 3, 1, "sum").steps
    for (sends, receives), own in zip(
        messages_of(moves, flat, bounds), moves, strict=True
    ):
        for messages, planned in zip((sends, receives), own, strict=True):
            for (member, part, *into), (there, chunk, *how) in zip(
                messages, planned, strict=True
            ):
                assert (member, into) == (there, how)
                assert part.tolist() == list(range(bounds[chunk], bounds[chunk + 1]))
                assert (
                    part.untyped_storage().data_ptr()
                    == flat.untyped_storage().data_ptr()
                )
    [([(_, whole)], _)] = messages_of([([(0, None)], [])], flat)
    assert whole is flat
