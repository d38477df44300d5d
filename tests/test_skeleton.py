"""The diff is the lesson: a recipe differs from its base in the sections that it declares open, and in no other."""

import ast
import re
from difflib import unified_diff
from pathlib import Path

import pytest

from tests.harness import runner

TITLES = ["Arguments", "Workload", "Strategy", "Step", "Main"]
MOST_LINES = 300
# Changed lines (removed plus added) outside the docstring that a lesson may take, where an issue sets a number.
MOST_CHANGED = {("dp_resnet", "ddp_resnet"): 19}


def declared(text: str) -> tuple[str | None, set[int]]:
    """Base and open sections that a recipe's docstring declares."""
    found = re.search(r"^Base: (none|recipes/(\w+))\.(?: Open: ([\d ]+)(?:\(.*\))?)?$", text, flags=re.MULTILINE)
    assert found, "the docstring needs a line `Base: none.` or `Base: recipes/<name>. Open: 0 3 (why)`"
    return found[2], {int(number) for number in (found[3] or "").split()}


def differing(text: str, base: str) -> set[int]:
    ours, theirs = runner.sections(text), runner.sections(base)
    return {number for number in ours | theirs if ours.get(number) != theirs.get(number)}


def check(text: str, base: str) -> None:
    """Fail on an undeclared difference, and on a declared one that is not there."""
    _, opened = declared(text)
    found = differing(text, base)
    assert not found - opened, f"sections {sorted(found - opened)} differ and are not declared open"
    assert not opened - found, f"sections {sorted(opened - found)} are declared open and do not differ"


def changed_lines(text: str, base: str) -> int:
    """Lines that a diff of the two files without their docstrings removes and adds."""

    def code(source: str) -> list[str]:
        return source.splitlines()[ast.parse(source).body[0].end_lineno :]

    lines = list(unified_diff(code(base), code(text), n=0))[2:]
    return sum(line[0] in "+-" for line in lines)


@pytest.mark.parametrize("recipe", runner.RECIPES)
def test_recipe_has_the_banners_in_order(recipe: str) -> None:
    text = runner.source(recipe)
    assert re.findall(r"^# --- (\d) (\w+) -+$", text, flags=re.MULTILINE) == [
        (str(number), title) for number, title in enumerate(TITLES, start=1)
    ]
    assert len(text.splitlines()) <= MOST_LINES


@pytest.mark.parametrize("recipe", runner.RECIPES)
def test_recipe_is_a_folder_of_its_own(recipe: str) -> None:
    folder = runner.ROOT / "recipes" / recipe
    beside = {"launch.env", "configs", "__pycache__"}
    assert {path.name for path in folder.iterdir()} - beside == {"train.py", "README.md"}
    assert {path.suffix for path in folder.glob("configs/*")} <= {".yaml"}


def test_recipes_differ_where_they_say(capsys: pytest.CaptureFixture) -> None:
    compared = 0
    for recipe in runner.RECIPES:
        base, _ = declared(runner.source(recipe))
        if base is None:
            continue
        check(runner.source(recipe), runner.source(base))
        compared += len(runner.sections(runner.source(recipe)))
        if (base, recipe) in MOST_CHANGED:
            assert changed_lines(runner.source(recipe), runner.source(base)) <= MOST_CHANGED[base, recipe]
    with capsys.disabled():
        print(f"\nskeleton: {compared} sections compared over {len(runner.RECIPES)} recipes")
    assert compared


def test_mutants_fail() -> None:
    """A change in a closed section, and an open section without a change, are both found."""
    text, base = runner.source("ddp_resnet"), runner.source("dp_resnet")
    check(text, base)
    with pytest.raises(AssertionError, match=r"sections \[4\] differ"):
        check(text.replace("optimizer.step()", "optimizer.step(None)"), base)
    with pytest.raises(AssertionError, match=r"sections \[4\] are declared open"):
        check(text.replace("Open: 0 1 3", "Open: 0 1 3 4"), base)


MODELS = [path for path in sorted(runner.ROOT.glob("common/workloads/*.py")) if "nn.Module" in path.read_text()]


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_models_know_nothing_of_ranks(path: Path) -> None:
    assert "distributed" not in path.read_text()
