"""What sends a run's records: each once and in order, later if not now, to one run; without a training."""

import json
import math
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from common import UserError
from common.run.process import Process
from common.track import send, services, tracker

TEN = [{"step": step, "train/loss": 1 / step} for step in range(1, 11)]


class Tracker:
    """A tracker in this process; it refuses as often as it is told to."""

    def __init__(self) -> None:
        self.begun: list[services.About] = []
        self.got: list[tuple[int, Mapping[str, float]]] = []
        self.ends: list[bool] = []
        self.refuses = 0

    def begin(self, about: services.About) -> services.Service:
        self.begun.append(about)
        return services.Service("there", "17", self.log, self.ends.append)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.refuses:
            self.refuses -= 1
            raise OSError("busy")
        self.got.append((step, values))


class After(threading.Event):
    """A run that ends after so many looks; it waits for nothing, and writes records meanwhile."""

    def __init__(self, looks: int, run: Path, *records: Mapping[str, Any]) -> None:
        super().__init__()
        self._looks = looks
        self._run = run
        self._records = [*records]
        self.waited: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout)
        if self._records:
            write(self._run, self._records.pop(0))
        if len(self.waited) == self._looks:
            self.set()
        return True


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Tracker:
    there = Tracker()
    monkeypatch.setattr(services, "find", lambda _: there.begin)
    return there


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    config = {"recipe": "ddp_resnet", "args": {"lr": 0.1}, "world_size": 2, "code": {"train.py": "abc"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write(run: Path, *records: Mapping[str, Any], mode: str = "a") -> None:
    with (run / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def follow(run: Path, ended: threading.Event | None = None, name: str = "mine") -> list[str]:
    """Send until the run ends; returns what was printed."""
    said: list[str] = []
    sender = send.Sender(name, run, lambda text, _: said.append(text))
    sender.follow(ended or After(1, run))
    sender.finish(True)
    return said


def test_each_record_once_under_its_step(run: Path, there: Tracker) -> None:
    """Those of a step that are there come together; null is NaN; a damaged line and half a line do not come."""
    write(run, {"step": 1, "train/loss": 2.0}, {"step": 1, "perf/mfu": 0.5}, {"step": 2, "train/loss": None})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('damaged\n{"step": 3, "train/loss": 1.5}\n{"step": 4, "tr')
    ended = After(2, run, {}, {"step": 3, "val/loss": 7.0})
    assert follow(run, ended) == ["tracker  mine: there"]
    (first, at_1), (second, at_2), *rest = there.got
    assert (first, at_1) == (1, {"train/loss": 2.0, "perf/mfu": 0.5})
    assert second == 2
    assert math.isnan(at_2["train/loss"])
    assert rest == [(3, {"train/loss": 1.5}), (3, {"val/loss": 7.0})]
    assert ended.waited == [send.POLL_S] * 2
    config = {"recipe": "ddp_resnet", "lr": 0.1, "world_size": 2}
    assert there.begun == [services.About("ddp_resnet", "run", config, "")]
    assert there.ends == [True]


def test_run_that_continues_is_the_same_and_repeats_nothing(run: Path, there: Tracker) -> None:
    """Its id comes from tracker.json. What it computes again is not sent again; another tracker gets everything."""
    write(run, *TEN[:6])
    follow(run)
    write(run, *TEN[:4], mode="w")  # from the checkpoint of step 4
    follow(run, After(3, run, *TEN[4:7]))
    assert [about.id for about in there.begun] == ["", "17"]
    assert [step for step, _ in there.got] == [1, 2, 3, 4, 5, 6, 7]
    follow(run, name="other")
    assert there.begun[-1].id == ""
    assert [step for step, _ in there.got[7:]] == [1, 2, 3, 4, 5, 6, 7]
    assert {name: known["sent"] for name, known in json.loads((run / "tracker.json").read_text()).items()} == {
        "mine": [7, 1],
        "other": [7, 1],
    }


def test_file_that_is_cut_off_meanwhile(run: Path, there: Tracker) -> None:
    """After a rewind with a full disk, it is cut off late."""
    write(run, *TEN[:6])

    class Cuts(After):
        def wait(self, timeout: float | None = None) -> bool:
            if not self.waited:
                write(run, *TEN[:2], mode="w")
            return super().wait(timeout)

    follow(run, Cuts(8, run, *TEN[2:9]))
    assert [step for step, _ in there.got] == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_refused_records_are_sent_later_with_one_warning(run: Path, there: Tracker) -> None:
    write(run, *TEN)
    there.refuses = 3
    ended = After(5, run)
    said = follow(run, ended)
    assert said == ["tracker  mine: there", "warning: --tracker mine fails, which ends no training: OSError: busy"]
    assert [step for step, _ in there.got] == [*range(1, 11)]
    assert ended.waited == [2, 4, 8, 1, 1], "it asks less and less often, until it is well"


def test_what_was_not_sent_is_said_and_sent_by_the_next_start(run: Path, there: Tracker) -> None:
    write(run, *TEN)
    there.refuses = 1000
    said = follow(run, After(20, run))
    assert said[-1] == "warning: mine lacks 10 records of this run, which the same command sends later: OSError: busy"
    assert len(said) == 3
    there.refuses = 0
    follow(run)
    assert [step for step, _ in there.got] == [*range(1, 11)]


def test_words_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdef123")
    error = OSError("https://me:word@host/a?key=1 says\nno to abcdef123\x1b[2J")
    assert send.words(error) == "OSError: https://host/a?... says no to $WANDB_API_KEY?[2J"


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker.check("")
    with pytest.raises(UserError, match=r"--tracker tensorbord is unknown: it may be mlflow, trackio, wandb"):
        tracker.check("tensorbord")
    monkeypatch.setattr(services.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"--tracker wandb needs a package that is not installed: pip install wandb"):
        tracker.check("wandb")
    monkeypatch.setattr(services.importlib.util, "find_spec", lambda name: name == "mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match=r"--tracker mlflow: set MLFLOW_TRACKING_URI, or `pip install mlflow`"):
        tracker.check("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    tracker.check("mlflow")


class Silent(subprocess.Popen):
    """A process that does not end."""

    asked: list[Any]

    def communicate(self, input: Any = None, timeout: float | None = None) -> Any:  # noqa: A002
        self.asked = [input, timeout]
        raise subprocess.TimeoutExpired("send", timeout or 0)


def test_process_that_does_not_end_is_killed(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKER_WAIT_S", "2")
    sender = Silent([sys.executable, "-c", "import time; time.sleep(5)"])
    tracker.end("mine", tmp_path, sender, Process())
    assert sender.asked == [b"done", 12]
    assert sender.returncode == -9
    assert f"warning: what sends to mine has failed, see {tmp_path}/logs/tracker.log" in capsys.readouterr().out
