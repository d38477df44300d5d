"""The same training on 1, 2 and 4 processes: `uv run python -m benchmarks.scaling` fills docs/measured/scaling.md.

Three arms take turns: a recipe with its defaults in float32, the bare DDP loop of benchmarks/peer_loops.py, and that
loop without DDP, in which each process trains its part of the batch alone. The last is what the machine can do: it has
the same processors, caches and memory to share, and sends nothing. The all-reduce of the gradients is timed apart.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.peer_loops import ALONE, WORKLOADS
from benchmarks.peers import cell, once
from common.run import process_group
from common.workloads import gpt, resnet
from tests.harness import pages, runner
from tests.harness.runner import ROOT

SIZES, STEPS, TIMES = (1, 2, 4), 31, 30
ARMS = {"Brigade": ("--dtype", "float32"), "bare DDP": (), ALONE: ()}
HEAD = """\
| processes | Brigade, {0}/s | bare DDP, {0}/s | nothing sent, {0}/s | Brigade, of that | all-reduce, ms | of a step |
|---|---|---|---|---|---|---|"""


def parameters(workload: str) -> int:
    """Elements of a model, and so of its gradients."""
    with torch.device("meta"):
        shape = gpt.Shape(256, num_layers=4, num_heads=4, width=192, mlp_width=512)
        model = resnet.make_resnet("resnet18", 1, 10, 8) if workload == "resnet" else gpt.GPT(shape)
    return sum(parameter.numel() for parameter in model.parameters())


def time_all_reduce(elements: int, out: str) -> None:
    """One rank's part: rank 0 writes the milliseconds of a sum over all ranks, in DDP's buckets of 25 MB."""
    world = process_group.start()
    buckets = torch.zeros(elements).split(25 * 2**20 // 4)
    took = []
    for _ in range(TIMES):
        dist.barrier()
        began = time.perf_counter()
        for bucket in buckets:
            dist.all_reduce(bucket)
        took.append(1e3 * (time.perf_counter() - began))
    if dist.get_rank() == 0:
        Path(out).write_text(str(statistics.median(took)))
    process_group.finish(world.process)


def sent_ms(workload: str, size: int) -> float:
    """Milliseconds of the all-reduce of a step's gradients, while nothing computes."""
    if size == 1:
        return 0.0
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder, "ms"))
        result = runner.spawn(time_all_reduce, [(parameters(workload), out)] * size)
        assert result.ok, str(result)
        return float(Path(out).read_text())


def row(workload: str, size: int, rounds: int) -> str:
    """Measure a number of processes."""
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for seed in range(rounds):
        for arm in list(ARMS)[:: -1 if seed % 2 else 1]:
            ran = once(arm, workload, seed, STEPS, ARMS[arm], size)
            found[arm].append({"rate": WORKLOADS[workload].batch / ran["wall_s"]} | ran)
            print(workload, size, arm, json.dumps(found[arm][-1]), flush=True)
    shares = [mine["rate"] / most["rate"] for mine, most in zip(found["Brigade"], found[ALONE], strict=True)]
    ms = sent_ms(workload, size)
    step_ms = 1e3 * statistics.median(run["wall_s"] for run in found["Brigade"])
    cells = [str(size), *(cell(runs, "rate", ".0f") for runs in found.values()), f"{statistics.median(shares):.2f}"]
    return f"| {' | '.join([*cells, f'{ms:.1f}', f'{100 * ms / step_ms:.1f} %'])} |"


def main() -> None:
    """Measure both models, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each arm")
    rounds = parser.parse_args().rounds
    began = time.monotonic()
    tables = {}
    for workload, unit in (("resnet", "images"), ("gpt", "sequences")):
        tables[workload] = "\n".join([HEAD.format(unit), *(row(workload, size, rounds) for size in SIZES)])
        print(tables[workload], flush=True)
    pages.write(
        ROOT / "docs" / "measured" / "scaling.md",
        measured=pages.measured(
            "uv run python -m benchmarks.scaling",
            f"float32, gloo, processes of one thread, {rounds} rounds of {STEPS} steps",
            began=began,
        ),
        resnet=tables["resnet"],
        gpt=tables["gpt"],
    )


if __name__ == "__main__":
    main()
