"""Where a step's time goes, from the trace of torch.profiler: parts that do not overlap and add up to the step.

Everything here is arithmetic on intervals, (begin, end) in microseconds of one clock. A CPU computes in the operators
of the main thread, a GPU in its kernels. What is sent comes from the intervals that gloo and NCCL report. Where nothing
is computed while something is being sent, the sending is exposed; as long as a rank that takes part has not begun to
send, the others wait for that rank.
"""

import bisect
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.marks import BESIDE, EVALUATED, EVALUATES, READS

Interval = tuple[float, float]
Event = Mapping[str, Any]
COMPUTE = ("forward", "backward", "optimizer")
PARTS = ("data", *COMPUTE, "exposed", "slower", "evaluation", "beside", "idle")
DATA = ("enumerate(DataLoader)", READS)  # torch's DataLoader has a mark of its own
SENDS = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel")
WAITS = ("c10d::", "_c10d_functional::", "c10d_functional::")  # operators that start what is sent, or wait for it
BACKWARD = "autograd::engine::evaluate_function"
CONTAINERS = re.compile(r"autograd::|Backward\d*$")  # hooks may send and wait between the operators that they call
UPDATE = "Optimizer.step#"
STEP = "ProfilerStep#"
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
BYTES = {"double": 8, "long": 8, "float": 4, "int": 4, "bfloat16": 2, "half": 2, "bool": 1, "unsigned char": 1}


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same instants, in intervals that do not touch, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > begin:
            found.append((begin, end))
    return found


def without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What of the first is in none of the others; both as `union` returns them."""
    found = []
    first = 0
    for begin, end in intervals:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        at = begin
        for other_begin, other_end in others[first:]:
            if other_begin >= end:
                break
            if other_begin > at:
                found.append((at, other_begin))
            at = max(at, other_end)
        if at < end:
            found.append((at, end))
    return found


def within(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What of the first is in one of the others; both as `union` returns them."""
    return without(intervals, without(intervals, others))


def seconds(intervals: Iterable[Interval]) -> float:
    """Length of intervals that do not overlap."""
    return sum(end - begin for begin, end in intervals) / 1e6


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


def window(trace: Mapping[str, Any], recorded: Sequence[Mapping[str, Any]] = ()) -> Window:
    """The profiled steps of one rank.

    Args:
        trace: as `torch.profiler.profile.export_chrome_trace` writes it.
        recorded: the flight recorder's entries of these steps, which know the groups of collectives.

    Raises:
        ValueError: no step is in the trace.
    """
    events = [one for one in trace["traceEvents"] if one.get("ph") == "X" and "dur" in one]
    steps = _named(events, STEP, "user_annotation")
    if not steps:
        raise ValueError("the trace has no step")
    mine = [one for one in events if one["tid"] == steps[0]["tid"]]
    marks = [one for one in mine if one["cat"] == "user_annotation"]
    frames = _frames(marks)
    frame = (frames[0][0], frames[-1][1])
    host = {
        "data": union(map(_interval, _named(marks, DATA))),
        "evaluation": _evaluations(marks),
        "beside": union(map(_interval, _named(marks, BESIDE))),
    }
    phases = _Phases(events, marks, host)
    on_gpu = any(one["cat"] in DEVICE for one in events)
    found = _kernels(events, phases) if on_gpu else _operators(_named(mine, "", "cpu_op"), phases)
    for part, intervals in host.items():
        found[part] += intervals
    beside = union([*host["evaluation"], *host["beside"]])
    messages = [one for one in _messages(events, trace, recorded) if not _inside(one.begin, beside)]
    found["exposed"] = [(one.begin, one.end) for one in messages]
    if not on_gpu:  # a CPU without an operator runs Python
        for gap in without([frame], union(interval for intervals in found.values() for interval in intervals)):
            found[phases.computes(gap[0])].append(gap)
    return Window(frame, len(frames), {part: union(intervals) for part, intervals in found.items()}, messages)


