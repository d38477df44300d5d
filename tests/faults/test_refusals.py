"""What must not be touched or run is not: another job's folder, what anybody can write to, and any pickle."""

import ast
import json
import os
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
from tests.harness.fault_case import STEPS, FaultCase, checkpoints, events_in
from tests.harness.runner import wait_for
from tools import about

OTHER = 65534  # a user and a group


@pytest.mark.fault("refused: two jobs in one run's folder")
def test_two_jobs(case: FaultCase) -> None:
    """The second is refused, the first does not notice."""
    other = case.another()
    refusals: list[runner.Result] = []
    refused = case.folder / "refused"

    def start_another(events: Path) -> None:
        try:
            wait_for(lambda: any(event["event"] == "fault" for event in events_in(events)))
            refusals.append(other.start())
        finally:
            refused.touch()

    # The second one takes as long as it takes to start, which is no hang of the first.
    wait = ("end of a step", "wait for", -1, 2, str(refused))
    result = case.start("--hang-timeout", "60", faults=[wait], meanwhile=start_another)
    assert result.ok, str(result)
    first = next(event["pid"] for event in case.events if event["rank"] == 0)
    case.check_refused(
        refusals[0], rf"error: --name run: .* is in use by process {first} on \S+; wait until it ends, or"
    )
    case.check_same_as_reference()


@pytest.mark.fault("refused: {what} that others can write to")
@pytest.mark.parametrize("what", ["a checkpoint", "a folder of checkpoints"])
def test_open_to_others(what: str, case: FaultCase) -> None:
    case.copy_reference(until=2)
    folder = checkpoints(case.run_dir)[2]
    folder = folder if what == "a checkpoint" else folder.parent
    folder.chmod(0o777)
    result = case.start()
    check_refused_at_once(
        case, result, f"{folder} is writable by every user, so its checkpoints are not trusted: chmod o-w"
    )


@pytest.mark.fault("refused: a new run's folder that others can write to")
def test_new_run_in_an_open_folder(case: FaultCase) -> None:
    """Before anything is written there: not only when there is a checkpoint to lose."""
    case.run_dir.mkdir(parents=True)
    case.run_dir.chmod(0o777)
    result = case.start()
    check_refused_at_once(
        case, result, f"error: {case.run_dir} is writable by every user, .*: chmod o-w {case.run_dir}"
    )
    assert not [*case.run_dir.iterdir()]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("whose", ["of another user", "that a group can write to"])
@pytest.mark.fault("refused: a run's folder {whose}")
def test_folder_of_others(whose: str, case: FaultCase) -> None:
    """Its name can be guessed, and where the folder that holds it is everybody's, as /tmp, he may come first."""
    case.copy_reference(until=2)
    if whose == "of another user":
        os.chown(case.run_dir, OTHER, OTHER)
        case.run_dir.chmod(0o1777)
        told = rf"belongs to another user \(number {OTHER}\), so its checkpoints are not trusted: use your own; "
    else:
        os.chown(case.run_dir, -1, OTHER)
        case.run_dir.chmod(0o775)
        told = f"is writable by group {OTHER}: chmod g-w {case.run_dir}, or trust it: TRUST_OPEN_FOLDERS=group"
    check_refused_at_once(case, case.start(), f"error: {case.run_dir} {told}")


@pytest.mark.fault("refused: mutant, open folders are trusted")
def test_mutant_in_an_open_folder(case: FaultCase) -> None:
    case.copy_reference(until=2)
    case.run_dir.chmod(0o777)
    result = case.start(mutant="open folders are trusted")
    assert result.ok, str(result)
    case.record_message(result.outputs[0], f"done .* step {STEPS} of {STEPS}")


@pytest.mark.fault("refused: links in an open folder, with TRUST_OPEN_FOLDERS=1")
def test_links_in_a_trusted_folder(case: FaultCase) -> None:
    """The user vouches for the folder; no link is followed to what lies elsewhere."""
    case.run_dir.mkdir(parents=True)
    case.run_dir.chmod(0o777)
    mine = case.folder / "mine"
    mine.write_text("precious")
    for name in ("config.tmp", "train.tmp", "metrics.jsonl"):
        (case.run_dir / name).symlink_to(mine)
    trusts = [("at the start", "set", rank, 0, "TRUST_OPEN_FOLDERS", "1") for rank in range(case.size)]
    result = case.start("--stop-after", "2", faults=trusts)
    assert result.ok, str(result)
    case.record_message(result.outputs[0], "reached  step 2 of")
    assert mine.read_text() == "precious"
    assert json.loads((case.run_dir / "config.json").read_text())["args"]


