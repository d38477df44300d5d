"""tools.profile: parts add up to the step that the clock measures, each planted slowness is named, and no other one."""

import contextlib
import dataclasses
import gzip
import json
import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
from common import UserError, bounds, marks
from common.run import cli
from common.train import flops
from tools.profile import table, timeline, traces

from tests.conftest import each_recipe
from tests.harness import runner
from tests.measure.test_profile import FOLDER, PROFILED, STEPS, flags_of
from tests.tools.test_timeline import STEP, mark, sent

ATTEMPTS = 3  # for planted slowness, beside which a loaded machine may have a larger one
COMPUTE_S = 0.1  # of a step, on a thread's own clock, so that other work on this machine changes no part of it


def profiled(run: Path, lost: str = "") -> table.Found:
    """What a run's traces show; the mutant overlooks the part `lost`."""
    ranks, _ = traces.read(traces.find(run, 0), 0)
    for one in ranks:
        one.window.claims.pop(lost, None)
    return table.judge(ranks)


def check_sum(found: table.Found) -> None:
    """The parts add up to the step that the clock has measured, and none is what no part claims."""
    mean = found.mean
    assert sum(mean[part] for part in timeline.PARTS) == pytest.approx(mean["step"], rel=0.02, abs=2e-3), mean
    assert mean["idle"] < 0.02 * mean["step"], "a CPU is never idle without a reason"


