"""Machines on this one: network namespaces on a common switch, each a host of its own (root, iproute2)."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness import runner

# In namespaces of their own: the host's name, and what the machine knows of names.
BECOME_A_HOST = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


def ip(*words: str, tool: str = "ip", check: bool = True) -> str:
    """Run ip, or tc."""
    done = subprocess.run([tool, *words], capture_output=True, text=True, timeout=runner.HANG_S, check=False)
    assert not check or not done.returncode, f"{tool} {' '.join(words)}: {done.stderr}"
    return done.stdout


@dataclass
class Machine:
    """A host on a switch; `number` is its NODE_RANK."""

    number: int
    space: str
    switch: str
    name: str
    address: str
    hosts: Path
    launched: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def popen(self, command: Sequence[str | Path], output: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        host = ("unshare", "--uts", "--mount", "bash", "-c", BECOME_A_HOST, "host", str(self.hosts), self.name)
        with output.open("ab") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.space, *host, *map(str, command)],
                cwd=runner.ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self.launched.append(process)
        return process

    def link(self, state: str) -> None:
        """Pull its cable out of the switch ("down"), or put it back ("up")."""
        ip("-n", self.switch, "link", "set", f"port{self.number}", state)

    def shape(self, rate: str) -> None:
        """Let it send no faster than this, such as 100mbit."""
        limit = ("tbf", "rate", rate, "burst", "256kb", "latency", "200ms")  # tc-tbf(8)
        ip("-n", self.space, "qdisc", "add", "dev", "eth0", "root", *limit, tool="tc")

    def bytes_sent(self) -> int:
        """What it has sent so far: what its port of the switch has received."""
        counters = ip("netns", "exec", self.switch, "cat", f"/sys/class/net/port{self.number}/statistics/rx_bytes")
        return int(counters)

    def pids(self) -> list[int]:
        """What runs on it."""
        return [int(pid) for pid in ip("netns", "pids", self.space, check=False).split()]

    def die(self) -> None:
        """End everything that runs on it, at once."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        for process in self.launched:
            process.wait(runner.HANG_S)


@contextlib.contextmanager
def joined(folder: Path, count: int) -> Iterator[list[Machine]]:
    """Some machines; gone with all that runs on them at the end.

    Each has a name that no other one knows, and that it takes for its loopback address, as Debian sets it up. The
    first one has the last address.
    """
    mine = f"brigade-{os.getpid()}"
    switch = f"{mine}-switch"
    them = [
        Machine(i, f"{mine}-{i}", switch, f"machine{i}", f"10.29.4.{9 - i}", folder / f"hosts{i}") for i in range(count)
    ]
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for one in them:
            one.hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {one.name}\n")
            port = f"port{one.number}"
            ip("netns", "add", one.space)
            ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", one.space)
            ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", one.space, "address", "add", f"{one.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", one.space, "link", "set", device, "up")
        yield them
    finally:
        for one in them:
            one.die()
            ip("netns", "delete", one.space, check=False)
        ip("netns", "delete", switch, check=False)
