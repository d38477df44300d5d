"""Copies of recipes with a defect: whole functions, or nodes of their syntax trees, are replaced.

A node is given as source text and found by its structure, so that neither line breaks nor comments matter:

    {"forward_backward": {"model.no_sync()": "contextlib.nullcontext()"}}    an expression
    {"clip_gradients": {"if model.tied_group: ...": "if False: ..."}}        a statement; `...` is its body, as it is
    {"clip_gradients": "def clip_gradients(args, model): ..."}               a whole function
    {"": {"import contextlib": "import contextlib, os"}}                     a statement outside of all functions
"""

import ast
from collections.abc import Mapping
from pathlib import Path

from tests.harness import runner

Changes = Mapping[str, str | Mapping[str, str]]


def mutate(recipe: str, folder: Path, changes: Changes) -> Path:
    """Write a copy of a recipe with these changes into a folder; each node to replace must be there exactly once.

    Args:
        recipe: its name.
        folder: where to make the copy's own folder.
        changes: by name of a function or class of train.py ("" for what is outside of them): its new source, or its
            nodes and what takes their place.

    Raises:
        AssertionError: a function or a node is not there, or a node is there more than once.
    """
    tree = ast.parse(runner.source(recipe))
    for name, change in changes.items():
        scope = [node for node in tree.body if getattr(node, "name", "") == name]
        assert scope, f"{recipe} has no function {name}"
        for before, after in ({ast.unparse(scope[0]): change} if isinstance(change, str) else change).items():
            swap = _Swap(before, after)
            tree.body = [new for node in tree.body for new in (swap.all_of(node) if node in scope else [node])]
            where = name or "what is outside of functions"
            assert swap.times == 1, f"{where} of {recipe} has {swap.times} times: {before}"
            scope = [node for node in tree.body if getattr(node, "name", "") == name]
    path = folder / recipe / "train.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    return path


class _Swap(ast.NodeTransformer):
    """Replaces nodes that look like one, and counts them."""

    def __init__(self, before: str, after: str) -> None:
        self._before, self._after = before, after
        (wanted,) = ast.parse(before).body
        self._made = ast.parse(after).body
        # Of a call that is a statement, the call alone can be replaced only by another expression.
        self._expression = isinstance(wanted, ast.Expr) and all(isinstance(one, ast.Expr) for one in self._made[:1])
        self._expression = self._expression and len(self._made) == 1
        self._wanted = _shape(wanted.value if self._expression else wanted)
        self.times = 0

    def all_of(self, node: ast.stmt) -> list[ast.stmt]:
        """A statement, changed; or those that take its place."""
        made = self.visit(node)
        return made if isinstance(made, list) else [made]

    def visit(self, node: ast.AST) -> ast.AST | list[ast.stmt]:  # type: ignore[override]
        if _shape(node) != self._wanted and _shape(node, open_body=True) != self._wanted:
            return self.generic_visit(node)
        self.times += 1
        if self._expression:
            return self._made[0].value
        for one in self._made:
            if _has_open_body(one):
                one.body = node.body
        return self._made


def _shape(node: ast.AST, open_body: bool = False) -> str:
    """A node without its place in the file; with `...` for the body of a statement, if it has one."""
    body = getattr(node, "body", None)
    if open_body and isinstance(body, list):
        copy = type(node)(**{name: getattr(node, name) for name in node._fields})
        copy.body = ast.parse("...").body  # type: ignore[attr-defined]
        return ast.dump(copy)
    return ast.dump(node)


def _has_open_body(node: ast.AST) -> bool:
    body = getattr(node, "body", None)
    return isinstance(body, list) and ast.dump(body[0]) == ast.dump(ast.parse("...").body[0])
