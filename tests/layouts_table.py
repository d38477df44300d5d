"""Move a checkpoint from every layout to every other: `uv run python -m tests.layouts_table`.

It runs tests/test_layouts.py and writes the figures of docs/checkpoints.md.
"""

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
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "rows.jsonl")
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "layouts", "tests/test_layouts.py"]
        command += ["-k", "any_to_any"]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"LAYOUTS_RECORD": str(record)}, check=False)
        rows = [json.loads(line) for line in record.read_text().splitlines()]
    wanted = len(moves.LAYOUTS) ** 2 + len(moves.TIED) ** 2
    table = [f"| | {' | '.join(moves.KINDS)} |", f"|{'---|' * (len(moves.KINDS) + 1)}"]
    for source in moves.KINDS:
        cells = [cell(rows, source, target) for target in moves.KINDS]
        table.append(f"| **{source}** | {' | '.join(cells)} |")
    kinds = [f"| {kind} | {', '.join(map(describe, layouts))} |" for kind, layouts in moves.KINDS.items()]
    pages.write(
        ROOT / "docs" / "checkpoints.md",
        measured=pages.measured("uv run python -m tests.layouts_table", "gloo", began=began),
        sum=f"**{sum(map(passed, rows))} of {len(rows)} moves passed**; {wanted - len(rows)} were not run. "
        f"{moves.STOP} steps before each move, {moves.MORE} after it.",
        moves="\n".join(table),
        kinds="\n".join(["| kind | layouts |", "|---|---|", *kinds]),
    )


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
