"""A profile as a table whose parts add up to the step, and the sentence on the largest part that could be less."""

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import UserError, printable
from common.measure import verdict
from tools.profile import timeline, traces

LINES = {
    "data": "waits for data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "clipping and update",
    "exposed": "sends, nothing computed",
    "slower": "waits for another rank",
    "evaluation": "evaluation",
    "beside": "checkpoint, checks, log",
    "idle": "GPU idle, nothing sent",
}
LEAST_S = 1e-6  # what is less gets no line


@dataclass(frozen=True)
class Sent:
    """One kind of message, in a step of the first rank."""

    name: str
    calls: float
    megabytes: float
    mb_per_s: float  # from when all its ranks had begun


@dataclass(frozen=True)
class Found:
    """What a profile shows.

    Attributes:
        by_rank: for each trace, seconds a step by part of `timeline.PARTS`, which add up to "step"; and "hidden".
        mean: the same, of all traces.
        sent: each kind of message.
        slowest: the rank that the others waited for longest, as rank and host.
        slowest_s: the seconds a step that they waited for it, their mean, less what it waited for them.
    """

    by_rank: list[dict[str, float]]
    mean: dict[str, float]
    sent: list[Sent]
    slowest: str
    slowest_s: float


def show(path: Path, step: int, merge_ranks: int, as_json: bool) -> None:
    """Print a profile, and merge the traces of its ranks.

    Raises:
        UserError: there is none, or its files are damaged.
    """
    folder = traces.find(path, step)
    try:
        ranks, merged = traces.read(folder, merge_ranks)
        found = judge(ranks)
        everything = facts(ranks, found)
        shown = lines(ranks, found)
    except (ArithmeticError, AttributeError, LookupError, TypeError, statistics.StatisticsError) as error:
        raise UserError(f"{folder} has no traces that a run of this version has written ({error!r})") from error
    written = traces.write(folder, merged) if merged else ""
    if as_json:
        print(json.dumps(everything, indent=1))
    else:
        print("\n".join(printable(line) for line in (*shown, written, everything["verdict"]) if line))


def judge(ranks: Sequence[traces.Trace]) -> Found:
    """Add up the steps of the ranks."""
    size = ranks[0].facts["size"]
    messages: list[list[timeline.Message]] = [[] for _ in range(size)]
    for one in ranks:
        shift = one.shift_us
        on_one_clock = [replace(each, begin=each.begin + shift, end=each.end + shift) for each in one.window.messages]
        messages[one.facts["rank"]] = on_one_clock
    waits = timeline.waits(messages)
    by_rank = []
    caused: dict[int, float] = defaultdict(float)  # what the others waited for each rank, in all
    for one in ranks:
        slower: dict[int, list[timeline.Interval]] = defaultdict(list)
        for message, wait in zip(one.window.messages, waits[one.facts["rank"]], strict=True):
            if wait:
                slower[wait.rank].append((message.begin, message.begin + wait.took_us))
        parts = timeline.parts(one.window, [interval for intervals in slower.values() for interval in intervals])
        by_rank.append(parts | {"step": one.facts["step_s"]})
        for rank, took_s in timeline.waited_for(one.window, slower).items():
            caused[rank] += took_s
    # What the others waited for a rank, less what it waited itself: ranks also wait for each other in turns.
    others = max(len(ranks) - 1, 1)
    net = [
        (caused[one.facts["rank"]] / others - parts["slower"], one.facts["name"])
        for one, parts in zip(ranks, by_rank, strict=True)
    ]
    slowest_s, slowest = max(net)
    mean = {part: statistics.fmean(one[part] for one in by_rank) for part in by_rank[0]}
    sent = _sent(ranks[0].window, waits[ranks[0].facts["rank"]])
    return Found(by_rank, mean, sent, slowest, max(slowest_s, 0.0))


def _sent(window: timeline.Window, waits: Sequence[timeline.Wait | None]) -> list[Sent]:
    """Each kind of message of a rank."""
    kinds: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for one, wait in zip(window.messages, waits, strict=True):
        took_us = one.end - one.begin - (wait.took_us if wait else 0.0)
        kinds[one.name].append((one.num_bytes, took_us / 1e6))
    found = []
    for name, calls in kinds.items():
        megabytes = sum(num_bytes for num_bytes, _ in calls) / 1e6
        took_s = max(sum(took_s for _, took_s in calls), 1e-9)
        steps = window.num_steps
        found.append(Sent(name, len(calls) / steps, megabytes / steps, megabytes / took_s))
    return found


