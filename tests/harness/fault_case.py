"""One cell of the fault matrix: a recipe, a fault, and what came of it."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.harness import inject, runner

STEPS, SAVE_EVERY, BATCH = 6, 2, 24  # an epoch is inject.EPOCH_STEPS steps
FLAGS = {
    **{"max_steps": STEPS, "save_every": SAVE_EVERY, "keep": 9, "log_every": 1, "eval_every": 1000},
    **{"global_batch_size": BATCH, "warmup_steps": 2, "dtype": "float32", "hang_timeout": 3},
}
# Whose checkpoints fit on a disk of 1 MB; images have the network of inject.py.
SMALLER = {
    "gpt": ("--seq-len", "16", "--num-layers", "4", "--num-heads", "4", "--width", "8", "--mlp-width", "12"),
    "ppo": (  # one minibatch an update
        *("--num-envs", "12", "--rollout-steps", "2", "--update-epochs", "1", "--width", "8"),
        *("--eval-episodes", "3"),
    ),
}
CURVES = ("train/loss", "train/grad_norm", "val/loss", "rl/return", "val/return")
TIMEOUT_S = 30.0  # for what should take a second or two, on a machine that does other things as well
LAUNCH_S = 60.0  # with torchrun, whose processes each import torch


def flags_of(recipe: str, size: int) -> list[str]:
    """Those of FLAGS that the recipe knows, what makes its model small, and how it is dealt out over the ranks."""
    known = {name: value for name, value in FLAGS.items() if runner.has_flag(recipe, name)}
    flags = [part for name, value in known.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    layout = runner.layout(recipe, size)
    return [*flags, *SMALLER.get(runner.workload(recipe), ()), *layout.strategy, *layout.micro_batches(BATCH)]


def checkpoints(run: Path) -> dict[int, Path]:
    """The committed ones by step, oldest first."""
    found = sorted(run.glob("checkpoints/step_*"))
    return {int(path.name[5:]): path for path in found if path.name[5:].isdigit()}


def temporaries(run: Path) -> list[str]:
    return [path.name for path in run.glob("checkpoints/*") if "tmp" in path.name]


def tensors(checkpoint: Path) -> dict[str, dict[str, torch.Tensor]]:
    """All of a checkpoint, by file and name."""
    return {path.name: load_file(path) for path in sorted(checkpoint.glob("*.safetensors"))}


def same_tensors(one: Path, other: Path, but: str = "nothing.") -> bool:
    """Whether two checkpoints of the same number of ranks hold the same names and bits, `but` for a prefix."""
    ours, theirs = tensors(one), tensors(other)
    assert ours, f"{one} has no files"
    names = [
        [(file, name) for file in files for name in files[file] if not name.startswith(but)] for files in (ours, theirs)
    ]
    return names[0] == names[1] and all(torch.equal(ours[file][name], theirs[file][name]) for file, name in names[0])


def events_in(file: Path) -> list[dict[str, Any]]:
    """What has happened in a run so far."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@dataclass
