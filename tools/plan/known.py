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
        tokens: of a sequence; 0 where it has none, or it is not known.
    """

    name: str
    workload: str
    family: str
    ranks: int
    error: float
    mfu: float = 0.0
    parameters: float = 0.0
    tokens: int = 0


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
    most_tokens: int

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
    return Like(rows, *(max((getattr(one, name) for one in rows), default=0) for name in ("ranks", "tokens")))


@dataclass(frozen=True)
class Step:
    """A predicted step, as far as its error depends on it.

    Attributes:
        ranks: of the run.
        seconds: predicted.
        launch_s: of them, launches that nothing hides.
        tokens: of a sequence; 0 where there are none.
    """

    ranks: int
    seconds: float
    launch_s: float = 0.0
    tokens: int = 0


def untested(found: Like, machine: Hardware, step: Step) -> str:
    """Why no row is like a step; "" if some are."""
    if not found.rows:
        return "no such rows"
    if machine.device == "cuda" and step.launch_s > step.seconds / 2:
        return "no row whose GPUs wait for launches"
    if step.ranks > found.most_ranks:
        return f"at most {found.most_ranks:,} ranks"
    return f"at most {found.most_tokens:,} tokens" if 0 < found.most_tokens < step.tokens else ""


def farthest(rows: Sequence[Compared]) -> float:
    """Size of the logarithm of measured / predicted, in which nine of ten rows like these should be."""
    far = sorted(abs(math.log1p(one.error)) for one in rows)
    return far[min(len(far), math.ceil(COVERED * (len(far) + 1))) - 1]


def between(workload: str, machine: Hardware, step: Step) -> tuple[float, float]:
    """The shortest and the longest step that a prediction stands for, in seconds.

    As far off as nine of ten rows like it were, by split conformal prediction (https://arxiv.org/abs/1604.04173) of the
    logarithm; as far as the worst of all rows where none are like it.
    """
    found = like(workload, machine)
    if untested(found, machine, step):
        most = max(abs(math.log1p(one.error)) for one in compared())
    else:
        most = farthest(found.rows)
    return step.seconds * math.exp(-most), step.seconds * math.exp(most)


def sentence(workload: str, machine: Hardware, step: Step) -> str:
    """What an answer says of its error."""
    found, every = like(workload, machine), compared()
    where = f"{workload} on {machine.family or 'a calibrated CPU'}"
    low, high = between(workload, machine, step)
    if why := untested(found, machine, step):
        worst = max(abs(one.error) for one in every)
        return (
            f"outside of what was tested ({where}: {why}): a step between {span(low)} and {span(high)}, if it errs "
            f"like the worst of all {len(every)} rows, {worst:.0%}"
        )
    return (
        f"rows like yours ({where}): mean {found.mean:.0%}, worst {found.worst:.0%} of {len(found.rows)}; by nine of "
        f"ten of them, a step between {span(low)} and {span(high)}"
    )


def span(seconds: float) -> str:
    """Seconds, for people."""
    for limit, unit, size in ((1.0, "ms", 1e-3), (120.0, "s", 1.0), (7200.0, "min", 60.0), (172800.0, "h", 3600.0)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:,.3g} days"
