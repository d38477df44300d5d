"""What this rank is doing, one look at its main thread at a time: step, phase, stack, and since when nothing moves."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from common import private_api
from common.manifest import Looked
from common.protect import diagnose
from common.run import process_group
from common.run.process import World
from common.state.private_api import files_of_rank
from common.train import data

BEAT_S = 0.25
DEAD_S = 6 * BEAT_S  # a process whose heartbeat stays the same for this long is dead or frozen

MOST_S = 1e8  # three years: the clock of C ends somewhere


class Heartbeat:
    """Looks at this rank's main thread.

    Attributes:
        step: the step that this rank is in.
        noted: the phase of training, where the run itself has noted it; "" where the stack tells it.
        stalled_s: seconds since the main thread last moved.
        spun_s: seconds since it last got anywhere: to another step, phase, batch or file, or on in what it writes.
        saving_s: seconds since the main thread entered a save; 0 outside of one.
    """

    def __init__(self, world: World, start_timeout_s: float) -> None:
        """Begin (main thread); see `slow_start` for the timeout."""
        self._world = world
        self._start_timeout_s = start_timeout_s
        self._main = threading.get_ident()
        self._processes = _processes()
        self._checkpoints = Path()
        self._first_step = 0
        self._timeout_s = float("inf")
        self._position: object = None
        self._reached: object = None
        self._waits_in: str | None = None
        self._written = 0
        self._looked_at = 0  # the step of the latest look
        self._ticked = time.monotonic()
        self._freeze = (0, 0.0)  # the step in which this process stood still, and for how many seconds
        self.step = 0
        self.noted = ""
        self.stalled_s = 0.0
        self.spun_s = 0.0
        self.saving_s = 0.0

    def begin(self, path: Path, first_step: int, hang_timeout_s: float) -> None:
        """The training begins, and with it the limits; see `watch.Watch.begin`."""
        self._checkpoints = path / "checkpoints"
        self._first_step = self.step = first_step
        self._timeout_s = hang_timeout_s

    def name(self) -> str:
        """This rank, for messages."""
        return f"rank {self._world.rank} (host {self._world.host}, pid {os.getpid()}, step {self.step})"

    def limit_s(self, phase: str = "") -> float:
        """Seconds without progress that count as a hang.

        There is no limit before the training. A first step, with cold disks and compilers, may take longer than later
        ones, and so may a save, because one flush of a large file shows no progress.
        """
        patient = phase == "save" or self.step <= self._first_step + 1
        return max(self._timeout_s, process_group.TIMEOUT_S) if patient else self._timeout_s

    def silence_s(self) -> float:
        """Seconds without a heartbeat after which a rank counts as dead, though its process may only stand still.

        There is no limit before the training, when one call of C may take long.
        """
        return max(2 * DEAD_S, self.limit_s() / 10)

    def look(self) -> diagnose.Beat:
        """One heartbeat (the watching thread, every `BEAT_S`)."""
        frames = sys._current_frames()
        del frames[threading.get_ident()]  # else it holds itself, and with it the loader's workers, after the training
        frame = frames.get(self._main)
        place = [_place(frame)]
        phase, stack = diagnose.phase_and_stack(reversed(list(traceback.walk_stack(frame))), self.noted)
        # Counted in heartbeats, so that time in which the whole job was suspended does not count.
        self.stalled_s += BEAT_S
        self.saving_s = self.saving_s + BEAT_S if phase == "save" and self.step == self._looked_at else 0.0
        self._looked_at = self.step
        if phase == "save":  # with --async-save, the main thread waits for the thread that writes
            place += [_place(frames.get(one.ident or 0)) for one in threading.enumerate() if one.name == phase]
            if not self._waits_in and max(self.stalled_s, self.spun_s) > self._timeout_s / 4:
                self._written = self._bytes_written()
        reached = (self.step, data.Loader.batches_read, phase, self._written, Looked.at)
        self.spun_s = self.spun_s + BEAT_S if reached == self._reached else 0.0
        self._reached = reached
        position = (*reached, place)
        if position != self._position:
            self._position = position
            self.stalled_s = 0.0
            self._waits_in = None
        if self._waits_in is None and self.stalled_s > 2 * BEAT_S:  # once per stall: reading it takes 0.1 s
            record = private_api.flight_recorder(self._world.device, only_active=True)
            self._waits_in = diagnose.waits_in(record, stack, phase)
        beat: diagnose.Beat = {"rank": self._world.rank, "name": self.name(), "phase": phase, "stack": stack}
        beat |= {"waits_in": self._waits_in or "", "stalled_s": self.stalled_s, "limit_s": self.limit_s(phase)}
        beat |= {"spun_s": self.spun_s, "spins_s": max(beat["limit_s"], diagnose.SPINS * self._timeout_s)}
        return beat | {"time": time.time(), "pid": os.getpid(), "processes": self._processes}

    def has_died(self, beat: diagnose.Beat) -> bool:
        """Whether the process of a heartbeat has ended, as far as this process can see it: on the same machine."""
        if not self._processes or beat["processes"] != self._processes:
            return False
        try:
            state = Path(f"/proc/{beat['pid']}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            return True
        return state in "ZX"  # its parent has not noticed yet

    def tick(self) -> None:
        """Notice whether this process has stood still (a thread that waits for nothing else, every `BEAT_S`)."""
        now = time.monotonic()
        gap_s = now - self._ticked
        self._ticked = now
        if gap_s > self._freeze[1] or self.step > self._freeze[0] + 1:
            self._freeze = (self.step, gap_s)
        if self._timeout_s < float("inf"):
            # A C thread: while a function keeps the interpreter's lock, no thread of Python runs. It waits for at least
            # TIMEOUT_S, because it also counts the time in which this process was stopped.
            limit_s = min(max(self.limit_s(), process_group.TIMEOUT_S) + 2 * DEAD_S, MOST_S)
            faulthandler.dump_traceback_later(limit_s, exit=True, file=2)

    def own_freeze(self) -> str:
        """That this process stood still for so long that the others have given it up; "" if it did not."""
        since_s = time.monotonic() - self._ticked
        step, gap_s = (self.step, since_s) if since_s > self._freeze[1] else self._freeze
        if gap_s < self.silence_s() or self.step > step + 1:
            return ""
        return (
            f"{self.name()} was frozen itself for {gap_s:.0f} s (suspended, stopped, or its interpreter locked): "
            "the other ranks have given it up\n"
        )

    def _bytes_written(self) -> int:
        """Bytes that this rank has written to the checkpoint that is being saved."""
        folders = self._checkpoints.glob("step_*.tmp-*")
        return _total([file for one in folders for file in files_of_rank(one, self._world.rank)])

    def slow_start(self) -> str:
        """A sentence about a start that stands still for half of --hang-timeout, perhaps for a file; else ""."""
        waits = self.stalled_s > self._start_timeout_s / 2 and self._timeout_s == float("inf") and not self._waits_in
        told = waits and Looked.at and self._world.rank % self._world.local_size == 0
        sentence = f"{self.name()} has stood still for {self.stalled_s:.0f} s so far; it looked at {Looked.at} last"
        return sentence if told else ""

    def slow_save(self) -> str:
        """A sentence about the save that is under way, if it takes longer than --hang-timeout; else ""."""
        if self.saving_s <= self._timeout_s or self._world.rank:
            return ""
        took = f"{self.saving_s:.0f} s"
        said = f"the save is slow: {took} so far, and it looked at {Looked.at} last"  # in a store, each part sent
        for folder in sorted(self._checkpoints.glob("step_*.tmp-*")):
            step = int(folder.name[5:].partition(".")[0])
            said = f"the save of step {step} is slow: {_total(folder.iterdir()) / 1e6:,.1f} MB in {took}"
        limit = f"It counts as a hang after {self.limit_s('save'):g} s without a new byte"
        return f"{said}. {limit} (raise --hang-timeout for more)"


def _processes() -> str:
    """A name for the processes that this one can see: the machine since its start, and the container; else ""."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    return ""


def _place(frame: FrameType | None) -> list[object]:
    return [(one.f_code, one.f_lasti) for one, _ in traceback.walk_stack(frame)] if frame else []


def _total(files: Iterable[Path]) -> int:
    """The size of these files in bytes; 0 if a commit renames or deletes one meanwhile."""
    with contextlib.suppress(OSError):
        return sum(file.stat().st_size for file in files)
    return 0
