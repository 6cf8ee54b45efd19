"""LeNet on Fashion-MNIST on several processes, which torchrun starts.

    torchrun --nproc_per_node=2 -m d2lpar.train_ddp --epochs 10
    d2lpar-train --epochs 10                                            # one process

Every process is a rank with its own replica, and reads its own share of each batch:
together they take the steps of one process. A checkpoint is written after each epoch,
and more often with ``--every``. ``--resume`` goes on from it, in the middle of an epoch
too, and ends with the weights of a run that was never stopped, bit for bit. With
another number of ranks, which must divide the batch size, it takes the same steps, and
rounds differently. ``--resume-if-there`` starts from the beginning where there is none.
With it, torchrun's ``--max-restarts`` survives a killed process, also on several
machines, and a run under ``--nnodes=1:4`` goes on when machines leave or join. Notebook
08 runs this file.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from . import ranks
from .checkpoint import (
    CheckpointError,
    load_checkpoint,
    remove_unfinished,
    save_checkpoint,
)
from .data import DataError, Minibatches, load_data_fashion_mnist
from .distributed.ddp import DistributedDataParallel
from .distributed.sampler import DistributedSampler
from .models import lenet_layers
from .ranks._old import is_alone, place, process_group
from .training import loss, sgd

HOW = "start it with torchrun: torchrun --nproc_per_node=2 -m d2lpar.train_ddp"
# bytes of what rank 0 tells the others when it resumes, filled up with spaces
NEWS = 2**16


class Progress(NamedTuple):
    """How far a run has come: so many epochs, and so many batches of the next one."""

    epoch: int
    batch: int
    loss: float  # sum over this rank's examples of the epoch that is under way


def device_of(local_rank: int, local_world_size: int, gpus: str | None) -> torch.device:
    """Return this process's device: its entry in ``gpus`` ("0,1"), else GPU or CPU."""
    count = torch.cuda.device_count()
    if gpus is None:
        enough = count >= local_world_size
        return torch.device("cuda", local_rank) if enough else torch.device("cpu")
    chosen = gpus.split(",")
    exist = set(chosen) <= {str(i) for i in range(count)}
    if not exist or not len(chosen) == len(set(chosen)) == local_world_size:
        problem = f"{local_world_size} processes need as many different GPUs, one each"
        raise ValueError(
            f"--gpus {gpus}: {problem}; this machine has {count}, numbered from 0"
        )
    return torch.device("cuda", int(chosen[local_rank]))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="d2lpar.train_ddp", description=HOW)
    parser.add_argument("--epochs", type=_positive(int), default=10)
    parser.add_argument(
        "--batch-size", type=_positive(int), default=256, help="of all ranks"
    )
    parser.add_argument(
        "--lr", type=_positive(float), default=0.2, help="learning rate"
    )
    parser.add_argument("--seed", type=int, default=0, help="of parameters and order")
    parser.add_argument(
        "--examples", type=_positive(int), help="train on the first so many"
    )
    parser.add_argument(
        "--gpus", help="which ones, for example 0,1,3; one for each local rank"
    )
    parser.add_argument(
        "--checkpoint", default="lenet.safetensors", help="file to write"
    )
    parser.add_argument(
        "--every", type=_positive(int), help="also save after so many batches"
    )
    resume = parser.add_mutually_exclusive_group()
    resume.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint"
    )
    resume.add_argument(
        "--resume-if-there", action="store_true", help="or from the beginning"
    )
    parser.add_argument("--timeout", type=_positive(float), default=300, help="seconds")
    return parser.parse_args(argv)


def _positive(kind: type) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not positive and finite")
        return value

    return number


