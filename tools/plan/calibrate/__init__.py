"""Measure this machine, and write it as a file for --hardware: `python -m tools.plan --calibrate FILE`.

Peaks come from tools/plan/calibrate/train.py, in one rank for each GPU, or two on a CPU. The achieved fractions are
fitted to steps of recipes: on one rank, as many runs at once as a machine has ranks, so that they share caches and
memory as ranks do; and on two ranks, as a collective waits for threads, which a message on an idle machine does not.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import UserError
from tools import about, need
from tools.plan import hardware, own_runs, sweep
from tools.plan.count import Case
from tools.plan.hardware import Hardware, Reach

STEPS = 30
SKIPPED = 10  # warm up
TIMEOUT_S = 600.0
RUNS = (  # recipe, ranks, layers and width or images: small ones for a CPU; GPUs want your own, given after FILE
    ("ddp_gpt", 1, (2, 96)),
    ("ddp_gpt", 1, (4, 160)),
    ("ddp_gpt", 1, (3, 288)),
    ("ddp_gpt", 1, (6, 224)),
    ("ddp_resnet", 1, (16,)),
    ("ddp_resnet", 1, (48,)),
    ("ddp_gpt", 2, (4, 96)),
    ("fsdp_gpt", 2, (2, 256)),
    ("fsdp_gpt", 2, (6, 128)),
    ("tensor_gpt", 2, (2, 224)),
    ("tensor_gpt", 2, (4, 96)),
    ("ddp_resnet", 2, (96,)),
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


def case(recipe: str, size: int, sizes: Sequence[int]) -> Case:
    """One of RUNS, on so many ranks."""
    if about.workload(recipe) == "resnet":
        flags = ["--global-batch-size", str(sizes[0])]
    else:
        layers, width = map(str, sizes)
        flags = ["--global-batch-size", "8", "--num-layers", layers, "--width", width, "--num-heads", "4"]
    return Case(about.ROOT / "recipes" / recipe, size, tuple(flags))


def step_s(one: Case, copies: int, folder: Path) -> float:
    """Seconds of a step of a recipe, while so many of it run at once: the slowest one's."""
    quiet = ("--eval-every", "10000", "--save-every", "10000", "--check-every", "0", "--log-every", str(SKIPPED))
    words = ["bash", "launch/torchrun.sh", f"recipes/{one.folder.name}", "--max-steps", str(STEPS), *quiet, *one.flags]
    environ = {"OMP_NUM_THREADS": "1", "NPROC_PER_NODE": str(one.size)}
    with ThreadPoolExecutor(copies) as pool:
        runs = [
            pool.submit(run, [*words, "--out", str(folder), "--name", str(copy)], folder / f"{copy}.log", **environ)
            for copy in range(copies)
        ]
        for each in runs:
            each.result()
    samples = sweep.value(one.flags, sweep.BATCH, 0)
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
    need("torch")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("measuring products, memory and messages ...", flush=True)
        words = ["bash", "launch/torchrun.sh", "tools/plan/calibrate", "--out", name]
        run(words, folder / "log")
        machine = of_measured(file.stem, json.loads((folder / "measured.json").read_text()))
        runs = []
        for number, (recipe, size, sizes) in enumerate(RUNS if machine.device == "cpu" else ()):
            if size > machine.local_size:  # a processor of one core
                continue
            one = case(recipe, size, sizes)
            print(f"measuring steps of {recipe} {' '.join(one.flags)} on {one.size} ranks ...", flush=True)
            place = folder / str(number)
            place.mkdir()
            took = step_s(one, machine.local_size // one.size, place)
            runs.append(own_runs.Run(f"{recipe} {' '.join(one.flags)} on {size}", one, "cpu", took))
        if runs:
            print("fitting ...", flush=True)
            machine, text = own_runs.fitted(runs, machine)
            print(text)
    hardware.save(machine, file, f"{about.cpu_name()}, measured by python -m tools.plan --calibrate {file.name}")
    print(f"wrote {file}: use --hardware {file}")
