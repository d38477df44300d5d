"""Move a checkpoint from every layout to every other: `uv run python -m tests.layouts_table`.

It runs tests/recipes/test_layouts.py and writes the figures of docs/checkpoints.md. With kinds of layouts
(`... -m tests.layouts_table cp diloco`), it makes the moves from and to these only, and the cells of the others stay.
With --store, the checkpoints lie in an object store, and only the sum of its section is written.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness import pages
from tests.harness.runner import ROOT
from tests.recipes import test_layouts as moves

PAGE = ROOT / "docs" / "checkpoints.md"
NONE = "0/0"  # moves of a cell that were run


def main() -> None:
    """Run pytest, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(moves.KINDS)}; default: all")
    parser.add_argument("--store", action="store_true", help="let the checkpoints lie on s3://, on this machine")
    args = parser.parse_args()
    if unknown := {*args.kinds} - {*moves.KINDS}:
        parser.error(f"no kind of layout: {', '.join(unknown)}")
    asked = args.kinds or [*moves.KINDS]
    before = pages.parts(PAGE.read_text())
    known = cells(before["moves"])
    began = time.monotonic()
    rows = run(asked, args.store)
    words = [*(["--store"] if args.store else []), *map(shlex.quote, args.kinds)]
    command = " ".join(["uv run python -m tests.layouts_table", *words])
    measured = pages.measured(command, "gloo", began=began)
    wanted = len(moves.LAYOUTS) ** 2 + len(moves.TIED) ** 2
    if args.store:
        text = f"**{sum(map(passed, rows))} of {len(rows)} moves passed** with the checkpoints on s3://; "
        pages.write(PAGE, stored=f"{text}{wanted - len(rows)} were not run.\n\n{measured}")
        return
    table = [f"| | {' | '.join(moves.KINDS)} |", f"|{'---|' * (len(moves.KINDS) + 1)}"]
    passes = []  # of a cell, and of how many moves
    for source in moves.KINDS:
        line = [
            cell(rows, source, target) if {source, target} & {*asked} else known.get((source, target), NONE)
            for target in moves.KINDS
        ]
        passes += [re.findall(r"\d+", one)[:2] for one in line]
        table.append(f"| **{source}** | {' | '.join(line)} |")
    kinds = [f"| {kind} | {', '.join(map(describe, layouts))} |" for kind, layouts in moves.KINDS.items()]
    well, ran = (sum(map(int, column)) for column in zip(*passes, strict=True))
    pages.write(
        PAGE,
        measured="\n\n".join([before["measured"], measured] if args.kinds else [measured]),
        sum=f"**{well} of {ran} moves passed**; {wanted - ran} were not run. "
        f"{moves.STOP} steps before each move, {moves.MORE} after it.",
        moves="\n".join(table),
        kinds="\n".join(["| kind | layouts |", "|---|---|", *kinds]),
    )


def cells(table: str) -> dict[tuple[str, str], str]:
    """What a page's table says of the moves from one kind to another."""
    head, _, *lines = ([part.strip() for part in line.strip("|").split("|")] for line in table.splitlines())
    return {(one[0].strip("*"), target): text for one in lines for target, text in zip(head[1:], one[1:], strict=True)}


def run(kinds: Sequence[str], in_store: bool) -> list[dict[str, Any]]:
    """Make all moves from and to these kinds."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "rows.jsonl")
        command = [sys.executable, "-m", "pytest", "-m", "rest", "tests/recipes/test_layouts.py", "-k", "any_to_any"]
        environ = os.environ | {"LAYOUTS_RECORD": str(record), "LAYOUTS_KINDS": ",".join(kinds)}
        environ |= {"LAYOUTS_STORE": "1"} if in_store else {}
        subprocess.run([*command, "--timeout=1800"], cwd=ROOT, env=environ, check=False)
        return [json.loads(line) for line in record.read_text().splitlines()]


def passed(row: Mapping[str, Any]) -> bool:
    return not row["changed"] and row["worst"] < moves.TOLERANCE


def cell(rows: Sequence[Mapping[str, Any]], source: str, target: str) -> str:
    """What came of the moves from one kind of layout to another."""
    sources, targets = ({str(layout) for layout in moves.KINDS[kind]} for kind in (source, target))
    these = [row for row in rows if row["source"] in sources and row["target"] in targets]
    if not these:
        return NONE
    return f"{sum(map(passed, these))}/{len(these)} {max(row['worst'] for row in these):.0e}"


def describe(layout: moves.Layout) -> str:
    """Whose train.py, on how many ranks, with which flags."""
    return f"`{' '.join((layout.recipe, *layout.flags))}` on {layout.size}"


if __name__ == "__main__":
    main()
