"""How long each rank works itself, and so which one the others wait for, without a collective in the training.

A rank that waits for others sleeps. One that computes, or would if its processor were free, works. All ranks take
equally long for a step, and the slow one alone works all the time.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from common import ranks

SLOW = 0.1  # what the others lose of their time by one slow rank, if it is worth a line
LEAST_S = 30.0  # of training: in a shorter one, what a rank does once, such as its first step, looks like slowness


class Pace:
    """Adds up how long this thread works, and how long that takes.

    Attributes:
        worked_s: seconds that it has worked.
        took_s: seconds by the clock.
        saved_s: seconds by the clock of saves, from `begin` to `compare`.
        slow: at the last comparison, what of the training the other ranks waited for one, and its name.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        """Begin with nothing (the thread that trains).

        Args:
            device: what computes. The work of a GPU is no thread's, and not counted.
            name: of this rank.
        """
        self.worked_s = self.took_s = self.saved_s = 0.0
        self.slow = (0.0, "")
        self._began = (0.0, 0.0)
        self._name = name
        self._on_cpu = device.type == "cpu"
        # On Linux; elsewhere, where others take its processor, it seems to wait.
        self._schedstat = Path("/proc/thread-self/schedstat")

    def begin(self) -> None:
        """Work begins, or a save."""
        self._began = (self._worked_s(), time.perf_counter())

    def end(self) -> None:
        """Work ends."""
        worked_s, at = self._began
        self.worked_s += self._worked_s() - worked_s
        self.took_s += time.perf_counter() - at

    def compare(self) -> None:
        """At the end of a save, report a rank that has worked longer than the others (all ranks)."""
        everyone = ranks.gather([self.worked_s, self.took_s, self._name])
        rank, share = slow_rank([(worked_s, took_s) for worked_s, took_s, _ in everyone])
        slow = everyone[rank][2] if share else ""
        if slow and slow != self.slow[1]:
            ranks.print0(f"note: {slow} works longer than the others: they wait for it in {share:.0%} of the training")
        self.slow = (share, slow)
        self.saved_s += time.perf_counter() - self._began[1]

    def _worked_s(self) -> float:
        """Seconds of this thread on a processor, and ready to run without one (proc(5), schedstat's second number)."""
        if not self._on_cpu:
            return 0.0
        delay_ns = int(self._schedstat.read_text().split()[1]) if self._schedstat.exists() else 0
        return time.thread_time() + delay_ns / 1e9


def slow_rank(paces: Sequence[tuple[float, float]]) -> tuple[int, float]:
    """The rank that works longest, and what of their time the others lose by it; 0 if that, or the time, is little.

    Args:
        paces: of each rank, `Pace.worked_s` and `Pace.took_s` of the same steps.
    """
    rank = max(range(len(paces)), key=lambda one: paces[one][0])
    others = [worked for one, (worked, _) in enumerate(paces) if one != rank]
    worked, took = paces[rank]
    share = (worked - statistics.median(others)) / took if others and took else 0.0
    return rank, share if share > SLOW and took > LEAST_S else 0.0
