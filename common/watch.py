"""Name the rank that hangs, dies, raises or leaves early, on every rank, and end all of them together.

A thread of each rank keeps a heartbeat in the store: step, phase, stack, and the collective that it waits in,
which torch's flight recorder knows. A rank that makes no progress, or that has lost a peer, compares them: the
culprit has no heartbeat any more, or is the one that waits for nobody. The first finding holds; every rank
prints it and leaves with the exit code PEER_FAILED, and the one that raised with its own error.
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

from common import UserError, data, diagnose, exits, process_group

BEAT_S = 0.25
GONE_S = 6 * BEAT_S  # a heartbeat that stays the same for so long is of a process that is dead or frozen
DECIDERS = 8  # these ranks compare heartbeats first, so that a thousand do not all read a thousand
FINDING = "watch/finding"
STORE_KEEPER = "rank 0, or the launcher, which keeps it,"


class Watch:
    """Watches this rank's main thread and, through the store, the other ranks."""

    def __init__(self, world: process_group.World, run_dir: Path, first_step: int, hang_timeout_s: float) -> None:
        """Begin (main thread, all ranks).

        Args:
            world: this process.
            run_dir: the run's folder; what the flight recorder has of a failure goes to its logs/.
            first_step: steps done already.
            hang_timeout_s: seconds without progress that count as a hang. Until the first step is done, with
                cold disks and compilers, it is process_group.TIMEOUT_S.
        """
        self._world, self._logs = world, run_dir / "logs"
        self._first_step = self._step = first_step
        self._timeout_s = hang_timeout_s
        self._main = threading.get_ident()
        self._seen: tuple[Any, ...] = ()
        self._waits_in: str | None = None
        self._stalled_s = 0.0
        self._reported = False
        self._closing = threading.Event()
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
        atexit.register(self._left_early)

    def step(self, step: int) -> None:
        """Note that `step` begins."""
        self._step = step

    def close(self) -> None:
        """End the heartbeat: this rank is done."""
        self._closing.set()
        for thread in self._threads:
            thread.join(GONE_S)
        atexit.unregister(self._left_early)

    def report(self, error: BaseException) -> None:
        """Tell the others why this rank raises (main thread); does not return if another one is the cause."""
        self._reported = True
        while error.__cause__ and not isinstance(error, UserError):  # torch wraps what a stage's backward pass raises
            error = error.__cause__
        phase, stack = diagnose.phase_and_stack(traceback.walk_tb(error.__traceback__))
        what = f"{self._name()} failed in {phase}: {type(error).__name__}: {error}\n"
        finding = what + stack
        try:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                beats, gone = self._compare()
                if accused := self._finding() or diagnose.accuse_gone(beats, gone):
                    self._leave(self._claim(accused))
                finding += "".join(diagnose.describe(beat) for beat in beats if beat["rank"] != self._world.rank)
            self._claim(finding)
        except dist.DistError as lost:
            self._leave(self._lost(lost))
        if not isinstance(error, UserError):  # which `exits.entry` tells
            sys.stderr.write(f"\n{what}")  # the stack follows, when Python prints the exception
            sys.stderr.flush()
        self._let_others_read()

    def _let_others_read(self) -> None:
        """Rank 0 keeps the store, in most ways of starting: it must not be the first to go."""
        if self._world.rank == 0 and self._world.size > 1:
            time.sleep(4 * BEAT_S)

    def _lost(self, error: Exception) -> str:
        return f"{self._name()} has lost the store: {STORE_KEEPER} is dead or cut off ({error})\n"

    def _name(self) -> str:
        return f"rank {self._world.rank} (host {self._world.host}, pid {os.getpid()}, step {self._step})"

    def _left_early(self) -> None:
        if not self._closing.is_set() and not self._reported:
            self._claim(f"{self._name()} left before the training was done\n")

    def _limit_s(self) -> float:
        return self._timeout_s if self._step > self._first_step + 1 else float(process_group.TIMEOUT_S)

    def _watch(self) -> None:
        patience_s = 0 if self._world.rank < DECIDERS else 2 * GONE_S
        while not self._closing.wait(BEAT_S):
            try:
                if self._publish() > self._limit_s() + patience_s:
                    beats, gone = self._compare()
                    accused = diagnose.accuse_gone(beats, gone) or diagnose.accuse_stalled(beats, self._limit_s())
                    if accused:
                        self._claim(accused)
                if not self._reported and (finding := self._finding()):
                    self._leave(finding)
            except dist.DistError as error:
                if not self._closing.is_set():
                    self._leave(self._lost(error))

    def _watch_store(self) -> None:
        """A store that is frozen, or behind a dead link, does not raise: it does not answer."""
        beats, silent_s = 0, 0.0
        while not self._closing.wait(BEAT_S):
            silent_s = silent_s + BEAT_S if self._beats == beats else 0.0
            beats = self._beats
            if silent_s > self._limit_s():
                self._leave(f"{self._name()} hears nothing of the store: {STORE_KEEPER} is frozen or cut off\n")

    def _publish(self) -> float:
        """Renew the heartbeat; returns for how many seconds the main thread has not moved."""
        frame = sys._current_frames().get(self._main)
        place = [(one.f_code, one.f_lasti) for one, _ in traceback.walk_stack(frame)]
        seen = (self._step, data.Loader.batches_read, place)
        # Counted in heartbeats: time in which the whole job was suspended does not count.
        self._stalled_s += BEAT_S
        if seen != self._seen:
            self._seen, self._stalled_s, self._waits_in = seen, 0.0, None
        phase, stack = diagnose.phase_and_stack(reversed(list(traceback.walk_stack(frame))))
        if self._waits_in is None and self._stalled_s > 2 * BEAT_S:  # once for each stall: reading it takes 0.1 s
            self._waits_in = diagnose.waits_in(diagnose.flight_recorder(self._world.device, only_active=True), stack)
        beat: diagnose.Beat = {"rank": self._world.rank, "name": self._name(), "phase": phase, "stack": stack}
        beat |= {"waits_in": self._waits_in or "", "stalled_s": self._stalled_s, "time": time.time()}
        self._store.set(f"watch/{self._world.rank}", json.dumps(beat))
        self._beats += 1
        return self._stalled_s

    def _compare(self) -> tuple[list[diagnose.Beat], set[int]]:
        """Read the heartbeats of all ranks for a while; returns them, and whose have stopped."""
        keys = [f"watch/{rank}" for rank in range(self._world.size)]
        first: list[str] = []
        now = [""] * len(keys)
        moved: set[int] = set()
        end = time.monotonic() + GONE_S
        while time.monotonic() < end and not self._finding():
            self._publish()
            now = [self._store.get(key).decode() if self._store.check([key]) else "" for key in keys]
            first = first or now
            moved |= {rank for rank, beat in enumerate(now) if beat != first[rank]}
            time.sleep(BEAT_S)
        unknown = {"phase": "its start", "stack": "", "waits_in": "", "stalled_s": 0.0}
        beats = [json.loads(beat) if beat else unknown | {"rank": r, "name": f"rank {r}"} for r, beat in enumerate(now)]
        return beats, {*range(len(now))} - moved

    def _finding(self) -> str:
        return self._store.get(FINDING).decode() if self._store.check([FINDING]) else ""

    def _claim(self, finding: str) -> str:
        """Publish a finding, unless there is one already; returns the one that holds."""
        return self._store.compare_set(FINDING, "", finding).decode()

    def _leave(self, finding: str) -> None:
        """Print the finding and end this process, whatever its main thread waits for."""
        try:
            sys.stderr.write(f"\n{finding}rank {self._world.rank} leaves; the run goes on from its newest checkpoint\n")
            sys.stderr.flush()
            if "TORCHELASTIC_ERROR_FILE" in os.environ:  # for the launcher, should rank 0 be the frozen one
                error = {"message": finding, "extraInfo": {"py_callstack": finding, "timestamp": str(int(time.time()))}}
                Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": error}))
            trace = self._logs / f"flight_recorder_{self._world.rank:05d}.json"
            trace.write_text(json.dumps(diagnose.flight_recorder(self._world.device, only_active=False)))
            self._let_others_read()
        finally:  # also where the disk is full
            os._exit(exits.PEER_FAILED)
