"""What each flag gains and costs: `uv run python -m benchmarks.knobs [resnet|gpt]` fills docs/measured/knobs.md.

Each round trains with the defaults and then with one flag after the other, from the command to its end, in the other
order each second time; a flag is compared with the defaults of its own round. The defaults run twice, and their
difference is the noise. The page keeps one table for processors that compute in bfloat16 and one for the others.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from benchmarks.peer_loops import WORKLOADS
from benchmarks.peers import SIZE, once
from common import precision
from tests.harness import pages
from tests.harness.runner import ROOT

STEPS = 41  # ten warm up; enough for a rate, and too few for a good model
BOTH = (
    ("--dtype", "float32"),
    ("--dtype", "bfloat16"),
    ("--matmul-precision", "medium"),
    ("--compile",),
    ("--max-grad-norm", "0"),
    ("--max-grad-norm", "1"),
    ("--micro-batch-size", "8"),
    ("--workers", "1"),
    ("--deterministic",),
    ("--check-every", "1"),
    ("--log-every", "1"),
    ("--async-save", "--save-every", "10"),
    ("--save-every", "10"),
    ("--ema", "0.99"),
)
KNOBS = {"resnet": (*BOTH, ("--sync-bn",)), "gpt": (*BOTH, ("--recompute", "full"), ("--tied",))}
SAME = {"resnet": ("--max-grad-norm", "0"), "gpt": ("--max-grad-norm", "1")}  # measured as "the defaults again"
AGAIN, ONE = "the defaults again", "one process of two threads"
JSON = ROOT / "docs" / "measured" / "knobs.json"
HEAD = """\
| flag | processor time of a step | wall time of a step | first step, s | peak of a rank, MiB | {} after {} steps |
|---|---|---|---|---|---|"""


def ratio(runs: list[dict[str, float]], base: list[dict[str, float]], key: str) -> str:
    """Median of a figure over that of the defaults in the same round, and the range."""
    ratios = [mine[key] / theirs[key] for mine, theirs in zip(runs, base, strict=True)]
    return pages.spread(ratios, ".2f")


def table(workload: str, found: dict[str, list[dict[str, float]]]) -> str:
    """A row for each flag, beside the defaults."""
    metric = WORKLOADS[workload].metric
    (_, base), *others = found.items()
    keys = ("cpu_s", "wall_s", "first_s", "peak_mib", metric)
    middle = {key: statistics.median(run[key] for run in base) for key in keys}
    first = f"{middle['cpu_s']:.3f} s | {1e3 * middle['wall_s']:.0f} ms | {middle['first_s']:.1f}"
    rows = [HEAD.format(metric.replace("top1", "top-1"), STEPS)]
    rows.append(f"| **the defaults** | {first} | {middle['peak_mib']:.0f} | {middle[metric]:.3f} |")
    for name, runs in others:
        later, more, learned = (
            [mine[key] - theirs[key] for mine, theirs in zip(runs, base, strict=True)]
            for key in ("first_s", "peak_mib", metric)
        )
        cells = [name, ratio(runs, base, "cpu_s"), ratio(runs, base, "wall_s")]
        cells.append(pages.spread(later, "+.1f"))
        cells += [f"{statistics.median(more):+.0f}", f"{statistics.median(learned):+.3f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def measure(workload: str, rounds: int, half: bool) -> dict[str, list[dict[str, float]]]:
    """All trainings of a workload, by the words of a row; half: `--dtype auto` is bfloat16."""
    same = {SAME[workload], ("--dtype", "bfloat16" if half else "float32")}
    knobs = [flags for flags in KNOBS[workload] if flags not in same]
    ways: dict[str, tuple[str, ...]] = {"defaults": (), AGAIN: ()}
    ways |= {f"`{' '.join(flags)}`": flags for flags in knobs}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (*ways, ONE)}
    for number in range(rounds):
        for name in list(found)[:: -1 if number % 2 else 1]:
            size, threads = (1, 2) if name == ONE else (SIZE, 1)
            ran = once("Brigade", workload, number, STEPS, ways.get(name, ()), size, threads)
            found[name].append(ran)
            print(workload, number, name, json.dumps(ran), flush=True)
    return found


def main() -> None:
    """Measure, and write each workload's table when it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(KNOBS), help=f"of {', '.join(KNOBS)}; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="trainings with each flag, each with another seed")
    args = parser.parse_args()
    half = precision.compute_dtype("auto", torch.device("cpu")) == torch.bfloat16
    for workload in args.workloads:
        began = time.monotonic()
        found = measure(workload, args.rounds, half)
        how = f"{SIZE} ranks of one thread on gloo, {args.rounds} rounds of {STEPS} steps"
        command = f"uv run python -m benchmarks.knobs {workload}"
        measured = pages.measured(command, how, began=began)
        known: dict[str, Any] = json.loads(JSON.read_text()) if JSON.exists() else {}
        known[f"{workload}, {'bfloat16' if half else 'float32'}"] = {"measured": measured, "runs": found}
        JSON.write_text(json.dumps(known, indent=1) + "\n")
        write(known)


def write(known: dict[str, Any]) -> None:
    """Fill the page with what is known."""
    texts = {key: f"{one['measured']}\n\n{table(key.split(',')[0], one['runs'])}" for key, one in known.items()}
    missing = "Not measured yet."
    pages.write(
        ROOT / "docs" / "measured" / "knobs.md",
        resnet_half=texts.get("resnet, bfloat16", missing),
        resnet_plain=texts.get("resnet, float32", missing),
        gpt_half=texts.get("gpt, bfloat16", missing),
        gpt_plain=texts.get("gpt, float32", missing),
    )


if __name__ == "__main__":
    main()
