"""The diff is the lesson: a recipe differs from its base in the sections that it declares open, and in no other."""

import ast
import re
from pathlib import Path

import pytest

from tests import floors, house
from tests.harness import runner

TITLES = ["Arguments", "Workload", "Strategy", "Step", "Main"]
# Sections that are the same text in all recipes of a workload that build on each other.
CLOSED = (2, 4, 5)
OTHER_MODELS = {"moe_gpt"}  # whose section 2 makes another model, and says so


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


@pytest.mark.parametrize("recipe", runner.RECIPES)
def test_recipe_has_the_banners_in_order(recipe: str) -> None:
    text = runner.source(recipe)
    assert re.findall(r"^# --- (\d) (\w+) -+$", text, flags=re.MULTILINE) == [
        (str(number), title) for number, title in enumerate(TITLES, start=1)
    ]


@pytest.mark.parametrize("recipe", runner.RECIPES)
def test_recipe_is_a_folder_of_its_own(recipe: str) -> None:
    folder = runner.ROOT / "recipes" / recipe
    beside = {"launch.env", "configs", "__pycache__"}
    twin = {"bare.py"} if recipe in runner.TRAINING else set()
    assert {path.name for path in folder.iterdir()} - beside == {"train.py", "README.md"} | twin
    assert {path.suffix for path in folder.glob("configs/*")} <= {".yaml"}


def test_recipes_differ_where_they_say(capsys: pytest.CaptureFixture) -> None:
    compared = 0
    for recipe in runner.RECIPES:
        base, _ = declared(runner.source(recipe))
        if base is None:
            continue
        check(runner.source(recipe), runner.source(base))
        compared += len(runner.sections(runner.source(recipe)))
    with capsys.disabled():
        print(f"\nskeleton: {compared} sections compared over {len(runner.RECIPES)} recipes")
    assert compared


def test_family_shares_its_workload_step_and_main() -> None:
    """dp, ddp and multinode ResNets have one text there, and so have all GPTs."""
    derived = [(base, recipe) for base, recipe in house.pairs() if runner.workload(base) == runner.workload(recipe)]
    assert {runner.workload(recipe) for _, recipe in derived} == {"resnet", "gpt"}
    for base, recipe in derived:
        ours, theirs = (runner.sections(runner.source(name)) for name in (recipe, base))
        opened = [2] if recipe in OTHER_MODELS else []
        assert [number for number in CLOSED if ours[number] != theirs[number]] == opened, f"{base} -> {recipe}"


def packed(text: str) -> list[int]:
    """Lines of assignments that pack unrelated values: `self.plan, self.most = plan, most`.

    Values belong together where they are one operation on several operands, that is, calls of one function, or
    expressions that differ in names and numbers only and share a name, such as `world.rank, world.size`; or where
    names change places. What a call or an iterator yields is unpacked freely.
    """
    found = []
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and len(node.value.elts) > 1):
            continue
        targets = [target for target in node.targets if isinstance(target, ast.Tuple)]
        values = node.value.elts
        if targets and not (_change_places(targets[0], values) or _one_operation(values)):
            found.append(node.lineno)
    return found


def _change_places(target: ast.Tuple, values: list[ast.expr]) -> bool:
    return {*map(ast.unparse, target.elts)} == {*map(ast.unparse, values)}


def _one_operation(values: list[ast.expr]) -> bool:
    if all(isinstance(value, ast.Call) for value in values) and len({ast.dump(v.func) for v in values}) == 1:
        return True
    shapes = {ast.dump(_Anonymous().visit(ast.parse(ast.unparse(value)))) for value in values}
    names = [{node.id for node in ast.walk(value) if isinstance(node, ast.Name)} for value in values]
    plain = all(isinstance(value, ast.Name | ast.Constant) for value in values)
    return len(shapes) == 1 and bool(set.intersection(*names)) and not plain


class _Anonymous(ast.NodeTransformer):
    """Leaves out which names, attributes and constants an expression has."""

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name("", node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        return ast.Attribute(self.visit(node.value), "", node.ctx)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant(None)


@pytest.mark.parametrize(
    "path",
    [*sorted(runner.ROOT.glob("recipes/*/*.py")), *floors.modules(runner.ROOT).values()],
    ids=lambda path: str(path.relative_to(runner.ROOT)),
)
def test_unrelated_values_are_not_packed(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert [f"line {number}: {lines[number - 1].strip()}" for number in packed(path.read_text())] == []


@pytest.mark.parametrize(
    ("assignment", "is_packed"),
    [
        ("step, loss = 0, 0.0", True),
        ("self.plan, self.most = plan, most", True),
        ("root, found = Path('a').parent, {}", True),
        ("mean, count = total[:-1] / total[-1], total[-1]", True),
        ("rank, size = dist.get_rank(), group.size()", True),
        ("rank, size = world.rank, world.size", False),
        ("rank, size = dist.get_rank(), dist.get_world_size()", False),
        ("start, stop = plan.position(step - 1), plan.position(step)", False),
        ("cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)", False),
        ("first, second = second, first", False),
        ("loss, count = means(sums)", False),
        ("first, *rest = values", False),
        ("size = (width, height)", False),
    ],
)
def test_what_is_packed(assignment: str, is_packed: bool) -> None:
    assert packed(assignment) == [1] * is_packed


def test_mutants_fail() -> None:
    """A change in a closed section, and an open section without a change, are both found."""
    text, base = runner.source("ddp_resnet"), runner.source("dp_resnet")
    _, opened = declared(text)
    check(text, base)
    with pytest.raises(AssertionError, match=r"sections \[4\] differ"):
        check(text.replace("optimizer.step()", "optimizer.step(None)"), base)
    line = "Open: " + " ".join(map(str, sorted(opened)))
    with pytest.raises(AssertionError, match=r"sections \[4\] are declared open"):
        check(text.replace(line, f"{line} 4"), base)


MODELS = [path for path in sorted(runner.ROOT.glob("common/workloads/*.py")) if "(nn.Module):" in path.read_text()]


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_models_know_nothing_of_ranks(path: Path) -> None:
    assert "distributed" not in path.read_text()
