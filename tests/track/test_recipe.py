"""A recipe with a tracker: one run for all ranks, the same one after a resume, and a training that needs none of it."""

import importlib
import json
import math
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import runner
from tests.track import stand_in

STEPS = 6
STOP = 4
FLAGS = (
    *("--max-steps", str(STEPS), "--global-batch-size", "16", "--log-every", "1", "--eval-every", "3"),
    *("--save-every", str(STOP), "--name", "run"),
)
SECRET = "word1234"


def train(argv: list[str], folder: str, env: dict[str, str]) -> None:
    """Run a recipe in a folder, with an environment, and packages of its own."""
    os.chdir(folder)
    os.environ.update(env)
    sys.path.insert(0, str(Path(folder) / "packages"))
    runner.run_unmeasured(argv[0], argv)


def run(folder: Path, data: Path, *flags: str, size: int = 2, **env: str) -> runner.Result:
    """Train in `folder`; its runs are in runs/."""
    path = str(runner.ROOT / "recipes" / "ddp_resnet" / "train.py")
    argv = [path, *FLAGS, *runner.small("ddp_resnet"), "--data", str(data), "--out", str(folder / "runs"), *flags]
    return runner.spawn(train, size * [(argv, str(folder), env)])


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]


def points(folder: Path) -> dict[tuple[int, str], float]:
    """What the run has recorded, by step and tag."""
    lines = records(folder)
    return {(line["step"], tag): value for line in lines for tag, value in line.items() if tag != "step"}


def losses(folder: Path) -> list[float]:
    return [line["train/loss"] for line in records(folder) if "train/loss" in line]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stand_in.install(tmp_path / "packages")
    return tmp_path


def test_stopped_and_resumed_is_one_run(folder: Path, small_digits: Path) -> None:
    """Every record of both starts comes once, from rank 0; the second start names the id of the first."""
    env = {"STAND_IN": str(folder / "got"), "RUN_KEY": "ab12"}
    for more in (("--stop-after", str(STOP)), ()):
        result = run(folder, small_digits, "--tracker", "stand-in", *more, **env)
        assert result.ok, str(result)
        assert result.outputs[0].count("tracker  stand-in: here\n") == 1
    got = [json.loads(line) for line in (folder / "got").read_text().splitlines()]
    assert [one["begins"] for one in got if "begins" in one] == ["", "17"]
    assert [one["done"] for one in got if "done" in one] == [True, True]
    for one in (line for line in got if "begins" in line):
        assert (one["name"], one["config"]["max_steps"], one["config"]["world_size"]) == ("run", STEPS, 2)
        assert not one["has_key"]
    sent = [((one["step"], tag), value) for one in got if "step" in one for tag, value in one["values"].items()]
    assert dict(sent) == points(folder)
    assert len(sent) == len(points(folder)), "each once"
    assert {step for (step, _), _ in sent} == {*range(1, STEPS + 1)}


@pytest.mark.parametrize(
    ("fault", "warning"),
    [
        ("raises at the start", "ConnectionError: https://host/run?... is away"),
        ("raises", "RuntimeError: no such run (token $STAND_IN_TOKEN)"),
        ("hangs", "it has not answered for 1 s"),
    ],
)
def test_tracker_that_fails_ends_nothing(fault: str, warning: str, folder: Path, small_digits: Path) -> None:
    """The losses are those of a run without it, and rank 0 says once what fails and at the end what is missing."""
    env = {"STAND_IN": str(folder / "got"), "STAND_IN_TOKEN": SECRET, "TRACKER_WAIT_S": "1"}
    plain = run(folder, small_digits, "--name", "plain")
    result = run(folder, small_digits, "--tracker", "stand-in", STAND_IN_FAULT=fault, **env)
    assert plain.ok, str(plain)
    assert result.ok, str(result)
    assert losses(folder) == [
        json.loads(line)["train/loss"]
        for line in (folder / "runs" / "plain" / "metrics.jsonl").read_text().splitlines()
        if "train/loss" in line
    ]
    out = result.outputs[0]
    assert f"done     step {STEPS} of {STEPS}" in out
    assert warning in out
    assert out.count("fails, which ends no training") == (fault != "hangs")
    assert out.count("records of this run, which the same command sends later") == 1
    assert "has failed" not in out, "the sending process ends by itself"
    assert SECRET not in out
    assert SECRET not in (folder / "runs" / "run" / "logs" / "tracker.log").read_text()


