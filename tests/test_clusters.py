"""The schedulers' files are sound, in words that torchrun and our script understand."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from d2lpar.train_ddp import arguments

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "clusters"
BATCH, MANIFEST = FOLDER / "train.sbatch", FOLDER / "pytorchjob.yaml"
LIMIT = 60  # seconds for what takes a moment
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

SCONTROL = """\
if [ "$1" = show ]; then echo node1; sleep 0.1; echo node2; \
else echo "$@" >> "$LOG/scontrol"; fi
"""
ON_TWO_NODES = """\
while [[ $1 == --* ]]; do echo "$1" >> "$LOG/srun"; shift; done
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
wait $second; wait $first
"""
TORCHRUN = """\
printf '%s\\n' "$OMP_NUM_THREADS" "$@" > "$LOG/node$SLURM_NODEID"
exit "${TORCHRUN_ENDS_WITH:-0}"
"""
UNTIL_TOLD = """\
touch "$LOG/started"
until [ -e "$LOG/stop" ]; do sleep 0.05; done
exit 7
"""


def command_line(words):
    """What torchrun and the training script take; they refuse what is wrong."""
    launch = get_args_parser().parse_args(words)
    assert launch.module and launch.training_script == "d2lpar.train_ddp"
    return launch, arguments(launch.training_script_args)


def submit(folder, srun, *options, **variables):
    """Start the batch script as Slurm would, with stand-ins for what it calls."""
    (folder / "bin").mkdir()
    for name, lines in (("scontrol", SCONTROL), ("srun", srun), ("torchrun", TORCHRUN)):
        path = folder / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{lines}")
        path.chmod(0o755)
    job = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "lenet",
        "SLURM_JOB_NODELIST": "node[1-2]",
    }
    job |= {"SLURM_SUBMIT_DIR": "/shared/here", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"SLURM_CPUS_PER_TASK": "4", "LOG": str(folder)}
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **job, **variables, "PATH": path}
    return subprocess.Popen(
        ["bash", str(BATCH), *options], env=environment, process_group=0
    )


def wait_for(condition):
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@needs_bash
def test_bash_and_shellcheck_have_no_complaint():
    subprocess.run(["bash", "-n", str(BATCH)], check=True, timeout=LIMIT)
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck")
    done = subprocess.run(
        ["shellcheck", str(BATCH)], capture_output=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout.decode()


def test_what_slurm_reads_stands_before_the_first_command():
    text = BATCH.read_text(encoding="utf-8")
    comments, _, commands = text.partition("\nset -euo pipefail\n")
    assert all(line.startswith("#") for line in comments.splitlines() if line)
    assert "#SBATCH" not in commands
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", comments, flags=re.M))
    assert len(options) == comments.count("\n#SBATCH ")
    assert options["ntasks-per-node"] == "1"  # one torchrun, and not one per rank
    # or a job that runs again would empty its own log
    assert options["open-mode"] == "append"
    # B: to the script
    assert "requeue" in options and options["signal"].startswith("B:USR1@")


@needs_bash
@pytest.mark.parametrize("code", [0, 3])
def test_the_batch_script_starts_one_torchrun_per_node(tmp_path, code):
    options = "--epochs=3", "--checkpoint=/other place/net"
    ends = {"TORCHRUN_ENDS_WITH": str(code)}
    assert submit(tmp_path, ON_TWO_NODES, *options, **ends).wait(LIMIT) == code
    nodes = [(tmp_path / f"node{n}").read_text().splitlines() for n in (0, 1)]
    assert [threads for threads, *_ in nodes] == ["2", "2"]  # 4 cores for 2 ranks
    (first, training), (second, same) = (command_line(words) for _, *words in nodes)
    assert (first.node_rank, second.node_rank) == (0, 1) and training == same
    second.node_rank = first.node_rank
    assert first == second
    assert (first.nnodes, first.nproc_per_node, first.master_addr) == (
        "2",
        "2",
        "node1",
    )
    # below those that the kernel gives to others
    assert 1024 <= first.master_port < 32768
    assert training.resume_if_there and training.epochs == 3  # the user's options count
    assert training.checkpoint == "/other place/net"
    assert {"--kill-on-bad-exit=1", "--cpus-per-task=4"} <= set(
        (tmp_path / "srun").read_text().split()
    )


@needs_bash
def test_the_checkpoint_is_one_per_job_where_the_job_was_submitted(tmp_path):
    assert submit(tmp_path, ON_TWO_NODES, RANKS_PER_NODE="4").wait(LIMIT) == 0
    threads, *words = (tmp_path / "node1").read_text().splitlines()
    launch, training = command_line(words)
    assert (launch.nproc_per_node, threads) == ("4", "1")
    assert training.checkpoint == "/shared/here/lenet-4711.safetensors"


@needs_bash
def test_slurms_signal_puts_the_job_back_into_the_queue(tmp_path):
    job = submit(tmp_path, UNTIL_TOLD)
    try:
        wait_for((tmp_path / "started").exists)
        job.send_signal(signal.SIGUSR1)
        wait_for((tmp_path / "scontrol").exists)
        (tmp_path / "stop").touch()
        assert job.wait(LIMIT) == 7  # the signal has not ended it: it ended as srun did
    finally:
        (tmp_path / "stop").touch()
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait(LIMIT)
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n"


def test_the_manifest_is_a_pytorchjob():
    """Against the fields of version 1.9, and what its webhook asks of a job."""
    job = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    assert set(spec) <= {
        "elasticPolicy",
        "nprocPerNode",
        "pytorchReplicaSpecs",
        "runPolicy",
    }
    assert isinstance(spec["nprocPerNode"], str)
    known = (
        "activeDeadlineSeconds backoffLimit cleanPodPolicy managedBy schedulingPolicy"
        " suspend"
    )
    assert set(spec["runPolicy"]) <= {*known.split(), "ttlSecondsAfterFinished"}
    # the default leaves them waiting
    assert spec["runPolicy"]["cleanPodPolicy"] == "Running"
    replicas = spec["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    for replica in replicas.values():
        assert set(replica) == {"replicas", "restartPolicy", "template"}
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        annotations, pod = (
            replica["template"]["metadata"]["annotations"],
            replica["template"]["spec"],
        )
        assert all(isinstance(value, str) for value in annotations.values())
        [container] = pod["containers"]
        assert container["name"] == "pytorch"  # by which the operator finds it
        volumes = [volume["name"] for volume in pod["volumes"]]
        assert [mount["name"] for mount in container["volumeMounts"]] == volumes
        assert all(isinstance(variable["value"], str) for variable in container["env"])


def test_the_command_of_the_manifest_is_one_that_torchrun_and_the_script_know(
    monkeypatch,
):
    job = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    settings = {
        "NNODES": "2",
        "NPROC_PER_NODE": "2",
        "NODE_RANK": "1",
        "MASTER_PORT": "23456",
    }
    for name, value in settings.items():  # as the operator does
        monkeypatch.setenv(f"PET_{name}", value)
    monkeypatch.setenv("PET_MASTER_ADDR", "lenet-master-0")
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        [container] = replica["template"]["spec"]["containers"]
        first, *words = container["command"] + container["args"]
        launch, training = command_line(words)
        assert (first, launch.nnodes, launch.nproc_per_node) == ("torchrun", "2", "2")
        assert (launch.master_addr, launch.master_port) == ("lenet-master-0", 23456)
        assert training.resume_if_there and launch.node_rank == 1
        [shared] = [m for m in container["volumeMounts"] if m["name"] == "shared"]
        assert training.checkpoint.startswith(f"{shared['mountPath']}/")
