"""The lessons in figures: how much of a recipe differs from its base, and how long everything is.

`python -m tests.lessons` prints them, and so does every run of the tests. Counted are lines of code: no docstrings,
comments or blank lines.
"""

import ast
import difflib
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.harness import runner

# Changed lines of code that a lesson should take at most, and lines of code of a recipe, a module, and common/ without
# its workloads: a light goes on where there are more. Split or delete before raising one.
GOALS = {
    ("dp_resnet", "ddp_resnet"): 14,
    ("ddp_resnet", "multinode_resnet"): 17,
    ("ddp_gpt", "fsdp_gpt"): 36,
    ("fsdp_gpt", "tensor_gpt"): 45,
    ("ddp_gpt", "pipeline_gpt"): 75,
    ("ddp_gpt", "accelerate_gpt"): 45,
}
RECIPE = 300
MODULE = 200
COMMON = 2200
MAIN_LINES = 40
MAIN_LOCALS = 20


def docstring_lines(text: str) -> set[int]:
    """Numbers of the lines of all docstrings."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    docstrings = [node.body[0] for node in nodes if ast.get_docstring(node) is not None]
    return {line for node in docstrings for line in range(node.lineno, node.end_lineno + 1)}


def code(text: str) -> list[str]:
    """The lines of code, without the comments behind them."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    documented = docstring_lines(text)
    return [line.rstrip() for number, line in enumerate(lines, 1) if line.strip() and number not in documented]


def changed(base: str, text: str) -> int:
    """Lines of code that a diff of two files removes and adds."""
    lines = list(difflib.unified_diff(code(base), code(text), n=0, lineterm=""))[2:]
    return sum(line[0] in "+-" for line in lines)


def pairs() -> Iterator[tuple[str, str]]:
    """Each base and the recipe that builds on it."""
    for recipe in runner.RECIPES:
        if base := runner.base(recipe):
            yield base, recipe


def main_of(recipe: str) -> tuple[int, int]:
    """Lines of its main from `def` to the end, without its docstring, and its local names."""
    tree = ast.parse(runner.source(recipe))
    (main,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    stored = {node.id for node in ast.walk(main) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return len(code(ast.get_source_segment(runner.source(recipe), main))), len(stored)


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


def product() -> list[Path]:
    """Files whose assignments are looked at."""
    return [runner.ROOT / "recipes" / name / "train.py" for name in runner.RECIPES] + modules()


def modules() -> list[Path]:
    return sorted(runner.ROOT.glob("common/**/*.py"))


def light(number: int, most: int) -> str:
    return f"{number}{'' if number <= most else f' (more than {most})'}"


def report() -> str:
    """All figures, in a few lines."""
    lines = ["changed lines of code"]
    for base, recipe in pairs():
        number = changed(runner.source(base), runner.source(recipe))
        goal = GOALS.get((base, recipe))
        lines.append(f"  {base} -> {recipe}: {number}" + (f" of {goal}" if goal else ""))
    lines.append("recipe: lines of code, lines and locals of main")
    for name in runner.RECIPES:
        length, names = main_of(name)
        lines.append(f"  {name}: {light(len(code(runner.source(name))), RECIPE)}, {length}, {names}")
    sizes = {path: len(code(path.read_text())) for path in modules()}
    own = sum(size for path, size in sizes.items() if path.parent.name == "common")
    long = [f", {path.name} {light(size, MODULE)}" for path, size in sizes.items() if size > MODULE]
    lines.append(
        f"common/: {light(own, COMMON)} lines of code, its workloads {sum(sizes.values()) - own}{''.join(long)}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
