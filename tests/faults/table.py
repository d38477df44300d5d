"""Run the fault matrix and write docs/faults.csv and docs/faults.md: `uv run python -m tests.faults.table`.

The file has a row for each fault and recipe; the page sums it up, and its prose is written by people. With names of
recipes (`... -m tests.faults.table ddp_gpt fsdp_gpt`) it takes minutes and replaces the rows of those recipes only;
with `-k EXPRESSION`, as of pytest, the rows that it has run. `--no-run` writes the page again from the file.
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
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness import pages
from tests.harness.runner import RECIPES, ROOT

PAGE, FILE = ROOT / "docs" / "faults.md", ROOT / "docs" / "faults.csv"
COLUMNS = ("fault", "recipe", "ranks", "runs", "passes", "steps_lost", "notice_s", "recover_s", "message")
# Of each row of the page: the largest of any recipe.
SLOWEST = {"steps_lost": "steps lost", "notice_s": "s to notice", "recover_s": "s to recover"}
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
    parser.add_argument("--no-run", action="store_true", help="write the page from docs/faults.csv as it is")
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
    """The parts of the page: how it was measured, the sum, and one table for each kind of fault."""
    kinds: dict[str, dict[str, dict[str, Row]]] = collections.defaultdict(lambda: collections.defaultdict(dict))
    for row in sorted(rows, key=lambda row: (row["fault"], row["recipe"])):
        kind, name = row["fault"].split(": ", 1)
        kinds[kind][name][row["recipe"]] = row
    latest = {line.split("`")[1]: line for line in measured}  # of the same command, one line
    tables = {kind: table(faults) for kind, faults in kinds.items()}
    return {"measured": "\n\n".join(latest.values()), "sum": summary(rows), **tables}


def summary(rows: Sequence[Row]) -> str:
    """How many passed, and what did not or was not run."""
    runs, passes = (sum(int(row[key]) for row in rows) for key in ("runs", "passes"))
    out_of_scope = sum(row["message"].startswith("not applicable") for row in rows)
    ran = sum(row["runs"] != "0" for row in rows)
    pairs = len({row["fault"] for row in rows}) * len(RECIPES)
    return (
        f"**{passes} of {runs} runs passed**, for {ran} of the {pairs} pairs of a fault and a recipe. "
        f"{out_of_scope} pairs do not apply; {pairs - ran - out_of_scope} were not run."
    )


def table(faults: dict[str, dict[str, Row]]) -> str:
    """One kind of fault: a line for each fault, a column for each recipe; and folded, what is printed."""
    recipes = [*RECIPES]
    heads = ["fault", *("<br>".join(recipe.rsplit("_", 1)) for recipe in recipes), *SLOWEST.values()]
    lines = [f"| {' | '.join(heads)} |", f"|---|{':-:|' * len(recipes)}{'--:|' * len(SLOWEST)}"]
    messages = []
    for name, found in faults.items():
        marks = [mark(found.get(recipe)) for recipe in recipes]
        largest = [slowest(found.values(), key) for key in SLOWEST]
        lines.append(f"| {' | '.join([name, *marks, *largest])} |")
        messages.append(f"- {name}: `{example(found.values()).replace('`', chr(39))}`")
    return "\n".join(lines) + "\n\n" + pages.folded("What the terminal says", "\n".join(messages))


def mark(row: Row | None) -> str:
    """What came of one fault in one recipe."""
    if row is None or row["runs"] == "0":
        return "–" if row and row["message"].startswith("not applicable") else "not run"
    if row["passes"] != row["runs"]:
        return f"✗ {row['passes']}/{row['runs']}"
    return "✓" if row["runs"] == "1" else f"✓ {row['runs']}"


def slowest(rows: Iterable[Row], key: str) -> str:
    """The largest figure of any recipe, as it was measured."""
    return max((row[key] for row in rows if row[key]), key=float, default="")


def example(rows: Iterable[Row]) -> str:
    """The message of the first recipe that failed, or else of the first that ran."""
    order = sorted(rows, key=lambda row: (row["passes"] == row["runs"], row["runs"] == "0"))
    return order[0]["message"]


if __name__ == "__main__":
    main()
