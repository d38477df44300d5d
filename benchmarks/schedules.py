"""When each rank of a pipeline computes and when it waits: timelines of recipes/pipeline_gpt, and their picture.

`benchmarks/strategies.py` calls this. The recipe runs as it stands, in real ranks; torch's pipeline stages are
wrapped so that each forward and backward pass of a micro-batch leaves a box with its start and its end, on the clock
that all processes of a machine share. A `unit` makes each pass last a fixed time, by sleeping once it is done.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness import probes
from tests.harness.theory import DEFAULT, NAIVE, RECIPE, flag, stages

MICRO_BATCHES = 8
UNIT_S = 0.08  # that a rank needs for the forward pass of one of MICRO_BATCHES through all that it holds
STEPS = range(2, 5)  # that are measured
QUICK = ("--width", "8", "--num-heads", "2", "--seq-len", "4")  # next to nothing to compute
REAL = ("--width", "256", "--seq-len", "128")
ROUNDS = 2
COLOURS = {"F": ("#3b76af", "#9dc3e6"), "B": ("#d9822b", "#f6c48f"), "I": ("#d9822b", "#f6c48f")}
COLOURS["W"] = ("#4e9a51", "#a8d5a2")  # each: a rank's first stage, its second


@dataclass(frozen=True)
class Box:
    """What a rank did from `start` to `end`, in s: F forward, B backward, I and W its two halves, by input and weight.

    `chunk` is the number of the stage among those that the rank holds.
    """

    rank: int
    chunk: int
    micro_batch: int
    kind: str
    start: float
    end: float


def record(path: str, argv: list[str], file: str, unit: float) -> None:
    """In a rank: run the recipe for STEPS, and write the boxes of each; a forward pass lasts a `unit`, in s."""
    from torch.distributed.pipelining.stage import _PipelineStageBase as Stage

    boxes: list[list[tuple[int, int, str, float, float]]] = [[]]

    def timed(name: str, what: Callable[[bool], tuple[str, int]]) -> None:
        method = getattr(Stage, name)

        def wrapped(self: Any, micro_batch: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
            kind, units = what(full_backward)
            start = time.monotonic()
            more = {} if full_backward else {"full_backward": False}
            result = method(self, micro_batch, *args, **more, **kwargs)
            time.sleep(max(0.0, start + units * unit - time.monotonic()))
            boxes[-1].append((self.stage_index // self.group_size, micro_batch, kind, start, time.monotonic()))
            return result

        setattr(Stage, name, wrapped)

    timed("forward_one_chunk", lambda full: ("F", 1))
    timed("backward_one_chunk", lambda full: ("B", 2) if full else ("I", 1))
    timed("backward_weight_one_chunk", lambda full: ("W", 1))

    def before(step: int) -> None:
        if step > STEPS[-1]:
            Path(file).write_text(json.dumps(boxes[-len(STEPS) :]))
        boxes.append([])

    probes.run_until(path, argv, STEPS[-1], before, Path(file))


def timelines(name: str, num_ranks: int, unit: float, folder: Path, *flags: str) -> list[list[Box]]:
    """The boxes of all ranks in each of STEPS, from the start of the first; with a unit of 0 nothing sleeps."""
    # NAIVE's micro-batch is as large as all of the others'; two stages of a rank share its layers.
    number = 1 if name == NAIVE else MICRO_BATCHES
    lasts = unit * MICRO_BATCHES / number / len(stages(name, num_ranks)[0])
    batch = MICRO_BATCHES * (2 if unit == 0 else 1)
    sizes = ["--num-layers", "8", "--global-batch-size", str(batch), "--micro-batch-size", str(batch // number)]
    flags = (*sizes, "--pp", str(num_ranks), "--schedule", flag(name), *flags)
    found = probes.in_ranks(record, RECIPE, num_ranks, [*flags], folder, lasts)
    steps = []
    for each in zip(*found, strict=True):
        first = min(start for boxes in each for *_, start, _ in boxes)
        steps.append(
            [
                Box(rank, chunk, micro_batch, kind, start - first, end - first)
                for rank, boxes in enumerate(each)
                for chunk, micro_batch, kind, start, end in boxes
            ]
        )
    return steps


def span(boxes: list[Box]) -> float:
    """From the start of the first to the end of the last, in s."""
    return max(box.end for box in boxes) - min(box.start for box in boxes)


def bubble(boxes: list[Box]) -> float:
    """Share of the ranks' time in which they wait."""
    num_ranks = len({box.rank for box in boxes})
    return 1 - sum(box.end - box.start for box in boxes) / (num_ranks * span(boxes))


def own_bubble(boxes: list[Box]) -> float:
    """The same, of each rank's time from its own first box to its own last."""
    each = [[box for box in boxes if box.rank == rank] for rank in {box.rank for box in boxes}]
    return 1 - sum(box.end - box.start for box in boxes) / sum(map(span, each))


