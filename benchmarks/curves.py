"""Draw the loss of every recipe in one picture: `uv run python benchmarks/curves.py` writes docs/curves.png.

Every recipe trains on the built-in digits from the same seed with the same global batch, in float64, on 1 to
4 processes (a recipe whose launch.env asks for one process, on one). The lower panel shows what is left
between them.
"""

import datetime
import json
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import torch
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
STEPS, BATCH = 48, 120  # 120 divides by 1, 2, 3 and 4


def runs() -> list[tuple[str, int]]:
    """Every recipe with the numbers of processes it runs on."""
    found = []
    for path in sorted(ROOT.glob("recipes/*/train.py")):
        env = path.with_name("launch.env")
        single = env.exists() and "NPROC_PER_NODE=1" in env.read_text()
        found += [(path.parent.name, size) for size in ((1,) if single else (1, 2, 3, 4))]
    return sorted(found, key=lambda run: run[1])


def losses(recipe: str, processes: int, out: Path) -> list[float]:
    """Train for real, through the launcher; loss of each step."""
    name = f"{recipe}-{processes}"
    sync_bn = ["--sync-bn"] if "sync_bn" in (ROOT / "recipes" / recipe / "train.py").read_text() else []
    flags = ["--max-steps", str(STEPS), "--global-batch-size", str(BATCH), "--dtype", "float64", "--log-every", "1"]
    flags += ["--micro-batch-size", "0"]  # one pass a step: BatchNorm sees the same samples on any number of ranks
    command = ["bash", str(ROOT / "launch/torchrun.sh"), f"recipes/{recipe}", *flags, *sync_bn]
    command += ["--eval-every", str(STEPS), "--save-every", str(STEPS), "--out", str(out), "--name", name]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"NPROC_PER_NODE": str(processes)})
    records = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]


def cpu_name() -> str:
    """Name of this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    """Train, compare, draw."""
    with tempfile.TemporaryDirectory() as folder:
        curves = {run: losses(*run, Path(folder)) for run in runs()}
    (first, baseline), *others = curves.items()
    steps = range(1, STEPS + 1)
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 5.4), sharex=True, height_ratios=[3, 1.4], layout="constrained"
    )
    for i, ((recipe, processes), values) in enumerate(curves.items()):
        # The first lines are broad and the later ones narrow, so that all show where they lie on each other.
        width = 9 - 8 * i / max(1, len(curves) - 1)
        label = f"{recipe}, {processes} process{'es' * (processes > 1)}"
        top.plot(steps, values, linewidth=width, label=label, solid_capstyle="round")
    top.set_ylabel("training loss")
    top.legend(frameon=False)
    for i, ((_, _), values) in enumerate(others, start=1):
        difference = [max(abs(a - b) / b, 1e-17) for a, b in zip(values, baseline, strict=True)]
        bottom.semilogy(steps, difference, ".", markersize=4, color=f"C{i}")
    bottom.axhline(1e-9, color="black", linewidth=0.8, linestyle="--")
    bottom.annotate("1e-9, the tolerance of the tests", (1, 1.6e-9), fontsize=8)
    bottom.set_ylim(1e-17, 1e-7)
    bottom.set_ylabel(f"relative to\n{first[0]}")
    bottom.set_xlabel(
        f"step (ResNet-18 on digits, float64, batch {BATCH})\n"
        f"{cpu_name()}, {os.cpu_count()} cores, gloo, torch {torch.__version__}, {datetime.date.today()}",
        fontsize=9,
    )
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs/curves.png", dpi=150)
    worst = max(abs(a - b) / b for _, values in others for a, b in zip(values, baseline, strict=True))
    print(f"{len(curves)} runs of {STEPS} steps, largest relative difference of a loss: {worst:.1e}")


if __name__ == "__main__":
    main()
