"""Name the rank that hangs, dies, raises or exits early, on every rank, and end all ranks together.

The order of events:
1. A thread of each rank renews a heartbeat in the store every `BEAT_S`: step, phase, stack, and the collective that
   the rank waits in, as torch's flight recorder has it.
2. A rank that makes no progress, or that loses a connection to a peer, reads all heartbeats for `DEAD_S`.
3. It accuses the ranks whose heartbeat has stopped, or else the one that waits for no other rank.
4. It publishes this finding in the store. The first finding counts; later ones are dropped.
5. Every other rank reads the finding, prints it and exits with PEER_FAILED. A rank that raised exits with its own
   error.
"""

import atexit
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common import UserError, data, diagnose, exits, private_api, process_group, ranks, run_dir

BEAT_S = 0.25
DEAD_S = 6 * BEAT_S  # a process whose heartbeat stays the same for this long is dead or frozen
DECIDERS = 8  # the first ranks to compare heartbeats: a thousand ranks must not all read a thousand heartbeats
FINDING = "watch/finding"
STORE_HOST = "its host (rank 0 or the launcher)"


class Watch:
    """Watches this rank's main thread and, through the store, the other ranks."""

    def __init__(self, world: process_group.World, path: Path, first_step: int, hang_timeout_s: float) -> None:
        """Begin (main thread, all ranks).

        Args:
            world: this process.
            path: the run's folder; after a failure, the flight recorder's entries are written to its logs/.
            first_step: steps done already.
            hang_timeout_s: seconds without progress that count as a hang. During the first step, with cold disks
                and compilers, the limit is process_group.TIMEOUT_S.
        """
        self._world = world
        self._logs = path / "logs"
        self._outlook = _outlook(path, world.size)
        self._first_step = self._step = first_step
        self._noted = ""
        self._timeout_s = hang_timeout_s
        self._main = threading.get_ident()
        self._position: tuple[Any, ...] = ()
        self._waits_in: str | None = None
        self._stalled_s = 0.0
        self._reported = False
        self._closing = threading.Event()
        self._exiting = threading.Lock()
        # The main thread may be waiting in the store itself.
        self._store = world.store.clone() if world.size > 1 else world.store
        self._beats = 0
        self._threads = [
            threading.Thread(target=target, name=target.__name__, daemon=True)
            for target in (self._watch, self._watch_store)
        ]
        for thread in self._threads:
            thread.start()
        exits.report = self.report
        process_group.background.callback(self.close)
        atexit.register(self._report_early_exit)

    def step(self, step: int) -> None:
        """Note that `step` begins."""
        self._step = step
        self._noted = ""

    def note(self, phase: str) -> None:
        """Note the phase of training, where a stack does not tell it; "" where it does, as from the next step on."""
        self._noted = phase

    def close(self) -> None:
        """Stop the heartbeat: this rank has finished."""
        self._closing.set()
        for thread in self._threads:
            thread.join(DEAD_S)
        atexit.unregister(self._report_early_exit)

    def report(self, error: BaseException) -> None:
        """Publish why this rank raises (main thread); does not return if another rank is the cause."""
        self._reported = True
        while error.__cause__ and not isinstance(error, UserError):  # torch wraps errors of a stage's backward pass
            error = error.__cause__
        phase, stack = diagnose.phase_and_stack(traceback.walk_tb(error.__traceback__), self._noted)
        headline = f"{self._name()} failed in {phase}: {type(error).__name__}: {error}\n"
        finding = headline + stack
        try:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                beats, dead = self._compare()
                if accused := self._finding() or diagnose.accuse_dead(beats, dead):
                    self._exit(self._publish_finding(accused))
                finding += "".join(diagnose.describe(beat) for beat in beats if beat["rank"] != self._world.rank)
            self._publish_finding(finding)
        except dist.DistError as lost:
            self._exit(self._store_lost(lost))
        if not isinstance(error, UserError):  # `exits.entry` prints those
            sys.stderr.write(f"\n{headline}")  # Python prints the stack afterwards, with the exception
            sys.stderr.flush()
        self._let_others_read()

    def _let_others_read(self) -> None:
        """Rank 0 hosts the store under most launchers, so it must not be the first to exit."""
        if self._world.rank == 0 and self._world.size > 1:
            time.sleep(4 * BEAT_S)

    def _store_lost(self, error: Exception) -> str:
        return f"{self._name()} has lost its connection to the store: {STORE_HOST} is dead or cut off ({error})\n"

    def _name(self) -> str:
        return f"rank {self._world.rank} (host {self._world.host}, pid {os.getpid()}, step {self._step})"

    def _report_early_exit(self) -> None:
        if not self._closing.is_set() and not self._reported:
            self._publish_finding(f"{self._name()} exited before the training was done\n")

    def _limit_s(self) -> float:
        return self._timeout_s if self._step > self._first_step + 1 else float(process_group.TIMEOUT_S)

    def _watch(self) -> None:
        patience_s = 0 if self._world.rank < DECIDERS else 2 * DEAD_S
        warned = False
        while not self._closing.wait(BEAT_S):
            try:
                if self._publish_heartbeat() > self._limit_s() + patience_s:
                    beats, dead = self._compare()
                    accused = diagnose.accuse_dead(beats, dead) or diagnose.accuse_stalled(beats, self._limit_s())
                    if accused:
                        self._publish_finding(accused)
                if not self._reported and (finding := self._finding()):
                    self._exit(finding)
                if self._store.foreign and not warned:
                    warned = True
                    ranks.print0(f"warning: a stranger writes to this run's store ({self._store.foreign}): ignored")
            except dist.DistError as error:
                if not self._closing.is_set():
                    self._exit(self._store_lost(error))

    def _watch_store(self) -> None:
        """Exit when the store has stopped answering: a frozen one, or one behind a dead link, raises no error."""
        beats = 0
        silent_s = 0.0
        while not self._closing.wait(BEAT_S):
            silent_s = silent_s + BEAT_S if self._beats == beats else 0.0
            beats = self._beats
            if silent_s > self._limit_s():
                self._exit(f"{self._name()} gets no answer from the store: {STORE_HOST} is frozen or cut off\n")

    def _publish_heartbeat(self) -> float:
        """Renew the heartbeat; returns the seconds since the main thread last moved."""
        frame = sys._current_frames().get(self._main)
        place = [(one.f_code, one.f_lasti) for one, _ in traceback.walk_stack(frame)]
        position = (self._step, data.Loader.batches_read, place)
        # Counted in heartbeats, so that time in which the whole job was suspended does not count.
        self._stalled_s += BEAT_S
        if position != self._position:
            self._position = position
            self._stalled_s = 0.0
            self._waits_in = None
        phase, stack = diagnose.phase_and_stack(reversed(list(traceback.walk_stack(frame))), self._noted)
        if self._waits_in is None and self._stalled_s > 2 * BEAT_S:  # once per stall: reading it takes 0.1 s
            record = private_api.flight_recorder(self._world.device, only_active=True)
            self._waits_in = diagnose.waits_in(record, stack)
        beat: diagnose.Beat = {"rank": self._world.rank, "name": self._name(), "phase": phase, "stack": stack}
        beat |= {"waits_in": self._waits_in or "", "stalled_s": self._stalled_s, "time": time.time()}
        self._store.set(f"watch/{self._world.rank}", json.dumps(beat))
        self._beats += 1
        return self._stalled_s

    def _compare(self) -> tuple[list[diagnose.Beat], set[int]]:
        """Read the heartbeats of all ranks for `DEAD_S`; returns them, and the ranks whose heartbeat has stopped."""
        keys = [f"watch/{rank}" for rank in range(self._world.size)]
        first: list[str] = []
        now = [""] * len(keys)
        moved: set[int] = set()
        end = time.monotonic() + DEAD_S
        while time.monotonic() < end and not self._finding():
            self._publish_heartbeat()
            now = [self._store.peek(key) for key in keys]
            first = first or now
            moved |= {rank for rank, beat in enumerate(now) if beat != first[rank]}
            time.sleep(BEAT_S)
        unknown = {"phase": "its start", "stack": "", "waits_in": "", "stalled_s": 0.0}
        beats = [json.loads(beat) if beat else unknown | {"rank": r, "name": f"rank {r}"} for r, beat in enumerate(now)]
        return beats, {*range(len(now))} - moved

    def _finding(self) -> str:
        return self._store.peek(FINDING)

    def _publish_finding(self, finding: str) -> str:
        """Publish a finding unless there is one already; returns the one that counts."""
        return self._store.compare_set(FINDING, "", finding).decode()

    def _exit(self, finding: str) -> None:
        """Print the finding and end this process, whatever its main thread waits for."""
        self._exiting.acquire()  # never released: if two threads have the same finding, only one prints it
        finding = f"{ranks.printable(finding)}rank {self._world.rank} exits; {self._outlook}\n"
        try:
            sys.stderr.write(f"\n{finding}")
            sys.stderr.flush()
            if "TORCHELASTIC_ERROR_FILE" in os.environ:  # the launcher prints it if rank 0 is the frozen one
                error = {"message": finding, "extraInfo": {"py_callstack": finding, "timestamp": str(int(time.time()))}}
                Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": error}))
            trace = self._logs / f"flight_recorder_{self._world.rank:05d}.json"
            trace.write_text(json.dumps(private_api.flight_recorder(self._world.device, only_active=False)))
            self._let_others_read()
        finally:  # also where the disk is full
            os._exit(exits.PEER_FAILED)


def _outlook(path: Path, world_size: int) -> str:
    """What happens after a failure: torchrun starts the ranks again, or the user has to."""
    restarts = ranks.env_int("TORCHELASTIC_RESTART_COUNT", default=0)
    most = ranks.env_int("TORCHELASTIC_MAX_RESTARTS", default=0)
    if restarts < most:
        return f"torchrun starts all ranks again, from the newest checkpoint (restart {restarts + 1} of {most})"
    return f"to continue from the newest checkpoint, run: {run_dir.resume_command(path, world_size)}"
