"""A run by ranks is a run by one process, and a stopped run is one that was not."""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from helpers import LIMIT, close, distance

from d2lpar import launch, load_checkpoint, train_ddp
from d2lpar.data import load_data_fashion_mnist
from d2lpar.models import lenet_layers

CPU = torch.device("cpu")
# No defaults; the last batch of an epoch has 30 rows, which 1, 2 and 3 ranks can share
GIVEN = {"batch-size": 60, "lr": 0.1, "seed": 3, "examples": 270}
SMALL = [f"--{name}={value}" for name, value in GIVEN.items()]


def test_a_batch_must_be_shared(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train_ddp.arguments(["--batch-size=34"]).batch_size == 34
    for size in (0, 33):
        with pytest.raises(SystemExit, match="2"):
            train_ddp.arguments([f"--batch-size={size}"])
        assert "--batch-size must be" in capsys.readouterr().err


def run(path, *command):
    """Run ``python -m ...`` with a checkpoint; return its exit code and its stdout."""
    words = [sys.executable, "-m", *command, f"--checkpoint={path}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"MKL_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)
    try:
        said = process.communicate(timeout=2 * LIMIT)[0]
    finally:
        everyone = psutil.process_iter(["cmdline"])
        left = [one for one in everyone if words[-1] in (one.info["cmdline"] or ())]
        for one in left:
            one.kill()
    assert not left
    return process.returncode, said


def test_alone_it_is_one_process_and_goes_on_only_with_what_fits(tmp_path, monkeypatch):
    def says(words, *options):
        with patch.dict(os.environ), pytest.raises(SystemExit) as stopped:
            train_ddp.main([f"--checkpoint={path}", *SMALL, "--resume", *options])
        dist.destroy_process_group()
        # a text, which Python prints, to exit with 1
        assert re.fullmatch(f"d2lpar.train_ddp: {words}.*", stopped.value.code)

    code, said = run(path := tmp_path / "net", "d2lpar.train_ddp", "--epochs=2", *SMALL)
    line = r"epoch {}/2: loss 2\.\d{{3}}, test accuracy 0\.\d{{3}}, \d+\.\d s on cpu\n"
    assert code == 0 and re.fullmatch(line.format(1) + line.format(2), said), said
    for name, value in GIVEN.items():
        differs = f"{name.replace('-', '_')} {value}, not {2 * value}"
        says(f"{path} is of a run with {differs}", f"--{name}={2 * value}")
    monkeypatch.setenv("D2LPAR_DATA", str(tmp_path))
    says(f"{tmp_path}/train-images-idx3-ubyte.gz cannot be read")


DIES = """
import os
from d2lpar import train_ddp
def dies(*args):  # at the end of the second epoch, before it is saved
    loss = steps(*args)
    return os.kill(os.getpid(), 9) if args[3].epoch == 1 else loss
steps = train_ddp.train_epoch
if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("{}", "0"):
    train_ddp.train_epoch = dies
train_ddp.main()
"""


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_run_whose_rank_is_killed_goes_on_to_the_same_bits(tmp_path, restarts):
    script, path, other = (tmp_path / name for name in ("dies.py", "net", "other"))
    script.write_text(DIES.format(restarts))  # rank 0 or 1
    torchrun = "torch.distributed.run", "--standalone", "--nproc_per_node=2"
    options, how = ("--epochs=2", *SMALL, "--resume"), f"--max-restarts={restarts}"
    code, said = run(path, *torchrun, how, script, *options)
    if not restarts:
        assert code == 1
        code, more = run(path, *torchrun, "-m", "d2lpar.train_ddp", *options)
        said += more
    assert code == 0 and re.findall(r"epoch (\d)/2: loss", said) == ["1", "2"]
    begun = [f"{path}: {n} of 2 epochs are done\n" for n in (0, 1)]
    assert [said.count(line) for line in begun] == [1, 1]
    args = train_ddp.arguments([f"--checkpoint={other}", *options])
    launch(lambda rank, k: train_ddp.train(args, CPU), 2, timeout=LIMIT)
    close(load_checkpoint(path), load_checkpoint(other), rtol=0, atol=0)


def network(scale=0.05):  # LeNet in float64, and random numbers of its own
    def in_float64(net, X):  # but for a wrong mode
        return X[0].double() if net.training == torch.is_grad_enabled() else None

    net = lenet_layers(scale).double()
    net.register_forward_pre_hook(in_float64)
    torch.seed()
    return net


def trains(rank, k, parts, *command):
    train_ddp.load_data_fashion_mnist = lambda *args, **kwargs: parts
    train_ddp.lenet_layers = network
    train_ddp.train(train_ddp.arguments(command), CPU)


def test_ranks_are_one_process_whatever_their_number(tmp_path, capsys):
    train, test = parts = load_data_fashion_mnist(1, device=CPU)
    for part, n in ((train, 300), (test, 101)):  # no number of ranks divides 101
        part.images, part.labels = part.images[:n].clone(), part.labels[:n].clone()
    options, states, lines = (f"--checkpoint={tmp_path / 'net'}", *SMALL), [], []
    for epochs, k in ((1, 2), (2, 2), (3, 3), (5, 1)):
        command = *options, f"--epochs={epochs}", "--resume"
        launch(trains, k, parts, *command, timeout=LIMIT)
        states.append(load_checkpoint(tmp_path / "net"))
    torch.manual_seed(3)  # and now one process, by torch's own classes
    optimizer = torch.optim.SGD((net := network()).parameters(), 0.1, momentum=0.9)
    for epoch in range(5):
        order, total = torch.randperm(270, generator=torch.manual_seed(3 + epoch)), 0
        for X, y in map(train.take, order.split(60)):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(X), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
        X, y = test.take(torch.arange(101))
        accuracy = (net(X).argmax(dim=1) == y).double().mean()
        lines.append(f"loss {total / 270:.3f}, test accuracy {accuracy:.3f}")
    assert re.findall(r"rank 0\] epoch.*: (.*), ", capsys.readouterr().out) == lines
    *_, control, found = (list(state["network"].values()) for state in states)
    expected = list(net.state_dict().values())
    assert distance(found, expected) < 1e-12 and distance(control, expected) > 1e-3
    first, second = (state["generators"] for state in states[:2])
    assert torch.equal(first, second) and not torch.equal(*first)
