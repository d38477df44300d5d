"""What each strategy holds, sends and waits for, beside theory: `uv run python -m benchmarks.strategies`.

It writes docs/strategies.md and docs/schedules.png. Every GPT recipe runs as it stands, in real ranks, over its
layouts of 2 and 4 ranks: benchmarks/probes.py looks into them, benchmarks/schedules.py times the pipelines.
"""

import collections
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import probes, schedules
from common.workloads import gpt
from tests.harness import pages, runner
from tests.harness.runner import ROOT

LAYERS, WIDTH, LENGTH, BATCH, ROWS = 8, 256, 64, 16, 2  # ROWS: sequences of a pipeline's micro-batch
REPLICAS = ("accelerate_gpt", "ddp_gpt")
SMALL = 100  # elements; a call with less is only counted
HELD_HEAD = """\
| recipe | ranks N | parameters of each rank | most: parameters | gradients | optimizer | theory | MB | off, % |
|---|---|---|---|---|---|---|---|---|"""
SENT_HEAD = """\
| recipe | ranks N | kind | calls | MB | textbook | MB | left out, MB | unexplained | small calls |
|---|---|---|---|---|---|---|---|---|---|"""
SLEPT_HEAD = """\
| ranks p | schedule | formula | theory, % | measured, % | own, % | units |
|---|---|---|---|---|---|---|"""
COMPUTED_HEAD = f"""\
| schedule | theory, % | measured, % | a step, s | ratio to {schedules.DEFAULT} |
|---|---|---|---|---|"""
SHOWN = (  # the rows of "Sent" that everybody should see: how they begin
    "ddp_gpt | 4 | all-reduce",
    "fsdp_gpt | 4 | all-gather",
    "fsdp_gpt | 4 | reduce-scatter",
    "fsdp_gpt --dp-replicate 2 | 4 | all-reduce",
    "tensor_gpt --tp 4 | 4 | all-gather",
    "tensor_gpt --tp 4 | 4 | reduce-scatter",
    f"pipeline_gpt --pp 4 --schedule {schedules.DEFAULT} | 4 | send",
    f"pipeline_gpt --pp 2 --schedule {schedules.DEFAULT} | 4 | all-reduce",
)


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


def symbols() -> str:
    """What the letters of the formulas stand for, and their sizes here."""
    rows = {
        "N": ("ranks", "2 or 4"),
        "P": ("parameters of the whole model, in float32", f"{P / 1e6:.2f} MB"),
        "L": ("layers", f"{LAYERS}"),
        "C": ("width", f"{WIDTH}"),
        "T": ("tokens of a sequence", f"{LENGTH}"),
        "B": ("sequences of one step that a group of ranks works on together", f"{BATCH} / number of groups"),
        "B T C": ("residual stream of these sequences", f"{4 * BATCH * LENGTH * WIDTH / 1e6:.2f} MB for {BATCH}"),
        "S": ("ranks of a group that shares the model (HSDP)", "2"),
        "tp": ("ranks of a tensor-parallel group, `--tp`", "2 or 4"),
        "norms": ("parameters of all norms", f"{NORMS / 1e3:.0f} kB"),
    }
    lines = [f"| {symbol} | {meaning} | {size} |" for symbol, (meaning, size) in rows.items()]
    return "\n".join(["| symbol | meaning | here |", "|---|---|---|", *lines])


def sent_tables(rows: list[str]) -> str:
    """The rows of SHOWN; and folded, all of them."""
    shown = [row for start in SHOWN for row in rows if row.startswith(f"| {start} |")]
    every = "\n".join([SENT_HEAD, *rows])
    return "\n".join([SENT_HEAD, *shown]) + "\n\n" + pages.folded(f"All {len(rows)} rows", every)


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
        slept = schedules.asleep(schedules.NAMES, Path(folder), ROOT / "docs/schedules.png")
        computed = schedules.computing(schedules.NAMES, Path(folder))
    pages.write(
        ROOT / "docs/strategies.md",
        measured=pages.measured("uv run python -m benchmarks.strategies", "gloo, float32", began=started),
        symbols=symbols(),
        held="\n".join([HELD_HEAD, *held]),
        sent=sent_tables(sent),
        alone=f"A single pipeline makes {alone} calls in groups of one rank.",
        sleeping=f"1 unit is {schedules.UNIT_S:g} s, m is {schedules.MICRO_BATCHES}; the shortest of "
        f"{len(schedules.STEPS)} steps.\n\n{SLEPT_HEAD}\n{slept}",
        computing=f"2 ranks of one thread, {LAYERS} layers, width {WIDTH}, {schedules.MICRO_BATCHES} micro-batches of "
        f"2 sequences of {schedules.REAL[-1]} tokens, {schedules.ROUNDS} rounds.\n\n{COMPUTED_HEAD}\n{computed}",
    )


if __name__ == "__main__":
    main()
