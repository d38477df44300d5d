"""--profile: its parts add up to the step that the clock measures, each planted slowness is named, and no other one."""

import contextlib
import gzip
import json
import os
import re
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from common.measure import profile, timeline
from common.train import flops

from tests.conftest import each_recipe
from tests.harness import runner

STEPS, PROFILED = 9, 3
ATTEMPTS = 3  # for planted slowness, beside which a loaded machine may have a larger one
COMPUTE_S = 0.1  # of a step, on a thread's own clock, so that other work on this machine changes no part of it


def flags_of(recipe: str, data: dict[str, Path], *more: str) -> list[str]:
    """A short training with a profile, in which nothing is due before its end."""
    flags = [*runner.small(recipe), "--max-steps", str(STEPS), "--profile", str(PROFILED), "--eval-every", "1000"]
    flags += ["--save-every", "1000", "--check-every", "0", "--dtype", "float32", "--log-every", "4", "--name", "run"]
    if recipe in runner.SUPERVISED:
        flags += ["--data", str(data[runner.workload(recipe)]), "--global-batch-size", "8"]
    return [*flags, *more]


def profiled(run: Path) -> dict[str, float]:
    """What a run's metrics.jsonl has of its profile."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (found,) = [line for line in lines if "profile/step_s" in line]
    return {key.removeprefix("profile/").removesuffix("_s"): value for key, value in found.items()}


def check_sum(found: dict[str, float]) -> None:
    """The parts add up to the step that the clock has measured, and none is what no part claims."""
    assert sum(found[part] for part in timeline.PARTS) == pytest.approx(found["step"], rel=0.05, abs=2e-3), found
    assert found["idle"] < 0.02 * found["step"], "a CPU is never idle without a reason"


@pytest.mark.parametrize("recipe", each_recipe(runner.RECIPES))
def test_parts_add_up(recipe: str, small_data: dict[str, Path], tmp_path: Path) -> None:
    size = min(2, runner.world_sizes(recipe)[-1])
    layout = runner.layout(recipe, size)
    argv = flags_of(recipe, small_data, *layout.strategy, "--out", str(tmp_path))
    result = runner.run_recipe(recipe, size, *argv, target=runner.run_unmeasured)
    assert result.ok, str(result)
    found = profiled(tmp_path / "run")
    check_sum(found)
    trained = recipe in runner.TRAINING
    for part in ("forward", *(("backward", "optimizer") if trained else ())):
        assert found[part] > 0, part
    assert (found["exposed"] + found["slower"] + found["hidden"] > 0) == (size > 1)
    shown = result.outputs[0]
    assert f"profile  steps {STEPS - PROFILED} to {STEPS - 1}:" in shown, shown
    folder = tmp_path / "run" / "profile" / f"step_{STEPS - PROFILED:08d}"
    with gzip.open(folder / "merged.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert {event["pid"] for event in events if event.get("ph") == "X"} == set(range(size))
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [f"rank {rank}" for rank in range(size)]
    arrows = [(event["id"], event["pid"]) for event in events if event.get("ph") == "s"]
    assert len({number for number, _ in arrows}) == len({*arrows}), "an arrow leads from one rank to another"
    assert sorted(path.name for path in folder.glob("rank_*")) == [f"rank_{rank:05d}.json.gz" for rank in range(size)]


@pytest.mark.parametrize("part", ["forward", "data"])
def test_a_part_that_is_lost(part: str, small_text: Path, tmp_path: Path) -> None:
    """The mutant of the test above: what no part claims is seen as idle."""
    result = run_slowed(tmp_path, small_text, {"data": 0.05}, lost=part)
    assert result.ok, str(result)
    with pytest.raises(AssertionError):
        check_sum(profiled(tmp_path / "run"))


# --- planted slowness -------------------------------------------------------------------------------------


def spin(seconds: float) -> None:
    """Work on this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@contextlib.contextmanager
def changed(owner: Any, name: str, before: Any) -> Iterator[None]:
    """Let something happen before a function."""
    real = getattr(owner, name)

    def function(*args: Any, **kwargs: Any) -> Any:
        before()
        return real(*args, **kwargs)

    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, real)


