"""A clock that stands still until a test moves it, in the place of the module `time` of the module under test."""

import time


class Clock:
    """Passes while somebody sleeps, or by as much as a test adds.

    Attributes:
        now: seconds since some moment.
        looks: how often it was read.
        naps_s: real seconds that each sleep takes, where another thread or process has to come to its turn.
    """

    def __init__(self, now: float = 1000.0, naps_s: float = 0.0) -> None:
        self.now = now
        self.looks = 0
        self.naps_s = naps_s

    def monotonic(self) -> float:
        self.looks += 1
        return self.now

    perf_counter = monotonic

    def time(self) -> float:
        return 1e9 + self.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(self.naps_s)
        self.now += seconds
