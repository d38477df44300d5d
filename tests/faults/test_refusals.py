"""What must not be touched or run is not: another job's folder, what anybody can write to, and any pickle."""

import dataclasses
import json
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.harness import runner
from tests.harness.fault_case import Cell, checkpoints, events_in, wait_for


@pytest.mark.fault("refused: two jobs in one run's folder")
def test_two_jobs(cell: Cell) -> None:
    """The second is refused, the first does not notice."""
    other = dataclasses.replace(cell, attempts=10)
    refusals: list[runner.Result] = []
    told = cell.folder / "told"

    def start_another(events: Path) -> None:
        try:
            wait_for(lambda: any(event["event"] == "fault" for event in events_in(events)))
            refusals.append(other.start())
        finally:
            told.touch()

    result = cell.start(faults=[("end of a step", "wait for", -1, 2, str(told))], meanwhile=start_another)
    assert result.ok, str(result)
    first = next(event["pid"] for event in cell.events if event["rank"] == 0)
    assert refusals[0].codes[0] == 2, str(refusals[0])
    assert "Traceback" not in str(refusals[0]), str(refusals[0])
    cell.say(
        refusals[0].outputs[0], rf"error: --name run: .* is in use by process {first} on \S+; wait until it ends, or"
    )
    cell.check_exact()


@pytest.mark.fault("refused: {what} that others can write to")
@pytest.mark.parametrize("what", ["a checkpoint", "a folder of checkpoints"])
def test_open_to_others(what: str, cell: Cell) -> None:
    cell.begin(2)
    folder = checkpoints(cell.run)[2]
    folder = folder if what == "a checkpoint" else folder.parent
    folder.chmod(0o777)
    result = cell.start()
    refused(cell, result, f"{folder} is writable by every user, so its checkpoints are not trusted: chmod o-w")


def refused(cell: Cell, result: runner.Result, pattern: str) -> None:
    assert result.codes[0] == 2, str(result)
    assert all(result.codes), str(result)
    assert "Traceback" not in str(result), str(result)
    cell.say(result.outputs[0], pattern)
    assert not cell.done()


# --- pickles ----------------------------------------------------------------------------------------------


class Bomb:
    """Unpickled, it creates a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.canary,)


def plant(folder: Path, canary: Path, *kinds: str) -> Path:
    """Files that run code when they are unpickled, in the forms that loaders know."""
    folder.mkdir(parents=True, exist_ok=True)
    bomb = Bomb(canary)
    for kind in kinds:
        if kind in ("pt", "pth"):
            torch.save(bomb, folder / f"train.{kind}")
        elif kind == "npy":
            np.save(folder / "train.npy", np.array([bomb], dtype=object), allow_pickle=True)
        elif kind.startswith("tar"):  # a WebDataset, whose files `datasets` decodes by their names
            inner = kind.partition(" of ")[2]
            with tarfile.open(folder / "train-000.tar", "w") as tar:
                tar.add(next(plant(folder.parent / "tar", canary, inner).iterdir()), f"000.{inner}")
        elif kind == "py":
            code = f"import pathlib\npathlib.Path({str(canary)!r}).touch()\n"
            (folder / f"{folder.name}.py").write_text(code)
        else:
            (folder / f"train.{kind}").write_bytes(pickle.dumps(bomb))
    return folder


KINDS = ("pt", "pkl", "npy", "tar of pkl", "py")
MORE_KINDS = ("pickle", "bin", "tar of npy", "tar of pth", "tar of pyd")


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """What must not be there at the end, though loading a planted file makes it."""
    path = tmp_path / "canary"
    for load in (
        lambda file: pickle.loads(file.with_suffix(".pkl").read_bytes()),
        lambda file: pickle.loads(zipfile.ZipFile(file.with_suffix(".pt")).read(f"{file.stem}/data.pkl")),
        lambda file: np.load(file.with_suffix(".npy"), allow_pickle=True),
    ):
        load(plant(tmp_path / "proof", path, "pt", "pkl", "npy") / "train.any")
        path.unlink()
    return path


@pytest.mark.fault("refused: malicious pickle, --data folder of {kind}")
@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.rest) for kind in MORE_KINDS)])
def test_pickle_as_data(kind: str, canary: Path, cell: Cell) -> None:
    cell.needs("--data")
    folder = plant(cell.folder / "data", canary, kind)
    result = cell.start("--data", str(folder))
    refused(cell, result, rf"error: --data {folder}")
    assert not canary.exists()


@pytest.mark.fault("refused: malicious pickle, --resume of a {what}")
@pytest.mark.parametrize("what", ["file", "folder", "run"])
def test_pickle_to_resume(what: str, canary: Path, cell: Cell) -> None:
    folder = plant(cell.folder / "evil", canary, *KINDS)
    path = {"file": folder / "train.pt", "folder": folder, "run": folder}[what]
    if what == "run":
        step = plant(folder / "checkpoints" / "step_00000002", canary, *KINDS)
        shutil.copy(step / "train.pkl", step / ".metadata")  # where torch.distributed.checkpoint keeps a pickle
        shutil.copy(step / "train.pkl", step / "MANIFEST.json")
    result = cell.start("--resume", str(path))
    refused(cell, result, "error: .*(no checkpoint there|every checkpoint is damaged)")
    assert not canary.exists()


@pytest.mark.fault("refused: malicious pickle, {flag}")
@pytest.mark.parametrize("flag", ["--config", "--out", "--out --name", "--data"])
def test_pickle_as_a_file(flag: str, canary: Path, cell: Cell) -> None:
    if flag == "--data":
        cell.needs(flag)
    file = plant(cell.folder / "evil", canary, "pkl") / "train.pkl"
    if flag == "--out --name":
        result = cell.start("--out", str(file.parent), "--name", file.name)
        refused(cell, result, f"error: --out {file.parent}: {file} cannot be written to")
    else:
        result = cell.start(flag, str(file))
        refused(cell, result, f"error: {flag} {file}")
    assert not canary.exists()


@pytest.mark.fault("refused: malicious pickles beside the files of a run")
def test_pickles_in_a_run(canary: Path, cell: Cell) -> None:
    """They are not looked at, and the run goes on exactly."""
    cell.begin(2)
    step = checkpoints(cell.run)[2]
    for folder in (cell.run, cell.run / "logs", step.parent, step):
        plant(folder, canary, *KINDS)
    for path in (step / ".metadata", step.parent / "latest", step.parent / "step_00000009"):
        path.write_bytes(pickle.dumps(Bomb(canary)))
    result = cell.start()
    assert result.ok, str(result)
    cell.say(result.outputs[0], "resuming from step 2 of")
    cell.check_exact()
    assert not canary.exists()


@pytest.mark.fault("refused: malicious pickle as the config.json of a run")
def test_pickle_as_config_of_a_run(canary: Path, cell: Cell) -> None:
    cell.begin(2)
    assert json.loads((cell.run / "config.json").read_text())
    (cell.run / "config.json").write_bytes(pickle.dumps(Bomb(canary)))
    result = cell.start()
    assert not canary.exists()
    assert result.ok, str(result)
    cell.say(result.outputs[0], r"warning: .*config\.json")
    cell.check_exact()