def train_slowed(path: str, argv: list[str], slow: dict[str, float], lost: str) -> None:
    """Run a recipe of the GPT whose forward pass works for `COMPUTE_S`, and which is slower where it is said.

    Args:
        path: of train.py.
        argv: its command line.
        slow: seconds that a batch takes to be read ("data"), that rank 1 works longer ("rank"), and that a file takes
            to reach the disk ("disk").
        lost: the part of the step that the profile overlooks; "" for none.
    """
    from common.workloads import gpt, text

    real = timeline.window

    def window(*args: Any) -> timeline.Window:
        found = real(*args)
        found.claims.pop(lost, None)
        return found

    flops.count_sample = lambda *_: flops.Sample()
    timeline.window = window
    compute_s = COMPUTE_S + slow.get("rank", 0.0) * (os.environ["RANK"] == "1")
    sys.argv = [path, *argv]
    with (
        changed(gpt.GPT, "forward", lambda: spin(compute_s)),
        changed(text.Text, "read", lambda: time.sleep(slow.get("data", 0.0))),
        changed(os, "fsync", lambda: time.sleep(slow.get("disk", 0.0))),
    ):
        runpy.run_path(path, run_name="__main__")


def run_slowed(folder: Path, data: Path, slow: dict[str, float], *more: str, lost: str = "") -> runner.Result:
    """Two ranks of ddp_gpt."""
    path = str(runner.ROOT / "recipes" / "ddp_gpt" / "train.py")
    argv = flags_of("ddp_gpt", {"gpt": data}, "--out", str(folder), *more)
    return runner.spawn(train_slowed, [(path, argv, slow, lost)] * 2, 120)


def verdicts(result: runner.Result) -> list[str]:
    """What rank 0 says of the profile, and of the run."""
    assert result.ok, str(result)
    return re.findall(r"^verdict  (.*)$", result.outputs[0], re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow", "more", "profile_says", "run_says"),
    [
        ({}, (), "", ""),
        ({"data": 0.1}, ("--max-steps", "40"), "of the step waits for data: raise --workers (now 0)", "waits for data"),
        ({"rank": 0.03}, ("--max-steps", "40"), "of the step the others wait for rank 1 on", ""),
        ({"rank": 0.1}, ("--max-steps", "50"), "of the step the others wait for rank 1 on", "wait for rank 1 on"),
        ({"disk": 0.1}, ("--save-every", "1"), "goes into checkpoints: raise --save-every", "goes into checkpoints"),
    ],
    ids=lambda one: "-".join(one) if isinstance(one, dict) else None,
)
def test_verdict(
    slow: dict[str, float],
    more: tuple[str, ...],
    profile_says: str,
    run_says: str,
    small_text: Path,
    tmp_path: Path,
) -> None:
    """What was planted is named, and nothing else but a rank that other work on this machine makes slow in truth."""
    wanted = [text for text in (profile_says, run_says) if text]
    for attempt in range(ATTEMPTS):
        result = run_slowed(tmp_path / str(attempt), small_text, slow, *more)
        found = verdicts(result)
        check_sum(profiled(tmp_path / str(attempt) / "run"))
        assert all("wait for rank" in one or any(text in one for text in wanted) for one in found), result.outputs[0]
        if len(found) >= len(wanted) and all(text in one for text, one in zip(wanted, found, strict=False)):
            break
    else:
        pytest.fail(result.outputs[0])
    if slow.get("rank", 0) > COMPUTE_S / 2:  # of less, a loaded machine leaves too little of a step
        assert "note: rank 1 on" in result.outputs[0]


# --- what must not stop a training ------------------------------------------------------------------------


