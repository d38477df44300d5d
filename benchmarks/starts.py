"""What --help and a wrong flag cost: `uv run python -m benchmarks.starts` fills docs/measured/starts.md.

Processor seconds of the command and of all that it starts, by turns with `import torch`, which any training needs.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time

from tests.harness import pages
from tests.harness.runner import RECIPES, ROOT

PAGE = ROOT / "docs" / "measured" / "starts.md"
TURNS = 5
REFUSED = 2
WRONG = {"a wrong flag": ("--lrr", "3"), "a wrong value": ("--lr", "high")}
TORCH = "`import torch`"


def commands(recipe: str) -> dict[str, tuple[list[str], int]]:
    """Each command with its exit code, by the words that stand in the table.

    Args:
        recipe: whose wrong flags are tried, and that the launcher starts.
    """
    python = sys.executable
    found = {TORCH: ([python, "-c", "import torch"], 0)}
    for name in RECIPES:
        found[f"{name}, --help"] = ([python, f"recipes/{name}/train.py", "--help"], 0)
    launcher = ["bash", "launch/torchrun.sh", f"recipes/{recipe}"]
    for what, flags in WRONG.items():
        found[f"{recipe}, {what}"] = ([python, f"recipes/{recipe}/train.py", *flags], REFUSED)
    found[f"launch/torchrun.sh {recipe}, --help"] = ([*launcher, "--help"], 0)
    for what, flags in WRONG.items():
        found[f"launch/torchrun.sh {recipe}, {what}"] = ([*launcher, *flags], REFUSED)
    for tool in sorted(path.parent.name for path in ROOT.glob("tools/*/__main__.py")):
        words = [python, "-m", f"tools.{tool}"]
        found[f"tools.{tool}, --help"] = ([*words, "--help"], 0)
        found[f"tools.{tool}, a wrong flag"] = ([*words, "--no-such-flag"], REFUSED)
    return found


def processor_s(command: list[str], code: int) -> float:
    """User and system time of a command and its children, which it has waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "NPROC_PER_NODE": "2"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode != code:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure by turns, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", default="ddp_gpt", help="whose refusals are measured (default: ddp_gpt)")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"how often each command runs (default: {TURNS})")
    args = parser.parse_args()
    began = time.monotonic()
    found: dict[str, list[float]] = {}
    for turn in range(-1, args.turns):  # the first one reads the files
        for name, command in commands(args.recipe).items():
            used_s = processor_s(*command)
            if turn >= 0:
                found.setdefault(name, []).append(used_s)
    rows = ["| | processor seconds, median | range | of `import torch` |", "|---|---|---|---|"]
    for name, values in found.items():
        ratio = statistics.median(used / torch for used, torch in zip(values, found[TORCH], strict=True))
        rows.append(
            f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} to {max(values):.2f} | {ratio:.2f} |"
        )
    own = " ".join(["uv run python -m benchmarks.starts", *sys.argv[1:]])
    measured = pages.measured(own, f"2 ranks, {args.turns} turns", began=began)
    print(measured, *rows, sep="\n")
    pages.write(PAGE, measured=measured, times="\n".join(rows))


if __name__ == "__main__":
    main()
