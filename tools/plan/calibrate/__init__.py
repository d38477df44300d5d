"""Measure this machine, and write it as a file for --hardware: `python -m tools.plan --calibrate FILE`.

Peaks come from tools/plan/calibrate/train.py, in one rank for each GPU, or two on a CPU. The achieved fractions are
fitted to steps of recipes, of which as many run at once, each alone: so they share caches and memory as ranks do.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import UserError
from tools import about
from tools.plan import hardware, own_runs, sweep
from tools.plan.count import Case
from tools.plan.hardware import Hardware, Reach

STEPS = 30
SKIPPED = 10  # warm up
TIMEOUT_S = 600.0
GPT = ("--global-batch-size", "8", "--num-layers")
RUNS = (  # small ones on a CPU; GPUs want larger ones, so give them your own with --fit
    ("ddp_gpt", (*GPT, "2", "--width", "96", "--num-heads", "4")),
    ("ddp_gpt", (*GPT, "4", "--width", "160", "--num-heads", "4")),
    ("ddp_gpt", (*GPT, "3", "--width", "288", "--num-heads", "4")),
    ("ddp_gpt", (*GPT, "6", "--width", "224", "--num-heads", "4")),
    ("ddp_resnet", ("--global-batch-size", "16")),
    ("ddp_resnet", ("--global-batch-size", "48")),
)
START = Reach(0.8, 0.5, 0.8, 1.0, 1.0, 1.0, 1.0)


def of_measured(name: str, found: Mapping[str, Any]) -> Hardware:
    """A machine, of what calibrate/train.py has written; its link is what the all-reduce went over."""
    n = int(found["world_size"])
    bandwidth = 2 * (n - 1) / n / found["byte_s"] if n > 1 else 1e12
    latency = found["latency_s"] / (2 * math.log2(n)) if n > 1 else 1e-6
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / found["local_size"]
    return Hardware(
        name=name,
        peak_16bit=found["peak_16bit"],
        peak_float32=found["peak_float32"],
        memory_gib=round((found["memory_bytes"] or host) / 2**30, 2),
        memory_bandwidth=found["memory_bandwidth"],
        local_size=int(found["local_size"]),
        link_bandwidth=bandwidth,
        network_bandwidth=bandwidth,
        link_latency_s=latency,
        network_latency_s=latency,
        gpu=found["gpu"],
        bfloat16=found["peak_16bit"] > found["peak_float32"],  # else it has no instructions for it
        launch_s=found["launch_s"],
        reach=START,
    )


def run(words: Sequence[str], output: Path, **environ: str) -> None:
    """A command of this repository.

    Raises:
        UserError: it has failed; with its last line.
    """
    with output.open("w") as file:
        done = subprocess.run(  # noqa: S603
            words,
            cwd=about.ROOT,
            env={**os.environ, "PYTHON": sys.executable, **environ},
            stdout=file,
            stderr=file,
            timeout=TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        said = output.read_text().strip().splitlines()
        raise UserError(f"{' '.join(words)} ended with {done.returncode}: {said[-1] if said else 'without a word'}")


def step_s(recipe: str, flags: Sequence[str], copies: int, folder: Path) -> float:
    """Seconds of a step of a recipe in one process, while as many others do the same: the slowest one's."""
    quiet = ("--eval-every", "10000", "--save-every", "10000", "--check-every", "0", "--log-every", str(SKIPPED))
    words = [sys.executable, f"recipes/{recipe}/train.py", "--max-steps", str(STEPS), *quiet, *flags]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = []
    for copy in range(copies):
        with (folder / f"{copy}.log").open("w") as file:
            command = [*words, "--out", str(folder), "--name", str(copy)]
            processes.append(subprocess.Popen(command, cwd=about.ROOT, env=environ, stdout=file, stderr=file))  # noqa: S603
    try:
        codes = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise UserError(f"{' '.join(words)} ended with {codes}: {(folder / '0.log').read_text()[-500:]}")
    samples = sweep.value(flags, sweep.BATCH, 0)
    return max(samples / rate(folder / str(copy) / "metrics.jsonl") for copy in range(copies))


def rate(file: Path) -> float:
    """Samples a second, of the records of a run without its first steps."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    key = "perf/samples_per_s"
    rates = [one[key] for one in records if one["step"] > SKIPPED and key in one]
    if not rates:
        raise UserError(f"{file} has no {key} after step {SKIPPED}")
    return len(rates) / sum(1 / one for one in rates)


def calibrate(file: Path) -> None:
    """Measure, fit and write."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("measuring products, memory and messages ...", flush=True)
        words = ["bash", "launch/torchrun.sh", "tools/plan/calibrate", "--out", name]
        run(words, folder / "log")
        machine = of_measured(file.stem, json.loads((folder / "measured.json").read_text()))
        runs = []
        for number, (recipe, flags) in enumerate(RUNS if machine.device == "cpu" else ()):
            print(f"measuring steps of {recipe} {' '.join(flags)} ...", flush=True)
            place = folder / str(number)
            place.mkdir()
            runs.append(
                (Case(about.ROOT / "recipes" / recipe, 1, flags), step_s(recipe, flags, machine.local_size, place))
            )
        if runs:
            print("fitting ...", flush=True)
            machine = own_runs.with_fit(machine, runs)
    hardware.save(machine, file, f"{about.cpu_name()}, measured by python -m tools.plan --calibrate {file.name}")
    print(f"wrote {file}: use --hardware {file}")
