import pytest
import torch

from d2lpar.collectives.schedules import ring, star
from d2lpar.ranks.agreement import agree, describe_schedule, describe_tensor
from d2lpar.ranks.collectives import MismatchError
from d2lpar.ranks.transport import PeerError, Send, Transport


class Told(Transport):
    """A transport whose other member says what it is given."""

    def __init__(self, *answers):
        super().__init__(0, (4, 7))
        self.answers = list(answers)
        self.lengths = []

    def tell(self, note, timeout, ahead=None):
        self.ahead = ahead
        self.lengths.append(len(note))
        return [note, self.answers.pop(0)(note)]

    def _announce(self, error):
        self.announced = error


def test_equal_plans_are_told_in_one_short_note_and_rows_come_back():
    transport = Told(lambda note: note)
    assert agree(transport, 3, "plan", 5, 1.0) == [5, 5]
    assert len(transport.lengths) == 1 and transport.lengths[0] <= 64


def test_what_is_sent_next_goes_ahead_with_the_note_but_not_with_the_whole_plan():
    sends = [Send(1, torch.ones(2))]
    transport = Told(lambda note: note)
    agree(transport, 3, "plan", 5, 1.0, sends)
    assert transport.ahead is sends
    transport = Told(lambda note: note[:-1] + b"x", lambda text: text)
    with pytest.raises(MismatchError):
        agree(transport, 3, "plan", 5, 1.0, sends)
    assert transport.ahead is None


@pytest.mark.parametrize("place", [4, 16, 31])
def test_another_call_or_digest_is_a_mismatch_with_both_plans(place):
    def other(note):
        return note[:place] + bytes([note[place] ^ 1]) + note[place + 1 :]

    transport = Told(other, lambda text: b"another plan".ljust(len(text), b"\0"))
    with pytest.raises(MismatchError, match=r"rank 4, call 3: plan\nrank 7, call \d: another plan"):
        agree(transport, 3, "plan", 5, 1.0)
    assert not transport.broken  # nothing was sent


def test_what_is_no_note_is_not_taken_for_one():
    transport = Told(lambda note: torch.arange(8.0).numpy().tobytes())
    with pytest.raises(PeerError, match=r"rank 7 did not compare plans.* This rank's call: plan"):
        agree(transport, 3, "plan", 5, 1.0)
    assert transport.broken and transport.announced.ranks == (7,)


def test_call_numbers_may_pass_the_size_of_their_field():
    assert agree(Told(lambda note: note), 2**32 + 5, "plan", 5, 1.0) == [5, 5]


def test_rows_may_differ():
    transport = Told(lambda note: note[:8] + (9).to_bytes(8, "little") + note[16:])
    assert agree(transport, 3, "plan", 5, 1.0) == [5, 9]


def test_tensors_are_described_by_all_that_must_agree():
    wanted = torch.ones(2, 3, requires_grad=True)
    assert describe_tensor(wanted) == "float32 [2, 3] that requires gradients"
    assert describe_tensor(wanted.detach(), first=1) == "float32 [3]"
    assert describe_tensor(torch.ones(3, dtype=torch.int8).expand(2, 3)) == "int8 [2, 3] expanded"
    assert describe_tensor([1.0]) == "list"
    assert describe_tensor(torch.ones(2, device="meta")) == "float32 [2] on meta"
    sparse = torch.eye(2).to_sparse()
    assert describe_tensor(sparse) == "float32 [2, 2] with layout torch.sparse_coo"


def test_schedules_are_described_by_their_moves():
    def other(k):
        return ring(k)

    other.__qualname__ = "star"
    assert describe_schedule(star, 3) != describe_schedule(other, 3)
    assert describe_schedule(other, 3).startswith("schedule star (")
    assert describe_schedule(None, 3) == "schedule None"
