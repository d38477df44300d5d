"""tests/harness/mutants.py: what it changes, and what it refuses."""

import ast
from pathlib import Path

import pytest

from tests.harness import mutants, runner

DDP = "ddp_resnet"
SENDS = "contextlib.nullcontext() if batch.last else model.no_sync()"


def changed(folder: Path, changes: mutants.Changes) -> tuple[str, str]:
    """The lines of the recipe that are not in the mutant, and those of the mutant that are new."""
    recipe = ast.unparse(ast.parse(runner.source(DDP))).splitlines()
    mutant = mutants.mutate(DDP, folder, changes).read_text().splitlines()
    gone, new = ([x.strip() for x in one if x not in other] for one, other in ((recipe, mutant), (mutant, recipe)))
    return "\n".join(gone), "\n".join(new)


def test_expression(tmp_path: Path) -> None:
    before, after = changed(tmp_path, {"forward_backward": {SENDS: "model.no_sync()"}})
    assert before == f"with {SENDS}:"
    assert after == "with model.no_sync():"


def test_statement_and_its_body(tmp_path: Path) -> None:
    before, after = changed(tmp_path, {"parallelize": {"if args.sync_bn: ...": "if True:\n    ..."}})
    assert (before, after) == ("if args.sync_bn:", "if True:")


def test_more_statements(tmp_path: Path) -> None:
    assert changed(tmp_path, {"main": {"run.save(step)": "run.save(step); broken()"}}) == ("", "broken()")
    assert changed(tmp_path, {"main": {"run.save(step)": "pass"}}) == ("run.save(step)", "pass")
    assert changed(tmp_path, {"": {"import contextlib": "import contextlib; import os"}}) == ("", "import os")


def test_whole_function(tmp_path: Path) -> None:
    mutant = mutants.mutate(DDP, tmp_path, {"clip_gradients": "def clip_gradients(args, model): return 0"})
    functions = {node.name: node for node in ast.parse(mutant.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert ast.unparse(functions["clip_gradients"]) == "def clip_gradients(args, model):\n    return 0"
    assert len(functions) > 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_such": {"a": "b"}}, "has no function no_such"),
        ({"no_such": "def no_such(): pass"}, "has no function no_such"),
        ({"clip_gradients": {SENDS: "b"}}, "clip_gradients of ddp_resnet has 0 times"),
        ({"forward_backward": {"batch": "b"}}, "forward_backward of ddp_resnet has [2-9] times: batch"),
    ],
)
def test_refused(changes: mutants.Changes, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=message):
        mutants.mutate(DDP, tmp_path, changes)
