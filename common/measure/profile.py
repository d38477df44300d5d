"""A few steps under torch.profiler: a trace of each rank, one of all ranks, and a table that adds up to the step."""

import ctypes
import gc
import gzip
import itertools
import json
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common import UserError, bounds, private_api, ranks
from common.measure import timeline

SKIPPED = 5  # first steps, which allocate and compile; torch.profiler warms up in the last of them
MERGED = 8  # most ranks in the trace of all ranks: a browser must load it
ROUNDS = 10  # of comparing clocks
LINES = {
    "data": "waits for data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "clipping and update",
    "exposed": "sends, nothing computed",
    "slower": "waits for another rank",
    "evaluation": "evaluation",
    "beside": "checkpoint, checks, log",
    "idle": "GPU idle, nothing sent",
}


@dataclass(frozen=True)
class ProfileArgs:
    """Flags of profiles."""

    # every run
    profile: bounds.NonNegativeInt = 0  # steps to profile, after the first 5: where their time goes; 0 for none


@dataclass(frozen=True)
class Found:
    """What a profile shows.

    Attributes:
        parts: seconds a step by part of `timeline.PARTS`, the mean of the ranks, which add up to "step"; and "hidden".
        lines: the table for the terminal.
        slowest: the rank that the others waited for longest, as rank and host; "" if nobody waited.
        slowest_s: the seconds a step that they waited for it, their mean, less what it waited for them.
    """

    parts: Mapping[str, float]
    lines: list[str]
    slowest: str = ""
    slowest_s: float = 0.0


class Profile:
    """Profiles some steps of a run."""

    def __init__(self, steps: int, first_step: int, last_step: int, device: torch.device, folder: Path) -> None:
        """Choose the steps.

        Args:
            steps: how many; 0 for none.
            first_step: the last step that is already done.
            last_step: where the run ends.
            device: of this rank.
            folder: the run's.

        Raises:
            UserError: the run is too short.
        """
        self._first = first_step + SKIPPED + 1
        self._last = first_step + SKIPPED + steps if steps else 0
        self._device = device
        self._folder = folder / "profile" / f"step_{self._first:08d}"
        self._began: list[float] = []  # of each step, and the end of the last one
        self._profiler: Any = None  # torch's, while it runs
        if steps and self._last > last_step:
            short = (
                f"--profile {steps} needs {SKIPPED + steps} steps, because the first {SKIPPED} are not typical, and "
                f"this start has {last_step - first_step}"
            )
            if not first_step:
                raise UserError(f"{short}: raise --max-steps or --stop-after, or lower --profile")
            ranks.print0(f"note: {short}: it is left out")  # a requeued job must not fail for that
            self._first = self._last = 0

    def begin(self, step: int) -> None:
        """A step begins (all ranks)."""
        if step > self._last:
            return
        if step == self._first:  # no kernel of one step counts for another
            torch.get_device_module(self._device).synchronize(self._device)
        self._began.append(time.perf_counter())
        if self._profiler:
            self._profiler.step()
            return
        if self._device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it complains that there is no GPU
        active = self._last - self._first + 1
        schedule = torch.profiler.schedule(skip_first=SKIPPED - 1, wait=0, warmup=1, active=active, repeat=1)
        self._profiler = torch.profiler.profile(record_shapes=True, schedule=schedule)
        self._profiler.start()

    def end(self, step: int, host: str) -> Found | None:
        """A step has ended (all ranks); what the profile shows, if it was the last one to profile.

        Args:
            step: the step.
            host: this rank's name and machine.
        """
        if not self._profiler or step < self._last:
            return None
        found = self._read(host)
        _give_back()
        return found

    def close(self) -> None:
        """End the profiler, if it runs: a request to stop may have come before its last step."""
        if self._profiler:
            self._profiler.stop()
            self._profiler = None

    def _read(self, host: str) -> Found | None:
        """What the profile shows (all ranks)."""
        torch.get_device_module(self._device).synchronize(self._device)
        self._began.append(time.perf_counter())
        ended = self._profiler
        self.close()
        trace: dict[str, Any] = {}
        mine = None
        problem = ""
        try:
            trace = self._export(ended)
            recorded = private_api.flight_recorder(self._device, only_active=False).get("entries", [])
            mine = timeline.window(trace, recorded)
        except (OSError, ValueError) as error:  # a full disk, or no JSON: the training continues
            problem = f"{host}: {error}"
        clock_us = clock_offset_s() * 1e6 + trace.get("baseTimeNanoseconds", 0) / 1e3
        everyone = ranks.gather([problem, clock_us])
        problems = [one for one, _ in everyone if one]
        if problems or not mine:
            ranks.print0(f"warning: there is no profile: {problems[0]}")
            return None
        shifts = [one - everyone[0][1] for _, one in everyone]  # onto rank 0's clock
        steps = [after - before for before, after in itertools.pairwise(self._began)]
        before_s = statistics.median(steps[1 : SKIPPED - 1])
        found = _judge(mine, statistics.fmean(steps[SKIPPED:]), _waits(mine, shifts[dist.get_rank()]), host)
        head = f"profile  steps {self._first} to {self._last}: {found.parts['step'] * 1e3:,.1f} ms a step"
        head = f"{head}, where those before them took {before_s * 1e3:,.1f} ms"
        if dist.get_rank() == 0:
            try:
                self._merge(shifts)
            except (OSError, ValueError) as error:
                ranks.print0(f"warning: the ranks' traces were not merged: {error}")
        tail = f"         {self._folder}/merged.json.gz shows each operator: open it at https://ui.perfetto.dev"
        return replace(found, lines=[head, *found.lines, tail])

    def _export(self, profiler: Any) -> dict[str, Any]:
        """Write this rank's trace, and read it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file(dist.get_rank())
        profiler.export_chrome_trace(str(file))
        with gzip.open(file) as content:
            return json.load(content)

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank_{rank:05d}.json.gz"

    def _merge(self, shifts: Sequence[float]) -> None:
        """Write one trace of the first ranks, with one clock (rank 0, when each has written its own)."""
        merged: dict[str, Any] = {}
        events = []
        for rank, shift in enumerate(shifts[:MERGED]):
            with gzip.open(self._file(rank)) as content:
                trace = json.load(content)
            merged = merged or trace
            of_process = {"process_name": {"name": f"rank {rank}"}, "process_sort_index": {"sort_index": rank}}
            events += [{"ph": "M", "name": name, "pid": rank, "args": args} for name, args in of_process.items()]
            for one in trace["traceEvents"]:
                # Others are no process's, or give it another name.
                if isinstance(one.get("pid"), int) and not one["name"].startswith("process_"):
                    event = one | {"pid": rank, "ts": one.get("ts", 0) + shift}
                    if "id" in event:  # of an arrow, which must not lead to another rank
                        event["id"] = one["id"] * MERGED + rank
                    events.append(event)
        with gzip.open(self._folder / "merged.json.gz", "wt") as content:
            json.dump(merged | {"traceEvents": events}, content)


def _give_back() -> None:
    """Free what a profile has allocated in millions of small blocks, among which each later step takes 3 % longer."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # of glibc
        libc.malloc_trim(0)


