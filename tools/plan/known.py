"""What is known of the planner's error: comparisons that benchmarks/plan.py has made, in known.json."""

import functools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools.plan.hardware import KNOWN, Hardware

ENOUGH = 3  # rows, to speak of a mean
COVERED = 0.9  # of rows, by the range that is printed


@dataclass(frozen=True)
class Compared:
    """A prediction beside a measurement.

    Attributes:
        name: of the row.
        workload: gpt or resnet.
        family: of the machine, see hardware.toml; "cpu" for one that was calibrated.
        ranks: of the run.
        error: predicted / measured - 1, where the row had no part in the fit.
        mfu: measured, 0 where it is not known.
        parameters: of the model, in billions; 0 where it is not known.
    """

    name: str
    workload: str
    family: str
    ranks: int
    error: float
    mfu: float = 0.0
    parameters: float = 0.0


@functools.cache
def compared() -> tuple[Compared, ...]:
    """All comparisons."""
    read: dict[str, Any] = json.loads(KNOWN.read_text())
    return tuple(Compared(**one) for one in read["compared"])


@dataclass(frozen=True)
class Like:
    """The comparisons that are like an answer."""

    rows: Sequence[Compared]
    most_ranks: int

    @property
    def mean(self) -> float:
        """Of the errors' sizes."""
        return statistics.fmean(abs(one.error) for one in self.rows)

    @property
    def worst(self) -> float:
        """Of the errors' sizes."""
        return max(abs(one.error) for one in self.rows)


def like(workload: str, machine: Hardware) -> Like:
    """Comparisons of the same workload on the same family of machines; none if they are too few."""
    family = machine.family or "cpu"
    rows = [one for one in compared() if one.workload == workload and one.family == family]
    if len(rows) < ENOUGH:
        rows = []
    return Like(rows, max((one.ranks for one in rows), default=0))


def between(workload: str, machine: Hardware, ranks: int, step_s: float, launch_s: float = 0.0) -> tuple[float, float]:
    """The shortest and the longest step that a prediction stands for, in seconds.

    As far off as nine of ten rows like it were, by split conformal prediction (https://arxiv.org/abs/1604.04173) of the
    logarithm; as far as the worst of all rows where none are like it.
    """
    found = like(workload, machine)
    if is_tested(found, machine, ranks, step_s, launch_s):
        far = sorted(abs(math.log1p(one.error)) for one in found.rows)
        most = far[min(len(far), math.ceil(COVERED * (len(far) + 1))) - 1]
    else:
        most = max(abs(math.log1p(one.error)) for one in compared())
    return step_s * math.exp(-most), step_s * math.exp(most)


def is_tested(found: Like, machine: Hardware, ranks: int, step_s: float, launch_s: float) -> bool:
    """Whether rows are like a step on so many ranks; GPUs of no row wait for launches most of the time."""
    waits = machine.device == "cuda" and launch_s > step_s / 2
    return bool(found.rows) and ranks <= found.most_ranks and not waits


def sentence(workload: str, machine: Hardware, ranks: int, step_s: float, launch_s: float = 0.0) -> str:
    """What an answer says of its error, for a step that spends `launch_s` on launches: GPUs of no row wait for them."""
    found, every = like(workload, machine), compared()
    where = f"{workload} on {machine.family or 'a calibrated CPU'}"
    if is_tested(found, machine, ranks, step_s, launch_s):
        return f"rows like yours ({where}): mean {found.mean:.0%}, worst {found.worst:.0%} of {len(found.rows)}"
    worst = max(abs(one.error) for one in every)
    why = f"at most {found.most_ranks:,} ranks" if found.rows else "no such rows"
    if found.rows and ranks <= found.most_ranks:
        why = "no row whose GPUs wait for launches"
    return (
        f"outside of what was tested ({where}: {why}): a step between {span(step_s / (1 + worst))} and "
        f"{span(step_s * (1 + worst))}, if it errs like the worst of all {len(every)} rows, {worst:.0%}"
    )


def span(seconds: float) -> str:
    """Seconds, for people."""
    for limit, unit, size in ((1.0, "ms", 1e-3), (120.0, "s", 1.0), (7200.0, "min", 60.0), (172800.0, "h", 3600.0)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:,.3g} days"
