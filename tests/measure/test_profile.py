"""--profile: each rank writes its trace with what tools.profile needs, and nothing about it stops a training."""

import contextlib
import gzip
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from common import marks
from common.measure import profile

from tests.harness import runner

STEPS, PROFILED = 9, 3
FOLDER = Path("run", "profile", f"step_{STEPS - PROFILED:08d}")


def flags_of(recipe: str, data: dict[str, Path], *more: str) -> list[str]:
    """A short training with a profile, in which nothing is due before its end."""
    flags = [*runner.small(recipe), "--max-steps", str(STEPS), "--profile", str(PROFILED), "--eval-every", "1000"]
    flags += ["--save-every", "1000", "--check-every", "0", "--dtype", "float32", "--log-every", "4", "--name", "run"]
    if recipe in runner.SUPERVISED:
        flags += ["--data", str(data[runner.workload(recipe)]), "--global-batch-size", "8"]
    return [*flags, *more]


def facts_in(file: Path) -> dict[str, Any]:
    """What a run has added to a trace."""
    with gzip.open(file) as content:
        return json.load(content)[marks.FACTS]


def test_traces(small_text: Path, tmp_path: Path) -> None:
    """Each rank writes one, with what it alone knows; the run does not look into it."""
    flags = flags_of("ddp_gpt", {"gpt": small_text}, "--out", str(tmp_path))
    result = runner.run_recipe("ddp_gpt", 2, *flags, target=runner.run_path)
    assert result.ok, str(result)
    files = sorted((tmp_path / FOLDER).iterdir())
    assert [file.name for file in files] == ["rank_00000.json.gz", "rank_00001.json.gz"]
    for rank, facts in enumerate(map(facts_in, files)):
        assert (facts["rank"], facts["size"], facts["steps"]) == (rank, 2, [STEPS - PROFILED, STEPS - 1])
        assert facts["name"].startswith(f"rank {rank} on ")
        assert facts["flags"]["workers"] == 0
        assert facts["step_s"] > 0
        assert facts["before_s"] > 0
        assert (facts["flops"] > 0, facts["ideal_s"] > 0) == (rank == 0, rank == 0), "rank 0 counts"
        assert "gloo:all_reduce" in {entry["profiling_name"] for entry in facts["recorded"]}
    (shown,) = re.findall(r"^profile  (.*)$", result.outputs[0], re.MULTILINE)
    wanted = (
        rf"steps 6 to 8: [\d.]+ ms a step, those before them [\d.]+ ms; python -m tools.profile {tmp_path}/run shows"
    )
    assert re.match(wanted, shown), shown
    assert f"{tmp_path / FOLDER} has the trace of each rank" in result.outputs[0]
    assert "profile/" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_any_text_is_kept(tmp_path: Path) -> None:
    """torch.profiler changes backslashes, and so the JSON of most texts: they come out readable."""
    given = {"quotes": 'a "b"', "path": "C:\\new\\", "lines": "a\nb", "é": ["é", None, Path("x")], '\\"': 1}
    schedule = torch.profiler.schedule(skip_first=1, wait=0, warmup=1, active=1)
    with torch.profiler.profile(schedule=schedule) as profiler:
        profiler.step()
        profiler.step()
        profiler.add_metadata_json(marks.FACTS, profile._json(given))
    profiler.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    found = facts_in(tmp_path / "trace.json.gz")
    assert found["quotes"] == "a 'b'"
    assert found["path"] == "C:/new/"
    assert found["lines"] == "a/nb"
    assert found["é"][:2] == ["é", None]
    assert found["/'"] == 1


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


def _cannot_write(path: str, argv: list[str], ranks: tuple[str, ...]) -> None:
    """Run a recipe; these ranks write a part of their trace, and then no more."""

    def export(self: Any, file: str) -> None:
        real(self, file)
        if os.environ["RANK"] in ranks:
            raise OSError(28, "No space left on device")

    real, torch.profiler.profile.export_chrome_trace = torch.profiler.profile.export_chrome_trace, export
    runner.run_unmeasured(path, argv)


@pytest.mark.parametrize("ranks", [("1",), ("0", "1")], ids=["one", "all"])
def test_full_disk(ranks: tuple[str, ...], small_text: Path, tmp_path: Path) -> None:
    """A trace that a rank cannot write ends no training; no older one stays in its place."""
    flags = flags_of("ddp_gpt", {"gpt": small_text}, "--out", str(tmp_path))
    path = str(runner.ROOT / "recipes" / "ddp_gpt" / "train.py")
    result = runner.spawn(_cannot_write, [(path, [path, *flags], ranks)] * 2)
    assert result.ok, str(result)
    wanted = rf"warning: rank {ranks[0]} on \S+ has written no profile: .*No space left"
    assert re.search(wanted, result.outputs[0])
    assert ("(and 1 more)" in result.outputs[0]) == (len(ranks) == 2)
    assert ("python -m tools.profile" in result.outputs[0]) == (len(ranks) == 1)
    left = {file.name for file in (tmp_path / FOLDER).iterdir()}
    assert left == {f"rank_{rank:05d}.json.gz" for rank in range(2) if str(rank) not in ranks}
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
    result = runner.spawn(_stop_in_profile, [(path, [path, *flags], closes)] * 2)
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
    result = runner.spawn(_offset, [(0.0,), (ahead_s,)])
    assert result.ok, str(result)
    first, second = (float(re.findall(r"offset (\S+)", output)[0]) for output in result.outputs)
    assert first == 0
    assert second == (pytest.approx(-ahead_s, abs=0.05) if ahead_s else 0)
