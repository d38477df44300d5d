"""One case of the fault matrix: a recipe, a fault, and what came of it."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from common.run import exits

from tests.harness import inject, runner
from tests.harness.runner import wait_for
from tests.harness.states import same_tensors

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
    "mimo": ("--access-points", "9", "--antennas", "2", "--users", "8", "--pilots", "2"),
}
CURVES = ("train/loss", "train/grad_norm", "val/loss", "rl/return", "val/return", "se/l4_mmse", "se_p5/l1_mr")
OF_TRAINING = ("reading", "backward")  # points of the faults that only a training comes to
# What finding out may take, in heartbeats of who finds out: no clock, which would tell how busy the machine is. A rank
# beats 12 times in the --hang-timeout of these runs, and compares for 6; an end of a process is felt without either.
PROMPT, HANG = 14, 28
UNHURRIED = ("--hang-timeout", "60")  # where ranks wait for what a busy machine does slowly


def flags_of(recipe: str, size: int) -> list[str]:
    """Those of FLAGS that the recipe knows, what makes its model small, and how it is dealt out over the ranks."""
    known = {name: value for name, value in FLAGS.items() if runner.has_flag(recipe, name)}
    flags = [part for name, value in known.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    layout = runner.layout(recipe, size)
    return [*flags, *SMALLER.get(runner.workload(recipe), ()), *layout.with_experts, *layout.micro_batches(BATCH)]


def checkpoints(run: Path) -> dict[int, Path]:
    """The committed ones by step, oldest first."""
    found = sorted(run.glob("checkpoints/step_*"))
    return {int(path.name[5:]): path for path in found if path.name[5:].isdigit()}


def temporaries(run: Path) -> list[str]:
    return [path.name for path in run.glob("checkpoints/*") if "tmp" in path.name]


def events_in(file: Path) -> list[dict[str, Any]]:
    """What has happened in a run so far."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def find_line(text: str, pattern: str) -> str:
    """The first line that holds a pattern; there must be one."""
    found = next((line.strip() for line in text.splitlines() if re.search(pattern, line)), None)
    assert found is not None, f"'{pattern}' is not in:\n{text}"
    return found


@dataclass
class Row:
    """What the table shows of a fault case.

    Attributes:
        runs: how often the fault was tried.
        passes: how often it went as expected; all, if the test passes and sets nothing else.
        steps_lost: steps that had been done, and were done again.
        notice_s: from the fault until the last of the other ranks had named it.
        recover_s: from the command that continues the run until its first step was done.
        message: what a person reads of the fault.
    """

    runs: int = 1
    passes: int | None = None
    steps_lost: int | None = None
    notice_s: float | None = None
    recover_s: float | None = None
    message: str = ""


