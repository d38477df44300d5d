"""Mistakes in who reads which samples."""

from collections.abc import Iterator

from tools.judge.findings import Finding
from tools.judge.launch import Event, Run
from tools.judge.seen import Epoch, Seen, epochs, first_line, forwards, is_distributed, is_split, paired

FEW = 8  # samples of a rank that batch statistics are taken over


def judge(seen: Seen) -> Iterator[Finding]:
    """All of them."""
    run = seen.two
    if not is_distributed(run) or len(run.ranks) < 2:
        return
    yield from set_epoch(run)
    yield from evaluation(run)
    yield from uneven(run)
    if not is_split(run):
        yield from same_samples(run)
        yield from parts(run)
        yield from random_numbers(run)
        yield from statistics(run)
        yield from environments(run)


def set_epoch(run: Run) -> Iterator[Finding]:
    """Epochs of a DistributedSampler with one order."""
    seen: dict[int, Epoch] = {}
    for one in epochs(run.ranks[0]):
        begin = one.begin
        if not one.trains or not begin.get("distributed") or not begin["shuffle"]:
            continue
        last = seen.get(begin["loader"])
        if last and last.begin["order"] == begin["order"] and begin["samples"] > 2:
            epoch = begin["epoch"]
            yield Finding(
                "set_epoch is missing",
                begin["at"],
                f"two epochs read the {begin['own_samples']} samples in the same order: "
                f"both are epoch {epoch} for the sampler",
            )
            return
        seen[begin["loader"]] = one


def made(run: Run, epoch: Epoch) -> str:
    """Where the loader of a pass was made."""
    found = [one["at"] for one in run.of("loader") if one["id"] == epoch.begin["loader"]]
    return str(found[0] if found else epoch.begin["at"])


def same_samples(run: Run) -> Iterator[Finding]:
    """Ranks that read the same."""
    ours, theirs = (forwards(events) for events in run.ranks[:2])
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a["rows"]]
    alike = [a["rows"] == b["rows"] for a, b in pairs]
    for a, b in paired(run, trains=True):
        if a.begin.get("stream") or a.begin["order"] != b.begin["order"] or not a.begin["batches"]:
            continue
        whole = [one for one in forwards(a.inside) if one["samples"] == a.begin["sizes"][0]]
        if whole and a.begin["own_samples"] > 1:
            text = f"both ranks read the {a.begin['own_samples']} samples in the same order"
            yield Finding("same samples on all ranks", made(run, a), text)
            return
    if len(alike) > 1 and all(alike):
        first = next(paired(run, trains=True), None)
        at = made(run, first[0]) if first else ours[0]["at"]
        text = f"{len(alike)} of {len(alike)} batches are the same on both ranks"
        yield Finding("same samples on all ranks", at, text)


def parts(run: Run) -> Iterator[Finding]:
    """Samples that nobody reads, or several."""
    for a, b in paired(run, trains=True):
        ours, theirs = a.begin.get("indices"), b.begin.get("indices")
        if not ours or not theirs or ours == theirs or (a.begin["order"] == b.begin["order"] and ours == theirs):
            continue
        if a.begin["distributed"] and a.begin["subset"] != b.begin["subset"]:
            total = a.begin["own_samples"] + b.begin["own_samples"]
            read = len({*ours, *theirs})
            if read < 0.75 * total:
                yield Finding(
                    "samples lost",
                    made(run, a),
                    f"each rank has a part of its own, and the sampler splits it again: "
                    f"an epoch reads {read} of {total} samples",
                )
                return
        both = len({*ours} & {*theirs})
        repeats = len(ours) > len({*ours})  # a sampler with replacement
        if not repeats and both > max(len(run.ranks), 0.2 * len({*ours})) and not same(ours, theirs):
            text = f"{both} of {len({*ours, *theirs})} samples are read by both ranks in one epoch"
            yield Finding("samples twice", made(run, a), text)
            return


def same(ours: list[int], theirs: list[int]) -> bool:
    """Whether it is the mistake that all ranks read the same."""
    return ours == theirs


def evaluation(run: Run) -> Iterator[Finding]:
    """Padding that is counted."""
    for one in epochs(run.ranks[0]):
        begin = one.begin
        evaluates = any(e["e"] == "forward" and not (e["grad"] and e["train"]) for e in one.inside)
        if one.trains or not evaluates or not begin.get("distributed") or begin["drop_last"]:
            continue
        extra = -begin["own_samples"] % begin["replicas"]
        if extra:
            text = f"{extra} of {begin['own_samples']} samples count twice on {begin['replicas']} ranks"
            yield Finding("evaluation counts duplicates", made(run, one), text)
            return


def uneven(run: Run) -> Iterator[Finding]:
    """Ranks with different numbers of batches."""
    for a, b in paired(run, trains=True):
        if a.begin.get("batches") != b.begin.get("batches") and a.begin.get("batches") is not None:
            text = f"rank 0 has {a.begin['batches']} batches in an epoch, rank 1 has {b.begin['batches']}"
            yield Finding("uneven batches", made(run, a), text)
            return


def random_numbers(run: Run) -> Iterator[Finding]:
    """Ranks that draw the same numbers for different samples."""
    seeds = first_line(run, "seed")
    ours, theirs = (forwards(events) for events in run.ranks[:2])
    dropped = [(a, b) for a, b in zip(ours, theirs, strict=False) if a["dropout"] and a["rows"] != b["rows"]]
    if len(dropped) > 1 and all(a["random"] == b["random"] for a, b in dropped):
        yield Finding("same dropout", seeds or ours[0]["at"], f"in {len(dropped)} of {len(dropped)} forward passes")
    ours, theirs = run.of("augment", 0), run.of("augment", 1)
    pairs = list(zip(ours, theirs, strict=False))
    if len(pairs) > 1 and all({*a["random"]} & {*b["random"]} for a, b in pairs):
        yield Finding("same augmentation", seeds or ours[0]["at"], f"in {len(pairs)} of {len(pairs)} batches")


def statistics(run: Run) -> Iterator[Finding]:
    """BatchNorm over a few samples."""
    most = max((one["samples"] for one in forwards(run.ranks[0]) if one["ddp"] and one["batch_norm"]), default=0)
    if 0 < most <= FEW:
        yield Finding("batch statistics per rank", first_line(run, "wrap"), f"over {most} samples of one rank")


def environments(run: Run) -> Iterator[Finding]:
    """Rollouts that begin with the same observations on both ranks."""
    rollouts = [first_rollout(events) for events in run.ranks[:2]]
    ours, theirs = ({*one["rows"]} if one else set() for one in rollouts)
    if rollouts[0] and ours == theirs and len(ours) > 1 and not run.of("loader"):
        text = f"the first {len(rollouts[0]['rows'])} observations of rank 0 and 1 are the same"
        yield Finding("environments with one seed", rollouts[0]["at"], text)


def first_rollout(events: list[Event]) -> Event | None:
    """The first forward pass without a gradient, if the samples of the first training pass come from such passes."""
    first = next(iter(forwards(events)), None)
    before = [one for one in events if first and one["n"] < first["n"] and one["e"] == "forward" and not one["grad"]]
    seen = {row for one in before for row in one["rows"]}
    return before[0] if first and before and {*first["rows"]} <= seen else None
