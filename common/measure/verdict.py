"""The largest part of the time that could be less, in one sentence, with the flag that changes it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

LEAST_S = 2.0  # of a run: a shorter part is not worth a sentence
# By part of `timeline.PARTS`, flags that make it shorter, with what they are now; `cli.parse` sets it.
shortens: dict[str, list[str]] = {}


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


def remedy(part: str, *others: str) -> str:
    """The recipe's flags that make a part shorter, then other means, in words."""
    return ", or ".join([*shortens.get(part, []), *(one for one in others if one)])


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


def of_profile(args: Any, parts: Mapping[str, float], slowest: str, slowest_s: float) -> str:
    """The verdict on profiled steps.

    Args:
        args: the recipe's flags.
        parts: seconds a step by part of `timeline.PARTS`, and "step".
        slowest: the rank that the others waited for longest.
        slowest_s: seconds a step that they waited for it, less what it waited for them.
    """
    share = {part: took / parts["step"] for part, took in parts.items()}
    step = "the step"
    batch = "a larger --global-batch-size" if "global_batch_size" in vars(args) else ""
    found = [
        *data(args, share["data"], step),
        Part(share["exposed"], 0.2, f"of {step} only sends", remedy("exposed", batch, "a faster network")),
        Part(share["idle"], 0.2, f"of {step} the GPU waits for Python", remedy("idle", "--compile")),
        _beside(share["beside"], step),
    ]
    if slowest_s > 0.1 * parts["step"]:
        found.append(slow(slowest_s / parts["step"], step, slowest))
    else:
        each = remedy("slower", "give the ranks equal work")
        found.append(Part(share["slower"], 0.25, f"of {step} ranks wait for each other", each))
    return sentence(found)


def of_run(
    args: Any, *, took_s: float, trained_s: float, data_share: float, saved_s: float, slow_share: float, slow_rank: str
) -> str:
    """The verdict on a run.

    Args:
        args: the recipe's flags.
        took_s: seconds from its first step on.
        trained_s: what of it was training.
        data_share: what of the training waited for data.
        saved_s: seconds of checkpoints.
        slow_share: what of the training the other ranks waited for one.
        slow_rank: that one.
    """
    training = "the training's time"
    found = [_beside(saved_s / took_s, "the run's time")] if saved_s > LEAST_S else []
    found += data(args, data_share, training) if data_share * trained_s > LEAST_S else []
    found += [slow(slow_share, training, slow_rank)] if slow_share * trained_s > LEAST_S else []
    return sentence(found)


def _beside(share: float, whole: str) -> Part:
    return Part(share, 0.1, f"of {whole} goes into checkpoints", "raise --save-every, or add --async-save")
