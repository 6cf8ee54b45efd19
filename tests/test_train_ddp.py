import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from d2lpar import launch, load_data_fashion_mnist
from d2lpar.checkpoint import CheckpointError, load_checkpoint
from d2lpar.launcher import RankError
from d2lpar.network import LeNet, loss
from d2lpar.train_ddp import arguments, device_of, place

ROOT = Path(__file__).resolve().parents[1]
HERE = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


# Where a process stands


def test_place_reads_what_torchrun_writes():
    assert place(HERE) == (3, 1, 4, 2)


def test_place_names_everything_that_is_missing():
    with pytest.raises(ValueError, match="not set: RANK, MASTER_ADDR; start it with torchrun"):
        place({**HERE, "RANK": "", "MASTER_ADDR": ""})


@pytest.mark.parametrize("name", [name for name in HERE if name != "MASTER_ADDR"])
def test_place_names_what_is_no_number(name):
    with pytest.raises(ValueError, match=f"not a whole number: {name}='-1'"):
        place({**HERE, name: "-1"})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "4", "RANK=4 does not go with WORLD_SIZE=4"),
        ("LOCAL_RANK", "2", "LOCAL_RANK=2 does not go with LOCAL_WORLD_SIZE=2"),
        ("LOCAL_WORLD_SIZE", "5", "LOCAL_WORLD_SIZE=5 does not go with WORLD_SIZE=4"),
        ("RANK", "0", "LOCAL_RANK=1 does not go with RANK=0"),
        ("MASTER_PORT", "65536", "MASTER_PORT=65536 does not go with"),
    ],
)
def test_place_names_contradictions(name, value, words):
    with pytest.raises(ValueError, match=words):
        place({**HERE, name: value})


def test_one_process_alone_has_its_place():
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    assert place({**HERE, **alone}) == (0, 0, 1, 1)


def test_device_is_the_entry_in_the_list_of_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [device_of(i, 3, "0,1,3").index for i in range(3)] == [0, 1, 3]
    assert device_of(2, 4, None) == torch.device("cuda", 2)
    assert device_of(2, 5, None) == torch.device("cpu")


@pytest.mark.parametrize("gpus", ["0,1", "0,1,1", "0,1,4", "0,1,x", "", "0,,1", "-1,0,1"])
def test_device_refuses_other_lists(monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match="--gpus"):
        device_of(0, 3, gpus)


@pytest.mark.parametrize("option", ["--epochs", "--batch-size", "--lr", "--timeout", "--every"])
def test_numbers_must_be_positive(option, capsys):
    with pytest.raises(SystemExit):
        arguments([option, "0"])
    assert "0 is not positive" in capsys.readouterr().err


# Training


def run(world_size, tmp_path, *options, stop_after=None):
    """Train in ranks; each returns its parameters. ``stop_after`` so many saves, all are gone."""
    args = arguments(["--checkpoint", str(tmp_path / "net.safetensors"), *options])

    def work(rank, world_size, args, stop_after):
        import torch

        from d2lpar import train_ddp

        saves = []
        save = train_ddp.save

        def counted(*args):
            save(*args)
            saves.append(1)
            if len(saves) == stop_after:
                raise KeyboardInterrupt

        train_ddp.save = counted
        network = train_ddp.train(args, torch.device("cpu"))
        return [param.detach().clone() for param in network.parameters()]

    return launch(work, world_size, args, stop_after, timeout=100)


