"""Stop on a signal or by the clock: all ranks save and stop after the same step, without a collective per step.

The main thread blocks the signals, so that loader workers inherit the block and survive them. A thread receives them,
also while the main thread waits in a collective. The rank that gets a signal writes the reason to the store; every
rank's thread answers with its latest step; rank 0 reads these, many in one request, and publishes the largest plus one,
the first step that no rank can have passed: after it, all ranks stop. A signal to one rank is enough.
"""

import os
import select
import signal
import socket
import threading
import time

import torch.distributed as dist

from common import printable, ranks
from common.run import process_group
from common.run.process import World

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
POLL_S = 0.2
POLL_RANK_S = 1e-4  # for each rank that there is
AT_ONCE = 512  # answers of ranks that rank 0 reads in one request
# torchrun forwards a signal that the terminal or Slurm also sends to the ranks: within this time it counts as one.
SAME_SIGNAL_S = 2.0
REASON = "stop/reason"  # in the store: why to stop, once somebody has asked
END_MARGIN_S = 120.0  # for the current step and the save, before Slurm ends the job


def taken_over() -> list[signal.Signals]:
    """The signals that mean a request to stop: SIGNALS, but not SIGHUP if this process ignores it, as under nohup."""
    return [one for one in SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]


def poll_s(size: int) -> float:
    """Seconds between two questions of a rank to the store, which answers no more a second however many ask."""
    return max(POLL_S, POLL_RANK_S * size)


class Stop:
    """Waits for a reason to stop; `after` returns whether the step to stop at is reached.

    Attributes:
        reason: why the ranks stop, and which rank noticed; "" while there is no reason.
    """

    def __init__(self, world: World, deadline_min: float, first_step: int, last_step: int) -> None:
        """Take over the signals (main thread, before any loader worker is forked; all ranks).

        Args:
            world: this process.
            deadline_min: minutes from now after which to stop; 0 for never.
            first_step: steps done already.
            last_step: the step after which the run stops anyway.
        """
        self.reason = ""
        self._rank = world.rank
        self._size = world.size
        self._poll_s = poll_s(world.size)
        self._deadline = time.monotonic() + 60 * deadline_min if deadline_min else float("inf")
        if "SLURM_JOB_END_TIME" in os.environ:  # Unix time; launch/slurm.sh sets it if Slurm does not
            remaining_s = float(os.environ["SLURM_JOB_END_TIME"]) - time.time()
            margin_s = min(END_MARGIN_S, remaining_s / 10)
            self._deadline = min(self._deadline, time.monotonic() + remaining_s - margin_s)
        self._last_step = last_step
        self._lock = threading.Lock()
        self._first_step = self._done = self._target = first_step
        self._agreed = threading.Event()
        self._signalled_at = float("inf")
        # Python writes a signal's number to this socket at once, whichever thread receives the signal.
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        before = world.process.stop
        if before:  # a request to stop outlives a rewind
            self._deadline = before._deadline
            self._signals = before._signals
            self._wakeup = before._wakeup
            self._signalled_at = before._signalled_at
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        for number in taken_over():
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        # torchrun's own process. Without torchrun, the parent is a shell, which may end while the training runs.
        self._launcher = world.parent if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self._store = world.store.clone()  # the main thread may be waiting in the store itself
        if before and before.reason:
            self._store.set("stop/reason", before.reason)
        world.process.stop = self
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stop", daemon=True)
        self._thread.start()
        world.process.background.callback(self.close)
        dist.barrier()  # from here on, a signal to any rank stops all of them

    def after(self, step: int) -> bool:
        """Whether to stop after `step`; waits for the other ranks only if there is a reason (all ranks).

        Raises:
            RuntimeError: another rank does not answer.
        """
        with self._lock:
            self._done = step
            if not self.reason:
                return False
        if not self._agreed.wait(process_group.TIMEOUT_S):
            raise RuntimeError(f"rank {self._rank}: the ranks did not agree on a step to stop after ({self.reason})")
        return step >= self._target

    def close(self) -> None:
        """Stop waiting for signals: this rank has finished."""
        self._closing.set()
        self._thread.join(5 * self._poll_s)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        while not self._closing.is_set():
            try:
                if (reason := self._look()) and not self.reason:
                    self._agree(reason)
            except dist.DistError:
                return  # the store is unreachable; `watch` reports it

    def _look(self) -> str:
        """Wait a moment for a reason to stop: a signal, the clock, or another rank's reason in the store."""
        if select.select([self._signals], [], [], self._poll_s)[0]:
            # Other signals arrive here too, such as SIGCHLD when a loader worker ends.
            numbers = [number for number in self._signals.recv(64) if number in SIGNALS]
            if not numbers:
                return ""
            # Only a second signal to this rank counts as a repeat: another rank's first one may arrive late.
            if time.monotonic() - self._signalled_at > SAME_SIGNAL_S:
                os._exit(128 + numbers[0])  # now, without saving
            self._signalled_at = min(self._signalled_at, time.monotonic())
            return f"{signal.Signals(numbers[0]).name} on rank {self._rank}"
        if time.monotonic() > self._deadline:
            return f"--deadline, or Slurm's time limit, on rank {self._rank}"
        if self._launcher and os.getppid() != self._launcher:
            reason = f"the launcher (process {self._launcher}) has died, on rank {self._rank}"
            if self._done == self._first_step:  # a short one is let end; rank 0 looks again before the others do
                time.sleep((10 if self._rank else 5) * self._poll_s)
            if self._done == self._first_step:  # which compiles, perhaps for minutes, and there is nothing to save
                ranks.print0(f"{reason}, before its first step: it exits")
                os._exit(1)
            return reason
        return printable(self._store.peek(REASON))

    def _agree(self, reason: str) -> None:
        """Publish this rank's latest step, and set the step to stop after, which rank 0 finds from those of all."""
        with self._lock:  # from here on, `after` waits, so no rank can pass the target
            self.reason = reason
            done = self._done
        self._store.set(REASON, reason)
        self._store.set(f"stop/done/{self._rank}", str(done))
        names = [f"stop/done/{rank}" for rank in range(self._size)] if self._rank == 0 else ["stop/target"]
        found = [int(number) for number in self._wait_for(names)]
        if not found:
            return
        self._target = min(1 + max(found), self._last_step) if self._rank == 0 else found[0]
        if self._rank == 0:
            self._store.set("stop/target", str(self._target))
        self._agreed.set()
        repeat = "; send it again to quit now without saving" if reason.startswith("SIG") else ""
        ranks.print0(f"{reason}: saving and stopping after step {self._target}{repeat}")

    def _wait_for(self, names: list[str]) -> list[str]:
        """These values of the store, once all are there; none if a rank has died, which never answers."""
        found: list[str] = []
        for first in range(0, len(names), AT_ONCE):
            while not all(values := self._store.peek_all(names[first : first + AT_ONCE])):
                if self._store.peek(process_group.FINDING):
                    return []  # `watch` ends this process
                time.sleep(self._poll_s / 4)
            found += values
        return found
