"""The folder of a run: config.json, the copied train.py, metrics.jsonl, logs/."""

import argparse
import contextlib
import dataclasses
import fcntl
import io
import json
import math
import os
import shlex
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from common import UserError, manifest, places, ranks, trust
from common.run import heat_maps, output
from common.run.process import Process, World

SHARED_S = 10.0  # how long NFS may take to show another machine's file


def claim(path: Path, process: Process) -> None:
    """Create the run's folder and keep every other job out of it until this process ends (all ranks).

    Raises:
        UserError: as `take`, or a machine does not see it.
    """
    owner = take(path, process)
    # Rank 0 does not open the file again: closing it would release the lock.
    visible = dist.get_rank() == 0 or _wait_for(path / "lock", owner)
    answers = ranks.gather((socket.gethostname(), visible))
    missing = sorted({host for host, visible in answers if not visible})
    if missing:
        raise UserError(
            f"--out {path.parent}: {', '.join(missing)} cannot see the files that {answers[0][0]} writes there: "
            "use a folder on a file system that all machines share"
        )


def take(path: Path, process: Process) -> str:
    """As `claim`, but other machines need not share the folder; returns who has it now (all ranks).

    What this process creates from here on is not writable by other users, whatever the umask was.

    Raises:
        UserError: another process uses it (named by host, number and job), or other users can write to it.
    """
    umask = os.umask(0o077)
    closed = stat.S_IWOTH | (0 if os.environ.get("TRUST_OPEN_FOLDERS") in ("1", "group") else stat.S_IWGRP)
    os.umask(umask | closed)

    def lock() -> str:
        try:
            path.mkdir(parents=True, exist_ok=True)
            trust.refuse_replaceable(path)
            file = output.append_to(path / "lock")
            if closed & ~umask & stat.S_IWGRP and not trust.is_own_group(path.stat().st_gid):
                ranks.print0("note: the umask lets a group write, and this run does not (TRUST_OPEN_FOLDERS=group)")
        except OSError as error:
            raise UserError(f"--out {path.parent}: {error}") from error
        try:
            # A record lock: loader workers do not inherit it, and the kernel releases it however the process ends.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            owner = file.read().strip() or "another process"
            file.close()
            raise UserError(
                f"--name {path.name}: {path} is in use by {owner}; wait until it ends, or use another --name"
            ) from None
        except OSError as error:  # a file system without locks
            sys.stderr.write(f"warning: {path} cannot be locked, so another job could write to it: {error}\n")
        job = f", Slurm job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
        mine = f"process {os.getpid()} on {socket.gethostname()}{job}"
        process.locks.append(file)  # closing it would release the lock
        place = os.environ.get("RUN_DIR_FILE", "")  # launch/slurm.sh reads the folder's path from it
        try:
            if place:
                Path(place).write_text(str(path))
            place = str(path)
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), mine.encode())
        except OSError as error:
            if place != str(path) or error.errno not in places.FULL or not (path / "checkpoints").is_dir():
                raise UserError(f"{place} cannot be written to ({error.strerror})") from error
            return os.pread(file.fileno(), 4096, 0).decode()  # it resumes; the others compare what is there
        return mine

    return ranks.from_rank0(lock)


def _wait_for(file: Path, content: str) -> bool:
    """Wait until this machine sees a file that another machine has written; returns whether it does."""
    for _ in range(round(SHARED_S / 0.1)):
        with contextlib.suppress(OSError):
            if file.read_text() == content:
                return True
        time.sleep(0.1)
    return False


def write_config(path: Path, recipe: str, args: Any, world: World, mfu_is_of: str = "") -> list[str]:
    """Write config.json and a copy of train.py (rank 0).

    Args:
        path: the run's folder, claimed.
        recipe: the train.py that runs.
        args: its dataclass of flags.
        world: this process.
        mfu_is_of: the peak that MFU is a share of, and its source.

    Returns:
        For a run that continues, a line for each flag that has changed.

    Raises:
        OSError: there is no room; the files of an earlier start are as they were.
    """
    flags = dataclasses.asdict(args)
    config = {
        "recipe": Path(recipe).resolve().parent.name,
        "args": flags,
        "command": shlex.join(sys.argv),
        "world_size": world.size,
        "device": world.device.type,
        "backend": world.backend,
        "versions": ranks.versions(),
        "code": ranks.code_digests(recipe),
        "mfu_is_of": mfu_is_of,
    }
    file = path / "config.json"
    try:
        lines = changed(file, flags) if file.exists() else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        lines = [f"warning: {file} of an earlier start could not be read and is replaced: {error!r}"]
    manifest.replace(file, json.dumps(config, indent=1))
    manifest.replace(path / "train.py", Path(recipe).read_text())
    return lines


def changed(file: Path, flags: Mapping[str, Any]) -> list[str]:
    """A line for each flag that had another value when a config.json was written."""
    before = manifest.read_json(file)["args"]
    others = {key: value for key, value in flags.items() if before.get(key, value) != value}
    return [f"changed: --{key.replace('_', '-')} is {now}, was {before[key]}" for key, now in others.items()]


