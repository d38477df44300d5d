"""The rows of the fault matrix that are about saving and loading, on runs in a store, with three strategies.

    STORE_FAULTS=all uv run pytest -m "" tests/store/test_faults.py

The rows are those of tests/faults themselves (see `stored.Mirror`): all of the families `FAMILIES`, and `MORE` of the
others. `WITHOUT` names each row that is not run here, and why. What a store alone does wrong has rows of its own below.
Without STORE_FAULTS, each row but those of `ALIKE` is run with one of the recipes in turn.
"""

import dataclasses
import inspect
import itertools
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import moto.s3.models
import pytest
from common import manifest
from common.store.objects import paths, uploads

from tests.faults import (
    test_blame,
    test_damage,
    test_data,
    test_numbers,
    test_output,
    test_ranks,
    test_refusals,
    test_saves,
    test_state,
    test_stop,
)
from tests.faults.conftest import reference_run
from tests.harness import runner
from tests.harness.damage import DAMAGES, add_tensors, flip_bit, flip_random_bit
from tests.harness.fault_case import STEPS, FaultCase, checkpoints
from tests.harness.once import Once
from tests.harness.states import same_tensors
from tests.store import server, stored

__all__ = ["reference_run"]  # a fixture
RECIPES = ("ddp_resnet", "fsdp_gpt", "pipeline_gpt")
ALL = os.environ.get("STORE_FAULTS") == "all"
MODULES = (
    *(test_blame, test_damage, test_data, test_numbers, test_output, test_ranks, test_refusals, test_saves),
    *(test_state, test_stop),
)
FAMILIES = ("damage", "disk", "save", "stop")
MORE = (
    r"numbers: (NaN in a parameter of one rank|a bit of a parameter of one rank, found at the save)",
    r"numbers: (a bit of a parameter, --on-bad-state rewind|mutant, state is not looked at before a save)",
    r"output: .* in metrics\.jsonl",
    r"rank: (SIGKILL before the training begins|a save that is slower|hangs, in a save|one has no memory for a save)",
    r"refused: (two jobs in one|a job that another one|the server has lost)",
)
WITHOUT = {  # a row's name: why it has no meaning in a store, or which test has it
    r"damage: (a pipe as|a link to itself)": "a store has objects, and neither pipes nor links",
    r"damage: (a file of tensors|mutant, files) that the manifest": "nobody reads it: test_stranger_is_not_read",
    "damage: a missing manifest, in the newest": "it looks as a save that was killed: test_what_no_manifest_names",
    "damage: 200 random bits": "it reads a copy on this machine: test_random_bits",
    r"damage: (images of|packed tokens)": "of --data, which lies on this machine",
    r"disk: .* (for a while|to the end)": "test_store_refuses_for_a_while, test_store_refuses_to_the_end",
    r"disk: (.* already when|mutant, a start)": "of log and records, which are on this machine",
    r"disk: the run's folder is removed": "test_everything_is_removed",
    r"stop: (SIG\w+|mutant, ranks do not see that) .*launcher": "of the launcher, whose ranks then stop as asked to",
    r"stop: SIGTERM with 2 loader workers": "of loader workers, which do not know where checkpoints lie",
    r"rank: a save that is slower": "it counts the bytes of a file: test_slow_store",
    r"refused: the server has lost checkpoints/": "of NFS: test_store_that_is_away_at_the_start",
}
ALIKE = {  # what only STORE_FAULTS=all runs, and why another row shows as much
    r"damage: (a manifest |an empty manifest)": "what its bytes say is read as in a folder",
    r"output: (?!a half line)": "what the lines say is read as in a folder",
    r"stop: SIG(USR1|INT|HUP)": "a request as SIGTERM is, whatever is saved then",
}


class Row(NamedTuple):
    """A row of the matrix: its name, its test, and what this takes beside the case."""

    name: str
    test: Callable[..., None]
    given: dict[str, Any]


