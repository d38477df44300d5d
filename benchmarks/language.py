"""Every language-model recipe as it stands, on two processes: `uv run python -m benchmarks.language`.

Writes docs/measured/language.md: how long each takes, and when it is better than a bigram model of the same bytes.
"""

import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.bigram import bigram_loss
from common.workloads import text
from tests.harness import pages, runner

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
    training = re.search(r"of which ([\d.]+) s training", told)
    assert training, told
    return took, float(training[1]), list(runner.records(out / recipe, "val/loss").items())


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
    head = "| recipe | seconds in all | of which training | val/loss at the end | better than the bigram from step |"
    pages.write(
        runner.ROOT / "docs/measured/language.md",
        measured=pages.measured("uv run python -m benchmarks.language", "two processes", "gloo"),
        bigram=f"A bigram model of the same bytes has a validation loss of **{wanted:.3f}** nats a byte.",
        recipes="\n".join([head, "|---|---|---|---|---|", *rows]),
    )


if __name__ == "__main__":
    main()
