"""A training that says where it is, and halts within a save when told to.

Torchrun starts this file once per rank. Without torchrun it starts the two ranks
itself, over lanes. Its arguments are a file for what it says, the halt as JSON (or
null), and those of ``d2lpar.train_ddp``.
"""

import io
import json
import os
import pathlib
import sys
import time

# of a save: before which it halts
STAGES = "write", "fsync", "rename", "folder", "saved"
NAMED = "RANK" in os.environ  # torchrun has started this


def say(log, *words):
    """Add a line to the file, in one write."""
    with open(log, "a", encoding="utf-8") as file:
        file.write(" ".join(map(str, words)) + "\n")


def work(rank, world_size, log, halt, options):
    """Be one rank of the training."""
    say(log, "rank", rank, os.getpid())
    from d2lpar import train_ddp

    watch(train_ddp, log, rank, json.loads(halt))
    if NAMED:
        train_ddp.main(options)
    else:
        import torch

        train_ddp.train_epochs(train_ddp.arguments(options), torch.device("cpu"))
    say(log, "end", rank)


def watch(train_ddp, log, rank, halt):
    """Let rank 0 say each step and stage of a save, and halt where it should."""
    steps, saves = [], []
    # of torchrun's attempts
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    sgd, save_checkpoint = train_ddp.sgd, train_ddp.save_checkpoint
    fsync, replace, path_open = os.fsync, os.replace, pathlib.Path.open

    def step(*args, **kwargs):
        sgd(*args, **kwargs)
        steps.append(1)
        say(log, "step", len(steps))

    def reach(stage):
        if halt and [len(saves), stage] == halt[:2] and first:
            say(log, "halts", *halt[:2])
            time.sleep(halt[2])

    class HalfWritten(io.BufferedWriter):
        def write(self, content):
            half = len(content) // 2
            super().write(content[:half])
            self.flush()
            reach("write")
            return half + super().write(content[half:])

    def open_slowly(path, mode="r", *args, **kwargs):
        if mode == "xb":
            return HalfWritten(io.FileIO(path, "x"))
        return path_open(path, mode, *args, **kwargs)

    def save(*args):
        saves.append(1)
        stages = iter(("fsync", "folder"))
        os.fsync = lambda file: (reach(next(stages)), fsync(file))
        os.replace = lambda *names: (reach("rename"), replace(*names))
        pathlib.Path.open = open_slowly
        try:
            save_checkpoint(*args)
        finally:
            os.fsync, os.replace, pathlib.Path.open = fsync, replace, path_open
        say(log, "saved", len(steps))
        reach("saved")

    if rank == 0:
        train_ddp.sgd, train_ddp.save_checkpoint = step, save


def main():
    """Start two ranks, or be one."""
    log, halt, *options = sys.argv[1:]
    if NAMED:
        work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), log, halt, options)
        return
    from d2lpar import launch, ranks

    create = ranks.lanes.SharedMemory.create

    def create_and_say(*args):
        memory = create(*args)
        locks = [
            lock._semlock.name for pair in memory.semaphores.values() for lock in pair
        ]
        say(log, "memory", memory.path, *(f"/dev/shm/sem.{name[1:]}" for name in locks))
        return memory

    ranks.lanes.SharedMemory.create = create_and_say
    launch(work, 2, log, halt, options)


if __name__ == "__main__":
    main()