def theory(name: str, p: int, m: int = MICRO_BATCHES) -> tuple[float, str]:
    """The bubble of p ranks and m micro-batches, and its formula."""
    if name == NAIVE:
        return (p - 1) / p, "(p-1) / p"
    if name in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        return (p - 1) / (6 * m + p - 1), "(p-1) / (6m+p-1)"
    if name == "DualPipeV":
        return (p - 1) / (3 * m + p - 1), "(p-1) / (3m+p-1)"
    if name == "Interleaved1F1B":
        return (p - 1) / (2 * m + p - 1), "(p-1) / (2m+p-1)"
    return (p - 1) / (m + p - 1), "(p-1) / (m+p-1)"


def draw(drawn: dict[str, list[Box]], path: Path) -> None:
    """One panel a schedule, all on one time axis, of which NAIVE gets as much as the others need."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import patches
    from matplotlib import pyplot as plt

    num_ranks = len({box.rank for box in next(iter(drawn.values()))})
    end = 1.03 * max(span(boxes) for name, boxes in drawn.items() if name != NAIVE) / UNIT_S
    figure, panels = plt.subplots(len(drawn), 1, figsize=(15, 1.9 * len(drawn)), sharex=True, layout="constrained")
    for axes, (name, boxes) in zip(panels, drawn.items(), strict=True):
        for box in boxes:
            start, width = box.start / UNIT_S, (box.end - box.start) / UNIT_S
            colour = COLOURS[box.kind][box.chunk]
            axes.barh(box.rank, width, left=start, height=0.86, color=colour, edgecolor="white", linewidth=0.6)
            middle = (start + min(start + width, end)) / 2
            if middle < end:
                label = "0 to 7" if name == NAIVE else str(box.micro_batch)
                ink = "black" if box.chunk else "white"
                axes.text(middle, box.rank, label, ha="center", va="center", fontsize=8.5, color=ink)
        formula, words = theory(name, num_ranks)
        axes.set_title(
            f"{name}: bubble {bubble(boxes):.0%}   (formula: {words} = {formula:.0%}), "
            f"done at {span(boxes) / UNIT_S:.1f}",
            loc="left",
            fontsize=12,
        )
        if span(boxes) / UNIT_S > end:
            note = f"and back again, from rank {num_ranks - 1} to rank 0, until {span(boxes) / UNIT_S:.0f}"
            axes.text(end, num_ranks - 2, note, ha="right", va="center", fontsize=11)
        else:
            axes.axvline(span(boxes) / UNIT_S, color="black", linewidth=1)
        axes.set_xlim(0, end)
        axes.set_ylim(num_ranks - 0.5, -0.5)
        axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)], fontsize=10)
        axes.tick_params(length=0, labelbottom=True)
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel("time, in forward passes of one micro-batch through what one rank holds", fontsize=11)
    names = {
        "F": "forward",
        "B": "backward (zero-bubble: its half by the input)",
        "W": "its half by the weights",
    }
    handles = [patches.Patch(color=COLOURS[kind][0], label=label) for kind, label in names.items()]
    handles.append(patches.Patch(color="#bbbbbb", label="paler: a rank's second stage"))
    handles.append(patches.Patch(facecolor="white", edgecolor="black", label="white: it waits, the bubble"))
    figure.legend(handles=handles, loc="outside upper center", ncols=5, frameon=False, fontsize=11)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def asleep(names: list[str], folder: Path, picture: Path) -> str:
    """The table of 2 and 4 ranks that sleep instead of computing; draws the one of 4."""
    lines, drawn = [], {}
    for num_ranks in (2, 4):
        for name in names:
            steps = timelines(name, num_ranks, UNIT_S, folder / f"asleep-{num_ranks}-{name}", *QUICK)
            share, words = theory(name, num_ranks)
            drawn[name] = boxes = min(steps, key=span)
            figures = [100 * share, 100 * bubble(boxes), 100 * own_bubble(boxes), span(boxes) / UNIT_S]
            lines.append(f"| {num_ranks} | {name} | {words} | {' | '.join(f'{one:.1f}' for one in figures)} |")
            print(lines[-1], flush=True)
    draw(drawn, picture)
    return "\n".join(lines)


def computing(names: list[str], folder: Path) -> str:
    """The table of 2 ranks that compute, all schedules in turns."""
    spans: dict[str, list[float]] = {name: [] for name in names}
    bubbles: dict[str, list[float]] = {name: [] for name in names}
    for i in range(ROUNDS):
        for name in names if i % 2 == 0 else names[::-1]:
            steps = timelines(name, 2, 0.0, folder / f"real-{i}-{name}", *REAL)
            spans[name].append(statistics.median(map(span, steps)))
            bubbles[name] += map(bubble, steps)
            print(f"round {i}  {name:21}  {spans[name][-1]:.3f} s", flush=True)
    lines = []
    for name in names:
        ratios = sorted(one / base for one, base in zip(spans[name], spans[DEFAULT], strict=True))
        middle = statistics.median(ratios)
        lines.append(
            f"| {name} | {100 * theory(name, 2)[0]:.1f} | {100 * statistics.median(bubbles[name]):.1f} | "
            f"{statistics.median(spans[name]):.2f} | {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
        )
    return "\n".join(lines)
