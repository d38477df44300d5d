"""The verdict at the end of a run names the largest part that is worth a sentence, and the flag that changes it."""

import dataclasses
import types
from pathlib import Path

import pytest
from common.measure import verdict
from common.run import log
from common.train import flops

from tests.run import test_log

READS = {"workers": 2}  # flags of a recipe that reads samples


@pytest.mark.parametrize(
    ("flags", "facts", "wanted"),
    [
        (READS, {"data_share": 0.2}, "20% of the training's time waits for data"),
        ({}, {"data_share": 0.2}, ""),
        (READS, {"data_share": 0.2, "trained_s": 5.0}, ""),  # one second
        (READS, {"saved_s": 50.0}, "25% of the run's time goes into checkpoints"),
        (READS, {"saved_s": 1.5, "took_s": 3.0}, ""),
        (READS, {"slow_share": 0.18}, "18% of the training's time the others wait for rank 3 on n2"),
        (READS, {"slow_share": 0.18, "data_share": 0.2}, "20% of the training's time waits for data"),
        (READS, {}, ""),
    ],
    ids=str,
)
def test_of_run(flags: dict[str, int], facts: dict[str, float], wanted: str) -> None:
    numbers = {"took_s": 200.0, "trained_s": 100.0, "data_share": 0.0, "saved_s": 0.0, "slow_share": 0.0} | facts
    spent = log.Spent(*(numbers.pop(name) for name in ("took_s", "trained_s", "data_share")))
    said = verdict.of_run(flags, spent, **numbers, slow_rank="rank 3 on n2")
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
    monkeypatch.setattr(flops, "peak_flops", lambda *_: (1e12, ""))
    run = test_log.make_run(tmp_path, args=args)
    for step, wait_s in enumerate(waits, start=1):
        now[0] += 10
        test_log.record(run, 10 * step, 0.5, data_wait_s=wait_s)
    run.finish(verdict=verdict.of_run(vars(args), run.spent(), 0.0, 0.0, ""))
    printed = capsys.readouterr().out
    assert ("\nverdict" in printed) == bool(said), printed
    assert said in printed
