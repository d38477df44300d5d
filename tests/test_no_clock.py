"""No test asserts a wall time, which tells how busy the machine is: found in the source of the tests.

Proofs take the order of events, counts, processor time beside a yardstick of the same test, or a clock that the test
itself moves. A wait has a limit for hangs only, `runner.HANG_S`, as in `runner.wait_for`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from common.run import process_group

from tests.harness import runner

CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
FILES = sorted((runner.ROOT / "tests").rglob("*.py"))


def reads_clock(node: ast.AST, clocks: set[str], dated: set[str]) -> bool:
    """Whether an expression depends on a clock: it calls one, or has a name for what depends on one."""
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and one.id in dated:
            return True
        if isinstance(one, ast.Call):
            function = one.func
            of_time = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
            if of_time and function.value.id == "time" and function.attr in CLOCKS:
                return True
            if isinstance(function, ast.Name) and function.id in clocks:
                return True
    return False


def asserted_times(text: str) -> Iterator[int]:
    """Lines of the asserts that depend on a clock of `time`, directly or by a variable of their function."""
    if not re.search(r"^\s*(from time import|import .*\btime\b)", text, re.MULTILINE):
        return
    tree = ast.parse(text)
    clocks = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        for alias in node.names
        if alias.name in CLOCKS
    }
    for scope in (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)):
        dated: set[str] = set()
        found = -1
        while found < len(dated):  # until no name is added: a name may come from another one
            found = len(dated)
            for node in ast.walk(scope):
                if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    if node.value and reads_clock(node.value, clocks, dated):
                        dated |= {target.id for target in targets if isinstance(target, ast.Name)}
        for node in ast.walk(scope):
            if isinstance(node, ast.Assert) and reads_clock(node.test, clocks, dated):
                yield node.lineno


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(runner.ROOT / "tests")))
def test_no_assert_depends_on_a_clock(path: Path) -> None:
    found = sorted({*asserted_times(path.read_text())})
    assert not found, f"{path.relative_to(runner.ROOT)}, lines {found}: see the first lines of tests/test_no_clock.py"


MUTANTS = {
    "a difference": "def test():\n    began = time.monotonic()\n    run()\n    assert time.monotonic() - began < 15\n",
    "a sum": "def test():\n    began = perf_counter()\n    run()\n    assert perf_counter() < began + 15\n",
    "a name": "def test():\n    began = time.time()\n    took = time.time() - began\n    assert 1 < took, 'late'\n",
    "a wait": "def test():\n    end = time.monotonic() + 9\n    while not done():\n        assert now() < end\n",
    "about": "def test():\n    began = now()\n    assert stop.deadline == pytest.approx(began + 3, abs=0.1)\n",
}
ALLOWED = {
    "processor time": "def test():\n    began = time.thread_time()\n    assert time.thread_time() - began < other\n",
    "a clock of the test": "def test():\n    clock.now += 3\n    assert clock.now - began == 3\n",
    "a printed time": "def test():\n    took = time.monotonic() - began\n    print(took)\n    assert done\n",
}
HEAD = "import time\nfrom time import perf_counter, monotonic as now\n"


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(name: str) -> None:
    lines = (HEAD + MUTANTS[name]).splitlines()
    assert [lines[number - 1].strip().partition(" ")[0] for number in asserted_times("\n".join(lines))] == ["assert"]


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_no_clock(name: str) -> None:
    assert not [*asserted_times(HEAD + ALLOWED[name])]


def test_limits_for_hangs() -> None:
    """A rank that only torch's own limit would end counts as one that hangs; pytest's limit is above both."""
    import tomllib

    limit_s = tomllib.loads((runner.ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["timeout"]
    assert runner.HANG_S < process_group.TIMEOUT_S < limit_s