@pytest.mark.parametrize("umask", ["000", "002"])
@pytest.mark.fault("refused: nothing of a run's own, under umask {umask}")
def test_umask(umask: str, case: FaultCase) -> None:
    """A run must be able to continue in what it has made itself, also where the group is not its user's alone."""
    case.run_dir.parent.mkdir()
    if os.geteuid() == 0:
        os.chown(case.run_dir.parent, -1, OTHER)
        case.run_dir.parent.chmod(0o2755)  # the group goes to what is made in it
    faults = [("at the start", "umask", rank, 0, int(umask, 8)) for rank in range(case.size)]
    result = case.start("--stop-after", "4", faults=faults)
    assert result.ok, str(result)
    assert (os.geteuid() == 0) == ("note: the umask lets a group write, and this run does not" in result.outputs[0])
    made = [case.run_dir, *case.run_dir.rglob("*")]
    assert not [path for path in made if not path.is_symlink() and path.stat().st_mode & 0o022]
    result = case.start(faults=faults)
    assert result.ok, str(result)
    case.record_message(result.outputs[0], "resuming from step 4 of")
    case.check_same_curves(case.curve, "train/grad_norm")
    case.check_same_checkpoints(STEPS)


# --- what another job has done meanwhile -------------------------------------------------------------------


def run_meanwhile(case: FaultCase, mutant: str = "") -> runner.Result:
    """A second job looks for a checkpoint, finds step 2, and waits; the first trains to its end; the second resumes."""
    case.copy_reference(until=2)
    other = case.another()
    done = case.folder / "done"

    def train(events: Path) -> None:
        try:
            wait_for(lambda: any(event["event"] == "fault" for event in events_in(events)))
            assert other.start().ok
        finally:
            done.touch()

    waits = ("before the claim", "wait for", 0, 0, str(done))
    result = case.start("--stop-after", "4", faults=[waits], mutant=mutant, meanwhile=train)
    assert other.steps_done() == STEPS
    return result


@pytest.mark.fault("refused: a job that another one has overtaken")
def test_overtaken(case: FaultCase) -> None:
    result = run_meanwhile(case)
    check_refused_at_once(case, result, "error: --name run: another job has saved step 6 in .*: start this one again")
    case.check_same_as_reference()


@pytest.mark.fault("refused: mutant, the folder is looked at once")
def test_mutant_overtaken(case: FaultCase) -> None:
    """What the first job has recorded is lost."""
    result = run_meanwhile(case, mutant="the folder is looked at once")
    assert result.ok, str(result)
    case.record_message(result.outputs[0], "reached  step 4 of")
    assert list(runner.records(case.run_dir, case.curve)) == [1, 2, 3, 4]


@pytest.mark.fault("refused: the server has lost checkpoints/, {what}")
@pytest.mark.parametrize("what", ["iterdir", "stat"])
def test_lost_server(what: str, case: FaultCase) -> None:
    """A run that has checkpoints does not start from scratch."""
    case.copy_reference(until=2)
    folder = case.run_dir / "checkpoints"
    result = case.start(faults=[("at the start", "lose the server", 0, 0, what, str(folder))])
    check_refused_at_once(case, result, rf"error: {case.run_dir}\S* cannot be read: .*Stale file handle")


def check_refused_at_once(case: FaultCase, result: runner.Result, pattern: str) -> None:
    case.check_refused(result, pattern)
    assert not case.steps_done()


# --- ranks that differ -------------------------------------------------------------------------------------


@pytest.mark.fault("refused: another version of {package} on a rank", least=2)
@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_other_version(package: str, case: FaultCase) -> None:
    result = case.start(faults=[("at the start", "other version", -1, 0, package)])
    check_refused_at_once(case, result, rf"error: rank \d was started with version {package} '1\.2\.3', rank 0 with ")


