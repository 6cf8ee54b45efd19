"""Rounds of ``make soak``: from their seeds, with what is wrong; and two of them."""

import pytest
import soak
import torch
from soak import STAGES, STARTER, VICTIMS, WAYS, Plan, Usual, go_on, plan
from watched import LIMIT, Size

from d2lpar import launch
from d2lpar.checkpoint import load_checkpoint

SMALL = Size(examples=600, epochs=2, every=1)  # 3 batches, 3 checkpoints per epoch


def train(rank, world_size, options):
    from d2lpar import train_ddp

    train_ddp.train_epochs(train_ddp.arguments(options), torch.device("cpu"))


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    path = tmp_path_factory.mktemp("usual") / "net"
    launch(train, 2, [*SMALL.options(), f"--checkpoint={path}"])
    return Usual(path.read_bytes(), load_checkpoint(path)[0], 5.0, 2.0)


def test_a_round_follows_from_its_seed_and_sixteen_have_all_kinds():
    size = Size()
    assert (size.batches, size.steps, size.saves) == (8, 24, 12)
    plans = [plan(seed, size) for seed in range(500, 516)]
    assert plans == [plan(seed, size) for seed in range(500, 516)]
    kinds = {(p.way, p.victim, p.halt is None) for p in plans}
    assert len(kinds) == len(WAYS) * len(VICTIMS) * 2
    plans = [plan(seed, size) for seed in range(1000)]
    halts = [p.halt for p in plans if p.halt]
    assert {save for save, *_ in halts} == set(range(1, 13))
    assert {stage for _, stage, _ in halts} == set(STAGES)
    assert {p.step for p in plans} == set(range(-8, 24))


@pytest.mark.parametrize(
    ("way", "victim", "halt", "moment"),
    [
        (
            "messages",
            STARTER,
            (2, "rename", LIMIT),
            "save 2 on the disk epoch 1 batch 2",
        ),
        (
            "lanes",
            "both ranks",
            (4, "write", LIMIT),
            "save 4 half written epoch 2 batch 1",
        ),
    ],
)
def test_a_killed_run_leaves_nothing_and_goes_on_to_the_same_bits(
    way, victim, halt, moment, usual
):
    found, complaints = go_on(Plan(0, way, victim, halt, 0, 0.0), usual, SMALL)
    assert complaints == [] and found.split() == moment.split()


def test_what_is_wrong_is_told(usual, monkeypatch, capsys):
    plans = [Plan(seed, "lanes", "rank 1", None, 3, 0.5) for seed in (7, 8)]
    monkeypatch.setattr(soak, "undisturbed", lambda *_: usual)
    found = {7: [], 8: ["process 1 is left", "different"]}
    good = soak.soak(
        plans, lambda p, *_: ("epoch 1 batch 3", found[p.seed]), SMALL, "are good"
    )
    first, second, last = capsys.readouterr().out.splitlines()
    assert not good and last.startswith("1 of 2 are good, in 0.0 min")
    assert " ".join(first.split()) == "1 seed 7 lanes rank 1 epoch 1 batch 3 good"
    words = "2 seed 8 lanes rank 1 epoch 1 batch 3 process 1 is left; different"
    assert " ".join(second.split()) == words
