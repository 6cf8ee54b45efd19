"""Workshop. A script that trains LeNet on the ranks that torchrun starts.

    torchrun --nproc_per_node=2 -m d2lpar.train_ddp --epochs 3
    d2lpar-train --epochs 3                                             # one process

Each process is a rank, with a replica and with its share of each batch: together they
take the steps of one process. Rank 0 writes a checkpoint after each epoch. With
``--resume`` a run goes on from there, and ends with the bits of one that was never
stopped; so ``torchrun --max-restarts=3`` survives a killed rank. Chapter 08 runs this
file.
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F

from . import ranks
from .checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from .data import DataError, load_data_fashion_mnist
from .ddp import DistributedDataParallel
from .models import lenet_layers
from .sampler import DistributedSampler

SAME = "batch_size", "lr", "seed", "examples"  # in each part of a resumed run


def arguments(argv=None):
    """Parse the command line."""
    style = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="d2lpar.train_ddp", formatter_class=style)
    add = parser.add_argument
    add("--epochs", type=int, default=10, help="in all, with those before a resume")
    add("--batch-size", type=int, default=256, help="rows of all ranks together")
    add("--lr", type=float, default=0.05, help="learning rate")
    add("--seed", type=int, default=0, help="of parameters and order")
    add("--examples", type=int, default=60_000, help="train on the first so many")
    add("--checkpoint", default="lenet.safetensors", help="file to write")
    add("--resume", action="store_true", help="go on from the checkpoint, if it exists")
    args = parser.parse_args(argv)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if min(args.epochs, args.examples, args.batch_size) < 1:
        parser.error("--epochs, --examples and --batch-size must be positive")
    if args.batch_size % world_size:
        parser.error(f"--batch-size must be a multiple of {world_size}")
    return args


def join():
    """Join the other processes, or be the only one; return this one's device."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    store, rank, world_size = dist.HashStore(), 0, 1
    if "RANK" in os.environ:  # torchrun has set it
        store, rank, world_size = next(dist.rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":  # one machine
            # after a restart, the store still has the addresses of dead ranks
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    if on_gpu:
        torch.cuda.set_device(local_rank)
        torch.backends.cudnn.deterministic = True  # the same bits after a resume
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    return torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")


def train(args, device):
    """Train, and after each epoch test, print a line, and save."""
    torch.manual_seed(args.seed)
    train_iter, test_iter = load_data_fashion_mnist(args.batch_size, device=device)
    network = lenet_layers(scale=0.05).to(device)
    torch.manual_seed(args.seed + dist.get_rank())  # dropout has to differ
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), args.lr, momentum=0.9)
    resumes = args.resume and os.path.exists(args.checkpoint)
    begin = load(args, network, optimizer) if resumes else 0
    ranks.agree(f"{begin} epochs are done")  # all have found the same checkpoint
    if args.resume and dist.get_rank() == 0:
        print(f"{args.checkpoint}: {begin} of {args.epochs} epochs are done")
    sampler = DistributedSampler(train_iter.images[: args.examples], seed=args.seed)
    for epoch in range(begin, args.epochs):
        start = time.perf_counter()
        sampler.set_epoch(epoch)
        loss = train_epoch(args, model, optimizer, sampler, train_iter)
        seconds = time.perf_counter() - start
        accuracy = evaluate(network, test_iter)
        if dist.get_rank() == 0:
            words = f"loss {loss:.3f}, test accuracy {accuracy:.3f}, {seconds:.1f} s"
            print(f"epoch {epoch + 1}/{args.epochs}: {words} on {device}", flush=True)
        save(args, network, optimizer, epoch + 1)


def train_epoch(args, model, optimizer, sampler, train_iter):
    """Take the steps of an epoch; return the mean loss of all ranks."""
    model.train()
    losses, own = [], torch.tensor(list(sampler), device=train_iter.images.device)
    for rows in own.split(args.batch_size // dist.get_world_size()):
        X, y = train_iter.take(rows)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach() * len(rows))
    return mean_over_ranks(sum(losses), len(own))


@torch.no_grad()
def evaluate(network, test_iter):
    """Return the accuracy: each rank tests its share, and no example counts twice."""
    network.eval()
    sampler = DistributedSampler(test_iter.images, shuffle=False, pad=False)
    own, correct = torch.tensor(list(sampler), device=test_iter.images.device), 0
    for rows in own.split(256):
        X, y = test_iter.take(rows)
        correct += (network(X).argmax(dim=1) == y).sum()
    return mean_over_ranks(correct, len(own))


def mean_over_ranks(total, count):
    """Return all ranks' totals, divided by all ranks' counts."""
    sums = torch.tensor([float(total), count], dtype=torch.float64)
    ranks.allreduce(sums)
    return (sums[0] / sums[1]).item()


def save(args, network, optimizer, epochs_done):
    """Let rank 0 write all that a run needs to go on; return when the file is there."""
    generators = ranks.all_gather(torch.get_rng_state()[None])  # a row for each rank
    if dist.get_rank() == 0:
        state = {"arguments": {name: getattr(args, name) for name in SAME}}
        state |= {"epochs_done": epochs_done, "network": network.state_dict()}
        state |= {"optimizer": optimizer.state_dict(), "generators": generators}
        save_checkpoint(args.checkpoint, state)
    ranks.barrier()


def load(args, network, optimizer):
    """Go on from the checkpoint; return how many epochs are done."""
    state = load_checkpoint(args.checkpoint)
    for name, value in state["arguments"].items():
        if getattr(args, name) != value:
            problem = f"{args.checkpoint} is of a run with {name} {value}"
            raise CheckpointError(f"{problem}, not {getattr(args, name)}")
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    if len(state["generators"]) == dist.get_world_size():
        own = state["generators"][dist.get_rank()]
        torch.set_rng_state(own.clone())  # a copy: torch crashes on a part of a tensor
    return state["epochs_done"]


def main(argv=None):
    """Join the other ranks, train, and leave."""
    args = arguments(argv)
    os.makedirs(os.path.dirname(os.path.abspath(args.checkpoint)), exist_ok=True)
    device = join()
    try:
        train(args, device)
    except (CheckpointError, DataError) as error:
        sys.exit(f"d2lpar.train_ddp: {error}")
    dist.destroy_process_group()  # not after an error: it may wait for other ranks


if __name__ == "__main__":
    main()