def one_process(num_examples, batch_size, lr, epochs):
    torch.manual_seed(0)
    network = LeNet(generator=torch.Generator().manual_seed(0))
    data, _ = load_data_fashion_mnist(batch_size)
    for epoch in range(epochs):
        order = torch.randperm(num_examples, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(batch_size):
            X, y = data.take(rows)
            network.zero_grad()
            loss(network(X), y).mean().backward()
            with torch.no_grad():
                for param in network.parameters():
                    param -= lr * param.grad
    return [param.detach() for param in network.parameters()]


def distance(a, b):
    return max(float((x - y).detach().abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_train_like_one_process(world_size, tmp_path, capfd):
    # 301 examples: the last batch of 61 is uneven over 2 ranks and over 3
    options = "--examples", "301", "--batch-size", "60", "--epochs", "2", "--lr", "0.5"
    results = run(world_size, tmp_path, *options)
    assert all(torch.equal(x, y) for r in results for x, y in zip(r, results[0], strict=True))
    expected = one_process(301, 60, 0.5, 2)
    start = list(LeNet(generator=torch.Generator().manual_seed(0)).parameters())
    assert distance(results[0], expected) < 1e-6 < 1e-3 < distance(start, expected)
    assert "of 10000)" in capfd.readouterr().out


def test_a_run_that_was_stopped_ends_with_the_same_bits(tmp_path):
    options = "--examples", "700", "--batch-size", "100", "--epochs", "2", "--every", "2"
    whole = run(2, tmp_path, *options)[0]
    for stop_after in (2, 4, 5):  # in the first epoch, at its end, in the second
        with pytest.raises(RankError, match="KeyboardInterrupt"):
            run(2, tmp_path, *options, stop_after=stop_after)
        _, info = load_checkpoint(tmp_path / "net.safetensors")
        assert (info["epoch"], info["batch"]) == {2: (0, 4), 4: (1, 0), 5: (1, 2)}[stop_after]
        resumed = run(2, tmp_path, *options, "--resume")[0]
        assert all(torch.equal(x, y) for x, y in zip(whole, resumed, strict=True))


def test_a_run_does_not_go_on_as_another(tmp_path):
    options = "--examples", "64", "--batch-size", "32", "--epochs", "1"
    run(2, tmp_path, *options)
    with pytest.raises(RankError, match=r"of a run with lr 0\.2, and this one has 0\.3"):
        run(2, tmp_path, *options, "--lr", "0.3", "--resume")
    (tmp_path / "net.safetensors").unlink()
    with pytest.raises(RankError, match=CheckpointError.__name__) as raised:
        run(2, tmp_path, *options, "--resume")
    assert raised.value.rank in (0, 1)


def test_batches_must_be_shared_evenly(tmp_path):
    with pytest.raises(RankError, match=r"100 cannot be shared by 3 ranks.*such as 99"):
        run(3, tmp_path, "--batch-size", "100")


# Under torchrun


def command(*words, env=None, timeout=100):
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=env,
        cwd=ROOT,
    )


def test_torchrun_trains_saves_and_resumes(tmp_path):
    path = tmp_path / "net.safetensors"
    torchrun = "torch.distributed.run", "--standalone", "--nproc_per_node=2"
    script = "-m", "d2lpar.train_ddp", "--examples=512", "--checkpoint", str(path)
    done = command(*torchrun, *script, "--epochs=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch  1/1: loss 2.30") == 1, done.stdout
    assert "epoch 1/1: 100%" in done.stderr or "epoch 1/1:" in done.stderr
    once = run(2, tmp_path / ".", "--examples", "512", "--epochs", "2", "--resume")[0]
    tensors, info = load_checkpoint(path)
    assert (info["epoch"], info["world_size"]) == (2, 2)
    saved = [tensors[f"params.{i}"] for i in range(8)]
    assert all(torch.equal(x, y) for x, y in zip(once, saved, strict=True))


def test_without_torchrun_the_script_says_what_is_missing(tmp_path):
    env = dict.fromkeys(HERE, "")
    done = command("d2lpar.train_ddp", env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("d2lpar.train_ddp: not set: RANK, LOCAL_RANK, WORLD_SIZE")
    assert done.stderr.count("\n") == 1


def test_a_missing_folder_is_named_before_anything_starts(tmp_path):
    done = command("d2lpar.train_ddp", "--checkpoint", str(tmp_path / "no" / "x"), env=HERE)
    assert (done.returncode, "there is no folder no" in done.stderr) == (1, True)
