"""Run the fault matrix: `uv run python -m tests.faults.table` writes faults.csv and faults.md in docs/measured.

The file has a row for each fault and recipe. The page sums up each family of faults, and names every pair that failed
or was not run; people write its prose. With names of recipes (`... -m tests.faults.table ddp_gpt fsdp_gpt`) it takes
minutes and replaces the rows of those recipes only; with `-k EXPRESSION`, as of pytest, the rows that it has run.
`--no-run` writes the page again from the file.
"""

import argparse
import collections
import csv
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness import pages
from tests.harness.runner import RECIPES, ROOT

PAGE, FILE = ROOT / "docs" / "measured" / "faults.md", ROOT / "docs" / "measured" / "faults.csv"
COLUMNS = ("fault", "recipe", "ranks", "runs", "passes", "steps_lost", "notice_s", "recover_s", "message")
SLOWEST = {"steps_lost": "steps lost", "notice_s": "s to notice", "recover_s": "s to recover"}  # largest of a family
BITS = "damage: 200 random bits, one at a time"  # no training: only looks whether the digests show each flipped bit
EXAMPLES = 3  # lines of the terminal that the page shows of each family
Row = dict[str, str]  # by COLUMNS
FINISHED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


def main() -> None:
    """Run pytest as often as asked, and write the file and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(RECIPES)}; default: all")
    parser.add_argument(
        "-k", dest="tests", default="", metavar="EXPRESSION", help="these tests only, as pytest selects them"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--no-run", action="store_true", help="write the page from docs/measured/faults.csv as it is")
    args = parser.parse_args()
    if unknown := {*args.recipes} - {*RECIPES}:
        parser.error(f"no recipe: {', '.join(unknown)}")
    before = PAGE.read_text()
    if args.no_run:
        PAGE.write_text(pages.fill(before, **render(read(FILE), pages.parts(before)["measured"].split("\n\n"))))
        return
    began = time.monotonic()
    rows = run(args.recipes, args.tests, args.repeats)
    words = [*args.recipes, *(["-k", shlex.quote(args.tests)] if args.tests else [])]
    words += [f"--repeats {args.repeats}"] if args.repeats > 1 else []
    measured = [pages.measured(" ".join(["uv run python -m tests.faults.table", *words]), "gloo", began=began)]
    if args.recipes or args.tests:
        rows = replace(read(FILE), rows, [] if args.tests else args.recipes)
        measured = [*(line for line in pages.parts(before)["measured"].split("\n\n") if line), *measured]
    save(rows)
    PAGE.write_text(pages.fill(before, **render(rows, measured)))


def run(recipes: Sequence[str], tests: str, repeats: int) -> list[Row]:
    """The rows of these recipes and tests, of all if none is named."""
    selected = " and ".join(f"({part})" for part in (selection(recipes), tests) if part)
    found: dict[tuple[str, str], list[dict[str, Any]]] = collections.defaultdict(list)
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder, "rows.jsonl")
            command = [sys.executable, "-m", "pytest", "-m", "faults", "tests/faults", "-k", selected]
            code = subprocess.run(
                command, cwd=ROOT, env=os.environ | {"FAULTS_RECORD": str(record)}, check=False
            ).returncode
            if code not in FINISHED:
                sys.exit(f"pytest ended with code {code} before the last fault: {PAGE.name} stays as it is")
            for line in record.read_text().splitlines():
                row = json.loads(line)
                found[row["fault"], row["recipe"]].append(row)
    return [merge(several) for several in found.values()]


def selection(recipes: Sequence[str]) -> str:
    """What pytest's -k selects these recipes by: not those whose name has one of these in it, as ddp_gpt has dp_gpt."""
    each = ([recipe, *(f"not {other}" for other in RECIPES if recipe in other != recipe)] for recipe in recipes)
    return " or ".join(f"({' and '.join(words)})" for words in each)


def merge(several: Sequence[dict[str, Any]]) -> Row:
    """One row from the same fault in the same recipe, run one or more times."""
    first = next((row for row in several if row["passes"] < row["runs"]), several[0])

    def largest(key: str, digits: int) -> str:
        values = [row[key] for row in several if row[key] is not None]
        return f"{max(values):.{digits}f}" if values else ""

    merged = {key: str(first[key]) for key in ("fault", "recipe", "ranks")}
    merged |= {key: str(sum(row[key] for row in several)) for key in ("runs", "passes")}
    merged |= {"steps_lost": largest("steps_lost", 0)}
    merged |= {key: largest(key, 1) for key in ("notice_s", "recover_s")}
    return merged | {"message": plain(first["message"])}


def plain(message: str) -> str:
    """The first line, without what is of this machine."""
    line = (message.splitlines() or [""])[0]
    line = re.sub(r"\S*/pytest-of-\w+/pytest-\d+/[^/\s]+", "RUN", line)
    line = re.sub(r"pid \d+", "pid N", line).replace(f"host {platform.node()}", "host H")
    line = re.sub(rf"process \d+ on {re.escape(platform.node())}", "process N on H", line)
    line = line.replace(f"on {platform.node()}:", "on H:")
    return line if len(line) <= 160 else f"{line[:157]}..."


