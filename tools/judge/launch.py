"""Start a script on some ranks, watch it within its limits, and read what each rank has written down."""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.judge import child, preload  # noqa: F401 (the ranks are forks of this process)

GRACE_S = 3.0  # for the other ranks, once one has failed or has seen enough
IDLE_S = 4.0  # in which nothing is computed and nothing written: the ranks wait for each other
POLL_S = 0.05
_CONTEXT = multiprocessing.get_context("fork")
Event = dict[str, Any]


@dataclass
class Run:
    """What one run of a script has shown.

    Attributes:
        ranks: the events of each rank, in order.
        ended: how each rank ended: "end", "enough", "died", or "" if it was killed.
        codes: by rank, exit codes other than 0 of those that ended without an exception; -N for signal N.
        hang: why it was ended, if the ranks waited: the line of each rank.
        limit: the limit that it met: "time", "memory" or "".
        tails: the last lines that each rank printed.
        seconds: that it took.
        peak_gib: the most that its processes held.
    """

    ranks: list[list[Event]]
    ended: list[str]
    codes: dict[int, int] = field(default_factory=dict)
    hang: list[str] = field(default_factory=list)
    limit: str = ""
    tails: list[str] = field(default_factory=list)
    seconds: float = 0.0
    peak_gib: float = 0.0

    def of(self, kind: str, rank: int = 0) -> list[Event]:
        """The events of one kind of one rank."""
        return [one for one in self.ranks[rank] if one["e"] == kind]

    @property
    def errors(self) -> list[Event]:
        """The ends of ranks that raised, the first first."""
        ends = [self.of("end", rank) for rank in range(len(self.ranks))]
        return [one[-1] for one in ends if one and one[-1]["code"]]


def start(places: list[child.Place], argv: list[str], timeout_s: float, memory_gib: float) -> Run:
    """Run a script as these ranks, at most so long."""
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in places]
    processes = [
        _CONTEXT.Process(target=child.serve, args=(place, argv, end), daemon=False)
        for place, (_, end) in zip(places, pipes, strict=True)
    ]
    run = Run([], [""] * len(places))
    began = time.monotonic()
    try:
        for one in processes:
            one.start()
        for _, end in pipes:
            end.close()
        _watch(run, places, processes, [pipe for pipe, _ in pipes], began + timeout_s, memory_gib)
    finally:
        for one in processes:
            if one.pid:
                one.kill()
                one.join()
        for pipe, _ in pipes:
            pipe.close()
    run.seconds = time.monotonic() - began
    run.ranks = [events(place.log()) for place in places]
    run.tails = [tail(place.output()) for place in places]
    return run


def _watch(
    run: Run, places: list[child.Place], processes: list[Any], pipes: list[Any], end: float, most: float
) -> None:
    """Until all ranks have ended, or nothing happens any more."""
    last, quiet_since, others_until = -1.0, time.monotonic(), float("inf")
    while time.monotonic() < end:
        for rank, pipe in enumerate(pipes):
            code = processes[rank].exitcode  # before the look into its pipe, which another rank may hold open
            if not run.ended[rank] and pipe.poll(0):
                with contextlib.suppress(EOFError):
                    run.ended[rank] = pipe.recv()
            if not run.ended[rank] and code is not None:
                run.ended[rank] = "died" if code else "end"
                run.codes |= {rank: code} if code else {}
        if all(run.ended):
            return
        now = time.monotonic()
        if any(run.ended):
            others_until = min(others_until, now + GRACE_S)
        used, memory = usage([one.pid for one in processes])
        run.peak_gib = max(run.peak_gib, memory)
        if memory > most:
            run.limit = "memory"
            return
        if used > last + 0.05:
            last, quiet_since = used, now
        if now > others_until or now - quiet_since > IDLE_S:
            if "enough" not in run.ended and not run.codes:  # after which a launcher ends the others
                run.hang = stacks(places, processes, run.ended)
            return
        time.sleep(POLL_S)
    run.limit = "time"
    run.hang = []


def usage(pids: list[int]) -> tuple[float, float]:
    """Processor seconds and resident GiB of some processes."""
    seconds, pages = 0.0, 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        pages += int(fields[21])
    return seconds, pages * os.sysconf("SC_PAGE_SIZE") / 2**30


def stacks(places: list[child.Place], processes: list[Any], ended: list[str]) -> list[str]:
    """The user's line that each rank waits at; "ended" for one that has ended."""
    for one, how in zip(processes, ended, strict=True):
        if not how:
            os.kill(one.pid, signal.SIGUSR1)
    time.sleep(0.3)
    found = []
    for place, how in zip(places, ended, strict=True):
        lines = re.findall(r'File "(.*?)", line (\d+)', place.stack().read_text(errors="replace"))
        own = [f"{name}:{line}" for name, line in lines if name.startswith(place.roots) and "site-packages" not in name]
        found.append("ended" if how else own[0] if own else "?")
    return found


def events(path: Path) -> list[Event]:
    """A rank's events; one that was cut off at its end is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # the rank was ended in the middle of it
            break
    return found


def tail(path: Path, most: int = 12) -> str:
    """The last lines of a rank's output."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-most:]) if path.exists() else ""
