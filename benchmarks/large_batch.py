"""Accuracy against batch size: `uv run python -m benchmarks.large_batch` writes docs/measured/large_batch.png and .md.

The shape of figure 1 and table 2 of Goyal et al. 2017 (https://arxiv.org/abs/1706.02677) on the built-in digits:
recipes/multinode_resnet, the same number of epochs at every batch size, with the learning rate scaled to the
batch and warmed up, scaled without warm-up, and not scaled at all.
"""

import argparse
import datetime
import os
import statistics
import tempfile
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import torch
from matplotlib import pyplot as plt
from tests.harness import pages, runner
from tools.about import ROOT, cpu_name

EPOCHS, SAMPLES, WARMUP_EPOCHS = 10, 1433, 2
LR, REFERENCE = 0.2, 256  # the recipe's defaults
BATCHES = (64, 128, 256, 512, 1024)
HOW = ("scaled, warmed up", "scaled", "not scaled")


def flags(how: str, batch: int) -> list[str]:
    """What makes one of HOW."""
    warmup = WARMUP_EPOCHS * SAMPLES // batch if how == "scaled, warmed up" else 0
    # Not scaled: the rate that the smallest batch has, for all.
    lr, reference = (LR * BATCHES[0] / REFERENCE, batch) if how == "not scaled" else (LR, REFERENCE)
    return ["--warmup-steps", str(warmup), "--lr", str(lr), "--lr-reference-batch", str(reference)]


def accuracy(how: str, batch: int, seed: int, folder: Path) -> float:
    """val/top1 after EPOCHS."""
    name = f"{batch}-{HOW.index(how)}-{seed}"
    common = ["--model", "resnet18", "--epochs", str(EPOCHS), "--global-batch-size", str(batch), "--seed", str(seed)]
    common += ["--eval-every", "100000", "--save-every", "100000", "--out", str(folder), "--name", name]
    result = runner.run_recipe("multinode_resnet", 2, *common, *flags(how, batch), timeout_s=1800)
    assert result.ok, str(result)
    (value,) = runner.records(folder / name, "val/top1").values()
    print(f"batch {batch:5}  {how:18}  seed {seed}  val/top1 {value:.4f}", flush=True)
    return value


def main() -> None:
    """Train, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    seeds = range(parser.parse_args().seeds)
    with tempfile.TemporaryDirectory() as folder:
        found = {
            (how, batch): [accuracy(how, batch, seed, Path(folder)) for seed in seeds]
            for batch in BATCHES
            for how in HOW
        }
    means = {key: statistics.mean(values) for key, values in found.items()}
    where = f"{cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}, {datetime.date.today()}"
    what = f"ResNet-18 on the digits, {EPOCHS} epochs, micro-batches of 32, {len(seeds)} seeds"

    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for i, how in enumerate(HOW):
        axes.plot(BATCHES, [100 * (1 - means[how, batch]) for batch in BATCHES], "o-", color=f"C{i}", label=how)
        for batch in BATCHES:
            axes.plot([batch] * len(seeds), [100 * (1 - value) for value in found[how, batch]], "_", color=f"C{i}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
    axes.set_yscale("log")
    axes.set_yticks([1, 2, 5, 10, 20, 50, 90], ["1", "2", "5", "10", "20", "50", "90"])
    axes.minorticks_off()
    axes.set_ylabel("validation error, %")
    axes.set_xlabel(f"samples per step (--global-batch-size)\n{what}\n{where}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title="learning rate")
    figure.savefig(ROOT / "docs/measured/large_batch.png", dpi=150)

    lines = [f"| {batch} | {EPOCHS * SAMPLES // batch} | " for batch in BATCHES]
    table = "\n".join(
        line + " | ".join(f"{100 * means[how, batch]:.1f}" for how in HOW) + " |"
        for line, batch in zip(lines, BATCHES, strict=True)
    )
    head = f"| batch | steps | {' | '.join(HOW)} |\n|---|---|{'---|' * len(HOW)}"
    pages.write(
        ROOT / "docs/measured/large_batch.md",
        measured=pages.measured(f"uv run python -m benchmarks.large_batch --seeds {len(seeds)}", what),
        accuracy=f"{head}\n{table}",
    )


if __name__ == "__main__":
    main()