def replace(rows: Iterable[Row], new: Sequence[Row], recipes: Sequence[str]) -> list[Row]:
    """All rows: the new ones, and the old ones of other faults, but none of these recipes or of those that are gone."""
    again = {(row["fault"], row["recipe"]) for row in new}
    kept = [row for row in rows if row["recipe"] in RECIPES and row["recipe"] not in recipes]
    return [*(row for row in kept if (row["fault"], row["recipe"]) not in again), *new]


def read(file: Path) -> list[Row]:
    """The rows of the file."""
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def save(rows: Iterable[Row], file: Path = FILE) -> None:
    """Write the file, sorted, so that a later one differs where a result does."""
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (row["fault"], row["recipe"])))


def render(rows: Sequence[Row], measured: Sequence[str]) -> dict[str, str]:
    """The parts of the page: how it was measured, the sum, a table of all families, and a few lines for each."""
    families: dict[str, list[Row]] = collections.defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["fault"], row["recipe"])):
        families[row["fault"].split(": ")[0]].append(row)
    latest = {line.split("`")[1]: line for line in measured}  # of the same command, one line
    heads = ["family", "faults", "pairs", "passed", *SLOWEST.values()]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'--:|' * (len(heads) - 1)}"]
    for name, found in families.items():
        ran = [row for row in found if row["runs"] != "0"]
        counts = [len({row["fault"] for row in found}), len(ran), sum(map(passed, ran))]
        lines.append(f"| {' | '.join(map(str, [name, *counts, *(slowest(found, key) for key in SLOWEST)]))} |")
    parts = {"measured": "\n\n".join(latest.values()), "sum": summary(rows), "families": "\n".join(lines)}
    return parts | {name: family(found) for name, found in families.items()}


def passed(row: Row) -> bool:
    """Whether all runs of a pair passed."""
    return row["passes"] == row["runs"]


def summary(rows: Sequence[Row]) -> str:
    """How many pairs passed, and what was not run. Repeated runs of a pair count once."""
    ran = [row for row in rows if row["runs"] != "0"]
    out_of_scope = sum(row["message"].startswith("not applicable") for row in rows)
    faults = {row["fault"] for row in rows}
    pairs = len(faults) * len(RECIPES)
    runs, bits = (sum(int(row["runs"]) for row in ran if only in ("", row["fault"])) for only in ("", BITS))
    return (
        f"**{sum(map(passed, ran))} of {len(ran)} pairs passed**: {len(faults)} faults, each in every recipe that it "
        f"concerns.\n{out_of_scope} pairs do not apply; {pairs - len(ran) - out_of_scope} were not run. The pairs took "
        f"{runs} runs, of which {bits} only look\nfor one flipped bit in a file."
    )


def family(rows: Sequence[Row]) -> str:
    """A few lines for one family: the faults, every pair that failed or is missing, and what the terminal says."""
    faults: dict[str, list[Row]] = collections.defaultdict(list)
    for row in rows:
        faults[row["fault"].split(": ", 1)[1]].append(row)
    injected = textwrap.fill(f"Injected: {'; '.join(grouped(faults))}.", 119, break_on_hyphens=False)
    lines = []
    for name, found in faults.items():
        ran = {row["recipe"]: row for row in found if row["runs"] != "0" or row["message"].startswith("not applicable")}
        lines += [
            f"- **failed**, {name}, {row['recipe']}, {row['passes']} of {row['runs']} passed: {quoted(row)}"
            for row in ran.values()
            if not passed(row)
        ]
        if missing := [recipe for recipe in RECIPES if recipe not in ran]:
            lines.append(f"- not run, {name}: {', '.join(missing)}")
    shown = [f"- {name}: {quoted(row)}" for name, row in examples(faults)]
    return "\n\n".join(part for part in (injected, "\n".join(lines), "\n".join(shown)) if part)


def grouped(faults: Iterable[str]) -> list[str]:
    """The names of faults; those that begin alike, up to a comma, as one with their number."""
    counts = collections.Counter(name.split(", ")[0] for name in faults if not name.startswith("mutant, "))
    names = [name if number == 1 else f"{name} ({number} ways)" for name, number in counts.items()]
    mutants = [name.removeprefix("mutant, ") for name in faults if name.startswith("mutant, ")]
    return [*names, *([f"and as mutants: {', '.join(mutants)}"] if mutants else [])]


def examples(faults: dict[str, list[Row]]) -> list[tuple[str, Row]]:
    """The faults whose messages stand for most others: those that begin with the same words."""
    alike: dict[str, list[tuple[str, Row]]] = collections.defaultdict(list)
    for name, found in faults.items():
        row = next((row for row in found if row["runs"] != "0" and row["message"]), None)
        if row and not name.startswith("mutant, "):
            alike[" ".join(row["message"].split()[:3])].append((name, row))
    most = sorted(alike.values(), key=len, reverse=True)[:EXAMPLES]
    return [each[0] for each in most]


def quoted(row: Row) -> str:
    """What the terminal said, as code."""
    return f"`{row['message'].replace('`', chr(39))}`"


def slowest(rows: Iterable[Row], key: str) -> str:
    """The largest figure of any recipe, as it was measured."""
    return max((row[key] for row in rows if row[key]), key=float, default="")


if __name__ == "__main__":
    main()
