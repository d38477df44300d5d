"""What each strategy holds, sends and waits for, beside theory: `uv run python -m benchmarks.strategies`.

It writes docs/strategies.md and docs/schedules.png. Every GPT recipe runs as it stands, in real ranks, over its
layouts of 2 and 4 ranks: benchmarks/probes.py looks into them, benchmarks/schedules.py times the pipelines.
"""

import collections
import datetime
import itertools
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import probes, schedules
from common.workloads import gpt
from tests.harness import runner
from tests.harness.runner import ROOT, cpu_name

LAYERS, WIDTH, LENGTH, BATCH, ROWS = 8, 256, 64, 16, 2  # ROWS: sequences of a pipeline's micro-batch
REPLICAS = ("accelerate_gpt", "ddp_gpt")
SMALL = 100  # elements; a call with less is only counted


# --- Theory -----------------------------------------------------------------------------------------------


def model_bytes(*names: str) -> int:
    """Of the parameters of the whole model, in float32, whose name has one of these in it."""
    with torch.device("meta"):
        model = gpt.GPT(gpt.Shape(256, LAYERS, 4, WIDTH))
    return sum(4 * p.numel() for name, p in model.named_parameters() if any(part in name for part in names))


P, BLOCK, NORMS = model_bytes(""), model_bytes("blocks.0."), model_bytes("norm")
Term = tuple[str, float]  # a formula in words, and its bytes


def options(layout: runner.Layout) -> dict[str, str]:
    """Its flags."""
    return dict(zip(layout.flags[::2], layout.flags[1::2], strict=True))


def owners(layout: runner.Layout) -> list[int]:
    """Rank, in its pipeline, of each stage."""
    flags = options(layout)
    of_ranks = schedules.stages(flags["--schedule"], int(flags["--pp"]))
    return [rank for _, rank in sorted((stage, rank) for rank, stages in enumerate(of_ranks) for stage in stages)]


