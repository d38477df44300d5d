"""Where a step's time goes, from the trace of torch.profiler: parts that do not overlap and add up to the step.

Everything here is arithmetic on intervals, (begin, end) in microseconds of one clock. A CPU computes in the operators
of the main thread, a GPU in its kernels. What is sent comes from the intervals that gloo and NCCL report. Where nothing
is computed while something is being sent, the sending is exposed; as long as a rank that takes part has not begun to
send, the others wait for that rank.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from common.marks import BESIDE, ENDS, EVALUATED, EVALUATES, READS

Interval = tuple[float, float]
Event = Mapping[str, Any]
# An instant belongs to the first of these parts that claims it, and is idle if none does.
PARTS = ("forward", "backward", "optimizer", "slower", "exposed", "evaluation", "beside", "data", "idle")
DATA = ("enumerate(DataLoader)", READS)  # torch's DataLoader has a mark of its own
SENDS = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel")
WAITS = ("c10d::", "_c10d_functional::", "c10d_functional::")  # operators that start what is sent, or wait for it
BACKWARD = "autograd::engine::evaluate_function"
CONTAINERS = re.compile(r"autograd::|Backward\d*$")  # hooks may send and wait between the operators that they call
UPDATE = "Optimizer.step#"
STEP = "ProfilerStep#"
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
HOST = ("data", "evaluation", "beside")  # what this process does beside the computing
LAUNCHES = ("cuda_runtime", "cuda_driver")
BYTES = {"double": 8, "long": 8, "float": 4, "int": 4, "bfloat16": 2, "half": 2, "bool": 1, "unsigned char": 1}


def inside(at: Sequence[float] | np.ndarray, intervals: Sequence[Interval]) -> np.ndarray:
    """Whether each instant is in one of the intervals: more of them have begun than have ended."""
    begins, ends = np.sort(np.array(intervals, dtype=float).reshape(-1, 2), axis=0).T
    return np.searchsorted(begins, at, side="right") > np.searchsorted(ends, at, side="right")


def without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What of the first is in none of the others, in order and without overlaps."""
    cuts = np.unique([*intervals, *others])
    kept = inside(cuts[:-1], intervals) & ~inside(cuts[:-1], others)
    return [*zip(cuts[:-1][kept].tolist(), cuts[1:][kept].tolist(), strict=True)]


@dataclass(frozen=True)
class Message:
    """A collective that a rank took part in, or what it sent to one rank or received from it.

    Attributes:
        name: such as "all_reduce", "send" or "recv".
        begin: when this rank had begun.
        end: when it was done here.
        num_bytes: of this rank's input.
        group: the ranks that take part; () if not known.
        number: which one of this group.
        peers: of "send" and "recv", which ranks the other one may be: the trace has its place in a group that it does
            not name.
    """

    name: str
    begin: float
    end: float
    num_bytes: int
    group: tuple[int, ...] = ()
    number: int = -1
    peers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Window:
    """Some whole steps of one rank.

    Attributes:
        frame: their begin and end.
        num_steps: how many.
        claims: when each part was under way; they may overlap, and an instant belongs to the first that claims it.
        messages: what was sent for the training, in order.
    """

    frame: Interval
    num_steps: int
    claims: dict[str, list[Interval]]
    messages: list[Message]


def window(trace: Mapping[str, Any], recorded: Iterable[Event] = ()) -> Window:
    """The profiled steps of one rank.

    Args:
        trace: as `torch.profiler.profile.export_chrome_trace` writes it.
        recorded: the flight recorder's entries, in order, which know the groups of collectives.

    Raises:
        ValueError: no step is in the trace.
    """
    events = [one for one in trace["traceEvents"] if one.get("ph") == "X" and "dur" in one]
    steps = _named(events, STEP, "user_annotation")
    if not steps:
        raise ValueError("the trace has no step")
    mine = [one for one in events if one["tid"] == steps[0]["tid"]]
    marks = [one for one in mine if one["cat"] == "user_annotation"]
    frames = [_interval(one) for one in _named(marks, STEP)]
    ends = [begin for begin, _ in map(_interval, _named(marks, ENDS))]
    frame = (frames[0][0], ends[0] if ends else frames[-1][1])
    phases = _phases(events, marks, frames)
    base_us = trace.get("baseTimeNanoseconds", 0) / 1e3
    recorded = [one for one in recorded if frame[0] <= one["time_created_ns"] / 1e3 - base_us < frame[1]]
    messages = _messages(events, trace.get("distributedInfo", {}), recorded)
    beside = inside([one.begin for one in messages], phases["evaluation"] + phases["beside"])
    messages = [one for one, is_beside in zip(messages, beside, strict=True) if not is_beside]
    claims: dict[str, list[Interval]] = {part: phases[part] for part in HOST}
    claims["exposed"] = [(one.begin, one.end) for one in messages]
    if any(one["cat"] in DEVICE for one in events):
        since, computed = _kernels(events)
    else:
        computed = _operators(_named(mine, "", "cpu_op"))
        busy = [*computed, *(interval for intervals in claims.values() for interval in intervals)]
        computed += without([frame], busy)  # a CPU without an operator runs Python
        since = [begin for begin, _ in computed]
    found = np.select([inside(since, intervals) for intervals in phases.values()], [*phases], "forward").tolist()
    for part, interval in zip(found, computed, strict=True):
        claims.setdefault(part, []).append(interval)
    return Window(frame, len(frames), claims, messages)


