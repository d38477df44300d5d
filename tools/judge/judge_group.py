"""Mistakes of the group: ranks that do not come, devices, the log, and rates that grow with the ranks."""

import re
from collections.abc import Iterator

from tools.judge.findings import Finding
from tools.judge.launch import Event, Run
from tools.judge.seen import Seen, first_line, forwards, is_distributed, optimizer_line, steps, wraps

NUMBER = r"(?<![\w.])-?\d+\.\d{3,}(?:e[-+]?\d+)?"
GLOO = ("preamble", "Connection closed", "timed out", "Connection reset", "Broken pipe", "gloo")


def judge(seen: Seen) -> Iterator[Finding]:
    """All of them."""
    run = seen.two
    if not is_distributed(run):
        if run.of("step"):
            yield Finding(
                "no torch.distributed",
                first_line(run, "forward") or first_line(run, "end"),
                "no process group was made",
            )
        return
    yield from starts(run)
    if len(run.ranks) > 1:
        yield from waits(run)
        yield from logged(run)
    yield from devices(seen)
    yield from rates(seen)


def starts(run: Run) -> Iterator[Finding]:
    """How the group is made, and whether it is ended."""
    for rank in range(len(run.ranks)):
        one = (run.of("init", rank) or [{}])[0]
        if run.of("spawn", rank):  # the script has numbered its processes itself, and they are as many as here
            break
        if one.get("given", {}).get("rank", rank) != rank or one.get("given", {}).get(
            "world_size", one.get("size")
        ) != one.get("size"):
            yield Finding(
                "rank written down", one["at"], f"process {rank} of {one['size']} calls itself {one['given']}"
            )
            break
    asks = [one for one in run.of("device") if one["at"]]
    if asks and run.of("init")[0]["backend"] == "gloo":
        yield Finding("gloo between GPUs", run.of("init")[0]["at"], "the backend is gloo, and the script asks for GPUs")
    ended = run.of("end")
    own = run.of("init")[0].get("direct", True)  # a library, such as Lightning, ends what it has made at exit
    if ended and not ended[-1]["code"] and ended[-1]["group_open"] and own:
        yield Finding("group left open", run.of("init")[0]["at"], "the script ended without destroy_process_group")


def calls(run: Run, rank: int) -> list[tuple[str, str]]:
    """The collectives of a rank in order, with the implicit ones of DDP: name and line."""
    found = []
    for one in run.ranks[rank]:
        if one["e"] == "collective":
            found.append((one["name"], one["at"]))
        elif one["e"] == "forward" and one["ddp"]:
            found.append(("forward of DDP", one["at"]))
        elif one["e"] == "backward" and "DDP" in wraps(run):
            found.append(("backward of DDP", one["at"]))
    return found


def waits(run: Run) -> Iterator[Finding]:
    """Collectives that not all ranks call."""
    ours, theirs = calls(run, 0), calls(run, 1)
    broken = [one for one in run.errors if is_of_group(one)]
    aborted = [any(word in run.tails[rank] for word in GLOO) for rank in run.codes]  # gloo may end a process
    if not all(aborted) or not (run.hang or broken or aborted) or len(broken) < len(run.errors):
        return
    if not ours and not theirs and not run.of("step"):
        return  # it has refused to start, or what it waits for is no collective
    if run.hang and ours == theirs and not any(map(is_inside, run.ranks)):
        return  # a slow disk, or a sleep
    names = {at: name for name, at in [*ours, *theirs]}
    i = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    a, b = (ours[i] if i < len(ours) else None), (theirs[i] if i < len(theirs) else None)
    known = [{at for _, at in side} for side in (ours, theirs)]
    alone = [one for one, others in ((a, known[1]), (b, known[0])) if one and one[1] not in others]
    lines = (
        [f"rank {r} {place(one)}" for r, one in enumerate(run.hang)]
        if run.hang
        else [f"rank {r}: {one[0]} at {one[1]}" for r, one in enumerate((a, b)) if one]
    )
    at = alone[0][1] if alone else (a or b or ("", ""))[1] or next((one for one in run.hang if ":" in one), "")
    what = names.get(at, "")
    yield Finding("not all ranks come", at, "; ".join(([f"{what} is not called by all"] if what else []) + lines))


def is_inside(events: list[Event]) -> bool:
    """Whether a rank waits in a collective, or in a pass that may send."""
    open_until = {"collective": "collected", "forward": "forwarded", "backward": "backwarded"}
    last = next((one["e"] for one in reversed(events) if one["e"] in {*open_until, *open_until.values()}), "")
    return last in open_until


def is_of_group(end: Event) -> bool:
    """Whether a rank ended because another one did something else, or nothing."""
    return any(word in end["text"] for word in GLOO)


def place(line: str) -> str:
    """Where a rank is, in words."""
    return f"waits at {line}" if ":" in line else "has ended" if line == "ended" else "waits somewhere"


