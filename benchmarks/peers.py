"""Brigade beside other loops: `uv run --group bench python -m benchmarks.peers` fills docs/measured/peers.md.

Each round runs every loop once, from the command to its end, in another order: Brigade's recipe with its defaults, and
the same start weights, data, batch and rates in the loops of benchmarks/peer_loops.py, whose defaults are those of the
library.
"""

import argparse
import functools
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks import plots
from benchmarks.peer_loops import ALONE, LOOPS, WORKLOADS
from common import precision
from common.run import cli
from common.train import initial
from common.workloads import augment
from tests.harness import pages, runner
from tests.harness.runner import ROOT

OWN = {"Brigade, bfloat16": (), "Brigade, float32": ("--dtype", "float32")}  # flags of its recipes; the first: none
SIZE, WARM = 2, 10  # ranks; steps that are not counted
JUDGE_EVERY = 5  # steps
LOOK_S = 1.0  # between two looks at the memory
LATEST_S = 900.0  # of one training
TITLES = {"resnet": "ResNet-18, 8 x 8 pixels", "resnet32": "ResNet-18, 32 x 32 pixels", "gpt": "a GPT"}  # of panels
JSON = ROOT / "docs" / "measured" / "peers.json"
GIVEN = tempfile.TemporaryDirectory()  # what all loops start from, by workload and seed


@functools.cache
def given(workload: str, seed: int) -> Path:
    """The folder with a workload's data, as arrays, and its start weights: those of Brigade's recipe."""
    what = WORKLOADS[workload]
    folder = Path(GIVEN.name, f"{workload}_{seed}")
    folder.mkdir()
    recipe: dict[str, Any] = runpy.run_path(str(ROOT / "recipes" / what.recipe / "train.py"), run_name="recipe")
    args = cli.parse(recipe["Args"], [*what.flags, "--seed", str(seed), "--dtype", "float32"])
    splits = recipe["make_data"](args)
    model = initial.materialize(recipe["make_model"](args, splits[0]), seed, torch.device("cpu"), torch.float32)
    torch.save(model.state_dict(), folder / "start.pt")
    for name, split in zip(("train", "held_out"), splits, strict=True):
        if what.side:
            np.save(folder / f"labels_{name}.npy", split.labels.numpy())
            pixels = augment.resize(split.pixels, what.side) if split.resize else split.pixels
            np.save(folder / f"pixels_{name}.npy", pixels.numpy())
        else:
            np.save(folder / f"tokens_{name}.npy", split.tokens)
    return folder


def memory_mib(folder: str) -> float:
    """Memory of all processes of a training, launcher and servers too, without the files that they have mapped.

    A page that several processes share counts once. The libraries' own files do not count: most are on the disk and in
    the memory of the machine once, however many read them, and this program has mapped some itself.

    Args:
        folder: in the environment of each of its processes, see `once`.
    """
    kilobytes = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"PEER_FOLDER={folder}\0".encode() in (process / "environ").read_bytes():
                found = re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB", (process / "smaps_rollup").read_text(), re.M)
                kilobytes += sum(map(int, found))
        except (ProcessLookupError, FileNotFoundError, PermissionError):
            continue  # it has ended, or is another user's
    return kilobytes / 1024


