"""Brigade beside other loops: `uv run --group bench python -m benchmarks.peers` fills docs/peers.md.

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
from benchmarks.peer_loops import ALONE, LOOPS
from common import precision
from tests.harness import pages, runner
from tests.harness.runner import ROOT

OWN = {"Brigade": (), "Brigade float32": ("--dtype", "float32")}  # flags of its recipes
SIZE, WARM = 2, 10  # ranks; steps that are not counted
STEPS = {"resnet": 101, "resnet32": 31, "gpt": 100}  # nine passes over the digits, and not quite three
METRIC = {"resnet": "top1", "resnet32": "top1", "gpt": "loss"}
JSON = ROOT / "docs" / "peers.json"
HEAD = """\
| | processor s / step | of bare DDP's | ms / step | first step, s | whole command, s | peak of a rank, MiB | {} |
|---|---|---|---|---|---|---|---|"""


def once(
    loop: str, workload: str, seed: int, steps: int, flags: Sequence[str] = (), size: int = SIZE, threads: int = 1
) -> dict[str, float]:
    """One training by torchrun: what it took, and what it has learned.

    Args:
        loop: "Brigade", or one of benchmarks/peer_loops.py.
        workload: "resnet", "resnet32" or "gpt".
        seed: of weights and order.
        steps: length of the training.
        flags: of Brigade's recipe.
        size: ranks.
        threads: of each rank.

    Raises:
        RuntimeError: it failed, or its ranks do not hold the same parameters.
    """
    with tempfile.TemporaryDirectory() as folder:
        if loop == "Brigade":  # by its own launcher, as the README has it
            Path(folder, "train.py").write_text("from benchmarks import peer_loops\n\npeer_loops.main()\n")
            launcher = ["bash", str(ROOT / "launch" / "torchrun.sh"), folder]
        else:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
            launcher += ["-m", "benchmarks.peer_loops"]
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "NPROC_PER_NODE": str(size), "PYTHONPATH": str(ROOT)}
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
            curve = runner.records(Path(folder, "runs", "run"), f"val/{METRIC[workload]}")
            ranks[0][METRIC[workload]] = curve[steps]
    walls, cpus = ([[tick[i] for tick in rank["ticks"]] for rank in ranks] for i in (0, 1))
    counted = steps - 2 - WARM  # in the last step, the recipe also evaluates and saves
    return {
        "cpu_s": sum(one[-2] - one[WARM] for one in cpus) / counted,
        "wall_s": max(one[-2] - one[WARM] for one in walls) / counted,
        "first_s": walls[0][0] - began,
        "whole_s": ended - began,
        "peak_mib": max(rank["peak_mib"] for rank in ranks),
        METRIC[workload]: ranks[0][METRIC[workload]],
    }


def cell(runs: list[dict[str, float]], key: str, form: str) -> str:
    """Median of a figure, and its range."""
    values = [run[key] for run in runs]
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def table(workload: str, found: dict[str, list[dict[str, float]]]) -> str:
    """A row for each loop."""
    rows = [HEAD.format("loss held out" if METRIC[workload] == "loss" else "top-1 held out")]
    for loop, runs in found.items():
        ratios = [one["cpu_s"] / bare["cpu_s"] for one, bare in zip(runs, found["bare DDP"], strict=True)]
        cells = [cell(runs, "cpu_s", ".3f"), f"{statistics.median(ratios):.2f}"]
        cells.append(cell([{"ms": 1e3 * run["wall_s"]} for run in runs], "ms", ".0f"))
        cells += [cell(runs, "first_s", ".1f"), cell(runs, "whole_s", ".0f"), cell(runs, "peak_mib", ".0f")]
        rows.append(f"| {' | '.join([loop, *cells, cell(runs, METRIC[workload], '.4f')])} |")
    return "\n".join(rows)


def main() -> None:
    """Measure, and write each workload's table when it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(STEPS), help=f"of {', '.join(STEPS)}; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each loop, each with another seed")
    args = parser.parse_args()
    half = precision.compute_dtype("auto", torch.device("cpu")) != torch.float32
    loops = [*(name for name in OWN if half or not OWN[name]), *LOOPS]
    for workload in args.workloads:
        began = time.monotonic()
        found: dict[str, list[dict[str, float]]] = {loop: [] for loop in loops}
        for seed in range(args.rounds):
            for loop in list(found)[:: -1 if seed % 2 else 1]:
                what = "Brigade" if loop in OWN else loop
                found[loop].append(once(what, workload, seed, STEPS[workload], OWN.get(loop, ())))
                print(workload, seed, loop, json.dumps(found[loop][-1]), flush=True)
        command = f"uv run --group bench python -m benchmarks.peers {workload}"
        known: dict[str, Any] = json.loads(JSON.read_text()) if JSON.exists() else {}
        how = f"{SIZE} ranks of one thread on gloo, {STEPS[workload]} steps, {args.rounds} seeds"
        known[workload] = {"measured": pages.measured(command, how, began=began), "runs": found}
        JSON.write_text(json.dumps(known, indent=1) + "\n")
        tables = {name: table(name, one["runs"]) for name, one in known.items()}
        pages.write(
            ROOT / "docs" / "peers.md",
            measured="\n\n".join(one["measured"] for one in known.values()),
            resnet=tables.get("resnet", "Not measured yet."),
            resnet32=tables.get("resnet32", "Not measured yet."),
            gpt=tables.get("gpt", "Not measured yet."),
        )


if __name__ == "__main__":
    main()
