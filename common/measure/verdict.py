"""The largest part of the time that could be less, in one sentence, with the flag that changes it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from common import bounds
from common.measure import profile
from common.run import cli, log

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


def remedy(args: Any, part: str, *others: str) -> str:
    """The recipe's flags that make a part shorter, then other means, in words."""
    flags = [flag for flag, note in cli.noted(args, bounds.Shortens) if note.part == part]
    return ", or ".join([*flags, *(one for one in others if one)])


def data(args: Any, share: float, whole: str) -> list[Part]:
    """On waiting for data: nothing for a recipe that reads no samples."""
    if "workers" not in vars(args):
        return []
    how = f"raise --workers (now {args.workers}), or read from faster storage (STAGE_DIR)"
    return [Part(share, 0.1, f"of {whole} waits for data", how)]


def slow(share: float, whole: str, rank: str) -> Part:
    """On a rank that is slower than the others."""
    look = "look for other work on that machine, a throttled processor or GPU, or give that rank less to do"
    return Part(share, 0.1, f"of {whole} the others wait for {rank}", look)


def of_profile(args: Any, found: profile.Found) -> str:
    """The verdict on profiled steps.

    Args:
        args: the recipe's flags.
        found: where the time of a step went.
    """
    step_s = found.parts["step"]
    share = {part: took / step_s for part, took in found.parts.items()}
    step = "the step"
    batch = "a larger --global-batch-size" if "global_batch_size" in vars(args) else ""
    parts = [
        *data(args, share["data"], step),
        Part(share["exposed"], 0.2, f"of {step} only sends", remedy(args, "exposed", batch, "a faster network")),
        Part(share["idle"], 0.2, f"of {step} the GPU waits for Python", remedy(args, "idle", "--compile")),
        _beside(share["beside"], step),
    ]
    if found.slowest_s > 0.1 * step_s:
        parts.append(slow(found.slowest_s / step_s, step, found.slowest))
    else:
        each = remedy(args, "slower", "give the ranks equal work")
        parts.append(Part(share["slower"], 0.25, f"of {step} ranks wait for each other", each))
    return sentence(parts)


def of_run(args: Any, spent: log.Spent, saved_s: float, slow_share: float, slow_rank: str) -> str:
    """The verdict on a run.

    Args:
        args: the recipe's flags.
        spent: its seconds.
        saved_s: seconds of checkpoints.
        slow_share: what of the training the other ranks waited for one.
        slow_rank: that one.
    """
    training = "the training's time"
    found = [_beside(saved_s / spent.took_s, "the run's time")] if saved_s > LEAST_S else []
    found += data(args, spent.data_share, training) if spent.data_share * spent.trained_s > LEAST_S else []
    found += [slow(slow_share, training, slow_rank)] if slow_share * spent.trained_s > LEAST_S else []
    return sentence(found)


def _beside(share: float, whole: str) -> Part:
    return Part(share, 0.1, f"of {whole} goes into checkpoints", "raise --save-every, or add --async-save")
