"""Leave on a signal or by the clock: saved, all ranks after the same step, without a collective per step.

Signals are blocked in the main thread, so that loader workers, which inherit that, outlive them, and are taken
by a thread of their own, also while the main thread sits in a collective. The rank that notices says so in the
store; every rank's thread answers with the step it has done; all leave after the largest of these plus one,
which is the first step that nobody can have passed. One rank that is told is enough.
"""

import os
import select
import signal
import socket
import threading
import time

import torch.distributed as dist

from common import process_group, ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
POLL_S = 0.2
# torchrun passes a signal on that the terminal or Slurm has sent to the ranks too: within this time it is the same.
SAME_SIGNAL_S = 2.0
END_MARGIN_S = 120.0  # for the step under way and the save, before Slurm ends the job


class Stop:
    """Watches for a reason to leave; `after` tells when.

    Attributes:
        reason: why the ranks leave, and which rank noticed; "" while there is no reason.
    """

    def __init__(self, world: process_group.World, deadline_min: float, first_step: int) -> None:
        """Take over the signals (main thread, before any loader worker is forked; all ranks).

        Args:
            world: this process.
            deadline_min: minutes from now after which to leave; 0 for never.
            first_step: steps done already.
        """
        self.reason = ""
        self._rank, self._size = world.rank, world.size
        self._deadline = time.monotonic() + 60 * deadline_min if deadline_min else float("inf")
        if "SLURM_JOB_END_TIME" in os.environ:  # seconds since 1970; launch/slurm.sh sets it where Slurm does not
            left_s = float(os.environ["SLURM_JOB_END_TIME"]) - time.time()
            self._deadline = min(self._deadline, time.monotonic() + left_s - min(END_MARGIN_S, left_s / 10))
        self._lock = threading.Lock()
        self._done = self._target = first_step
        self._agreed = threading.Event()
        self._signalled_at = float("inf")
        # Python writes the number of a signal here at once, whichever thread it hits.
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        # The main thread may be waiting in the store itself.
        self._store = world.store.clone() if world.size > 1 else world.store
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stop", daemon=True)
        self._thread.start()
        process_group.background.callback(self.close)
        dist.barrier()  # from here on a signal to any rank is a request

    def after(self, step: int) -> bool:
        """Whether to leave now that `step` is done; waits for the others only once there is a reason (all ranks).

        Raises:
            RuntimeError: another rank does not answer.
        """
        with self._lock:
            self._done = step
            if not self.reason:
                return False
        if not self._agreed.wait(process_group.TIMEOUT_S):
            raise RuntimeError(f"rank {self._rank}: no agreement on the step to leave after ({self.reason})")
        return step >= self._target

    def close(self) -> None:
        """Stop listening: this rank is done."""
        self._closing.set()
        self._thread.join(5 * POLL_S)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        while not self._closing.is_set():
            try:
                reason = self._look()
                if reason and not self.reason:
                    self._agree(reason)
            except dist.DistError:
                return  # the store is gone, and `watch` says so

    def _look(self) -> str:
        """Wait a moment for a reason: a signal here, the clock, or another rank's notice."""
        if select.select([self._signals], [], [], POLL_S)[0]:
            # Others come here too: a loader worker that ends, for one, is a SIGCHLD.
            numbers = [number for number in self._signals.recv(64) if number in SIGNALS]
            if not numbers:
                return ""
            # This rank twice: the first signal here may come late, as to the second of two machines that are drained.
            if time.monotonic() - self._signalled_at > SAME_SIGNAL_S:
                os._exit(128 + numbers[0])  # at once, unsaved
            self._signalled_at = min(self._signalled_at, time.monotonic())
            return f"{signal.Signals(numbers[0]).name} on rank {self._rank}"
        if time.monotonic() > self._deadline:
            return f"--deadline, or Slurm's time limit, on rank {self._rank}"
        return self._store.get("stop/reason").decode() if self._store.check(["stop/reason"]) else ""

    def _agree(self, reason: str) -> None:
        """Publish the step done here, read everyone's, and fix the step to leave after."""
        with self._lock:  # from here on `after` waits, so no rank can pass the target
            self.reason = reason
            done = self._done
        self._store.set("stop/reason", reason)
        self._store.set(f"stop/done/{self._rank}", str(done))
        self._target = 1 + max(int(self._store.get(f"stop/done/{rank}")) for rank in range(self._size))
        self._agreed.set()
        ranks.print0(
            f"{reason}: all ranks leave, saved, after step {self._target}; the same again quits at once, unsaved"
        )
