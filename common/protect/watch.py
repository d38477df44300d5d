"""Name the rank that hangs, dies, raises or exits early, on every rank, and end all ranks together.

The order of events:
1. A thread of each rank renews a heartbeat in the store every `BEAT_S`: step, phase, stack, and the collective that
   the rank waits in, as torch's flight recorder has it.
2. A rank that makes no progress, or that loses a connection to a peer, reads all heartbeats for `DEAD_S`, or until it
   sees that a process of its own machine has ended. Each rank holds a connection to the next one, so that the end of a
   process is noticed though nobody waits for it. It also looks at the next one's heartbeat: NCCL reports no end of a
   process, and a machine without power closes nothing.
3. It accuses the ranks whose heartbeat has stopped, or else the one that waits for no other rank: it stands still, or
   moves in one phase of one step for much longer. A rank that moves so also ends where it was asked to stop.
4. It publishes this finding in the store. The first finding counts; later ones are dropped.
5. Every other rank reads the finding, prints it and exits with PEER_FAILED. A rank that raised exits with its own
   error. Rank 0 exits last, and names those that have died as well.
"""

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from common import UserError, bounds, printable, private_api, ranks
from common.protect import diagnose
from common.protect.heartbeat import BEAT_S, DEAD_S, Heartbeat
from common.protect.peers import Peers
from common.run import exits, process_group, stop
from common.run.process import World

DECIDERS = 8  # the first ranks to compare heartbeats: a thousand ranks must not all read a thousand heartbeats
MOST_FOUND = 100_000  # characters of a finding, which may have the stacks of many ranks
STORE_HOST = "its host (rank 0 or the launcher)"
FAREWELL_TAG = 0x0FA2E  # of the message that a rank sends to the one before it when its training is done


@dataclass(frozen=True)
class WatchArgs:
    """Flags of the watch over the ranks."""

    # every run
    hang_timeout: bounds.Timeout = 300.0  # seconds without progress until the run names the hanging rank and exits


