"""The planner's formula of memory beside what the recipes' code holds, over layouts that a seed has drawn."""

import itertools
import re
from collections.abc import Callable

import pytest
from tools.plan import transformer

from tests import cuda_table
from tests.harness import memory_grid, pages, theory

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


def test_experts_are_as_counted() -> None:
    """The formulas of moe_gpt, beside what docs/measured/gpu-counts.md has counted in its code.

    The bytes of dispatch are those of the choices, without 8 L E bytes that say how many come. The memory is that of
    fsdp_gpt's moments, which gathers a layer at once; moe_gpt gathers its experts after the rest, and needs less.
    """
    counts = pages.parts(cuda_table.PAGE.read_text())["counts"].splitlines()
    cases = [one for one in cuda_table.cases("moe_gpt") if "gather" not in one.strategy]
    assert len(cases) == 4
    for case in cases:
        ep = int(dict(itertools.pairwise(case.strategy))["--ep"])
        (cells,) = [line.split(" | ") for line in counts if line.startswith(f"| `{case}` | {case.size} |")]
        shape = transformer.Shape(theory.WIDTH, theory.LAYERS, 8, 8, 704, True, 256, theory.LENGTH, False, 8, 2)
        batch = {"micro_batch": case.batch // case.size, "global_batch": case.batch}
        found = transformer.work(shape, transformer.of_recipe("moe_gpt", case.size, ep, **batch))
        assert -0.02 < sum(found.memory.values()) / 1e6 / float(cells[-1].strip("| ")) - 1 < 0.3, case
        assert found.kernels == pytest.approx(int(cells[8]), rel=0.08), case
        sent = {(one.kind, one.axis): one.bytes / 1e6 for one in found.traffic}
        dispatch = re.findall(r"all-to-all ep ([\d.]+) ", cells[9])
        wanted = [sent["all-to-all", "ep"] + 8 * shape.layers * shape.experts / 1e6] if ep > 1 else []
        assert [float(one) for one in dispatch] == pytest.approx(wanted, abs=0.0006)
        experts = re.findall(r"all-gather dp_shard ([\d.]+) ", cells[9])
        gathered = sent.get(("all-gather", "ep_dp"), sent["all-gather", "dp"] if ep == 1 else 0)
        assert sum(map(float, experts)) == pytest.approx(gathered, rel=0.005), case
    assert shape.parameters - shape.layers * (shape.met(8) - shape.met(2)) < shape.parameters / 2
