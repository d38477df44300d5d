"""A few steps under torch.profiler. Each rank writes its trace, which `python -m tools.profile` reads after the run."""

import contextlib
import ctypes
import gc
import itertools
import json
import math
import os
import shlex
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from common import UserError, bounds, marks, private_api, ranks
from common.run import cli
from common.run.process import World

SKIPPED = 5  # first steps, which allocate and compile; torch.profiler warms up in the last of them
ROUNDS = 10  # of comparing clocks
# What the flight recorder's entries say of the group of a collective.
RECORDED = ("profiling_name", "input_sizes", "process_group", "collective_seq_id", "time_created_ns")


@dataclass(frozen=True)
class ProfileArgs:
    """Flags of profiles."""

    # every run
    profile: bounds.NonNegativeInt = 0  # steps to profile, after the first 5; tools.profile reads them. 0 for none


class Profile:
    """Profiles some steps of a run."""

    def __init__(self, args: Any, first_step: int, last_step: int, world: World, run: Path) -> None:
        """Choose the steps.

        Args:
            args: the recipe's flags.
            first_step: the last step that is already done.
            last_step: where the run ends.
            world: this process.
            run: the run's folder.

        Raises:
            UserError: the run is too short.
        """
        steps = args.profile
        self._args = args
        self._first = first_step + SKIPPED + 1
        self._last = first_step + SKIPPED + steps if steps else 0
        self._world = world
        self._run = run
        self._began: list[float] = []  # of each step, and the end of the last one
        self._clock_s = 0.0  # from this machine's clock to rank 0's
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
        if step == self._first:
            self._clock_s = clock_offset_s()
            self._synchronize()  # no kernel of one step counts for another
        if self._profiler:
            self._profiler.step()
        else:
            self._start()
        self._began.append(time.perf_counter())

    def end(self, step: int, is_last: bool, ideal: dict[str, float]) -> None:
        """A step has ended; write the trace if it was the last one to profile (all ranks).

        Args:
            step: the step.
            is_last: whether the run ends after it: a request to stop may come in the middle of a profile.
            ideal: as `log.Run.ideal` gives it.
        """
        if self._profiler and step == self._last:
            self._synchronize()
            self._began.append(time.perf_counter())
            with record_function(marks.ENDS):  # what follows is no part of the step
                pass
            self._write(ideal)
            _give_back()
        if is_last:
            self.close()

    def close(self) -> None:
        """End the profiler, if it runs."""
        ended = self._profiler
        self._profiler = None
        if ended:
            ended.stop()

    def _start(self) -> None:
        if self._world.device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it complains that there is no GPU
        active = self._last - self._first + 1
        schedule = torch.profiler.schedule(skip_first=SKIPPED - 1, wait=0, warmup=1, active=active, repeat=1)
        self._profiler = torch.profiler.profile(record_shapes=True, schedule=schedule)
        self._profiler.start()

    def _synchronize(self) -> None:
        torch.get_device_module(self._world.device).synchronize(self._world.device)

    def _write(self, ideal: dict[str, float]) -> None:
        """Write this rank's trace; rank 0 prints how long the steps took, and where the traces are (all ranks)."""
        took_s = [after - before for before, after in itertools.pairwise(self._began)]
        step_s = statistics.fmean(took_s[SKIPPED:])
        before_s = statistics.median(took_s[1 : SKIPPED - 1])
        folder = self._run / "profile" / f"step_{self._first:08d}"
        file = folder / f"rank_{self._world.rank:05d}.json.gz"
        name = f"rank {self._world.rank} on {self._world.host}"
        problem = ""
        try:
            facts = self._facts() | ideal | {"name": name, "step_s": step_s, "before_s": before_s}
            self._profiler.add_metadata_json(marks.FACTS, _json(facts))
            ended = self._profiler
            self.close()
            folder.mkdir(parents=True, exist_ok=True)
            ended.export_chrome_trace(str(file))
        except (OSError, ValueError, KeyError, RuntimeError) as error:  # such as a full disk: the training continues
            problem = f"{name} has written no profile: {error}"
            with contextlib.suppress(OSError):
                file.unlink()  # a part of it, or an older one
        self.close()
        problems = [one for one in ranks.gather(problem) if one]
        if problems:
            more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
            ranks.print0(f"warning: {problems[0]}{more}")
        if len(problems) < self._world.size:
            ranks.print0(
                f"profile  steps {self._first} to {self._last}: {step_s * 1e3:,.1f} ms a step, those before them "
                f"{before_s * 1e3:,.1f} ms; python -m tools.profile {shlex.quote(str(self._run))} shows where the time "
                f"goes\n         {folder} has the trace of each rank, for https://ui.perfetto.dev"
            )

    def _facts(self) -> dict[str, Any]:
        """What `tools.profile` needs and torch does not write."""
        entries = private_api.flight_recorder(self._world.device, only_active=False).get("entries", [])
        return {
            "rank": self._world.rank,
            "size": self._world.size,
            "steps": [self._first, self._last],
            "clock_s": self._clock_s,
            "recorded": [{key: entry[key] for key in RECORDED} for entry in entries],
            "flags": vars(self._args),
            "shorter": [*cli.savings(self._args)],
        }


def _json(value: Any) -> str:
    """As JSON without backslashes, which torch.profiler replaces by slashes."""
    return json.dumps(value, ensure_ascii=False, default=repr).replace(r"\\", "/").replace(r"\"", "'")


def _give_back() -> None:
    """Free what a profile has allocated in millions of small blocks, among which each later step takes 3 % longer."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # of glibc
        libc.malloc_trim(0)


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