def parts(one: Window, slower: Sequence[Interval] = ()) -> dict[str, float]:
    """Seconds a step of each of PARTS, which add up to the step; and "hidden", what is sent while something computes.

    Args:
        one: the steps of this rank.
        slower: when this rank waited for another one to begin to send, as `waits` finds it.
    """
    frame = [one.frame]
    sends = within(one.claims["exposed"], frame)
    order = [*COMPUTE, "slower", "exposed", "evaluation", "beside", "data"]
    claims = one.claims | {"slower": within(union(slower), sends)}
    found = dict.fromkeys(PARTS, 0.0)
    claimed: list[Interval] = []
    for part in order:
        mine = without(within(claims.get(part, []), frame), claimed)
        found[part] = seconds(mine) / one.num_steps
        claimed = union([*claimed, *mine])
    found["idle"] = seconds(without(frame, claimed)) / one.num_steps
    found["hidden"] = seconds(sends) / one.num_steps - found["exposed"] - found["slower"]
    return found


@dataclass(frozen=True)
class Wait:
    """That a rank waited for another one to begin to send."""

    interval: Interval
    rank: int  # the other one


def waits(messages: Sequence[Sequence[Message]]) -> list[list[Wait | None]]:
    """For each rank and each of its messages, how long it waited for the last rank to begin; None if it did not.

    Args:
        messages: of each rank, with one clock.
    """
    found: list[dict[Message, Wait]] = [{} for _ in messages]
    together: dict[Any, dict[int, Message]] = defaultdict(dict)
    for rank, mine in enumerate(messages):
        for one in mine:
            if one.group:
                together[one.name, one.group, one.number][rank] = one
    for began in together.values():
        last = max(began, key=lambda rank: began[rank].begin)
        for rank, one in began.items():
            if one.begin < began[last].begin:
                found[rank][one] = Wait((one.begin, min(one.end, began[last].begin)), last)
    for rank, mine in enumerate(messages):
        for one, sent, sender in _received(rank, mine, messages):
            if one.begin < sent.begin:
                found[rank][one] = Wait((one.begin, min(one.end, sent.begin)), sender)
    return [[waited.get(one) for one in mine] for mine, waited in zip(messages, found, strict=True)]


def _received(
    rank: int, mine: Sequence[Message], messages: Sequence[Sequence[Message]]
) -> Iterator[tuple[Message, Message, int]]:
    """What a rank received, what was sent for it, and by whom: of equal sizes, the n-th answers the n-th."""
    for peers, num_bytes in {(one.peers, one.num_bytes) for one in mine if one.name == "recv"}:
        received = [one for one in mine if (one.name, one.peers, one.num_bytes) == ("recv", peers, num_bytes)]
        for sender in peers:
            sent = [
                one
                for one in messages[sender]
                if one.name == "send" and rank in one.peers and one.num_bytes == num_bytes
            ]
            if len(sent) == len(received) and all(b.begin < a.end for a, b in zip(received, sent, strict=True)):
                yield from ((a, b, sender) for a, b in zip(received, sent, strict=True))
                break


def _messages(
    events: Sequence[Event], trace: Mapping[str, Any], recorded: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """What a rank sent, in order."""
    about = trace.get("distributedInfo", {})
    groups = {one["pg_name"]: tuple(one["ranks"]) for one in about.get("pg_config", [])}
    found = []
    numbers: Counter[str] = (
        Counter()
    )  # of NCCL's kernels, which name their group, and are in the same order on all ranks
    for one, entry in _with_entries(sorted(_named(events, SENDS), key=_begin), recorded):
        name = one["name"].partition(":")[2] or one["args"].get("Collective name", one["name"])
        message = Message(name, *_interval(one), _num_bytes(one["args"]))
        group_name = one["args"].get("Process Group Name")
        if group_name and name not in ("send", "recv"):
            numbers[group_name] += 1
            message = replace(message, group=groups.get(group_name, ()), number=numbers[group_name])
        elif entry:
            group = groups.get(entry["process_group"][0], ())
            message = replace(message, group=group, number=entry["collective_seq_id"])
        found.append(message)
    for name in ("send", "recv"):
        operators = sorted(_named(events, f"c10d::{name}"), key=_begin)
        places = iter([int(one["args"]["Concrete Inputs"][2]) for one in operators])
        for index, message in enumerate(found):
            place = next(places, None) if message.name == name else None
            if place is not None:
                peers = {ranks[place] for ranks in groups.values() if about["rank"] in ranks and place < len(ranks)}
                found[index] = replace(message, peers=tuple(sorted(peers - {about["rank"]})))
    return sorted(found, key=lambda one: one.begin)


def _with_entries(
    events: Sequence[Event], recorded: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Event, Mapping[str, Any] | None]]:
    """Each event with its entry in the flight recorder: of equal names and sizes, the n-th is the n-th."""
    entries: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for entry in recorded:
        entries[entry["profiling_name"], str(entry["input_sizes"])].append(entry)
    same: dict[Any, list[Event]] = defaultdict(list)
    for one in events:
        same[one["name"], str(one["args"].get("Input Dims"))].append(one)
    for key, alike in same.items():
        known = entries[key] if len(entries[key]) == len(alike) else [None] * len(alike)
        yield from zip(alike, known, strict=True)