@dataclass
class FaultCase:
    """One recipe and one fault: runs the recipe with the fault in it, compares, and fills in the table's row.

    Attributes:
        recipe: whose train.py runs.
        folder: for the runs of this case; the one that the fault hits is `run_dir`.
        size: ranks.
        reference: returns the folder of the same training without a fault, made once for each recipe.
        row: what has come of it so far.
        events: what inject.py has noted in the last run.
        spawn: starts the ranks, as `runner.spawn`; of runs in a store, it also brings their objects to `out` and back.
        url: --out, where this is not `out`.
        copied: returns the folder that `copy_reference` copies, where this is not the reference.
    """

    recipe: str
    folder: Path
    size: int
    reference: Callable[[], Path]
    row: Row = field(default_factory=Row)
    events: list[dict[str, Any]] = field(default_factory=list)
    spawn: Callable[..., runner.Result] = runner.spawn
    url: str = ""
    copied: Callable[[], Path] | None = None
    _began: float = 0.0

    # --- what it is about ---

    def skip_without(self, flag: str) -> None:
        """Skip a test that is about a flag which the recipe does not have."""
        if not runner.has_flag(self.recipe, flag):
            pytest.skip(f"not applicable: this recipe has no {flag}")

    def skip_unless_it_trains(self) -> None:
        """Skip a test that is about training."""
        if self.recipe not in runner.TRAINING:
            pytest.skip("not applicable: this recipe does not train")

    def _skip_if_of_training(self, flags: Sequence[str], faults: Sequence[inject.Fault]) -> None:
        """Skip a test with flags or faults that a recipe which does not train cannot have."""
        if self.recipe in runner.TRAINING:
            return
        for flag in flags:
            if flag.startswith("--"):
                self.skip_without(flag.replace("--no-", "--"))
        if any(fault[0] in OF_TRAINING for fault in faults):
            self.skip_unless_it_trains()

    @property
    def in_update(self) -> str:
        """Where a rank is at the point "update", as a finding names it."""
        return "optimizer" if self.recipe in runner.TRAINING else "the main loop"

    @property
    def place(self) -> int:
        """The seed of a place in a parameter: of results, a place that the first step has filled in."""
        return 0 if self.recipe in runner.TRAINING else 2

    @property
    def curve(self) -> str:
        """The tag of what every step records."""
        return runner.curve(self.recipe)

    @property
    def out(self) -> Path:
        """Where the runs of this case are."""
        return self.folder / "out"

    @property
    def run_dir(self) -> Path:
        """Folder of the run that the fault hits."""
        return self.out / "run"

    @property
    def train_py(self) -> Path:
        """What runs."""
        return runner.ROOT / "recipes" / self.recipe / "train.py"

    # --- running ---

    def copy_reference(self, until: int) -> None:
        """Make the run's folder as the reference run had it after a step, with the checkpoints until then."""
        shutil.copytree((self.copied or self.reference)(), self.run_dir)
        for later in [path for step, path in checkpoints(self.run_dir).items() if step > until]:
            shutil.rmtree(later)

    def start(
        self,
        *flags: str,
        faults: Sequence[inject.Fault] = (),
        size: int = 0,
        name: str = "run",
        mutant: str = "",
        meanwhile: Callable[[Path], None] | None = None,
        timeout_s: float = runner.HANG_S,
    ) -> runner.Result:
        """Run with faults on real ranks; what happened when is in `events`, whose file `meanwhile` gets."""
        self._skip_if_of_training(flags, faults)
        file = self._new_events_file()
        size = size or self.size
        argv = [*flags_of(self.recipe, size), "--out", self.url or str(self.out), "--name", name, *flags]
        one = (str(self.train_py), argv, faults, str(file), mutant)
        self._began = time.time()
        meddle = (lambda _: meanwhile(file)) if meanwhile else None
        result = self.spawn(inject.run, [one] * size, timeout_s, meddle)
        self.events = events_in(file)
        came = {event["action"] for event in self.events if event["event"] == "fault"}
        assert came == {fault[1] for fault in faults}, f"only {came} of the faults came:\n{result}"
        return result

    def launch(
        self,
        *flags: str,
        faults: Sequence[inject.Fault] = (),
        options: Sequence[str] = (),
        size: int = 0,
        mutant: str = "",
        meanwhile: Callable[[subprocess.Popen[str], Path], None] = lambda *_: None,
        onto: int | None = None,
        **environ: str,
    ) -> tuple[int, str]:
        """The same through launch/torchrun.sh, on a folder whose train.py puts the faults in and runs the recipe.

        `options` are torchrun's; `meanwhile` gets the launcher and the file of events; `onto` is an open file for
        what is printed. Returns the exit code and everything that was printed, but for that.
        """
        self._skip_if_of_training(flags, faults)
        file, output = self._new_events_file(), self.folder / "output"
        folder = self.folder / self.recipe
        folder.mkdir(exist_ok=True)
        call = f"inject.run({str(self.train_py)!r}, sys.argv[1:], {[*faults]!r}, {str(file)!r}, {mutant!r})"
        folder.joinpath("train.py").write_text(f"import sys\nfrom tests.harness import inject\n\n{call}\n")
        size = size or self.size
        argv = [*flags_of(self.recipe, size), "--out", str(self.out), "--name", "run", *flags]
        variables = {
            **{"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            **{"NPROC_PER_NODE": str(size), **environ},
        }
        self._began = time.time()
        with output.open("w") as printed:
            process = subprocess.Popen(
                ["bash", str(runner.ROOT / "launch" / "torchrun.sh"), *options, str(folder), *argv],
                cwd=runner.ROOT,
                env=os.environ | variables,
                stdout=onto or printed,
                stderr=onto or printed,
                text=True,
            )
        try:
            meanwhile(process, file)
            process.wait(runner.HANG_S)
        except subprocess.TimeoutExpired:
            process.kill()
        finally:
            process.wait()
            self.events = events_in(file)
            for pid in {event["pid"] for event in self.events}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return process.returncode, output.read_text()

    def resume_and_check(self, *flags: str, exact: bool = True) -> runner.Result:
        """The same command again: it continues to the end, at the cost that is recorded; see `record_cost`.

        Unless `exact` is false, the training must be the reference.
        """
        before = self.steps_done()
        result = self.start(*flags)
        assert result.ok, str(result)
        self.record_cost(before)
        if exact:
            self.check_same_as_reference()
        return result

    def another(self) -> "FaultCase":
        """A case of its own in the same folder: another job."""
        return dataclasses.replace(self, row=Row(), events=[])

    def take_over(self, other: "FaultCase") -> None:
        """Become another case of the same recipe, with its folder, its events and its row."""
        vars(self).update(vars(other))

    def _new_events_file(self) -> Path:
        return self.folder / f"events-{uuid.uuid4().hex}.jsonl"

    # --- what has happened ---

    def times(self, event: str) -> list[float]:
        """When this happened on any rank in the last run."""
        return [one["time"] for one in self.events if one["event"] == event]

    def fault_time(self) -> float:
        """When the last fault of the last run happened."""
        return max(self.times("fault"))

    def restart_time(self) -> float:
        """When torchrun started the ranks of the last run again; infinity if it did not."""
        starts = [event for event in self.events if event["event"] == "start"]
        again = [event["time"] for i, event in enumerate(starts) if event["rank"] in {e["rank"] for e in starts[:i]}]
        return min(again, default=float("inf"))

    def steps_done(self) -> int:
        """Steps that all ranks of the last run had done when they ended for the first time."""
        last = {event["rank"]: 0 for event in self.events}
        until = self.restart_time()
        last |= {e["rank"]: e["step"] for e in self.events if e["event"] == "done" and e["time"] < until}
        return min(last.values(), default=0)

    def output(self, result: runner.Result, rank: int) -> str:
        """What a rank has printed: rank 0 on the terminal, the others in their log."""
        log = self.run_dir / "logs" / f"rank_{rank:05d}.log"
        return result.outputs[0] if rank == 0 else log.read_text()

    # --- checks, and what they record in the row ---

    def check_same_as_reference(self) -> None:
        """Every loss, and every bit of the last checkpoint, is that of the training without a fault."""
        self.check_same_curves(*CURVES)
        self.check_same_checkpoints(STEPS)

    def check_same_curves(self, *tags: str) -> None:
        """What is recorded under these tags is what the reference has recorded."""
        for tag in tags:
            assert runner.records(self.run_dir, tag) == runner.records(self.reference(), tag), tag

    def check_same_checkpoints(self, *steps: int) -> None:
        """The checkpoints of these steps are the reference's, bit for bit."""
        ours, wanted = checkpoints(self.run_dir), checkpoints(self.reference())
        for step in steps:
            assert same_tensors(ours[step], wanted[step]), step

    def check_refused(self, result: runner.Result, pattern: str) -> None:
        """All ranks have ended without a traceback, rank 0 as for a refusal, whose line is recorded."""
        assert result.codes[0] == exits.USAGE_ERROR, str(result)
        assert all(result.codes), str(result)
        assert "Traceback" not in str(result), str(result)
        self.record_message(result.outputs[0], pattern)

    def beats(self, rank: int) -> int:
        """Heartbeats of a rank between the last fault and when it named it, by the order in which they came."""
        what = [event["event"] for event in self.events if event["rank"] == rank or event["event"] == "fault"]
        last = len(what) - what[::-1].index("fault")
        return what[last : last + what[last:].index("named")].count("beat")

    def check_named(self, result: runner.Result, within: int, *patterns: str, culprits: Sequence[int] = ()) -> None:
        """Every other rank, so also the terminal, names the fault within so many of its own beats; none ended with 0.

        Records how long that took, and the first rank's line that holds the first of the patterns.
        """
        others = [rank for rank in range(self.size) if rank not in culprits]
        for rank in others:
            for pattern in patterns:
                assert re.search(pattern, self.output(result, rank)), (
                    f"rank {rank} lacks {pattern}\n{self.output(result, rank)}"
                )
            assert result.codes[rank], str(result)
        named = {event["rank"]: event["time"] for event in reversed(self.events) if event["event"] == "named"}
        exited = {event["rank"] for event in self.events if event["event"] == "exited"}
        assert {*others} <= exited & {*named}, f"only ranks {exited} have exited by themselves\n{result}"
        self.row.notice_s = max(named[rank] for rank in others) - self.fault_time()
        self.record_message(result.outputs[others[0]], patterns[0])
        beats = {rank: self.beats(rank) for rank in others}
        assert max(beats.values()) <= within, f"beats of each rank: {beats}\n{result}"

    def record_cost(self, before: int) -> None:
        """Record which steps were done again, of `before` that had been done, and how long it took to do the next."""
        since, came = self._began, 0.0
        if self.restart_time() < float("inf"):
            since, came = self.fault_time(), self.restart_time()
        again = [event for event in self.events if event["event"] == "done" and event["time"] > came]
        self.row.steps_lost = max(0, before - again[0]["step"] + 1) if again else 0
        self.row.recover_s = again[0]["time"] - since if again else None

    def record_message(self, text: str, pattern: str) -> None:
        """Record the first line that holds a pattern; there must be one."""
        self.row.message = find_line(text, pattern)


def wait_for_beats(file: Path, beats: int, ranks: Sequence[int]) -> None:
    """Wait until each of these ranks has looked into the store so often from now on, or one has ended."""
    begun = len(events_in(file))

    def enough() -> bool:
        since = [(event["event"], event["rank"]) for event in events_in(file)[begun:]]
        return all(since.count(("beat", rank)) >= beats for rank in ranks) or "exited" in dict(since)

    wait_for(enough)