def parts(one: Window, slower: Sequence[Interval] = ()) -> dict[str, float]:
    """Seconds a step of each of PARTS, which add up to the step; and "hidden", what is sent while something computes.

    Args:
        one: the steps of this rank.
        slower: when this rank waited for another one to begin to send, as `waits` finds it.
    """
    claims = one.claims | {"slower": [*slower], "idle": [one.frame]}
    cuts = np.unique([interval for intervals in claims.values() for interval in intervals])
    took_s = np.diff(cuts) / 1e6 / one.num_steps
    within = {part: inside(cuts[:-1], claims.get(part, [])) for part in PARTS}
    sends = within["exposed"] & within["idle"]
    within["slower"] &= sends
    left = within["idle"]  # the steps, of which each part takes what it claims
    found = {}
    for part in PARTS:
        found[part] = float(took_s[left & within[part]].sum())
        left = left & ~within[part]
    return found | {"hidden": float(took_s[sends].sum()) - found["exposed"] - found["slower"]}


def waited_for(one: Window, slower: Mapping[int, Sequence[Interval]]) -> dict[int, float]:
    """Seconds a step that this rank waited for each other one, as `parts` counts "slower".

    Args:
        one: the steps of this rank.
        slower: by rank, when this one waited for it to begin to send.
    """
    computed = [interval for part in PARTS[: PARTS.index("slower")] for interval in one.claims.get(part, [])]
    sends = without([one.frame], [*without([one.frame], one.claims["exposed"]), *computed])
    edges = np.array(sends, dtype=float).ravel()
    if not len(edges):
        return dict.fromkeys(slower, 0.0)
    took_us = np.diff(edges)
    took_us[1::2] = 0.0  # from the end of one to the begin of the next
    until_us = np.concatenate([[0.0], np.cumsum(took_us)])
    found = {}
    for rank, intervals in slower.items():
        between = np.interp(np.array(without(intervals, [])).reshape(-1, 2), edges, until_us)
        found[rank] = float((between[:, 1] - between[:, 0]).sum()) / 1e6 / one.num_steps
    return found


@dataclass(frozen=True)
class Wait:
    """That a rank waited for another one to begin to send."""

    took_us: float
    rank: int  # the other one


def waits(messages: Sequence[Sequence[Message]]) -> list[list[Wait | None]]:
    """For each rank and each of its messages, how long it waited for the last rank to begin; None if it did not.

    Args:
        messages: of each rank, with one clock.
    """
    last: dict[Any, tuple[float, int]] = {}  # when the last rank began each collective, and which rank that is
    for rank, mine in enumerate(messages):
        for one in mine:
            key = (one.name, one.group, one.number)
            if key not in last or one.begin > last[key][0]:
                last[key] = (one.begin, rank)
    found = []
    for rank, mine in enumerate(messages):
        sent = _sent_to(rank, messages)
        began = [last[one.name, one.group, one.number] if one.group else sent.get(one, (0.0, rank)) for one in mine]
        pairs = zip(mine, began, strict=True)
        found.append([Wait(min(one.end, at) - one.begin, by) if at > one.begin else None for one, (at, by) in pairs])
    return found


def _sent_to(rank: int, messages: Sequence[Sequence[Message]]) -> dict[Message, tuple[float, int]]:
    """For what a rank received, when it was sent and by whom: of equal sizes, the n-th answers the n-th."""
    found: dict[Message, tuple[float, int]] = {}
    same: dict[Any, list[Message]] = defaultdict(list)
    for one in messages[rank]:
        if one.name == "recv":
            same[one.peers, one.num_bytes].append(one)
    for (peers, num_bytes), received in same.items():
        for sender in peers:
            sends = [one for one in messages[sender] if (one.name, one.num_bytes) == ("send", num_bytes)]
            sent = [one for one in sends if rank in one.peers]
            pairs = [*zip(received, sent, strict=False)]
            if len(sent) == len(received) and all(answer.begin < one.end for one, answer in pairs):
                found |= {one: (answer.begin, sender) for one, answer in pairs}
                break
    return found