class Cell:
    """Runs a recipe with faults in it, and keeps what its row of the table says.

    Attributes:
        recipe: whose train.py runs.
        folder: for the runs of this cell; the one that the fault hits is `run`.
        size: ranks.
        whole: gives the folder of the same training without a fault, made once for each recipe.
        runs: how often the fault was tried.
        passes: how often it went as expected; all, if the test passes and does not say otherwise.
        steps_lost: steps that had been done, and were done again.
        notice_s: from the fault until the last of the other ranks had named it and left.
        recover_s: from the command that goes on until its first step was done.
        message: what a person reads of the fault.
    """

    recipe: str
    folder: Path
    size: int
    whole: Callable[[], Path]
    runs: int = 1
    passes: int | None = None
    steps_lost: int | None = None
    notice_s: float | None = None
    recover_s: float | None = None
    message: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    began: float = 0.0
    attempts: int = 0

    def needs(self, flag: str) -> None:
        """Leave a test out that is about what the recipe does not have."""
        if not runner.has_flag(self.recipe, flag):
            pytest.skip(f"not applicable: this recipe has no {flag}")

    @property
    def out(self) -> Path:
        """Where the runs of this cell go."""
        return self.folder / "out"

    @property
    def run(self) -> Path:
        """Folder of the run that the fault hits."""
        return self.out / "run"

    @property
    def train_py(self) -> Path:
        """What runs."""
        return runner.ROOT / "recipes" / self.recipe / "train.py"

    def begin(self, step: int) -> None:
        """Lay the run down as it is after `step`, with the checkpoints until then."""
        shutil.copytree(self.whole(), self.run)
        for later in [path for number, path in checkpoints(self.run).items() if number > step]:
            shutil.rmtree(later)

    def start(
        self,
        *flags: str,
        faults: Sequence[inject.Fault] = (),
        size: int = 0,
        name: str = "run",
        mutant: str = "",
        meanwhile: Callable[[Path], None] | None = None,
    ) -> runner.Result:
        """Run with faults on real ranks; what happened when is in `events`, whose file `meanwhile` gets."""
        events = self._new_events()
        size = size or self.size
        argv = [*flags_of(self.recipe, size), "--out", str(self.out), "--name", name, *flags]
        one = (str(self.train_py), argv, faults, str(events), mutant)
        self.began = time.time()
        meddle = (lambda _: meanwhile(events)) if meanwhile else None
        result = runner.spawn(inject.run, [one] * size, TIMEOUT_S, meddle)
        self.read(events)
        for *_, action, rank, _step in (fault[:4] for fault in faults):
            came = [event for event in self.events if event["event"] == "fault"]
            assert came, f"'{action}' on rank {rank} was not put in:\n{result}"
        return result

    def _new_events(self) -> Path:
        self.attempts += 1
        return self.folder / f"events_{self.attempts}.jsonl"

    def read(self, file: Path) -> None:
        """Take over what has happened in a run."""
        self.events = events_in(file)

    def restarted(self) -> float:
        """When torchrun started the ranks of the last run again; infinity if it did not."""
        starts = [event for event in self.events if event["event"] == "start"]
        again = [event["time"] for i, event in enumerate(starts) if event["rank"] in {e["rank"] for e in starts[:i]}]
        return min(again, default=float("inf"))

    def done(self) -> int:
        """Steps that all ranks of the last run had done when they ended for the first time."""
        last = {event["rank"]: 0 for event in self.events}
        last |= {e["rank"]: e["step"] for e in self.events if e["event"] == "done" and e["time"] < self.restarted()}
        return min(last.values(), default=0)

    def resume(self, *flags: str, exact: bool = True) -> runner.Result:
        """The same command again: it goes on to the end, and the training is the one without a fault."""
        before = self.done()
        result = self.start(*flags)
        assert result.ok, str(result)
        self.count_lost(before)
        if exact:
            self.check_exact()
        return result

    def count_lost(self, before: int) -> None:
        """Fill in what going on has cost, after `before` steps had been done."""
        since, came = self.began, 0.0
        if self.restarted() < float("inf"):
            since, came = self.fault_time(), self.restarted()
        again = [event for event in self.events if event["event"] == "done" and event["time"] > came]
        self.steps_lost = max(0, before - again[0]["step"] + 1) if again else 0
        self.recover_s = again[0]["time"] - since if again else None

    def check_exact(self) -> None:
        """Every loss, and every bit of the last checkpoint, is that of the training without a fault."""
        whole = self.whole()
        for tag in CURVES:
            assert runner.records(self.run, tag) == runner.records(whole, tag), tag
        assert same_tensors(checkpoints(self.run)[STEPS], checkpoints(whole)[STEPS])

    def fault_time(self) -> float:
        """When the last fault of the last run happened."""
        return max(event["time"] for event in self.events if event["event"] == "fault")

    def output(self, result: runner.Result, rank: int) -> str:
        """What a rank has said: rank 0 on the terminal, the others in their log."""
        log = self.run / "logs" / f"rank_{rank:05d}.log"
        return result.outputs[0] if rank == 0 else log.read_text()

    def check_named(self, result: runner.Result, within_s: float, *patterns: str, culprits: Sequence[int] = ()) -> None:
        """Every other rank, so also the terminal, names the fault in time, and none has ended with 0."""
        others = [rank for rank in range(self.size) if rank not in culprits]
        for rank in others:
            for pattern in patterns:
                assert re.search(pattern, self.output(result, rank)), (
                    f"rank {rank} lacks {pattern}\n{self.output(result, rank)}"
                )
            assert result.codes[rank], str(result)
        named = {event["rank"]: event["time"] for event in reversed(self.events) if event["event"] == "named"}
        left = {event["rank"] for event in self.events if event["event"] == "left"}
        assert {*others} <= left & {*named}, f"only ranks {left} have left by themselves\n{result}"
        self.notice_s = max(named[rank] for rank in others) - self.fault_time()
        self.say(result.outputs[others[0]], patterns[0])
        assert self.notice_s < within_s, f"{self.notice_s:.1f} s\n{result}"

    def line(self, text: str, pattern: str) -> str:
        """The first line that holds a pattern; there must be one."""
        found = next((line.strip() for line in text.splitlines() if re.search(pattern, line)), None)
        assert found is not None, f"'{pattern}' is not in:\n{text}"
        return found

    def say(self, text: str, pattern: str) -> None:
        """Keep that line: what a person reads of the fault."""
        self.message = self.line(text, pattern)

    def launch(
        self,
        *flags: str,
        faults: Sequence[inject.Fault] = (),
        options: Sequence[str] = (),
        size: int = 0,
        meanwhile: Callable[[subprocess.Popen[str], Path], None] = lambda *_: None,
        **environ: str,
    ) -> tuple[int, str]:
        """The same through launch/torchrun.sh, on a folder whose train.py puts the faults in and runs the recipe.

        `options` are torchrun's; `meanwhile` gets the launcher and the file of events. Returns the exit code and
        everything that was printed.
        """
        events, output = self._new_events(), self.folder / "output"
        folder = self.folder / self.recipe
        folder.mkdir(exist_ok=True)
        call = f"inject.run({str(self.train_py)!r}, sys.argv[1:], {[*faults]!r}, {str(events)!r})"
        folder.joinpath("train.py").write_text(f"import sys\nfrom tests.harness import inject\n\n{call}\n")
        size = size or self.size
        argv = [*flags_of(self.recipe, size), "--out", str(self.out), "--name", "run", *flags]
        variables = {
            **{"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            **{"NPROC_PER_NODE": str(size), **environ},
        }
        self.began = time.time()
        with output.open("w") as file:
            process = subprocess.Popen(
                ["bash", str(runner.ROOT / "launch" / "torchrun.sh"), *options, str(folder), *argv],
                cwd=runner.ROOT,
                env=os.environ | variables,
                stdout=file,
                stderr=file,
                text=True,
            )
        try:
            meanwhile(process, events)
            process.wait(LAUNCH_S)
        except subprocess.TimeoutExpired:
            process.kill()
        finally:
            process.wait()
            self.read(events)
            for pid in {event["pid"] for event in self.events}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return process.returncode, output.read_text()


def wait_for(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.02)
