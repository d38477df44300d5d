"""tools.exercise: each planted fault is noticed, and the file without it passes."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

    found = check.check(exercises.find(key), Path(path), lambda words: print(words, end="", flush=True), timeout_s)
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


# One of each check: exercises of a twin may have the same.
CHECKS = {(one.recipe, one.sizes, one.resumes, one.rank_0_logs): one.key for one in EXERCISES}


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if key == "2c" else pytest.mark.rest) for key in CHECKS.values()]
)
def test_twin_passes(key: str) -> None:
    exercise = exercises.find(key)
    assert found(exercise, exercise.twin) == ""


WRONG = (  # changes of a twin that train as it does where one does not look twice
    ("4b", "contextlib.nullcontext() if is_last else model.no_sync()", "contextlib.nullcontext()", "passes that send"),
    ("7a", "chosen[rank // tp :: size // tp]", "chosen", "on 4 processes: .*samples read"),
    (
        "7b",
        '    for block in model.blocks.values():\n        fully_shard(block, mesh=mesh["dp"])\n',
        "",
        "weights that it has at once",
    ),
    ("8c", "int(name) * size // model.shape.num_layers", "int(name) // (model.shape.num_layers // size)", "on 3 proc"),
)


@pytest.mark.parametrize(("key", "old", "new", "said"), WRONG, ids=[one[0] for one in WRONG])
@pytest.mark.rest
def test_half_a_fix_is_refused(key: str, old: str, new: str, said: str, tmp_path: Path) -> None:
    assert re.search(said, found(exercises.find(key), changed(tmp_path, key, old, new)))


RIGHT = (("2c", "dist.all_reduce(mean)  # for the log alone", "dist.reduce(mean, 0)"),)


@pytest.mark.parametrize(("key", "old", "new"), RIGHT, ids=[one[0] for one in RIGHT])
@pytest.mark.rest
def test_another_fix_is_accepted(key: str, old: str, new: str, tmp_path: Path) -> None:
    assert found(exercises.find(key), changed(tmp_path, key, old, new)) == ""


def changed(folder: Path, key: str, old: str, new: str) -> Path:
    """The twin of an exercise, with another text in one place."""
    text = exercises.find(key).twin.read_text()
    assert text.count(old) == 1
    path = folder / f"exercise_{key}.py"
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("3b", "first process's weights to all"),
        ("5b", "beside the old file"),
        ("5c", "without the wrapper"),
        ("6b", "gathered one by one"),
        ("6c", "a part for each"),
        ("6c", "this process's part"),
        ("7a", "the same in every process"),
        ("7a", "this group's part"),
        ("8a", "added up, not averaged"),
        ("8a", "the layers of all processes"),
        ("8b", "the same in every process: "),
    ],
)
def test_no_comment_gives_the_answer(key: str, answer: str) -> None:
    exercise = exercises.find(key)
    assert answer in exercise.twin.read_text()
    assert answer not in exercise.faulty()


def test_continues_before_it_crashes() -> None:
    """A plain resume comes first, so that a fault in load is not said to be one of a crash."""
    from tools.exercise import check

    made = check.legs(exercises.find("10c"), Path("x"))
    assert [(argv[1], crash) for _, argv, crash in made] == [
        ("6", False),
        ("3", False),
        ("6", False),
        ("9", True),
        ("9", False),
    ]
    assert [check.AGAIN in name for name, _, _ in made] == [False, False, True, True, True]
    assert len(check.legs(exercises.find("10b"), Path("x"))) == 1


def test_constants_are_those_of_the_twin() -> None:
    assert exercises.find("10b").constants() == {"BATCH": 16, "INNER_STEPS": 2}
    assert exercises.find("8a").constants() == {"BATCH": 16, "MICRO_BATCHES": 4}


# --- What differs, without ranks ----------------------------------------------------------------------------


def test_first_difference() -> None:
    right = Record([1.0, 2.0], [3.0, 4.0], [8, 8], [1, 1], 10, 5, ["epoch"], ["weight"])

    def said(*changes: dict[str, object], **more: Any) -> str:
        mine = [dataclasses.replace(right, **one) for one in changes]
        return compare.differs(mine, [right] * len(changes), 7, **more)

    assert said({}, {}) == ""
    assert said({"losses": [1.0, 2.0 + 1e-9]}) == "", "within the tolerance"
    assert said({"losses": [1.0, 2.0 + 2e-8]}, since=" after it continued") == (
        "step 2 after it continued, rank 0: the loss is 2.00000002, the twin's 2 (1.00000001 times)"
    )
    assert said({"losses": [1.0, 5.0]}, {"norms": [6.0, 4.0]}) == (
        "step 1, rank 1: the gradient norm is 6, the twin's 3 (2 times)"
    )
    assert said({}, {"losses": [1.0, 5.0]}, rank_0_logs=True) == ""
    assert said({"losses": [1.0, 5.0]}, {}, rank_0_logs=True).startswith("step 2, rank 0: the loss is 5")
    assert said({}, {"norms": [6.0, 4.0]}, rank_0_logs=True).startswith("step 1, rank 1: the gradient norm")
    assert said({"losses": [1.0]}) == "rank 0 makes 1 steps, the twin 2"
    assert said({}, {"error": "ValueError: x", "losses": [1.0]}) == "rank 1 fails in step 2: ValueError: x"
    assert said({"hangs": True, "losses": [1.0]}, {}) == (
        "it hangs: nothing happened for 7 s. Waiting: rank 0 in step 2; rank 1 had ended. "
        "One of them has skipped a collective that others wait in"
    )
    assert said({"hangs": True, "losses": []}, {"hangs": True, "losses": []}).endswith("rank 1 in step 1")
    assert said({}, {"reads": [8, 16]}).endswith("Rank 1, samples read for each step: [8, 16]; the twin: [8, 8]")
    for name, value in (("sends", [2, 2]), ("held", 11), ("most", 6), ("printed", []), ("names", ["module.weight"])):
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
