"""Long sequences over ranks, beside one process: `uv run python -m benchmarks.context`.

It writes docs/measured/context.md: time and memory of a step of recipes/context_gpt, for each kind and several lengths;
and a sequence that one process cannot hold under a limit of memory. Each rank has one thread. One process is ddp_gpt,
which sends nothing. Time and memory are taken in different steps, because the profiler that sees allocations takes
time.
"""

import argparse
import itertools
import json
import os
import re
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tests.harness import pages, probes, runner

KINDS = ("ring", "allgather", "ulysses")
LAYERS, WIDTH, HEADS = 2, 128, 4
TIMED = range(2, 5)  # steps
PROFILED = TIMED[-1] + 1
LIMITED = 3  # last step of a training under a limit
SHARE = 0.5  # of what one process needs for a step: the limit


# --- In a rank --------------------------------------------------------------------------------------------


def watch(path: str, argv: list[str], file: str) -> None:
    """Run a recipe; write wall and processor seconds of the TIMED steps, and the peak of bytes of PROFILED."""
    torch.set_num_threads(1)
    marks: list[tuple[float, float]] = []
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    def before(step: int) -> None:
        if step == PROFILED:
            profile.start()
        elif step == PROFILED + 1:
            profile.stop()
            profile.export_chrome_trace(f"{file}.trace")
            seconds = [[b - a for a, b in zip(one, other, strict=True)] for one, other in itertools.pairwise(marks)]
            Path(file).write_text(json.dumps({"seconds": seconds, "peak": peak(Path(f"{file}.trace"))}))
        if step in (*TIMED, PROFILED):
            marks.append((time.perf_counter(), time.process_time()))

    probes.run_until(path, argv, PROFILED, before, Path(file))


def peak(trace: Path) -> int:
    """Most bytes that a step has allocated and not yet freed: activations, gradients, gathered parameters."""
    events = [one for one in json.loads(trace.read_text())["traceEvents"] if one.get("name") == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda one: one["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most


def limit(path: str, argv: list[str], file: str, more: int) -> None:
    """Run a recipe to step LIMITED, and from the second on let it take `more` bytes than it has between two steps.

    In the first one, threads start, and their stacks would count.
    """
    torch.set_num_threads(1)

    def before(step: int) -> None:
        if step == 2:
            now = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
            most = int(now.split()[1]) * 1024 + more
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        elif step == LIMITED + 1:
            Path(file).write_text("{}")

    probes.run_until(path, argv, LIMITED, before, Path(file))


# --- Beside the ranks -------------------------------------------------------------------------------------


def layouts(most: int) -> list[runner.Layout]:
    """One process, and each kind on 2 and 4 ranks."""
    sizes = [size for size in (2, 4) if size <= most]
    several = [
        runner.Layout("context_gpt", size, ("--cp", str(size), "--cp-kind", kind), 1)
        for size in sizes
        for kind in KINDS
    ]
    return [runner.Layout("ddp_gpt", 1, (), 1), *several]


def flags(layout: runner.Layout, length: int) -> list[str]:
    """One sequence a step."""
    sizes = {"num-layers": LAYERS, "width": WIDTH, "num-heads": HEADS, "seq-len": length, "global-batch-size": 1}
    return [*layout.flags, *(part for name, size in sizes.items() for part in (f"--{name}", str(size)))]


def row(layout: runner.Layout, length: int, found: list[dict[str, Any]], alone: dict[str, float]) -> str:
    """The median step of the slowest rank, processor seconds of all, and the largest peak; beside one process."""
    wall = max(statistics.median(step[0] for step in one["seconds"]) for one in found)
    processor = sum(statistics.median(step[1] for step in one["seconds"]) for one in found)
    most = max(one["peak"] for one in found) / 1e6
    here = {"wall": wall, "processor": processor, "peak": most}
    if layout.size == 1:
        alone.update(here)
    ratios = [f"{here[what] / alone[what]:.2f}" for what in here]
    kind = layout.flags[-1] if layout.flags else "one process"
    cells = [f"{length:,}", layout.size, kind, f"{wall:.2f}", ratios[0], f"{processor:.2f}", ratios[1]]
    return f"| {' | '.join(map(str, [*cells, f'{most:.1f}', ratios[2]]))} |"


def under_limit(layout: runner.Layout, length: int, more: float, folder: Path) -> str:
    """How a training under a limit of memory ends."""
    found = "trains"
    try:
        probes.in_ranks(limit, layout.recipe, layout.size, flags(layout, length), folder, int(more), timeout_s=1200)
    except AssertionError as error:
        errors = re.findall(r"out of memory|^\w*Error: .*$", str(error), re.MULTILINE)
        found = f"ends: {errors[0] if errors else 'without a word'}"
    kind = layout.flags[-1] if layout.flags else "one process"
    return f"| {length:,} | {layout.size} | {kind} | {more / 1e6:.0f} | {found} |"


HEAD = """\
| tokens | ranks | kind | wall, s | ratio | processor, s | ratio | peak, MB | ratio |
|---|---|---|---|---|---|---|---|---|"""
LIMIT_HEAD = """\
| tokens | ranks | kind | limit of each process, MB | each process |
|---|---|---|---|---|"""


def main() -> None:
    """Measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384], help="of sequences, in tokens")
    parser.add_argument("--ranks", type=int, default=4, help="most ranks")
    args = parser.parse_args()
    began = time.monotonic()
    # What is freed goes back to the system at once, else a limit would count it. Before the first rank starts.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    rows, alone = [], dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        for length in args.lengths:
            for layout in layouts(args.ranks):
                where = Path(folder) / f"{layout}-{length}"
                found = probes.in_ranks(watch, layout.recipe, layout.size, flags(layout, length), where, timeout_s=1200)
                rows.append(row(layout, length, found, alone))
                print(rows[-1], flush=True)
        limits = []
        for layout in layouts(args.ranks):
            if layout.size in (1, 4) and args.ranks == 4:
                more = SHARE * 1e6 * alone["peak"]
                limits.append(under_limit(layout, args.lengths[-1], more, Path(folder) / f"{layout}-limit"))
                print(limits[-1], flush=True)
    chosen = [f" --lengths {' '.join(map(str, args.lengths))}"] if args.lengths != [1024, 4096, 16384] else []
    chosen += [f" --ranks {args.ranks}"] if args.ranks != 4 else []
    pages.write(
        runner.ROOT / "docs/measured/context.md",
        measured=pages.measured(
            f"uv run python -m benchmarks.context{''.join(chosen)}",
            "gloo, float32, one thread a rank",
            f"{LAYERS} layers, width {WIDTH}, {HEADS} heads, 1 sequence a step",
            began=began,
        ),
        steps="\n".join([HEAD, *rows]),
        limits="\n".join([LIMIT_HEAD, *limits]) if limits else "Not run: it takes four ranks.",
    )


if __name__ == "__main__":
    main()
