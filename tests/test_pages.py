"""The parts of docs/ that commands write, and what every page promises: links that lead somewhere, flags that exist."""

from pathlib import Path

import pytest

from tests.faults import table
from tests.harness import pages

PAGE = "# Title\n\nProse.\n\n<!-- begin one -->\nold\n<!-- end one -->\n\nMore.\n<!-- begin two -->\n<!-- end two -->\n"


def test_parts_are_replaced_and_prose_stays() -> None:
    text = pages.fill(PAGE, one=r"| a \1 |")
    assert pages.parts(text) == {"one": r"| a \1 |", "two": ""}
    assert text.split() == PAGE.replace("old", r"| a \1 |").split()
    assert pages.fill(text, one=r"| a \1 |") == text


def test_missing_part() -> None:
    """Or a command would measure for half an hour and write nothing."""
    with pytest.raises(KeyError, match="has 0 parts <!-- begin three -->"):
        pages.fill(PAGE, three="new")
    with pytest.raises(KeyError, match="has 2 parts"):
        pages.fill(PAGE + PAGE, one="new")


def row(fault: str, recipe: str, **more: str) -> table.Row:
    """One row of the fault matrix, that passed."""
    plain = {"ranks": "2", "runs": "1", "passes": "1", "steps_lost": "", "notice_s": "", "recover_s": ""}
    return {"fault": fault, "recipe": recipe, **plain, "message": f"as {recipe} says", **more}


def test_faults_page_shows_every_failure() -> None:
    first, second, third, *others = table.RECIPES
    rows = [
        row("disk: full", first, recover_s="0.9"),
        row("disk: full", second, recover_s="10.2", runs="3", passes="2", message="the worst | `of all`"),
        row("disk: full", third, runs="0", passes="0", message="not applicable: no --data"),
        row("rank: hangs", first, runs="4", passes="4", notice_s="2.0"),
    ]
    parts = table.render(rows, ["`command`, yesterday", "`other`, today", "`command`, today"])
    assert parts["measured"] == "`command`, today\n\n`other`, today"
    not_run = 2 * len(table.RECIPES) - 4
    assert parts["sum"].startswith("**7 of 8 runs passed**, for 3 of the")
    assert parts["sum"].endswith(f"1 pairs do not apply; {not_run} were not run.")
    (line,) = [line for line in parts["disk"].splitlines() if line.startswith("| full |")]
    missing = ["not run"] * len(others)
    assert line == f"| {' | '.join(['full', '✓', '✗ 2/3', '–', *missing, '', '', '10.2'])} |"
    assert "- full: `the worst | 'of all'`" in parts["disk"]
    assert "| hangs | ✓ 4 |" in parts["rank"]


def test_rows_of_some_recipes_are_replaced(tmp_path: Path) -> None:
    """And those of the others stay, through the file, as they were measured."""
    one, other = table.RECIPES[:2]
    old = [row("disk: full", recipe, message='a, "b" | c') for recipe in (one, other, "a_recipe_that_is_gone")]
    table.save(old, tmp_path / "rows.csv")
    assert table.read(tmp_path / "rows.csv") == sorted(old, key=lambda each: each["recipe"])
    new = [row("disk: full", one, passes="0")]
    assert table.replace(table.read(tmp_path / "rows.csv"), new, [one]) == [old[1], *new]


def test_same_fault_run_twice() -> None:
    """The larger figure, and the message of the run that failed."""
    measured = {"ranks": 2, "runs": 1, "passes": 1, "steps_lost": 1, "notice_s": None, "recover_s": 0.26}
    good = {"fault": "disk: full", "recipe": "ddp_gpt", "message": "well\nand more", **measured}
    bad = good | {"passes": 0, "recover_s": 0.1, "message": f"fails: process 7 on {table.platform.node()}"}
    merged = table.merge([good, bad])
    assert merged == row("disk: full", "ddp_gpt") | {
        **{"runs": "2", "passes": "1", "steps_lost": "1", "recover_s": "0.3"},
        "message": "fails: process N on H",
    }


def test_page_of_faults_is_that_of_its_file() -> None:
    """The page was not edited where figures are, nor the file without the page."""
    page = table.PAGE.read_text()
    measured = pages.parts(page)["measured"].split("\n\n")
    assert pages.fill(page, **table.render(table.read(table.FILE), measured)) == page
