"""A change leads to its tests: by imports, by folders, and in the table of CONTRIBUTING."""

import subprocess
import sys

import pytest

from tests import which
from tests.harness import pages, runner


def test_table_is_up_to_date() -> None:
    shown = pages.parts(which.PAGE.read_text())["which"]
    assert shown == which.table(), "run `python -m tests.which --table`"


def test_every_test_is_in_some_row() -> None:
    """Without the row that stands for all of them."""
    reached: set[str] = set()
    for row in which.ROWS[:-1]:
        for name in which.of_row(row):
            reached |= which.of_file(name)
    assert [
        one for one in which.tests() if not {one, *one.split("/")[:-1]} & reached and not covered(one, reached)
    ] == []


def covered(test: str, reached: set[str]) -> bool:
    return any(test.startswith(f"{one}/") for one in reached)


@pytest.mark.parametrize(
    ("changed", "wanted", "other"),
    [
        (["common/measure/pace.py"], ["tests/measure"], ["tests/train", "tests/workloads"]),
        (["common/protect/peers.py"], ["tests/protect", "tests/faults"], ["tests/workloads"]),
        (["common/keymap.py"], ["tests/test_keymap.py"], ["tests/test_seal.py"]),
        (["tools/doctor/group.py"], ["tests/tools/test_doctor.py"], ["tests/tools/test_plan.py"]),
        (["docs/doctor.md"], ["tests/docs", "tests/tools/test_doctor.py"], ["tests/launch"]),
        (["recipes/fsdp_gpt/train.py"], ["tests/recipes -k fsdp_gpt"], ["tests/train"]),
        (["tests/harness/clock.py"], ["tests/run/test_stop.py"], ["tests/recipes"]),
        (["tests/harness/damage.py"], ["tests/faults"], ["tests/train"]),
        (["tests/test_seal.py"], ["tests/test_seal.py"], ["tests/test_keymap.py"]),
        (["launch/rendezvous.py"], ["tests/launch"], ["tests/train"]),
    ],
    ids=lambda value: value[0],
)
def test_commands(changed: list[str], wanted: list[str], other: list[str]) -> None:
    commands = "\n".join(which.commands(changed)) + " "
    for word in wanted:
        assert f" {word}" in commands, commands
    for word in other:
        assert f" {word} " not in commands, commands
    for word in commands.split():
        assert not word.startswith("tests/") or (runner.ROOT / word).exists(), word


def test_what_all_depend_on() -> None:
    assert which.commands(["tests/conftest.py", "common/keymap.py"]) == ["uv run pytest tests"]


def test_mutant_that_reads_no_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(which, "imported", lambda _: frozenset())
    monkeypatch.setattr(which, "through_tests", lambda _: frozenset())
    assert "tests/test_keymap.py" not in "".join(which.commands(["common/keymap.py"]))
    assert which.table() != pages.parts(which.PAGE.read_text())["which"]


def test_command_line() -> None:
    """Without files, those that differ from a commit."""
    command = [sys.executable, "-m", "tests.which"]
    printed = {}
    for words in (["common/keymap.py"], []):
        done = subprocess.run(
            [*command, *words],
            cwd=runner.ROOT,
            capture_output=True,
            text=True,
            timeout=runner.HANG_S,
            check=True,
        )
        printed[len(words)] = done.stdout
    assert printed[1] == "\n".join(which.commands(["common/keymap.py"])) + "\n"
    assert printed[0] == "\n".join(which.commands(which.changed())) + "\n"
