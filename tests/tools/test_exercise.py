"""tools.exercise: each planted fault is noticed, and the file without it passes."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from common import UserError
from tools.about import ROOT
from tools.exercise import __main__ as command
from tools.exercise import compare, exercises
from tools.exercise.compare import Record
from tools.exercise.exercises import EXERCISES, Exercise

from tests.harness import runner

KEYS = [one.key for one in EXERCISES]
CHAPTERS = sorted(ROOT.glob("docs/course/[0-9]*.md"))
SAMPLED = ("2a", "5c", "10a")  # which the default run checks: by a gradient norm, by a checkpoint, by a later loss
HANGS = ("2c",)  # some of them: a collective that not all ranks call


def test_three_in_each_chapter() -> None:
    assert [f"{chapter}{letter}" for chapter in range(1, 11) for letter in "abc"] == KEYS


@pytest.mark.parametrize("key", KEYS)
def test_fault_applies(key: str) -> None:
    """Its text stands in the twin once, and what comes of it is a program. The file says what to do, and no answer."""
    exercise = exercises.find(key)
    compile(exercise.file(), key, "exec")
    assert exercise.faulty() != exercise.twin.read_text()
    head = exercise.file().removesuffix(exercise.faulty())
    assert all(line.startswith("#") for line in head.splitlines())
    assert f"python -m tools.exercise {key}" in head
    assert exercise.title in head


def test_each_chapter_names_its_exercises() -> None:
    """By their titles, and no others; and the program that it is about."""
    assert [int(path.stem.partition("-")[0]) for path in CHAPTERS] == list(range(1, 11))
    for number, path in enumerate(CHAPTERS, 1):
        text = path.read_text()
        own = [one for one in EXERCISES if one.key[:-1] == str(number)]
        assert re.findall(r"^- \*\*(\w+)\*\*: ", text, re.MULTILINE) == [one.key for one in own]
        assert all(f"- **{one.key}**: {one.title}" in text for one in own), path
        assert all(f"../../recipes/{one.recipe}/bare.py" in text for one in own), path
        assert text.count("<details>") == 2


def check(key: str, path: str, timeout_s: float) -> None:
    """In a process of its own, whose forks are the ranks."""
    from tools.exercise import check

    found = check.check(exercises.find(key), Path(path), lambda line: print(line, flush=True), timeout_s)
    print(f"found: {found}", flush=True)


def found(exercise: Exercise, path: Path, timeout_s: float = 300.0) -> str:
    """What the check says is different."""
    result = runner.spawn(check, [(exercise.key, str(path), timeout_s)], timeout_s=1.5 * runner.HANG_S)
    assert result.ok, str(result)
    return re.findall(r"^found: (.*)", result.outputs[0], re.MULTILINE)[0]


EACH = [pytest.param(key, marks=() if key in SAMPLED else pytest.mark.rest) for key in KEYS]


@pytest.mark.parametrize("key", EACH)
def test_fault_is_found(key: str, tmp_path: Path) -> None:
    exercise = exercises.find(key)
    path = tmp_path / f"exercise_{key}.py"
    path.write_text(exercise.file())
    said = found(exercise, path, 30.0 if key in HANGS else 300.0)
    assert re.match(r"on \d process", said), said
    assert "rank" in said.lower()


@pytest.mark.parametrize("key", [pytest.param(key, marks=() if key == "2a" else pytest.mark.rest) for key in KEYS])
def test_twin_passes(key: str) -> None:
    exercise = exercises.find(key)
    assert found(exercise, exercise.twin) == ""


# --- What differs, without ranks ----------------------------------------------------------------------------


def test_first_difference() -> None:
    right = Record([1.0, 2.0], [3.0, 4.0], [8, 8], 10, 5, ["epoch"], ["weight"])

    def said(*changes: dict[str, object]) -> str:
        return compare.differs([dataclasses.replace(right, **one) for one in changes], [right] * len(changes), 7)

    assert said({}, {}) == ""
    assert said({"losses": [1.0, 2.0 + 1e-9]}) == "", "within the tolerance"
    assert said({"losses": [1.0, 2.0 + 1e-8]}).startswith("step 2, rank 0: the loss is 2.00000001, the twin's 2 (apart")
    assert said({"losses": [1.0, 5.0]}, {"norms": [6.0, 4.0]}) == (
        "step 1, rank 1: the gradient norm is 6, the twin's 3 (2.000 times)"
    )
    assert said({"losses": [1.0]}) == "rank 0 makes 1 steps, the twin 2"
    assert said({}, {"error": "ValueError: x", "losses": [1.0]}) == "rank 1 fails in step 2: ValueError: x"
    assert said({"hangs": True, "losses": [1.0]}, {}) == (
        "it hangs: nothing happened for 7 s. Waiting: rank 0 in step 2; rank 1 had ended"
    )
    assert said({}, {"reads": [8, 16]}).endswith("Rank 1, samples read for each step: [8, 16]; the twin: [8, 8]")
    for name, value in (("held", 11), ("whole", 6), ("printed", []), ("names", ["module.weight"])):
        assert said({name: value}).startswith("the losses are right. Rank 0, "), name


def test_twin_that_hangs_is_no_difference() -> None:
    with pytest.raises(UserError, match=r"this machine is busy\. Give it --timeout 300"):
        compare.differs([Record()], [Record(hangs=True)], 60)


# --- The command ---------------------------------------------------------------------------------------------


def start(folder: Path, *words: str) -> Path:
    path = folder / "exercise_1a.py"
    assert command.main(["1a", "--start", "--file", str(path), *words]) == 0
    return path


def test_start_never_replaces_what_was_edited(tmp_path: Path) -> None:
    path = start(tmp_path)
    start(tmp_path)  # as it was written
    path.write_text(edited := path.read_text() + "# mine\n")
    with pytest.raises(UserError, match="has been edited: move or delete it"):
        start(tmp_path)
    assert path.read_text() == edited


def test_list_and_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == KEYS
    assert command.main(["3A", "--hint"]) == 0
    assert capsys.readouterr().out == f"{exercises.find('3a').hint}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["11a"], "there is no exercise 11a: they are 1a, 1b"),
        (["1a", "--file", "/nowhere/x.py"], "there is no /nowhere/x.py: python -m tools.exercise 1a --start writes it"),
        (["1a", "--timeout", "0"], "--timeout 0.0 must be above 0 s"),
    ],
)
def test_refusals(words: Sequence[str], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        command.main([*words])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f(:\n", "line 1: SyntaxError"),
        ("x = 1\n", "the file has no function main, which the check calls"),
        ("raise SystemExit(3)\n", "line 1, `raise SystemExit(3)`: SystemExit: 3"),
        ("import os\nos._exit(1)\n", "the process ended without an error of Python's"),
    ],
)
@pytest.mark.rest
def test_file_that_does_not_run(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "exercise_1a.py"
    path.write_text(text)
    assert said in found(exercises.find("1a"), path)
