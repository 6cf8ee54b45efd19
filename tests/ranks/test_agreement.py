"""Agreement: equal plans cost one short note. For different ones see test_collectives."""

import pytest
import torch

from d2lpar.ranks.agreement import agree
from d2lpar.ranks.transport import PeerError, Send, Transport


class Told(Transport):
    """A transport whose other member says what it is given."""

    def __init__(self, *answers):
        super().__init__(0, (4, 7))
        self.answers, self.told = list(answers), []

    def tell(self, note, timeout, ahead=()):
        self.told.append((len(note), ahead))
        return [note, self.answers.pop(0)(note)]

    def _announce(self, error):
        self.announced = error


def ask(transport, ahead=()):
    with transport.call("a test"):
        return agree(transport, 2**32 + 5, "plan", 5, 1.0, ahead)


def test_equal_plans_are_told_in_one_short_note_and_numbers_come_back():
    transport, sends = Told(lambda note: note), [Send(1, torch.ones(2))]
    assert ask(transport, sends) == [5, 5]
    [(length, ahead)] = transport.told
    assert length <= 63 and ahead is sends
    assert ask(Told(lambda note: note[:8] + (9).to_bytes(8, "little") + note[16:])) == [5, 9]


def test_what_is_no_note_is_not_taken_for_one():
    transport = Told(lambda note: torch.arange(8.0).numpy().tobytes())
    with pytest.raises(PeerError, match=r"rank 7 did not compare plans.* This rank's call: plan"):
        ask(transport)
    assert transport.broken and transport.announced.ranks == (7,)