class Watch:
    """Watches this rank's main thread and, through the store, the other ranks."""

    def __init__(self, world: World, hang_timeout_s: float = float("inf")) -> None:
        """Begin to name the ranks that die, and those that raise (main thread, all ranks).

        Args:
            world: this process.
            hang_timeout_s: half of it without progress is said, and ends nothing before the training.
        """
        self._world = world
        self._heart = Heartbeat(world, hang_timeout_s)
        self._logs: Path | None = None
        self._peers = Peers(world, self._heart)
        self._last_words = ""
        self._reported = False
        self._closing = threading.Event()
        self._exiting = threading.Lock()
        self._farewell = torch.zeros(1)  # not 0 once the next rank's training is done
        targets = [self._watch, self._tick]
        if world.size > 1:
            self._message: Any = dist.irecv(self._farewell, (world.rank + 1) % world.size, tag=FAREWELL_TAG)
            targets.append(self._feel_next)
        self._threads = [threading.Thread(target=target, name=target.__name__, daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()
        world.process.background.callback(self.close)
        atexit.register(self._report_early_exit)

    def begin(self, path: Path, first_step: int, hang_timeout_s: float) -> None:
        """The training begins: from here on, a hang is noticed too (main thread, all ranks).

        Args:
            path: the run's folder; after a failure, the flight recorder's entries are written to its logs/.
            first_step: steps done already.
            hang_timeout_s: seconds without progress that count as a hang; see `Heartbeat.limit_s`.
        """
        self._logs = path / "logs"
        self._heart.begin(path, first_step, hang_timeout_s)
        self._heart.tick()  # the first step may already keep the interpreter's lock
        self._world.process.background.callback(self.close)  # again: now before what has begun since `start`

    def step(self, step: int) -> None:
        """Note that `step` begins."""
        self._heart.step = step
        self._heart.noted = ""

    def note(self, phase: str) -> None:
        """Note the phase of training, where a stack does not tell it; "" where it does, as from the next step on."""
        self._heart.noted = phase

    def close(self) -> None:
        """Stop the heartbeat: this rank has finished."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(RuntimeError, ValueError):  # no connection is left, as after an error
            if self._world.size > 1:
                self._sent = dist.isend(torch.ones(1), (self._world.rank - 1) % self._world.size, tag=FAREWELL_TAG)
        for thread in self._threads:
            thread.join(DEAD_S)
        faulthandler.cancel_dump_traceback_later()
        atexit.unregister(self._report_early_exit)

    def report(self, error: BaseException) -> None:
        """Publish why this rank raises (main thread); does not return if another rank is the cause."""
        self._reported = True
        frames = list(traceback.walk_tb(error.__traceback__))
        # torch wraps errors so, of a stage's backward pass and of a loader's worker.
        while type(error) is RuntimeError and error.__cause__:
            error = error.__cause__
            frames += traceback.walk_tb(error.__traceback__)
        phase, stack = diagnose.phase_and_stack(frames, self._heart.noted)
        said = "\n".join([str(error), *getattr(error, "__notes__", [])])
        headline = f"{self._heart.name()} failed in {phase}: {type(error).__name__}: {said}\n"
        finding = headline + stack
        everywhere = isinstance(error, UserError) and error.everywhere
        if everywhere or (not self._logs and isinstance(error, UserError | KeyboardInterrupt)):
            # Mostly all ranks raise the same, and rank 0 prints it. Else the others read it once this rank has exited.
            self._last_words = finding
            self._closing.set()
            return
        try:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                beats, dead = self._peers.compare()
                if accused := self._peers.finding() or self._heart.own_freeze() or diagnose.accuse_dead(beats, dead):
                    self._exit(self._peers.publish_finding(accused))
                finding += "".join(diagnose.describe(beat) for beat in beats if beat["rank"] != self._world.rank)
            self._peers.publish_finding(finding)
        except dist.DistError as lost:
            self._exit(self._store_lost(lost))
        if not isinstance(error, UserError):  # `exits.entry` prints those
            # Python prints the stack afterwards, with the exception.
            sys.stderr.write(f"\n{printable(headline, MOST_FOUND)}")
            sys.stderr.flush()
        self._let_others_read(finding)

    def _let_others_read(self, finding: str) -> None:
        """Let rank 0 exit last, as it hosts the store under most launchers; meanwhile it looks for more dead ranks."""
        with contextlib.suppress(dist.DistError):  # the store has gone before
            if self._world.rank:
                self._peers.announce_exit()
            elif not self._heart.own_freeze():
                beats, dead = self._peers.compare(to_the_end=True)
                more = {rank for rank in dead if f"rank {rank} (" not in finding and not self._peers.exits(rank)}
                sys.stderr.write(printable(diagnose.accuse_dead(beats, more), MOST_FOUND))
                sys.stderr.flush()

    def _store_lost(self, error: Exception) -> str:
        lost = f"{self._heart.name()} has lost its connection to the store: {STORE_HOST} is dead or cut off ({error})\n"
        return self._heart.own_freeze() or lost

    def _report_early_exit(self) -> None:
        if self._last_words or not (self._closing.is_set() or self._reported):
            with contextlib.suppress(dist.DistError):  # the store has gone before
                early = f"{self._heart.name()} exited before the training was done\n"
                self._peers.publish_finding(self._last_words or early)

    def _watch(self) -> None:
        patience_s = 0 if self._world.rank < DECIDERS else 2 * DEAD_S
        warned = slow = False
        while True:
            try:
                beat = self._peers.publish()
                spins = diagnose.has_spun(beat, diagnose.SPINS * process_group.TIMEOUT_S)
                if spins and self._is_to_stop():  # which has a limit too
                    self._peers.publish_finding(diagnose.no_progress(beat))
                if self._heart.stalled_s > self._heart.limit_s() + patience_s:
                    self._peers.accuse(stalled=True)
                elif not self._reported and not self._farewell.any() and self._peers.next_is_silent():
                    self._peers.accuse(stalled=False)
                if not self._reported and (finding := self._peers.finding()):
                    self._exit(finding)
                if (foreign := self._peers.store.foreign) and not warned:
                    warned = True
                    ranks.print0(f"warning: a stranger writes to this run's store ({foreign}): ignored")
                sentence = self._heart.slow_save() or self._heart.slow_start()
                if sentence and not slow:
                    tqdm.write(f"warning: {printable(sentence)}", sys.stdout)
                    sys.stdout.flush()
                slow = bool(sentence)
            except dist.DistError as error:
                if self._closing.is_set() or self._reported:
                    return
                self._exit(self._store_lost(error))
            if self._closing.wait(BEAT_S):
                return

    def _is_to_stop(self) -> bool:
        """Whether the ranks have been asked to stop; before the training, signals wait for it to begin."""
        return bool(self._peers.store.peek(stop.REASON) or signal.sigpending() & {*exits.HELD_BACK})

    def _tick(self) -> None:
        """Keep the clocks that need no store: of a store that does not answer, and of an interpreter that is locked."""
        beats = 0
        silent_s = 0.0
        while not self._closing.wait(BEAT_S):
            self._heart.tick()
            silent_s = silent_s + BEAT_S if self._peers.num_beats == beats else 0.0
            beats = self._peers.num_beats
            if silent_s > self._heart.limit_s():
                self._exit(
                    f"{self._heart.name()} gets no answer from the store: {STORE_HOST} is frozen or cut off\n", False
                )

    def _feel_next(self) -> None:
        """Notice at once when the next rank's process has ended: then the kernel closes its connection."""
        try:
            self._message.wait(timedelta(days=365))
        except RuntimeError:
            with contextlib.suppress(dist.DistError):  # `_watch` reports it
                if not self._closing.is_set() and not self._reported:
                    self._peers.accuse(stalled=False)

    def _exit(self, finding: str, store_answers: bool = True) -> None:
        """Print the finding and end this process, whatever its main thread waits for."""
        self._exiting.acquire()  # never released: if two threads have the same finding, only one prints it
        try:
            own = self._heart.own_freeze()
            outlook = exits.outlook(self._logs.parent, self._world.size) if self._logs else "run the same command again"
            finding = printable(finding if own in finding else own + finding, MOST_FOUND)
            finding = f"{finding}rank {self._world.rank} exits; {outlook}\n"
            sys.stderr.write(f"\n{finding}")
            sys.stderr.flush()
            if "TORCHELASTIC_ERROR_FILE" in os.environ:  # the launcher prints it if rank 0 is the frozen one
                error = {"message": finding, "extraInfo": {"py_callstack": finding, "timestamp": str(int(time.time()))}}
                Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": error}))
            if self._logs:
                trace = self._logs / f"flight_recorder_{self._world.rank:05d}.json"
                trace.write_text(json.dumps(private_api.flight_recorder(self._world.device, only_active=False)))
            if store_answers:
                self._let_others_read(finding)
        finally:  # also where the disk is full
            os._exit(exits.PEER_FAILED)
