"""Move a checkpoint from every layout to every other: `uv run python -m tests.layouts_table`.

It runs tests/test_layouts.py and writes the figures of docs/checkpoints.md. With `--rows FILE`, it writes those of a
run that is over: `LAYOUTS_RECORD=FILE` lets pytest add them to a file.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import test_layouts as moves
from tests.harness import pages
from tests.harness.runner import ROOT


def main() -> None:
    """Run pytest, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, help="write the page from this file, without a run")
    args = parser.parse_args()
    began = time.monotonic()
    rows = [json.loads(line) for line in (args.rows.read_text() if args.rows else run()).splitlines()]
    wanted = len(moves.LAYOUTS) ** 2 + len(moves.TIED) ** 2
    table = [f"| | {' | '.join(moves.KINDS)} |", f"|{'---|' * (len(moves.KINDS) + 1)}"]
    for source in moves.KINDS:
        cells = [cell(rows, source, target) for target in moves.KINDS]
        table.append(f"| **{source}** | {' | '.join(cells)} |")
    kinds = [f"| {kind} | {', '.join(map(describe, layouts))} |" for kind, layouts in moves.KINDS.items()]
    pages.write(
        ROOT / "docs" / "checkpoints.md",
        measured=pages.measured("uv run python -m tests.layouts_table", "gloo", began=None if args.rows else began),
        sum=f"**{sum(map(passed, rows))} of {len(rows)} moves passed**; {wanted - len(rows)} were not run. "
        f"{moves.STOP} steps before each move, {moves.MORE} after it.",
        moves="\n".join(table),
        kinds="\n".join(["| kind | layouts |", "|---|---|", *kinds]),
    )


def run() -> str:
    """Make all moves; returns a line of JSON for each."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "rows.jsonl")
        command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "layouts", "tests/test_layouts.py"]
        command += ["-k", "any_to_any"]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"LAYOUTS_RECORD": str(record)}, check=False)
        return record.read_text()


def passed(row: Mapping[str, Any]) -> bool:
    return not row["changed"] and row["worst"] < moves.TOLERANCE


def cell(rows: Sequence[Mapping[str, Any]], source: str, target: str) -> str:
    """What came of the moves from one kind of layout to another."""
    sources, targets = ({str(layout) for layout in moves.KINDS[kind]} for kind in (source, target))
    these = [row for row in rows if row["source"] in sources and row["target"] in targets]
    if not these:
        return "not run"
    return f"{sum(map(passed, these))}/{len(these)} {max(row['worst'] for row in these):.0e}"


def describe(layout: moves.Layout) -> str:
    """Whose train.py, on how many ranks, with which flags."""
    return f"`{' '.join((layout.recipe, *layout.flags))}` on {layout.size}"


if __name__ == "__main__":
    main()