def train_epochs(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Train in the default group, as the command line says; return the network."""
    world_size = dist.get_world_size()
    if args.batch_size % world_size:
        uneven = (
            f"--batch-size {args.batch_size} cannot be shared by {world_size} ranks"
        )
        raise ValueError(f"{uneven}: take a multiple of {world_size}")
    train_iter, test_iter = load_data_fashion_mnist(args.batch_size, device=device)
    images, labels = (
        train_iter.images[: args.examples],
        train_iter.labels[: args.examples],
    )
    train_iter = Minibatches(images, labels, args.batch_size)
    network = lenet_layers(generator=torch.Generator().manual_seed(args.seed)).to(
        device
    )
    if dist.get_rank() == 0:
        remove_unfinished(args.checkpoint)
    resumes = args.resume or args.resume_if_there
    progress = resume(args, network) if resumes else Progress(0, 0, 0.0)
    model = DistributedDataParallel(network, weight="rows")
    for epoch in range(progress.epoch, args.epochs):
        begin = time.perf_counter()
        loss_sum = train_epoch(args, progress, model, train_iter)
        seconds = time.perf_counter() - begin
        progress = Progress(epoch + 1, 0, 0.0)
        save(args, network, progress)
        report(epoch, args, network, loss_sum / len(images), test_iter, seconds)
    return network


def train_epoch(
    args, progress: Progress, model: DistributedDataParallel, train_iter
) -> float:
    """Take what is left of an epoch; return the sum of all this rank's losses in it."""
    epoch, first, loss_sum = progress
    num_rows, num_batches = args.batch_size // dist.get_world_size(), len(train_iter)
    sampler = DistributedSampler(train_iter.images, seed=args.seed, pad=False)
    sampler.set_epoch(epoch, start=first * num_rows)
    own = torch.tensor(list(sampler), dtype=torch.int64).to(train_iter.images.device)
    bar = {
        "desc": f"epoch {epoch + 1}/{args.epochs}",
        "total": num_batches,
        "initial": first,
    }
    for i in tqdm(
        range(first, num_batches), **bar, disable=dist.get_rank() > 0, leave=False
    ):
        # maybe no rows
        X, y = train_iter.take(own[(i - first) * num_rows :][:num_rows])
        losses = loss(model(X), y)
        losses.mean().backward()
        # the gradients are means already
        sgd(list(model.parameters()), args.lr, batch_size=1)
        loss_sum += losses.detach().sum().item()
        if args.every and (i + 1) % args.every == 0 and i + 1 < num_batches:
            save(args, model.module, Progress(epoch, i + 1, loss_sum))
    return loss_sum


@torch.no_grad()
def report(
    epoch, args, network: nn.Module, loss_part: float, test_iter, seconds: float
) -> None:
    """Print an epoch's line on rank 0; each rank tests its share, each example once."""
    sampler = DistributedSampler(range(len(test_iter.images)), shuffle=False, pad=False)
    own, correct = torch.tensor(list(sampler), dtype=torch.int64), 0
    for rows in own.to(test_iter.images.device).split(1024):
        X, y = test_iter.take(rows)
        correct += (network(X).argmax(dim=1) == y).sum().item()
    sums = torch.tensor([loss_part, correct, len(sampler)], dtype=torch.float64)
    ranks.allreduce(sums)
    if dist.get_rank() == 0:
        mean_loss, correct, total = sums.tolist()
        tested = f"{correct / total:.3f} ({correct:.0f} of {total:.0f})"
        result = f"loss {mean_loss:.3f}, test accuracy {tested}, {seconds:.1f} s"
        print(f"epoch {epoch + 1:2}/{args.epochs}: {result}", flush=True)


def save(args: argparse.Namespace, network: nn.Module, progress: Progress) -> None:
    """Write the checkpoint on rank 0: parameters, and each rank's progress."""
    losses = ranks.all_gather(torch.tensor([progress.loss], dtype=torch.float64))
    if dist.get_rank() == 0:
        info = {**_identity(args), "epoch": progress.epoch, "batch": progress.batch}
        save_checkpoint(
            args.checkpoint, {**network.state_dict(), "losses": losses}, info
        )


def resume(args: argparse.Namespace, network: nn.Module) -> Progress:
    """Load the checkpoint on rank 0; return each rank's progress, or rank 0's error.

    Only rank 0 needs the file, so machines need not share a disk unless rank 0 moves
    between them. The others get its parameters from ``DistributedDataParallel``.
    """
    news = {}
    if dist.get_rank() == 0:
        try:
            news = _load(args, network)
        except Exception as error:  # any error: the others are waiting
            news = {"problem": str(error)[:4096]}
    letters = bytearray(json.dumps(news).encode().ljust(NEWS))
    ranks.broadcast(torch.frombuffer(letters, dtype=torch.uint8))
    news = json.loads(letters)
    if "problem" in news:
        raise CheckpointError(
            f"cannot resume from {args.checkpoint}: {news['problem']}"
        )
    return Progress(news["epoch"], news["batch"], news["losses"][dist.get_rank()])


def _load(args: argparse.Namespace, network: nn.Module) -> dict:
    """Load parameters into ``network``; return epoch, batch, and each rank's loss."""
    if args.resume_if_there and not os.path.exists(args.checkpoint):
        print(
            f"{args.checkpoint}: there is none yet, so this is the beginning",
            flush=True,
        )
        return {"epoch": 0, "batch": 0, "losses": [0.0] * dist.get_world_size()}
    tensors, info = load_checkpoint(args.checkpoint)
    for name, value in _identity(args).items():
        if info.get(name) != value:
            remedy = "give the same, or another --checkpoint"
            raise ValueError(
                f"its run has {name} {info.get(name)}, this one {value}: {remedy}"
            )
    if flawed := [
        name for name, tensor in tensors.items() if not tensor.isfinite().all()
    ]:
        raise ValueError(
            f"NaN or infinite values in {', '.join(flawed)}: take an older one"
        )
    epoch, batch = info["epoch"], info["batch"]
    if (epoch, batch) > (args.epochs, 0):
        raise ValueError(
            f"--epochs is {args.epochs}, and it is at epoch {epoch}, batch {batch}"
        )
    if epoch == args.epochs:
        print(
            f"{args.checkpoint}: all {args.epochs} epochs are done, nothing is left",
            flush=True,
        )
    losses, world_size = tensors.pop("losses").tolist(), dist.get_world_size()
    network.load_state_dict(tensors)
    if len(losses) != world_size:
        change = f"its run had {len(losses)} ranks, this one has {world_size}"
        print(
            f"{args.checkpoint}: {change}: the same steps, rounded differently",
            flush=True,
        )
        losses = [sum(losses)] + [0.0] * (world_size - 1)
    return {"epoch": epoch, "batch": batch, "losses": losses}


def _identity(args: argparse.Namespace) -> dict:
    """Return what must be the same for a run to go on as it was."""
    return {
        name: getattr(args, name) for name in ("batch_size", "lr", "seed", "examples")
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Join the other processes, if there are any, train, and leave."""
    args = arguments(argv)
    try:
        here = place(os.environ)
        device = device_of(here.local_rank, here.local_world_size, args.gpus)
        folder = Path(args.checkpoint).resolve().parent
        if here.rank == 0 and not folder.is_dir():
            raise ValueError(
                f"--checkpoint {args.checkpoint}: there is no folder {folder}"
            )
    except ValueError as error:
        sys.exit(f"d2lpar.train_ddp: {error}")
    if is_alone(os.environ):
        print(f"one process; for more, {HOW}", flush=True)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with process_group(backend, args.timeout):
            train_epochs(args, device)
    except DataError as error:  # for a reader who has just installed this
        sys.exit(f"d2lpar.train_ddp: {error}")


if __name__ == "__main__":
    main()