@pytest.mark.fault("refused: --dtype auto is another type on a rank", least=2)
def test_other_dtype(case: FaultCase) -> None:
    if "auto" not in ast.unparse(about.fields(case.recipe)["dtype"]):
        pytest.skip("not applicable: this recipe has no --dtype auto")
    faults = [("at the start", "bfloat16", rank, 0, rank == 0) for rank in range(case.size)]
    result = case.start("--dtype", "auto", faults=faults)
    check_refused_at_once(
        case, result, r"error: rank 1 was started with picked --dtype 'float32', rank 0 with 'bfloat16'"
    )


@pytest.mark.fault("refused: mutant, ranks are not compared", least=2)
def test_mutant_with_unequal_ranks(case: FaultCase) -> None:
    result = case.start(faults=[("at the start", "other version", -1, 0, "numpy")], mutant="ranks are not compared")
    assert result.ok, str(result)
    case.record_message(result.outputs[0], f"done .* step {STEPS} of {STEPS}")


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
@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.whole) for kind in MORE_KINDS)])
def test_pickle_as_data(kind: str, canary: Path, case: FaultCase) -> None:
    case.skip_without("--data")
    folder = plant(case.folder / "data", canary, kind)
    result = case.start("--data", str(folder))
    check_refused_at_once(case, result, rf"error: --data {folder}")
    assert not canary.exists()


@pytest.mark.fault("refused: malicious pickle, --resume of a {what}")
@pytest.mark.parametrize("what", ["file", "folder", "run"])
def test_pickle_to_resume(what: str, canary: Path, case: FaultCase) -> None:
    folder = plant(case.folder / "evil", canary, *KINDS)
    path = {"file": folder / "train.pt", "folder": folder, "run": folder}[what]
    if what == "run":
        step = plant(folder / "checkpoints" / "step_00000002", canary, *KINDS)
        shutil.copy(step / "train.pkl", step / ".metadata")  # where torch.distributed.checkpoint keeps a pickle
        shutil.copy(step / "train.pkl", step / "MANIFEST.json")
    result = case.start("--resume", str(path))
    check_refused_at_once(case, result, "error: .*(no checkpoint there|every checkpoint is damaged)")
    assert not canary.exists()


@pytest.mark.fault("refused: malicious pickle, {flag}")
@pytest.mark.parametrize("flag", ["--config", "--out", "--out --name", "--data"])
def test_pickle_as_a_file(flag: str, canary: Path, case: FaultCase) -> None:
    if flag == "--data":
        case.skip_without(flag)
    file = plant(case.folder / "evil", canary, "pkl") / "train.pkl"
    if flag == "--out --name":
        result = case.start("--out", str(file.parent), "--name", file.name)
        check_refused_at_once(case, result, f"error: --out {file.parent}: {file} cannot be written to")
    else:
        result = case.start(flag, str(file))
        check_refused_at_once(case, result, f"error: {flag} {file}")
    assert not canary.exists()


@pytest.mark.fault("refused: malicious pickles beside the files of a run")
def test_pickles_in_a_run(canary: Path, case: FaultCase) -> None:
    """They are not looked at, and the run continues exactly."""
    case.copy_reference(until=2)
    step = checkpoints(case.run_dir)[2]
    for folder in (case.run_dir, case.run_dir / "logs", step.parent, step):
        plant(folder, canary, *KINDS)
    for path in (step / ".metadata", step.parent / "latest", step.parent / "step_00000009"):
        path.write_bytes(pickle.dumps(Bomb(canary)))
    result = case.start()
    assert result.ok, str(result)
    case.record_message(result.outputs[0], "resuming from step 2 of")
    case.check_same_as_reference()
    assert not canary.exists()


@pytest.mark.fault("refused: malicious pickle as the config.json of a run")
def test_pickle_as_config_of_a_run(canary: Path, case: FaultCase) -> None:
    case.copy_reference(until=2)
    assert json.loads((case.run_dir / "config.json").read_text())
    (case.run_dir / "config.json").write_bytes(pickle.dumps(Bomb(canary)))
    result = case.start()
    assert not canary.exists()
    assert result.ok, str(result)
    case.record_message(result.outputs[0], r"warning: .*config\.json")
    case.check_same_as_reference()
