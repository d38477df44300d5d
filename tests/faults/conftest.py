"""The matrix: which fault cases there are, which of them a plain `pytest` runs, and the record for the table.

A test of the matrix takes `case` and is marked `fault("what happens")`. It runs for every recipe with `pytest -m
faults`; a plain `pytest` runs it for the recipe with the most world sizes, and for all if it is `core=True`. A row that
is of some recipes only names them, `recipes=...`: for the others it does not apply.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness import runner
from tests.harness.fault_case import FaultCase, Row
from tests.harness.once import Once

FOLDER = Path(__file__).parent


def widest(recipes: Sequence[str]) -> str:
    """The recipe with the most world sizes; of several, one with buffers: faults can spoil those as well."""
    return max(recipes, key=lambda recipe: (len(runner.world_sizes(recipe)), runner.workload(recipe) == "resnet"))


def concerned(item: pytest.Item) -> Sequence[str]:
    """The recipes that a row is about."""
    about = item.get_closest_marker("fault").kwargs.get("recipes")
    return about(item.callspec.params) if about else runner.RECIPES


def of(workload: str) -> Callable[[Mapping[str, Any]], list[str]]:
    """For `recipes`: those of a workload."""
    return lambda _: [recipe for recipe in runner.RECIPES if runner.workload(recipe) == workload]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        fault = metafunc.definition.get_closest_marker("fault")
        every = "faults" in metafunc.config.option.markexpr or fault is None or {"core", "recipes"} & {*fault.kwargs}
        # The others would be made, and thrown away below: thousands.
        metafunc.parametrize("case", runner.RECIPES if every else [widest(runner.RECIPES)], indirect=True)


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    everything = "faults" in config.option.markexpr
    deselected = []
    for item in [item for item in items if item.path.is_relative_to(FOLDER)]:
        item.add_marker("faults")
        fault = item.get_closest_marker("fault")
        if fault and not everything:
            world = fault.kwargs.get("core") or item.callspec.params["case"] == widest(concerned(item))
            if not world or item.get_closest_marker("whole"):
                deselected.append(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        gone = {*deselected}
        items[:] = [item for item in items if item not in gone]


@pytest.fixture(scope="session")
def reference_run(once: Once) -> Callable[[str], Path]:
    """The folder of a recipe's training without a fault, made when it is first asked for; to be read only."""

    def make(recipe: str, folder: Path) -> None:
        result = case_in(folder, recipe).start()
        assert result.ok, str(result)

    def get(recipe: str) -> Path:
        folder = once.folder(functools.partial(make, recipe), "fault reference", recipe)
        return case_in(folder, recipe).run_dir

    def case_in(folder: Path, recipe: str) -> FaultCase:
        return FaultCase(recipe, folder, num_ranks(recipe), lambda: get(recipe))

    return get


def num_ranks(recipe: str) -> int:
    return runner.world_sizes(recipe, most=2)[-1]


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path: Path, reference_run: Callable[[str], Path]) -> FaultCase:
    recipe = request.param
    made = FaultCase(recipe, tmp_path, num_ranks(recipe), lambda: reference_run(recipe))
    least = request.node.get_closest_marker("fault").kwargs.get("least", 1)
    if made.size < least:
        pytest.skip(f"not applicable: it needs {least} ranks, and this recipe is one process")
    if recipe not in (about := concerned(request.node)):
        pytest.skip(f"not applicable: it is a row of {', '.join(about)}")
    return made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add the row of a fault case to the file that FAULTS_RECORD names; a plain run has no row that does not apply."""
    report = yield
    fault = item.get_closest_marker("fault")
    if fault and report.skipped and not fault.kwargs.get("core") and "faults" not in item.config.option.markexpr:
        reason = str(report.longrepr[2])
        if "not applicable" in reason:
            report.outcome, report.longrepr = "failed", f"{reason}; so it proves nothing here: give its mark `recipes`"
    if fault and "FAULTS_RECORD" in os.environ and (call.when == "call" or (call.when == "setup" and call.excinfo)):
        _record(item, fault.args[0].format(**item.callspec.params), report)
    return report


def _record(item: pytest.Item, fault: str, report: pytest.TestReport) -> None:
    recipe = item.callspec.params["case"]
    case = item.funcargs.get("case")
    found = dataclasses.replace(case.row if case else Row(runs=0))
    if report.passed:
        found.passes = found.runs if found.passes is None else found.passes
    elif report.skipped and not hasattr(report, "wasxfail"):
        found.runs = found.passes = 0
        found.message = str(report.longrepr[2]).removeprefix("Skipped: ")
    else:
        crash = getattr(report.longrepr, "reprcrash", None)
        found.passes = 0
        found.message = f"fails: {getattr(report, 'wasxfail', '') or (crash.message if crash else report.longrepr)}"
    found.message = found.message.replace(str(item.funcargs.get("tmp_path", "RUN")), "RUN")
    row = {"fault": fault, "recipe": recipe, "ranks": case.size if case else num_ranks(recipe)}
    with Path(os.environ["FAULTS_RECORD"]).open("a") as file:
        file.write(json.dumps(row | dataclasses.asdict(found)) + "\n")
