"""Mistakes within one process's step: what the optimizer holds, gradients, clips, losses, schedules."""

import math
from collections.abc import Iterator

from tools.judge.findings import Finding
from tools.judge.judge_model import micro_batches
from tools.judge.launch import Event, Run
from tools.judge.seen import Seen, optimizer_line, steps, wraps

FEWEST, SHARE = 3, 0.9  # steps in which a line waits, and of how many it must be
POINTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss")


def judge(seen: Seen) -> Iterator[Finding]:
    """All of them."""
    run = seen.two
    for number in {one["id"] for one in run.of("step")}:
        yield from holds(run, number)
        yield from gradients(run, number)
    yield from no_backward(run)
    yield from made_again(run)
    yield from clips(run)
    yield from losses(run)
    yield from waits(run)
    yield from schedules(run)


def holds(run: Run, number: int) -> Iterator[Finding]:
    """Parameters of the model that the optimizer lacks, and the other way round."""
    own = [one for one in run.of("step") if one["id"] == number]
    at, last = optimizer_line(run, number), own[-1]
    idle = all(one["num_none"] == one["num"] for one in own)  # else the script gives them gradients by hand
    if not last["known"] and last["num"] and idle and run.of("forward"):
        yield Finding(
            "optimizer of other parameters", at, f"none of its {last['num']} tensors is in the model that trains"
        )
        return
    if number == 0 and len(own) > 1 and all(one["num_unheld"] for one in own[1:]):
        text = f"{last['num_unheld']} with a gradient: {', '.join(last['unheld'])}"
        yield Finding("parameters without optimizer", at, text)
    never = set.intersection(*({*one["none"]} for one in own))
    if len(own) > 1 and never and last["num_none"] < last["num"]:
        yield Finding(
            "parameters without gradient", at, f"{last['num_none']} of {last['num']}: {', '.join(sorted(never))}"
        )


def gradients(run: Run, number: int) -> Iterator[Finding]:
    """Gradients that are too many, or gone."""
    own = steps(run.ranks[0], number)
    if run.of("optimizer")[number]["kind"] == "LBFGS" or len(own) < 2 or not any(step["known"] for step, _ in own):
        return
    stale = [step for step, _ in own if step["stale"]]
    if len(stale) > 1 and len(stale) >= 0.5 * (len(own) - 1):
        yield Finding(
            "zero_grad is missing", stale[0]["at"], f"in {len(stale)} of {len(own) - 1} steps after the first"
        )
    empty = [(step, since) for step, since in own if step["empty"]]
    if len(empty) > 1:
        step, since = empty[0]
        zeros = [one["at"] for one in since if one["e"] == "zero_grad" and one["backwards"]]
        yield Finding(
            "zero_grad before the step", zeros[-1] if zeros else step["at"], f"in {len(empty)} of {len(own)} steps"
        )


def no_backward(run: Run) -> Iterator[Finding]:
    """Steps from one line, of whichever optimizer, that no backward pass comes before."""
    closures = {one["id"] for one in run.of("optimizer") if one["kind"] == "LBFGS"}
    own = [one for one in run.of("step") if one["known"] and one["id"] not in closures]
    for at in {one["at"]: None for one in own}:
        here = [one for one in own if one["at"] == at]
        idle = [one for one in here if not one["backwards"]]
        if len(idle) > 1:
            yield Finding("no backward", at, f"before {len(idle)} of {len(here)} steps")


def waits(run: Run) -> Iterator[Finding]:
    """Lines that read a number of the GPU in each step."""
    between = [{one["at"] for one in since if one["e"] == "wait"} for _, since in steps(run.ranks[0])]
    for one in {one["at"]: one for one in run.of("wait")}.values() if run.of("device") else ():
        count = sum(one["at"] in lines for lines in between)
        if count >= max(FEWEST, SHARE * (len(between) - 1)):  # one that stands after the step is not before the first
            yield Finding("host wait in each step", one["at"], f"{one['what']} in {count} of {len(between)} steps")


def made_again(run: Run) -> Iterator[Finding]:
    """Optimizers for the parameters of another one that has made steps."""
    for one in run.of("optimizer"):
        if one["same"] and any(step["id"] in one["same"] and step["n"] < one["n"] for step in run.of("step")):
            yield Finding("optimizer made again", one["at"], f"after step {one['step']}, for the same parameters")
            return


