"""Run the whole fault matrix and write docs/faults.md: `uv run python -m tests.faults.table [REPEATS]`."""

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

from tests.ranks import ROOT, cpu_name

COLUMNS = "fault | recipe | ranks | runs | passes | steps lost | s to notice | s to recover | message"
INTRO = """# What was done to the recipes, and what came of it

Each row is a fault that `tests/faults` puts into a run of a recipe, with a model of some thousand parameters and three
steps an epoch: a pass means that it was named or noticed as it should be, and that the run then went on to the same
losses and the same bits as one without the fault. Seconds to notice count from the fault until every other rank has
named it, seconds to recover from the command that goes on (from the fault, where torchrun does it) to the first step
done; where there were several runs, the largest is shown.
"""


def main() -> None:
    """Run pytest as often as asked, and write the table."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    rows: dict[tuple[str, str], list[dict[str, Any]]] = collections.defaultdict(list)
    took_s = 0.0
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder, "rows.jsonl")
            began = time.monotonic()
            command = [sys.executable, "-m", "pytest", "-m", "faults", "tests/faults"]
            subprocess.run(command, cwd=ROOT, env=os.environ | {"FAULTS_RECORD": str(record)}, check=False)
            took_s += time.monotonic() - began
            for line in record.read_text().splitlines():
                row = json.loads(line)
                rows[row["fault"], row["recipe"]].append(row)
    again = f" {repeats}" if repeats > 1 else ""
    text = INTRO + (
        f"\n`uv run python -m tests.faults.table{again}`, {time.strftime('%Y-%m-%d')}, {cpu_name()}, {os.cpu_count()} "
        f"cores, Python\n{platform.python_version()}, torch {torch.__version__}, gloo; {took_s / 60:.0f} minutes.\n\n"
    )
    text += f"{summary(rows)}\n\n| {COLUMNS} |\n|{'---|' * len(COLUMNS.split('|'))}\n"
    text += "".join(f"| {' | '.join(merge(several))} |\n" for _, several in sorted(rows.items()))
    (ROOT / "docs" / "faults.md").write_text(text)


def summary(rows: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """How many passed, and what did not or was not run."""
    every = [row for several in rows.values() for row in several]
    runs, passes = (sum(row[key] for row in every) for key in ("runs", "passes"))
    none = sum(not any(row["runs"] for row in several) for several in rows.values())
    return f"**{passes} of {runs} runs passed**, in {len(rows) - none} cells; {none} do not apply or were not run."


def merge(several: list[dict[str, Any]]) -> list[str]:
    """One line of the table from the same cell, run one or more times."""
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