def resume_command(path: Path, world_size: int) -> str:
    """The command that continues the run in `path`: this one, with the run's name and without --stop-after."""
    dropped = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    dropped.add_argument("--stop-after", "--stop_after")
    _, kept = dropped.parse_known_args(sys.argv[1:])
    if not any(flag.split("=")[0] == "--name" for flag in kept):
        kept += ["--name", path.name]
    # launch/torchrun.sh sets LAUNCHED_AS, and so does a recipe that runs under another launcher.
    launched_as = os.environ.get("LAUNCHED_AS") or f"{_launcher(world_size)} {shlex.quote(sys.argv[0])}"
    return f"{launched_as} {shlex.join(kept)}"


def _launcher(world_size: int) -> str:
    """A command that starts as many processes as somebody else's launcher has."""
    if world_size == 1:
        return "python"
    local_size = ranks.env_int("LOCAL_WORLD_SIZE", default=world_size)
    nodes = ranks.env_int("GROUP_WORLD_SIZE", default=world_size // local_size)
    # Ranks do not know where torchrun's own rendezvous is.
    several = f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT " if nodes > 1 else ""
    return f"torchrun {several}--nproc-per-node={local_size}"


class Records:
    """metrics.jsonl and TensorBoard's events of a run. A full disk ends no training: later calls try again."""

    def __init__(self, path: Path, first_step: int, rank: int) -> None:
        """Begin after `first_step`; on other ranks than 0, a call does nothing."""
        self._path = path
        self._first_step = first_step
        self._rank = rank
        self._lines: TextIO | None = None  # metrics.jsonl
        self._events: Any = None  # TensorBoard's writer
        self._purges = True

    def open(self) -> TextIO:
        """Open metrics.jsonl to append to, cut off after the steps that a resumed run does not repeat (rank 0).

        A cut needs no room on the disk. Damaged lines stay where they are, with a warning.

        Raises:
            OSError: the disk is full, or does not answer.
        """
        if not self._lines:
            file = self._path / "metrics.jsonl"
            size = 0
            for number, record, end in _parse(file):
                if record.get("step", math.inf) <= self._first_step:
                    size = end
                elif not record:
                    ranks.print0(f"warning: line {number} of {file} is damaged, and is left out of the curves")
            lines = output.append_to(file)
            lines.truncate(size)  # fails over a quota: then the next call tries again
            self._lines = lines
        return self._lines

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers by their tags."""
        if self._rank != 0:
            return
        # Null stands for a number that is not finite, for which JSON has no word.
        finite = {tag: value if math.isfinite(value) else None for tag, value in values.items()}
        try:
            lines = self.open()
            lines.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
            lines.flush()
        except OSError as error:
            ranks.print0(f"warning: step {step} was not recorded in {self._path}: {error}")

        def draw(board: Any) -> None:
            for tag, value in values.items():
                board.add_scalar(tag, value, step)
            for name, picture in heat_maps.of(values):
                board.add_image(name, picture, step, dataformats="HW")

        self.draw(step, draw)

    def draw(self, step: int, draw: Callable[[Any], None]) -> None:
        """Record in TensorBoard, which nothing depends on; after an error with a new writer, once there is room."""
        if self._rank != 0:
            return
        try:
            if not self._events:
                from torch.utils.tensorboard import SummaryWriter

                with tempfile.TemporaryFile(dir=self._path, buffering=0) as probe:
                    probe.write(bytes(2**16))  # without room, the writer would leave an empty file at each attempt
                threading.excepthook = _show_unless_events
                # The events of steps that a resumed run repeats are hidden.
                purge = self._first_step + 1 if self._purges else None
                self._events = SummaryWriter(str(self._path), purge_step=purge)
                self._purges = False
            draw(self._events)
        except OSError as error:
            self._events = None  # its thread has ended, and it would raise this error for ever
            ranks.print0(f"warning: TensorBoard lacks step {step} or the one before it: {error}")

    def close(self) -> None:
        """Close both files."""
        for file in (self._events, self._lines):
            try:
                if file:
                    file.close()
            except OSError as error:
                ranks.print0(f"warning: the last records were not written to {self._path}: {error}")


def _show_unless_events(failure: threading.ExceptHookArgs) -> None:
    """Report a thread's error, unless it is TensorBoard's: its next call raises that one again."""
    if not type(failure.thread).__module__.startswith("tensorboard"):
        threading.__excepthook__(failure)


def records(path: Path) -> list[dict[str, float]]:
    """All records in metrics.jsonl that can be read, NaN for null."""
    return [record for _, record, _ in _parse(path / "metrics.jsonl") if record]


def _parse(file: Path) -> Iterator[tuple[int, dict[str, float], int]]:
    """The number, record and end of each line, {} for a damaged one; a last line that a kill cut off is ignored."""
    end = 0
    if os.path.lexists(file) and not file.is_file():  # a pipe or a device could be read for ever
        raise UserError(f"{file} is not a regular file: move it away, or use another --name")
    with file.open("rb") if file.exists() else io.BytesIO() as lines:
        for number, line in enumerate(iter(lambda: lines.readline(manifest.BLOCK_BYTES), b""), 1):
            end += len(line)
            try:
                values = json.loads(line.decode())
                record = {key: math.nan if value is None else value for key, value in values.items()}
                whole = type(record["step"]) is int and all(isinstance(value, int | float) for value in record.values())
            except (ValueError, KeyError, AttributeError, RecursionError):
                whole = False
            if line.endswith(b"\n"):
                yield number, record if whole else {}, end
