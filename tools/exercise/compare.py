"""What a rank has done, and the first difference from what it should have done."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from common import UserError

TOLERANCE = 1e-9  # relative, in float64


@dataclass
class Record:
    """What one rank did.

    Attributes:
        losses: of each step, as train_step returned it.
        norms: of the gradient, likewise.
        reads: samples that it read for each step.
        sends: backward passes of each step in which DDP sends.
        held: elements of parameters and of the optimizer's state that it keeps from step to step.
        most: elements of parameters that it had at once in a step, at most, where parameters are split.
        printed: lines.
        names: of the model's tensors in the checkpoint, where that is one file.
        crashed: whether it ended in the middle of a save, as it was asked to.
        error: how it failed, or "".
        hangs: whether it had to be ended.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    sends: list[int] = field(default_factory=list)
    held: int = 0
    most: int = 0
    printed: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    crashed: bool = False
    error: str = ""
    hangs: bool = False


def differs(
    found: Sequence[Record], wanted: Sequence[Record], timeout_s: float, *, rank_0_logs: bool = False, since: str = ""
) -> str:
    """The first difference between what all ranks have done and what they should have done, or "".

    Args:
        found: of each rank.
        wanted: of each rank of the twin.
        timeout_s: after which a rank was said to hang.
        rank_0_logs: whether the mean loss counts on rank 0 alone.
        since: where steps are counted from, such as " after it continued".

    Raises:
        UserError: this machine is so busy that the twin hangs.
    """
    if any(record.hangs for record in wanted):
        raise UserError(
            f"the twin itself made no step in {timeout_s:.0f} s: this machine is busy. Give it --timeout 300"
        )
    assert not any(record.error for record in wanted), wanted
    if end := fails(found, timeout_s, since):
        return end
    for step in range(max(len(record.losses) for record in [*found, *wanted])):
        for i, (mine, right) in enumerate(zip(found, wanted, strict=True)):
            if step >= min(len(mine.losses), len(right.losses)):
                return f"rank {i} makes {len(mine.losses)} steps, the twin {len(right.losses)}"
            for what, one, other in (
                ("loss", mine.losses[step], right.losses[step]),
                ("gradient norm", mine.norms[step], right.norms[step]),
            ):
                if what == "loss" and i and rank_0_logs:
                    continue
                if not math.isclose(one, other, rel_tol=TOLERANCE):
                    where = f"step {step + 1}{since}, rank {i}"
                    return f"{where}: the {what} is {one:.9g}, the twin's {other:.9g}{times(one, other)}"
    for i, (mine, right) in enumerate(zip(found, wanted, strict=True)):
        for what, this, that in zip(KEPT, kept(mine), kept(right), strict=True):
            if this != that:
                return f"the losses are right. Rank {i}, {what}: {this}; the twin: {that}"
    return ""


def fails(found: Sequence[Record], timeout_s: float, since: str) -> str:
    """How a rank has failed, or which ones wait for ever, or ""."""
    for i, record in enumerate(found):
        if record.error:
            return f"rank {i} fails in step {len(record.losses) + 1}{since}: {record.error}"
    hanging = [i for i, record in enumerate(found) if record.hangs]
    if hanging:
        steps = {len(record.losses) for record in found}
        where = ", ".join(f"rank {i} in step {len(found[i].losses) + 1}{since}" for i in hanging)
        others = [str(i) for i in range(len(found)) if i not in hanging]
        ended = f"; rank {', '.join(others)} had ended" if others else ""
        skipped = ". One of them has skipped a collective that others wait in" if others or len(steps) > 1 else ""
        return f"it hangs: nothing happened for {timeout_s:.0f} s. Waiting: {where}{ended}{skipped}"
    return ""


KEPT = (
    "samples read for each step",
    "backward passes that send, for each step",
    "numbers kept from step to step (weights and optimizer)",
    "numbers of weights that it has at once in a step, at most",
    "does it print",
    "names in the checkpoint",
)


def kept(record: Record) -> list[object]:
    """What a rank has done beside computing, in the order of KEPT."""
    names = f"{len(record.names)}, the first {record.names[0]}" if record.names else "none"
    return [record.reads, record.sends, record.held, record.most, "yes" if record.printed else "no", names]


def times(one: float, other: float) -> str:
    """How far they are apart, where it can be said."""
    return f" ({one / other:.10g} times)" if math.isfinite(one) and other else ""
