"""What is known of the planner's error: comparisons that benchmarks/plan.py has made, in known.json."""

import functools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools.plan.hardware import KNOWN, Hardware

ENOUGH = 3  # rows, to speak of a mean


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


def sentence(workload: str, machine: Hardware, ranks: int, step_s: float, launch_s: float = 0.0) -> str:
    """What an answer says of its error, for a step that spends `launch_s` on launches: GPUs of no row wait for them."""
    found, every = like(workload, machine), compared()
    where = f"{workload} on {machine.family or 'a calibrated CPU'}"
    waits = machine.device == "cuda" and launch_s > step_s / 2
    if found.rows and ranks <= found.most_ranks and not waits:
        return f"rows like yours ({where}): mean {found.mean:.0%}, worst {found.worst:.0%} of {len(found.rows)}"
    worst = max(abs(one.error) for one in every)
    why = f"at most {found.most_ranks:,} ranks" if found.rows else "no such rows"
    if found.rows and waits:
        why = "no row whose GPUs wait for launches"
    return (
        f"outside of what was tested ({where}: {why}): a step between {span(step_s / (1 + worst))} and "
        f"{span(step_s * (1 + worst))}, if it errs like the worst of all {len(every)} rows, {worst:.0%}"
    )


def span(seconds: float) -> str:
    """Seconds, for people."""
    for limit, unit, size in ((1.0, "ms", 1e-3), (120.0, "s", 1.0), (7200.0, "min", 60.0)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"