def rows_of(test: Callable[..., None]) -> Iterator[Row]:
    """All rows of a test of the matrix."""
    marks = {mark.name: mark for mark in reversed(getattr(test, "pytestmark", []))}
    if "fault" not in marks:
        return
    lists = []
    for mark in test.pytestmark:  # type: ignore[attr-defined]
        if mark.name == "parametrize":
            names = [name.strip() for name in mark.args[0].split(",")]
            values = [one.values if hasattr(one, "values") else (one,) for one in mark.args[1]]
            lists.append([dict(zip(names, one, strict=True)) for one in values])
    for each in itertools.product(*lists):
        given = {name: value for one in each for name, value in one.items()}
        yield Row(marks["fault"].args[0].format(**given), test, given)


def found_rows() -> list[Row]:
    """Those of the matrix that are about saving and loading."""
    tests = [one for module in MODULES for one in vars(module).values() if inspect.isfunction(one)]
    every = [row for test in dict.fromkeys(tests) if test.__name__.startswith("test_") for row in rows_of(test)]
    return [row for row in every if row.name.partition(":")[0] in FAMILIES or matches(MORE, row.name)]


def matches(patterns: Any, name: str) -> list[str]:
    return [one for one in patterns if re.match(one, name)]


FOUND = found_rows()
LEFT_OUT = WITHOUT if ALL else WITHOUT | ALIKE
ROWS = [row for row in FOUND if not matches(LEFT_OUT, row.name)]


def each(names: list[str]) -> list[Any]:
    """Parameters: each row with all recipes, or with one of them in turn."""
    return [
        pytest.param(name, recipe, id=f"{name}-{recipe}")
        for i, name in enumerate(names)
        for recipe in (RECIPES if ALL else RECIPES[i % len(RECIPES) :][:1])
    ]


def test_every_row_is_run_or_named() -> None:
    """And no pattern is of rows that have gone."""
    names = [row.name for row in FOUND]
    assert len({*names}) == len(names)
    assert {name.partition(":")[0] for name in names} >= {*FAMILIES}
    for pattern in (*MORE, *WITHOUT, *ALIKE):
        assert any(re.match(pattern, name) for name in names), pattern
    assert [row.name for row in ROWS if {*inspect.signature(row.test).parameters} != {*row.given, "case"}] == []
    assert {runner.workload(recipe) for recipe in RECIPES} == {"resnet", "gpt"}


@pytest.fixture
def case(
    recipe: str,
    s3: server.Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reference_run: Callable[[str], Path],
    once: Once,
) -> FaultCase:
    """A run of a recipe in a store; what it is compared with lies in a folder."""
    monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", 1)

    def make(folder: Path, wanted: Callable[[], Path]) -> FaultCase:
        prefix = f"{folder.parent.name}-{folder.name}"
        mirror = stored.Mirror(s3, f"{prefix}/run", folder / "out" / "run", folder / "machine")
        url = f"s3://{server.BUCKET}/{prefix}"
        return FaultCase(recipe, folder, 2, wanted, spawn=mirror.spawn, url=url)

    def copied() -> Path:
        """The same training in a store: the names of its files have an end of their own."""
        folder = once.folder(begin, "stored reference", recipe)
        return folder / "out" / "run"

    def begin(folder: Path) -> None:
        one = make(folder, lambda: reference_run(recipe))
        result = one.start()
        assert result.ok, str(result)
        one.check_same_as_reference()
        one.check_same_checkpoints(2, 4)
        assert all("model" in file.name and file.stem[-9] == "-" for file in one.run_dir.rglob("*.safetensors"))

    return dataclasses.replace(make(tmp_path, lambda: reference_run(recipe)), copied=copied)


