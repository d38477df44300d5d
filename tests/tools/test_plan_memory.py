"""The planner's formula of memory beside what the recipes' code holds, over layouts that a seed has drawn."""

from collections.abc import Callable

import pytest

from tests.harness import memory_grid

NEAR = 0.05  # of what was counted
COUNTED = memory_grid.read()
AGAIN = [  # the ways to split of which one layout is counted again: with whole gradients, and with sliced logits
    ("fsdp_gpt", lambda point: point.micro_batches > 1),
    ("tensor_gpt", lambda point: point.vocab > 256),
]


@pytest.mark.parametrize("way", memory_grid.WAYS, ids=lambda way: f"{way[0]}-{way[2]}-{way[3]}-{way[4]}".rstrip("-"))
def test_formula_is_near_the_count(way: tuple[str, str, int, int, str]) -> None:
    errors = {
        point: point.formula_bytes / size - 1
        for point, size in COUNTED.items()
        if (point.recipe, point.flag, point.parts, point.size, point.config) == way
    }
    assert len(errors) > memory_grid.OF_EACH / 2
    assert not {point: f"{error:+.1%}" for point, error in errors.items() if abs(error) > NEAR}


def test_layouts_differ_in_all_that_changes_memory() -> None:
    assert COUNTED.keys() == {*memory_grid.points()}
    for name, least in (("recompute", 3), ("vocab", 3), ("tied", 2), ("width", 3), ("recipe", 7)):
        assert len({getattr(point, name) for point in COUNTED}) == least, name
    for recipe in {point.recipe for point in COUNTED}:
        assert {True, False} == {point.micro_batches > point.parts for point in COUNTED if point.recipe == recipe}
        assert {True, False} == {point.tied for point in COUNTED if point.recipe == recipe}


@pytest.mark.parametrize(("recipe", "kind"), AGAIN, ids=[recipe for recipe, _ in AGAIN])
def test_counts_are_those_of_the_code(recipe: str, kind: Callable[[memory_grid.Point], bool]) -> None:
    """The smallest of its layouts."""
    some = [point for point in COUNTED if point.recipe == recipe and kind(point)]
    point = min(some, key=lambda one: COUNTED[one])
    assert [*memory_grid.counted([point])] == [pytest.approx(COUNTED[point], rel=0.001)]
