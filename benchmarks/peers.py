"""Brigade beside other loops: `uv run --group bench python -m benchmarks.peers` fills docs/measured/peers.md.

Each round runs every loop once, from the command to its end, in another order: Brigade's recipe with its defaults, and
the same model, data, batch and rates in the loops of benchmarks/peer_loops.py, whose defaults are those of the library.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks import plots
from benchmarks.peer_loops import ALONE, LOOPS, WORKLOADS
from common import precision
from tests.harness import pages, runner
from tests.harness.runner import ROOT

OWN = {"Brigade, bfloat16": (), "Brigade, float32": ("--dtype", "float32")}  # flags of its recipes; the first: none
SIZE, WARM = 2, 10  # ranks; steps that are not counted
JUDGE_EVERY = 5  # steps
TITLES = {"resnet": "ResNet-18, 8 x 8 pixels", "resnet32": "ResNet-18, 32 x 32 pixels", "gpt": "a GPT"}  # of panels
JSON = ROOT / "docs" / "measured" / "peers.json"
HEAD = """\
| | processor s / step | of bare DDP's | ms / step | first step, s |{} whole command, s | peak of a rank, MiB | {} |
|---|---|---|---|---|---|---|---|"""
# What torch, oneDNN and MKL may use of a newer processor, so that it computes as one that has no more: a stand-in.
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def once(
    loop: str,
    workload: str,
    seed: int,
    steps: int,
    flags: Sequence[str] = (),
    size: int = SIZE,
    threads: int = 1,
    *,
    avx2: bool = False,
    judge_every: int = 0,
) -> dict[str, Any]:
    """One training by torchrun: what it took, and what it has learned.

    Args:
        loop: "Brigade", or one of benchmarks/peer_loops.py.
        workload: "resnet", "resnet32" or "gpt".
        seed: of weights and order.
        steps: length of the training.
        flags: of Brigade's recipe.
        size: ranks.
        threads: of each rank.
        avx2: with the instructions of AVX2 and no more, where the recipe's `--dtype auto` would be float32.
        judge_every: steps between two measurements of what was learned, whose time does not count; 0 for none.

    Raises:
        RuntimeError: it failed, or its ranks do not hold the same parameters.
    """
    what = WORKLOADS[workload]
    with tempfile.TemporaryDirectory() as folder:
        if loop == "Brigade":  # by its own launcher, as the README has it
            Path(folder, "train.py").write_text("from benchmarks import peer_loops\n\npeer_loops.main()\n")
            launcher = ["bash", str(ROOT / "launch" / "torchrun.sh"), folder]
        else:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
            launcher += ["-m", "benchmarks.peer_loops"]
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "NPROC_PER_NODE": str(size), "PYTHONPATH": str(ROOT)}
        env["PEER_JUDGE_EVERY"] = str(judge_every)
        env |= AVX2 if avx2 else {}
        if loop == "Brigade" and avx2:
            flags = ("--dtype", "float32", *flags)
        began = time.time()
        command = [*launcher, loop, workload, str(steps), str(seed), folder, *flags]
        ran = subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, text=True, timeout=900)
        ended = time.time()
        if ran.returncode:
            raise RuntimeError(f"{loop}, {workload}:\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
        if loop != ALONE and len({rank["digest"] for rank in ranks}) > 1:
            raise RuntimeError(f"{loop}, {workload}: the ranks hold different parameters, so they have trained apart")
        if loop == "Brigade":
            ranks[0][what.metric] = runner.records(Path(folder, "runs", "run"), f"val/{what.metric}")[steps]
    walls, cpus = ([[tick[i] for tick in rank["ticks"]] for rank in ranks] for i in (0, 1))
    counted = steps - 2 - WARM  # in the last step, the recipe also evaluates and saves
    learned = [judged[what.metric] for judged in ranks[0]["learned"]]
    sign = -1 if what.metric == "loss" else 1
    good = [i for i, value in enumerate(learned, start=1) if sign * value >= sign * what.goal]
    return {
        "cpu_s": sum(one[-2] - one[WARM] for one in cpus) / counted,
        "wall_s": max(one[-2] - one[WARM] for one in walls) / counted,
        "first_s": walls[0][0] - began,
        "goal_s": walls[0][good[0] * judge_every - 1] - began if good else None,
        "learned": learned,
        "whole_s": ended - began - ranks[0]["paused"][0],
        "peak_mib": max(rank["peak_mib"] for rank in ranks),
        what.metric: ranks[0][what.metric],
    }


def cell(runs: list[dict[str, Any]], key: str, form: str) -> str:
    """Median of a figure, and its range."""
    return pages.spread([run[key] for run in runs], form)


def ratios(runs: dict[str, list[dict[str, Any]]], loop: str) -> list[float]:
    """Processor time of a step over bare DDP's, in each round."""
    return [one["cpu_s"] / bare["cpu_s"] for one, bare in zip(runs[loop], runs["bare DDP"], strict=True)]