@pytest.mark.parametrize("recipe", each_recipe(runner.RECIPES))
def test_parts_add_up(
    recipe: str, small_data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = min(2, runner.world_sizes(recipe)[-1])
    layout = runner.layout(recipe, size)
    argv = flags_of(recipe, small_data, *layout.strategy, "--out", str(tmp_path))
    result = runner.run_recipe(recipe, size, *argv)
    assert result.ok, str(result)
    found = profiled(tmp_path / "run")
    check_sum(found)
    trained = recipe in runner.TRAINING
    for part in ("forward", *(("backward", "optimizer") if trained else ())):
        assert found.mean[part] > 0, part
    assert (found.mean["exposed"] + found.mean["slower"] + found.mean["hidden"] > 1e-9) == (size > 1)
    table.show(tmp_path / "run", 0, 8, False)
    shown = capsys.readouterr().out
    assert f"profile  steps {STEPS - PROFILED} to {STEPS - 1}:" in shown, shown
    check_merged(tmp_path / FOLDER / traces.MERGED, size)


def check_merged(file: Path, size: int) -> None:
    """Each rank is a process of one trace."""
    with gzip.open(file) as content:
        events = json.load(content)["traceEvents"]
    assert {event["pid"] for event in events if event.get("ph") == "X"} == set(range(size))
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [f"rank {rank}" for rank in range(size)]
    arrows = [(event["id"], event["pid"]) for event in events if event.get("ph") == "s"]
    assert len({number for number, _ in arrows}) == len({*arrows}), "an arrow leads from one rank to another"


def test_a_part_that_is_lost(small_text: Path, tmp_path: Path) -> None:
    """The mutants of the test above: what no part claims is seen as idle."""
    result = run_slowed(tmp_path, small_text, {"data": 0.05})
    assert result.ok, str(result)
    check_sum(profiled(tmp_path / "run"))
    for part in ("forward", "data"):
        with pytest.raises(AssertionError):
            check_sum(profiled(tmp_path / "run", lost=part))


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


def train_slowed(path: str, argv: list[str], slow: dict[str, float]) -> None:
    """Run a recipe of the GPT whose forward pass works for `COMPUTE_S`, and which is slower where it is said.

    Args:
        path: of train.py.
        argv: its command line.
        slow: seconds that a batch takes to be read ("data"), that rank 1 works longer ("rank"), and that a file takes
            to reach the disk ("disk").
    """
    from common.measure import pace
    from common.workloads import gpt, text

    flops.count_sample = lambda *_: flops.Sample()
    pace.LEAST_S = 1.0  # this training is short
    compute_s = COMPUTE_S + slow.get("rank", 0.0) * (os.environ["RANK"] == "1")
    sys.argv = [path, *argv]
    with (
        changed(gpt.GPT, "forward", lambda: spin(compute_s)),
        changed(text.Text, "read", lambda: time.sleep(slow.get("data", 0.0))),
        changed(os, "fsync", lambda: time.sleep(slow.get("disk", 0.0))),
    ):
        runpy.run_path(path, run_name="__main__")


def run_slowed(folder: Path, data: Path, slow: dict[str, float], *more: str) -> runner.Result:
    """Two ranks of ddp_gpt."""
    path = str(runner.ROOT / "recipes" / "ddp_gpt" / "train.py")
    argv = flags_of("ddp_gpt", {"gpt": data}, "--out", str(folder), *more)
    return runner.spawn(train_slowed, [(path, argv, slow)] * 2)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("slow", "more", "profile_says", "run_says"),
    [
        ({}, (), "", ""),
        ({"data": 0.1}, ("--max-steps", "40"), "of the step waits for data: raise --workers (now 0)", "waits for data"),
        ({"rank": 0.05}, ("--max-steps", "40"), "of the step the others wait for rank 1 on", ""),
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
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was planted is named, and nothing else but a rank that other work on this machine makes slow in truth."""
    wanted = [text for text in (profile_says, run_says) if text]
    for attempt in range(ATTEMPTS):
        result = run_slowed(tmp_path / str(attempt), small_text, slow, *more)
        assert result.ok, str(result)
        run = tmp_path / str(attempt) / "run"
        check_sum(profiled(run))
        capsys.readouterr()
        table.show(run, 0, 0, False)
        found = [
            said
            for printed in (capsys.readouterr().out, result.outputs[0])
            for said in re.findall(r"^verdict  (.*)$", printed, re.MULTILINE)
        ]
        assert all("wait for rank" in one or any(text in one for text in wanted) for one in found), found
        if len(found) >= len(wanted) and all(text in one for text, one in zip(wanted, found, strict=False)):
            break
    else:
        pytest.fail(f"{found}\n{result.outputs[0]}")
    if slow.get("rank", 0) > COMPUTE_S / 2:  # of less, a loaded machine leaves too little of a step
        assert "note: rank 1 on" in result.outputs[0]


# --- made-up traces ---------------------------------------------------------------------------------------


def write(folder: Path, ranks: Sequence[int] = (0, 1, 2), size: int = 3, ahead_s: float = 0.0, step: int = 6) -> Path:
    """Traces of a run: one step of 1 ms, in which each rank sends at 500, and rank 2 at 640 (microseconds).

    Args:
        folder: the run's.
        ranks: whose traces are there.
        size: how many ranks there were.
        ahead_s: how far rank 2's clock is ahead of the others'.
        step: the first one that was profiled.
    """
    where = folder / "profile" / f"step_{step:08d}"
    where.mkdir(parents=True, exist_ok=True)
    entry = {"profiling_name": "gloo:all_reduce", "input_sizes": [[1000]], "process_group": ["0", ""]}
    for rank in ranks:
        begin = 640 if rank == 2 else 500
        base_ns = 5e9 + (ahead_s * 1e9 if rank == 2 else 0)
        events = [one for one in STEP if not one["name"].startswith("gloo")]
        events += [sent("all_reduce", begin, 680), {"ph": "s", "name": "arrow", "tid": 1, "ts": 1.0, "id": 7}]
        trace = {
            "baseTimeNanoseconds": base_ns,
            "traceEvents": [one | {"pid": 4711} for one in events],
            "distributedInfo": {"rank": rank, "pg_config": [{"pg_name": "0", "ranks": list(range(size))}]},
            marks.FACTS: {
                **{"rank": rank, "size": size, "steps": [step, step], "name": f"rank {rank} on n{rank}"},
                **{"step_s": 1e-3, "before_s": 0.9e-3, "clock_s": -ahead_s if rank == 2 else 0.0},
                "recorded": [entry | {"collective_seq_id": 1, "time_created_ns": base_ns + 1e5}],
                **{"flags": {"workers": 0}, "shorter": []},
                **{"flops": 0.0 if rank else 5e8, "ideal_s": 0.0 if rank else 1e-4},
            },
        }
        with gzip.open(where / f"rank_{rank:05d}.json.gz", "wt") as file:
            json.dump(trace, file)
    return where


TABLE = """\
profile  steps 6 to 6: 1.0 ms a step, where those before them took 0.9 ms
         waits for data                 0.1 ms   10%   0.1 to 0.1 by rank
         forward                        0.3 ms   30%   0.3 to 0.3 by rank
         backward                       0.2 ms   23%   0.2 to 0.3 by rank
         clipping and update            0.1 ms   10%   0.1 to 0.1 by rank
         sends, nothing computed        0.0 ms    4%   0.0 to 0.0 by rank
         waits for another rank         0.0 ms    3%   0.0 to 0.0 by rank
         evaluation                     0.1 ms   11%   0.1 to 0.1 by rank
         checkpoint, checks, log        0.1 ms    9%   0.1 to 0.1 by rank
         sent while it computed         0.1 ms
         all_reduce                     1.0 calls, 0.004 MB a step at 100 MB/s
         0.500 TFLOP/s a device, 10.0% MFU
"""


@pytest.mark.parametrize("ahead_s", [0.0, 3.0], ids=["one clock", "two clocks"])
def test_table(ahead_s: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of the table; rank 2, which begins to send last, is who the others wait for, whatever its clock is."""
    folder = write(tmp_path, ahead_s=ahead_s)
    table.show(tmp_path, 0, 8, False)
    assert capsys.readouterr().out == (
        f"{TABLE}         {folder}/merged.json.gz shows each operator: open it at https://ui.perfetto.dev\n"
    )
    check_merged(folder / traces.MERGED, 3)
    ranks, merged = traces.read(folder, 2)
    found = table.judge(ranks)
    assert (found.slowest, found.slowest_s) == ("rank 2 on n2", pytest.approx(40e-6))
    assert {event["pid"] for event in merged["traceEvents"]} == {0, 1}, "--merge-ranks 2"
    assert ranks[2].shift_us == pytest.approx(0.0, abs=1e-3), "its base is as far ahead as its clock"
    assert traces.read(folder, 0)[1] == {}


def test_wrong_clock(tmp_path: Path) -> None:
    """The mutant: if the offset is not what it is, another rank seems to be the slow one."""
    folder = write(tmp_path, ahead_s=3.0)
    ranks, _ = traces.read(folder, 0)
    wrong = [dataclasses.replace(one, shift_us=-1e3 * (one.facts["rank"] == 2)) for one in ranks]
    assert table.judge(wrong).slowest != "rank 2 on n2"


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    table.show(tmp_path, 0, 0, True)
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["by_rank"]] == ["rank 0 on n0", "rank 1 on n1", "rank 2 on n2"]
    for one in (found["mean"], *found["by_rank"]):
        assert sum(one[f"{part}_s"] for part in timeline.PARTS) == pytest.approx(one["step_s"])
    assert [one["slower_s"] for one in found["by_rank"]] == pytest.approx([40e-6, 40e-6, 0])
    assert (found["mfu"], found["tflops_per_s"]) == pytest.approx((0.1, 0.5))
    assert (found["missing"], found["verdict"], found["steps"]) == ([], "", [6, 6])
    assert found["sent"] == [{"name": "all_reduce", "calls": 1, "megabytes": 0.004, "mb_per_s": pytest.approx(100)}]


def test_missing_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others are shown, and it is said whose trace is not there; ranks keep their numbers."""
    write(tmp_path, ranks=(0, 2))
    table.show(tmp_path, 0, 8, False)
    assert "note: there is no trace of rank 1: this is of the other ranks\n" in capsys.readouterr().out
    ranks, _ = traces.read(traces.find(tmp_path, 0), 0)
    found = table.judge(ranks)
    assert (found.slowest, found.slowest_s) == ("rank 2 on n2", pytest.approx(40e-6))
    write(tmp_path, ranks=(1,), size=20, step=7)
    table.show(tmp_path, 7, 8, False)
    shown = capsys.readouterr().out
    assert "note: there is no trace of rank 0, 2, 3, 4, 5, 6, 7, 8 and 11 more: this is" in shown
    assert "MFU" not in shown, "rank 0 alone knows it"


def test_ranks_of_an_older_start(tmp_path: Path) -> None:
    write(tmp_path, size=4, ranks=(3,))
    write(tmp_path)
    assert [one.facts["rank"] for one in traces.read(traces.find(tmp_path, 0), 0)[0]] == [0, 1, 2]


def test_which_profile(tmp_path: Path) -> None:
    """By the run's folder, that of its profiles or of one: the last one, or the one that is asked for."""
    early, late = write(tmp_path, step=6), write(tmp_path, step=106)
    assert [traces.find(path, 0) for path in (tmp_path, tmp_path / "profile", early, late)] == [late, late, early, late]
    assert traces.find(tmp_path, 6) == early
    with pytest.raises(UserError, match=r"--step 7: .* has no such profile, but step_00000006, step_00000106"):
        traces.find(tmp_path, 7)
    with pytest.raises(UserError, match="has no such profile, but step_00000106"):
        traces.find(late, 6)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, "has no profile: train with --profile 5, and give the folder of that run"),
        (b"", "cannot be read .*: delete it, and the table will be of the other ranks"),
        (b"no gzip", "cannot be read .*: delete it"),
        (gzip.compress(b"[" * 9999)[:-9], "cannot be read .*: delete it"),
        (gzip.compress(b'{"traceEvents": ['), "cannot be read .*: delete it"),
        (gzip.compress(b'{"traceEvents": []}'), "is not a trace that a run of this version has written"),
        (gzip.compress(b"[]"), "is not a trace that a run of this version has written"),
    ],
    ids=["none", "empty", "no gzip", "cut off", "no JSON", "another program's", "a list"],
)
def test_refusals(content: bytes | None, wanted: str, tmp_path: Path) -> None:
    if content is not None:
        write(tmp_path).joinpath("rank_00001.json.gz").write_bytes(content)
    with pytest.raises(UserError, match=wanted):
        table.show(tmp_path, 0, 8, False)


