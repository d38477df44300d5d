"""Mistakes by which the ranks train apart, or send what they need not."""

from collections.abc import Iterator

from tools.judge.findings import Finding
from tools.judge.launch import Event, Run
from tools.judge.seen import Seen, first_line, forwards, is_distributed, is_split, optimizer_line, steps, wraps


def judge(seen: Seen) -> Iterator[Finding]:
    """All of them."""
    run = seen.two
    if not is_distributed(run) or len(run.ranks) < 2 or is_split(run):
        return
    found = [*bypassed(run), *sends(run), *by_hand(run)]
    yield from found
    yield from statistics(run)
    yield from replayed(run)
    explained = {one.kind for one in found} & {"around the wrapper", "nothing is sent"}
    yield from apart(run, bool(explained))
    if "DataParallel" in wraps(run):
        yield Finding(
            "replicas as threads", first_line(run, "wrap"), f"{len(run.ranks)} processes, each with nn.DataParallel"
        )


def weights(run: Run) -> list[tuple[str, ...]]:
    """Fingerprints of the first optimizer's weights at each of its steps: one of each rank."""
    found = [[one["weights"] for one in run.of("step", rank) if one["id"] == 0] for rank in range(len(run.ranks))]
    return [*zip(*found, strict=False)]


def apart(run: Run, explained: bool) -> Iterator[Finding]:
    """Weights that differ, and nothing that would bring them together."""
    found = weights(run)
    if not found or any(one["split"] for one in run.of("step")):
        return
    differ = [len({*one}) > 1 for one in found]
    meet = True in differ and not all(differ[differ.index(True) :])  # as in training with steps of one's own
    at = optimizer_line(run)
    talks = any(one["grads"] or one["weights"] for one in run.of("collective"))
    count = len(run.of("step"))
    if not wraps(run) & {"DDP", "fully_shard"} and not talks:
        ours, theirs = (forwards(events) for events in run.ranks[:2])
        same = all(a["rows"] == b["rows"] for a, b in zip(ours, theirs, strict=False))
        if differ[-1] or same:
            text = f"no gradient was sent in {count} steps" + (
                "" if same else "; the weights of the ranks differ after them"
            )
            yield Finding("never wrapped", at, text)
    elif differ[0] and "DDP" not in wraps(run):
        yield Finding("different initial weights", at, "the weights of rank 0 and 1 differ before the first step")
    elif differ[-1] and not meet and not explained:
        yield Finding("replicas differ", first_line(run, "step"), f"the weights of rank 0 and 1 differ by step {count}")


def statistics(run: Run) -> Iterator[Finding]:
    """Running means and variances of each rank's own samples."""
    ours, theirs = ([one for one in forwards(events) if one["batch_norm"]] for events in run.ranks[:2])
    if not ours or not theirs or ours[-1]["statistics"] == theirs[-1]["statistics"]:
        return
    if any(one.get("statistics") for kind in ("wrap", "collective") for one in run.of(kind)):
        return
    sent = [one for one in run.of("collective") if one["grads"] or one["weights"]]
    at = first_line(run, "wrap") or (sent[-1]["at"] if sent else "")
    if at:
        text = f"running_mean and running_var of rank 0 and 1 differ by step {len(run.of('step'))}"
        yield Finding("buffers not synchronised", at, text)


def replayed(run: Run) -> Iterator[Finding]:
    """A forward pass that mixes the samples of a batch; that BatchNorm does so is known."""
    for one in run.of("replayed"):
        if one.get("op") and "batch_norm" not in one["op"]:
            text = (
                f"{one['op']} of two batches is not that of one batch of all samples: {one['size']:.0%} of the largest"
            )
            yield Finding("samples depend on each other", one["at"], text)


def bypassed(run: Run) -> Iterator[Finding]:
    """Forward passes that DDP does not see."""
    for one in run.of("forward"):
        if one["around"]:
            yield Finding("around the wrapper", one["at"], f"{one['kind']} is called, and DDP around it is not")
            return


def micro_batches(run: Run) -> list[tuple[Event, list[Event]]]:
    """Steps of several backward passes from one line."""
    return [
        (step, since)
        for step, since in steps(run.ranks[0])
        if step["backwards"] > 1 and len({one["at"] for one in since if one["e"] == "backward"}) == 1
    ]


def sends(run: Run) -> Iterator[Finding]:
    """When DDP sends."""
    if "DDP" not in wraps(run):
        return
    flags = [[one["sync"] for one in forwards(since) if one["ddp"]] for _, since in steps(run.ranks[0])]
    flags = [one for one in flags if one]
    if len(flags) > 1 and not any(any(one) for one in flags):
        yield Finding(
            "nothing is sent", first_line(run, "backward"), f"no_sync in all {sum(map(len, flags))} forward passes"
        )
        return
    several = micro_batches(run)
    always = [
        step
        for step, since in several
        if len(found := [f["sync"] for f in forwards(since) if f["ddp"]]) > 1 and all(found)
    ]
    if len(always) > 1:
        step, since = several[0]
        backward = next(one for one in since if one["e"] == "backward")
        yield Finding(
            "sent in each micro-batch",
            backward["at"],
            f"{step['backwards']} times in each step",
            {"times": step["backwards"]},
        )


def by_hand(run: Run) -> Iterator[Finding]:
    """Collectives over gradients."""
    sent = [one for one in run.of("collective") if one["grads"] and one["direct"]]
    if sent and "DDP" in wraps(run):
        yield Finding("gradients averaged twice", sent[0]["at"], "the script sends gradients that DDP has sent before")
        return
    summed = [one for one in run.of("step") if one["summed"]]
    if sent and len(summed) > 1:
        at = sent[0]["at"]
        yield Finding("sum of gradients", at, f"the gradient of the step is the sum of {len(run.ranks)} ranks' means")