def _num_bytes(args: Mapping[str, Any]) -> int:
    if "In msg nelems" in args:  # NCCL's kernels
        return int(args["In msg nelems"]) * BYTES.get(str(args.get("dtype", "")).lower(), 4)
    sizes, kinds = args.get("Input Dims", []), args.get("Input type", [])
    return sum(math.prod(size) * BYTES.get(kind, 4) for size, kind in zip(sizes, kinds, strict=False))


class _Phases:
    """Which part of the step an instant of the main thread belongs to."""

    def __init__(self, events: Sequence[Event], marks: Sequence[Event], host: Mapping[str, list[Interval]]) -> None:
        """Look for the passes and updates of each step; `host` has what this process did beside them."""
        self._host = host
        self._frames = _frames(marks)
        self._backward = union(map(_interval, _named(events, BACKWARD)))
        self._update = union(map(_interval, _named(marks, UPDATE)))
        # When each step's last backward pass had ended: clipping and checks belong to the update.
        ends = [within(self._backward, [frame]) for frame in self._frames]
        self._after = [inside[-1][1] if inside else math.inf for inside in ends]

    def part(self, at: float) -> str:
        """The part at this instant."""
        for part, intervals in self._host.items():
            if _inside(at, intervals):
                return part
        return self.computes(at)

    def computes(self, at: float) -> str:
        """The same, but what this process did beside."""
        if _inside(at, self._backward):
            return "backward"
        step = max(bisect.bisect_right(self._frames, (at, math.inf)) - 1, 0)
        return "optimizer" if at >= self._after[step] or _inside(at, self._update) else "forward"


def _operators(operators: Sequence[Event], phases: _Phases) -> defaultdict[str, list[Interval]]:
    """When a CPU computed, by part: in operators that neither send nor wait, also not for what they call."""
    ordered = sorted(operators, key=lambda one: (one["ts"], -one["dur"]))
    computing: defaultdict[str, list[Interval]] = defaultdict(list)
    waiting = union(map(_interval, _named(operators, WAITS)))
    for number, one in enumerate(ordered):
        begin, end = _interval(one)
        calls = number + 1 < len(ordered) and ordered[number + 1]["ts"] < end
        if not one["name"].startswith(WAITS) and not (calls and CONTAINERS.search(one["name"])):
            computing[phases.part(begin)] += without([(begin, end)], waiting)
    return computing


def _kernels(events: Sequence[Event], phases: _Phases) -> defaultdict[str, list[Interval]]:
    """When a GPU computed, by the part of the step in which this process launched it. Not run on a GPU."""
    launched: dict[Any, float] = {
        one["args"]["correlation"]: one["ts"] for one in events if one["cat"] in LAUNCHES and "args" in one
    }
    computing: defaultdict[str, list[Interval]] = defaultdict(list)
    for one in events:
        if one["cat"] in DEVICE and not one["name"].startswith(SENDS):
            at = launched.get(one["args"].get("correlation")) or one["ts"]
            computing[phases.part(at)].append(_interval(one))
    return computing


def _frames(marks: Iterable[Event]) -> list[Interval]:
    return sorted(map(_interval, _named(marks, STEP)))


def _evaluations(marks: Sequence[Event]) -> list[Interval]:
    """From where one was due to where its result came."""
    due = sorted(one["ts"] for one in _named(marks, EVALUATES))
    done = sorted(one["ts"] + one["dur"] for one in _named(marks, EVALUATED))
    ends = [next((end for end in done if end > begin), None) for begin in due]
    return union((begin, end) for begin, end in zip(due, ends, strict=True) if end is not None)


def _begin(event: Event) -> float:
    return event["ts"]


def _named(events: Iterable[Event], begin: str | tuple[str, ...], category: str = "") -> list[Event]:
    return [one for one in events if one["name"].startswith(begin) and category in ("", one["cat"])]


def _interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _inside(at: float, intervals: Sequence[Interval]) -> bool:
    place = bisect.bisect_right(intervals, (at, math.inf)) - 1
    return place >= 0 and at < intervals[place][1]