def test_trace_without_a_step(tmp_path: Path) -> None:
    file = write(tmp_path, ranks=(0,), size=1) / "rank_00000.json.gz"
    trace = json.loads(gzip.decompress(file.read_bytes()))
    trace["traceEvents"] = [mark("nothing", 0, 1) | {"pid": 1}]
    file.write_bytes(gzip.compress(json.dumps(trace).encode()))
    with pytest.raises(UserError, match=r"rank_00000.json.gz: the trace has no step"):
        table.show(tmp_path, 0, 8, False)


def test_no_room_for_the_merged_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path).joinpath(traces.MERGED).mkdir()
    table.show(tmp_path, 0, 8, False)
    shown = capsys.readouterr().out
    assert shown.startswith(TABLE)
    assert "warning: the ranks' traces were not merged: " in shown


def test_command(tmp_path: Path) -> None:
    """It needs no torch, and refuses with one line and exit code 2."""
    write(tmp_path)
    (tmp_path / "torch.py").write_text("raise AssertionError('torch is imported')")
    command = [sys.executable, "-m", "tools.profile"]
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    flags = {"cwd": runner.ROOT, "env": environ, "capture_output": True, "text": True}
    done = subprocess.run([*command, str(tmp_path), "--merge-ranks", "0"], check=False, **flags)
    assert (done.returncode, done.stdout, done.stderr) == (0, TABLE, "")
    done = subprocess.run([*command, str(tmp_path / "other")], check=False, **flags)
    wanted = f"error: {tmp_path}/other has no profile: train with --profile 5, and give the folder of that run\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", wanted)


