"""The doctor on one machine, around the launcher: looks at it, starts the ranks, and prints what was found.

launch/torchrun.sh hands it its command. What one machine has wrong is known before the others come, and is printed if
they never do. Imports no torch: it begins at once, also where torch cannot be imported. See docs/doctor.md.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.doctor import findings, folder, machine, network
from tools.doctor.findings import Asked, Finding

FOLDER = "DOCTOR_FOLDER"  # where this machine's ranks find what is known, and write what they find
# Files in it: what this machine has found; its ranks have begun; rank 0 knows what it has found; the report and the
# healthy line, on machine 0; the exit code.
LOCAL, BEGUN, MET, REPORT, ALL_WELL, DONE = "local.json", "begun", "met", "report.json", "healthy", "done"
LATER_S = 10.0  # by how much the launcher outlasts its ranks
RANKS_S = 200.0  # for all that the ranks do once they have met; each part has a limit of its own
CLOSE_S = 3.0  # for launchers, which wait for each other at the end
POLL_S = 0.05
ENDS = (signal.SIGTERM, signal.SIGHUP)  # the signals that end the doctor, and all that it has started


def main(command: Sequence[str]) -> int:
    """Look, start the ranks, print.

    Args:
        command: starts this machine's ranks: the interpreter, the launcher with its options, train.py and its flags.

    Returns:
        The exit code: 0 if nothing breaks or cripples a job.
    """
    if os.environ.get("ONLY_CHECK_FLAGS"):  # launch/slurm.sh, before it submits a job
        findings.parse(_flags(command))
        return findings.HEALTHY
    processes = next((int(word.partition("=")[2]) for word in command if word.startswith("--nproc-per-node=")), 1)
    asked = findings.parse(_flags(command), processes)
    for number in ENDS:
        signal.signal(number, _exit)
    host = socket.gethostname()
    found = look(asked, host)
    try:
        with tempfile.TemporaryDirectory(prefix="doctor-", ignore_cleanup_errors=True) as place:
            return _with_ranks(command, asked, found, Path(place))
    except OSError:  # "tmp" is among the findings
        return _print(found, asked)


def _exit(number: int, _frame: object = None) -> None:
    """What a signal does: the ranks end on the way out."""
    sys.exit(128 + number)


def look(asked: Asked, host: str) -> list[Finding]:
    """What this machine has wrong, whether the others come or not."""
    return [*network.check(asked, host), *machine.check(asked, host), *folder.check(asked, host)]


def _flags(command: Sequence[str]) -> list[str]:
    script = next(i for i, word in enumerate(command) if word.endswith("/train.py"))
    return [*command[script + 1 :]]


def _with_ranks(command: Sequence[str], asked: Asked, found: list[Finding], place: Path) -> int:
    began = time.monotonic()
    findings.write(place / LOCAL, found)
    with (place / "said").open("wb") as said, _started(command, place, said.fileno()) as launcher:
        limit_s = asked.wait_s
        while launcher.poll() is None and not (place / DONE).exists() and time.monotonic() < began + limit_s:
            if (place / BEGUN).exists():  # the ranks say themselves who has not come
                limit_s = 2 * asked.wait_s + LATER_S
            if (place / MET).exists():
                limit_s = 2 * asked.wait_s + RANKS_S
            time.sleep(POLL_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(CLOSE_S if (place / DONE).exists() else 0.0)
        late = launcher.poll() is None
    met = (place / MET).exists()
    report = place / REPORT
    if report.exists():  # rank 0 of all machines is here, and knows what all machines have found
        healthy = f"{(place / ALL_WELL).read_text()}; {time.monotonic() - began:.0f} s"
        return _print(findings.read(report.read_text()), asked, healthy)
    text = (place / "said").read_text(errors="replace")
    if met and (place / DONE).exists():  # machine 0 prints
        return int((place / DONE).read_text())
    found.append(_not_met(asked, socket.gethostname(), met, late, text, launcher.returncode))
    return _print(found, asked)


@contextlib.contextmanager
def _started(command: Sequence[str], place: Path, said: int) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher and all that it starts, gone at the end."""
    environ = os.environ | {FOLDER: str(place)}
    held: list[int] = []  # signals that come while the launcher starts: an exit then would leave it behind
    for number in ENDS:
        signal.signal(number, lambda number, _frame: held.append(number))
    launcher = subprocess.Popen([*command], env=environ, stdout=said, stderr=said, start_new_session=True)  # noqa: S603
    try:
        for number in ENDS:
            signal.signal(number, _exit)
        if held:
            _exit(held[0])
        yield launcher
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        # A process inside a driver or a file system that does not answer cannot end, and is not waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(2)


def _not_met(asked: Asked, host: str, met: bool, late: bool, said: str, code: int | None) -> Finding:
    """Why the ranks have not said anything."""
    reason = re.search(r"^(?:error|\w*Error): (.+)$", said.strip(), re.MULTILINE)
    lines = [line for line in said.strip().splitlines() if line.strip()]
    words = (reason[1] if reason else lines[-1] if lines else "it said nothing")[:300]
    if met:
        how = f"has not ended {RANKS_S:g} s after all ranks had met" if late else f"ended with exit code {code}"
        return Finding(
            *("ranks", host, None, "breaks", f"the launcher of this machine {how}: {words}"),
            "so does a job",
            "look at what the other machines say",
        )
    if late:
        number = f"{asked.machines} machines" if asked.machines > 1 else "the ranks"
        clock = time.strftime("%H:%M:%S", time.gmtime())
        return Finding(
            *("meet", host, None, "breaks", f"{number} have not met in {asked.wait_s:g} s (here it is {clock} UTC)"),
            "a job waits as long as that, and then ends",
            "check that the same command runs on each machine, that the firewall opens all ports between them, and "
            "that their clocks agree; --wait allows more time",
        )
    return Finding(
        *("meet", host, None, "breaks", f"the ranks did not start (exit code {code}): {words}"),
        "a job ends in the same way",
        "do what the message says, or run the command of docs/doctor.md for one machine on each",
    )


def _print(found: Sequence[Finding], asked: Asked, healthy: str = "") -> int:
    text = findings.report(found, asked.as_json, healthy)
    print(text) if text else None
    return findings.status(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
