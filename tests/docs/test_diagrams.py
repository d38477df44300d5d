"""docs/diagrams/: each picture is what its recipe's docstring says now, and a changed table makes another one."""

import ast
import itertools
import re
from xml.etree import ElementTree

import pytest
from tools.diagrams import draw as diagrams

from tests.harness import runner

# Recipe, words of its docstring, and others that mean another division.
CHANGES = {
    "who holds": ("ddp_gpt", "optimizer state    all, a replica", "optimizer state    1/N"),
    "what is sent": ("ddp_gpt", "One step sends: one all-reduce", "One step sends: one all-gather"),
    "when it is sent": ("ddp_resnet", "before a\nforward pass", "before a\nbackward pass"),
    "who sends": ("allreduce_resnet", "to the next rank ", "to ranks far and near"),
    "how many groups": ("tensor_gpt", "each rank, of N in N / tp groups", "each rank"),
}


def docstring(recipe: str) -> str:
    return ast.get_docstring(ast.parse(runner.source(recipe))) or ""


@pytest.mark.parametrize("name", runner.RECIPES)
def test_committed_picture_is_what_the_docstring_says(name: str) -> None:
    committed = (diagrams.FOLDER / f"{name}.svg").read_text()
    assert committed == diagrams.draw(diagrams.read(name)), "run python -m tools.diagrams"


def test_each_recipe_shows_its_own() -> None:
    for name in runner.RECIPES:
        shown = re.findall(r"docs/diagrams/(\w+)\.svg", (runner.ROOT / "recipes" / name / "README.md").read_text())
        assert shown == [name]
    assert sorted(path.stem for path in diagrams.FOLDER.iterdir()) == runner.RECIPES


@pytest.mark.parametrize("change", CHANGES)
def test_changed_table_makes_another_picture(change: str) -> None:
    """Not only other words in it: another part of the drawing."""
    name, old, new = CHANGES[change]
    text = docstring(name)
    assert text.count(old) == 1
    before, after = (diagrams.draw(diagrams.parse(name, said)) for said in (text, text.replace(old, new)))
    shapes = [re.sub(r"<(text|desc)\b.*", "", svg) for svg in (before, after)]
    assert shapes[0] != shapes[1]


def test_unknown_words_make_no_picture() -> None:
    text = docstring("ddp_gpt")
    for old, new, error in [
        (
            "optimizer state    all, a replica",
            "optimizer state    some of it",
            "words that are not known: 'some of it'",
        ),
        ("all-reduce of the gradients", "message", "does not say what a step sends"),
        ("    what   ", "    that   ", "no table of what each rank holds"),
    ]:
        assert text.count(old) == 1, old
        with pytest.raises(ValueError, match=error):
            diagrams.draw(diagrams.parse("ddp_gpt", text.replace(old, new)))


def test_what_ranks_hold() -> None:
    """By numbers: replicas whole, parts apart, and all of them together once."""
    for name, row, column in [("fsdp_gpt", "parameters", 1), ("tensor_gpt", "parameters", 1), ("ddp_gpt", "batch", 1)]:
        table = diagrams.read(name).holds
        cell = next(cells[column] for cells in table.rows if cells[0] == row)
        parts = [diagrams.held(row, cell, rank, table) for rank in range(diagrams.RANKS)]
        assert sorted(itertools.chain(*(one.always for one in parts))) == [0, 1, 2, 3]
    table = diagrams.read("pipeline_gpt").holds
    layers = [diagrams.held("parameters", table.rows[0][1], rank, table).always for rank in range(diagrams.RANKS)]
    assert layers == [{0}, {1}, {0}, {1}]
    batches = [diagrams.held("batch", table.rows[2][1], rank, table).always for rank in range(diagrams.RANKS)]
    assert batches == [{0}, {0}, {1}, {1}]


@pytest.mark.parametrize("name", runner.RECIPES)
def test_picture_stands_alone(name: str) -> None:
    """It is XML, has colors for both schemes, words for those who do not see it, and asks for no other file."""
    text = (diagrams.FOLDER / f"{name}.svg").read_text()
    root = ElementTree.fromstring(text)
    assert "prefers-color-scheme: dark" in text
    assert root.find("{*}title") is not None
    assert (root.findtext("{*}desc") or "").startswith(diagrams.read(name).holds.rows[0][0])
    assert not re.search(r"href|url\(|@import|<script", text)
    assert float(root.attrib["width"]) <= 420