def lines(ranks: Sequence[traces.Trace], found: Found) -> list[str]:
    """The table for the terminal."""
    about = ranks[0].facts
    first, last = about["steps"]
    step_s = found.mean["step"]
    shown = [
        f"profile  steps {first} to {last}: {step_s * 1e3:,.1f} ms a step, where those before them took "
        f"{about['before_s'] * 1e3:,.1f} ms"
    ]
    for part, name in LINES.items():
        each = [one[part] for one in found.by_rank]
        if max(each) < LEAST_S:
            continue
        mean_s = found.mean[part]
        between = f"   {min(each) * 1e3:,.1f} to {max(each) * 1e3:,.1f} by rank" if len(each) > 1 else ""
        shown.append(f"         {name:<24}{mean_s * 1e3:>10,.1f} ms{mean_s / step_s:>6.0%}{between}")
    if found.mean["hidden"] > LEAST_S:
        shown.append(f"         {'sent while it computed':<24}{found.mean['hidden'] * 1e3:>10,.1f} ms")
    for one in found.sent:
        rate = f"{one.megabytes:,.3f} MB a step at {one.mb_per_s:,.0f} MB/s"
        shown.append(f"         {one.name:<24}{one.calls:>10,.1f} calls, {rate}")
    if about["flops"]:
        mfu = f", {about['ideal_s'] / step_s:.1%} MFU" if about["ideal_s"] else ""
        shown.append(f"         {about['flops'] / step_s / 1e12:,.3f} TFLOP/s a device{mfu}")
    if lost := missing(ranks):
        named = ", ".join(map(str, lost[:8])) + (f" and {len(lost) - 8} more" if lost[8:] else "")
        shown.append(f"note: there is no trace of rank {named}: this is of the other ranks")
    return shown


def missing(ranks: Sequence[traces.Trace]) -> list[int]:
    """Ranks of the run whose trace is not there."""
    return sorted({*range(ranks[0].facts["size"])} - {one.facts["rank"] for one in ranks})


def facts(ranks: Sequence[traces.Trace], found: Found) -> dict[str, Any]:
    """All of it, for --json."""
    about = ranks[0].facts
    return {
        "steps": about["steps"],
        "before_s": about["before_s"],
        "mean": _seconds(found.mean),
        "by_rank": [
            {"rank": one.facts["rank"], "name": one.facts["name"]} | _seconds(parts)
            for one, parts in zip(ranks, found.by_rank, strict=True)
        ],
        "missing": missing(ranks),
        "sent": [asdict(one) for one in found.sent],
        "slowest": found.slowest,
        "slowest_s": found.slowest_s,
        "tflops_per_s": about["flops"] / found.mean["step"] / 1e12,
        "mfu": about["ideal_s"] / found.mean["step"],
        "verdict": said(about, found),
    }


def _seconds(parts: Mapping[str, float]) -> dict[str, float]:
    return {f"{part}_s": value for part, value in parts.items()}


def said(about: Mapping[str, Any], found: Found) -> str:
    """The verdict on profiled steps; "" if no part is worth a sentence.

    Args:
        about: facts of a trace, with the recipe's flags.
        found: where the time of a step went.
    """
    step_s = found.mean["step"]
    share = {part: took / step_s for part, took in found.mean.items()}
    step = "the step"
    batch = "a larger --global-batch-size" if "global_batch_size" in about["flags"] else ""
    sends = _remedy(about, "exposed", batch, "a faster network")
    parts = [
        *verdict.data(about["flags"], share["data"], step),
        verdict.Part(share["exposed"], 0.2, f"of {step} only sends", sends),
        verdict.Part(share["idle"], 0.2, f"of {step} the GPU waits for Python", _remedy(about, "idle", "--compile")),
        verdict.checkpoints(share["beside"], step),
    ]
    if found.slowest_s > 0.1 * step_s:
        parts.append(verdict.slow(found.slowest_s / step_s, step, found.slowest))
    else:
        each = _remedy(about, "slower", "give the ranks equal work")
        parts.append(verdict.Part(share["slower"], 0.25, f"of {step} ranks wait for each other", each))
    return verdict.sentence(parts)


def _remedy(about: Mapping[str, Any], part: str, *others: str) -> str:
    """The recipe's flags that make a part shorter, then other means, in words."""
    return ", or ".join([*(flag for of, flag in about["shorter"] if of == part), *filter(None, others)])