def stage_bytes(layout: runner.Layout) -> list[int]:
    """Parameters of each stage: its blocks, and what comes before the first and after the last."""
    num = len(owners(layout))
    sizes = [BLOCK * (LAYERS * (i + 1) // num - LAYERS * i // num) for i in range(num)]
    sizes[0] += model_bytes("embed")
    sizes[-1] += model_bytes("head") + 4 * WIDTH
    return sizes


def share(layout: runner.Layout, rank: int) -> Term:
    """What a rank should hold of the parameters; the optimizer's state is twice that."""
    flags = options(layout)
    if "--pp" in flags:
        of = zip(owners(layout), stage_bytes(layout), strict=True)
        return "its own layers", sum(size for owner, size in of if owner == rank % int(flags["--pp"]))
    if layout.recipe in REPLICAS:
        return "P", P
    if "--dp-replicate" in flags:
        return "P/S", P / (layout.size // int(flags["--dp-replicate"]))
    return "P/N", P / layout.size


def traffic(layout: runner.Layout, rank: int) -> dict[str, list[Term]]:
    """What a rank should send in a step, by kind: first the textbook's term, then what it leaves out."""
    flags, found = options(layout), dict[str, list[Term]]()
    rest = P - LAYERS * BLOCK  # what FSDP gathers first, and gives back last
    stream = 4 * BATCH * LENGTH * WIDTH / layout.dp_size  # of a group's part of the batch
    if layout.recipe in REPLICAS:
        found["all-reduce"] = [("P", P)]
    elif layout.recipe == "fsdp_gpt":
        found["all-gather"] = [("2 P", 2 * P), ("first and last layers gathered once", -rest)]
        found["reduce-scatter"] = [("P", P)]
        if "--dp-replicate" in flags:
            found["all-reduce"] = [share(layout, rank)]
    elif layout.recipe == "tensor_gpt":
        tp, fsdp = int(flags["--tp"]), int(flags["--tp"]) < layout.size
        ends: Term = ("around embedding and last norm", 2 * stream)
        found["all-gather"] = [
            ("4 L B T C + 2 P/tp" * fsdp or "4 L B T C", 4 * LAYERS * stream + 2 * P / tp * fsdp),
            ends,
        ]
        found["reduce-scatter"] = [
            ("4 L B T C + P/tp" * fsdp or "4 L B T C", 4 * LAYERS * stream + P / tp * fsdp),
            ends,
        ]
        sliced_loss = ("the loss over sliced logits", 3 * stream / WIDTH)
        found["all-reduce"] = [("none", 0.0), sliced_loss, ("gradients of norms", NORMS)]
        if fsdp:
            whole = NORMS * (1 - 1 / tp)
            once = (rest - 4 * WIDTH) / tp + 4 * WIDTH
            found["all-gather"] += [("norms are whole", 2 * whole), ("first and last layers gathered once", -once)]
            found["reduce-scatter"] += [("norms are whole", whole)]
    elif "--pp" in flags:
        me = rank % int(flags["--pp"])
        count = sum(me in border for border in itertools.pairwise(owners(layout)) if border[0] != border[1])
        found |= {kind: [(f"{count} B T C", count * stream)] for kind in ("send", "receive")}
        if layout.dp_size > 1:
            found["all-reduce"] = [share(layout, rank)]
    return found


# --- Tables -----------------------------------------------------------------------------------------------


def gpt_layouts() -> list[runner.Layout]:
    """Those of 2 and 4 ranks, of the GPT recipes, without the odd sizes of tests; hybrids with one schedule."""
    found = []
    for recipe in runner.RECIPES:
        for one in runner.layouts(recipe) if runner.workload(recipe) == "gpt" else []:
            again = one.dp_size > 1 and options(one).get("--schedule", schedules.DEFAULT) != schedules.DEFAULT
            if one.size in (2, 4) and not again and options(one).get("--pp") != "1":
                found.append(runner.Layout(recipe, one.size, one.strategy, one.dp_size))
    return found


def measure(layout: runner.Layout, folder: Path, recipe: str | Path = "") -> list[dict[str, Any]]:
    """What each rank holds and calls."""
    sizes = {"num-layers": LAYERS, "width": WIDTH, "seq-len": LENGTH, "global-batch-size": BATCH}
    if "--pp" in layout.flags:
        sizes["micro-batch-size"] = ROWS
    flags = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    return probes.in_ranks(probes.probe, recipe or layout.recipe, layout.size, [*flags, *layout.flags], folder)


def title(layout: runner.Layout) -> str:
    """As a row has it."""
    return " ".join([layout.recipe, *layout.flags]) + f" | {layout.size}"


def held_row(layout: runner.Layout, found: list[dict[str, Any]]) -> str:
    """The most of any rank, in MB; and how far the ranks are from theory."""
    expected = [share(layout, rank) for rank in range(layout.size)]
    most = {what: max(one[what] for one in found) / 1e6 for what in probes.HELD}
    off = [one[probes.HELD[0]] / size - 1 for one, (_, size) in zip(found, expected, strict=True)]
    each = " ".join(f"{one[probes.HELD[0]] / 1e6:.2f}" for one in found)
    theory = f"{expected[0][0]} | {max(size for _, size in expected) / 1e6:.2f} | {100 * max(off, key=abs):+.2f}"
    return f"| {title(layout)} | {each} | {' | '.join(f'{size:.2f}' for size in most.values())} | {theory} |"


def calls_to_others(one: dict[str, Any], kind: str) -> list[int]:
    """Sizes of the calls of a kind, without those in a group of one rank."""
    left = collections.Counter(map(tuple, one["calls"])) - collections.Counter(map(tuple, one["alone"]))
    return [size for (which, size), times in left.items() if which == kind for _ in range(times)]


def sent_rows(layout: runner.Layout, found: list[dict[str, Any]]) -> list[str]:
    """A row for each kind of call, of the rank that moves most with it."""
    rows = []
    for kind in dict.fromkeys(kind for kind, _ in probes.KINDS.values()):
        each = [calls_to_others(one, kind) for one in found]
        moved = [sum(4 * size for size in sizes if size >= SMALL) for sizes in each]
        rank = moved.index(max(moved))
        terms = traffic(layout, rank).get(kind, [("none", 0.0)])
        if not any(each) and not any(value for _, value in terms):
            continue
        large = sum(size >= SMALL for size in each[rank])
        left_out = "; ".join(f"{words}: {value / 1e6:+.2f}" for words, value in terms[1:])
        cells = [title(layout), kind, large, f"{moved[rank] / 1e6:.2f}", terms[0][0], f"{terms[0][1] / 1e6:.2f}"]
        cells += [left_out, f"{abs(moved[rank] - sum(value for _, value in terms)) / 1e6:.2f}", len(each[rank]) - large]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return rows


def main() -> None:
    """Measure, draw, write."""
    started = time.monotonic()
    held, sent, alone = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        for i, layout in enumerate(gpt_layouts()):
            found = measure(layout, Path(folder) / str(i))
            held.append(held_row(layout, found))
            sent += sent_rows(layout, found)
            alone = max(alone, *(len(one["alone"]) for one in found))
            print(held[-1], flush=True)
        names = schedules.NAMES
        slept = schedules.asleep(names, Path(folder), ROOT / "docs/schedules.png")
        computed = schedules.computing(names, Path(folder))
    stream = 4 * BATCH * LENGTH * WIDTH / 1e6
    minutes = (time.monotonic() - started) / 60
    unit, rounds, steps = schedules.UNIT_S, schedules.ROUNDS, len(schedules.STEPS)
    (ROOT / "docs/strategies.md").write_text(
        f"""# What each strategy holds, sends and waits for

`uv run python -m benchmarks.strategies`, {minutes:.0f} minutes, {datetime.date.today()}, {cpu_name()}, {os.cpu_count()}
cores, Python {platform.python_version()}, torch {torch.__version__}, gloo, float32. The recipes run as they stand, one
process a rank. In the first two tables: {LAYERS} layers L, width {WIDTH} C, {LENGTH} tokens T a sequence, {BATCH}
sequences a step, which N ranks deal out among them; P, all parameters, is {P / 1e6:.2f} MB. B is the part of these
sequences that a group of ranks works on together, and B T C their residual stream: of all, {stream:.2f} MB. MB are
10^6 bytes.

## Held

Added up over the tensors of each rank in step {probes.STEP}, between the backward pass and the optimizer's step; "most"
is the rank's that has most. AdamW keeps two numbers for each parameter. "Off" is how far the rank farthest from theory
is from it, in parameters. Not counted: what lives for a moment only, such as activations, and the whole blocks that
FSDP gathers to compute with.

- DDP keeps everything everywhere; FSDP keeps 1/N, with S ranks in a group (HSDP) 1/S.
- Tensor parallel keeps the {NORMS / 1e3:.0f} kB of norms whole in each group: that is what it is off by.
- A pipeline's ranks hold whole layers: the first has the embedding too, the last the output layer.

| recipe | ranks N | parameters of each rank | most: parameters | gradients | optimizer | theory | MB | off, % |
|---|---|---|---|---|---|---|---|---|
{chr(10).join(held)}

## Sent

Calls of torch.distributed in step {probes.STEP}, seen by torch's profiler, in the rank that moves most by each kind.
MB are those of the whole tensor: what is reduced, what a gather ends up with, what a scatter starts from. (A ring of N
ranks sends (N-1)/N of it for a gather or a scatter, twice that for an all-reduce.) "Left out" is what the textbook's
formula does not have; "unexplained" is what is left after both. Calls of less than {SMALL} elements are only counted,
in the last column: the loss to be logged, and the norm to clip by. Calls in a group of one rank send nothing and are
not counted: a lone pipeline makes {alone}.

- DDP sends each gradient once, in buckets: the first is small, so that sending can begin early.
- FSDP gathers the parameters forward and again backward, and scatters gradients: 1.5 times what DDP's all-reduce, which
  is a scatter and a gather, sends. With --dp-replicate the scattered gradients are then reduced between the groups.
- Tensor parallel sends activations, not parameters: that grows with the batch, and stands in the way of each layer.
  Its norms, which are not cut, have gradients for a part of each sequence, to be added up.
- A pipeline sends least: the stream at the borders of its stages, of which a rank may have several.

| recipe | ranks N | kind | calls | MB | textbook | MB | left out, MB | unexplained | small calls |
|---|---|---|---|---|---|---|---|---|---|
{chr(10).join(sent)}

## Waited for

{schedules.MICRO_BATCHES} microbatches m flow through p ranks. A forward pass is 1 unit of time in each rank, a backward
pass 2; zero-bubble splits the latter into halves, by the input and by the weights, of which only the first is urgent.
Interleaved and zero-bubble cut the model into 2p stages, so their passes are half as long; the naive schedule has one
microbatch as large as all of them. The bubble is 1 - time computed / (ranks x time from the first start to the last
end).

![Which rank computes what when, for each schedule](schedules.png)

Each pass is made to last its time (1 unit is {unit:g} s) by sleeping, on a model with next to nothing to compute, so
this shows the schedules and torch's overhead for them. The step shown is the shortest of {steps}: what else runs on the
machine only ever makes one longer. "Own" is the bubble between a rank's own first start and own last end.

| ranks p | schedule | formula | theory, % | measured, % | own, % | units |
|---|---|---|---|---|---|---|
{slept}

Formulas: the step of GPipe and 1F1B is as long as m + p - 1 microbatches, of which p - 1 are bubble
(Huang et al. 2019, https://arxiv.org/abs/1811.06965); two stages a rank halve that (Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473). Zero-bubble (Qi et al. 2023,
https://arxiv.org/abs/2401.10241) can do without one once a rank has begun, if all three kinds of pass take the same
time: what is left is that rank p begins p - 1 passes late, of 6m + p - 1.

With real computation (2 ranks of one thread, {LAYERS} layers, width {WIDTH}, {schedules.MICRO_BATCHES} microbatches of
2 sequences of {schedules.REAL[-1]} tokens), in {rounds} rounds, all schedules in each; the median step of a round, and
its ratio to {schedules.DEFAULT}'s, median and range over rounds. Passes are not equal here: the last stage has the loss
as well, and zero-bubble's first stage needs no gradient by its input. Ranks share the cores with whatever else runs.

| schedule | theory, % | measured, % | a step, s | ratio to {schedules.DEFAULT} |
|---|---|---|---|---|
{computed}
"""
    )


if __name__ == "__main__":
    main()