# --- the verdict ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Args:
    """Flags."""

    workers: bounds.NonNegativeInt = 2  # loader processes
    global_batch_size: bounds.PositiveInt = 8  # samples of a step
    compress: Annotated[str, bounds.Saves("exposed", "bf16")] = "none"  # what is sent


@dataclasses.dataclass(frozen=True)
class NoData:
    """Flags of a recipe that reads no samples."""


def parts(slowest_s: float = 0.0, **seconds: float) -> table.Found:
    """A step of one second, of which the rest is computed."""
    mean = dict.fromkeys(timeline.PARTS, 0.0) | seconds | {"step": 1.0}
    return table.Found([mean], mean, [], "rank 3 on n2", slowest_s)


def about(args: Any) -> dict[str, Any]:
    """What a run writes about its flags."""
    return {"flags": vars(args), "shorter": [*cli.savings(args)]}


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (parts(), ""),
        (parts(0.09, data=0.09, exposed=0.19, beside=0.09, idle=0.19, slower=0.24), ""),
        (parts(data=0.31), "31% of the step waits for data: raise --workers (now 2), or read from"),
        (parts(exposed=0.52), "52% of the step only sends: --compress bf16 (now none), or a larger --global-ba"),
        (parts(data=0.31, exposed=0.52), "52% of the step only sends"),
        (parts(0.18, slower=0.2), "18% of the step the others wait for rank 3 on n2: look for other work on that m"),
        (parts(0.02, slower=0.3), "30% of the step ranks wait for each other: give the ranks equal work"),
        (parts(idle=0.4), "40% of the step the GPU waits for Python: --compile"),
        (parts(beside=0.4), "40% of the step goes into checkpoints: raise --save-every, or add --async-save"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_sentence(found: table.Found, wanted: str) -> None:
    said = table.said(about(cli.parse(Args, [])), found)
    assert said.removeprefix("verdict  ").startswith(wanted)
    assert bool(said) == bool(wanted)


def test_flags_that_are_set() -> None:
    """What already has the better value is not advised."""
    sends = parts(exposed=0.5)
    assert "compress" not in table.said(about(cli.parse(Args, ["--compress", "bf16"])), sends)
    assert table.said(about(NoData()), sends).endswith("only sends: a faster network")


def trace_of(name: str) -> dict[str, Any]:
    facts = {"rank": 0, "size": 1, "name": name, "clock_s": 0.0, "recorded": 1, "steps": [1, 1], "before_s": 1.0}
    return {marks.FACTS: facts | {"step_s": 1.0, "flops": 0, "ideal_s": 0, "flags": {}}, "traceEvents": []}


ODD: dict[str, bytes] = {  # of what somebody else may have put there
    "not packed": b"{}",
    "no trace": gzip.compress(b"[]"),
    "100,000 brackets": gzip.compress(b"[" * 100_000),
    "no facts": gzip.compress(json.dumps({marks.FACTS: {}, "traceEvents": []}).encode()),
    "facts that are none": gzip.compress(json.dumps({marks.FACTS: "\x1b[2J", "traceEvents": []}).encode()),
    "no events": gzip.compress(json.dumps(trace_of("\x1b[2J")).encode()),
    "too large": gzip.compress(bytes(2**20 + 2)),
}


@pytest.mark.parametrize("what", [*ODD, "a pipe", "a folder"])
def test_traces_of_others(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, without a code for the terminal, and without a wait."""
    monkeypatch.setattr(traces, "MOST_BYTES", 2**20)
    file = tmp_path / "rank_00000.json.gz"
    if what == "a pipe":
        os.mkfifo(file)
    elif what == "a folder":
        file.mkdir()
    else:
        file.write_bytes(ODD[what])
    with pytest.raises(UserError) as refused:
        table.show(tmp_path, 0, 8, as_json=False)
    assert str(file.parent) in str(refused.value)
    assert str(refused.value).isprintable()
