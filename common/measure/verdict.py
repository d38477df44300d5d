"""The largest part of the time that could be less, in one sentence, with the flag that changes it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it needs torch, which tools.profile does not
    from common.run import log

LEAST_S = 2.0  # of a run: a shorter part is not worth a sentence


@dataclass(frozen=True)
class Part:
    """A part of the time.

    Attributes:
        share: of the whole.
        least: the share from which it is worth a sentence.
        what: after the share, such as "of the step waits for data".
        remedy: what makes it shorter.
    """

    share: float
    least: float
    what: str
    remedy: str


def sentence(parts: Iterable[Part]) -> str:
    """A line on the largest part that is worth one; "" if there is none."""
    worst = max((one for one in parts if one.share > one.least), key=lambda one: one.share, default=None)
    return f"verdict  {worst.share:.0%} {worst.what}: {worst.remedy}" if worst else ""


def data(flags: Mapping[str, Any], share: float, whole: str) -> list[Part]:
    """On waiting for data: nothing for a recipe that reads no samples."""
    if "workers" not in flags:
        return []
    how = f"raise --workers (now {flags['workers']}), or read from faster storage (STAGE_DIR)"
    return [Part(share, 0.1, f"of {whole} waits for data", how)]


def slow(share: float, whole: str, rank: str) -> Part:
    """On a rank that is slower than the others."""
    look = "look for other work on that machine, a throttled processor or GPU, or give that rank less to do"
    return Part(share, 0.1, f"of {whole} the others wait for {rank}", look)


def checkpoints(share: float, whole: str) -> Part:
    """On saves, comparisons of replicas and log lines."""
    return Part(share, 0.1, f"of {whole} goes into checkpoints", "raise --save-every, or add --async-save")


def of_run(flags: Mapping[str, Any], spent: "log.Spent", saved_s: float, slow_share: float, slow_rank: str) -> str:
    """The verdict on a run.

    Args:
        flags: the recipe's.
        spent: its seconds.
        saved_s: seconds of checkpoints.
        slow_share: what of the training the other ranks waited for one.
        slow_rank: that one.
    """
    training = "the training's time"
    found = [checkpoints(saved_s / spent.took_s, "the run's time")] if saved_s > LEAST_S else []
    found += data(flags, spent.data_share, training) if spent.data_share * spent.trained_s > LEAST_S else []
    found += [slow(slow_share, training, slow_rank)] if slow_share * spent.trained_s > LEAST_S else []
    return sentence(found)