def once(
    loop: str,
    workload: str,
    seed: int,
    steps: int,
    flags: Sequence[str] = (),
    size: int = SIZE,
    threads: int = 1,
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
        judge_every: steps between two measurements of what was learned, whose time does not count; 0 for none.

    Raises:
        RuntimeError: it failed, or its ranks do not hold the same parameters.
    """
    what = WORKLOADS[workload]
    training = (workload, str(steps), str(seed), str(given(workload, seed)))
    with tempfile.TemporaryDirectory() as folder, Path(folder, "output").open("w") as output:
        if loop == "Brigade":  # by its own launcher, as the README has it
            Path(folder, "train.py").write_text("from benchmarks import peer_brigade\n\npeer_brigade.main()\n")
            command = ["bash", str(ROOT / "launch" / "torchrun.sh"), folder, *training, folder, *flags]
        else:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
            command += ["-m", "benchmarks.peer_loops", loop, *training, folder]
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "NPROC_PER_NODE": str(size), "PYTHONPATH": str(ROOT)}
        env |= {"PEER_JUDGE_EVERY": str(judge_every), "PEER_FOLDER": folder}
        memory = 0.0
        began = time.time()
        ran = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output)
        while True:
            try:
                ran.wait(LOOK_S)
                break
            except subprocess.TimeoutExpired:
                memory = max(memory, memory_mib(folder))
                if time.time() - began > LATEST_S:
                    ran.terminate()  # the launcher, which ends its ranks
                    raise
        ended = time.time()
        if ran.returncode:
            raise RuntimeError(f"{loop}, {workload}:\n{Path(folder, 'output').read_text()[-6000:]}")
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
        "memory_mib": memory,
        "peak_mib": max(rank["peak_mib"] for rank in ranks),
        what.metric: ranks[0][what.metric],
    }


def cell(runs: list[dict[str, Any]], key: str, form: str) -> str:
    """Median of a figure, and its range; or how many have none."""
    late = sum(run[key] is None for run in runs)
    return f"{late} of {len(runs)} never" if late else pages.spread([run[key] for run in runs], form)


def ratios(runs: dict[str, list[dict[str, Any]]], loop: str) -> list[float]:
    """Processor time of a step over bare DDP's, in each round."""
    return [one["cpu_s"] / bare["cpu_s"] for one, bare in zip(runs[loop], runs["bare DDP"], strict=True)]


def table(workload: str, found: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each loop, a column for each figure that its runs have."""
    what = WORKLOADS[workload]
    metric = what.metric.replace("top1", "top-1")
    columns = {
        "cpu_s": ("processor s / step", ".3f"),
        "of_bare": ("of bare DDP's", ".2f"),
        "wall_ms": ("ms / step", ".0f"),
        "first_s": ("first step, s", ".1f"),
        "goal_s": (f"{metric} {what.goal}, s", ".1f"),
        "whole_s": ("whole command, s", ".0f"),
        "memory_mib": ("memory of all, MiB", ".0f"),
        what.metric: (f"{metric} held out", ".4f"),
    }
    rows = {
        loop: [
            run | {"of_bare": of_bare, "wall_ms": 1e3 * run["wall_s"]}
            for run, of_bare in zip(runs, ratios(found, loop), strict=True)
        ]
        for loop, runs in found.items()
    }
    one = next(iter(rows.values()))[0]
    shown = {key: how for key, how in columns.items() if key in one and (key != "goal_s" or what.goal)}
    lines = [f"| | {' | '.join(title for title, _ in shown.values())} |", f"|---|{'---|' * len(shown)}"]
    for loop, runs in rows.items():
        lines.append(f"| {' | '.join([loop, *(cell(runs, key, form) for key, (_, form) in shown.items())])} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write each workload's table when it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "workloads", nargs="*", default=list(WORKLOADS), help=f"of {', '.join(WORKLOADS)}; default: all"
    )
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each loop, each with another seed")
    args = parser.parse_args()
    half = precision.compute_dtype("auto", torch.device("cpu")) != torch.float32
    loops = [name for name in (*OWN, *LOOPS) if half or not name.endswith("bfloat16")]
    for workload in args.workloads:
        began = time.monotonic()
        found: dict[str, list[dict[str, Any]]] = {loop: [] for loop in loops}
        steps = WORKLOADS[workload].steps
        every = JUDGE_EVERY if WORKLOADS[workload].goal else 0
        for seed in range(args.rounds):
            for loop in list(found)[:: -1 if seed % 2 else 1]:
                what, flags = ("Brigade", OWN[loop]) if loop in OWN else (loop, ())
                ran = once(what, workload, seed, steps, flags, judge_every=every)
                found[loop].append(ran)
                print(workload, seed, loop, json.dumps(ran), flush=True)
        command = f"uv run --group bench python -m benchmarks.peers {workload}"
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