def _messages(events: Sequence[Event], about: Mapping[str, Any], recorded: Sequence[Event]) -> list[Message]:
    """What a rank sent, in order; `about` says which rank it is, and its groups."""
    groups = {one["pg_name"]: tuple(one["ranks"]) for one in about.get("pg_config", [])}
    sends = _named(events, SENDS)
    entries = _entries(sends, recorded)
    numbers: Counter[str] = Counter()  # of NCCL's kernels, which name their group, in the same order on all ranks
    places = {}
    for name in ("send", "recv"):
        operators = _named(events, f"c10d::{name}")
        places[name] = iter([int(one["args"]["Concrete Inputs"][2]) for one in operators])
    found = []
    for one in sends:
        name = one["name"].partition(":")[2] or one["args"].get("Collective name", one["name"])
        message = Message(name, *_interval(one), _num_bytes(one["args"]))
        group_name = one["args"].get("Process Group Name")
        if group_name and name not in places:
            numbers[group_name] += 1
            message = replace(message, group=groups.get(group_name, ()), number=numbers[group_name])
        elif entry := entries.get(id(one)):
            group = groups.get(entry["process_group"][0], ())
            message = replace(message, group=group, number=entry["collective_seq_id"])
        place = next(places[name], None) if name in places else None
        if place is not None:
            peers = {ranks[place] for ranks in groups.values() if about["rank"] in ranks and place < len(ranks)}
            message = replace(message, peers=tuple(sorted(peers - {about["rank"]})))
        found.append(message)
    return found


def _entries(events: Sequence[Event], recorded: Sequence[Event]) -> dict[int, Event]:
    """The flight recorder's entry of each event, by its id: of equal names and sizes, the n-th is the n-th."""
    same: dict[Any, tuple[list[int], list[Event]]] = defaultdict(lambda: ([], []))
    for one in events:
        same[one["name"], str(one["args"].get("Input Dims"))][0].append(id(one))
    for entry in recorded:
        same[entry["profiling_name"], str(entry["input_sizes"])][1].append(entry)
    found: dict[int, Event] = {}
    for numbers, entries in same.values():
        found |= zip(numbers, entries, strict=True) if len(numbers) == len(entries) else {}
    return found


def _num_bytes(args: Mapping[str, Any]) -> int:
    if "In msg nelems" in args:  # NCCL's kernels
        return int(args["In msg nelems"]) * BYTES.get(str(args.get("dtype", "")).lower(), 4)
    sizes, kinds = args.get("Input Dims", []), args.get("Input type", [])
    return sum(math.prod(size) * BYTES.get(kind, 4) for size, kind in zip(sizes, kinds, strict=False))


def _phases(events: Sequence[Event], marks: Sequence[Event], frames: Sequence[Interval]) -> dict[str, list[Interval]]:
    """When the main thread was in each part; what it does in none of them is forward, in several of the first."""
    backward = [_interval(one) for one in _named(events, BACKWARD)]
    update = [_interval(one) for one in _named(marks, UPDATE)]
    for first, last in frames:  # clipping and checks, after a step's last backward pass, belong to the update
        if ends := [end for begin, end in backward if first <= begin < last]:
            update.append((max(ends), last))
    # An evaluation lasts from where one was due to where its result came.
    done = [end for _, end in map(_interval, _named(marks, EVALUATED))]
    due = [begin for begin, _ in map(_interval, _named(marks, EVALUATES))]
    return {
        "data": [_interval(one) for one in _named(marks, DATA)],
        "evaluation": [(begin, next((end for end in done if end > begin), begin)) for begin in due],
        "beside": [_interval(one) for one in _named(marks, BESIDE)],
        "backward": backward,
        "optimizer": update,
    }


def _operators(operators: Sequence[Event]) -> list[Interval]:
    """When a CPU computed: in operators that neither send nor wait, also not for what they call."""
    ordered = sorted(operators, key=lambda one: (one["ts"], -one["dur"]))
    found = []
    for number, one in enumerate(ordered):
        begin, end = _interval(one)
        calls = number + 1 < len(ordered) and ordered[number + 1]["ts"] < end
        if not one["name"].startswith(WAITS) and not (calls and CONTAINERS.search(one["name"])):
            found.append((begin, end))
    return without(found, [_interval(one) for one in _named(operators, WAITS)])


def _kernels(events: Sequence[Event]) -> tuple[list[float], list[Interval]]:
    """When this process launched what a GPU computed, and when it computed that. Not run on a GPU."""
    launched: dict[Any, float] = {
        one["args"]["correlation"]: one["ts"] for one in events if one["cat"] in LAUNCHES and "args" in one
    }
    kernels = [one for one in events if one["cat"] in DEVICE and not one["name"].startswith(SENDS)]
    since = [launched.get(one["args"].get("correlation")) or one["ts"] for one in kernels]
    return since, [_interval(one) for one in kernels]


def _named(events: Iterable[Event], begin: str | tuple[str, ...], category: str = "") -> list[Event]:
    """The events whose name begins so, in order."""
    found = [one for one in events if one["name"].startswith(begin) and category in ("", one["cat"])]
    return sorted(found, key=lambda one: one["ts"])


def _interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]
