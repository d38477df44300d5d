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
NEAR = 0.93  # of the rows near a question: so that of each source that is left out, COVERED lie in it
# How far two questions must be apart to be no longer near: in powers of two of GPUs, of tokens of a sequence, of tokens
# of a GPU in a step, of tensor-parallel ranks and of stages; in years between their programs, in the share of a step
# that waits for launches; families.
SCALES = {"ranks": 3.0, "tokens": 1.5, "local_tokens": 3.0, "tp": 2.0, "pp": 2.0}
PLAIN_SCALES = {"year": 4.0, "launch": 0.15}
OTHER_FAMILY = 1.0
TODAY = 2025  # of a program like the recipes


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
        local_tokens: of a GPU in a step; 0 likewise.
        year: of the program.
        launch: share of the predicted step that waits for launches.
        tp: ranks that split a matrix.
        pp: stages of a pipeline.
    """

    name: str
    workload: str
    family: str
    ranks: int
    error: float
    mfu: float = 0.0
    parameters: float = 0.0
    tokens: int = 0
    local_tokens: float = 0.0
    year: int = TODAY
    launch: float = 0.0
    tp: int = 1
    pp: int = 1


@functools.cache
def compared() -> tuple[Compared, ...]:
    """All comparisons."""
    read: dict[str, Any] = json.loads(KNOWN.read_text())
    return tuple(Compared(**one) for one in read["compared"])


@dataclass(frozen=True)
class Like:
    """The comparisons that are like an answer."""

    rows: Sequence[Compared]
    others: Sequence[Compared]  # of other GPUs
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
    every = [one for one in compared() if one.workload == workload]
    rows = [one for one in every if one.family == family]
    others = [one for one in every if one.family != family and "cpu" not in (one.family, family)]
    if len(rows) < ENOUGH:
        rows = []
    return Like(rows, others, *(max((getattr(one, name) for one in rows), default=0) for name in ("ranks", "tokens")))


@dataclass(frozen=True)
class Step:
    """A predicted step, as far as its error depends on it.

    Attributes:
        ranks: of the run.
        seconds: predicted.
        launch_s: of them, launches that nothing hides.
        tokens: of a sequence; 0 where there are none.
        local_tokens: of a GPU in a step; 0 likewise.
        year: of the program.
        tp: ranks that split a matrix.
        pp: stages of a pipeline.
    """

    ranks: int
    seconds: float
    launch_s: float = 0.0
    tokens: int = 0
    local_tokens: float = 0.0
    year: int = TODAY
    tp: int = 1
    pp: int = 1

    @property
    def launch(self) -> float:
        """Share of the step that waits for launches."""
        return self.launch_s / self.seconds


def untested(found: Like, machine: Hardware, step: Step) -> str:
    """Why no row is like a step; "" if some are."""
    if not found.rows:
        return "no such rows"
    if machine.device == "cuda" and step.launch_s > step.seconds / 2:
        return "no row whose GPUs wait for launches"
    if step.ranks > found.most_ranks:
        return f"at most {found.most_ranks:,} ranks"
    if 0 < found.most_tokens < step.tokens:
        return f"at most {found.most_tokens:,} tokens"
    return "" if farthest(found, step) < math.inf else "too few rows near it"


def weight(row: Compared, step: Step) -> float:
    """How near a row is to a question, from 1: what either does not have counts as the same."""
    apart = [(getattr(row, name) - getattr(step, name)) / scale for name, scale in PLAIN_SCALES.items()]
    for name, scale in SCALES.items():
        mine, other = getattr(row, name), getattr(step, name)
        apart.append(math.log2(mine / other) / scale if mine and other else 0.0)
    return math.exp(-sum(one * one for one in apart) / 2)


def farthest(found: Like, step: Step) -> float:
    """Size of the logarithm of measured / predicted, in which nine of ten rows near this question should be.

    Split conformal prediction with weights by nearness (https://arxiv.org/abs/1904.06019, equation 3): the question
    itself has the weight 1, and counts as infinitely far, so that it is infinite where too few rows are near.
    """
    far = [(abs(math.log1p(one.error)), weight(one, step)) for one in found.rows]
    of_others = math.exp(-(OTHER_FAMILY**2) / 2)
    far += [(abs(math.log1p(one.error)), of_others * weight(one, step)) for one in found.others]
    needed = NEAR * (1 + sum(one for _, one in far))
    for size, one in sorted(far):
        needed -= one
        if needed <= 0:
            return size
    return math.inf


def _answer(row: Compared, others: Sequence[Compared]) -> float:
    """What `farthest` says of a row as somebody would ask for it, who knows the others only."""
    found = Like(
        [one for one in others if one.family == row.family], [one for one in others if one.family != row.family], 0, 0
    )
    step = Step(row.ranks, 1.0, row.launch, row.tokens, row.local_tokens, row.year, row.tp, row.pp)
    return farthest(found, step)


def is_outside(row: Compared, others: Sequence[Compared]) -> bool:
    """Whether an answer about a row says that it is outside of what was tested, by these others."""
    return _answer(row, others) == math.inf


def within(row: Compared, others: Sequence[Compared]) -> bool:
    """Whether a row lies in the range that these others give."""
    far, worst = _answer(row, others), max(abs(math.log1p(one.error)) for one in others)
    return abs(math.log1p(row.error)) <= (far if far < math.inf else worst)


def between(workload: str, machine: Hardware, step: Step) -> tuple[float, float]:
    """The shortest and the longest step that a prediction stands for, in seconds.

    As far off as nine of ten rows near it were; as far as the worst of all rows where none are like it.
    """
    found = like(workload, machine)
    if untested(found, machine, step):
        most = max(abs(math.log1p(one.error)) for one in compared())
    else:
        most = farthest(found, step)
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
        f"ten of those near it, a step between {span(low)} and {span(high)}"
    )


def span(seconds: float) -> str:
    """Seconds, for people."""
    for limit, unit, size in ((1.0, "ms", 1e-3), (120.0, "s", 1.0), (7200.0, "min", 60.0), (172800.0, "h", 3600.0)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:,.3g} days"
