"""How long each rank works itself, and so which one the others wait for, without a collective in the training.

A rank that waits for others sleeps. One that computes, or would if its processor were free, works. All ranks take
equally long for a step, and the slow one alone works all the time. A GPU that waits for others is as busy as they are:
each computes the same product before every save, and the slow one takes longer for it.
"""

import contextlib
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from common import ranks
from common.train import flops

SLOW = 0.1  # what the others lose of their time by one slow rank, if it is worth a line
LEAST_S = 30.0  # of training: in a shorter one, what a rank does once, such as its first step, looks like slowness


class Pace:
    """Adds up how long this thread works, and how long that takes.

    Attributes:
        worked_s: seconds that it has worked.
        took_s: seconds by the clock.
        saved_s: seconds by the clock of saves, without the comparison before them.
        slow: at the last comparison, what of the training the other ranks wait for one, and its name.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        """Begin with nothing (the thread that trains).

        Args:
            device: what computes. The work of a GPU is no thread's: its speed is compared instead.
            name: of this rank.
        """
        self.worked_s = self.took_s = self.saved_s = 0.0
        self.slow = (0.0, "")
        self._began = (0.0, 0.0)
        self._device = device
        self._name = name if device.type == "cpu" else f"{name} ({device})"
        # On Linux; elsewhere, where others take its processor, it seems to wait.
        self._schedstat = Path("/proc/thread-self/schedstat")

    def begin(self) -> None:
        """Work begins."""
        self._began = (self._worked_s(), time.perf_counter())

    def end(self) -> None:
        """Work ends."""
        worked_s, at = self._began
        self.worked_s += self._worked_s() - worked_s
        self.took_s += time.perf_counter() - at

    def begin_save(self) -> None:
        """Report a rank that the others wait for (all ranks): a GPU comes from a step, and still runs at its clock."""
        work = self.worked_s, self.took_s
        if self._device.type != "cpu":  # what one takes longer for a product, the others wait for
            work = float("inf"), float("inf")  # nobody is named, where memory for it is missing: 64 MiB
            with contextlib.suppress(torch.OutOfMemoryError):
                work = (flops.product_s(self._device, torch.float16, 4096),) * 2
        everyone = ranks.gather((*work, self._name))
        share, slow = slow_rank(everyone) if self.took_s > LEAST_S else (0.0, "")
        if slow and slow != self.slow[1]:
            ranks.print0(f"note: {slow} is slower than the others: they wait for it in {share:.0%} of the training")
        self.slow = (share, slow)
        self.begin()

    def end_save(self) -> None:
        """The save has ended."""
        self.saved_s += time.perf_counter() - self._began[1]

    def _worked_s(self) -> float:
        """Seconds of this thread on a processor, and ready to run without one (proc(5), schedstat's second number)."""
        delay_ns = int(self._schedstat.read_text().split()[1]) if self._schedstat.exists() else 0
        return time.thread_time() + delay_ns / 1e9


def slow_rank(paces: Iterable[tuple[float, float, str]]) -> tuple[float, str]:
    """What of their time the others lose by the rank that works longest, and its name; (0, "") if that is little.

    Args:
        paces: of each rank, how long it worked, how long this took all of them, and its name.
    """
    *others, (worked_s, took_s, name) = sorted(paces)
    share = (worked_s - statistics.median(one[0] for one in others)) / took_s if others and took_s else 0.0
    return (share, name) if share > SLOW else (0.0, "")
