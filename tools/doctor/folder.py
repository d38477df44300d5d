"""The folder of the runs, as one machine sees it, and whether all machines see the same one.

A file system that does not answer keeps a process for ever, even from ending. So what touches the folder runs in
processes of their own (`python -m tools.doctor.folder`), which nobody waits for without a limit. Imports no torch.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from common import UserError, trust
from tools.doctor import findings
from tools.doctor.findings import Asked, Finding

ANSWER_S = 20.0  # for all that is tried in the folder
SHARED_S = 8.0  # how long NFS may take to show another machine's file
FREE_BYTES = 2**30  # room for a few small checkpoints
FREE_FILES = 1000
TRIAL_BYTES = 2**24
SLOW_BYTES_PER_S = 5e6  # a twentieth of a single hard disk's
DO = "use --out with a folder on a file system that all machines share"


def check(asked: Asked, host: str) -> list[Finding]:
    """What is wrong with --out, as this machine sees it."""
    with start("alone", asked.out, asked.name, host) as trial:
        try:
            said, complaint = trial.communicate(timeout=ANSWER_S)
            return findings.read(said)
        except subprocess.TimeoutExpired:
            found = f"--out {asked.out} has not answered for {ANSWER_S:g} s"
        except ValueError:
            found = f"--out {asked.out}: the trial ended with {trial.returncode}: {complaint.strip()[-200:]}"
    return [
        Finding(
            *("folder", host, None, "breaks", found),
            "every rank that reads or writes there hangs",
            "ask the administrator about this file system, or use --out with another folder",
        )
    ]


@contextlib.contextmanager
def start(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A process that tries something in a folder; killed at the end, and not waited for, which could last for ever."""
    command = [sys.executable, "-m", "tools.doctor.folder", *words]
    root = Path(__file__).resolve().parents[2]
    pipe = subprocess.PIPE
    environ = os.environ | {"PYTHONPATH": str(root)}
    trial = subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True)  # noqa: S603
    try:
        yield trial
    finally:
        trial.kill()
        for file in (trial.stdin, trial.stdout, trial.stderr):
            if file:
                with contextlib.suppress(OSError):
                    file.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            trial.wait(1)


# --- in a process of its own ------------------------------------------------------------------------------------


def alone(out: str, name: str, host: str) -> Iterator[Finding]:
    """Try the folder on this machine."""
    wanted = Path(out).expanduser()
    folder = existing(wanted)
    file = folder / f".doctor-{socket.gethostname()}-{os.getpid()}"
    try:
        yield from _others_may_write(folder, host)
        yield from _room(folder, host)
        yield from _speed(file, out, host)
        yield from _lock(file, out, host)
        if name:
            yield from _in_use(wanted / name, host)
    except OSError as error:
        yield Finding(
            *("folder", host, None, "breaks", f"--out {out}: {folder} cannot be written to ({error.strerror})"),
            "the run is refused",
            DO,
        )
    finally:
        with contextlib.suppress(OSError):
            file.unlink()


def existing(folder: Path) -> Path:
    """The folder, or what there is of the way to it: a run makes the rest."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _others_may_write(folder: Path, host: str) -> Iterator[Finding]:
    try:
        trust.refuse_replaceable(folder)
    except UserError as refusal:
        found, _, advice = str(refusal).partition(": ")
        yield Finding(*("folder", host, None, "breaks", found), "the run is refused", advice)


def _room(folder: Path, host: str) -> Iterator[Finding]:
    place = os.statvfs(folder)
    free = place.f_bavail * place.f_frsize
    found = f"{folder} has {free / 2**20:,.0f} MiB free" if free < FREE_BYTES else ""
    if place.f_files and place.f_favail < FREE_FILES:
        found = f"{folder} has room for {place.f_favail} more files"
    if found:
        yield Finding(
            *("room", host, None, "cripples", found),
            "checkpoints cannot be saved, so a failure loses the training",
            "make room, or use --out with another folder",
        )


def _speed(file: Path, out: str, host: str) -> Iterator[Finding]:
    took: list[float] = []
    while len(took) < 3 and (not took or TRIAL_BYTES / min(took) < SLOW_BYTES_PER_S):  # other work may pass
        began = time.monotonic()
        with file.open("wb") as stream:
            stream.write(os.urandom(TRIAL_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
        took.append(time.monotonic() - began)
    rate = TRIAL_BYTES / min(took)
    if rate < SLOW_BYTES_PER_S:
        yield Finding(
            *("speed", host, None, "cripples", f"--out {out} takes {rate / 1e6:.1f} MB/s"),
            f"saving 1 GB takes {1e9 / rate:.0f} s, in which training waits",
            "use a faster file system, or save less often (--save-every)",
        )


def _lock(file: Path, out: str, host: str) -> Iterator[Finding]:
    """A lock of the kind that a run holds."""
    with file.open("a") as stream:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            yield Finding(
                *("locks", host, None, "advice", f"files in --out {out} cannot be locked ({error.strerror})"),
                "two jobs of the same --name would write to one run",
                "mount it with locks (Lustre: -o flock), or give each job a --name of its own",
            )


def _in_use(run: Path, host: str) -> Iterator[Finding]:
    if not (run / "lock").exists():
        return
    with (run / "lock").open("r+") as stream:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            yield Finding(
                *("folder", host, None, "breaks", f"{run} is in use by {stream.read().strip() or 'another process'}"),
                "the run is refused",
                "wait until it ends, or use another --name",
            )
        except OSError:
            return  # no locks here, see `_lock`


def hold(out: str) -> None:
    """Write and lock a file, say its path and its content, and keep it until the input ends."""
    file = existing(Path(out).expanduser()).resolve() / f".doctor-shared-{os.getpid()}"
    content = os.urandom(16).hex()
    try:
        with file.open("w") as stream:
            locked = True
            try:
                fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                locked = False
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
            print(json.dumps({"file": str(file), "content": content, "locked": locked}), flush=True)
            sys.stdin.read()
    finally:
        file.unlink()


def see(file: str, content: str) -> str:
    """What another machine's file is here: "missing", "seen", or "unlocked" if its lock binds nobody here."""
    end = time.monotonic() + SHARED_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            os.listdir(Path(file).parent)  # NFS then looks again
            with open(file, "r+") as stream:
                if stream.read() == content:
                    try:
                        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except OSError:
                        return "seen"
                    return "unlocked"
        time.sleep(0.1)
    return "missing"


if __name__ == "__main__":
    if sys.argv[1] == "alone":
        print(json.dumps([dataclasses.asdict(one) for one in alone(*sys.argv[2:])]))
    elif sys.argv[1] == "hold":
        hold(*sys.argv[2:])
    else:
        print(see(*sys.argv[2:]))