def test_ranks_that_are_killed_leave_the_run_to_the_next_start(folder: Path, small_digits: Path) -> None:
    """The sending process notices it, sends what there is, and says that the run has not ended."""
    env = {"STAND_IN": str(folder / "got")}
    kills = (
        "import os\nfrom common.state import saver\nreal = saver.Saver.save\n"
        "def save(self, step, *rest):\n    real(self, step, *rest)\n    os.kill(os.getpid(), 9)\n"
        "saver.Saver.save = save\n"
    )
    (folder / "packages" / "kills.py").write_text(kills)
    result = runner.spawn(
        train_and_die,
        2 * [([str(runner.ROOT / "recipes/ddp_resnet/train.py"), *FLAGS, *runner.small("ddp_resnet"),
               "--data", str(small_digits), "--out", str(folder / "runs"), "--tracker", "stand-in"], str(folder), env)],
    )  # fmt: skip
    assert not result.ok
    assert run(folder, small_digits, "--tracker", "stand-in", **env).ok
    got = [json.loads(line) for line in (folder / "got").read_text().splitlines()]
    assert [one["done"] for one in got if "done" in one] == [False, True]
    sent = [(one["step"], tag) for one in got if "step" in one for tag in one["values"]]
    assert sorted(sent) == sorted(points(folder)), "each once, also of the first start"


def train_and_die(argv: list[str], folder: str, env: dict[str, str]) -> None:
    sys.path.insert(0, str(Path(folder) / "packages"))
    importlib.import_module("kills")
    train(argv, folder, env)


def test_unknown_tracker_is_refused(folder: Path, small_digits: Path) -> None:
    result = run(folder, small_digits, "--tracker", "tensorbord")
    assert result.codes[0] == 2
    assert "--tracker tensorbord is unknown: it may be mlflow, stand-in, trackio, wandb" in result.outputs[0]
    assert not (folder / "runs").exists()


# --- The trackers themselves, without a network -----------------------------------------------------------

Found = tuple[dict[tuple[int, str], float], dict[str, str]]  # numbers by step and tag; config


def of_wandb(folder: Path) -> Found:
    """Both starts have a folder, with one id: what `wandb sync` would send."""
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1
    number = files[0].stem.removeprefix("run-").encode()  # eight random letters, which a short host's name may be among
    assert not [one for one in files if socket.gethostname().encode() in one.read_bytes().replace(number, b"")]
    reader = [sys.executable, str(Path(__file__).with_name("read_wandb.py")), *map(str, files)]
    printed = subprocess.run(reader, capture_output=True, text=True, timeout=runner.HANG_S, check=False)
    assert printed.returncode == 0, printed.stderr
    rows, config = json.loads(printed.stdout)
    found = {}
    for row in rows:
        for tag in [key for key in row if not key.startswith("_")]:
            assert (row["_step"], tag) not in found
            found[row["_step"], tag] = row[tag]
    return found, config


def of_mlflow(folder: Path) -> Found:
    (run,) = folder.glob("mlruns/*/*/metrics")
    found = {}
    for file in [one for one in run.rglob("*") if one.is_file()]:
        for line in file.read_text().splitlines():
            _, value, step, *_ = line.split()
            assert (int(step), str(file.relative_to(run))) not in found
            found[int(step), str(file.relative_to(run))] = float(value)
    params = run.parent / "params"
    return found, {file.name: file.read_text() for file in params.iterdir()}


def of_trackio(folder: Path) -> Found:
    (file,) = folder.glob("trackio/*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT run_id, step, metrics FROM metrics").fetchall()
        ((config,),) = database.execute("SELECT config FROM configs").fetchall()
    database.close()
    assert len({run for run, *_ in rows}) == 1
    found = [((step, tag), value) for _, step, metrics in rows for tag, value in json.loads(metrics).items()]
    assert len(found) == len(dict(found))
    return dict(found), json.loads(config)


@pytest.mark.parametrize(("name", "read"), [("wandb", of_wandb), ("mlflow", of_mlflow), ("trackio", of_trackio)])
def test_tracker(name: str, read: Callable[[Path], Found], tmp_path: Path, small_digits: Path) -> None:
    """Stopped and resumed, without a network: one run with each record once, and the flags."""
    pytest.importorskip(name)
    env = {
        **{"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "MLFLOW_ALLOW_FILE_STORE": "true"},
        **{"MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "TRACKER_WAIT_S": str(runner.HANG_S)},
    }
    for more in (("--stop-after", str(STOP)), ()):
        result = run(tmp_path, small_digits, "--tracker", name, *more, **env)
        assert result.ok, str(result)
        assert f"tracker  {name}: " in result.outputs[0], str(result)
        assert "warning" not in result.outputs[0], str(result)
    found, config = read(tmp_path)
    assert found == pytest.approx(points(tmp_path), rel=1e-12)
    assert math.isfinite(sum(found.values()))
    assert (str(config["max_steps"]), str(config["world_size"])) == (str(STEPS), "2")
