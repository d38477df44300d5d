"""Go from every layout to every other and write docs/checkpoints.md: `uv run python -m tests.layouts_table`."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests import test_layouts as moves
from tests.harness.runner import ROOT, cpu_name

INTRO = """# Who can go on with whose checkpoint

Each layout below trained a small language model for {stop} steps in float64, and saved; then each layout, on its own
number of ranks, went on with the checkpoint of each. A move passes if every rank then holds, bit for bit, what was
saved of the model and of the optimizer, and the next {more} losses and gradient norms are those of one process that was
never interrupted, to within a billionth.
"""
CELLS = """
Rows: who has saved. Columns: who goes on. In a cell: moves that passed, of how many, and the largest relative
difference of a loss or gradient norm. Its moves are between all layouts of the two kinds, and between some of them
once more with an embedding that is also the output layer. There is no recipe `dp_gpt`: the test puts the strategy of
dp_resnet into ddp_gpt; without a GPU, nn.DataParallel runs the model unwrapped.
"""


def main() -> None:
    """Run pytest, and write the table."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "rows.jsonl")
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-m", "layouts", "tests/test_layouts.py", "-k", "any_to_any"]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"LAYOUTS_RECORD": str(record)}, check=False)
        took_s = time.monotonic() - began
        rows = [json.loads(line) for line in record.read_text().splitlines()]
    text = INTRO.format(stop=moves.STOP, more=moves.MORE) + (
        f"\n`uv run python -m tests.layouts_table`, {time.strftime('%Y-%m-%d')}, {cpu_name()}, {os.cpu_count()} cores, "
        f"Python\n{platform.python_version()}, torch {torch.__version__}, gloo; {took_s / 60:.0f} minutes.\n\n"
    )
    wanted = len(moves.LAYOUTS) ** 2 + len(moves.TIED) ** 2
    text += f"**{sum(map(passed, rows))} of {len(rows)} moves passed**; {wanted - len(rows)} were not run.\n{CELLS}\n"
    text += f"| | {' | '.join(moves.KINDS)} |\n|{'---|' * (len(moves.KINDS) + 1)}\n"
    for source in moves.KINDS:
        cells = [cell(rows, source, target) for target in moves.KINDS]
        text += f"| **{source}** | {' | '.join(cells)} |\n"
    text += "\n| kind | layouts |\n|---|---|\n"
    for kind, layouts in moves.KINDS.items():
        text += f"| {kind} | {', '.join(map(describe, layouts))} |\n"
    (ROOT / "docs" / "checkpoints.md").write_text(text)


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