def clips(run: Run) -> Iterator[Finding]:
    """Clips at the wrong time."""
    found = run.of("clip")
    if not found:
        return
    at = found[0]["at"]
    if any(one["scaled"] for one in found):
        yield Finding("clip before unscale", at, f"in {sum(one['scaled'] for one in found)} of {len(found)} clips")
    if all(not one["backwards"] for one in found):
        yield Finding("clip after the step", at, f"no backward between the step and any of {len(found)} clips")
    if "DDP" in wraps(run):
        return
    clipped = ""
    for one in run.ranks[0]:
        if one["e"] == "clip":
            clipped = one["at"]
        elif one["e"] == "step":
            clipped = ""
        elif clipped and one["e"] == "collective" and one["grads"]:
            yield Finding("clip of local gradients", clipped, "the gradients are sent after it")
            return


def losses(run: Run) -> Iterator[Finding]:
    """Losses of the wrong shape or weight."""
    for one in run.of("loss"):
        if one["name"] in POINTWISE and one["input"] != one["target"] and one["grad"]:
            yield Finding(
                "shapes that broadcast", one["at"], f"{one['name']} of {tuple(one['input'])} and {tuple(one['target'])}"
            )
            break
    several = micro_batches(run)
    whole = [
        since
        for _, since in several
        if all(not divided(since, i) for i, one in enumerate(since) if one["e"] == "backward")
    ]
    if len(whole) > 1:
        at = next(one["at"] for one in whole[0] if one["e"] == "backward")
        yield Finding(
            "accumulation not divided", at, f"{several[0][0]['backwards']} whole means are added in each step"
        )
    yield from means(run)


def divided(since: list[Event], i: int) -> bool:
    """Whether a backward pass begins at another value than the mean that was computed before it."""
    before = [one for one in since[:i] if one["e"] == "loss" and one["grad"] and one["reduction"] == "mean"]
    value = since[i]["value"]
    if not before or value is None or before[-1]["value"] is None:
        return True
    return not math.isclose(before[-1]["value"], value, rel_tol=2e-3)


def means(run: Run) -> Iterator[Finding]:
    """Means over unequal counts that are averaged: over micro-batches, and over ranks."""
    ranks = [steps(events) for events in run.ranks]
    several = micro_batches(run)
    for parts in zip(*ranks, strict=False):
        found = [[one for one in since if one["e"] == "loss" and one["grad"]] for _, since in parts]
        flat = [one for part in found for one in part if one["reduction"] == "mean" and one["name"] == "cross_entropy"]
        if not flat or len(flat) != sum(map(len, found)) or len({one["at"] for one in flat}) > 1:
            continue
        counts = [one["count"] for one in flat]
        if len(counts) < 2 or len({*counts}) == 1 or weighted(parts[0][1], len(several) > 0):
            continue
        text = f"{min(counts)} and {max(counts)} {'labels' if flat[0]['ignores'] else 'samples'} in one step"
        yield Finding("mean of means", flat[0]["at"], text, {"ratio": max(counts) / max(1, min(counts))})
        return


def weighted(since: list[Event], several: bool) -> bool:
    """Whether the script gives the means weights other than one over their number."""
    backwards = [i for i, one in enumerate(since) if one["e"] == "backward"]
    ratios = []
    for i in backwards:
        before = [one for one in since[:i] if one["e"] == "loss" and one["grad"]]
        if not before or not before[-1]["value"] or since[i]["value"] is None:
            return True
        ratios.append(since[i]["value"] / before[-1]["value"])
    if not ratios:
        return True
    inverse = 1 / ratios[0] if ratios[0] else 0.0
    return max(ratios) > 1.01 * min(ratios) or abs(inverse - round(inverse)) > 0.02


def schedules(run: Run) -> Iterator[Finding]:
    """Schedules that run at another speed than the training."""
    made, stepped = run.of("schedule"), run.of("schedule step")
    done = run.of("step")
    if made and not stepped and len(done) > 1 and run.ended[0] == "end":
        yield Finding("schedule never stepped", made[0]["at"], f"{made[0]['kind']}, in {len(done)} steps")
    stepped = [one for one in stepped if one["direct"]]  # a library may make several: Accelerate does so
    if not stepped or not done:
        return
    if stepped[0]["n"] < done[0]["n"]:
        own = [one for one in run.of("backward") if one["n"] < stepped[0]["n"]]
        text = "the first scheduler.step() comes before the first optimizer.step()"
        if not own or len(micro_batches(run)) == 0:
            yield Finding("schedule before the step", stepped[0]["at"], text)
    per_step = [
        sum(one["e"] == "schedule step" and one["direct"] and one["id"] == stepped[0]["id"] for one in since)
        for _, since in steps(run.ranks[0])[1:]
    ]
    if len(per_step) > 1 and sum(count > 1 for count in per_step) > 0.5 * len(per_step):
        yield Finding(
            "schedule per micro-batch", stepped[0]["at"], f"{max(per_step)} times in one step of the optimizer"
        )