def _waits(mine: timeline.Window, shift_us: float) -> list[timeline.Wait | None]:
    """For each of this rank's messages, how long it waited for another rank (all ranks)."""
    sent = [replace(one, begin=one.begin + shift_us, end=one.end + shift_us) for one in mine.messages]
    everyone = [
        [timeline.Message(**one | {"group": tuple(one["group"]), "peers": tuple(one["peers"])}) for one in rows]
        for rows in ranks.gather([asdict(one) for one in sent])
    ]
    return timeline.waits(everyone)[dist.get_rank()]


def _judge(mine: timeline.Window, step_s: float, waited: Sequence[timeline.Wait | None], host: str) -> Found:
    """Add up the steps of all ranks (all ranks)."""
    by_rank: dict[int, list[timeline.Interval]] = defaultdict(list)
    for one, wait in zip(mine.messages, waited, strict=True):
        if wait:
            by_rank[wait.rank].append((one.begin, one.begin + wait.took_us))
    parts = timeline.parts(mine, [*itertools.chain(*by_rank.values())]) | {"step": step_s}
    causes = {rank: timeline.parts(mine, intervals)["slower"] for rank, intervals in by_rank.items()}
    everyone = ranks.gather([host, parts, causes])
    size = len(everyone)
    means = {part: statistics.fmean(one[1][part] for one in everyone) for part in parts}
    lines = []
    for part, name in LINES.items():
        each = [one[1][part] for one in everyone]
        if max(each) < 1e-6:
            continue
        between = f"   {min(each) * 1e3:,.1f} to {max(each) * 1e3:,.1f} by rank" if size > 1 else ""
        lines.append(f"         {name:<24}{means[part] * 1e3:>10,.1f} ms{means[part] / means['step']:>6.0%}{between}")
    if means["hidden"] > 1e-6:
        lines.append(f"         {'sent while it computed':<24}{means['hidden'] * 1e3:>10,.1f} ms")
    lines += _traffic(mine, waited)
    # What the others waited for a rank, less what it waited itself: ranks also wait for each other in turns.
    caused = [sum(one[2].get(str(rank), 0.0) for one in everyone) / max(size - 1, 1) for rank in range(size)]
    net = [(took_s - one[1]["slower"], one[0]) for took_s, one in zip(caused, everyone, strict=True)]
    slowest_s, slowest = max(net)
    return Found(means, lines, slowest, max(slowest_s, 0.0))


def _traffic(mine: timeline.Window, waited: Sequence[timeline.Wait | None]) -> list[str]:
    """Lines on each kind of message: how often in a step, how much, and how fast once all ranks had begun."""
    kinds: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for one, wait in zip(mine.messages, waited, strict=True):
        took_us = one.end - one.begin - (wait.took_us if wait else 0.0)
        kinds[one.name].append((one.num_bytes, took_us / 1e6))
    lines = []
    for name, calls in kinds.items():
        size_mb = sum(size for size, _ in calls) / 1e6
        took_s = sum(took for _, took in calls)
        rate = f"{size_mb / mine.num_steps:,.3f} MB a step at {size_mb / max(took_s, 1e-9):,.0f} MB/s"
        lines.append(f"         {name:<24}{len(calls) / mine.num_steps:>10,.1f} calls, {rate}")
    return lines


def clock_offset_s() -> float:
    """What to add to this machine's clock to get rank 0's (all ranks); 0 if the two may agree.

    Nobody leaves an all-gather before all have entered it, so that each one bounds the offset from both sides. This is
    Cristian's way (Probabilistic clock synchronization, 1989) with a collective in place of a message.
    """
    low = -math.inf
    high = math.inf
    for _ in range(ROUNDS):
        entered = time.time()
        all_entered = ranks.gather(entered)
        left = time.time()
        all_left = ranks.gather(left)
        low = max(low, all_entered[0] - left)
        high = min(high, all_left[0] - entered)
    return 0.0 if low <= 0 <= high else (low + high) / 2
