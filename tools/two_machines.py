"""Two machines in one: namespaces of Linux, joined by a virtual cable.

Each machine has its own interfaces, ports and processes. What it sends to the other one
crosses the cable, where it is counted, slowed down or lost. This needs root, and
iproute2's ``ip``.

A machine lives as long as one process that waits for the end of its standard input.
Then the kernel ends all others in there and takes the cable away: nothing is left, even
if the caller is killed.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import psutil  # jupyter brings it

from d2lpar.collectives.schedules import Schedule, chunks_of, num_chunks, steps_of

CABLE = "cable0"  # what both machines call their end of it
PORT = 29500  # at which the ranks meet
TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2"}
LIMIT = 60  # seconds for a command that takes milliseconds
LISTENS = "0A"  # a state in /proc/net/tcp
PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
NOBODY = "02:00:00:00:00:99"  # an Ethernet address that no interface has


class Machine:
    """A machine with an address. Use it in ``with``, which ends all that runs in it."""

    def __init__(self, address: str):
        self.address, self._started = address, []
        hold = "ip link set lo up && echo ready && exec cat"
        command = [
            "unshare",
            "--net",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            hold,
        ]
        self._outer = subprocess.Popen(command, text=True, **PIPES)
        if self._outer.stdout.readline() != "ready\n":
            _, problem = self._outer.communicate(timeout=LIMIT)
            raise OSError(f"the kernel refuses namespaces: {problem.strip()}")
        [inner] = psutil.Process(self._outer.pid).children()
        self.pid = inner.pid

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *_) -> None:
        for process in self._started:
            # only nsenter: what it has started waits for the end of the machine
            process.kill()
        # closes its input: it ends, and all others
        self._outer.communicate(timeout=LIMIT)
        for process in self._started:
            with process:
                process.wait(LIMIT)

    def start(self, *words: str, **options) -> subprocess.Popen:
        """Start a process in this machine, with options of ``subprocess.Popen``."""
        command = ["nsenter", f"--target={self.pid}", "--net", "--pid", *words]
        self._started.append(subprocess.Popen(command, **options))
        return self._started[-1]

    def run(self, *words: str) -> str:
        """Run a short command in this machine's network, and return what it prints."""
        command = ["nsenter", f"--target={self.pid}", "--net", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        if done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        """Return what runs in this machine."""
        return [p for p in psutil.process_iter() if p.pid != self.pid and self._has(p)]

    def _has(self, process: psutil.Process) -> bool:
        try:
            same = os.path.samefile(
                f"/proc/{process.pid}/ns/pid", f"/proc/{self.pid}/ns/pid"
            )
            return same and process.status() != psutil.STATUS_ZOMBIE
        except (OSError, psutil.Error):  # it has just ended
            return False

    def ports(self) -> set[int]:
        """Return the TCP ports at which something listens in this machine."""
        table = self.run("cat", "/proc/net/tcp", "/proc/net/tcp6")
        rows = [line.split() for line in table.splitlines()]
        return {
            int(own.rpartition(":")[2], 16)
            for _, own, _, state, *_ in rows
            if state == LISTENS
        }

    def sent(self) -> int:
        """Return how many bytes have left over the cable, packet headers included."""
        [link] = json.loads(self.run("ip", "-json", "-stats", "link", "show", CABLE))
        return link["stats64"]["tx"]["bytes"]

    def plug(self, is_in: bool) -> None:
        """Plug the cable in, or pull it out: what is sent waits to be sent again."""
        self.run("ip", "link", "set", CABLE, "up" if is_in else "down")

    def lose(self, other: "Machine") -> None:
        """Lose all that this machine sends, as a broken switch: it notices nothing."""
        wrong = "lladdr", NOBODY, "nud", "permanent"
        self.run("ip", "neighbour", "replace", other.address, *wrong, "dev", CABLE)

    def slow_down(self, rate: str, delay: str = "") -> None:
        """Send at most ``rate``, such as 100mbit; ``delay`` each packet, by ``tc``.

        Raises:
            OSError: this kernel has no tbf, or no netem, which a delay needs.
        """
        how = ["netem", "rate", rate, "delay", delay]
        if not delay:
            how = ["tbf", "rate", rate, "burst", "16kb", "latency", "200ms"]
        self.run("tc", "qdisc", "replace", "dev", CABLE, "root", *how)


@contextmanager
def two_machines() -> Iterator[list[Machine]]:
    """Make two machines with a cable between them."""
    with ExitStack() as stack:
        one, two = [stack.enter_context(Machine(f"10.77.0.{n}")) for n in (1, 2)]
        peer = "peer", "name", CABLE, "netns", str(two.pid)
        one.run("ip", "link", "add", CABLE, "type", "veth", *peer)
        for machine in (one, two):
            machine.run("ip", "address", "add", f"{machine.address}/24", "dev", CABLE)
            machine.plug(True)
        yield [one, two]


def missing() -> str:
    """Say why there cannot be two machines; an empty text if there can."""
    if not sys.platform.startswith("linux") or os.geteuid():
        return "two machines need Linux and root"
    if lacking := [tool for tool in TOOLS if not shutil.which(tool)]:
        packages = ", ".join(f"{tool} (of {TOOLS[tool]})" for tool in lacking)
        return f"two machines need a program that is not installed: {packages}"
    try:
        with two_machines():
            return ""
    except OSError as error:
        return f"two machines cannot be made: {error}"


def start_ranks(machines: Sequence[Machine], each: int, *words: str, **options) -> list:
    """Start ``each`` ranks in each machine, as torchrun would; return the processes."""
    size = each * len(machines)
    processes = []
    for rank in range(size):
        place = {"RANK": rank, "LOCAL_RANK": rank % each, "WORLD_SIZE": size}
        place |= {
            "LOCAL_WORLD_SIZE": each,
            "MASTER_ADDR": machines[0].address,
            "MASTER_PORT": PORT,
        }
        env = environment() | {name: str(value) for name, value in place.items()}
        processes.append(machines[rank // each].start(*words, env=env, **options))
    return processes


def environment() -> dict[str, str]:
    """Return the variables for a rank, or for torchrun: gloo is to use the cable."""
    # By itself gloo takes the address of the machine's name, which may be the
    # loopback's
    return {**os.environ, "GLOO_SOCKET_IFNAME": CABLE, "OMP_NUM_THREADS": "1"}


def crossings(
    schedule: Schedule, each: int, nbytes: int
) -> list[list[tuple[int, int, int]]]:
    """Return what crosses two machines' cable in each step, ``each`` ranks in one.

    A message is (source, destination, bytes), of machines: as ``cost.step_seconds``
    takes it.
    """
    steps = steps_of(schedule, 2 * each)
    n = num_chunks(steps)
    return [
        [
            (m.src // each, m.dst // each, nbytes * len(chunks_of(m, n)) // n)
            for m in step
            if m.src // each != m.dst // each
        ]
        for step in steps
    ]
