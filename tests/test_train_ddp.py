"""A run by ranks is a run by one process, and a stopped run is one that was not."""

import os
import re
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from helpers import TORCHRUN, distance

from d2lpar import launch, load_data_fashion_mnist
from d2lpar.checkpoint import load_checkpoint, save_checkpoint
from d2lpar.data import Minibatches
from d2lpar.models import lenet_layers
from d2lpar.train_ddp import arguments, device_of, main
from d2lpar.training import loss

ROOT = Path(__file__).resolve().parents[1]


def test_a_process_finds_its_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [device_of(i, 3, "0,1,3").index for i in range(3)] == [0, 1, 3]
    assert device_of(2, 4, None) == torch.device("cuda", 2)
    assert device_of(2, 5, None) == torch.device("cpu")
    for gpus in ("0,1", "0,1,1", "0,1,4", "0,1,x", ""):
        words = f"--gpus {gpus}: 3 processes need .* this machine has 4"
        with pytest.raises(ValueError, match=words):
            device_of(0, 3, gpus)


def test_a_wrong_start_ends_with_one_line(monkeypatch, capsys):
    for option in (
        "--epochs 0",
        "--batch-size -1",
        "--lr nan",
        "--timeout inf",
        "--every 0",
    ):
        with pytest.raises(SystemExit):
            arguments(option.split())
        assert (
            f"{option.split()[1]} is not positive and finite" in capsys.readouterr().err
        )
    for name, value in {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for words in ("there is no folder /no", "not set: RANK; torchrun sets"):
        # which prints the text and exits with 1
        with pytest.raises(SystemExit) as stopped:
            main(["--checkpoint", "/no/x", "--timeout=1"])
        text = stopped.value.code
        assert (
            text.startswith("d2lpar.train_ddp: ") and words in text and "\n" not in text
        )
        monkeypatch.delenv("RANK", raising=False)


def test_started_by_nobody_it_is_one_process_and_says_how_to_have_more(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in TORCHRUN}
    command = [sys.executable, "-m", "d2lpar.train_ddp", "--epochs=1", "--examples=300"]
    command += [f"--checkpoint={tmp_path / 'net'}"]
    options = {"capture_output": True, "text": True, "timeout": 100, "cwd": ROOT}
    done = subprocess.run(command, env=environment, **options)
    first, last = done.stdout.splitlines()
    assert first.startswith(
        "one process; for more, start it with torchrun: torchrun --nproc"
    )
    assert last.startswith("epoch  1/1: loss") and (tmp_path / "net").exists()
    environment["D2LPAR_DATA"] = str(tmp_path)
    done = subprocess.run(command, env=environment, **options)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    words = "d2lpar.train_ddp: .* cannot be read .* or fetch it with "
    assert re.search(words, done.stderr)


# Training


@pytest.fixture(scope="module")
def small():
    """Fashion-MNIST cut short: 600 to train on, 101 to test (uneven over 2 and 3)."""
    parts = zip(load_data_fashion_mnist(1, device="cpu"), (600, 101), strict=True)
    return [(part.images[:n].clone(), part.labels[:n].clone()) for part, n in parts]


def run(world_size, small, *commands, stops=None, dtype=torch.float32):
    """Train in new ranks, one command line after another; return each rank's outcomes.

    An outcome is the list of parameters, or the error as text. ``stops`` has for each
    command line the number of saves after which all ranks are interrupted; 0: never.
    """

    def work(rank, world_size):
        from d2lpar import train_ddp

        class Minibatches(train_ddp.Minibatches):
            def take(self, rows):
                X, y = super().take(rows)
                return X.to(dtype), y

        def save_and_stop(saves, stop, *args):
            save(*args)
            saves.append(1)
            if len(saves) == stop:
                raise KeyboardInterrupt

        def load_small(batch_size, device):
            return [Minibatches(*part, batch_size) for part in small]

        train_ddp.load_data_fashion_mnist, train_ddp.Minibatches = (
            load_small,
            Minibatches,
        )
        train_ddp.lenet_layers = lambda generator: lenet_layers(generator=generator).to(
            dtype
        )
        save, outcomes = train_ddp.save, []
        for command, stop in zip(commands, stops or [0] * len(commands), strict=True):
            train_ddp.save = partial(save_and_stop, [], stop)
            try:
                network = train_ddp.train_epochs(
                    train_ddp.arguments(command), torch.device("cpu")
                )
                outcomes.append(
                    [param.detach().clone() for param in network.parameters()]
                )
            except (Exception, KeyboardInterrupt) as error:
                outcomes.append(f"{type(error).__name__}: {error}")
        return outcomes

    return launch(work, world_size, timeout=100)


def one_process(small, num_examples, batch_size, lr, epochs, seed):
    """What training in one process, in float64, ends with and would report."""
    network = lenet_layers(generator=torch.Generator().manual_seed(seed)).double()
    data, test = (Minibatches(*part, batch_size) for part in small)
    for epoch in range(epochs):
        total = 0
        order = torch.randperm(
            num_examples, generator=torch.Generator().manual_seed(seed + epoch)
        )
        for rows in order.split(batch_size):
            X, y = data.take(rows)
            network.zero_grad()
            losses = loss(network(X.double()), y)
            losses.mean().backward()
            total += losses.sum().item()
            with torch.no_grad():
                for param in network.parameters():
                    param -= lr * param.grad
    X, y = test.take(torch.arange(n := len(test.images)))
    correct = (network(X.double()).argmax(dim=1) == y).sum()
    result = (
        f"loss {total / num_examples:.3f}, test accuracy {correct / n:.3f} ({correct}"
        f" of {n})"
    )
    return list(network.parameters()), f"epoch  {epochs}/{epochs}: {result}"


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_train_like_one_process(world_size, small, tmp_path, capsys):
    # 301 examples: the last batch has one, so of 2 or 3 ranks only rank 0 has any of it
    options = "--examples=301", "--batch-size=60", "--epochs=2", "--lr=0.5", "--seed=3"
    command = f"--checkpoint={tmp_path / 'net'}", *options
    params = [
        params for [params] in run(world_size, small, command, dtype=torch.float64)
    ]
    assert all(same(others, params[0]) for others in params)
    expected, report = one_process(small, 301, 60, 0.5, epochs=2, seed=3)
    start = list(lenet_layers(generator=torch.Generator().manual_seed(3)).parameters())
    assert distance(params[0], expected) < 1e-12 < 1e-3 < distance(start, expected)
    out, bars = capsys.readouterr()
    # a line for each, of rank 0
    assert f"[rank 0] {report}, " in out and out.count("epoch") == 2
    assert bars.startswith("[rank 0] \repoch 1/2:   0%") and bars.count("[rank ") == 1


def test_a_run_that_was_stopped_ends_with_the_same_bits(small, tmp_path, capsys):
    def reports():  # without the seconds, which no two runs share
        return re.findall(r"epoch .*\)", capsys.readouterr().out)

    options = "--examples=600", "--batch-size=100", "--epochs=2", "--every=2"
    # after so many saves: two in the first epoch, one at its end, one in the second
    places = {1: (0, 2), 2: (0, 4), 3: (1, 0), 4: (1, 2)}
    command = {n: (f"--checkpoint={tmp_path / str(n)}", *options) for n in (0, *places)}
    first, second = run(2, small, *command.values(), stops=list(command))
    assert first[1:] == second[1:] == ["KeyboardInterrupt: "] * 4
    for n, place_of_stop in places.items():
        _, info = load_checkpoint(tmp_path / str(n))
        assert (info["epoch"], info["batch"]) == place_of_stop
    epoch_1, epoch_2, *_ = reports()
    # the first one is stopped once more, where the second one was, and goes on again
    resumed = {n: (*command[n], "--resume") for n in places}
    assert run(2, small, resumed[1], stops=[1]) == [["KeyboardInterrupt: "]] * 2
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    for outcomes in run(2, small, *resumed.values()):
        assert all(same(params, first[0]) for params in outcomes)
    assert reports() == [epoch_1, epoch_2] * 2 + [epoch_2] * 2


def test_a_run_goes_on_with_another_number_of_ranks(small, tmp_path, capsys):
    options = "--examples=301", "--batch-size=60", "--epochs=2", "--lr=0.5", "--seed=3"
    command = (
        f"--checkpoint={tmp_path / 'net'}",
        *options,
        "--every=2",
        "--resume-if-there",
    )
    for world_size in (2, 3):  # each is stopped in the middle of the first epoch
        outcomes = run(world_size, small, command, stops=[1], dtype=torch.float64)
        assert outcomes == [["KeyboardInterrupt: "]] * world_size
    [[params]] = run(1, small, command, dtype=torch.float64)
    expected, last = one_process(small, 301, 60, 0.5, epochs=2, seed=3)
    _, first = one_process(small, 301, 60, 0.5, epochs=1, seed=3)
    assert distance(params, expected) < 1e-12
    out = capsys.readouterr().out
    # the losses before and after count
    assert last in out and first.replace("1/1", "1/2") in out
    for before, now in ((2, 3), (3, 1)):
        words = (
            f"its run had {before} ranks, this one has {now}: the same steps, rounded"
            " different"
        )
        assert out.count(words) == 1


def test_what_cannot_be_resumed_is_named_on_every_rank(small, tmp_path):
    options = "--examples=64", "--batch-size=32", "--epochs=1"
    run(2, small, (f"--checkpoint={tmp_path / 'net'}", *options))
    tensors, info = load_checkpoint(tmp_path / "net")
    weights = tensors["0.2.W"]
    flaws = {
        "its run has lr 0.3, this one 0.2: give the same": ({}, {"lr": 0.3}),
        "NaN or infinite values in 0.2.W": ({"0.2.W": weights / 0}, {}),
        "size mismatch for 0.2.W": ({"0.2.W": weights.reshape(-1)}, {}),
        "--epochs is 1, and it is at epoch 99, batch 0": ({}, {"epoch": 99}),
        "--epochs is 1, and it is at epoch 1, batch 1": ({}, {"batch": 1}),
    }
    for i, (tensor, place_of_stop) in enumerate(flaws.values()):
        save_checkpoint(
            tmp_path / str(i), {**tensors, **tensor}, {**info, **place_of_stop}
        )
    # there is no file for the last
    paths = [tmp_path / str(i) for i in range(len(flaws) + 1)]
    words = [*flaws, "it cannot be read (No such file"]
    commands = [(f"--checkpoint={path}", *options, "--resume") for path in paths]
    for *errors, uneven in run(2, small, *commands, ("--batch-size=33",)):
        assert "33 cannot be shared by 2 ranks: take a multiple of 2" in uneven
        for error, path, word in zip(errors, paths, words, strict=True):
            assert error.startswith(f"CheckpointError: cannot resume from {path}: "), (
                error
            )
            assert word in error


def test_resume_if_there_begins_where_there_is_no_checkpoint_yet(
    small, tmp_path, capsys
):
    options = "--examples=64", "--batch-size=32", "--epochs=1"
    there = f"--checkpoint={tmp_path / 'net'}", *options, "--resume-if-there"
    for plain, first, again in run(
        2, small, (f"--checkpoint={tmp_path / 'other'}", *options), there, there
    ):
        assert same(first, plain) and same(again, plain)
    out = capsys.readouterr().out
    assert out.count("net: there is none yet, so this is the beginning") == 1
    assert out.count("net: all 1 epochs are done, nothing is left") == 1
    assert out.count("epoch  1/1") == 2  # the third run had nothing to do


def torchrun(*options, how=("--standalone",), script=("-m", "d2lpar.train_ddp")):
    """Start the training; its process."""
    words = "-m", "torch.distributed.run", "--nproc_per_node=2", *how
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # as in launch
    # each step of the bar is shown
    env = {**os.environ, **one_thread, "TQDM_MININTERVAL": "0"}
    command = [sys.executable, *words, *script, *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=env, cwd=ROOT, **pipes)


def ended(process):
    """What a training has printed on stdout and stderr, when it has ended well."""
    said, complained = process.communicate(timeout=100)
    assert process.returncode == 0, complained
    return said, complained


def test_a_run_of_torchrun_that_is_killed_goes_on_to_the_same_bits(small, tmp_path):
    path, other = tmp_path / "net", tmp_path / "other"
    options = "--examples=512", "--epochs=2", "--every=1"
    begun = torchrun(*options, f"--checkpoint={path}")
    while not path.exists():
        assert begun.poll() is None
        time.sleep(0.01)
    agent = psutil.Process(begun.pid)
    for process in (agent, *agent.children(recursive=True)):
        process.kill()
    begun.communicate(timeout=100)
    said, bars = ended(torchrun(*options, f"--checkpoint={path}", "--resume-if-there"))
    assert "this is the beginning" not in said and "of 10000)" in said
    assert said.count("epoch  2/2: loss 2.30") == 1
    steps = re.findall(r"^epoch 2/2: +(\d+)%.*?(\d)/2 ", bars, re.MULTILINE)
    # not those of two ranks
    assert steps[-1] == ("100", "2") and len(steps) <= 3, bars
    run(2, small, (*options, f"--checkpoint={other}"))
    assert path.read_bytes() == other.read_bytes()


def test_a_restart_of_torchrun_under_a_fixed_port_goes_on_from_the_checkpoint(
    small, tmp_path
):
    """A fixed port's store outlives the restart, and so do the addresses of the dead.

    The torchruns of several machines do not count the same restarts, so a count does
    not help.
    """
    script, path, other = (tmp_path / name for name in ("script.py", "net", "other"))
    script.write_text("""if True:
        import os, signal, time
        from d2lpar import train_ddp

        attempt, rank = os.environ.pop("TORCHELASTIC_RESTART_COUNT"), os.environ["RANK"]

        def save_and_die(args, network, progress):
            save(args, network, progress)
            print(f"attempt {attempt} rank {rank} saved", flush=True)
            if attempt == "0" and rank == "1":
                while not os.path.exists(args.checkpoint):  # which rank 0 writes
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)

        if attempt != "0" and rank == "1":
            time.sleep(2)  # for so long rank 0 could find the dead one's address
        save, train_ddp.save = train_ddp.save, save_and_die
        train_ddp.main()
    """)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = "--examples=512", "--epochs=1", "--every=1"
    how = "--max-restarts=3", f"--master_port={port}"
    run_on = f"--checkpoint={path}", *options, "--resume-if-there"
    said, _ = ended(torchrun(*run_on, how=how, script=(script,)))
    saves = re.findall(r"attempt (\d) rank 1 saved", said)
    # batch 1; batch 2 by the next attempt, not the third
    assert saves == ["0", "1"], said
    assert said.count("there is none yet, so this is the beginning") == 1
    run(2, small, (f"--checkpoint={other}", *options))
    assert path.read_bytes() == other.read_bytes()
