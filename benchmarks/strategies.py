"""What each strategy holds, sends and waits for, beside theory: `uv run python -m benchmarks.strategies`.

It writes docs/measured/strategies.md, its plot and its rows. Every GPT recipe runs as it stands, in real ranks, over
its layouts of 2 and 4 ranks: tests/harness/probes.py looks into them, benchmarks/schedules.py times the pipelines. With
names of recipes (`... -m benchmarks.strategies moe_gpt`), it replaces what these hold and send, and nothing else.
"""

import argparse
import collections
import csv
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import schedules
from tests.harness import pages, probes, runner
from tests.harness.runner import ROOT
from tests.harness.theory import (
    BATCH,
    DEFAULT,
    EXPERTS,
    LAYERS,
    LENGTH,
    NAMES,
    NORMS,
    TOP_K,
    WIDTH,
    M,
    P,
    X,
    gpt_layouts,
    sent_file,
    sent_table,
    share,
    title,
    traffic,
)

ROWS = 2  # sequences of a pipeline's micro-batch
SMALL = 100  # elements; a call with less is only counted
HELD_HEAD = """\
| recipe | ranks N | parameters of each rank | most: parameters | gradients | optimizer | theory | MB | off, % |
|---|---|---|---|---|---|---|---|---|"""
SLEPT_HEAD = """\
| ranks p | schedule | formula | theory, % | measured, % | own, % | units |
|---|---|---|---|---|---|---|"""
COMPUTED_HEAD = f"""\
| schedule | theory, % | measured, % | a step, s | ratio to {DEFAULT} |
|---|---|---|---|---|"""


# --- Tables -----------------------------------------------------------------------------------------------


def measure(layout: runner.Layout, folder: Path, recipe: str | Path = "") -> list[dict[str, Any]]:
    """What each rank holds and calls."""
    sizes = {"num-layers": LAYERS, "width": WIDTH, "seq-len": LENGTH, "global-batch-size": BATCH}
    if "--pp" in layout.flags:
        sizes["micro-batch-size"] = ROWS
    flags = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    return probes.in_ranks(probes.probe, recipe or layout.recipe, layout.size, [*flags, *layout.flags], folder)


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
        moved: list[float] = [sum(4 * size for size in sizes if size >= SMALL) for sizes in each]
        if layout.recipe == "moe_gpt" and kind == "all-to-all":  # whose experts get more is no matter of the layout
            moved = [sum(moved) / len(moved)] * len(moved)
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
        "cp": ("ranks that share sequences, `--cp`", "2 or 4"),
        "M": (f"parameters of the whole model with {EXPERTS} experts (moe_gpt)", f"{M / 1e6:.2f} MB"),
        "X": ("of them, those of the experts", f"{X / 1e6:.2f} MB"),
        "ep": ("ranks that share the experts, `--ep`", "2 or 4"),
        "b": ("sequences of one step that a rank reads", f"{BATCH} / N"),
        "k": ("experts that a token goes to", f"{TOP_K}"),
        "norms": ("parameters of all norms", f"{NORMS / 1e3:.0f} kB"),
    }
    lines = [f"| {symbol} | {meaning} | {size} |" for symbol, (meaning, size) in rows.items()]
    return "\n".join(["| symbol | meaning | here |", "|---|---|---|", *lines])


def in_order(rows: list[str], layouts: list[runner.Layout]) -> list[str]:
    """Rows in the order of the layouts, without those of layouts that are gone."""
    places = {title(layout): i for i, layout in enumerate(layouts)}
    key = {row: places.get(" | ".join(row.strip("| ").split(" | ")[:2]), -1) for row in rows}
    return sorted((row for row in rows if key[row] >= 0), key=lambda row: key[row])


def main() -> None:
    """Measure, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    every = gpt_layouts()
    names = sorted({layout.recipe for layout in every})
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(names)}")
    only = parser.parse_args().recipes
    if unknown := {*only} - {*names}:
        parser.error(f"no recipe of these: {', '.join(unknown)}")
    started = time.monotonic()
    page, file = ROOT / "docs/measured/strategies.md", ROOT / "docs/measured/strategies.csv"
    held: list[str] = []
    sent: list[str] = []
    alone = 0
    with tempfile.TemporaryDirectory() as folder:
        for i, layout in enumerate(every):
            if only and layout.recipe not in only:
                continue
            ranks = measure(layout, Path(folder) / str(i))
            held.append(held_row(layout, ranks))
            sent += sent_rows(layout, ranks)
            alone = max(alone, *(len(one["alone"]) for one in ranks))
            print(held[-1], flush=True)
        if not only:
            slept = schedules.asleep(NAMES, Path(folder), ROOT / "docs/measured/schedules.png")
            computed = schedules.computing(NAMES, Path(folder))
            pages.write(
                page,
                alone=f"Calls in groups of one rank, made by a single pipeline: {alone}.",
                sleeping=f"1 unit is {schedules.UNIT_S:g} s, m is {schedules.MICRO_BATCHES}; the shortest of "
                f"{len(schedules.STEPS)} steps.\n\n{SLEPT_HEAD}\n{slept}",
                computing=f"2 ranks of one thread, {LAYERS} layers, width {WIDTH}, {schedules.MICRO_BATCHES} "
                f"micro-batches of 2 sequences of {schedules.REAL[-1]} tokens, {schedules.ROUNDS} rounds.\n\n"
                f"{COMPUTED_HEAD}\n{computed}",
            )
    measured = pages.measured(
        " ".join(["uv run python -m benchmarks.strategies", *only]), "gloo, float32", began=started
    )
    if only:
        before = pages.parts(page.read_text())
        others = before["held"].splitlines()[2:]
        held = [row for row in others if row.split()[1] not in only] + held
        with file.open(newline="") as lines:
            filed = [f"| {' | '.join(cells)} |" for cells in [*csv.reader(lines)][1:]]
        sent = [row for row in filed if row.split()[1] not in only] + sent
        measured = f"{before['measured'].strip()}\n\n{measured}"
    held, sent = in_order(held, every), in_order(sent, every)
    with file.open("w", newline="") as lines:
        csv.writer(lines, lineterminator="\n").writerows(sent_file(sent))
    table = "\n".join([HELD_HEAD, *held])
    pages.write(page, measured=measured, symbols=symbols(), held=table, sent=sent_table(sent))


if __name__ == "__main__":
    main()
