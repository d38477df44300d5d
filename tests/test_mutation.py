"""The faults of `python -m tests.mutation`: each still applies; and what became of one is what its tests say."""

import ast
import collections
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import runner
from tests.mutation import __main__ as mutation
from tests.mutation.fault import Fault

FLOORS = ("common/train", "common/state")
SUM = Fault("a sum is a difference", "sums.py", "a + b", "a - b", ("test_sums.py",))


@functools.cache
def dumped(file: str) -> str:
    return ast.dump(ast.parse((runner.ROOT / file).read_text()))


@functools.cache
def functions(file: str) -> set[str]:
    return {one.name for one in ast.parse((runner.ROOT / file).read_text()).body if isinstance(one, ast.FunctionDef)}


@pytest.mark.parametrize("fault", mutation.FAULTS, ids=lambda fault: fault.name)
def test_fault_applies(fault: Fault) -> None:
    """Its text is there once, in sections 3 and 4 of a recipe, and Python reads what takes its place."""
    assert ast.dump(ast.parse(fault.planted(runner.ROOT))) != dumped(fault.file)
    if fault.file.startswith("recipes/"):
        parts = runner.sections((runner.ROOT / fault.file).read_text())
        assert fault.old in parts[3] + parts[4]
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in functions(file), test


def test_everything_has_faults() -> None:
    """Each recipe two or more, each module of common/train and common/state one or more; and no two have one name."""
    counts = collections.Counter(fault.file for fault in mutation.FAULTS)
    few = [recipe for recipe in runner.RECIPES if counts[f"recipes/{recipe}/train.py"] < 2]
    assert few == []
    modules = [path for floor in FLOORS for path in (runner.ROOT / floor).glob("*.py") if path.stem != "__init__"]
    assert {str(path.relative_to(runner.ROOT)) for path in modules} - {*counts} == set()
    assert len({fault.name for fault in mutation.FAULTS}) == len(mutation.FAULTS)


@pytest.mark.parametrize("text", ["return a * b\n", "return a + b, a + b\n"])
def test_fault_that_no_longer_applies(text: str, tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(text)
    with pytest.raises(AssertionError, match=r"a sum is a difference: sums.py has [02] times, not once: a \+ b"):
        SUM.planted(tmp_path)


class Answers(mutation.Workplace):
    """Without a process: it answers what is given, and looks at the file meanwhile."""

    answer: dict[str, Any]

    def __post_init__(self) -> None:
        (self.root / "copy").mkdir()
        (self.root / "copy" / "sums.py").write_text("return a + b\n")
        self.seen: list[str] = []

    def run(self, tests: Any, mark: str, limit_s: float) -> dict[str, Any]:
        self.seen.append((self.root / "copy" / "sums.py").read_text())
        return self.answer


@pytest.mark.parametrize(
    ("code", "test", "text", "verdict", "why"),
    [
        (1, "test_sums.py::test_one", "assert 1 == 3", "found", "test_sums.py::test_one"),
        (0, "", "", "MISSED", "all of test_sums.py pass"),
        (1, "test_sums.py::test_one", "NameError: name 'c' is not defined", "broken", "exit code 1\n"),
        (2, "test_sums.py", "SyntaxError: invalid syntax", "broken", "exit code 2\n"),
        (5, "", "", "broken", "exit code 5\n"),
        (-1, "", "", "broken", "more than"),
    ],
)
def test_verdicts(code: int, test: str, text: str, verdict: str, why: str, tmp_path: Path) -> None:
    place = Answers(tmp_path)
    place.answer = {"code": code, "test": test, "text": text, "output": "", "seconds": 1.0}
    found = place.judge(0, SUM)
    assert found.verdict == verdict
    assert found.why.startswith(why)
    assert place.seen == ["return a - b\n"]
    assert (tmp_path / "copy" / "sums.py").read_text() == "return a + b\n"


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutation.main(["--list", "-k", "train/metrics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(fault.file == "common/train/metrics.py" for fault in mutation.FAULTS)
    samples = []
    for _ in range(2):
        mutation.main(["--list", "--sample", "5", "--seed", "3"])
        samples.append(capsys.readouterr().out)
    assert samples[0] == samples[1]
    assert samples[0].startswith("--sample 5 --seed 3\n")
    assert len(samples[0].splitlines()) == 6


@pytest.mark.rest
def test_tests_of_faults_and_of_the_oldest_versions_exist() -> None:
    """A test that has another name now would stop the run of all faults after some of them, and that of the oldest."""
    wanted = [test for fault in mutation.FAULTS for test in fault.tests]
    wanted += Path(__file__).with_name("oldest.txt").read_text().splitlines()
    asked = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    asked += ["-m", "faults or not faults"]  # of the fault matrix all, and of the others
    files = sorted({test.partition("::")[0] for test in wanted})
    done = subprocess.run(
        [*asked, *files], cwd=runner.ROOT, capture_output=True, text=True, timeout=runner.HANG_S, check=True
    )
    there = {
        name for line in done.stdout.splitlines() for name in (line, *(line.partition(to)[0] for to in ("[", "::")))
    }
    assert [test for test in wanted if test not in there] == []
