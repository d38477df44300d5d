"""All runs of one script, and questions that several judges ask of their logs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.judge.launch import Event, Run


@dataclass(frozen=True)
class Seen:
    """The runs of one script.

    Attributes:
        two: two ranks of one machine.
        one: one rank.
        apart: two ranks, each the first of its machine; None where no script asks for a numbered device.
        again: two ranks that start where `two` has stopped, in the same folder; None where nothing is loaded.
    """

    two: Run
    one: Run | None = None
    apart: Run | None = None
    again: Run | None = None


@dataclass(frozen=True)
class Epoch:
    """One pass over a loader: the event at its begin, what happened in it, and whether it trained."""

    begin: Event
    inside: list[Event]
    trains: bool


def epochs(events: list[Event]) -> list[Epoch]:
    """The passes over loaders, in order."""
    begins = [i for i, one in enumerate(events) if one["e"] == "epoch"]
    found = []
    for number, i in enumerate(begins):
        end = begins[number + 1] if number + 1 < len(begins) else len(events)
        inside = events[i + 1 : end]
        over = next(
            (k for k, one in enumerate(inside) if one["e"] == "epoch end" and one["at"] == events[i]["at"]), None
        )
        inside = inside if over is None else inside[:over]
        found.append(Epoch(events[i], inside, any(one["e"] == "backward" for one in inside)))
    return found


def paired(run: Run, trains: bool) -> Iterator[tuple[Epoch, Epoch]]:
    """Passes of the first two ranks, in order."""
    ours, theirs = ([one for one in epochs(events) if one.trains == trains] for events in run.ranks[:2])
    yield from zip(ours, theirs, strict=False)


def forwards(events: list[Event]) -> list[Event]:
    """Forward passes that train."""
    return [one for one in events if one["e"] == "forward" and one["train"] and one["grad"]]


def wraps(run: Run) -> set[str]:
    """What wraps models here."""
    return {one["kind"] for one in run.of("wrap")}


def is_split(run: Run) -> bool:
    """Whether ranks hold different parts of a model, so that their weights and samples say nothing about each other."""
    if "tensor parallel" in wraps(run) or any(one.get("pipelines") for one in run.of("start")):
        return True
    last = [run.of("step", rank)[-1:] for rank in range(len(run.ranks))]
    parts = "DDP" not in wraps(run) and len({one[0]["shapes"] for one in last if one}) > 1
    return parts or any(one.get("parts") for one in run.of("step"))


def is_distributed(run: Run) -> bool:
    """Whether the script makes a process group."""
    return bool(run.of("init"))


def steps(events: list[Event], optimizer: int = 0) -> list[tuple[Event, list[Event]]]:
    """Each step of an optimizer, with the events since the last one."""
    found: list[tuple[Event, list[Event]]] = []
    since: list[Event] = []
    for one in events:
        if one["e"] == "step" and one["id"] == optimizer:
            found.append((one, since))
            since = []
        else:
            since.append(one)
    return found


def optimizer_line(run: Run, number: int = 0) -> str:
    """Where an optimizer was made."""
    made: list[Any] = [one for one in run.of("optimizer") if one["id"] == number]
    return str(made[0]["at"]) if made else ""


def first_line(run: Run, kind: str) -> str:
    """Where an event of this kind first happened."""
    found = run.of(kind)
    return str(found[0]["at"]) if found else ""