def logged(run: Run) -> Iterator[Finding]:
    """Numbers on the terminal that are one rank's own loss."""
    theirs_at = {one["at"] for one in run.of("print", 1)}
    sent = {one["value"] for one in run.of("collected") if one["value"] is not None}
    hits: dict[str, list[str]] = {}
    for one in run.of("print"):
        if one["at"] in theirs_at:
            continue
        for ours, theirs in zip(losses(run, 0, one), losses(run, 1, one), strict=False):
            for text in re.findall(NUMBER, one["text"]):
                if (
                    is_shown(text, ours)
                    and not is_shown(text, theirs)
                    and not is_shown(text, (ours + theirs) / 2)
                    and not any(is_shown(text, value) for value in sent)
                ):
                    hits.setdefault(one["at"], []).append(
                        f"{text} is rank 0's; rank 1 had {theirs:.4f}, the mean is {(ours + theirs) / 2:.4f}"
                    )
    for at, found in hits.items():
        if len(found) > 1:
            yield Finding("local loss logged", at, found[0])
            return


def losses(run: Run, rank: int, printed: Event) -> list[float]:
    """What a rank could print as its loss at this point: the last one, and means since earlier prints and epochs."""
    until = position(run, rank, printed)
    before = [one for one in run.ranks[rank] if one["n"] < until]
    values = [(one["n"], one["value"]) for one in before if one["e"] == "backward" and one["value"] is not None]
    if not values:
        return []
    ends = [one["n"] for one in before if one["e"] == "stepped" and one["n"] < values[-1][0]]
    begins = [one["n"] for one in before if one["e"] == "epoch" and one["n"] < values[-1][0]]
    found = [values[-1][1], mean([value for _, value in values])]
    found.append(sum(value for n, value in values if not ends or n > ends[-1]))  # the micro-batches of a step
    if begins:
        found.append(mean([value for n, value in values if n > begins[-1]]))
    raw = [one["value"] for one in before if one["e"] == "loss" and one["grad"] and one["value"] is not None]
    return [*found, raw[-1]] if raw else found


def position(run: Run, rank: int, printed: Event) -> int:
    """The number of the event of a rank that stands where rank 0 printed: after the same number of backward passes."""
    if rank == 0:
        return int(printed["n"])
    passes = sum(one["e"] == "backward" and one["n"] < printed["n"] for one in run.ranks[0])
    own = [one["n"] for one in run.of("backward", rank)]
    return int(own[passes - 1]) + 1 if 0 < passes <= len(own) else 0


def mean(values: list[float]) -> float:
    """Their mean."""
    return sum(values) / len(values) if values else float("nan")


def is_shown(text: str, value: float) -> bool:
    """Whether a number on the terminal is this value, as far as it was printed."""
    digits = len(text.partition("e")[0].partition(".")[2])
    return abs(float(text) - value) <= 0.51 * 10.0**-digits * (10.0 ** int(text.partition("e")[2] or 0))


def devices(seen: Seen) -> Iterator[Finding]:
    """Which GPU each rank asks for."""
    run = seen.two
    ours, theirs = run.of("device"), run.of("device", 1) if len(run.ranks) > 1 else []
    negative = [one for one in ours if one["index"] < 0]
    if negative:
        yield Finding("no such device", negative[0]["at"], f"GPU {negative[0]['index']}")
    elif any(one["index"] == 0 for one in theirs):
        one = next(one for one in theirs if one["index"] == 0)
        yield Finding("all on GPU 0", one["at"], "rank 1 of a machine with two GPUs uses GPU 0 here")
    if seen.apart is not None and len(seen.apart.ranks) > 1:
        wrong = [one for one in seen.apart.of("device", 1) if one["index"] >= one["gpus"]]
        if wrong:
            yield Finding(
                "rank as device",
                wrong[0]["at"],
                f"rank 1, alone on the second machine, asks for GPU {wrong[0]['index']}",
            )
    moved = {one["module"] for one in run.of("move") if one["wrapped"]}
    if moved:
        yield Finding(
            "wrapped before moved", first_line(run, "wrap"), f"the wrapped model moves at {first_line(run, 'move')}"
        )
    if ours and not run.of("asks"):
        yield Finding("GPU without a question", ours[0]["at"], "torch.cuda.is_available() is never called")


def rates(seen: Seen) -> Iterator[Finding]:
    """Learning rate and samples of a step, on two ranks beside one."""
    if seen.one is None or len(seen.two.ranks) < 2:
        return
    found = []
    for run in (seen.one, seen.two):
        first = steps(run.ranks[0])[:1]
        if not first or not first[0][0]["rates"]:
            return
        samples = sum(
            one["samples"] for rank in run.ranks for one in forwards(steps(rank)[0][1] if steps(rank) else [])
        )
        found.append((first[0][0]["rates"][0], samples))
    (rate, batch), (rate_2, batch_2) = found
    if not rate or not batch or not batch_2:
        return
    faster, larger = rate_2 / rate, batch_2 / batch
    text = f"on 1 and 2 processes, the rate is {rate:g} and {rate_2:g}, a step has {batch} and {batch_2} samples"
    at = optimizer_line(seen.two)
    if larger < 1.05 and faster > 1.3:
        yield Finding("rate scaled without batch", at, text)
    elif larger > 1.9 and faster > 1.5 * larger:
        yield Finding("rate scaled twice", at, text)
    elif larger > 1.9 and faster < 1.05 and seen.two.of("optimizer")[0]["kind"] == "SGD":
        yield Finding("rate not scaled", at, text)
