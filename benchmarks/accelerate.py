"""Overhead of Accelerate: `uv run python -m benchmarks.accelerate` writes docs/measured/accelerate.md.

recipes/ddp_gpt and recipes/accelerate_gpt by turns, each through launch/torchrun.sh: seconds from the command to the
end of the first step, and steps per second of the training itself, with the recipes' own model and with one so small
that what is around it shows.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from tests.harness import pages, runner

RECIPES = ("ddp_gpt", "accelerate_gpt")
TINY = ("--num-layers", "1", "--num-heads", "2", "--width", "16", "--mlp-width", "16", "--seq-len", "16")
SIZES: dict[str, tuple[str, ...]] = {"the default model": (), "a tiny model": TINY}
QUIET = ("--eval-every", "100000", "--save-every", "100000", "--check-every", "0", "--dtype", "float32")
RECORDS = 4  # of a run's rate, without the first


def command(recipe: str, *flags: str) -> list[str]:
    """Through the launcher, as people start it."""
    return ["bash", str(runner.ROOT / "launch/torchrun.sh"), f"recipes/{recipe}", *QUIET, *flags]


def first_step_s(recipe: str, size: int, out: Path) -> float:
    """Seconds from the command to the line of the first step."""
    flags = ("--max-steps", "1", "--log-every", "1", "--out", str(out), "--name", f"first-{time.monotonic_ns()}")
    env = os.environ | {"NPROC_PER_NODE": str(size)}
    began = time.perf_counter()
    with subprocess.Popen(command(recipe, *flags), env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        came = next(time.perf_counter() for line in process.stdout if line.startswith("step 1/1  loss"))
        process.stdout.read()
    assert process.returncode == 0
    return came - began


def steps_per_s(recipe: str, size: int, steps: int, sizes: tuple[str, ...], out: Path) -> float:
    """Of the training, without its first steps: the median of some records."""
    name, every = f"rate-{time.monotonic_ns()}", steps // (RECORDS + 1)
    flags = ("--max-steps", str(steps), "--log-every", str(every), "--out", str(out), "--name", name, *sizes)
    env = os.environ | {"NPROC_PER_NODE": str(size)}
    subprocess.run(command(recipe, *flags, "--global-batch-size", "32"), env=env, check=True, capture_output=True)
    rates = list(runner.records(out / name, "perf/samples_per_s").values())
    return statistics.median(rates[1 : RECORDS + 1]) / 32


def row(what: str, found: dict[str, list[float]], form: str) -> str:
    """One figure of both recipes, and the ratio of their medians."""
    ratio = statistics.median(found[RECIPES[1]]) / statistics.median(found[RECIPES[0]])
    return f"| {what} | {' | '.join(pages.spread(found[recipe], form) for recipe in RECIPES)} | {ratio:.2f} |"


def main() -> None:
    """Measure by turns, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=100, help="of the default model; ten times as many of the tiny one"
    )
    parser.add_argument("--out", type=Path, default=runner.ROOT / "docs" / "measured" / "accelerate.md")
    args = parser.parse_args()
    first: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
    rates: dict[str, dict[str, list[float]]] = {size: {recipe: [] for recipe in RECIPES} for size in SIZES}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for recipe in RECIPES[:: -1 if number % 2 else 1]:  # neither is always first
                first[recipe].append(first_step_s(recipe, args.processes, Path(folder)))
                for size, flags in SIZES.items():
                    steps = args.steps * (10 if flags else 1)
                    rates[size][recipe].append(steps_per_s(recipe, args.processes, steps, flags, Path(folder)))
                latest = {size: round(found[recipe][-1], 2) for size, found in rates.items()}
                print(f"round {number + 1}  {recipe:14}  {first[recipe][-1]:.1f} s  {latest}", flush=True)
    rows = [row("seconds to the end of the first step", first, ".1f")]
    rows += [row(f"steps per second, {size}", found, ".2f") for size, found in rates.items()]
    head = f"| | {' | '.join(RECIPES)} | ratio |\n|---|{'---|' * len(RECIPES)}---|"
    command = f"uv run python -m benchmarks.accelerate --rounds {args.rounds} --steps {args.steps}"
    measured = pages.measured(
        f"{command} --processes {args.processes}", "gloo, float32", f"accelerate {version('accelerate')}", began=began
    )
    pages.write(args.out, measured=measured, cost="\n".join([head, *rows]))


if __name__ == "__main__":
    main()
