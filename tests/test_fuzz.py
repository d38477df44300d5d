"""Random flags, data files and checkpoints: refused in a sentence or read as they are, and never a hang.

    FUZZ_CASES=1000 FUZZ_SEED=7 uv run pytest tests/test_fuzz.py -k test_fuzz

Each case is a function of the seed, the family and its number, so that one that fails can be run again alone.
"""

import collections
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import clocked, fuzz, fuzz_files, runner

CASES = int(os.environ.get("FUZZ_CASES", "0"))  # over all families; 0 for what a plain `pytest` runs
SEED = int(os.environ.get("FUZZ_SEED", "1"))  # the same in each run: a change must not fail by somebody else's bad luck
MUTANT_S = 30.0  # for one case of a mutant, which may hang; one that is slow, and no fault, would only end a search
QUICK = 20  # of each family
FAMILIES: dict[str, Callable[[fuzz.Case], str]] = {
    "flags": fuzz.try_flags,
    "data": fuzz.try_data,
    "checkpoint": fuzz.try_checkpoint,
    **fuzz_files.FAMILIES,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    (outcome,) = clocked.run(fuzz.save_two, [folder], runner.HANG_S)
    assert outcome == "saved"
    return folder


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[str], None]]:
    """Prints past pytest: a seed that nobody sees helps nobody."""

    def tell(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}", end="")

    return tell


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
def test_fuzz(family: str, saved: Path, tmp_path: Path, told: Callable[[str], None]) -> None:
    number = -(-CASES // len(FAMILIES)) or QUICK
    began = time.monotonic()
    cases = [fuzz.Case(family, SEED, i, tmp_path / str(i), saved) for i in range(number)]
    found = clocked.run(FAMILIES[family], cases, runner.HANG_S)
    kinds = collections.Counter(line.split()[0] for line in found)
    took = time.monotonic() - began
    told(f"fuzz {family}: seed {SEED}, {number} cases in {took:.0f} s: {dict(kinds)}")
    faults = [f"case {i}: {line}" for i, line in enumerate(found) if line.startswith("FAULT")]
    assert not faults, f"FUZZ_SEED={SEED}, {len(faults)} of {number}:\n" + "\n".join(faults)
    assert number < QUICK or len(kinds) > 1, "some are refused, some are not"


@pytest.mark.parametrize("family", FAMILIES)
def test_mutants(family: str, saved: Path, tmp_path: Path) -> None:
    """Without the protection, one of the same cases is a fault: the fuzz sees it."""
    found: list[str] = []
    while not any(line.startswith("FAULT") for line in found):  # few at a time, because some take all of MUTANT_S
        assert len(found) < 1000, found
        numbers = range(len(found), len(found) + 5)
        cases = [fuzz.Case(family, 1, i, tmp_path / str(i), saved, mutant=True) for i in numbers]
        found += clocked.run(FAMILIES[family], cases, MUTANT_S)


def hang_or_die(case: str) -> str:
    if case == "hang":
        time.sleep(1000)
    if case == "die":
        os._exit(7)
    return case


def test_clock() -> None:
    """A case that hangs and one that ends its process are named, and those after them run."""
    assert clocked.run(hang_or_die, ["one"], runner.HANG_S) == ["one"], "the fork server is there"
    found = clocked.run(hang_or_die, ["one", "hang", "two", "die", "three"], 5.0)
    assert found == ["one", "FAULT hangs: more than 5.0 s", "two", "FAULT the process ended with 7", "three"]


RUNS = {  # whole runs at the edges of what the flags may be, and whether they train
    "one sample of each": (["--global-batch-size", "2", "--log-every", "2147483647", "--keep", "2147483647"], False),
    "far away": (["--stop-after", "2147483647", "--hang-timeout", "1e300", "--deadline", "1e300"], True),
    "no rate": (["--lr", "0", "--weight-decay", "1e30", "--momentum", "1"], True),
    "a rate that explodes": (["--lr", "1e300", "--max-skips", "2147483647"], False),
    "a batch beyond the set": (["--global-batch-size", "2000", "--warmup-steps", "2147483647"], True),
    "a seed of 64 bits": (["--seed", str(2**64 - 1), "--max-grad-norm", "1e-300"], True),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if i % 3 == 0 else pytest.mark.rest) for i, name in enumerate(RUNS)]
)
def test_whole_runs(name: str, tmp_path: Path, small_digits: Path) -> None:
    flags, trains = RUNS[name]
    where = ["--data", str(small_digits), "--out", str(tmp_path / "out"), "--name", "run", "--max-steps", "2"]
    batch = [] if "--global-batch-size" in flags else ["--global-batch-size", "8"]
    result = runner.run_recipe("ddp_resnet", 2, *where, *batch, *runner.small("ddp_resnet"), *flags)
    assert "Traceback" not in str(result), str(result)
    assert result.ok == trains, str(result)
    assert trains or result.codes[0] == 2, str(result)
