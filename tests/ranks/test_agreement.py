"""Agreement: equal plans cost one short note, and other ones are shown to all."""

import pytest
import torch

from d2lpar.ranks.agreement import agree
from d2lpar.ranks.transport import MismatchError, PeerError, Send, Transport


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


def ask(transport, call=3, ahead=()):
    with transport.call("a test"):
        return agree(transport, call, "plan", 5, 1.0, ahead)


@pytest.mark.parametrize("call", [3, 2**32 + 5])
def test_equal_plans_are_told_in_one_short_note_and_numbers_come_back(call):
    transport, sends = Told(lambda note: note), [Send(1, torch.ones(2))]
    assert ask(transport, call, sends) == [5, 5]
    [(length, ahead)] = transport.told
    assert length <= 63 and ahead is sends
    assert ask(Told(lambda note: note[:8] + (9).to_bytes(8, "little") + note[16:])) == [5, 9]


@pytest.mark.parametrize("place", [4, 16, 31])
def test_another_call_or_digest_is_a_mismatch_with_both_plans(place):
    def other(note):
        return note[:place] + bytes([note[place] ^ 1]) + note[place + 1 :]

    transport = Told(other, lambda text: b"another plan".ljust(len(text), b"\0"))
    with pytest.raises(MismatchError, match=r"rank 4, call 3: plan\nrank 7, call \d: another plan"):
        ask(transport, ahead=[Send(1, torch.ones(2))])
    assert not transport.broken  # nothing was sent
    assert transport.told[1][1] == ()  # nor goes along with the whole plan


def test_what_is_no_note_is_not_taken_for_one():
    transport = Told(lambda note: torch.arange(8.0).numpy().tobytes())
    with pytest.raises(PeerError, match=r"rank 7 did not compare plans.* This rank's call: plan"):
        ask(transport)
    assert transport.broken and transport.announced.ranks == (7,)