@pytest.mark.parametrize(("name", "recipe"), each([row.name for row in ROWS]))
def test_row(name: str, case: FaultCase, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = (row for row in ROWS if row.name == name)
    if name.startswith("rank: "):  # every rank exits by itself, as in tests/faults/test_ranks.py
        monkeypatch.setattr(runner, "GRACE_S", runner.PATIENT_S)
    row.test(**row.given, case=case)


# --- a store that refuses ---------------------------------------------------------------------------------


REFUSALS = {
    "full": (507, "InsufficientStorage"),
    "forbidden": (403, "AccessDenied"),
    "without its bucket": (404, "NoSuchBucket"),
    "busy": (503, "SlowDown"),
    "broken": (500, "InternalError"),
    "cut off": server.UNHEARD,
    "cut off before it answers": server.UNANSWERED,
}


@pytest.mark.parametrize(("what", "recipe"), each([*REFUSALS]))
def test_store_refuses_for_a_while(what: str, case: FaultCase, s3: server.Server) -> None:
    """The save that fails warns, and the training continues to a last save that succeeds."""
    case.copy_reference(until=2)
    hit = s3.refuse("P", r"checkpoints/step_00000004/", 10**6, *REFUSALS[what])
    result = case.start()
    assert hit
    assert result.ok, str(result)
    assert "Traceback" not in str(result), str(result)
    case.record_message(result.outputs[0], "warning: no checkpoint of step 4: .*; training continues")
    assert list(checkpoints(case.run_dir)) == [2, 6]
    case.check_same_checkpoints(2, 6)


@pytest.mark.parametrize(("what", "recipe"), each([*REFUSALS]))
def test_store_refuses_to_the_end(what: str, case: FaultCase, s3: server.Server) -> None:
    """The last save must succeed; a copy lies on this machine, and the same command continues once there is room."""
    case.copy_reference(until=2)
    s3.refuse("P", r"checkpoints/step_0000000[46]/", 10**6, *REFUSALS[what])
    result = case.start()
    case.check_refused(result, r"error: the last checkpoint was not saved: .*It was saved to .*step_00000006 instead")
    assert list(checkpoints(case.run_dir)) == [2]
    assert not manifest.verify(checkpoints(case.run_dir)[2])[1]
    (copy,) = case.folder.glob("machine/runs/s3/*/*/run/checkpoints/step_00000006")
    assert same_tensors(copy, checkpoints(case.reference())[6])
    s3.faults.clear()
    case.resume_and_check()
    assert case.row.steps_lost == STEPS - 2


@pytest.mark.parametrize(("what", "recipe"), each(["slow"]))
def test_slow_store(what: str, case: FaultCase, s3: server.Server) -> None:
    """A save that takes longer than a hang may last is none while parts arrive."""
    hits: list[str] = []
    patience_s = 2 * test_blame.SAVE_S  # a busy machine adds seconds to what a part takes here

    def take_long(environ: dict[str, Any]) -> None:
        if re.search("step_00000004/.*uploadId", request(environ)):
            hits.append(environ["QUERY_STRING"])
            time.sleep(0.6 * patience_s)

    s3.faults.append(take_long)
    result = case.start(faults=test_blame.patient(case, patience_s))
    assert len(hits) > uploads.PARTS * case.size, "more than can be on their way at once"
    assert result.ok, str(result)
    case.record_message(
        result.outputs[0], r"warning: the save is slow: \d+ s so far, and it looked at s3://.*/run/.*, part \d+ last"
    )
    case.check_same_as_reference()


def request(environ: dict[str, Any]) -> str:
    return f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"


@pytest.mark.parametrize(("what", "recipe"), each([one for one in REFUSALS if one != "full"]))
def test_store_that_is_away_at_the_start(what: str, case: FaultCase, s3: server.Server) -> None:
    """A run that has checkpoints does not start from scratch, nor does anything else than a sentence come of it."""
    case.copy_reference(until=2)
    for method in ("GET", "HEAD", "P"):
        s3.refuse(method, "run|prefix|list-type", 10**6, *REFUSALS[what])
    with pytest.MonkeyPatch.context() as patch:  # the mirror's own look goes on
        patch.setattr(stored.Mirror, "push", push_past(s3))
        patch.setattr(stored.Mirror, "pull", lambda _: None)
        result = case.start()
    s3.faults.clear()
    case.check_refused(result, "error: ")
    assert not case.steps_done()
    case.resume_and_check()


def push_past(s3: server.Server) -> Callable[[stored.Mirror], None]:
    """A push that no fault of the server hits."""
    push = stored.Mirror.push

    def pushed(mirror: stored.Mirror) -> None:
        faults, s3.faults[:] = [*s3.faults], []
        push(mirror)
        s3.faults[:] = faults

    return pushed


@pytest.mark.parametrize(("what", "recipe"), each(["run"]))
def test_everything_is_removed(what: str, case: FaultCase, s3: server.Server) -> None:
    """By another program, in the middle of a run: what is saved from then on is there, and is enough to continue."""

    def remove(_: dict[str, Any]) -> None:
        s3.faults.clear()
        for key in s3.objects(case.url.removeprefix(f"s3://{server.BUCKET}/")):
            if not key.endswith("/lock"):
                s3.client().delete_object(Bucket=server.BUCKET, Key=key)

    s3.faults.append(lambda environ: remove(environ) if "step_00000004" in environ["PATH_INFO"] else None)
    result = case.start()
    assert result.ok, str(result)
    assert {6} <= {*checkpoints(case.run_dir)} <= {4, 6}, "that of step 4 is whole, or failed with a warning"
    case.check_same_checkpoints(*checkpoints(case.run_dir))


# --- damage that only objects can have --------------------------------------------------------------------


ODD = [what for what in DAMAGES if not matches(LEFT_OUT, f"damage: {what}")]


@pytest.mark.parametrize(("what", "recipe"), each([one for one in ODD if one != "another checkpoint under its number"]))
def test_older_checkpoint_is_damaged(what: str, case: FaultCase) -> None:
    """It takes nothing from the newest one, nor from those to come."""
    case.copy_reference(until=4)
    DAMAGES[what](checkpoints(case.run_dir)[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored.Mirror, "check_tidy", lambda _: None)  # its own files may stay
        result = case.resume_and_check()
    assert "resuming from step 4 of" in result.outputs[0]
    assert "no checkpoint of step" not in result.outputs[0], str(result)
    assert not manifest.verify(checkpoints(case.run_dir)[6])[1]


@pytest.mark.parametrize(("what", "recipe"), each(["stranger"]))
def test_stranger_is_not_read(what: str, case: FaultCase) -> None:
    """A copy of a file, with other numbers, beside the files of a checkpoint: exact, and gone after the next save."""
    case.copy_reference(until=4)
    add_tensors(checkpoints(case.run_dir)[4])
    result = case.resume_and_check()
    assert "resuming from step 4 of" in result.outputs[0]


@pytest.mark.parametrize(("content", "recipe"), each(["step_00000099", "", "\udcff../../x", "[" * 1000]))
def test_pointers_are_damaged(content: str, case: FaultCase) -> None:
    """`latest` and `best` name nothing that is there."""
    case.copy_reference(until=4)
    for name in ("latest", "best"):
        (case.run_dir / "checkpoints" / name).write_bytes(content.encode(errors="surrogateescape"))
    result = case.resume_and_check()
    assert "resuming from step 4 of" in result.outputs[0]
    assert (case.run_dir / "checkpoints" / "latest").read_text() == "step_00000006"


@pytest.mark.parametrize(("what", "recipe"), each(["recipe"]) if ALL else each(["", "recipe"])[:2])
def test_checkpoint_of_another_model(
    what: str, recipe: str, case: FaultCase, reference_run: Callable[[str], Path], s3: server.Server
) -> None:
    (other, *_) = (one for one in RECIPES if runner.workload(one) != runner.workload(recipe))
    for file in checkpoints(reference_run(other))[6].iterdir():
        s3.client().upload_file(str(file), server.BUCKET, f"other/{file.name}")
    result = case.start("--resume", f"s3://{server.BUCKET}/other")
    case.check_refused(result, rf"error: checkpoint s3://{server.BUCKET}/other does not fit this model")
    assert not case.steps_done()


@pytest.mark.parametrize(("what", "recipe"), each(["200"]))
def test_random_bits(what: str, case: FaultCase, s3: server.Server) -> None:
    """One at a time, in all objects of a checkpoint; each is found."""
    choose = random.Random(3)
    assert case.copied
    copy = shutil.copytree(checkpoints(case.copied())[6], case.folder / "copy")
    client = s3.client()
    path = paths.parse("--resume", f"s3://{server.BUCKET}/copy/step_00000006")
    files = sorted(copy.iterdir())

    def put(file: Path) -> None:
        client.upload_file(str(file), server.BUCKET, f"copy/step_00000006/{file.name}")

    for file in files:
        put(file)
    assert not manifest.verify(path)[1]
    for i in range(int(what)):
        file = files[i % len(files)]
        bit = flip_random_bit(file, choose)
        put(file)
        assert manifest.verify(path)[1], f"bit {bit} of {file}"
        flip_bit(file, bit)
        put(file)
    assert not manifest.verify(path)[1]
