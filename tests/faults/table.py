"""Run the fault matrix and write docs/faults.md: `uv run python -m tests.faults.table [RECIPE ...] [--repeats N]`.

Of some recipes only, it takes minutes and replaces their rows; those of the others stay as they were measured.
"""

import argparse
import collections
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.harness.runner import RECIPES, ROOT, cpu_name

DOCUMENT = ROOT / "docs" / "faults.md"
COLUMNS = "fault | recipe | ranks | runs | passes | steps lost | s to notice | s to recover | message"
INTRO = """# What was done to the recipes, and what came of it

Each row is a fault that `tests/faults` puts into a run of a recipe, with a model of some thousand parameters and three
steps an epoch: a pass means that it was named or noticed as it should be, and that the run then continued to the same
losses and the same bits as one without the fault. Seconds to notice count from the fault until every other rank has
named it, seconds to recover from the command that continues the run (from the fault, where torchrun restarts it) to the
first step done; where there were several runs, the largest is shown.
"""


def main() -> None:
    """Run pytest as often as asked, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(RECIPES)}; default: all")
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    if unknown := {*args.recipes} - {*RECIPES}:
        parser.error(f"no recipe: {', '.join(unknown)}")
    found: dict[tuple[str, str], list[dict[str, Any]]] = collections.defaultdict(list)
    began = time.monotonic()
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder, "rows.jsonl")
            command = [sys.executable, "-m", "pytest", "-m", "faults", "tests/faults", "-k", " or ".join(args.recipes)]
            subprocess.run(command, cwd=ROOT, env=os.environ | {"FAULTS_RECORD": str(record)}, check=False)
            for line in record.read_text().splitlines():
                row = json.loads(line)
                found[row["fault"], row["recipe"]].append(row)
    words = " ".join([*args.recipes, *([f"--repeats {args.repeats}"] if args.repeats > 1 else [])])
    measured = [
        f"`{' '.join(['uv run python -m tests.faults.table', words]).rstrip()}`, {time.strftime('%Y-%m-%d')}, "
        f"{cpu_name()}, {os.cpu_count()} cores,\nPython {platform.python_version()}, torch {torch.__version__}, gloo; "
        f"{(time.monotonic() - began) / 60:.0f} minutes."
    ]
    rows = [merge(several) for several in found.values()]
    if args.recipes:
        before = DOCUMENT.read_text()
        measured = [*re.findall(r"^`uv run [^`]*`, .*\n.* minutes\.$", before, re.MULTILINE), *measured]
        kept = [line[2:-2].split(" | ", maxsplit=8) for line in before.splitlines() if line.startswith("| ")]
        rows += [row for row in kept if row[1] in RECIPES and row[1] not in args.recipes]
    table = "".join(f"| {' | '.join(row)} |\n" for row in sorted(rows))
    head = f"| {COLUMNS} |\n|{'---|' * len(COLUMNS.split('|'))}\n"
    DOCUMENT.write_text("\n\n".join([INTRO.rstrip(), *measured, summary(rows), head + table]))


def summary(rows: list[list[str]]) -> str:
    """How many passed, and what did not or was not run."""
    runs, passes = (sum(int(row[column]) for row in rows) for column in (3, 4))
    none = sum(row[3] == "0" for row in rows)
    cases = f"{len(rows) - none} fault cases; {none} do not apply or were not run"
    return f"**{passes} of {runs} runs passed**, in {cases}."


def merge(several: list[dict[str, Any]]) -> list[str]:
    """One line of the table from the same fault case, run one or more times."""
    first = next((row for row in several if row["passes"] < row["runs"]), several[0])

    def largest(key: str, digits: int) -> str:
        values = [row[key] for row in several if row[key] is not None]
        return f"{max(values):.{digits}f}" if values else ""

    return [
        *(first["fault"], first["recipe"], str(first["ranks"])),
        *(str(sum(row[key] for row in several)) for key in ("runs", "passes")),
        *(largest("steps_lost", 0), largest("notice_s", 1), largest("recover_s", 1)),
        plain(first["message"]),
    ]


def plain(message: str) -> str:
    """The first line, without what is of this machine or of the table's own syntax."""
    line = (message.splitlines() or [""])[0]
    line = re.sub(r"pid \d+", "pid N", line).replace(f"host {platform.node()}", "host H")
    line = re.sub(rf"process \d+ on {re.escape(platform.node())}", "process N on H", line)
    line = line.replace(f"on {platform.node()}:", "on H:").replace("|", "\\|")
    return line if len(line) <= 160 else f"{line[:157]}..."


if __name__ == "__main__":
    main()