def table(workload: str, found: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each loop."""
    what = WORKLOADS[workload]
    metric = what.metric.replace("top1", "top-1")
    goal = f" {metric} {what.goal}, s |" if what.goal else ""
    first, second = HEAD.format(goal, f"{metric} held out").splitlines()
    rows = [first, second + ("---|" if goal else "")]
    for loop, runs in found.items():
        cells = [cell(runs, "cpu_s", ".3f"), pages.spread(ratios(found, loop), ".2f")]
        cells.append(pages.spread([1e3 * run["wall_s"] for run in runs], ".0f"))
        cells.append(cell(runs, "first_s", ".1f"))
        if goal:
            late = sum(run["goal_s"] is None for run in runs)
            cells.append(f"{late} of {len(runs)} never" if late else cell(runs, "goal_s", ".1f"))
        cells += [cell(runs, "whole_s", ".0f"), cell(runs, "peak_mib", ".0f")]
        rows.append(f"| {' | '.join([loop, *cells, cell(runs, what.metric, '.4f')])} |")
    return "\n".join(rows)


def main() -> None:
    """Measure, and write each workload's table when it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "workloads", nargs="*", default=list(WORKLOADS), help=f"of {', '.join(WORKLOADS)}; default: all"
    )
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each loop, each with another seed")
    parser.add_argument("--avx2", action="store_true", help="as a processor that has AVX2 and no more")
    args = parser.parse_args()
    half = not args.avx2 and precision.compute_dtype("auto", torch.device("cpu")) != torch.float32
    loops = [name for name in (*OWN, *LOOPS) if half or not name.endswith("bfloat16")]
    for workload in args.workloads:
        began = time.monotonic()
        found: dict[str, list[dict[str, Any]]] = {loop: [] for loop in loops}
        steps = WORKLOADS[workload].steps
        every = JUDGE_EVERY if WORKLOADS[workload].goal else 0
        for seed in range(args.rounds):
            for loop in list(found)[:: -1 if seed % 2 else 1]:
                what, flags = ("Brigade", OWN[loop]) if loop in OWN else (loop, ())
                ran = once(what, workload, seed, steps, flags, avx2=args.avx2, judge_every=every)
                found[loop].append(ran)
                print(workload, seed, loop, json.dumps(ran), flush=True)
        more = " --avx2" if args.avx2 else ""
        command = f"uv run --group bench python -m benchmarks.peers {workload}{more}"
        known: dict[str, Any] = json.loads(JSON.read_text()) if JSON.exists() else {}
        how = f"{SIZE} ranks of one thread on gloo, {steps} steps, {args.rounds} seeds"
        key = workload if half else f"{workload}, float32"
        known[key] = {"measured": pages.measured(command, how, began=began), "runs": found}
        JSON.write_text(json.dumps(known, indent=1) + "\n")
        write(known)


def write(known: dict[str, Any]) -> None:
    """Fill the page with what is known, and draw it."""
    texts = {key: f"{one['measured']}\n\n{table(key.split(',')[0], one['runs'])}" for key, one in known.items()}
    missing = "Not measured yet."
    pages.write(
        ROOT / "docs" / "measured" / "peers.md",
        resnet=texts.get("resnet", missing),
        resnet_plain=texts.get("resnet, float32", missing),
        resnet32=texts.get("resnet32", missing),
        resnet32_plain=texts.get("resnet32, float32", missing),
        gpt=texts.get("gpt", missing),
        gpt_plain=texts.get("gpt, float32", missing),
    )
    panels: dict[str, dict[str, plots.Range]] = {}
    for workload, title in TITLES.items():
        if workload in known:
            runs = known[workload]["runs"]
            each = {loop: ratios(runs, loop) for loop in runs}
            panels[title] = {loop: (min(all_), statistics.median(all_), max(all_)) for loop, all_ in each.items()}
    unit = "processor time of a step / bare DDP's in the same round: lower is better (median and range)"
    plots.dots(ROOT / "docs" / "measured" / "peers.png", panels, unit, reference=1.0, form=".2f", own="Brigade")


if __name__ == "__main__":
    main()
