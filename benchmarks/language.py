"""Every language-model recipe as it stands, on two processes: `uv run python -m benchmarks.language`.

Writes docs/language.md: how long each takes, and when it is better than a bigram model of the same bytes.
"""

import datetime
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.bigram import bigram_loss
from common.workloads import text
from tests.harness import runner
from tests.harness.runner import cpu_name

EVAL_EVERY = 50


def train(recipe: str, out: Path) -> tuple[float, float, list[tuple[int, float]]]:
    """Seconds in all, seconds of training, and the validation loss by step, of the recipe's defaults."""
    command = [
        "bash",
        str(runner.ROOT / "launch/torchrun.sh"),
        f"recipes/{recipe}",
        "--out",
        str(out),
        "--name",
        recipe,
    ]
    start = time.perf_counter()
    told = subprocess.run(
        [*command, "--eval-every", str(EVAL_EVERY)],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"NPROC_PER_NODE": "2"},
    ).stdout
    took = time.perf_counter() - start
    training = float(told.split(" s of it training")[0].rpartition(", ")[2])
    return took, training, list(runner.records(out / recipe, "val/loss").items())


def main() -> None:
    """Train each, compare, write."""
    recipes = [recipe for recipe in runner.RECIPES if runner.workload(recipe) == "gpt"]
    wanted = bigram_loss(*text.load("stdlib", 128))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe in recipes:
            took, training, losses = train(recipe, Path(folder))
            better = next((str(step) for step, loss in losses if loss < wanted), "never")
            rows.append(f"| {recipe} | {took:.0f} | {training:.0f} | {losses[-1][1]:.3f} | {better} |")
            print(rows[-1], flush=True)
    table = "\n".join(rows)
    (runner.ROOT / "docs/language.md").write_text(
        f"""# The language-model recipes as they stand

`uv run python -m benchmarks.language`, {datetime.date.today()}, {cpu_name()}, {os.cpu_count()} cores, two processes,
gloo, Python {platform.python_version()}, torch {torch.__version__}: the built-in text, default flags but `--eval-every
{EVAL_EVERY}`. A bigram model of the same bytes (`benchmarks/bigram.py`) has a validation loss of {wanted:.3f} nats a
byte.

| recipe | seconds in all | of it training | val/loss at the end | better than the bigram model from step (evaluated) |
|---|---|---|---|---|
{table}
"""
    )


if __name__ == "__main__":
    main()
