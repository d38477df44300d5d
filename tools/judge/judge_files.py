"""Mistakes in what is saved and loaded, and in how a run continues."""

import os
from collections.abc import Iterator

from tools.judge.findings import Finding
from tools.judge.judge_model import weights
from tools.judge.launch import Event, Run
from tools.judge.seen import Seen, epochs, first_line, forwards, is_distributed


def judge(seen: Seen) -> Iterator[Finding]:
    """All of them."""
    run = seen.two
    saves = run.of("save")
    if len(run.ranks) > 1 and is_distributed(run):
        yield from by_all(run)
    if saves:
        yield from contents(run, saves)
        yield from early(run, saves)
    loads = [*run.of("load"), *(seen.again.of("load") if seen.again else [])]
    yield from pickles(loads)
    yield from places(run if run.of("load") else seen.again or run)
    if seen.again is not None and seen.again.of("load") and seen.again.of("step"):
        yield from continued(run, seen.again)


def by_all(run: Run) -> Iterator[Finding]:
    """One file, written by several ranks."""
    theirs = {one["path"] for one in run.of("save", 1)} - {""}
    both = [one for one in run.of("save") if one["path"] in theirs]
    if both:
        yield Finding(
            "saved by all ranks", both[0]["at"], f"ranks 0 and 1 both write {os.path.basename(both[0]['path'])}"
        )


def contents(run: Run, saves: list[Event]) -> Iterator[Finding]:
    """What is not in a checkpoint that a run is to continue from."""
    meant = [one for one in saves if one["counts"] or one["optimizer"]] or (saves if run.of("load") else [])
    steps = run.of("step")
    if meant and steps:
        at, keys = meant[0]["at"], ", ".join(meant[0]["keys"][:6])
        if steps[-1]["keeps"] and not any(one["optimizer"] for one in saves):
            yield Finding("checkpoint lacks the optimizer", at, f"it holds {keys}")
        if run.of("schedule") and not any(one["schedule"] for one in saves):
            yield Finding("checkpoint lacks the schedule", at, f"it holds {keys}")
        if run.of("scaler") and not any(one["scaler"] for one in saves):
            yield Finding("checkpoint lacks the scaler", at, f"it holds {keys}")
        drawn = [one for one in forwards(run.ranks[0]) if one["dropout"]] or run.of("augment")
        if drawn and not any(one["random"] for one in saves):
            yield Finding("checkpoint lacks the random numbers", at, f"drawn in {len(drawn)} batches; it holds {keys}")
    wrapped = [one for one in saves if one["prefix"]]
    if wrapped:
        yield Finding("names of the wrapper", wrapped[0]["at"], 'names begin with "module."')


def early(run: Run, saves: list[Event]) -> Iterator[Finding]:
    """Weights that ranks bring together after they were saved."""
    last = saves[-1]
    after = [one for one in run.ranks[0] if one["n"] > last["n"]]
    averaged = [one for one in after if one["e"] == "collective" and one["weights"]]
    differ = any(len({*one}) > 1 for one in weights(run))
    if len(run.ranks) > 1 and averaged and differ and not any(one["e"] == "step" for one in after):
        text = f"the ranks' weights differ, and {averaged[0]['name']} brings them together at {averaged[0]['at']}"
        yield Finding("saved before the last average", last["at"], text)


def pickles(loads: list[Event]) -> Iterator[Finding]:
    """Files that are run."""
    for one in loads:
        if one["weights_only"] is False:
            yield Finding("pickle is trusted", one["at"], "weights_only=False")
            return


def places(run: Run) -> Iterator[Finding]:
    """Where tensors come to lie."""
    if len(run.ranks) < 2 or not run.of("device"):
        return
    for one in run.of("load", 1):
        if one["map_location"] in ("None", "cuda:0"):
            yield Finding("loaded onto GPU 0", one["at"], f"map_location is {one['map_location']} on rank 1")
            return


def continued(run: Run, again: Run) -> Iterator[Finding]:
    """The first steps of a run that continues another one."""
    first, last = again.of("step")[0], run.of("step")[-1]
    at = first_line(again, "load")
    if first["keeps"] and not first["state"]:
        yield Finding("resume without optimizer state", at, "at its first step, the optimizer holds no state")
    read = [one.begin for one in epochs(run.ranks[0]) if one.trains]
    now = [one.begin for one in epochs(again.ranks[0]) if one.trains]
    if (
        read
        and now
        and read[-1].get("distributed")
        and read[-1]["shuffle"]
        and now[0]["epoch"] == read[-1]["epoch"]
        and run.ended[0] == "end"
        and now[0]["epoch"]
    ):
        yield Finding("resume repeats an epoch", at, f"epoch {now[0]['epoch']} was done, and is read again")
    after = run.of("schedule step")
    rates = first["rates"], last["rates"]
    began = run.of("step")[0]["rates"]
    if (
        after
        and rates[0] == began
        and rates[0] != rates[1]
        and min(began) > 0
        and abs(began[0] / rates[1][0] - 1) > 0.2
    ):
        yield Finding("resume at another rate", at, f"{rates[1][0]:g} before the stop, {rates[0][0]:g} after it")
