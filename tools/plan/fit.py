"""Fit the achieved fractions of a machine to measured steps."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tools.plan import predict
from tools.plan.hardware import Hardware, Reach
from tools.plan.work import Work

PRIOR = 0.01  # weight of the table's fractions against one measurement, where the measurements do not decide
ROUNDS = 60
ROUND = 0.05  # errors below this count by their square, larger ones as they are: one odd source does not lead
LEAST = 1e-3  # of a fraction
LEAST_STEP = 1e-3  # of a logarithm
NAMES = tuple(field.name for field in dataclasses.fields(Reach))


@dataclass(frozen=True)
class Measured:
    """A step that was measured: its work, where, and its seconds."""

    works: tuple[Work, ...]
    machine: Hardware
    step_s: float


def with_reach(machine: Hardware, reach: Reach) -> Hardware:
    """The machine with other fractions."""
    return dataclasses.replace(machine, reach=reach)


def predicted_s(one: Measured, reach: Reach) -> float:
    """Seconds of its step, with these fractions."""
    machine = with_reach(one.machine, reach)
    return max(predict.of_rank(work, machine)["step_s"] for work in one.works)


def fit(measured: Sequence[Measured], start: Reach, prior: float = PRIOR) -> Reach:
    """The fractions with the least mean of |ln(predicted / measured)|, rounded at 0: coordinate descent in logarithms.

    Fractions stay at most 1, and `prior` draws those that no measurement decides to where they start.
    """

    def loss(values: Sequence[float]) -> float:
        reach = Reach(**dict(zip(NAMES, map(math.exp, values), strict=True)))
        errors = [math.hypot(math.log(predicted_s(one, reach) / one.step_s), ROUND) for one in measured]
        drawn = sum((value - first) ** 2 for value, first in zip(values, begin, strict=True))
        return sum(errors) / len(errors) + prior * drawn / len(NAMES)

    begin = [math.log(max(getattr(start, name), LEAST)) for name in NAMES]
    found = descend(loss, begin, [math.inf if name in ("launch", "latency") else 0.0 for name in NAMES])
    return Reach(**dict(zip(NAMES, map(math.exp, found), strict=True)))


def descend(loss: Callable[[Sequence[float]], float], begin: Sequence[float], most: Sequence[float]) -> list[float]:
    """The values, below `most`, to which steps along one axis at a time lead, each axis with a step of its own."""
    values, best = list(begin), loss(begin)
    steps = [0.3] * len(values)
    for _ in range(ROUNDS):
        for axis in range(len(values)):
            for sign in (1, -1):
                tried = list(values)
                tried[axis] = min(most[axis], tried[axis] + sign * steps[axis])
                if (found := loss(tried)) < best:
                    values, best = tried, found
                    steps[axis] *= 1.5
                    break
            else:
                steps[axis] /= 2
        if max(steps) < LEAST_STEP:
            break
    return values