def test_too_short(small_text: Path, tmp_path: Path) -> None:
    """A profile that the run is too short for is refused before the training; after a resume, it is left out."""
    short = flags_of("ddp_gpt", {"gpt": small_text}, "--out", str(tmp_path), "--stop-after", "7")
    refused = runner.run_recipe("ddp_gpt", 1, *short)
    assert refused.codes == [2]
    assert "--profile 3 needs 8 steps, because the first 5 are not typical, and this start has 7" in refused.outputs[0]
    assert not (tmp_path / "run").exists()
    assert runner.run_recipe("ddp_gpt", 1, *short, "--profile", "0").ok
    rest = runner.run_recipe("ddp_gpt", 1, *short, "--stop-after", "0")
    assert rest.ok, str(rest)
    assert "note: --profile 3 needs 8 steps" in rest.outputs[0]
    assert "done     step 9 of 9" in rest.outputs[0]


def _full_on_rank1(path: str, argv: list[str]) -> None:
    """Run a recipe; rank 1 finds no room for its trace."""

    def export(self: profile.Profile, profiler: Any) -> dict[str, Any]:
        if os.environ["RANK"] == "1":
            raise OSError(28, "No space left on device")
        return real(self, profiler)

    real, profile.Profile._export = profile.Profile._export, export
    runner.run_unmeasured(path, argv)


def test_full_disk(small_text: Path, tmp_path: Path) -> None:
    """A trace that one rank cannot write ends no training."""
    flags = flags_of("ddp_gpt", {"gpt": small_text}, "--out", str(tmp_path))
    path = str(runner.ROOT / "recipes" / "ddp_gpt" / "train.py")
    result = runner.spawn(_full_on_rank1, [(path, [path, *flags])] * 2, 120)
    assert result.ok, str(result)
    assert re.search(r"warning: there is no profile: rank 1 on \S+: .*No space left", result.outputs[0])
    assert "done     step 9 of 9" in result.outputs[0]


def _stop_in_profile(path: str, argv: list[str], closes: bool) -> None:
    """Run a recipe that is asked to stop in the middle of its profile."""
    import signal

    from common import session

    real = session.Session.log_train

    def log_train(self: Any, step: int, *args: Any, **more: Any) -> None:
        real(self, step, *args, **more)
        if step == STEPS - PROFILED:
            assert torch.autograd._profiler_enabled()
            os.kill(os.getpid(), signal.SIGTERM)

    session.Session.log_train = log_train
    if not closes:
        profile.Profile.close = lambda _: None
    with contextlib.suppress(SystemExit):
        runner.run_unmeasured(path, argv)
    assert not torch.autograd._profiler_enabled(), "a profiler is left"


@pytest.mark.parametrize("closes", [True, False], ids=["", "mutant that does not close"])
def test_stopped_in_the_middle(closes: bool, small_text: Path, tmp_path: Path) -> None:
    """A run that stops while it profiles ends as usual, and leaves no profiler behind."""
    flags = flags_of("ddp_gpt", {"gpt": small_text}, "--out", str(tmp_path), "--profile", "4", "--max-steps", "60")
    path = str(runner.ROOT / "recipes" / "ddp_gpt" / "train.py")
    result = runner.spawn(_stop_in_profile, [(path, [path, *flags], closes)] * 2, 120)
    assert result.ok == closes, str(result)
    assert "stopped  checkpoint saved" in result.outputs[0]
    assert ("a profiler is left" in result.outputs[0]) == (not closes)


# --- clocks -----------------------------------------------------------------------------------------------


def _offset(ahead_s: float) -> None:
    """Print what this rank adds to its clock, which is ahead of the machine's."""
    from common.run import process_group

    real = time.time
    time.time = lambda: real() + ahead_s
    world = process_group.start()
    print("offset", profile.clock_offset_s())
    process_group.finish(world.process)


@pytest.mark.parametrize("ahead_s", [0.0, 10.0, -3.0])
def test_clocks(ahead_s: float) -> None:
    """The clocks of one machine agree exactly; another one's offset is found within the time of a message."""
    result = runner.spawn(_offset, [(0.0,), (ahead_s,)], 60)
    assert result.ok, str(result)
    first, second = (float(re.findall(r"offset (\S+)", output)[0]) for output in result.outputs)
    assert first == 0
    assert second == (pytest.approx(-ahead_s, abs=0.05) if ahead_s else 0)
