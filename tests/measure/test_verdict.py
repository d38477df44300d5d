"""The verdict names the largest part that is worth a sentence, and the flag that the recipe has for it."""

import dataclasses
import types
from pathlib import Path
from typing import Annotated

import pytest
from common import bounds
from common.measure import profile, timeline, verdict
from common.run import cli, log
from common.train import flops

from tests.run import test_log


@dataclasses.dataclass(frozen=True)
class Args:
    """Flags."""

    workers: bounds.NonNegativeInt = 2  # loader processes
    global_batch_size: bounds.PositiveInt = 8  # samples of a step
    compress: Annotated[str, bounds.Shortens("exposed", "bf16")] = "none"  # what is sent


@dataclasses.dataclass(frozen=True)
class NoData:
    """Flags of a recipe that reads no samples."""


def parts(**seconds: float) -> dict[str, float]:
    """A step of one second, of which the rest is computed."""
    return dict.fromkeys(timeline.PARTS, 0.0) | seconds | {"step": 1.0}


@pytest.mark.parametrize(
    ("found", "slowest_s", "wanted"),
    [
        (parts(), 0.0, ""),
        (parts(data=0.09, exposed=0.19, beside=0.09, idle=0.19, slower=0.24), 0.09, ""),
        (parts(data=0.31), 0.0, "31% of the step waits for data: raise --workers (now 2), or read from"),
        (parts(exposed=0.52), 0.0, "52% of the step only sends: --compress bf16 (now none), or a larger --global-ba"),
        (parts(data=0.31, exposed=0.52), 0.0, "52% of the step only sends"),
        (parts(slower=0.2), 0.18, "18% of the step the others wait for rank 3 on n2: look for other work on that m"),
        (parts(slower=0.3), 0.02, "30% of the step ranks wait for each other: give the ranks equal work"),
        (parts(idle=0.4), 0.0, "40% of the step the GPU waits for Python: --compile"),
        (parts(beside=0.4), 0.0, "40% of the step goes into checkpoints: raise --save-every, or add --async-save"),
    ],
    ids=lambda one: str(one) if isinstance(one, str) else None,
)
def test_of_profile(found: dict[str, float], slowest_s: float, wanted: str) -> None:
    args = cli.parse(Args, [])
    said = verdict.of_profile(args, profile.Found(found, [], "rank 3 on n2", slowest_s))
    assert said.removeprefix("verdict  ").startswith(wanted)
    assert bool(said) == bool(wanted)


def test_flags_that_are_set() -> None:
    """What already has the better value is not advised."""
    args = cli.parse(Args, ["--compress", "bf16"])
    sends = profile.Found(parts(exposed=0.5), [])
    assert "compress" not in verdict.of_profile(args, sends)
    assert verdict.of_profile(NoData(), sends).endswith("only sends: a faster network")


@pytest.mark.parametrize(
    ("args", "facts", "wanted"),
    [
        (Args(), {"data_share": 0.2}, "20% of the training's time waits for data"),
        (NoData(), {"data_share": 0.2}, ""),
        (Args(), {"data_share": 0.2, "trained_s": 5.0}, ""),  # one second
        (Args(), {"saved_s": 50.0}, "25% of the run's time goes into checkpoints"),
        (Args(), {"saved_s": 1.5, "took_s": 3.0}, ""),
        (Args(), {"slow_share": 0.18}, "18% of the training's time the others wait for rank 3 on n2"),
        (Args(), {"slow_share": 0.18, "data_share": 0.2}, "20% of the training's time waits for data"),
        (Args(), {}, ""),
    ],
    ids=str,
)
def test_of_run(args: object, facts: dict[str, float], wanted: str) -> None:
    numbers = {"took_s": 200.0, "trained_s": 100.0, "data_share": 0.0, "saved_s": 0.0, "slow_share": 0.0} | facts
    spent = log.Spent(*(numbers.pop(name) for name in ("took_s", "trained_s", "data_share")))
    said = verdict.of_run(args, spent, **numbers, slow_rank="rank 3 on n2")
    assert said.removeprefix("verdict  ").startswith(wanted)
    assert bool(said) == bool(wanted)


@dataclasses.dataclass(frozen=True)
class Reads(test_log.Args):
    """Flags of a recipe that reads samples."""

    workers: int = 3  # loader processes


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("args", "waits", "said"),
    [
        (Reads(), (8.0, 11.0), "verdict  30% of the training's time waits for data: raise --workers (now 3)"),
        (Reads(), (8.0, 8.9), ""),
        (test_log.Args(), (8.0, 11.0), ""),  # it has no such flag
        (Reads(), (8.0,), ""),  # the workers' start
    ],
    ids=str,
)
def test_verdict_on_slow_reading(
    args: test_log.Args,
    waits: tuple[float, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ten seconds of training before each line, of which some were spent waiting; the first line does not count."""
    now = [0.0]
    monkeypatch.setattr(log, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(flops, "peak_flops", lambda *_: 1e12)
    run = test_log.make_run(tmp_path, args=args)
    for step, wait_s in enumerate(waits, start=1):
        now[0] += 10
        test_log.record(run, 10 * step, 0.5, data_wait_s=wait_s)
    run.finish(verdict=verdict.of_run(args, run.spent(), 0.0, 0.0, ""))
    printed = capsys.readouterr().out
    assert ("\nverdict" in printed) == bool(said), printed
    assert said in printed
